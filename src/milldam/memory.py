"""Memory: how much there is, how much we may use, how much is used.

`Budget` is the limit for the whole process tree: the user's, or half of what the cgroup or the machine leaves. What
counts against it is anonymous and shared memory, which the kernel can't take back. File-backed pages (memory-mapped
files, libraries) are reclaimed at will, and reported separately. What forked processes share counts once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from milldam.errors import ConfigError, Setting

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str | int) -> int:
    """Bytes from a size as people write it.

    >>> parse_size("512MB"), parse_size("1.5GiB"), parse_size(4096)
    (512000000, 1610612736, 4096)
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([\d_]*\.?\d+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f'"{text}" is not a size. Write it as 512MB, 2GB or 1.5GiB.')
    return int(float(match[1].replace("_", "")) * _UNITS[match[2].upper()])


def format_size(size: float) -> str:
    """A size for people.

    >>> format_size(512_000_000), format_size(1_234), format_size(12)
    ('512 MB', '1.2 KB', '12 B')
    """
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if size >= scale:
            number = f"{size / scale:.1f}" if size < 100 * scale else f"{size / scale:.0f}"
            return f"{number.removesuffix('.0')} {unit}"
    return f"{int(size)} B"


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit in bytes for the anonymous and shared memory of the whole process tree.

    >>> milldam.Budget.of("512MB")
    Budget(limit_bytes=512000000, origin='given')
    """

    limit_bytes: int
    origin: str
    """Where the limit comes from, for the printed plan."""

    @classmethod
    def of(cls, memory: str | int | None, held_bytes: int = 0) -> Budget:
        """The budget from a user's setting; None means half of the free memory.

        `held_bytes`: what the calling program already holds, which is added to a given limit.
        """
        available, origin = available_bytes()
        if memory is not None:
            limit = parse_size(memory)
            if limit < 10**6 and str(memory).strip().isdecimal():
                what = f": {memory} is {memory} bytes; the unit is missing. Write {memory}MB or {memory}GB."
                raise ConfigError(Setting("memory"), what)
            beside = f", beside {format_size(held_bytes)} that this program holds" if held_bytes else ""
            more = f", more than the {format_size(available)} free {origin}" if limit > available else ""
            return cls(limit + held_bytes, f"given{more}{beside}")
        return cls(available // 2, f"half of the {format_size(available)} free {origin}")


def available_bytes() -> tuple[int, str]:
    """Bytes that could still be allocated, and the origin of that limit: the machine or a cgroup."""
    limits = [(_machine_available(), "on this machine")]
    limits += [(max(0, limit - used), "in the memory cgroup") for limit, used in _cgroup_limits()]
    slurm = os.environ.get("SLURM_MEM_PER_NODE", "")  # MiB; set even where no cgroup enforces it
    if slurm.isdigit() and int(slurm):
        limits.append((max(0, int(slurm) * 2**20 - usage().anonymous), "Slurm"))
    return min(limits)


def _machine_available() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+)", _content(Path("/proc/meminfo")), re.MULTILINE)
    if match is not None:
        return int(match[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _cgroup_limits(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, use that can't be reclaimed) of every memory cgroup above this process, v1 and v2."""
    limits = []
    for line in _content(proc).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            hierarchies = [(root, "memory.max", "anon"), (root / "unified", "memory.max", "anon")]
        elif "memory" in controllers.split(","):
            hierarchies = [(root / "memory", "memory.limit_in_bytes", "total_rss")]
        else:
            continue
        for base, limit_name, used_key in hierarchies:
            folder = base / path.lstrip("/")
            # Inside a container the path may belong to the host's tree: then only the mounted root is visible.
            folder = folder if folder.exists() else base
            while folder == base or base in folder.parents:
                limit = _content(folder / limit_name).strip()
                if limit.isdigit() and int(limit) < 2**60:
                    used = re.search(rf"^{used_key} (\d+)", _content(folder / "memory.stat"), re.MULTILINE)
                    limits.append((int(limit), int(used[1]) if used else 0))
                folder = folder.parent
    return limits


