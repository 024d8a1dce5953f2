"""An unfinished run, a file of its folder damaged, the same command again: the same bytes, or an error by its name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.damage import BYTES, not_utf8
from tests.kit.every_job import ALL_JOBS, Case
from tests.kit.faults import KILL, Fault, Faults, build_shim
from tests.kit.jobs import invoke
from tests.kit.quick import first_quick

NAMES = [name for name in ("near", "map", *ALL_JOBS) if name not in ("feed", "everything")]
"""A feed is killed in tests/feeding; a result with an index of its own would have to be copied with it."""


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def faults(shim: Path, tmp_path: Path) -> Iterator[Faults]:
    yield Faults(tmp_path, shim)


def damage_and_resume(job: Case, faults: Faults, share: float, rng: random.Random, most: int) -> list[str]:
    """What went wrong, over so many files of the folder of a run that was killed when a share of it was done."""
    calls = faults.count("rename", job.to("clean"))
    clean = job.made("clean")
    assert faults.run(Fault("rename", KILL, max(1, int(calls * share))), job.to("begun")).returncode == -9
    begun = job.kept("begun") if job.words[0] == "export" else job.path("begun")
    saved = shutil.copytree(begun, begun.with_name(f"{begun.name}-saved"), symlinks=True)
    folder = job.kept("begun") / "run" if job.words[0] == "export" else job.kept("begun")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert files
    wrong: list[str] = []
    for path in rng.sample(files, min(len(files), most)):
        for damage in rng.sample((*BYTES, not_utf8), max(1, most // 40)):
            for path_before in (job.path("begun"), begun):
                shutil.rmtree(path_before) if path_before.is_dir() else path_before.unlink(missing_ok=True)
            shutil.copytree(saved, begun, symlinks=True)
            path.write_bytes(damage(path.read_bytes(), rng))
            result = invoke(*job.to("begun"))
            name = f"{path.name} {damage.__name__}"
            if result.exit_code == 3 and path.name in result.output:
                continue
            if result.exit_code:
                wrong.append(f"{name}: {result.exit_code} {result.output[-400:]} {result.exception!r}")
            elif job.made("begun") != clean:
                wrong.append(f"{name}: other bytes")
    return wrong


@pytest.mark.parametrize("name", first_quick(dict.fromkeys(NAMES)))
def test_a_damaged_run_folder_gives_the_same_bytes_or_is_refused_by_name(
    name: str, faults: Faults, tmp_path: Path
) -> None:
    """What a resume reads is as it was written, made anew, or refused: never believed."""
    job = ALL_JOBS[name](tmp_path)
    assert damage_and_resume(job, faults, 0.6, random.Random(name), most=8) == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("name", dict.fromkeys(NAMES))
def test_every_damage_to_a_run_folder_gives_the_same_bytes_or_is_refused(
    name: str, share: float, faults: Faults, tmp_path: Path
) -> None:
    """The same for more kinds of damage, at other moments of the run."""
    job = ALL_JOBS[name](tmp_path)
    assert damage_and_resume(job, faults, share, random.Random(f"{name} {share}"), most=120) == []
