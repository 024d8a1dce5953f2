"""`milldam.map` where users expect what HF's does: columns that go, tables that replace, features that survive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import milldam

datasets = pytest.importorskip("datasets")
TEXTS = {"text": ["a", "bb", "ccc"], "id": [1, 2, 3]}


def in_place(batch: dict[str, Any]) -> dict[str, Any]:
    batch["n"] = [1] * len(batch["text"]) if isinstance(batch["text"], list) else 1
    return batch


def joined(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"n": [1] * len(batch["text"]) if isinstance(batch["text"], list) else 1}


def again(batch: dict[str, Any]) -> dict[str, Any]:
    return {"text": batch["text"], "n": [1] * len(batch["text"]) if isinstance(batch["text"], list) else 1}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("function", [in_place, joined, again])
def test_columns_that_are_removed_go_as_in_hf(function: Callable[..., Any], batched: bool, tmp_path: Path) -> None:
    """Also where the function returns the batch that it was given; not where it returns the column in a dict of its
    own."""
    source = datasets.Dataset.from_dict(TEXTS)
    expected = source.map(function, batched=batched, remove_columns=["text"])
    table = milldam.map(source, function, tmp_path / "table", batched=batched, remove_columns=["text"], workers=1)
    assert set(table.columns) == set(expected.column_names)
    assert ("text" in table.columns) == (function is again)


def test_a_table_takes_the_place_of_all_columns(tmp_path: Path) -> None:
    """Of any number of rows."""
    source = datasets.Dataset.from_dict(TEXTS)
    table = milldam.map(source, lambda batch: pa.table({"n": [7, 8]}), tmp_path / "batch", workers=1)
    assert list(table) == [{"n": 7}, {"n": 8}]


@pytest.mark.parametrize("streamed", [False, True])
def test_features_of_untouched_columns_survive(tmp_path: Path, streamed: bool) -> None:
    """Through the table, a table of that table, and back to HF."""
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["bad", "good"]),
        pair=datasets.Translation(["en", "de"]),
    )
    rows = [{"text": "a", "label": 1, "pair": {"de": "b", "en": "a"}}]
    source = datasets.Dataset.from_list(rows * 3, features=features)
    given = source.to_iterable_dataset() if streamed else source
    table = milldam.map(given, lambda batch: {"n": [1] * 3}, tmp_path / "one", workers=1)
    again = milldam.map(table, lambda batch: {"text": batch["n"]}, tmp_path / "two", workers=1).to_hf()
    assert table.to_hf().features == {**features, "n": datasets.Value("int64")}
    assert again.features == {**features, "text": datasets.Value("int64"), "n": datasets.Value("int64")}


def test_columns_beside_those_of_a_format_stay(tmp_path: Path) -> None:
    """`set_format(columns=)` says what is shown, not what there is."""
    source = datasets.Dataset.from_dict(TEXTS)
    source.set_format("numpy", columns=["id"])
    table = milldam.map(source, lambda batch: {"n": [len(one) for one in batch["text"]]}, tmp_path / "table", workers=1)
    assert table[:] == TEXTS | {"n": [1, 2, 3]}
