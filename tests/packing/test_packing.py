"""Best-fit rows: which pieces of documents share a row, against plain Python; and the rows that a job writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import run_here
from tests.kit.preprocess_jobs import lines_job, summary_of
from tests.kit.token_stores import write_store

import milldam

Row = list[tuple[int, int]]
"""(start, length) of each piece: its place in the store's stream of tokens."""

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=80)


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """Folders that no example had before."""
    return (tmp_path / f"store-{number}" for number in itertools.count())


def best_fit(folder: Path, lengths: list[int], row: int, **options: Any) -> list[Row]:
    """The rows of documents of these lengths, read from a store whose tokens say their place."""
    shards = [lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]]
    rows = write_store(folder, shards).packed(row, strategy="best_fit", **options)
    batch = rows.read(np.arange(len(rows)))
    last = np.cumsum(lengths) - 1
    found: list[Row] = []
    for ids, documents, places in zip(
        *(batch[name].tolist() for name in ("input_ids", "document_ids", "position_ids")), strict=True
    ):
        pieces: Row = []
        for token, document, place in zip(ids, documents, places, strict=True):
            if document >= 0:
                at = token - 1 if token else int(last[document])
                if place == 0:
                    pieces.append((at, 0))
                start, length = pieces[-1]
                assert at == start + length, "a piece is a stretch of tokens"
                pieces[-1] = start, length + 1
        found.append(pieces)
    return found


@given(lengths=lengths_lists, row=st.integers(1, 30), buffer=st.integers(1, 50))
def test_only_what_is_longer_than_a_row_is_cut(
    fresh: Iterator[Path], lengths: list[int], row: int, buffer: int
) -> None:
    """Every piece is a whole document, or a full row of a longer one, or its remainder; each is in one row."""
    found = sorted(piece for one in best_fit(next(fresh), lengths, row, buffer=buffer) for piece in one)
    starts = np.cumsum([0, *lengths]).tolist()
    assert found == [
        (start + at, min(row, length - at))
        for start, length in zip(starts[:-1], lengths, strict=True)
        for at in range(0, length, row)
    ]


@given(lengths=lengths_lists, row=st.integers(1, 30))
def test_best_fit_decreasing_is_what_its_name_says(fresh: Iterator[Path], lengths: list[int], row: int) -> None:
    """With a buffer that holds everything: as full as when every piece is put where least stays free."""
    found = best_fit(next(fresh), lengths, row, buffer=10_000)
    cut = [min(row, length - at) for length in lengths for at in range(0, length, row)]
    free: list[int] = []
    for length in sorted(cut, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else row) - length)
    assert sorted(row - sum(length for _, length in one) for one in found) == sorted(free)


def test_rows_keep_store_order(tmp_path: Path) -> None:
    """Rows come by their first document, and documents in a row as they came."""
    rows = best_fit(tmp_path / "s", [3, 9, 6, 1, 7, 4], 10, buffer=100)
    assert rows == [[(0, 3), (19, 7)], [(3, 9), (18, 1)], [(12, 6), (26, 4)]]


@pytest.mark.parametrize(
    "packing",
    [{"strategy": "wrapped"}, {"strategy": "wrapped", "pad_last": True}, {"strategy": "best_fit"}],
    ids=["wrapped", "padded", "best_fit"],
)
def test_written_rows_have_the_figures_of_the_summary(tmp_path: Path, packing: dict[str, Any]) -> None:
    """Rows, padding, the tail and cut documents of each split, one of which fills no row; a whole store of its own."""
    texts = [f"text {number} " * (1 + number % 40) for number in range(90)]
    options: dict[str, Any] = {"splits": {"val_tokens": 30}, "seq_len": 64, "dedup": "off"}
    store = lines_job(tmp_path, texts, packing=packing | {"write": True}, **options)
    run_here("verify", store.path / "packed")
    figures = summary_of(store.path)["packing"]
    for split in ("train", "val"):
        lengths = [len(document) for document in milldam.open(store.path, split=split)]
        ends = np.cumsum(lengths)
        files = [np.fromfile(path, "uint16") for path in (store.path / "packed").glob(f"{split}-*.bin")]
        tokens = sum(map(len, files))
        told = figures[split]
        assert told["rows"] * 64 == tokens == told["tokens"] + told["padding"]
        assert told["tokens"] + told["tail"] == sum(lengths)
        if packing["strategy"] == "best_fit":
            assert told["tail"] == 0
            assert told["cut_documents"] == sum(length > 64 for length in lengths)
        else:
            assert (told["tail"] == 0) == ("pad_last" in packing) and told["padding"] + told["tail"] < 64
            cuts = np.arange(64, ends[-1], 64)
            assert told["cut_documents"] == len({int(ends.searchsorted(at)) for at in cuts if at not in ends})
        assert told["efficiency"] == round(told["tokens"] / tokens, 6) if tokens else 1
