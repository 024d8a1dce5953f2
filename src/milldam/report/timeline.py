"""`memory.csv` -> a curve of bounded size, the stages and processes it is of, and how fast it grew.

The curve has the highest use in each of at most `POINTS` stretches of time. The file is read once, line by line; its
lines are sums over processes only when put together. Time is that of work: what lies between a run that was ended and
the one that resumed it is left out, and where is marked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

POINTS = 900
MAX_SPANS = 200
_GAP_SECONDS = 60.0
"""Without a sample for so long, a process is taken for another with the same number."""
_FIRST_STEP = 0.05
_LINE_BYTES = 1000
_FIT_POINTS, _FIT_SECONDS = 80, 30.0
"""Over less time, nobody can tell growth from beginning."""
_END = 0.02
"""The share of the time at its end in which a fall is only the process ending."""


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


@dataclass(slots=True)
class Process:
    """One process, from when it was first seen to when it was last seen, in seconds and bytes."""

    pid: str
    name: str
    first_seen: float
    last_seen: float
    start: int
    peak: int = 0
    final: int = 0
    peak_file: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    points: tuple[Point, ...]
    spans: tuple[Span, ...]
    restarts: tuple[float, ...]
    """When another process took over: the run had been ended."""
    processes: tuple[Process, ...]
    """The largest first."""
    seconds: float

    @property
    def peak(self) -> Point:
        """The highest point of anonymous memory."""
        return max(self.points, key=lambda point: point.anonymous)

    @property
    def peak_file(self) -> int:
        return max(point.file for point in self.points)

    @property
    def mean(self) -> tuple[int, int]:
        """Anonymous and file-backed, over time: points are not evenly spaced."""
        if len(self.points) == 1:
            return self.points[0].anonymous, self.points[0].file
        pairs = list(itertools.pairwise(self.points))
        whole = max(self.points[-1].seconds - self.points[0].seconds, 1e-9)
        weights = [(after.seconds - before.seconds) / whole for before, after in pairs]
        return (
            int(sum(weight * before.anonymous for weight, (before, _) in zip(weights, pairs, strict=True))),
            int(sum(weight * before.file for weight, (before, _) in zip(weights, pairs, strict=True))),
        )

    def seconds_over(self, limit: int) -> float:
        """How long anonymous memory was above a limit."""
        return sum(
            after.seconds - before.seconds
            for before, after in itertools.pairwise(self.points)
            if before.anonymous > limit
        )

    @property
    def growth(self) -> float | None:
        """Of anonymous memory, in bytes a minute; see `growth_of`."""
        return growth_of([(point.seconds, point.anonymous) for point in self.points])

    @property
    def grows_to_the_end(self) -> bool:
        """Whether memory rose all along, by a tenth of its peak or more: perhaps a leak.

        A program that fills its memory and then keeps it does not: its second half is flat.
        """
        growth, half = self.growth, self.seconds / 2
        later = growth_of([(one.seconds, one.anonymous) for one in self.points if one.seconds >= half])
        if growth is None or later is None:
            return False
        return growth * self.seconds / 60 > self.peak.anonymous / 10 and later > growth / 2


def growth_of(points: Sequence[tuple[float, float]]) -> float | None:
    """Bytes a minute by the median of the slopes between all pairs (Theil and Sen), on at most 80 points.

    Up to about a quarter of the points can be anything, such as a start or spikes, without moving it. None when they
    are of less than half a minute, or when what had grown was given back before the end: that is no rate to go on with.

    >>> growth_of([(k, 1000.0 * k + (9e9 if k % 10 == 5 else 0)) for k in range(60)])
    60000.0
    """
    if len(points) < 8 or points[-1][0] - points[0][0] < _FIT_SECONDS:
        return None
    size = -(-len(points) // _FIT_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    few = [(median(point[0] for point in group), median(point[1] for point in group)) for group in groups]
    slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(few, 2) if b[0] > a[0])
    return None if _fell_back(points, slope, few) else 60 * slope


def _fell_back(points: Sequence[tuple[float, float]], slope: float, few: Sequence[tuple[float, float]]) -> bool:
    """Whether the end lies below the fitted line by more than half of what it rises, and by a tenth of all."""
    end, span = points[-1][0], points[-1][0] - points[0][0]
    reached = max(amount for seconds, amount in points if seconds >= end - _END * span)
    expected = median(amount - slope * seconds for seconds, amount in few) + slope * end
    highest = max(amount for _, amount in few)
    return slope > 0 and expected - reached > max(slope * span / 2, highest / 10)


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
        self._processes: list[Process] = []
        self._alive: dict[str, Process] = {}

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
        # A number that was away for a sample and comes back is another process.
        self._alive = {pid: self._process(pid, row) for pid, row in sample.rows.items()}
        while self._clock >= POINTS * self._step:
            merged: dict[int, tuple[int, int]] = {}
            for position, peak in self._peaks.items():
                self._raise(merged, position // 2, peak)
            self._peaks, self._step = merged, self._step * 2
        self._raise(self._peaks, int(self._clock / self._step), sample.most)

    def _process(self, pid: str, row: tuple[int, int, str]) -> Process:
        anonymous, file, name = row
        one = self._alive.get(pid)
        if one is None:
            one = Process(pid, name, self._clock, self._clock, anonymous)
            self._processes.append(one)
        one.name, one.last_seen, one.final = name, self._clock, anonymous
        one.peak, one.peak_file = max(one.peak, anonymous), max(one.peak_file, file)
        return one

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
        largest = sorted(self._processes, key=lambda one: -one.peak)
        return Timeline(tuple(points), tuple(self._spans), tuple(self._restarts), tuple(largest), seconds)
