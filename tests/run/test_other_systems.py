"""Systems without forked workers, /proc, fadvise, sync_file_range or mapping at an address: the same bytes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.kit.jobs import DEMO, TOKENIZER, run_here

import milldam
from milldam.run.tasks import CAN_FORK

ELSEWHERE = Path(__file__).parents[1] / "kit" / "without_linux"
linux = pytest.mark.skipif(sys.platform != "linux", reason="what is switched off is what Linux has")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Enough for several units."""
    (tmp_path / "corpus.jsonl").write_bytes(8 * (DEMO / "corpus.jsonl").read_bytes())
    return tmp_path / "corpus.jsonl"


def python(code: str, *arguments: object, elsewhere: bool) -> str:
    """What a program prints, in a process of its own."""
    paths = [str(ELSEWHERE)] * elsewhere + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@linux
def test_without_what_only_linux_has_a_job_makes_the_same_store(corpus: Path, tmp_path: Path) -> None:
    """Two workers, each started as a program of its own; memory is what psutil tells."""
    options = f"{str(corpus)!r}, OUT, tokenizer={str(TOKENIZER)!r}, workers=2, shard_size='100KB'"
    code = f"""
import milldam
from milldam import files, memory
from milldam.run import tasks
store = milldam.tokenize({options.replace("OUT", repr(str(tmp_path / "elsewhere.milldam")))})
print(tasks.CAN_FORK, files._load_sync_file_range(), memory.usage().anonymous > 0)
rows = [{{"text": "word " * 200}}] * 2000  # batches that are large enough to wait for room
table = milldam.map(rows, lambda batch: {{"size": [len(one) for one in batch["text"]]}},
                    {str(tmp_path / "elsewhere.table")!r}, workers=2, batch_size=500, shard_size="500KB")
print(len(table), table[0]["size"])
"""
    told = python(code, elsewhere=True).splitlines()
    assert told == ["False None True", "2000 1000"]
    run_here("tokenize", corpus, "-o", tmp_path / "here.milldam", "--tokenizer", TOKENIZER,
             "--workers", 2, "--shard-size", "100KB")  # fmt: skip
    here, elsewhere = (milldam.open(tmp_path / f"{name}.milldam") for name in ("here", "elsewhere"))
    assert CAN_FORK and here.fingerprint == elsewhere.fingerprint
    for file in sorted(here.path.glob("*.bin")):
        assert file.read_bytes() == (elsewhere.path / file.name).read_bytes()


@pytest.mark.parametrize("without", ["advice", "locks"])
def test_batches_are_the_same_without_what_a_system_may_lack(
    without: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fadvise, no locks on files."""
    store = milldam.tokenize(corpus, tmp_path / "store", tokenizer=TOKENIZER, shard_size="100KB")
    expected = [x for x, _ in store.windows(64).batches(8, seed=1)]
    if without == "advice":
        code = "import sys, milldam; store = milldam.open(sys.argv[1]); "
        code += "print([x.tolist() for x, _ in store.windows(64, read='pread').batches(8, seed=1)])"
        assert json.loads(python(code, tmp_path / "store", elsewhere=True)) == [x.tolist() for x in expected]
        return
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    found = [x for x, _ in milldam.open(tmp_path / "store").windows(64).batches(8, seed=1)]
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def _no_locks(*arguments: object) -> None:
    raise OSError(38, "Function not implemented")


def test_windows_is_refused_in_a_sentence() -> None:
    """At import, before anything that it lacks is missed."""
    code = (
        "import sys; sys.platform = 'win32'\ntry:\n    import milldam\nexcept ImportError as error:\n    print(error)"
    )
    told = python(code, elsewhere=False)
    assert told == "milldam runs on Linux and macOS. On Windows, install it in WSL: `wsl --install`.\n"
