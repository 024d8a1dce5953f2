"""A store as rows in files of about `shard_size`: how hf, parquet, mds and litdata are written.

A row is a document, or, with `seq_len`, exactly so many tokens end to end over documents; tokens at the end that fill
no row are left out and counted. Which rows go into which file follows from the store's index and the options alone, and
is known before the first file is written. A store of several splits becomes a folder for each.

Every file is committed and then recorded, so that a killed export goes on with the file that it was at. Memory: blocks
of a million tokens, or one row where a document is longer and the format needs it whole; 8 bytes for each row of a file
(a file has at most a million).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, Setting
from milldam.files import NewFile, explain_os_errors, remove_temporaries
from milldam.formats.flat import block_as, document_lengths, has_splits, split_parts
from milldam.loader.reading import Reader, TokenArray, open_reader
from milldam.sealed import is_whole
from milldam.stores.tokens.blocks import cut_blocks, in_blocks
from milldam.stores.tokens.format import Int64s

if TYPE_CHECKING:
    from milldam.formats.exporting import Export
    from milldam.loader.stores import Store

OPTIONS = ("seq_len", "dtype", "shard_size")
DTYPES = ("int32", "uint16", "uint32", "int64")
"""int32 is what the tools' own tokenizing writes; any of their readers takes it. uint16 halves the files."""
MOST_ROWS = 1 << 20
"""Of a file: bounds what is held of documents of a token or two."""
MOST_TOKENS = 2**31 - 1
"""Of a row: what an offset of Arrow can say."""
_BESIDE_ROWS = 1 << 16
"""Bytes of a file that is bounded, for what it has besides rows."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How a format writes rows."""

    file_name: Callable[[int, int], str]
    """Of file number k of n."""
    write_file: Callable[[NewFile, FileRows], None]
    write_index: Callable[[Part, list[dict[str, Any]]], None]
    """Write what makes the folder of a part complete; of each file: file, rows, tokens, bytes and xxh3."""
    row_bytes: int
    """What a row takes besides its tokens, at most."""
    file_bytes: int | None = None
    """A file must be smaller than this."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """Which rows a file holds."""

    rows: int
    start: int
    """Position of its first token in the split."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Part:
    """A split, or all of the store, and the files that it becomes."""

    folder: Path
    name: str
    """Of the split."""
    store: Store
    seq_len: int | None
    dtype: np.dtype[Any]
    files: tuple[RowFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)


class FileRows:
    """The rows of one file, in blocks."""

    def __init__(self, part: Part, file: RowFile, lengths: Int64s, reader: Reader) -> None:
        self.part, self.file, self.lengths = part, file, lengths
        self._reader = reader

    def blocks(self) -> Iterator[tuple[int, Int64s]]:
        """(position, lengths) of whole rows: about a million tokens, or one row that has more."""
        position = self.file.start
        for first, stop in cut_blocks(self.lengths):
            lengths = self.lengths[first:stop]
            yield position, lengths
            position += int(lengths.sum())

    def tokens(self, start: int, count: int) -> TokenArray:
        """Tokens of the split from a position on; they may share memory with what is asked for next."""
        if not count:
            return np.empty(0, self.part.dtype)
        tokens = self._reader.runs(np.array([start]), np.array([count]))
        return np.ascontiguousarray(block_as(tokens, self.part.dtype))

    def chunks(self, start: int, count: int) -> Iterator[TokenArray]:
        """The same a million at a time, for a row of any length."""
        for begin, end in in_blocks(start, count):
            yield self.tokens(begin, end - begin)


def write_rows(export: Export, form: RowFormat) -> dict[str, Any]:
    """Write every file that is not there yet, and each part's index last; counts for the summary."""
    parts = _plan_parts(export, form)
    done = {(record["split"], record["file"]): record for record in export.ledger.records()}
    for part in parts:
        with explain_os_errors(part.folder):
            part.folder.mkdir(exist_ok=True)
            remove_temporaries(part.folder)
        made = []
        for number, rows in enumerate(_file_rows(part)):
            path = part.folder / form.file_name(number, len(part.files))
            record = done.get((part.name, path.name))
            if record is None or not is_whole(path, record):
                record = _write_file(path, rows, form)
                export.ledger.add(record)
            made.append(record)
        form.write_index(part, made)
    return {
        "rows": sum(part.rows for part in parts),
        "tokens_left_out": export.store.tokens - sum(part.tokens for part in parts),
        "row_files": sum(len(part.files) for part in parts),
    }


