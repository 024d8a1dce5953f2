"""Which files make a store, from its manifest alone: the same answer for a folder here and for a repository there; and
the same files as units of a job: a group is a call of huggingface_hub, and for a push a commit.

A manifest may come from anywhere: names that leave the folder are refused when it is read. Memory: the manifest.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, Setting, StoreError, did_you_mean
from milldam.files import hash_bytes, hash_file, stays_in_folder
from milldam.run.folder import NEW, RunFolder
from milldam.run.one_stage import Telling, plan_work, stage_of
from milldam.run.pools import WorkPlan
from milldam.run.records import Record, Records
from milldam.run.session import Session, Stage
from milldam.run.tasks import PART, Report, Work
from milldam.run.units import Identity, key_of
from milldam.stores.kinds import KINDS, TOKENS, Kind
from milldam.stores.place import Folder

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    xxh3: str
    bytes: int | None
    """None where the manifest does not say: the tokenizer."""


@dataclass(frozen=True, slots=True)
class Contents:
    kind: Kind
    manifest: Any
    """Manifest, FeatureManifest or TableManifest."""
    manifest_bytes: bytes
    files: tuple[StoredFile, ...]
    """All but the manifest, in its order."""

    @property
    def names(self) -> set[str]:
        return {file.name for file in self.files} | {self.kind.manifest}

    @property
    def state(self) -> dict[str, Any]:
        """As the input of a job."""
        size = sum(file.bytes or 0 for file in self.files)
        return {"files": len(self.names), "bytes": size, "fingerprint": hash_bytes(self.manifest_bytes)}


def kind_among(names: set[str], where: str) -> Kind:
    """The kind whose manifest is among the names."""
    found = [kind for kind in KINDS if kind.manifest in names]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"{where}: it has {' and '.join(kind.manifest for kind in found)}; a store has one of them.")
    raise StoreError(f"{where}: not a store (none of {', '.join(kind.manifest for kind in KINDS)} in it).")


def read_contents(folder: Path, kind: Kind | None = None) -> Contents:
    """What the manifest in a folder names. The files themselves are not looked at."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder.")
    if kind is None:
        there = {one.manifest for one in KINDS if (folder / one.manifest).is_file()}
        if not there and (folder / "run" / "plan.json").exists():
            raise StoreError(f"{folder}: unfinished: a run was interrupted here. Finish it first.")
        kind = kind_among(there, str(folder))
    manifest = kind.read_manifest(Folder(folder))
    made_with = getattr(manifest, "tokenizer", {}).get("xxh3")
    found = [StoredFile(TOKENIZER, made_with, None)] if made_with else []
    found += [StoredFile(name, one["xxh3"], one["bytes"]) for name, one in manifest.files()]
    # Equal units of a table share a file.
    contents = Contents(kind, manifest, (folder / kind.manifest).read_bytes(), tuple(dict.fromkeys(found)))
    for file in contents.files:
        if not stays_in_folder(file.name, hidden=False):
            raise StoreError(f'{folder / kind.manifest}: the file name "{file.name}" leaves the folder; refused.')
    if len(contents.names) <= len(contents.files):
        raise StoreError(f"{folder / kind.manifest}: it names a file twice.")
    return contents


def parse_contents(data: bytes, kind: Kind, where: str) -> Contents:
    """What a manifest that lies elsewhere names."""
    with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
        (Path(folder) / kind.manifest).write_bytes(data)
        try:
            return read_contents(Path(folder), kind)
        except StoreError as error:
            raise StoreError(str(error).replace(folder, where)) from None


def select_split(contents: Contents, split: str, where: str) -> Contents:
    """The same store with the shards of one split alone: its manifest names no others."""
    if contents.kind is not TOKENS:
        raise ConfigError(f"{where} is {contents.kind.phrase}, which has no splits. Leave out ", Setting("split"), ".")
    known = contents.manifest.splits
    if split not in known:
        raise ConfigError(f'{where}: no split "{split}"; it has {", ".join(known)}.{did_you_mean(split, known)}')
    kept = tuple(shard for shard in contents.manifest.shards if shard.split == split)
    with tempfile.TemporaryDirectory() as folder:
        dataclasses.replace(contents.manifest, shards=kept).write(Path(folder))
        return read_contents(Path(folder), TOKENS)


# ---- files here ----


def check_sizes(folder: Path, contents: Contents) -> None:
    """Every file is there with its size; reads none."""
    for file in contents.files:
        if problem := wrong_size(folder, file):
            raise StoreError(f"{problem}. `milldam verify {folder}` checks the store; make it again.")


def wrong_size(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.name
    if not path.is_file():
        return f"{path}: missing"
    if file.bytes is not None and path.stat().st_size != file.bytes:
        return f"{path}: {path.stat().st_size:,} bytes where the manifest says {file.bytes:,}"
    return None


def is_whole(folder: Path, file: StoredFile) -> bool:
    """It is there, of its size and with its bytes; reads it in blocks."""
    return wrong_size(folder, file) is None and hash_file(folder / file.name) == file.xxh3


MOST_FILES, MOST_BYTES, _ONE_ENDS_A_GROUP = 512, 10 * 10**9, 256


@dataclass(frozen=True, slots=True)
class FileGroup:
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        return sum(file.bytes or 0 for file in self.files)

    @property
    def key(self) -> str:
        return key_of(*((file.name, file.xxh3) for file in self.files))

    def as_json(self) -> dict[str, Any]:
        return {"files": [astuple(file) for file in self.files]}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> FileGroup:
        return cls(tuple(StoredFile(*file) for file in value["files"]))


def grouped(files: Iterable[StoredFile]) -> Iterator[FileGroup]:
    """Files in groups that end by content, so that a store that grows keeps most of them, or at a limit."""
    group: list[StoredFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.bytes or 0
        ends = int(key_of(file.name, file.xxh3), 16) % _ONE_ENDS_A_GROUP == 0
        if ends or len(group) == MOST_FILES or size >= MOST_BYTES:
            yield FileGroup(tuple(group))
            group, size = [], 0
    if group:
        yield FileGroup(tuple(group))


def plan_groups(session: Session, identity: Identity, begin: str, contents: Contents) -> WorkPlan:
    """The plan of a job that moves the files of a store."""
    folder = session.folder
    if folder.needs_plan(identity, begin):
        folder.stage(grouped(contents.files))
        folder.start(identity, outputs=("files/",) if begin == NEW else None)
    size, units = int(folder.units.sizes().sum()), len(folder.units)
    # huggingface_hub has threads of its own.
    return plan_work(
        session, (folder.kind.name,), units=units, input_bytes=size, shard_size=size // max(1, units), workers=1
    )


Move = Callable[[FileGroup, Callable[[int], None]], Record]
"""Moves a group, telling now and then how many bytes of it; the record of what was moved, its key left to others."""


@dataclass(frozen=True, slots=True)
class _MoveTask:
    """Moves groups in this process, which knows the repository."""

    move: Move

    def start(self) -> Work:
        return self._work

    def _work(self, given: tuple[str, FileGroup], report: Report) -> None:
        key, group = given
        telling = Telling(report, group.size)
        record = self.move(group, telling.reached)
        telling.end()
        report(PART, replace(record, key=key))


def moving(move: Move, folder: RunFolder, records: Records, plan: WorkPlan) -> Stage:
    """The stage that moves the groups that have no record."""

    def assign(number: int) -> tuple[str, FileGroup]:
        return records.keys[number], folder.units.at(number, FileGroup.from_json)

    return stage_of(folder.kind.name, _MoveTask(move), folder, records, assign, plan)
