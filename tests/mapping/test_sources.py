"""Anything that has rows: units that cover each row once, keys that change with what is read, readers of all kinds."""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.mapping.test_batching import records_of

from milldam.errors import ConfigError, InputError
from milldam.mapping.rows import AnySource, RowUnit, evenly, source_of
from milldam.mapping.settings import MapSettings
from milldam.sources.batch import Places, Reject, TextRules
from milldam.sources.reading import FileReader
from milldam.sources.units import Slice

Records = list[dict[str, Any]]
FILES_AT_HAND = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def look_up(source: Any, spool: Path, **options: Any) -> AnySource:
    return source_of(MapSettings(source=source, function=len, **options), spool)


def plan(source: Any, spool: Path, **options: Any) -> AnySource:
    made = look_up(source, spool, **options)
    if made.needs_spooling:
        made.spool()
    return made


def read(made: AnySource, rejects: list[Reject] | None = None) -> Records:
    """All rows, by a reader and units that went through pickle and JSON, as they do on their way to a worker."""
    reader = pickle.loads(pickle.dumps(made.reader))
    on_reject = (rejects if rejects is not None else []).append
    units = [RowUnit(**json.loads(json.dumps(unit.as_json()))) for unit in made.units()]
    assert [unit.index for unit in units] == list(range(len(units)))
    return [record for unit in units for rows in reader.read(unit, on_reject, Places()) for record in records_of(rows)]


def keys(source: Any, spool: Path, **options: Any) -> list[str]:
    return [unit.key for unit in plan(source, spool, **options).units()]


def write_jsonl(path: Path, records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---- files ----

ROWS: Records = [{"id": str(k), "text": f"line {k}\nand ünother" + "x" * (k % 50)} for k in range(60)]


def write_csv(path: Path, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter, lineterminator="\n")
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path: Path, *, stream: bool) -> None:
    schema = pa.schema([("id", pa.string()), ("text", pa.string())])
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(path, schema) as writer:
        for start in range(0, len(ROWS), 7):
            writer.write_batch(pa.RecordBatch.from_pylist(ROWS[start : start + 7], schema))


def write_rows(folder: Path, kind: str) -> Path:
    """The same rows as a file of any kind."""
    path = folder / f"rows.{kind.partition('-')[0]}"
    if kind == "jsonl":
        write_jsonl(path, ROWS)
    elif kind in ("csv", "tsv"):
        write_csv(path, "," if kind == "csv" else "\t")
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    else:
        write_arrow(path, stream=kind == "arrow-stream")
    return path


KINDS = ["jsonl", "csv", "tsv", "parquet", "arrow-file", "arrow-stream"]


@pytest.mark.parametrize("kind", KINDS)
@FILES_AT_HAND
@given(st.integers(1, 6000), st.none() | st.integers(1, 80))
def test_units_cover_every_row_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, kind: str, shard_size: int, shards: int | None
) -> None:
    """Whatever the size or number of shards, the units of a file of any format give its rows, with the same keys."""
    folder = tmp_path_factory.mktemp("rows")
    path = write_rows(folder, kind)
    made = plan(path, folder / "spool", shard_size=shard_size, shards=shards)
    assert read(made) == ROWS
    assert [unit.key for unit in made.units()] == keys(path, folder / "other", shard_size=shard_size, shards=shards)


@FILES_AT_HAND
@given(
    st.lists(st.text("ab \n\r", max_size=30), min_size=1, max_size=8),
    st.integers(1, 60),
    st.sampled_from(["file", "line", "paragraph", "##"]),
)
def test_units_of_plain_text_cover_every_document_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], shard_size: int, documents: str
) -> None:
    """Cut however small, text files give the documents that one unit gives, each with the name of its file."""
    spool = tmp_path_factory.mktemp("spool")
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text, newline="")
    rules = {"separator": "##"} if documents == "##" else {"documents": documents}
    whole = read(plan(folder, spool / "a", shard_size=10**6, **rules))
    assert read(plan(folder, spool / "b", shard_size=shard_size, **rules)) == whole
    assert read(plan(folder, spool / "c", shards=3, **rules)) == whole
    if documents == "file":
        assert [row["text"] for row in whole] == texts


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow-file"])
def test_compressed_files_are_a_unit_each(tmp_path: Path, kind: str, ending: str) -> None:
    """A compressed file of any format is read whole, however small the shards."""
    path = write_rows(tmp_path, kind)
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[ending]
    packed = tmp_path / f"{path.name}.{ending}"
    packed.write_bytes(compress(path.read_bytes()))
    made = plan(packed, tmp_path / "spool", shard_size=100)
    assert read(made) == ROWS
    assert len(list(made.units())) == 1


