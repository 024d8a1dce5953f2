"""The run folder: records that survive a crash, a lock, and the refusal to mix what does not belong together."""

from __future__ import annotations

import dataclasses
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
from milldam.files import seal_line
from milldam.run.array import ArrayTask
from milldam.run.folder import FINISHED, NEW, UNFINISHED, RunFolder, is_at_work
from milldam.run.records import RECORDS, Record, Records
from milldam.run.units import Identity
from milldam.sources.units import Slice, Unit
from milldam.stores.kinds import TABLE, TOKENS
from milldam.stores.tokens.manifest import Manifest

SETTINGS = {"tokenizer": "abc", "eos": "auto", "limit": None, "datasets": [{"weight": 1.0}], "clean": None}
INPUT = {"files": 1, "bytes": 10, "fingerprint": "f"}


@dataclass(frozen=True)
class File:
    """What the run folder needs to know of an input file."""

    path: str
    size: int = 10
    version: str = "1"


BEFORE = A, B, C = (File("a.jsonl"), File("b.jsonl"), File("c.jsonl"))


def units(count: int) -> list[Unit]:
    return [Unit(k, (Slice("corpus.jsonl", "jsonl", None, k, k + 1, 1),)) for k in range(count)]


def listed(*files: File) -> list[tuple[int, File]]:
    """Files of the only dataset."""
    return [(0, file) for file in files]


def run_in(out: Path, task: ArrayTask | None = None) -> RunFolder:
    return RunFolder(out, TOKENS, task=task)


def task_of(out: Path, index: int, of: int = 2) -> RunFolder:
    return run_in(out, ArrayTask("tokenize", index, of))


def start(out: Path, planned: list[Unit], files: tuple[File, ...] = (A,), *, anew: bool = True) -> Identity:
    """A folder with a plan in it."""
    with run_in(out) as run:
        identity = Identity(SETTINGS, run.inputs.write(listed(*files)))
        outputs = ("*.bin", "*.idx", "rejects.jsonl")
        run.start(identity, planned, {"tokenizer.json": b"{}"}, anew=anew, outputs=outputs)
    return identity


def finish(out: Path, identity: Identity) -> None:
    Manifest("uint16", 9, {"name": "t", "xxh3": ""}, "e", identity.settings, identity.input, ()).write(out)


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


def test_a_folder_is_new_then_unfinished_then_finished(tmp_path: Path) -> None:
    """The state follows what lies in the folder, the manifest last; a folder that was made beforehand is fine."""
    with run_in(tmp_path) as run:
        assert run.state() == NEW
    before = time.time()
    identity = start(tmp_path, units(3))
    plan = run_in(tmp_path).plan()
    assert before <= plan["started"] <= time.time() and plan["input"] == identity.input
    assert run_in(tmp_path).state() == UNFINISHED
    finish(tmp_path, dataclasses.replace(identity, input=INPUT))
    assert run_in(tmp_path).state() == UNFINISHED, "an older store that is being updated"
    finish(tmp_path, identity)
    assert run_in(tmp_path).state() == FINISHED
    assert run_in(tmp_path).identity() == identity


def test_recorded_units_are_not_done_again(tmp_path: Path) -> None:
    """Units come back as planned; a complete one is left out; of a part of one it is known where to go on, and whatever
    the order of work, records come in that of the plan."""
    start(tmp_path, units(4))
    done = record(tmp_path, 2), record(tmp_path, 1, 0, last=False), record(tmp_path, 0, 0, last=False)
    add(tmp_path, *done, record(tmp_path, 0, 1), *done)
    records = resumed(tmp_path)
    assert pending(records) == {1: 1, 3: 0} and records.counts["documents"] == 8
    assert [(unit, one.part) for unit, one in records.in_plan_order()] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert len((tmp_path / "run" / RECORDS).read_text().splitlines()) == 4, "reported twice, it is there once"
    with run_in(tmp_path) as run:
        assert [run.units.at(number, Unit.from_json) for number in (3, 1)] == [units(4)[3], units(4)[1]]
        assert list(run.units.all(Unit.from_json)) == units(4)
        assert records.pending_bytes(run.units.sizes()) == units(4)[1].size + units(4)[3].size


