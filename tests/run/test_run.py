"""The run folder: records that survive a crash, a lock, and the refusal to mix what does not belong together."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import ConfigError, MismatchError
from milldam.run.folder import FINISHED, NEW, UNFINISHED, RunFolder
from milldam.run.records import Record, Records
from milldam.run.tasks import ArrayTask
from milldam.run.units import Identity
from milldam.sources.units import Slice, Unit
from milldam.stores.kinds import TABLE, TOKENS
from milldam.stores.tokens.manifest import Manifest

RECORDS = "records.jsonl"

SETTINGS = {"tokenizer": "abc", "eos": "auto", "limit": None, "datasets": [{"weight": 1.0}], "clean": None}
INPUT = {"files": 1, "bytes": 10, "fingerprint": "f"}


@dataclass(frozen=True)
class File:
    """What the run folder needs to know of an input file."""

    path: str
    size: int = 10
    version: str = "1"


def units(count: int) -> list[Unit]:
    return [Unit(k, (Slice("corpus.jsonl", "jsonl", None, k, k + 1, 1),)) for k in range(count)]


def listed(*files: File) -> list[tuple[int, File]]:
    """Files of the only dataset."""
    return [(0, file) for file in files]


def run_in(out: Path, task: ArrayTask | None = None) -> RunFolder:
    return RunFolder(out, TOKENS, task=task)


def start(out: Path, count: int = 3, files: tuple[File, ...] = (File("corpus.jsonl"),)) -> Identity:
    """A folder with a plan in it."""
    with run_in(out) as run:
        identity = Identity(SETTINGS, run.inputs.write(listed(*files)))
        assert run.stage(units(count)) == count
        run.start(identity, {"tokenizer.json": b"{}"}, outputs=("*.bin", "*.idx", "rejects.jsonl"))
    return identity


def record(
    out: Path, unit: int, part: int = 0, *, last: bool = True, batches: int = 1, splits: tuple[str, ...] = ("train",)
) -> Record:
    """A finished part whose shards lie in the folder."""
    outputs = {}
    for split in splits:
        for suffix in ("bin", "idx"):
            name = f"{split}-{unit:05d}-{part:03d}.{suffix}"
            (out / name).write_bytes(b"12345678")
            outputs[name] = {"bytes": 8, "xxh3": ""}
    return Record(
        units(unit + 1)[unit].key,
        part,
        last,
        outputs,
        counts={"documents": 2},
        facts={"unit": unit, "batches": batches},
    )


def records_of(run: RunFolder) -> Records:
    """The records as the next command finds them."""
    return Records(run.journal, RECORDS, run.out, run.units.keys())


def add(out: Path, *records: Record) -> None:
    with run_in(out) as run:
        known = records_of(run)
        for one in records:
            known.add(one)


def resumed(out: Path) -> Records:
    with run_in(out) as run:
        run.tidy()
        return records_of(run)


def pending(records: Records) -> list[tuple[int, tuple[int, int]]]:
    """Units that are left, with the parts and batches that are done of them."""
    begun = {unit: records.begun(unit) for unit in records.pending()}
    return [(unit, (0, 0) if one is None else (one.part + 1, one.facts["batches"])) for unit, one in begun.items()]


# ---- plan and records ----


def test_a_folder_is_new_then_unfinished_then_finished(tmp_path: Path) -> None:
    """The state follows what lies in the folder, the manifest last."""
    out = tmp_path / "s"
    assert run_in(out).state() == NEW
    identity = start(out)
    assert run_in(out).state() == UNFINISHED
    Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", SETTINGS, INPUT, ()).write(out)
    assert run_in(out).state() == UNFINISHED, "an older store that is being updated"
    Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", SETTINGS, identity.input, ()).write(out)
    assert run_in(out).state() == FINISHED
    assert run_in(out).identity() == identity


def test_units_come_back_as_they_were_planned(tmp_path: Path) -> None:
    """The plan on disk gives the same units in the same order."""
    start(tmp_path / "s", 3)
    with run_in(tmp_path / "s") as run:
        records = records_of(run)
        assert [run.units.at(number, Unit.from_json) for number in records.pending()] == units(3)
        assert list(run.units.all(Unit.from_json)) == units(3)
        assert records.pending_bytes(run.units.sizes()) == sum(unit.size for unit in units(3))


def test_recorded_units_are_not_done_again(tmp_path: Path) -> None:
    """A complete unit is left out; of a part of one it is known where to go on."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 2), record(tmp_path, 1, 0, last=False, batches=3))
    records = resumed(tmp_path)
    assert pending(records) == [(0, (0, 0)), (1, (1, 3))]
    assert records.counts["documents"] == 4