def test_json_rows_are_as_they_are(tmp_path: Path) -> None:
    """JSON keeps its values of any type; a field that a row lacks is None; columns choose."""
    records = [{"a": 1, "b": {"c": [1, "x", None]}}, {"a": "two"}, {"d": 1.5}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    names = ["a", "b", "d"]
    assert read(plan(path, tmp_path)) == [{name: record.get(name) for name in names} for record in records]
    assert read(plan(path, tmp_path, columns=("d", "a")))[1] == {"d": None, "a": "two"}


def test_broken_records_are_rejected_with_their_place(tmp_path: Path) -> None:
    """Lines that are no object, no JSON or no UTF-8, and rows of another width, go aside; strict stops at the first."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n[2]\n{"a":\n{"a": "\xff"}\n{"a": "\\ud800"}\n\n{"a": 3}')
    rejects: list[Reject] = []
    assert read(plan(path, tmp_path), rejects) == [{"a": 1}, {"a": 3}]
    assert [(one.line, one.reason) for one in rejects] == [
        (2, "no_object"),
        (3, "bad_json"),
        (4, "not_utf8"),
        (5, "not_utf8"),
    ]
    assert len(read(plan(path, tmp_path, invalid_utf8="replace"))) == 4
    with pytest.raises(InputError, match=r"a\.jsonl:2"):
        read(plan(path, tmp_path, strict=True))
    table = tmp_path / "b.csv"
    table.write_bytes(b"x,y\n1,2\n3\n\xff,4\n5,6\n")
    rejects = []
    assert read(plan(table, tmp_path), rejects) == [{"x": "1", "y": "2"}, {"x": "5", "y": "6"}]
    assert [(one.line, one.reason) for one in rejects] == [(3, "bad_row"), (4, "not_utf8")]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_a_table_string_that_is_no_utf8_rejects_its_row(tmp_path: Path, format: str) -> None:
    """Its other rows and nulls are kept; "replace" keeps the row too; a nested one is found as well."""
    raw = pa.array([b"good", b"\xff", None, b"also"], pa.binary())
    text = pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2], raw.buffers()[0])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 1, 2, 3], pa.int32()), text.take(pa.array([0, 1, 3])))
    table = pa.table({"text": text, "n": [0, 1, 2, 3], "tags": lists})
    path = tmp_path / f"a.{format}"
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    rejects: list[Reject] = []
    assert read(plan(path, tmp_path, columns=("text", "n")), rejects) == [
        {"text": "good", "n": 0},
        {"text": None, "n": 2},
        {"text": "also", "n": 3},
    ]
    assert [(one.row, one.reason) for one in rejects] == [(1, "not_utf8")]
    assert read(plan(path, tmp_path, columns=("text",), invalid_utf8="replace"))[1] == {"text": "\ufffd"}
    assert [row["n"] for row in read(plan(path, tmp_path, columns=("n", "tags")))] == [0, 1, 3]


def test_parquet_batches_are_bounded_whatever_its_metadata_says(tmp_path: Path) -> None:
    """Texts stored once and repeated, and long runs of one number, are decoded a few rows at a time."""
    table = pa.table({"text": ["y" * 100_000] * 80, "ids": [[7] * 50_000] * 80})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    assert path.stat().st_size < 10**6
    for columns in (("text",), ("ids",)):
        made = plan(path, tmp_path, columns=columns)
        (unit,) = made.units()
        sizes = [rows.nbytes for rows in made.reader.read(unit, lambda reject: None, Places())]
        assert max(sizes) <= 4 << 20 < sum(sizes)


def test_a_giant_row_comes_whole(tmp_path: Path) -> None:
    """Documents of many blocks, as text and in JSON, are one row; one that is no UTF-8 at its end is rejected."""
    text = "é" * 3_000_000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(text.encode() + b"\xff")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "small"}, {"text": text}, {"text": "last"}])
    rejects: list[Reject] = []
    assert [row["text"] for row in read(plan(tmp_path / "a.txt", tmp_path / "s"))] == [text]
    assert read(plan(tmp_path / "b.txt", tmp_path / "s"), rejects) == []
    assert [one.reason for one in rejects] == ["not_utf8"]
    found = read(plan(tmp_path / "c.jsonl", tmp_path / "s", shard_size=10_000))
    assert [row["text"] for row in found] == ["small", text, "last"]


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A wrong name is an error that shows the right ones, for files of every format."""
    for kind in KINDS:
        with pytest.raises(InputError, match=r'no column "txet"; found "id", "text"\. Did you mean "text"'):
            plan(write_rows(tmp_path, kind), tmp_path, columns=("txet",))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputError, match='found "text", "file"'):
        plan(tmp_path / "a.txt", tmp_path, columns=("body",))
    with pytest.raises(ConfigError, match="columns is empty"):
        plan(tmp_path / "a.txt", tmp_path, columns=())


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_slices_of_a_split_take_exactly_these_rows(tmp_path: Path, kind: str) -> None:
    """Rows are counted over all units; numbers, where asked for, begin at the slice."""
    path = write_rows(tmp_path, kind)
    for split, wanted in [("train[10:20]", ROWS[10:20]), ("train[-5:]", ROWS[-5:]), ("train[50%:]", ROWS[30:])]:
        made = plan(path, tmp_path, split=split, shard_size=600, with_indices=True)
        assert read(made) == wanted
        firsts = [unit.first_row for unit in made.units()]
        assert firsts[0] == 0
    assert read(plan(path, tmp_path, split="train[7:]", shard_size=600)) == ROWS[7:]
    numbered = list(plan(path, tmp_path, with_indices=True, shard_size=600).units())
    assert numbered[0].first_row == 0
    assert numbered[-1].first_row is not None and numbered[-1].first_row > 30


