"""The maker of a run folder, as a loader sees it: found, or started; watched; replaced when it dies.

Whoever finds nobody at work starts a maker; of several that are started at once, one gets the run's lock and the others
end. So when a rank dies with its maker, any other that waits for a unit has its own within a moment.
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
from milldam.feeding.demand import Planned
from milldam.feeding.maker import FINISHED
from milldam.files import hash_bytes, read_sealed
from milldam.input_files import RUN_FOLDER
from milldam.memory import process_identity
from milldam.run.folder import is_at_work
from milldam.run.fork import ADVICE, ERROR, cause_of
from milldam.run.units import Identity
from milldam.stores.kinds import TOKENS

if TYPE_CHECKING:
    from milldam.config.settings import Config

log = logging.getLogger("milldam")

_HOW = ("out", "memory", "workers", "overwrite", "executor", "address", "storage_options")
"""Settings that do not change what is made."""
_STDERR = 2
_LOOK_SECONDS = 0.25
"""Between looks at who is at work."""
_STRANGER_SECONDS = 3.0
"""For so long a run that is no feed's may only be about to begin as one."""
_FIRST_RANK_SECONDS = 2.0
"""For so long other ranks let the first one begin."""
_FAREWELL_SECONDS = 5.0
_RETRIES = 2
"""Makers that may die one after the other, with nothing made in between."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made."""

    out: Path
    check: Callable[[], Config]
    """Makes the configuration, or raises what is wrong with it."""
    name: str
    """Names what is asked for, whatever its memory and workers."""
    report: bool = True
    """Make the page about it."""

    @classmethod
    def of(cls, out: Path, check: Callable[[], Config], settings: Mapping[str, Any], *, report: bool) -> Order:
        """`settings`: as they were written; other ones give another name."""
        of_result = {name: value for name, value in settings.items() if name not in _HOW}
        return cls(out, check, hash_bytes(repr(of_result).encode("utf-8", "backslashreplace")), report)


class Making:
    """`planned`: what the run is, once `await_planned` has returned."""

    def __init__(self, order: Order) -> None:
        self._order, self._run = order, order.out / RUN_FOLDER
        self._process: _MakerProcess | None = None
        self._deaths = 0
        self._made_at_death: int | None = None
        self._began = self._looked = time.monotonic()
        self._stranger_since: float | None = None
        self._told_alone = False
        self.is_finished = False
        """The store is whole."""

    def await_planned(self) -> Planned | None:
        """What is made for loaders; None: nothing, the store is finished."""
        while not self.is_finished:
            self._look(None)
            planned = self._told()
            if planned is not None and planned.name != self._order.name:
                raise RunHeldError(
                    f"{self._order.out}: another feed with other arguments is making it. "
                    "End it first, or choose another folder for the store."
                )
            if planned is not None and planned.identity and not self.is_finished:
                return planned
            time.sleep(0.005)
        return None

    def _told(self) -> Planned | None:
        """What the maker that is at work has told; not what one that is gone has left."""
        planned = Planned.read(self._run)
        if self._process is None:
            return planned if is_at_work(self._run) else None
        ours = planned is not None and planned.process == process_identity(self._process.process.pid)
        return planned if ours else None

    def tend(self, identity: str, made: int) -> None:
        """While waiting for a unit: raise what went wrong, see that somebody makes it. `made`: parts, up to now."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS and (self._process is None or self._process.is_alive()):
            return
        self._looked = now
        self._look(made)
        plan = read_sealed(self._run / "plan.json")
        if plan is not None and Identity(plan["settings"], plan["input"]).run_id != identity:
            raise MismatchError(
                f"{self._order.out}: its input or settings changed, and another process is now redoing it. "
                "Open the data again; earlier states no longer fit it."
            )

    def _look(self, made: int | None) -> None:
        """`made`: None: nothing is known of the plan."""
        if self._process is not None:
            if not self._process.is_alive():
                self._bury(self._process, made)
        elif is_at_work(self._run):
            if made is None:
                self._refuse_stranger()
        elif self._may_begin():
            self._process = _MakerProcess(self._order)

    def _bury(self, process: _MakerProcess, made: int | None) -> None:
        """Our maker has ended: that may mean several things."""
        self._process = None
        kind, value = process.farewell()
        self.is_finished = kind == FINISHED
        if self.is_finished or isinstance(value, RunHeldError):  # another one was faster
            return
        if kind == ERROR:
            raise value
        self._deaths = self._deaths + 1 if made == self._made_at_death else 1
        self._made_at_death = made
        cause = cause_of(process.process.wait())
        if self._deaths > _RETRIES:
            raise WorkerError(f"The process that makes units {cause}, {self._deaths} times.\n", *ADVICE)
        log.warning("The process that makes units %s; another one is started.", cause)

    def _refuse_stranger(self) -> None:
        """Somebody is at work who may be about to begin as a maker; who does not is another run."""
        if Planned.read(self._run) is not None:
            self._stranger_since = None
        elif self._stranger_since is None:
            self._stranger_since = time.monotonic()
        elif time.monotonic() - self._stranger_since > _STRANGER_SECONDS:
            out = self._order.out
            raise RunHeldError(f"{out}: another run is using it. `milldam status {out}` shows it.")

    def _may_begin(self) -> bool:
        """Of several ranks the first one begins; the others when it does not: it is gone, or can't be seen."""
        if _number("RANK", "SLURM_PROCID") == 0 or (self._order.out / TOKENS.manifest).exists():
            return True  # a store that is finished is most likely up to date: that is seen in a moment
        if time.monotonic() - self._began < _FIRST_RANK_SECONDS:
            return False
        if not self._told_alone and _number("WORLD_SIZE") > _number("LOCAL_WORLD_SIZE") > 0:
            self._told_alone = True
            log.warning(
                "%s: only this machine writes it, though ranks run on several machines. Unless all of them see this "
                "folder, each machine writes its own: the batches are the same, but the work is done on every machine.",
                self._order.out,
            )
        return True

    def close(self, *, patience: float = 0.0) -> None:
        """End our maker, if there is one; `patience`: seconds in which it may end by itself."""
        if self._process is not None:
            until = time.monotonic() + patience
            while self._process.is_alive() and time.monotonic() < until:
                time.sleep(0.01)
            self._process.end()
            self._process = None


def _number(*names: str) -> int:
    """The first of some variables of the environment that is a number; else 0."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdigit()), 0)


class _MakerProcess:
    def __init__(self, order: Order) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "milldam.feeding.maker", str(theirs.fileno()), str(os.getpid())]
        self.process = subprocess.Popen(
            command,
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

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def farewell(self) -> tuple[str, Any]:
        """The last thing that it told, once it has ended: that it has finished, or its error."""
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
