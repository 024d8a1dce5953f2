"""The memory of a process tree over time: of any command, or of this process and what it starts.

>>> watched = watch(["python", "train.py"], out="memory/")  # doctest: +SKIP
>>> watched.peak.anonymous, watched.growth  # bytes; bytes a minute  # doctest: +SKIP

Anonymous and shared memory is what the kernel can't take back; file-backed memory it takes back at will. A page that
two processes share counts twice, so `counted_once` says, sampled more seldom, what it is with each page once. What a
process held between two samples is missed, but not in its `resident_peak`. Memory and disk do not grow with time
(history.py, record.py); a sample that takes longer than a fiftieth of the interval makes the interval longer, so that
the cost stays under about 2 % of a core.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
from milldam.files import write_file, write_json
from milldam.memory import SAMPLE_SECONDS, Usage, parse_size
from milldam.watching.command import Command, reap
from milldam.watching.history import History, Moment, Others, Process
from milldam.watching.record import Recorder
from milldam.watching.tree import ProcessTree, adopting_orphans, count_once

__all__ = ["Moment", "Others", "Process", "Watched", "Watcher", "watch"]

CSV, SVG, JSON = "memory.csv", "memory.svg", "memory.json"
_FIRST_WAIT = 0.005
_SHARE_OF_CORE = 50
_COUNT_ONCE_SECONDS = 1.0
_FAREWELL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen, in bytes and seconds."""

    command: tuple[str, ...]
    exit_code: int | None
    """Minus the signal's number when one ended it; None when it was no command."""
    seconds: float
    peak: Usage
    mean: Usage
    growth: float | None
    """Of anonymous memory, bytes a minute, robustly fitted; None after less than half a minute, or when what had grown
    was given back before the end."""
    grows_to_the_end: bool
    counted_once: Usage | None
    """The most, with each page counted once; None where the kernel does not tell. Sampled more seldom than the rest."""
    sum_when_counted: int
    """Anonymous memory, as the rest is counted, at that moment."""
    peak_swapped: int
    largest_resident: int
    """The most that any one process had resident, by the kernel's count, also of processes too brief to be sampled, as
    far as they were larger than this process. 0: none was sampled, and none was larger."""
    processes: tuple[Process, ...]
    others: Others
    still_running: tuple[int, ...]
    limit: int | None
    seconds_over_limit: float
    moments: tuple[Moment, ...]
    samples: int
    cpu_seconds: float
    """What watching cost."""

    @property
    def title(self) -> str:
        """The command in one line, of long paths only the last part."""
        first, *others = self.command or ("this process",)
        # In one line: a word may be a whole script.
        return " ".join(" ".join([Path(first).name or first, *map(_shorter_path, others)]).split())

    def as_json(self) -> dict[str, Any]:
        """All but the curve."""
        left_out = ("moments", "processes", "others")
        found = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        for name in ("peak", "mean", "counted_once"):
            found[name] = asdict(found[name]) if found[name] is not None else None
        others = {
            "count": self.others.count,
            "peak": self.others.peak,
            "names": dict(self.others.names.most_common(20)),
        }
        return found | {"processes": [asdict(one) for one in self.processes], "others": others}