def test_folders_globs_lists_and_addresses_are_read(tmp_path: Path) -> None:
    """As everywhere: a folder to the bottom, a pattern, several paths, an fsspec address."""
    import fsspec

    (tmp_path / "d" / "e").mkdir(parents=True)
    write_jsonl(tmp_path / "d" / "a.jsonl", [{"n": 1}])
    write_jsonl(tmp_path / "d" / "e" / "b.jsonl", [{"n": 2}])
    both = [{"n": 1}, {"n": 2}]
    assert read(plan(tmp_path / "d", tmp_path / "s")) == both
    assert read(plan(f"{tmp_path}/d/**/*.jsonl", tmp_path / "s")) == both
    assert read(plan([tmp_path / "d" / "e", str(tmp_path / "d" / "a.jsonl")], tmp_path / "s")) == both[::-1]
    with fsspec.open("memory://rows/a.jsonl", "wb") as file:
        file.write(b'{"n": 1}\n' * 100)
    assert len(read(plan("memory://rows/a.jsonl", tmp_path / "s", shard_size=100))) == 100


def test_standard_input_is_copied_once_and_read_by_units(tmp_path: Path) -> None:
    """Rows of a pipe are there in full, called "-", and said to be not identifiable."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from tests.mapping.test_sources import plan, read\n"
        "made = plan('-', Path(sys.argv[2]), documents='line', shard_size=20)\n"
        "print(made.unidentified, len(list(made.units())), read(made)[-1])\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2]), str(tmp_path)]
    told = subprocess.run(command, input="".join(f"line {k}\n" for k in range(20)), capture_output=True, text=True)
    assert told.stdout.startswith("standard input can't be read again "), told.stderr
    assert told.stdout.endswith(" {'text': 'line 19', 'file': '-'}\n")


# ---- keys ----


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60), st.integers(1, 80))
def test_a_number_of_shards_is_met_exactly_where_there_are_pieces(sizes: list[int], shards: int) -> None:
    """Exactly so many groups, or as many as there are pieces, in order and none empty."""
    groups = list(evenly(sizes, int, shards, count=len(sizes), total=sum(sizes)))
    assert len(groups) == min(shards, len(sizes)) and [] not in groups
    assert [size for group in groups for size in group] == sizes


@pytest.mark.parametrize("shards", [1, 3, 16])
def test_shards_of_a_large_file_are_even(tmp_path: Path, shards: int) -> None:
    """Cut by number, a file of lines gives that many units of nearly one size."""
    path = write_jsonl(tmp_path / "a.jsonl", ({"n": k} for k in range(5000)))
    sizes = [unit.size for unit in plan(path, tmp_path, shards=shards).units()]
    assert len(sizes) == shards
    assert max(sizes) - min(sizes) <= sum(sizes) / shards / 4


# ---- datasets ----


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A dataset in several Arrow files."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"n": list(range(100)), "text": ["x" * k for k in range(100)]})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    return datasets.load_from_disk(str(tmp_path / "saved"))


def test_a_data_set_gives_its_rows_in_its_order(tmp_path: Path, saved: Any) -> None:
    """Chosen, shuffled, filtered and renamed rows are those of the dataset, whatever its format shows."""
    kinds = [
        saved,
        saved.shuffle(seed=1),
        saved.select([5, 3, 99, 3]),
        saved.filter(lambda row: row["n"] % 7 == 0),
        saved.rename_column("n", "number").select(range(10, 60)),
        saved.with_format("numpy", columns=["n"]),
    ]
    found = set()
    for k, data in enumerate(kinds):
        for options in ({"shard_size": 1000}, {"shards": 7}, {}):
            made = plan(data, tmp_path / str(k), **options)
            assert read(made) == list(data.with_format(None))
            assert len(pickle.dumps(made.reader)) < 20_000
        found.add(tuple(unit.key for unit in made.units()))
    assert len(found) == len(kinds)
    assert [unit.first_row for unit in plan(saved, tmp_path, shards=4).units()] == [0, 25, 50, 75]
    assert read(plan(saved, tmp_path, columns=("text",)))[3] == {"text": "xxx"}


def test_a_data_set_is_known_by_its_fingerprint_and_files(tmp_path: Path, saved: Any) -> None:
    """Loaded again it is the same; with its files changed it is not."""
    import datasets

    first = plan(saved, tmp_path).identity
    assert plan(datasets.load_from_disk(str(tmp_path / "saved")), tmp_path).identity == first
    os.utime(saved.cache_files[0]["filename"], ns=(1, 1))
    assert plan(saved, tmp_path).identity != first


def test_a_dict_of_data_sets_needs_a_split(tmp_path: Path, saved: Any) -> None:
    """Named, sliced, or summed; a dataset without splits refuses one, as it does a transform."""
    import datasets

    both = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
    assert len(read(plan(both, tmp_path, split="test"))) == 3
    assert len(read(plan(both, tmp_path, split="train+test"))) == 103
    assert [row["n"] for row in read(plan(both, tmp_path, split="train[2:4]"))] == [2, 3]
    with pytest.raises(InputError, match=r'which split\? There are "one", "two"'):
        plan(datasets.DatasetDict({"one": saved, "two": saved}), tmp_path)
    with pytest.raises(InputError, match='no split "dev"'):
        plan(both, tmp_path, split="dev")
    with pytest.raises(ConfigError, match="transform"):
        plan(saved.with_transform(lambda rows: rows), tmp_path)


def test_a_saved_data_set_with_indices_is_refused_as_a_folder(tmp_path: Path, saved: Any) -> None:
    """Its folder can be read when its rows are in order, and says what to do when they are not."""
    assert [row["n"] for row in read(plan(tmp_path / "saved", tmp_path / "s"))] == list(range(100))
    state = tmp_path / "saved" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(InputError, match="flatten_indices"):
        plan(tmp_path / "saved", tmp_path / "s")


def test_a_large_data_set_in_memory_goes_through_the_spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not sent to each worker: the reader is a path, and the rows are the same, shuffled ones too."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("milldam.mapping.spool.LARGEST_IN_MEMORY", 1000)
    data = datasets.Dataset.from_dict({"text": ["x" * k for k in range(200)]}).shuffle(seed=3)
    made = plan(data, tmp_path, shards=1)
    assert made.needs_spooling
    assert len(pickle.dumps(made.reader)) < 1000
    assert read(made) == list(data)


# ---- streams ----


def count_to(limit: int) -> Iterator[dict[str, Any]]:
    for k in range(limit):
        yield {"n": k, "text": "x" * (k % 300)}


@pytest.mark.parametrize("options", [{"shard_size": 300_000}, {"shards": 4}, {}])
def test_a_generator_is_spooled_and_cut(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows come back in order from units that are numbered; the same rows give the same keys."""
    monkeypatch.setattr("milldam.mapping.spool.FRAME_BYTES", 50_000)
    made = plan(functools.partial(count_to, 5000), tmp_path, with_indices=True, **options)
    assert read(made) == list(count_to(5000))
    units = list(made.units())
    assert len(units) == {"shard_size": 3, "shards": 4}.get(next(iter(options), ""), 1)
    assert units[0].first_row == 0
    again = plan(functools.partial(count_to, 5000), tmp_path / "again", with_indices=True, **options)
    assert [unit.key for unit in again.units()] == [unit.key for unit in units]


