"""Windows: counted exactly, read exactly, over the borders of documents and files; too little data is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.token_stores import flat_tokens, write_store

from milldam.errors import ConfigError
from milldam.loader.reading import Way
from milldam.loader.stores import Store
from milldam.loader.windows import Form, WindowRules

WAYS: list[Way] = ["map", "pread"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """140 tokens in shards of 31, 50, 2 and 57."""
    return write_store(tmp_path_factory.mktemp("windows") / "s.milldam", [[10, 20, 1], [50], [2], [7, 50]])


def brute_force(tokens: int, rules: WindowRules) -> list[int]:
    """Where windows begin, by trying every place."""
    starts = [start for start in range(0, tokens, rules.hop) if start + rules.span <= tokens]
    if rules.tail and starts and starts[-1] + rules.span < tokens:
        starts.append(tokens - rules.span)
    return starts


def pair(sample: Any) -> tuple[list[int], list[int]]:
    """Input and target of a sample in either form."""
    x, y = (sample["input_ids"], sample["labels"]) if isinstance(sample, dict) else sample
    return x.tolist(), y.tolist()


forms = st.sampled_from(["xy", "hf"])


@given(st.integers(1, 140), st.integers(1, 60), st.none() | st.integers(1, 70), forms, st.booleans())
def test_windows_are_those_found_by_trying_every_place(
    store: Store, tokens: int, seq_len: int, stride: int | None, form: Form, tail: bool
) -> None:
    """Their number and every token of each, the last one included; too few tokens for one are an error."""
    rules = WindowRules(seq_len=seq_len, stride=stride, form=form, tail=tail)
    starts, part = brute_force(tokens, rules), store.split(part=tokens)["part"]
    if not starts:
        with pytest.raises(ConfigError, match=f"{tokens:,} tokens are too few .* which takes {rules.span:,}"):
            part.windows(seq_len, stride=stride, form=form, tail=tail)
        return
    windows = part.windows(seq_len, stride=stride, form=form, tail=tail)
    assert len(windows) == len(starts)
    flat, shift = flat_tokens(store).tolist(), int(form == "xy")
    expected = [(flat[s : s + seq_len], flat[s + shift : s + shift + seq_len]) for s in starts]
    assert [pair(windows[number]) for number in range(len(windows))] == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["xy", "hf"])
def test_a_batch_is_its_windows(store: Store, way: Way, form: Form) -> None:
    """One read of many windows, in any order, gives the windows one by one, in the dtype asked for."""
    windows = store.windows(16, stride=5, form=form, read=way)
    numbers = np.array([3, 0, len(windows) - 1, 3, 7])
    batch = windows.read(numbers, np.int32)
    arrays = list(batch.values()) if isinstance(batch, dict) else list(batch)
    assert [array.dtype for array in arrays] == [np.int32, np.int32]
    for row, number in enumerate(numbers):
        assert tuple(array[row].tolist() for array in arrays) == pair(windows[int(number)])
