"""A row larger than a batch, which comes in parts: put together where there is room for it.

What it takes is weighed as it comes, in Python and in Arrow, before it is held. Rows of usual size are not looked at.
"""

from __future__ import annotations

import io
import re
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milldam.errors import ResourceError
from milldam.sources.places import Places

NUMBER_OBJECT = 40
"""Bytes of a number in a list of Python: the place in the list, and the object."""
_GROWING = 1.25
"""A string that is put together of pieces, as where escapes are, is larger while it grows."""
_STRUCTURE = np.zeros(256, dtype=np.int64)
_STRUCTURE[[ord(mark) for mark in ",:[{"]] = [NUMBER_OBJECT, 16, 88, 200]
"""What stands for an object in JSON, outside of strings: about its bytes."""
_SURROGATE, _BEYOND_LATIN = re.compile(rb"\\u[dD][89abAB]"), re.compile(rb"\\u(?!00)")


class Room(Protocol):
    """What the budget leaves."""

    @property
    def format(self) -> str:
        """What rows become: "python", "numpy" or "arrow"."""
        ...

    def fits(self, needed: float) -> bool: ...

    def refusal(self, needed: float, size: int, where: str, *, by_column: bool = False) -> ResourceError:
        """Of a row of so many bytes, which takes `needed`. `by_column`: columns are read one by one."""
        ...


class LargeRow:
    """Parts that are put together where there is room for all of them; else only their size is kept."""

    def __init__(self, room: Room | None, places: Places, kind: type[TextWeight]) -> None:
        self._room, self._places = room, places
        self._weight = kind(room.format if room is not None else "python")
        self._held = io.BytesIO()
        self._fits = True

    def add(self, part: bytes | memoryview) -> None:
        if self._room is not None:
            self._weight.add(part)
            self._fits = self._fits and self._room.fits(self._weight.needed - self._held.tell())
        if self._fits:
            self._held.write(part)
        elif self._held.tell():
            self._held = io.BytesIO()

    def whole(self) -> bytes:
        """The bytes of all parts, without a copy. Raises ResourceError when there is no room for them."""
        if not self._fits and self._room is not None:
            raise self._room.refusal(self._weight.needed, self._weight.bytes, str(self._places.next))
        return self._held.getvalue()


class TextWeight:
    """UTF-8 as it comes, in parts: how much memory Python takes for it as text."""

    _BLOCK = 1 << 20

    def __init__(self, format: str = "python") -> None:
        self.bytes = self.characters = self._highest = 0
        self._format = format

    def add(self, part: bytes | memoryview) -> None:
        data = np.frombuffer(part, dtype=np.uint8)
        self.bytes += len(data)
        for start in range(0, len(data), self._BLOCK):
            block = data[start : start + self._BLOCK]
            self._highest = max(self._highest, int(block.max()))
            # All but the bytes 80 to BF, which go on with a character.
            self.characters += len(block) - int(np.count_nonzero((block & 0xC0) == 0x80))

    @property
    def width(self) -> int:
        """Bytes of a character: as many as the highest one takes, in all of the text."""
        return 4 if self._highest >= 0xF0 else 2 if self._highest >= 0xC4 else 1

    @property
    def as_text(self) -> int:
        return self.width * self.characters

    @property
    def needed(self) -> float:
        """Its bytes, and what the function is given of them."""
        return self.bytes + (self.as_text if self._format != "arrow" else 0)


class JsonWeight(TextWeight):
    """A line of JSON as it comes, in parts: how much memory reading it takes."""

    def __init__(self, format: str = "python") -> None:
        super().__init__(format)
        self._escaped = self._objects = self._outside = 0
        self._inside = False
        self._before = b""

    def add(self, part: bytes | memoryview) -> None:
        super().add(part)
        data = self._before + bytes(part)
        self._before = b""
        if b"\\" in data:
            wide = 4 if _SURROGATE.search(data) else 2 if _BEYOND_LATIN.search(data) else 1
            self._escaped = max(self._escaped, wide)
            data = data.replace(b"\\\\", b"")
            self._before = b"\\" if data.endswith(b"\\") else b""
            data = data.replace(b'\\"', b"")
        self._count(np.frombuffer(data, dtype=np.uint8))

    def _count(self, marks: npt.NDArray[np.uint8]) -> None:
        """The values that stand outside of strings."""
        quotes = marks == ord('"')
        if self._inside and not quotes.any():
            return
        outside = (np.cumsum(quotes, dtype=np.int64) + self._inside) % 2 == 0
        self._outside += int(np.count_nonzero(outside))
        self._objects += int(_STRUCTURE[marks[outside]].sum())
        self._inside = bool(len(outside)) and not outside[-1]

    @property
    def needed(self) -> float:
        """Its bytes and its text, then its text and its value; then the value, lists of it that the function may
        change, and what Arrow makes of it."""
        value = max(self.width, self._escaped) * (self.characters - self._outside) + self._objects
        reading = self.as_text + max(self.bytes, value * (_GROWING if self._escaped else 1))
        return max(reading, value + self._objects // 2 + self.bytes)
