"""What a job will take, said beforehand: from a sample, without writing anything."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import milldam
from jobs import invoke, make_texts, write_lines
from milldam.errors import ResourceError
from milldam.job.estimating import UNITS_SAMPLED, Estimate, require_disk, survey
from milldam.sources.units import Slice, Unit
from preprocess_jobs import config_of, fresh_texts, preprocess, write_config, write_gz, write_parquet


def unit(index: int, size: int, compression: str | None = None) -> Unit:
    return Unit(index, (Slice("a.jsonl", "jsonl", compression, size=size),))


@given(sizes=st.lists(st.integers(0, 10**9), max_size=400))
def test_a_survey_holds_few_units_spread_over_all(sizes: list[int]) -> None:
    """The total is exact for what is not packed; the sample is evenly spread and bounded."""
    totals, some = survey(unit(k, size) for k, size in enumerate(sizes))
    assert sum(totals.values()) == sum(sizes)
    picked = [one.index for one in some]
    assert len(picked) <= 2 * UNITS_SAMPLED and len(picked) >= min(len(sizes), UNITS_SAMPLED)
    steps = {after - before for before, after in itertools.pairwise(picked)}
    assert picked[:1] == [0][: len(sizes)] and len(steps) <= 1
    if steps:
        assert len(sizes) - picked[-1] <= max(steps)


def test_packed_input_counts_by_what_it_unpacks_to() -> None:
    """About, by the kind of compression."""
    assert survey([unit(0, 1000, "gz")])[0] == {0: 3000} and survey([])[0] == {}


def test_a_full_disk_is_told_with_both_sizes() -> None:
    """What is needed, and what is free."""
    needed = Estimate(1, 1, 1, store_bytes=3 * 10**9, temporary_bytes={"fingerprints": 10**9}, free_bytes=10**9)
    with pytest.raises(ResourceError, match=r"about 4 GB are needed \(3 GB for the store.*1 GB are free"):
        require_disk(needed, "out")
    require_disk(Estimate(1, 1, 1, store_bytes=10, free_bytes=10), "out")


# ---- the plan of a job ----


def plan_of(config: Path, *command: str) -> dict[str, Any]:
    done = invoke(*(command or ("plan",)), config, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "gz"])
def test_the_plan_agrees_with_the_result(tmp_path: Path, kind: str) -> None:
    """Documents and tokens within a fifth (a third for a stream, whose size is a guess); nothing is written."""
    texts = list(make_texts(1_500_000, seed=3))
    write = {"jsonl": write_lines, "parquet": write_parquet, "gz": write_gz}[kind]
    path = write(tmp_path / {"gz": "a.jsonl.gz"}.get(kind, f"a.{kind}"), texts)
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path, dedup="off", shard_size="200KB"))
    before = sorted(tmp_path.iterdir())
    estimate = plan_of(config)["estimate"]
    assert sorted(tmp_path.iterdir()) == before
    store = preprocess(tmp_path / "out", path, dedup="off", shard_size="200KB")
    share = 0.34 if kind == "gz" else 0.2
    # A compressed column of a Parquet file is no measure of its text.
    share = 0.5 if kind == "parquet" else share
    assert abs(estimate["documents"] / len(store) - 1) < share
    assert abs(estimate["tokens"] / store.tokens - 1) < share
    real = sum(file.stat().st_size for file in store.path.iterdir() if file.suffix in (".bin", ".idx"))
    assert abs(estimate["store_bytes"] / real - 1) < share + 0.2


def test_a_dry_run_is_the_plan(tmp_path: Path) -> None:
    """The same text, and no folder; --json gives the same numbers."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(200))
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path))
    planned, dry = invoke("plan", config), invoke("preprocess", config, "--dry-run")
    assert planned.exit_code == dry.exit_code == 0 and not (tmp_path / "out").exists()
    for word in ("documents 200", "tokens", "disk", "time", "(new)"):
        assert word in planned.stdout and word in dry.stdout
    as_json = plan_of(config)
    assert as_json["estimate"]["documents"] == 200
    assert set(as_json["plan"]["stages"]) >= {"fingerprint", "group", "tokenize"}


def test_the_plan_lists_the_stages_of_the_job(tmp_path: Path) -> None:
    """Everything that is on, in order, with its temporary files."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(50))
    settings: dict[str, Any] = {
        "dedup": {"near": {}, "index": tmp_path / "index"},
        "splits": {"val_tokens": 10},
        "packing": {"write": True},
        "sequence_len": 8,
    }
    sets = [{"path": path, "max_documents": 40}]
    planned = plan_of(write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, **settings)))
    stages = ["count", "fingerprint", "group", "near", "join", "tokenize", "arrange", "index", "pack", "report"]
    assert planned["plan"]["stages"] == stages
    assert set(planned["estimate"]["temporary_bytes"]) >= {"fingerprints", "grouping", "signatures", "staged tokens"}
    assert not (tmp_path / "index").exists() and not (tmp_path / "out").exists()


def test_the_plan_knows_what_is_in_the_folder(tmp_path: Path) -> None:
    """Up to date; made from something else: an error, unless it is to be overwritten."""
    path = write_lines(tmp_path / "a.jsonl", ["a", "b"])
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path, dedup="off"))
    preprocess(tmp_path / "out", path, dedup="off")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}
    assert "up to date" in invoke("plan", config).stdout
    other = invoke("preprocess", config, "--dry-run", "--set", "seed=3")
    assert other.exit_code == 2 and "seed" in other.stderr
    replaced = invoke("preprocess", config, "--dry-run", "--set", "seed=3", "--overwrite")
    assert replaced.exit_code == 0, replaced.stderr
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "out").rglob("*")}


def test_the_plan_of_a_slice_is_about_the_slice(tmp_path: Path) -> None:
    """Ten documents of a thousand are not estimated as a thousand; nor is a weight of two once."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(1000))

    def documents(**more: Any) -> int:
        config = config_of(tmp_path / "out", [{"path": path, **more}], dedup="off")
        return int(plan_of(write_config(tmp_path / "c.yaml", config))["estimate"]["documents"])

    assert documents() == 1000
    assert documents(weight=2) == 2000
    assert documents(weight=0.5) <= 1000
    assert documents(max_documents=10) <= 100


def test_an_empty_input_has_a_plan_or_an_error(tmp_path: Path) -> None:
    """No division by nothing."""
    path = tmp_path / "a.txt"
    path.write_text("")
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path))
    done = invoke("plan", config)
    assert done.exit_code in (0, 3) and "Traceback" not in done.output
    with pytest.raises(milldam.MilldamError):
        preprocess(tmp_path / "out", path)
