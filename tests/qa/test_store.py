"""A table of windows opened: by number and example, mapped or by position, whole or damaged."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.kit.qa_jobs import small_store, store_of
from tests.kit.qa_recipe import COLUMNS

import milldam
from milldam.errors import ConfigError, StoreError
from milldam.loader.reading import Way
from milldam.qa.store import NUMBERS, FeatureStore
from milldam.stores.table.manifest import TableManifest


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return small_store(tmp_path)


@pytest.mark.parametrize("way", get_args(Way))
def test_windows_come_by_number_from_any_shard(store: FeatureStore, way: Any) -> None:
    """In the order asked for, with repeats; the same as row by row from the table, which any Arrow reader can read."""
    opened = FeatureStore(store.path, read=way)
    rows = milldam.Table(store.path)[:]
    assert (len(rows["id"]), opened.examples, opened.manifest.totals["shards"]) == (6, 6, 2)
    wanted = np.array([len(store) - 1, 0, 3, 3, 7])
    found = opened.rows(wanted, COLUMNS)
    for name in ("input_ids", "token_type_ids", "offsets"):
        windows = np.concatenate([np.array(one) for one in rows[name]])
        assert np.array_equal(found[name].reshape(5, -1), windows[wanted])
    numbers = np.concatenate([np.array(one) for one in rows["numbers"]])
    for at, name in enumerate(NUMBERS[:-1]):
        assert np.array_equal(found[name], numbers[wanted, at])
    firsts, counts = opened.windows_of([5, 0])
    assert counts.tolist() == [len(rows["input_ids"][5]), len(rows["input_ids"][0])]
    assert found["example"].tolist() == [5, 0, 1, 1, 2] and firsts.tolist() == [len(store) - counts[0], 0]


def test_a_window_has_the_fields_that_users_know(store: FeatureStore) -> None:
    """`store[i]` has the names of the question-answering recipes, and numbers are numbers."""
    window = store[-1]
    names = {"input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "cls_index"}
    names |= {"offset_mapping", "segment_index", "total_segments", "example_id", "has_answer"}
    names |= {"question", "context", "chosen_answer_text", "chosen_answer_char_span"}
    assert set(window) == names
    assert window["input_ids"].shape == (32,) and window["offset_mapping"].shape == (32, 2)
    assert type(window["start_positions"]) is int and type(window["has_answer"]) is bool
    assert len(list(store)) == len(store)
    pads = store.rows(np.arange(len(store)), ["attention_mask", "input_ids"])
    assert np.array_equal(pads["attention_mask"] == 0, pads["input_ids"] == store.form.pad_id)


def test_examples_come_with_their_texts(store: FeatureStore) -> None:
    """A context that several questions have is stored once."""
    example = store.example(4)
    begin, stop = example["chosen_answer_char_span"]
    assert example["context"][begin:stop] == example["chosen_answer_text"] == example["answers"]["text"][0] == "city"
    assert (example["id"], example["title"], example["status"]) == ("q4", "t1", "ok")
    assert store.example(0)["chosen_answer_char_span"] is None and store.example(0)["status"] == "none"


def test_equal_contexts_are_stored_once(tmp_path: Path) -> None:
    """A long context with a hundred questions takes its room once."""
    context = "x" * 5000 + " a b"
    sizes = [store_of(tmp_path / str(n), [[context] * n], max_segments=1).manifest.bytes for n in (1, 100)]
    assert sizes[1] < sizes[0] + 100_000


def test_numbers_and_names_outside_are_refused(store: FeatureStore) -> None:
    """A window, example or column that is not there is an error that says what there is."""
    for read in (lambda: store[99], lambda: store[-99], lambda: store.example(-7)):
        with pytest.raises(IndexError, match=r"window|example"):
            read()
    for numbers in ([-1], [99]):
        with pytest.raises(IndexError):
            store.rows(np.array(numbers), ["length"])
    with pytest.raises(TypeError):
        store.rows(np.array([0.5]), ["length"])
    with pytest.raises(ConfigError, match="input_ids"):
        store.rows(np.array([0]), ["input_idss"])


def test_a_store_pickles_as_its_path_and_opening_reads_the_manifest_alone(store: FeatureStore) -> None:
    """What goes to another process is a path, whatever was read before; files are looked at when they are needed."""
    expected = store[3]["input_ids"]
    data = pickle.dumps(store)
    assert len(data) < 300 + len(str(store.path)) and np.array_equal(pickle.loads(data)[3]["input_ids"], expected)
    next(store.path.glob("rows-*.arrow")).unlink()
    opened = FeatureStore(store.path)
    assert (len(opened), opened.examples) == (len(store), 6)
    with pytest.raises(StoreError, match="missing"):
        opened[0]


def test_a_manifest_that_lies_is_refused(store: FeatureStore, tmp_path: Path) -> None:
    """A sentence each; a table of other rows and a folder without one say what they are."""
    manifest = TableManifest.read(store.path)
    assert manifest.qa is not None
    for facts, message in (
        (manifest.qa | {"token_dtype": "object"}, "token_dtype is"),
        (manifest.qa | {"max_seq_length": 0}, "damaged"),
        (manifest.qa | {"memory": {"read": [1], "write": []}}, "damaged"),
        (manifest.qa | {"max_seq_length": 48}, "not as the manifest says"),
        (None, "a table without windows of question answering"),
    ):
        replace(manifest, qa=facts).write(store.path)
        with pytest.raises(StoreError, match=message):
            FeatureStore(store.path)[0]
    for name, message in (("missing", "no such folder"), ("", "not a table")):
        with pytest.raises(StoreError, match=message):
            FeatureStore(tmp_path / name)
