"""What the tests of question-answering jobs share: made-up examples, the command and the call."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, demo_texts

from milldam.qa.examples import Example, list_files, read_examples
from milldam.qa.job import prepare
from milldam.qa.store import FeatureStore
from milldam.sources.batch import Reading, TextRules
from milldam.sources.units import whole

SIZES = ("--max-seq-length", 64, "--overlap", 16)


def write_examples(path: Path, count: int, *, seed: int = 0, length: int = 300) -> Path:
    """Made-up questions on stretches of the demo texts, in HF's form: a third without an answer, some misaligned."""
    rng = random.Random(seed)
    sources = [text for text in demo_texts() if len(text) > 50]
    with path.open("w", encoding="utf-8") as file:
        context = ""
        for number in range(count):
            if number % 3 == 0:
                source = rng.choice(sources)
                begin = rng.randrange(len(source) - 40)
                context = f"{rng.randrange(10**6)} {source[begin : begin + rng.randrange(40, length)]}"
            begin = rng.randrange(len(context) - 5)
            text = context[begin : begin + 5]
            stated = begin + (3 if number % 50 == 1 else 0)
            answers = {"text": [text], "answer_start": [stated]} if number % 3 else {"text": [], "answer_start": []}
            record = {"id": f"q{number}", "title": "", "context": context, "question": f"What is {number}?"}
            file.write(json.dumps(record | {"answers": answers}, ensure_ascii=False) + "\n")
    return path


def examples_of(
    inputs: Any, *, split: str = "train", strict: bool = False, on_reject: Any = lambda reject: None
) -> Iterator[Example]:
    """The examples of files, in order, as a job reads them."""
    files = list_files([str(name) for name in (inputs if isinstance(inputs, list) else [inputs])], split)
    reading = Reading(TextRules(strict=strict, only_file=True), on_reject)
    return (example for file in files for example in read_examples(whole(file), reading))


def squad(examples: list[Example], *, title_first: bool = True) -> dict[str, Any]:
    """The examples in SQuAD's form: an article a title, a paragraph a context."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for one in examples:
        answers = [{"text": answer.text, "answer_start": answer.start} for answer in one.answers]
        qa = {"id": one.id, "question": one.question, "answers": answers, "is_impossible": not answers}
        articles.setdefault(one.title, {}).setdefault(one.context, []).append(qa)
    data = []
    for title, paragraphs in articles.items():
        inner = {"paragraphs": [{"qas": qas, "context": context} for context, qas in paragraphs.items()]}
        data.append({"title": title} | inner if title_first else inner | {"title": title})
    return {"version": "v2.0", "data": data}


def flat(examples: list[Example]) -> list[dict[str, Any]]:
    """The examples in HF's form."""
    return [
        {
            "id": one.id,
            "title": one.title,
            "context": one.context,
            "question": one.question,
            "answers": {"text": [a.text for a in one.answers], "answer_start": [a.start for a in one.answers]},
        }
        for one in examples
    ]


def lines(records: list[Any]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def command(path: Path, out: Path, *options: object) -> list[object]:
    return ["qa", path, "-o", out, "--tokenizer", TOKENIZER, *SIZES, *options]


def small(path: Path | list[Path], out: Path, **options: Any) -> FeatureStore:
    settings: dict[str, Any] = {"tokenizer": TOKENIZER, "max_seq_length": 64, "overlap": 16, "workers": 1}
    return prepare(path, out, **settings | options)


def store_of(folder: Path, contexts: list[list[str]], **options: Any) -> FeatureStore:
    """A store of a shard for each list; a question on each context, a third of them answered by its third word."""
    (folder / "in").mkdir(parents=True)
    number = 0
    for k, texts in enumerate(contexts):
        with (folder / "in" / f"{k}.jsonl").open("w", encoding="utf-8") as file:
            for context in texts:
                words = context.split()
                start = len(words[0]) + len(words[1]) + 2 if number % 3 else 0
                answers = {"text": [words[2]], "answer_start": [start]} if number % 3 else None
                record = {"id": f"q{number}", "title": f"t{k}", "context": context, "question": "what?"}
                file.write(json.dumps(record | {"answers": answers}) + "\n")
                number += 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("milldam.sources.units._ALONE", 0)  # every file is a unit
        return small(folder / "in", folder / "store", **{"max_seq_length": 32, "overlap": 8} | options)


def small_store(folder: Path, **options: Any) -> FeatureStore:
    """Two shards of three examples, of one to three windows."""
    return store_of(folder, [[f"{k} the city of paris " * size for size in (4, 16, 9)] for k in (1, 2)], **options)
