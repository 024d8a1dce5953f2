"""The rows of best-fit packing, as a file: made once by streaming, then mapped.

    magic "MILLROWS", version u32, bytes of JSON u32, JSON, spaces up to a multiple of 64,
    first piece of each row and the end i64[rows + 1], begins of pieces i64[pieces], their lengths i32[pieces]

All little-endian. The JSON names everything that the rows follow from; a file where it differs, or whose size is not
what it says, is made anew. It lies in the data's own cache folder, or, where that can't be written, in the user's.

Making it holds what `best_fit_rows` holds, whatever the number of documents: some megabytes. About 1.5 us a document,
and 12 bytes a piece and 8 a row on disk, twice that while it is made.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ResourceError
from milldam.files import NewFile, explain_os_errors, hash_bytes
from milldam.loader.boundaries import document_lengths
from milldam.loader.permutation import Int64s
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import best_fit_rows
from milldam.packing.pieces import Cutter, Rows

ALGORITHM = 1
"""Another number for every change of `best_fit_rows` that gives other rows."""
_MAGIC = b"MILLROWS"
_VERSION = 1
_HEADER = struct.Struct("<8sII")
_ALIGNMENT = 64
_COPY_BYTES = 1 << 20

log = logging.getLogger("milldam")


@dataclass(frozen=True, slots=True)
class RowSource:
    """All that the rows follow from."""

    stream: TokenStream
    seq_len: int
    buffer: int

    @property
    def facts(self) -> dict[str, Any]:
        """What a file must agree with."""
        own = {"strategy": "best_fit", "algorithm": ALGORITHM, "seq_len": self.seq_len, "buffer": self.buffer}
        return own | self.stream.identity

    def path_in(self, folder: Path) -> Path:
        """The file for these rows: the same for the same place of the data, so that new rows replace outdated ones."""
        stream = self.stream
        place = os.path.relpath(stream.files[0].path.parent, folder)
        # A cache of stores at addresses has them all in one folder.
        name = Path(stream.name).name if stream.origin is None else stream.fingerprint
        key = json.dumps([place, name, stream.first, stream.stop, self.seq_len, self.buffer])
        return folder / f"best_fit-{self.seq_len}-{hash_bytes(key.encode())[:12]}.rows"

    def rows(self) -> Iterator[Rows]:
        """The rows themselves; pieces begin at positions of the stream's first token on."""
        pieces = Cutter(self.seq_len, wrapped=False)(document_lengths(self.stream))
        return best_fit_rows(pieces, self.seq_len, buffer=self.buffer)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """A mapped file of rows."""

    path: Path
    firsts: Int64s
    """First piece of each row, and one past the last."""
    begins: Int64s
    """Position of each piece in the stream."""
    lengths: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.firsts) - 1

    @classmethod
    def open(cls, path: Path, facts: dict[str, Any]) -> RowIndex | None:
        """The index in a file, when it is whole and of these facts."""
        try:
            with path.open("rb") as file:
                buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, version, length = _HEADER.unpack_from(buffer)
            head = json.loads(buffer[_HEADER.size : _HEADER.size + length]) if magic == _MAGIC else {}
        except (OSError, ValueError, RecursionError, struct.error):
            # Not there, empty, shorter than a header, or no JSON.
            return None
        if version != _VERSION or not isinstance(head, dict) or head.get("facts") != facts:
            return None
        return cls._map(path, buffer, _aligned(_HEADER.size + length), head)

    @classmethod
    def _map(cls, path: Path, buffer: mmap.mmap, at: int, head: dict[str, Any]) -> RowIndex | None:
        rows, pieces = head.get("rows"), head.get("pieces")
        if not isinstance(rows, int) or not isinstance(pieces, int):
            return None
        begins_at = at + 8 * (rows + 1)
        lengths_at = begins_at + 8 * pieces
        if rows < 1 or pieces < 1 or len(buffer) != lengths_at + 4 * pieces:
            return None
        firsts = np.frombuffer(buffer, "<i8", rows + 1, at)
        if firsts[0] != 0 or firsts[-1] != pieces:
            return None
        begins = np.frombuffer(buffer, "<i8", pieces, begins_at)
        return cls(path, firsts, begins, np.frombuffer(buffer, "<i4", pieces, lengths_at))


