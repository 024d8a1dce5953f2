"""Paths, folders, globs and addresses become input files in an order that depends on names alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.kit.source_reading import read

import milldam
from milldam.errors import InputError, StoreError
from milldam.input_files import describe_left_out
from milldam.sources.units import InputFile, list_inputs
from milldam.stores.kinds import TABLE


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def listed(given: Path | str, input_format: str | None = None) -> list[InputFile]:
    return list(list_inputs([str(given)], input_format))


def names(folder: Path, given: Path | str | None = None) -> list[str]:
    return [os.path.relpath(file.path, folder) for file in listed(given or folder)]


def test_a_folder_gives_known_files_to_the_bottom_in_name_order(tmp_path: Path) -> None:
    """Files and folders of a level are sorted together, whatever order they were made in."""
    make(tmp_path, "z.txt", "b/2.jsonl", "b/1.jsonl", "b/deep/er/x.csv", "a.txt", "c.parquet")
    assert names(tmp_path) == ["a.txt", "b/1.jsonl", "b/2.jsonl", "b/deep/er/x.csv", "c.parquet", "z.txt"]


def test_a_table_of_ours_is_listed_in_the_order_of_its_rows(tmp_path: Path) -> None:
    """Its files are named by their content. One that is not finished has no rows to speak of: it is refused."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(64)))
    table = milldam.map(source, lambda rows: None, tmp_path / "table", shard_size=140)
    shards = [shard.name for shard in table.manifest.shards]
    assert names(tmp_path / "table") == shards != sorted(shards)
    (tmp_path / "table" / TABLE.manifest).unlink()
    with pytest.raises(InputError, match="an unfinished table"):
        names(tmp_path / "table")
    (tmp_path / "table" / TABLE.manifest).write_text('{"units": [{')
    with pytest.raises(StoreError, match="damaged"):
        names(tmp_path / "table")


@pytest.mark.parametrize(
    ("name", "format", "compression"),
    [
        ("a.txt", "txt", None),
        ("A.TXT", "txt", None),
        ("a.jsonl.gz", "jsonl", "gz"),
        ("a.ndjson.zst", "jsonl", "zst"),
        ("a.csv.bz2", "csv", "bz2"),
        ("a.tsv.xz", "tsv", "xz"),
        ("a.pq", "parquet", None),
        ("a.parquet.zst", "parquet", "zst"),
        ("a.feather", "arrow", None),
        ("a.b.c.arrow", "arrow", None),
    ],
)
def test_the_ending_says_format_and_compression(
    tmp_path: Path, name: str, format: str, compression: str | None
) -> None:
    """An ending, in any case, with or without a compression behind it."""
    make(tmp_path, name)
    (file,) = listed(tmp_path / name)
    assert (file.format, file.compression, file.size) == (format, compression, 1)


# ---- addresses ----


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """fsspec's file system in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def test_a_file_at_an_address_is_listed_and_read(memory: fsspec.AbstractFileSystem) -> None:
    """The whole way from an address to documents goes through fsspec."""
    memory.pipe("/box/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    (file,) = listed("memory://box/a.jsonl")
    assert (file.path, file.format, file.size) == ("memory:///box/a.jsonl", "jsonl", 32)
    assert file.version
    assert read("memory://box/a.jsonl").texts == ["one", "two"]


def test_a_folder_at_an_address_has_the_order_of_a_local_one(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    """The same tree gives the same documents in the same order, wherever it lies."""
    for name in ("a/x.txt", "a-b/x.txt", "a.txt"):
        memory.pipe(f"/box/{name}", b"x")
        make(tmp_path, name)
    assert [file.path.removeprefix("memory:///box/") for file in listed("memory://box")] == names(tmp_path)


# ---- what is not read ----


def test_files_of_other_kinds_are_counted_by_ending(tmp_path: Path) -> None:
    """The bookkeeping of HF datasets and hidden files are not worth a word."""
    for name in ("a.jsonl", "docs/b.md", "docs/c.MD", "setup.py", "Makefile", "dataset_info.json", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    left_out = Counter[str]()
    assert [Path(file.path).name for file in list_inputs([str(tmp_path)], None, left_out)] == ["a.jsonl"]
    assert describe_left_out(left_out) == "4 files of no known format (.md 2, no ending 1, .py 1)"
