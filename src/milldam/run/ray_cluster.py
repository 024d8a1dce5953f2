"""Units on the machines of a Ray cluster: the same work as in local processes, and the same bytes.

Every node has slots, as many as its cores, its memory and the budget of a node hold. In each is an actor (`Hand`) that
asks Ray for its cores and its share of the budget, works on one unit at a time, and ends with the stage, or earlier
when it must give its memory back. What a unit reports is streamed to this process (a few hundred bytes a part); what it
makes goes to the run's folder, which all machines must see.

Ray tries nothing again by itself: a worker or node that dies costs its unit's open part, and the unit goes to another
slot, resuming after what is recorded. Nodes that join are used, those that leave are forgotten. A slot
whose cores or memory others have taken gets no unit until Ray has started its hand.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import milldam
from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, Setting, WorkerError
from milldam.memory import format_size, keep_arrow_lean
from milldam.run.fork import ADVICE, as_sent
from milldam.run.pools import Pool
from milldam.run.tasks import CRASH, DONE, ENDED, ERROR, PROGRESS, Event, Todo, Work, Workers, begin

RETRIES = 3
"""How often a unit is tried again; on a cluster machines come and go."""
OVERHEAD_BYTES = 60 * 10**6
"""Memory of a Ray worker process beyond that of a local one (measured: docs/log.md)."""
_NODE_SECONDS, _WAIT_SECONDS, _PATIENCE_SECONDS, _KNOCK_SECONDS = 2.0, 1.0, 120.0, 5.0
_PAUSE_SECONDS = 0.1
_REPORTS = 64
"""Reports on their way, for each unit: a worker that is ahead of the driver waits."""


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    name: str
    cores: int
    memory_bytes: int
    """The memory that Ray may give away there."""


_Slot = tuple[_Node, int]
"""A place for one unit at a time: a node, and a number there."""


@dataclass(slots=True)
class _Worker:
    """A hand in a slot: starting, idle, or at work on a unit."""

    slot: _Slot
    number: int
    actor: Any
    is_ready: bool = False
    unit: int | None = None
    pid: int = 0
    held_bytes: int = 0

    def event(self, kind: str, value: Any = None) -> Event:
        return Event(self.number, self.pid, -1 if self.unit is None else self.unit, kind, value, self.slot[0].name)


class RayPool(Pool):
    """A Ray cluster. `budget_bytes`: what milldam may hold on each node.

    In a program that is connected to one, that one is used, whatever the address.
    """

    overhead_bytes = OVERHEAD_BYTES
    forks = False

    def __init__(self, address: str | None, budget_bytes: int) -> None:
        self.ray = _import_ray()
        super().__init__(budget_bytes)
        self._started = not self.ray.is_initialized()
        place = address or os.environ.get("RAY_ADDRESS", "")
        if place.startswith("ray://") or self.ray.util.client.ray.is_connected():
            raise ConfigError(
                "Ray Client (ray://) can't stream what workers report.\nRun milldam on a machine of the cluster, with ",
                Setting("address", "HOST:6379"),
                ", or with `ray job submit`.",
            )
        if self._started:
            _connect(self.ray, address)
        try:
            largest = max(self.nodes(), key=lambda node: node.memory_bytes, default=None)
            if largest is None:
                raise ResourceError("No node of the Ray cluster has cores to work with.")
            if largest.memory_bytes < self.budget_bytes:
                raise ResourceError(
                    f"A budget of {format_size(self.budget_bytes)} fits on no node: {largest.name} gives Ray "
                    f"{format_size(largest.memory_bytes)}, and no other more.\nUse ",
                    Setting("memory", f"{largest.memory_bytes // 10**6}MB"),
                    " or less; it holds for each node.",
                )
        except BaseException:
            self.leave()
            raise

    @property
    def cores(self) -> int:
        """Of the largest node."""
        return max(node.cores for node in self.nodes())

    @property
    def machine(self) -> str:  # type: ignore[override]
        """The node that this process is on."""
        here = self.ray.get_runtime_context().get_node_id()
        return next((node.name for node in self.nodes() if node.id == here), "")

    def expect(self, modules: Sequence[str]) -> None:
        """Nodes import when a stage comes."""

    def leave(self) -> None:
        """Give up the connection, if it is ours."""
        self.close()
        if self._started:
            self.ray.shutdown()

    def nodes(self) -> list[_Node]:
        """The nodes that are alive, in a fixed order."""
        nodes = []
        for node in self.ray.nodes():
            resources = node["Resources"]
            if node["Alive"] and resources.get("CPU", 0) >= 1:
                name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
                nodes.append(_Node(node["NodeID"], name, int(resources["CPU"]), int(resources.get("memory", 0))))
        return sorted(nodes, key=lambda node: node.id)

    def slots(self, workers: Workers) -> list[_Slot]:
        """The slots of all nodes, spread over them."""
        slots: list[_Slot] = []
        for node in self.nodes():
            by_cores, by_memory = node.cores // workers.threads, node.memory_bytes // self.share(workers)
            slots += [(node, number) for number in range(min(workers.count, max(1, by_cores), by_memory))]
        return sorted(slots, key=lambda slot: slot[1])

    def share(self, workers: Workers) -> int:
        return max(1, self.budget_bytes // workers.count)

    # ---- work ----

    def run(self, workers: Workers, todo: Todo) -> None:
        """Make every unit of a stage."""
        if workers.here:
            super().run(workers, todo)
            return
        self.close()
        stage = _Stage(self, workers, todo)
        try:
            stage.run()
        finally:
            for worker in list(stage.workers.values()):
                stage.dismiss(worker)


class _Stage:
    """One stage on the cluster. Holds what is in flight, and a count for each unit in flight that lost a worker."""

    def __init__(self, pool: RayPool, wanted: Workers, todo: Todo) -> None:
        import cloudpickle

        self._pool, self._ray, self._wanted, self._todo = pool, pool.ray, wanted, todo
        options = {name: value for name, value in os.environ.items() if name.startswith("FSSPEC_")}
        self._stored = self._ray.put(cloudpickle.dumps((todo.load, options)))
        self._crashes, self._failed_starts = Counter[int](), 0
        self._numbers, self._looked = itertools.count(), -_NODE_SECONDS
        self.workers: dict[_Slot, _Worker] = {}
        self._waiting: dict[Any, _Worker] = {}
        """Sources of reports: a worker that starts, or that makes a unit."""

    def run(self) -> None:
        while True:
            for worker in list(self.workers.values()):
                if worker.is_ready and worker.unit is None:
                    self._hand_out(worker)
            if not self._todo.is_unit_left and all(worker.unit is None for worker in self.workers.values()):
                return
            if self._todo.is_unit_left and time.monotonic() - self._looked >= _NODE_SECONDS:
                self._start_workers()
            self._receive()

    def _hand_out(self, worker: _Worker) -> None:
        worker.unit = self._todo.next_unit()
        if worker.unit is None:
            self.dismiss(worker)
            return
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": _REPORTS}
        self._waiting[worker.actor.work.options(**streaming).remote(self._todo.assign(worker.unit))] = worker

    def _start_workers(self) -> None:
        """Have a worker in each slot; wait a while when there are none."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (slots := self._pool.slots(self._wanted)):
            if time.monotonic() > deadline:
                raise ResourceError(
                    "No node of the Ray cluster is alive and large enough. Every finished unit is safe; run it again."
                )
            time.sleep(_WAIT_SECONDS)
        hand, threads = self._ray.remote(max_restarts=0, max_task_retries=0)(Hand), self._wanted.threads
        for slot in slots:
            if slot not in self.workers:
                room = _on(slot[0], min(threads, slot[0].cores), self._pool.share(self._wanted))
                actor = hand.options(**room).remote(self._stored, threads, str(Path.cwd()))
                self.workers[slot] = worker = _Worker(slot, next(self._numbers), actor)
                self._waiting[actor.ready.remote(slot[0].name, self._pool.folder, milldam.__version__)] = worker
        self._looked = time.monotonic()

    def _receive(self) -> None:
        """Wait for a report, then take one from every worker that has one."""
        if not self._waiting:
            time.sleep(_PAUSE_SECONDS)
            return
        sources = list(self._waiting)
        ready, _ = self._ray.wait(sources, num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        if ready and len(sources) > 1:
            ready, _ = self._ray.wait(sources, num_returns=len(sources), timeout=0, fetch_local=False)
        for source in ready:
            worker = self._waiting[source]
            try:
                if worker.is_ready:
                    self._take(worker, *self._ray.get(next(source)))
                else:
                    worker.pid, problem = self._ray.get(source)
                    if problem:
                        raise ConfigError(problem)
                    worker.is_ready = True
                    del self._waiting[source]
            except StopIteration:
                del self._waiting[source]
                self._done(worker)
            except self._ray.exceptions.RayError as error:
                self._lost(worker, error)

    def _take(self, worker: _Worker, kind: str, value: Any) -> None:
        if kind == ERROR:
            raise value
        if kind == PROGRESS:
            worker.held_bytes = value["anonymous_bytes"]
        self._todo.on_event(worker.event(kind, value))

    def _done(self, worker: _Worker) -> None:
        assert worker.unit is not None
        self._crashes.pop(worker.unit, None)
        self._failed_starts = 0
        self._todo.on_event(worker.event(DONE))
        worker.unit = None
        if self._wanted.apart or worker.held_bytes > (self._wanted.worker_bytes or sys.maxsize):
            self.dismiss(worker)

    def _lost(self, worker: _Worker, error: Exception) -> None:
        """A worker or its node died: its unit goes to another slot, unless it has ended too many."""
        self.dismiss(worker)
        cause, unit = f"on {worker.slot[0].name} died ({type(error).__name__})", worker.unit
        if unit is None:
            self._failed_starts += 1
            if self._failed_starts > RETRIES * (len(self.workers) + 1):
                before = "as those before it, with no unit finished between them.\n"
                raise WorkerError(f"A worker {cause}, {before}", *ADVICE)
            return
        self._crashes[unit] += 1
        if self._crashes[unit] > RETRIES:
            times = f"{self._crashes[unit]} times; the last one {cause}"
            raise WorkerError(f"Unit {unit} lost its worker {times}.\n", *ADVICE)
        self._todo.on_event(worker.event(CRASH, cause))
        self._todo.again.append(unit)

    def dismiss(self, worker: _Worker) -> None:
        """End a worker, whatever it is doing; its slot is free."""
        del self.workers[worker.slot]
        self._looked = -_NODE_SECONDS
        self._waiting = {source: one for source, one in self._waiting.items() if one is not worker}
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)
        if worker.pid:
            self._todo.on_event(worker.event(ENDED))


