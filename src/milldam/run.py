"""The run folder: what was planned, what is done, who is at work. It makes a job resumable.

    plan.json       settings and input fingerprint: what this run is
    inputs.jsonl    every input file with size and version, to name what changed
    units.jsonl     the units, one a line, in plan order
    records.jsonl   a line per finished part of a unit, appended and synced after its shard is durable
    rejects-*.jsonl records that could not be read, a file per part that has any
    status.json     what is going on now, for `milldam status`
    memory.csv      the memory timeline
    lock            held while a run is at work

Nothing here is held in memory whole, however many units there are: units are read as they are handed out.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.files import (
    NewFile,
    explain_os_errors,
    hash_bytes,
    hash_file,
    json_bytes,
    remove_temporaries,
    write_file,
    write_json,
)
from milldam.input_files import InputState
from milldam.store.manifest import NAME as MANIFEST
from milldam.store.manifest import Manifest, Shard

RUN_FOLDER, PACKED_FOLDER, DEDUP_FOLDER = "run", "packed", "dedup"
QA_MANIFEST, QA_RECORDS = "milldam-qa.json", "made.jsonl"
"""What tells a store of features, and an unfinished one: it is not replaced by tokens, nor the other way round."""
FINISHED, UNFINISHED, NEW = "finished", "unfinished", "new"
_CHANGES_SHOWN, _FILES_COMPARED = 5, 200_000


@dataclass(frozen=True, slots=True)
class Identity:
    """What a result depends on: two runs with equal identities give equal bytes."""

    settings: dict[str, Any]
    input: dict[str, Any]
    """Number of files, bytes, and a fingerprint of names, sizes and versions."""

    @property
    def run_id(self) -> str:
        """Names the result."""
        return hash_bytes(json.dumps([self.settings, self.input], sort_keys=True).encode())[:16]

    def differences(self, other: Identity) -> list[str]:
        """What differs, a line each; empty when nothing does."""
        before, now = _flat(self.settings), _flat(other.settings)
        found = [
            f"{name}: {_short(now.get(name))} (made with {_short(before.get(name))})"
            for name in dict.fromkeys([*before, *now])
            if before.get(name) != now.get(name)
        ]
        if self.input != other.input:
            found.append(
                f"input: {other.input['files']:,} files, {other.input['bytes']:,} bytes"
                f" (made from {self.input['files']:,} files, {self.input['bytes']:,} bytes)"
            )
        return found


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> _flat({"a": 1, "b": {"c": [2, {"d": 3}]}})
    {'a': 1, 'b.c.0': 2, 'b.c.1.d': 3}
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A finished part of a unit; its shards are durable before this is written."""

    unit: int
    part: int
    shards: list[dict[str, Any]]
    """At most one per split."""
    dropped: dict[str, dict[str, int]]
    """Stage -> reason -> documents."""
    batches: int
    """Batches of the unit that are done with this part: where a resumed unit goes on."""
    last: bool
    """The unit is complete."""
    read: int = 0
    """Documents that were read for it."""
    inexact_cuts: int = 0


@dataclass(slots=True)
class _Progress:
    """What is recorded as done: per unit, how many parts and batches, and whether it is complete."""

    complete: set[int] = field(default_factory=set)
    partial: dict[int, tuple[int, int]] = field(default_factory=dict)
    """unit -> (parts, batches) of the units that are not complete."""
    documents: int = 0


