"""Paths, folders, globs and addresses become input files in an order that depends on names alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.kit.source_reading import TEXT, read

import milldam
from milldam.errors import ConfigError, InputError, StoreError
from milldam.input_files import LeftOut, is_address
from milldam.sources.batch import TextRules
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


def test_hidden_and_unknown_files_in_a_folder_are_left_out(tmp_path: Path) -> None:
    """Dot files, files in dot folders and endings that say nothing are no input."""
    make(tmp_path, ".hidden.txt", ".git/x.txt", "notes.pdf", "README", "good.txt")
    assert names(tmp_path) == ["good.txt"]


def test_a_table_of_ours_is_listed_in_the_order_of_its_rows(tmp_path: Path) -> None:
    """Its files are named by their content. One that is not finished has no rows to speak of: it is refused."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(64)))
    table = milldam.map(source, lambda rows: None, tmp_path / "table", shards=8)
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


def test_inputs_keep_the_order_given(tmp_path: Path) -> None:
    """Only what is inside a folder is sorted, not what the user names one by one."""
    make(tmp_path, "a.txt", "b.txt")
    given = [str(tmp_path / "b.txt"), str(tmp_path / "a.txt")]
    assert [file.path for file in list_inputs(given)] == given


def test_a_glob_is_sorted_and_may_cross_folders(tmp_path: Path) -> None:
    """`**` reaches to the bottom; folders that match are no files."""
    make(tmp_path, "b/2.txt", "a/1.txt", "a/3.csv", "c.txt/inner.jsonl")
    assert names(tmp_path, tmp_path / "**/*.txt") == ["a/1.txt", "b/2.txt"]


def test_a_file_name_with_brackets_is_a_file_not_a_glob(tmp_path: Path) -> None:
    """What exists by that very name is taken as it is."""
    make(tmp_path, "part[1].txt", "part1.txt")
    assert names(tmp_path, tmp_path / "part[1].txt") == ["part[1].txt"]


@pytest.mark.parametrize("given", ["nothing-*.txt", "empty"])
def test_what_holds_no_input_is_an_error(tmp_path: Path, given: str) -> None:
    """A glob without matches and an empty folder say which endings are known."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no input files in it\. Known are \.txt"):
        listed(tmp_path / given)


def test_a_missing_file_names_the_one_that_is_near(tmp_path: Path) -> None:
    """A typing mistake is answered with the file that was meant."""
    make(tmp_path, "corpus.jsonl")
    with pytest.raises(InputError, match=r'no such file or folder\. Did you mean ".*/corpus.jsonl"\?'):
        listed(tmp_path / "corpsu.jsonl")


def test_a_missing_file_in_a_missing_folder_is_still_a_short_error(tmp_path: Path) -> None:
    """There is nothing to suggest, and nothing else goes wrong."""
    with pytest.raises(InputError, match=r"nowhere/corpus.jsonl: no such file or folder\.$"):
        listed(tmp_path / "nowhere/corpus.jsonl")


def test_an_unknown_ending_asks_for_the_format(tmp_path: Path) -> None:
    """A file named on its own is never left out in silence."""
    make(tmp_path, "corpus.dat")
    with pytest.raises(InputError, match=r"input_format='txt\|jsonl"):
        listed(tmp_path / "corpus.dat")


@pytest.mark.parametrize(("name", "compression"), [("corpus.dat", None), ("corpus.dat.gz", "gz"), ("x.txt", None)])
def test_input_format_overrules_the_ending(tmp_path: Path, name: str, compression: str | None) -> None:
    """The format is as asked; the compression is still told by the ending."""
    make(tmp_path, name)
    (file,) = listed(tmp_path / name, "jsonl")
    assert (file.format, file.compression) == ("jsonl", compression)


def test_input_format_lets_a_folder_give_files_of_any_ending(tmp_path: Path) -> None:
    """With the format stated, an unknown ending is no reason to leave a file out."""
    make(tmp_path, "a.json", "b.json")
    assert [Path(file.path).name for file in listed(tmp_path, "jsonl")] == ["a.json", "b.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    """Found before the run starts, not in the middle of it."""
    make(tmp_path, "a.txt")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(InputError, match="not readable"):
        listed(tmp_path / "a.txt")


def test_the_version_changes_with_the_file(tmp_path: Path) -> None:
    """What was made from the file before can be told from what it is now."""
    make(tmp_path, "a.txt")
    before = listed(tmp_path / "a.txt")[0].version
    os.utime(tmp_path / "a.txt", (1, 1))
    assert listed(tmp_path / "a.txt")[0].version != before


def test_a_folder_that_contains_itself_is_listed_once(tmp_path: Path) -> None:
    """A symbolic link to a parent does not repeat the files below it."""
    make(tmp_path, "data/a.txt")
    (tmp_path / "data/loop").symlink_to(tmp_path / "data", target_is_directory=True)
    assert names(tmp_path) == ["data/a.txt"]


# ---- addresses ----


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    """fsspec's file system in memory, empty before and after."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.mark.parametrize(("given", "expected"), [("s3://b/k", True), ("memory://x", True), ("/a/b", False)])
def test_addresses_are_told_from_paths(given: str, expected: bool) -> None:
    """A scheme makes an address."""
    assert is_address(given) is expected


def test_a_file_at_an_address_is_listed_and_read(memory: fsspec.AbstractFileSystem) -> None:
    """The whole way from an address to documents goes through fsspec."""
    memory.pipe("/box/a.jsonl", b'{"text": "one"}\n{"text": "two"}\n')
    (file,) = listed("memory://box/a.jsonl")
    assert (file.path, file.format, file.size) == ("memory:///box/a.jsonl", "jsonl", 32)
    assert file.version
    assert read("memory://box/a.jsonl").texts == ["one", "two"]


