"""The budget of a run: how many workers it holds, the smallest that works, and what was used over time.

`Monitor` samples a process tree into `memory.csv`, a row a sample: `time,stage,pid,anonymous_bytes,file_bytes`. It
keeps every sample of the first five minutes, then one for each 1/1,500 of the time that has passed, and each that is
higher than all before: a day is about 10,000 samples. The file can be cut off anywhere and is still readable. A sample
is taken five times a second; less often where that would cost more than about 2 % of a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from milldam.errors import ResourceError, Setting
from milldam.memory import Budget, Usage, format_size, process_tree, proportional_bytes, usage

# Measured (docs/log.md): a worker's imports, what batches on their way may take, a loaded tokenizer by its file's size.
WORKER_BYTES = 42 * 10**6
WORK_BYTES = 60 * 10**6
BATCHES_BYTES = 16 * 10**6
TABLE_BYTES = 34 * 10**6
"""gigatoken's cache of the words of half a gigabyte of text, without which it is still fast."""
TOKENIZER_FACTOR = 16
FILTER_BYTES, LANGUAGE_BYTES, FUNCTION_BYTES = 40 * 10**6, 85 * 10**6, 64 * 10**6
"""For text rules, the language model, and a function that gets whole documents, beside the rest."""
GROUPING_WORKER_BYTES, LEAST_GROUPING_BYTES = 60 * 10**6, 101 * 10**6
"""The process that groups hashes, and the least that grouping works with."""
_STAYS_SHARED = 0.75
"""Of what a worker inherits, the part that it does not write to, at least; of a tokenizer and its imports it is 0.8."""
SMALL_INPUT = 16 * 10**6
"""Bytes of input for which starting worker processes takes longer than the work."""


# ---- workers ----


@dataclass(frozen=True, slots=True)
class WorkPlan:
    """Workers and their shares, from the budget and the input."""

    budget: Budget
    units: int
    input_bytes: int
    shard_size: int
    workers: int
    threads: int
    share_bytes: int
    note: str = ""
    encoder: str = ""
    encoder_note: str = ""
    stages: tuple[str, ...] = ()
    left_out: str = ""
    """Files of the input's folders that are not read, and why."""
    done: int = 0
    """Units that were done before, where that is known."""
    conversations: str = ""
    """The form of the records, and how they become texts; empty: they are none."""
    text_columns: dict[str, str | None] = field(default_factory=dict)
    """The field that is read, by dataset; None: plain text."""
    preferred: str = ""
    """Which of near-duplicates stays, where a field decides."""
    changes: tuple[str, ...] = ()
    """Input files that are new, changed or gone since an earlier run."""


def fit_workers(
    budget: Budget, parent_bytes: int, loaded_bytes: int, wanted: int, *, own_bytes: int = 0, forked: bool = False
) -> int:
    """How many workers the budget holds, at most `wanted`; one works in this process.

    A worker loads `loaded_bytes`, which forked workers share but for what each writes to, and holds `own_bytes` beside
    what every worker holds. Raises ResourceError with the smallest budget that would do when it holds none.
    """
    require_room(budget, {"this job": least_bytes(parent_bytes, loaded_bytes + own_bytes)})
    loaded, own = WORKER_BYTES + loaded_bytes, own_bytes + WORK_BYTES
    left = budget.limit_bytes - parent_bytes
    several = (left - loaded) // (own + loaded - int(_STAYS_SHARED * loaded)) if forked else left // (own + loaded)
    return max(1, min(wanted, several))


def least_bytes(parent_bytes: int, loaded_bytes: int) -> int:
    """The least for a run in which this process does the work itself."""
    return max(parent_bytes, WORKER_BYTES) + loaded_bytes + WORK_BYTES


def least_grouping_bytes(parent_bytes: int) -> int:
    """The least for dedup that groups in a process of its own."""
    return parent_bytes + GROUPING_WORKER_BYTES + LEAST_GROUPING_BYTES


def require_room(budget: Budget, needed: Mapping[str, int], *, another_time: int = 0) -> None:
    """Raise ResourceError when a budget does not hold all of these, by name, one at a time; it names the largest.

    `another_time`: what the same job may take beside it when it runs again, so that the budget it names is enough then.
    """
    name, most = max(needed.items(), key=lambda one: one[1])
    if budget.limit_bytes < most:
        # A process does not weigh the same twice, so the budget it names is a little more.
        enough = Setting("memory", f"{(most + another_time) * 103 // 100 // 10**6 + 1}MB")
        limit = format_size(budget.limit_bytes)
        raise ResourceError(f"A budget of {limit} is too small for {name}: it takes at least ", enough, ".")