def test_a_unit_that_is_named_twice_is_done_twice(tmp_path: Path) -> None:
    """The same slices at two places of a plan have a key each, the same ones in every plan that names them."""
    start(tmp_path, [*units(2), *units(2)])
    keys = run_in(tmp_path).units.keys()
    assert len(set(keys.tolist())) == 4
    start(tmp_path, [units(2)[1], *units(2)], anew=False)
    assert set(run_in(tmp_path).units.keys().tolist()) == set(keys[[0, 1, 3]].tolist())


@given(keep=st.integers(0, 400))
def test_a_torn_last_line_is_mended(tmp_path_factory: pytest.TempPathFactory, keep: int) -> None:
    """Wherever the power failed while records were written, whole lines are kept and the rest is done again."""
    out = tmp_path_factory.mktemp("torn")
    start(out, units(3))
    add(out, record(out, 0), record(out, 1))
    path = out / "run" / RECORDS
    whole = path.read_bytes()
    torn = whole[: min(len(whole), whole.index(b"\n") + 1 + keep)]
    path.write_bytes(torn)
    records, done = resumed(out), torn.count(b"\n")
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:done])
    assert list(pending(records)) == list(range(done, 3))
    add(out, record(out, 2))
    assert path.read_bytes().count(b"\n") == done + 1


@pytest.mark.parametrize("missing", [0, 1, 2, 20, 36])
def test_a_damaged_line_costs_itself_alone(tmp_path: Path, missing: int) -> None:
    """Torn anywhere, or zeros, as some file systems leave them after a crash: what is added later is not lost, though
    a task of an array, which may not mend the file, appends it."""
    start(tmp_path, units(3))

    def append(*units: int) -> list[int]:
        with task_of(tmp_path, 0) as task:
            known = records_of(task)
            for unit in units:
                known.add(record(tmp_path, unit))
            known.close()
            return [unit for unit, _ in records_of(task).in_plan_order()]

    assert append(0, 1) == [0, 1]
    (path,) = (tmp_path / "run").glob("records@*")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - missing] if missing else data + bytes(30) + b"\n[]\n")
    survived = append()
    # With its line end alone missing, a line is whole to whoever reads it.
    assert survived == ([0, 1] if missing < 2 else [0])
    assert append(2) == [*survived, 2]


@pytest.mark.parametrize("name", ["train-00000-000.bin", "train-00000-000.idx", "val-00000-000.bin"])
@pytest.mark.parametrize("damage", ["missing", "short", "long"])
def test_a_record_without_its_whole_shards_is_dropped(tmp_path: Path, name: str, damage: str) -> None:
    """A shard that is gone or of another size is made again, and so is a part that misses one of its splits."""
    start(tmp_path, units(3))
    add(tmp_path, *(record(tmp_path, unit, splits=("train", "val")) for unit in range(2)), Record(units(3)[2].key))
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"1234567" if damage == "short" else b"123456789")
    records = resumed(tmp_path)
    assert pending(records) == {0: 0}, "a unit that gave nothing is complete without a shard"
    assert [unit for unit, _ in records.in_plan_order()] == [1, 2] and records.counts["documents"] == 2


@pytest.mark.parametrize("gone", [0, 1])
def test_a_missing_part_takes_the_later_parts_of_its_unit_with_it(tmp_path: Path, gone: int) -> None:
    """A unit goes on from its last unbroken part: what follows a hole is made again, so that nothing is lost."""
    start(tmp_path, units(2))
    parts = [record(tmp_path, 0, part, last=part == 2) for part in range(3)]
    add(tmp_path, *parts, record(tmp_path, 1))
    (tmp_path / next(iter(parts[gone].outputs))).unlink()
    assert pending(resumed(tmp_path)) == {0: gone}


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
    """One run at a time, though it has no plan yet: another is refused and removes nothing. `milldam status` in a loop,
    which looks at the lock, keeps nobody out."""
    with run_in(tmp_path / "s") as first:
        first.inputs.write(listed(A))
        assert is_at_work(tmp_path / "s" / "run")
        with pytest.raises(ConfigError, match="another run is using it"), run_in(tmp_path / "s"):
            pass
        assert list(first.inputs.listed())
    start(tmp_path / "s", units(1))
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            is_at_work(tmp_path / "s" / "run")

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(200):
            with run_in(tmp_path / "s"):
                pass
    finally:
        stop.set()
        watcher.join()
    assert not is_at_work(tmp_path / "s" / "run")


