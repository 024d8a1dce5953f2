"""The job of `milldam preprocess` and `milldam tokenize`. Each step leaves a state from which the same call goes on.

prepare      tokenizer, input listing, text columns, engine: everything that can be wrong is found here
plan         units from the input, workers from the budget
count        only for slices of data sets: how many documents each unit has
fingerprint  only with dedup, the first pass: hashes and signatures of every unit
group        only with dedup: drop sets
tokenize     the second pass: every finished part of a unit is recorded
arrange      only for splits and limits in tokens
finish       rejects gathered, manifest written last
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from milldam.config.settings import Config, text_columns
from milldam.dedup.fingerprints import partition_count
from milldam.errors import ConfigError, NotReadyError, ResourceError
from milldam.memory import Budget, format_size, usage
from milldam.pipeline.arranging import RECORDS as ARRANGED
from milldam.pipeline.arranging import ArrangeTask, Staged, find_boundaries, find_cap
from milldam.pipeline.assignments import Assignment
from milldam.pipeline.counting import CountTask, RowCounts
from milldam.pipeline.deduplicating import Deduplication
from milldam.pipeline.estimating import TYPICAL, Samples, Survey, estimate, free_bytes, measure, require_disk
from milldam.pipeline.finishing import Finish, TextSummary, complete
from milldam.pipeline.needs import Machines, Needs
from milldam.pipeline.preparing import Preparation, pick_engine, planned_units
from milldam.pipeline.resolving import check_index, steps_of
from milldam.pipeline.tokenizing import Selection, TokenizeTask
from milldam.run.array_task import FinishCrew, ShareCrew, ShareDone
from milldam.run.crews import Crew, LocalCrew
from milldam.run.folder import FINISHED, NEW, RECORDS, UNFINISHED, Run, refuse_foreign
from milldam.run.identity import Identity
from milldam.run.monitor import Monitor
from milldam.run.planning import (
    FILTER_BYTES,
    FUNCTION_BYTES,
    LANGUAGE_BYTES,
    SMALL_INPUT,
    WORK_BYTES,
    WORKER_BYTES,
    WorkPlan,
    fit_workers,
    make_plan,
    require_room_for_grouping,
)
from milldam.run.progress import Observer, Quiet
from milldam.run.records import PartRecord, in_plan_order
from milldam.run.workforce import Staff, Stage, at_work
from milldam.sources.opening import STDIN
from milldam.sources.tables import unpacking_place
from milldam.sources.units import Slice, Unit
from milldam.stores.tokens.format import token_dtype
from milldam.tokenizers.proof import Choice


def run_job(
    config: Config,
    observer: Observer | None = None,
    *,
    name: Path | None = None,
    held_bytes: int = 0,
    report: bool = True,
) -> TextSummary:
    """Do the job, or what is left of it.

    `name`: what messages call the result, when it is not the folder. `held_bytes`: memory that the calling program
    holds already; the limit comes on top of it. `report`: make the page about it.
    """
    with Run(Path(config.out), name) as run:
        return Job(config, run, observer or Quiet(), held_bytes).run(report=report)


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What a job would do and take."""

    plan: WorkPlan
    estimate: Needs
    free_bytes: int
    """On the disk that the result will be on."""
    state: str
    """What is in the output folder."""
    machines: Machines
    memory_bytes: int
    """The smallest budget of each machine for its workers."""


def plan_job(config: Config, *, nodes: int = 1) -> PlannedJob:
    """Check everything that can be checked beforehand; reads a small sample and writes nothing to the output folder.

    `nodes`: how many machines like this plan's will work on it.
    """
    with tempfile.TemporaryDirectory(prefix="milldam-plan-") as folder, Run(Path(folder) / "plan") as run:
        return Job(config, run, Quiet(), 0).look_ahead(nodes)


