"""The run folder: records that survive a crash, a lock, and the refusal to mix what does not belong together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from milldam.errors import ConfigError
from milldam.files import seal_line
from milldam.run.array import ArrayTask
from milldam.run.folder import RunFolder, is_at_work
from milldam.run.records import RECORDS, Record, Records
from milldam.run.units import Identity
from milldam.sources.units import InputFile, Slice, Unit
from milldam.stores.kinds import TABLE, TOKENS

SETTINGS = {"tokenizer": "abc", "eos": "auto", "limit": None, "datasets": [{"weight": 1.0}], "clean": None}
INPUT = {"files": 1, "bytes": 10, "fingerprint": "f"}


INPUT_FILE = InputFile("a.jsonl", "jsonl", None, 10, "1")


def units(count: int) -> list[Unit]:
    return [Unit(k, (Slice("corpus.jsonl", "jsonl", None, k, k + 1, 1),)) for k in range(count)]


def run_in(out: Path, task: ArrayTask | None = None) -> RunFolder:
    return RunFolder(out, TOKENS, task=task)


def task_of(out: Path, index: int, of: int = 2) -> RunFolder:
    return run_in(out, ArrayTask("tokenize", index, of))


def start(out: Path, planned: list[Unit], *, anew: bool = True) -> Identity:
    """A folder with a plan in it."""
    with run_in(out) as run:
        identity = Identity(SETTINGS, run.inputs.write([(0, INPUT_FILE)]))
        outputs = ("*.bin", "*.idx", "rejects.jsonl")
        run.start(identity, planned, {"tokenizer.json": b"{}"}, anew=anew, outputs=outputs)
    return identity


def record(out: Path, unit: int, part: int = 0, *, last: bool = True, splits: tuple[str, ...] = ("train",)) -> Record:
    """A finished part whose shards lie in the folder."""
    outputs = {}
    for name in (f"{split}-{unit:05d}-{part:03d}.{suffix}" for split in splits for suffix in ("bin", "idx")):
        (out / name).write_bytes(b"12345678")
        outputs[name] = {"bytes": 8, "xxh3": ""}
    return Record(units(unit + 1)[unit].key, part, last, outputs, counts={"documents": 2}, facts={"unit": unit})


def records_of(run: RunFolder) -> Records:
    """The records as the next command finds them."""
    return Records(run, RECORDS, run.units.keys())


def add(out: Path, *records: Record) -> None:
    with run_in(out) as run:
        known = records_of(run)
        for one in records:
            known.add(one)


def resumed(out: Path) -> Records:
    with run_in(out) as run:
        run.tidy()
        return records_of(run)


def pending(records: Records) -> dict[int, int]:
    """Units that are left, and how many parts are done of them."""
    begun = {unit: records.begun(unit) for unit in records.pending()}
    return {unit: 0 if one is None else one.part + 1 for unit, one in begun.items()}


# ---- plan and records ----


def test_a_run_clears_what_an_earlier_one_left(tmp_path: Path) -> None:
    """Half-written files go when it resumes; anew, all that is ours goes, and nothing of anybody else's."""
    start(tmp_path, units(3))
    fresh = sorted(path.name for path in (tmp_path / "run").iterdir())
    for name in (".train-00001.bin.99.tmp", "run/.rejects-0000001-00000.jsonl.99.tmp"):
        (tmp_path / name).write_bytes(b"half")
    resumed(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []
    add(tmp_path, record(tmp_path, 0, splits=("train", "val")))
    ours = ("milldam.json", "rejects.jsonl", "run/counts.jsonl", "run/summary.json", "run/dedup/hashes-0")
    for name in (*ours, "README.txt", "results/model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    start(tmp_path, units(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.txt", "results", "run", "tokenizer.json"]
    assert (tmp_path / "results" / "model.bin").read_text() == "{}"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == fresh
    assert pending(resumed(tmp_path)) == {0: 0, 1: 0, 2: 0}


# ---- one at a time, and nobody else's folder ----


def test_the_lock_keeps_a_second_run_out(tmp_path: Path) -> None:
    """One run at a time, though it has no plan yet: another is refused and removes nothing."""
    with run_in(tmp_path / "s") as first:
        first.inputs.write([(0, INPUT_FILE)])
        assert is_at_work(tmp_path / "s" / "run")
        with pytest.raises(ConfigError, match="another run is using it"), run_in(tmp_path / "s"):
            pass
        assert list(first.inputs.listed())
    assert not is_at_work(tmp_path / "s" / "run")


def test_an_unfinished_run_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """A table is not made where tokens are being made."""
    start(tmp_path, units(1))
    with pytest.raises(ConfigError, match="holds a token store"), RunFolder(tmp_path, TABLE):
        pass


# ---- what changed ----


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, []),
        ({"tokenizer": "xyz"}, ['tokenizer: "xyz" (made with "abc")']),
        ({"limit": 5, "eos": "none"}, ['eos: "none" (made with "auto")', "limit: 5 (made with null)"]),
        ({"new": True}, ["new: true (made with null)"]),
        ({"datasets": [{"weight": 2.0}]}, ["datasets.0.weight: 2.0 (made with 1.0)"]),
        ({"datasets": [{"weight": 1.0}, {"weight": 0.5}]}, ["datasets.1.weight: 0.5 (made with null)"]),
        ({"datasets": []}, ["datasets.0.weight: null (made with 1.0)"]),
        ({"clean": {"strip": True, "unicode": None}}, ["clean.strip: true (made with null)"]),
        ({"clean": {"strip": {"a": [1, {"b": 2}]}}}, ["clean.strip.a.0: 1 (made", "clean.strip.a.1.b: 2 (made"]),
        ({"eos": "x" * 500}, ['eos: "' + "x" * 56 + '... (made with "auto")']),
    ],
)
def test_each_changed_setting_is_named_with_both_values(change: dict[str, Any], named: list[str]) -> None:
    """A line each: the way to it, what it is now, and what the folder was made with; long ones are shortened."""
    found = Identity(SETTINGS, INPUT).differences(Identity(SETTINGS | change, INPUT))
    assert len(found) == len(named)
    assert all(line.startswith(start) for line, start in zip(found, named, strict=True)), found