def test_records_are_in_plan_order_whatever_the_order_of_work(tmp_path: Path) -> None:
    """Units and their parts come in order, though they were finished in another."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 2), record(tmp_path, 0, 0, last=False), record(tmp_path, 1), record(tmp_path, 0, 1))
    found = [(unit, one.part) for unit, one in resumed(tmp_path).in_plan_order()]
    assert found == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_a_unit_that_is_named_twice_is_done_twice(tmp_path: Path) -> None:
    """The same slices at two places of a plan have a key each, the same ones in every plan that names them."""
    with run_in(tmp_path) as run:
        identity = Identity(SETTINGS, run.inputs.write(listed(A)))
        run.stage([*units(2), *units(2)])
        run.start(identity)
        keys = run.units.keys()
        assert len({keys[number] for number in range(4)}) == 4
        assert [keys.number_of(keys[number]) for number in range(4)] == [0, 1, 2, 3]
        run.inputs.write(listed(A))
        run.stage([units(2)[1], *units(2)])
        run.start(identity)
        assert {run.units.keys()[number] for number in range(3)} == {keys[0], keys[1], keys[3]}


def test_what_is_recorded_stays_when_the_plan_grows(tmp_path: Path) -> None:
    """Units are known by what they are made from: others before them change their number, not what is done."""
    start(tmp_path, 3)
    add(tmp_path, *(record(tmp_path, unit) for unit in range(3)))
    with run_in(tmp_path) as run:
        identity = Identity(SETTINGS, run.inputs.write(listed(A)))
        run.stage([Unit(0, (Slice("new.jsonl", "jsonl", None, 7, 8, 1),)), *units(3)[1:]])
        run.start(identity)
        records = records_of(run)
        assert list(records.pending()) == [0] and records.reused == 2
        assert [(unit, one.facts["unit"]) for unit, one in records.in_plan_order()] == [(1, 1), (2, 2)]


@given(keep=st.integers(0, 400))
def test_a_torn_last_line_is_mended(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    """Wherever the power failed while records were written, whole lines are kept and the rest is done again."""
    out = tmp_path_factory.mktemp("torn")
    start(out)
    add(out, record(out, 0), record(out, 1))
    path = out / "run" / "records.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    torn = whole[: min(len(whole), first + keep)]
    path.write_bytes(torn)
    records = resumed(out)
    done = torn.count(b"\n")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:done])
    assert [index for index, _ in pending(records)] == list(range(done, 3))
    add(out, record(out, 2))
    assert path.read_bytes().count(b"\n") == done + 1


def test_a_record_in_the_middle_that_is_no_json_is_dropped(tmp_path: Path) -> None:
    """A line of zeros, as some file systems leave it after a crash, costs one unit, not the run."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 0))
    with (tmp_path / "run" / "records.jsonl").open("ab") as file:
        file.write(bytes(30) + b"\n[]\n")
    add(tmp_path, record(tmp_path, 2))
    assert [index for index, _ in pending(resumed(tmp_path))] == [1]


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_record_without_its_whole_shard_is_dropped(tmp_path: Path, suffix: str, damage: str) -> None:
    """A shard that is gone or of another size is made again."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 0), record(tmp_path, 1))
    path = tmp_path / f"train-00000-000.{suffix}"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"1234567" if damage == "short" else b"123456789")
    records = resumed(tmp_path)
    assert [index for index, _ in pending(records)] == [0, 2]
    assert [unit for unit, _ in records.in_plan_order()] == [1]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_record_that_misses_one_of_its_shards_is_dropped(tmp_path: Path, split: str) -> None:
    """A part is done when the shards of all its splits are there."""
    start(tmp_path, 2)
    add(tmp_path, *(record(tmp_path, unit, splits=("train", "val")) for unit in range(2)))
    (tmp_path / f"{split}-00001-000.bin").unlink()
    records = resumed(tmp_path)
    assert pending(records) == [(1, (0, 0))]
    assert records.counts["documents"] == 2


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_part_takes_the_later_parts_of_its_unit_with_it(tmp_path: Path, gone: int) -> None:
    """A unit goes on from its last unbroken part: what follows a hole is made again, so that nothing is lost."""
    start(tmp_path, 2)
    parts = [record(tmp_path, 0, part, last=part == 2, batches=part + 1) for part in range(3)]
    add(tmp_path, *parts, record(tmp_path, 1))
    (tmp_path / next(iter(parts[gone].outputs))).unlink()
    assert pending(resumed(tmp_path)) == [(0, (gone, gone))]


def test_a_unit_that_was_told_is_recorded_once(tmp_path: Path) -> None:
    """A worker that dies between its last part and its end is made up for, and the record is there once."""
    start(tmp_path)
    parts = [record(tmp_path, 0, part, last=part == 1) for part in range(2)]
    add(tmp_path, *parts, *parts)
    assert list(resumed(tmp_path).all()) == parts


def test_an_empty_unit_is_complete_without_a_shard(tmp_path: Path) -> None:
    """A unit that gave no document is not done again."""
    start(tmp_path, 2)
    add(tmp_path, Record(units(1)[0].key))
    assert [index for index, _ in pending(resumed(tmp_path))] == [1]


def test_leftovers_are_cleared_when_a_run_goes_on(tmp_path: Path) -> None:
    """What a killed run was writing, in the folder and in its run folder, is gone after the next start."""
    start(tmp_path)
    for name in (".train-00001.bin.99.tmp", "run/.rejects-0000001-00000.jsonl.99.tmp"):
        (tmp_path / name).write_bytes(b"half")
    resumed(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.tmp")] == []


def test_a_new_start_clears_the_earlier_run_and_its_shards(tmp_path: Path) -> None:
    """A run that replaces another leaves none of its files, and none of anybody else's is touched."""
    start(tmp_path)
    fresh = sorted(path.name for path in (tmp_path / "run").iterdir())
    add(tmp_path, record(tmp_path, 0, splits=("train", "val")))
    ours = ("milldam.json", "rejects.jsonl", "run/counts.jsonl", "run/summary.json", "run/dedup/hashes-0")
    for name in (*ours, "README.txt", "results/model.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    start(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.txt", "results", "run", "tokenizer.json"]
    assert (tmp_path / "results" / "model.bin").read_text() == "{}"
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == fresh
    assert pending(resumed(tmp_path)) == [(0, (0, 0)), (1, (0, 0)), (2, (0, 0))]


