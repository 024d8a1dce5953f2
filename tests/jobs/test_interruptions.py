"""Interrupted, killed alone, out of disk: what a run says and leaves, and that the same command completes it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.kit.jobs import (
    MILLDAM,
    TOKENIZER,
    invoke,
    leftovers,
    recorded,
    run_milldam,
    small_disk,
    started,
    store_bytes,
    wait_until,
    write_corpus,
)

import milldam
from milldam.stores.verify import verify

# Options that let a job run in this process, whose memory holds what the tests before have loaded.
HERE = ("--memory", "4GB", "--workers", 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A job that takes some seconds, and what comes out of it undisturbed."""

    input: Path
    options: tuple[object, ...]
    reference: Path

    def command(self, out: Path) -> list[object]:
        return ["tokenize", self.input, "-o", out, *self.options]

    def assert_finished(self, out: Path) -> None:
        """The store is whole, equals the undisturbed one byte for byte, and nothing else is left."""
        assert list(store_bytes(out)) == list(store_bytes(self.reference))
        assert store_bytes(out) == store_bytes(self.reference)
        assert leftovers(out) == []
        assert list(verify(out)) == []


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A file that is cut into some twenty units, for two workers."""
    folder = tmp_path_factory.mktemp("plain")
    # The slow encoder leaves time to be killed in.
    options = ("--tokenizer", TOKENIZER, "--encoder", "huggingface", "--workers", 2, "--memory", "1GB")
    path = write_corpus(folder / "corpus.jsonl", 2_000_000, broken_every=200).path
    job = Job(path, (*options, "--shard-size", "100KB"), folder / "reference")
    # In this process: the bytes do not depend on the workers.
    milldam.tokenize(path, job.reference, tokenizer=TOKENIZER, encoder="huggingface", shard_size="100KB", workers=1)
    assert len(milldam.open(job.reference).manifest.shards) >= 15
    assert "rejects" in milldam.open(job.reference).audit
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_says_how_to_go_on(plain: Job, number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM end with 130, say that finished work is safe, and give the command that resumes."""
    out = tmp_path / "a folder"
    with started(*plain.command(out)) as process:
        assert wait_until(lambda: recorded(out) >= 1, process)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr
    assert "Interrupted. Everything finished is safe." in stderr
    assert stderr.rstrip().splitlines()[-1].startswith("  milldam tokenize ")
    assert still_running(process.pid) == []
    assert not (out / "milldam.json").exists()
    # The command as it was printed, in a shell: the quoting must be right.
    again = stderr.rstrip().splitlines()[-1].strip().replace("milldam", MILLDAM, 1)
    done = subprocess.run(again, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    plain.assert_finished(out)


def still_running(group: int) -> list[int]:
    """Processes of a group that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and _group_of(process.pid) == group:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


@pytest.mark.slow
def test_ctrl_c_for_the_whole_group_is_one_message(plain: Job, tmp_path: Path) -> None:
    """A terminal sends SIGINT to workers too: they leave the talking to the parent."""
    out = tmp_path / "s"
    with started(*plain.command(out)) as process:
        assert wait_until(lambda: recorded(out) >= 1, process)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.count("Interrupted") == 1 and "Traceback" not in stderr


@pytest.mark.slow
def test_a_worker_killed_alone_costs_nothing(plain: Job, tmp_path: Path) -> None:
    """When the system kills one worker, its unit is done again, a warning says so, and the bytes are the same."""
    out = tmp_path / "s"
    with started(*plain.command(out)) as process:
        assert wait_until(lambda: recorded(out) >= 1, process)
        (server,) = psutil.Process(process.pid).children()
        workers = server.children()
        assert len(workers) == 2
        # In the middle of a unit, with a shard and perhaps rejects begun.
        assert wait_until(lambda: any(f".{workers[0].pid}." in name for name in leftovers(out)), process)
        workers[0].kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "was killed (signal 9)" in stderr and "tried once more" in stderr
    plain.assert_finished(out)


@pytest.mark.slow
def test_workers_die_with_their_parent(plain: Job, tmp_path: Path) -> None:
    """When the parent alone is killed no worker stays, and the folder can be used at once."""
    out = tmp_path / "s"
    with started(*plain.command(out)) as process:
        assert wait_until(lambda: recorded(out) >= 1, process)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) == 3
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert alive == []
    run_milldam(*plain.command(out))
    plain.assert_finished(out)


@pytest.mark.slow
def test_a_run_that_is_process_1_has_its_workers(plain: Job, tmp_path: Path) -> None:
    """As in a container: a worker whose parent has the id 1 is no orphan."""
    alone = ["unshare", "--fork", "--pid", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("a process of the id 1 needs root")
    out = tmp_path / "s"
    command = [*alone, MILLDAM, *(str(one) for one in plain.command(out))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "= 2 workers x" in done.stderr
    plain.assert_finished(out)


def fill(disk: Path) -> Path:
    """Take all the space that is left, as somebody else's file does."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    return ballast


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_more_room_lets_it_go_on(plain: Job, tmp_path: Path) -> None:
    """A disk that fills up is exit code 4 with what to do; with more room the same command ends with the same bytes."""
    disk = tmp_path / "disk"
    with small_disk(disk, "16m"):
        with started(*plain.command(disk / "s")) as process:
            assert wait_until(lambda: recorded(disk / "s") >= 1, process)
            ballast = fill(disk)
            _, stderr = process.communicate(timeout=60)
        assert process.returncode == 4, stderr
        assert_full(stderr)
        assert_full(run_milldam(*plain.command(disk / "s"), code=4).stderr)
        assert recorded(disk / "s") >= 1
        assert "ended before it was done" in run_milldam("status", disk / "s").stdout
        ballast.unlink()
        run_milldam(*plain.command(disk / "s"))
        plain.assert_finished(disk / "s")


def assert_full(stderr: str) -> None:
    assert "The disk is full" in stderr and "run the same command again" in stderr
    assert "Traceback" not in stderr and "bug in milldam" not in stderr


@pytest.mark.parametrize("room", [True, False])
def test_a_disk_that_is_full_from_the_start(plain: Job, tmp_path: Path, room: bool) -> None:
    """Where there is no room even for the plan, or for nothing at all, the message is that the disk is full."""
    disk = tmp_path / "disk"
    with small_disk(disk, "4k"):
        if not room:
            fill(disk)
        full = invoke(*plain.command(disk / "s"), *HERE)
        assert full.exit_code == 4 and "The disk is full" in full.stderr and "Traceback" not in full.stderr


def test_a_job_that_the_disk_can_not_hold_is_refused_before_it_begins(plain: Job, tmp_path: Path) -> None:
    """What is needed and what is free are said at once, not after hours; nothing is left behind."""
    disk = tmp_path / "disk"
    with small_disk(disk, "200k"):
        done = invoke(*plain.command(disk / "s"), *HERE)
        refused = done.stderr
        assert done.exit_code == 4
        assert re.search(
            rf"Not enough disk for {disk / 's'}: typical text of this size takes about .* MB .*, .* [KM]B are free\.",
            refused,
        )
        assert "Traceback" not in refused and len(refused.splitlines()) == 2
        assert list(disk.iterdir()) == []
