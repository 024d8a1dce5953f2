"""What a job will take, said beforehand: from a sample, without writing anything."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import invoke, make_texts, write_lines
from tests.kit.preprocess_jobs import config_of, fresh_texts, preprocess, write_config, write_gz, write_parquet

import milldam
from milldam.config.loading import load_config
from milldam.errors import ResourceError
from milldam.pipeline import estimating
from milldam.pipeline.estimating import UNITS_SAMPLED, Survey, require_disk
from milldam.pipeline.needs import Load, Machines, find_needs
from milldam.sources.units import Slice, Unit


def unit(index: int, size: int, compression: str | None = None) -> Unit:
    return Unit(index, (Slice("a.jsonl", "jsonl", compression, size=size),))


@given(sizes=st.lists(st.integers(0, 10**9), max_size=400))
def test_a_survey_holds_few_units_spread_over_all(sizes: list[int]) -> None:
    """The total is exact for what is not packed; the sample is evenly spread and bounded."""
    survey = Survey.of(unit(k, size) for k, size in enumerate(sizes))
    assert survey.units == len(sizes) and survey.unpacked_bytes == sum(sizes)
    picked = [one.index for one in survey.some]
    assert len(picked) <= 2 * UNITS_SAMPLED and len(picked) >= min(len(sizes), UNITS_SAMPLED)
    steps = {after - before for before, after in itertools.pairwise(picked)}
    assert picked[:1] == [0][: len(sizes)] and len(steps) <= 1
    if steps:
        assert len(sizes) - picked[-1] <= max(steps)


def test_packed_input_counts_by_what_it_unpacks_to() -> None:
    """About, by the kind of compression; what is repeated counts once."""
    survey = Survey.of([unit(0, 1000, "gz"), replace(unit(1, 1000, "gz"), copy=1, original=0)])
    assert survey.unpacked_bytes == 3000 and survey.sizes == {(0, "jsonl", "gz"): 1000} and survey.units == 2
    assert Survey.of([]).unpacked_bytes == 0


def test_a_full_disk_is_told_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is needed, and what is free."""
    monkeypatch.setattr(estimating, "free_bytes", lambda _: 10**9)
    with pytest.raises(ResourceError, match=r"about 3.8 TB are needed \(3.8 TB for the store.*1 GB are free"):
        require_disk(
            find_needs(full_config(tmp_path), load(documents=10**7, token_bytes=10**10), ("pack",), Machines()), "out"
        )
    few = load(documents=10, tokens=10, token_bytes=20, units=1)
    require_disk(find_needs(full_config(tmp_path), few, ("pack",), Machines()), "out")


# ---- the plan of a job ----


def plan_of(config: Path, *command: str) -> dict[str, Any]:
    done = invoke(*(command or ("plan",)), config, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "gz"])
def test_the_plan_agrees_with_the_result(tmp_path: Path, kind: str) -> None:
    """Documents and tokens within a fifth, also of a packed stream, whose head tells; nothing is written."""
    texts = list(make_texts(1_500_000, seed=3))
    write = {"jsonl": write_lines, "parquet": write_parquet, "gz": write_gz}[kind]
    path = write(tmp_path / {"gz": "a.jsonl.gz"}.get(kind, f"a.{kind}"), texts)
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path, dedup="off", shard_size="200KB"))
    before = sorted(tmp_path.iterdir())
    estimate = plan_of(config)["estimate"]
    assert sorted(tmp_path.iterdir()) == before
    store = preprocess(tmp_path / "out", path, dedup="off", shard_size="200KB")
    assert abs(estimate["documents"] / len(store) - 1) < 0.2
    assert abs(estimate["tokens"] / store.tokens - 1) < 0.2
    real = sum(file.stat().st_size for file in store.path.iterdir() if file.suffix in (".bin", ".idx"))
    assert abs(estimate["store_bytes"] / real - 1) < 0.4


def test_the_plan_does_not_take_one_data_set_for_another(tmp_path: Path) -> None:
    """Long and short documents, packed and not, in one file or many: each dataset is judged by its own."""
    long = ["A long document. " * 3000 + str(k) for k in range(40)]
    short = [f"short line {k}" for k in range(30_000)]
    (tmp_path / "few").mkdir()
    for k in range(40):
        (tmp_path / "few" / f"{k:02d}.txt").write_text(long[k] if k % 2 else f"small {k}")
    sets = [
        write_lines(tmp_path / "long.jsonl", long),
        write_gz(tmp_path / "short.jsonl.gz", short),
        tmp_path / "few",
    ]
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, dedup="off"))
    assert abs(plan_of(config)["estimate"]["documents"] / (40 + 30_000 + 40) - 1) < 0.1


