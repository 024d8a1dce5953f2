"""The server that forks workers: what it loads is loaded once, where it may not fork each worker loads for itself, and
a server that is killed costs nothing but time."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import threading
from pathlib import Path

import psutil
import pytest
from tests.kit.jobs import wait_until
from tests.kit.worker_tasks import DiesLoading, KillsServer, Started
from tests.run.test_executors import run, values, workers_left

from milldam.errors import WorkerError
from milldam.memory import inherit, process_tree, shared_bytes, usage
from milldam.run.fork import ForkedWorkers
from milldam.run.monitor import Monitor
from milldam.run.tasks import CRASH, DONE, Event

linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are forked on Linux only")


@linux
@pytest.mark.parametrize("leaves", ["", "ended thread"])
def test_a_task_is_started_once_for_all_workers(tmp_path: Path, leaves: str) -> None:
    """Workers are forked from the process that has started the task."""
    told = values(run(ForkedWorkers(3), Started(tmp_path, leaves), 9))
    assert len(list(tmp_path.iterdir())) == 1
    assert len(told) == 9 and len({one["worker"] for one in told}) > 1
    assert all(one["started"] == one["parent"] != one["worker"] for one in told)


@linux
@pytest.mark.parametrize("leaves", ["thread", "file"])
def test_what_can_not_be_forked_is_started_by_each_worker(
    tmp_path: Path, leaves: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where loading leaves a thread or an open file, workers share nothing, and do the same."""
    with caplog.at_level("INFO"):
        told = values(run(ForkedWorkers(3), Started(tmp_path, leaves), 9))
    assert len(told) == 9
    assert all(one["started"] == one["worker"] for one in told)
    assert ("runs 2 threads" if leaves == "thread" else f"has left {tmp_path}/open open") in caplog.text
    assert workers_left() == []


@linux
def test_fewer_workers_may_load_for_themselves(tmp_path: Path) -> None:
    """What is held once by forked workers is held by each of the others: as many as the budget holds."""
    told = values(run(ForkedWorkers(3, alone=2), Started(tmp_path, "thread"), 9))
    assert len(told) == 9 and len({one["worker"] for one in told}) <= 2
    assert len(list(tmp_path.iterdir())) <= 3  # the server, and two workers


@linux
def test_what_is_expected_is_imported_before_the_task_comes(tmp_path: Path) -> None:
    """The server that was started early takes the task; a module that can't be imported is no matter yet."""
    executor = ForkedWorkers(2)
    executor.expect(["tests.kit.worker_tasks", "no_such_module"])
    (server,) = executor.pids
    told = values(run(executor, Started(tmp_path), 4, keep=True))
    assert len(told) == 4 and {one["parent"] for one in told} == {server}
    executor.close()
    assert workers_left() == []


@linux
def test_what_is_expected_in_vain_ends(tmp_path: Path) -> None:
    """A server that gets no task goes with the executor, whatever it is importing."""
    executor = ForkedWorkers(2)
    executor.expect(["numpy", "pyarrow"])
    executor.close()
    assert executor.pids == [] and workers_left() == []


@linux
def test_a_killed_server_is_replaced_and_its_units_are_done(tmp_path: Path) -> None:
    """Its workers end with it, what they worked on is told as lost, and counts against no unit."""
    events = run(ForkedWorkers(2), KillsServer(tmp_path, 3, 1), 8)
    assert sorted(values(events)) == list(range(8))
    lost = [event for event in events if event.kind == CRASH]
    assert 3 in {event.unit for event in lost}
    assert all("ended with the process that started it" in event.value for event in lost)
    assert workers_left() == []


@linux
def test_a_server_that_is_killed_again_and_again_ends_the_run(tmp_path: Path) -> None:
    """Two servers in a row without a finished unit are enough."""
    with pytest.raises(WorkerError, match="no unit was finished between them") as caught:
        run(ForkedWorkers(1), KillsServer(tmp_path, 0, 99), 3)
    assert "The process that starts the workers was killed (signal 9)" in str(caught.value)
    assert workers_left() == []


