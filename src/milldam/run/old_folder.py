"""The locked output folder of a run, with its plan and its records."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from milldam.errors import ConfigError, MismatchError, NotReadyError, StoreError, TaskHeldError
from milldam.files import (
    NewFile,
    explain_os_errors,
    hash_file,
    names_matching,
    refuse_address,
    remove_matching,
    remove_temporaries,
    write_file,
)
from milldam.input_files import InputState
from milldam.run.identity import Identity
from milldam.run.journal import Journal
from milldam.run.old_records import PartRecord, Progress, Sequence, parse_record
from milldam.run.old_shares import Share
from milldam.run.old_units import UnitList
from milldam.sealed import ended, is_whole, read_sealed, seal_file, write_sealed
from milldam.stores.kinds import store_kind
from milldam.stores.place import Folder
from milldam.stores.tokens.manifest import NAME as MANIFEST
from milldam.stores.tokens.manifest import ManifestText

RUN_FOLDER, PACKED_FOLDER, DEDUP_FOLDER = "run", "packed", "dedup"
QA_RECORDS, TABLE_RECORDS = "made.jsonl", "mapped.jsonl"
"""What tells an unfinished store of features or table: none is replaced by another kind."""
FINISHED, UNFINISHED, NEW = "finished", "unfinished", "new"
SHARES_FOLDER, RECORDS = "shares", "records.jsonl"
_GATHERED = ("rejects.jsonl", "dropped.jsonl.zst")
_CHANGES_SHOWN, _FILES_COMPARED = 5, 200_000
_LINES_GATHERED = 1024
PLAN = "plan.json"


class Run:
    """A locked output folder with its plan and records; use it as a context manager."""

    manifest = MANIFEST
    """The file that makes the folder a store."""

    def __init__(self, out: Path, name: Path | None = None, share: Share | None = None) -> None:
        self.out, self.folder = out, out / RUN_FOLDER
        self.name = name or out
        self._out = str(out)
        self.share = share
        """What this process does of a run that several work on; None: it has the run to itself."""
        self.own = self.folder if share is None else self.folder / SHARES_FOLDER / share.label
        """Folder for what others need not see: what is just being listed, status, memory timeline."""
        self._lock = FileLock(self.own / "lock")
        self._journal = Journal(self.folder, None if share is None else share.label)
        self._units, self._staged_units = UnitList(self.folder, "units"), UnitList(self.own, "units.new")
        self._listed_at: dict[int, int] = {}
        """Where the files of each data set begin in what was just listed."""
        self.progress = Progress()
        self._stands: Callable[[PartRecord], bool] = lambda record: True

    def __enter__(self) -> Run:
        refuse_foreign(self.out, self.manifest)
        if self.share is not None and self.state() == NEW:
            raise NotReadyError(f"{self.name}: not prepared. First: milldam run-units CONFIG --stage prepare")
        self._made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        with explain_os_errors(self.own):
            self.own.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
                self._refuse_company()
            except Timeout:
                if self.share is not None and not self._lock.is_locked:
                    raise TaskHeldError(f"{self.name}: another task is at work on {self.share.label}.") from None
                self._lock.release()
                raise ConfigError(
                    f"{self.name}: another run is at work on it. `milldam status {self.out}` shows it."
                ) from None
        return self

    def _refuse_company(self) -> None:
        """Shares work beside each other; who has the run to himself works beside nobody."""
        others = self._share_folders()
        if self.share is not None:
            # Shares that are cut in another way would do the same units.
            others = [self.folder, *(folder for folder in others if self.share.overlaps(folder.name))]
        if any(_is_held(other / "lock") for other in others):
            raise Timeout(str(self.own))

    def _share_folders(self) -> list[Path]:
        return sorted((self.folder / SHARES_FOLDER).glob("*"))

    def __exit__(self, *_: object) -> None:
        self._journal.close()
        self._units.close()
        self._staged_units.remove()
        (self.own / "inputs.new.jsonl").unlink(missing_ok=True)
        if self.share is None and self.state() == NEW:
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

    # ---- what the folder holds ----

    def state(self) -> str:
        if (self.out / self.manifest).exists():
            return FINISHED
        return UNFINISHED if (self.folder / PLAN).exists() else NEW

    def has_results(self) -> bool:
        """Whether an unfinished run has done anything that would have to be done again."""
        made = any(self.records()) or (self.folder / QA_RECORDS).exists()
        return made or any((self.folder / DEDUP_FOLDER).glob("hashes-*"))

    def identity(self) -> Identity:
        """The identity of what is in the folder, finished or not."""
        if self.state() == FINISHED:
            manifest = ManifestText.at(Folder(self.out)).facts()
            return Identity(manifest.settings, manifest.input, manifest.tokenizer.get("name"))
        plan = self.plan()
        return Identity(plan["settings"], plan["input"], plan.get("tokenizer_name"))

    def agrees(self, identity: Identity, *, overwrite: bool) -> bool:
        """Whether what is in the folder, finished or not, is of this identity. What can't be told is no hindrance for
        who replaces it."""
        try:
            return self.state() != NEW and not self.identity().differences(identity)
        except StoreError:
            if overwrite:
                return False
            raise

    def plan(self) -> dict[str, Any]:
        """What was written down when the run began."""
        found = read_sealed(self.folder / PLAN)
        if found is None:
            raise StoreError(
                f"{self.folder / PLAN}: damaged, so nobody can tell what this unfinished run was to make. "
                "Start anew with --overwrite."
            )
        return found

    def require_same(self, identity: Identity) -> None:
        """Refuse to go on with, or to reuse, what was made from something else."""
        differences = self.identity().differences(identity)
        if differences:
            state = "was made" if self.state() == FINISHED else "holds an unfinished run that was started"
            listed = "\n".join(f"  {line}" for line in differences)
            changed = "".join(f"    {line}\n" for line in self._changed_inputs())
            raise MismatchError(
                f"{self.name} {state} from other settings or input:\n{listed}\n{changed}"
                "Choose another place, or replace it with --overwrite."
            )

    def _changed_inputs(self) -> Iterator[str]:
        """The first few files that are new, gone or changed."""
        before, after = self.folder / "inputs.jsonl", self.own / "inputs.new.jsonl"
        if before.exists() and after.exists():
            yield from itertools.islice(_changes(_by_path(before), _by_path(after)), _CHANGES_SHOWN)

    # ---- a new run ----

    def write_inputs(self, files: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        """List the input (number of the data set, file) into the run folder; its number, size and fingerprint.

        The files of a data set come one after the other.
        """
        state, at = InputState(), 0
        self._listed_at.clear()
        with explain_os_errors(self.own), (self.own / "inputs.new.jsonl").open("w", encoding="utf-8") as listing:
            names: tuple[str, ...] = ()
            for dataset, file in files:
                names = names or tuple(one.name for one in fields(file))
                # ASCII, with escapes: a file's name need not be UTF-8.
                # Not by asdict, which copies: it would take longer than all the rest.
                entry = {name: getattr(file, name) for name in names}
                line = json.dumps(entry | ({"dataset": dataset} if dataset else {})) + "\n"
                self._listed_at.setdefault(dataset, at)
                at += listing.write(line)
                state.add(file.path, file.size, file.version, dataset)
        return state.as_json()

    def inputs(self, *, listed_now: bool = False) -> Iterator[dict[str, Any]]:
        """The input files: those of the plan, or those just listed."""
        path = self.own / "inputs.new.jsonl" if listed_now else self.folder / "inputs.jsonl"
        with path.open("rb") as listing:
            for line in listing:
                yield json.loads(line)

    def listed(self, dataset: int) -> Iterator[dict[str, Any]]:
        """The files of a data set, as `write_inputs` has just listed them; those of others are not read."""
        if dataset not in self._listed_at:
            return
        with (self.own / "inputs.new.jsonl").open("rb") as listing:
            listing.seek(self._listed_at[dataset])
            for line in listing:
                file = json.loads(line)
                if file.pop("dataset", 0) != dataset:
                    return
                yield file

    def stage(self, units: Iterable[Any]) -> int:
        """List the units beside what is in the folder; how many there are."""
        return self._staged_units.write(units)

    def start(self, identity: Identity, files: dict[str, bytes]) -> None:
        """Begin anew: clear the folder, write `files` and the staged plan durably, the identity last."""
        self._clear()
        for name, content in files.items():
            write_file(self.out / name, content)
        self._take_staged()
        told = {"settings": identity.settings, "input": identity.input, "tokenizer_name": identity.tokenizer_name}
        self._write_plan(told | {"started": time.time()})

    def _write_plan(self, plan: dict[str, Any]) -> None:
        """With size and hash of the lists that it goes by."""
        write_sealed(self.folder / PLAN, plan | {"files": self._units.records()})

    def _clear(self) -> None:
        """Remove what an earlier run left: the manifest first, so that no half of it passes for a store."""
        (self.out / self.manifest).unlink(missing_ok=True)
        self.progress = Progress()
        self._journal.close()
        self.tidy()
        remove_matching(self.out, *(f"*-[0-9]*.{kind}" for kind in ("bin", "idx", "facts")), *_GATHERED)
        shutil.rmtree(self.out / PACKED_FOLDER, ignore_errors=True)
        # The plan goes before the records: without it the folder is new again, whatever is left of them.
        (self.folder / PLAN).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", "memory.csv", "inputs.new.jsonl", "units.new.jsonl", "units.new.offsets"):
                path.unlink(missing_ok=True)

    def replan(self, units: Iterable[Any]) -> None:
        """The same input lies elsewhere now: the same units, by their new paths."""
        self.stage(units)
        self._take_staged()
        self._write_plan(self.plan())

    def _take_staged(self) -> None:
        self._staged_units.replace(self._units)
        (self.own / "inputs.new.jsonl").replace(self.folder / "inputs.jsonl")

    def has_moved(self) -> bool:
        """Whether the input, otherwise unchanged, has other paths than when the run began; or what lists it and the
        units is damaged."""
        before, after = self.folder / "inputs.jsonl", self.own / "inputs.new.jsonl"
        return not before.exists() or hash_file(before) != hash_file(after) or not self._lists_units()

    def _lists_units(self) -> bool:
        return all(is_whole(self.folder / name, record) for name, record in self.plan()["files"].items())

    # ---- going on ----

    def resume(self, stands: Callable[[PartRecord], bool] = lambda record: True) -> int:
        """Read the records that stand, and whose files are there as they were written. How many units there are."""
        (self.own / "status.json").unlink(missing_ok=True)
        self._stands = stands
        if self.share is None:
            self.tidy()
            self._journal.close()
            if not self._book_records():
                self._mend_records()
            return len(self._units)
        if not self._lists_units():
            named = f"{self.folder / 'units.jsonl'} or units.offsets"
            raise StoreError(f"{named}: damaged. Make it anew: milldam run-units CONFIG --stage prepare")
        for record in filter(Sequence().takes, self.records()):
            self.progress.book(record)
        return len(self._units)

    def _book_records(self) -> bool:
        """Book the records that stand; whether all do, in one file."""
        whole = all(path.name == RECORDS for path in self._journal.paths(RECORDS))
        for _, record in self._standing():
            if record is None:
                whole = False
            else:
                self.progress.book(record)
        return whole

    def _mend_records(self) -> None:
        """Gather the records of shares in one file, and only those that stand."""
        paths, self.progress = self._journal.paths(RECORDS), Progress()
        with NewFile(self.folder / RECORDS) as new:
            gathered: list[bytes] = []
            for line, record in self._standing():
                if record is not None:
                    self.progress.book(record)
                    gathered.append(ended(line))
                if len(gathered) == _LINES_GATHERED:
                    new.write(b"".join(gathered))
                    gathered.clear()
            new.write(b"".join(gathered))
            new.commit()
        for path in paths:
            if path.name != RECORDS:
                path.unlink()

    def _standing(self) -> Iterator[tuple[bytes, PartRecord | None]]:
        """Every line of the records, with its record unless that is torn, or a shard is missing or of another size.

        With a record falls what follows it in its unit.
        """
        sequence = Sequence()
        for line in self._journal.lines(RECORDS):
            record = parse_record(line)
            stands = record is not None and self.holds(record) and sequence.takes(record)
            yield line, record if stands else None

    def holds(self, record: PartRecord) -> bool:
        """Whether what a record tells of is there as it was written."""
        # By plain strings: pathlib takes longer than the system, and there may be millions of files.
        shards = (
            (f"{self._out}/{shard['name']}.{kind}", shard[kind]) for shard in record.shards for kind in ("bin", "idx")
        )
        return (
            all(_has_size(path, file["bytes"]) for path, file in shards)
            # What is read again must be what was written; a shard is only named by the manifest, with its hash.
            and all(is_whole(f"{self._out}/{name}", file) for name, file in record.files.items())
            and self._stands(record)
        )

    def records(self) -> Iterator[PartRecord]:
        """In the order they were written."""
        lines = self._journal.lines(RECORDS)
        yield from (record for line in lines if (record := parse_record(line)) is not None)

    def safe(self) -> dict[str, int]:
        """What is recorded as done, seen from another process."""
        done = {"units_done": 0, "documents": 0, "tokens": 0}
        sequence = Sequence()
        for record in filter(sequence.takes, self.records()):
            done["units_done"] += record.last
            for shard in record.shards:
                done["documents"] += shard["documents"]
                done["tokens"] += shard["tokens"]
        return done

    def add(self, record: PartRecord) -> None:
        """Record a part whose shard is durable: from here on it is never made again.

        Once, though a worker that died before it could say that it is done is made up for by another.
        """
        if self.progress.holds(record):
            return
        self.append(RECORDS, record.as_json())
        self.progress.book(record)

    def append(self, name: str, value: dict[str, Any]) -> None:
        """Add a line to a file of the run folder, durably (see journal.py)."""
        self._journal.append(name, value)

    def appended(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines that `append` wrote, here and in shares; one that was torn by a crash is left out."""
        return self._journal.read(name)

    def appended_files(self, name: str) -> list[Path]:
        """The files that `append` wrote."""
        return self._journal.paths(name)

    def close_appended(self) -> None:
        """Close what `append` has open: those files may be replaced or removed now."""
        self._journal.close()

    def sync(self) -> None:
        """Make all that was appended durable."""
        self._journal.sync()

    def planned_units(self) -> int | None:
        """How many units the plan has; None where there is none yet."""
        try:
            return len(self._units)
        except FileNotFoundError:
            return None

    def pending(self) -> Iterator[int]:
        """Every unit that is not complete, in plan order."""
        return (unit for unit in range(len(self._units)) if unit not in self.progress.complete)

    def pending_bytes(self) -> int:
        """Input of the units that are not complete."""
        sizes = self._units.sizes()
        return int(sizes[self.progress.complete.missing(len(sizes))].sum())

    def bytes_of(self, units: npt.NDArray[np.int64]) -> int:
        """Input of some units."""
        return int(self._units.sizes()[units].sum())

    def unit(self, number: int, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """One unit of the plan, read from disk."""
        return self._units.at(number, parse)

    def all_units(self, parse: Callable[[dict[str, Any]], Any], *, staged: bool = False) -> Iterator[Any]:
        """Every unit of the plan, in order; `staged`: of the plan that has not begun yet."""
        lines = (self._staged_units if staged else self._units).lines()
        return (parse(json.loads(line)) for line in lines)

    def tidy(self) -> None:
        """Remove what processes that were killed left half written."""
        for folder in (self.out, self.folder, self.folder / DEDUP_FOLDER):
            remove_temporaries(folder)

    def done_so_far(self, index: int) -> tuple[int, int]:
        """(parts, batches) recorded of a unit by now."""
        return self.progress.partial.get(index, (0, 0))

    # ---- what is going on, for another terminal ----

    def write_status(self, status: dict[str, Any]) -> None:
        value = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), **status}
        temporary = self.own / "status.json.new"
        with explain_os_errors(temporary):
            temporary.write_bytes(seal_file(value))
            temporary.replace(self.own / "status.json")

    def close_status(self, **values: Any) -> None:
        """Add how it ended to what was last written down."""
        self.write_status(read_status(self.own) | values)

    def share_statuses(self) -> dict[str, dict[str, Any]]:
        """What each share last wrote down, by its label; `held`: whether it is at work."""
        return {
            folder.name: read_status(folder) | {"held": _is_held(folder / "lock")} for folder in self._share_folders()
        }

    def forget_shares(self) -> None:
        """Drop what shares of an earlier round told: they come again."""
        for folder in self._share_folders():
            (folder / "status.json").unlink(missing_ok=True)

    def is_locked(self) -> bool:
        """Whether a run is at work here, seen from another process."""
        return any(_is_held(folder / "lock") for folder in (self.folder, *self._share_folders()))


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


