"""The stages between the two passes over the input: from what the first leaves to drop files, which the second reads.

fingerprint    every unit: hashes, signatures, matches with evaluation sets (first_pass.py)
group          ranges of the hashes: exact duplicates
decontaminate  the matches of all units: documents that hold items of evaluation sets
rank           with `prefer`: the order of preference
near           bands of the signatures: pairs of documents that may be alike
shingle        every unit with documents in pairs: their shingles
verify         ranges of the pairs: those that are alike
decide         all of these: which documents are dropped

In this order: what one way drops is in no pair of the next. What the first pass leaves is kept by key in `run/prints`,
also when the store is finished: 24 bytes a document, and the signatures with near-dedup. When the input changes, only
that of changed units is made again. Drop files follow from all of it; they are made anew in `run/dedup-*`, where the
files of each unit lie under its number.

Exact duplicates are grouped in one process of its own with what the budget leaves, so that all its memory comes back
before the second pass begins; a cluster has one on each of its machines. The steps of near-dedup are shared by all
workers. Where there is little to do, this process does it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest

from milldam.config.settings import Config
from milldam.decontamination import deciding
from milldam.decontamination.index import Index
from milldam.decontamination.matches import Matches
from milldam.dedup.candidates import Documents, NearWork, find_pairs, pair_steps
from milldam.dedup.drops import (
    EVALUATION,
    EXACT,
    UNKNOWN,
    DropSet,
    DropWriter,
    drop_file_name,
    drops_in,
    place_of,
    unit_and_row,
)
from milldam.dedup.exact import FEW_HASHES, count_hashes, resolve_exact, sources_of
from milldam.dedup.fingerprints import partition_count
from milldam.dedup.index import DedupIndex
from milldam.dedup.keys import Int64s
from milldam.dedup.minhash import unit_name
from milldam.dedup.near import Place, decide, places_of, remove_work, verify_pairs, verify_parts
from milldam.dedup.preferred import rank
from milldam.errors import InputError
from milldam.files import record_of
from milldam.memory import held_bytes, usage
from milldam.pipeline.documents import print_path, recorded_place
from milldam.pipeline.first_pass import PRINTS, FirstPass, Shingling
from milldam.pipeline.fitting import Fitting, keeps_texts
from milldam.pipeline.preparing import Prepared
from milldam.rules import DedupRules, EvaluationSet, NearRules
from milldam.run.engine import Assigned, Load, Make, Progress, Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records, forget_records, read_records, sweep
from milldam.run.tasks import Workers
from milldam.run.units import KeyArray, keys_of, mixed, mixed_keys
from milldam.sources.units import Unit

FINGERPRINT, GROUP, DECONTAMINATE, RANK, NEAR, SHINGLE, VERIFY, DECIDE = (
    "fingerprint", "group", "decontaminate", "rank", "near", "shingle", "verify", "decide",
)  # fmt: skip
RECORDS, FOLDER, FINDINGS = "fingerprints.jsonl", "dedup", "contamination.jsonl"
FEW_DOCUMENTS, FEW_BYTES = 50_000, 64 << 20
"""So many are looked through for near-duplicates in this process, in a second or two, with so much memory; of index
and matches, so much is decided on here."""
NEAR_WORKER_BYTES = 120 * 10**6
"""The least that a process which looks for near-duplicates is given, its imports included, where there are several."""


def step_counts(rules: DedupRules, partitions: int, units: int, *, evaluation: bool) -> dict[str, int]:
    """The stages of a job in order, and into how many pieces each is cut."""
    counts = {FINGERPRINT: units, GROUP: 0 if rules.method == "off" else partitions}
    counts[DECONTAMINATE] = int(evaluation)
    if rules.near is not None:
        counts |= {RANK: int(rules.near.prefer != "first"), NEAR: pair_steps(rules.near), SHINGLE: units}
        counts |= {VERIFY: verify_parts(units), DECIDE: 1}
    return {stage: count for stage, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class Resolving:
    """The steps of one stage whose units are ranges, bands or everything: the files that they leave and what they
    found are in their records."""

    stage: str
    steps: int
    out: Path
    work: NearWork
    """Its folder has drop files, and what the first pass left, by the numbers of units; its memory is the most that a
    process that does it may take."""
    evaluation: Path | None
    """The index of the evaluation sets."""
    sets: tuple[EvaluationSet, ...]
    compared: int
    """Pairs that were verified before this stage."""

    def load(self) -> Make:
        return self._make

    def _make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        # What this process holds already counts too.
        work = replace(self.work, memory_bytes=self.work.memory_bytes - held_bytes())
        stage, number, folder, facts = self.stage, assigned.unit, work.folder, dict[str, Any]()
        if stage == GROUP:
            limits = {name: getattr(work, name) for name in ("exempt_below", "memory_bytes", "threads")}
            names, facts = [drop_file_name(EXACT, number)], resolve_exact(folder, number, self.steps, **limits)
        elif stage == DECONTAMINATE:
            names, facts = [drop_file_name(EVALUATION, number), FINDINGS], self._decontaminate(number)
        elif stage == RANK:
            rank(work)
            names = ["ranks.bin", "positions.bin"]
        elif stage == NEAR:
            names = [f"pairs-{number:03d}.keys", f"marks-{number:03d}.bits"]
            facts = {"pairs": find_pairs(work, number)}
        elif stage == VERIFY:
            names, facts = [f"edges-{number:05d}.*"], {"pairs": verify_pairs(work, number, self.steps)}
        else:
            names, facts = ["drops-near-*.bin"], decide(work, self.compared)
        below, paths = folder.relative_to(self.out), (path for name in names for path in sorted(folder.glob(name)))
        yield Record(assigned.key, files={f"{below}/{path.name}": record_of(path) for path in paths}, facts=facts)

    def _decontaminate(self, number: int) -> dict[str, Any]:
        assert self.evaluation is not None
        folder = self.work.folder

        def matches() -> Iterator[tuple[int, Matches]]:
            """Of documents that exact dedup leaves, unit by unit. What near-dedup drops follows from them."""
            for path in sorted(folder.glob("matches-*.bin")):
                unit, found = int(path.stem.rpartition("-")[2]), Matches.read(path)
                if len(found.row):
                    dropped = DropSet(folder, unit, (EXACT,))
                    gone = [row for row in np.unique(found.row).tolist() if dropped.of(row) is not None]
                    found = found.only(~np.isin(found.row, gone))
                yield unit, found

        with DropWriter(folder / drop_file_name(EVALUATION, number)) as writer:
            figures = deciding.decide(
                Index(self.evaluation),
                self.sets,
                matches,
                lambda unit, row: recorded_place(folder, unit, row),
                lambda unit, rows: writer.add(place_of(unit, np.array(rows)), np.full(len(rows), UNKNOWN)),
                folder / FINDINGS,
            )
            writer.commit()
        return figures


class Deduplication:
    """Dedup and decontamination of one job."""

    def __init__(
        self, config: Config, rules: DedupRules, session: Session, prepared: Prepared, keys: KeyArray, fitting: Fitting
    ) -> None:
        self._config, self._rules, self._session, self._prepared = config, rules, session, prepared
        self._cores = fitting.cores
        self._text_bytes = 0 if fitting.unpacked is None else fitting.unpacked.total()
        self._out = str(Path(config.out).resolve())
        self.keys = keys
        """Of what the first pass leaves, by unit."""
        # Another one for other fingerprints: what was resolved from those is of no use.
        self.folder = session.folder.folder / f"{FOLDER}-{xxh3_64_hexdigest(keys.tobytes())}"
        """The folder of the drop files."""
        self.index: dict[str, Path] = {}
        """Runs of the index that this one is compared with, and their files."""
        self.exact: dict[str, Any] = {}
        self.near: dict[str, Any] = {}
        self.contamination: dict[str, Any] | None = None
        """Figures of what was dropped."""
        self._evaluation: Path | None = None
        units = session.folder.units.all(Unit.from_json)
        known = ((unit.origin, unit.index if not unit.copy else -1, unit.dataset) for unit in units)
        self._origins, originals, datasets = np.fromiter(known, "(3,)i8").T
        self._originals: Int64s = originals[originals >= 0]
        self._exempt_below = int(np.count_nonzero(datasets < len(config.validation)))
        partitions, evaluated = partition_count(prepared.identity.input["bytes"]), prepared.input.evaluation is not None
        self._counts = step_counts(rules, partitions, len(self._origins), evaluation=evaluated)

    def stages(self, readers: Workers, judges: Workers, rows: dict[int, tuple[int, int]]) -> Iterator[Stage]:
        """The stages that are left to do. `readers` read the units, of each the `rows` that are wanted; `judges`
        do too, and filter."""
        config, folder, evaluation = self._config, self._session.folder, self._prepared.input.evaluation
        for place in (self.folder, folder.folder / PRINTS):
            place.mkdir(exist_ok=True)
        if self._rules.index is not None:  # settled once, for now and for when it resumes
            index, run_id = DedupIndex.of(self._rules), self._prepared.identity.run_id
            self.index = dict(index.pin(self.folder, self._out, run_id=run_id))
        if evaluation is not None:
            self._evaluation = evaluation.provide_index(folder.folder)
            for warning in deciding.warnings_of(Index(self._evaluation), evaluation.sets):
                self._session.observer.warn(warning)
        records = Records(folder, RECORDS, self.keys)
        load = FirstPass(
            out=folder.out,
            sets=self._prepared.sets,
            clean=config.clean_rules,
            rules=self._rules,
            threads=readers.threads,
            seed=config.seed,
            keep_texts=keeps_texts(config, self._text_bytes),
            evaluation=self._evaluation,
            value=self._prepared.value,
        )
        yield from self._read(FINGERPRINT, load, records, readers, rows)
        self._put_under_numbers()
        preferred = self._count_values(records)
        if GROUP in self._counts:
            grouped = yield from self._resolve(GROUP)
            total, clusters = Counter[str](), Counter[str]()
            for _, record in grouped.in_plan_order():
                clusters.update(record.facts["clusters"])
                total.update({name: count for name, count in record.facts.items() if name != "clusters"})
            self.exact = total | {"clusters": dict(clusters)} if total else {}
        if DECONTAMINATE in self._counts:
            decided = yield from self._resolve(DECONTAMINATE)
            self.contamination = next((record.facts for _, record in decided.in_plan_order()), None)
        if DECIDE in self._counts:
            yield from self._find_near(judges, rows)
        self.near |= preferred

    def _find_near(self, judges: Workers, rows: dict[int, tuple[int, int]]) -> Iterator[Stage]:
        folder, compared = self._session.folder, 0
        if not self._records_of(DECIDE).complete:  # else what the others leave is gone, and not needed
            if RANK in self._counts:
                yield from self._resolve(RANK)
            yield from self._resolve(NEAR)
            # Of another corpus, other documents may be in pairs.
            corpus = int(self.folder.name.rpartition("-")[2], 16)
            records = Records(folder, f"{SHINGLE}.jsonl", mixed_keys(self.keys, corpus))
            rules = self._prepared.sets, self._config.clean_rules, self._config.filters
            load = Shingling(folder.out, *rules, self._work(), judges.threads)
            yield from self._read(SHINGLE, load, records, judges, rows)
            verified = yield from self._resolve(VERIFY)
            compared = sum(record.facts["pairs"] for _, record in verified.in_plan_order())
        decided = yield from self._resolve(DECIDE, compared)
        for _, record in decided.in_plan_order():
            facts = record.facts
            self.near = facts | {"clusters": facts["cluster_sizes"], "cluster_count": facts["clusters"]}
            # Not before: killed in between, it could not be done again.
            remove_work(self.folder, sketches=self._rules.index is None)

    def _read(
        self, name: str, load: Load, records: Records, workers: Workers, rows: dict[int, tuple[int, int]]
    ) -> Iterator[Stage]:
        """A look at the input, of which a unit that is repeated has one."""

        def facts(unit: int) -> dict[str, Any]:
            return {"rows": rows.get(unit), "prints": f"{self.keys[unit]:016x}"}

        todo = [unit for unit in self._originals.tolist() if unit not in records]
        if todo:
            yield Stage(name, load, records, Unit.from_json, workers, facts, todo)

    def _records_of(self, name: str) -> Records:
        folder = self._session.folder
        keys = keys_of([self.folder.name, name, step] for step in range(self._counts[name]))
        return Records(folder, f"{name}.jsonl", keys)

    def _work(self) -> NearWork:
        return NearWork(
            folder=self.folder,
            rules=self._rules.near or NearRules(),
            exempt_below=self._exempt_below,
            memory_bytes=self._session.budget.limit_bytes - usage().anonymous,
            mark_all=self._rules.index is not None,
            threads=self._cores,
        )

    def _resolve(self, name: str, compared: int = 0) -> Generator[Stage, None, Records]:
        """Runs the steps of a stage that are left: here where there is little to do, else those of near-dedup by all
        workers that fit."""
        records, work, steps, count = self._records_of(name), self._work(), self._counts[name], 1
        todo = list(records.pending())
        if not todo:
            return records
        if name == GROUP:
            small = steps == 1 and count_hashes(sources_of(self.folder)) <= FEW_HASHES
        elif name == DECONTAMINATE:
            files = [*self.folder.glob("matches-*.bin"), *([self._evaluation] if self._evaluation else [])]
            small = sum(path.stat().st_size for path in files) <= FEW_BYTES
        elif small := Documents(work).count <= FEW_DOCUMENTS:
            most = min(self._session.budget.limit_bytes, held_bytes() + FEW_BYTES)
            work = replace(work, memory_bytes=most, threads=1)
        else:
            count = max(1, min(self._cores, len(todo), work.memory_bytes // NEAR_WORKER_BYTES))
            threads = self._cores if name == DECIDE else 1
            work = replace(work, memory_bytes=work.memory_bytes // count, threads=threads)
        out, sets = self._session.folder.out, self._config.decontaminate
        load = Resolving(name, steps, out, work, self._evaluation, sets, compared)
        workers = Workers(count, work.threads, apart=count == 1 and not small, here=small)
        # The later a document, the more come before it that it may be like: long parts first, short ones fill the gaps.
        yield Stage(name, load, records, workers=workers, todo=todo[::-1] if name == VERIFY else todo)
        return records

    def _count_values(self, records: Records) -> dict[str, Any]:
        """How many documents have a value of the field by which near-duplicates stay; InputError when none has."""
        value, done, without, there = self._prepared.value, 0, 0, 0
        if value is None:
            return {}
        for unit, record in records.in_plan_order():
            nothing, some = record.facts["values"] if unit >= self._exempt_below else (0, 0)
            done, without, there = done + 1, without + nothing, there + some
        # A task of a job array may be here before the others are done.
        if without and not there and done == len(self._originals):
            none = f'None of {without:,} documents has a {value.kind} in the field "{value.name}".'
            raise InputError(f"{none} Change dedup.near.prefer.field.")
        return {"prefer": {"stays": self._prepared.preferred(self._config), "with": there, "without": without}}

    def _put_under_numbers(self) -> None:
        """Let what the first pass left of each unit be found by its number in the plan, which drop files name."""
        prints = Path("..") / PRINTS
        for unit in self._originals.tolist():
            for kind in ("hashes", "signatures", "preferences", "matches", "places"):
                target = print_path(prints, kind, f"{self.keys[unit]:016x}")
                if (self.folder / target).exists():
                    with contextlib.suppress(FileExistsError):
                        print_path(self.folder, kind, unit_name(unit)).symlink_to(target)

    # ---- what the second pass and the end of the job ask ----

    @property
    def findings(self) -> Path | None:
        """The file of the passages of evaluation sets that were found."""
        return self.folder / FINDINGS if DECONTAMINATE in self._counts else None

    @property
    def shown(self) -> tuple[Place, ...]:
        """Near-duplicates to look at, and what they are like."""
        return tuple(places_of(self.near["shown"])) if "shown" in self.near else ()

    def verdicts(self) -> KeyArray:
        """A number for each unit that says which of its documents are dropped: of the rows alone, or, where dropped
        documents are written out, of all that is said of them."""
        tells_all, origins = self._config.write_dropped, self._origins
        found, keys = np.zeros(len(origins), np.uint64), self.keys
        for path in sorted(self.folder.glob("drops-*.bin")):
            way = np.uint64(int(xxh3_64_hexdigest(path.name.split("-")[1].encode()), 16))
            for drops in drops_in(path):
                units, rows = unit_and_row(drops["place"])
                columns: list[npt.NDArray[Any]] = [rows]
                if tells_all:
                    # Where the document that stays is found may change with any change of its unit.
                    of_units, _ = unit_and_row(drops["of"])
                    columns += [drops["of"], drops["similarity"], keys[np.maximum(of_units, 0)]]
                digests = np.full(len(drops), way)
                for values in columns:
                    digests = mixed(digests ^ values.astype(np.int64).view(np.uint64))
                np.add.at(found, units, digests)
        # What is written of dropped documents names units by number.
        verdicts: KeyArray = found[origins]
        return verdicts + np.arange(len(origins)).astype(np.uint64) if tells_all else verdicts

    def enter_index(self) -> None:
        """Enter the run's hashes into the index that runs share, where there is one."""
        if self._rules.index is not None:
            self._session.enter("index")
            DedupIndex.of(self._rules).commit(
                self._prepared.identity.run_id,
                self._out,
                self.folder,
                exempt_below=self._exempt_below,
                memory_bytes=self._session.budget.limit_bytes - usage().anonymous,
                threads=self._cores,
            )


def remove_drop_files(folder: RunFolder) -> None:
    """Remove what a finished store does not need; what the first pass left of its units stays for when its input
    grows."""
    found = list(folder.folder.glob(f"{FOLDER}-*"))
    if found:
        live = (Path(name).name for record in read_records(folder.folder, RECORDS) for name in record.files)
        sweep(folder.folder / PRINTS, ("*",), live)
        for name in (GROUP, DECONTAMINATE, RANK, NEAR, SHINGLE, VERIFY, DECIDE):
            forget_records(folder.folder, f"{name}.jsonl")
    for path in found:
        shutil.rmtree(path, ignore_errors=True)
