"""The worker process: takes a task, then one assignment after another, over the socket it inherited.

Another task takes the place of the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from milldam.errors import MilldamError
from milldam.run.lean_arrow import keep_arrow_lean
from milldam.run.tasks import DONE, TASK, WORK, Work

_PR_SET_PDEATHSIG = 1


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    # Ctrl-C reaches the whole group: only the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(connection)


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may be gone already. Whether the parent is process 1 says nothing: in a container it is.
    if os.getppid() != parent:
        sys.exit(1)


def _serve(connection: Connection) -> None:
    work: Work | None = None
    try:
        while True:
            kind, value = connection.recv()
            if kind == TASK:
                # What the task before held must be gone before this one takes its place.
                work = None
                gc.collect()
                keep_arrow_lean()
                work = value.start()
                continue
            assert kind == WORK and work is not None
            work(value, lambda kind, value: connection.send((kind, value)))
            connection.send((DONE, None))
    except MilldamError as error:
        connection.send(("error", error))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        connection.send(("error", _as_sent(error)))


def _as_sent(error: Exception) -> Any:
    """A bug in a worker, with its traceback: that does not pickle by itself."""
    return RuntimeError(f"{error!r} in a worker\n{traceback.format_exc()}")


if __name__ == "__main__":
    main()
