"""Plain text files (.txt) -> documents: a file, a line, a paragraph or a stretch between separators.

A file that is one document may be of any size. Above `max_document_bytes` it comes in open batches of about a
megabyte, after it was read through once: so nothing that was handed on is ever taken back.
"""

from __future__ import annotations

import codecs
import itertools
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO

import pyarrow as pa

from milldam.sources.arrays import (
    batches_of,
    checked_text,
    one_text,
    split_at,
    split_lines,
    split_paragraphs,
    whole_characters,
    without_blank,
)
from milldam.sources.batch import TOO_LARGE, Batch, Reading, Reject, TextRules, too_large
from milldam.sources.compression import STDIN, DamagedError, open_bytes, read_blocks
from milldam.sources.decoding import HEAD_BYTES, decode_text, describe_encoding
from milldam.sources.records import (
    BLOCK_BYTES,
    BOM,
    LINE,
    BlankLine,
    Block,
    Boundary,
    make_damage_reject,
    make_line_reject,
    record_blocks,
    reject_too_large,
)
from milldam.sources.units import Slice

PARAGRAPH = BlankLine()
TEXT_COLUMNS = ("text", "file")
_SPLITTERS = {LINE: split_lines, PARAGRAPH: split_paragraphs}
_MOST_FILES = 4096
"""In one batch."""
MOST_WITHOUT_SPACE = 4 << 20
"""Bytes of a document in pieces: an encoder cuts it at white space."""
_SPACE = re.compile(rb"[ \t\r\n]")
_ERRORS = {"drop": "ignore", "replace": "replace"}


