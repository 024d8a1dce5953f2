"""`milldam qa`: examples of question answering to a table of windows. `milldam qa-eval`: scores of answers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, job_options, present, settings, together
from milldam.cli.naming import visible
from milldam.qa.settings import QASettings

if TYPE_CHECKING:
    from milldam.mapping.table_job import TableSummary


@click.command(cls=JobCommand)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@together("Input and output", *settings(QASettings, "out tokenizer split max_examples strict"))
@together(
    "Windows",
    *settings(QASettings, "max_seq_length overlap hop memory_tokens first padding_side max_segments"),
)
@job_options
def qa(inputs: tuple[str, ...], **options: Any) -> Request[TableSummary]:
    """
    INPUT: SQuAD's JSON (v1.1 or v2), or records of id, context, question and answers as JSON lines, parquet, Arrow, a
    folder that `save_to_disk` wrote or a name on the Hub. Memory is bounded. If it is interrupted or killed, run the
    same command to resume; if the input has changed, only the units that changed are redone.

    \b
    milldam qa train-v2.0.json -o squad.milldam --tokenizer bert-base-uncased/ --overlap 128
    milldam qa train-v2.0.json -o squad.milldam --tokenizer xlnet/ --max-seq-length 512 --memory-tokens 16
    """
    from milldam.config.checking import checked_settings
    from milldam.qa.job import array_of, run_qa

    checked = checked_settings(QASettings, present(options) | {"inputs": inputs})
    return Request(partial(run_qa, checked), partial(array_of, checked))


@click.command("qa-eval")
@click.argument("references", type=click.Path(path_type=Path))
@click.argument("predictions", type=click.Path(path_type=Path))
@click.option("--null-odds", type=click.Path(path_type=Path), metavar="FILE", help="JSON {id: odds of no answer}.")
@click.option(
    "--threshold", type=float, default=1.0, show_default=True, metavar="X", help="Odds of no answer above it."
)
@click.option("--split", default="validation", show_default=True, help="Split of REFERENCES that is a dataset.")
def qa_eval(references: Path, predictions: Path, null_odds: Path | None, threshold: float, split: str) -> None:
    """
    Overall, with and without an answer, as JSON with the names of SQuAD's own scripts.

    REFERENCES: a SQuAD JSON file, flat records (jsonl, parquet, a dataset on disk), or what `milldam qa` made.
    PREDICTIONS: a JSON file {question id: answer}; "" for no answer. With --null-odds, answers with odds above
    --threshold count as empty, as in v2's script (inf: none do), and the best thresholds are shown.

    \b
    milldam qa-eval dev-v2.0.json predictions.json
    milldam qa-eval dev.features predictions.json --null-odds null_odds.json
    """
    from milldam.qa.evaluation import evaluate

    scores = evaluate(references, predictions, null_odds, threshold=threshold, split=split)
    click.echo(json.dumps(scores.as_dict(), indent=1))
    if scores.missing:
        such = ", ".join(scores.missing[:3]) + ", ..." * (len(scores.missing) > 3)
        missing = f"{len(scores.missing):,} of {scores.total:,} questions have no prediction and count 0: {such}"
        click.echo(visible(missing), err=True)
    if scores.unknown:
        click.echo(f"{scores.unknown:,} predictions are for questions that are not in the references.", err=True)
    if scores.left_out:
        left = f"{scores.left_out:,} examples were rejected or dropped when the store was made: they are not in the"
        click.echo(f"{left} scores. Name the original file to count them.", err=True)