def test_the_plan_keeps_when_the_run_began(tmp_path: Path) -> None:
    """A run that goes on has the start of the one it goes on with, for the report."""
    before = time.time()
    identity = start(tmp_path)
    begun = time.time()
    add(tmp_path, record(tmp_path, 0))
    plan = run_in(tmp_path).plan()
    assert (plan["settings"], plan["input"]) == (identity.settings, identity.input)
    assert before <= plan["started"] <= begun


# ---- lines of other stages ----


def lines(out: Path, name: str = "counts.jsonl") -> list[dict[str, Any]]:
    with run_in(out) as run:
        return list(run.journal.read(name))


def append(out: Path, *values: dict[str, Any]) -> None:
    with run_in(out) as run:
        for value in values:
            run.journal.append("counts.jsonl", value)


def test_appended_lines_come_back_in_order(tmp_path: Path) -> None:
    """What a stage wrote down is there for the next command; a file that nobody wrote to is empty."""
    start(tmp_path)
    append(tmp_path, {"unit": 2, "documents": 7})
    append(tmp_path, {"unit": 0, "documents": 5}, {"unit": 1, "documents": 0})
    assert [(line["unit"], line["documents"]) for line in lines(tmp_path)] == [(2, 7), (0, 5), (1, 0)]
    assert lines(tmp_path, "arranged.jsonl") == []


@pytest.mark.parametrize("missing", [1, 2, 20, 36])
def test_a_torn_appended_line_costs_itself_alone(tmp_path: Path, missing: int) -> None:
    """Wherever the power failed, no half of a line is taken for one, and what is appended afterwards is not lost."""
    start(tmp_path)
    first, second, again = ({"unit": unit, "documents": 10**9} for unit in (0, 1, 2))
    append(tmp_path, first, second)
    path = tmp_path / "run" / "counts.jsonl"
    os.truncate(path, path.stat().st_size - missing)
    survived = lines(tmp_path)
    # With its line end alone missing, a line is whole to whoever reads it.
    assert survived == [first] or (survived == [first, second] and missing == 1)
    append(tmp_path, again)
    assert lines(tmp_path) == [*survived, again]


