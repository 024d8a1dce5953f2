"""Shares of a job, for array schedulers: the bytes of one run, whoever does them, how often and cut how."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import MILLDAM, TOKENIZER, invoke, store_bytes, write_lines
from tests.kit.preprocess_jobs import config_of, make_words, preprocess, texts_with_copies, write_config
from tests.kit.slurm import queue

from milldam.cli.arrays import ALWAYS, slurm_script
from milldam.cli.status import read_status
from milldam.config.loading import load_config
from milldam.config.settings import Config
from milldam.errors import InputError, MismatchError, NotReadyError
from milldam.pipeline.job import array_of, plan_job
from milldam.run.array import ArrayTask


def do(config: Config, stage: str, index: int = 0, of: int = 1) -> None:
    """A task of a job array; the last one tells what was made."""
    assert (array_of(config).run(ArrayTask(stage, index, of)) is not None) == (stage == "finish")


@dataclass(frozen=True, slots=True)
class Job:
    """A job to be done in array tasks, and the store that one run of it makes."""

    path: Path
    out: Path
    reference: dict[str, bytes]

    def config(self, **changes: Any) -> Config:
        return load_config(self.path, [f"{name}={json.dumps(value)}" for name, value in changes.items()])

    def share(self, stage: str, index: int, of: int) -> None:
        do(self.config(), stage, index, of)

    def assert_finished(self) -> None:
        assert store_bytes(self.out) == self.reference


def make_job(folder: Path, **settings: Any) -> Job:
    """About a dozen units in four files, some documents twice, some almost."""
    folder.mkdir(exist_ok=True)
    rng = random.Random("near")
    texts = texts_with_copies(4500, 5)
    for _ in range(200):
        words = make_words(rng, 60).split()
        texts += [" ".join(words), " ".join([*words[:-1], "other"])]
    paths = [write_lines(folder / f"in-{k}.jsonl", texts[k::4]) for k in range(4)]
    datasets = [{"path": paths[0]}, {"path": paths[1], "max_documents": 300}, *({"path": path} for path in paths[2:])]
    settings = {"shard_size": "100KB", "clean": "off", "dedup": "off"} | settings
    reference = preprocess(folder / "reference", datasets, **settings)
    path = write_config(folder / "config.yaml", config_of(folder / "out", datasets, **settings))
    return Job(path, folder / "out", store_bytes(reference.path))


EVERYTHING = {
    "clean": "default",
    "dedup": "near",
    "splits": {"val_tokens": 500},
    "packing": {"strategy": "best_fit", "write": True},
    "seq_len": 64,
    "write_dropped": True,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that only tokenizes, and counts."""
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture
def job(made: Job) -> Iterator[Job]:
    """The same with nothing done of it."""
    yield made
    shutil.rmtree(made.out, ignore_errors=True)


@pytest.fixture
def prepared(job: Job) -> Job:
    do(job.config(), "prepare")
    return job


@pytest.fixture
def counted(prepared: Job) -> Job:
    prepared.share("count", 0, 1)
    return prepared


# ---- the same bytes ----


def test_tasks_make_what_one_run_makes(tmp_path: Path) -> None:
    """Dedup exact and near, splits by tokens, counted documents, packing, dropped documents: every byte. The machines
    need not be as many the second time."""
    job = make_job(tmp_path, **EVERYTHING)
    do(job.config(), "prepare")
    stages = ("count", "fingerprint", "group", "near", "shingle", "verify", "decide", "tokenize", "arrange")
    assert plan_job(job.config()).plan.stages[: len(stages)] == stages
    job.share("count", 1, 3)
    for stage in stages:
        for index in reversed(range(2)):
            job.share(stage, index, 2)
    do(job.config(), "finish")
    job.assert_finished()


# ---- again, and beside each other ----


