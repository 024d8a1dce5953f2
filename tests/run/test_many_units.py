"""Jobs of very many units: what is held and what is spent does not grow with each unit more than it must."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.errors import StoreError
from milldam.files import seal_line
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.manifest import NAME, Manifest, Shard, Tally

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDS = "records.jsonl"
UNITS = 10_000
MB = 10**6


@pytest.fixture(scope="module")
def many() -> Any:
    """The benchmark's simulated job."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import many_units

        yield many_units
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def killed(many: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of many units that was killed in the middle."""
    out = tmp_path_factory.mktemp("many") / "store"
    many.do_step("plan", out, UNITS, _no_clock)
    many.make_files(out, UNITS)
    ended = _step("serial", out)
    assert ended == -signal.SIGKILL
    return out


@pytest.fixture(scope="module")
def finished(many: Any, killed: Path) -> Path:
    """The same, resumed and finished."""
    assert _records(killed).complete == UNITS // 2
    many.do_step("finish", killed, UNITS, _no_clock)
    return killed


def _records(out: Path) -> Records:
    run = RunFolder(out, TOKENS)
    return Records(run, RECORDS, run.units.keys())


def _no_clock(name: str) -> None:
    """Nothing is timed here: other tests run beside it."""


def _step(step: str, out: Path, units: int = UNITS) -> int:
    """A step of the benchmark in a process of its own; how it ended."""
    paths = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths}
    code = "import sys, many_units; many_units.run_step(*sys.argv[1:])"
    return subprocess.run([sys.executable, "-c", code, step, str(out), str(units)], env=environment).returncode


# ---- a whole job ----


@pytest.mark.slow
def test_a_killed_job_of_many_units_is_finished_with_every_shard_in_plan_order(finished: Path) -> None:
    """None is missing, none is there twice; split after split."""
    shards = Manifest.read(finished).shards
    names = {split: [shard.name for shard in shards if shard.split == split] for split in ("train", "val")}
    assert names["train"] == [f"train-{unit:032x}" for unit in range(UNITS)]
    assert names["val"] == [f"val-{unit:032x}" for unit in range(0, UNITS, 100)]
    assert [shard.split for shard in shards] == ["train"] * UNITS + ["val"] * (UNITS // 100)


def test_a_finished_job_of_many_units_is_recognized_in_a_kilobyte_or_two_a_shard(many: Any, finished: Path) -> None:
    """Its manifest is parsed whole, and let go."""
    with _traced() as peak:
        RunFolder(finished, TOKENS).identity()
    assert peak() < 3000 * UNITS


def test_records_that_all_stand_are_left_as_they_are(finished: Path) -> None:
    """The file of a million records is not written again by every resume."""
    records = finished / "run" / RECORDS
    before = records.stat()
    assert _records(finished).complete == UNITS
    after = records.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.slow
def test_a_hundred_thousand_units_stay_within_the_budget(tmp_path: Path) -> None:
    """Plan, kill, resume and finish: each under 300 MB."""
    command = [sys.executable, str(BENCHMARKS / "many_units.py"), "--units", "100000", "--local", "20000"]
    figures = tmp_path / "figures.json"
    ran = subprocess.run([*command, "--folder", str(tmp_path), "--json", str(figures)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    steps = {one["step"]: one for one in json.loads(figures.read_text())}
    for step in ("plan", "serial", "resume", "local", "finish"):
        assert steps[step]["peak_bytes"] < 300 * MB, step


class _traced:  # noqa: N801 - used like a function
    """Memory that Python allocates inside; call what it gives for the peak."""

    def __enter__(self) -> Any:
        self._peak = 0
        tracemalloc.start()
        return lambda: self._peak

    def __exit__(self, *_: object) -> None:
        self._peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


# ---- the manifest's text ----


_names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda name: not set(name) & {"/", "\\", "\0"} and not name.startswith(".")
)
_files = st.fixed_dictionaries(
    {"bytes": st.integers(0, 2**50), "xxh3": st.text("0123456789abcdef", min_size=1, max_size=16)}
)
_shards = st.builds(
    Shard,
    name=_names,
    split=st.sampled_from(["train", "val", "ä\n ],\n"]),
    documents=st.integers(0, 2**50),
    tokens=st.integers(0, 2**50),
    text_bytes=st.integers(0, 2**50),
    characters=st.integers(0, 2**50),
    bin=_files,
    idx=_files,
)


@settings(max_examples=30)
@given(st.lists(_shards, max_size=4))
def test_a_manifest_is_read_as_it_was_written(tmp_path_factory: pytest.TempPathFactory, shards: list[Shard]) -> None:
    """It is JSON with a shard a line; refused when somebody wrote it anew."""
    folder = tmp_path_factory.mktemp("manifest")
    odd = {"shards": [], "nested": {"shards": [{"name": "\n ],\n"}]}}
    tokenizer = {"name": "t", "xxh3": ""}
    manifest = Manifest("uint16", 9, tokenizer, "e", odd, {"files": 1}, tuple(shards), (Tally("too\nshort"),), 3)
    manifest.write(folder)
    text = (folder / NAME).read_text()
    assert [one["name"] for one in json.loads(text)["shards"]] == [shard.name for shard in shards]
    assert sum(line.startswith('  {"name"') for line in text.splitlines()) == len(shards)
    assert Manifest.read(folder) == manifest
    assert [path.name for path in folder.iterdir() if path.is_file()] == [NAME]
    (folder / NAME).write_text(json.dumps(json.loads(text) | {"encoder": "another"}, indent=1) + "\n")
    with pytest.raises(StoreError, match="not as it was written"):
        Manifest.read(folder)


# ---- records ----


@settings(max_examples=30)
@given(st.permutations([unit for unit in range(5) for _ in range(2)]), st.integers(1, 200))
def test_records_come_in_plan_order_and_torn_ones_not_at_all(
    tmp_path_factory: pytest.TempPathFactory, units: list[int], cut: int
) -> None:
    """Whatever the order of the work; parts of a unit come one after the other."""
    out = tmp_path_factory.mktemp("records")
    order = [(unit, units[:at].count(unit)) for at, unit in enumerate(units)]
    lines = [seal_line(Record(f"{unit:016x}", part, last=part == 1).as_json()) for unit, part in order]
    torn = lines[0][: min(cut, len(lines[0]) - 2)] + b"\n"
    (out / "run").mkdir()
    (out / "run" / RECORDS).write_bytes(b"".join([*lines[:4], torn, *lines[4:]]) + lines[1][:-1])
    records = Records(RunFolder(out, TOKENS), RECORDS, np.arange(5, dtype=np.uint64))
    assert [(unit, one.part) for unit, one in records.in_plan_order()] == sorted(order)
