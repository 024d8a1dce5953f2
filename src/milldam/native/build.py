"""The C files of this folder -> one shared library beside them, where the machine has a compiler.

Used by the build (`hatch_build.py`), and by `make` when a C file changed. The compiler is the first that works:
`$CC`, cc, gcc, clang, or the one of the package ziglang. Needs nothing but Python.
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
LIBRARY = FOLDER / "kernels.so"
OFF = "MILLDAM_WITHOUT_KERNELS"
FLAGS = ["-O3", "-std=c11", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror"]


def sources() -> list[Path]:
    """The C files and their headers, in order."""
    return sorted(FOLDER.glob("*.[ch]"))


def digest() -> str:
    """A hash of the C files: the library has that of those it was made from, so that a stale one is noticed."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources())).hexdigest()[:16]


def unwanted() -> bool:
    """Whether the user wants neither to compile nor to use them."""
    return os.environ.get(OFF, "").strip().lower() in ("1", "true", "yes", "on")


def compilers() -> list[list[str]]:
    """The commands that may compile C here, best first."""
    found = [_words(os.environ["CC"])] if os.environ.get("CC", "").strip() else []
    found += [[name] for name in ("cc", "gcc", "clang") if shutil.which(name)]
    return [*found, [sys.executable, "-m", "ziglang", "cc", "-mcpu=baseline"]] if find_spec("ziglang") else found


def can_compile() -> bool:
    """Whether one of the compilers works: one without its headers or its linker does not."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "try.c")
        source.write_text("#include <stdint.h>\n#include <string.h>\nint64_t tried(void) { return 1; }\n")
        return any(_compile(one, [source], Path(folder, "try.so")) is None for one in compilers())


def build() -> str | None:
    """Make the library; None when it is there, else what went wrong."""
    # A process may have the old library mapped: a new file takes its name.
    new = LIBRARY.with_suffix(f".{os.getpid()}.so")
    problems = []
    for compiler in compilers():
        problem = _compile([*compiler, f'-DMILLDAM_DIGEST="{digest()}"'], sources(), new)
        if problem is None:
            new.replace(LIBRARY)
            return None
        problems.append(f"{shlex.join(compiler)}: {problem}")
        new.unlink(missing_ok=True)
    return "\n".join(problems) or "no C compiler (cc, gcc, clang, or `pip install ziglang`)"


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:  # a quote without its second: there is no such program, which is said when it is called
        return [command]


def _compile(compiler: list[str], files: list[Path], library: Path) -> str | None:
    """None when it worked, else what the compiler or the system says."""
    command = [*compiler, *FLAGS, *(str(file) for file in files if file.suffix == ".c"), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
