"""The memory of a process tree over time: sampled into `memory.csv`, with start, peak and final of each stage.

The file has a row a process and sample: `time,stage,pid,anonymous_bytes,file_bytes,name`. Every sample of the first
five minutes, then one for each 1/1,500 of the time that has passed, the highest since the one before: a day is about
10,000 samples, and the peak is always among them. It can be cut off anywhere and is still readable. Holds no history
in memory.
A sample that takes longer than a fiftieth of the interval makes the interval longer, so that the cost stays under
about 2 % of a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

from milldam.memory import Usage
from milldam.run.process_tree import ProcessTree

SAMPLE_SECONDS = 0.2
HEADER = "time,stage,pid,anonymous_bytes,file_bytes,name\n"
_FIRST_WAIT = 0.005
_SHARE_OF_CORE = 50
_WHOLE_SECONDS, _SHARE_OF_TIME = 300.0, 1500
_SILENT_SECONDS = 5.0
"""After so long without a word, a process on another machine is taken to be gone."""


class MemoryUse(TypedDict):
    """Bytes of anonymous memory of the whole process tree; of several machines, the one that held most."""

    start: int
    peak: int
    final: int
    peak_file_backed: int
    """Beside these, and not counted against the budget."""
    stages: dict[str, dict[str, int]]
    """Start, peak and final of each stage."""
    budget: int
    machines: NotRequired[dict[str, int]]
    """The peak of each machine, where there are several."""


@dataclass(slots=True)
class _Stage:
    """Memory of the tree while one stage ran."""

    start: Usage
    peak: Usage
    final: Usage


@dataclass(frozen=True, slots=True)
class _Noted:
    """What a process elsewhere told."""

    time: float
    now: int
    peak: int
    """Since the last sample."""


class Monitor:
    """Samples a tree from a thread of its own; use it as a context manager.

    Of processes that are not in the tree it knows what is noted; a row's pid is then `machine:pid`. The budget holds
    for each machine: what counts is the one that holds most.
    """

    def __init__(
        self,
        timeline: Path,
        *,
        stage: str = "start",
        here: str = "",
        tree: ProcessTree | None = None,
        every: float = SAMPLE_SECONDS,
    ) -> None:
        """`here`: what notes call this machine; its own process counts there, and what is below it tells of itself.

        `tree`: this process and all below it unless given.
        """
        self.stage = stage
        self.now = self.peak = Usage()
        self.machines: dict[str, int] = {}
        """Peak of anonymous memory on each machine of which something is noted."""
        self.resident_peak = 0
        """The most that one process had resident, by the kernel's count."""
        self._here, self._every = here, every
        # A cluster may run below this process: its workers tell of themselves, and what else it takes is not ours.
        self._tree = tree or ProcessTree(os.getpid(), alone=bool(here))
        self._stages: dict[str, _Stage] = {}
        self._elsewhere: dict[tuple[str, int], _Noted] = {}
        self._timeline = _Timeline(timeline)
        self._cost = 0.0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="milldam-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample(last=True)
        self._timeline.close()

    def enter_stage(self, stage: str) -> None:
        """Book what follows under another stage."""
        self.sample(last=True)
        self.stage = stage
        self.sample()

    def restart(self) -> None:
        """Forget the timeline of what was here before; keep what this one has measured."""
        with self._lock:
            self._timeline.restart()

    def note(self, machine: str, pid: int, anonymous: int) -> None:
        """A process that is not of this tree told what it holds; 0: it has ended."""
        with self._lock:
            before = self._elsewhere.pop((machine, pid), None)
            if anonymous:
                # Between two samples the largest counts.
                peak = max(anonymous, before.peak if before is not None else 0)
                self._elsewhere[machine, pid] = _Noted(time.monotonic(), anonymous, peak)

    def sample(self, *, last: bool = False) -> Usage:
        """Measure the tree once, now. `last`: of a stage, and so written down at once."""
        with self._lock:
            began = time.thread_time()
            readings, elsewhere = self._tree.read(), self._heard_of()
            if readings or elsewhere or not self._stages:  # at the very end nothing is left to see: what was, stays
                self.now = self._largest_machine(sum((one.use for one in readings), Usage()), elsewhere)
                self._book(self.now)
                self.resident_peak = max([self.resident_peak, *(one.resident_peak for one in readings)])
                rows = [(str(one.pid), one.use, one.name) for one in readings]
                rows += [(f"{machine}:{pid}", one, "") for (machine, pid), one in elsewhere.items()]
                self._timeline.add(self.stage, self.now.anonymous, rows, last=last)
            cost = time.thread_time() - began
            self._cost = 0.8 * self._cost + 0.2 * cost if self._cost else cost
            return self.now

    def _heard_of(self) -> dict[tuple[str, int], Usage]:
        """Processes elsewhere that told something lately."""
        silent = time.monotonic() - _SILENT_SECONDS
        lately = {who: noted for who, noted in self._elsewhere.items() if noted.time > silent}
        self._elsewhere = {who: replace(noted, peak=noted.now) for who, noted in lately.items()}
        return {who: Usage(noted.peak) for who, noted in lately.items()}

    def _largest_machine(self, here: Usage, elsewhere: dict[tuple[str, int], Usage]) -> Usage:
        totals: dict[str, Usage] = {}
        for (machine, _), one in elsewhere.items():
            # What this process holds is on one of the machines.
            totals[machine] = totals.get(machine, here if machine == self._here else Usage()) + one
        for machine, total in totals.items():
            self.machines[machine] = max(self.machines.get(machine, 0), total.anonymous)
        return max((here, *totals.values()), key=lambda total: total.anonymous)

    def _book(self, total: Usage) -> None:
        booked = self._stages.setdefault(self.stage, _Stage(total, total, total))
        booked.final = total
        booked.peak = _larger(booked.peak, total)
        self.peak = _larger(self.peak, total)

    def _watch(self) -> None:
        for seconds in self._waits():
            if self._stop.wait(seconds):
                return
            self.sample()

    def _waits(self) -> Iterator[float]:
        """Seconds to the next sample: few at the start, for brief runs; then `every`, or more when sampling is dear."""
        wait = min(_FIRST_WAIT, self._every)
        while True:
            yield max(wait, self._cost * _SHARE_OF_CORE if wait >= self._every else 0.0)
            wait = min(wait * 1.25, self._every)

    def use(self, budget_bytes: int) -> MemoryUse:
        """What was measured, of a budget."""
        use: MemoryUse = {
            "start": next(iter(self._stages.values())).start.anonymous,
            "peak": self.peak.anonymous,
            "final": self.now.anonymous,
            "peak_file_backed": self.peak.file,
            "stages": {
                name: {"start": s.start.anonymous, "peak": s.peak.anonymous, "final": s.final.anonymous}
                for name, s in self._stages.items()
            },
            "budget": budget_bytes,
        }
        if self.machines:
            use["machines"] = dict(sorted(self.machines.items()))
        return use


def _larger(one: Usage, other: Usage) -> Usage:
    return Usage(max(one.anonymous, other.anonymous), max(one.file, other.file))


class _Timeline:
    """Writes the file; holds one sample. A full disk ends neither the watch nor the work, which will tell of it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write(HEADER)
        self._begun = path.stat().st_size
        self._started, self._written = time.monotonic(), 0.0
        self._highest = (-1, "")

    def add(self, stage: str, total: int, rows: Sequence[tuple[str, Usage, str]], *, last: bool) -> None:
        if total >= self._highest[0]:
            now = time.time()
            lines = (f"{now:.2f},{stage},{pid},{use.anonymous},{use.file},{name}\n" for pid, use, name in rows)
            self._highest = (total, "".join(lines))
        elapsed = time.monotonic() - self._started
        if last or elapsed < _WHOLE_SECONDS or elapsed - self._written >= elapsed / _SHARE_OF_TIME:
            self._write(self._highest[1])
            self._highest, self._written = (-1, ""), elapsed

    def restart(self) -> None:
        with contextlib.suppress(OSError):
            kept = self._path.read_bytes()[self._begun :].decode()
            self._file.truncate(0)
            self._write(HEADER + kept)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
