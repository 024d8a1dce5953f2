"""`milldam.map` without a folder: tables in the user's cache, by key; and datasets with splits, a table for each."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import invoke

from milldam.errors import ConfigError
from milldam.mapping import cache
from milldam.mapping import map as map_rows
from milldam.stores.table.reader import Table
from milldam.stores.verify import verify

FILES, ROWS = 8, 20


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of twenty records, a unit each (`shard_size=1`); the cache in a folder of the test."""
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "in").mkdir()
    for number in range(FILES):
        write(tmp_path / "in", number)
    return tmp_path / "in"


def write(folder: Path, number: int, word: str = "word") -> None:
    lines = ({"id": number * 100 + row, "text": f"{word} " * row} for row in range(ROWS))
    # Compressed files are not cut: with a small shard_size each is a unit.
    (folder / f"{number}.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    )


def lengths(rows: dict[str, Any]) -> dict[str, Any]:
    return {"n": [len(text) for text in rows["text"]]}


def doubled(rows: dict[str, Any]) -> dict[str, Any]:
    return {"n": [2 * len(text) for text in rows["text"]]}


def keys() -> set[str]:
    return {table.key for table in cache.cached_tables()}


def report_of(table: Table) -> Any:
    assert table.report is not None
    return table.report


# ---- what is found again ----


def test_the_same_call_finds_its_table_again(corpus: Path) -> None:
    """By function, settings and input; another of these is another table, and the first stays."""
    first = map_rows(corpus, lengths)
    assert first.path.parent == cache.cache_folder() and not report_of(first).up_to_date
    assert report_of(map_rows(str(corpus), lengths)).up_to_date
    others = [
        map_rows(corpus, doubled),
        map_rows(corpus, lengths, columns=["text"]),
        map_rows(corpus / "1.jsonl.gz", lengths),
    ]
    assert len({first.path, *(one.path for one in others)}) == 4 == len(keys())
    assert report_of(map_rows(corpus, lengths)).up_to_date and list(verify(first.path)) == []


def test_an_edited_file_brings_its_table_up_to_date(corpus: Path) -> None:
    """Its own unit is made again; who reads the old table keeps it."""
    first = map_rows(corpus, lengths, shard_size=1)
    write(corpus, 5, "longer")
    second = map_rows(corpus, lengths, shard_size=1)
    assert (report_of(second).reused, report_of(second).units) == (FILES - 1, FILES)
    assert any("5.jsonl" in line for line in report_of(second).changed)
    assert first.path == second.path and first[101]["n"] == 5 and second[101]["n"] == 7
    assert list(verify(second.path)) == []


def test_what_cant_be_identified_needs_a_name(corpus: Path) -> None:
    """Of the function, since a table that is never found again would only take room; or a folder."""
    lock = threading.Lock()

    def guarded(rows: dict[str, Any]) -> dict[str, Any]:
        with lock:
            return lengths(rows)

    with pytest.raises(ConfigError, match=r"captured value lock.*by key; .*a folder for the table"):
        map_rows(corpus, guarded)
    assert map_rows(corpus, guarded, key="v1") == map_rows(corpus, lengths) and len(keys()) == 2


def test_rows_that_lie_in_no_file_are_found_again_by_content() -> None:
    """A list, or a stream, whose other rows make another table; nothing else is left in the cache."""
    for count, is_known in ((3, False), (3, True), (4, False)):
        table = map_rows(({"text": "x" * number} for number in range(count)), lengths)
        assert report_of(table).up_to_date is is_known and len(table) == count
    assert {path.name for path in cache.cache_folder().iterdir()} == keys() and len(keys()) == 2


# ---- bounds ----


def test_tables_that_were_not_used_for_longest_go_first(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the others fit; never one in use, nor the one that was just made."""
    sources = [corpus / f"{number}.jsonl.gz" for number in range(4)]
    paths = [map_rows(source, lengths).path for source in sources]
    for age, path in enumerate(paths):
        os.utime(path / "in-use", (1000 - age, 1000 - age))  # the last is the oldest
    held = Table(paths[3])
    os.utime(paths[3] / "in-use", (1, 1))
    size = max(table.bytes for table in cache.cached_tables())
    monkeypatch.setenv("MILLDAM_MAP_CACHE_SIZE", str(3 * size + size // 2))
    made = map_rows(corpus / "5.jsonl.gz", lengths).path
    assert keys() == {made.name, paths[3].name, paths[0].name}
    del held
    monkeypatch.setenv("MILLDAM_MAP_CACHE_SIZE", "1")
    map_rows(corpus / "6.jsonl.gz", lengths)
    assert len(keys()) == 1


def test_the_command_lists_and_removes(corpus: Path, tmp_path: Path) -> None:
    """By the beginning of a key, or all; what is in use is refused."""
    (tmp_path / "script.py").write_text("def f(rows):\n    return None\n")
    done = invoke("map", f"{tmp_path}/script.py:f", corpus, "--json")
    key = Path(json.loads(done.stdout)["out"]).name
    table = map_rows(corpus, lengths)
    listed = invoke("cache")
    assert f"{key}  " in listed.stdout and "lengths, 160 rows, in use" in listed.stdout and "2 tables" in listed.stdout
    told = {one["key"]: one for one in json.loads(invoke("cache", "--json").stdout)}
    assert told[key]["rows"] == FILES * ROWS and not told[key]["in_use"] and told[table.path.name]["in_use"]
    refused = invoke("cache", "--remove", table.path.name)
    assert refused.exit_code == 4 and "in use" in refused.output
    assert invoke("cache", "--remove", "none").exit_code == 2
    assert invoke("cache", "--remove", key[:20]).exit_code == 0 and keys() == {table.path.name}
    del table
    assert "1 of 1 tables" in invoke("cache", "--clear").output and keys() == set()
