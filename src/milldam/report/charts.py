"""The charts of the page, as SVG text: memory over time, and bars.

No script; colours by class, so that the style around has the say; a tooltip per mark. What is drawn is few figures
already; names from the data are escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from milldam.markup import duration, escape_plain, round_step, short_count, shorten
from milldam.memory import format_size
from milldam.report.timeline import Timeline

WIDTH, CHART_HEIGHT = 920, 414
LETTER = 7.0
"""About the width of a letter at the charts' size, in pixels."""
_TIME_STEPS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


class Column(NamedTuple):
    """A bar of a histogram."""

    label: str
    value: int
    tooltip: str


class _Panel(NamedTuple):
    """A plot's place in the picture, and its scales."""

    left: float
    right: float
    top: float
    bottom: float
    x_limit: float
    y_limit: float

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * value / self.x_limit

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * min(1.0, value / self.y_limit)

    def size_axis(self, parts: int) -> Iterable[str]:
        step = round_step(self.y_limit, parts)
        for k in range(int(self.y_limit / step) + 1):
            y = self.y(k * step)
            yield _line(self.left, y, self.right, y, "grid")
            yield _text(self.left - 8, y + 4, format_size(k * step) if k else "0", anchor="end")

    def time_axis(self) -> Iterable[str]:
        fitting = (step for step in _TIME_STEPS if self.x_limit / step <= 8)
        step = next(fitting, None) or round_step(self.x_limit / 86400, 8) * 86400
        for k in range(int(self.x_limit / step + 1e-9) + 1):
            x = self.x(k * step)
            anchor = "end" if x > self.right - 20 else "middle" if k else "start"
            yield _line(x, self.bottom, x, self.bottom + 4, "axis")
            yield _text(x, self.bottom + 18, duration(k * step) if k else "0", anchor=anchor)

    def area(self, values: Sequence[tuple[float, int]], kind: str) -> str:
        """A filled curve, drawn from edge to edge."""
        values = [(0.0, values[0][1]), *values, (self.x_limit, values[-1][1])]
        curve = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in values)
        foot = f"{self.right:.1f},{self.bottom:.1f} {self.left:.1f},{self.bottom:.1f}"
        return f'<polygon points="{curve} {foot}" class="{kind}-fill"/><polyline points="{curve}" class="{kind}"/>'


def memory_chart(timeline: Timeline, budget: int | None) -> str:
    """Anonymous memory against the budget above, file-backed memory below, both over the same time and stages."""
    points, peak, seconds = timeline.points, timeline.peak, timeline.seconds
    # A budget far above the use would press the curve flat: then it is named, not drawn.
    drawn = budget if budget is not None and budget <= 8 * peak.anonymous else 0
    above = _Panel(66, WIDTH - 8, 40, 280, seconds, max(peak.anonymous, drawn, 1) * 1.12)
    below = _Panel(66, WIDTH - 8, 318, 388, seconds, max(timeline.peak_file, 1) * 1.12)
    parts = [*_stages(timeline, above, below), *above.size_axis(4), *below.size_axis(2)]
    parts.append(above.area([(point.seconds, point.anonymous) for point in points], "anonymous"))
    parts.append(below.area([(point.seconds, point.file) for point in points], "file"))
    for at in timeline.restarts:
        x = above.x(at)
        parts += [_line(x, above.top, x, below.bottom, "restart"), _text(x + 4, above.bottom - 8, "resumed")]
    parts += [*below.time_axis(), _text(above.left, below.top - 10, "file-backed", "name")]
    # The peak: a dot, with its figure above the curve, unless the budget's line is there.
    x, y, label = above.x(peak.seconds), above.y(peak.anonymous), f"peak {format_size(peak.anonymous)}"
    at_right = x + len(label) * LETTER + 10 > above.right
    near_line = drawn and -4 < y - above.y(drawn) < 24
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="peak"/>')
    anchor = "end" if at_right else "start"
    parts.append(_text(x - 8 if at_right else x + 8, y + 18 if near_line else y - 7, label, "name", anchor))
    if drawn:
        parts.append(_line(above.left, above.y(drawn), above.right, above.y(drawn), "budget-line"))
        parts.append(_text(above.right - 6, above.y(drawn) - 6, f"budget {format_size(drawn)}", "budget", "end"))
    elif budget is not None:
        parts.append(_text(above.left + 6, above.top + 16, f"budget {format_size(budget)}, far above", "budget"))
    return _svg(WIDTH, CHART_HEIGHT, "Memory over time", parts)


def _stages(timeline: Timeline, above: _Panel, below: _Panel) -> Iterable[str]:
    """A band for each stage, and names above them, those of the longest first; what finds no room is left to the
    tooltips and the table."""
    for number, (stage, start, stop) in enumerate(timeline.spans):
        left, width = above.x(start), max(above.x(stop) - above.x(start), 0.5)
        tooltip = f"<title>{escape_plain(stage)}: {duration(stop - start)}</title>"
        for panel in (above, below):
            place = f'x="{left:.1f}" y="{panel.top:.1f}" width="{width:.1f}" height="{panel.bottom - panel.top:.1f}"'
            yield f'<rect {place} class="band{number % 2}">{tooltip}</rect>'
        yield _line(left, above.top - 6, left, above.top, "axis")
    taken: list[tuple[float, float]] = []
    for stage, start, stop in sorted(timeline.spans, key=lambda span: span[1] - span[2]):
        name = shorten(stage, 24)
        half = len(name) * LETTER / 2
        middle = min(max(above.x((start + stop) / 2), above.left + half), above.right - half)
        if all(middle + half + 8 <= left or middle - half - 8 >= right for left, right in taken):
            taken.append((middle - half, middle + half))
            yield _text(middle, above.top - 12, name, "stage", "middle")


def column_chart(columns: Sequence[Column], label: str, unit: str, width: int = WIDTH) -> str:
    """Bars with their values on top and their names below; names are thinned out where there is no room."""
    height = 250
    # Few bars stay slim, at the left.
    limit = max(len(columns), (width - 8) / 84)
    panel = _Panel(4, width - 4, 24, height - 44, limit, max(1, *(column.value for column in columns)))
    slot = panel.x(1) - panel.x(0)
    bar = slot - min(8.0, slot * 0.14)
    widest = max(len(column.label) for column in columns) * LETTER + 6
    every = max(1, -(-int(widest) // max(1, int(slot))))
    parts = [_line(panel.left, panel.bottom, panel.right, panel.bottom, "axis")]
    parts.append(_text(panel.left, panel.bottom + 38, unit))
    for number, column in enumerate(columns):
        middle = panel.x(number + 0.5)
        top = min(panel.y(column.value), panel.bottom - 2) if column.value else panel.bottom
        shape = f'x="{middle - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" height="{panel.bottom - top:.1f}" rx="2"'
        parts.append(f'<rect {shape} class="column"><title>{escape_plain(column.tooltip)}</title></rect>')
        value = short_count(column.value)
        if column.value and len(value) * LETTER <= slot + 2:
            parts.append(_text(middle, top - 6, value, "value", "middle"))
        if number % every == 0:
            parts.append(_text(middle, panel.bottom + 18, column.label, "tick", "middle"))
    return _svg(width, height, label, parts)


def _svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg {size} role="img" aria-label="{escape_plain(label)}">{"".join(parts)}</svg>'


def _text(x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape_plain(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
