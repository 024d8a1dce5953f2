"""`milldam status`: what a run is doing, seen from another terminal."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import click

from milldam.errors import ConfigError, StoreError
from milldam.markup import counted
from milldam.memory import format_size

_STUCK_SECONDS = 120
_TEXT, _ROWS = ("documents", "tokens"), ("rows",)
_COUNTED = {"tokens": _TEXT, "table": _ROWS}
"""What is safe, by kind of store; told also while it is nothing."""


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(out: Path, as_json: bool) -> None:
    """Show whether a run is working, stuck, ended or finished.

    Also shows the unit of each worker and how much of the result is safe. OUT is what the run makes: a folder or an
    export.

    \b
    milldam status corpus.milldam
    """
    found = read_status(out)
    if as_json:
        click.echo(json.dumps(found))
        return
    for line in _lines(out, found):
        click.echo(line)


def _run_folder(out: Path) -> Path:
    """Where the run is that makes OUT: a work folder in or beside it, or OUT itself."""
    from milldam.run.folder import find_work_folder

    beside = find_work_folder(out)
    if beside is None and not out.exists():
        from milldam.input_files import nearby

        raise ConfigError(
            f"{out}: no such file or folder.{nearby(str(out))}\n"
            "Name what a run makes: what was given to it as -o or out."
        )
    return beside or out


def read_status(out: Path) -> dict[str, Any]:
    """The state of a result and, where there is a run, what it last wrote down; so do its array tasks."""
    from milldam.formats.exporting import exported
    from milldam.run.folder import FINISHED, NEW, RunFolder, kind_in
    from milldam.run.records import safe_counts
    from milldam.stores.kinds import TOKENS

    folder = _run_folder(out)
    sizes = exported(out).get("sizes") if folder == out else None
    if sizes:
        return {"state": FINISHED, "safe": {"files": len(sizes)}}
    if folder.is_file():
        raise StoreError(f"{out}: a file; status is of what a run makes. `milldam stats` tells of files.")
    kind = kind_in(folder) or TOKENS
    run = RunFolder(folder, kind)
    state = run.state()
    if state == NEW and not run.presence.is_anybody_here():
        raise StoreError(f"{out}: no run and no store here.\nName what a run makes: what was given to it as -o or out.")
    last = run.presence.told()
    counted_kind = run.plan().get("kind", kind.name)
    safe = dict.fromkeys(_COUNTED.get(counted_kind, ()), 0) | safe_counts(run.journal, "records.jsonl")
    if state == FINISHED:
        return {"state": state, "safe": safe, **last}
    tasks = {label: told | {"state": _task_state(told)} for label, told in run.presence.told_by_tasks().items()}
    if run.presence.is_anybody_here():
        at_work = [told for told in tasks.values() if told["held"]] or [last]
        state = "stuck" if all(map(_is_silent, at_work)) else "working"
    else:
        state = "ended"
    # Those of the plan, where it has them: a stage such as a probe has units of its own.
    units = run.units.count() or last.get("units")
    found = {"safe": safe, **last, "units": units, "state": state}
    return found | ({"array_tasks": tasks} if tasks else {})


def _task_state(told: dict[str, Any]) -> str:
    if told["held"]:
        return "stuck" if _is_silent(told) else "working"
    return str(told.get("state", "ended"))


def _is_silent(told: dict[str, Any]) -> bool:
    """Whether nothing was heard for a while, neither of a run or array task nor of its workers."""
    heard = max([told.get("time", time.time()), *(worker["time"] for worker in told.get("workers", {}).values())])
    return bool(time.time() - heard > _STUCK_SECONDS)


def _lines(out: Path, found: dict[str, Any]) -> list[str]:
    safe = found["safe"]
    figures = [
        counted(count, name.removesuffix("s")) for name, count in safe.items() if name in (*_TEXT, *_ROWS, "files")
    ]
    done, all_units = safe.get("units_done", 0), found.get("units")
    kept = ", ".join([*([counted(done, "unit")] if "units_done" in safe else []), *figures])
    units = f"{done}/{counted(all_units, 'unit')}" if all_units else counted(done, "unit")
    if found["state"] == "finished":
        return [f"{out}: finished; {kept}."]
    tasks = _task_lines(found.get("array_tasks", {}))
    if found["state"] == "ended":
        lines = [f"{out}: ended before it was done ({units}).", f"Safe: {kept}.", *tasks]
        if tasks:
            return [*lines, "Queue the job again to resume."]
        if not found.get("command"):
            return [*lines, "Make the same call, or run the same command, again to resume."]
        there = "" if Path.cwd() == Path(found["directory"]) else f" in {shlex.quote(found['directory'])}"
        return [*lines, f"To resume, run the same command again{there}:", f"  {shlex.join(found['command'])}"]
    if tasks and not found.get("pid"):
        return [f"{out}: {found['state']}, in array tasks, {units}", f"Safe: {kept}.", *tasks]
    lines = [
        f"{out}: {found['state']}, process {found.get('pid')} on {found.get('host')}, stage {found.get('stage')}, "
        f"{units}, {found.get('elapsed', 0):.0f} s",
        f"Memory: {format_size(found.get('anonymous_bytes', 0))} of {format_size(found.get('budget_bytes', 0))}",
        f"Safe: {kept}.",
    ]
    return lines + _worker_lines(found.get("workers", {}), "row" if "rows" in safe else "document") + tasks


def _worker_lines(workers: dict[str, Any], noun: str) -> list[str]:
    def amount(worker: dict[str, Any]) -> str:
        moved = worker.get("input_bytes", 0)
        return counted(worker["documents"], noun) if "documents" in worker else f"{format_size(moved)} of it"

    return [
        f"  worker {number} (process {worker['pid']}): unit {worker['unit']}, "
        f"{amount(worker)}, {format_size(worker.get('anonymous_bytes', 0))}, "
        f"last seen {time.time() - worker['time']:.0f} s ago"
        for number, worker in sorted(workers.items())
    ]


def _task_lines(tasks: dict[str, Any]) -> list[str]:
    """A line for each array task that is not done, and one for all that are."""
    done = sum(told["state"] == "done" for told in tasks.values())
    lines = [_task_line(label, told) for label, told in tasks.items() if told["state"] != "done"]
    return lines + ([f"  {counted(done, 'array task')} done"] if done else [])


def _task_line(label: str, told: dict[str, Any]) -> str:
    line = f"  {label}: {told['state']}"
    if told["state"] == "failed":
        return f"{line} on {told.get('host')}: {told.get('message')}"
    if "units" not in told:
        return line
    return (
        f"{line}, process {told['pid']} on {told['host']},"
        f" {told['units_done']} of about {counted(told['units'], 'unit')}, "
        f"{told['elapsed']:.0f} s, {format_size(told['anonymous_bytes'])} of {format_size(told['budget_bytes'])}"
    )