def boundary_of(rules: TextRules) -> Boundary | None:
    """Where documents end inside a file; None when a file is one document."""
    if rules.separator is not None:
        return Boundary(rules.separator.encode())
    return {"line": LINE, "paragraph": PARAGRAPH}.get(rules.documents)


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The documents of a file, or of a slice of one."""
    boundary = boundary_of(reading.rules)
    if boundary is None:
        return read_whole_files((slice,), reading)
    return _read_separated(slice, reading, boundary)


def read_rows(slice: Slice, reading: Reading) -> Iterator[pa.RecordBatch]:
    """Documents as rows, with the name of their file."""
    wanted = reading.columns if reading.columns is not None else TEXT_COLUMNS
    # a file's name need not be UTF-8
    name = reading.name(slice.path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    several = boundary_of(reading.rules) is not None
    for batch in read_texts(slice, reading) if several else read_whole_files((slice,), reading, pieces=False):
        if len(batch.texts):
            columns = {"text": batch.texts, "file": pa.repeat(name, len(batch.texts)) if "file" in wanted else None}
            yield pa.record_batch([columns[column] for column in wanted], names=list(wanted))


# ---- several documents in a file ----


def _read_separated(slice: Slice, reading: Reading, boundary: Boundary) -> Iterator[Batch]:
    with open_bytes(slice.path) as file:
        most = reading.rules.max_document_bytes
        blocks = record_blocks(file, slice.compression, boundary, slice.start, slice.stop, most)
        try:
            for number, block in enumerate(blocks):
                if block.too_large:
                    reject_too_large(block, slice, reading)
                    yield Batch(pa.array([], pa.large_string()), bytes_read=block.size)
                    continue
                if number == 0 and slice.start == 0:
                    block = replace(block, data=block.data.removeprefix(BOM))
                yield from batches_of(without_blank(_split(block, slice, reading, boundary)), block.size)
        except DamagedError as error:
            reading.reject(make_damage_reject(slice, error))


def _split(block: Block, slice: Slice, reading: Reading, boundary: Boundary) -> pa.LargeStringArray:
    data = block.data
    pieces = _SPLITTERS[boundary](data) if boundary in _SPLITTERS else split_at(data, boundary.separators[0])

    searched = 0

    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        # Rejects come in order: each is searched for behind the one before.
        nonlocal searched
        at = data.index(raw, searched)
        searched = at + len(raw)
        return make_line_reject(slice, block, block.line + data.count(b"\n", 0, at), reason, detail, raw)

    texts = checked_text(pieces, reading, make_reject)
    if boundary is not PARAGRAPH:
        return texts
    import pyarrow.compute as pc

    return pc.utf8_trim(texts, characters="\r\n")


# ---- a document per file ----


@dataclass(slots=True)
class _SmallFiles:
    """Whole files, gathered into one batch."""

    raw: list[bytes] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    size: int = 0

    def add(self, path: str, data: bytes) -> None:
        self.raw.append(data)
        self.paths.append(path)
        self.size += len(data)


def read_whole_files(slices: tuple[Slice, ...], reading: Reading, *, pieces: bool = True) -> Iterator[Batch]:
    """One document a file; many small files make one batch. `pieces`: a file larger than a document may be comes in
    open batches; else it is rejected as any other record."""
    small, most = _SmallFiles(), reading.rules.max_document_bytes
    for slice in slices:
        head: list[bytes] = []
        damage: DamagedError | None = None
        with open_bytes(slice.path) as file:
            blocks = read_blocks(file, slice.compression, BLOCK_BYTES)
            try:
                while sum(map(len, head)) <= most and (block := next(blocks, b"")):
                    head.append(block)
            except DamagedError as error:
                damage = error
            size = sum(map(len, head))
            if small.raw and (damage is not None or size > BLOCK_BYTES):
                yield from _gathered(small, reading)
                small = _SmallFiles()
            if damage is not None:
                _reject_damaged(slice, damage, reading)
            elif size <= most:
                small.add(slice.path, b"".join(head).removeprefix(BOM))
            elif pieces:
                yield from _in_pieces(slice, itertools.chain(head, blocks), reading)
            else:
                detail = too_large(size + sum(map(len, blocks)), reading.rules)
                reading.reject(Reject(slice.path, TOO_LARGE, detail, head[0].decode("utf-8", "backslashreplace")))
        if small.size >= BLOCK_BYTES or len(small.raw) >= _MOST_FILES:
            yield from _gathered(small, reading)
            small = _SmallFiles()
    yield from _gathered(small, reading)


def _reject_damaged(slice: Slice, damage: DamagedError, reading: Reading) -> None:
    damage.cut = b""  # the document: nobody knows where it would have ended
    reading.reject(make_damage_reject(slice, damage))


def _gathered(small: _SmallFiles, reading: Reading) -> Iterator[Batch]:
    lost: set[int] = set()

    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        lost.add(position)
        return Reject(small.paths[position], reason, detail, raw.decode("utf-8", "backslashreplace"))

    if small.raw:
        texts = checked_text(pa.array(small.raw, pa.large_binary()), reading, make_reject)
        kept = (path for position, path in enumerate(small.paths) if position not in lost)
        for ahead, path in enumerate(kept):
            reading.places.begin(path, ahead=ahead)
        yield Batch(texts, bytes_read=small.size)


# ---- a document of any size ----


def _in_pieces(slice: Slice, blocks: Iterator[bytes], reading: Reading) -> Iterator[Batch]:
    """Read it through for whatever is wrong with it, then hand it on. Only standard input goes through the disk."""
    with ExitStack() as opened:
        copy = opened.enter_context(tempfile.TemporaryFile(dir=reading.spool)) if slice.path == STDIN else None
        try:
            problem = _problem_of(_copied(blocks, copy), reading.rules)
        except DamagedError as error:
            _reject_damaged(slice, error, reading)
            return
        if problem is not None:
            reading.reject(Reject(slice.path, *problem, line=1))
            return
        reading.places.begin(slice.path)
        if copy is not None:
            copy.seek(0)
            yield from _open_batches(read_blocks(copy, None, BLOCK_BYTES), reading.rules)
        else:
            with open_bytes(slice.path) as file:
                yield from _open_batches(read_blocks(file, slice.compression, BLOCK_BYTES), reading.rules)


def _copied(blocks: Iterator[bytes], copy: IO[bytes] | None) -> Iterator[bytes]:
    for block in blocks:
        if copy is not None:
            copy.write(block)
        yield block


def _problem_of(blocks: Iterator[bytes], rules: TextRules) -> tuple[str, str] | None:
    """(reason, detail) why a file is no document."""
    head, read, without_space = b"", 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")(_ERRORS.get(rules.invalid_utf8, "strict"))
    for block in blocks:
        if not read:
            head = block[:HEAD_BYTES]
            if rules.invalid_utf8 == "drop" and (problem := decode_text(head[: whole_characters(head)], rules)[1]):
                return "not_utf8", problem
        try:
            decoder.decode(block)
        except UnicodeDecodeError as error:
            return "not_utf8", describe_encoding(head, error, read - len(error.object) + len(block))
        first = _SPACE.search(block)
        without_space += len(block) if first is None else first.start()
        read += len(block)
        if without_space > MOST_WITHOUT_SPACE:
            return "no_white_space", f"{MOST_WITHOUT_SPACE:,} bytes without white space before byte {read:,}"
        if first is not None:
            without_space = len(block) - max(map(block.rfind, (b" ", b"\t", b"\r", b"\n")))
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return "not_utf8", describe_encoding(head, error, read - len(error.object))
    return None


def _open_batches(blocks: Iterator[bytes], rules: TextRules) -> Iterator[Batch]:
    """Its pieces, cut between characters; open until the last."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(_ERRORS.get(rules.invalid_utf8, "strict"))
    waiting, size = "", 0
    for block in blocks:
        text = decoder.decode(block)
        if text and waiting:
            yield Batch(one_text(waiting), open=True, bytes_read=size)
            size = 0
        waiting, size = text or waiting, size + len(block)
    yield Batch(one_text(waiting + decoder.decode(b"", final=True)), bytes_read=size)
