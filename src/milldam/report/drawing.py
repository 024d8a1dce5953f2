"""What a page is put together from: sections, tiles and tables, and charts as SVG text.

No script; colours by class, so that the style around has the say; a tooltip per mark. What is drawn is few figures
already; names from the data are escaped here. What parts are given as `body`, `about` or cells is markup already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from milldam.markup import duration, escape, escape_plain, round_step, short_count, shorten
from milldam.memory import format_size
from milldam.report.timeline import Span, Timeline

WIDTH, CHART_HEIGHT = 920, 414
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


def limit_line(panel: Panel, limit: int | None, drawn: int | None) -> list[str]:
    if limit is None:
        return []
    label = f"budget {format_size(limit)}"
    if drawn is None:
        return [text(panel.left + 6, panel.top + 16, f"{label}, far above", "budget")]
    y = panel.y(drawn)
    named = text(panel.right - 6, y - 6, label, "budget", "end")
    return [line(panel.left, y, panel.right, y, "budget-line"), named]


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
    parts += limit_line(above, budget, drawn)
    return svg(WIDTH, CHART_HEIGHT, "Memory over time", parts)


def page_style() -> str:
    return resources.files("milldam.report").joinpath("page.css").read_text(encoding="utf-8")


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


@dataclass(frozen=True, slots=True)
class Column:
    """A bar of a histogram."""

    label: str
    value: int
    tooltip: str


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


@dataclass(frozen=True, slots=True)
class Section:
    """A title with a few words beside it, and what it is about."""

    id: str
    title: str
    about: str
    body: str


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure, large. All but `more` is plain text."""

    label: str
    number: str
    unit: str = ""
    more: str = ""


def show_section(section: Section) -> str:
    about = f'<div class="about"><h2>{escape(section.title)}</h2>{section.about}</div>'
    return f'<section id="{section.id}">{about}\n<div class="body">{section.body}</div></section>'


def show_tiles(tiles: Iterable[Tile], *, small: bool = False) -> str:
    return f'<div class="tiles{" small" if small else ""}">{"".join(map(_show_tile, tiles))}</div>'


def _show_tile(tile: Tile) -> str:
    unit = f" <span>{escape(tile.unit)}</span>" if tile.unit else ""
    number = f'<div class="number">{escape(tile.number)}{unit}</div>'
    label, more = f'<div class="label">{escape(tile.label)}</div>', f'<div class="more">{tile.more}</div>'
    return f'<div class="tile">{label}{number}{more}</div>'


def gauge(part: float, whole: float) -> str:
    """How much of a limit is used."""
    over = " over" if part > whole else ""
    return f'<div class="gauge{over}"><i style="width:{_percent(part, whole)}"></i></div>'


def bar(parts: Sequence[tuple[float, str]], whole: float) -> str:
    """A bar of parts side by side, each an amount and a class."""
    shown = "".join(f'<i class="{name}" style="width:{_percent(part, whole)}"></i>' for part, name in parts if part > 0)
    return f'<div class="bar">{shown}</div>'


def _percent(part: float, whole: float) -> str:
    return f"{100 * min(1.0, part / whole) if whole > 0 else 0:.2f}%"


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), kind: str = "plain"
) -> str:
    """A table; the columns in `numbers` are set to the right. Heads are plain text, cells are markup.

    `kind`: "bars" where the second column holds them, "figures" for a single row.
    """

    def cell(name: str, column: int, content: str) -> str:
        place = ' class="n"' if column in numbers else ""
        place += f' data-head="{escape_plain(heads[column])}"' if name == "td" else ""  # shown where it is narrow
        return f"<{name}{place}>{content}</{name}>"

    top = "".join(cell("th", k, escape(head)) for k, head in enumerate(heads))
    body = "".join(f"<tr>{''.join(cell('td', k, content) for k, content in enumerate(row))}</tr>" for row in rows)
    return f'<div class="scroll {kind}"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def facts_table(facts: Iterable[tuple[str, object]]) -> str:
    """Names and values, escaped here."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<table class="facts"><tbody>{"".join(rows)}</tbody></table>'


def chart(svg: str) -> str:
    return f'<div class="chart">{svg}</div>'


def paragraphs(*texts: str) -> str:
    """Plain sentences; empty ones are left out."""
    return "".join(f"<p>{escape(text)}</p>" for text in texts if text)
