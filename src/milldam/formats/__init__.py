"""The files of other tools: a store -> their files, their tokens -> a store, and their files opened where they lie.

npy, nanogpt, megatron, hf, parquet     a tool each: how its files are opened, read and written; mds: only written
foreign      a flat file, read by training where it lies
columns      documents from columns of Arrow and Parquet files: what hf and parquet read
rows         files of rows of about a size: what hf, parquet and mds write
writing      a file to export, and tokens in one large file: what npy, nanogpt and megatron write
settings     the options of export and import
finding      what the user names -> the files to import
importing    the job of import: tokens -> documents -> shards
exporting    the job of export, and where its files go

Streamed both ways: memory does not grow with the data. Killed anywhere, the same call resumes and makes the same bytes.
What was made from something else or with other options is never mixed in.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, get_args

from milldam.choices import Side

if TYPE_CHECKING:
    from milldam.formats.exporting import ExportSummary
    from milldam.formats.finding import ReadRules, SourceFile
    from milldam.formats.writing import Export, FileRecord, OutputFile
    from milldam.loader.stores import Store
    from milldam.run.engine import Progress
    from milldam.stores.tokens.writer import Tokens

__all__ = ["FORMATS", "export", "import_tokens"]

ReadName = Literal["npy", "nanogpt", "megatron", "hf", "parquet"]
FormatName = Literal[ReadName, "mds"]
READ: tuple[str, ...] = get_args(ReadName)
"""Those that are imported, too."""
FORMATS: tuple[str, ...] = get_args(FormatName)
"""Each is a module here, loaded when it is asked for."""


class Format(Protocol):
    """A module that writes the files of one tool, and reads them if it is in `READ`. It may also have

    open_file(path, wanted) -> ForeignFile          opens a file where it lies; its ending is in `foreign.OPENERS`
    indexed(folder, split) -> list of SourceFile    the files of a folder that its index describes; None: no index
    complete_folder(export, split, folder, made)    what makes a folder complete; of each file: file, rows, bytes, xxh3
    """

    SUFFIXES: tuple[str, ...]
    """Endings of the files that it reads."""
    SHAPE: str
    """ "file": OUT, with one of the endings;  "pair": OUT.bin and OUT.idx;  "folder": OUT/"""
    ALL_SPLITS: bool
    """A store of several splits is written whole, as a folder with a part for each."""
    OPTIONS: tuple[str, ...]
    """Which of seq_len, dtype, shard_size and side it knows; others are refused."""
    DTYPES: tuple[str, ...]
    """That it can write; of those that hold the vocabulary the first is the default."""

    def read(self, source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
        """All tokens of a file in blocks, its rows or itself as documents."""

    def files(self, export: Export) -> Iterable[OutputFile]:
        """The files to write, from the store's index and the options alone."""

    def write_file(self, export: Export, file: OutputFile, progress: Progress) -> FileRecord:
        """Make one of these files, durably."""


def load_format(name: str) -> Format:
    from milldam.errors import ConfigError, did_you_mean

    if name not in FORMATS:
        raise ConfigError(f'No format "{name}"; there are {", ".join(FORMATS)}.{did_you_mean(name, FORMATS)}')
    module: Any = importlib.import_module(f"milldam.formats.{name}")
    return cast("Format", module)


def export(
    store: str | Path | Store,
    to: str,
    out: str | Path,
    *,
    split: str | None = None,
    seq_len: int | None = None,
    side: Side | None = None,
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
    tokens, across documents. `side`: of preference pairs, the documents of one side. `dtype`: by default that of the
    store, if the format has it. `shard_size`: of the files, in formats of several.

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
    and one. `dtype`: of a .bin file without a header; default uint16.

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
