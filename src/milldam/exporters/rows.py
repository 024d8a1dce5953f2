"""A store as rows in files of about `shard_size`: what hf, parquet, mds and litdata have in common.

A row is a document, or, with `seq_len`, exactly so many tokens end to end over documents; tokens at the end that fill
no row are left out and counted. Which rows go into which file follows from the store's index and the options alone, and
is known before the first file is written. A store of several splits becomes a folder for each.

Every file is committed and then recorded, so that a killed export goes on with the file that it was at. Memory: blocks
of a million tokens, or one row where a document is longer and the format needs it whole; 8 bytes for each row of a file
(a file has at most a million) and for each document of a shard of the store.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from milldam.errors import ConfigError
from milldam.exporters.job import Export, Options
from milldam.exporters.reading import block_as
from milldam.files import NewFile, explain_os_errors, remove_temporaries
from milldam.loader.reading import Reader, TokenArray, open_reader
from milldam.loader.stores import Store
from milldam.sealed import is_whole
from milldam.stores.tokens.blocks import cut_blocks, in_blocks
from milldam.stores.tokens.format import Int64s

MOST_ROWS = 1 << 20
"""Of a file: bounds what is held of documents of a token or two."""
_MOST_TOKENS = 2**31 - 1
"""Of a row: what an offset of Arrow can say."""
DEFAULT_DTYPE = "int32"
"""What the tools' own tokenizing writes; any of their readers takes it. `--dtype uint16` halves the files."""


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


class RowFormat(Protocol):
    """How a format writes rows."""

    @property
    def row_bytes(self) -> int:
        """What a row takes besides its tokens, at most."""

    @property
    def file_bytes(self) -> int | None:
        """A file must be smaller than this."""

    def file_name(self, number: int, files: int) -> str: ...

    def write_file(self, new: NewFile, rows: FileRows) -> None: ...

    def write_index(self, part: Part, made: list[dict[str, Any]]) -> None:
        """Write what makes the folder of a part complete; `made`: file, rows, tokens, bytes and xxh3 of each file."""


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

    def pieces(self, start: int, count: int) -> Iterator[TokenArray]:
        """The same in pieces of a million, for a row of any length."""
        for begin, end in in_blocks(start, count):
            yield self.tokens(begin, end - begin)


# ---- what can be written ----


def check_rows(store: Store, options: Options, dtypes: tuple[str, ...], name: str) -> None:
    """Refuse a dtype that the format or the vocabulary does not fit, and rows longer than all there is."""
    dtype = options.dtype or DEFAULT_DTYPE
    if dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype}: {name} takes {', '.join(dtypes[:-1])} or {dtypes[-1]}.")
    if store.vocab_size - 1 > np.iinfo(dtype).max:
        raise ConfigError(
            f"--dtype {dtype}: too small for a vocabulary of {store.vocab_size:,}. Take a wider one, such as int32."
        )
    for split, part in split_parts(store):
        if options.seq_len is not None and part.tokens < options.seq_len:
            raise ConfigError(
                f'--seq-len {options.seq_len}: the split "{split}" has {part.tokens:,} tokens, not even one row. '
                "Take shorter rows, or leave --seq-len out for documents."
            )


def split_parts(store: Store) -> Iterator[tuple[str, Store]]:
    """(name, store) of the splits that are meant."""
    if store.split_name is not None or len(store.splits) <= 1:
        yield store.split_name or next(iter(store.splits), "train"), store
        return
    for name in store.splits:
        yield name, store.named_part(name)


# ---- which rows go where ----


def plan_parts(export: Export, form: RowFormat) -> list[Part]:
    """Every split with its files."""
    options, store = export.options, export.store
    dtype = np.dtype(options.dtype or DEFAULT_DTYPE)
    found = []
    for name, part in split_parts(store):
        folder = export.folder if part is store else export.folder / name
        cut = _Cut(dtype.itemsize, form, _file_size(form, options.shard_size))
        for lengths in row_lengths(part, options.seq_len):
            cut.add(lengths)
        found.append(Part(folder, name, part, options.seq_len, dtype, cut.finish()))
    return found


def _file_size(form: RowFormat, wanted: int) -> int:
    # Some room for what a file has besides rows.
    return wanted if form.file_bytes is None else min(wanted, form.file_bytes - (1 << 16))


