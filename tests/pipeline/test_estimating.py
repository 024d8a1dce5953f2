"""What a job will take, said beforehand: from a sample, without writing anything."""

from __future__ import annotations

import itertools
import json
import tracemalloc
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
from milldam.pipeline.estimating import UNITS_SAMPLED, Estimate, Survey, require_disk
from milldam.pipeline.needs import LOADER_BYTES, Load, Machines, find_needs
from milldam.sources.listed import Listing, belongs
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


def test_a_full_disk_is_told_with_both_sizes() -> None:
    """What is needed, and what is free."""
    needed = Estimate(1, 1, 1, store_bytes=3 * 10**9, disk_bytes=4 * 10**9, free_bytes=10**9)
    with pytest.raises(ResourceError, match=r"about 4 GB are needed \(3 GB for the store.*1 GB are free"):
        require_disk(needed, "out")
    require_disk(Estimate(1, 1, 1, store_bytes=10, disk_bytes=10, free_bytes=10), "out")


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
    """Long and short documents, packed and not, in one file or many: each data set is judged by its own."""
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


# ---- what it needs ----

DISK_STAGES = ("fingerprint", "group", "near", "join", "tokenize", "index", "pack")


def load(**more: Any) -> Load:
    known: dict[str, Any] = {
        "documents": 10**10,
        "text_bytes": 15 * 10**12,
        "tokens": 3 * 10**12,
        "token_bytes": 6 * 10**12,
        "input_bytes": 15 * 10**12,
        "units": 60_000,
        "plan_bytes": 10**7,
        "shard_size": 256 * 10**6,
        "keeps_texts": False,
        "work": {"read": 9e4, "hash": 1e4, "signatures": 2e5, "encode": 1e5, "write": 2e4},
    }
    return Load(**known | more)


def full_config(tmp_path: Path, **more: Any) -> Any:
    settings = {"dedup": {"near": {}, "index": tmp_path / "index"}, "packing": {"write": True}, "sequence_len": 8}
    path = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", tmp_path / "a.jsonl", **settings | more))
    return load_config(path, []).config


def test_more_machines_take_less_time_until_one_has_to_do_it_alone(tmp_path: Path) -> None:
    """Units and partitions are shared by all, bands by as many as there are steps, the rest by nobody."""
    stages = (*DISK_STAGES, "report")
    one, many = (find_needs(full_config(tmp_path), load(), stages, Machines(nodes, 32)).seconds for nodes in (1, 64))
    assert list(one) == list(stages)
    for stage, factor in {"fingerprint": 64, "tokenize": 64, "group": 64, "near": 4, "join": 1, "pack": 1}.items():
        assert one[stage] / many[stage] == pytest.approx(factor), stage


def test_disk_is_told_stage_by_stage(tmp_path: Path) -> None:
    """Each kind where it is; the peak is the largest sum; machines at work beside each other take more."""
    config = full_config(tmp_path)
    needs = find_needs(config, load(), DISK_STAGES, Machines())
    assert set(needs.disk) == set(DISK_STAGES)
    assert needs.disk["fingerprint"] == {"fingerprints": 17 * 10**10, "signatures": 256 * 10**10}
    assert {"bands", "pairs"} <= set(needs.disk["near"]) and "labels" in needs.disk["join"]
    stage, most = needs.peak
    assert stage == "pack" and most == sum(needs.disk["pack"].values()) > needs.packed_bytes
    wide = find_needs(config, load(), DISK_STAGES, Machines(nodes=4))
    assert wide.disk["near"]["bands"] > 3 * needs.disk["near"]["bands"]
    kept = find_needs(config, load(keeps_texts=True), DISK_STAGES, Machines())
    assert kept.disk["tokenize"]["texts"] > 15 * 10**12 and "tokens" not in kept.disk["tokenize"]


def test_a_unit_that_unpacks_to_much_is_several_shards(tmp_path: Path) -> None:
    """And each once more for every split."""
    config = full_config(tmp_path, splits={"val": 0.1})
    needs = find_needs(config, load(text_bytes=60 * 10**12), ("tokenize",), Machines())
    assert needs.shards == 60_000 * 4 * 2 and needs.partitions == 0
    assert needs.loader["memory_bytes"] == needs.shards * LOADER_BYTES


# ---- a listing of what is not there ----


def write_listing(path: Path, files: int, size: int, documents: int | None = None) -> Path:
    told = {} if documents is None else {"documents": documents}
    lines = [json.dumps({"path": f"s3://web/{k:05d}.jsonl", "size": size} | told) for k in range(files)]
    path.write_text("\n".join(lines) + "\n")
    return path


