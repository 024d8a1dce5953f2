"""Memory: how much there is, how much we may use, how much is used.

`Budget` is the limit for the whole process tree: given, or half of what the cgroup or the machine
leaves. How it is kept to is measured in run/monitor.py.

What counts against the budget is anonymous and shared memory: what the kernel can't take back.
File-backed pages (memory-mapped files, libraries) are clean, are reclaimed at will, and are reported apart.
What forked workers share with the process that forked them counts once; any other page that two processes share
counts twice, so the figures err on the safe side.

pyarrow without pandas, until somebody wants pandas.

For the first array of Python values, pyarrow loads pandas where it is installed: 40 MB in every process, for nothing.
In processes of milldam's own, `keep_arrow_lean` lets it find that there is none. When a user's function imports pandas
itself, pyarrow is told at once, and treats pandas' types as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.machinery
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

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
    """What could still be allocated, and what sets that limit: the machine or a cgroup."""
    machine = _machine_available()
    limits = [(machine, "on this machine")]
    limits += [(max(0, limit - used), "in the memory cgroup") for limit, used in _cgroup_limits()]
    given = os.environ.get("SLURM_MEM_PER_NODE", "")
    if given.isdigit() and int(given):
        # Told also where no cgroup holds the task to it. In units of 2**20 bytes.
        limits.append((max(0, int(given) * 2**20 - usage().anonymous), "Slurm"))
    return min(limits)


def _machine_available() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)


def _cgroup_limits(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[tuple[int, int]]:
    """(limit, use that can't be reclaimed) of every memory cgroup above this process, v1 and v2."""
    found: list[tuple[int, int]] = []
    if not proc.exists():
        return found
    for line in proc.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for base in (root, root / "unified"):
                found += _walk_up(base, path, "memory.max", "anon")
        elif "memory" in controllers.split(","):
            found += _walk_up(root / "memory", path, "memory.limit_in_bytes", "total_rss")
    return found


def _walk_up(base: Path, path: str, limit_name: str, used_key: str) -> list[tuple[int, int]]:
    found = []
    folder = base / path.lstrip("/")
    # Inside a container the path may belong to the host's tree: then only the mounted root is visible.
    if not folder.exists():
        folder = base
    while folder == base or base in folder.parents:
        limit = _read_word(folder / limit_name)
        if limit is not None and limit.isdigit() and int(limit) < 2**60:
            found.append((int(limit), _stat_value(folder / "memory.stat", used_key)))
        folder = folder.parent
    return found


def _read_word(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _stat_value(path: Path, key: str) -> int:
    for line in (_read_word(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


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
        return _usage_without_proc(pid)
    kilobytes = {name: int(value) for name, value in re.findall(rb"Rss(\w+):\s+(\d+)", status)}
    anonymous = kilobytes.get(b"Anon", 0) + kilobytes.get(b"Shmem", 0)
    return Usage(anonymous * 1024, kilobytes.get(b"File", 0) * 1024)


def _usage_without_proc(pid: int | str) -> Usage:
    """Where there is no /proc: resident memory, counted whole as anonymous."""
    if Path("/proc/self").exists():
        return Usage()
    import psutil

    try:
        return Usage(int(psutil.Process(None if pid == "self" else int(pid)).memory_info().rss))
    except psutil.Error:
        return Usage()


_START_TIME = 19
"""Position of the start time among the fields of /proc/PID/stat that follow the process's name."""


def process_identity(pid: int) -> str:
    """A process's number and start time, since numbers are used again; empty when there is no such process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        import psutil  # for systems without /proc

        try:
            return f"{pid}.{psutil.Process(pid).create_time()}"
        except psutil.Error:
            return ""
    # The second field, in brackets, may hold anything.
    return f"{pid}.{status.rpartition(')')[2].split()[_START_TIME]}"


def pid_of(process: str) -> int:
    return int(process.partition(".")[0])


def is_alive(process: str) -> bool:
    """Whether a process of this machine, by its identity, is still there."""
    return process_identity(pid_of(process)) == process


FORKED = "milldam-worker"
"""The name, as the kernel has it, of a process that shares memory with the one that forked it."""
_PR_SET_NAME = 15
_STAYS_SHARED = 0.75
"""Of what a worker inherits, the part that it does not write to, at most; of a tokenizer and its imports it is 0.8."""
_SHARED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Inherited:
    """What forked workers have in common: each got it from the process that forked them, without a copy of its own."""

    anonymous: int = 0
    workers: int = 1

    def allowance(self, share_bytes: int, shared_bytes: int) -> int:
        """What a worker may hold by the count of `usage`, of which `shared_bytes` are shared, when each has a share.

        What was inherited counts once for all of them; what a worker writes to becomes its own.

        >>> Inherited(80, workers=4).allowance(100, 60), Inherited().allowance(100, 0)
        (140, 100)
        """
        return share_bytes - self.anonymous // self.workers + shared_bytes


class _Inheritance:
    """This process's own."""

    def __init__(self) -> None:
        self.all = Inherited()
        self._shared = 0
        self._looked = -_SHARED_SECONDS

    def shared(self) -> int:
        if not self.all.anonymous:
            return 0
        now = time.monotonic()
        if now - self._looked >= _SHARED_SECONDS:
            self._looked, self._shared = now, shared_bytes()
        return min(self._shared, stays_shared(self.all.anonymous))


def stays_shared(inherited_bytes: int) -> int:
    """Of what a worker inherits, the most that can be relied upon to stay shared."""
    return int(_STAYS_SHARED * inherited_bytes)


_inheritance = _Inheritance()


def inherit(inherited: Inherited) -> None:
    """Take note, in a process that was forked, of what it has in common with others; they see it by its name."""
    _inheritance.all = inherited
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_NAME, FORKED.encode(), 0, 0, 0)


def inherited() -> tuple[int, int]:
    """(what this process got when it was forked, what of that it still shares and is likely to); looked up seldom."""
    return _inheritance.all.anonymous, _inheritance.shared()


def held_bytes() -> int:
    """What this process holds, and what it has made the one that forked it hold besides: copies of what it changed."""
    got, shared = inherited()
    return usage().anonymous + got - shared


def allowance(share_bytes: int) -> int:
    """What this process may hold by the count of `usage` when its share of the budget is so large."""
    return _inheritance.all.allowance(share_bytes, _inheritance.shared())


def shared_bytes(pid: int | str = "self") -> int:
    """Of the anonymous memory of a process, what others have, too. The kernel walks its pages: 1 ms for 100 MB."""
    try:
        found = dict(re.findall(rb"^(\w+):\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_bytes(), re.MULTILINE))
    except OSError:
        return 0
    anonymous, dirty, all_dirty, part = (
        int(found.get(name, 0)) for name in (b"Anonymous", b"Private_Dirty", b"Pss_Dirty", b"Pss_Anon")
    )
    # Pages of a mapped file that was just written are dirty, too. Kernels before 6.0 do not tell them apart.
    files = all_dirty - part if all_dirty else 0
    return 1024 * max(0, anonymous - max(0, dirty - files))


def process_tree(root: int | None = None) -> list[int]:
    """A process, this one unless said otherwise, and all its descendants."""
    import psutil

    root = os.getpid() if root is None else root
    try:
        return [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    except psutil.Error:
        return [root]


class _MallocInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    )  # fmt: skip


def _load_mallinfo() -> Callable[[], Any] | None:
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _MallocInfo
    return mallinfo2


_mallinfo = _load_mallinfo()


def allocated() -> int | None:
    """Bytes that malloc has handed out in this process; what it keeps is not in them. None: it does not tell."""
    if _mallinfo is None:
        return None
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


def _load_malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL("libc.so.6").malloc_trim
    except (OSError, AttributeError):
        return None


_malloc_trim = _load_malloc_trim()


def release() -> None:
    """Give freed memory back to the kernel: what the allocators keep counts against the budget."""
    if "pyarrow" in sys.modules:
        import pyarrow

        pyarrow.default_memory_pool().release_unused()
    if _malloc_trim is not None:
        _malloc_trim(0)


# ---- pyarrow without pandas ----


class _Finder:
    """Stands before the finder of pandas."""

    def __init__(self) -> None:
        self.hidden = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "pandas":
            return None
        if self.hidden:
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
    finder.hidden = True
    try:
        pyarrow.array([0])
    finally:
        finder.hidden = False
