"""`milldam preprocess` killed in every stage and at every boundary: the same bytes come out in the end."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import (
    EOS_TEXT,
    MILLDAM,
    TOKENIZER,
    kill_group,
    leftovers,
    run_milldam,
    set_aside,
    started,
    wait_until,
    write_lines,
)
from tests.kit.preprocess_jobs import (
    CRASHED,
    drops_by_stage,
    fresh_texts,
    make_words,
    run_in,
    summary_of,
    tree_bytes,
    write_config,
)

from milldam.api import preprocess

KILLS = 12


@dataclass(frozen=True, slots=True)
class Job:
    """A job with everything on. Paths are seen from the folder it runs in: so every trial has the same settings."""

    home: Path
    config: dict[str, Any]

    @property
    def reference(self) -> Path:
        return self.home / "reference"

    def new_trial(self, folder: Path) -> Path:
        """A folder to run in, with the index as it is before the run."""
        folder.mkdir()
        shutil.copytree(self.home / "seen", folder / "seen")
        return folder

    def assert_finished(self, trial: Path) -> None:
        """Store, rows, dropped documents and index equal those of the undisturbed run; nothing else is left."""
        out, reference = trial / "out", self.reference / "out"
        assert list(tree_bytes(out)) == list(tree_bytes(reference))
        assert tree_bytes(out) == tree_bytes(reference)
        assert leftovers(out) == []
        assert index_of(trial) == index_of(self.reference)
        names = {path.name for path in (out / "run").iterdir()}
        assert names >= {"report.html", "summary.json"}
        assert not any(name.startswith("dedup") for name in names)
        assert drops_by_stage(out) == drops_by_stage(reference)
        assert summary_of(out)["packing"] == summary_of(reference)["packing"]
        assert "near_duplicate" in (out / "run" / "report.html").read_text(encoding="utf-8").replace(" ", "_")


def index_of(trial: Path) -> dict[str, Any]:
    """Hash files by name, and what is known of each run but for time and place."""
    found: dict[str, Any] = {}
    for path in sorted((trial / "seen").iterdir()):
        if path.suffix == ".json":
            record = json.loads(path.read_bytes())
            found[path.name] = {name: record[name] for name in ("id", "documents", "hashes", "bytes")}
        elif path.name != "lock":
            found[path.name] = path.read_bytes() if path.is_file() else "folder"
    return found


def make_texts(count: int) -> tuple[list[str], list[str]]:
    """Texts with copies, near copies and short ones; and what an earlier run has seen."""
    rng = random.Random("kill")
    base = fresh_texts(count, words=(30, 60))
    texts: list[str] = []
    for text in base:
        texts.append(text)
        kind = rng.random()
        if kind < 0.1:
            texts.append(rng.choice(texts))
        elif kind < 0.2:
            texts.append(f"{text} {make_words(rng, 1)}")
        elif kind < 0.25:
            texts.append(f"short {rng.random()}")
    return texts, rng.sample(base, count // 10)


def make_job(home: Path, count: int, **more: Any) -> Job:
    texts, seen = make_texts(count)
    corpus, old = write_lines(home / "corpus.jsonl", texts), write_lines(home / "old.jsonl", seen)
    with corpus.open("a") as file:
        file.write('{"text": 7}\n')
    common = {"tokenizer": str(TOKENIZER), "memory": "1GB", "dedup": {"index": "seen", "near": {}}}
    earlier = {"datasets": str(old), "out": "old", "workers": 1, **common}
    _preprocess_here(home, earlier)
    config = {
        "datasets": str(corpus),
        "out": "out",
        "shard_size": "100KB",
        "write_dropped": True,
        "filters": {"min_tokens": 20},
        "splits": {"val_tokens": 3000},
        "packing": {"strategy": "best_fit", "write": True},
        "seq_len": 128,
        **common,
        **more,
    }
    job = Job(home, config)
    write_config(home / "config.yaml", config)
    _preprocess_here(job.new_trial(job.reference), config)
    return job


def _preprocess_here(folder: Path, config: dict[str, Any]) -> None:
    """In this process, whose memory holds what the tests before have loaded; the result does not depend on it."""
    with chdir(folder):
        preprocess(config | {"memory": "4GB", "workers": 1})


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """For kills from outside: two workers, and the slower encoder leaves time to be killed in."""
    tokenizer = {"path": str(TOKENIZER), "encoder": "huggingface"}
    return make_job(tmp_path_factory.mktemp("slow"), 4000, workers=2, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """For deaths at a given place: four units, one process."""
    return make_job(tmp_path_factory.mktemp("small"), 1200, workers=1)


def test_the_job_has_everything_on(small: Job) -> None:
    """Otherwise the tests below would prove little."""
    out = small.reference / "out"
    dropped = drops_by_stage(out)
    assert set(dropped) == {"read", "dedup", "encode"}
    assert set(dropped["dedup"]) == {"duplicate", "seen_before", "near_duplicate"}
    assert set(summary_of(out)["splits"]) == {"train", "val"}
    assert (out / "packed" / "milldam.json").exists() and set_aside(out)
    assert len(set_aside(out, "dropped")) == sum(sum(dropped[stage].values()) for stage in ("dedup", "encode"))
    assert len(list(out.glob("train-*.bin"))) >= 3
    # Of both runs: facts, hashes, signatures, n-grams, and where those of each document begin.
    assert len(index_of(small.reference)) == 2 * 5
    assert EOS_TEXT == "<|endoftext|>"


# ---- killed from outside ----


def current_stage(out: Path) -> str:
    """What the run is at, by the end of its memory timeline."""
    try:
        with (out / "run" / "memory.csv").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200))
            lines = file.read().decode().splitlines()
        return lines[-1].split(",")[1]
    except (OSError, IndexError):
        return ""


@contextmanager
def running(job: Job, trial: Path) -> Iterator[subprocess.Popen[str]]:
    with started("preprocess", job.home / "config.yaml", cwd=trial) as process:
        yield process


CHAINS = {
    "to_the_rows": ["prepare", "fingerprint", "group", "tokenize", "tokenize", "arrange", "index", "pack"],
    "to_the_report": ["fingerprint", "group", "group", "tokenize", "arrange", "finish", "report"],
    "the_end": ["tokenize", "index", "index", "report"],
}
killed: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.parametrize("chain", ["to_the_rows", "to_the_report", "the_end"])
def test_killed_in_every_stage_the_result_is_the_same(slow: Job, tmp_path: Path, chain: str) -> None:
    """SIGKILL for the whole group, a random moment after a stage has begun; the same command goes on each time."""
    rng = random.Random(chain)
    trial = slow.new_trial(tmp_path / "t")
    timeline = trial / "out" / "run" / "memory.csv"
    for stage in CHAINS[chain]:
        before = timeline.stat().st_size if timeline.exists() else 0
        with running(slow, trial) as process:
            wait_until(partial(has_come, trial, before, stage), process)
            time.sleep(rng.uniform(0, 0.1))
            alive, now = process.poll() is None, current_stage(trial / "out")
            kill_group(process)
        assert alive or process.returncode == 0
        killed[now] += alive
    run_milldam("preprocess", slow.home / "config.yaml", cwd=trial)
    slow.assert_finished(trial)


@pytest.mark.slow
def test_the_kills_fell_into_many_stages() -> None:
    """Otherwise the test above has lost its point."""
    if killed.total() < KILLS:
        pytest.skip("some of the kills were in other processes of pytest")
    assert len(killed) >= 6, killed


def has_come(trial: Path, before: int, stage: str) -> bool:
    timeline = trial / "out" / "run" / "memory.csv"
    return timeline.exists() and timeline.stat().st_size > before and current_stage(trial / "out") == stage


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fingerprint", "group", "tokenize"])
def test_ctrl_c_ends_with_130_and_the_same_command_goes_on(slow: Job, tmp_path: Path, stage: str) -> None:
    """One message, no traceback, and nothing lost."""
    trial = slow.new_trial(tmp_path / "t")
    with running(slow, trial) as process:
        assert wait_until(lambda: has_come(trial, 0, stage), process)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stdout == "" and "Traceback" not in stderr and stderr.count("Interrupted") == 1
    again = stderr.rstrip().splitlines()[-1].strip()
    assert again.startswith("milldam preprocess ")
    done = subprocess.run(
        again.replace("milldam", MILLDAM, 1), shell=True, capture_output=True, text=True, timeout=60, cwd=trial
    )
    assert done.returncode == 0, done.stderr
    slow.assert_finished(trial)


# ---- dead at a given place ----

POINTS = [
    ("start", "before", 1),
    ("start", "after", 1),
    ("pin", "before", 1),
    ("pin", "after", 1),
    ("signatures", "after", 2),
    ("fingerprints", "before", 2),
    ("fingerprints", "after", 1),
    ("stage", "after", 1),
    ("exact", "after", 1),
    ("pairs", "after", 1),
    ("pairs", "before", 3),
    ("sketches", "before", 2),
    ("sketches", "after", 1),
    ("verify", "after", 3),
    ("decide", "before", 1),
    ("decide", "after", 1),
    ("removed", "before", 1),
    ("removed", "after", 1),
    ("stage", "after", 2),
    ("shard", "before", 2),
    ("shard", "after", 1),
    ("record", "before", 2),
    ("record", "after", 1),
    ("stage", "after", 3),
    ("append", "before", 6),
    ("append", "after", 6),
    ("stage", "after", 4),
    ("index_hashes", "after", 1),
    ("index_record", "before", 1),
    ("index_record", "after", 1),
    ("index_orphans", "after", 1),
    ("stage", "after", 5),
    ("rejects", "after", 1),
    ("dropped", "after", 1),
    ("manifest", "before", 1),
    ("manifest", "after", 1),
    ("row_shard", "before", 2),
    ("row_shard", "after", 1),
    ("manifest", "before", 2),
    ("pack", "after", 1),
    ("summary", "before", 1),
    ("summary", "after", 1),
    ("remove", "after", 1),
    ("report", "before", 1),
    ("report", "after", 1),
    ("summary", "before", 2),
    ("summary", "after", 2),
    ("status", "before", 1),
]

QUICK = {
    ("fingerprints", "before", 2),
    ("pairs", "before", 3),
    ("manifest", "before", 1),
}


@pytest.fixture(scope="module")
def forks() -> Any:
    """Processes that have milldam loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["milldam.pipeline.job", "milldam.dedup.index", "milldam.dedup.near", "preprocess_jobs"]
    )
    return context