# ---- memory over time ----

_SAMPLE_SECONDS, _FIRST_SECONDS = 0.2, 0.005
_SHARE_OF_CORE, _SHARE_OF_TIME = 50, 1500
_SILENT_SECONDS = 5.0
"""A process on another machine that has not reported for so long is taken to be gone."""
_HEADER = "time,stage,pid,anonymous_bytes,file_bytes\n"


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


class Monitor:
    """Samples this process and those below it from a thread of its own; use it as a context manager.

    Of processes on other machines it knows what they reported last (`note`). The budget holds for each machine: what
    counts is the one that holds most. `here`: what notes call this machine. A cluster may run below this process then:
    its workers report for themselves, and what else it takes is not ours.
    """

    def __init__(self, timeline: Path, *, stage: str = "start", here: str = "") -> None:
        self.stage, self._here, self.now = stage, here, Usage()
        self._peak = Usage()
        self._machines: dict[str, int] = {}
        self._stages: dict[str, dict[str, int]] = {}
        self._elsewhere: dict[tuple[str, int], tuple[float, int]] = {}
        """(machine, process) -> (when it reported, what it held)."""
        self._file = timeline.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write(_HEADER)
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
            self._write(_HEADER)

    def note(self, machine: str, pid: int, anonymous: int) -> None:
        """Note what a process on a machine of a cluster holds; 0: it has ended."""
        with self._lock:
            self._elsewhere[machine, pid] = time.monotonic() if anonymous else -1.0, anonymous

    def sample(self, *, last: bool = False) -> Usage:
        """Measure the tree once, now. `last`: of a stage, and so always written down."""
        with self._lock:
            pids = [os.getpid()] if self._here else process_tree()
            here = sum(map(usage, pids), Usage())
            if len(pids) > 1:  # of what forked processes share, each has its part
                here = Usage(sum(map(proportional_bytes, pids)), here.file)
            silent = time.monotonic() - _SILENT_SECONDS
            self._elsewhere = {who: one for who, one in self._elsewhere.items() if one[0] > silent}
            totals = Counter({self._here: here.anonymous}) if self._elsewhere else Counter[str]()
            for (machine, _), (_, held) in self._elsewhere.items():
                totals[machine] += held
            for machine in totals.keys() - {""}:
                self._machines[machine] = max(self._machines.get(machine, 0), totals[machine])
            self.now = Usage(max(here.anonymous, *totals.values(), 0), here.file)
            held = self.now.anonymous
            stage = self._stages.setdefault(self.stage, {"start": held, "peak": held, "final": held})
            stage |= {"peak": max(stage["peak"], held), "final": held}
            elapsed = time.monotonic() - self._started
            if last or held > self._peak.anonymous or elapsed - self._written >= elapsed / _SHARE_OF_TIME:
                self._written = elapsed
                self._write(f"{time.time():.2f},{self.stage},{os.getpid()},{held},{self.now.file}\n")
            self._peak = Usage(max(self._peak.anonymous, held), max(self._peak.file, self.now.file))
            return self.now

    def _watch(self) -> None:
        """Short intervals at the start, for brief runs; then five samples a second, fewer when they are expensive."""
        wait, cost = _FIRST_SECONDS, 0.0
        while not self._stop.wait(max(wait, cost * _SHARE_OF_CORE if wait >= _SAMPLE_SECONDS else 0.0)):
            began = time.thread_time()
            self.sample()
            cost = 0.8 * cost + 0.2 * (time.thread_time() - began)
            wait = min(wait * 1.25, _SAMPLE_SECONDS)

    def _write(self, text: str) -> None:
        """A full disk ends neither the watch nor the work, which will report it."""
        with contextlib.suppress(OSError):
            self._file.write(text)
            self._file.flush()

    def use(self, budget_bytes: int) -> MemoryUse:
        use: MemoryUse = {
            "start": next(iter(self._stages.values()))["start"],
            "peak": self._peak.anonymous,
            "final": self.now.anonymous,
            "peak_file_backed": self._peak.file,
            "stages": {name: dict(stage) for name, stage in self._stages.items()},
            "budget": budget_bytes,
        }
        return use | {"machines": dict(sorted(self._machines.items()))} if self._machines else use
