"""Memory of a mapped function: which batches run at a time, whether a row fits at all, and whether more and more stays.

The memory gate: workers on one machine start large batches only when all of them together stay within the budget. A
batch may start when three things fit: what every worker holds now (including a row that was read and waits), what
running batches are still expected to take, and what this batch is expected to take. It may also start when no other
batch runs. What a batch takes is learned on the way: workers note the most that a batch of each size took. A batch
larger than any before is expected to take proportionally more. The gate decides when a batch runs, never what comes out
of it.

Room: whether a large row fits into the budget, asked before it is held: by what it takes at least to be read and to be
given to the function, in Python and in Arrow. Rows of usual size are not looked at.

The leak check: a function that keeps more memory with every call stops the run before the budget is broken.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from milldam.errors import ResourceError, Setting
from milldam.memory import (
    allowance,
    format_size,
    held_bytes,
    inherited,
    is_alive,
    pid_of,
    process_identity,
    release,
    stays_shared,
    usage,
)
from milldam.run.pools import WORK_BYTES, WORKER_BYTES, enough_memory
from milldam.sources.rows import NUMBER_OBJECT, Rows, TextWeight, byte_size, column

SMALL_BYTES = 1 << 18
"""Batches below this size pass without being counted."""
_POLL_SECONDS, _SAMPLE_SECONDS = 0.02, 0.01
_READING = 3
"""Times its size: what reading a large row takes."""
_AT_LEAST = 6
"""Times its size: what a batch larger than any before is expected to take at least."""
MARGIN, ROOM_BYTES = 1.15, 12 * 10**6
"""What is added to what a batch takes: batches differ, and a shard waits to be written."""
_LARGE_TIMES = 2
"""For a row larger than a batch: some readers hold it, and what it left behind, until the next one."""
_SMALLEST_GROWTH = 10**5
_FEW = 4
"""Calls that say little about growth."""


class PeakMeter:
    """The peak of this process's anonymous memory while the block runs, sampled a hundred times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="milldam-peak", daemon=True)

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLE_SECONDS):
            self.peak = max(self.peak, usage().anonymous)

    def __enter__(self) -> PeakMeter:
        self.peak = usage().anonymous
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.peak = max(self.peak, usage().anonymous)


@dataclass(frozen=True, slots=True)
class MemoryGate:
    """What every worker needs to know about the gate; it pickles."""

    folder: Path
    """Of the run."""
    limit_bytes: int
    """For all workers and the process that planned."""
    first: tuple[int, int]
    """Bytes of the first batch, and what it took."""
    parent: tuple[str, int]
    """Machine and process that planned."""
    idle_bytes: int = 0
    """What a worker holds once the function has loaded what it keeps."""

    def join(self) -> None:
        """Count this process from now on, even while it has no large batch."""
        with self.board() as board:
            board.workers[process_identity(os.getpid())] = None

    @contextlib.contextmanager
    def passed(self, size: int, *, is_first: bool = False) -> Iterator[None]:
        """Wait until a batch of this size fits; count it until the block ends. `is_first`: of this process."""
        if size < SMALL_BYTES:
            yield
            return
        while not self.admits(size):
            time.sleep(_POLL_SECONDS)
        before = usage().anonymous
        try:
            with PeakMeter() as meter:
                yield
        finally:
            with self.board() as board:
                board.workers[process_identity(os.getpid())] = None
                # What the function loads and keeps in its first call is no part of the next batch.
                stays = usage().anonymous if is_first else 0
                board.learn(size, meter.peak - max(before, stays))

    def admits(self, size: int) -> bool:
        """Whether a batch of this size may start now; then it counts as running."""
        with self.board() as board:
            board.forget_the_dead()
            me, wanted = process_identity(os.getpid()), board.expected(size)
            own = max(held_bytes(), self.idle_bytes)
            held = own + _held_by(self.parent) + board.held_by_others(me, self.idle_bytes, inherited()[1])
            fits = held + wanted <= self.limit_bytes or not board.is_busy
            board.workers[me] = (own, wanted) if fits else None
            return fits

    @contextlib.contextmanager
    def board(self) -> Iterator[Board]:
        """What the workers of this machine know of each other, for reading and changing; one process at a time."""
        path = gate_path(self.folder)
        with path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            board = Board.parse(path.read_bytes()) if path.exists() else Board()
            if not board.taken:
                board.learn(*self.first)
            yield board
            # By rename: a process that is killed here must not make the others forget who is at work.
            new = path.with_suffix(".new")
            new.write_bytes(json.dumps(asdict(board)).encode())
            new.replace(path)


