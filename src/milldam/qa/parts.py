"""The first stage: sources -> parts of at most 1,024 examples in the run folder, read once and in order.

A part is JSON lines, one an example: [id, title, question, context, [[text, start], ...]]; a context that is that of
the line before is null. Which examples a part has follows from the input alone.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milldam.files import NewFile
from milldam.memory import usage
from milldam.qa.examples import Answer, Example
from milldam.qa.sources import Limits, Reject, read_examples, stop_at_reject
from milldam.run.tasks import PART, PROGRESS, Report, Work
from milldam.sources.listing import InputFile

EXAMPLES, CHARACTERS = 1024, 32 << 20
"""A part ends with so many examples, or so many characters."""
FOLDER, REJECTS = "parts", "rejects.jsonl"
REPORT_SECONDS = 0.25
_MOST_PARTS, _UNITS_WANTED = 64, 16


@dataclass(frozen=True, slots=True)
class Read:
    """What was read: written down when the stage is done, and what a resumed run goes on from."""

    examples: int
    parts: list[int]
    """Bytes of each part."""
    hashes: list[str]
    """xxh3 of each part."""
    rejected: dict[str, int]
    """Reason -> records."""
    heaviest: int = 0
    """What the example that takes most takes beside what every worker does."""

    def units(self) -> list[range]:
        """The parts of each unit: a sixteenth of them, but at most 64."""
        size = max(1, min(_MOST_PARTS, len(self.parts) // _UNITS_WANTED))
        return [range(first, min(first + size, len(self.parts))) for first in range(0, len(self.parts), size)]


def part_path(folder: Path, number: int) -> Path:
    return folder / FOLDER / f"{number:06d}.jsonl"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Reads everything, in this process."""

    folder: Path
    """Of the run."""
    rejects: Path
    files: Callable[[], Iterable[InputFile]]
    max_examples: int | None
    strict: bool
    limits: Limits

    def start(self) -> Work:
        return self._work

    def _work(self, assignment: Any, report: Report) -> None:
        (self.folder / FOLDER).mkdir(exist_ok=True)
        with NewFile(self.rejects) as rejects:
            told = _Told(rejects, self.limits)
            on_reject = stop_at_reject if self.strict else told.reject
            found = (
                example
                for file in self.files()
                for example in read_examples(file, on_reject, limits=self.limits, spool=str(self.folder))
            )
            examples = itertools.islice(found, self.max_examples)
            records = list(_write_parts(self.folder, examples, told, report))
            if told.rejected:
                rejects.commit()
        sizes, hashes = [one["bytes"] for one in records], [one["xxh3"] for one in records]
        report(PART, Read(told.examples, sizes, hashes, dict(sorted(told.rejected.items())), told.heaviest))


@dataclass(slots=True)
class _Told:
    rejects: NewFile
    limits: Limits
    examples: int = 0
    characters: int = 0
    heaviest: int = 0
    rejected: Counter[str] = field(default_factory=Counter)

    def reject(self, found: Reject) -> None:
        self.rejected[found.reason] += 1
        line = json.dumps(found.as_json(), ensure_ascii=False) + "\n"
        self.rejects.write(line.encode("utf-8", "backslashreplace"))


def _write_parts(folder: Path, examples: Iterator[Example], told: _Told, report: Report) -> Iterator[dict[str, Any]]:
    """Write every part; size and hash of each."""
    reported = 0.0
    number, ahead = 0, next(examples, None)
    while ahead is not None:
        with NewFile(part_path(folder, number)) as new:
            ahead = _write_part(new, ahead, examples, told)
            yield new.commit()
        number += 1
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            counts = {"documents": told.examples, "text_bytes": told.characters}
            report(PROGRESS, {"counts": counts, "seconds": {}, "anonymous_bytes": usage().anonymous})


def _write_part(new: NewFile, first: Example, examples: Iterator[Example], told: _Told) -> Example | None:
    """Fill a part; the example that no longer belongs to it."""
    characters = count = 0
    context: str | None = None
    example: Example | None = first
    while example is not None:
        size = len(example.question) + (len(example.context) if example.context != context else 0)
        if count == EXAMPLES or (count and characters + size > CHARACTERS):
            break
        answers = [[answer.text, answer.start] for answer in example.answers]
        shown = example.context if example.context != context else None
        line = json.dumps([example.id, example.title, example.question, shown, answers], ensure_ascii=False) + "\n"
        new.write(line.encode())
        told.heaviest = max(told.heaviest, told.limits.weigh(example.size_bytes, example))
        context, count, characters = example.context, count + 1, characters + size
        example = next(examples, None)
    told.examples += count
    told.characters += characters
    return example


def read_part(path: Path) -> Iterator[tuple[Example, int]]:
    """The examples of a part, each with the bytes of its line."""
    context = ""
    with path.open("rb") as lines:
        for line in lines:
            id, title, question, given, answers = json.loads(line)
            context = context if given is None else given
            yield (
                Example(id, question, context, tuple(Answer(text, start) for text, start in answers), title),
                len(line),
            )