def test_an_appended_line_of_zeros_is_left_out(tmp_path: Path) -> None:
    """So some file systems leave a line after a crash."""
    start(tmp_path)
    append(tmp_path, {"unit": 0})
    with (tmp_path / "run" / "counts.jsonl").open("ab") as file:
        file.write(bytes(30) + b"\n")
    append(tmp_path, {"unit": 1})
    assert lines(tmp_path) == [{"unit": 0}, {"unit": 1}]


# ---- one at a time, and nobody else's folder ----


def test_the_lock_keeps_a_second_run_out(tmp_path: Path) -> None:
    """While one run is at work another is refused; afterwards it may start."""
    start(tmp_path)
    with run_in(tmp_path) as first:
        assert run_in(tmp_path).presence.is_anybody_here()
        with pytest.raises(ConfigError, match="another run is using it"), run_in(tmp_path):
            pass
        assert first.state() == UNFINISHED
    assert not run_in(tmp_path).presence.is_anybody_here()
    with run_in(tmp_path):
        pass


def test_a_refused_second_run_leaves_the_first_one_alone(tmp_path: Path) -> None:
    """A run that was kept out removes nothing of the run at work, though that has no plan yet."""
    with run_in(tmp_path / "s") as first:
        first.inputs.write(listed(File("corpus.jsonl")))
        with pytest.raises(ConfigError), run_in(tmp_path / "s"):
            pass
        assert list(first.inputs.listed())
        assert run_in(tmp_path / "s").presence.is_anybody_here()


def test_watching_a_folder_does_not_keep_a_run_out(tmp_path: Path) -> None:
    """`milldam status` in a loop looks at the lock; a run that starts at that moment must not be refused."""
    start(tmp_path)
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            run_in(tmp_path).presence.is_anybody_here()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(200):
            with run_in(tmp_path):
                pass
    finally:
        stop.set()
        watcher.join()


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """A folder with files that are not ours is refused, and nothing is put into it."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and not made by milldam"), run_in(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_foreign_folder_named_run_is_left_alone(tmp_path: Path) -> None:
    """A project that happens to have a `run` folder is still not ours: nothing in it may be removed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    (tmp_path / "model-1.bin").write_text("mine")
    with pytest.raises(ConfigError, match="not made by milldam"):
        start(tmp_path)
    assert (tmp_path / "run" / "thesis.txt").read_text() == (tmp_path / "model-1.bin").read_text() == "mine"


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    """A folder that was made beforehand is fine."""
    with run_in(tmp_path) as run:
        assert run.state() == NEW


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    """A file is not overwritten by a store."""
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match=r"is a file\. Name a folder"), run_in(tmp_path / "s"):
        pass
    assert (tmp_path / "s").read_text() == "mine"


# ---- what changed ----


@pytest.mark.parametrize(("name", "value"), [("tokenizer", "xyz"), ("eos", "none"), ("limit", 5), ("new", True)])
def test_each_changed_setting_is_named_with_both_values(name: str, value: Any) -> None:
    """The refusal has the setting's name, what it is now, and what the folder was made with."""
    before = Identity(SETTINGS, INPUT)
    after = Identity(SETTINGS | {name: value}, INPUT)
    assert before.differences(before) == []
    assert before.differences(after) == [f"{name}: {json.dumps(value)} (made with {json.dumps(SETTINGS.get(name))})"]


def test_a_changed_tokenizer_is_named_before_its_hash() -> None:
    """And another name for the same one is no change."""
    before, after = Identity(SETTINGS, INPUT, "bert"), Identity(SETTINGS | {"tokenizer": "xyz"}, INPUT, "gpt2")
    made_with = json.dumps(SETTINGS["tokenizer"])
    assert before.differences(after) == [f'tokenizer: "gpt2", hash "xyz" (made with "bert", hash {made_with})']
    assert Identity(SETTINGS, INPUT, "gpt2").differences(before) == []


