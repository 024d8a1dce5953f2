"""Workers of a run on one machine take turns with large batches, so that together they stay within the budget.

A batch may begin when the memory that all of them hold now (a row that was read and waits counts, too), what those at
work will still take, and what this batch will take fit into the budget; or when nobody else is at work. What a batch
takes is learned as the work goes on: every worker notes the most that a batch of a size took and gave back. A batch
larger than any before is taken to need as much more as it is larger. The result does not depend on any of this: only
when a batch is worked on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milldam.memory import usage

SMALL_BYTES = 1 << 18
"""Batches of fewer bytes need no turn."""
_POLL_SECONDS, _SAMPLE_SECONDS = 0.02, 0.01
_READING = 3
"""Times its size: what reading a large row takes."""
_AT_LEAST = 6
"""Times its size: what a batch is expected to take that is larger than any before."""
_STARTED = 19
"""Of the fields that follow the name in /proc/PID/stat: when it began."""


class PeakMeter:
    """The most anonymous memory that this process has while the block runs, looked at a hundred times a second."""

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
class Turns:
    """What every worker needs to know; it pickles."""

    folder: Path
    """Of the run."""
    limit_bytes: int
    """For all of them, and the process that planned."""
    first: tuple[int, int]
    """Bytes of the first batch, and what it took."""
    parent: tuple[str, int]
    """Machine and process that planned."""
    idle_bytes: int = 0
    """What a worker holds once the function has loaded what it keeps."""
    begun: list[int] = field(default_factory=list)
    """Bytes of the first batch of this process, when it had one."""

    def join(self) -> None:
        """Be counted from now on, also while no batch is large."""
        with self._table() as table:
            table.workers[_name(os.getpid())] = None

    @contextlib.contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Wait until a batch of so many bytes fits; then it is counted until the block is left."""
        is_first = not self.begun
        if is_first:
            self.begun.append(size)
        if size < SMALL_BYTES:
            yield
            return
        while not self._enter(size):
            time.sleep(_POLL_SECONDS)
        before = usage().anonymous
        try:
            with PeakMeter() as meter:
                yield
        finally:
            with self._table() as table:
                table.workers[_name(os.getpid())] = None
                # What the function loads in its first call, and keeps, is no part of the next batch.
                stays = usage().anonymous if is_first else 0
                table.learn(size, meter.peak - max(before, stays))

    def _enter(self, size: int) -> bool:
        with self._table() as table:
            table.forget_the_dead()
            me, wanted = _name(os.getpid()), table.expected(size)
            own = max(usage().anonymous, self.idle_bytes)
            held = own + self._parent_bytes() + table.held_besides(me, self.idle_bytes)
            fits = held + wanted <= self.limit_bytes or not table.is_at_work
            table.workers[me] = (own, wanted) if fits else None
            return fits

    def _parent_bytes(self) -> int:
        machine, pid = self.parent
        return usage(pid).anonymous if machine == os.uname().nodename else 0

    @contextlib.contextmanager
    def _table(self) -> Iterator[_Table]:
        path = turns_path(self.folder)
        with path.with_suffix(".lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = _Table.parse(path.read_bytes()) if path.exists() else _Table()
            if not table.taken:
                table.learn(*self.first)
            yield table
            # Whole or not at all: who is killed here must not make the others forget who is at work.
            new = path.with_suffix(".new")
            new.write_bytes(table.as_bytes())
            new.replace(path)


@dataclass(slots=True)
class _Table:
    """Who is at work on this machine, and what was learned of batches."""

    workers: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    """Process -> memory when its batch began, and what its batch is expected to take; None: it reads, or waits."""
    taken: dict[int, int] = field(default_factory=dict)
    """Size of a batch in bits -> the most that one took."""
    largest: int = 0
    """Bytes of the largest batch."""

    @classmethod
    def parse(cls, data: bytes) -> _Table:
        found: dict[str, Any] = json.loads(data)
        workers = {name: entry and (entry[0], entry[1]) for name, entry in found["workers"].items()}
        return cls(workers, {int(bits): most for bits, most in found["taken"].items()}, found["largest"])

    def as_bytes(self) -> bytes:
        return json.dumps({"workers": self.workers, "taken": self.taken, "largest": self.largest}).encode()

    def learn(self, size: int, taken: int) -> None:
        bits = max(1, size).bit_length()
        self.largest = max(self.largest, size)
        self.taken[bits] = max(self.taken.get(bits, 0), taken)

    def expected(self, size: int) -> int:
        """What a batch of a size takes: as much as those up to its size took; more where there was none so large."""
        bits = size.bit_length()
        most = max((taken for other, taken in self.taken.items() if other <= bits), default=0)
        larger = [taken for other, taken in self.taken.items() if other >= bits]
        if larger:
            return max(most, min(larger))
        # Where those before took next to nothing, that tells nothing of a larger one.
        return max(most << (bits - max(self.taken)), _AT_LEAST * size)

    def forget_the_dead(self) -> None:
        for name in [name for name in self.workers if _name(_number(name)) != name]:
            del self.workers[name]

    @property
    def is_at_work(self) -> bool:
        """Whether anyone is."""
        return any(entry is not None for entry in self.workers.values())

    def held_besides(self, me: str, idle_bytes: int = 0) -> int:
        """What all others hold now, or will when they are at work; `idle_bytes`: what each will hold at least."""
        others = {other: entry for other, entry in self.workers.items() if other != me}
        held = (max(usage(_number(other)).anonymous, idle_bytes, sum(entry or ())) for other, entry in others.items())
        # One of those that are not at work may be reading a row as large as any.
        reading = _READING * self.largest if None in others.values() else 0
        return sum(held) + reading


def this_process() -> tuple[str, int]:
    """Its machine and number."""
    return os.uname().nodename, os.getpid()


def turns_path(folder: Path) -> Path:
    return folder / f"turns-{os.uname().nodename}.json"


def remove_turns(folder: Path) -> None:
    """When nobody is at work any more."""
    for path in folder.glob("turns-*"):
        path.unlink(missing_ok=True)


def _name(pid: int) -> str:
    """Its number and when it began: a number alone may be another process by now. Empty: there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # The second field, in brackets, may hold anything.
    return f"{pid} {status.rpartition(')')[2].split()[_STARTED]}"


def _number(name: str) -> int:
    return int(name.partition(" ")[0])
