"""`milldam qa`: examples of question answering to a store of windows.

`milldam qa-eval`: how good are the answers?
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, choice, given, job_options
from milldam.cli.naming import visible
from milldam.errors import ConfigError
from milldam.qa.settings import First, PaddingSide

if TYPE_CHECKING:
    from milldam.qa.evaluation import Scores
    from milldam.qa.job import QASummary
    from milldam.qa.settings import QASettings

_CONFIG_ENDINGS = (".yaml", ".yml")
_STEPS = ("overlap", "hop")


@click.command(cls=JobCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Folder for the store.")
@click.option("--tokenizer", help="Folder, file or Hub name of the tokenizer.")
@click.option("--max-seq-length", type=int, metavar="N", help="Tokens per window. [default: 384]")
@click.option("--overlap", type=int, metavar="N", help="Tokens of the context that two windows share. [default: 128]")
@click.option(
    "--hop", type=int, metavar="N", help="Instead of --overlap: tokens from the start of one window to the next."
)
@click.option("--memory-tokens", type=int, metavar="N", help="Memory tokens at each end. [default: 0]")
@click.option("--first", type=choice(First), help="What comes first in a window. [default: auto]")
@click.option("--padding-side", type=choice(PaddingSide), help="Side on which windows are padded. [default: auto]")
@click.option("--max-segments", type=int, metavar="N", help="Keep only the first N windows of an example.")
@click.option("--max-examples", type=int, metavar="N", help="Stop after exactly N examples.")
@click.option("--split", metavar="NAME", help="Split to read, and its name in the store. [default: train]")
@click.option("--strict", is_flag=True, help="Stop at the first record that can't be used.")
@job_options()
def qa(inputs: tuple[str, ...], **options: Any) -> Request[QASummary]:
    """Turn question-answering examples into windows.

    INPUT: SQuAD's JSON (v1.1 or v2), or records of id, context, question and answers as JSON lines, parquet, Arrow, a
    folder that `save_to_disk` wrote or a name on the Hub; or one YAML file with the same settings. Memory is
    bounded. If it is interrupted or killed, run the same command to resume; if the input has
    changed, only the units that changed are redone.

    \b
    milldam qa train-v2.0.json -o squad.milldam --tokenizer bert-base-uncased/ --overlap 128
    milldam qa train-v2.0.json -o squad.milldam --tokenizer xlnet/ --max-seq-length 512 --memory-tokens 16
    milldam qa qa.yaml --memory 600MB
    """
    from milldam.qa.job import array_of, run_qa

    settings = _settings(inputs, given(options))
    return Request(partial(run_qa, settings), partial(array_of, settings))


def _settings(inputs: tuple[str, ...], options: dict[str, Any]) -> QASettings:
    """From the file, if one is named, with the options put over it."""
    from milldam.config.checking import checked_settings
    from milldam.config.loading import read_file
    from milldam.qa.settings import QASettings

    if not any(path.lower().endswith(_CONFIG_ENDINGS) for path in inputs):
        return checked_settings(QASettings, {"inputs": inputs, **options})
    if len(inputs) > 1:
        raise ConfigError("One configuration file, or inputs: not both. Name the inputs in the file.")
    # One of them takes the place of any other in the file.
    taken_away = dict.fromkeys(_STEPS) if any(name in options for name in _STEPS) else {}
    values = read_file(Path(inputs[0]), inputs[0])
    for name, value in (taken_away | options).items():
        values.put(name, value)
    return checked_settings(QASettings, values)


@click.command("qa-eval")
@click.argument("references", type=click.Path(path_type=Path))
@click.argument("predictions", type=click.Path(path_type=Path))
@click.option(
    "--null-odds",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSON {id: number}, higher if no answer is likelier; also finds the best thresholds.",
)
@click.option(
    "--threshold",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="With --null-odds: count answers with odds above X as empty, like v2's script; inf: keep all as predicted.",
)
@click.option(
    "--split", default="validation", show_default=True, help="Split of REFERENCES, if it is a folder or dataset."
)
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON, with the official names.")
def qa_eval(
    references: Path, predictions: Path, null_odds: Path | None, threshold: float, split: str, as_json: bool
) -> None:
    """Compute exact match and F1 of answers.

    Overall, with and without an answer, as SQuAD's own scripts compute them.

    REFERENCES: a SQuAD JSON file, flat records (jsonl, parquet, a dataset on disk), or what `milldam qa` made.
    PREDICTIONS: a JSON file {question id: answer}; "" for no answer.

    \b
    milldam qa-eval dev-v2.0.json predictions.json
    milldam qa-eval dev.features predictions.json --null-odds null_odds.json --json
    """
    from milldam.qa.evaluation import evaluate

    scores = evaluate(references, predictions, null_odds, threshold=threshold, split=split)
    if as_json:
        click.echo(json.dumps(scores.as_dict()))
        return
    for line in _lines(scores):
        click.echo(visible(line))
    for line in _remarks(scores):
        click.echo(visible(line), err=True)


def _lines(scores: Scores) -> list[str]:
    """A row a group, those without questions left out."""
    lines = [f"{'':<20}{'questions':>10}{'exact':>8}{'F1':>8}"]
    for name, group in scores.groups.items():
        if group.total:
            lines.append(f"{name:<20}{group.total:>10,}{group.exact:>8.2f}{group.f1:>8.2f}")
    best = scores.best
    if best is not None:
        lines.append(f"Best exact {best.exact:.2f}, when null odds above {best.exact_threshold:g} mean no answer.")
        lines.append(f"Best F1 {best.f1:.2f}, when those above {best.f1_threshold:g} do.")
    return lines


def _remarks(scores: Scores) -> list[str]:
    remarks = []
    if scores.missing:
        such = ", ".join(scores.missing[:3]) + ", ..." * (len(scores.missing) > 3)
        remarks.append(f"{len(scores.missing):,} of {scores.total:,} questions have no prediction and count 0: {such}")
    if scores.unknown:
        remarks.append(f"{scores.unknown:,} predictions are for questions that are not in the references.")
    if scores.left_out:
        remarks.append(
            f"{scores.left_out:,} examples were rejected or dropped when the store was made: they are not in the "
            "scores. Give the file that it was made from to count them."
        )
    return remarks
