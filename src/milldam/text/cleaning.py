"""Cleaning: batches of text -> the same documents, cleaned. Holds one batch.

Text that needs nothing is handed on as it is, without a copy.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.rules import CleanRules
from milldam.text.arrays import Verdicts, text_offsets, wide_characters
from milldam.text.user_functions import UserFunction

FUNCTION_BYTES: Final = 16_000_000
"""The largest document that is given to a user's function."""
DROPPED, FAILURE, TOO_LARGE = "dropped_by_clean", "error_in_clean_function", "too_large_for_function"

_CUT, _NEAR_END, _LONGEST_PIECE = re.compile(r"(?<=\s)(?=[^\W_])"), 4096, 8_000_000
"""Where cleaning one side does not change what the other becomes; without such a place, so many characters are cut
where they end."""

Bytes = npt.NDArray[np.uint8]
Int64s = npt.NDArray[np.int64]
_BLOCK_BYTES = 1 << 20
_SPACE, _LINE_END = 32, 10
_WIDE_CONTROLS = "".join(map(chr, range(0x80, 0xA0))) + "\ufeff"
_HALF = re.compile("[\ud800-\udfff]")


class Cleaner:
    def __init__(self, rules: CleanRules) -> None:
        self._rules = rules
        self._function = UserFunction(rules.function) if rules.function is not None else None

    def clean(self, texts: pa.LargeStringArray, verdicts: Verdicts) -> pa.LargeStringArray:
        """As many texts, cleaned. Documents that are already dropped are not shown to a user's function."""
        texts = self._edit(texts, final=True)
        texts = stripped(texts) if self._rules.strip else texts
        function = self._function
        if function is None:
            return texts
        cleaned = [""] * len(texts)
        sizes = np.diff(text_offsets(texts))
        for position in np.flatnonzero(verdicts.keep).tolist():
            if sizes[position] > FUNCTION_BYTES:
                verdicts.drop_one(position, TOO_LARGE)
                continue
            result = function(texts[position].as_py())
            if result is None:
                verdicts.drop_one(position, DROPPED)
            elif result is function.FAILED or (isinstance(result, str) and _HALF.search(result)):
                verdicts.drop_one(position, FAILURE)
            elif not isinstance(result, str):
                raise function.wrong_type(result, "the text, or None to drop the document")
            else:
                cleaned[position] = result
        return pa.array(cleaned, pa.large_string())

    def clean_piece(
        self, piece: pa.LargeStringArray, verdicts: Verdicts, *, first: bool, last: bool
    ) -> pa.LargeStringArray:
        """A piece of one document that is cut where white space ends. A user's function sees whole documents only."""
        if self._function is not None:
            verdicts.drop_one(0, TOO_LARGE)
            return piece
        piece = self._edit(piece, final=last)
        piece = pc.utf8_ltrim_whitespace(piece) if self._rules.strip and first else piece
        return pc.utf8_rtrim_whitespace(piece) if self._rules.strip and last else piece

    @staticmethod
    def last_cut(text: str) -> int:
        """Where to cut the beginning of a document; 0: more has to come first."""
        for start in (max(0, len(text) - _NEAR_END), 0):
            places = [match.start() for match in _CUT.finditer(text, start)]
            if places:
                return places[-1]
        return len(text) if len(text) > _LONGEST_PIECE else 0

    def _edit(self, texts: pa.LargeStringArray, *, final: bool) -> pa.LargeStringArray:
        """Every rule that needs to see only what is near."""
        if self._rules.unicode is not None:
            texts = normalized(texts, self._rules.unicode)
        if self._rules.control_characters:
            texts = without_control_characters(texts)
        if self._rules.whitespace:
            texts = with_plain_whitespace(texts, final=final)
        return texts


# ---- the rules, on whole arrays ----


def normalized(texts: pa.LargeStringArray, form: Literal["NFC", "NFKC"]) -> pa.LargeStringArray:
    """By Python's tables. A Python string per document, for once: text that is normal already is only looked through,
    and so this is faster than pyarrow's way (NFC: 142 MB/s to 53 on the multilingual sample, 431 to 92 on English
    books; NFKC: 54 to 57, 413 to 80).
    """
    if _is_ascii(_data(texts)):
        return texts
    return pa.array([unicodedata.normalize(form, text) for text in texts.to_pylist()], pa.large_string())


