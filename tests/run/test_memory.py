"""Sizes as people write them, limits as the system sets them, and what a process tree uses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import TOKENIZER, run_milldam, write_corpus, write_lines
from tests.kit.preprocess_jobs import write_config

from milldam import memory
from milldam.errors import ConfigError
from milldam.memory import Budget, format_size, parse_size
from milldam.run.tasks import cores

MB = 10**6

# ---- sizes ----


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512 * MB),
        ("512 mb", 512 * MB),
        (" 2GB ", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (".5G", 5 * 10**8),
        ("4096", 4096),
        ("1_000KB", MB),
        ("3KiB", 3072),
        ("0", 0),
        (77, 77),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    """Decimal and binary units in any case, fractions, underscores, and plain bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1GB", "1.2.3GB", "12XB", "1e9", "one", "5 5MB", "1,000MB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    """The error repeats what was written and shows how to write it."""
    with pytest.raises(ConfigError, match="is not a size") as caught:
        parse_size(text)
    assert f'"{text}"' in str(caught.value) and "Write it as 512MB" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1234, "1.2 KB"), (512 * MB, "512 MB"), (3 * 10**12, "3 TB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    """Three digits and a unit."""
    assert format_size(size) == text


@given(st.integers(0, 10**15))
def test_a_shown_size_can_be_typed_back(size: int) -> None:
    """What is printed can be given as an option, and is the size within five percent."""
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.05)


# ---- limits ----


@pytest.mark.parametrize(
    ("line", "files", "found"),
    [
        (
            "0::/slice/job",
            {
                "slice/job/memory.max": "2000",
                "slice/job/memory.stat": "anon 500\nfile 900",
                "slice/memory.max": "5000",
                "slice/memory.stat": "file 1\nanon 700",
            },
            [(2000, 500), (5000, 700)],
        ),
        (
            "9:name=systemd:/x\n4:cpu,memory:/box/job\n0::/",
            {"memory/box/job/memory.limit_in_bytes": "1000", "memory/box/job/memory.stat": "rss 1\ntotal_rss 300"},
            [(1000, 300)],
        ),
        ("4:memory:/host/box", {"memory/memory.limit_in_bytes": "4096"}, [(4096, 0)]),
        ("0::/host/box", {"memory.max": "4096"}, [(4096, 0)]),
    ],
)
def test_cgroup_limits_are_found(
    tmp_path: Path, line: str, files: dict[str, str], found: list[tuple[int, int]]
) -> None:
    """Of either version, of the group and those above it; in a container, where the group's path is the host's, at the
    root."""
    (tmp_path / "proc").write_text(line + "\n")
    for name, content in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(content + "\n")
    assert sorted(memory._cgroup_limits(tmp_path / "proc", tmp_path / "cgroup")) == found


def test_the_smallest_limit_sets_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of machine and groups the tightest counts, by what it leaves, and is named."""
    monkeypatch.setattr(memory, "_machine_available", lambda: 10_000 * MB)
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(8000 * MB, 100 * MB), (3000 * MB, 1000 * MB)])
    assert memory.available_bytes() == (2000 * MB, "in the memory cgroup")
    budget = Budget.of(None)
    assert budget.limit_bytes == 1000 * MB
    assert budget.origin == "half of the 2 GB free in the memory cgroup"
    monkeypatch.setattr(memory, "_cgroup_limits", lambda: [(10 * MB, 20 * MB)])
    assert memory.available_bytes()[0] == 0


def test_the_limits_of_a_slurm_task_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the job on its node, in MiB, and its cores, also where nothing enforces them."""
    free = Budget.of(None).limit_bytes
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "400")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert Budget.of(None).limit_bytes < min(200 * 2**20, free) and "Slurm" in Budget.of(None).origin
    assert cores() == 1
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "0")
    monkeypatch.delenv("SLURM_CPUS_ON_NODE")
    assert Budget.of(None).limit_bytes > 200 * 2**20 and cores() == len(os.sched_getaffinity(0))


# ---- workers within the budget ----


def test_the_refusal_on_the_command_line_names_a_budget_that_works(tmp_path: Path) -> None:
    """The very command with the size that the refusal names goes through."""
    corpus = write_lines(tmp_path / "corpus.jsonl", ["one", "two"])
    job = ["tokenize", corpus, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--memory"]
    refused = run_milldam(*job, "10MB", code=4)
    assert "A budget of 10 MB is too small for this tokenizer" in refused.stderr
    assert not (tmp_path / "s" / "milldam.json").exists()
    run_milldam(*job, refused.stderr.rsplit("--memory ", 1)[1].strip().rstrip("."))


def test_the_budget_that_a_refusal_names_does_with_and_without_a_cache(tmp_path: Path, shared_data: Path) -> None:
    """It is the largest of all needs, and allows for a tokenizer of which nothing is known yet."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 100_000).path
    rules = {"datasets": str(corpus), "tokenizer": str(shared_data / "tokenizers" / "gpt2"), "dedup": "near"}
    asked = ("preprocess", write_config(tmp_path / "c.yaml", rules | {"out": str(tmp_path / "s")}), "--workers", 1)
    named, cache = [], {"MILLDAM_CACHE": str(tmp_path / "cache")}
    for _ in range(2):
        said = run_milldam(*asked, "--memory", "150MB", code=4, env=os.environ | cache)
        named += re.findall(r"too small for dedup: it takes at least --memory (\d+)MB", said.stderr)
    assert len(named) == 2 and int(named[1]) <= int(named[0])
    run_milldam(*asked, "--memory", f"{named[0]}MB", env=os.environ | {"MILLDAM_CACHE": str(tmp_path / "empty")})
