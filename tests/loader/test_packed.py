"""Packed rows: every token in one row, and beside it all that keeps documents apart, as a plain loop would say it."""

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
from tests.kit.token_stores import flat_tokens, write_store

from milldam.loader.stores import Store
from milldam.loader.stream import TokenStream
from milldam.loader.views import Trainable

PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")

# Lengths of the documents of each shard; some shards have none.
shard_lengths = st.lists(st.lists(st.integers(1, 25), max_size=12), min_size=1, max_size=4).filter(
    lambda shards: any(map(len, shards))
)
strategies = st.sampled_from(["wrapped", "best_fit"])
forms = st.sampled_from(["shifted", "hf"])
ways = st.sampled_from(["map", "pread"])


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "milldam" / "rows"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """Folders that no example had before."""
    return (tmp_path / f"store-{number}" for number in itertools.count())


class Plain:
    """The documents of a stretch of a store, as lists: what rows are checked against."""

    def __init__(self, store: Store, first: int, stop: int) -> None:
        self.tokens = flat_tokens(store).tolist()
        self.first, self.stop = first, stop
        lengths = [length for lengths in store.document_lengths() for length in lengths.tolist()]
        self.document = [number for number, length in enumerate(lengths) for _ in range(length)]

    def target(self, position: int) -> int | None:
        """The next token, when it is of the same document and of this stretch."""
        after = position + 1
        if after >= self.stop or self.document[after] != self.document[position]:
            return None
        return self.tokens[after]

    def row(self, pieces: list[list[int]], seq_len: int, form: str) -> dict[str, list[Any]]:
        """A row of pieces, each a list of positions."""
        row: dict[str, list[Any]] = {name: [] for name in PER_TOKEN}
        for piece in pieces:
            for place, position in enumerate(piece):
                token = self.tokens[position]
                label = self.target(position) if form == "shifted" else token if place else None
                values = (token, -100 if label is None else label, place, self.document[position], label is not None)
                for name, value in zip(PER_TOKEN, values, strict=True):
                    row[name].append(value)
        for place in range(seq_len - len(row["labels"])):
            for name, value in zip(PER_TOKEN, (0, -100, place, -1, False), strict=True):
                row[name].append(value)
        return row

    def wrapped(self, number: int, seq_len: int) -> list[list[int]]:
        begin = self.first + number * seq_len
        positions = range(begin, min(begin + seq_len, self.stop))
        return [list(piece) for _, piece in itertools.groupby(positions, key=lambda one: self.document[one])]


def seen_positions(plain: Plain, batch: dict[str, Any], row: int) -> list[list[int]]:
    """The pieces of a best-fit row, as what it says of its documents and tokens tells it."""
    pieces: list[list[int]] = []
    for token, place, document in zip(
        *(batch[name][row].tolist() for name in ("input_ids", "position_ids", "document_ids")), strict=True
    ):
        if document < 0:
            continue
        if place == 0:
            mine = [p for p in range(plain.first, plain.stop) if plain.document[p] == document]
            start = next(p for p in mine if plain.tokens[p] == token)
            pieces.append([])
        pieces[-1].append(start + place)
    return pieces


def check_cu_seqlens(batch: dict[str, Any]) -> None:
    """They begin where positions begin anew, and end with the batch."""
    flat = batch["position_ids"].reshape(-1)
    begins = np.flatnonzero(flat == 0)
    assert batch["cu_seqlens"].dtype == np.int32
    np.testing.assert_array_equal(batch["cu_seqlens"], [*begins, len(flat)])
    assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()


# ---- what a row says ----


class _Stretch(Trainable):
    """Any stretch of a store."""

    def __init__(self, store: Store, first: int, stop: int) -> None:
        self._made_from = (store, first, stop)

    def stream(self) -> TokenStream:
        store, first, stop = self._made_from
        return store.stream().part(first, stop)


@given(data=st.data(), shards=shard_lengths, seq_len=st.integers(1, 30), strategy=strategies, form=forms, way=ways)
@settings(max_examples=100, deadline=None)
def test_rows_are_what_a_plain_loop_makes(
    fresh: Iterator[Path], data: st.DataObject, shards: list[list[int]], seq_len: int, strategy: Any, form: Any,
    way: Any,
) -> None:  # fmt: skip
    """Tokens, labels, positions, documents and mask of both strategies and forms; each token is in exactly one row."""
    store = write_store(next(fresh), shards)
    first = data.draw(st.integers(0, store.tokens - 1))
    stop = data.draw(st.integers(first + 1, store.tokens))
    part = _Stretch(store, first, stop)
    pad_last = strategy == "wrapped"
    rows = part.packed(
        seq_len, strategy=strategy, form=form, pad_last=pad_last, buffer=data.draw(st.integers(1, 9)), read=way
    )
    plain = Plain(store, first, stop)
    numbers = np.array(data.draw(st.permutations(range(len(rows)))))
    batch = rows.read(numbers)
    seen: list[int] = []
    for place, number in enumerate(numbers.tolist()):
        pieces = plain.wrapped(number, seq_len) if pad_last else seen_positions(plain, batch, place)
        expected = plain.row(pieces, seq_len, form)
        for name in PER_TOKEN:
            assert batch[name][place].tolist() == expected[name], name
        seen += itertools.chain(*pieces)
    assert sorted(seen) == list(range(first, stop))
    check_cu_seqlens(batch)


# ---- rules and errors ----


# ---- the file of rows ----


def test_rows_are_made_once_and_kept_in_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second time they are mapped; other settings have files of their own; the log says what is done."""
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])
    with caplog.at_level(logging.INFO, "milldam"):
        first = store.packed(6, strategy="best_fit").read(np.arange(3))
    assert "making the best-fit rows of 6 tokens" in caplog.text
    (path,) = (store.path / "rows").glob("*.rows")
    made = path.stat()
    again = Store(store.path).packed(6, strategy="best_fit").read(np.arange(3))
    np.testing.assert_array_equal(first["input_ids"], again["input_ids"])
    assert path.stat() == made
    store.packed(7, strategy="best_fit")
    store.packed(6, strategy="best_fit", buffer=2)
    store.split(train=0.5, val=...)["val"].packed(6, strategy="best_fit")
    assert len(list((store.path / "rows").glob("*.rows"))) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-4],
        lambda data: data + b"\0\0\0\0",
        lambda data: data[:10],
        lambda data: b"",
        lambda data: b"X" + data[1:],
        lambda data: data[:8] + b"\2" + data[9:],
        lambda data: data[:-8] + b"\1" + data[-7:],
        lambda data: data[:18] + bytes(8) + data[26:],
    ],
)
def test_a_damaged_file_of_rows_is_made_anew(tmp_path: Path, damage: Any) -> None:
    """Cut short, longer, of another version, or with a head or an end that makes no sense."""
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])
    expected = store.packed(6, strategy="best_fit").read(np.arange(3))["input_ids"].copy()
    (path,) = (store.path / "rows").glob("*.rows")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    found = store.packed(6, strategy="best_fit").read(np.arange(3))["input_ids"]
    np.testing.assert_array_equal(found, expected)
    assert path.read_bytes() == whole


# ---- batches, states, pickles ----
