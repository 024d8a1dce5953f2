"""`memory.csv` -> the memory of the process tree over time, by stage, and its chart as SVG.

The file stays small (the monitor writes ever more rarely), so it is read whole. Time is that of work: what lies between
a run that was ended and the one that resumed it is left out, and where is marked.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.markup import duration, escape_plain, round_step, shorten
from milldam.memory import format_size

POINTS = 900
"""The curve has the highest use in each of at most so many stretches of time."""
_GAP_SECONDS = 60.0
"""Without a sample for so long, a process is taken for another with the same number."""
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 920, 66, 912, 40, 340
_LETTER = 7.0
"""About the width of a letter at the chart's size, in pixels."""


@dataclass(frozen=True, slots=True)
class Timeline:
    seconds: float
    points: npt.NDArray[Any]
    """(points, 3): seconds, anonymous and file-backed bytes."""
    stages: list[tuple[str, float, float]]
    """From when to when each was."""
    restarts: list[float]
    """When another process took over: the run had been ended."""

    @property
    def peak(self) -> int:
        """The most anonymous memory."""
        return int(self.points[:, 1].max())


def read_timeline(path: Path, end: float = math.inf) -> Timeline | None:
    """The curve of a run with all its sessions; None when there is none. `end`: later rows are of other commands."""
    moments = [one for one in _read_moments(path) if one[0] <= end]
    if not moments:
        return None
    times = np.array([time for time, *_ in moments])
    gaps = np.diff(times, prepend=times[0])
    changed = np.array([k > 0 and one[2] != moments[k - 1][2] for k, one in enumerate(moments)])
    sessions = np.flatnonzero(changed | (gaps > _GAP_SECONDS))
    gaps[sessions] = 0.0
    clock = np.maximum(gaps, 0.0).cumsum()
    seconds = max(float(clock[-1]), 0.05)
    stages: list[tuple[str, float, float]] = []
    for (_, stage, *_), at in zip(moments, clock.tolist(), strict=True):
        if stages:
            stages[-1] = (*stages[-1][:2], at)
        if not stages or stages[-1][0] != stage:
            stages.append((stage, at, at))
    used = np.array([(anonymous, file) for *_, anonymous, file in moments])
    places, stretch = np.unique(np.minimum((clock * POINTS / seconds).astype(int), POINTS - 1), return_inverse=True)
    most = np.zeros((len(places), 2), np.int64)
    np.maximum.at(most, stretch, used)
    points = np.column_stack(((places + 0.5) * seconds / POINTS, most))
    return Timeline(seconds, points, stages, clock[sessions].tolist())


def _read_moments(path: Path) -> list[tuple[float, str, str, int, int]]:
    """(time, stage, process that sampled, anonymous bytes, file-backed bytes) of every sample. Lines that are no rows,
    as a kill leaves them, are passed over."""
    moments = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError):
            moment, stage, pid, anonymous, file = line.split(",")
            if math.isfinite(float(moment)):
                moments.append((float(moment), stage, pid, int(anonymous), int(file)))
    return moments


# ---- the chart ----


def memory_chart(timeline: Timeline, budget: int | None) -> str:
    """Anonymous memory against the budget, and file-backed memory, as SVG over the time and its stages.

    Colours by class, so that the page's style has the say; a tooltip a stage.
    """
    points, seconds = timeline.points, timeline.seconds
    # A budget far above the use would press the curve flat: then it is named, not drawn.
    drawn = budget if budget is not None and budget <= 8 * timeline.peak else 0
    most = max(timeline.peak, drawn, points[:, 2].max(), 1) * 1.12

    def x(at: float) -> float:
        return _LEFT + (_RIGHT - _LEFT) * at / seconds

    def y(used: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * float(used) / float(most)

    parts = []
    for number, (stage, start, stop) in enumerate(timeline.stages):
        left, width = x(start), max(x(stop) - x(start), 0.5)
        tooltip = f"<title>{escape_plain(stage)}: {duration(stop - start)}</title>"
        place = f'x="{left:.1f}" y="{_TOP}" width="{width:.1f}" height="{_BOTTOM - _TOP}"'
        parts.append(f'<rect {place} class="band{number % 2}">{tooltip}</rect>')
        if width > len(name := shorten(stage, 24)) * _LETTER:
            parts.append(_text(left + width / 2, _TOP - 10, name, "stage", "middle"))
    step = round_step(most, 4)
    for k in range(int(most / step) + 1):
        parts.append(_line(_LEFT, y(k * step), _RIGHT, y(k * step), "grid"))
        parts.append(_text(_LEFT - 8, y(k * step) + 4, format_size(k * step) if k else "0", anchor="end"))
    for column, kind in ((2, "file"), (1, "anonymous")):
        rows = [(0.0, points[0, column]), *points[:, (0, column)], (seconds, points[-1, column])]
        curve = " ".join(f"{x(at):.1f},{y(used):.1f}" for at, used in rows)
        parts.append(f'<polygon points="{curve} {_RIGHT},{_BOTTOM} {_LEFT},{_BOTTOM}" class="{kind}-fill"/>')
        parts.append(f'<polyline points="{curve}" class="{kind}"/>')
    for at in timeline.restarts:
        parts += [_line(x(at), _TOP, x(at), _BOTTOM, "restart"), _text(x(at) + 4, _BOTTOM - 8, "resumed")]
    parts += [_text(_LEFT, _BOTTOM + 18, "0"), _text(_RIGHT, _BOTTOM + 18, duration(seconds), anchor="end")]
    parts.append(_text(_LEFT + 6, _TOP + 16, f"peak {format_size(timeline.peak)}", "name"))
    if drawn:
        parts.append(_line(_LEFT, y(drawn), _RIGHT, y(drawn), "budget-line"))
    if budget is not None:
        where, far = (y(drawn) - 6, "") if drawn else (_TOP + 16, ", far above")
        parts.append(_text(_RIGHT - 6, where, f"budget {format_size(budget)}{far}", "budget", "end"))
    size = f'viewBox="0 0 {_WIDTH} {_BOTTOM + 26}" width="{_WIDTH}" height="{_BOTTOM + 26}"'
    return f'<svg {size} role="img" aria-label="Memory over time">{"".join(parts)}</svg>'


def _text(x: float, y: float, content: str, kind: str = "tick", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape_plain(content)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'
