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
from milldam.run.identity import Identity
from milldam.run.old_folder import FINISHED, NEW, RECORDS, UNFINISHED, Run, require_complete
from milldam.run.old_records import PartRecord, UnitSet, in_plan_order, shards_in_order
from milldam.run.old_shares import Share
from milldam.sources.units import Slice, Unit
from milldam.stores.tokens.manifest import Manifest

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
    """Files of the only data set."""
    return [(0, file) for file in files]


def start(out: Path, count: int = 3, files: tuple[File, ...] = (File("corpus.jsonl"),)) -> Identity:
    """A folder with a plan in it."""
    with Run(out) as run:
        identity = Identity(SETTINGS, run.write_inputs(listed(*files)))
        assert run.stage(units(count)) == count
        run.start(identity, {"tokenizer.json": b"{}"})
    return identity


def shard(out: Path, unit: int, part: int = 0, split: str = "train") -> dict[str, Any]:
    """What is recorded of a shard that lies in the folder."""
    name = f"{split}-{unit:05d}" + (f"-{part:03d}" if part else "")
    for suffix in ("bin", "idx"):
        (out / f"{name}.{suffix}").write_bytes(b"12345678")
    files = {suffix: {"bytes": 8, "xxh3": ""} for suffix in ("bin", "idx")}
    counts = {"documents": 2, "tokens": 4, "text_bytes": 9, "characters": 9}
    return {"name": name, "split": split, **counts, **files}


def record(
    out: Path, unit: int, part: int = 0, *, last: bool = True, batches: int = 1, splits: tuple[str, ...] = ("train",)
) -> PartRecord:
    """A finished part whose shards lie in the folder."""
    shards = [shard(out, unit, part, split) for split in splits]
    return PartRecord(unit, part, shards, {"clean": {"empty": 1}}, batches, last, read=3)


def add(out: Path, *records: PartRecord) -> None:
    with Run(out) as run:
        for one in records:
            run.add(one)


def resumed(out: Path) -> Run:
    """The run as the next command finds it."""
    with Run(out) as run:
        run.resume()
        return run


def pending(run: Run) -> list[tuple[int, tuple[int, int]]]:
    return [(unit, run.done_so_far(unit)) for unit in run.pending()]


# ---- plan and records ----


def test_a_folder_is_new_then_unfinished_then_finished(tmp_path: Path) -> None:
    """The state follows what lies in the folder, the manifest last."""
    out = tmp_path / "s"
    assert Run(out).state() == NEW
    start(out)
    assert Run(out).state() == UNFINISHED
    Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", SETTINGS, INPUT, ()).write(out)
    assert Run(out).state() == FINISHED
    assert Run(out).identity() == Identity(SETTINGS, INPUT)


def test_units_come_back_as_they_were_planned(tmp_path: Path) -> None:
    """The plan on disk gives the same units in the same order."""
    start(tmp_path / "s", 3)
    with Run(tmp_path / "s") as run:
        assert run.resume() == 3
        assert [run.unit(number, Unit.from_json) for number in run.pending()] == units(3)
        assert list(run.all_units(Unit.from_json)) == units(3)
        assert run.pending_bytes() == sum(unit.size for unit in units(3))


def test_recorded_units_are_not_done_again(tmp_path: Path) -> None:
    """A complete unit is left out; of a part of one it is known where to go on."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 2), record(tmp_path, 1, 0, last=False, batches=3))
    run = resumed(tmp_path)
    assert pending(run) == [(0, (0, 0)), (1, (1, 3))]
    assert run.progress.documents == 4


def test_shards_are_in_plan_order_whatever_the_order_of_work(tmp_path: Path) -> None:
    """The manifest lists units and their parts in order, though they were finished in another."""
    start(tmp_path)
    add(tmp_path, record(tmp_path, 2), record(tmp_path, 0, 0, last=False), record(tmp_path, 1), record(tmp_path, 0, 1))
    records = in_plan_order(resumed(tmp_path).appended_files(RECORDS))
    names = [shard.name for shard in shards_in_order(records)]
    assert names == ["train-00000", "train-00000-001", "train-00001", "train-00002"]


def test_shards_are_listed_split_after_split_with_training_first(tmp_path: Path) -> None:
    """A split's documents lie together: train, then the others by name, each in plan order."""
    splits = ("val", "test", "train")
    records = [record(tmp_path, unit, splits=splits) for unit in (0, 1)]
    assert [shard.name for shard in shards_in_order(records)] == [
        f"{split}-{unit:05d}" for split in ("train", "test", "val") for unit in (0, 1)
    ]


