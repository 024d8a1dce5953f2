"""Units on the machines of a Ray cluster: the same work as in local processes, and the same bytes.

Every node has slots, as many as its cores, its memory and the budget of a node hold. In each is an actor (`Hand`) that
asks Ray for its cores and its share of the budget, works on one unit at a time, and ends with the stage, or earlier
when it must give its memory back. What a unit reports is streamed to this process (a few hundred bytes a part), and
once a second what the hand holds; what it makes goes to the run's folder, which all machines must see.

Ray tries nothing again by itself: a worker or node that dies costs its unit's open part, and the unit goes to another
slot, going on behind what is recorded. Nodes that join are looked at and used, those that leave are forgotten. A slot
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
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import milldam
from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, Setting, WorkerError
from milldam.memory import format_size, keep_arrow_lean, usage
from milldam.run.fork import ADVICE, ERROR, as_sent
from milldam.run.pools import Pool, Workers
from milldam.run.tasks import CRASH, DONE, MEMORY, Assigned, Event, Executor, Load, Work, begin

log = logging.getLogger("milldam")

RETRIES = 3
"""How often a unit is tried again; on a cluster machines come and go."""
OVERHEAD_BYTES = 60 * 10**6
"""What a Ray worker process holds more than a local one (measured: docs/log.md)."""
_NODE_SECONDS, _WAIT_SECONDS, _PATIENCE_SECONDS, _KNOCK_SECONDS = 2.0, 1.0, 120.0, 5.0
_BEAT_SECONDS, _SAMPLE_SECONDS = 1.0, 0.1
_REPORTS = 64
"""Reports on their way, for each unit: a worker that is ahead of the driver waits."""


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    name: str
    cores: int
    memory_bytes: int
    """What Ray may give away there."""


class RayPool(Pool):
    """A Ray cluster. `budget_bytes`: what milldam may hold on each node.

    In a program that is connected to one, that one is used, whatever the address.
    """

    overhead_bytes = OVERHEAD_BYTES
    forks = False

    def __init__(self, address: str | None, budget_bytes: int) -> None:
        self.ray = _import_ray()
        super().__init__(budget_bytes)
        self._folder: Path | None = None
        self._fit: dict[str, bool] = {}
        """Node -> whether it can take part."""
        self._started = not self.ray.is_initialized()
        named = address or os.environ.get("RAY_ADDRESS", "")
        if named.startswith("ray://") or self.ray.util.client.ray.is_connected():
            raise ConfigError(
                "Ray Client (ray://) can't stream what workers report.\nRun milldam on a machine of the cluster, with ",
                Setting("address", "HOST:6379"),
                ", or with `ray job submit`.",
            )
        if self._started:
            _connect(self.ray, address)
        try:
            self._require_memory()
        except BaseException:
            self.leave()
            raise

    def _require_memory(self) -> None:
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

    @property
    def cores(self) -> int:
        """Of the largest node."""
        return max(node.cores for node in self.nodes())

    @property
    def machine(self) -> str:  # type: ignore[override]
        """The node that this process is on."""
        here = self.ray.get_runtime_context().get_node_id()
        return next((node.name for node in self.nodes() if node.id == here), "")

    def nodes(self) -> list[_Node]:
        """The nodes that are alive, in a fixed order."""
        found = []
        for node in self.ray.nodes():
            resources = node["Resources"]
            if node["Alive"] and resources.get("CPU", 0) >= 1:
                name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
                found.append(_Node(node["NodeID"], name, int(resources["CPU"]), int(resources.get("memory", 0))))
        return sorted(found, key=lambda node: node.id)

    def expect(self, modules: Sequence[str]) -> None:
        """Nodes import when a stage comes."""

    # ---- nodes that can take part ----

    def require_shared(self, folder: Path) -> None:
        """Raise ConfigError when a node does not see a folder of this machine, or runs another milldam."""
        self._folder = folder.absolute()
        for complaint in self._look_at(self.nodes()):
            raise ConfigError(complaint)

    def _look_at(self, nodes: list[_Node]) -> list[str]:
        """What stands against nodes; those without complaint can take part."""
        assert self._folder is not None
        mark, complaints = self._folder / f".seen-{uuid.uuid4().hex}", []
        mark.write_bytes(b"")
        remote = self.ray.remote(max_retries=0)(look)
        told = str(mark), milldam.__version__, str(Path.cwd())
        try:
            answers = [remote.options(**_on(node)).remote(node.name, *told) for node in nodes]
            for node, answer in zip(nodes, answers, strict=True):
                try:
                    complaint = self.ray.get(answer, timeout=_PATIENCE_SECONDS)
                except self.ray.exceptions.RayError as error:
                    reason = str(error).strip().splitlines()[-1]
                    complaint = f"The node {node.name} can't run milldam: {reason}\nInstall the same milldam there."
                self._fit[node.id] = not complaint
                complaints += [complaint] if complaint else []
        finally:
            for path in self._folder.glob(f"{mark.name}*"):
                path.unlink(missing_ok=True)
        return complaints

    def slots(self, workers: Workers) -> list[tuple[_Node, int]]:
        """(node, number there): places for one unit at a time, spread over the nodes that can take part."""
        nodes = self.nodes()
        new = [node for node in nodes if node.id not in self._fit]
        if new and self._folder is not None:
            for complaint in self._look_at(new):
                log.warning("%s It is left out.", complaint.splitlines()[0])
        found = []
        for node in nodes:
            if self._fit.get(node.id, True):
                by_cores, by_memory = node.cores // workers.threads, node.memory_bytes // self.share(workers)
                room = min(workers.count, max(1, by_cores), by_memory)
                found += [(node, number) for number in range(room)]
        return sorted(found, key=lambda slot: slot[1])

    def share(self, workers: Workers) -> int:
        return max(1, self.budget_bytes // workers.count)

    # ---- work ----

    def executor(self, workers: Workers) -> Executor:
        if workers.here:
            return super().executor(workers)
        self.close()
        return _RayExecutor(self, workers)

    def leave(self) -> None:
        """Give up the connection, if it is ours."""
        self.close()
        if self._started:
            self.ray.shutdown()


@dataclass(slots=True)
class _Worker:
    """A hand in a slot: starting, idle, or at work on a unit."""

    node: _Node
    number: int
    actor: Any
    is_ready: bool = False
    unit: int | None = None
    pid: int = 0
    held_bytes: int = 0


class _RayExecutor:
    """One stage on the cluster. Holds what is in flight, and a count for each unit in flight that lost a worker."""

    def __init__(self, pool: RayPool, wanted: Workers) -> None:
        self._pool, self._ray, self._wanted = pool, pool.ray, wanted
        self._workers: dict[tuple[_Node, int], _Worker] = {}
        self._waiting: dict[Any, _Worker] = {}
        """What a worker is waited for by: that it has started, or its unit's reports."""
        self._numbers = itertools.count()
        self._crashes, self._failed_starts = Counter[int](), 0
        self._again: list[int] = []
        self._looked = -_NODE_SECONDS

    def run(
        self, load: Load, units: Iterable[int], assign: Callable[[int], Assigned], on_event: Callable[[Event], None]
    ) -> None:
        import cloudpickle

        self._on_event = on_event
        options = {name: value for name, value in os.environ.items() if name.startswith("FSSPEC_")}
        stored, coming = self._ray.put(cloudpickle.dumps((load, options))), iter(units)
        over = False
        try:
            while True:
                for slot, worker in list(self._workers.items()):
                    if worker.is_ready and worker.unit is None:
                        unit = self._again.pop() if self._again else next(coming, None)
                        if unit is None:
                            over = True
                            self._dismiss(slot)
                            continue
                        worker.unit = unit
                        told = {"num_returns": "streaming", "_generator_backpressure_num_objects": _REPORTS}
                        self._waiting[worker.actor.work.options(**told).remote(assign(unit))] = worker
                if over and not self._again and all(worker.unit is None for worker in self._workers.values()):
                    return
                if not over or self._again:
                    self._start_workers(stored)
                self._hear()
        finally:
            for slot in list(self._workers):
                self._dismiss(slot)

    def _start_workers(self, stored: Any) -> None:
        """See now and then which nodes there are, and have a worker in each slot; wait a while when there are none."""
        if time.monotonic() - self._looked < _NODE_SECONDS:
            return
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (slots := self._pool.slots(self._wanted)):
            if time.monotonic() > deadline:
                raise ResourceError(
                    "No node of the Ray cluster is alive and large enough. Every finished unit is safe; run it again."
                )
            time.sleep(_WAIT_SECONDS)
        self._looked = time.monotonic()
        hand = self._ray.remote(max_restarts=0, max_task_retries=0)(Hand)
        for slot in slots:
            if slot not in self._workers:
                node, threads = slot[0], self._wanted.threads
                room = _on(node, min(threads, node.cores), self._pool.share(self._wanted))
                actor = hand.options(**room).remote(stored, threads, str(Path.cwd()))
                self._workers[slot] = worker = _Worker(node, next(self._numbers), actor)
                self._waiting[actor.pid.remote()] = worker

    def _dismiss(self, slot: tuple[_Node, int]) -> None:
        """End the worker in a slot, whatever it is doing."""
        worker = self._workers.pop(slot)
        self._waiting = {what: one for what, one in self._waiting.items() if one is not worker}
        with contextlib.suppress(Exception):
            self._ray.kill(worker.actor)
        if worker.pid:
            self._tell(worker, -1, MEMORY, 0)

    def _hear(self) -> None:
        """Wait for a word, then take one from everybody who has one."""
        if not self._waiting:
            time.sleep(_SAMPLE_SECONDS)
            return
        ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        if ready and len(self._waiting) > 1:
            everybody = list(self._waiting)
            ready, _ = self._ray.wait(everybody, num_returns=len(everybody), timeout=0, fetch_local=False)
        for what in ready:
            worker = self._waiting[what]
            try:
                if not worker.is_ready:
                    worker.pid, worker.is_ready = self._ray.get(what), True
                    del self._waiting[what]
                else:
                    self._take(worker, *self._ray.get(next(what)))
            except StopIteration:
                del self._waiting[what]
                self._done(worker)
            except self._ray.exceptions.RayError as error:
                self._lost(worker, error)

    def _take(self, worker: _Worker, kind: str, value: Any) -> None:
        if kind == ERROR:
            raise value
        if kind == MEMORY:
            worker.held_bytes = value
        assert worker.unit is not None
        self._tell(worker, worker.unit, kind, value)

    def _done(self, worker: _Worker) -> None:
        assert worker.unit is not None
        self._crashes.pop(worker.unit, None)
        self._failed_starts = 0
        self._tell(worker, worker.unit, DONE)
        worker.unit = None
        most = self._wanted.worker_bytes
        if self._wanted.apart or (most is not None and worker.held_bytes > most):
            self._dismiss(self._slot_of(worker))
            self._looked = -_NODE_SECONDS

    def _lost(self, worker: _Worker, error: Exception) -> None:
        """A worker or its node died: its unit goes to another slot, unless it has killed too many."""
        self._dismiss(self._slot_of(worker))
        self._looked = -_NODE_SECONDS
        cause = f"on {worker.node.name} died ({type(error).__name__})"
        if worker.unit is None:
            self._failed_starts += 1
            if self._failed_starts > RETRIES * (len(self._workers) + 1):
                raise WorkerError(
                    f"A worker {cause}, as those before it, with no unit finished between them.\n", *ADVICE
                )
            return
        self._crashes[worker.unit] += 1
        if self._crashes[worker.unit] > RETRIES:
            times = self._crashes[worker.unit]
            raise WorkerError(f"Unit {worker.unit} lost its worker {times} times; the last one {cause}.\n", *ADVICE)
        self._tell(worker, worker.unit, CRASH, cause)
        self._again.append(worker.unit)

    def _slot_of(self, worker: _Worker) -> tuple[_Node, int]:
        return next(slot for slot, one in self._workers.items() if one is worker)

    def _tell(self, worker: _Worker, unit: int, kind: str, value: Any = None) -> None:
        self._on_event(Event(worker.number, worker.pid, unit, kind, value, host=worker.node.name))


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

    def pid(self) -> int:
        return os.getpid()

    def work(self, assignment: Any) -> Iterator[tuple[str, Any]]:
        """Do a unit: everything it reports, as it comes; what it holds, at least at the beginning and the end."""
        told: queue.Queue[tuple[str, Any]] = queue.Queue(_REPORTS)
        peak, beat = usage().anonymous, time.monotonic()
        doing = threading.Thread(target=self._do, args=(assignment, told), daemon=True)
        doing.start()
        yield MEMORY, peak
        while True:
            with contextlib.suppress(queue.Empty):
                kind, value = told.get(timeout=_SAMPLE_SECONDS)
                if kind == DONE:
                    break
                yield kind, value
            peak = max(peak, usage().anonymous)
            if time.monotonic() - beat > _BEAT_SECONDS:
                yield MEMORY, peak
                peak, beat = 0, time.monotonic()
        doing.join()
        now = usage().anonymous
        yield MEMORY, max(peak, now)
        yield MEMORY, now

    def _do(self, assignment: Any, told: queue.Queue[tuple[str, Any]]) -> None:
        try:
            if self._work is None:
                self._work = self._load()
            self._work(assignment, lambda kind, value: told.put((kind, value)))
        except BaseException as error:
            gone = error.__cause__ if isinstance(error, MilldamError) else error
            if isinstance(gone, FileNotFoundError) and gone.filename is not None:
                # The driver's machine sees what this one does not: most often an input on a disk of its own.
                error = InputError(
                    f"{gone.filename}: not there on the node {os.uname().nodename}.\nOn a Ray cluster every node must "
                    "see the input under the same path, or read it from an address."
                )
            told.put((ERROR, as_sent(error)))
        finally:
            told.put((DONE, None))

    def _load(self) -> Work:
        import cloudpickle

        keep_arrow_lean()
        load, options = cloudpickle.loads(self._stored)
        os.environ |= options
        if options:
            from fsspec.config import conf, set_conf_env

            set_conf_env(conf)  # where Ray has imported it already
        return begin(load)


