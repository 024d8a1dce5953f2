"""Every error that milldam raises, in one tree.

    MilldamError                exit code 1
    ├── ConfigError                       2
    │   ├── MismatchError                 2
    │   ├── NotReadyError                 2
    │   ├── RunHeldError                  2
    │   └── TaskHeldError                 2
    ├── InputError                        3
    ├── StoreError                        3
    ├── ResourceError                     4
    └── WorkerError                       4

A message says what, where and what to do, in a few lines; the command line prints it and exits with the code. A
setting in it is a `Setting`, which the command line spells as an option and the library as an argument. Errors of the
operating system become one of these by `os_error`. Any other exception is a bug in milldam.
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting in a message, by its place in a configuration, and perhaps a value for it.

    >>> str(Setting("datasets.0.text_column", "body")), str(Setting("limit"))
    ("text_column='body'", 'limit')
    """

    path: str
    value: Any = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value!r}"


EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


class MilldamError(Exception):
    """The root: catch this to catch everything milldam reports. Its arguments are the parts of the message.

    >>> try:
    ...     milldam.open("nowhere.milldam")
    ... except milldam.MilldamError as error:
    ...     print(error.exit_code, error)
    3 nowhere.milldam: ...
    """

    exit_code = 1

    def __str__(self) -> str:
        return self.spelled(str)

    def __reduce__(self) -> tuple[Any, ...]:
        # By its message, whatever a subclass is made from: errors come from other processes.
        return _restored, (type(self), self.args, self.__dict__)

    def spelled(self, spell: Callable[[Setting], str]) -> str:
        """The message, each setting in it as `spell` writes it."""
        return "".join(spell(part) if isinstance(part, Setting) else str(part) for part in self.args)


def _restored(kind: type[MilldamError], message: tuple[Any, ...], attributes: dict[str, Any]) -> MilldamError:
    error = kind.__new__(kind, *message)
    error.__dict__.update(attributes)
    return error


class ConfigError(MilldamError):
    """A setting is wrong or contradicts another."""

    exit_code = 2


class MismatchError(ConfigError):
    """The folder or state was made with other settings or input."""


class NotReadyError(ConfigError):
    """An earlier stage that an array task needs is not done."""


class RunHeldError(ConfigError):
    """Another run is using the folder: try again when it has ended."""


class TaskHeldError(ConfigError):
    """The same array task is already running."""


class InputError(MilldamError):
    """A file, column or tokenizer can't be used."""

    exit_code = 3


class StoreError(MilldamError):
    """The folder is not a store, or it is damaged."""

    exit_code = 3


class ResourceError(MilldamError):
    """Memory or disk is not enough, or fails."""

    exit_code = 4


class WorkerError(MilldamError):
    """A worker process died twice on the same unit."""

    exit_code = 4


# ---- errors of the operating system ----

_REFUSALS: tuple[tuple[set[int], type[MilldamError], str], ...] = (
    ({errno.ENOSPC, errno.EDQUOT}, ResourceError, "The disk is full: {path} could not be written."),
    ({errno.EACCES, errno.EPERM, errno.EROFS}, ResourceError, "{path} is not writable or readable ({error})."),
    ({errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR}, ConfigError, "{path}: can't be made ({error})."),
    ({errno.ENOENT}, InputError, "{path}: not there, or removed meanwhile ({error})."),
)


def os_error(error: OSError, path: str | os.PathLike[str] | None = None) -> MilldamError:
    """The error of the operating system, where, and what to do. `path`: where, if the error does not say it better.

    >>> print(os_error(OSError(28, "No space left on device"), "corpus.milldam"))
    The disk is full: corpus.milldam could not be written.
    Everything finished so far is safe. Free some space and run the same command again.
    """
    found = path or error.filename2 or error.filename
    where = os.fsdecode(found) if isinstance(found, str | bytes | os.PathLike) else "A file of this command"
    number = error.errno or 0
    other: tuple[Any, type[MilldamError], str] = (None, ResourceError, "{path}: the system reports an error ({error}).")
    numbers, kind, message = next((one for one in _REFUSALS if number in one[0]), other)
    message = message.format(path=where, error=f"{error.strerror}, {errno.errorcode.get(number, number)}")
    if numbers is not None and errno.ENOSPC not in numbers:
        return kind(f"{message} Choose another place, or change it.")
    cause = "Remove the cause" if numbers is None else "Free some space"
    return kind(f"{message}\nEverything finished so far is safe. {cause} and run the same command again.")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message, empty when nothing is near.

    >>> did_you_mean("txet", ["text", "id"])
    ' Did you mean "text"?'
    """
    near = nearest(word, known)
    return "" if near is None else f' Did you mean "{near}"?'


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one is near to, or that has all of its parts; else None.

    >>> nearest("treshold", ["threshold"]), nearest("vla", ["val"]), nearest("num_workers", ["workers"])
    ('threshold', 'val', 'workers')
    >>> nearest("npz", ["npy"]), nearest("shuffle", ["buffer"])
    ('npy', None)
    """
    names, parts = list(known), set(word.lower().replace("-", "_").split("_"))
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.75 if len(word) > 4 else 0.65)
    alike = [name for name in names if not parts.isdisjoint(name.lower().split("_"))] if "_" in word else []
    return next(iter(near + alike), None)
