"""The second stage, in a worker: the chunks of a unit -> one shard of windows, and the list of answers to look at.

Holds one batch: as many examples as have 256,000 characters in different contexts and about 8 MB of windows, at most
256; an example that is larger than that is a batch of its own. What comes out does not depend on the batches.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from milldam.files import NewFile
from milldam.memory import release
from milldam.qa.chunks import WindowUnit, chunk_path, read_chunk
from milldam.qa.settings import QARules
from milldam.qa.sources import Example
from milldam.qa.template import Template
from milldam.qa.windows import Prepared, Windower, load_windower
from milldam.run.engine import Telling
from milldam.run.records import Record
from milldam.run.tasks import PART, Report, Work
from milldam.stores.features.format import FeatureForm
from milldam.stores.features.writer import FeatureShardWriter
from milldam.stores.kinds import FileRecord

BATCH_EXAMPLES, BATCH_CONTEXTS, BATCH_WINDOWS = 256, 256_000, 8 << 20
"""Examples, characters of different contexts (what encoding takes), bytes of windows."""
_CHARACTERS_A_TOKEN = 3


@dataclass(frozen=True, slots=True)
class WindowTask:
    out: Path
    folder: Path
    """Of the run."""
    split: str
    rules: QARules
    template: Template
    form: FeatureForm

    def start(self) -> Work:
        windower = load_windower(self.out / "tokenizer.json", self.rules, self.template)

        def work(unit: WindowUnit, report: Report) -> None:
            report(PART, _Unit(self, windower, Telling(report, unit.size)).make(unit))

        return work


@dataclass(frozen=True, slots=True)
class _Unit:
    """One unit, being made."""

    task: WindowTask
    windower: Windower
    telling: Telling
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    def make(self, unit: WindowUnit) -> Record:
        """Its files are durable then."""
        task = self.task
        shard, files = None, {}
        with (
            FeatureShardWriter(task.out, task.split, task.form) as writer,
            NewFile(task.folder / f"answers-{unit.key}.jsonl") as answers,
        ):
            for batch in _batches(self._examples(unit.chunks), _most_characters(task)):
                self._append(batch, writer, answers)
            if answers.size:
                files = {f"{task.folder.name}/{answers.path.name}": answers.commit()}
            if writer.windows:
                shard = writer.commit().as_dict()
        release()
        self.telling.end()
        outputs = {} if shard is None else shard.pop("files")
        done = {"documents": 0 if shard is None else shard["examples"], "tokens": self.counts["tokens"]}
        facts = {"shard": shard, "counts": dict(self.counts), "dropped": dict(self.dropped)}
        return Record(unit.key, outputs=outputs, files=files, counts=done, facts=facts)

    def _examples(self, chunks: Iterable[FileRecord]) -> Iterator[Example]:
        for chunk in chunks:
            for example, size in read_chunk(chunk_path(self.task.folder, chunk)):
                self.telling.add(input_bytes=size)
                yield example

    def _append(self, batch: list[Example], writer: FeatureShardWriter, answers: NewFile) -> None:
        self.telling.lap()
        prepared = self.windower(batch)
        self.telling.lap("encode")
        writer.append(prepared.features, batch, prepared.chosen)
        answers.write(b"".join(_to_look_at(batch, prepared)))
        self.telling.lap("write")
        features, tokens = prepared.features, int(prepared.features.length.sum())
        self.dropped.update(prepared.dropped.values())
        self.counts.update(one.status for k, one in enumerate(prepared.chosen) if k not in prepared.dropped)
        answered = int(features.has_answer.sum())
        self.counts.update(windows=len(features), windows_with_answers=answered, tokens=tokens)
        characters = sum(len(example.question) + len(example.context) for example in batch)
        self.telling.add(documents=len(batch), tokens=tokens, characters=characters)


def _most_characters(task: WindowTask) -> int:
    """Characters of context, each as often as it is used, whose windows take about `BATCH_WINDOWS`."""
    length, taken = task.form.max_seq_length, task.template.taken
    step = max(1, task.rules.step(length - taken))
    row = sum(column.row_bytes for column in task.form.columns)
    return max(1, BATCH_WINDOWS // row * step * _CHARACTERS_A_TOKEN)


def _batches(examples: Iterator[Example], most_characters: int) -> Iterator[list[Example]]:
    batch: list[Example] = []
    used = different = 0
    for example in examples:
        size = len(example.question) + len(example.context)
        new = size if not batch or batch[-1].context != example.context else len(example.question)
        full = len(batch) == BATCH_EXAMPLES or used + size > most_characters or different + new > BATCH_CONTEXTS
        if batch and full:
            yield batch
            batch, used, different, new = [], 0, 0, size
        batch.append(example)
        used, different = used + size, different + new
    if batch:
        yield batch


def _to_look_at(batch: list[Example], prepared: Prepared) -> Iterator[bytes]:
    """A line for each example whose answer is not where the data says, or that was dropped."""
    for number, (example, chosen) in enumerate(zip(batch, prepared.chosen, strict=True)):
        reason = prepared.dropped.get(number)
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