def row_lengths(store: Store, seq_len: int | None) -> Iterator[Int64s]:
    """Tokens of each row in order, many at a time."""
    if seq_len is None:
        yield from store.document_lengths()
        return
    rows = store.tokens // seq_len
    for first in range(0, rows, MOST_ROWS):
        yield np.full(min(MOST_ROWS, rows - first), seq_len, np.int64)


class _Cut:
    """Fills file after file: each ends before the row that would exceed the size."""

    def __init__(self, width: int, form: RowFormat, size: int) -> None:
        self._width, self._form, self._size = width, form, size
        self._files: list[RowFile] = []
        self._open = RowFile(0, 0, 0)
        self._open_bytes = 0

    def add(self, lengths: Int64s) -> None:
        costs = lengths * self._width + self._form.row_bytes
        self._refuse_giant(lengths, costs)
        cost_ends, token_ends = costs.cumsum(), lengths.cumsum()
        first = 0
        while first < len(lengths):
            cost, tokens = (int(ends[first - 1]) if first else 0 for ends in (cost_ends, token_ends))
            room = cost + self._size - self._open_bytes
            fit = min(int(cost_ends.searchsorted(room, side="right")), first + MOST_ROWS - self._open.rows)
            stop = fit if self._open.rows else max(fit, first + 1)
            if stop > first:
                self._grow(stop - first, int(token_ends[stop - 1]) - tokens, int(cost_ends[stop - 1]) - cost)
            if stop < len(lengths):
                self._close()
            first = stop

    def _grow(self, rows: int, tokens: int, cost: int) -> None:
        file = self._open
        self._open = RowFile(file.rows + rows, file.start, file.tokens + tokens)
        self._open_bytes += cost

    def _close(self) -> None:
        self._files.append(self._open)
        self._open, self._open_bytes = RowFile(0, self._open.start + self._open.tokens, 0), 0

    def _refuse_giant(self, lengths: Int64s, costs: Int64s) -> None:
        most = self._form.file_bytes
        too_large = most is not None and int(costs.max(initial=0)) > _file_size(self._form, most)
        if too_large or int(lengths.max(initial=0)) > _MOST_TOKENS:
            raise ConfigError(
                f"A document of {int(lengths.max()):,} tokens is more than a row of this format holds. "
                "Cut the tokens into rows with --seq-len."
            )

    def finish(self) -> tuple[RowFile, ...]:
        if self._open.rows:
            self._close()
        return tuple(self._files)


# ---- writing ----


def write_rows(export: Export, form: RowFormat) -> dict[str, Any]:
    """Write every file that is not there yet, and each part's index last; counts for the summary."""
    parts = plan_parts(export, form)
    done = {(record["split"], record["file"]): record for record in export.ledger.records()}
    for part in parts:
        with explain_os_errors(part.folder):
            part.folder.mkdir(exist_ok=True)
            remove_temporaries(part.folder)
        made = []
        for number, rows in enumerate(_file_rows(part)):
            name = form.file_name(number, len(part.files))
            record = done.get((part.name, name))
            if record is None or not is_whole(part.folder / name, record):
                record = _write_file(part.folder / name, rows, form)
                export.ledger.add(record)
            made.append(record)
        form.write_index(part, made)
    kept = sum(part.tokens for part in parts)
    return {
        "rows": sum(part.rows for part in parts),
        "tokens_left_out": export.store.tokens - kept,
        "row_files": sum(len(part.files) for part in parts),
        "dtype": parts[0].dtype.name if parts else DEFAULT_DTYPE,
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
    chunks = row_lengths(part.store, part.seq_len)
    held: list[Int64s] = []
    for file in part.files:
        while sum(len(chunk) for chunk in held) < file.rows:
            held.append(next(chunks))
        lengths = np.concatenate(held)
        yield FileRows(part, file, lengths[: file.rows], reader)
        held = [lengths[file.rows :]]


def with_headers(
    tokens: TokenArray, lengths: Int64s, headers: np.ndarray[Any, np.dtype[np.uint8]], sizes: Int64s
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of rows, each behind the first `sizes[k]` bytes of `headers[k]`. headers: (rows, widest)."""
    data_sizes = lengths * tokens.itemsize
    ends = (data_sizes + sizes).cumsum()
    begins = ends - data_sizes - sizes
    columns = np.arange(headers.shape[1])
    used = columns < sizes[:, None]
    places = (begins[:, None] + columns)[used]
    made = np.empty(int(ends[-1]), np.uint8)
    is_data = np.ones(len(made), np.bool_)
    is_data[places] = False
    made[places] = headers[used]
    made[is_data] = tokens.view(np.uint8)
    return made
