"""The bytes of `NAME.spans` and `NAME.labels`: which tokens of each document are trained on (docs/format.md).

    begins i64[documents + 1], then pairs i64[stretches, 2]

All little-endian. A pair is half-open: (first token, behind the last), counted from the document's own first token.
Both directions stream: memory does not grow with the number of documents.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.files import NewFile, explain_os_errors
from milldam.stores.tokens.format import Int64s

_BLOCK_BYTES = 1 << 20
_BLOCK_DOCUMENTS = 1 << 16
_WIDTH = 8


@dataclass(frozen=True, slots=True)
class Spans:
    """What is trained on of some documents."""

    pairs: Int64s
    """(stretches, 2): half-open positions within each document."""
    counts: Int64s
    """Stretches of each document."""
    labels: npt.NDArray[np.uint8] | None = None
    """A label a document."""

    def only(self, keep: npt.NDArray[np.bool_]) -> Spans:
        """Those of the documents of a mask."""
        labels = None if self.labels is None else self.labels[keep]
        return Spans(self.pairs[np.repeat(keep, self.counts)], self.counts[keep], labels)

    def between(self, first: int, stop: int | None) -> Spans:
        """Those of the documents [first, stop)."""
        keep = np.zeros(len(self.counts), np.bool_)
        keep[first:stop] = True
        return self.only(keep)

    @property
    def trained_tokens(self) -> int:
        return int((self.pairs[:, 1] - self.pairs[:, 0]).sum())


class SpanFiles:
    """What comes with the tokens of a shard, until its files can be written."""

    def __init__(self, folder: Path, split: str) -> None:
        self._folder, self._split = folder, split
        self._counts, self._pairs = self._spool(), self._spool()
        self._labels: IO[bytes] | None = None

    def _spool(self) -> IO[bytes]:
        with explain_os_errors(self._folder / f"{self._split}.spans"):
            return tempfile.TemporaryFile(dir=self._folder)

    def append(self, spans: Spans) -> None:
        if spans.labels is not None and self._labels is None:
            self._labels = self._spool()
        with explain_os_errors(self._folder / f"{self._split}.spans"):
            self._counts.write(spans.counts.astype("<i8").tobytes())
            self._pairs.write(spans.pairs.astype("<i8").tobytes())
            if self._labels is not None:
                assert spans.labels is not None and len(spans.labels) == len(spans.counts)
                self._labels.write(spans.labels.astype(np.uint8).tobytes())

    def write(self, stack: contextlib.ExitStack) -> dict[str, NewFile]:
        """The files by how their names end, to be committed; `stack` removes what is not."""
        files = {"spans": stack.enter_context(NewFile(self._folder / f"{self._split}.spans"))}
        _write_begins(files["spans"], self._counts)
        _copy(self._pairs, files["spans"])
        if self._labels is not None:
            files["labels"] = stack.enter_context(NewFile(self._folder / f"{self._split}.labels"))
            _copy(self._labels, files["labels"])
        return files

    def close(self) -> None:
        for file in (self._counts, self._pairs, self._labels):
            if file is not None:
                file.close()


def _write_begins(new: NewFile, counts: IO[bytes]) -> None:
    begin = 0
    new.write(np.zeros(1, "<i8").tobytes())
    for block in _blocks(counts):
        ends = begin + np.cumsum(np.frombuffer(block, "<i8"))
        new.write(ends.astype("<i8").tobytes())
        begin = int(ends[-1])


def _copy(spool: IO[bytes], new: NewFile) -> None:
    for block in _blocks(spool):
        new.write(block)


def _blocks(spool: IO[bytes]) -> Iterator[bytes]:
    spool.flush()
    spool.seek(0)
    while block := spool.read(_BLOCK_BYTES):
        yield block


@dataclass(frozen=True, slots=True)
class SpanTable:
    """A mapped file of stretches: arrays that are read from disk when they are touched."""

    begins: Int64s
    pairs: Int64s
    """(stretches, 2)."""
    path: str
    """What messages call the file."""

    @classmethod
    def parse(cls, buffer: memoryview | bytes, documents: int, path: str) -> SpanTable:
        head = _WIDTH * (documents + 1)
        if len(buffer) < head or (len(buffer) - head) % (2 * _WIDTH):
            raise StoreError(
                f"{path}: {len(buffer):,} bytes can't be the stretches of {documents:,} documents. {_AGAIN}"
            )
        begins = np.frombuffer(buffer, "<i8", documents + 1)
        pairs = np.frombuffer(buffer, "<i8", offset=head).reshape(-1, 2)
        if begins[0] != 0 or begins[-1] != len(pairs):
            raise StoreError(f"{path}: its documents do not cover its {len(pairs):,} stretches. {_AGAIN}")
        return cls(begins, pairs, path)

    def document(self, number: int, length: int) -> Int64s:
        """(n, 2): the stretches of a document of so many tokens."""
        begin, end = int(self.begins[number]), int(self.begins[number + 1])
        if not 0 <= begin <= end <= len(self.pairs):
            raise StoreError(f"{self.path}: document {number:,} has no place in it. {_AGAIN}")
        pairs = self.pairs[begin:end].astype(np.int64)
        if not _in_order(pairs, np.array([end - begin]), np.array([length])).all():
            raise StoreError(f"{self.path}: the stretches of document {number:,} are not in order within it. {_AGAIN}")
        return pairs

    def some(self, first: int, stop: int) -> Spans:
        """Those of the documents from `first` up to `stop`."""
        begins = self.begins[first : stop + 1]
        return Spans(self.pairs[begins[0] : begins[-1]].astype(np.int64), np.diff(begins))

    def problems(self, lengths: Iterator[Int64s]) -> Iterator[str]:
        """What is wrong, given the tokens of all documents in blocks."""
        if (np.diff(self.begins) < 0).any():
            yield f"{self.path}: its documents are not in order"
            return
        first = 0
        for block in lengths:
            for at in range(0, len(block), _BLOCK_DOCUMENTS):
                some = block[at : at + _BLOCK_DOCUMENTS]
                spans = self.some(first, first + len(some))
                wrong = ~_in_order(spans.pairs, spans.counts, some)
                if wrong.any():
                    number = first + int(np.flatnonzero(wrong)[0])
                    yield f"{self.path}: the stretches of document {number:,} are not in order within its tokens"
                    return
                first += len(some)


_AGAIN = "It is damaged, or belongs to another file. Make it again."


def _in_order(pairs: Int64s, counts: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
    """Which documents have stretches that rise, do not touch, are not empty and lie within the document."""
    owner = np.repeat(np.arange(len(counts)), counts)
    bad = (pairs[:, 0] < 0) | (pairs[:, 0] >= pairs[:, 1]) | (pairs[:, 1] > lengths[owner])
    bad[1:] |= (owner[1:] == owner[:-1]) & (pairs[1:, 0] <= pairs[:-1, 1])
    fine = np.ones(len(counts), dtype=bool)
    fine[owner[bad]] = False
    return fine