class Watcher:
    """Samples a tree from a thread of its own; by itself, of this process and what it starts.

    >>> with Watcher(every=0.05) as watcher:
    ...     data = bytearray(10_000_000)
    >>> watcher.watched().peak.anonymous > 10_000_000
    True
    """

    def __init__(
        self, *, every: float = SAMPLE_SECONDS, limit: str | int | None = None, out: str | Path | None = None
    ) -> None:
        if not every > 0:
            raise ConfigError(f"every={every}: the time between two samples must be above 0 s.")
        self._every = every
        self._limit = None if limit is None else parse_size(limit)
        self._out = None if out is None else Path(out)
        self.history = History(self._limit)
        self.counted_once: Usage | None = None
        self.largest_resident = 0
        self._recorder = Recorder(self._out / CSV) if self._out is not None else None
        self._tree = ProcessTree(adopting=False)
        self._started = time.monotonic()
        self._cost = self._spent = 0.0
        self._counted = self._count_cost = 0.0
        self._counted_at = self._sum_when_counted = 0
        self._left_running: tuple[int, ...] = ()
        self._stop = threading.Event()

    def __enter__(self) -> Watcher:
        self._begin(self._tree, os.getpid())
        self._thread = threading.Thread(target=self._watch, name="milldam-watcher", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.sample()
        self.finish(self.watched())

    def _begin(self, tree: ProcessTree, root: int) -> None:
        self._tree, self._started = tree, time.monotonic()
        tree.begin(root)
        self.sample()

    def _watch(self) -> None:
        for seconds in self.waits():
            if self._stop.wait(seconds):
                return
            self.sample()

    def waits(self) -> Iterator[float]:
        """Seconds to the next sample: few at the start, for brief commands; then `every`, or more when it is dear."""
        wait = min(_FIRST_WAIT, self._every)
        while True:
            yield max(wait, self._cost * _SHARE_OF_CORE if wait >= self._every else 0.0)
            wait = min(wait * 1.25, self._every)

    def sample(self) -> Usage:
        """Look at the tree once, now."""
        began = time.thread_time()
        readings = self._tree.read()
        elapsed = time.monotonic() - self._started
        # At the very end nothing is left to see: what was, stays.
        if readings or not self.history.samples:
            total = self.history.add(elapsed, readings)
            if self._recorder is not None:
                self._recorder.add(elapsed, time.time(), readings)
        else:
            total = Usage()
        self._reap()
        cost = time.thread_time() - began
        self._cost = 0.8 * self._cost + 0.2 * cost if self._cost else cost
        self._count_once(elapsed, total.anonymous)
        self._spent += time.thread_time() - began
        return total

    def _reap(self) -> None:
        for pid in self._tree.orphans_ended():
            done = reap(pid)
            if done is not None:
                self.largest_resident = max(self.largest_resident, done[1])

    def _let_go(self) -> None:
        """Wait a moment for what ends with the command, such as its helpers: the rest is left running."""
        until = time.monotonic() + _FAREWELL_SECONDS
        while (left := self._tree.read()) and time.monotonic() < until:
            self._reap()
            time.sleep(0.01)
        self._reap()
        self._left_running = tuple(one.pid for one in left)

    def _count_once(self, elapsed: float, anonymous: int) -> None:
        """Once a second, and when memory has risen; about 1 % of a core at most, while it rises 4 %."""
        risen = anonymous > 1.03 * self._counted_at
        wait = 25 * self._count_cost if risen else max(_COUNT_ONCE_SECONDS, 100 * self._count_cost)
        if elapsed < self._counted + wait:
            return
        self._counted_at = anonymous
        began = time.thread_time()
        found = count_once(self._tree.members)
        if found is not None and (self.counted_once is None or found.anonymous > self.counted_once.anonymous):
            self.counted_once, self._sum_when_counted = found, anonymous
        self._counted, self._count_cost = elapsed, time.thread_time() - began

    def watched(self, command: Command | None = None) -> Watched:
        """What has been seen so far."""
        history = self.history
        processes = history.processes()
        resident = [one.resident_peak for one in processes]
        return Watched(
            command=tuple(command.words) if command else (),
            exit_code=command.exit_code if command else None,
            seconds=history.seconds,
            peak=history.peak,
            mean=history.mean(),
            growth=history.growth(),
            grows_to_the_end=history.grows_to_the_end(),
            counted_once=self.counted_once,
            sum_when_counted=self._sum_when_counted,
            peak_swapped=history.peak_swapped,
            largest_resident=max([self.largest_resident, command.largest_resident if command else 0, *resident]),
            processes=processes,
            others=history.others,
            still_running=self._left_running,
            limit=self._limit,
            seconds_over_limit=history.seconds_over_limit,
            moments=history.moments(),
            samples=history.samples,
            cpu_seconds=self._spent,
        )

    def finish(self, watched: Watched) -> None:
        """Write the picture and the figures beside the record. A full disk must not hide how the command ended."""
        from milldam.watching.picture import draw

        if self._recorder is None or self._out is None:
            return
        self._recorder.close()
        with contextlib.suppress(OSError):
            write_file(self._out / SVG, draw(watched).encode())
            write_json(self._out / JSON, watched.as_json())

    def run(self, words: Sequence[str]) -> Watched:
        """Run a command and watch it to its end."""
        with adopting_orphans() as adopting:
            tree = ProcessTree(adopting=adopting)
            with Command(words) as command:
                self._begin(tree, command.pid)
                for seconds in self.waits():
                    if command.wait(seconds):
                        break
                    self.sample()
                self.history.end(time.monotonic() - self._started)
                self._let_go()
        watched = self.watched(command)
        self.finish(watched)
        return watched


def _shorter_path(word: str) -> str:
    """
    >>> _shorter_path("--data=/home/anna/corpora/web.jsonl"), _shorter_path("s3://bucket/a/b"), _shorter_path("a/b")
    ('--data=…/web.jsonl', 's3://bucket/a/b', 'a/b')
    """
    option, equals, path = word.rpartition("=")
    if "://" in word or path.rstrip("/").count("/") < 2 or any(letter.isspace() for letter in word):
        return word
    return f"{option}{equals}…/{Path(path).name}"


def watch(
    command: Sequence[str],
    *,
    every: float = SAMPLE_SECONDS,
    limit: str | int | None = None,
    out: str | Path | None = None,
) -> Watched:
    """Run a command, its input and output untouched, and tell what its process tree held.

    `every`: seconds between samples. `limit`: drawn and compared, not enforced. `out`: a folder for memory.csv, which
    is written as it goes, memory.svg and memory.json. While it runs, processes that lose their parent become children
    of this process; children that this process starts meanwhile by other ways count as well.
    """
    if not command:
        raise ConfigError("watch: no command to run.")
    return Watcher(every=every, limit=limit, out=out).run(command)
