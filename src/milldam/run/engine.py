"""Jobs as units -> read -> steps -> sink -> record: what a job has to say, and what is done for it.

    prepare    everything that can be wrong is found; the identity: what the result depends on
    units      slices of the input, each with a key, listed on disk; as many workers as the budget holds
    stages     one after the other, as the job yields them: the keys of a stage may need what an earlier one decided
    finish     the manifest, written last: there is a result if and only if it is there

A stage brings a `Load`, which pickles; a worker builds `make` of it once. `make` takes a unit, reads it batch by batch,
sends each batch through its steps into a sink, and yields a record for every part whose files are durable. A unit whose
last record is there is never made again; one that is begun goes on behind its last part, with what that record says.

Jobs of this kind: tokenize, preprocess, feeds, export, import, map. QA stands on run/job.py until it has moved.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from milldam.memory import usage
from milldam.run import job as frame
from milldam.run.folder import NEW, RunFolder
from milldam.run.pools import SMALL_INPUT, Workers, WorkPlan, fit_workers, make_plan
from milldam.run.records import RECORDS, Record, Records
from milldam.run.session import Session
from milldam.run.session import Stage as PooledStage
from milldam.run.summary import Observer
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.run.units import Identity, PlannedUnit
from milldam.stores.kinds import Kind

S = TypeVar("S")
REPORT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Assigned:
    """A unit as a worker gets it."""

    unit: Any
    key: str
    size: int
    """Bytes of input."""
    begun: Record | None = None
    """The last part that an earlier run left; None: the unit is not begun."""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON that only the job understands: which rows are wanted, the key of what an earlier stage left."""

    @property
    def next_part(self) -> int:
        return 0 if self.begun is None else self.begun.part + 1


class Telling:
    """Tells now and then how a unit gets on, and where its time goes."""

    def __init__(self, report: Report, size: int) -> None:
        self._report, self._size = report, size
        self._counts: Counter[str] = Counter(documents=0, tokens=0, input_bytes=0)
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last, self._lap = time.monotonic(), time.perf_counter()

    def lap(self, step: str | None = None) -> None:
        """Book the time since the last lap under a step, or leave it out."""
        now = time.perf_counter()
        if step is not None:
            self.seconds[step] += now - self._lap
        self._lap = now

    def add(self, **counts: int) -> None:
        self._counts.update(counts)
        # Of what is compressed, what comes out of it is more than what it takes.
        self._counts["input_bytes"] = min(self._size, self._counts["input_bytes"])
        if time.monotonic() - self._last > REPORT_SECONDS:
            self.tell()

    def reached(self, input_bytes: int) -> None:
        """So much of its input is through."""
        self._counts["input_bytes"] = input_bytes
        self.tell()

    def end(self) -> None:
        self.reached(self._size)

    def tell(self, **measured: int) -> None:
        self._last = time.monotonic()
        told = {"counts": dict(self._counts), "seconds": dict(self.seconds)}
        self._report(PROGRESS, told | {"anonymous_bytes": usage().anonymous} | measured)


Make = Callable[[Assigned, Telling], Iterator[Record]]


class Load(Protocol):
    """What crosses to a worker: settings, and where to find the rest."""

    def load(self) -> Make: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """What is made of the units that have no complete record."""

    name: str
    load: Load
    records: Records
    parse: Callable[[dict[str, Any]], Any] | None = None
    """The unit of a line of the plan; None: the units are steps, each its number."""
    workers: Workers | None = None
    """None: as many as are planned."""
    facts: Callable[[int], dict[str, Any]] = lambda number: {}
    """Of a unit, by its number: `Assigned.facts`, looked up when it is handed out."""
    todo: Iterable[int] | None = None
    """The units to make, in this order; None: all without a complete record. Of an iterator, some may come later
    (`NothingYetError`), and not all be wanted."""


class Job(ABC, Generic[S]):
    """What only one kind of job knows."""

    kind: Kind
    stage_names: tuple[str, ...]
    """In order; tasks of a job array can share each of them."""
    outputs: tuple[str, ...] | None
    """What it leaves in its folder besides the manifest, by pattern: removed when a run begins anew. None: the old
    result stays until the new manifest takes its place; what is recorded goes."""
    workers: int | None
    """As many as the user asks for; None: as many as are useful."""
    read_once: bool = False
    """Its input can't be read again: what an earlier run listed of it says nothing."""
    batch_bytes: int = 0
    """What a batch may take in each worker, where that is more than usual; known when it is prepared."""

    @abstractmethod
    def prepare(self, run: Session) -> Identity:
        """Look at settings and input (`run.folder.inputs.write`)."""

    @abstractmethod
    def units(self, run: Session) -> Iterable[PlannedUnit]: ...

    def files(self, run: Session) -> dict[str, bytes]:
        """Small files of the result that are there from the start."""
        return {}

    def plan_facts(self, run: Session) -> dict[str, Any]:
        """What this job says of its plan, by the names of `make_plan` and `WorkPlan`; the units are listed."""
        return {}

    @abstractmethod
    def stages(self, run: Session) -> Iterator[Stage | PooledStage]: ...

    @abstractmethod
    def finish(self, run: Session, plan: WorkPlan) -> S:
        """Gather what units left, write the manifest last; the summary."""

    @abstractmethod
    def up_to_date(self, run: Session) -> S | None:
        """The summary of a result that was made from the same; None: it is not whole, so that something is to do."""


