"""The job of `milldam tokenize`. Each step leaves a state from which the same call goes on.

prepare   tokenizer, input listing, text column, engine: everything that can be wrong is found here
plan      units from the input, workers from the budget
work      units through an executor; every finished part is recorded
finish    rejects gathered, manifest written last
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milldam.config import TokenizeConfig
from milldam.errors import ConfigError, InputError
from milldam.executors import CRASH, DONE, PART, PROGRESS, Event, Executor
from milldam.executors.local import LocalExecutor
from milldam.executors.serial import SerialExecutor
from milldam.files import hash_bytes, write_json
from milldam.memory import Budget, Monitor, release, usage
from milldam.pipeline import Assignment, TokenizeTask
from milldam.planning import TOKENIZER_FACTOR, WorkPlan, cores, fit_workers
from milldam.progress import Observer, Quiet, Snapshot, Summary
from milldam.rejects import gather_rejects
from milldam.run import FINISHED, NEW, UNFINISHED, Identity, Run, require_complete, shards_in_order
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column
from milldam.sources.listing import InputFile, list_inputs
from milldam.sources.opening import STDIN
from milldam.sources.reading import read_unit, slice_file
from milldam.sources.units import Slice, Unit, default_shard_size, plan_units
from milldam.store.format import token_dtype
from milldam.store.manifest import Manifest
from milldam.tokenizers.loading import LoadedTokenizer, load_tokenizer
from milldam.tokenizers.proof import Choice, Expected, choose_engine, expected_ids
from milldam.tokenizers.special import SpecialTokens, choose_special_tokens

SAMPLE_BYTES = 64 << 10
REPORT_SECONDS = 0.2
STATUS_SECONDS = 1.0


def tokenize_to_store(config: TokenizeConfig, observer: Observer | None = None, *, name: Path | None = None) -> Summary:
    """Do the job, or what is left of it. `name`: what messages call the result, when it is not the folder."""
    with Run(config.out, name) as run:
        return _Job(config, run, observer or Quiet()).run()


@dataclass(frozen=True, slots=True)
class _Prepared:
    name: str
    tokenizer_json: str
    tokenizer_hash: str
    expected: Expected
    special: SpecialTokens
    vocab_size: int
    rules: TextRules
    shard_size: int
    identity: Identity

    @property
    def tokenizer_bytes(self) -> int:
        """What it will take in memory, as measured of many."""
        return TOKENIZER_FACTOR * len(self.tokenizer_json)


class _Job:
    def __init__(self, config: TokenizeConfig, run: Run, observer: Observer) -> None:
        self._config, self._run, self._observer = config, run, observer
        self._budget = Budget.of(config.memory, config.held_bytes)
        self._snapshot = Snapshot(budget_bytes=self._budget.limit_bytes)
        self._by_unit: dict[int, dict[str, Any]] = {}
        self._started = time.monotonic()
        self._told = 0.0

    def run(self) -> Summary:
        with Monitor(self._run.folder / "memory.csv", stage="prepare") as self._monitor:
            input_identity = self._run.write_inputs(list_inputs(self._config.inputs, self._config.input_format))
            # The loaded tokenizer is needed for this step alone: it must not stay in memory.
            prepared = self._prepare(load_tokenizer(self._config.tokenizer), input_identity)
            release()
            begin = self._where_to_begin(prepared.identity)
            if begin == FINISHED:
                return self._summary(Manifest.read(self._config.out), up_to_date=True)
            # All that can be refused is refused before anything in the folder is replaced.
            choice = self._choose_engine(prepared)
            fit_workers(self._budget, usage().anonymous, prepared.tokenizer_bytes, 1)
            units = self._plan_units(prepared, fresh=begin == NEW)
            plan = self._plan_work(prepared, choice, units)
            task = self._make_task(prepared, plan)
            self._observer.planned(plan)
            self._monitor.enter_stage("tokenize")
            self._work(plan, task)
            self._monitor.enter_stage("finish")
            manifest = self._finish(prepared, units, plan)
        return self._write_summary(manifest, plan)

    # ---- prepare ----

    def _prepare(self, tokenizer: LoadedTokenizer, input_identity: dict[str, Any]) -> _Prepared:
        config = self._config
        special = choose_special_tokens(tokenizer.huggingface, tokenizer.named, bos=config.bos, eos=config.eos)
        shard_size = config.shard_size or default_shard_size(input_identity["bytes"])
        rules = TextRules(config.documents, config.separator, config.text_column, config.invalid_utf8, config.strict)
        slices = (Slice(file.path, file.format, file.compression) for file in self._input_files())
        column = find_text_column(slices, config.text_column, str(self._run.folder))
        rules = dataclasses.replace(rules, text_column=column)
        tokenizer_hash = hash_bytes(tokenizer.json.encode())
        # What "auto" stands for is settled here, so that it is compared and recorded as what it is.
        settled = {"bos": special.bos_token, "eos": special.eos_token, "shard_size": shard_size, "text_column": column}
        identity = Identity(config.settings(tokenizer_hash) | settled, input_identity)
        plain = config.special_text == "plain"
        expected = expected_ids(tokenizer.huggingface, self._samples(rules), plain_specials=plain)
        return _Prepared(
            name=tokenizer.name,
            tokenizer_json=tokenizer.json,
            tokenizer_hash=tokenizer_hash,
            expected=expected,
            special=special,
            vocab_size=tokenizer.vocab_size,
            rules=rules,
            shard_size=shard_size,
            identity=identity,
        )

    def _input_files(self) -> Iterator[InputFile]:
        return (InputFile(**file) for file in self._run.inputs(listed_now=True))

    def _where_to_begin(self, identity: Identity) -> str:
        """NEW: from nothing; UNFINISHED: go on; FINISHED: nothing to do. Refuses what was made from something else."""
        run, config = self._run, self._config
        state = run.state()
        same = state != NEW and not run.identity().differences(identity)
        if state == NEW or (config.overwrite and not (same and state == UNFINISHED)):
            return NEW
        run.require_same(identity)
        if STDIN in config.inputs:
            if state == FINISHED:
                raise ConfigError(
                    f"{config.out} exists, and standard input can't be compared with it. Use --overwrite."
                )
            return NEW
        return state

    # ---- plan ----

    def _plan_units(self, prepared: _Prepared, *, fresh: bool) -> int:
        run = self._run
        units = plan_units(self._input_files(), prepared.shard_size, partial(slice_file, rules=prepared.rules))
        if fresh:
            count = run.stage(units)
            run.start(prepared.identity, {"tokenizer.json": prepared.tokenizer_json.encode()})
        else:
            if run.has_moved():
                run.replan(units)
            count = run.resume()
        self._snapshot.units, self._snapshot.units_done = count, len(run.progress.complete)
        self._snapshot.input_total = sum(unit.size for unit, _ in run.pending(Unit.from_json))
        return count

    def _plan_work(self, prepared: _Prepared, choice: Choice, units: int) -> WorkPlan:
        config, done = self._config, len(self._run.progress.complete)
        wanted = config.workers or cores()
        here_only = config.limit is not None or any(_this_process_only(one) for one in config.inputs)
        useful = 1 if here_only else max(1, min(wanted, units - done))
        parent = usage().anonymous
        workers = fit_workers(self._budget, parent, prepared.tokenizer_bytes, useful)
        left = self._budget.limit_bytes - (parent if workers > 1 else 0)
        return WorkPlan(
            budget=self._budget,
            units=units,
            done=done,
            input_bytes=prepared.identity.input["bytes"],
            shard_size=prepared.shard_size,
            workers=workers,
            threads=max(1, wanted // workers),
            share_bytes=left // workers,
            engine=choice.engine,
            engine_note=choice.note,
            note=f"the budget holds {workers} of {useful} workers" if workers < useful else "",
        )

    def _make_task(self, prepared: _Prepared, plan: WorkPlan) -> TokenizeTask:
        return TokenizeTask(
            out=self._config.out,
            rules=prepared.rules,
            engine=plan.engine,
            plain_specials=self._config.special_text == "plain",
            special=prepared.special,
            dtype=token_dtype(prepared.vocab_size),
            shard_size=prepared.shard_size,
            share_bytes=plan.share_bytes,
            threads=plan.threads,
        )

    def _choose_engine(self, prepared: _Prepared) -> Choice:
        plain = self._config.special_text == "plain"
        choice = choose_engine(self._config.engine, prepared.tokenizer_json, prepared.expected, plain_specials=plain)
        if choice.warning is not None:
            self._observer.warn(choice.warning)
        return choice

    def _samples(self, rules: TextRules) -> list[str]:
        """The first documents of the input, up to some tens of kilobytes."""
        if STDIN in self._config.inputs:
            return []
        texts: list[str] = []
        size = 0
        lenient = dataclasses.replace(rules, strict=False, invalid_utf8="reject")
        for file in itertools.islice(self._input_files(), 3):
            head = Unit(0, (Slice(file.path, file.format, file.compression),))
            for batch in read_unit(head, lenient, lambda reject: None, str(self._run.folder)):
                for text in batch.texts:
                    texts.append(text.as_py()[:SAMPLE_BYTES])
                    size += len(texts[-1])
                    if size > SAMPLE_BYTES:
                        return texts
        return texts

    # ---- work ----

    def _work(self, plan: WorkPlan, task: TokenizeTask) -> None:
        run = self._run
        pending = {}

        def units() -> Iterator[int]:
            for unit, _ in run.pending(Unit.from_json):
                if self._limit_reached():
                    return
                pending[unit.index] = unit
                yield unit.index

        def assign(index: int) -> Assignment:
            parts, batches = run.done_so_far(index)
            left = None if self._config.limit is None else self._config.limit - run.progress.documents
            return Assignment(pending[index], parts, batches, left)

        def on_event(event: Event) -> None:
            if event.kind == DONE:
                del pending[event.unit]
            self._on_event(event)

        executor: Executor = SerialExecutor() if plan.workers == 1 else LocalExecutor(plan.workers, plan.threads)
        with _thread_limit(plan):
            executor.run(task, units(), assign, on_event)

    def _limit_reached(self) -> bool:
        return self._config.limit is not None and self._run.progress.documents >= self._config.limit

    def _on_event(self, event: Event) -> None:
        if event.kind == PART:
            self._run.add(event.value)
        elif event.kind == PROGRESS:
            self._by_unit[event.unit] = event.value
            self._snapshot.workers[event.worker] = _worker_status(event)
        elif event.kind == DONE:
            finished = self._by_unit.pop(event.unit, {"counts": {}, "seconds": {}})
            self._snapshot.counts.update(finished["counts"])
            self._snapshot.seconds.update(finished["seconds"])
            self._snapshot.workers.pop(event.worker, None)
        elif event.kind == CRASH:
            self._by_unit.pop(event.unit, None)
            self._observer.warn(f"A worker on unit {event.unit} {event.value}; the unit is tried once more.")
        self._tell(force=event.kind == DONE)

    def _tell(self, *, force: bool) -> None:
        """Show where the run stands, and write it down for `milldam status`."""
        now = time.monotonic()
        if not force and now - self._told < REPORT_SECONDS:
            return
        snapshot = self._current()
        self._observer.progress(snapshot)
        if now - self._told >= STATUS_SECONDS or force:
            self._told = now
            self._run.write_status(
                {
                    "stage": self._monitor.stage,
                    "units": snapshot.units,
                    "units_done": snapshot.units_done,
                    "counts": dict(snapshot.counts),
                    "elapsed": snapshot.elapsed,
                    "anonymous_bytes": snapshot.anonymous_bytes,
                    "budget_bytes": snapshot.budget_bytes,
                    "workers": snapshot.workers,
                }
            )

    def _current(self) -> Snapshot:
        counts, seconds = Counter(self._snapshot.counts), Counter(self._snapshot.seconds)
        for running in self._by_unit.values():
            counts.update(running["counts"])
            seconds.update(running["seconds"])
        return dataclasses.replace(
            self._snapshot,
            counts=counts,
            seconds=seconds,
            units_done=len(self._run.progress.complete),
            anonymous_bytes=self._monitor.now.anonymous,
            elapsed=time.monotonic() - self._started,
        )

    # ---- finish ----

    def _finish(self, prepared: _Prepared, units: int, plan: WorkPlan) -> Manifest:
        run = self._run
        if not self._limit_reached():
            require_complete(run, units)
        dropped: Counter[str] = Counter()
        for record in run.records():
            dropped.update(record.dropped)
        gather_rejects(run)
        run.tidy()
        self._require_unchanged(prepared.identity)
        shards = shards_in_order(run)
        if not shards:
            raise InputError(_nothing_left(run.out, dropped))
        tokenizer = {"name": prepared.name, "xxh3": prepared.tokenizer_hash, **dataclasses.asdict(prepared.special)}
        manifest = Manifest(
            dtype=token_dtype(prepared.vocab_size),
            vocab_size=prepared.vocab_size,
            tokenizer=tokenizer,
            engine=_engine_version(plan.engine),
            settings=prepared.identity.settings,
            input=prepared.identity.input,
            shards=shards,
            dropped=dict(sorted(dropped.items())),
            inexact_cuts=sum(record.inexact_cuts for record in run.records()),
        )
        manifest.write(self._config.out)
        return manifest

    def _require_unchanged(self, identity: Identity) -> None:
        """What was read must be what was planned."""
        now = self._run.write_inputs(list_inputs(self._config.inputs, self._config.input_format))
        if now != identity.input:
            raise InputError("The input changed while it was read. Run the same command again with --overwrite.")

    def _write_summary(self, manifest: Manifest, plan: WorkPlan) -> Summary:
        summary = self._summary(manifest, up_to_date=False, plan=plan)
        write_json(self._run.folder / "summary.json", dataclasses.asdict(summary) | {"out": str(summary.out)})
        self._run.write_status({"stage": "finished", "units": plan.units, "units_done": plan.units})
        return summary

    def _summary(self, manifest: Manifest, *, up_to_date: bool, plan: WorkPlan | None = None) -> Summary:
        return Summary(
            out=self._config.out,
            up_to_date=up_to_date,
            documents=manifest.documents,
            tokens=manifest.tokens,
            text_bytes=manifest.text_bytes,
            characters=manifest.characters,
            dropped=manifest.dropped,
            seconds=time.monotonic() - self._started,
            stages=dict(self._snapshot.seconds),
            memory={} if up_to_date else self._monitor.summary() | {"budget": self._budget.limit_bytes},
            workers=plan.workers if plan else 0,
            engine=manifest.engine,
            inexact_cuts=manifest.inexact_cuts,
        )


def _this_process_only(given: str) -> bool:
    """Input that another process could not open."""
    return given == STDIN or given.startswith("memory://")


def _worker_status(event: Event) -> dict[str, Any]:
    told = event.value
    return {
        "pid": event.pid,
        "unit": event.unit,
        "time": time.time(),
        "anonymous_bytes": told["anonymous_bytes"],
        **told["counts"],
    }


@contextlib.contextmanager
def _thread_limit(plan: WorkPlan) -> Iterator[None]:
    """Keep the engines' thread pools to the workers asked for; a pool reads this when it is first used."""
    before = dict(os.environ)
    if plan.workers == 1 and plan.threads < cores():
        os.environ.setdefault("RAYON_NUM_THREADS", str(plan.threads))
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if plan.threads > 1 else "false"
    try:
        yield
    finally:
        for name in ("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


def _engine_version(engine: str) -> str:
    from importlib.metadata import version

    return f"{engine} {version({'huggingface': 'tokenizers'}.get(engine, engine))}"


def _nothing_left(out: Path, dropped: Counter[str]) -> str:
    if not dropped:
        return "No documents in the input: nothing to write."
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in dropped.most_common())
    where = f"\nThe rejected records are in {out / 'rejects.jsonl'}." if (out / "rejects.jsonl").exists() else ""
    return f"No documents left: {sum(dropped.values()):,} records read, all dropped ({reasons}).{where}"
