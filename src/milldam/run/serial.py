"""One unit after another, in this process: no start-up, the least memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from milldam.run.tasks import DONE, Event, Task


class SerialExecutor:
    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        work, pid = task.start(), os.getpid()
        for unit in units:
            work(assign(unit), partial(_report, on_event, pid, unit))
            on_event(Event(0, pid, unit, DONE))


def _report(on_event: Callable[[Event], None], pid: int, unit: int, kind: str, value: Any) -> None:
    on_event(Event(0, pid, unit, kind, value))
