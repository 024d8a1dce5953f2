#!/usr/bin/env python3
"""A stand-in for Slurm's sbatch: takes jobs and arrays with dependencies, and runs them on this machine.

Put first on PATH as `sbatch`, with STAND_IN_FOLDER set. It honours --parsable, --array=0-N[%M], --job-name, --requeue,
--dependency=afterok:ID[:ID] and --wrap or a script from standard input; other options are recorded. As sbatch does, it
answers at once; a process of its own waits for the dependencies and runs the tasks of an array in parallel. A job
behind one that failed is never started. A task that was ended by SIGKILL counts as on a machine that failed: with
--requeue it runs again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

COMPLETED, FAILED, CANCELLED = "COMPLETED", "FAILED", "CANCELLED"
KILLED = (-9, 137)
MOST_RUNS = 3


def main(arguments: list[str]) -> None:
    folder = Path(os.environ["STAND_IN_FOLDER"])
    job = parse(arguments)
    wrapped = job["options"].get("wrap")
    job["script"] = sys.stdin.read() if wrapped is None else f"#!/bin/sh\n{wrapped}\n"
    if not job["script"].startswith("#!"):
        sys.exit("sbatch: error: This does not look like a batch script.")
    for number in itertools.count(100):
        with contextlib.suppress(FileExistsError):
            (folder / f"{number}.taken").touch(exist_ok=False)
            break
    (folder / f"{number}.json").write_text(json.dumps(job))
    # As the daemons: not a child of who asks, and deaf to what he is told.
    subprocess.Popen(
        [sys.executable, __file__, "--run", str(folder), str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "errors.log").open("a"),
        start_new_session=True,
    )
    print(number if "parsable" in job["options"] else f"Submitted batch job {number}")


def parse(arguments: list[str]) -> dict[str, Any]:
    """The options as sbatch is given them here: --name or --name=value."""
    if stray := [one for one in arguments if not one.startswith("--")]:
        sys.exit(f"sbatch: error: Unable to open file {stray[0]}")
    options = {name[2:]: value for name, _, value in (one.partition("=") for one in arguments)}
    tasks, at_once = [None], 1
    if "array" in options:
        numbers, _, most = options["array"].partition("%")
        first, _, last = numbers.partition("-")
        tasks = list(range(int(first), int(last or first) + 1))
        at_once = int(most or len(tasks))
    kind, _, after = options.get("dependency", "afterok:").partition(":")
    if kind != "afterok" or ("dependency" in options and not all(one.isdigit() for one in after.split(":"))):
        sys.exit("sbatch: error: Batch job submission failed: Job dependency problem")
    return {"options": options, "tasks": tasks, "at_once": at_once, "after": [one for one in after.split(":") if one]}


def run(folder: Path, number: str) -> None:
    job = json.loads((folder / f"{number}.json").read_text())
    state, tasks = CANCELLED, {}
    if all(wait_for(folder, one) == COMPLETED for one in job["after"]):
        slots = threading.Semaphore(job["at_once"])
        threads = [
            threading.Thread(target=run_task, args=(folder, number, job, one, slots, tasks)) for one in job["tasks"]
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        state = FAILED if any(runs[-1] for runs in tasks.values()) else COMPLETED
    done = {"state": state, "tasks": tasks}
    (folder / f"{number}.new").write_text(json.dumps(done))
    (folder / f"{number}.new").rename(folder / f"{number}.done")


def run_task(
    folder: Path, number: str, job: dict[str, Any], task: int | None, slots: threading.Semaphore, codes: dict[str, Any]
) -> None:
    label = number if task is None else f"{number}_{task}"
    environment = os.environ | {"SLURM_JOB_ID": number}
    if task is not None:
        environment |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": number}
    script = folder / f"{label}.sh"
    script.write_text(job["script"])
    script.chmod(0o700)
    runs: list[int] = []
    with slots:
        while not runs or ("requeue" in job["options"] and runs[-1] in KILLED and len(runs) < MOST_RUNS):
            with (folder / f"{label}.log").open("ab") as log:
                runs.append(subprocess.run([script], env=environment, stdout=log, stderr=log).returncode)
    codes["" if task is None else str(task)] = runs


def wait_for(folder: Path, number: str) -> str:
    """The state of a job, once it is over."""
    path = folder / f"{number}.done"
    while not path.exists():
        if not (folder / f"{number}.taken").exists():
            return FAILED
        time.sleep(0.02)
    return str(json.loads(path.read_text())["state"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run(Path(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1:])
