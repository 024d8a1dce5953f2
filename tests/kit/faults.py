"""Faults of a disk in real commands: short writes and reads, errors of the system, kills, each at the n-th call.

faults = Faults(folder)
faults.count("write", words)                      # how many writes below the folder a command makes
faults.run(Fault("write", "short", 3), words)     # the third gets half of its bytes; a process
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kit.jobs import MILLDAM

SHORT, KILL = "short", "kill"
_SHIM = Path(__file__).with_suffix(".c")
_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Fault:
    """`call`: write, read, fsync, rename or remove. `kind`: SHORT, KILL, or the name of an error such as ENOSPC."""

    call: str
    kind: str
    at: int = 1
    times: int = 1


class Faults:
    """Runs commands whose files below a folder meet a fault."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._folder, self._library, self._count = folder.resolve(), library, folder / "fault-count"

    def run(self, fault: Fault, words: tuple[object, ...], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """The command line as a process group of its own, all of which a kill ends."""
        self._count.write_bytes(bytes(8))
        kind = fault.kind if fault.kind in (SHORT, KILL) else str(getattr(errno, fault.kind))
        told = {"CALL": fault.call, "KIND": kind, "AT": fault.at, "TIMES": fault.times}
        told |= {"UNDER": f"{self._folder}/", "COUNT": self._count}
        environment = {f"FAULT_{name}": str(value) for name, value in told.items()}
        return subprocess.run(
            [MILLDAM, *map(str, words)],
            env=os.environ | environment | {"LD_PRELOAD": str(self._library)},
            capture_output=True,
            text=True,
            timeout=120,
            start_new_session=True,
            cwd=cwd,
        )

    def count(self, call: str, words: tuple[object, ...], cwd: Path | None = None) -> int:
        """How many such calls a command makes that meets no fault."""
        done = self.run(Fault(call, SHORT, _NEVER), words, cwd)
        assert done.returncode == 0, done.stderr
        return self.calls

    @property
    def calls(self) -> int:
        """How many calls of the kind the last command made."""
        return int.from_bytes(self._count.read_bytes(), "little")


def build_shim(folder: Path) -> Path:
    """The library that brings the faults; skips the test where none can be compiled or loaded."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or os.uname().sysname != "Linux":
        pytest.skip("faults are compiled with gcc, and loaded by Linux")
    library = folder / "faults.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SHIM, "-ldl"], check=True, timeout=60)
    return library
