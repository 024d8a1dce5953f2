"""A JSON text of any size -> the same records as JSON lines: the items of an array, or one value after the other.

Where an item ends is found by Python's JSON decoder; the reader of JSON lines does the rest. What follows a broken item
can't be told from it: the file is damaged from there on. Holds the item at hand.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator

from milldam.sources.compression import DamagedError

_BETWEEN = re.compile(r"[ \t\r\n,]*")
_DECODER = json.JSONDecoder(strict=False)


def as_json_lines(blocks: Iterator[bytes], most: int) -> Iterator[bytes]:
    """Blocks of a JSON text, or of JSON lines -> blocks of JSON lines. `most`: bytes that an item may have.

    >>> b"".join(as_json_lines(iter([b'[{"a":', b' 1},\\n {"a": [2, 3]}]']), 100))
    b'{"a": 1}\\n{"a": [2, 3]}\\n'
    """
    head = next(blocks, b"").removeprefix(codecs.BOM_UTF8)
    if is_json_lines(head):
        yield head
        yield from blocks
        return
    # A byte a character: where an item ends does not depend on what is no ASCII.
    text = head.decode("latin-1").lstrip()
    in_array, ended, lines = text.startswith("["), False, list[str]()
    text = text[in_array:]
    while not ended:
        block = next(blocks, None)
        ended = block is None
        text, lines, at, wrong = text + (block or b"").decode("latin-1"), [], 0, ""
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]
            if at == len(text) or (in_array and text[at] == "]"):
                break
            try:
                _, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                wrong = str(error)
                break
            if end == len(text) and not ended:
                break  # a number may go on
            # A line end in a string is as wrong as it was.
            lines.append(text[at:end].replace("\n", "\r"))
            at = end
        yield "".join(f"{line}\n" for line in lines).encode("latin-1")
        if text[at : at + 1] == "]" and in_array:
            yield from (b"" for _ in blocks)  # the checksum is at the end
            return
        text = text[at:]
        if wrong and (ended or len(text) > 2 * most):
            raise DamagedError(
                "truncated" if ended else "bad_json", f"an item is no JSON, cut off or too large ({wrong})"
            )
    if in_array:
        raise DamagedError("truncated", "the JSON array is not closed: the file is cut off, or a bracket is missing")


def is_json_lines(head: bytes) -> bool:
    """Whether the lines of a file are records by themselves, as far as its head tells."""
    line = head.strip().partition(b"\n")[0].rstrip()
    return line.startswith(b"{") and line.endswith(b"}")
