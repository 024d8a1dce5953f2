"""The job of `milldam qa` in the frame of run/job.py: examples to a feature store.

prepare     tokenizer, memory tokens, template, input listing: everything that can be wrong is found here
plan        read: files once, in order, into chunks of examples in the run folder; then units and workers follow
window      chunks of a file to a shard of windows, in worker processes
finish      the lists of rejects and repaired answers gathered, the manifest written last

Files that were read and shards that were made are recorded by what they are made from: what has a record is never made
again, after a kill or when the input has changed.

Memory: this process reads and keeps count; a worker holds a tokenizer and a batch of windows. How many workers there
are follows from the budget, and what they make from the input and the settings alone.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from milldam.config.checking import checked_settings
from milldam.errors import InputError, StoreError
from milldam.files import NewFile, hash_bytes, is_whole
from milldam.memory import format_size, release, usage
from milldam.pipeline.rejects import first_reject
from milldam.qa.chunks import CHUNKS, Read, Reading, ReadTask, Scale, WindowUnit, chunk_path, readings, window_units
from milldam.qa.records import input_state, list_files
from milldam.qa.settings import First, PaddingSide, QASettings
from milldam.qa.sources import Limits
from milldam.qa.windowing import WindowTask
from milldam.qa.windows import VERSION as WINDOWS_VERSION
from milldam.qa.windows import QATokenizer, load_qa_tokenizer
from milldam.run import job as frame
from milldam.run.folder import NEW, RunFolder
from milldam.run.pools import TOKENIZER_FACTOR, Workers, WorkPlan, enough_memory, fit_workers, least_bytes, make_plan
from milldam.run.records import Record, Records, sweep
from milldam.run.session import Session, Stage
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity, Keys
from milldam.stores.features.manifest import FeatureManifest, FeatureShard, template_facts
from milldam.stores.generations import live_files
from milldam.stores.kinds import FEATURES
from milldam.stores.verify import has_every_file

if TYPE_CHECKING:
    from milldam.choices import Executor
    from milldam.stores.features.reader import FeatureStore

READS, RECORDS = "read.jsonl", "records.jsonl"
ANSWERS, REJECTS = "answers.jsonl", "rejects.jsonl"
SHARDS = ("*.bin", "*.idx")
WINDOWS_BYTES = 42 * 10**6
"""What a worker's batch of examples and its windows take, besides what any worker takes."""
VALUE_FACTOR, READING_BYTES = 64, 32 * 10**6
"""Bytes held for a byte of a value while it is read (24 for `{}`, 4 for a character, twice); what it leaves."""
SMALL_INPUT = 8 * 10**6
"""Bytes of examples for which starting worker processes takes longer than the work."""
_CHANGED = "The input changed while it was read. Run the same command again: it reads what changed."


class QAFacts(TypedDict):
    """What the summary of such a job tells besides."""

    max_seq_length: int
    memory_tokens: int


QASummary = Summary[QAFacts]


def prepare(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path,
    max_seq_length: int = 384,
    overlap: int | None = None,
    hop: int | None = None,
    doc_stride: int | None = None,
    memory_tokens: int = 0,
    first: First = "auto",
    padding_side: PaddingSide = "auto",
    max_segments: int | None = None,
    max_examples: int | None = None,
    split: str = "train",
    memory: str | int | None = None,
    workers: int | None = None,
    executor: Executor = "local",
    address: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
) -> FeatureStore:
    """Turn question-answering examples into a feature store and open it; what `milldam qa` does.

    `inputs`: files, folders, globs, names on the Hub. The other arguments are those of `QASettings`; `doc_stride` means
    overlap. Resumes unfinished work; if the input has changed, only what changed is redone; a store that is up to date
    is opened as it is. `memory` limits what the job uses beyond what your program already holds.

    >>> milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/", overlap=128)
    FeatureStore('squad.milldam': 36 windows of 384, 12 examples, 159 KB)
    """
    settings = checked_settings(QASettings, locals())
    from milldam.stores.features.reader import FeatureStore

    release()
    run_qa(settings, held_bytes=usage().anonymous)
    return FeatureStore(settings.out)


def run_qa(settings: QASettings, observer: Observer | None = None, *, held_bytes: int = 0) -> QASummary:
    """Do the job, or what is left of it. `held_bytes`: memory that the calling program holds already."""
    return frame.run(QAJob(settings), frame.Options.of(settings, held_bytes=held_bytes), observer)


