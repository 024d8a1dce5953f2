"""`memory.csv` -> a curve of bounded size, the stages it is of, and its chart.

The curve has the highest use in each of at most `POINTS` stretches of time: a grid whose step doubles whenever it has
more. The file is read once, line by line; its lines are sums over processes only when put together. Time is that of
work: what lies between a run that was ended and the one that resumed it is left out, and where is marked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from milldam.markup import duration, escape_plain, round_step, shorten
from milldam.memory import format_size

POINTS, MAX_SPANS = 900, 200
_GAP_SECONDS = 60.0
"""Without a sample for so long, a process is taken for another with the same number."""
_FIRST_STEP = 0.05
_LINE_BYTES = 1000
_TIME_STEPS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)
_WIDTH, _LEFT, _RIGHT = 920, 66, 912
_LETTER = 7.0
"""About the width of a letter at the chart's size, in pixels."""


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
    """The curve, and from when to when each stage was."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self.restarts: list[float] = []
        """When another process took over: the run had been ended."""
        self.last: _Sample | None = None
        self._clock, self._step = 0.0, _FIRST_STEP
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
        anonymous, file = Counter[str](), Counter[str]()
        for process, used in sample.rows.items():
            machine = process.rpartition(":")[0]
            anonymous[machine] += used[0]
            file[machine] += used[1]
        fullest = max(anonymous, key=lambda machine: (anonymous[machine], file[machine]))
        self._raise(int(self._clock / self._step), anonymous[fullest], file[fullest])

    def _raise(self, at: int, anonymous: int, file: int) -> None:
        before = self._peaks.get(at, (0, 0))
        self._peaks[at] = max(before[0], anonymous), max(before[1], file)


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


# ---- the chart ----


def memory_chart(timeline: Timeline, budget: int | None) -> str:
    """Anonymous memory against the budget above, file-backed memory below, as SVG over the same time and stages.

    Colours by class, so that the page's style has the say; a tooltip a stage.
    """
    points, peak, seconds = timeline.points, timeline.peak, timeline.seconds
    # A budget far above the use would press the curve flat: then it is named, not drawn.
    drawn = budget if budget is not None and budget <= 8 * peak.anonymous else 0
    most = max(peak.anonymous, drawn, 1) * 1.12
    parts = _stages(timeline)
    parts += _curve([(one.seconds, one.anonymous) for one in points], seconds, most, (40, 280), "anonymous")
    most_file = max(1, *(one.file for one in points)) * 1.12
    parts += _curve([(one.seconds, one.file) for one in points], seconds, most_file, (318, 388), "file")
    parts.append(_text(_LEFT, 308, "file-backed", "name"))
    for at in timeline.restarts:
        parts += [_line(_x(at, seconds), 40, _x(at, seconds), 388, "restart")]
        parts.append(_text(_x(at, seconds) + 4, 272, "resumed"))
    step = next((step for step in _TIME_STEPS if seconds / step <= 8), None) or round_step(seconds / 86400, 8) * 86400
    for k in range(int(seconds / step + 1e-9) + 1):
        x = _x(k * step, seconds)
        anchor = "end" if x > _RIGHT - 20 else "middle" if k else "start"
        parts += [_line(x, 388, x, 392, "axis"), _text(x, 406, duration(k * step) if k else "0", anchor=anchor)]
    # The peak: a dot, with its figure above the curve, unless the budget's line is there.
    x, y, label = _x(peak.seconds, seconds), _y(peak.anonymous, most, 40, 280), f"peak {format_size(peak.anonymous)}"
    budget_y, at_right = _y(drawn, most, 40, 280), x + len(label) * _LETTER + 10 > _RIGHT
    below = drawn and -4 < y - budget_y < 24
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="peak"/>')
    anchor = "end" if at_right else "start"
    parts.append(_text(x - 8 if at_right else x + 8, y + 18 if below else y - 7, label, "name", anchor))
    if drawn:
        parts.append(_line(_LEFT, budget_y, _RIGHT, budget_y, "budget-line"))
        parts.append(_text(_RIGHT - 6, budget_y - 6, f"budget {format_size(drawn)}", "budget", "end"))
    elif budget is not None:
        parts.append(_text(_LEFT + 6, 56, f"budget {format_size(budget)}, far above", "budget"))
    size = f'viewBox="0 0 {_WIDTH} 414" width="{_WIDTH}" height="414"'
    return f'<svg {size} role="img" aria-label="Memory over time">{"".join(parts)}</svg>'


def _curve(
    values: Sequence[tuple[float, int]], seconds: float, most: float, edges: tuple[int, int], kind: str
) -> list[str]:
    """A filled curve from edge to edge, over lines of its scale."""
    top, bottom = edges
    parts, step = [], round_step(most, 4 if bottom - top > 100 else 2)
    for k in range(int(most / step) + 1):
        y = _y(k * step, most, top, bottom)
        parts.append(_line(_LEFT, y, _RIGHT, y, "grid"))
        parts.append(_text(_LEFT - 8, y + 4, format_size(k * step) if k else "0", anchor="end"))
    values = [(0.0, values[0][1]), *values, (seconds, values[-1][1])]
    curve = " ".join(f"{_x(at, seconds):.1f},{_y(used, most, top, bottom):.1f}" for at, used in values)
    parts.append(f'<polygon points="{curve} {_RIGHT},{bottom} {_LEFT},{bottom}" class="{kind}-fill"/>')
    return [*parts, f'<polyline points="{curve}" class="{kind}"/>']


def _stages(timeline: Timeline) -> list[str]:
    """A band for each stage, and names above them, those of the longest first; what finds no room is left to the
    tooltips and the table."""
    parts, taken, seconds = list[str](), list[tuple[float, float]](), timeline.seconds
    for number, (stage, start, stop) in enumerate(timeline.spans):
        left, width = _x(start, seconds), max(_x(stop, seconds) - _x(start, seconds), 0.5)
        place = f'x="{left:.1f}" y="40" width="{width:.1f}" height="348"'
        tooltip = f"<title>{escape_plain(stage)}: {duration(stop - start)}</title>"
        parts.append(f'<rect {place} class="band{number % 2}">{tooltip}</rect>')
        parts.append(_line(left, 34, left, 40, "axis"))
    for stage, start, stop in sorted(timeline.spans, key=lambda span: span[1] - span[2]):
        name = shorten(stage, 24)
        half = len(name) * _LETTER / 2
        middle = min(max(_x((start + stop) / 2, seconds), _LEFT + half), _RIGHT - half)
        if all(middle + half + 8 <= left or middle - half - 8 >= right for left, right in taken):
            taken.append((middle - half, middle + half))
            parts.append(_text(middle, 28, name, "stage", "middle"))
    return parts


def _x(at: float, seconds: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * at / seconds


def _y(value: float, most: float, top: int, bottom: int) -> float:
    return bottom - (bottom - top) * min(1.0, value / most)


def _text(x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape_plain(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
