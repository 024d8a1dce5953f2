"""The run folder: what was planned, what is done, who is at work. It makes a job resumable.

    plan.json       what this run is: settings, input fingerprint
    inputs.jsonl    every input file with size and version, to name what changed
    units.jsonl     the units, one a line, in plan order; units.offsets: where each line is, the unit's size and key
    *.jsonl         records of finished units, stage by stage (records.py)
    memory.csv      the memory timeline
    lock            held while a run is at work
    status.json     what is going on now, for `milldam status`
    tasks/          a folder for each task of a job array, with a lock and a status of its own

The manifest in the output folder is what makes it a store. While a plan is there that the manifest was not made from,
the store is being made, or updated: until the new manifest takes its place, the old store stays whole.

A job whose result is no run folder of its own (export) has one beside OUT, `.OUT.milldam-JOB`, so that OUT appears at
once, by a rename; it is removed when the job is done.

Array tasks work beside each other; a run that is no array's works beside nobody.
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
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from filelock import FileLock, Timeout

from milldam.errors import (
    ConfigError,
    MismatchError,
    NotReadyError,
    ResourceError,
    RunHeldError,
    Setting,
    StoreError,
    TaskHeldError,
)
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
from milldam.run.records import Journal
from milldam.run.tasks import ArrayTask
from milldam.run.units import Identity, InputList, PlannedUnit, UnitList
from milldam.stores.kinds import KINDS, Kind, store_kind

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
        held = RunHeldError(f"{name}: another run is using it. `milldam status {name}` shows it.")
        with explain_os_errors(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
            except Timeout:
                if self._task is not None:
                    raise TaskHeldError(f"{name}: another task is running {self._task.label}.") from None
                raise held from None
        # Who would do the same units: a whole run, any task beside it, and tasks that are cut in another way.
        rivals = self._task_folders()
        if self._task is not None:
            rivals = [self._folder, *(folder for folder in rivals if self._task.overlaps(folder.name))]
        if any(map(_is_held, rivals)):
            self.leave()
            raise held

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
        return read_sealed(self.own / _STATUS) or {}

    def forget(self) -> None:
        (self.own / _STATUS).unlink(missing_ok=True)

    def told_by_tasks(self) -> dict[str, dict[str, Any]]:
        """What each array task last told, by its label; `held`: whether it is at work."""
        return {
            folder.name: (read_sealed(folder / _STATUS) or {}) | {"held": _is_held(folder)}
            for folder in self._task_folders()
        }

    def forget_tasks(self) -> None:
        """Drop what array tasks of an earlier round told: they come again."""
        for folder in self._task_folders():
            (folder / _STATUS).unlink(missing_ok=True)


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


# ---- the folder ----

RUN_FOLDER, PLAN = "run", "plan.json"
PREPARE_FIRST = "milldam run-units --stage prepare COMMAND..."
FINISHED, UNFINISHED, NEW = "finished", "unfinished", "new"
_CHANGES_SHOWN = 5


class RunFolder:
    """A locked output folder with its plan and records; use it as a context manager.

    `name`: what messages call it. `task`: what this process does of a run that several work on; None: it has the run
    to itself.
    """

    def __init__(self, out: Path, kind: Kind, *, name: Path | None = None, task: ArrayTask | None = None) -> None:
        self.out, self.folder, self.kind, self.task = out, out / RUN_FOLDER, kind, task
        self.name = name or out
        self.presence = Presence(self.folder, task)
        self.own = self.presence.own
        self.journal = Journal(self.folder, None if task is None else task.label)
        self.inputs = InputList(self.folder, self.own)
        self.units = UnitList(self.folder, "units")
        self._staged = UnitList(self.own, "units.new")
        self._made: list[Path] = []
        """Folders that were not there before."""
        self.refusal: ResourceError | None = None
        """Why the folder can only be looked at: nothing can be written there."""

    def __enter__(self) -> RunFolder:
        refuse_foreign(self.out, self.kind)
        if self.task is not None and self.is_new():
            raise NotReadyError(f"{self.name}: not prepared. First: {PREPARE_FIRST}")
        self._made.extend(folder for folder in (self.out, *self.out.parents) if not folder.exists())
        try:
            self.presence.enter(self.name)
        except ResourceError as error:
            if self.task is not None or not (self.out / self.kind.manifest).exists():
                raise
            # It may be up to date: what this run has to list lies elsewhere.
            self.refusal, self.own = error, Path(tempfile.mkdtemp(prefix="milldam-"))
            self.inputs, self._staged = InputList(self.folder, self.own), UnitList(self.own, "units.new")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.journal.close()
        self.units.close()
        self._staged.remove()
        self.inputs.forget()
        if self.refusal is not None:
            shutil.rmtree(self.own)
            if isinstance(error, OSError):  # it was not only looked at
                raise self.refusal
            return
        if self.task is None and self.is_new():
            # Nothing came of it, not even a plan: put the folder back as it was. With more in it, the lock says whose
            # it is.
            with contextlib.suppress(OSError):
                if [path.name for path in self.out.iterdir()] == [RUN_FOLDER]:
                    shutil.rmtree(self.folder)
                    for folder in self._made:
                        folder.rmdir()
        self.presence.leave()

    # ---- what the folder holds ----

    def is_new(self) -> bool:
        """Without a look into the manifest."""
        return not (self.out / self.kind.manifest).exists() and not (self.folder / PLAN).exists()

    def made(self) -> Identity | None:
        """What the store was made from; None: there is none, or that can't be told. The manifest may be large."""
        with contextlib.suppress(StoreError):
            return Identity.of_store(self.out, self.kind) if (self.out / self.kind.manifest).exists() else None
        return None

    def plan(self) -> dict[str, Any]:
        """What was written down when the run began; empty where there is none, or it is damaged."""
        return read_sealed(self.folder / PLAN) or {}

    def planned(self) -> Identity | None:
        """What is to be made; None: nothing, or the plan is damaged."""
        plan = self.plan()
        return Identity(plan["settings"], plan["input"], plan["tokenizer_name"]) if plan else None

    def state(self) -> str:
        """FINISHED: a store, and no plan for another. UNFINISHED: a store is being made or updated. NEW: neither."""
        has_plan = (self.folder / PLAN).exists()
        if not (self.out / self.kind.manifest).exists():
            return UNFINISHED if has_plan else NEW
        return UNFINISHED if has_plan and self.planned() != self.made() else FINISHED

    def identity(self) -> Identity:
        """What the store in the folder is, or is to be, made from. Raises StoreError when that can't be told."""
        if self.state() == FINISHED:
            return Identity.of_store(self.out, self.kind)
        planned = self.planned()
        if planned is None:
            raise StoreError(
                f"{self.folder / PLAN}: damaged, so what this unfinished run was to make is not known. "
                "Start over with ",
                Setting("overwrite", True),
                ".",
            )
        return planned

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
            return UNFINISHED if state == UNFINISHED and self.planned() == identity else NEW
        if identity == self.made():
            return FINISHED
        if adapts:
            return UNFINISHED
        before = self.identity()
        if before.settings == identity.settings:
            return UNFINISHED
        if not has_results and not (self.out / self.kind.manifest).exists():
            return NEW
        how = "was made" if state == FINISHED else "holds an unfinished run that was started"
        listed = "\n".join(f"  {line}" for line in before.differences(identity))
        raise MismatchError(
            f"{self.name} {how} with other settings:\n{listed}\nChoose another place, or replace it with ",
            Setting("overwrite", True),
            ".",
        )

    def require_same(self, identity: Identity) -> str:
        """Refuse to work on what was prepared from something else; the state of what is there."""
        differences = self.identity().differences(identity)
        if differences:
            listed = "\n".join(f"  {line}" for line in (*differences, *self.inputs.changes()[:_CHANGES_SHOWN]))
            raise MismatchError(f"{self.name} was prepared from other settings or input:\n{listed}\nPrepare it again.")
        return self.state()

    # ---- the plan ----

    def stage(self, units: Iterable[PlannedUnit]) -> int:
        """List the units beside what is in the folder; how many there are."""
        return self._staged.write(units)

    def start(
        self,
        identity: Identity,
        files: Mapping[str, bytes] = MappingProxyType({}),
        *,
        outputs: tuple[str, ...] | None = None,
    ) -> None:
        """Take the staged units for the plan; what is recorded stays, and `files` are there (`provide`).

        `outputs`: begin anew instead: what matches (folders end in a slash) is removed, and all that is recorded.
        """
        started = time.time()
        if outputs is not None:
            self._clear(outputs)
        elif self.state() == UNFINISHED:
            started = self.plan().get("started", started)
        self.provide(files)
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

    def provide(self, files: Mapping[str, bytes]) -> None:
        """Write what is missing in the output folder, or not as it should be."""
        for name, content in files.items():
            if not is_whole(self.out / name, {"bytes": len(content), "xxh3": hash_bytes(content)}):
                write_file(self.out / name, content)

    def needs_plan(self, identity: Identity, begin: str) -> bool:
        """Whether units are to be staged: there is no plan, or it is of other input, or of the same that lies
        elsewhere, or what lists it is damaged. A task goes by the plan that is there."""
        if begin == NEW or self.task is not None:
            return begin == NEW
        return self.planned() != identity or self.inputs.differs() or not self.lists_units()

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
            elif path.name not in (LOCK, "memory.csv", "inputs.new.jsonl", "units.new.jsonl", "units.new.offsets"):
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what processes that were killed left half written, and what the last one told of itself."""
        if self.refusal is not None:
            return
        self.presence.forget()
        for folder in (self.out, self.folder, *(path for path in self.folder.iterdir() if path.is_dir())):
            remove_temporaries(folder)


def refuse_foreign(out: Path, kind: Kind) -> None:
    """Never mix our files with somebody else's, nor those of two kinds of stores."""
    refuse_address(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file. Name a folder for the store.")
    is_ours = (out / kind.manifest).exists() or (out / RUN_FOLDER / LOCK).exists() or _is_barely_begun(out)
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


def find_work_folder(out: Path) -> Path | None:
    """The work folder of a job that makes OUT, in it or beside it."""
    name = glob.escape(out.name)
    places = [*out.glob(f".milldam-*/{RUN_FOLDER}"), *out.parent.glob(f".{name}.milldam*/{RUN_FOLDER}")]
    return places[0].parent if places else None
