"""Units as Ray tasks, on the machines of a cluster: the same work as in local processes, and the same bytes.

Every node has slots, as many as its cores and the budget of a node hold; a slot works on one unit at a time, so what is
in flight is bounded, and so is the memory of each node. A task streams what it reports to this process (a few hundred
bytes a part); what it makes goes to the run's folder, which all machines must see. A worker or node that dies costs
its unit's open part: the unit goes to another slot. Nodes that join are used, those that leave are forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, WorkerError
from milldam.executors import CRASH, DONE, Event, Executor, Task, Work
from milldam.executors.crews import LocalCrew, Staff
from milldam.lean_arrow import keep_arrow_lean

RETRIES = 3
"""How often a unit is tried again; on a cluster machines come and go."""
OVERHEAD_BYTES = 60 * 10**6
"""What a Ray worker process holds more than a local one (measured: docs/log.md)."""
_NODE_SECONDS, _WAIT_SECONDS, _PATIENCE_SECONDS, _KNOCK_SECONDS = 2.0, 1.0, 120.0, 5.0
ERROR = "error"


class RayCrew:
    """A Ray cluster. `budget_bytes`: what milldam may hold on each node."""

    def __init__(self, address: str | None, budget_bytes: int) -> None:
        self._ray = _import_ray()
        self._budget_bytes = budget_bytes
        self._here = LocalCrew(budget_bytes)
        self._started = not self._ray.is_initialized()
        if self._started:
            self._connect(address)

    def _connect(self, address: str | None) -> None:
        try:
            _knock(address)
            self._ray.init(address=address, namespace="milldam", log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            where = address or "here"
            raise InputError(
                f"No Ray cluster could be reached ({where}): {str(error).splitlines()[0]}\n"
                "Start one with `ray start --head`, and name it with --address HOST:6379."
            ) from None

    overhead_bytes = OVERHEAD_BYTES

    @property
    def cores(self) -> int:
        """Of the largest node."""
        return max(node.cores for node in self.nodes())

    def nodes(self) -> list[_Node]:
        """The nodes that are alive, in a fixed order."""
        alive = (node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))
        found = (
            _Node(node["NodeID"], f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}", int(node["Resources"]["CPU"]))
            for node in alive
        )
        return sorted(found, key=lambda node: node.id)

    def require_shared(self, folder: Path) -> None:
        """Raise ConfigError when a node does not see a folder of this machine, or runs another milldam."""
        mark = folder / f".seen-{uuid.uuid4().hex}"
        mark.write_bytes(b"")
        try:
            look = self._ray.remote(max_retries=0)(_look)
            asked = {node.name: look.options(**self._on(node)).remote(str(mark)) for node in self.nodes()}
            for name, answer in asked.items():
                _require_fit(name, folder, self._answer(name, answer))
        finally:
            mark.unlink(missing_ok=True)

    def _answer(self, name: str, answer: Any) -> tuple[bool, str]:
        try:
            found: tuple[bool, str] = self._ray.get(answer, timeout=_PATIENCE_SECONDS)
            return found
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"The node {name} can't run milldam: {reason}\nInstall the same milldam on every node."
            ) from None

    def _on(self, node: _Node, *, cores: float = 0, memory_bytes: int = 0) -> dict[str, Any]:
        """Options of a task that runs on a node and nowhere else."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(node.id, soft=False)
        memory = {"memory": memory_bytes} if memory_bytes else {}
        return {"num_cpus": cores, "scheduling_strategy": there, **memory}

    def executor(self, stage: str, staff: Staff) -> Executor:
        if staff.here:
            return self._here.executor(stage, staff)
        return _RayExecutor(self, staff)

    def slots(self, staff: Staff) -> list[_Slot]:
        """Places for one unit at a time, spread over the nodes."""
        by_node = (
            [_Slot(node, number) for number in range(max(1, min(staff.workers, node.cores // staff.threads)))]
            for node in self.nodes()
        )
        spread = itertools.zip_longest(*by_node)
        return [slot for round_ in spread for slot in round_ if slot is not None]

    def submit(self, slot: _Slot, staff: Staff, task: _TaskInStore, assignment: Any) -> Any:
        """Start a unit in a slot; the stream of what it reports."""
        share = self._budget_bytes // max(1, min(staff.workers, slot.node.cores // staff.threads))
        cores = min(staff.threads, slot.node.cores)
        # A process that must give all its memory back ends after its unit.
        calls = {"max_calls": 1} if staff.apart or staff.worker_bytes is not None else {}
        remote = self._ray.remote(num_returns="streaming", max_retries=0, **calls)(_work)
        return remote.options(**self._on(slot.node, cores=cores, memory_bytes=share)).remote(
            task.reference, task.id, staff.threads, assignment
        )

    def close(self) -> None:
        self._here.close()

    def leave(self) -> None:
        """Give up the connection, if it is ours."""
        self.close()
        if self._started:
            self._ray.shutdown()


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    name: str
    cores: int


@dataclass(frozen=True, slots=True)
class _Slot:
    node: _Node
    number: int


@dataclass(frozen=True, slots=True)
class _TaskInStore:
    """A task that was put where every worker can fetch it once."""

    reference: Any
    id: str


@dataclass(slots=True)
class _Running:
    """A unit in a slot."""

    slot: _Slot
    worker: int
    unit: int
    pid: int = 0


class _RayExecutor:
    """One stage on the cluster."""

    def __init__(self, crew: RayCrew, staff: Staff) -> None:
        self._crew, self._staff = crew, staff
        self._ray = crew._ray
        self._workers: dict[_Slot, int] = {}
        self._running: dict[Any, _Running] = {}
        self._crashes: dict[int, int] = {}
        self._again: list[int] = []
        self._looked = 0.0

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        import cloudpickle

        stored = _TaskInStore(self._ray.put(cloudpickle.dumps(task)), uuid.uuid4().hex)
        ahead = iter(units)
        try:
            while self._hand_out(stored, ahead, assign) or self._running:
                self._hear(on_event)
        finally:
            for stream in self._running:
                with contextlib.suppress(Exception):
                    self._ray.cancel(stream, force=True)

    def _hand_out(self, task: _TaskInStore, units: Iterator[int], assign: Callable[[int], Any]) -> bool:
        """Fill the free slots; whether anything was started."""
        started = False
        for slot in self._free():
            unit = self._again.pop() if self._again else next(units, None)
            if unit is None:
                break
            stream = self._crew.submit(slot, self._staff, task, assign(unit))
            self._running[stream] = _Running(slot, self._workers[slot], unit)
            started = True
        return started

    def _free(self) -> list[_Slot]:
        if time.monotonic() - self._looked > _NODE_SECONDS:
            self._look()
        taken = {one.slot for one in self._running.values()}
        return [slot for slot in self._workers if slot not in taken]

    def _look(self) -> None:
        """See which nodes there are now; wait a while when there are none."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (slots := self._crew.slots(self._staff)):
            if time.monotonic() > deadline:
                raise ResourceError("No node of the Ray cluster is alive. Every finished unit is safe; run it again.")
            time.sleep(_WAIT_SECONDS)
        number = itertools.count(max(self._workers.values(), default=-1) + 1)
        known = self._workers
        self._workers = {slot: known[slot] if slot in known else next(number) for slot in slots}
        self._looked = time.monotonic()

    def _hear(self, on_event: Callable[[Event], None]) -> None:
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        for stream in ready:
            running = self._running[stream]
            try:
                pid, kind, value = self._ray.get(next(stream))
            except StopIteration:
                del self._running[stream]
                on_event(self._event(running, DONE))
            except self._ray.exceptions.RayError as error:
                del self._running[stream]
                self._again_or_never(running, error, on_event)
            else:
                if kind == ERROR:
                    raise value
                running.pid = pid
                on_event(self._event(running, kind, value))

    def _event(self, running: _Running, kind: str, value: Any = None) -> Event:
        return Event(running.worker, running.pid, running.unit, kind, value, host=running.slot.node.name)

    def _again_or_never(self, running: _Running, error: Exception, on_event: Callable[[Event], None]) -> None:
        """A worker or its node died: the unit goes to another slot, unless it has killed too many."""
        self._looked = 0.0
        unit, cause = running.unit, f"on {running.slot.node.name} died ({type(error).__name__})"
        self._crashes[unit] = self._crashes.get(unit, 0) + 1
        if self._crashes[unit] > RETRIES:
            raise WorkerError(
                f"Unit {unit} lost its worker {self._crashes[unit]} times; the last one {cause}.\n"
                "Every finished unit is safe. Run the same command again; if it was memory, with fewer --workers."
            )
        on_event(self._event(running, CRASH, cause))
        self._again.append(unit)


# ---- on the nodes ----

_state: tuple[str, Work] | None = None
"""What this worker process has built for a task: the next unit of the same stage finds it."""


def _work(task: bytes, task_id: str, threads: int, assignment: Any) -> Iterator[tuple[int, str, Any]]:
    """Do a unit; everything it reports, as it comes: (process, kind, value)."""
    told: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    doing = threading.Thread(target=_do, args=(task, task_id, threads, assignment, told), daemon=True)
    doing.start()
    while (event := told.get())[0] != DONE:
        yield os.getpid(), *event
    doing.join()


def _do(task: bytes, task_id: str, threads: int, assignment: Any, told: queue.SimpleQueue[tuple[str, Any]]) -> None:
    try:
        _work_for(task, task_id, threads)(assignment, lambda kind, value: told.put((kind, value)))
    except MilldamError as error:
        told.put((ERROR, error))
    except BaseException as error:
        # A traceback does not pickle by itself.
        told.put((ERROR, RuntimeError(f"{error!r} in a worker\n{traceback.format_exc()}")))
    finally:
        told.put((DONE, None))


def _work_for(task: bytes, task_id: str, threads: int) -> Work:
    global _state
    if _state is None or _state[0] != task_id:
        import cloudpickle

        # What the task before held must be gone before this one takes its place.
        _state = None
        keep_arrow_lean()
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        _state = (task_id, cloudpickle.loads(task).start())
    return _state[1]


def _look(path: str) -> tuple[bool, str]:
    """Whether a file is seen here, and which milldam this is."""
    import milldam

    return Path(path).exists(), milldam.__version__


def _require_fit(name: str, folder: Path, found: tuple[bool, str]) -> None:
    import milldam

    sees, version = found
    if version != milldam.__version__:
        raise ConfigError(
            f"The node {name} has milldam {version}, this machine {milldam.__version__}: the results could differ.\n"
            "Install the same version on every node."
        )
    if not sees:
        raise ConfigError(
            f"The node {name} does not see {folder}.\nWith --engine ray the output lies on a file system that all "
            "nodes share, under the same path."
        )


def _knock(address: str | None) -> None:
    """Raise OSError when nobody listens there: Ray itself takes minutes to give up."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError('--engine ray needs the package ray: pip install "milldam[ray]"') from None
    return ray