def test_a_dry_run_is_the_plan(tmp_path: Path) -> None:
    """The same text, and no folder; --json gives the same numbers."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(200))
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", path))
    planned, dry = invoke("plan", config), invoke("preprocess", config, "--dry-run")
    assert planned.exit_code == dry.exit_code == 0 and not (tmp_path / "out").exists()
    for word in ("about 200 documents", "tokens", "disk", "time", "(new)"):
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
        "seq_len": 8,
    }
    sets = [{"path": path, "max_documents": 40}]
    planned = plan_of(write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, **settings)))
    near = ["near", "shingle", "verify", "decide"]
    stages = ["count", "fingerprint", "group", *near, "tokenize", "arrange", "index", "pack", "report"]
    assert planned["plan"]["stages"] == stages
    kinds = {kind for kinds in planned["estimate"]["disk"].values() for kind in kinds}
    assert kinds >= {"fingerprints", "grouping", "signatures", "staged tokens"}
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


# ---- what it needs ----

DISK_STAGES = ("fingerprint", "group", "near", "shingle", "verify", "decide", "tokenize", "index", "pack")


def load(**more: Any) -> Load:
    known: dict[str, Any] = {
        "documents": 10**10,
        "text_bytes": 15 * 10**12,
        "tokens": 3 * 10**12,
        "token_bytes": 6 * 10**12,
        "input_bytes": 15 * 10**12,
        "units": 60_000,
        "shard_size": 256 * 10**6,
        "keeps_texts": False,
        "work": defaultdict(float, read=9e4, hash=1e4, signatures=2e5, encode=1e5, write=2e4),
    }
    return Load(**known | more)


def full_config(tmp_path: Path, **more: Any) -> Any:
    settings = {"dedup": {"near": {}, "index": tmp_path / "index"}, "packing": {"write": True}, "seq_len": 8}
    path = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", tmp_path / "a.jsonl", **settings | more))
    return load_config(path, []).config


def test_more_machines_take_less_time_until_one_has_to_do_it_alone(tmp_path: Path) -> None:
    """Units and partitions are shared by all, pairs by 256 workers, bands by eight, the rest by nobody."""
    stages = (*DISK_STAGES, "report")
    one, many = (find_needs(full_config(tmp_path), load(), stages, Machines(nodes, 32)).seconds for nodes in (1, 64))
    assert list(one) == list(stages)
    shared = dict.fromkeys(("fingerprint", "tokenize", "group", "shingle"), 64)
    for stage, factor in (shared | {"near": 1, "verify": 8, "decide": 1, "pack": 1}).items():
        assert one[stage] / many[stage] == pytest.approx(factor), stage


def test_disk_is_told_stage_by_stage(tmp_path: Path) -> None:
    """Each kind where it is; the peak is the largest sum; machines at work beside each other take more."""
    config = full_config(tmp_path)
    needs = find_needs(config, load(), DISK_STAGES, Machines())
    assert set(needs.disk) == set(DISK_STAGES)
    assert needs.disk["fingerprint"] == {"fingerprints": 17 * 10**10, "signatures": 256 * 10**10}
    assert {"bands", "pairs"} <= set(needs.disk["near"]) and "verdicts" in needs.disk["decide"]
    stage, most = needs.peak
    assert stage == "index" and most == sum(needs.disk["index"].values()) > needs.store_bytes
    assert needs.disk["index"]["near-dedup index"] > needs.disk["verify"]["shingles"] > 10**13
    wide = find_needs(config, load(), DISK_STAGES, Machines(nodes=4))
    assert wide.disk["near"]["bands"] > 3 * needs.disk["near"]["bands"]
    kept = find_needs(config, load(keeps_texts=True), DISK_STAGES, Machines())
    assert kept.disk["tokenize"]["texts"] > 15 * 10**12 and "tokens" not in kept.disk["tokenize"]


def test_a_unit_that_unpacks_to_much_is_several_shards(tmp_path: Path) -> None:
    """And each once more for every split."""
    config = full_config(tmp_path, splits={"val": 0.1})
    needs = find_needs(config, load(text_bytes=60 * 10**12), ("tokenize",), Machines())
    assert needs.shards == 60_000 * 4 * 2 and needs.partitions == 0
