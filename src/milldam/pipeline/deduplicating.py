"""The stages of dedup in a job: fingerprints of units, drop sets from them, and at the end the index across runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milldam.config.settings import Config
from milldam.dedup.fingerprints import partition_count
from milldam.dedup.rules import DedupRules
from milldam.memory import Budget, usage
from milldam.pipeline.assignments import Assignment
from milldam.pipeline.estimating import Survey, keeps_texts
from milldam.pipeline.fingerprinting import FingerprintTask
from milldam.pipeline.preparing import Prepared
from milldam.pipeline.resolving import IndexTask, ResolveTask, pin_index, resolved
from milldam.run.folder import DEDUP_FOLDER, Run
from milldam.run.workforce import Staff, Stage, Workforce
from milldam.sealed import is_whole
from milldam.sources.units import Unit
from milldam.stores.tokens.format import Int64s

_RECORDS = "fingerprints.jsonl"
"""A line per unit whose fingerprints are durable: size and hash of its files."""


@dataclass(slots=True)
class Deduplication:
    """Dedup of one job."""

    config: Config
    rules: DedupRules
    run: Run
    prepared: Prepared
    workforce: Workforce
    budget: Budget
    cores: int
    """To use, on each machine."""
    index: dict[str, Path] = field(default_factory=dict)
    """Runs of the index that this one is compared with, and their files."""

    @property
    def folder(self) -> Path:
        """Where fingerprints and drop sets lie."""
        return self.run.folder / DEDUP_FOLDER

    @property
    def _out(self) -> str:
        return str(Path(self.config.out).resolve())

    def pin(self) -> None:
        """Settle which runs of the index this one is compared with, now and when it is resumed."""
        self.folder.mkdir(exist_ok=True)
        self.index = pin_index(self.rules, self.folder, self.prepared.identity, self._out)

    def find_drops(self, staff: Staff, assign: Callable[[int], Assignment]) -> None:
        """Both stages: `staff` reads the units, as `assign` gives them; then they are grouped."""
        self.pin()
        self._fingerprint(staff, assign)
        self._group()

    def _fingerprint(self, staff: Staff, assign: Callable[[int], Assignment]) -> None:
        todo = self._without_hashes()
        if not len(todo):
            return
        task = FingerprintTask(
            folder=self.folder,
            sets=self.prepared.sets,
            clean=self.config.clean_rules,
            rules=self.rules,
            spool=str(self.run.folder),
            threads=staff.threads,
            seed=self.config.seed,
            keep_texts=keeps_texts(self.config, Survey.of(self._units()).unpacked_bytes),
        )
        size = self.run.bytes_of(todo)
        stage = Stage("fingerprint", task, iter(todo.tolist()), assign, total=len(todo), input_bytes=size)
        self.workforce.work(stage, staff, lambda made: self.run.append(_RECORDS, made))

    def _units(self) -> Iterator[Unit]:
        return self.run.all_units(Unit.from_json)

    def _without_hashes(self) -> Int64s:
        """Units whose fingerprints are still to be made; repetitions need none."""
        done = {made["unit"] for made in self.run.appended(_RECORDS) if self._are_there(made)}
        return np.fromiter((unit.index for unit in self._units() if not unit.copy and unit.index not in done), np.int64)

    def _are_there(self, made: dict[str, Any]) -> bool:
        """Whether the files of a unit are as they were written. Kept texts are checked when they are read."""
        return all(is_whole(self.folder / name, file) for name, file in made["files"].items())

    def _resolve_task(self) -> ResolveTask:
        validation = len(self.config.validation_sets)
        exempt = sum(1 for unit in self._units() if unit.dataset < validation)
        return ResolveTask(
            folder=self.folder,
            rules=self.rules,
            partitions=partition_count(self.prepared.identity.input["bytes"]),
            exempt_below=exempt,
            index_files=tuple(self.index.values()),
            memory_bytes=self.budget.limit_bytes - usage().anonymous,
            threads=self.cores,
        )

    def _group(self) -> None:
        task = self._resolve_task()
        staff = Staff(1, task.threads, apart=not task.is_small, here=task.is_small)
        for name in task.stages:
            todo = task.todo(name)
            if todo:
                stage = Stage(name, task, iter(todo), lambda step: step, total=len(todo))
                self.workforce.work(stage, staff, lambda part: None)
        self.workforce.dedup, self.workforce.near = resolved(task)

    def commit_to_index(self) -> None:
        """Enter the run's hashes into the index that runs share, where there is one."""
        if self.rules.index is None:
            return
        resolve = self._resolve_task()
        task = IndexTask(self.rules.index, self.prepared.identity.run_id, self._out, resolve)
        stage = Stage("index", task, iter([0]), lambda step: step, total=1)
        self.workforce.work(stage, Staff(1, resolve.threads, apart=True), lambda part: None)
