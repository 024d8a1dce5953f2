"""The job of `milldam preprocess` and `milldam tokenize`, on run/engine.py.

prepare      tokenizer, input listing, text columns: what can be wrong is found here
units        slices of the input; encoder, workers and disk are settled before anything in the folder is replaced
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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from milldam.config.settings import Config, text_columns
from milldam.errors import ConfigError, Setting
from milldam.input_files import describe_left_out
from milldam.memory import Budget, usage
from milldam.pipeline.finishing import Made, TextSummary, complete, finish
from milldam.pipeline.fitting import Disk, Fitting
from milldam.pipeline.preparing import prepare
from milldam.pipeline.tokenizing import TokenizeLoad
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import WorkPlan, least_bytes, least_grouping_bytes, require_room
from milldam.run.engine import Options, Session, Stage
from milldam.run.folder import FINISHED, NEW, RunFolder, refuse_foreign
from milldam.run.pools import Pool
from milldam.run.records import RECORDS, Records
from milldam.run.summary import Observer, Quiet
from milldam.run.units import Identity, KeyArray, mixed_keys
from milldam.sources.compression import STDIN
from milldam.sources.units import Unit
from milldam.stores.kinds import AUDIT_FILES, TOKENS
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import SHARD_FILES
from milldam.stores.verify import has_every_file

if TYPE_CHECKING:
    from milldam.run.fork import ForkServer


def run_job(
    config: Config,
    observer: Observer | None = None,
    *,
    held_bytes: int = 0,
    report: bool = True,
    server: ForkServer | None = None,
) -> TextSummary:
    """Do the job, or what is left of it.

    `held_bytes`: memory that the calling program holds already; the limit comes on top of it. `report`: make the page
    about it. `server`: begun ahead for it.
    """
    return engine.run(
        TokenJob(config, report=report), Options.of(config, held_bytes=held_bytes, server=server), observer
    )


def array_of(config: Config, *, report: bool = True) -> ArrayWork[TextSummary]:
    """The same for tasks of a job array."""
    if config.limit is not None:
        message = ": counts documents in one process, not in arrays. Use max_documents of the datasets."
        raise ConfigError(Setting("limit"), message)
    paths = (path for one in config.sources for path in one.paths)
    alone = next((path for path in paths if path == STDIN or path.startswith("memory://")), None)
    if alone is not None:
        raise ConfigError(f"{alone}: other machines can't read it. Save it to a file.")
    return ArrayWork(TokenJob(config, report=report), Options.of(config))


class TokenJob(engine.Job[TextSummary]):
    """Text to tokens. `report`: make the page about it."""

    kind = TOKENS
    outputs = (*(f"*.{ending}" for ending in SHARD_FILES), "*.facts", *AUDIT_FILES, "packed/")

    def __init__(self, config: Config, *, report: bool = True) -> None:
        self._config, self._report, self.workers = config, report, config.workers
        self.stage_names = _stage_names(config)
        self.read_once = any(STDIN in one.paths for one in config.sources)
        self._is_settled = False
        self._records: Records | None = None

    # ---- prepare and plan ----

    def prepare(self, run: Session) -> Identity:
        config = self._config
        if self.read_once and not config.overwrite and run.folder.state() == FINISHED:
            message = f"{config.out} exists, and standard input can't be compared with it. Use "
            raise ConfigError(message, Setting("overwrite", True), ".")
        self._prepared = prepare(config, run.folder)
        self._fitting = Fitting(config, self._prepared, run.budget, run.pool)
        return self._prepared.identity

    def files(self, run: Session) -> dict[str, bytes]:
        return {"tokenizer.json": self._prepared.known.json.encode()}

    def units(self, run: Session) -> Iterator[Unit]:
        """All that can be refused is refused before the last one is taken, and so before anything is replaced."""
        self._settle(run)
        prepared = self._prepared
        yield from self._fitting.survey(prepared.input.units(prepared.sets, prepared.shard_size))
        self._fitting.fit(self._fitting.loaded_bytes, 1)
        self.require_disk(self._fitting.disk())

    def require_disk(self, disk: Disk) -> None:
        disk.require(self._config.out)

    def _settle(self, run: Session) -> None:
        """Warn where the fast encoder is not used, and refuse a budget that can't hold the least that there will be."""
        if self._is_settled:
            return
        self._is_settled = True
        prepared, rules = self._prepared, self._config.dedup_rules
        if prepared.known.warning is not None:
            run.observer.warn(prepared.known.warning)
        parent = usage().anonymous
        needed = {"this tokenizer and these rules": least_bytes(parent, self._fitting.loaded_bytes)}
        if rules is not None:
            needed["dedup"] = least_grouping_bytes(parent)
        if prepared.input.evaluation is not None:
            needed["evaluation sets"] = parent + prepared.input.evaluation.building_bytes
        require_room(run.budget, needed)
        if rules is not None and rules.index is not None:
            from milldam.dedup.index import DedupIndex

            # Raises StoreError when it can't be used.
            DedupIndex.of(rules).require_whole(prepared.identity.run_id, str(Path(self._config.out).resolve()))

    def plan_facts(self, run: Session) -> dict[str, Any]:
        config, prepared, folder, fitting = self._config, self._prepared, run.folder, self._fitting
        self._settle(run)
        done = 0
        if fitting.unpacked is None:  # resumed: the units were listed before
            for _ in fitting.survey(folder.units.all(Unit.from_json)):
                pass
        if config.dedup_rules is None and not any(rules.counted for rules in prepared.sets):
            self._records = Records(folder, RECORDS, mixed_keys(folder.units.keys(), self._selected(run)))
            done = self._records.complete
        later = {"index": config.dedup_rules is not None and config.dedup_rules.index is not None}
        later |= {"pack": config.packing_rules is not None, "report": True}
        recipes = [rules.chat for rules in prepared.sets if rules.chat is not None]
        forms = "; ".join(dict.fromkeys(str(one.form) for one in recipes))
        self._workers = fitting.workers_for(len(folder.units) - done)
        return self._workers | {
            "done": done,
            "input_bytes": prepared.identity.input["bytes"],
            "shard_size": prepared.shard_size,
            "encoder": prepared.known.encoder,
            "encoder_note": prepared.known.note,
            "stages": (*self.stage_names, *(stage for stage, wanted in later.items() if wanted)),
            "left_out": describe_left_out(prepared.input.left_out),
            "conversations": f"{forms}, by {recipes[0].template.origin}" if recipes else "",
            "text_columns": text_columns(prepared.identity.settings),
            "preferred": prepared.preferred(config),
        }

    # ---- work ----

    def stages(self, run: Session) -> Iterator[Stage]:
        config, prepared, folder, fitting = self._config, self._prepared, run.folder, self._fitting
        units = len(folder.units)
        readers = fitting.readers(units)
        ranges: dict[int, tuple[int, int]] = {}
        """Unit -> the rows wanted of it, of the datasets of which not all documents are wanted."""
        if any(rules.counted for rules in prepared.sets):
            from milldam.pipeline.counting import RowCounts

            counts = RowCounts(folder, prepared.sets)
            yield counts.stage(readers)
            ranges = counts.ranges()
        keys = mixed_keys(folder.units.keys(), self._selected(run, ranges))
        dedup = None
        if config.dedup_rules is not None:
            from milldam.pipeline.deduplicating import Deduplication

            first = keys
            if prepared.input.evaluation is not None:
                first = mixed_keys(keys, int(prepared.input.evaluation.name, 16))
            dedup = Deduplication(config, config.dedup_rules, run, prepared, first, fitting)
            yield from dedup.stages(readers, fitting.readers(units, judging=True), ranges)
            keys = mixed_keys(keys, dedup.verdicts())
        records = self._records or Records(folder, RECORDS, keys)
        self._made = Made(records, None, dedup)

        def facts(number: int) -> dict[str, Any]:
            origin = folder.units.at(number, Unit.from_json).origin
            left = None if config.limit is None else config.limit - records.counts["documents"]
            prints = None if dedup is None else f"{dedup.keys[origin]:016x}"
            return {"documents": left, "rows": ranges.get(origin), "prints": prints}

        wanted = takewhile(lambda _: not self._is_full(records), records.pending())
        workers = fitting.tokenizers(self._workers)
        yield Stage("tokenize", self._load(run), records, Unit.from_json, workers, facts, wanted)
        if config.counts_tokens:
            from milldam.pipeline.arranging import arrange

            self._made.arranged = yield from arrange(
                config, run, records, readers, token_dtype(prepared.known.vocab_size)
            )

    def _selected(self, run: Session, ranges: dict[int, tuple[int, int]] | None = None) -> KeyArray:
        """A number a unit for all that its tokens depend on besides its slices. `ranges`: the rows wanted of units."""
        units, prepared = run.folder.units, self._prepared
        mixed = np.full(len(units), prepared.index_key, np.uint64)
        if ranges:
            for unit in units.all(Unit.from_json):
                if unit.origin in ranges:
                    mixed[unit.index] ^= np.uint64(xxh3_64_intdigest(repr(ranges[unit.origin]).encode()))
        if self._config.limit is not None:
            # How much of a unit is taken depends on all before it.
            mixed += np.uint64(int(prepared.identity.input["fingerprint"][:16], 16))
        return mixed

    def _load(self, run: Session) -> TokenizeLoad:
        config, prepared, dedup = self._config, self._prepared, self._made.dedup
        self._settle(run)
        seen: dict[str, Path] = {} if dedup is None else dedup.index
        if config.index_rules is not None:
            from milldam.pipeline.index_lookup import pin_index

            seen = pin_index(run.folder, config.index_rules, prepared.identity.input["index"])
        return TokenizeLoad(
            out=run.folder.out,
            config=config,
            sets=prepared.sets,
            drops=None if dedup is None else dedup.folder,
            seen=seen,
            shown=() if dedup is None else dedup.shown,
            encoder=prepared.known.encoder,
            differing=prepared.known.differing,
            special=prepared.known.special,
            dtype=token_dtype(prepared.known.vocab_size),
            shard_size=prepared.shard_size,
            share_bytes=self._fitting.share_bytes(self._workers),
            threads=max(1, self._fitting.cores // self._workers["workers"]),
        )

    def _is_full(self, records: Records) -> bool:
        """Whether the limit is reached."""
        return self._config.limit is not None and records.counts["documents"] >= self._config.limit

    # ---- finish ----

    def finish(self, run: Session, plan: WorkPlan) -> TextSummary:
        whole = self._is_full(self._made.records)
        return finish(self._config, run, self._prepared, plan, self._made, whole=whole, report=self._report)

    def up_to_date(self, run: Session) -> TextSummary | None:
        if not has_every_file(run.folder.out, TOKENS):
            return None
        return complete(self._config, run.folder, report=self._report)


def _stage_names(config: Config) -> tuple[str, ...]:
    """The stages of a job that several machines can share, in order."""
    dedup, names = config.dedup_rules, list[str]()
    if any(one.max_documents is not None or "[" in (one.split or "") for one in config.sources):
        names.append("count")
    if dedup is not None:
        from milldam.pipeline.deduplicating import step_counts

        names += step_counts(dedup, 1, 1, evaluation=bool(config.decontaminate))
    return (*names, "tokenize", *(["arrange"] if config.counts_tokens else []))


# ---- looking ahead ----


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """The plan of a job, and the disk and memory that it takes."""

    plan: WorkPlan
    disk: Disk
    state: str
    """The state of the output folder."""
    memory_bytes: int
    """The smallest budget for its workers; on several machines, of each."""


def plan_job(config: Config) -> PlannedJob:
    """Check everything that can be checked beforehand; reads no documents, writes nothing to the output folder."""
    job, budget = TokenJob(config), Budget.of(config.memory)
    with (
        tempfile.TemporaryDirectory(prefix="milldam-plan-") as place,
        RunFolder(Path(place) / "plan", TOKENS) as folder,
        Session(folder, Quiet(), budget, Pool(budget.limit_bytes)) as run,
    ):
        identity = job.prepare(run)
        state = _state_of(config, identity)
        folder.start(identity, job.units(run))
        plan = engine.plan_work(run, job)
        return PlannedJob(
            plan, job._fitting.disk(), state, usage().anonymous + plan.workers * job._fitting.worker_bytes
        )


def _state_of(config: Config, identity: Identity) -> str:
    """The state of the output folder, in words; refuses what another job made."""
    refuse_foreign(Path(config.out), TOKENS)
    there = RunFolder(Path(config.out), TOKENS)
    state = there.state()
    begin = there.where_to_begin(identity, overwrite=config.overwrite)
    if state == NEW:
        return state
    if begin == NEW:
        return "there is something already: it will be replaced"
    if begin == FINISHED:
        return "up to date"
    changed = "input changed: only the units that changed are redone"
    return changed if state == FINISHED else "unfinished: the job resumes"
