"""Whole jobs on a Ray cluster of two nodes: the bytes of this machine, whatever dies, in the budget of each node."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import leftovers, recorded, started, store_bytes, wait_until, write_lines
from tests.kit.preprocess_jobs import config_of, fresh_texts, summary_of, texts_with_copies, write_config
from tests.kit.ray_clusters import NODE, hands, two_nodes

import milldam

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BUDGET = 700 * 10**6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as found:
        yield found


def settings(folder: Path, out: str, **more: Any) -> dict[str, Any]:
    """A job with every stage: exact and near duplicates, filters, two splits, several units."""
    if not (folder / "c.jsonl").exists():
        write_lines(folder / "c.jsonl", texts_with_copies(6000, copies=0.2))
        write_lines(folder / "d.jsonl", [*texts_with_copies(3000, copies=0.2), *fresh_texts(3000, 7)])
    near = {"method": "exact", "near": {"threshold": 0.7, "bands": 20, "rows": 4}}
    rules = {"dedup": near, "filters": {"min_characters": 9}, "splits": {"val": 0.1}, "shard_size": "100KB"}
    inputs = [folder / "c.jsonl", folder / "d.jsonl"]
    return config_of(folder / out, inputs, **rules, memory="700MB", workers=2, **more)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store as this machine makes it."""
    folder = tmp_path_factory.mktemp("local")
    milldam.preprocess(settings(folder, "local"))
    return folder


def on(cluster: Any) -> dict[str, Any]:
    return {"executor": "ray", "address": cluster.address}


def stage_of(out: Path) -> str:
    """Where a run is, as `milldam status` sees it."""
    try:
        return str(json.loads((out / "run" / "status.json").read_bytes())["stage"])
    except (OSError, ValueError):
        return ""


def parts_recorded(out: Path) -> Counter[tuple[str, int]]:
    with (out / "run" / "records.jsonl").open() as lines:
        records = [json.loads(line) for line in lines]
    return Counter((record["key"], record["part"]) for record in records)


def assert_equal(out: Path, local: Path) -> None:
    """The same files, every part recorded once, nothing left behind, and no worker."""
    assert store_bytes(out) == store_bytes(local)
    assert set(parts_recorded(out).values()) == {1}
    assert parts_recorded(out) == parts_recorded(local)
    assert leftovers(out) == []
    assert wait_until(lambda: not hands())


# ---- the same bytes, in the same memory ----


def test_the_store_has_the_bytes_of_the_local_one(cluster: Any, local: Path) -> None:
    """Dedup, near-dedup, splits and tokens by two nodes: equal files, the budget kept on each, all of it told here."""
    path = write_config(local / "ray.yaml", settings(local, "ray") | on(cluster))
    with started("preprocess", path, "--json") as process:
        stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    out = local / "ray"
    assert_equal(out, local / "local")
    assert json.loads(stdout)["counts"]["documents"] == summary_of(local / "local")["counts"]["documents"]
    memory = summary_of(out)["memory"]
    assert len(memory["machines"]) == 2 and memory["peak"] < BUDGET


# ---- what dies ----


def test_a_node_that_dies_costs_nothing_but_time(cluster: Any, local: Path) -> None:
    """In each pass a worker is killed, in the second a whole node, too; the bytes are the same."""
    extra = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    out = local / "deaths"
    path = write_config(local / "deaths.yaml", settings(local, "deaths") | on(cluster))
    with started("preprocess", path) as process:
        for stage in ("fingerprint", "shingle", "tokenize"):
            assert wait_until(lambda stage=stage: stage_of(out) == stage and hands(), process), stage
            hands()[0].kill()
        assert wait_until(lambda: recorded(out) >= 2, process)
        cluster.remove_node(extra, allow_graceful=False)
        _, stderr = process.communicate(timeout=400)
        assert process.returncode == 0, stderr
    assert "tried once more" in stderr
    assert_equal(out, local / "local")
    # The cluster takes a while to notice: a run that starts before would be refused because of that node.
    assert wait_until(lambda: _alive(cluster) == 2)


# ---- stopped, and gone on with ----


@pytest.mark.parametrize("executor", ["ray", "local"])
def test_interrupted_it_is_cancelled_and_goes_on_anywhere(cluster: Any, local: Path, executor: str) -> None:
    """Ctrl-C ends every task and exits with 130; Ray or the local executor goes on with the run folder."""
    out = local / f"stopped-{executor}"
    config = settings(local, out.name) | on(cluster)
    path = write_config(local / "stopped.yaml", config)
    with started("preprocess", path) as process:
        assert wait_until(lambda: recorded(out) >= 2, process), process.communicate()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    assert "Everything finished is safe" in stderr and "Traceback" not in stderr
    assert wait_until(lambda: not hands())
    done = parts_recorded(out)
    assert len(done) >= 2
    milldam.preprocess(config | (on(cluster) if executor == "ray" else {"executor": "local", "address": None}))
    assert_equal(out, local / "local")


def test_a_driver_that_is_killed_takes_its_workers_along(cluster: Any, local: Path) -> None:
    """Nothing of it runs on; the same call goes on."""
    out = local / "killed"
    config = settings(local, out.name) | on(cluster)
    with started("preprocess", write_config(local / "killed.yaml", config)) as process:
        assert wait_until(lambda: recorded(out) >= 2, process)
        process.kill()
    assert wait_until(lambda: not hands())
    milldam.preprocess(config)
    assert_equal(out, local / "local")


# ---- every command ----


def test_map_with_a_closure(cluster: Any, tmp_path: Path) -> None:
    """A function that lives in this process alone is carried to the nodes, with what it holds."""
    path = write_lines(tmp_path / "c.jsonl", fresh_texts(6000))
    table = {"a": 1, "e": 2}
    options: dict[str, Any] = {"shard_size": "100KB", "memory": "600MB"}

    def score(batch: dict[str, list[str]]) -> dict[str, list[int]]:
        return {"score": [sum(table.get(letter, 0) for letter in text) for text in batch["text"]]}

    here = milldam.map(path, score, tmp_path / "local", **options)
    there = milldam.map(path, score, tmp_path / "ray", **options, **on(cluster))
    assert len(here) == len(there) == 6000
    assert store_bytes(tmp_path / "ray") == store_bytes(tmp_path / "local")


def _alive(cluster: Any) -> int:
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(cluster.address, None, True, False))
    return sum(node["Alive"] for node in state.node_table())
