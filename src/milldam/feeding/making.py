"""The maker of a run folder, as a loader sees it: started if there is none, watched, replaced when it dies.

A loader that finds no maker at work starts one; of several that are started at once, one gets the run's lock and the
others end. So when a rank dies with its maker, any other that waits for a unit has its own within a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import MismatchError, RunHeldError, WorkerError
from milldam.feeding.demand import FEED
from milldam.files import hash_bytes, read_sealed
from milldam.run.folder import PLAN, RUN_FOLDER, is_at_work
from milldam.run.fork import ADVICE, cause_of
from milldam.run.tasks import DONE, ERROR
from milldam.run.units import Identity

if TYPE_CHECKING:
    from milldam.config.settings import Config

log = logging.getLogger("milldam")

_HOW = ("out", "memory", "workers", "overwrite", "executor", "address", "storage_options")
"""Settings that do not change what is made."""
_LOOK_SECONDS = 0.25
"""Between looks at the lock."""
_STRANGER_SECONDS = 3.0
"""For so long a run that is no feed's may only be about to begin as one."""
_FAREWELL_SECONDS = 5.0
_RETRIES = 2
"""Makers that may die one after the other, with nothing made in between."""


@dataclass(frozen=True, slots=True)
class Order:
    """A store that is to be made for loaders."""

    out: Path
    check: Callable[[], Config]
    """Makes the configuration, or raises what is wrong with it."""
    settings: Mapping[str, Any]
    """As they were written."""
    report: bool
    """Make the page about it."""

    @property
    def name(self) -> str:
        """A hash of the settings that change what is made: loaders with another one do not share the store."""
        of_result = {name: value for name, value in self.settings.items() if name not in _HOW}
        return hash_bytes(repr(of_result).encode("utf-8", "backslashreplace"))


class Making:
    """Sees that there is a maker for a store: starts one where none is at work, and tells how ours ended."""

    def __init__(self, order: Order) -> None:
        self._order, self._run = order, order.out / RUN_FOLDER
        self._process: subprocess.Popen[bytes] | None = None
        """Our maker."""
        self._deaths, self._made_at_death = 0, -1
        self._looked = time.monotonic()
        self._is_finished = False

    def await_feed(self) -> dict[str, Any] | None:
        """`feed.json` of a maker that has planned; None: the store is finished."""
        left_behind, explained = None, time.monotonic()
        while True:
            self._look(-1)
            if self._is_finished:
                return None
            feed = read_sealed(self._run / FEED) or {}
            if not is_at_work(self._run):
                # What a maker left that was killed does not count.
                left_behind, explained = feed.get("maker"), time.monotonic()
            elif feed and feed["maker"] != left_behind:
                if feed["name"] != self._order.name:
                    raise RunHeldError(
                        f"{self._order.out}: another feed with other arguments is making it. "
                        "End it first, or choose another folder for the store."
                    )
                if "facts" in feed:
                    return feed
                explained = time.monotonic()
            elif self._process is None and time.monotonic() - explained > _STRANGER_SECONDS:
                out = self._order.out
                raise RunHeldError(f"{out}: another run is using it. `milldam status {out}` shows it.")
            time.sleep(0.005)

    def tend(self, identity: str, made: int) -> None:
        """While waiting for a unit: raise what went wrong, see that there is a maker. `made`: parts, up to now."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS and (self._process is None or self._process.poll() is None):
            return
        self._looked = now
        self._look(made)
        plan = read_sealed(self._run / PLAN)
        if plan is not None and Identity(plan["settings"], plan["input"]).run_id != identity:
            raise MismatchError(
                f"{self._order.out}: its input or settings changed, and another process is now redoing it. "
                "Open the data again; earlier states no longer fit it."
            )

    def _look(self, made: int) -> None:
        """Start a maker where none is at work; raise the error that ended ours."""
        if self._process is None:
            if not is_at_work(self._run):
                self._start()
            return
        if self._process.poll() is None:
            return
        cause, self._process = cause_of(self._process.wait()), None
        kind, value = "", Exception()
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll():
                kind, value = self._connection.recv()
        self._is_finished = kind == DONE
        if kind == ERROR and not isinstance(value, RunHeldError):  # that one: another maker was faster
            raise value
        if not kind:
            self._deaths = self._deaths + 1 if made == self._made_at_death else 1
            self._made_at_death = made
            if self._deaths > _RETRIES:
                raise WorkerError(f"The process that makes units {cause}, {self._deaths} times.\n", *ADVICE)
            log.warning("The process that makes units %s; another one is started.", cause)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "milldam.feeding.job", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=2,  # standard error
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        weakref.finalize(self, _end, process, os.getpid())
        try:
            config = self._order.check()  # here, while it starts: both take a tenth of a second and more
        except BaseException:
            self.close()
            raise
        with contextlib.suppress(OSError):  # it has died, which will be noticed
            self._connection.send((config, self._order.name, self._order.report))

    def close(self, *, patience: float = 0.0) -> None:
        """End our maker, if there is one; `patience`: seconds in which it may end by itself."""
        if self._process is not None:
            _end(self._process, os.getpid(), patience)
            self._process = None


def _end(process: subprocess.Popen[bytes], owner: int, patience: float = 0.0) -> None:
    """End a maker; not from a process that was forked meanwhile."""
    if os.getpid() != owner:
        return
    for seconds, end in ((patience, process.terminate), (_FAREWELL_SECONDS, process.kill)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
        end()
    process.wait()