def _content(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of one process, or the sum over several."""

    anonymous: int = 0
    """Bytes the kernel can't drop: private anonymous and shared memory."""
    file: int = 0
    """Bytes of mapped files, which the kernel takes back at will."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.anonymous + other.anonymous, self.file + other.file)


def usage(pid: int | str = "self") -> Usage:
    """The memory of a process now; zero when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        if Path("/proc/self").exists():
            return Usage()
        import psutil  # where there is no /proc: resident memory, counted whole as anonymous

        try:
            return Usage(int(psutil.Process(None if pid == "self" else int(pid)).memory_info().rss))
        except psutil.Error:
            return Usage()
    kilobytes = {name: int(value) for name, value in re.findall(rb"Rss(\w+):\s+(\d+)", status)}
    anonymous = kilobytes.get(b"Anon", 0) + kilobytes.get(b"Shmem", 0)
    return Usage(anonymous * 1024, kilobytes.get(b"File", 0) * 1024)


forked = False
"""Whether this process has memory in common with the one that forked it; set by `run.fork`."""
_SHARED_SECONDS = 1.0
_shared = (-_SHARED_SECONDS, 0)
"""When it was looked up how much of this process's memory counts for others, and how much that is."""


def held_bytes() -> int:
    """Anonymous memory of this process; of what forked processes share, its part."""
    global _shared
    anonymous = usage().anonymous
    if forked and time.monotonic() - _shared[0] >= _SHARED_SECONDS:
        _shared = time.monotonic(), max(0, anonymous - proportional_bytes())
    return anonymous - _shared[1]


def proportional_bytes(pid: int | str = "self") -> int:
    """Anonymous memory of a process; of what several share, its part. The kernel walks its pages: 1 ms for 100 MB."""
    try:
        found = dict(re.findall(rb"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_bytes(), re.MULTILINE))
        return 1024 * (int(found[b"Pss_Anon"]) + int(found[b"Pss_Shmem"]))
    except (OSError, KeyError):  # gone, or another kernel
        return usage(pid).anonymous


def process_tree(root: int | None = None) -> list[int]:
    """A process, this one by default, and all its descendants."""
    pids = [os.getpid() if root is None else root]
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        import psutil

        with contextlib.suppress(psutil.Error):
            pids += [child.pid for child in psutil.Process(pids[0]).children(recursive=True)]
        return pids
    for pid in pids:  # which grows meanwhile
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                    pids += map(int, children.read().split())
    return pids


def release() -> None:
    """Give freed memory back to the kernel: what the allocators keep counts against the budget."""
    if "pyarrow" in sys.modules:
        import pyarrow

        pyarrow.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


# ---- pyarrow without pandas ----


class _Finder:
    """Stands before the finder of pandas: hides it at first, then tells pyarrow when somebody imports it."""

    is_hiding = True

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "pandas":
            return None
        if self.is_hiding:
            raise ModuleNotFoundError("No module named 'pandas'", name=name)
        sys.meta_path.remove(self)
        found = importlib.machinery.PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            load = found.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                import pyarrow

                # What needs pandas looks for it again.
                pyarrow.table({"a": [0]}).to_pandas()

            setattr(found.loader, "exec_module", load_and_tell)  # noqa: B010
        return found


own_process = False
"""Whether this process is the command line's, and no program's that uses milldam."""


def keep_arrow_lean() -> None:
    """For processes that are milldam's alone: it changes how every thread imports. Once is enough; where pandas or
    pyarrow's use of it is there already, it stays."""
    if "pandas" in sys.modules or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    import pyarrow

    finder = _Finder()
    sys.meta_path.insert(0, finder)
    pyarrow.array([0])
    finder.is_hiding = False
