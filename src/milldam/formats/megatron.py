"""Megatron-LM's pair, `X.bin` and `X.idx`: tokens end to end, and where each document lies; what IndexedDataset reads.

An export is one pair over all shards of a store; the index has 20 bytes a document. Holds a block of tokens, or of
documents, at a time; beside the pair, 8 bytes a document on disk while the index is made. A document is one sequence,
or several when it is longer than an int32 can say (docs/format.md).
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError
from milldam.files import NewFile, explain_os_errors
from milldam.formats.finding import ReadRules, SourceFile
from milldam.formats.foreign import ForeignFile, open_foreign, stretch
from milldam.formats.writing import Export, FileRecord, OutputFile, document_lengths, flat_files, write_flat
from milldam.loader.reading import TokenArray, open_reader
from milldam.loader.stream import TokenFile
from milldam.stores.tokens.format import DTYPE_CODES, Index, write_index
from milldam.stores.tokens.reader import cut_blocks, is_giant
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.run.engine import Progress

SUFFIXES = (".idx",)
SHAPE, ALL_SPLITS, OPTIONS = "pair", False, ("dtype",)
DTYPES = tuple(sorted(DTYPE_CODES, reverse=True))


class MegatronFile(ForeignFile):
    """A pair of Megatron-LM, whose documents are known: `file[i]`, `len(file)`, `for document in file`."""

    def __init__(self, file: TokenFile, wanted: np.dtype[Any] | None, index: Index) -> None:
        super().__init__("Megatron", file, index.dtype, wanted)
        self.index = index

    @functools.cached_property
    def _mapped(self) -> TokenArray:
        # A plain array over the mapping: np.memmap's slicing costs several times as much.
        return np.asarray(np.memmap(self.path, self.dtype, mode="r"))

    def __len__(self) -> int:
        return len(self.index.documents) - 1

    def __getitem__(self, number: int) -> TokenArray:
        """A document, as a view into the mapped file."""
        wanted = number + len(self) if number < 0 else number
        if not 0 <= wanted < len(self):
            raise IndexError(f"document {number} of {len(self):,} documents")
        begin, end = self.index.extent(wanted)
        return self._mapped[begin:end]

    def __iter__(self) -> Iterator[TokenArray]:
        return (self[number] for number in range(len(self)))

    def _facts(self) -> str:
        return f"{len(self):,} documents, {super()._facts()}"


def open_file(path: Path, wanted: np.dtype[Any] | None) -> MegatronFile:
    tokens, index_path = path.with_suffix(".bin"), path.with_suffix(".idx")
    if not tokens.is_file():
        raise InputError(f"{index_path}: an index without its tokens: there is no {tokens.name} beside it.")
    index = Index.map(index_path)
    size = tokens.stat().st_size
    index.check_ends(size)
    file = TokenFile(tokens, size // index.dtype.itemsize, index=index_path, empty_documents=True)
    return MegatronFile(file, wanted, index)


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    """Its documents, many at a time, a giant one in blocks."""
    file = open_foreign(source.path)
    assert isinstance(file, MegatronFile)
    reader = open_reader(file.stream(), "pread")
    position = 0
    for lengths in file.index.length_blocks():
        for first, stop in cut_blocks(lengths):
            some, count = lengths[first:stop], int(lengths[first:stop].sum())
            if is_giant(some):
                yield from stretch(reader, position, count)
            else:
                flat = reader.runs(np.array([position]), np.array([count])) if count else np.empty(0, file.dtype)
                yield Tokens(flat, some)
            position += count


def files(export: Export) -> Iterator[OutputFile]:
    for file in flat_files(export):
        yield replace(file, name=f"{file.name}.bin")
        yield OutputFile(f"{file.name}.idx", file.split, 0, 20 * len(export.parts[file.split]))


def write_file(export: Export, file: OutputFile, progress: Progress) -> FileRecord:
    if file.name.endswith(".bin"):
        return write_flat(export, file, progress)
    with NewFile(export.folder / file.name) as new:
        # The index has three arrays that each need all lengths: spooled once, so that no shard is opened three times.
        with explain_os_errors(new.path), tempfile.TemporaryFile(dir=new.path.parent) as lengths:
            for block in document_lengths(export.parts[file.split]):
                lengths.write(block.astype("<i8").data)
            lengths.flush()
            write_index(new, np.memmap(lengths, "<i8", "r"), export.dtype.name)
        return new.commit()
