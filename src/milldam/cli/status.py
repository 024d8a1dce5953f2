"""`milldam status`: what a run is doing, seen from another terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from milldam.run import Run

_STUCK_SECONDS = 120


@click.command()
@click.argument("out", type=click.Path(path_type=Path, exists=True))
@click.option("--json", "as_json", is_flag=True, help="Print the status as JSON.")
def status(out: Path, as_json: bool) -> None:
    """Show whether a run works, is stuck, was ended or is finished; each worker's unit, and what is safe.

    \b
    milldam status corpus.milldam
    """
    found = read_status(out)
    if as_json:
        click.echo(json.dumps(found))
        return
    for line in _lines(out, found):
        click.echo(line)


def read_status(out: Path) -> dict[str, Any]:
    """The state of a folder and, where there is a run, what it last wrote down."""
    from milldam.errors import StoreError
    from milldam.run import FINISHED, NEW

    run = _run_of(out)
    state = run.state()
    if state == NEW and not run.is_locked():
        raise StoreError(f"{out}: no run and no store in this folder.")
    path = run.folder / "status.json"
    last: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
    safe = run.safe()
    if state != FINISHED:
        working = run.is_locked()
        heard = max([last.get("time", time.time()), *(w["time"] for w in last.get("workers", {}).values())])
        stuck = time.time() - heard > _STUCK_SECONDS
        state = ("stuck" if stuck else "working") if working else "ended"
    return {"state": state, "safe": safe, **last}


def _run_of(out: Path) -> Run:
    """The run in a folder: of tokens, of a table, or of question answering."""
    from milldam.run import QA_MANIFEST, RUN_FOLDER, TABLE_MANIFEST, TABLE_RECORDS, Run

    if (out / TABLE_MANIFEST).exists() or (out / RUN_FOLDER / TABLE_RECORDS).exists():
        from milldam.mapping.map_run import MapRun

        return MapRun(out)
    run = Run(out)
    unfinished = (run.folder / "plan.json").exists() and "max_seq_length" in run.plan()["settings"]
    if not unfinished and not (out / QA_MANIFEST).exists():
        return run
    from milldam.qa.job import QARun

    return QARun(out)


def _lines(out: Path, found: dict[str, Any]) -> list[str]:
    from milldam.memory import format_size

    safe = found["safe"]
    kept = f"{safe['units_done']} units, {safe['documents']:,} documents, {safe['tokens']:,} tokens"
    units = f"{safe['units_done']}/{found.get('units', '?')} units"
    if found["state"] == "finished":
        return [f"{out}: finished; {kept}."]
    if found["state"] == "ended":
        return [f"{out}: ended before it was done ({units}).", f"Safe: {kept}.", "Run the same command again to go on."]
    lines = [
        f"{out}: {found['state']}, process {found.get('pid')} on {found.get('host')}, stage {found.get('stage')}, "
        f"{units}, {found.get('elapsed', 0):.0f} s",
        f"Memory: {format_size(found.get('anonymous_bytes', 0))} of {format_size(found.get('budget_bytes', 0))}",
        f"Safe: {kept}.",
    ]
    for number, worker in sorted(found.get("workers", {}).items()):
        ago = time.time() - worker["time"]
        lines.append(
            f"  worker {number} (process {worker['pid']}): unit {worker['unit']}, "
            f"{worker.get('documents', 0):,} documents, {format_size(worker.get('anonymous_bytes', 0))}, "
            f"heard {ago:.0f} s ago"
        )
    return lines
