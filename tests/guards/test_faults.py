"""Faults of a disk, in every job: the result is right, or the run says what failed, where, and what to do.

A job is added in `tests/kit/every_job.py`: its words on the command line and where its result lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.kit.every_job import JOBS, NO_ARRAYS, Case
from tests.kit.faults import KILL, SHORT, Fault, Faults, build_shim
from tests.kit.jobs import TOKENIZER, run_here, run_milldam, write_lines
from tests.kit.preprocess_jobs import tree_bytes, write_config
from tests.kit.quick import first_quick

ALWAYS = 1 << 60
ALL_JOBS: dict[str, Callable[[Path], Case]] = JOBS | NO_ARRAYS
ORDER = ["near", "export of a folder", "tokenize", *(name for name in ALL_JOBS)]
NAMES = list(dict.fromkeys(ORDER))
"""The first of them are looked at by `make test`."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def faults(shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "cache"))
    yield Faults(tmp_path, shim)


@pytest.mark.parametrize("name", first_quick(NAMES))
@pytest.mark.parametrize("call", ["write", "read"])
def test_what_is_written_or_read_only_in_part_is_completed(
    name: str, call: str, faults: Faults, tmp_path: Path
) -> None:
    """The system takes, or gives, half of what it is asked for, every time: the same bytes."""
    job = ALL_JOBS[name](tmp_path)
    run_milldam(*job.to("clean"))
    met = faults.run(Fault(call, SHORT, times=ALWAYS), job.to("out"))
    assert met.returncode == 0, met.stderr
    assert faults.calls > 20
    assert job.made("out") == job.made("clean")


FAULTS = (
    "EIO rename",
    "kill remove",
    "ENOSPC write",
    "kill rename",
    "kill write",
    "EIO read",
    "ESTALE fsync",
    "EIO write",
)


@pytest.mark.parametrize("fault", first_quick(FAULTS, 3))
@pytest.mark.parametrize("name", first_quick(NAMES, 2))
def test_a_run_that_fails_says_why_and_the_next_one_completes_it(
    name: str, fault: str, faults: Faults, tmp_path: Path
) -> None:
    """At calls from the first to the last: what, where and what to do; then the same bytes, and nothing left over."""
    kind, call = fault.split()
    job = ALL_JOBS[name](tmp_path)
    calls = faults.count(call, job.to("clean"))
    for at in spread(calls, 3 if name in NAMES[:2] else 12):
        out = f"out-{at}"
        met = faults.run(Fault(call, kind, at), job.to(out))
        if kind == KILL:
            assert met.returncode in (-9, 0)
        elif met.returncode:
            assert met.returncode in (3, 4), met.stderr
            assert str(tmp_path) in met.stderr and "run the same command again" in met.stderr.lower(), met.stderr
            assert "Traceback" not in met.stderr and " bug " not in met.stderr
        run_milldam(*job.to(out))
        assert job.made(out) == job.made("clean")
        assert [path.name for path in tmp_path.glob(f".{out}*")] == []


def test_a_refused_update_leaves_the_old_store_as_it_was(tmp_path: Path) -> None:
    """No document is left: store, rejects and dropped documents stay those of the run that made the store."""
    corpus = write_lines(tmp_path / "a.jsonl", ["a text that stays", "another one", "another one"])
    with corpus.open("a") as last:
        last.write('{"title": "no text here"}\n')
    rules = {"dedup": "exact", "write_dropped": True}
    config = {"datasets": [str(corpus)], "tokenizer": str(TOKENIZER), "out": str(tmp_path / "out"), **rules}
    path = write_config(tmp_path / "config.yaml", config)
    run_here("preprocess", path)
    before = tree_bytes(tmp_path / "out")
    assert {"rejects.jsonl", "dropped.jsonl.zst"} <= before.keys()
    corpus.write_text('{"text": ""}\n{"text": " "}\n')
    assert "No documents left" in run_here("preprocess", path, code=3).output
    assert tree_bytes(tmp_path / "out") == before
    write_lines(corpus, ["a text that is new"])
    run_here("preprocess", path)
    assert not {"rejects.jsonl", "dropped.jsonl.zst"} & tree_bytes(tmp_path / "out").keys()


def spread(calls: int, count: int) -> list[int]:
    """So many of the numbers from 1 on, both ends included."""
    return sorted({1 + k * (calls - 1) // max(1, count - 1) for k in range(count)})
