"""What loaders deliver is frozen: hashes of the first 200 batches of each mode, by seed and rank, and behind a resume.

`golden_batches.json` has a hash for each. All are invariant but those of mixtures, whose order may change with a reason
in CHANGELOG.md. To write the file anew: MILLDAM_WRITE_GOLDEN=1 pytest -n 0 tests/guards/test_golden_batches.py
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.kit.chat_jobs import make_conversations, write_messages, write_template
from tests.kit.jobs import TOKENIZER, make_texts, write_lines

import milldam

GOLDEN = Path(__file__).with_name("golden_batches.json")
BATCHES = 200


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A store of text, one of which loaders follow the units, and one of conversations."""
    folder = tmp_path_factory.mktemp("stores")
    data = write_lines(folder / "a.jsonl", list(make_texts(900_000, seed=3)))
    options: dict[str, Any] = {"tokenizer": TOKENIZER, "shard_size": "200KB", "workers": 1}
    text = milldam.tokenize(data, folder / "text", **options)
    other = milldam.tokenize(
        write_lines(folder / "b.jsonl", list(make_texts(300_000, seed=4))), folder / "b", **options
    )
    said = write_messages(folder / "c.jsonl", make_conversations(600, seed=5))
    chat = milldam.tokenize(said, folder / "chat", chat={"template": str(write_template(folder))}, **options)
    return {"text": text, "units": milldam.open(text.path, units=True), "other": other, "chat": chat}


def _mixed(stores: dict[str, Any]) -> Any:
    return milldam.mix({stores["text"]: 0.7, stores["other"]: 0.3}, stop="all_exhausted").windows(64)


MODES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "windows": lambda stores: stores["text"].windows(64),
    "windows, stride, tail, hf": lambda stores: stores["text"].windows(64, stride=40, tail=True, form="hf"),
    "packed, wrapped": lambda stores: stores["text"].packed(128),
    "packed, best fit": lambda stores: stores["text"].packed(128, strategy="best_fit"),
    "units": lambda stores: stores["units"].windows(64),
    "units, packed": lambda stores: stores["units"].packed(128),
    "part": lambda stores: stores["text"].split(train=0.6, val=...)["val"].windows(64),
    "mixture": _mixed,
    "conversations": lambda stores: stores["chat"].conversations(length_groups=32),
    "conversations, packed": lambda stores: stores["chat"].packed(512),
}


def digest(batches: Iterator[Any]) -> str:
    """Of up to 200 batches: names, shapes and values."""
    found = xxhash.xxh3_64()
    for batch in itertools.islice(batches, BATCHES):
        named = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for name, values in named:
            array = np.ascontiguousarray(values)
            found.update(f"{name} {array.shape} {array.dtype}".encode())
            found.update(array.tobytes())
    return found.hexdigest()


def digests(samples: Any) -> dict[str, str]:
    """By seed, rank and number of ranks; then resumed in the middle, with as many ranks and with others."""
    found = {}
    for seed, ranks in itertools.product((0, 7), (1, 3, 8)):
        rank = min(ranks - 1, 2)
        batches = samples.batches(4, seed=seed, rank=rank, world_size=ranks, epochs=2)
        found[f"seed {seed}, rank {rank} of {ranks}"] = digest(iter(batches))
    for ranks in (3, 8):
        before = samples.batches(4, seed=7, rank=1, world_size=3, epochs=2)
        for _ in itertools.islice(before, 5):
            pass
        resumed = samples.batches(4, seed=7, rank=1, world_size=ranks, epochs=2)
        resumed.load_state_dict(before.state_dict())
        found[f"resumed on rank 1 of {ranks}"] = digest(iter(resumed))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_loader_delivers_what_it_always_delivered(mode: str, stores: dict[str, Any]) -> None:
    """The order of samples is part of a run's identity: states of it must stay true."""
    compare(mode, digests(MODES[mode](stores)))


def test_streams_deliver_what_they_always_delivered(stores: dict[str, Any]) -> None:
    """Rows that continue from batch to batch."""
    compare("streams", {"4 x 32": digest(iter(stores["text"].streams(4, 32)))})


def compare(name: str, made: dict[str, str]) -> None:
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {name: made}, indent=1, sort_keys=True) + "\n")
    else:
        assert made == golden[name]
