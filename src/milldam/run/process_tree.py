"""Which processes belong to a tree, and what each of them holds.

A process belongs to the tree once its parent does, and stays in it when that parent ends. With `adopting`, processes
that lost their parents come to us (PR_SET_CHILD_SUBREAPER), so that none gets away between two looks, not even one that
began a session of its own. A look costs a listing of /proc, a file for each new process of the machine, and a file
for each process of the tree. What a forked worker shares with the process that forked it is left out of what it holds;
since the kernel walks all pages for that, it is looked at for a few workers at a time.
Without /proc, psutil is asked: then all resident memory counts as anonymous.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milldam.memory import FORKED, Usage, process_tree, shared_bytes, usage

_HAS_PROC = Path("/proc/self/status").exists()
_STATUS = re.compile(rb"^(Name|VmHWM|Rss\w+):\s+(.*)$", re.MULTILINE)
_ROLLUP = re.compile(rb"^(Pss_Anon|Pss_Shmem|Pss_File):\s+(\d+)", re.MULTILINE)
_INTERPRETERS = re.compile(r"python|pypy|ruby|perl|node|bash|^sh$|zsh|dash|java|milldam|pt_")
_NAME_CHARACTERS = 48
_NAME_LOOKS = 3
_SHARED_SECONDS = 0.002
"""To spend at each look on what forked workers share."""
_SET_CHILD_SUBREAPER, _GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process holds now."""

    pid: int
    name: str
    use: Usage
    resident_peak: int = 0
    """The most it ever had resident, file-backed too, by the kernel's own count: no spike is missed."""


class ProcessTree:
    """The processes below a root, looked up again and again. Holds a number for each process of the machine."""

    def __init__(
        self, root: int, *, alone: bool = False, adopting: bool = False, strangers: frozenset[int] = frozenset()
    ) -> None:
        """`alone`: without what is below it. `strangers`: what ran before the root and is none of its processes."""
        self._root, self._members, self._alone = root, {root}, alone
        self._adopting = os.getpid() if adopting else None
        self._strangers = set(strangers) - {root}
        self._names: dict[int, tuple[bytes, str, int]] = {}
        self._shared: dict[int, int] = {}
        """Of forked workers, those first that were not looked at for longest."""

    def read(self) -> list[Reading]:
        """What each process holds; those that have ended are left out."""
        if not _HAS_PROC:
            pids = [self._root] if self._alone else process_tree(self._root)
            return [found for pid in pids if (found := _read_without_proc(pid)) is not None]
        if not self._alone:
            self._look()
        self._look_at_shared()
        readings = [found for pid in sorted(self._members) if (found := self._reading(pid)) is not None]
        for pid in self._members - {self._root, *(one.pid for one in readings)}:
            # Ended, and its parent before it: nobody but us takes note of it.
            if self._adopting is not None and _parent(pid) == self._adopting:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return readings

    def count_once(self) -> Usage | None:
        """Memory with each page counted once, however many processes share it; None where nobody tells.

        The kernel walks all pages for it: about a second for 100 GB.
        """
        total = Usage()
        for pid in tuple(self._members):
            with contextlib.suppress(OSError):
                found = {name: int(n) for name, n in _ROLLUP.findall(Path(f"/proc/{pid}/smaps_rollup").read_bytes())}
                anonymous = found.get(b"Pss_Anon", 0) + found.get(b"Pss_Shmem", 0)
                total += Usage(1024 * anonymous, 1024 * found.get(b"Pss_File", 0))
        return total if total.anonymous + total.file else None

    def _look(self) -> None:
        present = listed()
        self._members &= present
        self._strangers &= present
        for pid in self._names.keys() - self._members:
            del self._names[pid]
            self._shared.pop(pid, None)
        parents = {pid: _parent(pid) for pid in present - self._members - self._strangers}
        while found := {pid for pid, parent in parents.items() if self._is_ours(parent)}:
            self._members |= found
            for pid in found:
                del parents[pid]
        # One whose parent has just ended may still turn out to be ours: it is looked at again.
        self._strangers |= {pid for pid, parent in parents.items() if parent == 0 or parent in present}

    def _is_ours(self, parent: int | None) -> bool:
        return parent is not None and (parent in self._members or parent == self._adopting)

    def _reading(self, pid: int) -> Reading | None:
        try:
            with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
                found = dict(_STATUS.findall(file.read(8192)))
        except OSError:
            return None
        if b"RssAnon" not in found:
            return None  # ended, and not taken note of yet
        sizes = {key: int(value.split()[0]) * 1024 for key, value in found.items() if key != b"Name"}
        shared = self._shared_by(pid) if found[b"Name"] == FORKED.encode() else 0
        anonymous = max(0, sizes[b"RssAnon"] - shared) + sizes.get(b"RssShmem", 0)
        use = Usage(anonymous, sizes.get(b"RssFile", 0))
        return Reading(pid, self._name(pid, found[b"Name"]), use, sizes.get(b"VmHWM", 0))

    def _shared_by(self, pid: int) -> int:
        if pid not in self._shared:
            self._shared[pid] = shared_bytes(pid)
        return self._shared[pid]

    def _look_at_shared(self) -> None:
        """Workers write to what they share, which makes it their own: look at some of them again."""
        until = time.monotonic() + _SHARED_SECONDS
        for pid in tuple(self._shared):
            del self._shared[pid]
            self._shared[pid] = shared_bytes(pid)
            if time.monotonic() > until:
                return

    def _name(self, pid: int, kernel_name: bytes) -> str:
        """The command's name, read again when the process became another program.

        The first looks may fall between a fork and what follows it, when it still has its parent's words or none.
        """
        before, name, looks = self._names.get(pid, (b"", "", 0))
        if before != kernel_name or looks < _NAME_LOOKS:
            name = _describe(pid, kernel_name.decode(errors="replace"))
            self._names[pid] = (kernel_name, name, looks + 1 if before == kernel_name else 1)
        return name


