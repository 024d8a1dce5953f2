"""A store whose input changed: only what changed is made, and the bytes are those of a run from nothing."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import kill_group, leftovers, run_milldam, started, store_bytes
from tests.kit.qa_jobs import command, small, write_examples
from tests.kit.quick import first_quick

from milldam.errors import MismatchError
from milldam.stores.features.reader import FeatureStore
from milldam.stores.verify import verify

KILLS = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files, the second of several chunks."""
    made = tmp_path / "in"
    made.mkdir()
    for seed, (name, count) in enumerate((("a.jsonl", 40), ("m.jsonl", 2100), ("y.jsonl", 30))):
        write_examples(made / name, count, seed=seed)
    return made


def add(folder: Path) -> None:
    write_examples(folder / "c.jsonl", 50, seed=7)


def edit(folder: Path) -> None:
    write_examples(folder / "y.jsonl", 35, seed=8)


def grow(folder: Path) -> None:
    """Its first chunks stay."""
    lines = (folder / "m.jsonl").read_bytes() + (folder / "a.jsonl").read_bytes()
    (folder / "m.jsonl").write_bytes(lines)


def remove(folder: Path) -> None:
    (folder / "a.jsonl").unlink()


def rename(folder: Path) -> None:
    """The same examples, at another place in the order."""
    (folder / "a.jsonl").rename(folder / "z.jsonl")


def copy(folder: Path) -> None:
    """The same examples twice."""
    (folder / "b.jsonl").write_bytes((folder / "a.jsonl").read_bytes())


def told(folder: Path, out: Path, *options: object) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(run_milldam(*command(folder, out, "--json", *options)).stdout)
    return summary


@pytest.mark.parametrize(
    ("change", "units", "reused"),
    first_quick([(edit, 5, 4), (add, 6, 5), (grow, 5, 4), (remove, 4, 4), (rename, 5, 5), (copy, 6, 5)]),
)
def test_only_what_changed_is_made(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], units: int, reused: int
) -> None:
    """Added, edited, longer, gone, renamed, twice: without --overwrite, and with the bytes of a run from nothing."""
    assert told(folder, tmp_path / "s")["units"] == 5
    change(folder)
    summary = told(folder, tmp_path / "s")
    assert (summary["units"], summary["reused"], summary["up_to_date"]) == (units, reused, False)
    small(folder, tmp_path / "fresh")
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")
    assert list(verify(tmp_path / "s")) == [] and leftovers(tmp_path / "s") == []
    assert told(folder, tmp_path / "s")["up_to_date"]


def test_the_command_says_what_is_new(folder: Path, tmp_path: Path) -> None:
    """How many units were reused, and which files are new or changed."""
    small(folder, tmp_path / "s")
    add(folder)
    shown = run_milldam(*command(folder, tmp_path / "s")).stdout
    assert "5 of 6 units reused" in shown and "c.jsonl" in shown


def test_an_open_store_is_read_on(folder: Path, tmp_path: Path) -> None:
    """Whoever opened it before the update reads what he opened."""
    small(folder, tmp_path / "s")
    numbers = np.arange(len(FeatureStore(tmp_path / "s")))
    before = FeatureStore(tmp_path / "s").rows(numbers, ("input_ids",))["input_ids"]
    opened = FeatureStore(tmp_path / "s")
    edit(folder)
    small(folder, tmp_path / "s")
    assert np.array_equal(opened.rows(numbers, ("input_ids",))["input_ids"], before)


def test_other_settings_are_refused_as_ever(folder: Path, tmp_path: Path) -> None:
    """With a changed input too: nothing of another length is reused."""
    small(folder, tmp_path / "s")
    before = store_bytes(tmp_path / "s")
    add(folder)
    with pytest.raises(MismatchError, match="overlap: 8"):
        small(folder, tmp_path / "s", overlap=8)
    assert store_bytes(tmp_path / "s") == before


def test_examples_are_counted_over_all_files(folder: Path, tmp_path: Path) -> None:
    """A limit takes the first ones of the files as they are now."""
    small(folder, tmp_path / "s", max_examples=60)
    add(folder)
    store = small(folder, tmp_path / "s", max_examples=60)
    small(folder, tmp_path / "fresh", max_examples=60)
    assert store.examples == 60
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")


def test_rejects_and_answers_are_those_of_all_files(folder: Path, tmp_path: Path) -> None:
    """What files that were not read again had to tell is still told, in order."""
    with (folder / "a.jsonl").open("a") as file:
        file.write("{broken\n")
    small(folder, tmp_path / "s")
    with (folder / "y.jsonl").open("a") as file:
        file.write("{broken\n")
    store = small(folder, tmp_path / "s")
    rejects = [json.loads(line) for line in (tmp_path / "s/rejects.jsonl").read_text().splitlines()]
    assert [Path(one["file"]).name for one in rejects] == ["a.jsonl", "y.jsonl"]
    assert store.manifest.counts["rejected"] == {"bad_json": 2}
    small(folder, tmp_path / "fresh")
    assert store_bytes(tmp_path / "s") == store_bytes(tmp_path / "fresh")


@pytest.mark.slow
def test_killed_in_an_update_the_old_store_or_the_new_one_is_whole(folder: Path, tmp_path: Path) -> None:
    """SIGKILL at random times: what can be opened is whole, and the same command ends with the right bytes."""
    rng = random.Random("kill an update")
    kills = 0
    for number in itertools.count():
        if kills >= KILLS:
            break
        out = tmp_path / str(number)
        small(folder, out)
        change = (add, edit, grow)[number % 3]
        change(folder)
        for _ in range(3):
            with started(*command(folder, out, "--workers", 2, "--memory", "1GB")) as process:
                time.sleep(rng.uniform(0.5, 1.8))
                finished = process.poll() is not None
                kill_group(process)
            kills += not finished
            assert list(verify(out)) == []
        small(folder, out)
        small(folder, tmp_path / f"fresh{number}")
        assert store_bytes(out) == store_bytes(tmp_path / f"fresh{number}")
        assert leftovers(out) == []
