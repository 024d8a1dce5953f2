"""The golden vectors: what the widely used recipe makes of real sets, window by window.

Ids, windows and CLS are the same everywhere; positions but for the windows named here, where ours are exact.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.kit.qa_recipe import squad_examples, windower_of

from milldam.tokenizers.loading import load_tokenizer

VECTORS = [
    ("squad-v2-dev-part.json", "cs224n-dev", "bert-base-uncased", 384, 128),
    ("squad-v2-dev-part.json", "cs224n-dev", "xlnet-base-cased", 384, 128),
    ("xquad.en.json", "xquad.en", "bert-base-uncased", 128, 32),
    ("xquad.en.json", "xquad.en", "xlnet-base-cased", 128, 32),
]

MARKER = "a lone word marker before the last word is said to cover its first letter, and the recipe ends there"
LAST = (
    "the answer is the window's last token of the context, and the recipe's begin walks on through the question to CLS"
)
EXACT_HERE = {
    ("xlnet-base-cased", "bead7ffd9b33a6e9eadaecc0e", 0): ((43, 43), (43, 42), "k", MARKER),
    ("xlnet-base-cased", "572ffd75b2c2fd14005686e8", 1): ((60, 62), (60, 61), "120 m", MARKER),
    ("xlnet-base-cased", "5730b2312461fd1900a9cfad", 0): (
        (18, 32),
        (18, 31),
        "Taskforce of United Methodists on Abortion and Sexuality (",
        MARKER,
    ),
    ("xlnet-base-cased", "570d47b8b3d812140066d631", 0): ((113, 113), (127, 113), "five", LAST),
    ("xlnet-base-cased", "57378b141c456719005744a2", 0): ((107, 107), (127, 107), "global", LAST),
}
"""(tokenizer, question, window) -> our start and end, the recipe's, the answer, why the recipe's is not it."""

Row = dict[str, Any]


def rows_of(windower: Any, file: Path) -> Iterator[tuple[str, int, Row]]:
    """Windows in the form of the vectors: positions and ids without padding."""
    examples = list(squad_examples(json.loads(file.read_text(encoding="utf-8"))))
    for first in range(0, len(examples), 1024):
        batch = examples[first : first + 1024]
        features = windower(batch).features
        for row in range(len(features)):
            length = int(features.length[row])
            pads = features.input_ids.shape[1] - length if windower.template.pad_left else 0
            ids = features.input_ids[row, pads : pads + length].tolist()
            places = {"start": features.start_positions, "end": features.end_positions, "cls": features.cls_index}
            made: Row = {name: int(column[row]) - pads for name, column in places.items()}
            made |= {"n": length, "sha": hashlib.sha1(json.dumps(ids).encode()).hexdigest()[:16]}
            yield batch[int(features.example[row])].id, int(features.segment[row]), made


@pytest.mark.parametrize(("file", "data", "tokenizer", "length", "overlap"), VECTORS)
def test_windows_and_positions_are_the_golden_ones(
    shared_data: Path, file: str, data: str, tokenizer: str, length: int, overlap: int
) -> None:
    """Every window of the vectors, once, and no other."""
    loaded = load_tokenizer(str(shared_data / "tokenizers" / tokenizer))
    windower = windower_of(tokenizers.Tokenizer.from_str(loaded.json), max_seq_length=length, overlap=overlap)
    with gzip.open(shared_data / f"vectors/{data}.{tokenizer}.{length}.{overlap}.jsonl.gz", "rt") as lines:
        golden = {(row.pop("id"), row.pop("w")): row for row in map(json.loads, lines)}
    different: dict[tuple[str, str, int], tuple[tuple[int, int], tuple[int, int]]] = {}
    count = 0
    for question, window, made in rows_of(windower, shared_data / "squad" / file):
        count += 1
        wanted = golden[question, window]
        assert (made["sha"], made["n"], made["cls"]) == (wanted["sha"], wanted["n"], wanted["cls"])
        if made != wanted:
            different[tokenizer, question, window] = places_of(made), places_of(wanted)
    assert count == len(golden)
    listed = {key: (ours, theirs) for key, (ours, theirs, _, _) in EXACT_HERE.items()}
    assert different == {key: both for key, both in listed.items() if key[0] == tokenizer and key[1:] in golden}


def places_of(row: Row) -> tuple[int, int]:
    return row["start"], row["end"]


@pytest.mark.parametrize(("file", "data", "tokenizer", "length", "overlap"), VECTORS)
def test_every_span_reads_as_its_answer(
    shared_data: Path, file: str, data: str, tokenizer: str, length: int, overlap: int
) -> None:
    """Where a window has an answer, its tokens cover the answer's characters, and begin and end with one of them."""
    loaded = load_tokenizer(str(shared_data / "tokenizers" / tokenizer))
    windower = windower_of(tokenizers.Tokenizer.from_str(loaded.json), max_seq_length=length, overlap=overlap)
    examples = list(squad_examples(json.loads((shared_data / "squad" / file).read_text(encoding="utf-8"))))[::20]
    prepared = windower(examples)
    features = prepared.features
    for row in np.flatnonzero(features.has_answer).tolist():
        chosen = prepared.chosen[int(features.example[row])]
        places = features.offsets[row, int(features.start_positions[row]) : int(features.end_positions[row]) + 1]
        assert places[0, 0] <= chosen.start < places[0, 1]
        assert places[-1, 0] < chosen.stop <= places[-1, 1]
