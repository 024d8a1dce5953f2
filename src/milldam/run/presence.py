"""Who is at work in a run folder, and what they tell of it.

    lock            held while a run is at work
    status.json     what is going on now, for `milldam status`
    tasks/          a folder for each task of a job array, with the same of its own

Array tasks work beside each other; a run that is no array's works beside nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from milldam.errors import RunHeldError, TaskHeldError
from milldam.files import explain_os_errors, read_sealed, replace_unsynced, seal_file
from milldam.run.tasks import ArrayTask

LOCK = "lock"
_TASKS, _STATUS = "tasks", "status.json"


class Presence:
    """This process in a run folder, or any that looks at it. `task`: None: it has the run to itself."""

    def __init__(self, folder: Path, task: ArrayTask | None) -> None:
        self._folder, self._task = folder, task
        self.own = folder if task is None else folder / _TASKS / task.label
        """Folder for what others need not see: what is just being listed, status, memory timeline."""
        self._lock = FileLock(self.own / LOCK)

    def enter(self, name: Path) -> None:
        """Take the lock. Raises TaskHeldError when the same task is at work, RunHeldError when another run is."""
        with explain_os_errors(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
            except Timeout:
                if self._task is not None:
                    raise TaskHeldError(f"{name}: another task is running {self._task.label}.") from None
                raise _held(name) from None
        if any(map(_is_held, self._rivals())):
            self.leave()
            raise _held(name)

    def _rivals(self) -> list[Path]:
        """Who would do the same units: a whole run, any task beside it, and tasks that are cut in another way."""
        tasks = self._task_folders()
        if self._task is None:
            return tasks
        return [self._folder, *(folder for folder in tasks if self._task.overlaps(folder.name))]

    def leave(self) -> None:
        self._lock.release()

    def is_anybody_here(self) -> bool:
        """Whether a run is at work, seen from another process."""
        return any(map(_is_held, (self._folder, *self._task_folders())))

    def _task_folders(self) -> list[Path]:
        return sorted((self._folder / _TASKS).glob("*"))

    # ---- what is going on, for another terminal ----

    def tell(self, status: dict[str, Any]) -> None:
        value = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), **status}
        with explain_os_errors(self.own / _STATUS):
            replace_unsynced(self.own / _STATUS, seal_file(value))

    def told(self) -> dict[str, Any]:
        """What was last told; nothing when that is damaged: it is not synced, and a power failure may tear it."""
        return _read(self.own)

    def forget(self) -> None:
        (self.own / _STATUS).unlink(missing_ok=True)

    def told_by_tasks(self) -> dict[str, dict[str, Any]]:
        """What each array task last told, by its label; `held`: whether it is at work."""
        return {folder.name: _read(folder) | {"held": _is_held(folder)} for folder in self._task_folders()}

    def forget_tasks(self) -> None:
        """Drop what array tasks of an earlier round told: they come again."""
        for folder in self._task_folders():
            (folder / _STATUS).unlink(missing_ok=True)


def _held(name: Path) -> RunHeldError:
    return RunHeldError(f"{name}: another run is using it. `milldam status {name}` shows it.")


def _read(folder: Path) -> dict[str, Any]:
    return read_sealed(folder / _STATUS) or {}


def _is_held(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("rb") as file:
            # Shared: many may look at the same time, and none takes another who looks for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        # ENOSYS: a file system without locks, where the file is there as long as somebody holds it.
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.ENOSYS):
            return True
        raise