class Job:
    """One job in its output folder."""

    def __init__(
        self, config: Config, run: Run, observer: Observer, held_bytes: int, *, after_shares: bool = False
    ) -> None:
        self._config, self._run, self._observer = config, run, observer
        self._after_shares = after_shares
        self._budget = Budget.of(config.memory, held_bytes)
        self._crew: Crew = LocalCrew(self._budget.limit_bytes)
        self._dearest: tuple[int, Slice] | None = None

    def run(self, *, report: bool) -> TextSummary:
        with self._at_work() as monitor:
            preparation = Preparation(self._config, self._run)
            if not self._begin(preparation, monitor):
                return complete(self._config, self._run, report=report)
            self._observer.planned(self._plan)
            self._ranges = self._count()
            self._deduplicate()
            self._tokenize()
            self._arrange()
            if self._run.share is not None:
                raise ShareDone
            self._workforce.close()
            self._workforce.enter("finish")
            finish = Finish(self._config, self._run, self._prepared, self._plan, self._workforce, monitor, report)
            draft = finish.make_manifest(preparation, require_all=not self._limit_reached())
            if draft.damage:
                self._observer.warn(draft.damage)
            # Between what can still be refused and what makes it a store: the index knows finished runs only.
            if self._dedup is not None:
                self._dedup.commit_to_index()
            return finish.wind_up(draft)

    def prepare(self) -> None:
        """As far as other machines can go on from."""
        with self._at_work() as monitor:
            if not self._begin(Preparation(self._config, self._run), monitor):
                return
            self._observer.planned(self._plan)
            if self._dedup is not None:
                self._dedup.pin()
            self._run.forget_shares()

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[Monitor]:
        where = self._config.engine, self._config.address
        with at_work(self._run, self._observer, self._budget, *where) as self._workforce:
            self._crew = self._workforce.crew
            yield self._workforce.monitor

    def _begin(self, preparation: Preparation, monitor: Monitor) -> bool:
        """Prepare and plan; False when there is nothing to do."""
        self._prepared, self._left_out = preparation.prepare(), str(preparation.left_out)
        begin = self._where_to_begin(self._prepared.identity)
        if begin == FINISHED:
            if self._run.share is not None:
                raise ShareDone
            return False
        # All that can be refused is refused before anything in the folder is replaced.
        choice = self._choose_engine()
        if begin == NEW:
            monitor.restart()
        self._plan = self._plan_work(choice, self._plan_units(choice.engine, fresh=begin == NEW))
        self._dedup = self._plan_dedup()
        share, in_shares = self._run.share, tuple(self._plan.pieces)
        if share is not None:
            self._workforce.hire(ShareCrew(self._crew, share.stage, share.holds, in_shares))
        elif self._after_shares:
            self._workforce.hire(FinishCrew(self._crew, in_shares))
        return True

    def look_ahead(self, nodes: int) -> PlannedJob:
        config, preparation = self._config, Preparation(self._config, self._run)
        self._prepared, self._left_out = preparation.prepare(), str(preparation.left_out)
        state = _state_of(config, self._prepared.identity)
        choice = self._choose_engine()
        survey = Survey.of(preparation.units(self._prepared))
        self._dearest = survey.dearest
        plan = self._plan_work(choice, survey.units)
        machines = Machines(nodes, plan.workers)
        samples = measure(config, self._prepared, survey.some, plan.engine)
        needs = estimate(config, self._prepared, survey, samples, plan.stages, machines)
        require_disk(needs, config.out)
        each = WORKER_BYTES + self._loaded_bytes + self._unpacking_bytes + WORK_BYTES
        memory = usage().anonymous + plan.workers * each
        return PlannedJob(plan, needs, free_bytes(config.out), state, machines, memory)

    # ---- prepare and plan ----

    def _where_to_begin(self, identity: Identity) -> str:
        """NEW: from nothing; UNFINISHED: go on; FINISHED: nothing to do. Refuses what was made from something else."""
        run, config = self._run, self._config
        state = run.state()
        if self._after_shares and state == NEW:
            raise NotReadyError(f"{config.out}: not prepared. First: milldam run-units CONFIG --stage prepare")
        if run.share is not None or self._after_shares:
            run.require_same(identity)
            return state
        same = run.agrees(identity, overwrite=config.overwrite)
        if state == NEW or (config.overwrite and not (same and state == UNFINISHED)):
            return NEW
        if state == UNFINISHED and not same and not run.has_results():
            return NEW  # it was planned, and nothing came of it
        run.require_same(identity)
        if self._from_stdin:
            if state == FINISHED:
                raise ConfigError(
                    f"{config.out} exists, and standard input can't be compared with it. Use --overwrite."
                )
            return NEW
        return state

    @property
    def _from_stdin(self) -> bool:
        return any(STDIN in one.paths for one in self._config.sources)

    def _choose_engine(self) -> Choice:
        choice = pick_engine(self._config, self._prepared)
        if choice.warning is not None:
            self._observer.warn(choice.warning)
        self._fit_workers(self._loaded_bytes, 1)
        if self._config.dedup_rules is not None:
            require_room_for_grouping(self._budget, usage().anonymous)
            check_index(self._config.dedup_rules, self._prepared.identity, self._out)
        return choice

    @property
    def _loaded_bytes(self) -> int:
        """What a worker of the second pass holds besides its batches."""
        filters, clean = self._config.filters, self._config.clean_rules
        text_rules = FILTER_BYTES if filters.on_text else 0
        language = LANGUAGE_BYTES if filters.language is not None else 0
        function = FUNCTION_BYTES if clean is not None and clean.function is not None else 0
        return self._prepared.tokenizer_bytes + text_rules + language + function + self._crew.overhead_bytes

    @property
    def _unpacking_bytes(self) -> int:
        """What a worker may hold of the input besides batches."""
        return self._dearest[1].unpacking if self._dearest is not None else 0

    def _fit_workers(self, loaded_bytes: int, wanted: int) -> int:
        """How many workers the budget holds when each can unpack the largest part of the input."""
        try:
            return fit_workers(self._budget, usage().anonymous, loaded_bytes + self._unpacking_bytes, wanted)
        except ResourceError as error:
            if self._dearest is None:
                raise
            dataset, slice = self._dearest
            place = unpacking_place(slice, self._prepared.sets[dataset].text.text_column)
            size = format_size(slice.unpacking)
            raise ResourceError(f"{error}\n{slice.path}, {place}, takes {size} of that to unpack.") from None

    def _plan_units(self, engine: str, *, fresh: bool) -> int:
        run, prepared = self._run, self._prepared
        units = planned_units(run, prepared.sources, prepared.shard_size)
        if fresh:
            survey = Survey()
            count = run.stage(survey.watch(units))
            self._dearest = survey.dearest
            self._fit_workers(self._loaded_bytes, 1)
            self._require_disk(engine, survey, count)
            run.start(prepared.identity, {"tokenizer.json": prepared.tokenizer_json.encode()})
            return count
        if run.share is None and run.has_moved():
            run.replan(units)
        count = run.resume()
        self._dearest = Survey.of(self._units()).dearest
        return count

    def _require_disk(self, engine: str, survey: Survey, units: int) -> None:
        """Refuse what would fill the disk: judged by typical text, and only if that does not fit by this one."""
        job = (self._config, self._prepared, survey)
        stages = self._stages(self._pieces(units))
        if estimate(*job, Samples(TYPICAL), stages, Machines()).peak[1] > free_bytes(self._config.out):
            samples = measure(self._config, self._prepared, survey.some, engine)
            require_disk(estimate(*job, samples, stages, Machines()), self._config.out)

    @property
    def _out(self) -> str:
        return str(Path(self._config.out).resolve())

    def _plan_work(self, choice: Choice, units: int) -> WorkPlan:
        done = len(self._run.progress.complete)
        wanted = self._cores
        useful = 1 if self._one_process else max(1, min(wanted, units - done))
        parent = usage().anonymous
        workers = self._fit_workers(self._loaded_bytes, useful)
        held = parent if workers > 1 or self._crew.machine else 0
        return make_plan(
            self._budget,
            workers=workers,
            useful=useful,
            cores=wanted,
            held_bytes=held,
            units=units,
            done=done,
            done_text_bytes=self._run.progress.text_bytes,
            input_bytes=self._prepared.identity.input["bytes"],
            shard_size=self._prepared.shard_size,
            engine=choice.engine,
            engine_note=choice.note,
            stages=self._stages(self._pieces(units)),
            pieces=self._pieces(units),
            left_out=self._left_out,
            text_columns=text_columns(self._prepared.identity.settings),
        )

    def _pieces(self, units: int) -> dict[str, int]:
        """The stages that are cut into pieces, in order, and into how many at most."""
        dedup = self._config.dedup_rules
        found = {"count": units} if any(source.counted for source in self._prepared.sources) else {}
        if dedup is not None:
            steps = steps_of(dedup, partition_count(self._prepared.identity.input["bytes"]))
            found |= {"fingerprint": units} | {stage: len(each) for stage, each in steps.items()}
        return found | {"tokenize": units} | ({"arrange": units} if self._staged else {})

    def _stages(self, pieces: dict[str, int]) -> tuple[str, ...]:
        """The stages that this job has, in order."""
        packing, dedup = self._config.packing_rules, self._config.dedup_rules
        last = {
            "index": dedup is not None and dedup.index is not None,
            "pack": packing is not None,
            "report": True,
        }
        return (*pieces, *(stage for stage, there in last.items() if there))

    @property
    def _one_process(self) -> bool:
        """Whether other processes are not worth their start, or could not open the input or know when it is enough."""
        if self._config.limit is not None:
            return True
        small = self._prepared.identity.input["bytes"] < SMALL_INPUT
        if self._config.engine == "local" and self._config.workers is None and small:
            return True
        paths = (path for one in self._config.sources for path in one.paths)
        return any(path == STDIN or path.startswith("memory://") for path in paths)

    def _readers(self) -> Staff:
        """Who reads without encoding: no tokenizer takes memory."""
        wanted = 1 if self._one_process else self._cores
        workers = self._fit_workers(self._crew.overhead_bytes, min(wanted, self._plan.units))
        return Staff(workers, max(1, self._cores // workers), here=self._one_process)

    @property
    def _cores(self) -> int:
        """To use, on each machine."""
        return self._config.workers or self._crew.cores

    # ---- which documents ----

    def _count(self) -> dict[int, tuple[int, int]]:
        counts = RowCounts(self._run, self._prepared.sources)
        if not counts.needed:
            return {}
        task = CountTask(self._prepared.sets, str(self._run.folder))
        stage = Stage("count", task, counts.missing(), lambda index: Assignment(self._unit(index)), total=counts.units)
        self._workforce.work(stage, self._readers(), counts.add)
        return counts.ranges()

    def _units(self) -> Iterator[Unit]:
        return self._run.all_units(Unit.from_json)

    def _unit(self, number: int) -> Unit:
        unit: Unit = self._run.unit(number, Unit.from_json)
        return unit

    def _rows(self, unit: Unit) -> tuple[int, int] | None:
        return self._ranges.get(unit.origin)

    # ---- dedup ----

    def _plan_dedup(self) -> Deduplication | None:
        rules = self._config.dedup_rules
        if rules is None:
            return None
        job = (self._config, rules, self._run, self._prepared)
        return Deduplication(*job, self._workforce, self._budget, self._cores)

    def _deduplicate(self) -> None:
        if self._dedup is not None:
            readers = self._readers()
            self._dedup.find_drops(readers, lambda index: Assignment(unit := self._unit(index), rows=self._rows(unit)))

    # ---- tokenize ----

    def _tokenize(self) -> None:
        run, plan = self._run, self._plan

        def assign(index: int) -> Assignment:
            parts, batches = run.done_so_far(index)
            left = None if self._config.limit is None else self._config.limit - run.progress.documents
            unit = self._unit(index)
            return Assignment(unit, parts, batches, left, self._rows(unit))

        stage = Stage(
            "tokenize",
            self._tokenize_task(),
            itertools.takewhile(lambda _: not self._limit_reached(), run.pending()),
            assign,
            total=plan.units,
            done=plan.done,
            input_bytes=run.pending_bytes(),
        )
        self._workforce.work(stage, Staff(plan.workers, plan.threads, here=self._one_process), run.add)

    def _tokenize_task(self) -> TokenizeTask:
        config, prepared, plan = self._config, self._prepared, self._plan
        return TokenizeTask(
            out=self._run.out,
            sets=prepared.sets,
            selection=Selection(
                clean=config.clean_rules,
                drops=self._dedup.folder if self._dedup is not None else None,
                seen_by=tuple(self._dedup.index) if self._dedup is not None else (),
                filters=config.filters,
                shares=config.split_shares,
                staged=self._staged,
                seed=config.seed,
                write_dropped=config.write_dropped,
            ),
            engine=plan.engine,
            plain_specials=config.tokenizer_rules.special_text == "plain",
            special=prepared.special,
            dtype=token_dtype(prepared.vocab_size),
            shard_size=prepared.shard_size,
            share_bytes=plan.share_bytes - self._unpacking_bytes,
            threads=plan.threads,
        )

    @property
    def _staged(self) -> bool:
        return self._config.counts_tokens

    def _limit_reached(self) -> bool:
        return self._config.limit is not None and self._run.progress.documents >= self._config.limit

    # ---- splits and limits in tokens ----

    def _arrange(self) -> None:
        if not self._staged:
            return
        self._workforce.enter("arrange")
        config, run = self._config, self._run
        staged = self._capped(self._staged_shards())
        if not staged:
            return
        validation = len(config.validation_sets)
        free = [one for one in staged if one.dataset >= validation]
        task = ArrangeTask(
            out=run.out,
            splits=tuple(config.split_tokens),
            boundaries=tuple(find_boundaries(run.out, lambda: iter(free), config.split_tokens)),
            shares=config.split_shares,
            validation=frozenset(range(validation)),
            dtype=token_dtype(self._prepared.vocab_size),
        )
        records = (PartRecord(**line) for line in run.appended(ARRANGED))
        done = {(record.unit, record.part) for record in records if run.holds(record)}
        todo = [k for k, one in enumerate(staged) if (one.record.unit, one.record.part) not in done]

        def keep(record: PartRecord) -> None:
            # Once, though a worker that died before it could say that it is done is made up for by another.
            if (record.unit, record.part) not in done:
                done.add((record.unit, record.part))
                run.append(ARRANGED, asdict(record))

        stage = Stage("arrange", task, iter(todo), lambda k: staged[k], total=len(todo))
        self._workforce.work(stage, self._readers(), keep)

    def _staged_shards(self) -> list[Staged]:
        records = in_plan_order(self._run.appended_files(RECORDS))
        return [Staged(record) for record in records if record.shards]

    def _capped(self, staged: list[Staged]) -> list[Staged]:
        rooms = {k: one.max_tokens for k, one in enumerate(self._config.sources) if one.max_tokens is not None}
        capped = []
        for one in staged:
            if one.dataset in rooms:
                cap, rooms[one.dataset] = find_cap(self._run.out, one, rooms[one.dataset])
                one = replace(one, cap=cap)
            capped.append(one)
        return capped


def _state_of(config: Config, identity: Identity) -> str:
    """What is in the output folder, in words; refuses what another job made."""
    refuse_foreign(Path(config.out))
    there = Run(Path(config.out))
    state = there.state()
    if state == NEW:
        return state
    if config.overwrite and (state == FINISHED or not there.agrees(identity, overwrite=True)):
        return "there is something already: it will be replaced"
    there.require_same(identity)
    return "up to date" if state == FINISHED else "unfinished: the job goes on where it stopped"