def test_a_changed_tokenizer_and_changed_input_are_named_as_people_call_them() -> None:
    """Another name for the same tokenizer is no change."""
    before, after = Identity(SETTINGS, INPUT, "bert"), Identity(SETTINGS | {"tokenizer": "xyz"}, INPUT, "gpt2")
    assert before.differences(after) == ['tokenizer: "gpt2", hash "xyz" (made with "bert", hash "abc")']
    assert Identity(SETTINGS, INPUT, "gpt2").differences(before) == []
    (line,) = before.differences(Identity(SETTINGS, INPUT | {"files": 2, "bytes": 10**6}))
    assert re.fullmatch(r"input: 2 files, .* \(made from 1 file, .*\)", line)


# ---- job arrays: several processes at one run ----


def test_tasks_record_beside_each_other_and_the_run_gathers_them(tmp_path: Path) -> None:
    """Each task appends to a file of its own; whoever goes on alone finds all of them in one. A unit that two tasks
    did, since another number of them came the second time, counts once."""
    start(tmp_path, units(4))
    with task_of(tmp_path, 0) as first, task_of(tmp_path, 1) as second:
        records_of(first).add(record(tmp_path, 0))
        records_of(second).add(record(tmp_path, 3))
    with task_of(tmp_path, 0) as again:
        assert pending(records_of(again)) == {1: 0, 2: 0}
        with (tmp_path / "run" / f"records@{again.task.label}.jsonl").open("ab") as file:
            file.write(seal_line(record(tmp_path, 3).as_json()))
    records = resumed(tmp_path)
    assert pending(records) == {1: 0, 2: 0}
    assert records.counts["documents"] == 4
    assert [path.name for path in (tmp_path / "run").glob("records*")] == [RECORDS]


def test_who_has_the_run_to_himself_waits_for_no_task_and_the_other_way_round(tmp_path: Path) -> None:
    """A whole run is refused while a task works, a task while a whole run does, and a task twice."""
    start(tmp_path, units(1))
    with task_of(tmp_path, 0), task_of(tmp_path, 1):
        for other in (run_in(tmp_path), task_of(tmp_path, 1)):
            with pytest.raises(ConfigError, match=r"another (run is using it|task is running)"), other:
                pass
        assert is_at_work(tmp_path / "run")
    with run_in(tmp_path), pytest.raises(ConfigError, match="another run is using it"), task_of(tmp_path, 0):
        pass
    assert not is_at_work(tmp_path / "run")
