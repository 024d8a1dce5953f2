"""`milldam watch`: the memory of any command's process tree."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from milldam.cli.naming import visible
from milldam.markup import duration, share, shorten
from milldam.memory import format_size

if TYPE_CHECKING:
    from milldam.report.timeline import Process, Timeline
    from milldam.run.watching import Ended

_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001, "min": 60.0, "m": 60.0}
_SHOWN = 20
_NOT_FOUND, _NOT_RUN = 127, 126
_FILES = CSV, SVG, JSON = "memory.csv", "memory.svg", "memory.json"


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
    help="Folder for memory.csv, memory.svg and memory.json; results of an earlier watch are replaced.",
)  # fmt: skip
@click.option(
    "--every", default="0.2s", show_default=True, help="Sampling interval; longer when sampling is expensive."
)
@click.option("--limit", metavar="SIZE", help="Compare memory with this limit and draw it; it is not enforced.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as a line of JSON instead of the table.")
def watch(command: tuple[str, ...], out: Path, every: str, limit: str | None, as_json: bool) -> None:
    """Run any command and show where its memory goes.

    Records anonymous and file-backed memory of the whole process tree over time.

    The command keeps its input, output, signals and exit code; the table goes to standard error.

    \b
    milldam watch -o memory/ --limit 2GB -- python train.py --lr 1e-3
    """
    from milldam.errors import InputError
    from milldam.memory import parse_size
    from milldam.report.timeline import read_timeline
    from milldam.run.watching import watch as run_watched

    seconds, limit_bytes = parse_seconds(every), None if limit is None else parse_size(limit)
    _make_room(out)
    try:
        ended = run_watched(command, out / CSV, every=seconds)
    except InputError as error:
        click.echo(visible(f"milldam: {error}"), err=True)
        sys.exit(_NOT_RUN if shutil.which(command[0]) or Path(command[0]).exists() else _NOT_FOUND)
    timeline, title = read_timeline(out / CSV), _title(command)
    figures = _figures(command, ended, timeline, limit_bytes)
    _write(out, title, figures, timeline, limit_bytes)
    lines = [json.dumps(figures)] if as_json else [*_lines(title, ended, timeline, limit_bytes), _wrote(out)]
    for line in lines:
        click.echo(visible(line), err=True)
    # As a shell has it, when a signal ended the command.
    sys.exit(128 - ended.exit_code if ended.exit_code < 0 else ended.exit_code)


def _make_room(out: Path) -> None:
    """An earlier watch is written over; the record of a run, or anything else, never."""
    from milldam.errors import MismatchError
    from milldam.files import explain_os_errors

    with explain_os_errors(out / CSV):
        out.mkdir(parents=True, exist_ok=True)
        if (out / CSV).exists():
            if not (out / JSON).exists():
                raise MismatchError(f"{out / CSV}: not written by `milldam watch`. Name another folder with -o.")
            (out / CSV).unlink()
        (out / JSON).write_text("{}\n")


def _figures(command: tuple[str, ...], ended: Ended, timeline: Timeline | None, limit: int | None) -> dict[str, Any]:
    """All that is told, in bytes and seconds; without the curve, which is in memory.csv."""
    figures: dict[str, Any] = {"command": command, **asdict(ended), "limit": limit}
    if timeline is None:
        return figures | {"processes": []}
    anonymous, file = timeline.mean
    return figures | {
        "peak": {"anonymous": timeline.peak.anonymous, "file": timeline.peak_file},
        "mean": {"anonymous": anonymous, "file": file},
        "growth": timeline.growth,
        "grows_to_the_end": timeline.grows_to_the_end,
        "seconds_over_limit": 0.0 if limit is None else timeline.seconds_over(limit),
        "processes": [asdict(one) for one in timeline.processes],
    }


def _write(out: Path, title: str, figures: dict[str, Any], timeline: Timeline | None, limit: int | None) -> None:
    """The picture and the figures. A full disk must not hide how the command ended."""
    from milldam.files import write_file, write_json
    from milldam.report.drawing import memory_picture

    with contextlib.suppress(OSError):
        if timeline is not None:
            said = f"peak {format_size(timeline.peak.anonymous)}, {len(timeline.processes)} processes"
            picture = memory_picture(timeline, limit, title, f"{said}, {duration(figures['seconds'])}")
            write_file(out / SVG, picture.encode())
        write_json(out / JSON, figures)


def _wrote(out: Path) -> str:
    written = [name for name in _FILES if (out / name).exists()]
    return f"Wrote {', '.join(written[:-1])} and {written[-1]} to {out}."


def _title(command: tuple[str, ...]) -> str:
    """The command in one line, of long paths only the last part.

    >>> _title(("/opt/venv/bin/python", "/home/anna/jobs/train.py", "--data=/mnt/x/web.jsonl", "s3://b/a/b", "a/b"))
    'python …/train.py --data=…/web.jsonl s3://b/a/b a/b'
    """
    first, *others = command
    # In one line: a word may be a whole script.
    return " ".join(" ".join([Path(first).name or first, *map(_shorter_path, others)]).split())


def _shorter_path(word: str) -> str:
    option, equals, path = word.rpartition("=")
    if "://" in word or path.rstrip("/").count("/") < 2 or any(letter.isspace() for letter in word):
        return word
    return f"{option}{equals}…/{Path(path).name}"


def _lines(title: str, ended: Ended, timeline: Timeline | None, limit: int | None) -> Iterator[str]:
    code = ended.exit_code
    yield ""
    yield f"{shorten(title, 70)}: {duration(ended.seconds)}, {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    if timeline is None:
        yield "  It ended before its memory could be looked at."
        return
    yield from _totals(ended, timeline, limit)
    yield from _table(ended, timeline)


def _totals(ended: Ended, timeline: Timeline, limit: int | None) -> Iterator[str]:
    growth = "" if timeline.growth is None else f"  growth {_rate(timeline.growth)} MB/min"
    peak, mean = timeline.peak.anonymous, timeline.mean
    for name, most, usual, more in (
        ("anonymous", peak, mean[0], growth),
        ("file-backed", timeline.peak_file, mean[1], "  the kernel can take it back"),
    ):
        yield f"  {name:<12} peak {format_size(most):>8}  mean {format_size(usual):>8}{more}"
    if ended.counted_once is not None:
        once = format_size(ended.counted_once.anonymous)
        yield f"  each page counted once, sampled less often: at most {once} anonymous"
    if ended.largest_resident:
        largest = format_size(ended.largest_resident)
        yield f"  largest process, by the kernel's own count: {largest} resident, file-backed included"
    if limit is not None:
        over = timeline.seconds_over(limit)
        beside = f"over it for {duration(over)}" if over else "never over it" if peak <= limit else "over it briefly"
        yield f"  limit {format_size(limit)}: peak {share(peak, limit)} of it, {beside}"
    if timeline.grows_to_the_end:
        yield "  It grew to the very end: perhaps a leak."


def _rate(growth: float) -> str:
    number = growth / 1e6
    return f"{number:+.1f}" if abs(number) >= 0.05 else "0.0"


def _table(ended: Ended, timeline: Timeline) -> Iterator[str]:
    yield ""
    heads = ("lived", "start", "peak", "final", "file")
    yield f"{'pid':>9}  {'process':<30}" + "".join(f"{head:>11}" for head in heads)
    for process in timeline.processes[:_SHOWN]:
        yield _row(process)
    hidden = timeline.processes[_SHOWN:]
    if hidden:
        names = ", ".join(f"{name} ({count:,})" for name, count in Counter(one.name for one in hidden).most_common(4))
        yield f"{'':>9}  and {len(hidden):,} others, {format_size(hidden[0].peak)} at most each: {names}"
    if ended.still_running:
        yield f"{'':>9}  still running, and left so: {', '.join(map(str, ended.still_running[:10]))}"


def _row(process: Process) -> str:
    sizes = (format_size(one) for one in (process.start, process.peak, process.final, process.peak_file))
    seconds = process.last_seen - process.first_seen
    cells = (duration(seconds) if seconds else "seen once", *sizes)
    return f"{process.pid:>9}  {shorten(process.name, 30):<30}" + "".join(f"{cell:>11}" for cell in cells)
