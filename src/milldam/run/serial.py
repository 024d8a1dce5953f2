"""One unit after another, in this process: no start-up, the least memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from milldam.run.tasks import DONE, PAUSE_SECONDS, Event, NothingYetError, Task


class SerialExecutor:
    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        work, pid = task.start(), os.getpid()
        for unit in _as_they_come(iter(units)):
            work(assign(unit), partial(_report, on_event, pid, unit))
            on_event(Event(0, pid, unit, DONE))


def _as_they_come(units: Iterator[int]) -> Iterator[int]:
    while True:
        try:
            yield next(units)
        except StopIteration:
            return
        except NothingYetError:
            time.sleep(PAUSE_SECONDS)


def _report(on_event: Callable[[Event], None], pid: int, unit: int, kind: str, value: Any) -> None:
    on_event(Event(0, pid, unit, kind, value))