def open_row_index(source: RowSource) -> RowIndex:
    """The rows of a stream, from a file that was made before or is made now."""
    folders = list(_folders(source.stream))
    for folder in folders:
        found = RowIndex.open(source.path_in(folder), source.facts)
        if found is not None:
            return found
    for folder in folders:
        if _is_writable(folder):
            return _make(source, source.path_in(folder))
    raise ResourceError(
        f"{source.stream.name}: its rows have to be kept in a file, and neither of these can be written: "
        f"{', '.join(str(folder) for folder in folders)}. Set XDG_CACHE_HOME to a folder that can be."
    )


def _folders(stream: TokenStream) -> Iterator[Path]:
    if stream.cache is not None:
        yield stream.cache
    home = os.environ.get("XDG_CACHE_HOME")
    yield (Path(home) if home else Path.home() / ".cache") / "milldam" / "rows"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _make(source: RowSource, path: Path) -> RowIndex:
    with _lock(path):
        # Another process may have made it while this one waited.
        found = RowIndex.open(path, source.facts)
        if found is not None:
            return found
        begun = perf_counter()
        log.info("%s: making the best-fit rows of %d tokens", source.stream.name, source.seq_len)
        with explain_os_errors(path):
            _write(source, path)
        made = RowIndex.open(path, source.facts)
    if made is None:
        raise ResourceError(f"{path}: was written, but not so that it can be read. Is the disk failing?")
    fill = 100 * source.stream.tokens / (len(made) * source.seq_len)
    took = perf_counter() - begun
    log.info("%s: %d rows, %.2f %% full, in %.1f s: %s", source.stream.name, len(made), fill, took, path)
    return made


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process do the work while the others wait; without a lock they would all do it, to the same end."""
    from filelock import FileLock, Timeout

    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            log.info("%s: another process is making it; waiting", path)
            lock.acquire()
    except (OSError, NotImplementedError) as error:
        log.debug("%s: no lock (%s)", path, error)
    try:
        yield
    finally:
        lock.release()


def _write(source: RowSource, path: Path) -> None:
    """Columns wait in temporary files, since how long each is shows only at the end."""
    rows = pieces = 0
    with ExitStack() as stack:
        counts, begins, lengths = (stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for _ in range(3))
        for made in source.rows():
            rows += len(made)
            pieces += len(made.pieces)
            counts.write(made.counts.astype("<i8").data)
            begins.write((made.pieces.starts + source.stream.first).astype("<i8").data)
            lengths.write(made.pieces.lengths.astype("<i4").data)
        new = stack.enter_context(NewFile(path))
        new.write(_head({"facts": source.facts, "rows": rows, "pieces": pieces}))
        _write_firsts(new, counts)
        for column in (begins, lengths):
            for block in _blocks(column):
                new.write(block)
        new.commit()


def _head(value: dict[str, Any]) -> bytes:
    text = json.dumps(value).encode()
    head = _HEADER.pack(_MAGIC, _VERSION, len(text)) + text
    return head.ljust(_aligned(len(head)))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _write_firsts(new: NewFile, counts: IO[bytes]) -> None:
    piece = 0
    new.write(struct.pack("<q", 0))
    for block in _blocks(counts):
        firsts = piece + np.frombuffer(block, "<i8").cumsum()
        new.write(firsts.astype("<i8").data)
        piece = int(firsts[-1])


def _blocks(column: IO[bytes]) -> Iterator[bytes]:
    column.seek(0)
    while block := column.read(_COPY_BYTES):
        yield block
