"""The C files of this folder -> one shared library beside them, where the machine has a compiler.

Used by the build (`hatch_build.py`), and by `make` when a C file changed. The compiler is `$CC`, else cc, gcc or clang,
else the one of the package ziglang. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "kernels.so"
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]


def sources() -> list[Path]:
    """The C files, in order."""
    return sorted(FOLDER.glob("*.c"))


def digest() -> str:
    """A hash of the C files: the library has that of those it was made from, so that a stale one is noticed."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources())).hexdigest()[:16]


def compilers() -> list[list[str]]:
    """The commands that may compile C here, best first."""
    if os.environ.get("CC"):
        return [shlex.split(os.environ["CC"])]
    found = [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    return [*found, [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]] if find_spec("ziglang") else found


def build() -> str | None:
    """Make the library; None when it is there, else what went wrong."""
    said = "no C compiler (cc, gcc, clang, or `pip install ziglang`)"
    # A process may have the old library mapped: a new file takes its name.
    new = LIBRARY.with_suffix(f".{os.getpid()}.so")
    for compiler in compilers():
        command = [*compiler, *FLAGS, f'-DMILLDAM_DIGEST="{digest()}"', *map(str, sources()), "-o", str(new)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            said = f"{shlex.join(compiler)}: {error}"
            continue
        if done.returncode == 0:
            new.replace(LIBRARY)
            return None
        said = f"{shlex.join(compiler)}: {done.stderr.strip()}"
        new.unlink(missing_ok=True)
    return said