@dataclass(slots=True)
class Board:
    """Which workers run a large batch on this machine, and what was learned of batches."""

    workers: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Process -> its memory when the batch started, and what the batch is expected to take; None: it reads or waits."""
    taken: dict[int, int] = field(default_factory=dict)
    """Size of a batch in bits -> the most that one took."""
    largest: int = 0
    """Bytes of the largest batch."""

    @classmethod
    def parse(cls, data: bytes) -> Board:
        found = json.loads(data)
        workers = {name: entry and (entry[0], entry[1]) for name, entry in found["workers"].items()}
        return cls(workers, {int(bits): most for bits, most in found["taken"].items()}, found["largest"])

    def learn(self, size: int, taken: int) -> None:
        bits = max(1, size).bit_length()
        self.largest = max(self.largest, size)
        self.taken[bits] = max(self.taken.get(bits, 0), taken)

    def expected(self, size: int) -> int:
        """What a batch of a size takes: as much as any up to that size took; more where none was so large."""
        bits = size.bit_length()
        most = max((taken for other, taken in self.taken.items() if other <= bits), default=0)
        larger = [taken for other, taken in self.taken.items() if other >= bits]
        if larger:
            return max(most, min(larger))
        # Small batches that took next to nothing say nothing about a larger one.
        return max(most << (bits - max(self.taken)), _AT_LEAST * size)

    def forget_the_dead(self) -> None:
        for name in [name for name in self.workers if not is_alive(name)]:
            del self.workers[name]

    @property
    def is_busy(self) -> bool:
        """Whether any worker runs a large batch."""
        return any(entry is not None for entry in self.workers.values())

    def held_by_others(self, me: str, idle_bytes: int = 0, shared_bytes: int = 0) -> int:
        """What all other workers hold now, or will hold; `idle_bytes`: what each will hold at least.

        `shared_bytes`: what of that each of them shares with this one.
        """
        others = {other: entry for other, entry in self.workers.items() if other != me}
        held = (max(usage(pid_of(other)).anonymous, idle_bytes, sum(entry or ())) for other, entry in others.items())
        held = (max(0, one - shared_bytes) for one in held)
        # One of those without a batch may be reading a row as large as any.
        reading = _READING * self.largest if None in others.values() else 0
        return sum(held) + reading


def this_process() -> tuple[str, int]:
    """Its machine and number."""
    return os.uname().nodename, os.getpid()


def _held_by(process: tuple[str, int]) -> int:
    """Memory of another process, if it is one of this machine."""
    machine, pid = process
    return usage(pid).anonymous if machine == os.uname().nodename and pid != os.getpid() else 0


def gate_path(folder: Path) -> Path:
    return folder / f"gate-{os.uname().nodename}.json"


def remove_gates(folder: Path) -> None:
    """Forget what an earlier run noted: a process of now may have the number of one that was killed."""
    for path in folder.glob("gate-*"):
        path.unlink(missing_ok=True)


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

    @property
    def is_parent(self) -> bool:
        """Whether this process is the one that planned."""
        return self.parent == this_process()

    def _total(self, needed: float) -> int:
        return held_bytes() + _held_by(self.parent) + int(MARGIN * needed) + ROOM_BYTES

    def refusal(self, needed: float, size: int, where: str, *, by_column: bool = False) -> ResourceError:
        """Of a row of so many bytes, which takes `needed`: what would do. `by_column`: columns are read one by one."""
        # With more memory the work may be done in a process of its own, which weighs something, too, as does the one
        # that forks it.
        apart = 2 * WORKER_BYTES - stays_shared(WORKER_BYTES) if self.is_parent else 0
        other = ("; or read other columns than the large one with ", Setting("columns", ["..."])) if by_column else ()
        return ResourceError(
            f"{where}: {format_size(size)}, which take about {format_size(needed)} to be read and mapped: more than "
            f"a budget of {format_size(self.limit_bytes - self.held_bytes)} leaves. It takes at least ",
            enough_memory(self._total(needed) + apart, self.held_bytes),
            *other,
            ".",
        )

    def for_call(self, rows: Rows, kept: list[str]) -> int:
        """What a call takes at least beside the rows: as the function is given them, and as Arrow has what is kept."""
        if not isinstance(rows, dict):
            number = NUMBER_OBJECT if self.format == "python" else 0
            return sum(_python_bytes(one, number) for one in rows.columns) if self.format != "arrow" else 0
        stays = byte_size({name: column(rows, name) for name in kept})
        # Python keeps the UTF-8 of a text that is not ASCII, once Arrow has asked for it.
        texts = (value for values in rows.values() for value in values if isinstance(value, str))
        return stays if all(map(str.isascii, texts)) else 2 * stays


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


@dataclass(slots=True)
class LeakCheck:
    """Compares this process's memory after each batch with what the budget leaves it. Reads one small file a batch."""

    most_bytes: int
    """What the budget leaves this worker."""
    batch_bytes: int
    name: str
    """Of the function."""
    is_parent: bool
    """This process planned the run and can't be replaced by a fresh one."""
    calls: int = 0
    first: int = 0
    """Memory after the first call, which may load something that stays."""
    last: int = field(default_factory=lambda: usage().anonymous)
    """Memory after the last call."""
    read: int = 0
    """What was read since the last call: the batch, and perhaps a large row that follows it."""
    leak: tuple[object, ...] = ()
    """Why another batch would be too much, as parts of a message; empty while all is well."""

    def begin(self, *, is_first: bool) -> None:
        """Before a batch. Raises ResourceError when too much was held after the last one; not before the first of a
        unit, since a worker that was too large has just been replaced."""
        if self.leak and (self.is_parent or not is_first):
            raise ResourceError(*self.leak)
        self.read = max(0, usage().anonymous - self.last)

    def end(self, size: int) -> None:
        """After a batch of this size: is more held than the budget leaves, now or probably after the next one?"""
        is_large = size > self.batch_bytes
        most = allowance(self.most_bytes) + (_LARGE_TIMES * size if is_large else 0)
        held = self._held()
        self.calls += 1
        if self.calls == 1:
            self.first = held
        if self._after_next(held, is_large=is_large) > most:
            gc.collect()
            release()
            held = self._held()
        self.leak = self._told(held) if self._after_next(held, is_large=is_large) > most else ()

    def _held(self) -> int:
        self.last = usage().anonymous
        return self.last - self.read

    def _growth(self, held: int) -> int:
        """Bytes a call, on average since the first."""
        return max(0, held - self.first) // max(1, self.calls - 1)

    def _after_next(self, held: int, *, is_large: bool) -> int:
        return held + (self._growth(held) if self.calls > _FEW and not is_large else 0)

    def _told(self, held: int) -> tuple[object, ...]:
        growth = self._growth(held)
        keeps = f"the function keeps about {format_size(growth)} more after each call (a default argument, a global, "
        what = keeps + "a cache?)" if growth >= _SMALLEST_GROWTH else "the function loads that much and keeps it"
        here = (" (with ", Setting("workers", 2), " or more: this one is the program)") if self.is_parent else ()
        most = allowance(self.most_bytes)
        return (
            f"{self.name}: between two calls a worker holds {format_size(held)}, too much for the "
            f"{format_size(most)} that the budget leaves it: {what}. Every finished unit is safe.\n"
            "Let it keep less; or use a smaller ",
            Setting("shard_size"),
            ", so that workers are replaced between units",
            *here,
            "; or give more ",
            Setting("memory"),
            ".",
        )
