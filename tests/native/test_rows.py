"""Batches of packed rows that a kernel writes: equal to numpy's, array by array."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.chat_stores import chat_store, random_chat
from tests.kit.token_stores import write_store
from tests.native import oracles

from milldam.loader import packed
from milldam.loader.stores import Store

FOLDERS = itertools.count()
LENGTHS = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=12), min_size=1, max_size=3)


def batches(store: Store, seq_len: int, dtype: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    rows = store.packed(seq_len, read="map", **options)
    return [dict(batch) for batch in rows.batches(3, seed=1, epochs=1, drop_last=False, dtype=dtype)]


@given(lengths=LENGTHS, seq_len=st.integers(1, 30), dtype=st.sampled_from([np.int32, np.int64]))
@pytest.mark.parametrize("form", ["shifted", "hf"])
@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
@pytest.mark.parametrize("kind", ["uint16", "int32", "chat"])
def test_batches_are_those_of_numpy(
    tmp_path: Path, lengths: list[list[int]], seq_len: int, dtype: Any, form: str, strategy: str, kind: str
) -> None:
    """Both forms, padding, rows that lie in two files, and conversations that are trained on in part."""
    folder, rng = tmp_path / str(next(FOLDERS)), np.random.default_rng(seq_len)
    if kind == "chat":
        store = chat_store(folder, [[random_chat(rng, length) for length in some] for some in lengths])
    else:
        store = write_store(folder, lengths, dtype=kind)
    options: dict[str, Any] = {"form": form, "strategy": strategy}
    options |= {"pad_last": True} if strategy == "wrapped" else {"too_long": "split"}
    found = batches(store, seq_len, dtype, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "kernel", lambda *_: fill_by_numpy)
        expected = batches(store, seq_len, dtype, options)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, values in one.items():
            np.testing.assert_array_equal(values, other[name], name)
            assert np.asarray(values).dtype == np.asarray(other[name]).dtype


def fill_by_numpy(tokens: Any, table: Any, form: int, *arrays: Any) -> int:
    names = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask", "cu_seqlens")
    return oracles.fill_rows(tokens, table, form, dict(zip(names, arrays, strict=True)))
