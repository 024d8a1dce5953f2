"""The job of `milldam qa`: examples to a store of features. Each step leaves a state from which the same call goes on.

prepare     tokenizer, memory tokens, template, input listing: everything that can be wrong is found here
read        files once, in order, into chunks of examples in the run folder; every file that was read is recorded
window      chunks of a file to shards of windows, in worker processes; every finished shard is recorded
finish      the lists of rejects and repaired answers gathered, the manifest written last

Memory: this process reads and keeps count; a worker holds a tokenizer and a batch of windows. How many workers there
are follows from the budget, and what they make from the input and the settings alone.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from milldam.config.checking import checked_settings
from milldam.errors import InputError
from milldam.files import NewFile, hash_bytes, remove_matching, remove_temporaries
from milldam.memory import Budget, format_size, release, usage
from milldam.qa.chunks import Read, ReadTask, chunk_path, readings, rejects_path, shards_of
from milldam.qa.records import list_files
from milldam.qa.settings import First, PaddingSide, QASettings
from milldam.qa.sources import Limits
from milldam.qa.tokenizer import QATokenizer, load_qa_tokenizer
from milldam.qa.weighing import Scale
from milldam.qa.windowing import Assigned, Made, WindowTask, answers_path
from milldam.qa.windows import VERSION as WINDOWS_VERSION
from milldam.run.identity import Identity
from milldam.run.old_folder import FINISHED, NEW, QA_RECORDS, UNFINISHED, Run
from milldam.run.old_workforce import Staff, Stage, at_work
from milldam.run.planning import TOKENIZER_FACTOR, WorkPlan, enough_memory, fit_workers, least_bytes, make_plan
from milldam.run.progress import Observer, Quiet
from milldam.run.summary import Summary, describe_machine, package_versions
from milldam.sealed import is_whole
from milldam.sources.listing import InputFile
from milldam.stores.features.manifest import NAME as MANIFEST
from milldam.stores.features.manifest import FeatureManifest, FeatureShard, template_facts

if TYPE_CHECKING:
    from milldam.config.fields import Executor
    from milldam.stores.features.reader import FeatureStore

ANSWERS, REJECTS = "answers.jsonl", "rejects.jsonl"
WINDOWS_BYTES = 42 * 10**6
"""What a worker's batch of examples and its windows take, besides what any worker takes."""
VALUE_FACTOR, READING_BYTES = 64, 32 * 10**6
"""Bytes held for a byte of a value while it is read (24 for `{}`, 4 for a character, twice); what it leaves."""
SMALL_INPUT = 8 * 10**6
"""Bytes of examples for which starting worker processes takes longer than the work."""
_READ = "read.jsonl"


class QAFacts(TypedDict):
    """What the summary of such a job tells besides."""

    max_seq_length: int
    memory_tokens: int


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
    engine: Executor = "local",
    address: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
) -> FeatureStore:
    """Turn examples of question answering into a store of features and open it; what `milldam qa` does.

    `inputs`: files, folders, globs, names on the Hub. The other arguments are those of `QASettings`; `doc_stride` means
    overlap. Finds finished work and goes on from there; a store that is up to date is opened as it is. `memory` limits
    what the job takes on top of what the program holds already.

    >>> prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased", overlap=128)   # doctest: +SKIP
    FeatureStore('squad.milldam': 131,944 windows of 384, 130,319 examples, 700 MB)
    """
    settings = checked_settings(QASettings, locals())
    from milldam.stores.features.reader import FeatureStore

    release()
    run_qa(settings, held_bytes=usage().anonymous)
    return FeatureStore(settings.out)


def run_qa(settings: QASettings, observer: Observer | None = None, *, held_bytes: int = 0) -> Summary[QAFacts]:
    """Do the job, or what is left of it. `held_bytes`: memory that the calling program holds already."""
    with QARun(Path(settings.out)) as run:
        return _Job(settings, run, observer or Quiet(), held_bytes).run()


