"""The executor on a Ray cluster of two nodes: every unit once, in bounded numbers, whatever dies on the way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke, write_lines
from tests.kit.ray_clusters import NODE, two_nodes
from tests.kit.worker_loads import Work, assigned, square, values

from milldam.errors import ConfigError, ResourceError
from milldam.run import ray_cluster
from milldam.run.tasks import Event, Todo, Workers

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")

BUDGET = 10**9
ONE = Workers(1, 1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as found:
        yield found


@pytest.fixture(scope="module")
def pool(cluster: Any) -> Iterator[Any]:
    found = ray_cluster.RayPool(cluster.address, BUDGET)
    yield found
    found.leave()


def run(pool: Any, task: Any, units: int, workers: Workers = ONE) -> list[Event]:
    events: list[Event] = []
    pool.run(workers, Todo(task, iter(range(units)), assigned, events.append))
    return events


# ---- what is refused at the start ----


@pytest.mark.slow
def test_a_node_that_can_not_take_part_is_refused(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not see the output, or can't write there; nothing is left of the check."""
    monkeypatch.setattr(pool, "folder", tmp_path)
    assert values(run(pool, Work(square), 1)) == [0] and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(pool, "folder", tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"The node .* can't write to .*/elsewhere"):
        run(pool, Work(square), 1)


@pytest.mark.slow
def test_a_budget_that_fits_on_no_node_is_refused(pool: Any, cluster: Any) -> None:
    """Ray would wait for ever for memory that no node has."""
    with pytest.raises(ResourceError, match="Use memory='2000MB' or less"):
        ray_cluster.RayPool(cluster.address, NODE["memory"] + 1)


def test_ray_client_is_refused() -> None:
    """It can't stream."""
    with pytest.raises(ConfigError, match="Run milldam on a machine of the cluster"):
        ray_cluster.RayPool("ray://127.0.0.1:10001", BUDGET)


def tokenize(folder: Path, *options: object, out: object = None) -> Any:
    lines = write_lines(folder / "c.jsonl", ["one"])
    return invoke("tokenize", lines, "-o", out or folder / "s", "--tokenizer", TOKENIZER, *options)


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address without a cluster is an error of two lines; so is ray that is not installed."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    done = tokenize(tmp_path, "--executor", "ray", "--address", "127.0.0.1:1")
    assert (done.exit_code, len(done.stderr.splitlines())) == (3, 2), done.stderr
    assert "No Ray cluster could be reached (127.0.0.1:1)" in done.stderr
    monkeypatch.setitem(sys.modules, "ray", None)
    done = tokenize(tmp_path, "--executor", "ray")
    assert (done.exit_code, done.stderr) == (
        2,
        'milldam: --executor ray needs the package ray: pip install "milldam[ray]"\n',
    )
    assert not (tmp_path / "s").exists()