def listed_plan(tmp_path: Path, listing: Path, *options: Any, sets: Any = "s3://web/", **settings: Any) -> Any:
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, **settings))
    return invoke("plan", config, "--listing", listing, *options)


def test_a_listing_is_planned_on_without_its_files(tmp_path: Path) -> None:
    """Terabytes that nobody has; what is simulated is called so, as text and as JSON, and nothing is written."""
    listing = write_listing(tmp_path / "files.jsonl", 600, 250_000_000, 166_667)
    sample = write_lines(tmp_path / "a.jsonl", fresh_texts(200))
    before = sorted([*tmp_path.iterdir(), tmp_path / "c.yaml"])
    done = listed_plan(tmp_path, listing, "--sample", sample, "--nodes", 4, "--json", shard_size="250MB")
    assert done.exit_code == 0, done.stderr
    planned = json.loads(done.stdout)
    assert planned["plan"]["units"] == planned["estimate"]["needs"]["shards"] == 600
    assert planned["estimate"]["documents"] == 600 * 166_667
    assert planned["state"] == "simulated" and "600 files" in planned["simulated"][0]
    assert planned["machines"]["nodes"] == 4
    assert sorted(tmp_path.iterdir()) == before
    told = listed_plan(tmp_path, listing).stdout
    assert "Simulated input: 600 files" in told and "typical English text" in told and "are free" not in told


def test_a_listing_plans_as_the_files_themselves(tmp_path: Path) -> None:
    """The same units and, with them as sample, about the same documents and tokens."""
    paths = [write_lines(tmp_path / f"{k}.jsonl", make_texts(400_000, seed=k)) for k in range(3)]
    sets = [str(path) for path in paths]
    csv = tmp_path / "files.csv"
    csv.write_text("size,path\n" + "".join(f"{path.stat().st_size},{path}\n" for path in paths))
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", sets, shard_size="200KB"))
    real = plan_of(config)
    sample = itertools.chain.from_iterable(("--sample", path) for path in paths)
    done = invoke("plan", config, "--listing", csv, *sample, "--json")
    simulated = json.loads(done.stdout)
    assert simulated["plan"]["units"] == real["plan"]["units"]
    for figure in ("documents", "tokens", "text_bytes"):
        assert simulated["estimate"][figure] == pytest.approx(real["estimate"][figure], rel=0.1)


def test_listed_files_belong_to_the_data_set_that_names_them(tmp_path: Path) -> None:
    """By folder or glob where there are several; packed ones count by what they unpack to."""
    assert belongs("web/a.jsonl", ["web/*.jsonl"]) and not belongs("web/a.jsonl", ["we"])
    listing = tmp_path / "files.csv"
    listing.write_text("path,size\ns3://a/1.jsonl.gz,100MB\ns3://b/2.jsonl,300000000\ns3://c/3.jsonl,7\n")
    sets = [{"path": "s3://a"}, {"path": "s3://b", "weight": 2}]
    planned = json.loads(listed_plan(tmp_path, listing, "--json", sets=sets).stdout)
    assert planned["plan"]["input_bytes"] == 400_000_000
    assert planned["estimate"]["text_bytes"] == pytest.approx(0.98 * 900e6, rel=0.01)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "path\nx.jsonl\n", 'no column "size"'),
        ("a.csv", "path,size\nx.jsonl,many\n", "a.csv:2: needs a path and a size"),
        ("a.jsonl", '{"path": "x.pdf", "size": 1}\n', "a.jsonl:1: x.pdf: its ending"),
        ("a.jsonl", "[]\n", "a.jsonl:1: needs a path"),
        ("a.jsonl", "{\n", "a.jsonl:1: no JSON"),
        ("a.jsonl", "", "lists no file"),
        ("a.txt", "x", "a listing is JSON lines"),
    ],
)
def test_a_wrong_listing_is_told_by_its_line(tmp_path: Path, name: str, text: str, told: str) -> None:
    """What, where, and what to do."""
    (tmp_path / name).write_text(text)
    done = listed_plan(tmp_path, tmp_path / name)
    assert done.exit_code in (2, 3) and told in done.stderr


def test_a_sample_without_a_listing_is_refused(tmp_path: Path) -> None:
    """It would be ignored."""
    config = write_config(tmp_path / "c.yaml", config_of(tmp_path / "out", "a.jsonl"))
    done = invoke("plan", config, "--sample", "a.jsonl")
    assert done.exit_code == 2 and "--listing" in done.stderr


def test_a_long_listing_is_streamed(tmp_path: Path) -> None:
    """No file of it is held."""
    listing = write_listing(tmp_path / "files.jsonl", 20_000, 10)
    tracemalloc.start()
    try:
        assert sum(1 for _ in Listing(listing).files()) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
