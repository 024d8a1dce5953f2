"""Arrow arrays of text: built without a Python object per document, checked, and cut to a bounded size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.sources.batch import Batch, MalformedError, Reading, Reject, TextRules
from milldam.sources.compression import DamagedError
from milldam.sources.decoding import HEAD_BYTES, HEAD_CHARACTERS, decode_text
from milldam.text.arrays import text_offsets

if TYPE_CHECKING:
    from milldam.sources.values import Floats

BATCH_BYTES = 2 << 20
_PART = 1 << 20

Bytes = npt.NDArray[np.uint8]
_INK = ~np.isin(np.arange(256), list(b" \t\r\n"))
MakeReject = Callable[[int, str, str, bytes], Reject]
"""(position in the array, reason, detail, the record's bytes) -> a reject that says where."""


def from_offsets(data: Bytes, offsets: npt.NDArray[np.int64]) -> pa.LargeBinaryArray:
    """An array of byte strings that lie end to end in `data`."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def split_at(data: bytes, separator: bytes) -> pa.LargeBinaryArray:
    """The pieces between separators, empty ones included."""
    array = np.frombuffer(data, dtype=np.uint8)
    starts = _occurrences(data, separator)
    keep = np.ones(len(array), dtype=bool)
    for k in range(len(separator)):
        keep[starts + k] = False
    # Taking out separators moves everything behind them.
    moved = len(separator) * np.arange(len(starts))
    offsets = np.concatenate(([0], starts - moved, [len(array) - len(separator) * len(starts)]))
    return from_offsets(array[keep], offsets.astype(np.int64))


def split_paragraphs(data: bytes) -> pa.LargeBinaryArray:
    """The stretches of lines between blank ones, each with its line ends."""
    array = np.frombuffer(data, dtype=np.uint8)
    stops = np.flatnonzero(array == 10) + 1
    if not len(stops) or stops[-1] != len(array):
        stops = np.append(stops, len(array))
    starts = np.concatenate(([0], stops[:-1]))
    ink = np.concatenate(([0], np.cumsum(_INK[array])))
    blank = ink[stops] == ink[starts]
    keep = np.repeat(~blank, stops - starts)
    kept = np.concatenate(([0], np.cumsum(keep)))
    begins = ~blank & np.concatenate(([True], blank[:-1]))
    return from_offsets(array[keep], np.append(kept[starts[begins]], kept[-1]).astype(np.int64))


def split_lines(data: bytes) -> pa.LargeBinaryArray:
    """The lines, without their ends (\\n or \\r\\n)."""
    array = np.frombuffer(data, dtype=np.uint8)
    newlines = np.flatnonzero(array == 10)
    lines = newlines + 1  # where each line begins, but for the first
    if b"\r\n" not in data:
        # Taking out one byte a line moves everything behind it by one.
        offsets = np.concatenate(([0], lines - np.arange(1, len(lines) + 1), [len(array) - len(lines)]))
        return from_offsets(array[array != 10], offsets.astype(np.int64))
    keep = array != 10
    before = newlines[newlines > 0] - 1
    keep[before[array[before] == 13]] = False
    kept = np.concatenate(([0], np.cumsum(keep)))
    return from_offsets(array[keep], np.concatenate(([0], kept[lines], [kept[-1]])).astype(np.int64))


def _occurrences(data: bytes, separator: bytes) -> npt.NDArray[np.int64]:
    found = [match.start() for match in re.finditer(re.escape(separator), data)]
    return np.array(found, dtype=np.int64)


def checked_text(array: pa.Array, reading: Reading, make_reject: MakeReject) -> pa.LargeStringArray:
    """The same documents as valid UTF-8 without nulls; what is neither goes to the rejects."""
    if array.null_count == 0:
        try:
            return array.cast(pa.large_string())
        except pa.ArrowInvalid:
            pass
    kept: list[str] = []
    for position, value in enumerate(array.cast(pa.large_binary())):
        raw = value.as_py()
        text, problem = decode_text(raw, reading.rules) if raw is not None else (None, "the text is null")
        if text is not None:
            kept.append(text)
        else:
            reason = "not_utf8" if raw is not None else "no_text"
            reading.reject(make_reject(position, reason, problem, raw or b""), ahead=len(kept))
    return pa.array(kept, pa.large_string())


def one_text(text: str | bytes) -> pa.LargeStringArray:
    """An array of one text, with a copy less than pa.array makes; raises UnicodeEncodeError for lone surrogates."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return pa.LargeStringArray.from_buffers(1, pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data))


def bytes_of(texts: pa.LargeStringArray) -> memoryview:
    """The bytes of all texts, end to end, without a copy."""
    offsets = text_offsets(texts)
    return memoryview(texts.buffers()[2])[int(offsets[0]) : int(offsets[-1])] if len(texts) else memoryview(b"")


def decode_array(data: bytes, rules: TextRules, head: bytes) -> tuple[pa.LargeStringArray | None, str]:
    """A part of a document as an array by the rules, without a copy; or what is wrong with it."""
    raw = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), 1, [None, pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data)]
    )
    try:
        return raw.cast(pa.large_string()), ""
    except pa.ArrowInvalid:
        text, problem = decode_text(data, rules, head)
        return (None if text is None else pa.array([text], pa.large_string())), problem


