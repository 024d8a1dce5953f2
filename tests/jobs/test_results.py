"""What one job can, all can: workers, budgets, array tasks, Slurm, Ray, status; always the bytes of a local run."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.kit.every_job import ALL_JOBS, JOBS, Case
from tests.kit.faults import KILL, Fault, Faults, build_shim
from tests.kit.jobs import MILLDAM, invoke, run_milldam
from tests.kit.quick import first_quick
from tests.kit.slurm import queue


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder in which nothing can be written, not even by root; skips the test where that is not allowed."""
    mounted = [["mount", "--bind", folder, folder], ["mount", "-o", "remount,ro,bind", folder]]
    if os.geteuid() != 0 or any(subprocess.run(one, capture_output=True, check=False).returncode for one in mounted):
        pytest.skip("mounting a folder needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(params=first_quick(JOBS, 4))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Case]:
    """Each of the jobs, done once."""
    yield JOBS[request.param](tmp_path)


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from tests.kit.ray_clusters import two_nodes

    with two_nodes() as nodes:
        yield nodes


def done(*words: object) -> str:
    result = invoke(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def status(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done("status", path, "--json"))
    return found


def test_array_tasks_make_what_one_run_makes(job: Case) -> None:
    """Two tasks a stage, the second first; the script names the stages; finish tells what the job's command does."""
    told = json.loads(done(*job.to("local"), "--json"))
    named = done("slurm", "--nodes", 2, "-o", job.folder / "job.sh", *job.to("arrays"))
    assert f": {', '.join(('prepare', *job.stages, 'finish'))}; 2 machines" in named
    assert done(*job.task("arrays", "prepare")) == ""
    for stage in job.stages:
        for index in (1, 0):
            assert done(*job.task("arrays", stage, "--index", index, "--of", 2)) == ""
    finished = json.loads(done(*job.task("arrays", "finish"), "--json"))
    assert job.made("arrays") == job.made("local")
    assert (finished["job"], finished["counts"]) == (told["job"], told["counts"])
    assert told["units"] >= 3 or "npy" in job.words
    assert status(job.path("arrays"))["state"] == status(job.path("local"))["state"] == "finished"


def test_a_killed_array_task_goes_on_after_its_last_record(job: Case, shim: Path) -> None:
    """SIGKILL when its first file is whole; status shows it, and the same task does the rest."""
    done(*job.to("local"), "--quiet")
    done(*job.task("arrays", "prepare"))
    *before, last = job.stages
    for stage in before:
        done(*job.task("arrays", stage, "--index", 0, "--of", 1))
    task = job.task("arrays", last, "--index", 0, "--of", 1)
    killed = Faults(job.folder, shim).run(Fault("rename", KILL, 4), task)
    assert killed.returncode == -9, killed.stderr
    shown = status(job.path("arrays"))
    assert shown["state"] == "ended" and shown["array_tasks"][f"{last}-0-of-1"]["state"] == "ended"
    done(*task)
    done(*job.task("arrays", "finish"))
    assert job.made("arrays") == job.made("local")


def test_the_tasks_of_a_finished_job_do_nothing(job: Case) -> None:
    """Every task of the script again: exit code 0, the same files."""
    done(*job.to("out"), "--quiet")
    before = {path: path.stat().st_mtime_ns for path in job.folder.glob("out*")}
    for stage in ("prepare", *job.stages, "finish"):
        which = () if stage in ("prepare", "finish") else ("--index", 0, "--of", 2)
        done(*job.task("out", stage, *which))
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_folder_that_can_not_be_written_to_is_refused(tmp_path: Path) -> None:
    """In a sentence; the store in it can be read all the same."""
    job = JOBS["tokenize"](tmp_path)
    done(*job.to("out"), "--quiet")
    with read_only(job.path("out")):
        refused = invoke(*job.to("out"))
        assert refused.exit_code == 4 and "not writable" in refused.output
        done("verify", job.path("out"))


@pytest.mark.parametrize(
    "name", first_quick(["everything", *(name for name in ALL_JOBS if name not in ("everything", "feed"))])
)
def test_workers_and_budget_change_no_byte(name: str, tmp_path: Path) -> None:
    """One worker with ample memory, three in the least that carries the job."""
    job = ALL_JOBS[name](tmp_path)
    for out, options in {"one": ("--workers", 1), "three": ("--workers", 3, "--memory", "400MB")}.items():
        run_milldam(*job.to(out), *options, cwd=job.cwd(out))
    assert job.made("three") == job.made("one")


@pytest.mark.slow
def test_the_script_of_every_job(job: Case, tmp_path: Path) -> None:
    """Through the stand-in for Slurm, each task a process."""
    run_milldam(*job.to("local"), "--quiet")
    run_milldam("slurm", "--nodes", 2, "-o", tmp_path / "job.sh", "--milldam", MILLDAM, *job.to("arrays"))
    queue(tmp_path / "job.sh", tmp_path / "slurm")
    assert job.made("arrays") == job.made("local")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["near", "pairs", *JOBS])
def test_every_job_on_ray(name: str, tmp_path: Path, cluster: Any) -> None:
    """On a cluster of two nodes: the bytes of this machine."""
    job = ALL_JOBS[name](tmp_path)
    run_milldam(*job.to("local"), "--quiet")
    run_milldam(*job.to("ray"), "--memory", "600MB", "--executor", "ray", "--address", cluster.address)
    assert job.made("ray") == job.made("local")


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_a_result_has_lost_is_made_again(job: Case, is_lost: bool) -> None:
    """A file that is gone, or cut off, is noticed by its name and size: nothing damaged is called up to date."""
    done(*job.to("out"))
    made = job.made("out")
    for name in sorted(made, key=lambda name: len(made[name]))[-2:]:
        damaged = job.path("out") / name if name else job.path("out")
        damaged.unlink()
        if not is_lost:
            damaged.write_bytes(made[name][:-1])
        again = ["--overwrite"] if job.words[0] == "export" else []  # which replaces nothing unasked
        assert not json.loads(done(*job.to("out"), *again, "--json"))["up_to_date"]
        assert job.made("out") == made