def test_all_differences_are_named_at_once() -> None:
    """Nobody has to find them one by one."""
    after = Identity(SETTINGS | {"tokenizer": "x", "eos": "y", "limit": 1}, INPUT | {"files": 2, "bytes": 10**6})
    found = Identity(SETTINGS, INPUT).differences(after)
    assert [line.split(":")[0] for line in found] == ["tokenizer", "eos", "limit", "input"]
    assert re.fullmatch(r"input: 2 files, .* \(made from 1 file, .*\)", found[-1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"datasets": [{"weight": 2.0}]}, ["datasets.0.weight: 2.0 (made with 1.0)"]),
        ({"datasets": [{"weight": 1.0}, {"weight": 0.5}]}, ["datasets.1.weight: 0.5 (made with null)"]),
        ({"datasets": []}, ["datasets.0.weight: null (made with 1.0)"]),
        ({"clean": {"strip": True, "unicode": None}}, ["clean.strip: true (made with null)"]),
        ({"clean": {"strip": {"a": [1, {"b": 2}]}}}, ["clean.strip.a.0: 1 (made", "clean.strip.a.1.b: 2 (made"]),
    ],
)
def test_a_nested_setting_is_named_with_dots(change: dict[str, Any], named: list[str]) -> None:
    """A difference deep in the settings is a line with the way to it, and what is around it is not."""
    found = Identity(SETTINGS, INPUT).differences(Identity(SETTINGS | change, INPUT))
    assert len(found) == len(named)
    assert all(line.startswith(start) for line, start in zip(found, named, strict=True)), found


def test_a_long_value_is_shortened() -> None:
    """A line stays a line."""
    (line,) = Identity(SETTINGS, INPUT).differences(Identity(SETTINGS | {"eos": "x" * 500}, INPUT))
    assert line.startswith('eos: "xxx') and line.endswith('... (made with "auto")') and len(line) < 100


def test_settings_are_compared_as_they_are_written_down(tmp_path: Path) -> None:
    """A folder knows its settings from JSON, which has lists only: the same settings as a tuple are no others."""
    settings = SETTINGS | {"filters": {"language": {"keep": ("en", "de")}}}
    with run_in(tmp_path) as run:
        identity = Identity(settings, run.inputs.write(listed(A)))
        run.stage(units(1))
        run.start(identity)
        run.require_same(identity)
        assert run.identity().run_id == identity.run_id


def test_the_run_id_names_what_the_result_depends_on() -> None:
    """Equal settings and input, however they are ordered, have one id; any change gives another."""
    identity = Identity(SETTINGS, INPUT)
    assert identity.run_id == Identity(dict(reversed(SETTINGS.items())), dict(reversed(INPUT.items()))).run_id
    assert identity.run_id == Identity(json.loads(json.dumps(SETTINGS)), INPUT).run_id
    assert re.fullmatch(r"[0-9a-f]{16}", identity.run_id)
    others = [
        Identity(SETTINGS | {"limit": 1}, INPUT),
        Identity(SETTINGS | {"datasets": [{"weight": 2.0}]}, INPUT),
        Identity(SETTINGS, INPUT | {"fingerprint": "g"}),
    ]
    assert len({identity.run_id, *(other.run_id for other in others)}) == 4


BEFORE = A, B, C = (File("a.jsonl"), File("b.jsonl"), File("c.jsonl"))


@pytest.mark.parametrize(
    ("after", "named", "not_named"),
    [
        pytest.param((A, File("b.jsonl", 11), C), ["b.jsonl"], ["a.jsonl", "c.jsonl"], id="grown"),
        pytest.param((A, File("b.jsonl", 10, "2"), C), ["b.jsonl"], ["a.jsonl", "c.jsonl"], id="touched"),
        pytest.param((*BEFORE, File("d.jsonl")), ["d.jsonl"], ["a.jsonl", "b.jsonl", "c.jsonl"], id="added last"),
        pytest.param(BEFORE[:2], ["c.jsonl"], ["a.jsonl", "b.jsonl"], id="last one gone"),
        pytest.param((File("0.jsonl"), *BEFORE), ["0.jsonl"], ["b.jsonl", "c.jsonl"], id="added first"),
        pytest.param(BEFORE[1:], ["a.jsonl"], ["c.jsonl"], id="first one gone"),
    ],
)
def test_changed_files_are_named(
    tmp_path: Path, after: tuple[File, ...], named: list[str], not_named: list[str]
) -> None:
    """The files that changed, were added or are gone, and no others."""
    start(tmp_path, files=BEFORE)
    with run_in(tmp_path) as run:
        run.inputs.write(listed(*after))
        told = " ".join(run.inputs.changes())
    assert [name for name in named if name not in told] == []
    assert [name for name in not_named if name in told] == []


