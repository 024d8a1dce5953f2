"""The user's function, its arguments and the reader of rows, on their way to worker processes.

By `cloudpickle`, so that lambdas, closures and functions of a script arrive too; a function that was named as
`script.py:function` is loaded by its name again. In the process that it comes from nothing is copied.

What arrives must be what the keys were made of. Modules are imported anew in a worker, so one that was edited after
this process had loaded it would be another there; and some values leave a part of themselves behind when they are
pickled. So the identity travels too and is found again on arrival, which costs a hash of all that the function holds.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, Setting
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.plan import RowReader


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker needs that is not ours."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    reader: RowReader


@dataclass(frozen=True)
class Carried:
    """Pickles; `open` gives the load, in the process that made it and in any other."""

    load: Load | None
    spec: str | None = None
    packed: bytes | None = None
    paths: tuple[str, ...] = ()
    identity: FunctionIdentity | None = None
    """Of what was packed."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self.load is None:
            return Carried, (None, self.spec, self.packed, self.paths, self.identity)
        return Carried, (None, self.spec, self.pack(), _import_paths(), self._sent)

    @functools.cached_property
    def _sent(self) -> FunctionIdentity:
        """As it is when it is first sent: what a call in this process has left in a global is no edit of its code."""
        assert self.load is not None
        return identify(self.load.function, self.load.kwargs)

    def pack(self) -> bytes:
        """The load as bytes. Raises ConfigError when something in it can't leave this process."""
        if self.packed is not None:
            return self.packed
        try:
            import cloudpickle
        except ImportError:
            missing = "Several workers need cloudpickle: pip install cloudpickle, or use "
            raise ConfigError(missing, Setting("workers", 1), ".") from None
        assert self.load is not None
        function = self.load.function if self.spec is None else None
        try:
            packed: bytes = cloudpickle.dumps((function, dict(self.load.kwargs), self.load.reader))
        except Exception as error:
            raise ConfigError(
                f"The function or something that it holds can't be sent to worker processes:\n"
                f"{type(error).__name__}: {error}\n"
                "Make it inside the function (once, kept in a global), or use ",
                Setting("workers", 1),
                " on this machine.",
            ) from None
        return packed

    def open(self) -> Load:
        if self.load is not None:
            return self.load
        arrived = self.spec, self.packed, self.identity
        if _last.arrived != arrived:
            _last.arrived, _last.load = None, None  # not two at a time
            _last.load = self._unpack()
            _last.arrived = arrived
        assert _last.load is not None
        return _last.load

    def _unpack(self) -> Load:
        assert self.packed is not None
        sys.path += [path for path in self.paths if path not in sys.path]
        import cloudpickle

        try:
            function, kwargs, reader = cloudpickle.loads(self.packed)
        except Exception as error:
            raise ConfigError(
                f"The function could not be loaded in a worker process:\n{type(error).__name__}: {error}\n"
                "What it needs must be importable there; or use ",
                Setting("workers", 1),
                " on this machine.",
            ) from None
        if self.spec is not None:
            from milldam.text.user_functions import load_function

            function = load_function(self.spec)
        if self.identity is not None:
            _require_same(self.identity, identify(function, kwargs))
        return Load(function, kwargs, reader)


@dataclass(slots=True)
class _Last:
    """What arrived in this process last: a process that forks the workers of several stages opens it once."""

    arrived: tuple[Any, ...] | None = None
    load: Load | None = None


_last = _Last()


def _require_same(sent: FunctionIdentity, arrived: FunctionIdentity) -> None:
    """What can't be hashed is not compared."""
    differences = sent.differences(arrived)
    differences = [part for part in differences if not any(line.startswith(part) for line in sent.unhashable)]
    if differences:
        listed = "\n".join(f"  {line}" for line in differences)
        raise ConfigError(
            f"{sent.name} is not the same in a worker process as in the one that planned this run:\n{listed}\n"
            "Code: it was edited since it was loaded; run again (in a notebook, restart or reload the module first).\n"
            "A value: the function changes it when it is called, or it does not survive pickling; make it inside the "
            "function, or use ",
            Setting("workers", 1),
            ".",
        )


def _import_paths() -> tuple[str, ...]:
    """Where this process imports from, the current folder by its name: a worker does not look there by itself."""
    return tuple(path or str(Path.cwd()) for path in sys.path)
