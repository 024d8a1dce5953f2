"""The first stage: input files -> chunks of at most 1,024 examples in the run folder, each file read once and in order.

A chunk is JSON lines, one an example: [id, title, question, context, [[text, start], ...]]; a context that is that of
the line before is null. Which examples a chunk has follows from its file alone, and its name from its content: so a
file that is added or changed leaves the chunks of others as they are. Holds an example at a time.

What a worker takes to make windows of an example is estimated, so that one that is too heavy is known when it is
read. A context is encoded whole: what that takes follows from its bytes and its tokens, and these from 16 samples of
a long one. Bounds of what was measured on seven kinds of text with three tokenizers (docs/log.md). Short examples are
in what every worker takes.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from milldam.files import NewFile
from milldam.qa.settings import QARules
from milldam.qa.sources import Answer, Example, Limits, Reject, read_examples, stop_at_reject
from milldam.qa.template import Template
from milldam.run.engine import Telling
from milldam.run.records import Record
from milldam.run.tasks import PART, Report, Work
from milldam.run.units import key_of
from milldam.sources.units import InputFile
from milldam.stores.kinds import FileRecord

CHUNKS = "chunks"
EXAMPLES, CHARACTERS = 1024, 32 << 20
"""A chunk ends with so many examples, or so many characters."""
_MOST_CHUNKS, _SHARDS_WANTED = 64, 16


@dataclass(frozen=True, slots=True)
class Reading:
    """Files to read: one; or, where examples are counted over all of them, all."""

    key: str
    files: tuple[InputFile, ...]
    most: int | None = None
    """Examples."""


@dataclass(frozen=True, slots=True)
class Read:
    """What came of a reading: the facts of its record."""

    examples: int
    chunks: list[list[FileRecord]]
    """By file."""
    rejected: dict[str, int]
    """Reason -> records."""
    heaviest: int
    """What the example that takes most takes beside what every worker does."""


@dataclass(frozen=True, slots=True)
class WindowUnit:
    """Chunks of a file that become a shard."""

    key: str
    reading: int
    """The number of the reading that they are from."""
    chunks: list[FileRecord]

    @property
    def size(self) -> int:
        return sum(chunk["bytes"] for chunk in self.chunks)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def readings(files: Iterable[InputFile], max_examples: int | None) -> Iterator[Reading]:
    """What there is to read, named by the state of the files."""
    groups = ([file] for file in files) if max_examples is None else iter([list(files)])
    for group in groups:
        key = key_of(max_examples, *((Path(file.path).name, file.size, file.version) for file in group))
        yield Reading(key, tuple(group), max_examples)


def window_units(recipe: str, reads: Iterable[Read]) -> Iterator[WindowUnit]:
    """A sixteenth of a file's chunks each, but at most 64."""
    for number, read in enumerate(reads):
        for chunks in read.chunks:
            size = max(1, min(_MOST_CHUNKS, len(chunks) // _SHARDS_WANTED))
            for first in range(0, len(chunks), size):
                together = chunks[first : first + size]
                yield WindowUnit(key_of(recipe, *(chunk["xxh3"] for chunk in together)), number, together)


def chunk_path(folder: Path, chunk: FileRecord) -> Path:
    return folder / CHUNKS / f"{chunk['xxh3']}.jsonl"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Reads files, in this process."""

    folder: Path
    """Of the run."""
    strict: bool
    alone: bool
    """There is one file."""
    limits: Limits

    def start(self) -> Work:
        (self.folder / CHUNKS).mkdir(exist_ok=True)
        return self._work

    def _work(self, reading: Reading, report: Report) -> None:
        with NewFile(self.folder / f"rejects-{reading.key}.jsonl") as rejects:
            size = sum(file.size for file in reading.files)
            tally = _Tally(rejects, self.limits, Telling(report, size))
            chunks: list[list[FileRecord]] = []
            for file in reading.files:
                on_reject = stop_at_reject if self.strict else tally.reject
                found = read_examples(file, on_reject, limits=self.limits, spool=str(self.folder), alone=self.alone)
                left = None if reading.most is None else reading.most - tally.examples
                chunks.append(list(_write_chunks(self.folder, itertools.islice(found, left), tally)))
                if tally.examples == reading.most:
                    break
            files = {f"{self.folder.name}/{rejects.path.name}": rejects.commit()} if tally.rejected else {}
        read = Read(tally.examples, chunks, dict(sorted(tally.rejected.items())), tally.heaviest)
        report(PART, Record(reading.key, files=files, facts=asdict(read)))


@dataclass(slots=True)
class _Tally:
    rejects: NewFile
    limits: Limits
    telling: Telling
    examples: int = 0
    heaviest: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def reject(self, found: Reject) -> None:
        self.rejected[found.reason] += 1
        line = json.dumps(found.as_json(), ensure_ascii=False) + "\n"
        self.rejects.write(line.encode("utf-8", "backslashreplace"))

    def count(self, example: Example, characters: int) -> None:
        self.examples += 1
        self.heaviest = max(self.heaviest, self.limits.weigh(example.size_bytes, example))
        self.telling.add(documents=1, text_bytes=characters)


def _write_chunks(folder: Path, examples: Iterator[Example], tally: _Tally) -> Iterator[FileRecord]:
    """Write every chunk; size and hash of each."""
    ahead = next(examples, None)
    while ahead is not None:
        with NewFile(folder / CHUNKS / "new.jsonl") as new:
            ahead = _write_chunk(new, ahead, examples, tally)
            yield new.commit(chunk_path(folder, new.record).name)


def _write_chunk(new: NewFile, first: Example, examples: Iterator[Example], tally: _Tally) -> Example | None:
    """Fill a chunk; the example that no longer belongs to it."""
    characters = count = 0
    context: str | None = None
    example: Example | None = first
    while example is not None:
        same = example.context == context
        size = len(example.question) + (0 if same else len(example.context))
        if count == EXAMPLES or (count and characters + size > CHARACTERS):
            break
        answers = [[answer.text, answer.start] for answer in example.answers]
        shown = None if same else example.context
        line = json.dumps([example.id, example.title, example.question, shown, answers], ensure_ascii=False) + "\n"
        new.write(line.encode())
        tally.count(example, size)
        context, count, characters = example.context, count + 1, characters + size
        example = next(examples, None)
    return example


def read_chunk(path: Path) -> Iterator[tuple[Example, int]]:
    """The examples of a chunk, each with the bytes of its line."""
    context = ""
    with path.open("rb") as lines:
        for line in lines:
            id, title, question, given, answers = json.loads(line)
            context = context if given is None else given
            found = tuple(Answer(text, start) for text, start in answers)
            yield Example(id, question, context, found, title), len(line)


LONG_EXAMPLE = 256_000
"""An example of more bytes is a batch by itself, and weighed."""
_FOR_A_BYTE, _FOR_A_TOKEN = 100, 560
_USUAL_DENSITY = 0.3
"""Tokens a byte, where the text is not known."""
_SAMPLES, _SAMPLE_CHARACTERS = 16, 4096


class Scale:
    """`row_bytes`: of a window."""

    def __init__(self, tokenizer_json: str, rules: QARules, template: Template, row_bytes: int) -> None:
        self._json, self._rules, self._template, self._row_bytes = tokenizer_json, rules, template, row_bytes
        self._known = "", 0.0

    def weigh(self, size: int, example: Example | None = None) -> int:
        """Bytes that an example of so many takes beside what every worker does; None: it could not be read."""
        if size <= LONG_EXAMPLE:
            return 0
        tokens = size * (_USUAL_DENSITY if example is None else self._density(example.context))
        question = 0 if example is None else self._tokens([example.question])
        step = max(1, self._rules.step(self._rules.max_seq_length - self._template.taken - question))
        windows = min(tokens / step, self._rules.max_segments or tokens)
        return round(size * _FOR_A_BYTE + tokens * _FOR_A_TOKEN + 2 * windows * self._row_bytes)

    def _density(self, context: str) -> float:
        """Tokens a byte. The questions on a context follow each other: it is looked at once."""
        if self._known[0] != context:
            between = max(_SAMPLE_CHARACTERS, len(context) // _SAMPLES)
            samples = [context[at : at + _SAMPLE_CHARACTERS] for at in range(0, len(context), between)]
            self._known = context, self._tokens(samples) / sum(len(sample.encode()) for sample in samples)
        return self._known[1]

    def _tokens(self, texts: list[str]) -> int:
        return sum(len(found.ids) for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Any:
        """Loaded when the first long example comes."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self._json)