class QARun(Run):
    """The run folder of a store of features: the same, with another manifest and other records."""

    manifest = MANIFEST

    def __enter__(self) -> QARun:
        super().__enter__()
        return self

    def identity(self) -> Identity:
        if self.state() == FINISHED:
            made = FeatureManifest.read(self.out)
            return Identity(made.settings, made.input, made.tokenizer["name"])
        return super().identity()

    def has_results(self) -> bool:
        return any(self.what_was_read()) or super().has_results()

    def _clear(self) -> None:
        super()._clear()
        (self.out / ANSWERS).unlink(missing_ok=True)

    def tidy(self) -> None:
        super().tidy()
        remove_temporaries(self.folder / "chunks")

    def what_was_read(self) -> dict[str, Read]:
        """The files that were read and whose chunks are there as they were written."""
        found = (Read(**line) for line in self.appended(_READ))
        return {one.key: one for one in found if self._has_chunks(one)}

    def _has_chunks(self, read: Read) -> bool:
        if read.rejects is not None and not is_whole(rejects_path(self.folder, read.key), read.rejects):
            return False
        return all(is_whole(chunk_path(self.folder, chunk), chunk) for chunks in read.chunks for chunk in chunks)

    def made(self) -> dict[int, Made]:
        """The units that are done and whose files are there."""
        found = (Made(**line) for line in self.appended(QA_RECORDS))
        return {one.unit: one for one in found if self._has_files(one)}

    def safe(self) -> dict[str, int]:
        made = self.made().values()
        return {
            "units_done": len(made),
            "documents": sum(one.shard["examples"] for one in made if one.shard is not None),
            "tokens": sum(one.counts["tokens"] for one in made),
        }

    def _has_files(self, made: Made) -> bool:
        files = (made.shard or {"files": {}})["files"]
        if made.answers is not None and not is_whole(answers_path(self.folder, made.unit), made.answers):
            return False
        try:
            return all((self.out / name).stat().st_size == record["bytes"] for name, record in files.items())
        except OSError:
            return False


