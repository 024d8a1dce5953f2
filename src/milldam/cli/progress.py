"""How a run is shown while it works: two live lines on a terminal, a plain line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from milldam.cli.naming import visible
from milldam.cli.summaries import column_lines
from milldam.markup import counted
from milldam.memory import format_size
from milldam.run.progress import Snapshot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from milldam.run.planning import WorkPlan
    from milldam.run.progress import Observer

PLAIN_SECONDS = 30.0


@contextmanager
def make_observer(*, quiet: bool) -> Iterator[Observer]:
    """The display that fits where standard error goes."""
    if quiet:
        yield QuietDisplay()
    elif sys.stderr.isatty():
        yield from _live()
    else:
        yield PlainDisplay()


def _live() -> Iterator[Observer]:
    from rich.console import Console

    display = LiveDisplay(Console(stderr=True))
    with display.live:
        yield display


class QuietDisplay:
    """Warnings only."""

    def planned(self, plan: WorkPlan) -> None:
        pass

    def progress(self, snapshot: Snapshot) -> None:
        pass

    def warn(self, message: str) -> None:
        click.echo(visible(f"Warning: {message}"), err=True)


class PlainDisplay(QuietDisplay):
    """The plan, then a line every 30 seconds."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def planned(self, plan: WorkPlan) -> None:
        click.echo("\n".join(plan_lines(plan)), err=True)

    def progress(self, snapshot: Snapshot) -> None:
        if time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            click.echo(progress_line(snapshot), err=True)


class LiveDisplay(QuietDisplay):
    """The plan, then two lines that change in place; their clock goes on also while nobody reports."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._snapshot = Snapshot("reading the input")
        self._heard = time.monotonic()
        self.live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)

    def planned(self, plan: WorkPlan) -> None:
        self.progress(Snapshot(plan.stages[0], budget_bytes=plan.budget.limit_bytes))
        self.live.refresh()  # first: what is printed goes above the lines as they were last drawn
        self._console.print("\n".join(plan_lines(plan)), highlight=False, markup=False)

    def progress(self, snapshot: Snapshot) -> None:
        self._snapshot, self._heard = snapshot, time.monotonic()

    def warn(self, message: str) -> None:
        self._console.print(visible(f"Warning: {message}"), style="yellow", markup=False)

    def render(self) -> Text:
        from rich.text import Text

        snapshot, heard = self._snapshot, self._heard
        seconds = snapshot.elapsed + time.monotonic() - heard
        lines = live_lines(snapshot, seconds, self._console.width)
        return Text("\n".join(lines), no_wrap=True, overflow="crop")


def plan_lines(plan: WorkPlan) -> list[str]:
    """What will be done and in how much memory."""
    lines = [
        f"Memory: {format_size(plan.budget.limit_bytes)} ({plan.budget.origin})"
        f" = {counted(plan.workers, 'worker')} x {format_size(plan.share_bytes)}"
        + (f"; {plan.note}" if plan.note else ""),
        f"Input:  {format_size(plan.input_bytes)} in {counted(plan.units, 'unit')}"
        f" of about {format_size(plan.shard_size)}" + (f", {plan.done} of them done before" if plan.done else ""),
    ]
    lines += [f"Encoder: {plan.encoder} ({plan.encoder_note})"] if plan.encoder else []
    lines[2:2] = column_lines(plan.text_columns)
    lines[2:2] = [f"Conversations: {plan.conversations}"] if plan.conversations else []
    if len(plan.stages) > 2:
        lines.append(f"Stages: {', '.join(plan.stages)}")
    if plan.left_out:
        how = "name it with --input-format txt. In a configuration: input_format: txt for that dataset."
        lines.append(f"Not read: {plan.left_out}. To read text among them, {how}")
    if plan.threads > 1:
        lines[0] += f", {plan.threads} threads each"
    return lines


def progress_line(snapshot: Snapshot) -> str:
    """All in one line."""
    return ", ".join(
        [f"{snapshot.stage} {_share(snapshot):.0%}", *_pace(snapshot, snapshot.elapsed), *_amounts(snapshot)]
    )


def live_lines(snapshot: Snapshot, seconds: float, width: int) -> tuple[str, str]:
    """Two lines that fit into a terminal: what is done of the stage, and what came of it."""
    share = _share(snapshot)
    bar = f" {_bar(share, 20 if width >= 100 else 10)} {share:.0%}" if snapshot.input_total else ""
    return _fit([snapshot.stage + bar, *_pace(snapshot, seconds)], width), _fit(_amounts(snapshot), width)


def _fit(figures: list[str], width: int) -> str:
    """As many figures, the most important first, as a line of so many columns holds."""
    line = figures[0]
    for figure in figures[1:]:
        if len(line) + len(figure) + 2 >= width:
            break
        line += f", {figure}"
    # A full line would wrap on some terminals.
    return line[: width - 1]


def _pace(snapshot: Snapshot, seconds: float) -> list[str]:
    """The time, and how much of the stage is left."""
    share, units = _share(snapshot), f"unit {snapshot.units_done:,}/{snapshot.units:,}"
    left = [f"{_clock(snapshot.elapsed / share - snapshot.elapsed)} left"] if share >= 0.01 else []
    return [_clock(seconds), *left, *([units] if snapshot.units else [])]


def _amounts(snapshot: Snapshot) -> list[str]:
    """What has come of the stage, and the memory."""
    counts, elapsed = snapshot.counts, max(snapshot.elapsed, 1e-9)
    size, documents, tokens = counts["text_bytes"] or counts["input_bytes"], counts["documents"], counts["tokens"]
    memory = f"memory {format_size(snapshot.anonymous_bytes)} of {format_size(snapshot.budget_bytes)}"
    figures = [f"{format_size(size)} at {format_size(size / elapsed)}/s"] if size else []
    figures += [memory] if snapshot.budget_bytes else []
    figures += [f"{_short(documents)} document{'' if documents == 1 else 's'}"] if documents else []
    if tokens:
        figures += [f"{_short(tokens / elapsed)} tokens/s"]
    if tokens and counts["characters"]:
        figures += [f"{counts['characters'] / tokens:.2f} chars/token"]
    return figures or [""]


def _short(count: float) -> str:
    """
    >>> _short(950), _short(1_500), _short(24_100_000)
    ('950', '1.5K', '24.1M')
    """
    return format_size(count).removesuffix("B").replace(" ", "")


def _share(snapshot: Snapshot) -> float:
    if not snapshot.input_total:
        return 0.0
    return min(1.0, snapshot.counts["input_bytes"] / snapshot.input_total)


def _clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def _bar(share: float, width: int) -> str:
    filled = int(share * width)
    return "█" * filled + "░" * (width - filled)
