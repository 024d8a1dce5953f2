"""What a loader delivers here: time to the first batch, rate, memory.

The clock runs while a batch is asked for and stands still between two requests. Nothing is done with a batch, so the
rate is the most that a training loop can get, and what it waits for a batch is at most what is measured: a thread or
worker processes go on while the loop computes.

Counts only; holds nothing of what it is given but the last batch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

from milldam.errors import ConfigError
from milldam.loader.batches import Batches
from milldam.memory import Usage, release, usage

_MEMORY_SECONDS = 0.25
"""From one look at the memory to the next."""

Ended = Literal["seconds", "epochs", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was delivered, how fast, and in how much memory."""

    samples: int | None
    """Samples of an epoch; None: not known before all of it is made."""
    sample_tokens: int
    announced: bool
    """Read from files by pread, announced ahead to the kernel; else from a mapping."""
    first_batch_seconds: float
    """From the call that opens the data to the first batch."""
    batches: int
    """All that were delivered, the first too."""
    delivered: int
    """Samples in them."""
    steady: int
    """Samples of those after the first batch."""
    steady_seconds: float
    """Waited for these."""
    slowest_seconds: float
    """The longest wait for one batch after the first."""
    anonymous_bytes: int
    """The most at any look, beyond what the process held before it opened the data."""
    file_bytes: int
    """Mapped files, counted likewise: the kernel takes them back at will."""
    worker_bytes: int | None
    """Anonymous memory of worker processes, all of it; None without any."""
    ended: Ended
    making: dict[str, float]
    """What making took while it was fed; empty: nothing was made."""

    @property
    def samples_per_second(self) -> float | None:
        """None when the first batch was all there is."""
        return self.steady / self.steady_seconds if self.steady else None

    @property
    def tokens_per_second(self) -> float | None:
        return self.steady * self.sample_tokens / self.steady_seconds if self.steady else None

    @property
    def batch_seconds(self) -> float | None:
        """The mean wait for a batch after the first."""
        return self.steady_seconds / (self.batches - 1) if self.steady else None

    @property
    def epochs_delivered(self) -> float | None:
        """How many times over the data were delivered."""
        return None if self.samples is None else self.delivered / self.samples


def measure(
    make: Callable[[], Batches[Any]],
    *,
    seconds: float = 5.0,
    through: Callable[[Batches[Any]], Iterable[Any]] = lambda batches: batches,
) -> Figures:
    """Open data, ask for batches until the time is up or they end, and say what came.

    `make` opens the data and makes the loader: its time is part of that to the first batch; imports are not, when they
    were done before. `through`: what the batches go through on their way, such as a torch `DataLoader`. An interrupt
    after the first batch ends it early, with the figures so far.

    >>> measure(lambda: milldam.open("corpus.milldam").windows(128).batches(16), seconds=0.1).tokens_per_second > 0
    True
    """
    if seconds <= 0:
        raise ConfigError(f"seconds: {seconds}; use more than 0.")
    release()
    memory = _Watch(usage())
    begun = perf_counter()
    batches = make()
    delivered = iter(through(batches))
    first = _rows(next(delivered))
    first_batch_seconds = perf_counter() - begun
    tally = _Tally()
    ended = tally.count(delivered, seconds, memory)
    memory.look()
    steady = tally.samples
    known = batches.samples._length_known
    return Figures(
        samples=batches.samples.epoch_samples if known else None,
        sample_tokens=batches.samples.sample_tokens,
        announced=known and any(reader.announces for reader in batches.samples._readers),
        first_batch_seconds=first_batch_seconds,
        batches=tally.batches + 1,
        delivered=first + steady,
        steady=steady,
        steady_seconds=tally.waited,
        slowest_seconds=tally.slowest,
        anonymous_bytes=max(0, memory.anonymous - memory.before.anonymous),
        file_bytes=max(0, memory.file - memory.before.file),
        worker_bytes=memory.workers or None,
        ended=ended,
        making=batches.samples._stats(),
    )


class _Tally:
    """What came after the first batch."""

    def __init__(self) -> None:
        self.batches, self.samples = 0, 0
        self.waited, self.slowest = 0.0, 0.0

    def count(self, delivered: Iterable[Any], seconds: float, memory: _Watch) -> Ended:
        """Ask for batches until they end, the time is up, or the user has had enough."""
        asked = perf_counter()
        deadline, look = asked + seconds, asked
        try:
            for batch in delivered:
                came = perf_counter()
                self.batches += 1
                self.samples += _rows(batch)
                self.waited += came - asked
                self.slowest = max(self.slowest, came - asked)
                if came >= deadline:
                    return "seconds"
                if came >= look:
                    memory.look()
                    look = came + _MEMORY_SECONDS
                asked = perf_counter()
        except KeyboardInterrupt:
            return "interrupted"
        return "epochs"


def _rows(batch: Any) -> int:
    """Samples in a batch: the rows of its first array."""
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])


class _Watch:
    """The most memory at any look."""

    def __init__(self, before: Usage) -> None:
        self.before = before
        self.anonymous, self.file, self.workers = before.anonymous, before.file, 0

    def look(self) -> None:
        now = usage()
        self.anonymous, self.file = max(self.anonymous, now.anonymous), max(self.file, now.file)
        children = (child.pid for child in multiprocessing.active_children())
        self.workers = max(self.workers, sum(usage(pid).anonymous for pid in children if pid is not None))
