"""`milldam qa`: examples of question answering to a table of windows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.commands import JobCommand, Request, job_options, present, settings, together
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
