"""`milldam.map`: any function over the rows of any source, in flat memory, cached unit by unit.

settings            its options
identity            what a function depends on
rows, spool         anything that has rows -> units, and a reader of their rows; the rest -> files
function, schema    rows -> batches -> function -> columns of one schema
working             the function and a unit in a worker
table_job           the part of a job that `milldam qa` shares: records, manifest, summary
job                 all of it as a job of the engine: planned, resumable, in a memory budget
cache               tables for which no folder was named
text_encoder        `milldam.TextEncoder`, for use inside a function

The result is a `milldam.stores.table.Table`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.choices import Documents, Executor, InputFormat, InvalidUtf8
    from milldam.mapping.settings import Format, OnError
    from milldam.stores.table.reader import Table

__all__ = ["map"]

Path: TypeAlias = str | os.PathLike[str]
Rows: TypeAlias = Iterable[Mapping[str, object]]
Source: TypeAlias = "Path | Sequence[Path] | Rows | Callable[[], Rows] | Table | pa.Table"
"""Files, folders, globs, addresses, names on the Hub; datasets; lists of dicts; functions that yield dicts; tables."""


def map(
    source: Source,
    function: Callable[..., object] | str,
    out: Path | None = None,
    *,
    batched: bool = True,
    batch_size: int = 1000,
    batch_bytes: int | str = "8MB",
    columns: Sequence[str] | None = None,
    remove_columns: Sequence[str] | str | None = None,
    format: Format = "python",
    with_indices: bool = False,
    fn_kwargs: Mapping[str, object] | None = None,
    schema: pa.Schema | Mapping[str, object] | None = None,
    workers: int | None = None,
    memory: int | str | None = None,
    executor: Executor = "local",
    address: str | None = None,
    shard_size: int | str = "64MB",
    on_error: OnError = "raise",
    key: str | None = None,
    documents: Documents = "file",
    separator: str | None = None,
    invalid_utf8: InvalidUtf8 = "reject",
    max_document_bytes: int | str = "32MiB",
    input_format: InputFormat | None = None,
    split: str | None = None,
    subset: str | None = None,
    strict: bool = False,
    overwrite: bool = False,
) -> Table:
    """Apply a function to every row of a source and open the resulting table; what `milldam map` does.

    `source`: files, folders, globs, addresses, names on the Hub, a `datasets.Dataset` or `IterableDataset`, or a
    generator function. The function takes and returns a dict of columns (batched=False: a row) as in HF's `map`.
    Resumes after the last finished unit. A unit is redone if the function's code, a value that it holds, an argument, a
    setting or its own input has changed, and never otherwise. `memory` limits what the job uses beyond what your
    program already holds.

    Without `out` the table goes to the user's cache, where the same call finds it again.

    >>> lengths = lambda rows: {"length": [len(text) for text in rows["text"]]}
    >>> table = milldam.map("corpus.jsonl", lengths, "lengths.table")
    >>> len(table), table[0]["length"]
    (91, 695)
    >>> print(table.report)
    lengths.table: ...
    """
    options = locals()
    from milldam.mapping.job import run_map
    from milldam.mapping.settings import settings_of
    from milldam.memory import release, usage
    from milldam.run.summary import log
    from milldam.stores.table.reader import Table

    release()
    summary = run_map(settings_of(options), held_bytes=usage().anonymous)
    if not summary.up_to_date and summary.rejected:  # of a table that was there already, it was logged before
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in summary.rejected.items())
        rejects = os.path.join(summary.out, "rejects.jsonl")
        log.warning("%s: rejected: %d (%s), in %s", summary.out, sum(summary.rejected.values()), reasons, rejects)
    if summary.over_budget:
        log.warning("%s: %s", summary.out, summary.over_budget)
    table = Table(summary.out)
    table.report = summary
    release()
    return table
