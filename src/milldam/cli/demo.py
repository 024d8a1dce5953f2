"""`milldam demo`: the main job end to end, on the small corpus that ships with the package."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Keep the store here. [default: a temporary folder]")
def demo(out: Path | None) -> None:
    """Preprocess, verify and look into a small corpus; draw a few training batches from it; show the report's place."""
    if out is not None:
        _run(out)
        return
    with tempfile.TemporaryDirectory(prefix="milldam-demo-") as folder:
        _run(Path(folder) / "demo.milldam")


def _run(out: Path) -> None:
    from milldam.cli.inspect import inspect
    from milldam.cli.preprocess import preprocess
    from milldam.cli.report import report
    from milldam.cli.stats import stats
    from milldam.cli.verify import verify

    data = Path(__file__).parent.parent / "demo_data"
    paths = [f"datasets.0.path={data / 'corpus.jsonl'}", f"datasets.1.path={data / 'notes.txt'}"]
    paths.append(f"tokenizer={data / 'tokenizer.json'}")
    given = [argument for path in paths for argument in ("--set", path)]
    _step(preprocess, [str(data / "preprocess.yaml"), *given, "-o", str(out)])
    _step(verify, [str(out)])
    _step(stats, [str(out)])
    _step(inspect, [str(out), "--documents", "1", "--tokens", "60"])
    _show_batches(out)
    _step(report, [str(out)])


def _step(command: click.Command, arguments: list[str]) -> None:
    click.secho(f"\n$ milldam {command.name} {' '.join(arguments)}", bold=True)
    try:
        command.main(arguments, standalone_mode=False)
    except SystemExit as ended:
        if ended.code:
            raise


def _show_batches(out: Path) -> None:
    """Random windows straight from the mapped tokens, as a training loop would take them."""
    import numpy as np

    from milldam.store import open_store

    click.secho("\n>>> a few training batches, straight from the memory-mapped store", bold=True)
    tokens = next(open_store(out).shard_tokens())
    rng = np.random.default_rng(0)
    for step in range(3):
        starts = rng.integers(0, len(tokens) - 65, size=4)
        x = np.stack([tokens[start : start + 64] for start in starts]).astype(np.int64)
        y = np.stack([tokens[start + 1 : start + 65] for start in starts]).astype(np.int64)
        click.echo(f"batch {step}: x {x.shape}, y {y.shape}, first row {x[0, :6].tolist()} -> {y[0, :6].tolist()}")
