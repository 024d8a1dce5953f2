"""The job of `milldam preprocess` and `milldam tokenize`, in the frame of run/job.py.

prepare      tokenizer, input listing, text columns, encoder: everything that can be wrong is found here
plan         units from the input, workers from the budget
count        only for slices of datasets: how many documents each unit has
fingerprint  only with dedup, the first pass: hashes and signatures of every unit
group        only with dedup: drop sets
decontaminate  only with evaluation sets: documents that hold items of them
near, shingle, verify, decide   only with near-dedup: pairs, their shingles, how alike they are, which of them to drop
tokenize     the second pass: every finished part of a unit is recorded
arrange      only for splits and limits in tokens
finish       rejects gathered, manifest written last
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from xxhash import xxh3_64_intdigest

from milldam.config.settings import Config, text_columns
from milldam.errors import ConfigError, Setting
from milldam.memory import Budget, release, usage
from milldam.pipeline.counting import RowCounts
from milldam.pipeline.documents import Assignment
from milldam.pipeline.finishing import Finish, Made, TextSummary, complete
from milldam.pipeline.fitting import Disk, Fitting, Survey
from milldam.pipeline.judging import Selection
from milldam.pipeline.preparing import Preparation, Prepared
from milldam.pipeline.starting import leave_receipt
from milldam.pipeline.tokenizing import TokenizeTask
from milldam.rules import DedupRules
from milldam.run import job as frame
from milldam.run.engine import Stage as EngineStage
from milldam.run.engine import pooled
from milldam.run.folder import FINISHED, NEW, RunFolder, refuse_foreign
from milldam.run.job import ArrayWork, Options
from milldam.run.pools import LocalPool, Workers, WorkPlan, least_bytes, least_grouping_bytes, make_plan, require_room
from milldam.run.records import RECORDS, Records
from milldam.run.session import Session, Stage, session
from milldam.run.summary import Observer, Quiet
from milldam.run.units import KeyArray
from milldam.sources.compression import STDIN
from milldam.sources.units import Unit
from milldam.stores.kinds import AUDIT_FILES, TOKENS
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import SHARD_FILES
from milldam.stores.verify import has_every_file
from milldam.tokenizers.encoders import Ranges
from milldam.tokenizers.proof import Choice

if TYPE_CHECKING:
    from milldam.dedup.seen import PinnedIndex
    from milldam.pipeline.deduplicating import Deduplication
    from milldam.run.fork import ForkedWorkers

OUTPUTS = (
    *(f"*.{ending}" for ending in SHARD_FILES),
    "*.facts",
    *AUDIT_FILES,
)
"""What a job leaves in its output folder, besides manifest and tokenizer."""


def run_job(
    config: Config,
    observer: Observer | None = None,
    *,
    held_bytes: int = 0,
    report: bool = True,
    request: str | None = None,
    server: ForkedWorkers | None = None,
) -> TextSummary:
    """Do the job, or what is left of it.

    `held_bytes`: memory that the calling program holds already; the limit comes on top of it. `report`: make the page
    about it. `request`: names what was asked for, for a receipt. `server`: begun ahead for it.
    """
    options = Options.of(config, held_bytes=held_bytes, server=server)
    return frame.run(TokenJob(config, report=report, request=request), options, observer)


def array_of(config: Config, *, report: bool = True) -> ArrayWork[TextSummary]:
    """The same for tasks of a job array."""
    return ArrayWork(TokenJob(config, report=report), Options.of(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan(WorkPlan):
    fitting: Fitting
    """How many workers fit, also for stages that need less memory."""
    differing: Ranges = ()
    """The characters that gigatoken leaves to HF tokenizers."""
    records: Records | None = None
    """What is done already, where that is known before the first stage."""
    seen: PinnedIndex | None = None
    """The index whose documents are dropped in one pass."""


class TokenJob:
    """Text to tokens."""

    kind = TOKENS

    def __init__(self, config: Config, *, report: bool = True, request: str | None = None) -> None:
        self._config, self._report, self._request = config, report, request
        self._from_stdin = any(STDIN in one.paths for one in config.sources)

    # ---- in job arrays ----

    def require_shareable(self) -> None:
        if self._config.limit is not None:
            said = ": counts documents in one process, not in arrays. Use max_documents of the datasets."
            raise ConfigError(Setting("limit"), said)
        paths = (path for one in self._config.sources for path in one.paths)
        alone = next((path for path in paths if path == STDIN or path.startswith("memory://")), None)
        if alone is not None:
            raise ConfigError(f"{alone}: other machines can't read it. Save it to a file.")

    def pieces(self) -> dict[str, int]:
        return plan_job(self._config).plan.pieces

    # ---- prepare and plan ----

    def prepare(self, session: Session) -> Prepared:
        folder, config = session.folder, self._config
        if self._from_stdin and not config.overwrite and folder.state() == FINISHED:
            said = f"{config.out} exists, and standard input can't be compared with it. Use "
            raise ConfigError(said, Setting("overwrite", True), ".")
        return Preparation(config, folder).prepare()

    def has_results(self, folder: RunFolder) -> bool:
        names = (RECORDS, "fingerprints.jsonl")
        return any(next(folder.journal.read(name), None) is not None for name in names)

    def plan(self, session: Session, prepared: Prepared, begin: str) -> TokenPlan:
        """All that can be refused is refused before anything in the folder is replaced."""
        fitting = Fitting(self._config, prepared, session.budget, session.pool)
        choice = self._choose_encoder(session, prepared, fitting)
        folder, files = session.folder, {"tokenizer.json": prepared.tokenizer_json.encode()}
        if self._from_stdin or folder.needs_plan(prepared.identity, begin):
            survey = Survey()
            folder.stage(survey.watch(prepared.units(folder)))
            fitting = fitting.with_dearest(survey.dearest)
            fitting.fit(fitting.loaded_bytes, 1)
            self.require_disk(Disk.of(self._config, prepared, survey))
            folder.start(prepared.identity, files, outputs=(*OUTPUTS, "packed/") if begin == NEW else None)
        else:
            if folder.task is None:
                folder.provide(files)
            fitting = fitting.with_dearest(Survey.of(folder.units.all(Unit.from_json)).dearest)
        units = len(folder.units)
        seen = None if prepared.index is None else prepared.index.pin(folder, prepared.identity.input["index"])
        if self._config.dedup_rules is not None or any(source.counted for source in prepared.sources):
            return replace(self._plan_work(prepared, fitting, choice, units), seen=seen)
        keys = folder.units.keys().mixed(self._selected(folder, prepared, {}))
        records = Records(folder.journal, RECORDS, folder.out, keys)
        plan = self._plan_work(prepared, fitting, choice, units, done=records.complete)
        return replace(plan, records=records, seen=seen)

    def _choose_encoder(self, session: Session, prepared: Prepared, fitting: Fitting) -> Choice:
        choice = prepared.choose_encoder()
        if choice.warning is not None:
            session.observer.warn(choice.warning)
        # What the proof took is given back: it is no need of the job.
        release()
        parent = usage().anonymous
        needed = {"this tokenizer and these rules": least_bytes(parent, fitting.loaded_bytes)}
        if self._config.dedup_rules is not None:
            needed["dedup"] = least_grouping_bytes(parent)
        if prepared.evaluation is not None:
            needed["evaluation sets"] = parent + prepared.evaluation.building_bytes
        # Where nothing is known of the tokenizer, loading it leaves some of its memory behind (a third, measured).
        unproved = 0 if prepared.known.expected is not None else prepared.tokenizer_bytes * 3 // 8
        require_room(session.budget, needed, another_time=unproved)
        if self._config.dedup_rules is not None:
            self._check_index(prepared, self._config.dedup_rules)
        return choice

    def _check_index(self, prepared: Prepared, rules: DedupRules) -> None:
        """Raise StoreError when the index across runs can't be used."""
        if rules.index is not None:
            from milldam.dedup.index import DedupIndex

            DedupIndex.of(rules).files(prepared.identity.run_id, str(Path(self._config.out).resolve()))

    def require_disk(self, disk: Disk) -> None:
        disk.require(self._config.out)

    def _plan_work(
        self, prepared: Prepared, fitting: Fitting, choice: Choice, units: int, *, done: int = 0
    ) -> TokenPlan:
        pieces = self._pieces(prepared, units)
        return make_plan(
            fitting.budget,
            kind=TokenPlan,
            **fitting.workers_for(units - done),
            units=units,
            done=done,
            input_bytes=prepared.identity.input["bytes"],
            shard_size=prepared.shard_size,
            encoder=choice.encoder,
            encoder_note=choice.note,
            differing=choice.differing,
            stages=self._stage_names(pieces),
            pieces=pieces,
            left_out=prepared.left_out,
            conversations=prepared.conversations,
            text_columns=text_columns(prepared.identity.settings),
            preferred=prepared.preferred,
            fitting=fitting,
        )

    def _pieces(self, prepared: Prepared, units: int) -> dict[str, int]:
        """The stages that are cut into pieces, in order, and into how many at most."""
        dedup = self._config.dedup_rules
        found = {"count": units} if any(source.counted for source in prepared.sources) else {}
        if dedup is not None:
            from milldam.pipeline.deduplicating import step_counts

            evaluated = bool(self._config.evaluation_sets)
            found |= step_counts(dedup, prepared.partitions, units, evaluation=evaluated)
        return found | {"tokenize": units} | ({"arrange": units} if self._config.counts_tokens else {})

    def _stage_names(self, pieces: dict[str, int]) -> tuple[str, ...]:
        """The stages that this job has, in order."""
        packing, dedup = self._config.packing_rules, self._config.dedup_rules
        last = {"index": dedup is not None and dedup.index is not None, "pack": packing is not None, "report": True}
        return (*pieces, *(stage for stage, there in last.items() if there))

    # ---- work ----

    def stages(self, session: Session, prepared: Prepared, plan: TokenPlan) -> Generator[Stage, None, Made]:
        folder, config = session.folder, self._config
        readers = plan.fitting.readers(plan.units)
        ranges = yield from self._count(folder, prepared, readers)
        keys = folder.units.keys().mixed(self._selected(folder, prepared, ranges))
        dedup = None
        if config.dedup_rules is not None:
            from milldam.pipeline.deduplicating import Deduplication

            first = keys
            if prepared.evaluation is not None:
                first = keys.mixed(np.full(len(keys), int(prepared.evaluation.name, 16), np.uint64))
            dedup = Deduplication(config, config.dedup_rules, session, prepared, first, plan.fitting.cores)
            for stage in dedup.stages(readers, plan.fitting.readers(plan.units, judging=True), ranges):
                yield pooled(stage, folder, plan.workers)
            keys = keys.mixed(dedup.verdicts())
        records = plan.records or Records(folder.journal, RECORDS, folder.out, keys)
        yield self._tokenize(session, prepared, plan, records, dedup, ranges)
        arranged = None
        if config.counts_tokens:
            from milldam.pipeline.arranging import arrange

            arranging = arrange(config, session, records, readers, token_dtype(prepared.vocab_size))
            arranged = yield from _pooled(arranging, folder, readers.count)
        return Made(records, arranged, dedup, limit_reached=self._limit_reached(records))

    def _count(
        self, folder: RunFolder, prepared: Prepared, readers: Workers
    ) -> Generator[Stage, None, dict[int, tuple[int, int]]]:
        """Unit -> the rows wanted of it, for the units of datasets of which not all documents are wanted."""
        if not any(source.counted for source in prepared.sources):
            return {}
        counts = RowCounts(folder, prepared.sources)
        yield pooled(counts.stage(readers), folder, readers.count)
        return counts.ranges()

    def _selected(self, folder: RunFolder, prepared: Prepared, ranges: dict[int, tuple[int, int]]) -> KeyArray:
        """What a unit's tokens depend on besides its slices: a number each."""
        mixed = np.full(len(folder.units), prepared.index_key, np.uint64)
        if ranges:
            for unit in folder.units.all(Unit.from_json):
                if unit.origin in ranges:
                    mixed[unit.index] ^= np.uint64(xxh3_64_intdigest(repr(ranges[unit.origin]).encode()))
        if self._config.limit is not None:
            # How much of a unit is taken depends on all before it.
            mixed += np.uint64(int(prepared.identity.input["fingerprint"][:16], 16))
        return mixed

    def _tokenize(
        self,
        session: Session,
        prepared: Prepared,
        plan: TokenPlan,
        records: Records,
        dedup: Deduplication | None,
        ranges: dict[int, tuple[int, int]],
    ) -> Stage:
        folder, config = session.folder, self._config

        def assign(number: int) -> Assignment:
            begun = records.begun(number)
            left = None if config.limit is None else config.limit - records.counts["documents"]
            unit = folder.units.at(number, Unit.from_json)
            parts, batches = (0, 0) if begun is None else (begun.part + 1, begun.facts["batches"])
            prints = None if dedup is None else dedup.keys[unit.origin]
            return Assignment(unit, records.keys[number], parts, batches, left, ranges.get(unit.origin), prints)

        return Stage(
            "tokenize",
            self._tokenize_task(folder, prepared, plan, dedup),
            takewhile(lambda _: not self._limit_reached(records), records.pending()),
            assign,
            plan.fitting.tokenizers(plan.workers, plan.threads, plan.share_bytes),
            records.add,
            total=plan.units,
            done=records.complete,
            input_bytes=records.pending_bytes(folder.units.sizes()),
        )

    def _tokenize_task(
        self, folder: RunFolder, prepared: Prepared, plan: TokenPlan, dedup: Deduplication | None
    ) -> TokenizeTask:
        config = self._config
        return TokenizeTask(
            out=folder.out,
            sets=prepared.sets,
            selection=Selection(
                clean=config.clean_rules,
                drops=dedup.folder if dedup is not None else None,
                seen=plan.seen,
                seen_by=plan.seen.runs if plan.seen is not None else tuple(dedup.index) if dedup is not None else (),
                shown=dedup.shown if dedup is not None else (),
                filters=config.filters,
                shares=config.split_shares,
                staged=config.counts_tokens,
                seed=config.seed,
                write_dropped=config.write_dropped,
            ),
            encoder=plan.encoder,
            differing=plan.differing,
            plain_specials=config.tokenizer_rules.special_text == "plain",
            special=prepared.special,
            dtype=token_dtype(prepared.vocab_size),
            shard_size=prepared.shard_size,
            share_bytes=plan.share_bytes - plan.fitting.unpacking_bytes,
            threads=plan.threads,
        )

    def _limit_reached(self, records: Records) -> bool:
        return self._config.limit is not None and records.counts["documents"] >= self._config.limit

    # ---- finish ----

    def finish(self, session: Session, prepared: Prepared, plan: TokenPlan, done: Made) -> TextSummary:
        finish = Finish(self._config, session, prepared, plan, done, self._report)
        draft = finish.make_manifest()
        if draft.damage:
            session.observer.warn(draft.damage)
        # Between what can still be refused and what makes it a store: the index knows finished runs only.
        if done.dedup is not None:
            done.dedup.enter_index()
            session.enter("finish")
        summary, told_again = finish.wind_up(draft)
        leave_receipt(session.folder.out, self._request, self._config, prepared, told_again)
        return summary

    def up_to_date(self, session: Session, prepared: Prepared) -> TextSummary | None:
        if not has_every_file(session.folder.out, TOKENS):
            return None
        summary = complete(self._config, session.folder, report=self._report)
        leave_receipt(session.folder.out, self._request, self._config, prepared, summary)
        return summary


