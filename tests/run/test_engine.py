"""A whole job on the engine, as short as one can be: numbers of text files, doubled, to one file a part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from milldam.errors import MismatchError
from milldam.files import write_file
from milldam.memory import usage
from milldam.run import engine
from milldam.run.engine import Assigned, Make, Options, Progress, Session, Stage
from milldam.run.records import RECORDS, Record, Records
from milldam.run.units import Identity, key_of
from milldam.stores.kinds import Kind

NUMBERS = Kind("numbers", "numbers.json", "numbers", "a store of numbers", "")
PART_LINES = 10


@dataclass(frozen=True)
class Unit:
    path: str
    size: int
    version: str = "1"

    @property
    def key(self) -> str:
        return key_of(self.path, self.size)

    def as_json(self) -> dict[str, Any]:
        return {"path": self.path}


@dataclass(frozen=True)
class Doubling:
    """What a worker loads. `dies_at`: the part before whose record its process is killed."""

    out: Path
    dies_at: int | None

    def load(self) -> Make:
        return self._make

    def _make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        lines = Path(assigned.unit["path"]).read_text().split()
        for part in range(assigned.next_part, len(lines) // PART_LINES):  # after the last part that is recorded
            if part == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            numbers = [2 * int(line) for line in lines[part * PART_LINES : (part + 1) * PART_LINES]]
            name = f"{assigned.key}-{part}.txt"
            written = write_file(self.out / name, "\n".join(map(str, numbers)).encode())
            progress.add(documents=len(numbers))
            is_last = (part + 1) * PART_LINES == len(lines)
            yield Record(assigned.key, part, is_last, {name: written}, counts={"sum": sum(numbers)})


class NumberJob(engine.Job[dict[str, int]]):
    kind, stage_names, outputs, workers = NUMBERS, ("double",), ("*.txt",), 1

    def __init__(self, paths: list[Path], out: Path, factor: int = 2, dies_at: int | None = None) -> None:
        self.paths, self.out, self.factor, self.dies_at = paths, out, factor, dies_at

    def prepare(self, run: Session) -> Identity:
        files = [Unit(str(path), path.stat().st_size) for path in self.paths]
        return Identity({"factor": self.factor}, run.folder.inputs.write((0, file) for file in files))

    def units(self, run: Session) -> Iterable[Unit]:
        return [Unit(str(path), path.stat().st_size) for path in self.paths]

    def stages(self, run: Session) -> Iterator[Stage]:
        self.records = Records(run.folder, RECORDS, run.folder.units.keys())
        yield Stage("double", Doubling(self.out, self.dies_at), self.records, dict)

    def finish(self, run: Session, plan: Any) -> dict[str, int]:
        totals: Counter[str] = Counter(parts=0, made=self.records.complete - self.records.reused)
        for _, record in self.records.in_plan_order():
            totals.update(record.counts, parts=1)
        identity = run.folder.identity()
        NUMBERS.write(self.out, {"settings": identity.settings, "input": identity.input})
        return dict(totals)

    def up_to_date(self, run: Session) -> dict[str, int]:
        return {}


def run(paths: list[Path], out: Path, *more: Any) -> dict[str, int]:
    options = Options(out, memory="1GB", held_bytes=usage().anonymous)
    return engine.run(NumberJob(paths, out, *more), options)


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{name}.in" for name in "abc"]
    for number, path in enumerate(made):
        path.write_text("\n".join(str(number * 100 + line) for line in range(40)))
    return made


def test_a_unit_killed_in_its_middle_is_resumed_after_its_last_record(paths: list[Path], tmp_path: Path) -> None:
    """What was durable stays, the part that was open is made, and nothing is there twice or missing."""
    whole = run(paths, tmp_path / "whole")
    program = "import sys, pathlib, tests.run.test_engine as test; *paths, out = map(pathlib.Path, sys.argv[1:])\n"
    program += "test.run(paths, out, 2, 2)"
    killed = subprocess.run([sys.executable, "-c", program, *paths, tmp_path / "out"])
    assert killed.returncode == -signal.SIGKILL
    recorded = (tmp_path / "out/run/records.jsonl").read_bytes()
    assert len(recorded.splitlines()) == 2
    assert run(paths, tmp_path / "out") == whole == {"parts": 12, "made": 3, "sum": 2 * (120 * 100 + 3 * 780)}
    assert (tmp_path / "out/run/records.jsonl").read_bytes().startswith(recorded)
    for path in (tmp_path / "whole").glob("*.txt"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_only_changed_units_are_made_again_and_other_settings_are_refused(paths: list[Path], tmp_path: Path) -> None:
    """The same call does nothing; a changed file costs its unit; another factor is another result."""
    run(paths, tmp_path / "out")
    assert run(paths, tmp_path / "out") == {}
    paths[1].write_text("\n".join(str(1000 + line) for line in range(20)))
    assert run(paths, tmp_path / "out") == {"parts": 10, "made": 1, "sum": 2 * (80 * 100 + 2 * 780 + 20_190)}
    with pytest.raises(MismatchError, match=r"factor: 3 \(made with 2\)"):
        run(paths, tmp_path / "out", 3)
