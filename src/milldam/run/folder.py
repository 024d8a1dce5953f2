"""The run folder: what was planned, what is done, who is at work. It makes a job resumable.

    plan.json       what this run is: settings, input fingerprint
    inputs.jsonl    every input file with size and version, to name what changed
    units.jsonl     the units, one a line, in plan order; units.offsets: where each line is, the unit's size and key
    *.jsonl         records of finished units, stage by stage (records.py)
    status.json     what is going on now, for `milldam status`
    memory.csv      the memory timeline
    lock            held while a run is at work
    tasks/          a folder per task of a job array, with its own status and memory timeline

The manifest in the output folder is what makes it a store. While a plan is there that the manifest was not made from,
the store is being made, or updated: until the new manifest takes its place, the old store stays whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from milldam.errors import ConfigError, MismatchError, NotReadyError, Setting, StoreError, TaskHeldError
from milldam.files import (
    explain_os_errors,
    names_matching,
    refuse_address,
    remove_matching,
    remove_temporaries,
    write_file,
)
from milldam.run.array_task import ArrayTask
from milldam.run.identity import Identity
from milldam.run.inputs import InputList
from milldam.run.journal import Journal
from milldam.run.units import PlannedUnit, UnitList
from milldam.sealed import is_whole, read_sealed, seal_file, write_sealed
from milldam.stores.kinds import KINDS, Kind, store_kind

RUN_FOLDER, PLAN = "run", "plan.json"
FINISHED, UNFINISHED, NEW = "finished", "unfinished", "new"
_TASKS = "tasks"
_CHANGES_SHOWN = 5


class RunFolder:
    """A locked output folder with its plan and records; use it as a context manager.

    `name`: what messages call it. `task`: what this process does of a run that several work on; None: it has the run
    to itself.
    """

    def __init__(self, out: Path, kind: Kind, *, name: Path | None = None, task: ArrayTask | None = None) -> None:
        self.out, self.folder, self.kind, self.task = out, out / RUN_FOLDER, kind, task
        self.name = name or out
        self.own = self.folder if task is None else self.folder / _TASKS / task.label
        """Folder for what others need not see: what is just being listed, status, memory timeline."""
        self.journal = Journal(self.folder, None if task is None else task.label)
        self.inputs = InputList(self.folder, self.own)
        self.units = UnitList(self.folder, "units")
        self._staged = UnitList(self.own, "units.new")
        self._lock = FileLock(self.own / "lock")
        self._made: list[Path] = []
        """Folders that were not there before."""

    # ---- who is at work ----

    def __enter__(self) -> RunFolder:
        refuse_foreign(self.out, self.kind)
        if self.task is not None and self._is_new():
            raise NotReadyError(f"{self.name}: not prepared. First: milldam run-units CONFIG --stage prepare")
        self._made.extend(folder for folder in (self.out, *self.out.parents) if not folder.exists())
        with explain_os_errors(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
                self._refuse_company()
            except Timeout:
                if self.task is not None and not self._lock.is_locked:
                    raise TaskHeldError(f"{self.name}: another task is at work on {self.task.label}.") from None
                self._lock.release()
                raise ConfigError(
                    f"{self.name}: another run is at work on it. `milldam status {self.name}` shows it."
                ) from None
        return self

    def _refuse_company(self) -> None:
        """Array tasks work beside each other; who has the run to himself works beside nobody."""
        others = self._task_folders()
        if self.task is not None:
            # Tasks that are cut in another way would do the same units.
            others = [self.folder, *(folder for folder in others if self.task.overlaps(folder.name))]
        if any(_is_held(other / "lock") for other in others):
            raise Timeout(str(self.own))

    def _task_folders(self) -> list[Path]:
        return sorted((self.folder / _TASKS).glob("*"))

    def __exit__(self, *_: object) -> None:
        self.journal.close()
        self.units.close()
        self._staged.remove()
        self.inputs.forget()
        if self.task is None and self._is_new():
            self._leave_no_trace()
        self._lock.release()

    def _leave_no_trace(self) -> None:
        """Nothing came of it, not even a plan: put the folder back as it was."""
        for name in ("memory.csv", "lock"):
            (self.folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()
            for folder in self._made:
                folder.rmdir()

    def is_locked(self) -> bool:
        """Whether a run is at work here, seen from another process."""
        return any(_is_held(folder / "lock") for folder in (self.folder, *self._task_folders()))

    # ---- what the folder holds ----

    def state(self) -> str:
        """FINISHED: a store, and no plan for another. UNFINISHED: a store is being made or updated. NEW: neither."""
        if self._is_new():
            return NEW
        if not (self.out / self.kind.manifest).exists():
            return UNFINISHED
        has_plan = (self.folder / PLAN).exists()
        return UNFINISHED if has_plan and self._planned() != self._finished() else FINISHED

    def _is_new(self) -> bool:
        """Without a look into the manifest, which may be large."""
        return not (self.out / self.kind.manifest).exists() and not (self.folder / PLAN).exists()

    def identity(self) -> Identity:
        """What the store in the folder is, or is to be, made from."""
        if self.state() == FINISHED:
            return Identity.of_store(self.out, self.kind)
        planned = self._planned()
        if planned is None:
            raise StoreError(
                f"{self.folder / PLAN}: damaged, so nobody can tell what this unfinished run was to make. "
                "Start anew with ",
                Setting("overwrite", True),
                ".",
            )
        return planned

    def _finished(self) -> Identity | None:
        """What the store was made from; None: that can't be told."""
        try:
            return Identity.of_store(self.out, self.kind)
        except StoreError:
            return None

    def _planned(self) -> Identity | None:
        plan = self.plan()
        return Identity(plan["settings"], plan["input"], plan["tokenizer_name"]) if plan else None

    def plan(self) -> dict[str, Any]:
        """What was written down when the run began; empty where there is none, or it is damaged."""
        return read_sealed(self.folder / PLAN) or {}

    # ---- where to begin ----

    def where_to_begin(self, identity: Identity, *, overwrite: bool, has_results: bool, adapts: bool = False) -> str:
        """NEW: from nothing. UNFINISHED: with what is recorded. FINISHED: nothing to do.

        Input that changed costs the units that it changed. What was made with other settings is refused, unless it is
        to be replaced, or nothing has come of it; or `adapts`: its units have other keys, and are made again.
        """
        state = self.state()
        if state == NEW:
            return NEW
        if overwrite:
            return UNFINISHED if state == UNFINISHED and self._planned() == identity else NEW
        if identity == self._finished():
            return FINISHED
        if adapts:
            return UNFINISHED
        before = self.identity()
        if before.settings == identity.settings:
            return UNFINISHED
        if state == UNFINISHED and not has_results and not (self.out / self.kind.manifest).exists():
            return NEW
        how = "was made" if state == FINISHED else "holds an unfinished run that was started"
        listed = "\n".join(f"  {line}" for line in before.differences(identity))
        raise MismatchError(
            f"{self.name} {how} with other settings:\n{listed}\nChoose another place, or replace it with ",
            Setting("overwrite", True),
            ".",
        )

    def require_same(self, identity: Identity) -> None:
        """Refuse to work on what was prepared from something else."""
        differences = self.identity().differences(identity)
        if differences:
            listed = "\n".join(f"  {line}" for line in (*differences, *self.inputs.changes()[:_CHANGES_SHOWN]))
            raise MismatchError(f"{self.name} was prepared from other settings or input:\n{listed}\nPrepare it again.")

    # ---- the plan ----

    def stage(self, units: Iterable[PlannedUnit]) -> int:
        """List the units beside what is in the folder; how many there are."""
        return self._staged.write(units)

    def start(self, identity: Identity, files: dict[str, bytes], outputs: tuple[str, ...]) -> None:
        """Begin anew: remove what matches `outputs` (folders end in a slash), write `files`, then the staged plan."""
        self._clear(outputs)
        for name, content in files.items():
            write_file(self.out / name, content)
        self._take_staged(identity, time.time())

    def replan(self, identity: Identity, files: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Go on with the staged plan: the input has changed, or lies elsewhere. `files` are written where they miss."""
        for name, content in files.items():
            if not (self.out / name).exists():
                write_file(self.out / name, content)
        started = time.time() if self.state() == FINISHED else self.plan().get("started", time.time())
        self._take_staged(identity, started)

    def _take_staged(self, identity: Identity, started: float) -> None:
        self._staged.replace(self.units)
        self.inputs.take()
        told = {
            "kind": self.kind.name,
            "settings": identity.settings,
            "input": identity.input,
            "tokenizer_name": identity.tokenizer_name,
        }
        # With size and hash of the lists that it goes by.
        write_sealed(self.folder / PLAN, told | {"started": started, "files": self.units.records()})

    def needs_replan(self, identity: Identity) -> bool:
        """Whether the plan is of other input, or of the same that lies elsewhere, or what lists it is damaged."""
        return self._planned() != identity or self.inputs.differs() or not self.lists_units()

    def lists_units(self) -> bool:
        """Whether the list of units is as it was written."""
        files = self.plan().get("files", {})
        return bool(files) and all(is_whole(self.folder / name, record) for name, record in files.items())

    def _clear(self, outputs: tuple[str, ...]) -> None:
        """Remove what an earlier run left: the manifest first, so that no half of it passes for a store."""
        (self.out / self.kind.manifest).unlink(missing_ok=True)
        self.journal.close()
        self.tidy()
        for name in outputs:
            if name.endswith("/"):
                shutil.rmtree(self.out / name, ignore_errors=True)
        remove_matching(self.out, *outputs)
        # The plan goes before the records: without it the folder is new again, whatever is left of them.
        (self.folder / PLAN).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", "memory.csv", "inputs.new.jsonl", "units.new.jsonl", "units.new.offsets"):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what processes that were killed left half written, and what the last one told of itself."""
        (self.own / "status.json").unlink(missing_ok=True)
        for folder in (self.out, self.folder, *(path for path in self.folder.iterdir() if path.is_dir())):
            remove_temporaries(folder)

    # ---- what is going on, for another terminal ----

    def write_status(self, status: dict[str, Any]) -> None:
        value = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), **status}
        temporary = self.own / "status.json.new"
        with explain_os_errors(temporary):
            temporary.write_bytes(seal_file(value))
            temporary.replace(self.own / "status.json")

    def task_statuses(self) -> dict[str, dict[str, Any]]:
        """What each array task last wrote down, by its label; `held`: whether it is at work."""
        return {
            folder.name: read_status(folder) | {"held": _is_held(folder / "lock")} for folder in self._task_folders()
        }

    def forget_tasks(self) -> None:
        """Drop what array tasks of an earlier round told: they come again."""
        for folder in self._task_folders():
            (folder / "status.json").unlink(missing_ok=True)


