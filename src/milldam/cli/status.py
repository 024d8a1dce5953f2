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
_COUNTED = {"tokens": ("documents", "tokens"), "table": ("rows",)}
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
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(out, found)))


def read_status(out: Path) -> dict[str, Any]:
    """The state of a result and, where there is a run, what it last wrote down; so do its array tasks."""
    from milldam.formats.exporting import EXPORT
    from milldam.input_files import nearby
    from milldam.run.folder import (
        FINISHED,
        NEW,
        RunFolder,
        find_work_folder,
        is_at_work,
        kind_in,
        read_status,
        task_statuses,
    )
    from milldam.run.records import RECORDS, safe_counts
    from milldam.stores.kinds import TOKENS

    work = find_work_folder(out)  # in or beside it
    if work is None and not out.exists():
        raise ConfigError(
            f"{out}: no such file or folder.{nearby(str(out))}\n"
            "Name what a run makes: what was given to it as -o or out."
        )
    folder = work or out
    if folder.is_file():
        raise StoreError(f"{out}: a file; status is of what a run makes. `milldam stats` tells of files.")
    kind = EXPORT if (folder / EXPORT.manifest).exists() else kind_in(folder) or TOKENS
    run = RunFolder(folder, kind)
    state, is_running = run.state(), is_at_work(run.folder)
    if state == NEW and not is_running:
        raise StoreError(f"{out}: no run and no store here.\nName what a run makes: what was given to it as -o or out.")
    last = read_status(run.folder)
    safe = dict.fromkeys(_COUNTED.get(run.plan().get("kind", kind.name), ()), 0) | safe_counts(run.journal, RECORDS)
    if state == FINISHED:
        return {"state": state, "safe": safe, **last}
    tasks = {}
    for label, told in task_statuses(run.folder).items():
        of_task = ("stuck" if _is_silent(told) else "working") if told["held"] else str(told.get("state", "ended"))
        tasks[label] = told | {"state": of_task}
    state = "ended"
    if is_running:
        at_work = [told for told in tasks.values() if told["held"]] or [last]
        state = "stuck" if all(map(_is_silent, at_work)) else "working"
    # Those of the plan, where it has them: a stage such as a probe has units of its own.
    found = {"safe": safe, **last, "units": len(run.units) or last.get("units"), "state": state}
    return found | ({"array_tasks": tasks} if tasks else {})


def _is_silent(told: dict[str, Any]) -> bool:
    """Whether nothing was heard for a while, neither of a run or array task nor of its workers."""
    heard = max([told.get("time", time.time()), *(worker["time"] for worker in told.get("workers", {}).values())])
    return bool(time.time() - heard > _STUCK_SECONDS)


def _lines(out: Path, found: dict[str, Any]) -> list[str]:
    safe, state = found["safe"], found["state"]
    done, all_units = safe.get("units_done", 0), found.get("units")
    kept = [counted(done, "unit")] if "units_done" in safe else []
    shown = ("documents", "tokens", "rows", "files")
    kept += [counted(count, name.removesuffix("s")) for name, count in safe.items() if name in shown]
    if state == "finished":
        return [f"{out}: finished; {', '.join(kept)}."]
    units = f"{done}/{counted(all_units, 'unit')}" if all_units else counted(done, "unit")
    tasks, safe_line = _task_lines(found.get("array_tasks", {})), f"Safe: {', '.join(kept)}."
    if state == "ended":
        lines = [f"{out}: ended before it was done ({units}).", safe_line, *tasks]
        if tasks:
            return [*lines, "Queue the job again to resume."]
        if not found.get("command"):
            return [*lines, "Make the same call, or run the same command, again to resume."]
        there = "" if Path.cwd() == Path(found["directory"]) else f" in {shlex.quote(found['directory'])}"
        return [*lines, f"To resume, run the same command again{there}:", f"  {shlex.join(found['command'])}"]
    if tasks and not found.get("pid"):
        return [f"{out}: {state}, in array tasks, {units}", safe_line, *tasks]
    lines = [
        f"{out}: {state}, process {found.get('pid')} on {found.get('host')}, stage {found.get('stage')}, "
        f"{units}, {found.get('elapsed', 0):.0f} s",
        f"Memory: {format_size(found.get('anonymous_bytes', 0))} of {format_size(found.get('budget_bytes', 0))}",
        safe_line,
    ]
    noun = "row" if "rows" in safe else "document"
    for number, worker in sorted(found.get("workers", {}).items()):
        moved = f"{format_size(worker.get('input_bytes', 0))} of it"
        lines.append(
            f"  worker {number} (process {worker['pid']}): unit {worker['unit']}, "
            f"{counted(worker['documents'], noun) if 'documents' in worker else moved}, "
            f"{format_size(worker.get('anonymous_bytes', 0))}, last seen {time.time() - worker['time']:.0f} s ago"
        )
    return lines + tasks


def _task_lines(tasks: dict[str, Any]) -> list[str]:
    """A line for each array task that is not done, and one for all that are."""
    lines, done = [], 0
    for label, told in tasks.items():
        line = f"  {label}: {told['state']}"
        if told["state"] == "done":
            done += 1
        elif told["state"] == "failed":
            lines.append(f"{line} on {told.get('host')}: {told.get('message')}")
        elif "units" not in told:
            lines.append(line)
        else:
            held = f"{format_size(told['anonymous_bytes'])} of {format_size(told['budget_bytes'])}"
            lines.append(
                f"{line}, process {told['pid']} on {told['host']}, {told['units_done']} of about "
                f"{counted(told['units'], 'unit')}, {told['elapsed']:.0f} s, {held}"
            )
    return lines + ([f"  {counted(done, 'array task')} done"] if done else [])
