"""The plan's units on disk: written once, read in order or by number, never held.

`units.jsonl` has a unit a line; `units.offsets` for each the byte where its line begins and its size in bytes of
input, as two int64, so that any unit is found by one read, and the sizes of a million are summed at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from milldam.files import explain_os_errors
from milldam.sealed import record_of

_ENTRY = np.dtype([("offset", "<i8"), ("size", "<i8")])
_HELD, _BUFFER_BYTES = 4096, 1 << 16


class UnitList:
    """A list of units in a folder: `units.jsonl` for the name "units"."""

    def __init__(self, folder: Path, name: str) -> None:
        self._lines, self._offsets = folder / f"{name}.jsonl", folder / f"{name}.offsets"
        self._opened: tuple[IO[bytes], IO[bytes]] | None = None
        """Offsets and lines, open from the first unit that is asked for on: units come one after the other."""

    def records(self) -> dict[str, dict[str, Any]]:
        """Size and hash of both files, by their names."""
        return {path.name: record_of(path) for path in (self._lines, self._offsets)}

    def write(self, units: Iterable[Any]) -> int:
        """Write units (with `as_json()`, and `size` where they have one); how many there are."""
        with (
            explain_os_errors(self._lines),
            self._lines.open("w", encoding="utf-8") as lines,
            self._offsets.open("wb") as offsets,
        ):
            count = at = 0
            held: list[tuple[int, int]] = []
            for unit in units:
                # ASCII, with escapes: a file's name need not be UTF-8, and a character is a byte.
                line = json.dumps(unit.as_json()) + "\n"
                lines.write(line)
                held.append((at, getattr(unit, "size", 0)))
                at, count = at + len(line), count + 1
                if len(held) == _HELD:
                    offsets.write(np.array(held, _ENTRY).tobytes())
                    held.clear()
            offsets.write(np.array(held, _ENTRY).tobytes())
            for file in (lines, offsets):
                file.flush()
                os.fsync(file.fileno())
        return count

    def replace(self, other: UnitList) -> None:
        """Take the place of another list. The lines last: they are the plan."""
        self.close()
        other.close()
        self._offsets.replace(other._offsets)
        self._lines.replace(other._lines)

    def remove(self) -> None:
        self.close()
        self._lines.unlink(missing_ok=True)
        self._offsets.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; they are opened again when a unit is asked for."""
        for file in self._opened or ():
            file.close()
        self._opened = None

    def __len__(self) -> int:
        return self._offsets.stat().st_size // _ENTRY.itemsize

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of input of each unit."""
        sizes: npt.NDArray[np.int64] = np.fromfile(self._offsets, _ENTRY)["size"]
        return sizes

    def lines(self) -> Iterator[bytes]:
        with self._lines.open("rb") as lines:
            yield from lines

    def at(self, number: int, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """One unit, by two reads, which for units in order are mostly from buffers."""
        if self._opened is None:
            self._opened = self._offsets.open("rb"), self._lines.open("rb", buffering=_BUFFER_BYTES)
        offsets, lines = self._opened
        offsets.seek(number * _ENTRY.itemsize)
        lines.seek(int.from_bytes(offsets.read(8), "little", signed=True))
        return parse(json.loads(lines.readline()))
