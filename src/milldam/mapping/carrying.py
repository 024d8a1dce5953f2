"""The user's function, its arguments and the reader of rows, on their way to worker processes.

By `cloudpickle`, so that lambdas, closures and functions of a script arrive too; a function that was named as
`script.py:function` is loaded by its name again. In the process that it comes from nothing is copied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (None, self.spec, self.pack(), _import_paths())

    def pack(self) -> bytes:
        """The load as bytes. Raises ConfigError when something in it can't leave this process."""
        if self.packed is not None:
            return self.packed
        try:
            import cloudpickle
        except ImportError:
            raise ConfigError("Several workers need cloudpickle: pip install cloudpickle, or use workers=1.") from None
        assert self.load is not None
        function = self.load.function if self.spec is None else None
        try:
            packed: bytes = cloudpickle.dumps((function, dict(self.load.kwargs), self.load.reader))
        except Exception as error:
            raise ConfigError(
                f"The function or something that it holds can't be sent to worker processes:\n"
                f"{type(error).__name__}: {error}\n"
                "Make it inside the function (once, kept in a global), or use workers=1, which works in this process."
            ) from None
        return packed

    def open(self) -> Load:
        if self.load is not None:
            return self.load
        assert self.packed is not None
        sys.path += [path for path in self.paths if path not in sys.path]
        import cloudpickle

        try:
            function, kwargs, reader = cloudpickle.loads(self.packed)
        except Exception as error:
            raise ConfigError(
                f"The function could not be loaded in a worker process:\n{type(error).__name__}: {error}\n"
                "What it needs must be importable there; or use workers=1, which works in this process."
            ) from None
        if self.spec is not None:
            from milldam.user_functions import load_function

            function = load_function(self.spec)
        return Load(function, kwargs, reader)


def _import_paths() -> tuple[str, ...]:
    """Where this process imports from, the current folder by its name: a worker does not look there by itself."""
    return tuple(path or str(Path.cwd()) for path in sys.path)
