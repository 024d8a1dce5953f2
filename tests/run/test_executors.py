"""Workers: every unit is made once, whoever is killed; errors come back as they are; what is loaded is loaded once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.kit.jobs import wait_until
from tests.kit.worker_loads import (
    FailsLoading,
    Loaded,
    Work,
    assigned,
    deadly,
    failing,
    hoard,
    square,
    values,
)

from milldam.errors import InputError, WorkerError
from milldam.run.fork import ForkServer
from milldam.run.pools import Pool
from milldam.run.tasks import CRASH, DONE, PART, PROGRESS, Assigned, Event, Load, Todo, Workers

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are forked on Linux only")
MB = 10**6


def workers_left() -> list[psutil.Process]:
    """Processes of executors that are still there; another test may have left others."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "milldam.run" in " ".join(child.cmdline()):
                found.append(child)
    return found


def run(
    workers: Workers,
    load: Load,
    units: int | Iterable[int | None],
    assign: Callable[[int], Assigned] = assigned,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    pool: Pool | None = None,
) -> list[Event]:
    """All events of some units. `pool`: is used again; else none of its processes stays."""
    events: list[Event] = []

    def hear(event: Event) -> None:
        events.append(event)
        on_event(event)

    used = pool or Pool(10**12)
    try:
        used.run(workers, Todo(load, iter(range(units) if isinstance(units, int) else units), assign, hear))
    finally:
        if pool is None:
            used.close()
            assert workers_left() == []
    return events


# ---- units ----


@pytest.mark.parametrize("workers", [Workers(1, 1, here=True), Workers(1, 1, apart=True), Workers(2, 1)])
def test_every_unit_is_made_once(workers: Workers) -> None:
    """Each unit gives its record and its counts, then is done; local workers are processes of their own."""
    events = run(workers, Work(square), 7)
    assert sorted(values(events)) == [unit**2 for unit in range(7)]
    for unit in range(7):
        assert [event.kind for event in events if event.unit == unit] == [PART, PROGRESS, DONE]
    assert (os.getpid() in {event.pid for event in events}) == workers.here
    assert run(workers, Work(square), 0) == []


@pytest.mark.parametrize("workers", [Workers(1, 1, here=True), Workers(2, 1)])
def test_units_may_come_later(workers: Workers) -> None:
    """While there is none to hand out, workers wait; who dies meanwhile is replaced."""
    heard: list[Event] = []

    def trickle() -> Iterator[int | None]:
        for given in range(5):
            while len(values(heard)) < given:
                yield None
            yield from (None, None)
            if given == 2 and not workers.here:
                for pid in {event.pid for event in heard}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            yield given

    assert sorted(values(run(workers, Work(square), trickle(), on_event=heard.append))) == [0, 1, 4, 9, 16]


# ---- kills ----


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "was killed (signal 9)"), (signal.SIGSEGV, "was ended by signal 11")]
)
def test_a_worker_that_dies_once_is_replaced(tmp_path: Path, number: int, cause: str) -> None:
    """The unit is given to a fresh worker, the crash is reported with its cause, and nothing is lost."""
    events = run(Workers(2, 1), Work(deadly, tmp_path, 2, 1, number, False), 5)
    assert sorted(values(events)) == [0, 1, 2, 3, 4]
    (crash,) = [event for event in events if event.kind == CRASH]
    assert crash.unit == 2 and cause in crash.value


def test_a_unit_that_always_kills_its_worker_ends_the_run(tmp_path: Path) -> None:
    """After the second death on the same unit the run ends, naming it, and leaves no process."""
    with pytest.raises(WorkerError, match="Unit 2 ended its worker process 2 times") as caught:
        run(Workers(2, 1), Work(deadly, tmp_path, 2, 99, signal.SIGKILL, False), 5)
    assert caught.value.exit_code == 4
    assert "was killed (signal 9)" in str(caught.value) and "Every finished unit is safe" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2


@linux
def test_a_killed_server_ends_the_run(tmp_path: Path) -> None:
    """Its workers end with it; the message says what is safe. So is one that dies while it loads."""
    with pytest.raises(WorkerError, match="Every finished unit is safe") as caught:
        run(Workers(2, 1), Work(deadly, tmp_path, 3, 1, signal.SIGKILL, True), 8)
    assert "The process that starts the workers was killed (signal 9)" in str(caught.value)
    with pytest.raises(WorkerError, match="signal 11"):
        run(Workers(2, 1), FailsLoading("killed"), 3)


