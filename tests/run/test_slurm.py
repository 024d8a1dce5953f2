"""The script of `milldam slurm` as users run it: through a stand-in for sbatch, and through Slurm where it can run.

The second needs Debian's packages slurm-wlm and munge and root; it starts its own daemons in a temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import MILLDAM, invoke, run_milldam, write_lines
from tests.kit.preprocess_jobs import config_of, texts_with_copies, write_config
from tests.run.test_array_jobs import EVERYTHING, Job, make_job

from milldam.cli.status import read_status

STAND_IN = Path(__file__).parents[1] / "kit/sbatch_stand_in.py"
DAEMONS = ("munged", "slurmctld", "slurmd")


# ---- the stand-in ----


@dataclass(frozen=True, slots=True)
class StandIn:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "STAND_IN_FOLDER": str(self.folder / "jobs"),
        }

    def queue(self, script: Path) -> list[dict[str, Any]]:
        """Run the script, wait until all of its jobs are over; each with its name, state and the codes of its tasks."""
        told = subprocess.run(["bash", script], env=self.environment, check=True, capture_output=True, text=True)
        done = [self.folder / "jobs" / f"{number}.done" for number in told.stdout.split()[1:]]
        deadline = time.monotonic() + 300
        while not all(path.exists() for path in done):
            assert time.monotonic() < deadline, "jobs do not end"
            time.sleep(0.05)
        return [
            {"name": json.loads(path.with_suffix(".json").read_text())["options"]["job-name"]}
            | json.loads(path.read_text())
            for path in done
        ]

    def messages(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.folder / "jobs").glob("*.log")))


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    folder = tmp_path / "slurm"
    (folder / "jobs").mkdir(parents=True)
    shutil.copy(STAND_IN, folder / "sbatch")
    (folder / "sbatch").chmod(0o755)
    return StandIn(folder)


def write_script(job: Path, path: Path, *options: object) -> Path:
    made = invoke("slurm", "-o", path, "--milldam", MILLDAM, *options, "preprocess", job)
    assert made.exit_code == 0, made.output
    return path


def states(jobs: list[dict[str, Any]]) -> dict[str, str]:
    return {job["name"].removeprefix("milldam-"): job["state"] for job in jobs}


@pytest.mark.slow
def test_the_script_may_run_again(tmp_path: Path, stand_in: StandIn) -> None:
    """The second time there is nothing to do; of a changed configuration it makes nothing."""
    job = make_job(tmp_path / "job")
    script = write_script(job.path, tmp_path / "job.sh", "--nodes", 2)
    assert set(states(stand_in.queue(script)).values()) == {"COMPLETED"}, stand_in.messages()
    before = {path: path.stat().st_mtime_ns for path in job.out.iterdir() if path.is_file()}
    assert set(states(stand_in.queue(script)).values()) == {"COMPLETED"}, stand_in.messages()
    assert before == {path: path.stat().st_mtime_ns for path in before}
    changed = json.loads(job.path.read_text()) | {"clean": "default"}
    job.path.write_text(json.dumps(changed))
    assert list(states(stand_in.queue(script)).values()) == ["FAILED", *["CANCELLED"] * 3]
    assert "clean" in stand_in.messages()
    job.assert_finished()


@pytest.mark.slow
def test_what_waits_for_a_failed_share_never_starts(tmp_path: Path, stand_in: StandIn) -> None:
    """A bad record with `strict`: the other share's work is safe, and `milldam status` names the place."""
    paths = [write_lines(tmp_path / f"in-{k}.jsonl", texts_with_copies(500, k)) for k in range(2)]
    settings = {"strict": True, "dedup": "off", "shard_size": "1MB"}
    path = write_config(tmp_path / "config.yaml", config_of(tmp_path / "out", paths, **settings))
    script = write_script(path, tmp_path / "job.sh", "--nodes", 2)
    # Behind the script: `milldam slurm` would find it in its sample.
    with paths[1].open("a") as file:
        file.write('{"text": "cut off\n')
    jobs = stand_in.queue(script)
    assert states(jobs) == {"prepare": "COMPLETED", "tokenize": "FAILED", "finish": "CANCELLED"}
    assert jobs[1]["tasks"] == {"0": [0], "1": [3]}
    assert read_status(tmp_path / "out")["safe"]["units_done"] == 1
    assert "in-1.jsonl:501" in invoke("status", tmp_path / "out").output


