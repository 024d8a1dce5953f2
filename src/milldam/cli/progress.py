"""How a run is shown while it works: a live line on a terminal, a plain line every 30 seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from milldam.cli.terminal import visible
from milldam.memory import format_size

if TYPE_CHECKING:
    from rich.status import Status

    from milldam.planning import WorkPlan
    from milldam.progress import Observer, Snapshot

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

    console = Console(stderr=True)
    with console.status("reading the input ...", spinner="line") as status:
        yield LiveDisplay(status)


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
    """The plan, then one line that changes."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def planned(self, plan: WorkPlan) -> None:
        self._status.console.print("\n".join(plan_lines(plan)), highlight=False, markup=False)

    def progress(self, snapshot: Snapshot) -> None:
        from rich.text import Text

        self._status.update(Text(f"{_bar(_share(snapshot))} {progress_line(snapshot)}"))

    def warn(self, message: str) -> None:
        self._status.console.print(visible(f"Warning: {message}"), style="yellow", markup=False)


def plan_lines(plan: WorkPlan) -> list[str]:
    """What will be done and in how much memory."""
    lines = [
        f"Memory: {format_size(plan.budget.limit_bytes)} ({plan.budget.origin})"
        f" = {plan.workers} workers x {format_size(plan.share_bytes)}" + (f"; {plan.note}" if plan.note else ""),
        f"Input:  {format_size(plan.input_bytes)} in {plan.units} units of about {format_size(plan.shard_size)}"
        + (f", {plan.done} of them done before" if plan.done else ""),
        f"Engine: {plan.engine} ({plan.engine_note})",
    ]
    lines[2:2] = column_lines(plan.text_columns)
    if len(plan.stages) > 2:
        lines.append(f"Stages: {', '.join(plan.stages)}")
    if plan.left_out:
        lines.append(f"Not read: {plan.left_out}. To read text among them, name it with --input-format txt.")
    if plan.threads > 1:
        lines[0] += f", {plan.threads} threads each"
    return lines


def column_lines(columns: dict[str, str | None]) -> list[str]:
    """The field that the text comes from, and where there are several the data sets of each; none for plain text.

    >>> column_lines({"datasets.0": "text", "datasets.1": "body"})
    ['Text:   field "text" of datasets.0; field "body" of datasets.1']
    """
    fields: dict[str | None, list[str]] = {}
    for data_set, column in columns.items():
        fields.setdefault(column, []).append(data_set)
    if set(fields) <= {None}:
        return []
    told = {f'field "{visible(column)}"' if column else "plain text": sets for column, sets in fields.items()}
    which = (field if len(told) == 1 else f"{field} of {', '.join(sets)}" for field, sets in told.items())
    return [f"Text:   {'; '.join(which)}"]


def progress_line(snapshot: Snapshot) -> str:
    counts, elapsed = snapshot.counts, max(snapshot.elapsed, 1e-9)
    tokens, characters = counts["tokens"], counts["characters"]
    told = f", {tokens / elapsed / 1e6:.1f}M tokens/s, {characters / tokens:.2f} chars/token" if tokens else ""
    size = counts["text_bytes"] or counts["input_bytes"]
    return (
        f"{snapshot.stage} {_share(snapshot):.0%} {format_size(size)}, {format_size(size / elapsed)}/s, "
        f"{counts['documents']:,} documents{told}, "
        f"unit {snapshot.units_done}/{snapshot.units}{_remaining(snapshot)}, "
        f"memory {format_size(snapshot.anonymous_bytes)} of {format_size(snapshot.budget_bytes)}"
    )


def _share(snapshot: Snapshot) -> float:
    if not snapshot.input_total:
        return 0.0
    return min(1.0, snapshot.counts["input_bytes"] / snapshot.input_total)


def _remaining(snapshot: Snapshot) -> str:
    share = _share(snapshot)
    if share < 0.01:
        return ""
    left = int(snapshot.elapsed / share - snapshot.elapsed)
    return f", {left // 3600}:{left % 3600 // 60:02d}:{left % 60:02d} left"


def _bar(share: float) -> str:
    filled = int(share * 20)
    return "█" * filled + "░" * (20 - filled)