def test_an_identified_generator_runs_once(tmp_path: Path) -> None:
    """What it left complete is used; another source, or a spool that was not finished, is made again."""
    calls = str(tmp_path / "calls")

    def rows() -> Iterator[dict[str, Any]]:
        with open(calls, "a") as file:
            file.write("x")
        yield {"n": 1}

    spool = tmp_path / "spool"
    for _ in range(2):
        assert read(plan(rows, spool, source_key="v1")) == [{"n": 1}]
    assert Path(calls).read_text() == "x"
    read(plan(rows, spool, source_key="v2"))
    (spool / "complete.json").unlink()
    read(plan(rows, spool, source_key="v2"))
    assert Path(calls).read_text() == "xxx"


def test_a_generator_that_fails_leaves_no_rows_that_count(tmp_path: Path) -> None:
    """The error is the generator's own, and the next call begins anew."""
    broken = [True]

    def rows() -> Iterator[dict[str, Any]]:
        yield {"n": 1}
        if broken:
            raise KeyError("mine")
        yield {"n": 2}

    with pytest.raises(KeyError, match="mine"):
        plan(rows, tmp_path, source_key="k")
    assert not list(tmp_path.glob(".*.tmp"))
    broken.clear()
    assert read(plan(rows, tmp_path, source_key="k")) == [{"n": 1}, {"n": 2}]