@linux
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "signal 9"), (signal.SIGSEGV, "signal 11")])
def test_loading_that_ends_its_process_ends_the_run(number: int, cause: str) -> None:
    """A task that can't be loaded is tried twice, and the cause is told."""
    with pytest.raises(WorkerError, match=cause):
        run(ForkedWorkers(2), DiesLoading(number), 3)
    assert workers_left() == []


@linux
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_of_server_and_workers_lose_nothing(seed: int, tmp_path: Path) -> None:
    """Whoever is killed, every unit is done once in the end, and no process stays."""
    rng, done = random.Random(seed), threading.Event()
    finished: list[int] = []

    def kill_some() -> None:
        for _ in range(3):
            # Far enough apart that no unit loses two workers.
            before = len(finished)
            wait_until(lambda before=before: len(finished) > before + 7 or done.is_set())  # type: ignore[misc]
            processes = workers_left()
            if processes and not done.is_set():
                rng.choice(processes).kill()

    def on_event(event: Event) -> None:
        if event.kind == DONE:
            finished.append(event.unit)

    killer = threading.Thread(target=kill_some)
    killer.start()
    try:
        with contextlib.closing(ForkedWorkers(3)) as executor:
            executor.run(Started(tmp_path), range(40), lambda unit: unit, on_event)
    finally:
        done.set()
        killer.join()
    assert sorted(finished) == list(range(40))
    assert workers_left() == []


@linux
def test_workers_of_a_killed_server_do_not_stay(tmp_path: Path) -> None:
    """They are killed with it, even when nobody is there to start others."""
    pids: list[int] = []

    def stop(event: Event) -> None:
        server = psutil.Process(event.pid).parent()
        assert server is not None
        workers = server.children()
        pids.extend(worker.pid for worker in workers)
        server.kill()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), contextlib.closing(ForkedWorkers(3)) as executor:
        executor.run(Started(tmp_path), range(9), lambda unit: unit, stop)
    assert len(pids) == 3


@linux
def test_what_forked_workers_share_counts_once(tmp_path: Path) -> None:
    """A tree of processes that share 60 MB holds them once."""
    block = bytearray(60 * 10**6)
    block[::4096] = b"x" * len(block[::4096])
    ours, theirs = os.pipe()
    server = os.fork()
    if server == 0:
        for _ in range(3):
            if os.fork() == 0:
                inherit(usage().anonymous, 3)
                os.read(ours, 1)
                os._exit(0)
        for _ in range(3):
            os.wait()
        os._exit(0)
    wait_until(lambda: len(process_tree(server)) == 4)
    workers = [psutil.Process(pid) for pid in process_tree(server)[1:]]
    wait_until(lambda: [one.name() for one in workers].count("milldam-worker") == 3)
    monitor = Monitor(tmp_path / "memory.csv")
    held, once = monitor.sample().anonymous - usage().anonymous, usage(server).anonymous
    assert shared_bytes(workers[0].pid) > 50 * 10**6
    os.write(theirs, b"abc")
    os.waitpid(server, 0)
    assert once > len(block) and held < once + 3 * 20 * 10**6


@linux
def test_a_file_just_written_and_mapped_does_not_hide_what_is_shared(tmp_path: Path) -> None:
    """Its pages are dirty and private, as copies of shared ones are."""
    if b"Pss_Dirty" not in Path("/proc/self/smaps_rollup").read_bytes():
        pytest.skip("this kernel does not tell dirty pages of files from others")
    block = bytearray(b"x") * (60 * 10**6)
    child = os.fork()
    if child == 0:
        path = tmp_path / "written"
        path.write_bytes(block)
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for at in range(0, len(mapped), mmap.PAGESIZE):
                mapped[at]
            os._exit(0 if shared_bytes() > 50 * 10**6 else 1)
    assert os.waitpid(child, 0)[1] == 0


@linux
def test_a_server_that_is_just_starting_does_not_hear_ctrl_c(tmp_path: Path) -> None:
    """Which reaches the whole group: what it means is decided elsewhere, and no traceback is printed."""
    executor = ForkedWorkers(2)
    executor.expect(["json"])
    (server,) = executor.pids
    os.kill(server, signal.SIGINT)
    told = values(run(executor, Started(tmp_path, ""), 4))
    assert {one["parent"] for one in told} == {server}
    assert workers_left() == []
