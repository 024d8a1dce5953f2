"""A job that is killed at one fsync after the other, each try going on where the last one died.

Run as a program it forks a child per kill, so that only one process starts up:
`python -m tests.kit.fsync_kills '[["export", ["store", "mds", "out"], {}], ...]' 10`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]

Call = tuple[str, list[Any], dict[str, Any]]
"""A function of `milldam.formats`, its arguments and its options; nothing that JSON can't hold."""


def kill_at_fsyncs(calls: list[Call], before: int) -> list[list[int]]:
    """For each call the signals (0: it came to its end) of its tries, killed at the second, fourth, ... fsync."""
    command = [sys.executable, "-m", "tests.kit.fsync_kills", json.dumps(calls), str(before)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    signals: list[list[int]] = json.loads(done.stdout)
    return signals


def _die_at_fsync(number: int) -> None:
    """Nothing waits for the disk: it is the process that dies, not the machine."""
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync  # type: ignore[assignment]


def _try(call: Call, number: int) -> int:
    """The signal that ended it."""
    from milldam import formats

    child = os.fork()
    if child == 0:
        name, arguments, options = call
        _die_at_fsync(number)
        getattr(formats, name)(*arguments, **options)
        os._exit(0)
    ended = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0, ended
    return os.WTERMSIG(ended)


if __name__ == "__main__":
    import pyarrow.parquet  # noqa: F401  # once, not in each child

    calls, before = json.loads(sys.argv[1]), int(sys.argv[2])
    print(json.dumps([[_try(call, number) for number in range(2, before, 2)] for call in calls]))
