"""Plain text files (.txt) -> documents: a file, a line, a paragraph or a stretch between separators.

A file that is one document may be of any size. Above `max_document_bytes` it is a batch of its own, whose text comes in
pieces of about a megabyte, after it was read through once: so nothing that was handed on is ever taken back.
"""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from milldam.sources.arrays import ERRORS, HEAD_BYTES, Int64s, batches_of, checked_text, decode_text, describe_encoding
from milldam.sources.batch import NUMBER_BITS, TOO_LARGE, Batch, Reading, Reject, TextRules, too_large
from milldam.sources.compression import BLOCK_BYTES, STDIN, DamagedError, open_bytes, read_blocks
from milldam.sources.records import BOM, LINE, PARAGRAPH, Separator, record_blocks
from milldam.sources.units import Slice

TEXT_COLUMNS = ("text", "file")
_MOST_FILES = 4096
"""In one batch."""
MOST_WITHOUT_SPACE = 4 << 20
"""Bytes of a document in pieces: an encoder cuts it at white space."""
_SPACE = re.compile(rb"[ \t\r\n]")


def separator_of(rules: TextRules) -> Separator | None:
    """What ends a document inside a file; None when a file is one document."""
    if rules.separator is not None:
        return rules.separator.encode()
    separators: dict[str, Separator] = {"line": LINE, "paragraph": PARAGRAPH}
    return separators.get(rules.documents)


def columns_of(slice: Slice) -> list[str]:
    return list(TEXT_COLUMNS)


