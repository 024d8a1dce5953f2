"""A store of preference pairs never trains on its rejected side unasked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.kit.chat_jobs import write_template
from tests.kit.jobs import TOKENIZER

import milldam
from milldam.errors import ConfigError

COUNT = 1000


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> milldam.Store:
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    times = rng.integers(1, 20, (COUNT, 2)).tolist()
    rows = [
        {"prompt": f"Ask {n}", "chosen": f"good {n} " * more, "rejected": f"bad {n} " * less}
        for n, (more, less) in enumerate(times)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {"template": str(write_template(folder))}
    # Several units and shards.
    small: dict[str, Any] = {"shard_size": "100KB"}
    return milldam.tokenize(folder / "pairs.jsonl", folder / "pairs.milldam", tokenizer=TOKENIZER, chat=chat, **small)


def _feed(store: milldam.Store) -> Any:
    return milldam.open(str(store.place.folder), units=True)


VIEWS: dict[str, Callable[[milldam.Store], Any]] = {
    "packed": lambda store: store.packed(256),
    "wrapped": lambda store: store.packed(256, strategy="wrapped"),
    "conversations": lambda store: store.conversations(),
    "windows": lambda store: store.windows(64),
    "streams": lambda store: store.streams(2, 64),
    "part": lambda store: store.split(a=0.5, b=...)["a"].packed(256),
    "mix": lambda store: milldam.mix({store: 1}).packed(256),
    "mixed windows": lambda store: milldam.mix({store: 1}).windows(64),
    "feed packed": lambda store: _feed(store).packed(256),
    "feed conversations": lambda store: _feed(store).conversations(),
    "feed windows": lambda store: _feed(store).windows(64),
    "feed streams": lambda store: _feed(store).streams(2, 64),
}


@pytest.mark.parametrize("view", VIEWS)
def test_pairs_are_refused_where_no_side_is_named(pairs: milldam.Store, view: str) -> None:
    """Every way to train, with what to do instead."""
    with pytest.raises(ConfigError, match=r"pairs\(\).*side='chosen'"):
        VIEWS[view](pairs)


def _documents(batches: Any) -> list[int]:
    found = np.concatenate([np.unique(batch["document_ids"]) for batch in batches])
    return sorted(found[found >= 0].tolist())


@pytest.mark.parametrize(("side", "first"), [("chosen", 0), ("rejected", 1)])
def test_a_side_has_its_documents_alone(pairs: milldam.Store, side: Any, first: int) -> None:
    """Each once, packed and one by one, with the masks of the store, of parts too."""
    mine = list(range(first, 2 * COUNT, 2))
    packed = list(pairs.packed(256, side=side).batches(4, seed=1))
    assert _documents(packed) == mine
    singles = list(pairs.conversations(side=side, length_groups=8).batches(4, seed=1))
    assert _documents(singles) == mine
    for batch in singles:
        for row, number in enumerate(batch["document_ids"].tolist()):
            length = int(batch["attention_mask"][row].sum())
            assert batch["input_ids"][row, :length].tolist() == pairs[number].tolist()
            trained = np.zeros(length, bool)
            for begin, end in pairs.spans(number).tolist():
                trained[begin:end] = True
            assert ((batch["labels"][row, :length] != -100) == trained).all()
    parts = pairs.split(a=0.5, b=...).values()
    assert sorted(n for part in parts for n in _documents(part.packed(256, side=side).batches(1))) == mine
    mixed = milldam.mix({pairs: 1}).packed(256, side=side)
    assert _documents(mixed.batches(1)) == mine
