"""The stages of dedup in a job: fingerprints of units, drop sets from them, and at the end the index across runs.

Fingerprints are kept by key in `run/prints`, also when the store is finished: 24 bytes a document, and the
signatures with near-dedup. When the input changes, only those of changed units are made again. Drop sets follow from
all fingerprints together; they are made anew in `run/dedup-*`, where each unit's fingerprints lie under its number.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest

from milldam.config.settings import Config
from milldam.decontamination.deciding import warnings_of
from milldam.decontamination.index import Index
from milldam.decontamination.matches import match_path
from milldam.dedup import DECIDE, NEAR, SHINGLE, VERIFY
from milldam.dedup.candidates import Documents, room_for_steps
from milldam.dedup.drops import drops_in, unit_and_row
from milldam.dedup.fingerprints import hash_file_name
from milldam.dedup.minhash import signature_file_name
from milldam.dedup.near_drops import NearSummary, Place
from milldam.dedup.ranking import preference_file_name
from milldam.errors import InputError
from milldam.memory import held_bytes, usage
from milldam.pipeline.decontaminating import STAGE, DecideTask
from milldam.pipeline.documents import Assignment, places_path, preference_path, print_paths
from milldam.pipeline.fingerprinting import PRINTS, FingerprintTask
from milldam.pipeline.fitting import Survey, keeps_texts
from milldam.pipeline.preparing import Prepared
from milldam.pipeline.resolving import FEW_BYTES, NEAR_STAGES, IndexTask, ResolveTask, in_order, pin_index, resolved
from milldam.pipeline.sketching import SketchTask
from milldam.rules import DedupRules
from milldam.run.folder import RunFolder
from milldam.run.pools import Workers
from milldam.run.records import Records, sweep
from milldam.run.session import Session, Stage
from milldam.run.units import KeyArray, Keys, mixed
from milldam.sources.units import Unit
from milldam.stores.tokens.format import Int64s

RECORDS, SKETCHES, FOLDER = "fingerprints.jsonl", "sketches.jsonl", "dedup"
NEAR_WORKER_BYTES = 120 * 10**6
"""The least that a process which looks for near-duplicates is given, its imports included, where there are several."""


class Deduplication:
    """Dedup of one job. `cores`: to use, on each machine."""

    def __init__(
        self, config: Config, rules: DedupRules, session: Session, prepared: Prepared, keys: Keys, cores: int
    ) -> None:
        self._config, self._rules, self._session, self._prepared, self._cores = config, rules, session, prepared, cores
        self._out = str(Path(config.out).resolve())
        self.keys = keys
        """Of the fingerprints, by unit."""
        # Another one for other fingerprints: what was resolved from those is of no use.
        self.folder = session.folder.folder / f"{FOLDER}-{xxh3_64_hexdigest(keys.tobytes())}"
        """Where drop sets lie."""
        self.index: dict[str, Path] = {}
        """Runs of the index that this one is compared with, and their files."""
        self.figures: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        """What exact and near dedup found."""
        self.decontamination: DecideTask | None = None
        """What is looked for of evaluation sets, and was decided."""
        if prepared.evaluation is not None:
            place = session.folder.folder
            index = prepared.evaluation.index_path(place)
            self.decontamination = DecideTask(self.folder, index, prepared.evaluation.sets)

    def find_drops(
        self, readers: Workers, judges: Workers, assign: Callable[[int], Assignment]
    ) -> Generator[Stage, None, None]:
        """All stages: `readers` read the units, as `assign` gives them; `judges` do too, and ask filters."""
        self.provide_folders()
        # Settled once, for now and for when it resumes.
        self.index = pin_index(self._rules, self.folder, self._prepared.identity, self._out)
        if self._prepared.evaluation is not None:
            index = Index(self._prepared.evaluation.provide_index(self._session.folder.folder))
            for warning in warnings_of(index, self._prepared.evaluation.sets):
                self._session.observer.warn(warning)
        records = Records(self._session.folder.journal, RECORDS, self._session.folder.out, self.keys)
        originals = np.fromiter((unit.index for unit in self._units() if not unit.copy), np.int64)
        todo = originals[[number not in records for number in originals.tolist()]]
        if len(todo):
            yield self._fingerprint(todo, records, readers, assign)
        self._put_under_numbers(originals)
        preferred = self._count_values(records, len(originals))
        task = self._resolve_task()
        for name in in_order([*task.stages, STAGE]):
            if name == STAGE:
                yield from self._decontaminate(task.threads)
            elif name == SHINGLE:
                stage = self._shingle(originals, task, judges, assign)
                if stage.total and not task.is_decided:
                    yield stage
            elif steps := task.todo(name):
                yield self._resolve(name, steps, task)
        exact, near = resolved(task)
        self.figures = exact, near | preferred

    def _decontaminate(self, threads: int) -> Iterator[Stage]:
        if self.decontamination is not None and self.decontamination.figures() is None:
            small = self.decontamination.is_small
            workers = Workers(1, threads, apart=not small, here=small)
            yield Stage(STAGE, self.decontamination, iter([0]), lambda step: step, workers, total=1)

    def provide_folders(self) -> None:
        for place in (self.folder, self._session.folder.folder / PRINTS):
            place.mkdir(exist_ok=True)

    def _resolve(self, name: str, steps: list[int], task: ResolveTask) -> Stage:
        """Steps of a stage: where there is little to do here, else those of near-dedup by all workers that fit."""
        small = task.is_small(name)
        workers = Workers(1, task.threads, apart=not small, here=small)
        if name in NEAR_STAGES and small:
            most = min(self._session.budget.limit_bytes, held_bytes() + FEW_BYTES)
            task = replace(task, memory_bytes=most, threads=1)
        elif name in NEAR_STAGES:
            count = max(1, min(self._cores, len(steps), task.memory_bytes // NEAR_WORKER_BYTES))
            if name == NEAR:
                count = min(count, room_for_steps(self.folder, Documents(task.near_work(0)).count))
            threads = self._cores if name == DECIDE else 1
            task = replace(task, memory_bytes=task.memory_bytes // count, threads=threads)
            workers = Workers(count, threads, apart=count == 1)
        # The later a document, the more come before it that it may be like: long parts first, short ones fill the gaps.
        ordered = reversed(steps) if name == VERIFY else steps
        return Stage(name, task, iter(ordered), lambda step: step, workers, total=len(steps))

    def _shingle(
        self, originals: Int64s, task: ResolveTask, judges: Workers, assign: Callable[[int], Assignment]
    ) -> Stage:
        """The shingles of the documents that are in pairs: of another corpus, there may be others."""
        folder, corpus = self._session.folder, np.uint64(int(self.folder.name.rpartition("-")[2], 16))
        keys = self.keys.mixed(np.full(len(self.keys), corpus))
        records = Records(folder.journal, SKETCHES, folder.out, keys)
        todo = originals[[number not in records for number in originals.tolist()]]
        work = task.near_work(0)
        rules = self._config.clean_rules, self._config.filters
        sketch = SketchTask(folder.out, self._prepared.sets, *rules, work, judges.threads)

        def assigned(number: int) -> Assignment:
            return replace(assign(number), key=keys[number], prints=self.keys[number])

        size = int(folder.units.sizes()[todo].sum())
        return Stage(
            SHINGLE, sketch, iter(todo.tolist()), assigned, judges, records.add, total=len(todo), input_bytes=size
        )

    def _units(self) -> Iterator[Unit]:
        return self._session.folder.units.all(Unit.from_json)

    def _fingerprint(
        self, todo: Int64s, records: Records, readers: Workers, assign: Callable[[int], Assignment]
    ) -> Stage:
        task = self.fingerprint_task(readers.threads)
        size = int(self._session.folder.units.sizes()[todo].sum())
        return Stage(
            "fingerprint", task, iter(todo.tolist()), assign, readers, records.add, total=len(todo), input_bytes=size
        )

    def fingerprint_task(self, threads: int) -> FingerprintTask:
        return FingerprintTask(
            out=self._session.folder.out,
            sets=self._prepared.sets,
            clean=self._config.clean_rules,
            rules=self._rules,
            threads=threads,
            seed=self._config.seed,
            keep_texts=keeps_texts(self._config, Survey.of(self._units()).unpacked.total()),
            evaluation=None if self.decontamination is None else self.decontamination.index,
            value=self._prepared.value,
        )

    def _count_values(self, records: Records, units: int) -> dict[str, Any]:
        """How many documents have a value of the field by which near-duplicates stay; InputError when none has."""
        value, exempt, done, without, there = self._prepared.value, self.exempt_below, 0, 0, 0
        if value is None:
            return {}
        for unit, record in records.in_plan_order():
            nothing, some = record.facts["values"] if unit >= exempt else (0, 0)
            done, without, there = done + 1, without + nothing, there + some
        # A task of a job array may be here before the others are done.
        if without and not there and done == units:
            said = f'None of {without:,} documents has a {value.kind} in the field "{value.name}".'
            raise InputError(f"{said} Change dedup.near.prefer.field.")
        return {"prefer": {"stays": self._prepared.preferred, "with": there, "without": without}}

    def _put_under_numbers(self, originals: Int64s) -> None:
        """Let the fingerprints of each unit be found by its number in the plan, which drop sets name."""
        for number in originals.tolist():
            hashes, signatures, _ = print_paths(Path("..") / PRINTS, self.keys[number])
            links = {} if self._rules.is_off else {hash_file_name(number): hashes}
            places = places_path(Path("..") / PRINTS, self.keys[number])
            links[places_path(self.folder, f"{number:07d}").name] = places
            matches = match_path(Path("..") / PRINTS, self.keys[number])
            if (self.folder / matches).exists():
                links[match_path(self.folder, f"{number:07d}").name] = matches
            if self._rules.near is not None:
                links[signature_file_name(number)] = signatures
                if self._rules.near.prefer != "first":
                    links[preference_file_name(number)] = preference_path(Path("..") / PRINTS, self.keys[number])
            for name, target in links.items():
                with contextlib.suppress(FileExistsError):
                    (self.folder / name).symlink_to(target)

    def _resolve_task(self) -> ResolveTask:
        return ResolveTask(
            folder=self.folder,
            rules=self._rules,
            partitions=self._prepared.partitions,
            exempt_below=self.exempt_below,
            index_files=tuple(self.index.values()),
            units=len(self._session.folder.units),
            memory_bytes=self._session.budget.limit_bytes - usage().anonymous,
            threads=self._cores,
        )

    @property
    def exempt_below(self) -> int:
        """Documents of the units before this one are never dropped."""
        validation = len(self._config.validation_sets)
        return sum(1 for unit in self._units() if unit.dataset < validation)

    @property
    def shown(self) -> tuple[Place, ...]:
        """Near-duplicates to look at, and what they are like."""
        near = self.figures[1]
        return tuple(sorted(NearSummary.from_json(near["shown"]).places)) if near else ()

    def verdicts(self) -> KeyArray:
        """A number for each unit that says which of its documents are dropped: of the rows alone, or, where dropped
        documents are written out, of all that is said of them."""
        origins = np.fromiter((unit.origin for unit in self._units()), np.int64)
        found, keys = np.zeros(len(origins), np.uint64), np.frombuffer(self.keys.tobytes(), np.uint64)
        for path in sorted(self.folder.glob("drops-*.bin")):
            way = path.name.split("-")[1]
            for drops in drops_in(path):
                units, rows = unit_and_row(drops["place"])
                columns: list[npt.NDArray[Any]] = [rows]
                if self.tells_all:
                    # Where the document that stays is found may change with any change of its unit.
                    of_units, _ = unit_and_row(drops["of"])
                    columns += [drops["of"], drops["similarity"], keys[np.maximum(of_units, 0)]]
                np.add.at(found, units, drop_digests(way, columns))
        verdicts = found[origins]
        if self.tells_all:
            # What is written of dropped documents names units by number.
            verdicts += np.arange(len(origins)).astype(np.uint64)
        return verdicts

    @property
    def tells_all(self) -> bool:
        """Whether what is said of dropped documents is part of the store."""
        return self._config.write_dropped

    def index_stages(self) -> Iterator[Stage]:
        """Enter the run's hashes into the index that runs share, where there is one."""
        if self._rules.index is not None:
            resolve = self._resolve_task()
            task = IndexTask(self._prepared.identity.run_id, self._out, resolve)
            yield Stage("index", task, iter([0]), lambda step: step, Workers(1, resolve.threads, apart=True), total=1)


def drop_digests(way: str, told: Sequence[npt.NDArray[Any]]) -> KeyArray:
    """A number for each dropped document; those of a unit, added up, say what a way of dedup drops of it."""
    digests = np.full(len(told[0]), np.uint64(int(xxh3_64_hexdigest(way.encode()), 16)))
    for values in told:
        digests = mixed(digests ^ values.astype(np.int64).view(np.uint64))
    return digests


def remove_drop_sets(folder: RunFolder) -> None:
    """Remove what a finished store does not need; the fingerprints of its units stay for when its input grows."""
    found = list(folder.folder.glob(f"{FOLDER}-*"))
    if found:
        live = (Path(name).name for record in folder.journal.read(RECORDS) for name in record["files"])
        sweep(folder.folder / PRINTS, ("*",), live)
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