def test_an_incomplete_run_can_not_be_finished(tmp_path: Path) -> None:
    """As long as a unit is missing there is no store."""
    start(tmp_path, 2)
    add(tmp_path, record(tmp_path, 0))
    with pytest.raises(Exception, match="1 units are not done"):
        require_complete(resumed(tmp_path), 2)


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
    run = resumed(out)
    done = torn.count(b"\n")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:done])
    assert [index for index, _ in pending(run)] == list(range(done, 3))
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
    path = tmp_path / f"train-00000.{suffix}"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"1234567" if damage == "short" else b"123456789")
    run = resumed(tmp_path)
    assert [index for index, _ in pending(run)] == [0, 2]
    assert [one.unit for one in run.records()] == [1]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_record_that_misses_one_of_its_shards_is_dropped(tmp_path: Path, split: str) -> None:
    """A part is done when the shards of all its splits are there."""
    start(tmp_path, 2)
    add(tmp_path, *(record(tmp_path, unit, splits=("train", "val")) for unit in range(2)))
    (tmp_path / f"{split}-00001.bin").unlink()
    run = resumed(tmp_path)
    assert pending(run) == [(1, (0, 0))]
    assert run.progress.documents == 4


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_part_takes_the_later_parts_of_its_unit_with_it(tmp_path: Path, gone: int) -> None:
    """A unit goes on from its last unbroken part: what follows a hole is made again, so that nothing is lost."""
    start(tmp_path, 2)
    parts = [record(tmp_path, 0, part, last=part == 2, batches=part + 1) for part in range(3)]
    add(tmp_path, *parts, record(tmp_path, 1))
    (tmp_path / f"{parts[gone].shards[0]['name']}.bin").unlink()
    assert pending(resumed(tmp_path)) == [(0, (gone, gone))]


def test_an_empty_unit_is_complete_without_a_shard(tmp_path: Path) -> None:
    """A unit that gave no document is not done again."""
    start(tmp_path, 2)
    add(tmp_path, PartRecord(0, 0, [], {"read": {"not_utf8": 3}}, 1, True))
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
    ours = ("milldam.json", "_staged-00000.facts", "rejects.jsonl", "dropped.jsonl.zst", "packed/train-00000.bin")
    ours += ("run/counts.jsonl", "run/arranged.jsonl", "run/summary.json", "run/report.html", "run/dedup/hashes-0")
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
    plan = resumed(tmp_path).plan()
    assert (plan["settings"], plan["input"]) == (identity.settings, identity.input)
    assert before <= plan["started"] <= begun


def test_all_units_are_those_of_the_plan_done_or_not(tmp_path: Path) -> None:
    """Every stage goes over the same units, in plan order; a plan that has not begun is told from the one that has."""
    start(tmp_path, 3)
    add(tmp_path, record(tmp_path, 1))
    with Run(tmp_path) as run:
        run.resume()
        assert list(run.all_units(Unit.from_json)) == units(3)
        repeated = [dataclasses.replace(unit, dataset=1, copy=unit.index, original=0) for unit in units(2)[1:]]
        assert run.stage(repeated) == 1
        assert list(run.all_units(Unit.from_json, staged=True)) == repeated
        assert list(run.all_units(Unit.from_json)) == units(3)


# ---- lines of other stages ----


def lines(out: Path, name: str = "counts.jsonl") -> list[dict[str, Any]]:
    with Run(out) as run:
        return list(run.appended(name))


def append(out: Path, *values: dict[str, Any]) -> None:
    with Run(out) as run:
        for value in values:
            run.append("counts.jsonl", value)


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
    with Run(tmp_path) as first:
        assert Run(tmp_path).is_locked()
        with pytest.raises(ConfigError, match="another run is at work"), Run(tmp_path):
            pass
        assert first.state() == UNFINISHED
    assert not Run(tmp_path).is_locked()
    with Run(tmp_path):
        pass


def test_a_refused_second_run_leaves_the_first_one_alone(tmp_path: Path) -> None:
    """A run that was kept out removes nothing of the run at work, though that has no plan yet."""
    with Run(tmp_path / "s") as first:
        first.write_inputs(listed(File("corpus.jsonl")))
        with pytest.raises(ConfigError), Run(tmp_path / "s"):
            pass
        assert list(first.inputs(listed_now=True))
        assert Run(tmp_path / "s").is_locked()