@pytest.mark.parametrize("finished", [False, True])
def test_where_a_job_begins_follows_from_settings_and_input(tmp_path: Path, finished: bool) -> None:
    """Other input is taken in, other settings are refused by name, what is the same is done or resumed."""
    identity = start(tmp_path)
    if finished:
        Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", identity.settings, identity.input, ()).write(tmp_path)
    other_input = dataclasses.replace(identity, input=INPUT)
    other_settings = dataclasses.replace(identity, settings=SETTINGS | {"eos": "none"})
    with run_in(tmp_path) as run:
        assert run.where_to_begin(identity, overwrite=False, has_results=True) == (FINISHED if finished else UNFINISHED)
        assert run.where_to_begin(identity, overwrite=True, has_results=True) == (NEW if finished else UNFINISHED)
        assert run.where_to_begin(other_input, overwrite=False, has_results=True) == UNFINISHED
        assert run.where_to_begin(other_settings, overwrite=True, has_results=True) == NEW
        with pytest.raises(MismatchError, match=r'eos: "none" \(made with "auto"\)'):
            run.where_to_begin(other_settings, overwrite=False, has_results=True)
        if not finished:
            assert run.where_to_begin(other_settings, overwrite=False, has_results=False) == NEW


def test_an_unfinished_run_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    """Tokens are not made where a table is being made."""
    start(tmp_path)
    with pytest.raises(ConfigError, match="holds a token store"), RunFolder(tmp_path, TABLE):
        pass


def test_equal_identities_go_on(tmp_path: Path) -> None:
    """Nothing changed, nothing is refused."""
    start(tmp_path, files=BEFORE)
    with run_in(tmp_path) as run:
        run.require_same(Identity(SETTINGS, run.inputs.write(listed(*BEFORE))))


def test_the_order_of_files_is_part_of_the_identity(tmp_path: Path) -> None:
    """The same files in another order give other documents first, so they are another input."""
    with run_in(tmp_path) as run:
        assert run.inputs.write(listed(*BEFORE)) != run.inputs.write(listed(*BEFORE[::-1]))


def test_the_data_set_of_a_file_is_part_of_the_identity(tmp_path: Path) -> None:
    """The same files divided otherwise among datasets are another input; each is listed with its dataset."""
    with run_in(tmp_path) as run:
        together = run.inputs.write([(0, A), (0, B)])
        apart = run.inputs.write([(0, A), (1, B)])
        assert together["bytes"] == apart["bytes"] == 20
        assert together["fingerprint"] != apart["fingerprint"]
        assert [[file["path"] for file in run.inputs.listed(k)] for k in range(2)] == [["a.jsonl"], ["b.jsonl"]]


# ---- job arrays: several processes at one run ----


def task_of(out: Path, index: int, of: int = 2) -> RunFolder:
    return run_in(out, ArrayTask("tokenize", index, of))


def test_tasks_record_beside_each_other_and_the_run_gathers_them(tmp_path: Path) -> None:
    """Each task appends to a file of its own; whoever goes on alone finds all of them in one."""
    start(tmp_path, 4)
    with task_of(tmp_path, 0) as first, task_of(tmp_path, 1) as second:
        records_of(first).add(record(tmp_path, 0))
        records_of(second).add(record(tmp_path, 3))
    with task_of(tmp_path, 0) as again:
        assert pending(records_of(again)) == [(1, (0, 0)), (2, (0, 0))]
    assert pending(resumed(tmp_path)) == [(1, (0, 0)), (2, (0, 0))]
    assert [path.name for path in (tmp_path / "run").glob("records*")] == ["records.jsonl"]


def test_a_unit_that_two_tasks_did_counts_once(tmp_path: Path) -> None:
    """Another number of tasks on the second try may give a unit to two: the first record holds."""
    start(tmp_path, 2)
    line = record(tmp_path, 0).as_json()
    for of in (1, 2):
        with task_of(tmp_path, 0, of) as run:
            run.journal.append(RECORDS, line)
    records = resumed(tmp_path)
    assert pending(records) == [(1, (0, 0))]
    assert records.counts["documents"] == 2
    assert len(list(records.all())) == 1


def test_who_has_the_run_to_himself_waits_for_no_task_and_the_other_way_round(tmp_path: Path) -> None:
    """A whole run is refused while a task works, a task while a whole run does, and a task twice."""
    start(tmp_path)
    with task_of(tmp_path, 0), task_of(tmp_path, 1):
        for other in (run_in(tmp_path), task_of(tmp_path, 1)):
            with pytest.raises(ConfigError, match=r"another (run is using it|task is running)"), other:
                pass
        assert run_in(tmp_path).presence.is_anybody_here()
    with run_in(tmp_path), pytest.raises(ConfigError, match="another run is using it"), task_of(tmp_path, 0):
        pass
    assert not run_in(tmp_path).presence.is_anybody_here()
