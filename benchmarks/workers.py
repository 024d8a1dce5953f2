"""Processes or threads? The same units through two worker processes, two threads, and one after the other.

    python benchmarks/workers.py CORPUS --tokenizer FOLDER

Prints the wall time and the peak of anonymous memory of each; `docs/decisions/0003` rests on it. The threads share one
interpreter, each with an encoder of its own, as the processes have.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from milldam.config.tokenize_options import tokenize_config
from milldam.pipeline.job import run_job
from milldam.run.local import LocalExecutor
from milldam.run.pools import LocalPool
from milldam.run.serial import SerialExecutor
from milldam.run.tasks import DONE, Event, Executor, Task


class ThreadExecutor:
    """Two threads of this process, an encoder each."""

    def run(
        self, task: Task, units: Iterable[int], assign: Callable[[int], Any], on_event: Callable[[Event], None]
    ) -> None:
        lock, state = threading.Lock(), threading.local()

        def tell(event: Event) -> None:
            with lock:
                on_event(event)

        def work(unit: int, assignment: Any) -> None:
            if not hasattr(state, "work"):
                state.work = task.start()
            state.work(assignment, lambda kind, value: tell(Event(0, 0, unit, kind, value)))
            tell(Event(0, 0, unit, DONE))

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(work, unit, assign(unit)) for unit in units]:
                done.result()


EXECUTORS: dict[str, Callable[[], Executor]] = {
    "processes": lambda: LocalExecutor(2),
    "threads": ThreadExecutor,
    "serial": SerialExecutor,
}


def measure(name: str, corpus: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory(prefix="milldam-workers-") as folder:
        config = tokenize_config(corpus, Path(folder) / "out", tokenizer, {"memory": "2GB", "workers": 2})
        started = time.monotonic()
        with mock.patch.object(LocalPool, "executor", lambda *_: EXECUTORS[name]()):
            summary = run_job(config, report=False)
        seconds = time.monotonic() - started
    assert summary.memory is not None
    rate, peak = summary.counts["text_bytes"] / seconds / 1e6, summary.memory["peak"] / 1e6
    print(f"{name:<10} {seconds:6.1f} s  {rate:6.0f} MB/s  {peak:5.0f} MB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=sorted(EXECUTORS), help="measure one, in this process")
    given = parser.parse_args()
    if given.only:
        measure(given.only, given.corpus, given.tokenizer)
        return
    for name in list(EXECUTORS) * given.repeats:
        subprocess.run(
            [sys.executable, __file__, given.corpus, "--tokenizer", given.tokenizer, "--only", name], check=True
        )


if __name__ == "__main__":
    main()
