"""What a job of a million units costs besides its work: planning, handing out, recording, resuming, finishing, opening.

The input is simulated: a listing of as many files as units, of 15 MB each, that lie nowhere; a task that does nothing
but report the record of a shard; the files of the shards are there, and empty (made before the clock runs). All else
is what any job goes through: `planned_units`, `Run`, `Workforce`, the executors, `Finish`, `milldam.open`.

    plan     list the input, plan the units, write them down
    serial   the first half of the units in one process, which is then killed (SIGKILL) in the middle of the work
    resume   list again, compare, read the records, look at the files of every shard
    local    more of them by two worker processes: all the rest, or --local of them
    rest     what is left then, in one process
    finish   records in plan order, totals, the manifest
    again    the same command once more: the store is found up to date
    open     `milldam.open` of the store

Each step is a process of its own in a memory cgroup (Linux, root). Peak: anonymous and shared memory, each page once,
sampled every 50 ms (memory.py); it includes about 50 MB of imports. Seconds: of the step, without imports.

    python benchmarks/many_units.py --units 10000 100000 1000000 --json benchmarks/results/many_units.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory import end_on_terminate, measure
from milldam.config.settings import Config
from milldam.files import hash_bytes
from milldam.memory import Budget
from milldam.pipeline.assignments import Assignment, SetRules
from milldam.pipeline.finishing import Finish, complete
from milldam.pipeline.preparing import Preparation, Prepared, Source, planned_units
from milldam.run.folder import FINISHED, Run
from milldam.run.identity import Identity
from milldam.run.planning import WorkPlan
from milldam.run.progress import Quiet
from milldam.run.records import PartRecord
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.run.workforce import Staff, Stage, at_work
from milldam.sources.batch import TextRules
from milldam.sources.listing import InputFile
from milldam.sources.units import Unit
from milldam.stores.tokens.reader import open_store
from milldam.tokenizers.proof import Expected
from milldam.tokenizers.special import SpecialTokens
from sizes import parse_size

FILE_BYTES = 15 * 10**6
SPLITS = ("train", "val")
STEPS = ("plan", "serial", "resume", "local", "rest", "finish", "again", "open")
MOST = "MANY_UNITS_LOCAL"
BUDGET = Budget(300 * 10**6, "simulated")
SOURCES = (Source(SetRules(TextRules(text_column="text")), None, None),)

# A class of the module that is run would not be found by worker processes: each step imports this one.
RUN_STEP = "import sys, many_units; many_units.run_step(*sys.argv[1:])"


# ---- the simulated job ----


def listing(units: int) -> Iterator[tuple[int, InputFile]]:
    """As many files as units, each of its own size; none of them is anywhere."""
    for k in range(units):
        path = f"/data/simulated-crawl/2026-11/part-{k // 1000:05d}/documents-{k:07d}.jsonl"
        yield 0, InputFile(path, "jsonl", None, FILE_BYTES + k % 1000, str(1_790_000_000_000_000_000 + k))


def shard_name(unit: int, split: str = SPLITS[0]) -> str:
    return f"{split}-{unit:05d}"


def shard(unit: int, split: str, share: int) -> dict[str, Any]:
    """What a worker records of a shard."""
    files = {kind: {"bytes": 0, "xxh3": hash_bytes(f"{unit} {split} {kind}".encode())} for kind in ("bin", "idx")}
    counts = {"documents": 9_000 // share, "tokens": 3_700_000 // share, "text_bytes": 14_800_000 // share}
    return {"name": shard_name(unit, split), "split": split, **counts, "characters": 14_700_000 // share, **files}


def record(unit: int) -> PartRecord:
    """Every hundredth unit has documents for a second split."""
    shards = [shard(unit, SPLITS[0], 1)] + ([shard(unit, SPLITS[1], 100)] if unit % 100 == 0 else [])
    dropped = {"clean": {"empty": 3}, "filter": {"too_short": 40 + unit % 7}}
    return PartRecord(unit, 0, shards, dropped, batches=12, last=True, read=9_050)


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """Finishes a unit by saying so."""

    def start(self) -> Work:
        return _pretend


def _pretend(assignment: Assignment, report: Report) -> None:
    unit = assignment.unit.index
    report(PART, record(unit))
    counts = {"documents": 9_050, "tokens": 3_700_000, "input_bytes": assignment.unit.size}
    report(PROGRESS, {"counts": counts, "seconds": {"tokenize": 1.5}, "anonymous_bytes": 10**8})


def make_files(out: Path, units: int) -> None:
    """The files of all shards: not part of what is measured."""
    for unit in range(units):
        for split in SPLITS if unit % 100 == 0 else SPLITS[:1]:
            for kind in ("bin", "idx"):
                os.close(os.open(f"{out}/{shard_name(unit, split)}.{kind}", os.O_CREAT | os.O_WRONLY))


class SimulatedPreparation(Preparation):
    """Lists what is not there."""

    def __init__(self, config: Config, run: Run, units: int) -> None:
        self._config, self._run, self._count = config, run, units

    def list_input(self) -> dict[str, Any]:
        return self._run.write_inputs(listing(self._count))


def prepared(identity: Identity) -> Prepared:
    special = SpecialTokens(None, 50256, None, "<|endoftext|>")
    return Prepared("simulated", "{}", hash_bytes(b""), Expected([], []), special, 50257, SOURCES, FILE_BYTES, identity)


def config_of(out: Path) -> Config:
    return Config(datasets="/data/simulated-crawl", tokenizer="simulated", out=str(out), dedup="off")


# ---- the steps ----

Clock = Callable[[str], None]


def plan(run: Run, units: int, clock: Clock) -> None:
    identity = list_input(run, units, clock)
    planned = run.stage(planned_units(run, SOURCES, FILE_BYTES))
    assert planned == units, planned
    clock("units")
    # As the check of the disk does, which every job begins with.
    assert sum(unit.size for unit in run.all_units(Unit.from_json, staged=True)) == identity.input["bytes"]
    clock("survey")
    run.start(identity, {"tokenizer.json": b"{}"})
    clock("start")


def list_input(run: Run, units: int, clock: Clock) -> Identity:
    identity = Identity(config_of(run.out).settings(), run.write_inputs(listing(units)))
    clock("list")
    return identity


def resume(run: Run, units: int, clock: Clock) -> None:
    identity = list_input(run, units, clock)
    run.require_same(identity)
    assert not run.has_moved()
    clock("compare")
    assert run.resume() == units
    clock("records")


def work(
    run: Run, units: int, clock: Clock, *, workers: int, most: int | None = None, killed_at: int | None = None
) -> None:
    """Hand out what is left, or `most` of it; `killed_at`: records after which this process is killed."""
    run.resume()
    done = len(run.progress.complete)
    clock("before")
    stop = units if killed_at is None else killed_at

    def assign(index: int) -> Assignment:
        return Assignment(run.unit(index, Unit.from_json), *run.done_so_far(index))

    def add(part: PartRecord) -> None:
        run.add(part)
        if len(run.progress.complete) == stop and killed_at is not None:
            clock("work")
            os.kill(os.getpid(), signal.SIGKILL)

    with at_work(run, Quiet(), BUDGET, "local", None) as workforce:
        some = itertools.islice(run.pending(), most)
        stage = Stage("tokenize", SimulatedTask(), some, assign, units, done, run.pending_bytes())
        workforce.work(stage, Staff(workers, 1), add)
    clock("work")


def serial(run: Run, units: int, clock: Clock) -> None:
    work(run, units, clock, workers=1, killed_at=units // 2)


def local(run: Run, units: int, clock: Clock) -> None:
    work(run, units, clock, workers=2, most=int(os.environ.get(MOST, units)))


def rest(run: Run, units: int, clock: Clock) -> None:
    work(run, units, clock, workers=1)


def finish(run: Run, units: int, clock: Clock) -> None:
    run.resume()
    clock("before")
    config, plan_ = config_of(run.out), run.plan()
    work_plan = WorkPlan(BUDGET, units, units, plan_["input"]["bytes"], FILE_BYTES, 2, 1, 10**8, "huggingface", "")
    with at_work(run, Quiet(), BUDGET, "local", None) as workforce:
        identity = Identity(plan_["settings"], plan_["input"])
        end = Finish(config, run, prepared(identity), work_plan, workforce, workforce.monitor, report=False)
        manifest = end.make_manifest(SimulatedPreparation(config, run, units), require_all=True)
        clock("gather")
        summary = end.wind_up(manifest)
        clock("manifest")
    assert summary.counts["read"] == 9_050 * units


def again(run: Run, units: int, clock: Clock) -> None:
    identity = list_input(run, units, clock)
    assert run.state() == FINISHED
    run.require_same(identity)
    clock("compare")
    complete(config_of(run.out), run, report=False)
    clock("summary")


def open_(out: Path, units: int, clock: Clock) -> None:
    store = open_store(out)
    clock("open")
    assert len(store.shards) == units + -(-units // 100)


def run_step(step: str, out: str, units: str) -> None:
    """One step in this process; seconds by what it did go to a file beside the store."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def clock(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now
        Path(f"{out}.{step}.json").write_text(json.dumps(seconds))

    if step == "open":
        open_(Path(out), int(units), clock)
        return
    functions = (plan, serial, resume, local, rest, finish, again)
    with Run(Path(out)) as run:
        next(one for one in functions if one.__name__ == step)(run, int(units), clock)


