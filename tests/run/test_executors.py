"""Workers: every unit is made once, whoever is killed; errors come back as they are; what is loaded is loaded once."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest
from tests.kit.worker_loads import (
    FailsLoading,
    Loaded,
    Work,
    assigned,
    deadly,
    failing,
    hoard,
    values,
)

from milldam.errors import InputError, WorkerError
from milldam.run.pools import Pool
from milldam.run.tasks import CRASH, Event, Load, Todo, Workers

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


def run(workers: Workers, load: Load, units: int) -> list[Event]:
    """All events of some units; no process stays."""
    events: list[Event] = []
    pool = Pool(10**12)
    try:
        pool.run(workers, Todo(load, iter(range(units)), assigned, events.append))
    finally:
        pool.close()
        assert workers_left() == []
    return events


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
def test_what_workers_need_is_loaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Workers are forked from the process that loaded it, know their threads, and are where the command is."""
    monkeypatch.chdir(elsewhere := tmp_path_factory.mktemp("elsewhere"))
    told = values(run(Workers(3, 2), Loaded(tmp_path), 9))
    assert len(list(tmp_path.iterdir())) == 1
    assert len(told) == 9 and len({one["worker"] for one in told}) > 1
    assert all(one["loaded"] == one["parent"] != one["worker"] for one in told)
    assert {(one["threads"], one["cwd"]) for one in told} == {("2", str(elsewhere))}


# ---- memory ----


def test_a_worker_over_its_share_of_memory_makes_room_for_a_fresh_one() -> None:
    """What a function keeps does not add up: over the limit, the next unit is for another process."""
    for share, processes in ((70 * MB, 3), (1000 * MB, 1)):
        pids = values(run(Workers(1, 1, apart=True, worker_bytes=share), Work(hoard, 60 * MB), 3))
        assert len(set(pids)) == processes