def _write_file(path: Path, rows: FileRows, form: RowFormat) -> dict[str, Any]:
    with NewFile(path) as new:
        form.write_file(new, rows)
        record = {"split": rows.part.name, "file": path.name, "rows": rows.file.rows, "tokens": rows.file.tokens}
        return record | new.commit()


def _file_rows(part: Part) -> Iterator[FileRows]:
    """The files of a part with the lengths of their rows, in one pass over the index."""
    if not part.files:
        return
    # Exactly the bytes that are asked for: nothing stays mapped, whatever the size of the store.
    reader = open_reader(part.store.stream(), "pread")
    blocks = _row_lengths(part.store, part.seq_len)
    held: list[Int64s] = []
    for file in part.files:
        while sum(len(block) for block in held) < file.rows:
            held.append(next(blocks))
        lengths = np.concatenate(held)
        yield FileRows(part, file, lengths[: file.rows], reader)
        held = [lengths[file.rows :]]


# ---- which rows go where ----


def _plan_parts(export: Export, form: RowFormat) -> list[Part]:
    """Every split with its files."""
    seq_len, dtype = export.options.seq_len, export.dtype
    found = []
    for name, store in split_parts(export.store).items():
        folder = export.folder / name if has_splits(export.store) else export.folder
        files = _cut_files(_row_lengths(store, seq_len), dtype.itemsize, form, export.options.shard_size)
        found.append(Part(folder, name, store, seq_len, dtype, tuple(files)))
    return found


def _row_lengths(store: Store, seq_len: int | None) -> Iterator[Int64s]:
    """Tokens of each row in order, many at a time."""
    if seq_len is None:
        yield from document_lengths(store)
        return
    rows = store.tokens // seq_len
    for first in range(0, rows, MOST_ROWS):
        yield np.full(min(MOST_ROWS, rows - first), seq_len, np.int64)


def _cut_files(blocks: Iterator[Int64s], width: int, form: RowFormat, size: int) -> Iterator[RowFile]:
    """Fill file after file: each ends before the row that would exceed the size."""
    most = None if form.file_bytes is None else form.file_bytes - _BESIDE_ROWS
    size = size if most is None else min(size, most)
    rows = start = tokens = used = 0
    for lengths in blocks:
        costs = lengths * width + form.row_bytes
        _refuse_giant(lengths, costs, most)
        cost_ends, token_ends = costs.cumsum(), lengths.cumsum()
        first = cost = seen = 0
        while first < len(lengths):
            fit = min(int(cost_ends.searchsorted(cost + size - used, side="right")), first + MOST_ROWS - rows)
            stop = fit if rows else max(fit, first + 1)
            if stop > first:
                rows, tokens = rows + stop - first, tokens + int(token_ends[stop - 1]) - seen
                used += int(cost_ends[stop - 1]) - cost
                cost, seen = int(cost_ends[stop - 1]), int(token_ends[stop - 1])
            if stop < len(lengths):
                yield RowFile(rows, start, tokens)
                start, rows, tokens, used = start + tokens, 0, 0, 0
            first = stop
    if rows:
        yield RowFile(rows, start, tokens)


def _refuse_giant(lengths: Int64s, costs: Int64s, most: int | None) -> None:
    too_large = most is not None and int(costs.max(initial=0)) > most
    if too_large or int(lengths.max(initial=0)) > MOST_TOKENS:
        raise ConfigError(
            f"A document of {int(lengths.max()):,} tokens is more than a row of this format holds. "
            "Cut the tokens into rows with ",
            Setting("seq_len"),
            ".",
        )