# ---- measuring ----


@dataclass(frozen=True, slots=True)
class Measured:
    units: int
    step: str
    seconds: dict[str, float]
    """By what was done; "before" is what the step before has measured already."""
    peak_bytes: int
    wall_seconds: float
    """Of the process, imports and all."""
    cpu_seconds: float
    """Of all its processes, imports and all: what it would take at least if it had the cores to itself."""

    @property
    def total(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != "before")


def measure_step(step: str, out: Path, units: int, limit_bytes: int | None) -> Measured:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), *filter(None, sys.path[1:])])
    limit = None if step in ("open", "again") else limit_bytes
    before = sum(os.times()[2:4])
    report = measure([sys.executable, "-c", RUN_STEP, step, str(out), str(units)], limit)
    cpu = sum(os.times()[2:4]) - before
    expected = 128 + signal.SIGKILL if step == "serial" else 0
    if report.exit_status != expected or report.oom_kills:
        raise SystemExit(f"{step} of {units:,} units: exit {report.exit_status}, {report.oom_kills} OOM kills")
    seconds = json.loads(Path(f"{out}.{step}.json").read_text())
    return Measured(units, step, seconds, report.cgroup_peak_bytes, report.wall_seconds, cpu)


def measure_job(units: int, steps: tuple[str, ...], limit_bytes: int | None, folder: Path) -> Iterator[Measured]:
    work_folder = Path(tempfile.mkdtemp(prefix="many-units-", dir=folder))
    try:
        for step in STEPS[: max(map(STEPS.index, steps)) + 1]:
            measured = measure_step(step, work_folder / "store", units, limit_bytes)
            if step in steps:
                yield measured
            if step == "plan":
                make_files(work_folder / "store", units)
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)


def row(one: Measured) -> str:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in one.seconds.items())
    seconds = f"{one.total:.2f} | {one.cpu_seconds:.2f}"
    return f"| {one.units:,} | {one.step} | {seconds} | {one.peak_bytes / 1e6:.0f} | {parts} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--steps", nargs="+", default=STEPS, choices=STEPS)
    parser.add_argument("--limit", type=parse_size, help="hard limit of all but again and open, page cache included")
    parser.add_argument("--folder", type=Path, help="where to work; two files a unit")
    parser.add_argument("--local", type=int, help="units for the two worker processes; default: half of all")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    end_on_terminate()
    print("| units | step | seconds | CPU | peak MB | of it |\n|---:|---|---:|---:|---:|---|", flush=True)
    if arguments.local is not None:
        os.environ[MOST] = str(arguments.local)
    figures = []
    for units in arguments.units:
        for one in measure_job(units, tuple(arguments.steps), arguments.limit, arguments.folder):
            figures.append(one)
            print(row(one), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in figures], indent=1) + "\n")


if __name__ == "__main__":
    main()
