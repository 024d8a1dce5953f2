"""What runs on the nodes of a Ray cluster: a hand that works on one unit at a time, and a look at the node before.

A hand is an actor, a process of its own: its memory is known, and all of it comes back when it is ended. While a unit
is worked on, what it reports is streamed to the driver as it comes, and once a second what the process holds.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milldam.errors import InputError, MilldamError
from milldam.memory import keep_arrow_lean, usage
from milldam.run.tasks import DONE, MEMORY, Work

ERROR = "error"
TOLD = 64
"""Reports on their way, for each unit: a worker that is ahead of the driver waits."""
BEAT_SECONDS = 1.0
_SAMPLE_SECONDS = 0.1

Told = tuple[int, str, Any]
"""(process, kind, value)."""


class Hand:
    """A worker of one stage. `folder`: where the driver is; paths may be relative to it."""

    def __init__(self, task: bytes, threads: int, folder: str) -> None:
        self._task: bytes | None = task
        self._work: Work | None = None
        _enter(folder)
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"

    def work(self, assignment: Any) -> Iterator[Told]:
        """Do a unit: everything it reports, as it comes; what it holds, at least at the beginning and the end."""
        told: queue.Queue[tuple[str, Any]] = queue.Queue(TOLD)
        pid, peak, beat = os.getpid(), usage().anonymous, time.monotonic()
        doing = threading.Thread(target=self._do, args=(assignment, told), daemon=True)
        doing.start()
        yield pid, MEMORY, peak
        while True:
            with contextlib.suppress(queue.Empty):
                kind, value = told.get(timeout=_SAMPLE_SECONDS)
                if kind == DONE:
                    break
                yield pid, kind, value
            peak = max(peak, usage().anonymous)
            if time.monotonic() - beat > BEAT_SECONDS:
                yield pid, MEMORY, peak
                peak, beat = 0, time.monotonic()
        doing.join()
        now = usage().anonymous
        yield pid, MEMORY, max(peak, now)
        yield pid, MEMORY, now

    def _do(self, assignment: Any, told: queue.Queue[tuple[str, Any]]) -> None:
        try:
            self._started()(assignment, lambda kind, value: told.put((kind, value)))
        except MilldamError as error:
            gone = error.__cause__
            told.put((ERROR, _unseen(gone) if isinstance(gone, FileNotFoundError) else error))
        except FileNotFoundError as error:
            told.put((ERROR, _unseen(error)))
        except BaseException as error:
            told.put((ERROR, _as_sent(error)))
        finally:
            told.put((DONE, None))

    def _started(self) -> Work:
        if self._work is None:
            import cloudpickle

            assert self._task is not None
            keep_arrow_lean()
            task, options = cloudpickle.loads(self._task)
            os.environ |= options
            if options:
                from fsspec.config import conf, set_conf_env

                set_conf_env(conf)  # where Ray has imported it already
            self._work = task.start()
            self._task = None
        return self._work


def look(mark: str, answer: str, folder: str) -> tuple[bool, bool, str]:
    """Whether a file of the driver is seen here, whether one can be written beside it, and which milldam this is."""
    import milldam

    _enter(folder)
    sees = Path(mark).exists()
    try:
        Path(answer).write_bytes(b"")
    except OSError:
        return sees, False, milldam.__version__
    return sees, True, milldam.__version__


def _unseen(error: FileNotFoundError) -> BaseException:
    """The driver's machine sees what this one does not: most often an input on a disk of its own."""
    if error.filename is None:
        return _as_sent(error)
    return InputError(
        f"{error.filename}: not there on the node {os.uname().nodename}.\n"
        "On a Ray cluster every node must see the input under the same path, or read it from an address."
    )


def _as_sent(error: BaseException) -> BaseException:
    """An error of the system, or a bug in a worker with its traceback: that does not pickle by itself."""
    if isinstance(error, OSError) and type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{error!r} in a worker\n{traceback.format_exc()}")


def _enter(folder: str) -> None:
    """Where there is no such folder, relative paths fail where they are used."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
