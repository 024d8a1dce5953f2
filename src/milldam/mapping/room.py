"""Whether a large row fits into the budget, asked before it is held: by what it takes at least to be read and to be
given to the function, in Python and in Arrow. Rows of usual size are not looked at.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from milldam.errors import ResourceError, Setting
from milldam.memory import format_size, release, usage
from milldam.run.planning import WORK_BYTES, WORKER_BYTES
from milldam.sources.large_rows import NUMBER_OBJECT, TextWeight
from milldam.sources.rows import Rows, byte_size, column

MARGIN, ROOM_BYTES = 1.15, 12 * 10**6
"""What is added to what a batch takes: batches differ, and a shard waits to be written."""


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
            number = NUMBER_OBJECT if self.format == "python" else 0
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
