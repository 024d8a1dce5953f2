"""Scripts of `milldam slurm` through a stand-in for sbatch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any


def queue(script: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a script and wait until all of its jobs are over: the state of each, and the exit codes of its tasks."""
    jobs = folder / "jobs"
    jobs.mkdir(parents=True)
    (folder / "sbatch").write_bytes((Path(__file__).parent / "sbatch_stand_in.py").read_bytes())
    shutil.copymode("/bin/sh", folder / "sbatch")
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "STAND_IN_FOLDER": str(jobs)}
    ran = subprocess.run(["bash", script], env=environment, check=True, capture_output=True, text=True)
    done = [jobs / f"{number}.done" for number in ran.stdout.split()[1:]]
    deadline = time.monotonic() + 300
    while not all(path.exists() for path in done):
        assert time.monotonic() < deadline, "jobs do not end"
        time.sleep(0.05)
    ended = [json.loads(path.read_text()) for path in done]
    messages = "\n".join(path.read_text() for path in sorted(jobs.glob("*.log")))
    assert {one["state"] for one in ended} == {"COMPLETED"}, messages
    return ended