@linux
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_of_workers_lose_nothing(seed: int, tmp_path: Path) -> None:
    """Whoever is killed, every unit is made once in the end, and no process stays."""
    rng, done, finished = random.Random(seed), threading.Event(), list[int]()

    def kill_some() -> None:
        for _ in range(3):
            # Far enough apart that no unit loses two workers.
            before = len(finished)
            wait_until(lambda before=before: len(finished) > before + 7 or done.is_set())  # type: ignore[misc]
            processes = [one for one in workers_left() if one.ppid() != os.getpid()]
            if processes and not done.is_set():
                rng.choice(processes).kill()

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        hear = lambda event: finished.append(event.unit) if event.kind == DONE else None  # noqa: E731
        run(Workers(3, 1), Loaded(tmp_path), 40, on_event=hear)
    finally:
        done.set()
        killer.join()
    assert sorted(finished) == list(range(40))


# ---- errors ----


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("workers", [Workers(1, 1, here=True), Workers(3, 1)])
def test_our_errors_come_back_as_they_are(workers: Workers, at_start: bool) -> None:
    """An error of ours in a worker is that error here, with its message and exit code; no worker goes on."""
    with pytest.raises(InputError, match=r"corpus\.jsonl:7: not readable"):
        run(workers, FailsLoading("ours") if at_start else Work(failing, "ours"), 10)


@pytest.mark.parametrize("kind", ["other", "unpicklable"])
def test_other_exceptions_come_back_with_their_traceback(kind: str) -> None:
    """A bug in a worker can be found: its type, message and place are in what is raised here."""
    with pytest.raises(RuntimeError) as caught:
        run(Workers(1, 1, apart=True), Work(failing, kind), 3)
    shown = str(caught.value)
    assert "worker_loads.py" in shown and "in failing" in shown
    assert ("ZeroDivisionError" if kind == "other" else "Unpicklable") in shown


# ---- what is loaded ----


@linux
@pytest.mark.parametrize("leaves", ["", "ended thread"])
def test_what_workers_need_is_loaded_once(
    tmp_path: Path, leaves: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Workers are forked from the process that loaded it, know their threads, and are where the command is."""
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    told = values(run(Workers(3, 2), Loaded(tmp_path, leaves), 9))
    assert len(list(tmp_path.iterdir())) == 1
    assert len(told) == 9 and len({one["worker"] for one in told}) > 1
    assert all(one["loaded"] == one["parent"] != one["worker"] for one in told)
    assert {(one["threads"], one["cwd"]) for one in told} == {("2", str(elsewhere))}


@linux
def test_a_server_is_kept_for_the_next_stage_and_replaced_when_it_died(tmp_path: Path) -> None:
    """Begun early it imports what is expected, does not hear Ctrl-C, and takes stage after stage."""
    pool = Pool(10**12, ForkServer())
    pool.expect(["tests.kit.worker_loads", "no_such_module"])
    (server,) = {process.pid for process in workers_left()}
    os.kill(server, signal.SIGINT)
    told = values(run(Workers(2, 1), Loaded(tmp_path), 4, pool=pool))
    assert {one["parent"] for one in told} == {server}
    assert psutil.Process(server).children() == []
    assert sorted(values(run(Workers(2, 1), Work(square), 6, pool=pool))) == [unit**2 for unit in range(6)]
    assert {process.pid for process in workers_left()} == {server}
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: psutil.Process(server).status() == psutil.STATUS_ZOMBIE)
    assert sorted(values(run(Workers(2, 1), Work(square), 6, pool=pool))) == [unit**2 for unit in range(6)]
    pool.close()


# ---- memory ----


def test_a_worker_over_its_share_of_memory_makes_room_for_a_fresh_one() -> None:
    """What a function keeps does not add up: over the limit, the next unit is for another process."""
    for share, processes in ((70 * MB, 3), (1000 * MB, 1)):
        pids = values(run(Workers(1, 1, apart=True, worker_bytes=share), Work(hoard, 60 * MB), 3))
        assert len(set(pids)) == processes
