"""The executor on a Ray cluster of two nodes: every unit once, in bounded numbers, whatever dies on the way."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER, invoke, wait_until, write_lines
from tests.kit.ray_clusters import NODE, hands, two_nodes
from tests.kit.worker_loads import Work, assigned, deadly, hoard, recording, square, values

from milldam.errors import ConfigError, ResourceError, WorkerError
from milldam.run import ray_cluster
from milldam.run.tasks import CRASH, DONE, ENDED, PART, PROGRESS, Assigned, Event, Make, Todo, Workers

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


# ---- units ----


@pytest.mark.slow
def test_every_unit_is_done_once_on_both_nodes(pool: Any) -> None:
    """Each unit reports its progress and its part, then is done."""
    events = run(pool, Work(square), 8)
    assert sorted(values(events)) == [unit**2 for unit in range(8)]
    for unit in range(8):
        kinds = [event.kind for event in events if event.unit == unit]
        assert kinds == [PART, PROGRESS, DONE]
    assert os.getpid() not in {event.pid for event in events}
    assert wait_until(lambda: not hands())


@pytest.mark.slow
def test_a_worker_that_dies_is_replaced(pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose process is killed is tried again; one that kills every time ends the run."""
    events = run(pool, Work(deadly, tmp_path, 1, 2, signal.SIGKILL, False), 3)
    assert sorted(values(events)) == [0, 1, 2]
    assert sum(event.kind == CRASH for event in events) == 2
    monkeypatch.setattr(ray_cluster, "RETRIES", 1)
    with pytest.raises(WorkerError, match="Unit 1 lost its worker 2 times"):
        run(pool, Work(deadly, tmp_path, 1, 99, signal.SIGKILL, False), 2)


@dataclass(frozen=True)
class Given:
    """Tells what Ray gave its process, and where it is."""

    def load(self) -> Make:
        def make(unit: int) -> Any:
            time.sleep(0.1)  # so that no worker gets all units
            return ray.get_runtime_context().get_assigned_resources(), Path.cwd(), os.getpid()

        return recording(make)


@pytest.mark.slow
def test_a_worker_asks_for_its_cores_and_its_share_of_the_budget(pool: Any) -> None:
    """What is in flight never exceeds the slots, however many units there are; units are taken as they are needed."""
    taken, done = itertools.count(), Counter[str]()
    given: list[Any] = []

    def assign(unit: int) -> Assigned:
        assert unit == next(taken) and unit < done[DONE] + 4
        return assigned(unit)

    def on_event(event: Event) -> None:
        done[event.kind] += 1
        if event.kind == PART:
            given.append(event.value.facts["value"])

    units = itertools.takewhile(lambda unit: unit < 200, itertools.count())
    pool.run(Workers(2, 1), Todo(Given(), units, assign, on_event))
    assert len(given) == 200
    assert all(resources == {"CPU": 1.0, "memory": BUDGET / 2} for resources, _, _ in given)
    assert {folder for _, folder, _ in given} == {Path.cwd()}
    assert len({pid for _, _, pid in given}) == 4


@pytest.mark.slow
def test_memory_comes_back(pool: Any) -> None:
    """A worker that works apart ends with its unit, and one that holds too much; others go on."""
    apart = run(pool, Work(square), 3, Workers(1, 1, apart=True))
    assert len({event.pid for event in apart if event.kind == PROGRESS}) == 3
    hoards = Counter(values(run(pool, Work(hoard, 80 * 10**6), 6, Workers(1, 1, worker_bytes=200 * 10**6))))
    assert 2 < len(hoards) < 6 and max(hoards.values()) == 2
    ended = {event.pid for event in apart if event.kind == ENDED}
    assert ended == {event.pid for event in apart}


@pytest.mark.slow
def test_units_do_not_wait_for_a_node_that_others_have_taken(pool: Any) -> None:
    """What can't begin on a busy node goes to a slot that is free elsewhere."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    busy = pool.nodes()[0]["NodeID"]
    there = NodeAffinitySchedulingStrategy(busy, soft=False)
    hog = ray.remote(_Hog).options(num_cpus=2, scheduling_strategy=there).remote()
    ray.get(hog.ready.remote())
    try:
        events = run(pool, Work(square), 3)
    finally:
        ray.kill(hog)
    assert sorted(values(events)) == [0, 1, 4]
    assert not [event.host for event in events if event.host.endswith(busy[:6])]
    assert not any(event.kind == CRASH for event in events)


class _Hog:
    def ready(self) -> None:
        pass


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
