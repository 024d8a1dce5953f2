"""Workers: every unit is done once, a worker that dies is replaced once, and errors come back as what they are."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.kit.jobs import wait_until
from tests.kit.worker_tasks import Deadly, DiesAfterwards, Environment, Failing, Hoarder, Square

from milldam.errors import InputError, WorkerError
from milldam.run.fork import ForkedWorkers
from milldam.run.pools import LocalPool, SerialExecutor, Workers
from milldam.run.tasks import CRASH, DONE, PART, PROGRESS, Event, Executor, NothingYetError, Task


def workers_left() -> list[psutil.Process]:
    """Processes of executors that are still there; another test may have left others."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "milldam.run" in " ".join(child.cmdline()):
                found.append(child)
    return found


def run(
    executor: Executor, task: Task, units: int, assign: Any = lambda unit: unit, *, keep: bool = False
) -> list[Event]:
    """All events of a job over some units. `keep`: the executor is used again."""
    events: list[Event] = []
    try:
        executor.run(task, range(units), assign, events.append)
    finally:
        if isinstance(executor, ForkedWorkers) and not keep:
            executor.close()
    return events


def values(events: list[Event], kind: str = PART) -> list[Any]:
    return [event.value for event in events if event.kind == kind]


@pytest.mark.parametrize("executor", [SerialExecutor(), ForkedWorkers(1), ForkedWorkers(2)])
def test_every_unit_is_done_once(executor: Executor) -> None:
    """Each unit's assignment gives its parts, then is done."""
    events = run(executor, Square(), 7, lambda unit: unit + 10)
    assert sorted(values(events)) == [(unit + 10) ** 2 for unit in range(7)]
    assert sorted(event.unit for event in events if event.kind == DONE) == list(range(7))
    for unit in range(7):
        assert [event.kind for event in events if event.unit == unit] == [PROGRESS, PART, DONE]
        assert {event.value for event in events if event.unit == unit and event.kind == PART} == {(unit + 10) ** 2}


def test_no_units_no_work() -> None:
    """A job without units ends at once."""
    assert run(ForkedWorkers(2), Square(), 0) == []


def test_work_is_in_other_processes_that_are_gone_afterwards() -> None:
    """Local workers are processes of their own, known by their ids, and none stays."""
    events = run(ForkedWorkers(2), Square(), 8)
    pids = set(values(events, PROGRESS))
    assert os.getpid() not in pids and pids == {event.pid for event in events}
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_assignments_are_made_when_they_are_handed_out() -> None:
    """Units are taken one at a time, so what is assigned can depend on what is done."""
    done: list[int] = []
    seen: list[int] = []

    def assign(unit: int) -> int:
        seen.append(len(done))
        return unit

    with contextlib.closing(ForkedWorkers(1)) as executor:
        executor.run(Square(), range(4), assign, lambda event: done.append(1) if event.kind == DONE else None)
    assert seen == [0, 1, 2, 3]


def test_workers_know_how_many_threads_they_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's encoder is told its share of the cores; the folder is that of the command."""
    monkeypatch.chdir(tmp_path)
    (seen,) = values(run(ForkedWorkers(1, threads=3), Environment(), 1))
    assert seen == {"threads": "3", "cwd": str(tmp_path)}


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGKILL, "was killed (signal 9)"), (signal.SIGSEGV, "was ended by signal 11")]
)
def test_a_worker_that_dies_once_is_replaced(tmp_path: Path, number: int, cause: str) -> None:
    """The unit is given to a fresh worker, the crash is reported with its cause, and nothing is lost."""
    events = run(ForkedWorkers(2), Deadly(tmp_path, 2, 1, number), 5)
    assert sorted(values(events)) == [0, 1, 2, 3, 4]
    (crash,) = [event for event in events if event.kind == CRASH]
    assert crash.unit == 2 and cause in crash.value


def test_a_unit_that_always_kills_its_worker_ends_the_run(tmp_path: Path) -> None:
    """After the second death on the same unit the run ends, naming it, and leaves no process."""
    with pytest.raises(WorkerError, match="Unit 2 ended its worker process 2 times") as caught:
        run(ForkedWorkers(2), Deadly(tmp_path, 2, 99), 5)
    assert caught.value.exit_code == 4
    assert "was killed (signal 9)" in str(caught.value) and "Every finished unit is safe" in str(caught.value)
    assert len(list(tmp_path.iterdir())) == 2
    assert workers_left() == []


