"""The files of a store as units of a job: a group is a call of huggingface_hub, and for a push a commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from typing import Any

from milldam.hub.contents import Contents, StoredFile
from milldam.memory import usage
from milldam.run.folder import NEW, Identity, RunFolder
from milldam.run.one_stage import plan_work, stage_of
from milldam.run.planning import WorkPlan
from milldam.run.records import Record, Records
from milldam.run.session import Session, Stage
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.run.units import key_of

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

        def tell(moved: int) -> None:
            report(PROGRESS, {"counts": {"input_bytes": moved}, "seconds": {}, "anonymous_bytes": usage().anonymous})

        record = self.move(group, tell)
        tell(group.size)
        report(PART, replace(record, key=key))


def moving(move: Move, folder: RunFolder, records: Records, plan: WorkPlan) -> Stage:
    """The stage that moves the groups that have no record."""

    def assign(number: int) -> tuple[str, FileGroup]:
        return records.keys[number], folder.units.at(number, FileGroup.from_json)

    return stage_of(folder.kind.name, _MoveTask(move), folder, records, assign, plan)
