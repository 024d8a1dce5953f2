"""The rows of best-fit packing, as a file: made once by streaming, then mapped.

It has the layout of a shard's index (milldam.stores.tokens.format): its documents are the rows, its sequences their
pieces, and an offset is where a piece begins in the stream of tokens. Its name says by two hashes which place of the
data it is for and what its rows follow from; a file that is damaged is made anew. It lies in the data's own cache
folder, or, where that can't be written, in the user's.

Making it holds what `best_fit_rows` holds, whatever the number of documents: some megabytes. About 1.5 us a document,
and 12 bytes a piece and 8 a row on disk, twice that while it is made.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np

from milldam.errors import ResourceError, StoreError
from milldam.files import NewFile, explain_os_errors, hash_bytes
from milldam.loader.boundaries import document_lengths
from milldam.loader.permutation import Int64s
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import Cutter, Pieces, Rows, best_fit_rows
from milldam.packing.rows import IndexColumns
from milldam.stores.tokens.format import Index

ALGORITHM = 1
"""Another number for every change of `best_fit_rows` that gives other rows."""
_OFFSETS_IN_TOKENS = 1
"""The code of a dtype of one byte: offsets count tokens, whatever their size."""

TooLong = Literal["drop", "cut", "split", "refuse"]
"""What becomes of a document that is longer than a row: no row has it, one row has its begin, several rows have pieces
of it, or it is an error."""

log = logging.getLogger("milldam")


@dataclass(frozen=True, slots=True)
class RowSource:
    """All that the rows follow from."""

    stream: TokenStream
    seq_len: int
    buffer: int
    too_long: TooLong = "split"

    @property
    def facts(self) -> dict[str, Any]:
        """What a file must agree with."""
        own = {"strategy": "best_fit", "algorithm": ALGORITHM, "seq_len": self.seq_len, "buffer": self.buffer}
        if self.too_long != "split":
            own["too_long"] = self.too_long
        return own | self.stream.identity

    def path_in(self, folder: Path) -> Path:
        """The file for these rows; names for one place of the data begin alike, so that what is outdated is found."""
        stream = self.stream
        place = os.path.relpath(stream.files[0].path.parent, folder)
        # A cache of stores at addresses has them all in one folder.
        name = Path(stream.name).name if stream.origin is None else stream.fingerprint
        whole = [] if self.too_long == "split" else [self.too_long]
        key = _hash([place, name, stream.first, stream.stop, self.seq_len, self.buffer, *whole])
        return folder / f"best_fit-{self.seq_len}-{key}-{_hash(self.facts)}.rows"

    def rows(self) -> Iterator[Rows]:
        """The rows themselves; pieces begin at positions of the stream's first token on."""
        lengths = document_lengths(self.stream)
        if self.too_long == "split":
            pieces = Cutter(self.seq_len, wrapped=False)(lengths)
        else:
            pieces = _one_each(lengths, self.seq_len, cut=self.too_long == "cut")
        return best_fit_rows(pieces, self.seq_len, buffer=self.buffer)


def _one_each(documents: Iterator[Int64s], seq_len: int, *, cut: bool) -> Iterator[Pieces]:
    """A piece for each document: those that are too long are cut or left out."""
    position = 0
    for lengths in documents:
        ends = position + lengths.cumsum()
        position = int(ends[-1]) if len(ends) else position
        pieces = Pieces(ends - lengths, np.minimum(lengths, seq_len))
        yield pieces if cut else pieces[lengths <= seq_len]


@dataclass(frozen=True, slots=True)
class TooLongDocuments:
    """What is known of the documents that are longer than a limit."""

    documents: int = 0
    tokens: int = 0
    """All tokens of them."""
    longest: int = 0
    of_documents: int = 0
    """How many documents there are."""

    def told(self, limit: str, most: int | None, too_long: str, *, also: str = "") -> str:
        """What becomes of them, and what to do about it. `limit`: the setting that says how long is too long."""
        became = {"drop": "left out", "refuse": "refused", "cut": "cut there", "split": "split"}[too_long]
        others = "drop, cut, split or refuse" if limit == "seq_len" else "drop, cut or refuse"
        return (
            f"{self.documents:,} of {self.of_documents:,} documents are longer than {limit}={most:,} and are "
            f"{became}{also} ({self.tokens:,} tokens; the longest has {self.longest:,}). Use a larger {limit}, or "
            f"another too_long: {others}."
        )


def count_too_long(documents: Iterator[Int64s], most: int) -> TooLongDocuments:
    """Those of more tokens than so many; a look at all lengths, some milliseconds for a million."""
    count, tokens, longest, total = 0, 0, 0, 0
    for lengths in documents:
        long = lengths[lengths > most]
        count, tokens, total = count + len(long), tokens + int(long.sum()), total + len(lengths)
        longest = max(longest, int(long.max(initial=0)))
    return TooLongDocuments(count, tokens, longest, total)


def _hash(value: object) -> str:
    return hash_bytes(json.dumps(value).encode())[:12]


def _map(path: Path) -> Index | None:
    """The index in a file, when there is one and it is whole."""
    try:
        index = Index.map(path)
    except StoreError:
        return None
    ends = (int(index.documents[0]), int(index.documents[-1]))
    return index if len(index.documents) > 1 and ends == (0, len(index.lengths)) else None


def open_row_index(source: RowSource) -> Index:
    """The rows of a stream, from a file that was made before or is made now."""
    folders = list(_folders(source.stream))
    for folder in folders:
        found = _map(source.path_in(folder))
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


def _make(source: RowSource, path: Path) -> Index:
    with _lock(path):
        # Another process may have made it while this one waited.
        found = _map(path)
        if found is not None:
            return found
        begun = perf_counter()
        log.info("%s: making the best-fit rows of %d tokens", source.stream.name, source.seq_len)
        with explain_os_errors(path):
            _write(source, path)
        made = _map(path)
    if made is None:
        raise ResourceError(f"{path}: was written, but not so that it can be read. Is the disk failing?")
    rows, took = len(made.documents) - 1, perf_counter() - begun
    fill = 100 * int(made.lengths.sum(dtype=np.int64)) / (rows * source.seq_len)
    log.info("%s: %d rows, %.2f %% full, in %.1f s: %s", source.stream.name, rows, fill, took, path)
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
    with closing(IndexColumns(path.parent)) as columns, NewFile(path) as new:
        for made in source.rows():
            columns.add(made.counts, made.pieces.starts + source.stream.first, made.pieces.lengths)
        columns.write(new, _OFFSETS_IN_TOKENS)
        new.commit()
    for outdated in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
        if outdated != path:
            outdated.unlink(missing_ok=True)
