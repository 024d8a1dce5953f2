"""What was watched -> memory.svg: anonymous memory stacked by process, file-backed memory below it.

Readable by itself, on light and dark ground, without scripts; names of processes are escaped. At most `BANDS` bands:
where there are more processes, those of one name are one band, and the smallest together are "others".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from milldam.markup import duration, escape_plain, shorten
from milldam.memory import format_size
from milldam.report.drawing import Panel, area, drawn_limit, limit_line, line, peak_mark, size_axis, text, time_axis
from milldam.watching import Watched

BANDS = 8
_WIDTH, _HEIGHT = 1000, 520
_LEFT, _RIGHT = 74, 730
_OTHERS = -1
_LIGHT = ("#1c7488", "#d0912f", "#7c62ad", "#5b9444", "#c2573c", "#4a7bc4", "#b0628a", "#9aa5a8")
_DARK = ("#4aa9bd", "#dfab57", "#a48cd3", "#86bd6d", "#e58468", "#7ea6e3", "#d58fb1", "#6d7c80")
_FONT = 'ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif'


@dataclass(frozen=True, slots=True)
class _Band:
    """A process, or several, and its bytes at each moment."""

    label: str
    peak: int
    amounts: tuple[int, ...]


def draw(watched: Watched) -> str:
    """The whole file."""
    bands = _bands(watched)
    times = [moment.seconds for moment in watched.moments]
    seconds = max(watched.seconds, 0.05)
    peak = watched.peak.anonymous
    drawn = drawn_limit(watched.limit, peak)
    above = Panel(_LEFT, _RIGHT, 92, 356, seconds, max(peak, drawn or 0, 1) * 1.12)
    below = Panel(_LEFT, _RIGHT, 404, 476, seconds, max(watched.peak.file, 1) * 1.15)
    parts = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" class="paper"/>', *_heading(watched)]
    parts += [*size_axis(above, 5), *size_axis(below, 2), *_stack(above, times, bands)]
    parts += area(below, [(moment.seconds, moment.file) for moment in watched.moments] or [(0.0, 0)], "file")
    parts += [*time_axis(below), line(_LEFT, above.bottom, _RIGHT, above.bottom, "axis")]
    parts += limit_line(above, watched.limit, drawn, "limit", at_start=True)
    if watched.moments:
        highest = max(watched.moments, key=lambda moment: moment.anonymous)
        parts += peak_mark(above, highest.seconds, highest.anonymous, drawn)
    parts += [text(_LEFT, above.top - 10, "anonymous and shared, by process", "name")]
    parts += [text(_LEFT, below.top - 10, "file-backed, of all: the kernel can take it back", "name"), *_legend(bands)]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    label = escape_plain(f"Memory of {watched.title} over time")
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
    return "\n".join([opening, f"<style>{_style()}</style>", *parts, "</svg>\n"])


def _heading(watched: Watched) -> list[str]:
    said = [f"peak {format_size(watched.peak.anonymous)}", f"mean {format_size(watched.mean.anonymous)}"]
    if watched.counted_once is not None and watched.counted_once.anonymous < 0.95 * watched.sum_when_counted:
        said.append(f"{format_size(watched.counted_once.anonymous)} with shared pages once")
    if watched.growth is not None:
        said.append(f"growth {watched.growth / 1e6:+.1f} MB a minute")
    said += [f"{len(watched.processes) + watched.others.count} processes", duration(watched.seconds)]
    return [text(24, 34, shorten(watched.title, 96), "title"), text(24, 56, ", ".join(said), "tick")]


# ---- bands ----


def _bands(watched: Watched) -> list[_Band]:
    """Bottom first: in the order in which the processes began, others on top."""
    group = _groups(watched)
    rows = [_row(moment.numbers, moment.amounts, group) for moment in watched.moments]
    peaks: dict[int, int] = {}
    for row in rows:
        for number, amount in row.items():
            peaks[number] = max(peaks.get(number, 0), amount)
    named = sorted((number for number in peaks if number != _OTHERS), key=lambda number: -peaks[number])
    room = BANDS if len(named) <= BANDS and _OTHERS not in peaks else BANDS - 1
    kept, small = sorted(named[:room]), {*named[room:], _OTHERS}
    labels = _labels(watched, group)
    bands = [_Band(labels[one], peaks[one], tuple(row.get(one, 0) for row in rows)) for one in kept]
    rest = tuple(sum(amount for number, amount in row.items() if number in small) for row in rows)
    return [*bands, _Band("others", max(rest), rest)] if any(rest) else bands


def _groups(watched: Watched) -> dict[int, int]:
    """Number of a process -> number of the first one that it is drawn with."""
    if len(watched.processes) <= BANDS:
        return {process.number: process.number for process in watched.processes}
    first: dict[str, int] = {}
    for process in sorted(watched.processes, key=lambda one: one.number):
        first.setdefault(process.name, process.number)
    return {process.number: first[process.name] for process in watched.processes}


def _labels(watched: Watched, group: dict[int, int]) -> dict[int, str]:
    sizes: dict[int, int] = defaultdict(int)
    for first in group.values():
        sizes[first] += 1
    named = {process.number: process for process in watched.processes}
    return {
        first: f"{shorten(named[first].name, 16)} × {count}"
        if count > 1
        else f"{shorten(named[first].name, 15)} {named[first].pid}"
        for first, count in sizes.items()
    }


def _row(numbers: Sequence[int], amounts: Sequence[int], group: dict[int, int]) -> dict[int, int]:
    row: dict[int, int] = defaultdict(int)
    for number, amount in zip(numbers, amounts, strict=True):
        row[group.get(number, _OTHERS)] += amount
    return row


def _stack(panel: Panel, times: Sequence[float], bands: Sequence[_Band]) -> list[str]:
    if not times:
        return []
    edges = [0.0, *times, panel.x_limit]
    floor = [0] * len(edges)
    parts = []
    for number, band in enumerate(bands):
        amounts = [band.amounts[0], *band.amounts, band.amounts[-1]]
        top = [below + amount for below, amount in zip(floor, amounts, strict=True)]
        outline = [*zip(edges, top, strict=True), *reversed(list(zip(edges, floor, strict=True)))]
        points = " ".join(f"{panel.x(x):.1f},{panel.y(y):.1f}" for x, y in outline)
        tooltip = f"<title>{escape_plain(band.label)}: at most {format_size(band.peak)}</title>"
        parts.append(f'<polygon points="{points}" class="b{_colour(band, number)}">{tooltip}</polygon>')
        floor = top
    return parts


def _legend(bands: Sequence[_Band]) -> list[str]:
    """In the order of the bands as they lie, top first."""
    parts = [text(_RIGHT + 24, 82, "process", "tick"), text(_WIDTH - 24, 82, "peak", "tick", "end")]
    for place, (number, band) in enumerate(reversed(list(enumerate(bands)))):
        y = 106 + 24 * place
        shape = f'x="{_RIGHT + 24}" y="{y - 10}" width="12" height="12" rx="2"'
        parts.append(f'<rect {shape} class="b{_colour(band, number)}"/>')
        parts.append(text(_RIGHT + 44, y, shorten(band.label, 22), "name"))
        parts.append(text(_WIDTH - 24, y, format_size(band.peak), "name", "end"))
    return parts


def _colour(band: _Band, number: int) -> int:
    return BANDS - 1 if band.label == "others" else number


def _style() -> str:
    light = _colours("#fbfaf6", "#17272c", "#5d6f75", "#e1dfd6", "#a08a5b", "#bf4b30", _LIGHT)
    dark = _colours("#0f1719", "#e4ecec", "#8ea3a8", "#27363b", "#c9b27f", "#ef8b70", _DARK)
    return (
        f"text{{font-family:{_FONT};font-size:12.5px;font-variant-numeric:tabular-nums}}"
        ".title{font-size:18px;font-weight:600}.name,.budget{paint-order:stroke;stroke-width:3.5px;stroke-linejoin:round}"
        ".grid{stroke-width:1}.budget-line{stroke-width:1.5;stroke-dasharray:6 4}polyline{fill:none;stroke-width:1.4}"
        f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
    )


def _colours(paper: str, ink: str, soft: str, rule: str, sand: str, alarm: str, bands: Sequence[str]) -> str:
    bands_style = "".join(f".b{number}{{fill:{colour}}}" for number, colour in enumerate(bands))
    return (
        f".paper{{fill:{paper}}}.title,.name{{fill:{ink}}}.tick{{fill:{soft}}}.grid{{stroke:{rule}}}"
        f".axis{{stroke:{soft}}}.file{{stroke:{sand}}}.file-fill{{fill:{sand};fill-opacity:.25}}"
        f".name,.budget{{stroke:{paper}}}.budget{{fill:{alarm}}}.budget-line{{stroke:{alarm}}}.peak{{fill:{ink};stroke:{paper};stroke-width:1.5}}{bands_style}"
    )