def read_status(folder: Path) -> dict[str, Any]:
    """What was last written down; nothing when that is damaged: it is not synced, and a power failure may tear it."""
    return read_sealed(folder / "status.json") or {}


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
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


def refuse_foreign(out: Path, kind: Kind) -> None:
    """Never mix our files with somebody else's, nor those of two kinds of stores."""
    refuse_address(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file. Name a folder for the store.")
    is_ours = (out / kind.manifest).exists() or (out / RUN_FOLDER / "lock").exists() or _is_barely_begun(out)
    if out.is_dir() and any(names_matching(out, "*")) and not is_ours:
        raise ConfigError(f"{out}: not empty and not made by milldam; it is left alone. Choose another folder.")
    other = kind_in(out)
    if other is not None and other is not kind:
        raise ConfigError(f"{out}: holds {other.phrase} ({other.manifest}). Choose another folder.")


def _is_barely_begun(out: Path) -> bool:
    """Killed when it had made its folder, before it could lock it."""
    names = list(itertools.islice(names_matching(out, "*"), 2))
    return names == [RUN_FOLDER] and next(names_matching(out / RUN_FOLDER, "*"), None) is None


def kind_in(out: Path) -> Kind | None:
    """The kind of store in a folder, finished or not."""
    plan = out / RUN_FOLDER / PLAN
    planned = (read_sealed(plan) or {}).get("kind") if plan.is_file() else None
    return store_kind(out) or next((kind for kind in KINDS if kind.name == planned), None)
