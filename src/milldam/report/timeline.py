"""`memory.csv` -> a curve of bounded size, and the stages it is of.

The curve has the highest use in each of at most `POINTS` stretches of time. The file is read once, line by line; its
lines are sums over processes only when put together. Time is that of work: what lies between a run that was ended and
the one that resumed it is left out, and where is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

POINTS = 900
MAX_SPANS = 200
_GAP_SECONDS = 60.0
"""Without a sample for so long, a process is taken for another with the same number."""
_FIRST_STEP = 0.05
_LINE_BYTES = 1000


class Point(NamedTuple):
    """The most that was used around a moment."""

    seconds: float
    anonymous: int
    file: int


class _Sample(NamedTuple):
    """The process tree at a moment."""

    time: float
    stage: str
    main: str
    """The process that sampled, or the first that was sampled."""
    rows: dict[str, tuple[int, int]]
    """Anonymous and file-backed memory of each process."""


class Timeline:
    """Points on a grid whose step doubles whenever there are too many of them."""

    def __init__(self) -> None:
        self._clock = 0.0
        self.spans: list[tuple[str, float, float]] = []
        """Stages, from when to when."""
        self.restarts: list[float] = []
        """When another process took over: the run had been ended."""
        self.last: _Sample | None = None
        self._step = _FIRST_STEP
        self._peaks: dict[int, tuple[int, int]] = {}

    @property
    def seconds(self) -> float:
        return max(self._clock, _FIRST_STEP)

    @property
    def points(self) -> list[Point]:
        return [Point(min((at + 0.5) * self._step, self.seconds), *peak) for at, peak in sorted(self._peaks.items())]

    @property
    def peak(self) -> Point:
        """The highest point of anonymous memory."""
        return max(self.points, key=lambda point: point.anonymous)

    @property
    def peak_file(self) -> int:
        return max(point.file for point in self.points)

    def continues(self, sample: _Sample) -> bool:
        """Whether a sample is of the session of the last one."""
        last = self.last
        return last is not None and sample.main == last.main and sample.time - last.time <= _GAP_SECONDS

    def add(self, sample: _Sample) -> None:
        if self.last is not None and self.continues(sample):
            self._clock += max(0.0, sample.time - self.last.time)
        elif self.last is not None and len(self.restarts) < MAX_SPANS:
            self.restarts.append(self._clock)
        self.last = sample
        if self.spans:
            self.spans[-1] = (*self.spans[-1][:2], self._clock)
        if not self.spans or (self.spans[-1][0] != sample.stage and len(self.spans) < MAX_SPANS):
            self.spans.append((sample.stage, self._clock, self._clock))
        while self._clock >= POINTS * self._step:
            peaks, self._peaks, self._step = self._peaks, {}, self._step * 2
            for at, peak in peaks.items():
                self._raise(at // 2, *peak)
        # Of the machine that holds most: the budget is for each. This one has no name.
        machines: dict[str, tuple[int, int]] = {}
        for process, (anonymous, file) in sample.rows.items():
            machine = process.rpartition(":")[0]
            before = machines.get(machine, (0, 0))
            machines[machine] = (before[0] + anonymous, before[1] + file)
        self._raise(int(self._clock / self._step), *max(machines.values()))

    def _raise(self, at: int, anonymous: int, file: int) -> None:
        before = self._peaks.get(at, (0, 0))
        self._peaks[at] = (max(before[0], anonymous), max(before[1], file))


def read_timeline(path: Path, *, begin: float = -math.inf, end: float = math.inf) -> Timeline | None:
    """The curve of a timeline; None when there is none.

    `begin`: what another run wrote before this moment is not shown. `end`: nor what a later one wrote after this.
    """
    timeline = Timeline()
    try:
        for sample in _read_samples(path):
            if timeline.last is not None and timeline.last.time < begin and not timeline.continues(sample):
                timeline = Timeline()
            if sample.time <= end:
                timeline.add(sample)
    except FileNotFoundError:
        return None
    return timeline if timeline.last is not None else None


def _read_samples(path: Path) -> Iterator[_Sample]:
    """Rows of one moment, put together. Lines that are no rows, as a kill leaves them, are passed over."""
    now: _Sample | None = None
    with path.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(_LINE_BYTES):
            try:
                moment, stage, pid, anonymous, file, _ = line.rstrip("\n").split(",")
                time, row = float(moment), (int(anonymous), int(file))
            except ValueError:
                continue
            if not math.isfinite(time):
                continue
            if now is None or (time, stage) != (now.time, now.stage) or pid in now.rows:
                if now is not None:
                    yield now
                now = _Sample(time, stage, pid, {})
            now.rows[pid] = row
    if now is not None:
        yield now
