"""`milldam qa-eval`: how good are the answers?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.cli.terminal import visible

if TYPE_CHECKING:
    from milldam.qa.evaluation import Scores

_NAMES = {"number": "  number", "short": "  short, to 3 words", "long": "  long"}


@click.command("qa-eval")
@click.argument("references", type=click.Path(path_type=Path))
@click.argument("predictions", type=click.Path(path_type=Path))
@click.option(
    "--null-odds",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="{id: number}, higher where no answer is likelier; gives the best thresholds.",
)
@click.option(
    "--threshold",
    type=float,
    default=1.0,
    show_default=True,
    metavar="X",
    help="With --null-odds, take answers with odds above X for empty, as v2's script does; inf: as predicted.",
)
@click.option(
    "--split", default="validation", show_default=True, help="Which part of a folder or data set REFERENCES are."
)
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON, by the official names.")
def qa_eval(
    references: Path, predictions: Path, null_odds: Path | None, threshold: float, split: str, as_json: bool
) -> None:
    """Exact match and F1 of answers, as SQuAD's own scripts compute them, and by type of answer.

    REFERENCES: a SQuAD JSON file, flat records (jsonl, parquet, a data set on disk), or what `milldam qa` made.
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
    for name in ("all", "answerable", *_NAMES, "unanswerable"):
        group = scores.groups[name]
        if group.total:
            lines.append(f"{_NAMES.get(name, name):<20}{group.total:>10,}{group.exact:>8.2f}{group.f1:>8.2f}")
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
