"""The job of `milldam qa`, on run/engine.py: examples to a table, a row an example with all its windows.

prepare   tokenizer, memory tokens, template, input listing: everything that can be wrong is found here
units     pieces of files; a large SQuAD file is read through once to be cut
window    a unit's examples -> windows -> a shard, and a list of rejects
finish    rejects gathered, the manifest written last    mapping/table_job.py

Memory: this process plans and keeps count; a worker holds a tokenizer, a batch of examples and their windows.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from milldam.config.checking import checked_settings
from milldam.errors import InputError
from milldam.files import hash_bytes
from milldam.mapping.table_job import SHARDS, RowUnit, TableJob, TableSummary, require_unchanged, unit_record
from milldam.memory import release, usage
from milldam.pipeline.rejects import NAME as REJECTS
from milldam.pipeline.rejects import RejectFile, first_reject
from milldam.qa.examples import PIECE_BYTES, Example, cut_file, list_files, read_examples
from milldam.qa.settings import First, PaddingSide, QARules, QASettings
from milldam.qa.store import FeatureStore, Form
from milldam.qa.template import Template, template_of
from milldam.qa.windows import VERSION, Windower, Windows
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import SMALL_INPUT, TOKENIZER_FACTOR, fit_workers
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.run.summary import Observer
from milldam.run.units import Identity, key_of
from milldam.sources.batch import Reading, TextRules
from milldam.sources.units import Slice, gather, whole
from milldam.stores.table.manifest import TableManifest, TableSchema
from milldam.stores.table.writer import TableShardWriter
from milldam.tokenizers.loading import load_tokenizer

if TYPE_CHECKING:
    from milldam.choices import Executor

WINDOWS_BYTES = 42 * 10**6
"""What a worker's batch of examples and its windows take, besides what any worker takes."""
BATCH_EXAMPLES, BATCH_CHARACTERS, BATCH_WINDOWS = 256, 256_000, 6 << 20
"""Limits of a batch: examples, their characters (what encoding takes), bytes of windows."""
_CHARACTERS_A_TOKEN = 3


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


def run_qa(settings: QASettings, observer: Observer | None = None, *, held_bytes: int = 0) -> TableSummary:
    """Do the job, or what is left of it. `held_bytes`: memory that the calling program holds already."""
    return engine.run(QAJob(settings), engine.Options.of(settings, held_bytes=held_bytes), observer)


def array_of(settings: QASettings) -> ArrayWork[TableSummary]:
    """The same for tasks of a job array."""
    return ArrayWork(QAJob(settings), engine.Options.of(settings))