def listed() -> set[int]:
    """Every process of the machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} if _HAS_PROC else set()


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name, in parentheses, may hold anything.
            return int(file.read(4096).rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _describe(pid: int, kernel_name: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].decode(errors="replace").split("\0")
    except OSError:
        words = []
    return name_of([word for word in words if word], kernel_name)


def name_of(words: list[str], kernel_name: str) -> str:
    """A process in a few words: its program, and of an interpreter what it runs.

    >>> name_of(["/usr/bin/python3", "-u", "train.py", "--lr", "1"], "python3")
    'python3 train.py'
    >>> name_of(["python", "-m", "pytest", "-x"], "python"), name_of(["/usr/bin/gzip", "-9", "a"], "gzip")
    ('python -m pytest', 'gzip')
    """
    name = kernel_name
    if name == FORKED:
        return name
    if words and _INTERPRETERS.search(kernel_name):
        flag = next((k for k, word in enumerate(words) if word == "-m" and k + 1 < len(words)), None)
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        if "multiprocessing" in " ".join(words[1:4]):
            name += " (multiprocessing)"
        elif flag is not None:
            name += f" -m {words[flag + 1]}"
        elif "-c" in words[1:]:
            name += " -c"
        elif script:
            name += f" {Path(script).name}"
    printable = "".join(letter if letter.isprintable() and letter != "," else "?" for letter in name)
    return printable[:_NAME_CHARACTERS]


def _read_without_proc(pid: int) -> Reading | None:
    import psutil

    with contextlib.suppress(psutil.Error):
        return Reading(pid, name_of([], psutil.Process(pid).name()), usage(pid))
    return None


@contextmanager
def adopting_orphans() -> Iterator[bool]:
    """While it lasts, processes below us that lose their parent become our children; False where that can't be."""
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError, TypeError):
        yield False
        return
    before = ctypes.c_int(0)
    known = prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) == 0
    adopting = known and prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        yield adopting
    finally:
        if adopting:
            prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
