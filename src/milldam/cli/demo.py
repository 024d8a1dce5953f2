"""`milldam demo`: the main job end to end, on the small corpus that ships with the package."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Put the store here. [default: a new temporary folder]")
def demo(out: Path | None) -> None:
    """
    Preprocesses and verifies it, shows documents, draws batches from the store and straight from its text, measures the
    loader and makes the report.

    \b
    milldam demo
    milldam demo --out demo.milldam
    """
    import milldam
    from milldam.cli import main

    # A temporary folder stays: the last line shows where its report is.
    out = out or Path(tempfile.mkdtemp(prefix="milldam-demo-")) / "demo.milldam"
    data, sizes = Path(__file__).parent.parent / "demo_data", "--seq-len 128 --batch-size 32 --seconds 1"
    tokenizer = f"{data}/tokenizer.json"
    paths = {"datasets.0.path": f"{data}/corpus.jsonl", "datasets.1.path": f"{data}/notes.txt", "tokenizer": tokenizer}
    overrides = [word for key, path in paths.items() for word in ("--set", f"{key}={path}")]
    for words in (
        ["preprocess", f"{data}/preprocess.yaml", *overrides, "-o", str(out)],
        ["verify", str(out)],
        ["stats", str(out)],
        ["inspect", str(out), "--documents", "1", "--tokens", "60"],
        ["feed", str(out), "--split", "train", *sizes.split(), "--epochs", "10000"],
        ["feed", f"{data}/corpus.jsonl", "--tokenizer", tokenizer, *sizes.split()],
    ):
        click.secho(f"\n$ milldam {' '.join(words)}", bold=True)
        try:
            main.commands[words[0]].main(words[1:], standalone_mode=False)
        except SystemExit as end:
            if end.code:
                raise
    click.secho('\n>>> x, y = next(milldam.open(out, split="train").windows(64).batches(4, seed=0))', bold=True)
    x, y = next(milldam.open(out, split="train").windows(64).batches(4, seed=0))
    click.echo(f"x {x.shape}, y {y.shape}, {x[0, :6].tolist()} -> {y[0, :6].tolist()}")
    click.echo(out / "run" / "report.html")
