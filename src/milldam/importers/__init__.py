"""Tokens that other tools wrote -> a store. Streamed: memory does not grow with the source.

finding     what the user names -> the files to read, in order, with their splits
pieces      a file to read, and what reading it needs to know
flat        npy, nanoGPT, llm.c and Megatron files -> blocks of tokens
columns     a column of token ids in Arrow and Parquet files -> the same
samples     MDS shards and litdata chunks -> the same
documents   blocks -> documents: the source's own, or cut behind each id that ends one, or before each that begins one
job         documents -> shards of a store, resumable by shard
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam.loader.stores import Store

__all__ = ["FORMATS", "import_tokens"]

FORMATS = ("npy", "nanogpt", "megatron", "hf", "parquet", "mds", "litdata")


def import_tokens(source: str | Path | Sequence[str | Path], out: str | Path, **options: Any) -> Store:
    """Make a store of tokens that are there already, and open it; what `milldam import` does.

    source       files or folders: .npy, nanoGPT or llm.c .bin, a Megatron pair, a folder of `save_to_disk`, Arrow,
                 Parquet, MDS, litdata; the kind shows in the files, or say it with format="hf"
    tokenizer    what made the tokens; it is copied into the store, and ids are checked against it
    column       the column with the ids; default input_ids or tokens
    eos          an id that ends documents: all rows are joined and cut behind each; default: a row is a document
    bos          an id that begins documents, as end-of-text does in files of llm.c: the same, cut before each
    dtype        of a .bin file that does not say it, or of MDS columns of bytes; default uint16
    split        which one of a source that has several, and what it is called; default: all of them, or train
    vocab_size   where there is no tokenizer; default: the largest id and one
    shard_size   of the store's files; default 256MB
    overwrite    replace what was made from another source or with other options

    Finds finished work and goes on from there; a store that is up to date is opened as it is.

    >>> milldam.import_tokens("fineweb/", "fineweb.milldam", eos=50256, tokenizer="gpt2")     # doctest: +SKIP
    Store('fineweb.milldam': 14,868,862 documents, 10,311,871,044 tokens, uint16)
    """
    from milldam.importers.job import run_import
    from milldam.importers.settings import settings_of
    from milldam.loader.stores import Store

    settings = settings_of(source, out, options)
    run_import(settings)
    return Store(settings.out)
