"""A worker process: takes one assignment after another, over the socket it has from the process that started the job.

The server forks it with the task's state built (run/server.py). Where the server can't, this module is a program of its
own, which is sent the task and builds that state itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from milldam.errors import MilldamError
from milldam.memory import keep_arrow_lean
from milldam.run.tasks import DONE, ERROR, READY, TASK, Work

GONE = (EOFError, BrokenPipeError, ConnectionResetError)
"""What is raised where the process at the other end is no more."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    connection = attach()
    keep_arrow_lean()  # before a task brings imports along
    with contextlib.suppress(*GONE):
        serve(connection)


def attach() -> Connection:
    """The connection to the process that this one belongs to, by the arguments it was started with."""
    # Ctrl-C reaches the whole group: only the process that runs the job decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    die_with(int(sys.argv[2]))
    return Connection(int(sys.argv[1]))


def die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may be gone already. Whether the parent is process 1 says nothing: in a container it is.
    if os.getppid() != parent:
        os._exit(1)


def serve(connection: Connection, work: Work | None = None) -> None:
    """Do what is assigned, until the other end is closed. Without `work`, the task comes first."""
    try:
        connection.send((READY, os.getpid()))
        while True:
            kind, value = connection.recv()
            if kind == TASK:
                work = value.start()
                continue
            assert work is not None
            work(value, lambda kind, value: connection.send((kind, value)))
            connection.send((DONE, None))
    except GONE:
        raise
    except Exception as error:
        connection.send((ERROR, as_sent(error)))


def as_sent(error: Exception) -> Any:
    """An error of ours, or a bug in a worker with its traceback, which does not pickle by itself."""
    if isinstance(error, MilldamError):
        return error
    return RuntimeError(f"{error!r} in a worker\n{traceback.format_exc()}")


if __name__ == "__main__":
    main()
