"""The maker of a run folder, as a loader sees it: started if there is none, watched, replaced when it dies.

A loader that finds no maker at work starts one; of several that are started at once, one gets the run's lock and the
others end. So when a rank dies with its maker, any other that waits for a unit has its own within a moment.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
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
from milldam.feeding.demand import Planned, process_identity
from milldam.files import hash_bytes, read_sealed
from milldam.run.folder import PLAN, RUN_FOLDER, is_at_work
from milldam.run.fork import ADVICE, cause_of
from milldam.run.tasks import DONE, ERROR
from milldam.run.units import Identity
from milldam.stores.kinds import TOKENS

if TYPE_CHECKING:
    from milldam.config.settings import Config

log = logging.getLogger("milldam")

_HOW = ("out", "memory", "workers", "overwrite", "executor", "address", "storage_options")
"""Settings that do not change what is made."""
_STDERR = 2
_LOOK_SECONDS = 0.25
"""Between looks at the lock."""
_STRANGER_SECONDS = 3.0
"""For so long a run that is no feed's may only be about to begin as one."""
_FIRST_RANK_SECONDS = 2.0
"""For so long other ranks let the first one begin."""
_FAREWELL_SECONDS = 5.0
_RETRIES = 2
"""Makers that may die one after the other, with nothing made in between."""


@dataclass(frozen=True, slots=True)
class Order:
    """A store that is to be made for loaders."""

    out: Path
    check: Callable[[], Config]
    """Makes the configuration, or raises what is wrong with it."""
    name: str
    """A hash of the settings, without memory and workers."""
    report: bool = True
    """Make the page about it."""

    @classmethod
    def of(cls, out: Path, check: Callable[[], Config], settings: Mapping[str, Any], *, report: bool) -> Order:
        """`settings`: as they were written; other ones give another name."""
        of_result = {name: value for name, value in settings.items() if name not in _HOW}
        return cls(out, check, hash_bytes(repr(of_result).encode("utf-8", "backslashreplace")), report)


class Making:
    def __init__(self, order: Order) -> None:
        self._order, self._run = order, order.out / RUN_FOLDER
        self._maker: _Maker | None = None
        self._deaths, self._made_at_death = 0, -1
        self._began = self._looked = time.monotonic()
        self._stranger_since: float | None = None
        self.is_finished = False
        """The store is whole."""

    def await_planned(self) -> Planned | None:
        """The plan of the maker, once it has one; None: the store is finished."""
        while True:
            self._look(None)
            if self.is_finished:
                return None
            planned = Planned.read(self._run)
            if self._maker is not None:  # what another one has left does not count
                ours = process_identity(self._maker.process.pid)
                planned = planned if planned is not None and planned.process == ours else None
            elif not is_at_work(self._run):
                planned = None
            if planned is not None and planned.name != self._order.name:
                raise RunHeldError(
                    f"{self._order.out}: another feed with other arguments is making it. "
                    "End it first, or choose another folder for the store."
                )
            if planned is not None and planned.identity:
                return planned
            time.sleep(0.005)

    def tend(self, identity: str, made: int) -> None:
        """While waiting for a unit: raise what went wrong, see that there is a maker. `made`: parts, up to now."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS and (self._maker is None or self._maker.process.poll() is None):
            return
        self._looked = now
        self._look(made)
        plan = read_sealed(self._run / PLAN)
        if plan is not None and Identity(plan["settings"], plan["input"]).run_id != identity:
            raise MismatchError(
                f"{self._order.out}: its input or settings changed, and another process is now redoing it. "
                "Open the data again; earlier states no longer fit it."
            )

    def _look(self, made: int | None) -> None:
        """`made`: None: the plan is not known yet."""
        if self._maker is not None:
            if self._maker.process.poll() is not None:
                self._bury(self._maker, made)
        elif is_at_work(self._run):
            if made is None:
                self._refuse_stranger()
        # Of several ranks the first one begins; the others when it does not. A store that is finished is most likely
        # up to date, which its maker sees in a moment.
        elif (
            _rank() == 0
            or (self._order.out / TOKENS.manifest).exists()
            or time.monotonic() - self._began > _FIRST_RANK_SECONDS
        ):
            self._maker = _Maker(self._order)

    def _bury(self, maker: _Maker, made: int | None) -> None:
        """Our maker has ended, for one of several reasons."""
        self._maker = None
        kind, value = maker.last_words()
        self.is_finished = kind == DONE
        if self.is_finished or isinstance(value, RunHeldError):  # another one was faster
            return
        if kind == ERROR:
            raise value
        count = -1 if made is None else made
        self._deaths = self._deaths + 1 if count == self._made_at_death else 1
        self._made_at_death = count
        cause = cause_of(maker.process.wait())
        if self._deaths > _RETRIES:
            raise WorkerError(f"The process that makes units {cause}, {self._deaths} times.\n", *ADVICE)
        log.warning("The process that makes units %s; another one is started.", cause)

    def _refuse_stranger(self) -> None:
        """A run may be about to begin as a maker; one that does not within a few seconds is another run."""
        now = time.monotonic()
        if Planned.read(self._run) is not None:
            self._stranger_since = None
        elif self._stranger_since is None:
            self._stranger_since = now
        elif now - self._stranger_since > _STRANGER_SECONDS:
            out = self._order.out
            raise RunHeldError(f"{out}: another run is using it. `milldam status {out}` shows it.")

    def close(self, *, patience: float = 0.0) -> None:
        """End our maker, if there is one; `patience`: seconds in which it may end by itself."""
        if self._maker is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._maker.process.wait(patience)
            self._maker.end()
            self._maker = None


def _rank() -> int:
    """Of this process in training, as torchrun or Slurm number it."""
    values = (os.environ.get(name, "") for name in ("RANK", "SLURM_PROCID"))
    return next((int(value) for value in values if value.isdigit()), 0)


class _Maker:
    """The process of `milldam.feeding.job`."""

    def __init__(self, order: Order) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "milldam.feeding.job", str(theirs.fileno()), str(os.getpid())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            start_new_session=True,
        )
        theirs.close()
        self._connection = Connection(ours.detach())
        self.end = weakref.finalize(self, _end, self.process, os.getpid())
        try:
            config = order.check()  # here, while it starts: both take a tenth of a second and more
        except BaseException:
            self.end()
            raise
        with contextlib.suppress(OSError):  # it has died, which will be noticed
            self._connection.send((config, order.name, order.report))

    def last_words(self) -> tuple[str, Any]:
        """Its last message: that it has finished, or its error."""
        with contextlib.suppress(EOFError, OSError):
            if self._connection.poll():
                kind, value = self._connection.recv()
                return kind, value
        return "", None


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """End a maker; not from a process that was forked meanwhile."""
    if os.getpid() != owner or process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_FAREWELL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
