"""What a job of a million units costs besides its work: planning, handing out, recording, resuming, finishing, opening.

The input is simulated: a listing of as many files as units, of 15 MB each, that lie nowhere; a task that does nothing
but report the record of a shard; the files of the shards are there, and empty (made before the clock runs). All else
is what any job goes through: the engine, the executors, finishing, `milldam.open`.

    plan     list the input, plan the units, write them down
    serial   the first half of the units in one process, which is then killed (SIGKILL) in the middle of the work
    resume   list again, compare, read the records, look at the files of every shard
    local    more of them by two worker processes: all the rest, or --local of them
    finish   what is left, then records in plan order, totals, the manifest
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
from milldam.config.loading import load_config
from milldam.config.settings import Config
from milldam.files import hash_bytes
from milldam.pipeline.documents import SetRules
from milldam.pipeline.finishing import Made, TextSummary, complete, finish
from milldam.pipeline.preparing import Input, Prepared
from milldam.run import engine
from milldam.run.array import ArrayTask, ArrayWork
from milldam.run.budget import WorkPlan
from milldam.run.engine import Assigned, Make, Options, Progress, Session
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.units import Identity
from milldam.sources.batch import TextRules
from milldam.sources.units import InputFile, Unit
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.reader import Store
from milldam.tokenizers.loading import SpecialTokens
from milldam.tokenizers.proof import ProvedTokenizer
from sizes import parse_size

FILE_BYTES = 15 * 10**6
SPLITS = ("train", "val")
STEPS = ("plan", "serial", "resume", "local", "finish", "again", "open")
MOST = "MANY_UNITS_LOCAL"
SETS = (SetRules(TextRules(text_column="text")),)

# A class of the module that is run would not be found by worker processes: each step imports this one.
RUN_STEP = "import sys, many_units; many_units.run_step(*sys.argv[1:])"

Clock = Callable[[str], None]


# ---- the simulated job ----


def listing(units: int) -> Iterator[tuple[int, InputFile]]:
    """As many files as units, each of its own size; none of them is anywhere."""
    for k in range(units):
        path = f"/data/simulated-crawl/2026-11/part-{k // 1000:05d}/documents-{k:07d}.jsonl"
        yield 0, InputFile(path, "jsonl", None, FILE_BYTES + k % 1000, str(1_790_000_000_000_000_000 + k))


def shard_name(unit: int, split: str = SPLITS[0]) -> str:
    return f"{split}-{unit:032x}"


def shard(unit: int, split: str, share: int) -> dict[str, Any]:
    """What a worker records of a shard."""
    files = {kind: {"bytes": 0, "xxh3": hash_bytes(f"{unit} {split} {kind}".encode())} for kind in ("bin", "idx")}
    counts = {"documents": 9_000 // share, "tokens": 3_700_000 // share, "text_bytes": 14_800_000 // share}
    return {"name": shard_name(unit, split), "split": split, **counts, "characters": 14_700_000 // share, **files}


def record(unit: int, key: str) -> Record:
    """Every hundredth unit has documents for a second split."""
    shards = [shard(unit, SPLITS[0], 1)] + ([shard(unit, SPLITS[1], 100)] if unit % 100 == 0 else [])
    outputs = {f"{one['name']}.{kind}": one[kind] for one in shards for kind in ("bin", "idx")}
    dropped = {"clean": {"empty": 3}, "filter": {"too_short": 40 + unit % 7}}
    facts = {"shards": shards, "dropped": dropped, "batches": 12, "read": 9_050, "dataset": 0}
    counts = {"documents": 9_000, "tokens": 3_700_000, "text_bytes": 14_800_000}
    return Record(key, outputs=outputs, counts=counts, facts=facts)


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """Finishes a unit by saying so."""

    def load(self) -> Make:
        return _pretend


def _pretend(assigned: Assigned, progress: Progress) -> Iterator[Record]:
    progress.add(documents=9_050, tokens=3_700_000)
    yield record(assigned.unit.index, assigned.key)


def make_files(out: Path, units: int) -> None:
    """The files of all shards: not part of what is measured."""
    for unit in range(units):
        for split in SPLITS if unit % 100 == 0 else SPLITS[:1]:
            for kind in ("bin", "idx"):
                os.close(os.open(f"{out}/{shard_name(unit, split)}.{kind}", os.O_CREAT | os.O_WRONLY))


class SimulatedInput(Input):
    """Lists what is not there."""

    def __init__(self, config: Config, folder: RunFolder, units: int) -> None:
        self._config, self._folder, self._count = config, folder, units

    def look(self) -> dict[str, Any]:
        return self._folder.inputs.write(listing(self._count))


class SimulatedRecords(Records):
    """Kills this process when so many units are complete."""

    killed_at: int | None = None
    clock: Clock

    def add(self, record: Record) -> None:
        super().add(record)
        if self.complete == self.killed_at:
            self.clock("work")
            os.kill(os.getpid(), signal.SIGKILL)


def config_of(out: Path) -> Config:
    return load_config({"datasets": "/data/simulated-crawl", "tokenizer": "simulated", "out": str(out), "dedup": "off"})


class SimulatedJob(engine.Job[TextSummary]):
    """`most`: units to work on; `killed_at`: units after which this process is killed."""

    kind, stage_names, outputs = TOKENS, ("tokenize",), ()

    def __init__(
        self,
        out: Path,
        units: int,
        clock: Clock,
        workers: int = 1,
        most: int | None = None,
        killed_at: int | None = None,
    ) -> None:
        self._config, self._units, self._clock, self.workers = config_of(out), units, clock, workers
        self._most, self._killed_at = most, killed_at

    def prepare(self, run: Session) -> Identity:
        input = SimulatedInput(self._config, run.folder, self._units)
        identity = Identity(self._config.settings() | {"tokenizer": hash_bytes(b"")}, input.look())
        self._clock("list")
        special = SpecialTokens(None, 50256, None, "<|endoftext|>")
        known = ProvedTokenizer("simulated", "{}", special, 50257, (), "huggingface", "as asked")
        self._prepared = Prepared(input, SETS, identity, FILE_BYTES, known, None)
        return identity

    def files(self, run: Session) -> dict[str, bytes]:
        return {"tokenizer.json": b"{}"}

    def units(self, run: Session) -> Iterator[Unit]:
        yield from self._prepared.input.units(SETS, FILE_BYTES)
        self._clock("units")

    def plan_facts(self, run: Session) -> dict[str, Any]:
        self._clock("plan")
        size = self._prepared.identity.input["bytes"]
        return {"workers": self.workers, "input_bytes": size, "encoder": "huggingface"}

    def stages(self, run: Session) -> Iterator[engine.Stage]:
        folder = run.folder
        self._records = SimulatedRecords(folder, "records.jsonl", folder.units.keys())
        self._records.killed_at, self._records.clock = self._killed_at, self._clock
        self._clock("records")
        some = itertools.islice(self._records.pending(), self._most)
        yield engine.Stage("tokenize", SimulatedLoad(), self._records, Unit.from_json, todo=some)
        self._clock("work")

    def finish(self, run: Session, plan: WorkPlan) -> TextSummary:
        if self._records.complete < self._units:
            raise SystemExit(0)
        summary = finish(self._config, run, self._prepared, plan, Made(self._records), whole=False, report=False)
        self._clock("finish")
        return summary

    def up_to_date(self, run: Session) -> TextSummary:
        self._clock("compare")
        summary = complete(self._config, run.folder, report=False)
        self._clock("summary")
        return summary


# ---- the steps ----


def run_step(step: str, out: str, units: str) -> None:
    """One step in this process; seconds by what it did go to a file beside the store."""
    seconds: dict[str, float] = {}
    last = time.perf_counter()

    def clock(name: str) -> None:
        nonlocal last
        now = time.perf_counter()
        seconds[name], last = now - last, now
        Path(f"{out}.{step}.json").write_text(json.dumps(seconds))

    do_step(step, Path(out), int(units), clock)


def do_step(step: str, out: Path, units: int, clock: Clock) -> None:
    if step == "open":
        store = Store(out)
        clock("open")
        assert len(store.shards) == units + -(-units // 100)
        return
    most = int(os.environ.get(MOST, units // 4))
    how: dict[str, dict[str, Any]] = {
        "serial": {"killed_at": units // 2},
        "resume": {"most": 0},
        "local": {"workers": 2, "most": most},
    }
    job = SimulatedJob(out, units, clock, **how.get(step, {}))
    options = Options(out, memory="300MB")
    if step == "plan":
        ArrayWork(job, options).run(ArrayTask("prepare", 0, 1))
    else:
        engine.run(job, options)


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