def test_two_units_may_each_lose_a_worker(tmp_path: Path) -> None:
    """The count is per unit: a bad day is not a bad unit."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = run(ForkedWorkers(2), Deadly(tmp_path / "a", 1, 1), 4)
    second = run(ForkedWorkers(1), Deadly(tmp_path / "b", 3, 1), 4)
    assert sorted(values(first)) == sorted(values(second)) == [0, 1, 2, 3]


def test_a_worker_killed_between_two_units_is_replaced(tmp_path: Path) -> None:
    """A worker that dies while it is given its next unit is replaced like any other."""

    def assign(unit: int) -> int:
        if unit == 1:
            time.sleep(0.8)
        return unit

    events = run(ForkedWorkers(1), DiesAfterwards(tmp_path), 3, assign)
    assert sorted(values(events)) == [0, 1, 2]


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("executor", [SerialExecutor(), ForkedWorkers(2)])
def test_our_errors_come_back_as_they_are(executor: Executor, at_start: bool) -> None:
    """An error of ours in a worker is that error here, with its message and exit code."""
    with pytest.raises(InputError, match=r"corpus\.jsonl:7: not readable"):
        run(executor, Failing("ours", at_start), 3)


@pytest.mark.parametrize("kind", ["other", "unpicklable"])
def test_other_exceptions_come_back_with_their_traceback(kind: str) -> None:
    """A bug in a worker can be found: its type, message and place are in what is raised here."""
    with pytest.raises(RuntimeError) as caught:
        run(ForkedWorkers(1), Failing(kind), 3)
    shown = str(caught.value)
    assert "worker_tasks.py" in shown and "in _fail" in shown
    assert ("ZeroDivisionError" if kind == "other" else "Unpicklable") in shown


def test_an_error_ends_all_workers(tmp_path: Path) -> None:
    """No worker goes on after the run has failed."""
    with pytest.raises(InputError):
        run(ForkedWorkers(3), Failing("ours"), 10)
    assert workers_left() == []


def test_an_interrupt_ends_all_workers() -> None:
    """Ctrl-C in this process leaves no worker behind."""

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), contextlib.closing(ForkedWorkers(2)) as executor:
        executor.run(Square(), range(10), lambda unit: unit, stop)
    assert workers_left() == []


def test_a_kept_server_takes_another_task() -> None:
    """The same server forks the workers of the next task, as many as ever; closed, it is gone."""
    executor = ForkedWorkers(2)
    run(executor, Square(), 6, keep=True)
    (server,) = executor.pids
    assert psutil.Process(server).children() == []
    assert sorted(values(run(executor, Square(), 6, keep=True))) == [unit**2 for unit in range(6)]
    assert executor.pids == [server]
    executor.close()
    assert not psutil.pid_exists(server) and workers_left() == []


def test_a_kept_server_that_died_is_replaced() -> None:
    """Killed while it had nothing to do, it costs the next task nothing."""
    executor = ForkedWorkers(2)
    run(executor, Square(), 6, keep=True)
    (server,) = executor.pids
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: psutil.Process(server).status() == psutil.STATUS_ZOMBIE)
    assert sorted(values(run(executor, Square(), 6, keep=True))) == [unit**2 for unit in range(6)]
    executor.close()
    assert workers_left() == []


def test_a_worker_over_its_share_of_memory_makes_room_for_a_fresh_one() -> None:
    """What a function keeps does not add up: over the limit, the next unit is for another process."""
    hoarding = Hoarder(60 * 10**6)
    pids = values(run(ForkedWorkers(1, worker_bytes=70 * 10**6), hoarding, 3))
    assert len(set(pids)) == 3
    pids = values(run(ForkedWorkers(1, worker_bytes=10**9), hoarding, 3))
    assert len(set(pids)) == 1


class Trickle:
    """Units that come one by one, each only after the one before is done and was asked for some times in vain."""

    def __init__(self, units: int, done: list[Event]) -> None:
        self._units, self._done = iter(range(units)), done
        self._given = self._asked = 0

    def __iter__(self) -> Trickle:
        return self

    def __next__(self) -> int:
        self._asked += 1
        if self._asked % 3 or len(values(self._done, DONE)) < self._given:
            raise NothingYetError
        unit = next(self._units)
        self._given += 1
        return unit


@pytest.mark.parametrize("executor", [SerialExecutor(), ForkedWorkers(2)])
def test_units_may_come_later(executor: Executor) -> None:
    """While there is none to hand out, workers wait and are asked to do what comes."""
    events: list[Event] = []
    executor.run(Square(), Trickle(4, events), lambda unit: unit, events.append)
    if isinstance(executor, ForkedWorkers):
        executor.close()
    assert values(events) == [0, 1, 4, 9]


def test_an_idle_worker_that_dies_is_replaced_where_units_may_come(tmp_path: Path) -> None:
    """None is left to wait for units with nobody to do them."""
    events: list[Event] = []

    class AfterKills(Trickle):
        def __next__(self) -> int:
            unit = super().__next__()
            if unit == 2:
                for pid in {event.pid for event in events}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.1)
            return unit

    with contextlib.closing(ForkedWorkers(2)) as executor:
        executor.run(Square(), AfterKills(5, events), lambda unit: unit, events.append)
    assert sorted(values(events)) == [0, 1, 4, 9, 16]


def test_a_worker_in_this_process_has_the_budget_for_itself() -> None:
    """The process that would have started others ends (35 MB); between stages with workers it stays."""
    pool = LocalPool(4 * 10**9)
    pool.expect(["json"])
    before = set(psutil.Process().children())
    assert before
    pool.executor("group", Workers(1, 1, here=True))
    assert set(psutil.Process().children()) == before
    pool.executor("tokenize", Workers(1, 1))
    assert not before & set(psutil.Process().children())
