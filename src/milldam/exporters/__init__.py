"""A store -> the files of other tools, and back. Streamed: memory does not grow with the store.

job        what every export has in common: the plan, the ledger, the lock, the summary
reading    the tokens and documents of a store, in blocks
growing    one large file that grows over several runs
npy, nanogpt, megatron            one file, one file or a file a split, one pair
hf, parquet, mds, litdata         folders of files of about `shard_size`

Killed anywhere, the same call goes on where it stopped and makes the same bytes. What was made from another store or
with other options is never mixed in.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from milldam.exporters.job import ExportSummary
    from milldam.loader.stores import Store

__all__ = ["EXPORTERS", "export"]

EXPORTERS = {
    "npy": "milldam.exporters.npy",
    "nanogpt": "milldam.exporters.nanogpt",
    "megatron": "milldam.exporters.megatron",
    "hf": "milldam.exporters.hf",
    "parquet": "milldam.exporters.parquet",
    "mds": "milldam.exporters.mds",
    "litdata": "milldam.exporters.litdata",
}
"""Name of a format -> the module that writes it, loaded when it is asked for."""


def export(
    store: str | Path | Store,
    to: str,
    out: str | Path,
    *,
    split: str | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    shard_size: str | int = "256MB",
    overwrite: bool = False,
) -> ExportSummary:
    """Write a store as files that another tool reads; what `milldam export` does.

    store        a store, its folder, or its address such as s3://bucket/corpus.milldam
    to           npy, nanogpt, megatron, hf, parquet, mds or litdata
    split        one of the store's splits; needed where a format holds one and the store has several
    seq_len      rows of exactly so many tokens, end to end over documents; default: a document a row
    dtype        of the tokens; default: that of the store where the format has it
    shard_size   of the files in formats of several files

    Finds finished work and goes on from there; an export that is up to date is left alone.

    >>> milldam.export("corpus.milldam", "nanogpt", "train.bin").tokens                    # doctest: +SKIP
    15293621
    """
    from milldam.errors import ConfigError
    from milldam.exporters.job import Options, run_export
    from milldam.loader.opening import open_data
    from milldam.loader.stores import Store
    from milldam.memory import parse_size

    opened = store if isinstance(store, Store) else open_data(store)
    if not isinstance(opened, Store):
        raise ConfigError(f"{store}: not a store, but a file of {opened.kind}. `milldam import` makes a store of it.")
    options = Options(split=split, seq_len=seq_len, dtype=dtype, shard_size=parse_size(shard_size))
    return run_export(opened, to, Path(out), options, overwrite=overwrite)
