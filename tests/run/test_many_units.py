"""Jobs of very many units: what is held and what is spent does not grow with each unit more than it must."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.files import seal_line
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.stores.kinds import TOKENS
from milldam.stores.tokens.manifest import Manifest

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


# ---- a whole job ----


@pytest.mark.slow
def test_a_killed_job_of_many_units_is_finished_with_every_shard_in_plan_order(many: Any, tmp_path: Path) -> None:
    """None is missing, none is there twice; split after split. What is durable when it is killed stays."""
    out = tmp_path / "store"
    many.do_step("plan", out, UNITS, lambda name: None)
    many.make_files(out, UNITS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    killed = subprocess.run([sys.executable, "-c", many.RUN_STEP, "serial", out, str(UNITS)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    run = RunFolder(out, TOKENS)
    assert Records(run, RECORDS, run.units.keys()).complete == UNITS // 2
    many.do_step("finish", out, UNITS, lambda name: None)
    shards = Manifest.read(out).shards
    names = {split: [shard.name for shard in shards if shard.split == split] for split in ("train", "val")}
    assert names["train"] == [f"train-{unit:032x}" for unit in range(UNITS)]
    assert names["val"] == [f"val-{unit:032x}" for unit in range(0, UNITS, 100)]
    assert [shard.split for shard in shards] == ["train"] * UNITS + ["val"] * (UNITS // 100)


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