def test_a_share_asks_for_no_file_but_its_own(counted: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand shares of a million files would else be a billion questions; who prepares and who finishes ask."""

    def refuse(*_: Any) -> None:
        raise AssertionError("listed")

    with monkeypatch.context() as patched:
        patched.setattr("milldam.pipeline.preparing.list_inputs", refuse)
        counted.share("tokenize", 0, 1)
    changed = counted.path.parent / "in-3.jsonl"
    before = changed.stat().st_mtime_ns
    changed.touch()
    with pytest.raises(MismatchError, match=r"changed: in-3.jsonl"):
        do(counted.config(), "finish")
    os.utime(changed, ns=(before, before))
    do(counted.config(), "finish")
    counted.assert_finished()


# ---- what is refused ----


def test_a_share_before_prepare_leaves_no_trace(job: Job) -> None:
    """It says what comes first, and that can still be done."""
    with pytest.raises(NotReadyError, match="--stage prepare"):
        job.share("tokenize", 0, 1)
    with pytest.raises(NotReadyError, match="--stage prepare"):
        do(job.config(), "finish")
    assert not job.out.exists()
    do(job.config(), "prepare")


def test_stages_wait_for_those_before(prepared: Job) -> None:
    """Neither a share nor the end begins on half of what it needs, nor does it do the rest itself."""
    with pytest.raises(NotReadyError, match="the stage count before it is not done"):
        prepared.share("tokenize", 0, 2)
    prepared.share("count", 0, 1)
    prepared.share("tokenize", 0, 2)
    with pytest.raises(NotReadyError, match="the stage tokenize before it is not done"):
        do(prepared.config(), "finish")
    assert not (prepared.out / "milldam.json").exists()


def test_a_changed_configuration_is_refused(counted: Job) -> None:
    """By shares and by the end: nothing of two configurations comes together."""
    counted.share("tokenize", 0, 2)
    changed = counted.config(seed=7, clean="default")
    for work in (lambda: do(changed, "tokenize", 1, 2), lambda: do(changed, "finish")):
        with pytest.raises(MismatchError, match="clean"):
            work()
    counted.share("tokenize", 1, 2)
    do(counted.config(), "finish")
    counted.assert_finished()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stage", "polish", "--index", 0, "--of", 1), "the stages count, tokenize; prepare"),
        (("--stage", "report", "--index", 0, "--of", 1), "the stages count, tokenize; prepare"),
        (("--stage", "tokenize", "--index", 2, "--of", 2), "0 to 1"),
        (("--stage", "tokenize"), "say which one"),
        (("--stage", "finish", "--index", 1, "--of", 2), "one task alone"),
    ],
)
def test_what_can_not_be_done_in_arrays_is_said(prepared: Job, options: tuple[object, ...], message: str) -> None:
    """A stage that there is not, one that is no array's, an index too high, a job that one process must do."""
    result = invoke("run-units", *options, "preprocess", prepared.path)
    assert result.exit_code == 2 and message in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("preprocess", "CONFIG", "--set", "limit=3"), "limit: counts"),
        (("preprocess", "CONFIG", "--executor", "ray"), "--executor: ray: array tasks"),
        (("preprocess", "CONFIG", "--set", 'datasets="-"'), "other machines can't read it"),
        (("tokenize", "CONFIG", "--tokenizer", TOKENIZER, "-o", "out", "--limit", 3), "--limit: counts"),
        (("tokenize", "CONFIG", "--tokenizer", TOKENIZER, "-o", "out.npy", "--format", "npy"), "milldam export"),
        (("map", "SCRIPT", "CONFIG"), "--out: name a folder"),
        (("map", "SCRIPT", "-", "-o", "out"), "Save it to a file"),
        (("qa", "CONFIG", "--no-such"), "No such option"),
        (("verify", "out"), "not a job that array tasks can do; name one of tokenize, preprocess, map"),
        (("polish",), "not a job that array tasks can do"),
    ],
)
def test_jobs_that_one_process_must_do_are_refused(
    job: Job, tmp_path: Path, words: tuple[object, ...], message: str
) -> None:
    """Before anything is queued or prepared, with the options of the job's own command in the message."""
    script = tmp_path / "f.py"
    script.write_text("def f(rows):\n    return rows\n")
    given = [{"CONFIG": job.path, "SCRIPT": f"{script}:f"}.get(str(word), word) for word in words]
    for start in (("slurm", "--nodes", 2), ("run-units", "--stage", "prepare")):
        result = invoke(*start, *given)
        assert result.exit_code == 2 and message in result.output
    assert not job.out.exists()


# ---- status ----


def test_a_failing_share_leaves_the_others_their_work(tmp_path: Path) -> None:
    """A bad record with `strict`: the share says where, `milldam status` too, and what others did stays."""
    for k in range(2):
        write_lines(tmp_path / f"in-{k}.jsonl", texts_with_copies(500, k))
    with (tmp_path / "in-1.jsonl").open("a") as file:
        file.write('{"text": "cut off\n')
    settings = {"strict": True, "dedup": "off", "shard_size": "1MB"}
    paths = [str(tmp_path / f"in-{k}.jsonl") for k in range(2)]
    path = write_config(tmp_path / "config.yaml", config_of(tmp_path / "out", paths, **settings))
    config = load_config(path)
    do(config, "prepare")
    with pytest.raises(InputError):
        do(config, "tokenize", 1, 2)
    do(config, "tokenize", 0, 2)
    found = read_status(tmp_path / "out")
    assert found["state"] == "ended" and found["safe"]["units_done"] == 1
    assert {label: told["state"] for label, told in found["array_tasks"].items()} == {
        "tokenize-0-of-2": "done",
        "tokenize-1-of-2": "failed",
    }
    shown = invoke("status", tmp_path / "out").output
    assert "tokenize-1-of-2: failed" in shown and "in-1.jsonl:501" in shown and "1 array task done" in shown


