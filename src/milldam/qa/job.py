"""The job of `milldam qa`, on run/engine.py: examples to a table, a row an example with all its windows.

prepare   tokenizer, memory tokens, template, input listing: everything that can be wrong is found here
units     pieces of files; a large SQuAD file is read through once to be cut
window    a unit's examples -> windows -> a shard, and lists of rejects and of answers to check
finish    these lists gathered, the manifest written last

Memory: this process plans and keeps count; a worker holds a tokenizer, a batch of examples and their windows.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from milldam.config.checking import checked_settings
from milldam.errors import InputError, StoreError
from milldam.files import NewFile, hash_bytes
from milldam.memory import release, usage
from milldam.pipeline.rejects import NAME as REJECTS
from milldam.pipeline.rejects import RejectFile, first_reject, gather_rejects
from milldam.qa.examples import Example, read_examples
from milldam.qa.records import PIECE_BYTES, Piece, cut_file, list_files
from milldam.qa.settings import First, PaddingSide, QARules, QASettings
from milldam.qa.store import FeatureStore, Form
from milldam.qa.template import Template
from milldam.qa.windows import VERSION, Windower, Windows, load_qa_tokenizer
from milldam.run import engine
from milldam.run.budget import TOKENIZER_FACTOR, WorkPlan, fit_workers
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.records import RECORDS, Record, Records, sweep
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity, key_of
from milldam.sources.batch import Reading, TextRules
from milldam.sources.units import Slice, gather, whole
from milldam.stores.generations import live_files
from milldam.stores.kinds import TABLE
from milldam.stores.table.manifest import TableManifest, TableSchema, TableShard
from milldam.stores.table.writer import ENDING, ROWS, TableShardWriter
from milldam.stores.verify import has_every_file

if TYPE_CHECKING:
    from milldam.choices import Executor

ANSWERS = "answers.jsonl"
SHARDS = (f"{ROWS}-*{ENDING}",)
WINDOWS_BYTES = 42 * 10**6
"""What a worker's batch of examples and its windows take, besides what any worker takes."""
SMALL_INPUT = 8 * 10**6
"""Bytes of input for which starting worker processes takes longer than the work."""
BATCH_EXAMPLES, BATCH_CONTEXTS, BATCH_WINDOWS = 256, 256_000, 6 << 20
"""Limits of a batch: examples, characters of distinct contexts (what encoding takes), bytes of windows."""
_CHARACTERS_A_TOKEN = 3


class QAFacts(TypedDict):
    """What the summary of such a job has besides."""

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
    """Turn question-answering examples into a table of windows and open it; what `milldam qa` does.

    `inputs`: files, folders, globs, names on the Hub. The other arguments are those of `QASettings`. Resumes unfinished
    work; if the input has changed, only what changed is redone; a table that is up to date is opened as it is. `memory`
    limits what the job uses beyond what your program already holds.

    >>> milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/", overlap=128)
    FeatureStore('squad.milldam': 36 windows of 384, 12 examples, 161 KB)
    """
    settings = checked_settings(QASettings, locals())
    release()
    run_qa(settings, held_bytes=usage().anonymous)
    return FeatureStore(settings.out)


def run_qa(settings: QASettings, observer: Observer | None = None, *, held_bytes: int = 0) -> QASummary:
    """Do the job, or what is left of it. `held_bytes`: memory that the calling program holds already."""
    return engine.run(QAJob(settings), engine.Options.of(settings, held_bytes=held_bytes), observer)


def array_of(settings: QASettings) -> engine.ArrayWork[QASummary]:
    """The same for tasks of a job array."""
    return engine.array_of(QAJob(settings), engine.Options.of(settings))


@dataclass(frozen=True, slots=True)
class QAUnit:
    """Pieces of files that become a shard."""

    pieces: tuple[Piece, ...]
    most: int | None = None
    """Limit for its examples."""

    @property
    def size(self) -> int:
        return sum(piece.slice.size for piece in self.pieces)

    @property
    def key(self) -> str:
        slices = (piece.slice for piece in self.pieces)
        made_from = [[one.state, one.format, one.compression, one.start, one.stop] for one in slices]
        return key_of(self.most, made_from)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> QAUnit:
        pieces = (Piece(Slice(**piece["slice"]), piece["article"]) for piece in value["pieces"])
        return cls(tuple(pieces), value["most"])


