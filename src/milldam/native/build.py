"""The C files of this folder -> one shared library beside them, named by a hash of them: a stale one is never loaded.

Used by the build (`hatch_build.py`), and by milldam itself in a checkout whose C files have changed. The compiler is
the first that works: `$CC`, cc, gcc, clang, or the one of the package ziglang. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]
ADVICE = "Install a C compiler (or `pip install ziglang`), then install milldam again."


def library() -> Path:
    """Where the library of these C files is, once it is built."""
    digest = hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(FOLDER.glob("*.[ch]"))))
    return FOLDER / f"kernels-{digest.hexdigest()[:16]}.so"


def compilers() -> list[list[str]]:
    """The commands that may compile C here, best first."""
    found = [os.environ["CC"].split()] if os.environ.get("CC", "").strip() else []
    found += [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    return [*found, [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]] if find_spec("ziglang") else found


def can_compile() -> bool:
    """Whether one of the compilers works: one without its headers or its linker does not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <stdint.h>\n#include <string.h>\nint64_t tried(void) { return 1; }\n")
        return any(_compile(one, [source], Path(folder, "try.so")) is None for one in compilers())


def build() -> str | None:
    """Make the library, in place of older ones; None when it is there, else what went wrong."""
    if sys.byteorder != "little":
        return "milldam works on little-endian processors alone"
    made = library()
    # Processes may build it at once, or have an old one mapped: a new file takes its name.
    new = made.with_suffix(f".{os.getpid()}")
    problems = []
    for compiler in compilers():
        problem = _compile(compiler, sorted(FOLDER.glob("*.c")), new)
        if problem is None:
            new.replace(made)
            for old in set(FOLDER.glob("kernels*.so")) - {made}:
                old.unlink(missing_ok=True)
            return None
        problems.append(f"{shlex.join(compiler)}: {problem}")
        new.unlink(missing_ok=True)
    return "\n".join(problems) or "no C compiler (cc, gcc, clang, or `pip install ziglang`)"


def _compile(compiler: list[str], files: list[Path], library: Path) -> str | None:
    """None when it worked, else what the compiler or the system says."""
    command = [*compiler, *FLAGS, *map(str, files), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
