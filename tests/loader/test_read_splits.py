"""Splits made when reading: disjoint parts by shares, tokens and the rest, exact to the token."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.kit.token_stores import flat_tokens, write_store

import milldam
from milldam.errors import ConfigError
from milldam.loader.stores import Store
from milldam.loader.stream import TokenFile, TokenStream
from milldam.loader.views import Part, Trainable


class Tokens(Trainable):
    """So many tokens, no files: enough to be cut into parts."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def stream(self) -> TokenStream:
        return TokenStream("data", (TokenFile(Path("x"), self._tokens),), np.dtype("uint16"), 0, self._tokens, "print")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """1,000 tokens in three shards."""
    return write_store(tmp_path_factory.mktemp("splits") / "s.milldam", [[100, 233], [333], [334]])


def edges(parts: dict[str, Part]) -> list[tuple[int, int]]:
    """First and behind-the-last token of each part."""
    return [(part.stream().first, part.stream().stop) for part in parts.values()]


def named(sizes: list[Any]) -> dict[str, Any]:
    return {f"part_{number}": size for number, size in enumerate(sizes)}


def is_row_of_parts(found: list[tuple[int, int]]) -> bool:
    """Each begins where the one before ended, none is empty."""
    joined = all(one[1] == other[0] for one, other in itertools.pairwise(found))
    return joined and found[0][0] == 0 and all(first < stop for first, stop in found)


sizes_of_data = st.integers(100, 10**12)


@given(sizes_of_data, st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_shares_that_add_up_to_one_cover_everything(total: int, weights: list[int]) -> None:
    """Whatever floats make of them: nothing is lost, nothing twice, and no part is off by more than a token."""
    shares = [weight / sum(weights) for weight in weights]
    assume(total >= 2 * sum(weights))
    found = edges(Tokens(total).split(**named(shares)))
    assert is_row_of_parts(found)
    assert found[-1][1] == total
    for (first, stop), share in zip(found, shares, strict=True):
        assert abs(stop - first - share * total) <= 1 + total * 1e-15


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=8), st.integers(0, 8), st.integers(1, 10**9))
def test_tokens_are_exact_and_the_rest_is_the_rest(sizes: list[int], at: int, rest: int) -> None:
    """Numbers of tokens are kept to the token, wherever the part that gets the rest stands."""
    at = min(at, len(sizes))
    total = sum(sizes) + rest
    parts = Tokens(total).split(**named([*sizes[:at], ..., *sizes[at:]]))
    found = edges(parts)
    assert is_row_of_parts(found)
    assert found[-1][1] == total
    assert [part.tokens for part in parts.values()] == [*sizes[:at], rest, *sizes[at:]]


def test_a_share_is_taken_as_it_is_written() -> None:
    """0.29 of 100 tokens is 29, though the float nearest to 0.29 times 100 is less."""
    assert Tokens(100).split(train=0.29, rest=...)["train"].tokens == 29
    parts = Tokens(1000).split(train=0.9, val=50, test=...)
    assert [part.tokens for part in parts.values()] == [900, 50, 50]
    parts = Tokens(1000).split(train=np.int64(900), val=np.float32(0.1))  # type: ignore[arg-type]
    assert [part.tokens for part in parts.values()] == [900, 100]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, r"Say how much each part gets, such as split\(train=0\.9, val=\.\.\.\)"),
        ({"a": ..., "b": ...}, "one of them can get the rest"),
        ({"a": 0.9, "b": 0.2}, "1,100 tokens are asked for, and there are 1,000"),
        ({"a": 0.0001, "b": ...}, "a would get no token of 1,000"),
        ({"a": 0}, "a=0; use a share between 0 and 1, a number of tokens, or"),
        ({"a": 1.5}, "a=1.5; use a share"),
        ({"a": True}, "a=True; use a share"),
        ({"a": float("nan")}, "a=nan; use a share"),
    ],
)
def test_parts_that_make_no_sense_are_refused(store: Store, parts: dict[str, Any], message: str) -> None:
    """What is wrong with which part, and how many tokens there are."""
    with pytest.raises(ConfigError, match=message):
        store.split(**parts)


@given(st.integers(10, 980), st.integers(1, 9), st.integers(1, 9))
def test_windows_never_cross_the_edge_of_a_part(store: Store, cut: int, seq_len: int, stride: int) -> None:
    """No token of one part is in a window of the other, though both lie in the same files."""
    flat = flat_tokens(store)
    parts = store.split(train=cut, val=...)
    for part, tokens in zip(parts.values(), (flat[:cut], flat[cut:]), strict=True):
        windows = part.windows(seq_len, stride=stride, tail=True)
        x, y = windows.read(np.arange(len(windows)))
        places = [min(number * stride, len(tokens) - seq_len - 1) for number in range(len(windows))]
        assert x.tolist() == [tokens[place : place + seq_len].tolist() for place in places]
        assert int(y[-1, -1]) == tokens[-1]


def test_parts_of_a_named_split(tmp_path: Path) -> None:
    """A split made with the store can be cut further; without a name it is not clear what is meant."""
    store = write_store(tmp_path / "s.milldam", [[60], [40]], splits=["train", "val"])
    with pytest.raises(ConfigError, match="has the splits train, val; say which one"):
        store.split(a=0.5, b=...)
    parts = store.split("val").split(a=0.5, b=...)
    assert [part.tokens for part in parts.values()] == [20, 20]
    assert parts["b"].windows(19)[0][0].tolist() == flat_tokens(store)[80:99].tolist()
    with pytest.raises(ConfigError, match='has no splits, and "train" is asked for'):
        parts["a"].windows(5, split="train")


def test_a_store_opened_for_one_split_gives_no_other(tmp_path: Path) -> None:
    """Whoever holds the validation data can't train on it by mistake; its name is shown."""
    write_store(tmp_path / "s", [[40], [30]], splits=["train", "val"])
    val = milldam.open(tmp_path / "s", split="val")
    assert "split val" in repr(val)
    for ask in (lambda: val.windows(4, split="train"), lambda: val.split("train")):
        with pytest.raises(ConfigError, match='was opened for its split "val", and "train" is asked for'):
            ask()
    assert len(val.windows(4, split="val")) == len(val.windows(4))