def test_an_address_is_cut_into_units_like_a_file(memory: fsspec.AbstractFileSystem) -> None:
    """Byte ranges are read by seeking in the remote file."""
    documents = [f"line {n}" for n in range(50)]
    memory.pipe("/box/a.txt", "\n".join(documents).encode())
    result = read("memory://box/a.txt", TextRules("line"), shard_size=60)
    assert result.texts == documents
    assert result.units > 3


def test_a_folder_and_a_glob_at_an_address(memory: fsspec.AbstractFileSystem) -> None:
    """Known files to the bottom, sorted; hidden and unknown ones left out."""
    for name in ("b.txt", "a/2.txt", "a/1.jsonl", "a/.hidden.txt", "a/x.bin"):
        memory.pipe(f"/box/{name}", b"x")
    assert [file.path for file in listed("memory://box")] == [
        "memory:///box/a/1.jsonl",
        "memory:///box/a/2.txt",
        "memory:///box/b.txt",
    ]
    assert [file.path for file in listed("memory://box/**/*.txt")] == ["memory:///box/a/2.txt", "memory:///box/b.txt"]


def test_hidden_folders_at_an_address_are_left_out(memory: fsspec.AbstractFileSystem) -> None:
    """As in a local folder: what lies below a dot folder is no input."""
    memory.pipe("/box/.git/a.txt", b"x")
    memory.pipe("/box/b.txt", b"x")
    assert [file.path for file in listed("memory://box")] == ["memory:///box/b.txt"]


def test_a_folder_at_an_address_has_the_order_of_a_local_one(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    """The same tree gives the same documents in the same order, wherever it lies."""
    for name in ("a/x.txt", "a-b/x.txt", "a.txt"):
        memory.pipe(f"/box/{name}", b"x")
        make(tmp_path, name)
    assert [file.path.removeprefix("memory:///box/") for file in listed("memory://box")] == names(tmp_path)


def test_a_glob_at_an_address_gives_each_file_once(memory: fsspec.AbstractFileSystem) -> None:
    """Folders that match are no files, as with a local glob."""
    for name in ("a/1.txt", "a/deep/2.txt", "3.txt"):
        memory.pipe(f"/box/{name}", b"x")
    assert [file.path for file in listed("memory://box/*")] == ["memory:///box/3.txt"]
    found = [file.path.removeprefix("memory:///box/") for file in listed("memory://box/**")]
    assert found == ["3.txt", "a/1.txt", "a/deep/2.txt"]


def test_nothing_at_an_address_is_an_error(memory: fsspec.AbstractFileSystem) -> None:
    """A missing remote file is an input error, not a traceback."""
    with pytest.raises(InputError, match=r"memory://box/none\.txt"):
        listed("memory://box/none.txt")


def test_an_unknown_scheme_is_a_setting_that_is_wrong() -> None:
    """fsspec's own words say which protocol or package is missing."""
    with pytest.raises(ConfigError, match="nosuch://bucket/x"):
        listed("nosuch://bucket/x.txt")


def test_columns_are_read_from_an_address(memory: fsspec.AbstractFileSystem) -> None:
    """CSV needs its header from the start of the file for every unit."""
    rows = [f"row {n}" for n in range(30)]
    memory.pipe("/box/a.csv", b"id,text\n" + b"".join(f"{n},{row}\n".encode() for n, row in enumerate(rows)))
    assert read("memory://box/a.csv", TEXT).texts == rows


# ---- what is not read ----


def test_files_of_other_kinds_are_counted_by_ending(tmp_path: Path) -> None:
    """And the first are named; the bookkeeping of HF datasets and hidden files are not worth a word."""
    for name in ("a.jsonl", "docs/b.md", "docs/c.MD", "setup.py", "Makefile", "dataset_info.json", ".git/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    left_out = LeftOut()
    assert [Path(file.path).name for file in list_inputs([str(tmp_path)], None, left_out)] == ["a.jsonl"]
    first = f"{tmp_path}/Makefile, {tmp_path}/docs/b.md, {tmp_path}/docs/c.MD, ..."
    assert str(left_out) == f"4 files of no known format (.md 2, no ending 1, .py 1): {first}"


def test_files_of_other_kinds_at_an_address_are_counted(memory: fsspec.AbstractFileSystem) -> None:
    """As those of a local folder."""
    memory.pipe({"/in/a.jsonl": b"x", "/in/b.md": b"x"})
    left_out = LeftOut()
    assert len(list(list_inputs(["memory://in"], None, left_out))) == 1
    assert str(left_out) == "1 file of no known format (.md 1): /in/b.md"


def test_a_folder_of_nothing_but_other_kinds_says_what_there_is(tmp_path: Path) -> None:
    """And how to read it."""
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(InputError, match=r"(?s)no input files in it.*1 file .*a\.md.*input_format='txt'"):
        list(list_inputs([str(tmp_path)]))


def test_a_named_pipe_is_told_from_nothing(tmp_path: Path) -> None:
    """With what to do."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe: a named pipe, .* Feed it on standard input: milldam \.\.\. - < "):
        list(list_inputs([str(tmp_path / "pipe")]))


def test_a_link_to_nothing_is_told(tmp_path: Path) -> None:
    """With where it leads."""
    (tmp_path / "a.jsonl").symlink_to("/nowhere/b.jsonl")
    with pytest.raises(InputError, match=r"a link to /nowhere/b\.jsonl, which is not there"):
        list(list_inputs([str(tmp_path / "a.jsonl")]))
