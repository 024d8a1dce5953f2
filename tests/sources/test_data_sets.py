"""A dataset by name, split and slice becomes the files and documents that HF `datasets` would take.

There is no network here: the Hub is played by a stand-in for `datasets.load_dataset_builder`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import ConfigError, InputError
from milldam.sources import data_sets
from milldam.sources.batch import TextRules
from milldam.sources.data_sets import Resolved, resolve_data_set
from milldam.sources.reading import read_unit, slice_file
from milldam.sources.splits import RowSlice, parse_split
from milldam.sources.units import list_inputs, plan_units

TEXT = TextRules(text_column="text")


def make(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "x"}\n')
    return folder


def names(folder: Path, split: str | None, path: Path | str | None = None) -> list[str]:
    """What a split takes of a folder."""
    resolved = resolve_data_set(str(path or folder), split, None)
    listed = [file.path for file in list_inputs(resolved.inputs, resolved.input_format)]
    return [os.path.relpath(path, folder) for path in listed]


def texts(resolved: Resolved) -> list[str]:
    """The documents of a dataset, read as a run does."""
    files = list_inputs(resolved.inputs, resolved.input_format)
    units = plan_units(files, 1 << 30, lambda file, size: slice_file(file, size, TEXT))
    return [
        text for unit in units for batch in read_unit(unit, TEXT, lambda _: None) for text in batch.texts.to_pylist()
    ]


# ---- how a split is asked for ----


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("train", (("train",), None)),
        ("train[:100_000]", (("train",), RowSlice(None, 100_000))),
        ("train[10%:20%]", (("train",), RowSlice(10, 20, percent=True))),
        ("train[-5%:]", (("train",), RowSlice(-5, None, percent=True))),
        (" train_sft [ 5 : ] ", (("train_sft",), RowSlice(5, None))),
        ("train + test.v2 + x-y", (("train", "test.v2", "x-y"), None)),
    ],
)
def test_a_split_is_read_as_hf_reads_it(text: str, split: tuple[tuple[str, ...], RowSlice | None]) -> None:
    """Names, sums, numbers with underscores, percents, and counting from the end."""
    assert parse_split(text) == split


@pytest.mark.parametrize(
    "text",
    [
        *("", "train[", "train+", "[:10]", "../train", "train[:10](closest)", "train[10]", "train[:1e6]"),
        *("train[1:2:3]", "train[:5.5%]", "train[10%:200]", "train[:120%]", "train[20:10]", "train[:0]"),
        *("train[-5%:-5%]", "train[:10]+test"),
    ],
)
def test_what_is_no_split_is_refused_with_an_example(text: str) -> None:
    """Before anything is looked up."""
    with pytest.raises(ConfigError, match=re.escape(f'split "{text}": ') + r".*Examples: train"):
        resolve_data_set("nowhere", text, None)


EDGES = st.none() | st.integers(-150, 150)


@given(edges=st.lists(st.integers(0, 100), min_size=1, max_size=5), total=st.integers(0, 10_000))
def test_percents_cut_a_data_set_into_parts_that_cover_it_once(edges: list[int], total: int) -> None:
    """Where one part ends, the next begins, also when it is counted from the end."""
    cuts = sorted({0, 100, *edges})
    parts = [RowSlice(a, b, percent=True).bounds(total) for a, b in itertools.pairwise(cuts)]
    assert [number for part in parts for number in range(*part)] == list(range(total))
    tail, rest = RowSlice(-7, None, percent=True).bounds(total), RowSlice(None, -7, percent=True).bounds(total)
    assert (rest[0], rest[1], tail[1]) == (0, tail[0], total)


# ---- files and folders ----


@pytest.mark.parametrize(
    ("files", "split", "expected"),
    [
        (["train-00001-of-00002.jsonl", "train-00000-of-00002.jsonl", "test-00000-of-00001.jsonl"], "train", 2),
        (["train/part.jsonl", "validation/part.jsonl"], "validation", ["validation/part.jsonl"]),
        (["validation.jsonl", "train.jsonl"], "dev", ["validation.jsonl"]),
        (["data/train_sft-00000-of-00001.jsonl", "data/train_gen-00000-of-00001.jsonl"], "train_sft", 1),
        (["b.jsonl", "a.jsonl"], "train", ["a.jsonl", "b.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test+train", ["test.jsonl", "train.jsonl"]),
    ],
)
def test_a_split_takes_the_files_that_hf_takes(
    tmp_path: Path, files: list[str], split: str, expected: list[str] | int
) -> None:
    """By the conventions of `datasets`, which tells them."""
    pytest.importorskip("datasets")
    found = names(make(tmp_path, *files), split)
    assert len(found) == expected if isinstance(expected, int) else found == expected


def test_a_single_file_is_train_whatever_it_is_called(tmp_path: Path) -> None:
    """The user named it."""
    make(tmp_path, "test.jsonl")
    for split in ("train", "all", "train[:5]"):
        assert names(tmp_path, split, tmp_path / "test.jsonl") == ["test.jsonl"]
    with pytest.raises(InputError, match=r'no split "validation"'):
        names(tmp_path, "validation", tmp_path / "test.jsonl")


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A file system in memory that plays a remote one."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


# ---- what HF save_to_disk wrote ----


def save(folder: Path, shards: list[list[str]], **state: Any) -> Path:
    """A dataset as `save_to_disk` lays it down: Arrow streams of small record batches, and state.json."""
    folder.mkdir(parents=True)
    files = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    schema = pa.schema([("text", pa.string()), ("n", pa.int64())], metadata={"huggingface": "{}"})
    for name, shard in zip(files, shards, strict=True):
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            table = pa.table({"text": shard, "n": list(range(len(shard)))}, schema=schema)
            writer.write_table(table, max_chunksize=2)
    described = {"_data_files": [{"filename": name} for name in files], "_fingerprint": "e1d8", "_split": None} | state
    (folder / "state.json").write_text(json.dumps(described))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def save_dict(folder: Path, **splits: list[list[str]]) -> Path:
    for name, shards in splits.items():
        save(folder / name, shards)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


@pytest.mark.parametrize("split", [None, "train[:3]"])
def test_a_saved_data_set_is_read_in_its_own_order(tmp_path: Path, split: str | None) -> None:
    """The files that state.json lists, without `datasets`; what a later map has cached beside them is no part of it."""
    folder = save(tmp_path / "d", [["a", "b", "c"], ["d é"], []])
    (folder / "cache-1234.arrow").write_bytes((folder / "data-00000-of-00003.arrow").read_bytes())
    resolved = resolve_data_set(str(folder), split, None)
    assert resolved.input_format == "arrow"
    assert texts(resolved) == ["a", "b", "c", "d é"]


@pytest.mark.parametrize(("split", "expected"), [(None, "ab"), ("test", "c"), ("test+train", "cab"), ("all", "abc")])
def test_a_saved_dict_gives_the_split_asked_for(tmp_path: Path, split: str | None, expected: str) -> None:
    """Train when nothing is asked for."""
    folder = save_dict(tmp_path / "d", train=[["a"], ["b"]], test=[["c"]])
    assert texts(resolve_data_set(str(folder), split, None)) == list(expected)


def test_a_saved_data_set_at_an_address_is_read_there(tmp_path: Path, bucket: Any) -> None:
    """As load_from_disk does."""
    bucket.put(str(save_dict(tmp_path / "d", train=[["a"]], test=[["b"]])), "/bucket/d", recursive=True)
    assert texts(resolve_data_set("memory://bucket/d", "test", None)) == ["b"]


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "..", "a\\b"])
def test_files_outside_of_a_saved_data_set_are_refused(tmp_path: Path, name: str) -> None:
    """A dataset from elsewhere can't lead out of its folder."""
    folder = save(tmp_path / "d", [["a"]], _data_files=[{"filename": name}])
    with pytest.raises(InputError, match="which is not a file in it"):
        resolve_data_set(str(folder), None, None)


