"""CONTRIBUTING.md: its worked examples work when they are put where it says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest
from tests.guards.test_pages import blocks_of
from tests.kit.jobs import TOKENIZER, demo_texts, write_lines

import milldam
from milldam import formats, input_files
from milldam.config.checking import checked_settings
from milldam.filters import judging
from milldam.formats.exporting import ExportSettings, run_export
from milldam.formats.finding import ReadRules, find_files
from milldam.rules import FilterRules
from milldam.run import engine
from milldam.sources import columns, reading
from milldam.sources.batch import TextRules
from milldam.sources.units import InputFile, Unit

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"
EXAMPLES = {block.mark: block.content for block in blocks_of(PAGE) if block.mark.endswith(".py")}
ROOMS = {"mbox.py": "sources", "shouting.py": "filters", "llmc.py": "formats", "threads.py": "run"}
MAX_LINES = 60


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the page, in the room it belongs to."""
    name: str = request.param
    folder, room = tmp_path / "room", importlib.import_module(f"milldam.{ROOMS[name]}")
    folder.mkdir()
    (folder / name).write_text(EXAMPLES[name])
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(folder)])
    whole_name = f"{room.__name__}.{name.removesuffix('.py')}"
    yield importlib.import_module(whole_name)
    del sys.modules[whole_name]


def put(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("example", names, indirect=True)


def test_every_example_is_short_and_has_its_room() -> None:
    """One each for a source, a filter, a format and an executor."""
    assert {*EXAMPLES} == {*ROOMS}
    assert [name for name, code in EXAMPLES.items() if len(code.splitlines()) > MAX_LINES] == []


@put("mbox.py")
def test_a_source_is_read_however_it_is_cut(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its documents come once each in any slicing, rejects are kept, and `tokenize` takes its files."""
    monkeypatch.setitem(input_files.FORMATS, ".mbox", "mbox")
    monkeypatch.setitem(reading._READERS, "mbox", "mbox")
    monkeypatch.setattr(columns, "WITHOUT_FIELDS", (*columns.WITHOUT_FIELDS, "mbox"))
    mails = [f"Subject: {number}\n\nFrom the mill {'x' * number}\n" for number in range(40)]
    path = tmp_path / "in.mbox"
    path.write_bytes("".join(f"From a@b Mon\n{mail}" for mail in mails).replace("From the", ">From the").encode())
    wanted = [mail.replace("From the", ">From the") for mail in mails]
    file = InputFile(str(path), "mbox", None, path.stat().st_size, "1")
    for size in (1, 7, 64, 1000, 10**6):
        slices = tuple(reading.slice_file(file, size, TextRules()))
        batches = reading.read_unit(Unit(0, slices), TextRules(), pytest.fail)
        assert [text for batch in batches for text in batch.texts.to_pylist()] == wanted
    path.write_bytes(path.read_bytes() + b"From c@d Tue\n\xff\n")
    store = milldam.tokenize(path, tmp_path / "out", tokenizer=TOKENIZER)
    assert len(store) == len(mails) and "not_utf8" in store.rejects.read_text()


@put("shouting.py")
def test_a_filter_drops_what_a_plain_version_of_it_drops(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its reason counted in the store."""
    rules = example.ShoutingRules()
    monkeypatch.setattr(judging, "_rule_sets", lambda _: [lambda layout: example.shouting_faults(layout, rules)])
    texts = ["a b c d e f g h i j!", "a b! c!", "", "!", "no marks here", "one two three four! five"]
    verdicts = judging.Verdicts(len(texts))
    judging.Filters(FilterRules()).judge(pa.array(texts, pa.large_string()), verdicts)
    plain = [text.count("!") / max(1, len(text.split())) <= 0.1 for text in texts]
    assert verdicts.keep.tolist() == plain and not all(plain)


@put("llmc.py")
def test_a_format_goes_there_and_back(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is opened as llm.c's, and read with the same tokens."""
    monkeypatch.setattr(formats, "FORMATS", (*formats.FORMATS, "llmc"))
    write_lines(tmp_path / "in.jsonl", demo_texts()[:20])
    store = milldam.tokenize(tmp_path / "in.jsonl", tmp_path / "store", tokenizer=TOKENIZER)
    asked = checked_settings(ExportSettings, {"to": "nanogpt", "out": str(tmp_path / "out.bin")})
    run_export(store, replace(asked, to="llmc"))
    opened = milldam.open(tmp_path / "out.bin", kind="file")
    assert opened.tokens == store.tokens and opened.kind == "llm.c"
    rules = ReadRules(None, None, tmp_path)
    (source,) = find_files([tmp_path / "out.bin"], None, None)
    read = np.concatenate([block.flat for block in example.read(source, rules)])
    assert np.array_equal(read, np.concatenate([store[number] for number in range(len(store))]))


@put("threads.py")
def test_an_executor_makes_the_same_bytes(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several units in several threads."""
    write_lines(tmp_path / "in.jsonl", demo_texts() * 10)
    plain = milldam.tokenize(tmp_path / "in.jsonl", tmp_path / "plain", tokenizer=TOKENIZER, shard_size="100KB")
    pools: list[object] = []

    def pool(executor: str, address: str | None, budget_bytes: int, server: object) -> object:
        pools.append(example.ThreadPool(budget_bytes))
        return pools[-1]

    monkeypatch.setattr(engine, "pool_for", pool)
    threads = milldam.tokenize(
        tmp_path / "in.jsonl", tmp_path / "threads", tokenizer=TOKENIZER, shard_size="100KB", workers=3
    )
    assert pools and len(threads.shards) > 3 and threads.fingerprint == plain.fingerprint
