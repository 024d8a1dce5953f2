"""Whether a large row fits into the budget, asked before it is held: by what it takes at least to be read and to be
given to the function, in Python and in Arrow. Rows of usual size are not looked at.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import ResourceError, Setting
from milldam.mapping.rows import Rows, byte_size, column
from milldam.memory import format_size, release, usage
from milldam.run.planning import WORK_BYTES, WORKER_BYTES

MARGIN, ROOM_BYTES = 1.15, 12 * 10**6
"""What is added to what a batch takes: batches differ, and a shard waits to be written."""
_NUMBER_OBJECT = 40
"""A number in a list of Python: the place in the list, and the object."""
_GROWING = 1.25
"""A string that is put together of pieces, as where escapes are, is larger while it grows."""
_STRUCTURE = np.zeros(256, dtype=np.int64)
_STRUCTURE[[ord(mark) for mark in ",:[{"]] = [_NUMBER_OBJECT, 16, 88, 200]
"""What stands for an object in JSON, outside of strings: about its bytes."""
_SURROGATE, _BEYOND_LATIN = re.compile(rb"\\u[dD][89abAB]"), re.compile(rb"\\u(?!00)")


@dataclass(frozen=True, slots=True)
class Room:
    """What the budget leaves a process, when it has to itself what the process that planned does not hold."""

    limit_bytes: int
    held_bytes: int
    """What the calling program held before, which comes on top of what is given."""
    parent: tuple[str, int]
    """Machine and process that planned."""
    format: str
    """What the function is given: "python", "numpy" or "arrow"."""

    def fits(self, needed: float) -> bool:
        if needed <= WORK_BYTES:  # which every plan leaves
            return True
        if self._total(needed) > self.limit_bytes:
            release()
        return self._total(needed) <= self.limit_bytes

    def _total(self, needed: float) -> int:
        machine, pid = self.parent
        elsewhere = machine == os.uname().nodename and pid != os.getpid()
        return usage().anonymous + (usage(pid).anonymous if elsewhere else 0) + int(MARGIN * needed) + ROOM_BYTES

    def refusal(self, needed: float, size: int, where: str, *, by_column: bool = False) -> ResourceError:
        """Of a row of so many bytes, which takes `needed`: what would do. `by_column`: columns are read one by one."""
        # With more memory the work may be done in a process of its own, which weighs something, too. And none weighs
        # the same twice: a little more, so that the size named is not refused in turn.
        apart = WORKER_BYTES if self.parent[1] == os.getpid() else 0
        least = max(0, (self._total(needed) + apart) * 103 // 100 - self.held_bytes) // 10**6 + 1
        return ResourceError(
            f"{where}: {format_size(size)}, which take about {format_size(needed)} to be read and mapped: more than "
            f"a budget of {format_size(self.limit_bytes - self.held_bytes)} leaves. It takes at least ",
            Setting("memory", f"{least}MB"),
            *(
                ("; or read other columns than the large one with ", Setting("columns", ["..."]), ".")
                if by_column
                else (".",)
            ),
        )

    def for_call(self, rows: Rows, kept: list[str]) -> int:
        """What a call takes at least beside the rows: as the function is given them, and as Arrow has what is kept."""
        if not isinstance(rows, dict):
            number = _NUMBER_OBJECT if self.format == "python" else 0
            return sum(_python_bytes(one, number) for one in rows.columns) if self.format != "arrow" else 0
        stays = byte_size({name: column(rows, name) for name in kept})
        # Python keeps the UTF-8 of a text that is not ASCII, once Arrow has asked for it.
        return stays if _is_ascii(rows) else 2 * stays


def _is_ascii(rows: dict[str, list[Any]]) -> bool:
    return all(value.isascii() for values in rows.values() for value in values if isinstance(value, str))


def _python_bytes(array: pa.Array, number: int) -> int:
    """Of a column's values as Python objects; `number`: bytes for each that is no text."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        weight = TextWeight()
        offsets = np.frombuffer(array.buffers()[1], dtype=np.int32 if pa.types.is_string(kind) else np.int64)
        if array.buffers()[2] is not None:
            weight.add(memoryview(array.buffers()[2])[offsets[array.offset] : offsets[array.offset + len(array)]])
        return weight.as_text
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _python_bytes(array.flatten(), number)
    if pa.types.is_struct(kind):
        return sum(_python_bytes(array.field(at), number) for at in range(kind.num_fields))
    return int(array.nbytes) if pa.types.is_binary(kind) else number * len(array)


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
