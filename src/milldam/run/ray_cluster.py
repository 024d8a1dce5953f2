"""Units on the machines of a Ray cluster: the same work as in local processes, and the same bytes.

Every node has slots, as many as its cores, its memory and the budget of a node hold; a slot works on one unit at a
time, so what is in flight is bounded, and so is the memory of each node. Units are tasks of an actor per slot
(ray_node.py) that asks Ray for its cores and its share of the budget; it ends with the stage, or earlier when it must
give its memory back. What a unit reports is streamed to this process (a few hundred bytes a part); what it makes goes
to the run's folder, which all machines must see.

Ray tries nothing again by itself: a worker or node that dies costs its unit's open part, and the unit goes to another
slot, going on behind what is recorded. Nodes that join are looked at and used, those that leave are forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, ResourceError, Setting, WorkerError
from milldam.memory import format_size
from milldam.run.pools import LocalPool, Workers
from milldam.run.ray_node import ERROR, TOLD, Hand, look
from milldam.run.tasks import CRASH, DONE, MEMORY, Event, Executor, Task

log = logging.getLogger("milldam")

RETRIES = 3
"""How often a unit is tried again; on a cluster machines come and go."""
OVERHEAD_BYTES = 60 * 10**6
"""What a Ray worker process holds more than a local one (measured: docs/log.md)."""
_NODE_SECONDS, _WAIT_SECONDS, _PATIENCE_SECONDS, _KNOCK_SECONDS = 2.0, 1.0, 120.0, 5.0
_BUSY_SECONDS = 60.0
"""After so long a unit that waits for a node, whose cores or memory others have, goes to a slot that is free."""


class RayPool:
    """A Ray cluster. `budget_bytes`: what milldam may hold on each node.

    In a program that is connected to one, that one is used, whatever the address.
    """

    def __init__(self, address: str | None, budget_bytes: int) -> None:
        self._ray = _import_ray()
        self._budget_bytes = budget_bytes
        self._here = LocalPool(budget_bytes)
        self._folder: Path | None = None
        self._fit: dict[str, bool] = {}
        """Node -> whether it can take part."""
        self._started = not self._ray.is_initialized()
        named = address or os.environ.get("RAY_ADDRESS", "")
        if named.startswith("ray://") or self._ray.util.client.ray.is_connected():
            raise ConfigError(
                "Ray Client (ray://) can't stream what workers report.\nRun milldam on a machine of the cluster, with ",
                Setting("address", "HOST:6379"),
                ", or with `ray job submit`.",
            )
        if self._started:
            self._connect(address)
        try:
            self._require_memory()
        except BaseException:
            self.leave()
            raise

    def _connect(self, address: str | None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        try:
            _knock(address)
            self._ray.init(
                # Without one Ray would start a cluster of its own here; "auto" takes the one that runs.
                address=address or "auto",
                namespace="milldam",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
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

    def _require_memory(self) -> None:
        largest = max(self.nodes(), key=lambda node: node.memory_bytes, default=None)
        if largest is None:
            raise ResourceError("No node of the Ray cluster has cores to work with.")
        if largest.memory_bytes < self._budget_bytes:
            raise ResourceError(
                f"A budget of {format_size(self._budget_bytes)} fits on no node: {largest.name} gives Ray "
                f"{format_size(largest.memory_bytes)}, and no other more.\nUse ",
                Setting("memory", f"{largest.memory_bytes // 10**6}MB"),
                " or less; it holds for each node.",
            )

    overhead_bytes = OVERHEAD_BYTES
    forks = False

    @property
    def cores(self) -> int:
        """Of the largest node."""
        return max(node.cores for node in self.nodes())

    @property
    def machine(self) -> str:
        """The node that this process is on."""
        here = self._ray.get_runtime_context().get_node_id()
        return next((node.name for node in self.nodes() if node.id == here), "")

    def nodes(self) -> list[_Node]:
        """The nodes that are alive, in a fixed order."""
        alive = (node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1)
        return sorted(map(_Node.of, alive), key=lambda node: node.id)

    def expect(self, modules: Sequence[str]) -> None:
        """Nodes import when a task comes."""

    # ---- nodes that can take part ----

    def require_shared(self, folder: Path) -> None:
        """Raise ConfigError when a node does not see a folder of this machine, or runs another milldam."""
        self._folder = folder.absolute()
        for complaint in self._look_at(self.nodes()).values():
            if complaint is not None:
                raise ConfigError(complaint)

    def _look_at(self, nodes: list[_Node]) -> dict[str, str | None]:
        """What stands against each node; None: nothing."""
        assert self._folder is not None
        mark = self._folder / f".seen-{uuid.uuid4().hex}"
        mark.write_bytes(b"")
        remote = self._ray.remote(max_retries=0)(look)
        asked = {}
        try:
            for node in nodes:
                answer = mark.with_name(f"{mark.name}-{node.id}")
                asked[node] = remote.options(**_on(node)).remote(str(mark), str(answer), str(Path.cwd()))
            found = {node.name: self._complaint(node, reference) for node, reference in asked.items()}
            self._fit |= {node.id: found[node.name] is None for node in nodes}
            return found
        finally:
            for path in self._folder.glob(f"{mark.name}*"):
                path.unlink(missing_ok=True)

    def _complaint(self, node: _Node, answer: Any) -> str | None:
        assert self._folder is not None
        try:
            return _complaint(node.name, self._folder, self._ray.get(answer, timeout=_PATIENCE_SECONDS))
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            return f"The node {node.name} can't run milldam: {reason}\nInstall the same milldam on every node."

    def _fit_nodes(self) -> list[_Node]:
        """The nodes that can take part; new ones are looked at first."""
        nodes = self.nodes()
        new = [node for node in nodes if node.id not in self._fit]
        if new and self._folder is not None:
            for complaint in self._look_at(new).values():
                if complaint is not None:
                    log.warning("%s It is left out.", complaint.splitlines()[0])
        return [node for node in nodes if self._fit.get(node.id, True)]

    # ---- work ----

    def executor(self, stage: str, workers: Workers) -> Executor:
        if workers.here:
            return self._here.executor(stage, workers)
        self.close()
        return _RayExecutor(self, workers)

    def slots(self, workers: Workers) -> list[_Slot]:
        """Places for one unit at a time, spread over the nodes."""
        by_node = ([_Slot(node, number) for number in range(self._room(node, workers))] for node in self._fit_nodes())
        spread = itertools.zip_longest(*by_node)
        return [slot for round_ in spread for slot in round_ if slot is not None]

    def _room(self, node: _Node, workers: Workers) -> int:
        return min(workers.count, max(1, node.cores // workers.threads), node.memory_bytes // self._share(workers))

    def _share(self, workers: Workers) -> int:
        return max(1, self._budget_bytes // workers.count)

    def start_worker(self, slot: _Slot, workers: Workers, task: Any) -> Any:
        """A worker in a slot, for a task that was put where every node can fetch it."""
        remote = self._ray.remote(max_restarts=0, max_task_retries=0)(Hand)
        room = _on(slot.node, cores=min(workers.threads, slot.node.cores), memory_bytes=self._share(workers))
        return remote.options(**room).remote(task, workers.threads, str(Path.cwd()))

    def dismiss(self, hand: Any) -> None:
        """End a worker, whatever it is doing."""
        with contextlib.suppress(Exception):
            self._ray.kill(hand)

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
    memory_bytes: int
    """What Ray may give away there."""

    @classmethod
    def of(cls, node: dict[str, Any]) -> _Node:
        name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
        resources = node["Resources"]
        return cls(node["NodeID"], name, int(resources["CPU"]), int(resources.get("memory", 0)))


@dataclass(frozen=True, slots=True)
class _Slot:
    node: _Node
    number: int


@dataclass(slots=True)
class _Worker:
    """A worker in a slot."""

    slot: _Slot
    number: int
    actor: Any
    pid: int = 0
    held_bytes: int = 0


@dataclass(slots=True)
class _Running:
    """A unit in a slot."""

    hand: _Worker
    unit: int
    since: float = field(default_factory=time.monotonic)
    begun: bool = False


class _RayExecutor:
    """One stage on the cluster. Holds what is in flight, and a count for each unit in flight that lost a worker."""

    def __init__(self, pool: RayPool, workers: Workers) -> None:
        self._pool, self._wanted = pool, workers
        self._ray = pool._ray
        self._workers: dict[_Slot, int] = {}
        self._hands: dict[_Slot, _Worker] = {}
        self._running: dict[Any, _Running] = {}
        self._crashes: dict[int, int] = {}
        self._again: list[int] = []
        self._busy: dict[_Slot, float] = {}
        """Slot -> until when it is left alone."""
        self._looked = 0.0

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        import cloudpickle

        self._on_event = on_event
        options = {name: value for name, value in os.environ.items() if name.startswith("FSSPEC_")}
        stored = self._ray.put(cloudpickle.dumps((task, options)))
        ahead = iter(units)
        try:
            while self._hand_out(stored, ahead, assign) or self._running:
                self._hear()
                self._move_waiting()
        finally:
            for hand in self._hands.values():
                self._pool.dismiss(hand.actor)

    # ---- hand out ----

    def _hand_out(self, task: Any, units: Iterator[int], assign: Callable[[int], Any]) -> bool:
        """Fill the free slots; whether anything was started."""
        started = False
        for slot in self._free():
            unit = self._again.pop() if self._again else next(units, None)
            if unit is None:
                self._dismiss(slot)
                continue
            if slot not in self._hands:
                self._hands[slot] = _Worker(
                    slot, self._workers[slot], self._pool.start_worker(slot, self._wanted, task)
                )
            hand = self._hands[slot]
            told = {"num_returns": "streaming", "_generator_backpressure_num_objects": TOLD}
            self._running[hand.actor.work.options(**told).remote(assign(unit))] = _Running(hand, unit)
            started = True
        return started

    def _free(self) -> list[_Slot]:
        if time.monotonic() - self._looked > _NODE_SECONDS:
            self._look()
        taken = {one.hand.slot for one in self._running.values()}
        free = [slot for slot in self._workers if slot not in taken]
        idle = [slot for slot in free if self._busy.get(slot, 0.0) < time.monotonic()]
        # With nothing else, a busy node is better than none.
        return idle or ([] if self._running else free)

    def _look(self) -> None:
        """See which nodes there are now; wait a while when there are none."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (slots := self._pool.slots(self._wanted)):
            if time.monotonic() > deadline:
                raise ResourceError(
                    "No node of the Ray cluster is alive and large enough. Every finished unit is safe; run it again."
                )
            time.sleep(_WAIT_SECONDS)
        number = itertools.count(max(self._workers.values(), default=-1) + 1)
        known = self._workers
        self._workers = {slot: known[slot] if slot in known else next(number) for slot in slots}
        self._looked = time.monotonic()

    def _move_waiting(self) -> None:
        """Take units back that wait for a node which others have taken, when there is a free slot elsewhere."""
        late = time.monotonic() - _BUSY_SECONDS
        waiting = [(stream, one) for stream, one in self._running.items() if not one.begun and one.since < late]
        for (stream, one), _ in zip(waiting, self._free() if waiting else (), strict=False):
            del self._running[stream]
            self._dismiss(one.hand.slot)
            self._busy[one.hand.slot] = time.monotonic() + _BUSY_SECONDS
            self._again.append(one.unit)

    def _dismiss(self, slot: _Slot) -> None:
        """End the worker in a slot, if there is one: it holds nothing any more."""
        hand = self._hands.pop(slot, None)
        if hand is not None:
            self._pool.dismiss(hand.actor)
            if hand.pid:
                self._tell(hand, -1, MEMORY, 0)

    # ---- hear ----

    def _hear(self) -> None:
        """Wait for a word, then take one from everybody who has one."""
        streams = list(self._running)
        ready, _ = self._ray.wait(streams, num_returns=1, timeout=_WAIT_SECONDS, fetch_local=False)
        if ready and len(streams) > 1:
            ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
        for stream in ready:
            self._take(stream)

    def _take(self, stream: Any) -> None:
        """One word of a unit: what it reports, that it is done, or that it is lost."""
        running = self._running[stream]
        hand = running.hand
        try:
            hand.pid, kind, value = self._ray.get(next(stream))
        except StopIteration:
            del self._running[stream]
            self._crashes.pop(running.unit, None)
            self._tell(hand, running.unit, DONE)
            if self._must_go(hand):
                self._dismiss(hand.slot)
            return
        except self._ray.exceptions.RayError as error:
            del self._running[stream]
            self._dismiss(hand.slot)
            self._again_or_never(running, error)
            return
        if kind == ERROR:
            raise value
        running.begun = True
        if kind == MEMORY:
            hand.held_bytes = value
        self._tell(hand, running.unit, kind, value)

    def _must_go(self, hand: _Worker) -> bool:
        """Whether a worker has to give all its memory back after its unit."""
        most = self._wanted.worker_bytes
        return self._wanted.apart or (most is not None and hand.held_bytes > most)

    def _tell(self, hand: _Worker, unit: int, kind: str, value: Any = None) -> None:
        self._on_event(Event(hand.number, hand.pid, unit, kind, value, host=hand.slot.node.name))

    def _again_or_never(self, running: _Running, error: Exception) -> None:
        """A worker or its node died: the unit goes to another slot, unless it has killed too many."""
        self._looked = 0.0
        unit, cause = running.unit, f"on {running.hand.slot.node.name} died ({type(error).__name__})"
        self._crashes[unit] = self._crashes.get(unit, 0) + 1
        if self._crashes[unit] > RETRIES:
            raise WorkerError(
                f"Unit {unit} lost its worker {self._crashes[unit]} times; the last one {cause}.\n"
                "Every finished unit is safe. Run the same command again; if it was memory, with fewer ",
                Setting("workers"),
                ".",
            )
        self._tell(running.hand, unit, CRASH, cause)
        self._again.append(unit)


def _on(node: _Node, *, cores: float = 0, memory_bytes: int = 0) -> dict[str, Any]:
    """Options of what runs on a node and nowhere else."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node.id, soft=False)
    memory = {"memory": memory_bytes} if memory_bytes else {}
    return {"num_cpus": cores, "scheduling_strategy": there, **memory}


def _complaint(name: str, folder: Path, found: tuple[bool, bool, str]) -> str | None:
    """What stands against a node that a look at it found."""
    import milldam

    sees, writes, version = found
    if version != milldam.__version__:
        return (
            f"The node {name} has milldam {version}, this machine {milldam.__version__}: the results could differ.\n"
            "Install the same version on every node."
        )
    if sees and writes:
        return None
    what = "can't write to" if sees else "does not see"
    return (
        f"The node {name} {what} {folder}.\nOn a Ray cluster the output must be on a file system that all "
        "nodes share, under the same path."
    )


def _knock(address: str | None) -> None:
    """Raise OSError when nobody listens there: Ray itself takes minutes to give up."""
    host, _, port = (address or "").rpartition(":")
    if host and "/" not in host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_SECONDS).close()


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
