"""The maker: a process that makes units of a store beside training, in the frame, as any run does.

It has the run's lock and keeps to the run's budget; nothing of it is in the training process. It is niced, in a process
group of its own, and ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NoReturn

NICENESS = 5
FINISHED = "finished"
_PARENT_SECONDS = 0.2


def main() -> None:
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICENESS)
    from milldam.run.fork import as_sent
    from milldam.run.tasks import ERROR

    try:
        _make(connection)
        told = FINISHED, None
    except KeyboardInterrupt:
        return
    except Exception as error:
        told = ERROR, as_sent(error)
    with contextlib.suppress(OSError):
        connection.send(told)


def _leave(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _end_with(parent: int) -> None:
    """What is not recorded is not kept: nothing needs to be wound up."""
    # Not by the kernel's signal, which comes when the thread ends that started us.
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os._exit(1)


def _make(connection: Connection) -> None:
    from milldam.feeding.job import FeedJob
    from milldam.memory import keep_arrow_lean
    from milldam.run import engine
    from milldam.run.engine import Options
    from milldam.sources.compression import storage_options

    keep_arrow_lean()
    config, name, report = connection.recv()
    with storage_options(config.storage_options):
        engine.run(FeedJob(config, name=name, report=report), Options.of(config))


if __name__ == "__main__":
    main()