def test_watching_a_folder_does_not_keep_a_run_out(tmp_path: Path) -> None:
    """`milldam status` in a loop looks at the lock; a run that starts at that moment must not be refused."""
    start(tmp_path)
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            Run(tmp_path).is_locked()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(200):
            with Run(tmp_path):
                pass
    finally:
        stop.set()
        watcher.join()


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    """A folder with files that are not ours is refused, and nothing is put into it."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty and not made by milldam"), Run(tmp_path):
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
    with Run(tmp_path) as run:
        assert run.state() == NEW


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    """A file is not overwritten by a store."""
    (tmp_path / "s").write_text("mine")
    with pytest.raises(ConfigError, match="is a file; -o names a folder"), Run(tmp_path / "s"):
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
    assert re.fullmatch(r"input: 2 files, .* \(made from 1 files, .*\)", found[-1])


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
    with Run(tmp_path) as run:
        identity = Identity(settings, run.write_inputs(listed(A)))
        run.stage(units(1))
        run.start(identity, {})
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
@pytest.mark.parametrize("finished", [False, True])
def test_changed_files_are_named(
    tmp_path: Path, after: tuple[File, ...], named: list[str], not_named: list[str], finished: bool
) -> None:
    """A refusal names the files that changed, were added or are gone, and no others."""
    identity = start(tmp_path, files=BEFORE)
    if finished:
        Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", identity.settings, identity.input, ()).write(tmp_path)
    with Run(tmp_path) as run:
        now = dataclasses.replace(identity, input=run.write_inputs(listed(*after)))
        with pytest.raises(MismatchError) as caught:
            run.require_same(now)
    message = str(caught.value)
    assert message.endswith("--overwrite.")
    assert [name for name in named if name not in message] == []
    assert [name for name in not_named if name in message] == []


def test_equal_identities_go_on(tmp_path: Path) -> None:
    """Nothing changed, nothing is refused."""
    start(tmp_path, files=BEFORE)
    with Run(tmp_path) as run:
        run.require_same(Identity(SETTINGS, run.write_inputs(listed(*BEFORE))))


def test_the_order_of_files_is_part_of_the_identity(tmp_path: Path) -> None:
    """The same files in another order give other documents first, so they are another input."""
    with Run(tmp_path) as run:
        assert run.write_inputs(listed(*BEFORE)) != run.write_inputs(listed(*BEFORE[::-1]))


def test_the_data_set_of_a_file_is_part_of_the_identity(tmp_path: Path) -> None:
    """The same files divided otherwise among data sets are another input; each is listed with its data set."""
    with Run(tmp_path) as run:
        together = run.write_inputs([(0, A), (0, B)])
        apart = run.write_inputs([(0, A), (1, B)])
        assert together["bytes"] == apart["bytes"] == 20
        assert together["fingerprint"] != apart["fingerprint"]
        inputs = [(file["path"], file.get("dataset", 0)) for file in run.inputs(listed_now=True)]
        assert inputs == [("a.jsonl", 0), ("b.jsonl", 1)]


# ---- shares: several processes at one run ----


def share_of(out: Path, index: int, of: int = 2) -> Run:
    return Run(out, share=Share("tokenize", index, of))


def test_shares_record_beside_each_other_and_the_run_gathers_them(tmp_path: Path) -> None:
    """Each share appends to a file of its own; whoever goes on alone finds all of them in one."""
    start(tmp_path, 4)
    with share_of(tmp_path, 0) as first, share_of(tmp_path, 1) as second:
        first.resume()
        second.resume()
        first.add(record(tmp_path, 0))
        second.add(record(tmp_path, 3))
    with share_of(tmp_path, 0) as again:
        again.resume()
        assert pending(again) == [(1, (0, 0)), (2, (0, 0))]
    assert pending(resumed(tmp_path)) == [(1, (0, 0)), (2, (0, 0))]
    assert [path.name for path in (tmp_path / "run").glob("records*")] == ["records.jsonl"]


def test_a_unit_that_two_shares_did_counts_once(tmp_path: Path) -> None:
    """Another number of shares on the second try may give a unit to two: the first record holds."""
    start(tmp_path, 2)
    for of in (1, 2):
        with share_of(tmp_path, 0, of) as run:
            run.add(record(tmp_path, 0))
    run = resumed(tmp_path)
    assert pending(run) == [(1, (0, 0))]
    assert run.progress.documents == 2
    assert len(list(run.records())) == 1


def test_who_has_the_run_to_himself_waits_for_no_share_and_the_other_way_round(tmp_path: Path) -> None:
    """A whole run is refused while a share works, a share while a whole run does, and a share twice."""
    start(tmp_path)
    with share_of(tmp_path, 0), share_of(tmp_path, 1):
        for other in (Run(tmp_path), share_of(tmp_path, 1)):
            with pytest.raises(ConfigError, match=r"another (run|task) is at work"), other:
                pass
        assert Run(tmp_path).is_locked()
    with Run(tmp_path), pytest.raises(ConfigError, match="another run is at work"), share_of(tmp_path, 0):
        pass
    assert not Run(tmp_path).is_locked()


@given(done=st.sets(st.integers(0, 70)), units=st.integers(0, 90))
def test_a_set_of_units_is_a_set(done: set[int], units: int) -> None:
    """A bit a unit holds what a set would."""
    found = UnitSet()
    for unit in [*done, *done]:
        found.add(unit)
    assert len(found) == len(done)
    assert [unit in found for unit in range(100)] == [unit in done for unit in range(100)]
    assert found.missing(units).tolist() == [unit not in done for unit in range(units)]
