"""`milldam.map`: any function over the rows of any source, in flat memory, cached unit by unit.

settings                                      what can be said
plan, sources, file_rows, data_set_rows, ...  anything that has rows -> units, and a reader of their rows
rows, batching                                rows -> batches, bounded in rows and bytes
calling, schema, shards                       batch -> function -> columns of one schema -> Arrow file
carrying, probing, working                    the same in worker processes
unit_list, map_run, job                       all of it as a run: planned, resumable, in a memory budget

What it makes is a `milldam.stores.table.Table`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from milldam.stores.table import Table
    from milldam.stores.table.summary import MapSummary

__all__ = ["map", "run_map"]


def map(
    source: Any,
    function: Callable[..., Any] | str,
    out: str | Path | None = None,
    *,
    batched: bool = True,
    batch_size: int = 1000,
    batch_bytes: int | str = "8MB",
    columns: Sequence[str] | None = None,
    remove_columns: Sequence[str] | str | None = None,
    format: str = "python",
    with_indices: bool = False,
    fn_kwargs: Mapping[str, Any] | None = None,
    schema: Any = None,
    workers: int | None = None,
    memory: int | str | None = None,
    shard_size: int | str = "64MB",
    shards: int | None = None,
    on_error: str = "raise",
    key: str | None = None,
    source_key: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Table:
    """Put a function over all rows of a source, and open what comes out; what `milldam map` does.

    `source`: files, folders, globs, addresses, names on the Hub, a `datasets.Dataset` or `IterableDataset`, or a
    generator function. The function takes and returns a dict of columns (batched=False: a row) as in HF's `map`.
    Finds finished units and goes on from there: a unit is made again when the function's code, a value that it holds,
    an argument, a setting or its own input has changed, and never otherwise. `memory` limits what the job takes on top
    of what the program holds already. `options`: input_columns, documents, separator, invalid_utf8, input_format,
    split, subset, strict; and names of HF's `map` that mean the same: num_proc, features, new_fingerprint.

    Without `out` the table is in the user's cache (`milldam cache`), and the same call finds it again. A `DatasetDict`,
    saved or on the Hub or in memory, becomes a dict of tables, one a split, each in a folder of `out`.

    >>> lengths = lambda rows: {"length": [len(text) for text in rows["text"]]}
    >>> table = map("books/", lengths, "lengths.table")                                            # doctest: +SKIP
    >>> table[0], table.to_hf()                                                                    # doctest: +SKIP
    >>> print(table.report.reuse)                                                                  # doctest: +SKIP
    cached: 4 of 16 units
    """
    said = {name: value for name, value in locals().items() if name in _SAID} | options
    from milldam.mapping.sources import each_split

    splits = each_split(said)
    made: Any = _table_of(said) if splits is None else {name: _table_of(one) for name, one in splits.items()}
    return cast("Table", made)


def _table_of(said: dict[str, Any]) -> Table:
    from milldam.errors import ConfigError
    from milldam.mapping.settings import settings_of
    from milldam.memory import release, usage
    from milldam.stores.table import Table

    release()
    settings = settings_of(said)
    try:
        summary = run_map(settings, held_bytes=usage().anonymous)
    except ConfigError as error:
        if "-o" not in str(error):
            raise
        # What every run says of its folder, in the words of the command line.
        raise type(error)(re.sub(r"(?<!\S)-o\b", "out=", str(error))) from None
    _warn(summary)
    table = Table(summary.out)
    table.report = summary
    release()
    return table


def _warn(summary: MapSummary) -> None:
    """What nobody should overlook, to `logging`; of a table that was there already it was said before."""
    from milldam.run.progress import log

    if not summary.up_to_date and summary.rejected:
        log.warning("%s: rejected: %s", summary.out, summary.set_aside)
    if summary.over_budget:
        log.warning("%s: %s", summary.out, summary.over_budget)


_SAID = frozenset(map.__annotations__) - {"options", "return"}


def run_map(settings: Any, observer: Any = None, *, held_bytes: int = 0) -> MapSummary:
    """The same from settings, with an observer; what it did rather than the table."""
    from milldam.mapping.job import run_map as run

    return run(settings, observer, held_bytes=held_bytes)
