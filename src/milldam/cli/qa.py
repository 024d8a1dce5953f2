"""`milldam qa`: examples of question answering to a store of windows."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from milldam.cli.engine import engine_options
from milldam.cli.interrupting import as_interrupt, end_interrupted
from milldam.cli.summaries import memory_lines
from milldam.cli.terminal import visible
from milldam.errors import ConfigError
from milldam.markup import counted

if TYPE_CHECKING:
    from milldam.qa.job import QASummary
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
        _explain_interrupt(Path(settings.out))
    if as_json:
        click.echo(json.dumps(summary.as_json()))
    elif not quiet:
        click.echo(visible("\n".join(summary_lines(summary))))


def _settings(inputs: tuple[str, ...], options: dict[str, Any]) -> QASettings:
    """From the file, if one is named, with the options put over it."""
    from milldam.qa.settings import settings_of

    if not any(path.lower().endswith(_CONFIG_ENDINGS) for path in inputs):
        for name, option in (("tokenizer", "--tokenizer"), ("out", "-o FOLDER")):
            if name not in options:
                raise ConfigError(f"No {name}: say it with {option}.")
        return settings_of({"inputs": inputs, **options})
    if len(inputs) > 1:
        raise ConfigError("One configuration file, or inputs: not both. Name the inputs in the file.")
    from milldam.config.loading import load_settings
    from milldam.qa.settings import QASettings

    steps = ("overlap", "hop", "doc_stride")
    # One of them takes the place of any other in the file.
    taken_away = dict.fromkeys(steps) if any(name in options for name in steps) else {}
    return load_settings(QASettings, Path(inputs[0]), taken_away | options)


def _explain_interrupt(out: Path) -> NoReturn:
    from milldam.qa.job import QARun

    end_interrupted(f"Every finished shard is safe.\n{counted(len(QARun(out).made()), 'unit')} done.")


def summary_lines(summary: QASummary) -> list[str]:
    """The closing lines: what was made, what became of the answers, at what rate, in how much memory."""
    made = f"{counted(summary.examples, 'example')}, {counted(summary.windows, 'window')}"
    if summary.up_to_date:
        return [f"{summary.out} is up to date: {made}."]
    counts = summary.counts
    seconds = max(summary.seconds, 1e-9)
    lines = [
        f"{summary.out}: {made}, {counts['windows_with_answers']:,} of them with the answer",
        f"{summary.seconds:.1f} s, {summary.examples / seconds:,.0f} examples/s, "
        f"{counts['tokens'] / seconds / 1e6:.2f}M tokens/s, {counted(summary.workers, 'worker')}",
        f"Answers: {counts['answered']:,} found, {counts['repaired']:,} of them repaired; "
        f"{counts['unrepairable']:,} unrepairable; {counted(counts['unanswerable'], 'question')} without one",
    ]
    for name in ("dropped", "rejected"):
        if counts[name]:
            reasons = ", ".join(f"{reason} {count:,}" for reason, count in counts[name].items())
            lines.append(f"{name.capitalize()}: {sum(counts[name].values()):,} ({reasons})")
    for name, what in (("answers.jsonl", "Answers to look at"), ("rejects.jsonl", "Rejected records")):
        if (summary.out / name).exists():
            lines.append(f"{what} are in {summary.out / name}")
    return lines + memory_lines(summary.memory)