def read_rows(slice: Slice, reading: Reading) -> Iterator[tuple[pa.RecordBatch, Int64s]]:
    """Documents as rows, with the name of their file."""
    wanted = reading.columns if reading.columns is not None else TEXT_COLUMNS
    # a file's name need not be UTF-8
    name = reading.name(slice.path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    several = separator_of(reading.rules) is not None
    for batch in read_texts(slice, reading) if several else read_whole_files((slice,), reading, pieces=False):
        if len(batch.texts) and batch.origins is not None:
            columns = {"text": batch.texts, "file": pa.repeat(name, len(batch.texts)) if "file" in wanted else None}
            yield pa.record_batch([columns[column] for column in wanted], names=list(wanted)), batch.origins


# ---- several documents in a file ----


def read_texts(slice: Slice, reading: Reading) -> Iterator[Batch]:
    """The documents of a file, or of a slice of one; lines and stretches of nothing but white space are none."""
    separator, count = separator_of(reading.rules), 0
    assert separator is not None
    for data, line, _, size in record_blocks(slice, reading, separator):
        if separator == LINE:
            data = data.replace(b"\r\n", b"\n")
            count = line - 1  # lines are counted with those that are too large
        pieces = data.split(separator) if isinstance(separator, bytes) else separator.split(data)
        first = count

        def make_reject(position: int, reason: str, detail: str, raw: bytes, first: int = first) -> Reject:
            record, number = raw.decode("utf-8", "backslashreplace"), first + position
            if separator == LINE:
                return Reject(slice.path, reason, detail, record, line=number + 1, origin=slice.start)
            return Reject(slice.path, reason, detail, record, row=number, origin=slice.start)

        texts, positions = checked_text(pa.array(pieces, pa.large_binary()), reading, make_reject)
        blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
        texts, positions = texts.filter(pc.invert(blank)), positions[~np.asarray(blank)]
        if separator is PARAGRAPH:
            texts = pc.utf8_trim(texts, characters="\r\n")
        yield from batches_of(Batch(texts, bytes_read=size, origins=count + positions))
        # Behind the last separator of a block is nothing.
        count += max(1, len(pieces) - (not pieces[-1]))


# ---- a document per file ----


def read_whole_files(slices: tuple[Slice, ...], reading: Reading, *, pieces: bool = True) -> Iterator[Batch]:
    """One document a file; many small files make one batch. `pieces`: a file larger than a document may be comes in
    pieces; else it is rejected as any other record, as is standard input, which can't be read twice."""
    small, held, most = list[tuple[int, bytes]](), 0, reading.rules.max_document_bytes
    for number, slice in enumerate(slices):
        with open_bytes(slice.path) as file:
            blocks = read_blocks(file, slice.compression)
            head, size, damage = list[bytes](), 0, None
            try:
                while size <= most and (block := next(blocks, b"")):
                    head.append(block)
                    size += len(block)
            except DamagedError as error:
                damage = error
            if small and (damage is not None or held + size > BLOCK_BYTES or len(small) == _MOST_FILES):
                yield _gathered(small, slices, reading)
                small, held = [], 0
            if damage is not None:
                reading.reject(Reject(slice.path, damage.reason, str(damage), damaged=True))
            elif size <= most:
                small.append((number, b"".join(head).removeprefix(BOM)))
                held += size
            elif pieces and slice.path != STDIN:
                # Read through for whatever is wrong with it, then handed on.
                problem = _problem_of(itertools.chain(head, blocks), reading.rules)
                if problem is not None:
                    reading.reject(Reject(slice.path, *problem))
                    continue
                origins = np.array([number << NUMBER_BITS])
                yield Batch(pa.array([""], pa.large_string()), pieces=_pieces(slice, reading.rules), origins=origins)
            else:
                detail = too_large(size + sum(map(len, blocks)), most)
                reading.reject(Reject(slice.path, TOO_LARGE, detail, head[0].decode("utf-8", "backslashreplace")))
    if small:
        yield _gathered(small, slices, reading)


def _gathered(small: list[tuple[int, bytes]], slices: tuple[Slice, ...], reading: Reading) -> Batch:
    def make_reject(position: int, reason: str, detail: str, raw: bytes) -> Reject:
        return Reject(slices[small[position][0]].path, reason, detail, raw.decode("utf-8", "backslashreplace"))

    data = [data for _, data in small]
    texts, positions = checked_text(pa.array(data, pa.large_binary()), reading, make_reject)
    origins = np.array([number << NUMBER_BITS for number, _ in small], np.int64)[positions]
    return Batch(texts, bytes_read=sum(map(len, data)), origins=origins)


# ---- a document of any size ----


def _pieces(slice: Slice, rules: TextRules) -> Iterator[tuple[str, int]]:
    """Its text, and how many bytes of input each piece took."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(ERRORS.get(rules.invalid_utf8, "strict"))
    with open_bytes(slice.path) as file:
        for block in read_blocks(file, slice.compression):
            if text := decoder.decode(block):
                yield text, len(block)
    if text := decoder.decode(b"", final=True):
        yield text, 0


def _problem_of(blocks: Iterator[bytes], rules: TextRules) -> tuple[str, str] | None:
    """(reason, detail) why a file is no document."""
    head, read, without_space = b"", 0, 0
    decoder = codecs.getincrementaldecoder("utf-8")(ERRORS.get(rules.invalid_utf8, "strict"))
    try:
        for block in itertools.chain(blocks, [b""]):
            head = head or block[:HEAD_BYTES]
            if not read and rules.invalid_utf8 == "drop" and (problem := decode_text(head, rules)[1]):
                return "not_utf8", problem
            read += len(block)
            decoder.decode(block, final=not block)
            first = _SPACE.search(block)
            without_space += len(block) if first is None else first.start()
            if without_space > MOST_WITHOUT_SPACE:
                return "no_white_space", f"{MOST_WITHOUT_SPACE:,} bytes without white space before byte {read:,}"
            if first is not None:
                without_space = len(block) - max(map(block.rfind, (b" ", b"\t", b"\r", b"\n")))
    except UnicodeDecodeError as error:
        at = read - len(error.object) + error.start
        return "not_utf8", describe_encoding(head, at, error.object[error.start])
    except DamagedError as error:
        return error.reason, str(error)
    return None
