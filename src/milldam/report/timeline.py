"""`memory.csv` -> the memory of the process tree over time, by stage, and where its chart has what.

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

from milldam.markup import round_step

POINTS = 900
"""The curve has the highest use in each of at most so many stretches of time."""
LEFT, RIGHT, TOP, BOTTOM = 66, 912, 40, 340
"""Of the chart, in pixels."""


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
    sessions = [k for k in range(1, len(moments)) if moments[k][2] != moments[k - 1][2]]
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
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            moment, stage, pid, anonymous, file = line.split(",")
            if math.isfinite(float(moment)):
                moments.append((float(moment), stage, pid, int(anonymous), int(file)))
    return moments


def chart_of(timeline: Timeline, budget: int | None) -> dict[str, Any]:
    """Anonymous memory against the budget, and file-backed memory, over the time and its stages, in pixels."""
    points, seconds = timeline.points, timeline.seconds
    # A budget far above the use would press the curve flat: then it is named, not drawn.
    drawn = budget if budget is not None and budget <= 8 * timeline.peak else 0
    most = max(timeline.peak, drawn, int(points[:, 2].max()), 1) * 1.12

    def x(at: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * at / seconds, 1)

    def y(used: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * float(used) / most, 1)

    curves = {}
    for column, kind in ((2, "file"), (1, "anonymous")):
        rows = [(0.0, points[0, column]), *points[:, (0, column)], (seconds, points[-1, column])]
        curves[kind] = " ".join(f"{x(at)},{y(used)}" for at, used in rows)
    step = round_step(most, 4)
    return {
        "stages": [
            (stage, x(start), max(x(stop) - x(start), 0.5), stop - start) for stage, start, stop in timeline.stages
        ],
        "ticks": [(y(k * step), k * step) for k in range(int(most / step) + 1)],
        "curves": curves,
        "restarts": [x(at) for at in timeline.restarts],
        "budget_at": y(drawn) if drawn else None,
        "left": LEFT,
        "right": RIGHT,
        "top": TOP,
        "bottom": BOTTOM,
    }
