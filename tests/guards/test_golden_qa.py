"""Windows of question answering, their batches, answers and scores are frozen: hashes of all arrays, by setting.

`golden_qa.json` has a hash for each; all are invariant, whatever the files on disk look like. To write it anew:
MILLDAM_WRITE_GOLDEN=1 pytest -n 0 tests/guards/test_golden_qa.py
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.kit.qa_recipe import PIECES, WORDS, tokenizer_json

from milldam import qa

GOLDEN = Path(__file__).with_name("golden_qa.json")
FIELDS = (
    *("input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "cls_index"),
    *("offset_mapping", "segment_index", "total_segments", "has_answer", "context_begin", "context_tokens", "example"),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"kind": "bert", "max_seq_length": 64, "overlap": 16},
    "bert, hop, memory tokens": {"kind": "bert", "max_seq_length": 72, "hop": 20, "memory_tokens": 4},
    "bert, context first, left": {
        "kind": "bert",
        "max_seq_length": 64,
        "overlap": 9,
        "first": "context",
        "padding_side": "left",
    },
    "xlnet": {"kind": "xlnet", "max_seq_length": 64, "overlap": 16},
    "xlnet, memory tokens, three segments": {
        "kind": "xlnet",
        "max_seq_length": 80,
        "overlap": 8,
        "memory_tokens": 3,
        "max_segments": 3,
    },
    "roberta": {"kind": "roberta", "max_seq_length": 128, "overlap": 32},
    "llama, examples": {"kind": "llama", "max_seq_length": 96, "overlap": 24, "max_examples": 50},
}


def _text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS + PIECES, k=rng.randrange(3, most))).strip() or "a"


def write_squad(path: Path) -> None:
    """Articles of paragraphs with several questions: answered, unanswerable, misplaced, with hard characters."""
    rng, articles, number = random.Random(28), [], 0
    for article in range(6):
        paragraphs = []
        for _ in range(rng.randrange(1, 12)):
            context, questions = _text(rng, 260), []
            for _ in range(rng.randrange(1, 4)):
                start = rng.randrange(len(context))
                found = {"text": context[start : start + rng.randrange(1, 20)], "answer_start": start + number % 7 // 6}
                answers = [] if number % 4 == 0 else [found]
                questions.append({"id": f"q{number}", "question": _text(rng, 8), "answers": answers})
                number += 1
            paragraphs.append({"context": context, "qas": questions})
        articles.append({"title": f"t{article}", "paragraphs": paragraphs})
    path.write_text(json.dumps({"version": "v2.0", "data": articles}, ensure_ascii=article % 2 == 0), encoding="utf-8")


def store_of(folder: Path, kind: str, **options: Any) -> Any:
    write_squad(folder / "squad.json")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    options = {"tokenizer": folder / "tokenizer", "workers": 1} | options
    return qa.prepare(folder / "squad.json", folder / "store", **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return store_of(tmp_path_factory.mktemp("golden"), **SETTINGS["xlnet"])


def digest(items: Iterable[Any]) -> str:
    """Of arrays by name, whatever integers they are stored as; of texts; of lists of these."""
    found = xxhash.xxh3_64()
    for item in items:
        for one in item if isinstance(item, list) else [item]:
            for name, value in sorted(one.items()):
                array = np.asarray(value) if isinstance(value, np.ndarray) else None
                found.update(f"{name} {value if array is None else array.shape}".encode("utf-8", "backslashreplace"))
                found.update(b"" if array is None else np.ascontiguousarray(array, np.int64).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("name", SETTINGS)
def test_windows_are_what_they_always_were(name: str, tmp_path: Path) -> None:
    """Every field of every window, and what became of every example."""
    store = store_of(tmp_path, **SETTINGS[name])
    examples = [store.example(number) for number in range(store.examples)]
    rows = store.rows(np.arange(len(store)), FIELDS)
    made = {"windows": f"{len(store)} {digest([rows])}", "examples": f"{len(examples)} {digest(examples)}"}
    memory = store.memory_positions(np.arange(len(store)))
    compare(name, made | {"memory tokens": digest([dict(zip("rw", memory, strict=True))])})


def samples_of(store: Any) -> dict[str, Any]:
    chosen = {name: qa.Selection(strategy=name, max_segments=2, seed=3) for name in STRATEGIES}
    return {
        "windows": qa.WindowSamples(store, columns=FIELDS),
        "documents": qa.DocumentSamples(store),
        **{f"documents, {name}": qa.DocumentSamples(store, selection=one) for name, one in chosen.items()},
    }


STRATEGIES: Any = ("first_n", "answer_centered", "random_continuous")


def test_batches_are_what_they_always_were(store: Any) -> None:
    """By seed, rank and number of ranks, and behind a resume."""
    made = {}
    for name, samples in samples_of(store).items():
        for seed, ranks in itertools.product((0, 7), (1, 3)):
            batches = samples.batches(4, seed=seed, rank=ranks - 1, world_size=ranks, epochs=2)
            made[f"{name}, seed {seed}, last of {ranks}"] = digest(itertools.islice(batches, 60))
        before = samples.batches(4, seed=7, epochs=2)
        for _ in itertools.islice(before, 3):
            pass
        resumed = samples.batches(4, seed=7, epochs=2)
        resumed.load_state_dict(before.state_dict())
        made[f"{name}, resumed"] = digest(itertools.islice(resumed, 60))
    compare("batches", made)


def test_lanes_are_what_they_always_were(store: Any) -> None:
    """Every step, by seed and rank, with segments chosen, and behind a resume."""
    chosen = qa.Selection(strategy="random_continuous", max_segments=2)
    made = {
        f"seed {seed}, {rank} of {ranks}, {selection is not None}": digest(
            qa.lanes(
                qa.DocumentSamples(store, selection=selection), 4, seed=seed, rank=rank, world_size=ranks, epochs=2
            )
        )
        for seed, (rank, ranks), selection in itertools.product((0, 7), ((0, 1), (1, 3)), (None, chosen))
    }
    resumed = qa.lanes(qa.DocumentSamples(store), 4, seed=7, epochs=2, skip=5)
    compare("lanes", made | {"resumed": digest(resumed)})


def test_answers_and_scores_are_what_they_always_were(store: Any, tmp_path: Path) -> None:
    """The files that are written, and every figure, from logits drawn by a seed."""
    start, end = np.random.default_rng(5).normal(size=(2, len(store), 64)).round(2)
    right = store.rows(np.arange(len(store)), ("start_positions", "end_positions"))
    for logits, places in zip((start, end), right.values(), strict=True):
        logits[np.arange(len(store)), places] += np.arange(len(store)) % 4
    made = {}
    for threshold in (0.0, None, -2.0):
        predictions = qa.answers(store, start, end, n_best=5, max_answer_length=9, null_threshold=threshold)
        files = [tmp_path / name for name in ("p.json", "n.json", "o.json")]
        predictions.write_predictions(files[0], n_best=files[1], null_odds=files[2])
        made[f"files, {threshold}"] = xxhash.xxh3_64_hexdigest(b"".join(path.read_bytes() for path in files))
        for references in (store, store.path.parent / "squad.json"):
            scores = qa.evaluate(references, files[0], files[2], threshold=0.5).as_dict()
            made[f"scores, {threshold}, {type(references).__name__}"] = digest([scores])
    made["stretches"] = digest([{"stretches": qa.stretches(store, np.arange(len(store)))}])
    compare("answers", made)


def compare(name: str, made: dict[str, str]) -> None:
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {name: made}, indent=1, sort_keys=True) + "\n")
    else:
        assert made == golden[name]