# ---- the script ----

COMMAND = ("preprocess", "/c.yaml")
STAGES = ("fingerprint", "group", "tokenize")


@pytest.fixture
def jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `milldam slurm` is called, and tasks run."""
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path / "jobs")
    return tmp_path


ODD = """it's "a" $HOME `b` \\ c; d & (e) *\nf"""


def submitted(folder: Path, script: str, code: int = 0) -> list[tuple[list[str], list[str]]]:
    """What the script hands to sbatch: its options, and the words of the task's last command. `code`: of sbatch."""
    (folder / "sbatch").write_text(
        '#!/bin/bash\nn=$(ls | wc -l)\nprintf "%s\\0" "$@" > "$n.options"\ncat > "$n.task"\nchmod +x "$n.task"\n'
        f'echo "$n;cluster"\nexit {code}\n'
    )
    (folder / "milldam").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    for name in ("sbatch", "milldam"):
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "5"}
    done = subprocess.run(["bash"], input=script.encode(), env=environment, stdout=subprocess.DEVNULL)
    assert done.returncode == code
    tasks = []
    for path in sorted((folder / "jobs").glob("*.task"), key=lambda path: int(path.stem)):
        words = subprocess.run([path], env=environment, capture_output=True, check=True).stdout
        options = path.with_suffix(".options").read_text().split("\0")[:-1]
        tasks.append((options, words.decode().split("\0")[:-1]))
    return tasks


def test_the_script_queues_each_stage_behind_the_one_before(jobs_folder: Path) -> None:
    """prepare, arrays, finish; --parsable's cluster is left out."""
    jobs = submitted(jobs_folder, slurm_script(COMMAND, STAGES, 4, 16, options=(*ALWAYS, "--mem=4G")))

    def named(option: str) -> list[list[str]]:
        return [[one.partition("=")[2] for one in options if one.startswith(option)] for options, _ in jobs]

    assert named("--job-name=") == [[f"milldam-{stage}"] for stage in ("prepare", *STAGES, "finish")]
    assert named("--array=") == [[], *[["0-15%4"]] * 3, []]
    numbers = sorted(int(path.stem) for path in (jobs_folder / "jobs").glob("*.task"))
    assert named("--dependency=") == [[], *([f"afterok:{number}"] for number in numbers[:-1])]
    always = {"--parsable", "--requeue", "--kill-on-invalid-dep=yes", "--mem=4G"}
    assert all(always <= {*options} for options, _ in jobs)
    assert jobs[3][1][-8:] == ["--stage", "tokenize", "--index", "5", "--of", "16", *COMMAND]
    assert jobs[-1][1][-4:] == ["--stage", "finish", *COMMAND]


def test_any_name_and_value_reaches_the_task_as_it_is(jobs_folder: Path) -> None:
    """Quotes, spaces, $ and line ends in paths, --set values, options and setup commands."""
    command = ("preprocess", f"/data/{ODD}/c.yaml", "--set", f"out={ODD}")
    setup = f"export NOTE={shlex.quote(ODD)} # it's"
    script = slurm_script(command, ("tokenize",), 2, options=(f"--comment={ODD}",), setup=setup)
    for options, words in submitted(jobs_folder, script):
        assert f"--comment={ODD}" in options and words[-4:] == [*command]


def test_a_script_stops_when_slurm_refuses(jobs_folder: Path) -> None:
    """Nothing is queued behind a job that there is not."""
    assert len(submitted(jobs_folder, slurm_script(COMMAND, STAGES, 2), code=1)) == 1


@pytest.mark.slow
def test_every_stage_through_the_script_while_tasks_are_killed(tmp_path: Path) -> None:
    """Dedup, splits by tokens, packing; a task of every array is killed once and queued again by itself."""
    job = make_job(tmp_path / "job", **EVERYTHING)
    # Kills itself where the first task of a stage starts its work, once; it stands for a machine that fails.
    setup = (
        'if [ "${SLURM_ARRAY_TASK_ID:-}" = 0 ] && mkdir "$STAND_IN_FOLDER/killed-$SLURM_JOB_ID"; then\n'
        '  (sleep "1.$((RANDOM % 9))"; pkill -9 -P $$) &\nfi'
    )
    options = ("--nodes", 2, "--tasks", 3, "--setup", setup, "--milldam", MILLDAM)
    assert invoke("slurm", "-o", tmp_path / "job.sh", *options, "preprocess", job.path).exit_code == 0
    jobs = queue(tmp_path / "job.sh", tmp_path / "slurm")
    assert any(len(runs) > 1 for one in jobs for runs in one["tasks"].values())
    job.assert_finished()
