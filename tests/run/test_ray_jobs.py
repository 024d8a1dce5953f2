"""Whole jobs on a Ray cluster of two nodes: the bytes of this machine, whatever dies, in the budget of each node."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.jobs import TOKENIZER, leftovers, recorded, started, store_bytes, wait_until, write_lines
from tests.kit.preprocess_jobs import config_of, fresh_texts, summary_of, texts_with_copies, write_config
from tests.kit.ray_clusters import NODE, hands, two_nodes

import milldam
from milldam.errors import ConfigError, InputError
from milldam.memory import process_tree, usage

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


@contextmanager
def measured(driver: int | None = None) -> Iterator[dict[int, int]]:
    """Peak of anonymous memory of milldam's processes by node (its raylet), the driver's counted on each of them."""
    peaks: dict[int, int] = defaultdict(int)
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.05):
            now: dict[int, int] = defaultdict(int)
            for hand in hands():
                try:
                    now[hand.ppid()] += usage(hand.pid).anonymous
                except psutil.Error:
                    continue
            base = sum(usage(pid).anonymous for pid in process_tree(driver)) if driver is not None else 0
            for node, total in now.items():
                peaks[node] = max(peaks[node], total + base)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


# ---- the same bytes, in the same memory ----


def test_the_store_has_the_bytes_of_the_local_one(cluster: Any, local: Path) -> None:
    """Dedup, near-dedup, splits and tokens by two nodes: equal files, the budget kept on each, all of it told here."""
    path = write_config(local / "ray.yaml", settings(local, "ray") | on(cluster))
    with started("preprocess", path, "--json") as process, measured(process.pid) as peaks:
        stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    out = local / "ray"
    assert_equal(out, local / "local")
    assert json.loads(stdout)["counts"]["documents"] == summary_of(local / "local")["counts"]["documents"]
    memory = summary_of(out)["memory"]
    assert len(peaks) == len(memory["machines"]) == 2
    assert max(peaks.values()) < BUDGET and memory["peak"] < BUDGET
    # What was told is what was seen from outside, but for moments between two looks.
    assert max(memory["machines"].values()) > 0.5 * (max(peaks.values()))
    with (out / "run" / "memory.csv").open() as rows:
        told = [(row["stage"], row["pid"].partition(":")[0]) for row in csv.DictReader(rows) if ":" in row["pid"]]
    # Stages that end between two samples may be missing.
    assert {stage for stage, _ in told} >= {"fingerprint", "tokenize"}
    assert {machine for _, machine in told} == set(memory["machines"])
    assert (out / "run" / "report.html").stat().st_size > 10_000


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


# ---- what nodes do not see ----


@pytest.fixture
def blind_node(cluster: Any, tmp_path: Path) -> Iterator[Path]:
    """A third node, which has an empty folder where this machine has another."""
    folder = tmp_path / "shared"
    folder.mkdir()
    start = [str(Path(sys.executable).with_name("ray")), "start", f"--address={cluster.address}", "--num-cpus=1"]
    start += [f"--memory={NODE['memory']}", f"--object-store-memory={NODE['object_store_memory']}", "--block"]
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder), *start]
    if os.geteuid() or shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("a node with another view of the files needs root")
    known = len(ray.nodes()) if ray.is_initialized() else 2
    node = subprocess.Popen(mounted, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: _alive(cluster) > known - 0, None), "the node did not come"
        yield folder
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(timeout=60)


def _alive(cluster: Any) -> int:
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions

    state = GlobalState()
    state._initialize_global_state(GcsClientOptions.create(cluster.address, None, True, False))
    return sum(node["Alive"] for node in state.node_table())


def test_an_output_that_a_node_does_not_see_is_refused(cluster: Any, blind_node: Path) -> None:
    """The error names the node and the folder, and nothing is left there; a lost input is named as one, too."""
    lines = write_lines(blind_node.parent / "c.jsonl", fresh_texts(2000))
    options = {"tokenizer": TOKENIZER, "memory": "600MB", "shard_size": "100KB", **on(cluster)}
    with pytest.raises(ConfigError, match=r"The node .* does not see .*shared/s/run"):
        milldam.tokenize(lines, blind_node / "s", **options)
    assert list(blind_node.iterdir()) == []
    unseen = shutil.copy(lines, blind_node / "c.jsonl")
    with pytest.raises(InputError, match=r"c\.jsonl: not there on the node .*\n.* must see the input"):
        milldam.tokenize(unseen, blind_node.parent / "s", **options)