def look(node: str, mark: str, version: str, folder: str) -> str:
    """What stands against the node that this runs on: another milldam, a file of the driver (`mark`) that is not seen,
    none that can be written beside it; empty: nothing."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    if version != milldam.__version__:
        return (
            f"The node {node} has milldam {milldam.__version__}, this machine {version}: the results could differ.\n"
            "Install the same version on every node."
        )
    what = "can't write to" if Path(mark).exists() else "does not see"
    with contextlib.suppress(OSError):
        Path(f"{mark}-{node}").write_bytes(b"")
        if Path(mark).exists():
            return ""
    return (
        f"The node {node} {what} {Path(mark).parent}.\nOn a Ray cluster the output must be on a file system that all "
        "nodes share, under the same path."
    )


# ---- the connection ----


def _connect(ray: Any, address: str | None) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        host, _, port = (address or "").rpartition(":")
        if host and "/" not in host and port.isdigit():
            # Ray itself takes minutes to see that nobody listens.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()
        # Without an address Ray would start a cluster of its own here; "auto" takes the one that runs.
        ray.init(address=address or "auto", namespace="milldam", log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        where = address or "here"
        raise InputError(
            f"No Ray cluster could be reached ({where}): {str(error).splitlines()[0]}\n"
            "Start one with `ray start --head`, and name it with ",
            Setting("address", "HOST:6379"),
            ".",
        ) from None
    finally:
        # Ray puts its own in place, which would end this process with nothing said.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _import_ray() -> Any:
    # Ray prints what it thinks of workers that die to standard output, unless it is told before it is imported.
    silence = "RAY_DEDUP_LOGS_SKIP_REGEX"
    ours = "ray" not in sys.modules and silence not in os.environ
    if ours:
        os.environ[silence] = "."
    try:
        import ray
    except ImportError:
        raise ConfigError(Setting("executor", "ray"), ' needs the package ray: pip install "milldam[ray]"') from None
    finally:
        if ours:
            del os.environ[silence]
    return ray
