"""An unfinished run, a file of its folder damaged, the same command again: the same bytes, or an error by its name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.damage import BYTES, not_utf8
from tests.kit.jobs import BROKEN_LINES, TOKENIZER, make_texts, write_lines
from tests.kit.quick import first_quick
from tests.qa.test_job import write_examples
from tests.stores.test_features import some_folder

import milldam
from milldam import qa
from milldam.errors import MilldamError
from milldam.run.records import Journal

RULES: dict[str, Any] = {"workers": 1, "memory": "1GB"}
Run = Callable[[Path, Path], Any]
"""(input, out): a job."""


class KilledError(BaseException):
    """What a kill is to the process that it hits."""


def tokenized(source: Path, out: Path) -> Any:
    return milldam.tokenize(source / "lines.jsonl", out, tokenizer=TOKENIZER, shard_size="100KB", **RULES)


def deduplicated(source: Path, out: Path) -> Any:
    """With every file that a run can have: fingerprints, signatures, texts, drops, facts, rejects, dropped texts."""
    config = {"datasets": str(source / "lines.jsonl"), "tokenizer": str(TOKENIZER), "out": str(out)}
    config |= {"dedup": {"near": {}}, "shard_size": "150KB", "write_dropped": True, "splits": {"val_tokens": 500}}
    return milldam.preprocess(config | {"clean": {}} | RULES)


def mapped(source: Path, out: Path) -> Any:
    return milldam.map(source / "torn.jsonl", _lengths, out, shards=5, **RULES)


def _lengths(rows: dict[str, list[str]]) -> dict[str, list[int]]:
    return {"length": [len(text or "") for text in rows["text"]]}


def mapped_rows(source: Path, out: Path) -> Any:
    """Rows that are spooled before they are mapped."""
    import datasets

    rows = datasets.load_dataset("json", data_files=str(source / "good.jsonl"), split="train", streaming=True)
    return milldam.map(rows, _lengths, out, shards=4, source_key="rows", **RULES)


def answered(source: Path, out: Path) -> Any:
    return qa.prepare(source / "qa.jsonl", out, tokenizer=TOKENIZER, max_seq_length=64, overlap=16, **RULES)


def imported(source: Path, out: Path) -> Any:
    return milldam.import_tokens(source / "tokens.npy", out, eos=0, shard_size="2KB")


def exported(source: Path, out: Path) -> Any:
    return milldam.export(source / "store", "parquet", out, shard_size="40KB")


def grown(source: Path, out: Path) -> Any:
    return milldam.export(source / "store", "nanogpt", out / "train.bin")


JOBS: dict[str, tuple[Run, str]] = {
    # job, and where it writes down what is done
    "tokenize": (tokenized, "out/run"),
    "dedup": (deduplicated, "out/run"),
    "map": (mapped, "out/run"),
    "map of rows": (mapped_rows, "out/run"),
    "qa": (answered, "out/run"),
    "import": (imported, "out/run"),
    "export": (exported, ".out.milldam-export"),
    "export of a file": (grown, "out/.train.bin.milldam-export"),
}


@pytest.fixture(scope="module")
def source() -> Iterator[Path]:
    with some_folder() as folder:
        texts = list(make_texts(500_000))
        write_lines(folder / "good.jsonl", texts)
        lines = write_lines(folder / "lines.jsonl", texts + texts[:20]).read_bytes().splitlines(keepends=True)
        for place, broken in enumerate(BROKEN_LINES):
            lines.insert(17 * (place + 1), broken + b"\n")
        (folder / "lines.jsonl").write_bytes(b"".join(lines))
        (folder / "torn.jsonl").write_bytes(b"".join(line for line in lines if b'"title"' not in line))
        write_examples(folder / "qa.jsonl", 2500)
        tokens = np.random.default_rng(0).integers(1, 500, 20_000).astype(np.uint16)
        tokens[::37] = 0
        np.save(folder / "tokens.npy", tokens)
        milldam.tokenize(folder / "good.jsonl", folder / "store", tokenizer=TOKENIZER, **RULES)
        yield folder


class Killing:
    """Ends a job when it has written down so much."""

    def __init__(self, patch: pytest.MonkeyPatch, most: int | None) -> None:
        self.written, self._most = 0, most
        patch.setattr(Journal, "append", self._counted(Journal.append))

    def _counted(self, write: Callable[..., None]) -> Callable[..., None]:
        def counted(*arguments: Any) -> None:
            if self._most is not None and self.written >= self._most:
                raise KilledError
            write(*arguments)
            self.written += 1

        return counted


def contents(out: Path) -> dict[str, bytes]:
    """What a job made, what it wrote down of itself left out."""
    found = (path for path in sorted(out.rglob("*")) if path.is_file() and "run" not in path.relative_to(out).parts)
    return {str(path.relative_to(out)): path.read_bytes() for path in found if "milldam-export" not in str(path)}


def interrupted(job: Run, source: Path, folder: Path, share: float) -> dict[str, bytes]:
    """Leave an unfinished run in `folder / "begun"`; what it would have made undisturbed."""
    with pytest.MonkeyPatch.context() as patch:
        whole = Killing(patch, None)
        (folder / "whole").mkdir(parents=True)
        job(source, folder / "whole" / "out")
    with pytest.MonkeyPatch.context() as patch:
        (folder / "begun").mkdir()
        Killing(patch, min(int(whole.written * share), whole.written - 1))
        with pytest.raises(KilledError):
            job(source, folder / "begun" / "out")
    return contents(folder / "whole" / "out")


def damage_and_resume(name: str, source: Path, share: float, rng: random.Random, most: int) -> list[str]:
    """What went wrong, over so many files of the folder of a run."""
    job, where = JOBS[name]
    found: list[str] = []
    with some_folder() as folder:
        expected = interrupted(job, source, folder, share)
        kept = folder / "begun" / where
        files = sorted(path.relative_to(folder / "begun") for path in kept.rglob("*") if path.is_file())
        assert files
        for file in rng.sample(files, min(len(files), most)):
            for damage in rng.sample((*BYTES, not_utf8), max(1, most // 40)):
                shutil.rmtree(folder / "again", ignore_errors=True)
                shutil.copytree(folder / "begun", folder / "again", symlinks=True)
                path = folder / "again" / file
                path.write_bytes(damage(path.read_bytes(), rng))
                told = f"{name} {share}: {file} {damage.__name__}"
                try:
                    job(source, folder / "again" / "out")
                except MilldamError as error:
                    if path.name not in str(error) or error.exit_code != 3:
                        found.append(f"{told}: {error}")
                except BaseException as error:
                    import traceback

                    found.append(f"{told}: {type(error).__name__}: {traceback.format_exc()[-900:]}")
                else:
                    made = contents(folder / "again" / "out")
                    if made != expected:
                        differ = [one for one in made.keys() | expected.keys() if made.get(one) != expected.get(one)]
                        found.append(f"{told}: other bytes: {differ[:5]}")
    return found


@pytest.mark.parametrize("name", first_quick(JOBS))
def test_a_damaged_run_folder_gives_the_same_bytes_or_is_refused_by_name(name: str, source: Path) -> None:
    """What a resume reads is as it was written, made anew, or refused: never believed."""
    assert damage_and_resume(name, source, 0.6, random.Random(name), most=12) == []


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.2, 0.4, 0.8, 0.95])
@pytest.mark.parametrize("name", JOBS)
def test_every_damage_to_a_run_folder_gives_the_same_bytes_or_is_refused(name: str, source: Path, share: float) -> None:
    """The same for every kind of damage, at other moments of the run."""
    assert damage_and_resume(name, source, share, random.Random(f"{name} {share}"), most=240) == []
