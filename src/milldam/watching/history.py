"""Samples of a process tree -> figures and a curve, in memory that is bounded whatever the time.

The curve has at most `POINTS` stretches of time; of each it keeps its highest moment, with the share of each process
in it. When there are too many, two become one. Of processes the `MAX_PROCESSES` largest are kept one by one, the
others are counted. With 50 processes at a time that is about 1 MB, after a minute and after a month.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from milldam.memory import Usage
from milldam.watching.tree import Reading

POINTS = 600
MAX_PROCESSES = 512
_FIRST_STEP = 0.05
_FIT_POINTS = 80
_FIT_SECONDS = 30.0
"""Over less time, nobody can tell growth from beginning."""
_END = 0.02
"""The share of the time at its end in which a fall is only the process ending."""


@dataclass(slots=True)
class Process:
    """One process, from when it was first seen to when it was last seen, in seconds and bytes."""

    number: int
    pid: int
    name: str
    first_seen: float
    last_seen: float
    start: int
    peak: int
    final: int
    peak_file: int
    resident_peak: int
    growth: float | None = None
    """Bytes a minute, robustly fitted; None when it lived too briefly, or gave back what it grew by."""

    @property
    def seconds(self) -> float:
        return self.last_seen - self.first_seen


@dataclass(frozen=True, slots=True)
class Moment:
    """The highest moment of a stretch of time."""

    seconds: float
    anonymous: int
    file: int
    """The most in the stretch, at whatever moment."""
    numbers: array[int]
    amounts: array[int]
    """Anonymous bytes of the processes with these numbers; together they are `anonymous`."""


@dataclass(slots=True)
class Others:
    """Processes that were too many, and too small, to be kept one by one."""

    count: int = 0
    peak: int = 0
    names: Counter[str] = field(default_factory=Counter)

    def add(self, process: Process) -> None:
        self.count += 1
        self.peak = max(self.peak, process.peak)
        if process.name in self.names or len(self.names) < MAX_PROCESSES:
            self.names[process.name] += 1


class History:
    """Takes samples in order of time."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.samples = 0
        self.seconds = 0.0
        self.seconds_over_limit = 0.0
        self.peak, self.peak_swapped = Usage(), 0
        self.others = Others()
        self._processes: dict[int, Process] = {}
        self._alive: dict[int, Process] = {}
        self._moments: dict[int, Moment] = {}
        self._step = _FIRST_STEP
        self._area = (0.0, 0.0)
        self._last = Usage()
        self._numbers = 0

    def add(self, seconds: float, readings: Sequence[Reading]) -> Usage:
        """Book the tree at a moment; returns its sum."""
        total = sum((Usage(one.anonymous, one.file) for one in readings), Usage())
        self._weigh(seconds, total)
        self.peak = Usage(max(self.peak.anonymous, total.anonymous), max(self.peak.file, total.file))
        self.peak_swapped = max(self.peak_swapped, sum(one.swapped for one in readings))
        self._alive = {one.pid: self._book(seconds, one) for one in readings}
        self._raise(seconds, total, readings)
        self._thin_out()
        self.samples += 1
        return total

    def _weigh(self, seconds: float, total: Usage) -> None:
        """Means are over time: samples are not evenly spaced."""
        passed = max(0.0, seconds - self.seconds)
        before = self._last if self.samples else total
        self._area = (self._area[0] + passed * before.anonymous, self._area[1] + passed * before.file)
        if self.limit is not None and before.anonymous > self.limit:
            self.seconds_over_limit += passed
        self.seconds, self._last = max(seconds, self.seconds), total

    def end(self, seconds: float) -> None:
        """The tree ended now: what it held last, it held until then."""
        self._weigh(seconds, self._last)

    def mean(self) -> Usage:
        if not self.seconds:
            return self._last
        return Usage(int(self._area[0] / self.seconds), int(self._area[1] / self.seconds))

    def _book(self, seconds: float, one: Reading) -> Process:
        held = one.anonymous
        process = self._alive.get(one.pid)
        if process is None:
            number, self._numbers = self._numbers, self._numbers + 1
            process = Process(number, one.pid, one.name, seconds, seconds, held, held, held, one.file, 0)
            self._processes[number] = process
        process.name, process.last_seen, process.final = one.name, seconds, held
        process.peak, process.peak_file = max(process.peak, held), max(process.peak_file, one.file)
        process.resident_peak = max(process.resident_peak, one.resident_peak)
        return process

    def _raise(self, seconds: float, total: Usage, readings: Sequence[Reading]) -> None:
        while seconds >= POINTS * self._step:
            self._coarsen()
        position = int(seconds / self._step)
        before = self._moments.get(position)
        if before is not None and before.anonymous > total.anonymous:
            self._moments[position] = replace(before, file=max(before.file, total.file))
            return
        file_backed = max(total.file, before.file if before else 0)
        numbers = array("q", (self._alive[one.pid].number for one in readings))
        amounts = array("q", (one.anonymous for one in readings))
        self._moments[position] = Moment(seconds, total.anonymous, file_backed, numbers, amounts)

    def _coarsen(self) -> None:
        merged: dict[int, Moment] = {}
        for position, moment in sorted(self._moments.items()):
            other = merged.get(position // 2)
            if other is not None:
                file_backed = max(moment.file, other.file)
                moment = replace(max(other, moment, key=lambda one: one.anonymous), file=file_backed)
            merged[position // 2] = moment
        self._moments, self._step = merged, self._step * 2

    def _thin_out(self) -> None:
        """Halve what is kept of processes that have ended, the small ones first."""
        if len(self._processes) <= MAX_PROCESSES:
            return
        alive = {process.number for process in self._alive.values()}
        ended = sorted((one for one in self._processes.values() if one.number not in alive), key=lambda one: one.peak)
        for process in ended[: max(0, len(self._processes) - MAX_PROCESSES // 2)]:
            self.others.add(self._processes.pop(process.number))

    def moments(self) -> tuple[Moment, ...]:
        return tuple(moment for _, moment in sorted(self._moments.items()))

    def processes(self) -> tuple[Process, ...]:
        """All that were kept, the largest first, with their growth."""
        series: dict[int, list[tuple[float, float]]] = {number: [] for number in self._processes}
        for moment in self.moments():
            for number, amount in zip(moment.numbers, moment.amounts, strict=True):
                if number in series:
                    series[number].append((moment.seconds, amount))
        found = (replace(one, growth=growth_of(series[one.number])) for one in self._processes.values())
        return tuple(sorted(found, key=lambda one: (-one.peak, one.number)))

    def growth(self) -> float | None:
        """That of the whole tree, in bytes a minute."""
        return growth_of([(moment.seconds, moment.anonymous) for moment in self.moments()])

    def grows_to_the_end(self) -> bool:
        """Whether memory rose all along, by a tenth of its peak or more: perhaps a leak.

        A program that fills its memory and then keeps it does not: its second half is flat.
        """
        growth = self.growth()
        half = self.seconds / 2
        later = growth_of([(one.seconds, one.anonymous) for one in self.moments() if one.seconds >= half])
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
    few = list(_medians(points, -(-len(points) // _FIT_POINTS)))
    pairs = ((one, other) for k, one in enumerate(few) for other in few[k + 1 :] if other[0] > one[0])
    slopes = [(other[1] - one[1]) / (other[0] - one[0]) for one, other in pairs]
    slope = median(slopes)
    return None if _fell_back(points, slope, few) else 60 * slope


def _fell_back(points: Sequence[tuple[float, float]], slope: float, few: Sequence[tuple[float, float]]) -> bool:
    """Whether the end lies below the fitted line by more than half of what it rises, and by a tenth of all."""
    end, span = points[-1][0], points[-1][0] - points[0][0]
    reached = max(amount for seconds, amount in points if seconds >= end - _END * span)
    expected = median(amount - slope * seconds for seconds, amount in few) + slope * end
    highest = max(amount for _, amount in few)
    return slope > 0 and expected - reached > max(slope * span / 2, highest / 10)


def _medians(points: Sequence[tuple[float, float]], size: int) -> Iterable[tuple[float, float]]:
    for start in range(0, len(points), size):
        group = points[start : start + size]
        yield median(point[0] for point in group), median(point[1] for point in group)