class QAJob(engine.Job[QASummary]):
    """Examples to windows."""

    kind, stage_names, outputs = TABLE, ("window",), (*SHARDS, ANSWERS, REJECTS)

    def __init__(self, settings: QASettings) -> None:
        self._settings, self._rules, self.workers = settings, settings.rules, settings.workers

    def prepare(self, run: Session) -> Identity:
        self._tokenizer = tokenizer = load_qa_tokenizer(self._settings.tokenizer, self._rules)
        self._form, template = tokenizer.form(self._rules), tokenizer.template
        release()
        # Every setting that changes windows, with "auto" resolved.
        settings = {
            "version": VERSION,
            "tokenizer": tokenizer.plain_hash,
            **asdict(self._rules),
            "first": "context" if template.context_first else "question",
            "padding_side": "left" if template.pad_left else "right",
            "pad_id": template.pad_id,
            "pad_type": template.pad_type,
            "cls_id": template.cls_id,
            "max_examples": self._settings.max_examples,
            "split": self._settings.split,
        }
        self._identity = Identity(settings, self._list_input(run), tokenizer.name)
        return self._identity

    def _list_input(self, run: Session) -> dict[str, Any]:
        self._files = list(list_files(self._settings.inputs, self._settings.split))
        return run.folder.inputs.write((0, file) for file in self._files)

    def units(self, run: Session) -> Iterable[QAUnit]:
        most = self._settings.max_examples
        if most is not None:  # counted over all files, in order
            return [QAUnit(tuple(Piece(whole(file).of_state(file.state)) for file in self._files), most)]
        run.enter("read")
        pieces = (piece for file in self._files for piece in cut_file(file))
        return (QAUnit(tuple(group)) for group in gather(pieces, PIECE_BYTES, lambda piece: piece.slice))

    def files(self, run: Session) -> dict[str, bytes]:
        return {"tokenizer.json": self._tokenizer.json.encode()}

    def plan_facts(self, run: Session) -> dict[str, Any]:
        if run.folder.task is None:
            run.folder.provide(self.files(run))  # workers read the tokenizer there
        sizes, rules, settings = run.folder.units.sizes(), self._rules, self._settings
        recipe = xxh3_64_intdigest(json.dumps(self._identity.settings, sort_keys=True).encode())
        keys = run.folder.units.keys().mixed(np.full(len(sizes), recipe, np.uint64))
        self._records = records = Records(run.folder.journal, RECORDS, run.folder.out, keys)
        small = settings.executor == "local" and settings.workers is None and sizes.sum() < SMALL_INPUT
        useful = 1 if small else max(1, min(settings.workers or run.pool.cores, len(sizes) - records.complete))
        worker_bytes = TOKENIZER_FACTOR * len(self._tokenizer.json) + WINDOWS_BYTES + run.pool.overhead_bytes
        step = f"overlap {rules.overlap}" if rules.hop is None else f"hop {rules.hop}"
        release()
        return {
            "workers": fit_workers(run.budget, usage().anonymous, worker_bytes, useful),
            "useful": useful,
            "done": records.complete,
            "encoder": "huggingface",
            "encoder_note": f"windows of {rules.max_seq_length}, {step}, {rules.memory_tokens} memory tokens",
        }

    def stages(self, run: Session) -> Iterator[Stage]:
        rules = TextRules(strict=self._settings.strict, only_file=len(self._files) == 1)
        load = WindowLoad(run.folder.out, run.folder.folder, rules, self._rules, self._tokenizer.template, self._form)
        yield Stage("window", load, self._records, QAUnit.from_json)

    # ---- finish ----

    def finish(self, run: Session, plan: WorkPlan) -> QASummary:
        folder, records = run.folder, self._records
        if records.complete != plan.units:
            raise StoreError(f"{folder.out}: {plan.units - records.complete} units are not done.")
        if self._list_input(run) != self._identity.input:
            raise InputError("The input changed while it was read. Run the same command again: it reads what changed.")
        with NewFile(folder.out / ANSWERS) as answers:
            for part in self._parts(folder.out, "answers-"):
                answers.write(part.read_bytes())
            if answers.size:
                answers.commit()
            else:
                answers.path.unlink(missing_ok=True)
        rejects = self._parts(folder.out, "rejects-")
        damage = gather_rejects(folder.out, rejects, lambda: (file["path"] for file in folder.inputs.planned()))
        if damage.files:
            run.observer.warn(str(damage))
        manifest = self._manifest()
        totals = Counter[str]()
        for shard in self._shards():
            totals.update(rows=shard.rows, bytes=shard.bytes)
        if not totals["rows"]:
            reasons = manifest.counts["rejected"] | manifest.counts["dropped"]
            if not reasons:
                raise InputError("No examples in the input: nothing to write.")
            listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons.items())
            first = first_reject(folder.out) if manifest.counts["rejected"] else ""
            raise InputError(f"No examples left: {listed}.{first}")
        folder.tidy()
        summary = replace(
            run.measured(_summary(manifest, totals, folder.out)),
            up_to_date=False,
            units=plan.units,
            reused=records.reused,
            changed=plan.changes,
            workers=plan.workers,
        )
        summary.write(folder.folder)
        manifest.write(folder.out, self._shards)
        _clean_up(run)
        return summary

    def _in_order(self) -> Iterator[Record]:
        """The records of all units, one at a time, since there may be a million."""
        return (record for _, record in self._records.in_plan_order())

    def _parts(self, out: Path, begin: str) -> Iterator[Path]:
        """The lists of all units whose names begin so."""
        names = (name for record in self._in_order() for name in record.files)
        return (out / name for name in names if Path(name).name.startswith(begin))

    def _shards(self) -> Iterator[TableShard]:
        for record in self._in_order():
            for name, file in record.outputs.items():
                yield TableShard(name, record.facts["rows"], **file)

    def _manifest(self) -> TableManifest:
        """The manifest without its shards."""
        tokenizer, sums, units, read = self._tokenizer, Counter[str](), 0, 0
        dropped, rejected = Counter[str](), Counter[str]()
        for record in self._in_order():
            sums.update(record.facts["counts"])
            units, read = units + 1, read + record.facts["read"]
            dropped.update(record.facts["dropped"])
            rejected.update(record.facts["rejected"])
        counts = {
            "units": units,
            "read": read,
            "answered": sums["ok"] + sums["repaired"],
            "unanswerable": sums["none"],
            **{name: sums[name] for name in ("repaired", "unrepairable")},
            "dropped": dict(sorted(dropped.items())),
            "rejected": dict(sorted(rejected.items())),
            **{name: sums[name] for name in ("windows", "windows_with_answers", "tokens")},
        }
        facts = {
            "name": tokenizer.name,
            "xxh3": hash_bytes(tokenizer.json.encode()),
            "vocab_size": tokenizer.vocab_size,
            "cls_id": tokenizer.template.cls_id,
        }
        form = json.loads(json.dumps(asdict(self._form)))
        schema = TableSchema.of(schema_of(self._form))
        return TableManifest(schema, self._identity.settings, self._identity.input, counts, tokenizer=facts, qa=form)

    def up_to_date(self, run: Session) -> QASummary | None:
        if not has_every_file(run.folder.out, TABLE):
            return None
        _clean_up(run)  # a kill may have come after the manifest
        manifest = TableManifest.read(run.folder.out)
        return _summary(manifest, manifest.totals, run.folder.out)