@pytest.mark.slow
def test_every_stage_through_the_script_while_tasks_are_killed(tmp_path: Path, stand_in: StandIn) -> None:
    """Dedup, splits by tokens, packing; a task of every array is killed once and queued again by itself."""
    job = make_job(tmp_path / "job", **EVERYTHING)
    # Kills itself where the first share of a stage starts its work, once; it stands for a machine that fails.
    setup = (
        'if [ "${SLURM_ARRAY_TASK_ID:-}" = 0 ] && mkdir "$STAND_IN_FOLDER/killed-$SLURM_JOB_ID"; then\n'
        '  (sleep "1.$((RANDOM % 9))"; pkill -9 -P $$) &\nfi'
    )
    script = write_script(job.path, tmp_path / "job.sh", "--nodes", 2, "--tasks", 3, "--setup", setup)
    jobs = stand_in.queue(script)
    assert set(states(jobs).values()) == {"COMPLETED"}, stand_in.messages()
    assert any(len(runs) > 1 for one in jobs for runs in one["tasks"].values())
    job.assert_finished()


# ---- Slurm itself ----


@contextmanager
def running_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node with two cores, with its daemons in a folder; the environment for its commands."""
    missing = [name for name in DAEMONS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"Slurm can't be started here: {', '.join(missing) or 'root'} is missing (slurm-wlm and munge)")
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (folder / "munge/key").write_bytes(os.urandom(128))
    (folder / "munge/key").chmod(0o600)
    (folder / "slurm.conf").write_text(slurm_conf(folder))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = {name: folder / "munge" / name for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")}
    munge["key-file"] = folder / "munge/key"
    daemons = [
        ["munged", "--force", "--foreground", *(f"--{name}={path}" for name, path in munge.items())],
        ["slurmctld", "-D", "-c", "-f", str(folder / "slurm.conf")],
        ["slurmd", "-D", "-c", "-f", str(folder / "slurm.conf")],
    ]
    log = (folder / "daemons.log").open("wb")
    started = []
    try:
        for command in daemons:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            time.sleep(0.5)
        await_that(lambda: "idle" in told("sinfo", "-h", "-o", "%t", environment=environment), 60)
        yield environment
    finally:
        told("scancel", "--user=root", environment=environment)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        log.close()


def slurm_conf(folder: Path) -> str:
    """No cgroups and no binding, which a container may not give."""
    host = socket.gethostname().partition(".")[0]
    ports = free_ports(2)
    return f"""\
ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SchedulerParameters=sched_interval=1,batch_sched_delay=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=2000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def told(*command: str, environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout


def await_that(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.2)


def task_states(environment: dict[str, str]) -> dict[str, str]:
    """job or job_task -> state, of what Slurm still knows; what failed or was cancelled included."""
    lines = told("squeue", "-h", "-t", "all", "-r", "-o", "%F_%K %T", environment=environment).splitlines()
    return dict(line.replace("_N/A", "").split() for line in lines)


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(folder.glob("slurm-*.out")))


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


def submit(job: Job, folder: Path, environment: dict[str, str], *options: object) -> list[str]:
    """Write the script in a folder, run it there; the numbers of its jobs."""
    script = folder / "job.sh"
    words = ("slurm", "--nodes", 2, "--cpus", 1, "-o", script, "--milldam", MILLDAM, *options)
    run_milldam(*words, "preprocess", job.path, cwd=folder)
    return told("bash", str(script), environment=environment).split()[1:]


@pytest.mark.slow
def test_slurm_makes_the_store_also_when_a_task_is_queued_again(tmp_path: Path, slurm: dict[str, str]) -> None:
    """Dedup, splits by tokens, packing through real sbatch; `scontrol requeue` kills a task of tokenize at its work."""
    job = make_job(tmp_path / "job", **EVERYTHING)
    slow = 'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then sleep 1; fi'
    numbers = submit(job, tmp_path, slurm, "--mem", "900M", "--setup", slow)
    tokenize = numbers[-3]
    await_that(lambda: task_states(slurm).get(f"{tokenize}_0") in ("RUNNING", "COMPLETED"), 300)
    told("scontrol", "requeue", f"{tokenize}_0", environment=slurm)
    assert "Restarts=1" in told("scontrol", "show", "job", f"{tokenize}_0", environment=slurm)
    await_that(lambda: (job.out / "milldam.json").exists() and not told("squeue", "-h", environment=slurm), 400)
    assert {state for number, state in task_states(slurm).items() if number.split("_")[0] in numbers} <= {"COMPLETED"}
    job.assert_finished()
