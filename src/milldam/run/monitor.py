"""The memory of a process tree over time: sampled into `memory.csv`, with start, peak and final of each stage.

The file has a row a process and sample: `time,stage,pid,anonymous_bytes,file_bytes,name`. Every sample of the first
five minutes, then one for each 1/1,500 of the time that has passed, and each that is higher than all before: a day is
about 10,000 samples. It can be cut off anywhere and is still readable. Holds no history in memory.

A sample is taken five times a second; less often where that would cost more than about 2 % of a core. What a forked
worker shares with the process that forked it is left out of what it holds; since the kernel walks all pages for that,
one worker is looked at again at each sample. Without /proc, psutil is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

from milldam.memory import FORKED, Usage, process_tree, shared_bytes, usage

SAMPLE_SECONDS = 0.2
HEADER = "time,stage,pid,anonymous_bytes,file_bytes,name\n"
_FIRST_WAIT = 0.005
_SHARE_OF_CORE = 50
_SHARE_OF_TIME = 1500
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
    """Anonymous memory of the tree while one stage ran."""

    start: int
    peak: int
    final: int


class Monitor:
    """Samples this process and those below it from a thread of its own; use it as a context manager.

    Of processes on other machines it knows what is noted; a row's pid is then `machine:pid`. The budget holds for each
    machine: what counts is the one that holds most. `here`: what notes call this machine. A cluster may run below this
    process then: its workers tell of themselves, and what else it takes is not ours.
    """

    def __init__(self, timeline: Path, *, stage: str = "start", here: str = "") -> None:
        self.stage, self._here = stage, here
        self.now = Usage()
        self._peak = self._peak_file = 0
        self._machines: dict[str, int] = {}
        self._stages: dict[str, _Stage] = {}
        self._shared: dict[int, int] = {}
        """Of forked workers, those first that were not looked at for longest."""
        self._elsewhere: dict[tuple[str, int], tuple[float, int, int]] = {}
        """(machine, process) -> (when it told, what it holds, the most that it held since the last sample)."""
        self._file = timeline.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write(HEADER)
        self._started, self._written = time.monotonic(), -1.0
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
        with contextlib.suppress(OSError):
            self._file.close()

    def enter_stage(self, stage: str) -> None:
        """Book what follows under another stage."""
        self.sample(last=True)
        self.stage = stage
        self.sample(last=True)

    def restart(self) -> None:
        """Forget the timeline of what was here before."""
        with self._lock, contextlib.suppress(OSError):
            self._file.truncate(0)
            self._write(HEADER)

    def note(self, machine: str, pid: int, anonymous: int) -> None:
        """A process on a machine of a cluster told what it holds; 0: it has ended."""
        with self._lock:
            _, _, peak = self._elsewhere.pop((machine, pid), (0.0, 0, 0))
            if anonymous:
                self._elsewhere[machine, pid] = time.monotonic(), anonymous, max(peak, anonymous)

    def sample(self, *, last: bool = False) -> Usage:
        """Measure the tree once, now. `last`: of a stage, and so written down whatever was written before."""
        with self._lock:
            rows = self._read()
            here = sum((use for _, use, _ in rows), Usage())
            silent = time.monotonic() - _SILENT_SECONDS
            lately = {who: told for who, told in self._elsewhere.items() if told[0] > silent}
            self._elsewhere = {who: (told, now, now) for who, (told, now, _) in lately.items()}
            totals = {machine: here.anonymous for machine, _ in lately if machine == self._here}
            for (machine, pid), (_, _, peak) in lately.items():
                totals[machine] = totals.get(machine, 0) + peak
                rows.append((f"{machine}:{pid}", Usage(peak), ""))
            for machine, total in totals.items():
                self._machines[machine] = max(self._machines.get(machine, 0), total)
            self.now = Usage(max(here.anonymous, *totals.values(), 0), here.file)
            self._book(rows, last)
            return self.now

    def _book(self, rows: list[tuple[str, Usage, str]], last: bool) -> None:
        held = self.now.anonymous
        stage = self._stages.setdefault(self.stage, _Stage(held, held, held))
        stage.final, stage.peak = held, max(stage.peak, held)
        elapsed = time.monotonic() - self._started
        if last or held > self._peak or elapsed - self._written >= elapsed / _SHARE_OF_TIME:
            now, self._written = time.time(), elapsed
            self._write(
                "".join(f"{now:.2f},{self.stage},{pid},{u.anonymous},{u.file},{name}\n" for pid, u, name in rows)
            )
        self._peak, self._peak_file = max(self._peak, held), max(self._peak_file, self.now.file)

    def _read(self) -> list[tuple[str, Usage, str]]:
        """(process, what it holds, its name) of each that is still there."""
        rows = []
        for pid in [os.getpid()] if self._here else process_tree():
            use, name = usage(pid), _name_of(pid)
            if not use.anonymous:
                continue  # ended
            if name == FORKED:
                shared = self._shared.setdefault(pid, 0) or self._shared_now(pid)
                use = Usage(max(0, use.anonymous - shared), use.file)
            rows.append((str(pid), use, name))
        if self._shared:
            # Workers write to what they share, which makes it their own.
            self._shared_now(next(iter(self._shared)))
        return rows

    def _shared_now(self, pid: int) -> int:
        """What a worker shares now, looked up; one that has ended is forgotten."""
        del self._shared[pid]
        shared = shared_bytes(pid)
        if shared:
            self._shared[pid] = shared
        return shared

    def _watch(self) -> None:
        """Few waits at the start, for brief runs; then five samples a second, or fewer where they are dear."""
        wait, cost = _FIRST_WAIT, 0.0
        while not self._stop.wait(max(wait, cost * _SHARE_OF_CORE if wait >= SAMPLE_SECONDS else 0.0)):
            began = time.thread_time()
            self.sample()
            cost = 0.8 * cost + 0.2 * (time.thread_time() - began)
            wait = min(wait * 1.25, SAMPLE_SECONDS)

    def _write(self, text: str) -> None:
        """A full disk ends neither the watch nor the work, which will tell of it."""
        with contextlib.suppress(OSError):
            self._file.write(text)
            self._file.flush()

    def use(self, budget_bytes: int) -> MemoryUse:
        """What was measured, of a budget."""
        use: MemoryUse = {
            "start": next(iter(self._stages.values())).start,
            "peak": self._peak,
            "final": self.now.anonymous,
            "peak_file_backed": self._peak_file,
            "stages": {name: {"start": s.start, "peak": s.peak, "final": s.final} for name, s in self._stages.items()},
            "budget": budget_bytes,
        }
        if self._machines:
            use["machines"] = dict(sorted(self._machines.items()))
        return use


def _name_of(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""
    return re.sub(r"[^\w./-]", "?", name)
