"""The run folder: what was planned, what is done, who is at work. It makes a job resumable.

    plan.json       what this run is: settings, input fingerprint
    inputs.jsonl    every input file with size and version, to name what changed
    units.jsonl     the units, one a line, in plan order; units.offsets: where each line is, the unit's size and key
    *.jsonl         records of finished units, stage by stage (records.py)
    memory.csv      the memory timeline
    lock            held while a run is at work
    status.json     progress, for `milldam status`
    tasks/          a folder for each task of a job array, with a lock and a status of its own

The manifest in the output folder is what makes it a store. While there is a plan that the manifest was not made from,
the store is being made or updated: until the new manifest takes its place, the old store stays whole.

A job whose result is no run folder of its own (export) has one beside OUT, `.OUT.milldam-JOB`, so that OUT appears at
once, by a rename. It stays, and says what OUT was made from.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import itertools
import os
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from milldam.errors import ConfigError, MismatchError, NotReadyError, RunHeldError, Setting, StoreError, TaskHeldError
from milldam.files import (
    explain_os_errors,
    hash_bytes,
    is_whole,
    names_matching,
    read_sealed,
    refuse_address,
    remove_matching,
    remove_temporaries,
    replace_unsynced,
    seal_file,
    write_file,
    write_sealed,
)
from milldam.run.records import RECORDS, forget_records
from milldam.run.units import Identity, InputList, UnitList
from milldam.stores.kinds import KINDS, Kind, store_kind

if TYPE_CHECKING:
    from milldam.run.array import ArrayTask

RUN_FOLDER, PLAN, LOCK = "run", "plan.json", "lock"
PREPARE_FIRST = "milldam run-units --stage prepare COMMAND..."
FINISHED, UNFINISHED, NEW = "finished", "unfinished", "new"
_TASKS, _STATUS = "tasks", "status.json"
_CHANGES_SHOWN = 5


class RunFolder:
    """A locked output folder with its plan and records; use it as a context manager.

    `name`: what messages call it. `task`: the array task that this process does; None: it has the run to itself.
    """

    def __init__(self, out: Path, kind: Kind, *, name: Path | None = None, task: ArrayTask | None = None) -> None:
        self.out, self.folder, self.kind, self.task = out, out / RUN_FOLDER, kind, task
        self.name = name or out
        self.own = self.folder if task is None else self.folder / _TASKS / task.label
        """Folder for what others need not see: status, memory timeline, what is just being listed."""
        self.inputs, self.units = InputList(self.folder, self.own), UnitList(self.folder, "units")

    def __enter__(self) -> RunFolder:
        refuse_foreign(self.out, self.kind)
        if self.task is not None and self.is_new():
            raise NotReadyError(f"{self.name}: not prepared. First: {PREPARE_FIRST}")
        self._new_folders = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        self._lock = FileLock(self.own / LOCK)
        held = RunHeldError(f"{self.name}: another run is using it. `milldam status {self.name}` shows it.")
        with explain_os_errors(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
            except Timeout:
                if self.task is None:
                    raise held from None
                raise TaskHeldError(f"{self.name}: another task is running {self.task.label}.") from None
        # Tasks work beside each other; a whole run works alone.
        if is_held(self.folder) if self.task is not None else any(map(is_held, _task_folders(self.folder))):
            self._lock.release()
            raise held
        return self

    def __exit__(self, *_: object) -> None:
        self.inputs.new.unlink(missing_ok=True)
        if self.task is None and self.is_new():  # nothing came of it: put the folder back as it was
            with contextlib.suppress(OSError):
                if [path.name for path in self.out.iterdir()] == [RUN_FOLDER]:
                    shutil.rmtree(self.folder)
                    for folder in self._new_folders:
                        folder.rmdir()
        self._lock.release()

    # ---- what the folder holds ----

    def is_new(self) -> bool:
        return not (self.out / self.kind.manifest).exists() and not (self.folder / PLAN).exists()

    def plan(self) -> dict[str, Any]:
        """The plan; empty where there is none, or it is damaged."""
        return read_sealed(self.folder / PLAN) or {}

    def _planned(self) -> Identity | None:
        plan = self.plan()
        return Identity(plan["settings"], plan["input"], plan["tokenizer_name"]) if plan else None

    def _made(self) -> Identity | None:
        """The identity of the store; None when there is none, or it can't be read. The manifest may be large."""
        with contextlib.suppress(StoreError):
            return Identity.of_store(self.out, self.kind) if (self.out / self.kind.manifest).exists() else None
        return None

    def state(self) -> str:
        """FINISHED: a store, and no plan for another. UNFINISHED: a store is being made or updated. NEW: neither."""
        if self.is_new():
            return NEW
        if not (self.out / self.kind.manifest).exists():
            return UNFINISHED
        return UNFINISHED if (self.folder / PLAN).exists() and self._planned() != self._made() else FINISHED

    def identity(self) -> Identity:
        """The identity of the store that is, or will be, in the folder. Raises StoreError when it can't be read."""
        if self.state() == FINISHED:
            return Identity.of_store(self.out, self.kind)
        planned = self._planned()
        if planned is None:
            raise StoreError(
                f"{self.folder / PLAN}: damaged, so what this unfinished run was to make is not known. "
                "Start over with ",
                Setting("overwrite", True),
                ".",
            )
        return planned

    # ---- where to begin ----

    def where_to_begin(self, identity: Identity, *, overwrite: bool, adapts: bool = False) -> str:
        """NEW: from nothing. UNFINISHED: resume what is recorded. FINISHED: nothing to do.

        Changed input costs the units that it changed. A folder made with other settings is refused, unless it is to be
        replaced, or holds no results; or `adapts`: its units have other keys, and are made again.
        """
        state = self.state()
        if state == NEW:
            return NEW
        if overwrite:
            return UNFINISHED if state == UNFINISHED and self._planned() == identity else NEW
        if identity == self._made():
            return FINISHED
        if adapts:
            return UNFINISHED
        before = self.identity()
        if before.settings == identity.settings:
            return UNFINISHED
        plans = (self.inputs.path.name, self.inputs.new.name, "units.jsonl")
        results = (path for path in self.folder.glob("*.jsonl") if path.name not in plans)
        if not (self.out / self.kind.manifest).exists() and not any(path.stat().st_size for path in results):
            return NEW
        how = "was made" if state == FINISHED else "holds an unfinished run that was started"
        listed = "\n".join(f"  {line}" for line in before.differences(identity))
        raise MismatchError(
            f"{self.name} {how} with other settings:\n{listed}\nChoose another place, or replace it with ",
            Setting("overwrite", True),
            ".",
        )

    def require_same(self, identity: Identity) -> str:
        """Refuse to work on what was prepared from something else; return the folder's state."""
        differences = self.identity().differences(identity)
        if differences:
            listed = "\n".join(f"  {line}" for line in (*differences, *self.inputs.changes()[:_CHANGES_SHOWN]))
            raise MismatchError(f"{self.name} was prepared from other settings or input:\n{listed}\nPrepare it again.")
        return self.state()

    # ---- the plan ----

    def has_plan(self, identity: Identity) -> bool:
        """Whether the plan is of this input in this place, and its units are listed as they were written."""
        return self._planned() == identity and not self.inputs.differs() and self.lists_units()

    def lists_units(self) -> bool:
        files = self.plan().get("files", {})
        return bool(files) and all(is_whole(self.folder / name, record) for name, record in files.items())

    def start(
        self,
        identity: Identity,
        units: Iterable[Any],
        files: Mapping[str, bytes] | None = None,
        *,
        anew: bool = False,
        outputs: tuple[str, ...] | None = (),
    ) -> None:
        """Write the plan. Nothing in the folder changes before the last unit is listed.

        `files`: see `provide`. `anew`: remove what is recorded, and with it what matches `outputs` (folders end in a
        slash); None: the old result stays until there is a new one.
        """
        started = time.time()
        if not anew and self.state() == UNFINISHED:
            started = self.plan().get("started", started)
        self.tidy()
        with self.units.listing(units) as put_in_place:
            if anew and outputs is None:
                forget_records(self.folder, RECORDS)
            elif anew:
                self._clear(outputs or ())
            self.provide(files or {})
            self.inputs.new.replace(self.inputs.path)
            plan = {
                "kind": self.kind.name,
                "settings": identity.settings,
                "input": identity.input,
                "tokenizer_name": identity.tokenizer_name,
                "started": started,
                "files": put_in_place(),
            }
        write_sealed(self.folder / PLAN, plan)

    def provide(self, files: Mapping[str, bytes]) -> None:
        """Write the files that are missing in the output folder, or damaged."""
        for name, content in files.items():
            if not is_whole(self.out / name, {"bytes": len(content), "xxh3": hash_bytes(content)}):
                write_file(self.out / name, content)

    def _clear(self, outputs: tuple[str, ...]) -> None:
        """Remove what an earlier run left: the manifest first, so that no half of it passes for a store."""
        (self.out / self.kind.manifest).unlink(missing_ok=True)
        for name in outputs:
            if name.endswith("/"):
                shutil.rmtree(self.out / name, ignore_errors=True)
        remove_matching(self.out, *outputs)
        # The plan goes before the records: without it the folder is new again, whatever is left of them.
        (self.folder / PLAN).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith(".") and path.name not in (LOCK, "memory.csv", self.inputs.new.name):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what killed processes left half written, and the last status."""
        (self.own / _STATUS).unlink(missing_ok=True)
        for folder in (self.out, self.folder, *(path for path in self.folder.iterdir() if path.is_dir())):
            remove_temporaries(folder)

    # ---- status, for another terminal ----

    def write_status(self, status: Mapping[str, Any]) -> None:
        value = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), **status}
        with explain_os_errors(self.own / _STATUS):
            replace_unsynced(self.own / _STATUS, seal_file(value))

    def forget_tasks(self) -> None:
        """Remove the status of array tasks of an earlier round."""
        for folder in _task_folders(self.folder):
            (folder / _STATUS).unlink(missing_ok=True)


def read_status(folder: Path) -> dict[str, Any]:
    """The last status of a run or task; empty when it is damaged: it is not synced, and a power failure may tear it."""
    return read_sealed(folder / _STATUS) or {}


def task_statuses(run_folder: Path) -> dict[str, dict[str, Any]]:
    """The last status of each array task, by its label; `held`: whether it is at work."""
    return {folder.name: read_status(folder) | {"held": is_held(folder)} for folder in _task_folders(run_folder)}


def is_at_work(run_folder: Path) -> bool:
    """Whether a run or one of its array tasks is at work, seen from another process."""
    return any(map(is_held, (run_folder, *_task_folders(run_folder))))


def _task_folders(run_folder: Path) -> list[Path]:
    return sorted((run_folder / _TASKS).glob("*"))


def is_held(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("rb") as file:
            # Shared: many processes may look at the same time, and none is taken for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        # ENOSYS: a file system without locks, where the file exists as long as it is held.
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.ENOSYS):
            return True
        raise


def refuse_foreign(out: Path, kind: Kind) -> None:
    """Refuse a folder with other files in it, or with another kind of store."""
    refuse_address(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file. Name a folder for the store.")
    run, names = out / RUN_FOLDER, list(itertools.islice(names_matching(out, "*"), 2))
    # With nothing but an empty run folder, a run was killed before it could lock it.
    is_ours = (out / kind.manifest).exists() or (run / LOCK).exists()
    if names and not is_ours and (names != [RUN_FOLDER] or any(names_matching(run, "*"))):
        raise ConfigError(f"{out}: not empty and not made by milldam; it is left alone. Choose another folder.")
    other = kind_in(out)
    if other is not None and other is not kind:
        raise ConfigError(f"{out}: holds {other.phrase} ({other.manifest}). Choose another folder.")


def kind_in(out: Path) -> Kind | None:
    """The kind of store in a folder, finished or not."""
    plan = out / RUN_FOLDER / PLAN
    planned = (read_sealed(plan) or {}).get("kind") if plan.is_file() else None
    return store_kind(out) or next((kind for kind in KINDS if kind.name == planned), None)


def find_work_folder(out: Path) -> Path | None:
    """The work folder of a job that makes OUT, in it or beside it."""
    name = glob.escape(out.name)
    places = [*out.glob(f".milldam-*/{RUN_FOLDER}"), *out.parent.glob(f".{name}.milldam*/{RUN_FOLDER}")]
    return places[0].parent if places else None