@pytest.mark.parametrize("mine", ["thesis.txt", "run/thesis.txt"])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, mine: str) -> None:
    """A folder with files that are not ours, or a file, is refused, and nothing is put into it."""
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    for name in (mine, "model-1.bin"):
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="not empty and not made by milldam"):
        start(tmp_path, units(1))
    with pytest.raises(ConfigError, match=r"is a file\. Name a folder"), run_in(tmp_path / mine):
        pass
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / mine).read_text() == "mine"


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


def test_the_run_id_names_what_the_result_depends_on(tmp_path: Path) -> None:
    """Equal settings and input, however they are ordered or written down, have one id; any change gives another."""
    identity = Identity(SETTINGS, INPUT)
    assert identity.run_id == Identity(dict(reversed(SETTINGS.items())), dict(reversed(INPUT.items()))).run_id
    assert re.fullmatch(r"[0-9a-f]{16}", identity.run_id)
    others = [
        Identity(SETTINGS | {"limit": 1}, INPUT),
        Identity(SETTINGS | {"datasets": [{"weight": 2.0}]}, INPUT),
        Identity(SETTINGS, INPUT | {"fingerprint": "g"}),
    ]
    assert len({identity.run_id, *(other.run_id for other in others)}) == 4
    with run_in(tmp_path) as run:
        tuples = Identity(SETTINGS | {"filters": {"keep": ("en", "de")}}, run.inputs.write(listed(A)))
        run.start(tuples, units(1))
        run.require_same(tuples)
        assert run.identity().run_id == tuples.run_id


@pytest.mark.parametrize(
    ("after", "named", "not_named"),
    [
        pytest.param(BEFORE, [], ["a.jsonl", "b.jsonl", "c.jsonl"], id="the same"),
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
    identity = start(tmp_path, units(1), BEFORE)
    with run_in(tmp_path) as run:
        assert (run.inputs.write(listed(*after)) == identity.input) == (after == BEFORE)
        told = " ".join(run.inputs.changes())
    assert [name for name in named if name not in told] == []
    assert [name for name in not_named if name in told] == []


def test_order_and_dataset_of_files_are_part_of_the_identity(tmp_path: Path) -> None:
    """Other documents come first, or are divided otherwise; each file is listed with its dataset."""
    with run_in(tmp_path) as run:
        together, turned = run.inputs.write(listed(A, B)), run.inputs.write(listed(B, A))
        apart = run.inputs.write([(0, A), (1, B)])
        assert together["bytes"] == apart["bytes"] == 20
        assert len({one["fingerprint"] for one in (together, turned, apart)}) == 3
        assert [[file["path"] for file in run.inputs.listed(k)] for k in range(2)] == [["a.jsonl"], ["b.jsonl"]]


@pytest.mark.parametrize("finished", [False, True])
def test_where_a_job_begins_follows_from_settings_and_input(tmp_path: Path, finished: bool) -> None:
    """Other input is taken in, other settings are refused by name, what is the same is done or resumed."""
    identity = start(tmp_path, units(1))
    if finished:
        finish(tmp_path, identity)
    other_input = dataclasses.replace(identity, input=INPUT)
    other_settings = dataclasses.replace(identity, settings=SETTINGS | {"eos": "none"})
    with run_in(tmp_path) as run:
        assert run.where_to_begin(identity, overwrite=False) == (FINISHED if finished else UNFINISHED)
        assert run.where_to_begin(identity, overwrite=True) == (NEW if finished else UNFINISHED)
        assert run.where_to_begin(other_input, overwrite=False) == UNFINISHED
        assert run.where_to_begin(other_settings, overwrite=True) == NEW
        if not finished:
            assert run.where_to_begin(other_settings, overwrite=False) == NEW  # nothing is recorded
            records_of(run).add(record(tmp_path, 0))
        with pytest.raises(MismatchError, match=r'eos: "none" \(made with "auto"\)'):
            run.where_to_begin(other_settings, overwrite=False)


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
