"""Units on the machines of a Ray cluster: the same work as in local processes, and the same bytes.

Workers are actors (`Hand`): each asks Ray for its cores and its share of a node's budget, makes one unit at a time, and
ends with the stage, or earlier when it must give its memory back. Ray decides where: a worker that finds no place yet
gets no unit. What a unit reports is streamed to this process (a few hundred bytes a part); what it makes goes to the
run's folder, which all machines must see.

Ray tries nothing again by itself: a worker or node that dies costs its unit's open part, and the unit goes to another
worker, resuming after what is recorded. Nodes that join are used, those that leave are forgotten.
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
_NODE_SECONDS, _WAIT_SECONDS, _KNOCK_SECONDS = 2.0, 0.5, 5.0
_REPORTS = 64
"""Reports on their way, for each unit: a worker that is ahead of the driver waits."""


def _node_name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"


class RayPool(Pool):
    """A Ray cluster. `budget_bytes`: what milldam may hold on each node.

    In a program that is connected to one, that one is used, whatever the address.
    """

    overhead_bytes = OVERHEAD_BYTES
    forks = False

    def __init__(self, address: str | None, budget_bytes: int) -> None:
        # Ray prints to standard output about workers that die, unless this is set before it is imported.
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
        try:
            import ray
        except ImportError:
            needs = ' needs the package ray: pip install "milldam[ray]"'
            raise ConfigError(Setting("executor", "ray"), needs) from None
        self.ray = ray
        super().__init__(budget_bytes)
        self._started = not ray.is_initialized()
        place = address or os.environ.get("RAY_ADDRESS", "")
        if place.startswith("ray://") or ray.util.client.ray.is_connected():
            raise ConfigError(
                "Ray Client (ray://) can't stream what workers report.\nRun milldam on a machine of the cluster, with ",
                Setting("address", "HOST:6379"),
                ", or with `ray job submit`.",
            )
        if self._started:
            _connect(ray, address)
        most = max((int(node["Resources"].get("memory", 0)) for node in self.nodes()), default=0)
        if most < budget_bytes:
            self.leave()
            raise ResourceError(
                f"A budget of {format_size(budget_bytes)} fits on no node: none gives Ray more than "
                f"{format_size(most)}.\nUse ",
                Setting("memory", f"{most // 10**6}MB"),
                " or less; it holds for each node.",
            )

    @property
    def cores(self) -> int:
        """Of the largest node."""
        return max(int(node["Resources"]["CPU"]) for node in self.nodes())

    @property
    def machine(self) -> str:  # type: ignore[override]
        """The node that this process is on."""
        here = self.ray.get_runtime_context().get_node_id()
        return next((_node_name(node) for node in self.nodes() if node["NodeID"] == here), "")

    def expect(self, modules: Sequence[str]) -> None:
        """Nodes import when a stage comes."""

    def leave(self) -> None:
        """Give up the connection, if it is ours."""
        self.close()
        if self._started:
            self.ray.shutdown()

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes that are alive and have cores to work with."""
        return [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]

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
            for worker in list(stage.workers):
                stage.dismiss(worker)


@dataclass(slots=True, eq=False)
class _Worker:
    """Starting, idle, or at work on a unit."""

    number: int
    actor: Any
    is_ready: bool = False
    node: str = ""
    unit: int | None = None
    pid: int = 0
    held_bytes: int = 0

    def event(self, kind: str, value: Any = None) -> Event:
        return Event(self.number, self.pid, -1 if self.unit is None else self.unit, kind, value, self.node)


class _Stage:
    """One stage on the cluster. Holds what is in flight, and a count for each unit in flight that lost a worker."""

    def __init__(self, pool: RayPool, wanted: Workers, todo: Todo) -> None:
        import cloudpickle

        self._pool, self._ray, self._wanted, self._todo = pool, pool.ray, wanted, todo
        options = {name: value for name, value in os.environ.items() if name.startswith("FSSPEC_")}
        self._stored = self._ray.put(cloudpickle.dumps((todo.load, options)))
        self._crashes, self._failed_starts = Counter[int](), 0
        self._numbers, self._looked = itertools.count(), -_NODE_SECONDS
        self.workers: list[_Worker] = []
        self._waiting: dict[Any, _Worker] = {}
        """Sources of reports: a worker that starts, or that makes a unit."""

    def run(self) -> None:
        while True:
            for worker in [worker for worker in self.workers if worker.is_ready and worker.unit is None]:
                self._hand_out(worker)
            if not self._todo.is_unit_left and all(worker.unit is None for worker in self.workers):
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
        """Have as many as the nodes hold: of each, by its cores, and what of its budget a worker takes."""
        threads, share = self._wanted.threads, max(1, self._pool.budget_bytes // self._wanted.count)
        # So many cores that no node gets more workers than its budget holds, though Ray may give it more memory.
        cores = max(threads, self._pool.cores // self._wanted.count)
        most = sum(min(self._wanted.count, int(node["Resources"]["CPU"]) // cores) for node in self._pool.nodes())
        room = {"num_cpus": cores, "memory": share, "scheduling_strategy": "SPREAD"}
        hand = self._ray.remote(max_restarts=0, max_task_retries=0, **room)(Hand)
        while len(self.workers) < most:
            actor = hand.remote(self._stored, threads, str(Path.cwd()))
            worker = _Worker(next(self._numbers), actor)
            self.workers.append(worker)
            self._waiting[actor.ready.remote(self._pool.folder, milldam.__version__)] = worker
        self._looked = time.monotonic()

    def _receive(self) -> None:
        """Wait for a report, then take one from every worker that has one."""
        if not self._waiting:
            time.sleep(_WAIT_SECONDS / 5)
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
                    worker.pid, node, problem = self._ray.get(source)
                    worker.node = next((_node_name(one) for one in self._pool.nodes() if one["NodeID"] == node), node)
                    if problem:
                        raise ConfigError(f"The node {worker.node} {problem}")
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
        """A worker or its node died: its unit goes to another one, unless it has ended too many."""
        self.dismiss(worker)
        cause, unit = f"on {worker.node or 'a node'} died ({type(error).__name__})", worker.unit
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
        """End a worker, whatever it is doing."""
        self.workers.remove(worker)
        self._looked = -_NODE_SECONDS
        self._waiting = {source: one for source, one in self._waiting.items() if one is not worker}
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)
        if worker.pid:
            self._todo.on_event(worker.event(ENDED))


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

    def ready(self, folder: Path | None, version: str) -> tuple[int, str, str]:
        """This process, its node, and why that can't take part: another milldam, or an output that it can't write."""
        import ray

        problem = ""
        if version != milldam.__version__:
            problem = (
                f"has milldam {milldam.__version__}, the driver {version}: install the same version on every node."
            )
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            problem = (
                f"can't write to {folder} ({error.strerror}).\nOn a Ray cluster the output must be on a file system "
                "that all nodes share, under the same path."
            )
        return os.getpid(), ray.get_runtime_context().get_node_id(), problem

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
