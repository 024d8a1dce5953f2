"""`milldam qa`: examples of question answering to a store of windows."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.engine import engine_options
from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.summaries import show_summary
from milldam.errors import ConfigError

if TYPE_CHECKING:
    from milldam.qa.settings import QASettings

_CONFIG_ENDINGS = (".yaml", ".yml")


@click.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store.")
@click.option("--tokenizer", help="Folder, file or Hub name of the tokenizer.")
@click.option("--max-seq-length", type=int, metavar="N", help="Tokens of a window. [default: 384]")
@click.option("--overlap", type=int, metavar="N", help="Tokens of the context that two windows share. [default: 128]")
@click.option("--hop", type=int, metavar="N", help="Instead: tokens from one window's begin to the next one's.")
@click.option("--doc-stride", type=int, metavar="N", help="Another word for --overlap, as fast tokenizers use it.")
@click.option("--memory-tokens", type=int, metavar="N", help="So many memory tokens at each end. [default: 0]")
@click.option(
    "--first", type=click.Choice(["auto", "question", "context"]), help="What comes first in a window. [default: auto]"
)
@click.option(
    "--padding-side", type=click.Choice(["auto", "left", "right"]), help="Where windows are padded. [default: auto]"
)
@click.option("--max-segments", type=int, metavar="N", help="At most N windows of an example, the first ones.")
@click.option("--max-examples", type=int, metavar="N", help="Stop after N examples, exactly.")
@click.option("--split", metavar="NAME", help="Name of the split, and which one is read. [default: train]")
@click.option("--memory", metavar="SIZE", help="Limit for the whole process tree. [default: half of what is free]")
@click.option("--workers", type=int, help="Cores to use. [default: all]")
@engine_options
@click.option("--overwrite", is_flag=True, help="Replace what was made from other settings or input.")
@click.option("--strict", is_flag=True, help="Stop at the first record that can't be used.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No plan, progress or summary.")
def qa(inputs: tuple[str, ...], as_json: bool, quiet: bool, **options: Any) -> None:
    """Turn examples of question answering into windows for training, in a fixed amount of memory.

    INPUT: SQuAD's JSON (v1.1 or v2), or records of id, context, question and answers as JSON lines, parquet, Arrow, a
    folder that `save_to_disk` wrote or a name on the Hub; or one YAML file with the same settings. Interrupted or
    killed, the same command goes on where it stopped.

    \b
    milldam qa train-v2.0.json -o squad.milldam --tokenizer bert-base-uncased/ --overlap 128
    milldam qa train-v2.0.json -o squad.milldam --tokenizer xlnet/ --max-seq-length 512 --memory-tokens 16
    milldam qa qa.yaml --memory 600MB
    """
    from milldam.cli.progress import make_observer
    from milldam.qa.job import run_qa

    given = {name: value for name, value in options.items() if value is not None and value is not False}
    settings = _settings(inputs, given)
    signal.signal(signal.SIGTERM, as_interrupt)
    try:
        with make_observer(quiet=quiet) as observer:
            summary = run_qa(settings, observer)
    except KeyboardInterrupt:
        end_interrupted("Every finished shard is safe.")
    show_summary(summary, as_json=as_json, quiet=quiet)


def _settings(inputs: tuple[str, ...], options: dict[str, Any]) -> QASettings:
    """From the file, if one is named, with the options put over it."""
    from milldam.config.checking import checked_settings
    from milldam.config.loading import load_settings
    from milldam.qa.settings import QASettings

    if not any(path.lower().endswith(_CONFIG_ENDINGS) for path in inputs):
        return checked_settings(QASettings, {"inputs": inputs, **options})
    if len(inputs) > 1:
        raise ConfigError("One configuration file, or inputs: not both. Name the inputs in the file.")
    steps = ("overlap", "hop", "doc_stride")
    # One of them takes the place of any other in the file.
    taken_away = dict.fromkeys(steps) if any(name in options for name in steps) else {}
    return load_settings(QASettings, Path(inputs[0]), taken_away | options)