def run(job: Job[S], options: frame.Options, observer: Observer | None = None) -> S:
    """Do a job, or what is left of it."""
    return frame.run(_InFrame(job), options, observer)


def array_of(
    job: Job[S],
    options: frame.Options,
    made_before: Callable[[bool], S | None] = lambda anew: None,
    publish: Callable[[], None] = lambda: None,
) -> frame.ArrayWork[S]:
    """The same for tasks of a job array."""
    return frame.ArrayWork(_InFrame(job), options, made_before, publish)


@dataclass(frozen=True, slots=True)
class _Identified:
    identity: Identity


class _InFrame(Generic[S]):
    """A job as run/job.py takes it."""

    def __init__(self, job: Job[S]) -> None:
        self._job, self.kind = job, job.kind

    def require_shareable(self) -> None:
        """What other machines can't do is refused when the job is made."""

    def pieces(self) -> dict[str, int | None]:
        return dict.fromkeys(self._job.stage_names)

    def prepare(self, run: Session) -> _Identified:
        return _Identified(self._job.prepare(run))

    def has_results(self, folder: RunFolder) -> bool:
        return next(folder.journal.read(RECORDS), None) is not None

    def plan(self, run: Session, prepared: _Identified, begin: str) -> WorkPlan:
        folder = run.folder
        if self._job.read_once or folder.needs_plan(prepared.identity, begin):
            folder.stage(self._job.units(run))
            if begin == NEW and self._job.outputs is None:
                folder.journal.forget(RECORDS)
            folder.start(prepared.identity, self._job.files(run), outputs=self._job.outputs if begin == NEW else None)
        elif folder.task is None:
            folder.provide(self._job.files(run))
        return plan_work(run, self._job)

    def stages(self, run: Session, prepared: _Identified, plan: WorkPlan) -> Generator[PooledStage, None, None]:
        for stage in self._job.stages(run):
            yield stage if isinstance(stage, PooledStage) else pooled(stage, run.folder, plan.workers)

    def finish(self, run: Session, prepared: _Identified, plan: WorkPlan, done: None) -> S:
        return self._job.finish(run, plan)

    def up_to_date(self, run: Session, prepared: _Identified) -> S | None:
        return self._job.up_to_date(run)


def plan_work(run: Session, job: Job[Any]) -> WorkPlan:
    """As many workers for the listed units as are wanted, useful and fit into the budget."""
    sizes = run.folder.units.sizes()
    units, input_bytes, held = len(sizes), int(sizes.sum()), usage().anonymous
    cores = run.pool.cores if job.workers is None else job.workers
    useful = 1 if input_bytes < SMALL_INPUT else max(1, min(units, cores))
    facts = {
        "workers": 0,
        "useful": useful,
        "cores": cores,
        "held_bytes": held,
        "units": units,
        "input_bytes": input_bytes,
        "shard_size": input_bytes // max(1, units),
        "stages": job.stage_names,
        "pieces": dict.fromkeys(job.stage_names, units),
        "encoder": "",
        "encoder_note": "",
        **job.plan_facts(run),
    }
    facts["workers"] = facts["workers"] or fit_workers(run.budget, held, 0, useful, own_bytes=job.batch_bytes)
    return make_plan(run.budget, kind=WorkPlan, **facts)


def pooled(stage: Stage, folder: RunFolder, workers: int) -> PooledStage:
    """A stage as executors take it."""
    records, parse, todo = stage.records, stage.parse, stage.todo
    sizes = np.zeros(len(records.keys), np.int64) if parse is None else folder.units.sizes()

    def assign(number: int) -> Assigned:
        unit = number if parse is None else folder.units.at(number, parse)
        return Assigned(unit, records.keys[number], int(sizes[number]), records.begun(number), stage.facts(number))

    return PooledStage(
        stage.name,
        _Making(stage.load),
        records.pending() if todo is None else iter(todo),
        assign,
        stage.workers or Workers(workers, 1),
        records.add,
        total=len(todo) if isinstance(todo, Sequence) else len(records.keys),
        done=0 if isinstance(todo, Sequence) else records.complete,
        input_bytes=int(sizes[list(todo)].sum()) if isinstance(todo, Sequence) else records.pending_bytes(sizes),
    )


@dataclass(frozen=True, slots=True)
class _Making:
    """The task of a stage: every record goes to the journal as it comes."""

    loads: Load

    def start(self) -> Work:
        make = self.loads.load()

        def work(assigned: Assigned, report: Report) -> None:
            telling = Telling(report, assigned.size)
            for record in make(assigned, telling):
                report(PART, record)
            telling.end()

        return work
