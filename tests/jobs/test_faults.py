"""Faults of a disk and kills, in every job: the result is right, or the run says what failed, where, and what to do.

A job is added in `tests/kit/every_job.py`: its words on the command line and where its result lies.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.kit.every_job import ALL_JOBS, Case
from tests.kit.faults import KILL, SHORT, Fault, Faults, build_shim
from tests.kit.jobs import TOKENIZER, run_here, run_milldam, set_aside, store_bytes, write_lines
from tests.kit.preprocess_jobs import fresh_texts, write_config
from tests.kit.quick import first_quick

import milldam

ALWAYS = 1 << 60
NAMES = list(dict.fromkeys(["near", "export of a folder", "tokenize", "everything", *ALL_JOBS]))
"""The first of them are looked at by `make test`."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def faults(shim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    # Below the folder, so that it meets faults too; with what is known of the tokenizer: finding out takes seconds.
    session, own = Path(os.environ["MILLDAM_CACHE"]) / "tokenizers", tmp_path / "cache/tokenizers"
    if session.exists():
        shutil.copytree(session, own)
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path / "cache"))
    yield Faults(tmp_path, shim)
    session.mkdir(parents=True, exist_ok=True)
    for found in own.glob("characters-*"):
        if not (session / found.name).exists():
            shutil.copy(found, session)


def done(job: Case, out: str) -> dict[str, bytes]:
    """Do a job, or what is left of it; every file of its result."""
    run_milldam(*job.to(out), cwd=job.cwd(out))
    assert job.traces(out) == []
    return job.made(out)


@pytest.mark.parametrize("name", first_quick(NAMES))
@pytest.mark.parametrize("call", ["write", "read"])
def test_what_is_written_or_read_only_in_part_is_completed(
    name: str, call: str, faults: Faults, tmp_path: Path
) -> None:
    """The system takes, or gives, half of what it is asked for, every time: the same bytes."""
    job = ALL_JOBS[name](tmp_path)
    met = faults.run(Fault(call, SHORT, times=ALWAYS), job.to("out"), job.cwd("out"))
    assert met.returncode == 0, met.stderr
    assert faults.calls > 20
    assert job.made("out") == done(job, "clean")


FAULTS = (
    "EIO rename",
    "kill remove",
    "ENOSPC write",
    "kill rename",
    "kill write",
    "kill fsync",
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
    calls = faults.count(call, job.to("clean"), job.cwd("clean"))
    clean = job.made("clean")
    for at in spread(calls, 3 if name in NAMES[:2] else 12):
        out = f"out-{at}"
        met = faults.run(Fault(call, kind, at), job.to(out), job.cwd(out))
        if kind == KILL:
            assert met.returncode in (-9, 0)
        elif met.returncode:
            assert met.returncode in (3, 4), met.stderr
            # What was named relative to the current folder is told so.
            assert str(tmp_path) in met.stderr or " seen/" in met.stderr, met.stderr
            assert "run the same command again" in met.stderr.lower(), met.stderr
            assert "Traceback" not in met.stderr and " bug " not in met.stderr
        assert done(job, out) == clean


@pytest.mark.parametrize("name", first_quick(["everything", *(name for name in NAMES if name != "everything")]))
def test_killed_again_and_again_it_comes_to_the_same_end(name: str, faults: Faults, tmp_path: Path) -> None:
    """Each run of the same folder dies a few steps further on."""
    job = ALL_JOBS[name](tmp_path)
    kills = 0
    for at in (2, 3, 5, 8, 13, 21, 34):
        met = faults.run(Fault("rename", KILL, at), job.to("out"), job.cwd("out"))
        assert met.returncode in (-9, 0), met.stderr
        kills += met.returncode == -9
    assert kills >= 2 or name == "feed"  # whose maker is killed, and replaced
    assert done(job, "out") == done(job, "clean")


WAYS_TO_KILL = (("rename", [5]), ("rename", range(15)), ("remove", range(15)))
"""At the call after the manifest's rename; then at each of the finish, counted from the last."""


@pytest.mark.parametrize(("call", "from_last"), first_quick(WAYS_TO_KILL))
def test_a_killed_update_shows_the_old_store_or_the_new_one(
    call: str, from_last: Sequence[int], faults: Faults, tmp_path: Path
) -> None:
    """Its rejects, dropped documents and findings with it; run again, it has the bytes of a fresh store."""
    to = update_of_all_kinds(tmp_path)
    shutil.copytree(tmp_path / "old", tmp_path / "updated")
    calls = faults.count(call, to("updated"))
    run_here(*to("fresh"))
    assert store_bytes(tmp_path / "updated") == store_bytes(tmp_path / "fresh")
    old, new = shown(tmp_path / "old"), shown(tmp_path / "fresh")
    assert all(one != other for one, other in zip(old, new, strict=True))
    seen = []
    for at in (calls - back for back in from_last):
        out = tmp_path / f"out-{at}"
        shutil.copytree(tmp_path / "old", out)
        assert faults.run(Fault(call, KILL, at), to(out.name)).returncode in (-9, 0)
        seen.append(shown(out))
        assert seen[-1] in (old, new)
        run_here(*to(out.name))
        assert store_bytes(out) == store_bytes(tmp_path / "fresh")
    assert new in seen


def test_a_refused_update_leaves_the_old_store_as_it_was(tmp_path: Path) -> None:
    """No document is left: all files stay, the store shows its own; those of the refused run go with the next."""
    to = update_of_all_kinds(tmp_path)
    before, old = store_bytes(tmp_path / "old"), shown(tmp_path / "old")
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    assert "No documents left" in run_here(*to("old"), code=3).output
    assert before.items() <= store_bytes(tmp_path / "old").items()
    assert shown(tmp_path / "old") == old
    write_lines(tmp_path / "a.jsonl", ["a text that is new"])
    run_here(*to("old"))
    assert shown(tmp_path / "old")[1:] == ([], [], [])
    assert not [name for name in store_bytes(tmp_path / "old") if name.startswith(("rejects", "dropped", "contam"))]


def update_of_all_kinds(folder: Path) -> Callable[[str], tuple[object, ...]]:
    """A store `old` with audit files of every kind, whose input has changed since; the words of its job, by folder."""
    item = fresh_texts(1, 7, words=(30, 31))[0]
    sets = write_lines(folder / "items.jsonl", [item])
    rules = {"dedup": "exact", "write_dropped": True, "decontaminate": str(sets)}
    config = {"datasets": [str(folder / "a.jsonl")], "tokenizer": str(TOKENIZER), "out": str(folder / "never"), **rules}
    path = write_config(folder / "config.yaml", config)

    def to(out: str) -> tuple[object, ...]:
        return "preprocess", path, "-o", folder / out, "--workers", 1

    for seed in (1, 2):
        texts = fresh_texts(40, seed)
        with write_lines(folder / "a.jsonl", [*texts, texts[0], f"{texts[1]} {item}"]).open("a") as last:
            last.write(f'{{"title": "no text here, {seed}"}}\n')
        if seed == 1:
            run_here(*to("old"))
    return to


def shown(out: Path) -> tuple[list[Any], ...]:
    """What a store that is whole shows: its documents, and what was set aside."""
    run_here("verify", out)
    store = milldam.open(out)
    return [one.tolist() for one in store], *(
        set_aside(store, what) for what in ("rejects", "dropped", "contamination")
    )


def spread(calls: int, count: int) -> list[int]:
    """So many of the numbers from 1 on, both ends included."""
    return sorted({1 + k * (calls - 1) // max(1, count - 1) for k in range(count)})