def test_rows_of_any_types_survive_the_spool(tmp_path: Path) -> None:
    """Columns that change their type or come and go, arrays of any shape; what can't be stored is named."""
    import numpy as np

    rows: Records = [{"a": 1}, {"a": "x"}, {"a": [1, 2], "b": None}, {"b": b"\0"}, {"a": {"c": 1}}, {"a": 2.5}]
    found = read(plan(rows, tmp_path / "1"))
    assert [{name: value for name, value in row.items() if value is not None} for row in found] == [
        {name: value for name, value in row.items() if value is not None} for row in rows
    ]
    assert read(plan([{"m": np.eye(2), "v": np.arange(2)}], tmp_path / "2")) == [{"m": [[1, 0], [0, 1]], "v": [0, 1]}]
    assert read(plan(pa.table({"a": [1, 2]}), tmp_path / "3")) == [{"a": 1}, {"a": 2}]
    with pytest.raises(InputError, match="the list: row 1 can't be stored"):
        plan([{"a": 1}, {"a": io.BytesIO()}], tmp_path / "4")
    with pytest.raises(InputError, match="row 1 is of type str"):
        plan(lambda: [{"a": 1}, "b"], tmp_path / "5", source_key="k")


def test_what_is_no_source_is_refused_with_a_hint(tmp_path: Path) -> None:
    """A generator that was called already, a number, a class, and a split where there are none."""
    with pytest.raises(ConfigError, match="without calling it"):
        plan(count_to(3), tmp_path)
    for wrong in (7, dict, {"a": [1]}, None):
        with pytest.raises(ConfigError, match="no source of rows"):
            plan(wrong, tmp_path)
    with pytest.raises(ConfigError, match="Leave them out"):
        plan([{"a": 1}], tmp_path, split="train")
    with pytest.raises(ConfigError, match="Let it yield rows"):
        plan(lambda: {"a": 1}, tmp_path, source_key="k")


def test_a_streamed_data_set_is_known_by_its_key_alone(tmp_path: Path, saved: Any) -> None:
    """Its rows are spooled; without a key it says that it can't be identified."""
    streamed = saved.to_iterable_dataset().map(lambda row: {"twice": 2 * row["n"]})
    made = plan(streamed, tmp_path / "a")
    assert made.unidentified is not None and "source_key" in made.unidentified
    assert read(made) == list(streamed)
    named = plan(streamed, tmp_path / "b", source_key="v1")
    assert named.unidentified is None
    assert [unit.key for unit in named.units()] == [unit.key for unit in made.units()]


def test_a_generator_that_cannot_be_hashed_says_why(tmp_path: Path) -> None:
    """Nothing is guessed: the reason names what it holds."""
    handle = (tmp_path / "x").open("w")

    def rows() -> Iterator[dict[str, Any]]:
        yield {"name": handle.name}

    made = plan(rows, tmp_path / "a")
    handle.close()
    assert made.unidentified is not None and "handle" in made.unidentified
    assert plan(count_to_three, tmp_path / "b").unidentified is None


