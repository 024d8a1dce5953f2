"""Charts as SVG text: no script, colours by class so that the page's style has the say, a tooltip per mark.

Every function takes figures that are already few; names from the data are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milldam.markup import duration, escape_plain, short_count, shorten
from milldam.report.drawing import (
    LETTER,
    WIDTH,
    Panel,
    area,
    drawn_limit,
    limit_line,
    line,
    peak_mark,
    size_axis,
    svg,
    text,
    time_axis,
)  # fmt: skip
from milldam.report.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class Column:
    """A bar of a histogram."""

    label: str
    value: int
    tooltip: str


# ---- memory over time ----


def memory_chart(timeline: Timeline, budget: int | None) -> str:
    """Anonymous memory against the budget above, file-backed memory below, both over the same time and stages."""
    peak = timeline.peak.anonymous
    drawn = drawn_limit(budget, peak)
    above = Panel(66, WIDTH - 8, 40, 280, timeline.seconds, max(peak, drawn or 0, 1) * 1.12)
    below = Panel(66, WIDTH - 8, 318, 388, timeline.seconds, max(timeline.peak_file, 1) * 1.12)
    parts = [*_stage_bands(timeline.spans, above, below), *size_axis(above, 4), *size_axis(below, 2)]
    parts += area(above, [(p.seconds, p.anonymous) for p in timeline.points], "anonymous")
    parts += area(below, [(p.seconds, p.file) for p in timeline.points], "file")
    parts += [*_restart_lines(timeline, above, below), *time_axis(below)]
    parts += [
        text(above.left, below.top - 10, "file-backed", "name"),
        *peak_mark(above, timeline.peak.seconds, peak, drawn),
    ]
    parts += limit_line(above, budget, drawn, "budget")
    return svg(WIDTH, 414, "Memory over time", parts)


def _stage_bands(spans: Sequence[Span], above: Panel, below: Panel) -> list[str]:
    parts = []
    for number, span in enumerate(spans):
        left, width = above.x(span.start), above.x(span.stop) - above.x(span.start)
        tooltip = f"<title>{escape_plain(span.stage)}: {duration(span.stop - span.start)}</title>"
        for panel in (above, below):
            place = f'x="{left:.1f}" y="{panel.top:.1f}" width="{max(width, 0.5):.1f}"'
            height = f'height="{panel.bottom - panel.top:.1f}"'
            parts.append(f'<rect {place} {height} class="band{number % 2}">{tooltip}</rect>')
        parts.append(line(left, above.top - 6, left, above.top, "axis"))
    return parts + _stage_labels(spans, above)


def _stage_labels(spans: Sequence[Span], panel: Panel) -> list[str]:
    """Names above the bands, those of the longest first; what finds no room is left to the tooltips and the table."""
    taken: list[tuple[float, float]] = []
    parts = []
    for span in sorted(spans, key=lambda one: one.start - one.stop):
        name = shorten(span.stage, 24)
        half = len(name) * LETTER / 2
        middle = (panel.x(span.start) + panel.x(span.stop)) / 2
        middle = min(max(middle, panel.left + half), panel.right - half)
        if all(middle + half + 8 <= left or middle - half - 8 >= right for left, right in taken):
            taken.append((middle - half, middle + half))
            parts.append(text(middle, panel.top - 12, name, "stage", "middle"))
    return parts


def _restart_lines(timeline: Timeline, above: Panel, below: Panel) -> list[str]:
    parts = []
    for at in timeline.restarts:
        x = above.x(at)
        parts.append(line(x, above.top, x, below.bottom, "restart"))
        parts.append(text(x + 4, above.bottom - 8, "resumed"))
    return parts


# ---- histograms ----


def column_chart(columns: Sequence[Column], label: str, unit: str, *, width: int = WIDTH) -> str:
    """Bars with their values on top and their names below; names are thinned out where there is no room."""
    height = 250
    most = max((column.value for column in columns), default=0)
    # Few bars stay slim, at the left.
    limit = max(len(columns), (width - 8) / 84)
    panel = Panel(4, width - 4, 24, height - 44, limit, max(most, 1))
    slot = panel.x(1) - panel.x(0)
    bar = slot - min(8.0, slot * 0.14)
    widest = max((len(column.label) for column in columns), default=0) * LETTER + 6
    every = max(1, -(-int(widest) // max(1, int(slot))))
    parts = [line(panel.left, panel.bottom, panel.right, panel.bottom, "axis")]
    parts.append(text(panel.left, panel.bottom + 38, unit))
    for number, column in enumerate(columns):
        middle = panel.x(number + 0.5)
        top = min(panel.y(column.value), panel.bottom - 2) if column.value else panel.bottom
        shape = f'x="{middle - bar / 2:.1f}" y="{top:.1f}" width="{bar:.1f}" height="{panel.bottom - top:.1f}" rx="2"'
        parts.append(f'<rect {shape} class="column"><title>{escape_plain(column.tooltip)}</title></rect>')
        value = short_count(column.value)
        if column.value and len(value) * LETTER <= slot + 2:
            parts.append(text(middle, top - 6, value, "value", "middle"))
        if number % every == 0:
            parts.append(text(middle, panel.bottom + 18, column.label, "tick", "middle"))
    return svg(width, height, label, parts)