def _pooled(
    stages: Generator[EngineStage, None, Records], folder: RunFolder, workers: int
) -> Generator[Stage, None, Records]:
    while True:
        try:
            yield pooled(next(stages), folder, workers)
        except StopIteration as end:
            return cast("Records", end.value)


# ---- looking ahead ----


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What a job would do and take."""

    plan: WorkPlan
    disk: Disk
    state: str
    """What is in the output folder."""
    memory_bytes: int
    """The smallest budget for its workers; on several machines, of each."""


def plan_job(config: Config) -> PlannedJob:
    """Check everything that can be checked beforehand; reads no documents, writes nothing to the output folder."""
    job, budget = TokenJob(config), Budget.of(config.memory)
    with (
        tempfile.TemporaryDirectory(prefix="milldam-plan-") as place,
        RunFolder(Path(place) / "plan", TOKENS) as folder,
        session(folder, Quiet(), budget, LocalPool(budget.limit_bytes)) as work,
    ):
        prepared = Preparation(config, folder).prepare()
        state = _state_of(config, prepared)
        survey = Survey.of(prepared.units(folder))
        fitting = Fitting(config, prepared, budget, work.pool, survey.dearest)
        choice = job._choose_encoder(work, prepared, fitting)
        plan = job._plan_work(prepared, fitting, choice, survey.units)
        disk = Disk.of(config, prepared, survey)
        disk.require(config.out)
        return PlannedJob(plan, disk, state, usage().anonymous + plan.workers * fitting.worker_bytes)


def _state_of(config: Config, prepared: Prepared) -> str:
    """What is in the output folder, in words; refuses what another job made."""
    refuse_foreign(Path(config.out), TOKENS)
    there = RunFolder(Path(config.out), TOKENS)
    state = there.state()
    begin = there.where_to_begin(prepared.identity, overwrite=config.overwrite, has_results=True)
    if state == NEW:
        return state
    if begin == NEW:
        return "there is something already: it will be replaced"
    if begin == FINISHED:
        return "up to date"
    return (
        "input changed: only the units that changed are redone" if state == FINISHED else "unfinished: the job resumes"
    )