def _clean_up(run: Session) -> None:
    """Remove what neither the table nor a record names."""
    folder = run.folder
    sweep(folder.out, SHARDS, live_files(folder.out, TABLE))
    kept = (Path(name).name for line in folder.journal.read(RECORDS) for name in line["files"])
    sweep(folder.folder, ("answers-*.jsonl", "rejects-*.jsonl"), kept)


def _summary(manifest: TableManifest, totals: Mapping[str, int], out: Path) -> QASummary:
    form, counts = Form.of(manifest, str(out)), manifest.counts
    numbers = {name: count for name, count in counts.items() if isinstance(count, int) and name != "units"}
    return Summary(
        "qa",
        str(out),
        {"max_seq_length": form.max_seq_length, "memory_tokens": len(form.memory)},
        up_to_date=True,
        counts=numbers | {"examples": totals["rows"]},
        rejected=counts["rejected"],
        dropped=counts["dropped"],
        output_bytes=totals["bytes"],
    )


# ---- in a worker ----


def schema_of(form: Form) -> pa.Schema:
    """The columns of the table. A context that several questions of a batch have is stored once."""
    answer = [("text", pa.string()), ("start", pa.int64())]
    kinds = {
        **dict.fromkeys(("id", "title", "question"), pa.string()),
        "context": pa.dictionary(pa.int32(), pa.string()),
        "answers": pa.list_(pa.struct(answer)),
        "chosen": pa.struct([*answer, ("stop", pa.int64())]),
        "status": pa.string(),
    }
    for name, (dtype, shape) in form.columns.items():
        kinds[name] = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), int(np.prod(shape))))
    return pa.schema(list(kinds.items()))


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """Makes the shard of a unit."""

    out: Path
    folder: Path
    """Of the run."""
    text_rules: TextRules
    rules: QARules
    template: Template
    form: Form

    def load(self) -> Make:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str((self.out / "tokenizer.json").read_text(encoding="utf-8"))
        windower = Windower(tokenizer, self.rules, self.template)
        return lambda assigned, progress: iter([self._make(windower, assigned, progress)])

    def _make(self, windower: Windower, assigned: Assigned, progress: Progress) -> Record:
        """The record of a unit, whose files are durable."""
        unit, schema = assigned.unit, schema_of(self.form)
        counts: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        with (
            TableShardWriter(self.out, schema) as writer,
            NewFile(self.folder / f"answers-{assigned.key}.jsonl") as answers,
            RejectFile(self.folder / f"rejects-{assigned.key}.jsonl") as rejects,
        ):
            reading = Reading(self.text_rules, rejects.add)
            examples = (example for piece in unit.pieces for example in read_examples(piece, reading))
            read = 0
            for batch in self._batches(itertools.islice(examples, unit.most)):
                progress.lap("read")
                windows = windower(batch)
                progress.lap("encode")
                writer.append(_rows(batch, windows, writer.rows, schema))
                answers.write(b"".join(_answers_to_check(batch, windows)))
                progress.lap("write")
                read += len(batch)
                tokens = int(windows.column("length").sum())
                answered = int((windows.column("start_positions") != windows.column("cls_index")).sum())
                dropped.update(windows.dropped.values())
                counts.update(one.status for k, one in enumerate(windows.chosen) if k not in windows.dropped)
                counts.update(windows=len(windows.numbers), windows_with_answers=answered, tokens=tokens)
                size = sum(len(example.question) + len(example.context) for example in batch)
                progress.add(documents=len(batch), tokens=tokens, characters=size, input_bytes=size)
            files = rejects.commit()
            if answers.size:
                files[answers.path.name] = answers.commit()
            shard = writer.commit()
        release()
        facts = {"read": read, "rows": writer.rows, "counts": dict(counts), "dropped": dict(dropped)}
        return Record(
            assigned.key,
            outputs={} if shard is None else {shard.name: {"bytes": shard.bytes, "xxh3": shard.xxh3}},
            files={f"{self.folder.name}/{name}": file for name, file in files.items()},
            counts={"rows": writer.rows},
            facts=facts | {"rejected": dict(sorted(rejects.counts.items()))},
        )

    def _batches(self, examples: Iterator[Example]) -> Iterator[list[Example]]:
        """Batches of about `BATCH_WINDOWS`; an example with more windows than that comes alone."""
        step = max(1, self.rules.step(self.form.max_seq_length - self.template.taken))
        row = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.form.columns.values())
        most = max(1, BATCH_WINDOWS // row * step * _CHARACTERS_A_TOKEN)
        batch: list[Example] = []
        used = different = 0
        for example in examples:
            size = len(example.question) + len(example.context)
            new = size if not batch or batch[-1].context != example.context else len(example.question)
            if batch and (len(batch) == BATCH_EXAMPLES or used + size > most or different + new > BATCH_CONTEXTS):
                yield batch
                batch, used, different, new = [], 0, 0, size
            batch.append(example)
            used, different = used + size, different + new
        if batch:
            yield batch


def _rows(examples: list[Example], windows: Windows, before: int, schema: pa.Schema) -> pa.RecordBatch:
    """A row for each example that has windows. `before`: rows of the shard in front of them."""
    stored, places, counts = np.unique(windows.column("example"), return_inverse=True, return_counts=True)
    windows.numbers[:, -1] = before + places
    kept = [(examples[number], windows.chosen[number]) for number in stored.tolist()]
    columns: dict[str, Any] = {
        **{name: [getattr(example, name) for example, _ in kept] for name in ("id", "title", "question")},
        "answers": [[asdict(answer) for answer in example.answers] for example, _ in kept],
        "chosen": [{"text": one.text, "start": one.start, "stop": one.stop} if one else None for _, one in kept],
        "status": [one.status for _, one in kept],
    }
    columns = {name: pa.array(values, schema.field(name).type) for name, values in columns.items()}
    contexts = {text: number for number, text in enumerate(dict.fromkeys(example.context for example, _ in kept))}
    indices = pa.array([contexts[example.context] for example, _ in kept], pa.int32())
    columns["context"] = pa.DictionaryArray.from_arrays(indices, pa.array(list(contexts), pa.string()))
    lists = pa.array(np.concatenate(([0], counts.cumsum())), pa.int32())
    for name in ("input_ids", "token_type_ids", "offsets", "numbers"):
        kind = schema.field(name).type.value_type
        flat = np.ascontiguousarray(getattr(windows, name), kind.value_type.to_pandas_dtype()).reshape(-1)
        columns[name] = pa.ListArray.from_arrays(
            lists, pa.FixedSizeListArray.from_arrays(pa.array(flat), kind.list_size)
        )
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)


def _answers_to_check(batch: list[Example], windows: Windows) -> Iterator[bytes]:
    """A line for each example whose answer is not where the data says, or that was dropped."""
    for number, (example, chosen) in enumerate(zip(batch, windows.chosen, strict=True)):
        reason = windows.dropped.get(number)
        if reason is None and chosen.status in ("ok", "none"):
            continue
        line = {
            "id": example.id,
            "status": "dropped" if reason else chosen.status,
            **({"reason": reason} if reason else {}),
            "stated": [{"text": answer.text, "start": answer.start} for answer in example.answers],
            "found": {"text": chosen.text, "start": chosen.start} if chosen else None,
        }
        yield (json.dumps(line, ensure_ascii=False) + "\n").encode()