def without_control_characters(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """The texts without C0 (but for tab and line ends), DEL, C1 and U+FEFF."""
    data, offsets, removed = _data(texts), text_offsets(texts), [np.empty(0, np.int64)]
    for start in range(0, len(data), _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        # Counting is several times as fast as looking for places, and nearly always all that is needed.
        controls = np.count_nonzero(block < 32) - np.count_nonzero(block == 10)
        if controls:
            controls -= np.count_nonzero(block == 9) + np.count_nonzero(block == 13)
        if controls or np.count_nonzero(block == 127):
            low = np.flatnonzero((block < 32) | (block == 127))
            removed.append(low[~np.isin(block[low], (9, 10, 13))] + start)
    for at, size in () if _is_ascii(data) else wide_characters(data, _WIDE_CONTROLS):
        removed += [at + step for step in range(size)]
    places = np.unique(np.concatenate(removed))
    return _without(data, offsets - offsets[0], places) if len(places) else texts


def with_plain_whitespace(texts: pa.LargeStringArray, *, final: bool) -> pa.LargeStringArray:
    """Lines end in \\n and not in spaces, spaces are single, blank lines too. `final`: a text's end ends a line."""
    data, offsets = _data(texts), text_offsets(texts)
    texts = _one_byte_whitespace(data, offsets - offsets[0])
    data, offsets = _data(texts), text_offsets(texts)
    # Without spaces before white space and, when it is the final one, before the end of a text.
    before_white = np.zeros(len(data), dtype=bool)
    before_white[:-1] = (data[1:] == _SPACE) | (data[1:] == _LINE_END)
    before_white[offsets[1:][np.diff(offsets) > 0] - 1] = final
    texts = _without(data, offsets, np.flatnonzero((data == _SPACE) & before_white))
    data, offsets = _data(texts), text_offsets(texts)
    # Without line ends that two others precede in the same text.
    line_end, third = data == _LINE_END, np.zeros(len(data), dtype=bool)
    third[2:] = line_end[2:] & line_end[1:-1] & line_end[:-2]
    for step in (0, 1):
        starts = offsets[:-1] + step
        third[starts[starts < len(data)]] = False
    return _without(data, offsets, np.flatnonzero(third))


_SPACES, _LINE_ENDS = "\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), "\x85\u2028\u2029"
_PLAIN = bytes.maketrans(b"\t\x1f\r\v\f\x1c\x1d\x1e", b"  \n\n\n\n\n\n")


def _one_byte_whitespace(data: Bytes, offsets: Int64s) -> pa.LargeStringArray:
    """Every white space character made a space or \\n."""
    plain = np.frombuffer(bytearray(data.tobytes().translate(_PLAIN)), dtype=np.uint8)
    # A carriage return that \n follows in the same text is one line end with it.
    returns = np.flatnonzero((data[:-1] == 13) & (data[1:] == 10))
    removed = [returns[~np.isin(returns + 1, offsets)]]
    for byte, characters in () if _is_ascii(data) else ((_SPACE, _SPACES), (_LINE_END, _LINE_ENDS)):
        for at, size in wide_characters(data, characters):
            plain[at] = byte
            removed += [at + step for step in range(1, size)]
    return _without(plain, offsets, np.unique(np.concatenate(removed)))


def stripped(texts: pa.LargeStringArray) -> pa.LargeStringArray:
    """The texts without white space at both ends."""
    data, offsets = _data(texts), text_offsets(texts)
    offsets = offsets - offsets[0]
    filled = np.diff(offsets) > 0
    ends = np.concatenate((data[offsets[:-1][filled]], data[offsets[1:][filled] - 1]))
    # A byte from 0x80 on may belong to white space.
    return pc.utf8_trim_whitespace(texts) if ((ends <= 32) | (ends >= 0x80)).any() else texts


# ---- arrays of text as bytes ----


def _data(texts: pa.LargeStringArray) -> Bytes:
    """The bytes of all texts, end to end, without a copy."""
    offsets, buffer = text_offsets(texts), texts.buffers()[2]
    if buffer is None:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, dtype=np.uint8)[offsets[0] : offsets[-1]]


def _without(data: Bytes, offsets: Int64s, removed: Int64s) -> pa.LargeStringArray:
    """Texts that lie end to end in `data`, less the bytes at some places, which are sorted."""
    if len(removed):
        keep = np.ones(len(data), dtype=bool)
        keep[removed] = False
        data = data[keep]
        offsets = offsets - np.searchsorted(removed, offsets)
    buffers = pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(np.ascontiguousarray(data))
    return pa.LargeStringArray.from_buffers(len(offsets) - 1, *buffers)


def _is_ascii(data: Bytes) -> bool:
    return not len(data) or int(data.max()) < 0x80
