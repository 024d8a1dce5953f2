"""The files of other tools: a store -> their files, their tokens -> a store, and their files opened where they lie.

settings     the options of export and import
exporting    the job of export, and where its files go
flat         tokens in one large file: npy, nanoGPT, Megatron-LM
rows, mds    files of rows of about a size: HF datasets and Parquet; MDS
importing    the job of import: files -> documents -> shards
columns      documents from columns of Arrow and Parquet files
foreign      a flat file, read by training where it lies

Streamed both ways: memory does not grow with the data. Killed anywhere, the same call resumes and makes the same bytes.
What was made from something else or with other options is never mixed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from milldam.formats.exporting import ExportSummary
    from milldam.loader.stores import Store

__all__ = ["FORMATS", "export", "import_tokens"]

ReadName = Literal["npy", "nanogpt", "megatron", "hf", "parquet"]
"""Those that are imported, too."""
FormatName = Literal[ReadName, "mds"]


@dataclass(frozen=True, slots=True)
class Format:
    """What can be written of a tool's format."""

    shape: Literal["file", "pair", "folder"]
    """OUT, with an ending;  OUT.bin and OUT.idx;  OUT/"""
    dtypes: tuple[str, ...]
    """Of those that hold the vocabulary the first is the default."""
    ending: str = ""
    """Of a file."""
    splits: bool = True
    """A store of several splits is written whole, as a folder with a part for each."""
    seq_len: bool = False
    """Holds rows: of `seq_len` tokens, in files of `shard_size`."""
    masks: bool = False
    """Has columns for what is trained on."""


_ROWS = ("int32", "uint16", "uint32", "int64")
"""int32 is what the tools' own tokenizing writes; any of their readers takes it. uint16 halves the files."""
FORMATS: dict[str, Format] = {
    "npy": Format("file", ("uint16", "int32", "uint32", "int64"), ".npy", splits=False),
    "nanogpt": Format("file", ("uint16", "uint32", "int32", "int64"), ".bin"),
    "megatron": Format("pair", ("uint16", "int32"), splits=False),
    "hf": Format("folder", _ROWS, seq_len=True, masks=True),
    "parquet": Format("folder", _ROWS, seq_len=True, masks=True),
    "mds": Format("folder", _ROWS, seq_len=True),
}


def export(
    store: str | Path | Store,
    to: str,
    out: str | Path,
    *,
    split: str | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    shard_size: str | int = "256MB",
    memory: str | int | None = None,
    workers: int | None = None,
    executor: str = "local",
    address: str | None = None,
    overwrite: bool = False,
) -> ExportSummary:
    """Write a store as files that another tool reads; what `milldam export` does.

    Of several splits name one, where the format holds one. Rows are documents, or with `seq_len` exactly so many
    tokens, across documents. `dtype`: by default that of the store, if the format has it. `shard_size`: of the files,
    in formats of several.

    Resumes unfinished work; an export that is up to date is left as it is.

    >>> milldam.export("corpus.milldam", "nanogpt", "train.bin").counts["tokens"] == store.tokens
    True
    """
    settings = {name: value for name, value in locals().items() if name != "store"}
    from milldam.config.checking import checked_settings
    from milldam.formats.exporting import run_export
    from milldam.formats.settings import ExportSettings

    return run_export(store, checked_settings(ExportSettings, settings))


def import_tokens(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    format: str | None = None,
    tokenizer: str | Path | None = None,
    column: str | None = None,
    masks: str | None = None,
    eos: int | None = None,
    bos: int | None = None,
    dtype: str | None = None,
    split: str | None = None,
    vocab_size: int | None = None,
    shard_size: str | int = "256MB",
    memory: str | int | None = None,
    workers: int | None = None,
    executor: str = "local",
    address: str | None = None,
    overwrite: bool = False,
) -> Store:
    """Make a store from tokens of another tool and open it; what `milldam import` does.

    `source`: files or folders of .npy, nanoGPT or llm.c .bin, Megatron pairs, Arrow, Parquet, or `save_to_disk`.
    Rows are documents; with `eos` all are joined and cut after that id, with `bos` before it. `column` has the ids,
    `masks` the loss mask (labels with -100, or zeros and ones; "none": ignore it); both are found by their usual names.
    `tokenizer` is copied into the store and ids are checked against it; without one, `vocab_size` is the largest id
    and one, and tokens are int32 unless the files hold uint16. `dtype`: of a .bin file without a header.

    Resumes unfinished work; if the source has changed, only the files that changed are imported again. A store that is
    up to date is opened as it is.

    >>> summary = milldam.export("corpus.milldam", "nanogpt", "train.bin")
    >>> milldam.import_tokens("train.bin", "imported.milldam", eos=0, tokenizer="tokenizer/")
    Store('imported.milldam': 91 documents, 23,862 tokens, uint16)
    """
    settings = {**locals()}
    from milldam.config.checking import checked_settings
    from milldam.formats.importing import run_import
    from milldam.formats.settings import ImportSettings
    from milldam.loader.stores import Store

    run_import(checked_settings(ImportSettings, settings))
    return Store(Path(out))
