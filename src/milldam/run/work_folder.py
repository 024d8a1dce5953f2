"""The work folder of a job whose result is no run folder of its own.

    beside OUT: `.OUT.milldam-JOB`    OUT appears at once, when it is whole: a rename on the same disk
    in OUT: `OUT/.milldam-JOB`        OUT is updated in place, and may be a mount point
    elsewhere                         OUT is not on this machine, or not to be written to

It has `run/`, as of any job (plan, records, lock, status), and `files/`, what will be OUT, or in it. When the job is
done it is removed; what OUT was made from is kept in OUT.
"""

from __future__ import annotations

import glob
import shutil
from pathlib import Path
from typing import Any

from milldam.run.folder import PLAN, RUN_FOLDER, RunFolder
from milldam.sealed import read_sealed
from milldam.stores.kinds import Kind


class WorkFolder:
    """Where a job of a kind works on what messages call `name`."""

    def __init__(self, work: Path, kind: Kind, name: Path) -> None:
        self.work, self._kind, self._name = work, kind, name
        self.files = work / "files"

    def begun(self) -> dict[str, Any] | None:
        """The settings of the job that was begun here and is not finished; None: there is none."""
        settings: dict[str, Any] | None = (read_sealed(self.work / RUN_FOLDER / PLAN) or {}).get("settings")
        return settings

    def remove(self) -> None:
        """Remove it, unless somebody is at work in it again."""
        with RunFolder(self.work, self._kind, name=self._name):
            self.clear()

    def clear(self) -> None:
        """Remove all that is in it, while its lock is held. The manifest last: it tells a later call what was done."""
        for path in (self.files, self.work / RUN_FOLDER, self.work):
            shutil.rmtree(path, ignore_errors=True)


def find_work_folder(out: Path) -> Path | None:
    """The work folder of a job that makes OUT, in it or beside it."""
    name = glob.escape(out.name)
    places = [*out.glob(f".milldam-*/{RUN_FOLDER}"), *out.parent.glob(f".{name}.milldam*/{RUN_FOLDER}")]
    return places[0].parent if places else None
