"""`milldam status`: what a run is doing, seen from another terminal."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import click

from milldam.cli.commands import json_option
from milldam.errors import ConfigError, StoreError
from milldam.markup import counted
from milldam.memory import format_size

_STUCK_SECONDS = 120
_COUNTED = {"tokens": ("documents", "tokens"), "table": ("rows",)}
"""Counts of what is safe, by kind of store; shown while they are 0 too."""
_NAME_IT = "Name the folder or file that a run makes: its -o or out."


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@json_option
def status(out: Path, as_json: bool) -> None:
    """
    Also shows the unit of each worker and how much of the result is safe. OUT: the folder or file that the run makes.

    \b
    milldam status corpus.milldam
    """
    found = read_status(out)
    click.echo(json.dumps(found) if as_json else "\n".join(_lines(out, found)))


def read_status(out: Path) -> dict[str, Any]:
    """The state of a result and, if there is a run, its last report and those of its array tasks."""
    from milldam.formats.exporting import EXPORT
    from milldam.input_files import nearby
    from milldam.run import folder as runs
    from milldam.run.records import RECORDS, safe_counts
    from milldam.stores.kinds import TOKENS

    work = runs.find_work_folder(out)  # in or beside it
    if work is None and not out.exists():
        raise ConfigError(f"{out}: no such file or folder.{nearby(str(out))}\n{_NAME_IT}")
    folder = work or out
    if folder.is_file():
        raise StoreError(f"{out}: a file that no run makes. `milldam stats` shows what is in files.")
    kind = EXPORT if (folder / EXPORT.manifest).exists() else runs.kind_in(folder) or TOKENS
    run = runs.RunFolder(folder, kind)
    state, is_running = run.state(), runs.is_at_work(run.folder)
    if state == runs.NEW and not is_running:
        raise StoreError(f"{out}: no run and no store here.\n{_NAME_IT}")
    last = runs.read_status(run.folder)
    safe = dict.fromkeys(_COUNTED.get(run.plan().get("kind", kind.name), ()), 0) | safe_counts(run.folder, RECORDS)
    if state == runs.FINISHED:
        return {"state": state, "safe": safe, **last}
    tasks = {}
    for label, report in runs.task_statuses(run.folder).items():
        held = "stuck" if _is_silent(report) else "working"
        tasks[label] = report | {"state": held if report["held"] else str(report.get("state", "ended"))}
    state = "ended"
    if is_running:
        at_work = [report for report in tasks.values() if report["held"]] or [last]
        state = "stuck" if all(map(_is_silent, at_work)) else "working"
    # The units of the plan, if it has them: a stage such as a probe has units of its own.
    found = {"safe": safe, **last, "units": len(run.units) or last.get("units"), "state": state}
    return found | ({"array_tasks": tasks} if tasks else {})


def _is_silent(report: dict[str, Any]) -> bool:
    """Whether neither a run or array task nor its workers have reported for a while."""
    times = [report.get("time", time.time()), *(worker["time"] for worker in report.get("workers", {}).values())]
    return bool(time.time() - max(times) > _STUCK_SECONDS)


def _lines(out: Path, found: dict[str, Any]) -> list[str]:
    safe, state, tasks = found["safe"], found["state"], found.get("array_tasks", {})
    done, all_units = safe.get("units_done", 0), found.get("units")
    kept = [counted(done, "unit")] if "units_done" in safe else []
    names = ("documents", "tokens", "rows", "files")
    kept += [counted(count, name.removesuffix("s")) for name, count in safe.items() if name in names]
    if state == "finished":
        return [f"{out}: finished; {', '.join(kept)}."]
    units = f"{done}/{counted(all_units, 'unit')}" if all_units else counted(done, "unit")
    lines = [f"Safe: {', '.join(kept)}."]
    if state == "ended":
        lines.insert(0, f"{out}: ended before it was done ({units}).")
    elif tasks and not found.get("pid"):
        lines.insert(0, f"{out}: {state}, in array tasks, {units}")
    else:
        process = f"process {found.get('pid')} on {found.get('host')}, stage {found.get('stage')}"
        memory = f"{format_size(found.get('anonymous_bytes', 0))} of {format_size(found.get('budget_bytes', 0))}"
        lines[:0] = [f"{out}: {state}, {process}, {units}, {found.get('elapsed', 0):.0f} s", f"Memory: {memory}"]
    for number, worker in sorted(found.get("workers", {}).items()) if state != "ended" else ():
        seen = f"last seen {time.time() - worker['time']:.0f} s ago"
        lines.append(f"  worker {number} (process {worker['pid']}): unit {worker['unit']}, {seen}")
    for label, task in tasks.items():
        more = ""
        if task["state"] == "failed":
            more = f" on {task.get('host')}: {task.get('message')}"
        elif "units" in task:
            units = f"{task['units_done']} of about {counted(task['units'], 'unit')}"
            more = f", process {task['pid']} on {task['host']}, {units}, {task['elapsed']:.0f} s"
        lines += [f"  {label}: {task['state']}{more}"] if task["state"] != "done" else []
    finished = sum(task["state"] == "done" for task in tasks.values())
    lines += [f"  {counted(finished, 'array task')} done"] if finished else []
    if state != "ended":
        return lines
    if tasks or not found.get("command"):
        again = "Queue the job again" if tasks else "Make the same call, or run the same command, again"
        return [*lines, f"{again} to resume."]
    there = "" if Path.cwd() == Path(found["directory"]) else f" in {shlex.quote(found['directory'])}"
    return [*lines, f"To resume, run the same command again{there}:", f"  {shlex.join(found['command'])}"]
