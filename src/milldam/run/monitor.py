"""The memory of a process tree over time: sampled into `memory.csv`, with start, peak and final of each stage.

The file has a row a process and sample: `time,stage,pid,anonymous_bytes,file_bytes,name`. Every sample of the first
five minutes, then one for each 1/1,500 of the time that has passed, the highest since the one before: a day is about
10,000 samples, and the peak is always among them. It can be cut off anywhere and is still readable. Holds no history
in memory.
A sample that takes longer than a fiftieth of the interval makes the interval longer, so that the cost stays under
about 2 % of a core.

A process belongs to the tree once its parent does, and stays in it when that parent ends. A look costs a listing of
/proc, a file for each new process of the machine, and a file for each process of the tree. What a forked worker shares
with the process that forked it is left out of what it holds; since the kernel walks all pages for that, it is looked at
for a few workers at a time.
Without /proc, psutil is asked: then all resident memory counts as anonymous.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NotRequired, TypedDict

from milldam.memory import FORKED, Usage, process_tree, shared_bytes, usage

_HAS_PROC = Path("/proc/self/status").exists()
_STATUS = re.compile(rb"^(Name|Rss\w+):\s+(.*)$", re.MULTILINE)
_INTERPRETERS = re.compile(r"python|pypy|ruby|perl|node|bash|^sh$|zsh|dash|java|milldam|pt_")
_NAME_CHARACTERS = 48
_NAME_LOOKS = 3
_SHARED_SECONDS = 0.002
"""To spend at each look on what forked workers share."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a process holds now."""

    pid: int
    name: str
    use: Usage


class ProcessTree:
    """The processes below a root, looked up again and again. Holds a number for each process of the machine."""

    def __init__(self, root: int, *, alone: bool = False) -> None:
        """`alone`: without what is below it."""
        self._root, self._members, self._alone = root, {root}, alone
        self._strangers: set[int] = set()
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
        return [found for pid in sorted(self._members) if (found := self._reading(pid)) is not None]

    def _look(self) -> None:
        present = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._members &= present
        self._strangers &= present
        for pid in self._names.keys() - self._members:
            del self._names[pid]
            self._shared.pop(pid, None)
        parents = {pid: _parent(pid) for pid in present - self._members - self._strangers}
        while found := {pid for pid, parent in parents.items() if parent in self._members}:
            self._members |= found
            for pid in found:
                del parents[pid]
        # One whose parent has just ended may still turn out to be ours: it is looked at again.
        self._strangers |= {pid for pid, parent in parents.items() if parent == 0 or parent in present}

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
        return Reading(pid, self._name(pid, found[b"Name"]), use)

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
        elif Path(script).name not in ("", name):  # a script may give the process its own name
            name += f" {Path(script).name}"
    printable = "".join(letter if letter.isprintable() and letter != "," else "?" for letter in name)
    return printable[:_NAME_CHARACTERS]


def _read_without_proc(pid: int) -> Reading | None:
    import psutil

    with contextlib.suppress(psutil.Error):
        return Reading(pid, name_of([], psutil.Process(pid).name()), usage(pid))
    return None


SAMPLE_SECONDS = 0.2
HEADER = "time,stage,pid,anonymous_bytes,file_bytes,name\n"
_FIRST_WAIT = 0.005
_SHARE_OF_CORE = 50
_WHOLE_SECONDS, _SHARE_OF_TIME = 300.0, 1500
_SILENT_SECONDS = 5.0
"""After so long without a word, a process on another machine is taken to be gone."""


class MemoryUse(TypedDict):
    """Bytes of anonymous memory of the whole process tree; of several machines, the one that held most."""

    start: int
    peak: int
    final: int
    peak_file_backed: int
    """Beside these, and not counted against the budget."""
    stages: dict[str, dict[str, int]]
    """Start, peak and final of each stage."""
    budget: int
    machines: NotRequired[dict[str, int]]
    """The peak of each machine, where there are several."""


@dataclass(slots=True)
class _Stage:
    """Memory of the tree while one stage ran."""

    start: Usage
    peak: Usage
    final: Usage


@dataclass(frozen=True, slots=True)
class _Noted:
    """What a process elsewhere told."""

    time: float
    now: int
    peak: int
    """Since the last sample."""