def _on(node: _Node, cores: float = 0, memory_bytes: int = 0) -> dict[str, Any]:
    """Options of what runs on a node and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    return {"num_cpus": cores, "scheduling_strategy": there} | ({"memory": memory_bytes} if memory_bytes else {})


# ---- on the nodes ----


class Hand:
    """A worker of one stage. `folder`: where the driver is; paths may be relative to it."""

    def __init__(self, stored: bytes, threads: int, folder: str) -> None:
        self._stored = stored
        self._work: Work | None = None
        with contextlib.suppress(OSError):  # where there is no such folder, paths fail where they are used
            os.chdir(folder)
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def ready(self, node: str, folder: Path | None, version: str) -> tuple[int, str]:
        """This process, and why its node can't take part: another milldam, or an output that it can't write."""
        if version != milldam.__version__:
            return os.getpid(), (
                f"The node {node} has milldam {milldam.__version__}, the driver {version}: the results could differ.\n"
                "Install the same version on every node."
            )
        try:
            with tempfile.TemporaryFile(dir=folder):
                return os.getpid(), ""
        except OSError as error:
            return os.getpid(), (
                f"The node {node} can't write to {folder} ({error.strerror}).\nOn a Ray cluster the output must be on "
                "a file system that all nodes share, under the same path."
            )

    def work(self, assignment: Any) -> Iterator[tuple[str, Any]]:
        """Make a unit: everything it reports, as it comes."""
        reports: queue.Queue[tuple[str, Any]] = queue.Queue(_REPORTS)
        threading.Thread(target=self._make, args=(assignment, reports), daemon=True).start()
        while (report := reports.get())[0] != DONE:
            yield report

    def _make(self, assignment: Any, reports: queue.Queue[tuple[str, Any]]) -> None:
        try:
            self._work = self._work or self._load()
            self._work(assignment, lambda kind, value: reports.put((kind, value)))
        except BaseException as error:
            gone = error.__cause__ if isinstance(error, MilldamError) else error
            if isinstance(gone, FileNotFoundError) and gone.filename is not None:
                # The driver's machine sees what this one does not: most often an input on a disk of its own.
                error = InputError(
                    f"{gone.filename}: not there on the node {os.uname().nodename}.\nOn a Ray cluster every node must "
                    "see the input under the same path, or read it from an address."
                )
            reports.put((ERROR, as_sent(error)))
        finally:
            reports.put((DONE, None))

    def _load(self) -> Work:
        import cloudpickle

        keep_arrow_lean()
        load, options = cloudpickle.loads(self._stored)
        os.environ |= options
        if options:
            from fsspec.config import conf, set_conf_env

            set_conf_env(conf)  # where Ray has imported it already
        return begin(load)


# ---- the connection ----


def _connect(ray: Any, address: str | None) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = (address or "").rpartition(":")
        if host and "/" not in host and port.isdigit():
            # Ray itself takes minutes to notice that nothing listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
        # Without an address Ray would start a cluster of its own here; "auto" takes the one that runs.
        ray.init(address=address or "auto", namespace="milldam", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"No Ray cluster could be reached ({address or 'here'}): {str(error).splitlines()[0]}\n"
            "Start one with `ray start --head`, and name it with ",
            Setting("address", "HOST:6379"),
            ".",
        ) from None
    finally:
        # Ray puts its own in place, which would end this process without a message.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _import_ray() -> Any:
    # Ray prints to standard output about workers that die, unless this is set before it is imported.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    try:
        import ray
    except ImportError:
        raise ConfigError(Setting("executor", "ray"), ' needs the package ray: pip install "milldam[ray]"') from None
    return ray