class Run:
    """A locked output folder with its plan and records; use it as a context manager."""

    manifest = MANIFEST
    """The file that makes the folder a store."""

    def __init__(self, out: Path, name: Path | None = None) -> None:
        self.out, self.folder = out, out / RUN_FOLDER
        self.name = name or out
        self._lock = FileLock(self.folder / "lock")
        self.progress = _Progress()

    def __enter__(self) -> Run:
        refuse_foreign(self.out, self.manifest)
        self._made = [folder for folder in (self.out, *self.out.parents) if not folder.exists()]
        with explain_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                # A little patience: `milldam status` takes the lock for a moment to see whether it is free.
                self._lock.acquire(timeout=0.2, poll_interval=0.01)
            except Timeout:
                raise ConfigError(
                    f"{self.name}: another run is at work on it. `milldam status {self.out}` shows it."
                ) from None
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("inputs.new.jsonl", "units.new.jsonl"):
            (self.folder / name).unlink(missing_ok=True)
        if self.state() == NEW:
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
        return UNFINISHED if (self.folder / "plan.json").exists() else NEW

    def has_results(self) -> bool:
        """Whether an unfinished run has done anything that would have to be done again."""
        made = any(self.records()) or (self.folder / QA_RECORDS).exists()
        return made or any((self.folder / DEDUP_FOLDER).glob("hashes-*"))

    def identity(self) -> Identity:
        """The identity of what is in the folder, finished or not."""
        if self.state() == FINISHED:
            manifest = Manifest.read(self.out)
            return Identity(manifest.settings, manifest.input)
        plan = self.plan()
        return Identity(plan["settings"], plan["input"])

    def plan(self) -> dict[str, Any]:
        """What was written down when the run began."""
        return dict(json.loads((self.folder / "plan.json").read_bytes()))

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
        before, after = self.folder / "inputs.jsonl", self.folder / "inputs.new.jsonl"
        if before.exists() and after.exists():
            yield from itertools.islice(_changes(_by_path(before), _by_path(after)), _CHANGES_SHOWN)

    # ---- a new run ----

    def write_inputs(self, files: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        """List the input (number of the data set, file) into the run folder; its number, size and fingerprint."""
        state = InputState()
        with explain_os_errors(self.folder), (self.folder / "inputs.new.jsonl").open("w", encoding="utf-8") as listing:
            for dataset, file in files:
                # ASCII, with escapes: a file's name need not be UTF-8.
                listing.write(json.dumps(asdict(file) | ({"dataset": dataset} if dataset else {})) + "\n")
                state.add(file.path, file.size, file.version, dataset)
        return state.as_json()

    def inputs(self, *, listed_now: bool = False) -> Iterator[dict[str, Any]]:
        """The input files: those of the plan, or those just listed."""
        name = "inputs.new.jsonl" if listed_now else "inputs.jsonl"
        with (self.folder / name).open(encoding="utf-8") as listing:
            for line in listing:
                yield json.loads(line)

    def stage(self, units: Iterable[Any]) -> int:
        """List the units beside what is in the folder; how many there are."""
        count = 0
        with explain_os_errors(self.folder), (self.folder / "units.new.jsonl").open("w", encoding="utf-8") as lines:
            for unit in units:
                lines.write(json.dumps(unit.as_json()) + "\n")
                count += 1
            lines.flush()
            os.fsync(lines.fileno())
        return count

    def start(self, identity: Identity, files: dict[str, bytes]) -> None:
        """Begin anew: clear the folder, write `files` and the staged plan durably, the identity last."""
        self._clear()
        for name, content in files.items():
            write_file(self.out / name, content)
        for name in ("inputs", "units"):
            (self.folder / f"{name}.new.jsonl").replace(self.folder / f"{name}.jsonl")
        plan = {"settings": identity.settings, "input": identity.input, "started": time.time()}
        write_json(self.folder / "plan.json", plan)

    def _clear(self) -> None:
        """Remove what an earlier run left: the manifest first, so that no half of it passes for a store."""
        (self.out / self.manifest).unlink(missing_ok=True)
        self.progress = _Progress()
        self.tidy()
        for pattern in ("*-[0-9]*.bin", "*-[0-9]*.idx", "*-[0-9]*.facts", "rejects.jsonl", "dropped.jsonl.zst"):
            for path in self.out.glob(pattern):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.out / PACKED_FOLDER, ignore_errors=True)
        # The plan goes before the records: without it the folder is new again, whatever is left of them.
        (self.folder / "plan.json").unlink(missing_ok=True)
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("lock", "memory.csv", "inputs.new.jsonl", "units.new.jsonl"):
                path.unlink(missing_ok=True)

    def replan(self, units: Iterable[Any]) -> None:
        """The same input lies elsewhere now: the same units, by their new paths."""
        self.stage(units)
        for name in ("units", "inputs"):
            (self.folder / f"{name}.new.jsonl").replace(self.folder / f"{name}.jsonl")

    def has_moved(self) -> bool:
        """Whether the input, otherwise unchanged, has other paths than when the run began."""
        before, after = self.folder / "inputs.jsonl", self.folder / "inputs.new.jsonl"
        return hash_file(before) != hash_file(after)

    # ---- going on ----

    def resume(self) -> int:
        """Read the records; drop those whose files are gone. How many units there are."""
        self.tidy()
        (self.folder / "status.json").unlink(missing_ok=True)
        self._mend_records()
        for record in self.records():
            self._book(record)
        with (self.folder / "units.jsonl").open("rb") as lines:
            return sum(1 for _ in lines)

    def _mend_records(self) -> None:
        """Drop a record that is torn, or whose shard is missing or of another size; and what follows it in its unit."""
        path = self.folder / "records.jsonl"
        if not path.exists():
            return
        with path.open("rb") as lines, NewFile(path) as new:
            next_part: dict[int, int] = {}
            for line in lines:
                record = _parse_record(line)
                if record is not None and record.part == next_part.get(record.unit, 0) and self._holds(record):
                    next_part[record.unit] = record.part + 1
                    new.write(line)
            new.commit()

    def _holds(self, record: PartRecord) -> bool:
        files = (
            (self.out / f"{shard['name']}.{x}", shard[x]["bytes"]) for shard in record.shards for x in ("bin", "idx")
        )
        return all(_has_size(path, size) for path, size in files)

    def _book(self, record: PartRecord) -> None:
        done = self.progress
        done.documents += sum(shard["documents"] for shard in record.shards)
        if record.last:
            done.complete.add(record.unit)
            done.partial.pop(record.unit, None)
        else:
            done.partial[record.unit] = (record.part + 1, record.batches)

    def records(self) -> Iterator[PartRecord]:
        path = self.folder / "records.jsonl"
        if path.exists():
            with path.open("rb") as lines:
                yield from (record for line in lines if (record := _parse_record(line)) is not None)

    def safe(self) -> dict[str, int]:
        """What is recorded as done, seen from another process."""
        records = list(self.records())
        return {
            "units_done": len({record.unit for record in records if record.last}),
            "documents": sum(shard["documents"] for record in records for shard in record.shards),
            "tokens": sum(shard["tokens"] for record in records for shard in record.shards),
        }

    def add(self, record: PartRecord) -> None:
        """Record a part whose shard is durable: from here on it is never made again."""
        self.append("records.jsonl", asdict(record))
        self._book(record)

    def append(self, name: str, value: dict[str, Any]) -> None:
        """Add a line to a file of the run folder, durably."""
        with explain_os_errors(self.folder), (self.folder / name).open("a+b") as file:
            # A line that was torn by a crash must not take this one with it.
            if file.tell() and not _ends_a_line(file):
                file.write(b"\n")
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def appended(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines that `append` wrote; one that was torn by a crash is left out."""
        path = self.folder / name
        if path.exists():
            with path.open("rb") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError):
                        yield json.loads(line)

    def pending(self, parse: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[Any, tuple[int, int]]]:
        """(unit, (parts, batches) already done) of every unit that is not complete, in plan order."""
        for index, unit in enumerate(self.all_units(parse)):
            if index not in self.progress.complete:
                yield unit, self.progress.partial.get(index, (0, 0))

    def all_units(self, parse: Callable[[dict[str, Any]], Any], *, staged: bool = False) -> Iterator[Any]:
        """Every unit of the plan, in order; `staged`: of the plan that has not begun yet."""
        name = "units.new.jsonl" if staged else "units.jsonl"
        with (self.folder / name).open(encoding="utf-8") as lines:
            yield from (parse(json.loads(line)) for line in lines)

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
        temporary = self.folder / "status.json.new"
        with explain_os_errors(temporary):
            temporary.write_bytes(json_bytes(value))
            temporary.replace(self.folder / "status.json")

    def is_locked(self) -> bool:
        """Whether a run is at work here, seen from another process."""
        if not (self.folder / "lock").exists():
            return False
        try:
            with self._lock.acquire(timeout=0):
                return False
        except Timeout:
            return True


def _ends_a_line(file: IO[bytes]) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _parse_record(line: bytes) -> PartRecord | None:
    """A record, unless it was torn by a crash while it was written."""
    try:
        return PartRecord(**json.loads(line)) if line.endswith(b"\n") else None
    except (ValueError, TypeError):
        return None


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _by_path(listing: Path) -> dict[str, dict[str, Any]]:
    with listing.open(encoding="utf-8") as lines:
        files = (json.loads(line) for line in itertools.islice(lines, _FILES_COMPARED))
        return {file["path"]: file for file in files}


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
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: is a file; -o names a folder for the store.")
    if (
        out.is_dir()
        and any(out.iterdir())
        and not (out / manifest).exists()
        and not (out / RUN_FOLDER / "lock").exists()
    ):
        raise ConfigError(f"{out}: not empty and not made by milldam; it is left alone. Choose another folder with -o.")
    for other in {MANIFEST, QA_MANIFEST} - {manifest}:
        if (out / other).exists():
            raise ConfigError(f"{out}: holds a store of another kind ({other}). Choose another folder with -o.")


def shards_in_order(given: Iterable[PartRecord]) -> tuple[Shard, ...]:
    """Every recorded shard: split after split, in plan order whatever the order of work."""
    records = sorted(given, key=lambda record: (record.unit, record.part))
    shards = [Shard(**shard) for record in records for shard in record.shards]
    # Training first; the others by name.
    return tuple(sorted(shards, key=lambda shard: (shard.split != "train", shard.split)))


def require_complete(run: Run, units: int) -> None:
    if len(run.progress.complete) != units:
        raise StoreError(f"{run.out}: {units - len(run.progress.complete)} units are not done.")