class _Job:
    def __init__(self, settings: QASettings, run: QARun, observer: Observer, held_bytes: int) -> None:
        self._settings, self._run, self._observer = settings, run, observer
        self._rules = settings.rules
        self._budget = Budget.of(settings.memory, held_bytes)

    def run(self) -> Summary[QAFacts]:
        run = self._run
        where = self._settings.engine, self._settings.address
        with at_work(run, self._observer, self._budget, *where) as self._workforce:
            self._monitor = self._workforce.monitor
            tokenizer = load_qa_tokenizer(self._settings.tokenizer, self._rules)
            release()
            identity = Identity(self._identity_settings(tokenizer), self._list_input(), tokenizer.name)
            begin = self._where_to_begin(identity)
            if begin == FINISHED:
                _remove_intermediate(run)
                return self._summary(FeatureManifest.read(run.out), up_to_date=True)
            self._loaded_bytes = TOKENIZER_FACTOR * len(tokenizer.json) + WINDOWS_BYTES
            fit_workers(self._budget, usage().anonymous, self._loaded_bytes, 1)
            self._begin(begin, identity, tokenizer)
            reads = self._read(tokenizer)
            self._plan = self._plan_work(reads, identity)
            self._observer.planned(self._plan)
            made = self._make_windows(reads, tokenizer)
            self._workforce.close()
            self._workforce.enter("finish")
            return self._finish(reads, made, tokenizer, identity)

    # ---- prepare ----

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

    def _list_input(self) -> dict[str, Any]:
        files = list_files(self._settings.inputs, self._settings.split)
        return self._run.write_inputs((0, file) for file in files)

    def _where_to_begin(self, identity: Identity) -> str:
        """NEW: from nothing; UNFINISHED: go on; FINISHED: nothing to do. Refuses what was made from something else."""
        run, state = self._run, self._run.state()
        same = run.agrees(identity, overwrite=self._settings.overwrite)
        if state == NEW or (self._settings.overwrite and not (same and state == UNFINISHED)):
            return NEW
        if state == UNFINISHED and not same and not run.has_results():
            return NEW  # it was planned, and nothing came of it
        run.require_same(identity)
        return state

    def _begin(self, begin: str, identity: Identity, tokenizer: QATokenizer) -> None:
        run = self._run
        if begin == NEW:
            self._monitor.restart()
            run.stage(())
            run.start(identity, {"tokenizer.json": tokenizer.json.encode()})
        elif run.has_moved():
            run.replan(())
        run.tidy()

    # ---- read ----

    def _read(self, tokenizer: QATokenizer) -> list[Read]:
        run, found = self._run, self._run.what_was_read()
        files = (InputFile(**file) for file in run.inputs())
        wanted = list(readings(files, self._settings.max_examples))
        todo = [number for number, one in enumerate(wanted) if one.key not in found]

        def keep(read: Read) -> None:
            found[read.key] = read
            if read.examples:  # else the same command reads again, maybe with more memory
                run.append(_READ, asdict(read))

        task = ReadTask(run.folder, self._settings.strict, self._limits(tokenizer))
        total, done = len(wanted), len(wanted) - len(todo)
        stage = Stage("read", task, iter(todo), wanted.__getitem__, total=total, done=done)
        self._workforce.work(stage, Staff(1, 1, here=True), keep)
        return [found[one.key] for one in wanted]

    def _limits(self, tokenizer: QATokenizer) -> Limits:
        """What the budget leaves: for a value that is read here, and for an example in a worker."""
        limit, parent = self._budget.limit_bytes, usage().anonymous
        least = least_bytes(parent, self._worker_bytes(0)) + READING_BYTES
        row_bytes = sum(column.row_bytes for column in tokenizer.form(self._rules).columns)
        scale = Scale(tokenizer.json, self._rules, tokenizer.template, row_bytes)

        def advice(weight: int) -> str:
            option = enough_memory(least + weight)
            return f"too much for a budget of {format_size(limit)}. {option} --overwrite would do"

        return Limits((limit - parent) // VALUE_FACTOR, max(0, limit - least), scale.weigh, advice)

    # ---- window ----

    def _plan_work(self, reads: list[Read], identity: Identity) -> WorkPlan:
        shards = [shard for read in reads for shard in shards_of(read)]
        units, done = len(shards), len(self._run.made())
        chunk_bytes = sum(chunk["bytes"] for shard in shards for chunk in shard)
        wanted = self._settings.workers or self._workforce.crew.cores
        local = self._settings.engine == "local"
        small = local and self._settings.workers is None and chunk_bytes < SMALL_INPUT
        useful = 1 if small else max(1, min(wanted, units - done))
        release()
        parent = usage().anonymous
        workers = fit_workers(self._budget, parent, self._worker_bytes(max(read.heaviest for read in reads)), useful)
        held = parent if workers > 1 or self._workforce.crew.machine else 0
        rules = self._rules
        step = f"overlap {rules.overlap}" if rules.hop is None else f"hop {rules.hop}"
        return make_plan(
            self._budget,
            kind=WorkPlan,
            workers=workers,
            useful=useful,
            cores=wanted,
            held_bytes=held,
            units=units,
            done=done,
            input_bytes=identity.input["bytes"],
            shard_size=chunk_bytes // max(1, units),
            encoder="huggingface",
            encoder_note=f"windows of {rules.max_seq_length}, {step}, {rules.memory_tokens} memory tokens",
            stages=("read", "window"),
        )

    def _worker_bytes(self, heaviest: int) -> int:
        """What a worker takes whose heaviest example takes so much."""
        return self._loaded_bytes + self._workforce.crew.overhead_bytes + heaviest

    def _make_windows(self, reads: list[Read], tokenizer: QATokenizer) -> dict[int, Made]:
        run, made = self._run, self._run.made()
        units = [shard for read in reads for shard in shards_of(read)]
        todo = [number for number in range(len(units)) if number not in made]
        task = WindowTask(
            run.out, run.folder, self._settings.split, self._rules, tokenizer.template, tokenizer.form(self._rules)
        )

        def keep(one: Made) -> None:
            run.append(QA_RECORDS, asdict(one))
            made[one.unit] = one

        stage = Stage(
            "window",
            task,
            iter(todo),
            lambda number: Assigned(number, units[number]),
            total=len(units),
            done=len(units) - len(todo),
            input_bytes=sum(chunk["bytes"] for number in todo for chunk in units[number]),
        )
        if todo:
            self._workforce.work(stage, Staff(self._plan.workers, self._plan.threads), keep)
        return made

    # ---- finish ----

    def _finish(
        self, reads: list[Read], made: dict[int, Made], tokenizer: QATokenizer, identity: Identity
    ) -> Summary[QAFacts]:
        run = self._run
        if self._list_input() != identity.input:
            raise InputError("The input changed while it was read. Run the same command again with --overwrite.")
        _gather(run.out / ANSWERS, (answers_path(run.folder, unit) for unit in sorted(made) if made[unit].answers))
        _gather(run.out / REJECTS, (rejects_path(run.folder, read.key) for read in reads if read.rejects))
        manifest = _manifest(reads, made, tokenizer, identity, tokenizer.form(self._rules))
        if not manifest.shards:
            raise InputError(_nothing_left(manifest, run.out))
        run.tidy()
        summary = self._summary(manifest, len(made))
        summary.write(run.folder)
        manifest.write(run.out)
        _remove_intermediate(run)
        run.write_status({"stage": "finished", "units": len(made), "units_done": len(made)})
        return summary

    def _summary(self, manifest: FeatureManifest, made: int = 0, *, up_to_date: bool = False) -> Summary[QAFacts]:
        counts = {name: count for name, count in manifest.counts.items() if isinstance(count, int)}
        told: Summary[QAFacts] = Summary(
            "qa",
            str(self._run.out),
            {"max_seq_length": manifest.form.max_seq_length, "memory_tokens": len(manifest.memory["read"])},
            up_to_date=up_to_date,
            counts=counts | {"read": counts["examples"], "examples": manifest.examples},
            rejected=manifest.counts["rejected"],
            dropped=manifest.counts["dropped"],
        )
        if up_to_date:
            return told
        return replace(
            told,
            units=made,
            output_bytes=sum(file["bytes"] for shard in manifest.shards for file in shard.files.values()),
            seconds=self._workforce.elapsed,
            stages=self._workforce.wall,
            work=dict(self._workforce.seconds),
            memory=self._monitor.use(self._budget.limit_bytes),
            workers=self._plan.workers,
            machine=describe_machine(),
            versions=package_versions(),
        )


def _manifest(
    reads: list[Read], made: dict[int, Made], tokenizer: QATokenizer, identity: Identity, form: Any
) -> FeatureManifest:
    template = tokenizer.template
    units = [made[number] for number in sorted(made)]
    return FeatureManifest(
        form=form,
        tokenizer={
            "name": tokenizer.name,
            "xxh3": hash_bytes(tokenizer.json.encode()),
            "vocab_size": tokenizer.vocab_size,
            "cls_id": template.cls_id,
        },
        memory={"read": list(template.memory_read), "write": list(template.memory_write)},
        template=template_facts(template),
        settings=identity.settings,
        input=identity.input,
        shards=tuple(FeatureShard(**one.shard) for one in units if one.shard is not None),
        counts=_counts(reads, units),
    )


def _counts(reads: list[Read], units: list[Made]) -> dict[str, Any]:
    found: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for one in units:
        found.update(one.counts)
        dropped.update(one.dropped)
    for read in reads:
        rejected.update(read.rejected)
    return {
        "examples": sum(read.examples for read in reads),
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


def _gather(path: Path, parts: Iterable[Path]) -> None:
    """One list from those of all units, in order; none when they are empty."""
    with NewFile(path) as new:
        for part in parts:
            new.write(part.read_bytes())
        if new.size:
            new.commit()


def _remove_intermediate(run: QARun) -> None:
    """What a finished store no longer needs."""
    shutil.rmtree(run.folder / "chunks", ignore_errors=True)
    remove_matching(run.folder, "answers-*.jsonl", "rejects-*.jsonl")


def _nothing_left(manifest: FeatureManifest, out: Path) -> str:
    lost = manifest.counts["rejected"] | manifest.counts["dropped"]
    if not lost:
        return "No examples in the input: nothing to write."
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in lost.items())
    where = f"\nThe rejected records are in {out / REJECTS}." if manifest.counts["rejected"] else ""
    return f"No examples left: {reasons}.{where}"
