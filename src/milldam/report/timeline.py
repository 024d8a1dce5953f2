"""`memory.csv` -> a curve of bounded size, and the stages it is of.

The curve has the highest use in each of at most `POINTS` stretches of time. The file is read once, line by line; its
lines are sums over processes only when put together. Time is that of work: what lies between a run that was ended and
the one that resumed it is left out, and where is marked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

POINTS = 900
MAX_SPANS = 200
_GAP_SECONDS = 60.0
"""Without a sample for so long, a process is taken for another with the same number."""
_FIRST_STEP = 0.05
_LINE_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Point:
    """The most that was used around a moment."""

    seconds: float
    anonymous: int
    file: int


@dataclass(slots=True)
class Span:
    """A stage, from when to when."""

    stage: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    points: tuple[Point, ...]
    spans: tuple[Span, ...]
    restarts: tuple[float, ...]
    """When another process took over: the run had been ended."""
    seconds: float

    @property
    def peak(self) -> Point:
        """The highest point of anonymous memory."""
        return max(self.points, key=lambda point: point.anonymous)

    @property
    def peak_file(self) -> int:
        return max(point.file for point in self.points)


# ---- reading the file ----


@dataclass(slots=True)
class _Sample:
    """The process tree at a moment."""

    time: float
    stage: str
    main: str
    """The process that sampled, or the first that was sampled."""
    rows: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Anonymous and file-backed memory and name of each process."""

    @property
    def most(self) -> tuple[int, int]:
        """Of the machine that holds most: the budget is for each. This one has no name."""
        machines: dict[str, tuple[int, int]] = {}
        for pid, (anonymous, file, _) in self.rows.items():
            machine = pid.rpartition(":")[0]
            before = machines.get(machine, (0, 0))
            machines[machine] = (before[0] + anonymous, before[1] + file)
        return max(machines.values())


def read_timeline(path: Path, *, begin: float = -math.inf, end: float = math.inf) -> Timeline | None:
    """The curve of a timeline; None when there is none.

    `begin`: what another run wrote before this moment is not shown. `end`: nor what a later one wrote after this.
    """
    curve = _Curve()
    try:
        for sample in _read_samples(path):
            if curve.is_of_another_run(sample, begin):
                curve = _Curve()
            if sample.time <= end:
                curve.add(sample)
    except FileNotFoundError:
        return None
    return curve.finish()


def _read_samples(path: Path) -> Iterator[_Sample]:
    """Rows of one moment, put together. Lines that are no rows, as a kill leaves them, are passed over."""
    now: _Sample | None = None
    with path.open(encoding="utf-8", errors="replace") as lines:
        while line := lines.readline(_LINE_BYTES):
            try:
                moment, stage, pid, anonymous, file, name = line.rstrip("\n").split(",")
                time, row = float(moment), (int(anonymous), int(file), name)
            except ValueError:
                continue
            if not math.isfinite(time):
                continue
            if now is None or (time, stage) != (now.time, now.stage) or pid in now.rows:
                if now is not None:
                    yield now
                now = _Sample(time, stage, pid)
            now.rows[pid] = row
    if now is not None:
        yield now


class _Curve:
    """Points on a grid whose step doubles whenever there are too many of them."""

    def __init__(self) -> None:
        self._last: _Sample | None = None
        self._clock, self._step = 0.0, _FIRST_STEP
        self._peaks: dict[int, tuple[int, int]] = {}
        self._spans: list[Span] = []
        self._restarts: list[float] = []

    def is_of_another_run(self, sample: _Sample, begin: float) -> bool:
        """Whether all so far was written before `begin`, by a process that has ended."""
        return self._last is not None and self._last.time < begin and not self._goes_on(self._last, sample)

    def _goes_on(self, last: _Sample, sample: _Sample) -> bool:
        return sample.main == last.main and sample.time - last.time <= _GAP_SECONDS

    def add(self, sample: _Sample) -> None:
        last = self._last
        if last is not None and self._goes_on(last, sample):
            self._clock += max(0.0, sample.time - last.time)
        elif last is not None and len(self._restarts) < MAX_SPANS:
            self._restarts.append(self._clock)
        self._last = sample
        if self._spans:
            self._spans[-1].stop = self._clock
        if not self._spans or (self._spans[-1].stage != sample.stage and len(self._spans) < MAX_SPANS):
            self._spans.append(Span(sample.stage, self._clock, self._clock))
        while self._clock >= POINTS * self._step:
            merged: dict[int, tuple[int, int]] = {}
            for position, peak in self._peaks.items():
                self._raise(merged, position // 2, peak)
            self._peaks, self._step = merged, self._step * 2
        self._raise(self._peaks, int(self._clock / self._step), sample.most)

    @staticmethod
    def _raise(peaks: dict[int, tuple[int, int]], position: int, to: tuple[int, int]) -> None:
        before = peaks.get(position, (0, 0))
        peaks[position] = (max(before[0], to[0]), max(before[1], to[1]))

    def finish(self) -> Timeline | None:
        if not self._peaks:
            return None
        seconds = max(self._clock, _FIRST_STEP)
        points = (
            Point(min((position + 0.5) * self._step, seconds), *peak) for position, peak in sorted(self._peaks.items())
        )
        return Timeline(tuple(points), tuple(self._spans), tuple(self._restarts), seconds)
