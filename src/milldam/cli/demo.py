"""`milldam demo`: the main job end to end, on the small corpus that ships with the package."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Put the store here. [default: a new temporary folder]")
def demo(out: Path | None) -> None:
    """Take a small corpus from text to training batches.

    Preprocesses and verifies it, shows documents, draws batches from the store and straight from its text, resumes a
    loader, measures it and makes the report.

    \b
    milldam demo
    milldam demo --out demo.milldam
    """
    from milldam.cli.feed import feed
    from milldam.cli.inspect import inspect, report, verify
    from milldam.cli.preprocess import preprocess
    from milldam.cli.stats import stats

    # It stays: the last line shows where its report is.
    out = out or Path(tempfile.mkdtemp(prefix="milldam-demo-")) / "demo.milldam"
    data = Path(__file__).parent.parent / "demo_data"
    paths = [f"datasets.0.path={data / 'corpus.jsonl'}", f"datasets.1.path={data / 'notes.txt'}"]
    paths.append(f"tokenizer={data / 'tokenizer.json'}")
    given = [argument for path in paths for argument in ("--set", path)]
    _step(preprocess, [str(data / "preprocess.yaml"), *given, "-o", str(out)])
    _step(verify, [str(out)])
    _step(stats, [str(out)])
    _step(inspect, [str(out), "--documents", "1", "--tokens", "60"])
    _show_batches(out)
    sizes = ["--seq-len", "128", "--batch-size", "32"]
    _step(feed, [str(out), "--split", "train", *sizes, "--epochs", "10000", "--seconds", "1"])
    _step(feed, [str(data / "corpus.jsonl"), "--tokenizer", str(data / "tokenizer.json"), *sizes, "--seconds", "1"])
    _step(report, [str(out)])


def _step(command: click.Command, arguments: list[str]) -> None:
    click.secho(f"\n$ milldam {command.name} {' '.join(arguments)}", bold=True)
    try:
        command.main(arguments, standalone_mode=False)
    except SystemExit as ended:
        if ended.code:
            raise


def _show_batches(out: Path) -> None:
    """Shuffled batches as a training loop takes them, and a second loop that goes on where the first one stopped."""
    import milldam

    click.secho('\n>>> batches = milldam.open(out, split="train").windows(64).batches(4, seed=0)', bold=True)
    windows = milldam.open(out, split="train").windows(64)
    batches = windows.batches(4, seed=0)
    for step in range(3):
        x, y = next(batches)
        click.echo(f"batch {step}: x {x.shape}, y {y.shape}, first row {x[0, :6].tolist()} -> {y[0, :6].tolist()}")
    state = json.dumps(batches.state_dict())
    click.secho("\n>>> state = batches.state_dict()", bold=True)
    click.echo(state)
    click.secho("\n>>> a loader in another process, or on another day, resumes from that state", bold=True)
    resumed = windows.batches(4, seed=0)
    resumed.load_state_dict(json.loads(state))
    (x, _), (expected, _) = next(resumed), next(batches)
    same = "the same" if (x == expected).all() else "NOT the same"
    click.echo(f"batch 3: first row {x[0, :6].tolist()}, {same} as without a break")