def count_to_three() -> Iterator[dict[str, Any]]:
    yield from count_to(3)


# ---- tables of ours ----


def test_a_table_of_ours_is_read_shard_by_shard(tmp_path: Path) -> None:
    """In the order of its manifest, also after an unfinished one was refused."""
    from milldam.stores.table.manifest import TableManifest, TableSchema, TableShard

    schema = pa.schema([("n", pa.int64())])
    for name in ("b", "a"):
        with pa.ipc.new_stream(tmp_path / f"rows-{name}.arrow", schema) as writer:
            writer.write_batch(pa.record_batch([pa.array([ord(name)])], schema=schema))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    with pytest.raises(InputError, match="an unfinished table"):
        plan(tmp_path, tmp_path / "s")
    sizes = {name: (tmp_path / f"rows-{name}.arrow").stat().st_size for name in "ab"}
    shards = tuple(TableShard(f"rows-{name}.arrow", 1, sizes[name], name) for name in ("b", "a"))
    TableManifest(TableSchema.of(schema), {}, {}, {}, shards).write(tmp_path)
    assert read(plan(tmp_path, tmp_path / "s")) == [{"n": ord("b")}, {"n": ord("a")}]


# ---- what names a source ----


def test_a_changed_row_changes_its_own_unit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not numbered: another one in front leaves the units behind it; with numbers all are others."""
    monkeypatch.setattr("milldam.mapping.spool.FRAME_BYTES", 1000)
    rows = [{"t": f"{k:02} " + "x" * 1000} for k in range(8)]
    other = [{"t": "a " + "y" * 200}, {"t": "b " + "y" * 789}, *rows[1:]]
    before, after = keys(rows, tmp_path / "a", shards=4), keys(other, tmp_path / "b", shards=4)
    assert before[0] != after[0] and before[1:] == after[1:]
    before, after = (keys(one, tmp_path / "c", shards=4, with_indices=True) for one in (rows, other))
    assert not set(before) & set(after)


@pytest.mark.parametrize("made_of", [list, pa.Table.from_pylist])
def test_a_key_does_not_hide_what_a_source_in_memory_holds(made_of: Any, tmp_path: Path) -> None:
    """A list and a table are known by their content; the key is added to it."""

    def fingerprint(rows: Records, key: str | None) -> str:
        found = look_up(made_of(rows), tmp_path, source_key=key)
        assert found.unidentified is None
        return str(found.identity["fingerprint"])

    one, other = [{"t": "aa"}], [{"t": "bb"}]
    assert fingerprint(one, "v1") == fingerprint([{"t": "aa"}], "v1")
    assert len({fingerprint(one, "v1"), fingerprint(other, "v1"), fingerprint(one, "v2"), fingerprint(one, None)}) == 4


def test_a_list_that_cant_be_hashed_is_not_identified(tmp_path: Path) -> None:
    """Without a key nothing that was made of it may be reused."""
    rows = [{"t": lambda: None}]
    assert "can't be hashed" in str(look_up(rows, tmp_path).unidentified)
    assert look_up(rows, tmp_path, source_key="v1").unidentified is None


@pytest.mark.parametrize("address", ["https://host/a.txt?X-Amz-Signature=secret", "s3://me:secret@host/a.txt"])
def test_rows_messages_and_the_list_of_inputs_tell_no_secrets(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an address neither its query nor its password leave what is needed to read it."""
    from milldam.mapping.job import _outside as outside
    from milldam.sources.units import InputFile

    plain = address.replace("?X-Amz-Signature=secret", "").replace("me:secret@", "")
    monkeypatch.setattr("milldam.sources.plain_text.open_bytes", lambda path: io.BytesIO(b"hello\n\xff\n"))
    reader, places = FileReader(TextRules("line"), None, str(tmp_path)), Places()
    rejects: list[Reject] = []
    (rows,) = reader.rows([Slice(address, "txt", None)], rejects.append, places)
    assert records_of(rows) == [{"text": "hello", "file": plain}]
    assert [reject.file for reject in rejects] == [place.file for place in places.of(0, 1)] == [plain]
    listed = outside(iter([InputFile(address, "txt", None, 5, "")]), tmp_path, tmp_path / "rows")
    assert [file.path for file in listed] == [plain]
