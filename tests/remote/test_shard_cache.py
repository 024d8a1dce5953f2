"""The cache of shards: whole files by content, within a bound, shared between processes, safe from kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.kit.jobs import wait_until

from milldam.errors import StoreError
from milldam.remote.shard_cache import DamagedError, ShardCache


def data_of(number: int) -> bytes:
    return bytes([number]) * 1000


def record_of(number: int) -> dict[str, Any]:
    return {"xxh3": xxhash.xxh3_128(data_of(number)).hexdigest(), "bytes": 1000}


def source(number: int, fetched: list[int]) -> Callable[[], Iterator[bytes]]:
    """A file that can be downloaded, and is noted when it is."""

    def blocks() -> Iterator[bytes]:
        fetched.append(number)
        yield data_of(number)[:500]
        yield data_of(number)[500:]

    return blocks


def read(cache: ShardCache, number: int, fetched: list[int]) -> None:
    """Open a file, check its bytes, and give it back."""
    descriptor = cache.open(record_of(number), source(number, fetched))
    assert descriptor is not None and os.pread(descriptor, 2000, 0) == data_of(number)
    os.close(descriptor)


def bytes_in(folder: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(folder))


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    """Opening a file again keeps it longer than one that came later."""
    cache = ShardCache(tmp_path, 3000)
    for number in (1, 2, 3, 1, 4):
        read(cache, number, [])
    assert {number for number in range(1, 5) if cache.has(record_of(number))} == {1, 3, 4}
    assert bytes_in(cache.folder) == 3000


def test_what_is_open_is_not_removed_and_counts(tmp_path: Path) -> None:
    """Files in use stay, and only they can lead beyond the bound; closed ones make room again."""
    cache, fetched = ShardCache(tmp_path, 2000), list[int]()
    held = [cache.open(record_of(number), source(number, fetched)) for number in (1, 2, 3)]
    assert bytes_in(cache.folder) == 3000
    assert cache.open(record_of(4), source(4, fetched), may_exceed=False) is None
    for descriptor in held:
        assert descriptor is not None
        os.close(descriptor)
    read(cache, 5, fetched)
    assert bytes_in(cache.folder) <= 2000
    assert fetched == [1, 2, 3, 5]


def test_damaged_bytes_are_never_kept(tmp_path: Path) -> None:
    """Fewer bytes, or others, are an error, and nothing is left of them; nor does a manifest name paths elsewhere."""
    cache = ShardCache(tmp_path, 5000)
    for wrong in (data_of(1)[:500], data_of(2)):
        with pytest.raises(DamagedError, match="its bytes are not those of the manifest"):
            cache.open(record_of(1), lambda wrong=wrong: iter([wrong]))
    assert bytes_in(cache.folder) == 0
    with pytest.raises(StoreError, match="damaged manifest"):
        cache.path({"xxh3": "../../etc/passwd", "bytes": 10})


FETCHING = """
import os, sys, time
from pathlib import Path
import xxhash
from milldam.remote.shard_cache import ShardCache

folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
data = bytes([1]) * 1000

def download():
    with log.open("a") as file:
        file.write("fetch\\n")
    yield data[:500]
    time.sleep(seconds)
    yield data[500:]

descriptor = ShardCache(folder, 1500).open({"xxh3": xxhash.xxh3_128(data).hexdigest(), "bytes": 1000}, download)
assert os.pread(descriptor, 2000, 0) == data
"""


def start(folder: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", FETCHING, str(folder), str(log), str(seconds)])


def test_processes_that_need_the_same_file_fetch_it_once(tmp_path: Path) -> None:
    """The second waits while the first downloads."""
    log = tmp_path / "log"
    processes = [start(tmp_path / "cache", log, 0.5) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text() == "fetch\n"


def test_a_killed_download_leaves_nothing_that_is_misread_or_counted(tmp_path: Path) -> None:
    """SIGKILL in the middle: the half file is no file, and the next who needs room removes it."""
    folder, log, fetched = tmp_path / "cache", tmp_path / "log", list[int]()
    process = start(folder, log, 60)
    assert wait_until(lambda: log.exists() and log.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list(folder.glob("*.part"))) == 1
    cache = ShardCache(folder, 1500)
    read(cache, 2, fetched)
    assert bytes_in(cache.folder) == 1000
    read(cache, 1, fetched)
    assert fetched == [2, 1]
    assert not list(folder.glob("*.part"))


FORKING = """
import os, signal, sys, threading, time
from pathlib import Path
import xxhash
from milldam.remote.shard_cache import ShardCache

data, half, go = bytes([1]) * 1000, threading.Event(), threading.Event()
cache, content = ShardCache(Path(sys.argv[1]), 1500), {"xxh3": xxhash.xxh3_128(data).hexdigest(), "bytes": 1000}

def download():
    yield data[:500]
    half.set()
    go.wait()
    yield data[500:]

thread = threading.Thread(target=lambda: cache.open(content, download), daemon=True)
thread.start()
half.wait()
child = os.fork()
if child == 0:
    # Meanwhile it has a copy of the descriptor that the parent's thread has locked.
    descriptor = cache.open(content, download)
    time.sleep(30)
    os._exit(0)
go.set()
thread.join(10)
blocked = thread.is_alive()
os.kill(child, signal.SIGKILL)
os.waitpid(child, 0)
sys.exit("the fork has kept the lock" if blocked else 0)
"""


def test_a_fork_in_the_middle_of_a_download_keeps_no_lock(tmp_path: Path) -> None:
    """A worker that is forked while a thread fetches ahead has the thread's descriptor, and must not block anybody."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