class QAJob(TableJob):
    """Examples to windows."""

    stage_names, outputs = ("window",), (SHARDS, REJECTS)

    def __init__(self, settings: QASettings) -> None:
        self._settings, self.workers = settings, settings.workers

    def prepare(self, run: Session) -> Identity:
        settings = self._settings
        loaded = load_tokenizer(settings.tokenizer)
        plain_hash = hash_bytes(loaded.json.encode())
        template = template_of(loaded.huggingface, settings, loaded.named)
        Windower(loaded.huggingface, settings, template)  # refuses rules that make no windows
        self._json = loaded.huggingface.to_str() if settings.memory_tokens else loaded.json
        self._facts = {
            "name": loaded.name,
            "xxh3": hash_bytes(self._json.encode()),
            "vocab_size": loaded.vocab_size,
            "cls_id": template.cls_id,
        }
        dtype = "uint16" if loaded.vocab_size <= 1 << 16 else "int32"
        own = template.pad_id, template.pad_type, template.pad_left, len(template.before), len(template.after)
        self._form = Form(settings.max_seq_length, dtype, *own, template.memory)
        self._template, name = template, loaded.name
        del loaded
        release()
        # Every setting that changes windows, with "auto" resolved.
        recipe = {
            "version": VERSION,
            "tokenizer": plain_hash,
            **settings.facts,
            "first": "context" if template.context_first else "question",
            "padding_side": "left" if template.pad_left else "right",
            "pad_id": template.pad_id,
            "pad_type": template.pad_type,
            "cls_id": template.cls_id,
            "max_examples": settings.max_examples,
            "split": settings.split,
        }
        self._files = list(list_files(settings.inputs, settings.split))
        listed = run.folder.inputs.write((0, file) for file in self._files)
        self._identity = Identity(recipe, listed, name)
        return self._identity

    def units(self, run: Session) -> Iterator[RowUnit]:
        most = self._settings.max_examples
        if most is None:
            run.enter("read")
            pieces = (piece for file in self._files for piece in cut_file(file))
            groups: Iterable[list[Slice]] = gather(pieces, PIECE_BYTES, lambda piece: piece)
        else:  # counted over all files, in order
            groups = [[whole(file) for file in self._files]]
        for index, group in enumerate(groups):
            key = key_of(most, [[one.state, one.format, one.compression, one.start, one.stop] for one in group])
            place = {"pieces": [piece.as_json() for piece in group], "most": most}
            yield RowUnit(index, key, sum(one.size for one in group), place)

    def files(self, run: Session) -> dict[str, bytes]:
        return {"tokenizer.json": self._json.encode()}

    def plan_facts(self, run: Session) -> dict[str, Any]:
        sizes, settings = run.folder.units.sizes(), self._settings
        records = self.open_records(run, json.dumps(self._identity.settings, sort_keys=True))
        small = settings.executor == "local" and settings.workers is None and sizes.sum() < SMALL_INPUT
        useful = 1 if small else max(1, min(settings.workers or run.pool.cores, len(sizes) - records.complete))
        worker_bytes = TOKENIZER_FACTOR * len(self._json) + WINDOWS_BYTES + run.pool.overhead_bytes
        step = f"overlap {settings.facts['overlap']}" if settings.hop is None else f"hop {settings.hop}"
        release()
        return {
            "workers": fit_workers(run.budget, usage().anonymous, worker_bytes, useful),
            "useful": useful,
            "done": records.complete,
            "encoder": "huggingface",
            "encoder_note": f"windows of {settings.max_seq_length}, {step}, {settings.memory_tokens} memory tokens",
        }

    def stages(self, run: Session) -> Iterator[Stage]:
        rules = TextRules(strict=self._settings.strict, only_file=len(self._files) == 1)
        load = WindowLoad(run.folder.out, rules, self._settings, self._template, self._form)
        yield Stage("window", load, self.records, lambda value: RowUnit(**value))

    def manifest(self, out: Path, counts: Counter[str], reasons: dict[str, dict[str, int]]) -> TableManifest:
        if not counts["windows"]:
            listed = ", ".join(f"{reason} {count:,}" for one in reasons.values() for reason, count in one.items())
            if not listed:
                raise InputError("No examples in the input: nothing to write.")
            raise InputError(f"No examples left: {listed}.{first_reject(out) if reasons['rejected'] else ''}")
        facts: dict[str, Any] = {name: counts[name] for name in ("units", "read")}
        facts |= {"answered": counts["ok"] + counts["repaired"], "unanswerable": counts["none"]}
        facts |= {name: counts[name] for name in ("repaired", "unrepairable")}
        facts |= {name: reasons[name] for name in ("dropped", "rejected")}
        facts |= {name: counts[name] for name in ("windows", "windows_with_answers", "tokens")}
        schema, form = TableSchema.of(schema_of(self._form)), json.loads(json.dumps(asdict(self._form)))
        recipe, listed_input = self._identity.settings, self._identity.input
        return TableManifest(schema, recipe, listed_input, facts, tokenizer=self._facts, qa=form)


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


# ---- in a worker ----


@dataclass(frozen=True, slots=True)
class WindowLoad:
    """Makes the shard of a unit."""

    out: Path
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
        place, schema = assigned.unit.place, schema_of(self.form)
        slices = [Slice(**piece) for piece in place["pieces"]]
        counts: Counter[str] = Counter()
        dropped: Counter[str] = Counter()
        with (
            TableShardWriter(self.out, schema) as writer,
            RejectFile(self.out / RUN_FOLDER / f"rejects-{assigned.key}.jsonl") as rejects,
        ):
            reading = Reading(self.text_rules, rejects.add)
            examples = (example for one in slices for example in read_examples(one, reading))
            for batch in self._batches(itertools.islice(examples, place["most"])):
                progress.lap("read")
                windows = windower(batch)
                progress.lap("encode")
                writer.append(_rows(batch, windows, writer.rows, schema))
                progress.lap("write")
                tokens = int(windows.column("length").sum())
                answered = int((windows.column("start_positions") != windows.column("cls_index")).sum())
                dropped.update(windows.dropped.values())
                counts.update(one.status for k, one in enumerate(windows.chosen) if k not in windows.dropped)
                counts.update(read=len(batch), windows=len(windows.numbers), tokens=tokens)
                counts.update(windows_with_answers=answered)
                size = sum(len(example.question) + len(example.context) for example in batch)
                progress.add(documents=len(batch), tokens=tokens, characters=size, input_bytes=size)
            require_unchanged(slices)
            lists, shard = rejects.commit(), writer.commit()
        release()
        shards = [] if shard is None else [shard]
        return unit_record(assigned, shards, lists, counts, rejects.counts, dropped=dict(dropped))

    def _batches(self, examples: Iterator[Example]) -> Iterator[list[Example]]:
        """Batches within these limits; an example that is larger comes alone."""
        step = max(1, self.rules.step(self.form.max_seq_length - self.template.taken))
        row = sum(dtype.itemsize * int(np.prod(shape)) for dtype, shape in self.form.columns.values())
        most = min(BATCH_CHARACTERS, BATCH_WINDOWS // row * step * _CHARACTERS_A_TOKEN)
        batch: list[Example] = []
        used = 0
        for example in examples:
            size = len(example.question) + len(example.context)
            if batch and (len(batch) == BATCH_EXAMPLES or used + size > most):
                yield batch
                batch, used = [], 0
            batch.append(example)
            used += size
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
