"""A JSON text of any size -> the same records as JSON lines: the items of an array, or one value after the other.

Nothing is parsed: brackets are counted and strings passed over; the reader of JSON lines does the rest, and what is
broken in one item is its reject alone. A lost bracket or quote can't be made good: what follows is taken into its item,
and the end is an error that says so. Holds a block. JSON lines pass as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from milldam.sources.compression import DamagedError

HEAD_BYTES = 1 << 16
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
# Sets of what may come, not of what may not: those are looked up in a table, three times as fast.
_INNER = rb"[\x00-!#-\[\]-\xff]*+"
_OUTER = rb"[\x00-!#-Z\\^-z|~-\xff]*+"
_BETWEEN = rb"[\x00-!#-+\--Z\\^-z|~-\xff]++"


def _all_of(pattern: bytes) -> bytes:
    """Repeated as often as it goes, and never taken back.

    Not by "*+", which Python before 3.11.5 does wrong where what is repeated is more than a set (gh-106052).
    """
    return rb"(?>(?:" + pattern + rb")*)"


_CHARACTERS = _INNER + _all_of(rb"\\." + _INNER)
_STRING = rb'"' + _CHARACTERS + rb'"'
_PLAIN = _OUTER + _all_of(_STRING + _OUTER)
_LEAF = rb"(?:\{" + _PLAIN + rb"\}|\[" + _PLAIN + rb"\])"
# Up to the next bracket, or a string that goes on beyond the block; past brackets that hold no others.
_IN_ITEM = re.compile(_PLAIN + _all_of(_LEAF + _PLAIN), re.DOTALL)
_IN_ARRAY = re.compile(_all_of(_BETWEEN + rb"|" + _STRING + rb"|" + _LEAF), re.DOTALL)
_OUTSIDE = re.compile(_all_of(_BETWEEN + rb"|" + _STRING), re.DOTALL)
_IN_STRING = re.compile(_CHARACTERS, re.DOTALL)
_INDENT = re.compile(rb"\n[ \t\r]+")


def as_json_lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Blocks of a JSON text, or of JSON lines -> blocks of JSON lines.

    >>> b"".join(as_json_lines(iter([b'[{"a":', b' 1},\\n {"a": [2, 3]}]'])))
    b'{"a": 1}\\n{"a": [2, 3]}\\n'
    """
    head = next(blocks, b"")
    if is_json_lines(head):
        yield head
        yield from blocks
        return
    items = _Items()
    yield items.feed(head.removeprefix(_BOM))
    for block in blocks:
        yield items.feed(block)
    items.finish()


def is_json_lines(head: bytes) -> bool:
    """Whether the lines of a file are records by themselves, as far as its head tells."""
    line, _, rest = head.removeprefix(_BOM).lstrip(_BLANK).partition(b"\n")
    if not line.startswith(b"{"):
        return not line.startswith(b"[")
    if not rest:
        return True
    try:
        json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        # A broken record among others, unless it goes on: {"data": [ on a line of its own begins no record.
        return rest.lstrip(_BLANK).startswith(b"{") and not line.rstrip(_BLANK).endswith((b"[", b"{", b",", b":"))
    return True


class _Items:
    """Where it stands: in the array or not, how many brackets of an item are open, in a string or not."""

    def __init__(self) -> None:
        self._in_array = self._in_string = False
        self._depth = self._position = self._began = 0
        self._held = b""

    def feed(self, block: bytes) -> bytes:
        """The block with a line end after each item, and nowhere else."""
        data = self._held + block
        # Half an escape is held until the next block.
        decided = len(data) - (len(data) - len(data.rstrip(b"\\"))) % 2
        data, self._held = data[:decided], data[decided:]
        pieces, taken, at = [], 0, 0
        while True:
            pattern = _IN_ITEM if self._depth else _IN_ARRAY if self._in_array else _OUTSIDE
            match = (_IN_STRING if self._in_string else pattern).match(data, at)
            assert match is not None
            if (at := match.end()) == len(data):
                break
            instead = self._pass(data[at : at + 1], self._position + at)
            at += 1
            if instead is not None:
                pieces += [data[taken : at - 1].replace(b"\n", b"\r"), instead]
                taken = at
        self._position += len(data)
        return _INDENT.sub(b"\n", b"".join([*pieces, data[taken:].replace(b"\n", b"\r")]))

    def _pass(self, byte: bytes, position: int) -> bytes | None:
        """Go past a byte that means something; what to write instead of it, where that is something else."""
        if self._in_string or byte == b'"':
            self._in_string = not self._in_string
        elif byte in b"{[":
            if not self._depth:
                self._began = position
                if byte == b"[" and not self._in_array:
                    self._in_array = True
                    return b""
            self._depth += 1
        elif byte in b"}]" and self._depth:
            self._depth -= 1
            return byte + b"\n" if not (self._in_array or self._depth) else None
        elif byte == b"]" and self._in_array:
            self._in_array = False
            return b"\n"
        elif byte == b",":
            return b"\n" if self._in_array else b""
        return None

    def finish(self) -> None:
        """Raises DamagedError when the text can't end here."""
        if self._depth or self._in_string:
            raise DamagedError(
                "truncated",
                f"the JSON that begins at byte {self._began:,} is not closed: the file is cut off, or a bracket or a "
                "quote is missing and what follows could not be told from it",
            )
        if self._in_array:
            raise DamagedError(
                "truncated", "the JSON array is not closed: the file is cut off, or a bracket is missing"
            )
