"""Conversations in rows, one by one and in pairs: what is trained on, as a plain loop would say it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.chat_stores import PAD, Chat, chat_shards, chat_store, chats, random_chat
from tests.kit.token_stores import shard_file

from milldam.errors import ConfigError, StoreError
from milldam.loader.stores import Store

PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")
forms = st.sampled_from(["shifted", "hf"])
limits = st.none() | st.integers(1, 30)
quickly = settings(deadline=None, max_examples=60)


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """Folders that no example had before."""
    return (tmp_path / f"store-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """300 conversations of 1 to 60 tokens in three shards."""
    rng = np.random.default_rng(1)
    every = [random_chat(rng, int(length)) for length in rng.integers(1, 61, 300)]
    return chat_store(tmp_path_factory.mktemp("many") / "s", [every[:100], every[100:101], every[101:]])


def label_of(chat: Chat, at: int, form: str, first: bool) -> int:
    """The label of a token; `first`: nothing in its row comes before it that is of the same conversation."""
    if form == "shifted":
        return chat.ids[at + 1] if at + 1 < len(chat.ids) and chat.trained[at + 1] else -100
    return chat.ids[at] if chat.trained[at] and not first else -100


def check_row(every: list[Chat], row: dict[str, Any], form: str) -> list[tuple[int, int, int]]:
    """A row against the conversations that it says it has; (document, begin, stop) of each piece."""
    columns = [row[name].tolist() for name in PER_TOKEN]
    pieces: list[tuple[int, int, int]] = []
    for token, label, position, document, has_loss in zip(*columns, strict=True):
        assert has_loss == (label != -100)
        if document < 0:
            assert (token, label) == (PAD, -100)
            continue
        if position == 0:
            starts = [at for at in range(len(every[document].ids)) if every[document].ids[at] == token]
            pieces.append((document, starts[0], starts[0]))
        at = pieces[-1][2]
        assert token == every[document].ids[at]
        assert label == label_of(every[document], at, form, position == 0)
        pieces[-1] = (document, pieces[-1][1], at + 1)
    return pieces


def distinct(shards: list[list[Chat]]) -> list[list[Chat]]:
    """The same conversations, each token with an id of its own within its conversation."""
    return [[Chat([1 + at for at in range(len(chat.ids))], chat.trained) for chat in some] for some in shards]


@quickly
@given(chat_shards, st.integers(1, 30), forms, st.sampled_from(["map", "pread"]))
def test_best_fit_rows_have_each_conversation_whole_and_labels_for_what_is_trained_on(
    fresh: Iterator[Path], shards: list[list[Chat]], seq_len: int, form: Any, way: Any
) -> None:
    shards = distinct(shards)
    every = [chat for some in shards for chat in some]
    fitting = [(number, 0, len(chat.ids)) for number, chat in enumerate(every) if len(chat.ids) <= seq_len]
    store = chat_store(next(fresh), shards)
    if not fitting:
        with pytest.raises(ConfigError, match="longer than seq_len"):
            store.packed(seq_len, form=form)
        return
    rows = store.packed(seq_len, form=form, read=way)
    assert rows.too_long.documents == len(every) - len(fitting)
    batch = rows.read(np.arange(len(rows)))
    found = [piece for row in rows.__getitems__(range(len(rows))) for piece in check_row(every, row, form)]
    assert sorted(found) == fitting
    borders = np.flatnonzero(batch["position_ids"].reshape(-1) == 0)
    np.testing.assert_array_equal(batch["cu_seqlens"], [*borders, batch["labels"].size])


@quickly
@given(chat_shards, forms, st.integers(1, 8), limits)
def test_conversations_are_padded_to_the_longest_and_masked(
    fresh: Iterator[Path], shards: list[list[Chat]], form: Any, pad_to: int, most: int | None
) -> None:
    every = [(k, chat) for k, chat in enumerate(chat for some in shards for chat in some)]
    kept = [(k, chat) for k, chat in every if most is None or len(chat.ids) <= most]
    store = chat_store(next(fresh), shards)
    if not kept:
        with pytest.raises(ConfigError, match="longer than max_tokens"):
            store.conversations(max_tokens=most)
        return
    conversations = store.conversations(form=form, pad_to=pad_to, max_tokens=most)
    assert len(conversations) == len(kept)
    assert conversations.too_long.documents == len(every) - len(kept)
    batch = conversations.read(np.arange(len(kept)))
    width = -(-max(len(chat.ids) for _, chat in kept) // pad_to) * pad_to
    assert batch["input_ids"].shape == (len(kept), width)
    for row, (number, chat) in enumerate(kept):
        padding = width - len(chat.ids)
        labels = [label_of(chat, at, form, False) for at in range(len(chat.ids))]
        assert batch["document_ids"][row] == number
        assert batch["input_ids"][row].tolist() == chat.ids + [PAD] * padding
        assert batch["labels"][row].tolist() == labels + [-100] * padding
        assert batch["attention_mask"][row].tolist() == [1] * len(chat.ids) + [0] * padding


@quickly
@given(st.lists(chats, min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 1000), limits)
def test_pairs_are_what_trl_makes_of_them(
    fresh: Iterator[Path], prompts: list[Chat], answer: int, seed: int, most: int | None
) -> None:
    """The prompt both share, then what is trained on of each answer; the chosen ones first."""
    rng = np.random.default_rng(seed)

    def answered(prompt: Chat) -> Chat:
        length = 1 + int(rng.integers(0, answer + 1))
        # The first token of an answer opens the turn, so that what is trained on in the prompt ends before it.
        ids = [*prompt.ids, 1000, *rng.integers(1, 4, length).tolist()]
        return Chat(ids, [*prompt.trained, False, *[True] * length])

    every = [answered(prompt) for prompt in prompts for _ in range(2)]
    longest = [max(len(every[2 * k].ids), len(every[2 * k + 1].ids)) for k in range(len(prompts))]
    kept = [k for k in range(len(prompts)) if most is None or longest[k] <= most]
    store = chat_store(next(fresh), [every], pairs=True)
    if not kept:
        with pytest.raises(ConfigError, match="longer than max_tokens"):
            store.pairs(max_tokens=most)
        return
    pairs = store.pairs(max_tokens=most)
    assert len(pairs) == len(kept)
    batch = pairs.read(np.arange(len(kept)))
    for row, k in enumerate(kept):
        chosen, rejected, begin = every[2 * k], every[2 * k + 1], len(prompts[k].ids) + 1
        same = chosen.ids == rejected.ids
        begin = len(chosen.ids) if same else begin
        pair = pairs[row]
        assert pair["prompt_ids"].tolist() == chosen.ids[:begin]
        assert pair["chosen_ids"].tolist() == chosen.ids[begin:]
        assert pair["rejected_ids"].tolist() == rejected.ids[begin:]
        for at, chat in ((row, chosen), (row + len(kept), rejected)):
            width, length = batch["input_ids"].shape[1], len(chat.ids)
            assert batch["input_ids"][at].tolist() == chat.ids + [PAD] * (width - length)
            assert batch["attention_mask"][at].tolist() == [1] * length + [0] * (width - length)
            completion = [0] * begin + [1] * (length - begin) + [0] * (width - length)
            assert batch["completion_mask"][at].tolist() == completion


def documents_in(batch: Any) -> list[int]:
    return [number for number in np.unique(batch["document_ids"]).tolist() if number >= 0]


def test_conversations_that_are_too_long_are_counted_and_named(many: Store, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "milldam"):
        rows = many.packed(40)
    long = [len(document) for document in many if len(document) > 40]
    assert (rows.too_long.documents, rows.too_long.tokens) == (len(long), sum(long))
    assert f"{len(long):,} of 300 documents are longer than seq_len=40 and are left out" in caplog.text
    with pytest.raises(ConfigError, match="Use best_fit"):
        many.packed(40, strategy="wrapped", too_long="drop")
    cut = many.conversations(max_tokens=40, too_long="cut")
    assert len(cut) == 300 and cut.read(np.arange(300))["input_ids"].shape[1] == 40


def test_parts_keep_conversations_and_pairs_whole(many: Store, tmp_path: Path) -> None:
    parts = many.split(train=0.8, val=...)
    views = [part.conversations() for part in parts.values()]
    numbers = [view.read(np.arange(len(view)))["document_ids"] for view in views]
    np.testing.assert_array_equal(np.concatenate(numbers), np.arange(300))
    packed = [documents_in(batch) for part in parts.values() for batch in part.packed(64).batches(4)]
    assert sorted(itertools.chain(*packed)) == list(range(300))
    rng = np.random.default_rng(1)
    pairs = chat_store(tmp_path / "p", [[random_chat(rng, int(n)) for n in rng.integers(1, 9, 20)]], pairs=True)
    assert sum(len(part.pairs()) for part in pairs.split(a=0.3, b=0.33, c=...).values()) == 10


@pytest.mark.parametrize("damage", ["shorter", "unordered", "missing"])
def test_damaged_stretches_are_named(tmp_path: Path, damage: str) -> None:
    rng = np.random.default_rng(1)
    store = chat_store(tmp_path / "s", [[Chat([1, 2, 3, 4], [False, True, False, True]), random_chat(rng, 9)]])
    path = shard_file(tmp_path / "s", 0, "spans")
    data = np.fromfile(path, "<i8")
    if damage == "missing":
        path.unlink()
    else:
        wrong = data[:2] if damage == "shorter" else np.concatenate((data[:3], data[5:7], data[3:5], data[7:]))
        wrong.tofile(path)
    with pytest.raises(StoreError, match="spans"):
        store.packed(16).read(np.arange(1))