def gathered(parts: Iterator[str]) -> Iterator[str]:
    """Parts of a text put together to about a megabyte; the first has the head of the text, at least."""
    held: list[str] = []
    size, wanted = 0, max(_PART, HEAD_CHARACTERS)
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= wanted:
            yield "".join(held)
            held, size, wanted = [], 0, _PART
    if held:
        yield "".join(held)


def open_batches(parts: Iterator[pa.LargeStringArray | None]) -> Iterator[Batch]:
    """The parts of one document as batches, open until the last; None: those before it don't count.

    When something is wrong with what follows (MalformedError, DamagedError), what was given is taken back first.
    """
    waiting: pa.LargeStringArray | None = None
    begun = False
    cancel = Batch(pa.array([], pa.large_string()), cancel=True)
    try:
        for part in parts:
            if part is not None and waiting is not None:
                yield Batch(waiting, open=True, bytes_read=waiting.nbytes)
                begun = True
            elif part is None and begun:
                yield cancel
                begun = False
            waiting = part
    except (MalformedError, DamagedError):
        if begun:
            yield cancel
        raise
    yield Batch(waiting, bytes_read=waiting.nbytes if waiting is not None else 0)


def decoded_parts(parts: Iterable[bytes], rules: TextRules) -> Iterator[pa.LargeStringArray]:
    """The parts of one document as text by the rules, cut between characters; raises MalformedError."""
    head = held = b""
    for part in parts:
        held += part
        if rules.invalid_utf8 == "drop" and not head and len(held) < HEAD_BYTES:
            continue  # its head, which decides, is not complete
        head = head or held[:HEAD_BYTES]
        cut = whole_characters(held)
        yield require_array(held[:cut], rules, head)
        held = held[cut:]
    if held or not head:
        yield require_array(held, rules, head or held)


def require_array(data: bytes, rules: TextRules, head: bytes) -> pa.LargeStringArray:
    """As decode_array; raises MalformedError."""
    text, problem = decode_array(data, rules, head)
    if text is None:
        raise MalformedError("not_utf8", problem)
    return text


def whole_characters(data: bytes) -> int:
    """How many bytes make up whole UTF-8 characters: the last one may be cut off."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needed > back else len(data)
        if byte < 0x80:
            break
    return len(data)


def without_blank(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """Leave out what is no document: lines and stretches of nothing but white space."""
    import pyarrow.compute as pc

    blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    return texts.filter(pc.invert(blank)) if pc.any(blank).as_py() else texts


def bounded(array: pa.Array) -> Iterator[pa.Array]:
    """Slices of about `BATCH_BYTES`, without a copy; a larger document stands alone."""
    if pa.types.is_dictionary(array.type):
        yield from _bounded_dictionary(array)
        return
    if array.nbytes <= BATCH_BYTES or len(array) <= 1:
        if len(array):
            yield array
        return
    half = len(array) // 2
    yield from bounded(array[:half])
    yield from bounded(array[half:])


def batches_of(texts: pa.LargeStringArray, bytes_read: int, values: Floats | None = None) -> Iterator[Batch]:
    """The texts of a block in bounded batches; an empty one when there are none, so that rejects do not pile up."""
    parts, at = list(bounded(texts)) or [texts], 0
    for part in parts:
        some = None if values is None else values[at : at + len(part)]
        yield Batch(part, bytes_read=bytes_read // len(parts), values=some)
        at += len(part)


def with_value(batches: Iterator[Batch], value: Callable[[], float] | None) -> Iterator[Batch]:
    """The batches of one document, the last with its number, which is asked for then."""
    for batch in batches:
        ends = not batch.open and not batch.cancel
        yield replace(batch, values=np.array([value()])) if value is not None and ends else batch


def _bounded_dictionary(array: pa.DictionaryArray) -> Iterator[pa.Array]:
    """By the size of the texts that the numbers stand for, which the array itself does not show."""
    import pyarrow.compute as pc

    sizes = pc.take(pc.binary_length(array.dictionary.cast(pa.large_binary())), array.indices).fill_null(0)
    ends = np.cumsum(sizes.to_numpy(zero_copy_only=False))
    start = 0
    while start < len(array):
        reached = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, reached + BATCH_BYTES, side="right")))
        if stop == start + 1 and array[start].is_valid:
            # A large one is not copied.
            number = array.indices[start].as_py()
            yield array.dictionary[number : number + 1]
        else:
            yield array[start:stop].dictionary_decode()
        start = stop