class Monitor:
    """Samples a tree from a thread of its own; use it as a context manager.

    Of processes that are not in the tree it knows what is noted; a row's pid is then `machine:pid`. The budget holds
    for each machine: what counts is the one that holds most.
    """

    def __init__(
        self,
        timeline: Path,
        *,
        stage: str = "start",
        here: str = "",
    ) -> None:
        """`here`: what notes call this machine; its own process counts there, and what is below it tells of itself."""
        self.stage = stage
        self.now = self.peak = Usage()
        self.machines: dict[str, int] = {}
        """Peak of anonymous memory on each machine of which something is noted."""
        self._here = here
        # A cluster may run below this process: its workers tell of themselves, and what else it takes is not ours.
        self._tree = ProcessTree(os.getpid(), alone=bool(here))
        self._stages: dict[str, _Stage] = {}
        self._elsewhere: dict[tuple[str, int], _Noted] = {}
        self._timeline = _Timeline(timeline)
        self._cost = 0.0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="milldam-monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample(last=True)
        self._timeline.close()

    def enter_stage(self, stage: str) -> None:
        """Book what follows under another stage."""
        self.sample(last=True)
        self.stage = stage
        self.sample()

    def restart(self) -> None:
        """Forget the timeline of what was here before; keep what this one has measured."""
        with self._lock:
            self._timeline.restart()

    def note(self, machine: str, pid: int, anonymous: int) -> None:
        """A process that is not of this tree told what it holds; 0: it has ended."""
        with self._lock:
            before = self._elsewhere.pop((machine, pid), None)
            if anonymous:
                # Between two samples the largest counts.
                peak = max(anonymous, before.peak if before is not None else 0)
                self._elsewhere[machine, pid] = _Noted(time.monotonic(), anonymous, peak)

    def sample(self, *, last: bool = False) -> Usage:
        """Measure the tree once, now. `last`: of a stage, and so written down at once."""
        with self._lock:
            began = time.thread_time()
            readings, elsewhere = self._tree.read(), self._heard_of()
            if readings or elsewhere or not self._stages:  # at the very end nothing is left to see: what was, stays
                self.now = self._largest_machine(sum((one.use for one in readings), Usage()), elsewhere)
                booked = self._stages.setdefault(self.stage, _Stage(self.now, self.now, self.now))
                booked.final = self.now
                booked.peak = _larger(booked.peak, self.now)
                self.peak = _larger(self.peak, self.now)
                rows = [(str(one.pid), one.use, one.name) for one in readings]
                rows += [(f"{machine}:{pid}", one, "") for (machine, pid), one in elsewhere.items()]
                self._timeline.add(self.stage, self.now.anonymous, rows, last=last)
            cost = time.thread_time() - began
            self._cost = 0.8 * self._cost + 0.2 * cost if self._cost else cost
            return self.now

    def _heard_of(self) -> dict[tuple[str, int], Usage]:
        """Processes elsewhere that told something lately."""
        silent = time.monotonic() - _SILENT_SECONDS
        lately = {who: noted for who, noted in self._elsewhere.items() if noted.time > silent}
        self._elsewhere = {who: replace(noted, peak=noted.now) for who, noted in lately.items()}
        return {who: Usage(noted.peak) for who, noted in lately.items()}

    def _largest_machine(self, here: Usage, elsewhere: dict[tuple[str, int], Usage]) -> Usage:
        totals: dict[str, Usage] = {}
        for (machine, _), one in elsewhere.items():
            # What this process holds is on one of the machines.
            totals[machine] = totals.get(machine, here if machine == self._here else Usage()) + one
        for machine, total in totals.items():
            self.machines[machine] = max(self.machines.get(machine, 0), total.anonymous)
        return max((here, *totals.values()), key=lambda total: total.anonymous)

    def _watch(self) -> None:
        for seconds in self._waits():
            if self._stop.wait(seconds):
                return
            self.sample()

    def _waits(self) -> Iterator[float]:
        """Seconds to the next sample: few at the start, for brief runs; then five a second; fewer when it is dear."""
        wait = min(_FIRST_WAIT, SAMPLE_SECONDS)
        while True:
            yield max(wait, self._cost * _SHARE_OF_CORE if wait >= SAMPLE_SECONDS else 0.0)
            wait = min(wait * 1.25, SAMPLE_SECONDS)

    def use(self, budget_bytes: int) -> MemoryUse:
        """What was measured, of a budget."""
        use: MemoryUse = {
            "start": next(iter(self._stages.values())).start.anonymous,
            "peak": self.peak.anonymous,
            "final": self.now.anonymous,
            "peak_file_backed": self.peak.file,
            "stages": {
                name: {"start": s.start.anonymous, "peak": s.peak.anonymous, "final": s.final.anonymous}
                for name, s in self._stages.items()
            },
            "budget": budget_bytes,
        }
        if self.machines:
            use["machines"] = dict(sorted(self.machines.items()))
        return use


def _larger(one: Usage, other: Usage) -> Usage:
    return Usage(max(one.anonymous, other.anonymous), max(one.file, other.file))


class _Timeline:
    """Writes the file; holds one sample. A full disk ends neither the watch nor the work, which will tell of it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write(HEADER)
        self._begun = path.stat().st_size
        self._started, self._written = time.monotonic(), 0.0
        self._highest = (-1, "")

    def add(self, stage: str, total: int, rows: Sequence[tuple[str, Usage, str]], *, last: bool) -> None:
        if total >= self._highest[0]:
            now = time.time()
            lines = (f"{now:.2f},{stage},{pid},{use.anonymous},{use.file},{name}\n" for pid, use, name in rows)
            self._highest = (total, "".join(lines))
        elapsed = time.monotonic() - self._started
        if last or elapsed < _WHOLE_SECONDS or elapsed - self._written >= elapsed / _SHARE_OF_TIME:
            self._write(self._highest[1])
            self._highest, self._written = (-1, ""), elapsed

    def restart(self) -> None:
        with contextlib.suppress(OSError):
            kept = self._path.read_bytes()[self._begun :].decode()
            self._file.truncate(0)
            self._write(HEADER + kept)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