def array_of(settings: QASettings) -> frame.ArrayWork[QASummary]:
    """The same for tasks of a job array."""
    return frame.ArrayWork(QAJob(settings), frame.Options.of(settings))


@dataclass(frozen=True, slots=True)
class Prepared:
    identity: Identity
    tokenizer: QATokenizer
    readings: list[Reading]


@dataclass(frozen=True, slots=True, kw_only=True)
class QAPlan(WorkPlan):
    reads: list[Record]
    """Of the files, in order."""
    records: Records
    """Of the units."""


class QAJob:
    """Examples to windows."""

    kind = FEATURES

    def __init__(self, settings: QASettings) -> None:
        self._settings, self._rules = settings, settings.rules

    def require_shareable(self) -> None:
        """Examples are in the run folder when they are shared."""

    def pieces(self) -> dict[str, int | None]:
        return {"window": None}

    # ---- prepare ----

    def prepare(self, session: Session) -> Prepared:
        tokenizer = load_qa_tokenizer(self._settings.tokenizer, self._rules)
        release()
        files = list(list_files(self._settings.inputs, self._settings.split))
        listed = session.folder.inputs.write((0, file) for file in files)
        identity = Identity(self._identity_settings(tokenizer), listed, tokenizer.name)
        return Prepared(identity, tokenizer, list(readings(files, self._settings.max_examples)))

    def _identity_settings(self, tokenizer: QATokenizer) -> dict[str, Any]:
        """Every setting that changes features, with what "auto" stands for settled."""
        template = tokenizer.template
        settled = {
            "first": "context" if template.context_first else "question",
            "padding_side": "left" if template.pad_left else "right",
        }
        special = {"pad_id": template.pad_id, "pad_type": template.pad_type, "cls_id": template.cls_id}
        rules = self._rules.as_dict() | settled
        kept = {"max_examples": self._settings.max_examples, "split": self._settings.split}
        return {"version": WINDOWS_VERSION, "tokenizer": tokenizer.plain_hash, **rules, **special, **kept}

    def has_results(self, folder: RunFolder) -> bool:
        return any(next(folder.journal.read(name), None) is not None for name in (READS, RECORDS))

    # ---- plan: what is in the files, and who works on it ----

    def plan(self, session: Session, prepared: Prepared, begin: str) -> QAPlan:
        folder, identity = session.folder, prepared.identity
        files = {"tokenizer.json": prepared.tokenizer.json.encode()}
        fit_workers(session.budget, usage().anonymous, self._worker_bytes(session, prepared), 1)
        if begin == NEW:
            folder.stage(())
            folder.start(identity, files, outputs=(*SHARDS, ANSWERS, REJECTS))
        reads = self._read(session, prepared, {})
        if folder.task is None:
            recipe = hash_bytes(json.dumps(identity.settings, sort_keys=True).encode())
            folder.stage(window_units(recipe, (Read(**reads[number].facts) for number in sorted(reads))))
            folder.inputs.write((0, file) for one in prepared.readings for file in one.files)
            folder.start(identity, files)
        records = Records(folder.journal, RECORDS, folder.out, folder.units.keys())
        lost = {unit.reading: reads[unit.reading] for unit in self._without_chunks(folder, records)}
        if lost:
            self._read(session, prepared, lost)
        return self._plan_work(session, prepared, [reads[number] for number in sorted(reads)], records)

    def _read(self, session: Session, prepared: Prepared, again: dict[int, Record]) -> dict[int, Record]:
        """Read the files that have no record, or those to be read again; the records of all, by number.

        Array tasks read none: it was done when the job was prepared.
        """
        folder, keys = session.folder, Keys.of(one.key for one in prepared.readings)
        records = Records(folder.journal, READS, folder.out, keys)
        found = dict(records.in_plan_order())

        def keep(record: Record) -> None:
            number = keys.number_of(record.key)
            assert number is not None
            if number in again and again[number].facts != record.facts:
                raise InputError(_CHANGED)
            found[number] = record
            if record.facts["examples"]:  # else the same command reads again, maybe with more memory
                records.add(record)

        todo = [] if folder.task is not None else sorted(again) or list(records.pending())
        alone = prepared.identity.input["files"] == 1
        stage = Stage(
            "read",
            ReadTask(folder.folder, self._settings.strict, alone, self._limits(session, prepared)),
            todo,
            lambda number: replace(prepared.readings[number], key=keys[number]),
            Workers(1, 1, here=True),
            keep,
            total=len(keys),
            done=len(keys) - len(todo),
            in_arrays=False,
        )
        if todo:
            session.work(stage)
        return found

    def _limits(self, session: Session, prepared: Prepared) -> Limits:
        """What the budget leaves: for a value that is read here, and for an example in a worker."""
        limit, parent = session.budget.limit_bytes, usage().anonymous
        least = least_bytes(parent, self._worker_bytes(session, prepared)) + READING_BYTES
        tokenizer = prepared.tokenizer
        row_bytes = sum(column.row_bytes for column in tokenizer.form(self._rules).columns)
        scale = Scale(tokenizer.json, self._rules, tokenizer.template, row_bytes)

        def advice(weight: int) -> str:
            enough = enough_memory(least + weight).value
            return f"too much for a budget of {format_size(limit)}. With memory {enough} and overwrite it is made"

        return Limits((limit - parent) // VALUE_FACTOR, max(0, limit - least), scale.weigh, advice)

    def _without_chunks(self, folder: RunFolder, records: Records) -> Iterator[WindowUnit]:
        """Units that are still to be made and whose chunks are gone: those of a finished store are removed."""
        for number in records.pending() if folder.task is None else ():
            unit = _unit(folder, number)
            if not all(is_whole(chunk_path(folder.folder, chunk), chunk) for chunk in unit.chunks):
                yield unit

    def _plan_work(self, session: Session, prepared: Prepared, reads: list[Record], records: Records) -> QAPlan:
        units, sizes = len(records.keys), session.folder.units.sizes()
        wanted = self._settings.workers or session.pool.cores
        local = self._settings.executor == "local"
        small = local and self._settings.workers is None and sizes.sum() < SMALL_INPUT
        useful = 1 if small else max(1, min(wanted, units - records.complete))
        release()
        parent, heaviest = usage().anonymous, max((read.facts["heaviest"] for read in reads), default=0)
        needed = self._worker_bytes(session, prepared) + heaviest
        workers = fit_workers(session.budget, parent, needed, useful)
        rules = self._rules
        step = f"overlap {rules.overlap}" if rules.hop is None else f"hop {rules.hop}"
        return make_plan(
            session.budget,
            kind=QAPlan,
            workers=workers,
            useful=useful,
            cores=wanted,
            held_bytes=parent if workers > 1 or session.pool.machine else 0,
            units=units,
            done=records.complete,
            input_bytes=prepared.identity.input["bytes"],
            shard_size=int(sizes.sum()) // max(1, units),
            encoder="huggingface",
            encoder_note=f"windows of {rules.max_seq_length}, {step}, {rules.memory_tokens} memory tokens",
            stages=("read", "window"),
            pieces={"window": units},
            reads=reads,
            records=records,
        )

    def _worker_bytes(self, session: Session, prepared: Prepared) -> int:
        """What a worker takes besides what any worker takes, and besides a heavy example."""
        return TOKENIZER_FACTOR * len(prepared.tokenizer.json) + WINDOWS_BYTES + session.pool.overhead_bytes

    # ---- work ----

    def stages(self, session: Session, prepared: Prepared, plan: QAPlan) -> Generator[Stage, None, None]:
        folder, tokenizer, records = session.folder, prepared.tokenizer, plan.records
        form = tokenizer.form(self._rules)
        yield Stage(
            "window",
            WindowTask(folder.out, folder.folder, self._settings.split, self._rules, tokenizer.template, form),
            records.pending(),
            lambda number: replace(_unit(folder, number), key=records.keys[number]),
            Workers(plan.workers, plan.threads),
            records.add,
            total=plan.units,
            done=records.complete,
            input_bytes=records.pending_bytes(folder.units.sizes()),
        )

    # ---- finish ----

    def finish(self, session: Session, prepared: Prepared, plan: QAPlan, done: None) -> QASummary:
        folder, records = session.folder, plan.records
        if records.complete != plan.units:
            raise StoreError(f"{folder.out}: {plan.units - records.complete} units are not done.")
        if input_state(self._settings.inputs, self._settings.split) != prepared.identity.input:
            raise InputError(_CHANGED)
        made = [record for _, record in records.in_plan_order()]
        _gather(folder.out, ANSWERS, made)
        _gather(folder.out, REJECTS, plan.reads)
        manifest = self._manifest(prepared, plan.reads, made)
        if not manifest.shards:
            raise InputError(_nothing_left(manifest, folder.out))
        folder.tidy()
        summary = replace(
            _told_by(manifest, folder.out),
            up_to_date=False,
            units=plan.units,
            reused=records.reused,
            changed=plan.changes,
            workers=plan.workers,
        )
        summary = session.measured(summary)
        summary.write(folder.folder)
        manifest.write(folder.out)
        _clean_up(folder)
        return summary

    def _manifest(self, prepared: Prepared, reads: list[Record], made: list[Record]) -> FeatureManifest:
        tokenizer, template = prepared.tokenizer, prepared.tokenizer.template
        return FeatureManifest(
            form=tokenizer.form(self._rules),
            tokenizer={
                "name": tokenizer.name,
                "xxh3": hash_bytes(tokenizer.json.encode()),
                "vocab_size": tokenizer.vocab_size,
                "cls_id": template.cls_id,
            },
            memory={"read": list(template.memory_read), "write": list(template.memory_write)},
            template=template_facts(template),
            settings=prepared.identity.settings,
            input=prepared.identity.input,
            shards=tuple(FeatureShard(**one.facts["shard"], files=one.outputs) for one in made if one.facts["shard"]),
            counts=_counts(reads, made),
        )

    def up_to_date(self, session: Session, prepared: Prepared) -> QASummary | None:
        if not has_every_file(session.folder.out, FEATURES):
            return None
        _clean_up(session.folder)  # a kill may have come after the manifest
        return _told_by(FeatureManifest.read(session.folder.out), session.folder.out)


def _clean_up(folder: RunFolder) -> None:
    """Remove what neither the store nor a record names, and what was needed only on the way."""
    sweep(folder.out, SHARDS, live_files(folder.out, FEATURES))
    kept = (
        Path(name).name
        for name_of in (READS, RECORDS)
        for line in folder.journal.read(name_of)
        for name in line["files"]
    )
    sweep(folder.folder, ("answers-*.jsonl", "rejects-*.jsonl"), kept)
    shutil.rmtree(folder.folder / CHUNKS, ignore_errors=True)


def _unit(folder: RunFolder, number: int) -> WindowUnit:
    return folder.units.at(number, lambda value: WindowUnit(**value))


def _gather(out: Path, name: str, records: list[Record]) -> None:
    """One list from those that units left, in order; none when they left nothing."""
    with NewFile(out / name) as new:
        for part in (part for record in records for part in record.files):
            new.write((out / part).read_bytes())
        if new.size:
            new.commit()
        else:
            new.path.unlink(missing_ok=True)


def _counts(reads: list[Record], made: list[Record]) -> dict[str, Any]:
    found: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for one in made:
        found.update(one.facts["counts"])
        dropped.update(one.facts["dropped"])
    for read in reads:
        rejected.update(read.facts["rejected"])
    return {
        "examples": sum(read.facts["examples"] for read in reads),
        "answered": found["ok"] + found["repaired"],
        "unanswerable": found["none"],
        "repaired": found["repaired"],
        "unrepairable": found["unrepairable"],
        "dropped": dict(sorted(dropped.items())),
        "rejected": dict(sorted(rejected.items())),
        "windows": found["windows"],
        "windows_with_answers": found["windows_with_answers"],
        "tokens": found["tokens"],
    }


def _told_by(manifest: FeatureManifest, out: Path) -> QASummary:
    """What the manifest alone tells."""
    counts = {name: count for name, count in manifest.counts.items() if isinstance(count, int)}
    return Summary(
        "qa",
        str(out),
        {"max_seq_length": manifest.form.max_seq_length, "memory_tokens": len(manifest.memory["read"])},
        up_to_date=True,
        counts=counts | {"read": counts["examples"], "examples": manifest.examples},
        rejected=manifest.counts["rejected"],
        dropped=manifest.counts["dropped"],
        output_bytes=sum(file["bytes"] for shard in manifest.shards for file in shard.files.values()),
    )


def _nothing_left(manifest: FeatureManifest, out: Path) -> str:
    lost = manifest.counts["rejected"] | manifest.counts["dropped"]
    if not lost:
        return "No examples in the input: nothing to write."
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in lost.items())
    first = first_reject(out) if manifest.counts["rejected"] else ""
    return f"No examples left: {reasons}.{first}"