def run_in_fork(forks: Any, job: Job, trial: Path, crash: tuple[str, str, int] | None) -> int:
    process = forks.Process(target=run_in, args=(trial, job.config, crash))
    process.start()
    process.join(60)
    return int(process.exitcode)


def parameters() -> Iterator[Any]:
    """Those that matter most; the others are slow in sum."""
    for point in POINTS:
        marks = [] if point in QUICK else [pytest.mark.slow]
        yield pytest.param(point, id="-".join(map(str, point)), marks=marks)


@pytest.mark.parametrize("point", list(parameters()))
def test_dead_at_a_boundary_the_result_is_the_same(
    small: Job, tmp_path: Path, forks: Any, point: tuple[str, str, int]
) -> None:
    """Between any two steps that leave something behind: run again, it ends with the same bytes."""
    trial = small.new_trial(tmp_path / "t")
    assert run_in_fork(forks, small, trial, point) == CRASHED
    assert run_in_fork(forks, small, trial, None) == 0
    small.assert_finished(trial)


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param("pairs-*.keys", marks=pytest.mark.slow),
        pytest.param("marks-*.bits", marks=pytest.mark.slow),
        pytest.param("sketches-0*.bin", marks=pytest.mark.slow),
        "edges-*.keys",
        pytest.param("resolved-*.json", marks=pytest.mark.slow),
    ],
)
def test_work_files_torn_by_a_power_failure_are_made_again(small: Job, tmp_path: Path, forks: Any, torn: str) -> None:
    """Those of near-dedup wait for no disk: what is not as it was recorded is not believed."""
    trial = small.new_trial(tmp_path / "t")
    assert run_in_fork(forks, small, trial, ("decide", "before", 1)) == CRASHED
    files = [path for path in trial.glob(f"**/dedup-*/{torn}") if path.stat().st_size]
    assert files
    for path in files:
        data = path.read_bytes()
        path.write_bytes(bytes(len(data)) if torn == "edges-*.keys" else data[: len(data) // 2])
    assert run_in_fork(forks, small, trial, None) == 0
    small.assert_finished(trial)


@pytest.mark.slow
def test_dead_again_and_again_at_the_same_place(small: Job, tmp_path: Path, forks: Any) -> None:
    """Each attempt gets a few steps further, until it is done."""
    trial = small.new_trial(tmp_path / "t")
    for _ in range(30):
        if run_in_fork(forks, small, trial, ("append", "after", 3)) == 0:
            break
    small.assert_finished(trial)


@pytest.mark.slow
def test_a_run_that_died_while_the_index_grew_is_not_changed_by_it(small: Job, tmp_path: Path, forks: Any) -> None:
    """What it is compared with was settled when it began."""
    trial = small.new_trial(tmp_path / "t")
    assert run_in_fork(forks, small, trial, ("stage", "after", 1)) == CRASHED
    other = write_lines(trial / "other.jsonl", make_texts(1200)[0][:300])
    config = small.config | {"datasets": str(other), "out": "other", "splits": {}}
    assert run_in_fork(forks, Job(small.home, config), trial, None) == 0
    assert run_in_fork(forks, small, trial, None) == 0
    assert tree_bytes(trial / "out") == tree_bytes(small.reference / "out")
