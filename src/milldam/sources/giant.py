"""One JSON line of any size -> the text of one field, in parts of bounded size.

The line is spooled to disk. A scan replaces every long string by a short mark, which leaves a small skeleton that the
ordinary parser reads; the mark found at the wanted field leads back to the bytes on disk, which are unescaped in parts.
Memory: one part and the skeleton, at most `_LARGEST_SKELETON`.
"""

from __future__ import annotations

import json
import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, Any

from milldam.sources.batch import MalformedError, TextRules
from milldam.sources.decoding import (
    HEAD_CHARACTERS,
    decode_json,
    is_sound,
    mend,
    mended,
    parse_json,
    require_mendable,
)

_PART = 1 << 20
_LONG_STRING = 1 << 16
_LARGEST_SKELETON = 16 << 20
LONG_TEXT = "a long text: "
"""Begins what stands for a long string in an outline."""
_QUOTE_OR_ESCAPE = re.compile(rb'["\\]')
# A cut must not fall into an escape, between the halves of a surrogate pair, or into a UTF-8 character.
_UNFINISHED = re.compile(
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|\\u[0-9a-fA-F]{0,3}|\\|[\xc2-\xf4][\x80-\xbf]*)\Z"
)


class GiantLine:
    """Fed the parts of a line in order; gives the text once the last part is there."""

    def __init__(self, path: list[str], spool: str | None, rules: TextRules) -> None:
        self._path, self._spool, self._rules = path, spool, rules
        self._file: IO[bytes] | None = None

    def feed(self, data: bytes, *, last: bool) -> Iterator[tuple[str, bool]]:
        """(part of the text, whether it is the last); raises MalformedError when the line holds no such text."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._spool)  # noqa: SIM115 - closed with the last part
        self._file.write(data)
        if last:
            file, self._file = self._file, None
            with file:
                yield from self._read(file)

    @staticmethod
    def outline(parts: Iterable[bytes], spool: str | None) -> Any:
        """The line's value with its long strings replaced by short ones, which begin with `LONG_TEXT`."""
        with tempfile.TemporaryFile(dir=spool) as file:
            for part in parts:
                file.write(part)
            return json.loads(_scan(file, LONG_TEXT)[0].decode("utf-8", "replace"))

    def _read(self, file: IO[bytes]) -> Iterator[tuple[str, bool]]:
        try:
            # A mark that no text of the input can foresee.
            mark = f"{uuid.uuid4()} "
            skeleton, strings = _scan(file, mark)
        except ValueError as error:
            raise MalformedError("bad_json", str(error)) from None
        value = self._find(skeleton)
        if not value.startswith(mark):
            yield mended(value, self._rules), True
            return
        start, stop = strings[int(value.removeprefix(mark))]
        # Once through before anything is handed on: what is wrong with it rejects the whole line.
        sound = self._check(_unescape(file, start, stop, self._rules))
        for text, last in _unescape(file, start, stop, self._rules):
            yield text if sound else mend(text, self._rules), last

    def _check(self, parts: Iterator[tuple[str, bool]]) -> bool:
        """Whether UTF-8 can hold the text as it is; raises MalformedError when it can't be mended."""
        head, sound = "", True
        for text, _ in parts:
            head += text[: max(0, HEAD_CHARACTERS - len(head))]
            sound = sound and is_sound(text)
        if not sound:
            require_mendable(head, self._rules)
        return sound

    def _find(self, skeleton: bytes) -> str:
        value = parse_json(skeleton, self._rules)
        field = ".".join(self._path)
        for name in self._path:
            if not isinstance(value, dict) or name not in value:
                raise MalformedError("no_field", f'no field "{field}"')
            value = value[name]
        if not isinstance(value, str):
            raise MalformedError("no_text", f'"{field}" is {type(value).__name__}, not text')
        return value


def _scan(file: IO[bytes], mark: str) -> tuple[bytes, list[tuple[int, int]]]:
    """The line with long strings marked, and where on disk each of those lies."""
    skeleton, strings = bytearray(), list[tuple[int, int]]()
    for is_string, start, stop in _spans(file):
        if is_string and stop - start > _LONG_STRING:
            skeleton += json.dumps(f"{mark}{len(strings)}").encode()
            strings.append((start, stop))
        else:
            text = _bytes_at(file, start, stop)
            skeleton += b'"' + text + b'"' if is_string else text
        if len(skeleton) > _LARGEST_SKELETON:
            raise ValueError("the line is too large, even without its long strings")
    return bytes(skeleton), strings


def _spans(file: IO[bytes]) -> Iterator[tuple[bool, int, int]]:
    """(inside a string, start, stop) of the stretches between quotes, quotes left out."""
    inside, start, position = False, 0, 0
    skip_to = 0
    file.seek(0)
    while block := file.read(_PART):
        for match in _QUOTE_OR_ESCAPE.finditer(block):
            at = position + match.start()
            if at < skip_to:
                continue
            if match[0] == b"\\":
                skip_to = at + 2
                continue
            yield inside, start, at
            inside, start = not inside, at + 1
        position += len(block)
        file.seek(position)
    if inside:
        raise ValueError("a string is not closed")
    yield False, start, position


def _bytes_at(file: IO[bytes], start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)


def _unescape(file: IO[bytes], start: int, stop: int, rules: TextRules) -> Iterator[tuple[str, bool]]:
    """(part of the text, whether it is the last); lone surrogates are still in it."""
    held = b""
    while start < stop:
        block = held + _bytes_at(file, start, min(stop, start + _PART))
        start = min(stop, start + _PART)
        cut = len(block)
        if start < stop and (unfinished := _unfinished(block)) is not None:
            cut = unfinished
        held = block[cut:]
        raw = decode_json(block[:cut], rules)
        try:
            yield json.loads(f'"{raw}"'), start >= stop
        except ValueError as error:
            raise MalformedError("bad_json", str(error)) from None


def _unfinished(block: bytes) -> int | None:
    tail = max(0, len(block) - 16)
    match = _UNFINISHED.search(block, tail)
    if match is None:
        return None
    # An escaped backslash before it would make the "escape" plain text: count them back.
    slashes = len(block[: match.start()]) - len(block[: match.start()].rstrip(b"\\"))
    return match.start() - 1 if slashes % 2 else match.start()
