"""Shapes and scales of charts, as SVG text: no script, colours by class so that the style around has the say.

What is drawn is few figures already; names from the data are escaped here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from milldam.markup import duration, escape_plain, round_step
from milldam.memory import format_size

WIDTH = 920
LETTER = 7.0
"""About the width of a letter at the charts' size, in pixels."""
_TIME_STEPS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True, slots=True)
class Panel:
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


def svg(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg {size} role="img" aria-label="{escape_plain(label)}">{"".join(parts)}</svg>'


def text(x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape_plain(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def size_axis(panel: Panel, parts: int) -> list[str]:
    step = round_step(panel.y_limit, parts)
    found = []
    for k in range(int(panel.y_limit / step) + 1):
        y = panel.y(k * step)
        label = format_size(k * step) if k else "0"
        found += [line(panel.left, y, panel.right, y, "grid"), text(panel.left - 8, y + 4, label, anchor="end")]
    return found


def time_axis(panel: Panel) -> list[str]:
    fitting = (step for step in _TIME_STEPS if panel.x_limit / step <= 8)
    step = next(fitting, None) or round_step(panel.x_limit / 86400, 8) * 86400
    found = []
    for k in range(int(panel.x_limit / step + 1e-9) + 1):
        x = panel.x(k * step)
        anchor = "end" if x > panel.right - 20 else "middle" if k else "start"
        found += [line(x, panel.bottom, x, panel.bottom + 4, "axis")]
        found += [text(x, panel.bottom + 18, duration(k * step) if k else "0", anchor=anchor)]
    return found


def area(panel: Panel, values: Sequence[tuple[float, int]], kind: str) -> list[str]:
    """A filled curve, drawn from edge to edge."""
    values = [(0.0, values[0][1]), *values, (panel.x_limit, values[-1][1])]
    curve = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in values)
    foot = f"{panel.right:.1f},{panel.bottom:.1f} {panel.left:.1f},{panel.bottom:.1f}"
    return [f'<polygon points="{curve} {foot}" class="{kind}-fill"/>', f'<polyline points="{curve}" class="{kind}"/>']


def drawn_limit(limit: int | None, peak: int) -> int | None:
    """A limit far above the use would press the curve flat: then it is named, not drawn."""
    return limit if limit is not None and limit <= 8 * peak else None


def limit_line(panel: Panel, limit: int | None, drawn: int | None, name: str, *, at_start: bool = False) -> list[str]:
    """A line with its name at its end or, where the curve would be in the way, at its start."""
    if limit is None:
        return []
    label = f"{name} {format_size(limit)}"
    if drawn is None:
        return [text(panel.right - 6, panel.top + 16, f"{label}, far above", "budget", "end")]
    y = panel.y(drawn)
    x, anchor = (panel.left + 6, "start") if at_start else (panel.right - 6, "end")
    return [line(panel.left, y, panel.right, y, "budget-line"), text(x, y - 6, label, "budget", anchor)]


def peak_mark(panel: Panel, seconds: float, peak: int, limit: int | None) -> list[str]:
    """A dot at the highest point, with its figure above the curve, unless the limit's line is there."""
    x, y = panel.x(seconds), panel.y(peak)
    label = f"peak {format_size(peak)}"
    room = len(label) * LETTER
    anchor = "end" if x + room + 10 > panel.right else "start"
    beside = -8 if anchor == "end" else 8
    near_line = limit is not None and -4 < y - panel.y(limit) < 24
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="peak"/>'
    return [dot, text(x + beside, y + 18 if near_line else y - 7, label, "name", anchor)]
