"""`milldam watch`: the memory of any command's process tree."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from milldam.cli.terminal import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from milldam.watching import Process, Watched

_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "min": 60.0, "m": 60.0}
_SHOWN = 20
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS, _LINES = 72, 8
_NOT_FOUND, _NOT_RUN = 127, 126


def parse_seconds(text: str) -> float:
    """Seconds from a time as people write it.

    >>> parse_seconds("0.2s"), parse_seconds("50ms"), parse_seconds("1")
    (0.2, 0.05, 1.0)
    """
    match = re.fullmatch(r"\s*(\d*\.?\d+)\s*([a-z]*)\s*", text)
    if match is None or match[2] not in _UNITS or not float(match[1]) > 0:
        raise click.BadParameter(f'"{text}" is not a time. Write it as 0.2s or 50ms.', param_hint="--every")
    return float(match[1]) * _UNITS[match[2]]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), default=Path("milldam-watch"), show_default=True,
    help="Folder for memory.csv, memory.svg and memory.json; an earlier watch in it is written over.",
)  # fmt: skip
@click.option("--every", default="0.2s", show_default=True, help="Time between samples; more where they are dear.")
@click.option("--limit", metavar="SIZE", help="Compare with this and draw it; it is not enforced.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as a line of JSON in place of the table.")
def watch(command: tuple[str, ...], out: Path, every: str, limit: str | None, as_json: bool) -> None:
    """Run any command and tell where its memory goes: anonymous and file-backed, of the whole process tree, over time.

    The command keeps its input, output, signals and exit code; the table goes to standard error.

    \b
    milldam watch -o memory/ --limit 2GB -- python train.py --lr 1e-3
    """
    from milldam.errors import InputError
    from milldam.watching import watch as run_watched

    try:
        watched = run_watched(command, every=parse_seconds(every), limit=limit, out=out)
    except InputError as error:
        click.echo(visible(f"milldam: {error}"), err=True)
        sys.exit(_NOT_RUN if shutil.which(command[0]) or Path(command[0]).exists() else _NOT_FOUND)
    for line in _as_json(watched) if as_json else _lines(watched, out):
        click.echo(visible(line), err=True)
    code = watched.exit_code or 0
    # As a shell has it, when a signal ended the command.
    sys.exit(128 - code if code < 0 else code)


def _as_json(watched: Watched) -> Iterator[str]:
    import json

    yield json.dumps(watched.as_json())


def _lines(watched: Watched, out: Path) -> Iterator[str]:
    from milldam.markup import duration, shorten

    code = watched.exit_code or 0
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    yield ""
    yield f"{shorten(watched.title, 70)}: {duration(watched.seconds)}, {ended}"
    yield from _totals(watched)
    yield from _plot(watched)
    yield from _table(watched)
    yield f"Wrote memory.csv, memory.svg and memory.json to {out}."


def _totals(watched: Watched) -> Iterator[str]:
    from milldam.markup import duration, share
    from milldam.memory import format_size

    if not watched.processes:
        yield "  It ended before its memory could be looked at."
        return
    growth = "" if watched.growth is None else f"  growth {_rate(watched.growth)} MB/min"
    peak, mean = watched.peak, watched.mean
    for name, most, usual, more in (
        ("anonymous", peak.anonymous, mean.anonymous, growth),
        ("file-backed", peak.file, mean.file, "  the kernel can take it back"),
    ):
        yield f"  {name:<12} peak {format_size(most):>8}  mean {format_size(usual):>8}{more}"
    if watched.counted_once is not None:
        once = format_size(watched.counted_once.anonymous)
        beside = format_size(watched.sum_when_counted)
        yield f"  each page counted once, sampled more seldom: at most {once}, where the sum was {beside}"
    if watched.largest_resident:
        largest = format_size(watched.largest_resident)
        yield f"  largest process, by the kernel's own count: {largest} resident, file-backed included"
    if watched.peak_swapped:
        yield f"  swapped out at most: {format_size(watched.peak_swapped)}, which is not in the figures above"
    if watched.limit is not None:
        over = watched.seconds_over_limit
        beside = f"over it for {duration(over)}" if over else "never over it"
        yield f"  limit {format_size(watched.limit)}: peak {share(peak.anonymous, watched.limit)} of it, {beside}"
    if watched.grows_to_the_end:
        yield "  It grew to the very end: perhaps a leak."


def _rate(growth: float) -> str:
    number = growth / 1e6
    return f"{number:+.1f}" if abs(number) >= 0.05 else "0.0"


def _plot(watched: Watched) -> Iterator[str]:
    """Anonymous memory over time in block letters, where the terminal has them."""
    from milldam.markup import duration
    from milldam.memory import format_size

    top = watched.peak.anonymous
    if not top or len(watched.moments) < 2 or "utf" not in (sys.stderr.encoding or "").lower():
        return
    heights = [round(value / top * _LINES * 8) for value in _columns(watched)]
    yield ""
    for line in range(_LINES - 1, -1, -1):
        label = format_size(top * (line + 1) / _LINES) if line in (_LINES - 1, _LINES // 2 - 1) else ""
        bars = "".join(_BLOCKS[min(8, max(0, height - 8 * line))] for height in heights)
        yield f"{label:>9} │{bars.rstrip()}"
    yield f"{'0':>9} └{'─' * (_COLUMNS - 1)}{duration(watched.seconds):>1}"


def _columns(watched: Watched) -> list[int]:
    """The highest use in each of the plot's columns; one without a sample goes on as the one before."""
    found: list[int | None] = [None] * _COLUMNS
    for moment in watched.moments:
        place = min(_COLUMNS - 1, int(moment.seconds / max(watched.seconds, 1e-9) * _COLUMNS))
        found[place] = max(found[place] or 0, moment.anonymous)
    columns, last = [], watched.moments[0].anonymous
    for value in found:
        last = last if value is None else value
        columns.append(last)
    return columns


def _table(watched: Watched) -> Iterator[str]:
    from milldam.memory import format_size

    if not watched.processes:
        return
    yield ""
    heads = ("lived", "start", "peak", "final", "file", "MB/min")
    yield f"{'pid':>9}  {'process':<30}" + "".join(f"{head:>11}" for head in heads)
    for process in watched.processes[:_SHOWN]:
        yield _row(process)
    hidden = watched.processes[_SHOWN:]
    count = len(hidden) + watched.others.count
    if count:
        peak = max([watched.others.peak, *(one.peak for one in hidden)])
        yield f"{'':>9}  and {count:,} others, {format_size(peak)} at most each: {_names(watched, hidden)}"
    if watched.still_running:
        yield f"{'':>9}  still running, and left so: {', '.join(map(str, watched.still_running[:10]))}"


def _names(watched: Watched, hidden: Sequence[Process]) -> str:
    counted = watched.others.names.copy()
    counted.update(one.name for one in hidden)
    return ", ".join(f"{name} ({count:,})" for name, count in counted.most_common(4))


def _row(process: Process) -> str:
    from milldam.markup import duration, shorten
    from milldam.memory import format_size

    growth = "" if process.growth is None else _rate(process.growth)
    sizes = (format_size(one) for one in (process.start, process.peak, process.final, process.peak_file))
    lived = duration(process.seconds) if process.seconds else "seen once"
    cells = (lived, *sizes, growth)
    return f"{process.pid:>9}  {shorten(process.name, 30):<30}" + "".join(f"{cell:>11}" for cell in cells)