# ---- the Hub ----


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for `datasets`: what it has by name, and what it was asked for."""
    there: dict[str, Any] = {}

    def load_dataset_builder(path: str, name: str | None = None) -> Any:
        there["asked"] = (path, name)
        if path not in there:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
        return SimpleNamespace(config=SimpleNamespace(data_files=there[path]))

    module = ModuleType("datasets")
    module.load_dataset_builder = load_dataset_builder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(data_sets, "why_no_hub", lambda *asked, **of: None)
    return there


def test_a_name_on_the_hub_gives_addresses_that_are_streamed(hub: dict[str, Any], bucket: Any) -> None:
    """The files of the split, read where they lie; the subset is handed on."""
    for name in ("train-0.jsonl", "train-1.jsonl", "validation.jsonl"):
        bucket.pipe(f"/bucket/{name}", b'{"text": "%s"}\n' % name.encode())
    addresses = [f"memory://bucket/train-{n}.jsonl" for n in (0, 1)]
    hub["user/corpus-v1.1"] = {"train": addresses, "validation": ["memory://bucket/validation.jsonl"]}
    resolved = resolve_data_set("user/corpus-v1.1", "train[:1]", "en")
    assert resolved == Resolved(tuple(addresses), None, RowSlice(None, 1))
    assert texts(resolved) == ["train-0.jsonl", "train-1.jsonl"]
    assert hub["asked"] == ("user/corpus-v1.1", "en")
    assert resolve_data_set("user/corpus-v1.1", None, None).inputs == tuple(addresses)
    assert texts(resolve_data_set("user/corpus-v1.1", "val", None)) == ["validation.jsonl"]
    with pytest.raises(InputError, match=r'no split "test" in it; there are: "train", "validation"'):
        resolve_data_set("user/corpus-v1.1", "test", None)


@pytest.mark.parametrize("path", ["corpus.jsonl", "./corpus", "a/b/c", "user/corpus.txt", "~/corpus", "../corpus"])
def test_a_path_that_does_not_exist_is_never_looked_up_on_the_hub(
    hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It gives the error that it always gave."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=r": no such file or folder\.$"):
        list(list_inputs(resolve_data_set(path, None, None).inputs))
    assert resolve_data_set(path, "train", None).inputs == (path,)
    assert not hub