def _has_size(path: str, size: int) -> bool:
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


def _by_path(listing: Path) -> dict[str, dict[str, Any]]:
    """For a message alone: what is damaged in it is left out."""
    found: dict[str, dict[str, Any]] = {}
    with listing.open("rb") as lines:
        for line in itertools.islice(lines, _FILES_COMPARED):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                file = json.loads(line)
                found[file["path"]] = {"size": int(file["size"]), "version": str(file["version"])}
    return found


def _changes(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> Iterator[str]:
    for path, now in after.items():
        was = before.get(path)
        if was is None:
            yield f"{path}: new"
        elif was["size"] != now["size"]:
            yield f"{path}: {now['size']:,} bytes (was {was['size']:,})"
        elif was["version"] != now["version"]:
            yield f"{path}: modified since"
    yield from (f"{path}: gone" for path in before if path not in after)


def refuse_foreign(out: Path, manifest: str = MANIFEST) -> None:
    """Never mix our files with somebody else's, nor those of two kinds of stores."""
    refuse_address(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file. Name a folder for the store.")
    if (
        out.is_dir()
        and any(names_matching(out, "*"))
        and not (out / manifest).exists()
        and not (out / RUN_FOLDER / "lock").exists()
    ):
        raise ConfigError(f"{out}: not empty and not made by milldam; it is left alone. Choose another folder.")
    other = store_kind(out)
    if other is not None and other.manifest != manifest:
        raise ConfigError(f"{out}: holds {other.phrase} ({other.manifest}). Choose another folder.")


def require_complete(run: Run, units: int) -> None:
    if len(run.progress.complete) != units:
        raise StoreError(f"{run.out}: {units - len(run.progress.complete)} units are not done.")
