"""Units on a Ray cluster of two nodes: the same bytes as on this machine, whatever dies on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import milldam
from jobs import MILLDAM, TOKENIZER, recorded, started, wait_until, write_lines
from milldam.errors import ConfigError, InputError, WorkerError
from milldam.executors import CRASH, DONE, PART, PROGRESS, Event
from milldam.executors.crews import Staff
from preprocess_jobs import config_of, summary_of, texts_with_copies, write_config
from worker_tasks import Deadly, Failing, Square

ray = pytest.importorskip("ray")

NODE = {"num_cpus": 2, "memory": 2 * 10**9, "object_store_memory": 80 * 10**6}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes; tests are found by the workers."""
    from ray.cluster_utils import Cluster

    tests = str(Path(__file__).parent)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, before]))
    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    found.add_node(**NODE)
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def crew(cluster: Any) -> Iterator[Any]:
    from milldam.executors.ray_cluster import RayCrew

    found = RayCrew(cluster.address, 10**9)
    yield found
    found.leave()


def run(crew: Any, task: Any, units: int) -> list[Event]:
    events: list[Event] = []
    crew.executor("stage", Staff(1, 1)).run(task, range(units), lambda unit: unit, events.append)
    return events


def test_every_unit_is_done_once_on_both_nodes(crew: Any) -> None:
    """Each unit reports its progress and its part, then is done; both nodes take part."""
    events = run(crew, Square(), 8)
    assert sorted(event.value for event in events if event.kind == PART) == [unit**2 for unit in range(8)]
    for unit in range(8):
        assert [event.kind for event in events if event.unit == unit] == [PROGRESS, PART, DONE]
    assert len({event.host for event in events}) == 2
    assert os.getpid() not in {event.pid for event in events}


def test_a_worker_that_dies_is_replaced(crew: Any, tmp_path: Path) -> None:
    """A unit whose process is killed is tried again; one that kills every time ends the run."""
    events = run(crew, Deadly(tmp_path, 1, times=2), 3)
    assert sorted(event.value for event in events if event.kind == PART) == [0, 1, 2]
    assert sum(event.kind == CRASH for event in events) == 2
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with pytest.raises(WorkerError, match="Unit 1 lost its worker 4 times"):
        run(crew, Deadly(tmp_path, 1, times=99), 3)


def test_errors_come_back_as_what_they_are(crew: Any) -> None:
    """A complaint about the input is one here too; a bug comes with its traceback."""
    with pytest.raises(InputError):
        run(crew, Failing("ours"), 2)
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError.*in a worker"):
        run(crew, Failing("bug"), 2)


def test_a_folder_that_all_nodes_see_is_accepted(crew: Any, tmp_path: Path) -> None:
    """Nothing is left of the check; another version or a folder unseen is refused by name."""
    from milldam.executors.ray_cluster import _require_fit

    crew.require_shared(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="The node a does not see"):
        _require_fit("a", tmp_path, (False, milldam.__version__))
    with pytest.raises(ConfigError, match=r"has milldam 0\.0\.0"):
        _require_fit("a", tmp_path, (True, "0.0.0"))


def test_a_cluster_that_is_not_there_is_said(tmp_path: Path) -> None:
    """An address without a cluster is an error of two lines."""
    lines = write_lines(tmp_path / "c.jsonl", ["one"])
    command = [MILLDAM, "tokenize", lines, "-o", tmp_path / "s", "--tokenizer", TOKENIZER]
    done = subprocess.run(
        [*command, "--engine", "ray", "--address", "127.0.0.1:1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 3, done.stderr
    assert "No Ray cluster could be reached" in done.stderr
    assert not (tmp_path / "s").exists()


# ---- whole jobs ----


def settings(folder: Path, out: str) -> dict[str, Any]:
    """A job with every stage: exact and near duplicates, filters, two splits."""
    texts = texts_with_copies(3000, copies=0.2)
    if not (folder / "c.jsonl").exists():
        write_lines(folder / "c.jsonl", texts)
    near = {"method": "exact", "near": {"threshold": 0.7, "bands": 20, "rows": 4}}
    shards = {"shard_size": "100KB", "splits": {"val": 0.1}, "memory": "700MB"}
    return config_of(folder / out, str(folder / "c.jsonl"), dedup=near, **shards)


def files(out: Path) -> dict[str, bytes]:
    """What makes the store."""
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store as this machine makes it."""
    folder = tmp_path_factory.mktemp("local")
    milldam.preprocess(settings(folder, "local"))
    return folder


@pytest.mark.slow
def test_the_store_has_the_bytes_of_the_local_one(cluster: Any, local: Path) -> None:
    """Dedup, near-dedup, splits and tokens by two nodes give the same files, within the budget of each node."""
    milldam.preprocess(settings(local, "ray") | {"engine": "ray", "address": cluster.address})
    assert files(local / "ray") == files(local / "local")
    summary = summary_of(local / "ray")
    assert summary["memory"]["peak"] < 700 * 10**6
    assert len(summary["memory"]["machines"]) == 2


@pytest.mark.slow
def test_a_node_that_dies_costs_nothing_but_time(cluster: Any, local: Path) -> None:
    """While the job runs, a worker is killed, then a whole node; another node joins; the bytes are the same."""
    extra = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    config = settings(local, "deaths") | {"engine": "ray", "address": cluster.address}
    path = write_config(local / "deaths.yaml", config)
    with started("preprocess", path) as process:
        assert wait_until(lambda: recorded(local / "deaths") >= 1, process)
        for one in psutil.process_iter(["name", "cmdline"]):
            if "ray::_work" in " ".join(one.info["cmdline"] or [one.info["name"] or ""]):
                one.kill()
                break
        cluster.remove_node(extra, allow_graceful=False)
        assert process.wait(timeout=240) == 0
    assert files(local / "deaths") == files(local / "local")


@pytest.mark.slow
def test_what_ray_began_this_machine_finishes(cluster: Any, local: Path) -> None:
    """Interrupted on the cluster, the run folder is one that the local engine goes on with."""
    config = settings(local, "moved") | {"engine": "ray", "address": cluster.address}
    path = write_config(local / "moved.yaml", config)
    with started("preprocess", path) as process:
        assert wait_until(lambda: recorded(local / "moved") >= 2, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    done = recorded(local / "moved")
    milldam.preprocess(config | {"engine": "local", "address": None})
    assert files(local / "moved") == files(local / "local")
    assert done >= 2
