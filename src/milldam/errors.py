"""Every error that milldam raises, in one tree.

    MilldamError                exit code 1
    ├── ConfigError                       2   a setting is wrong or contradicts another
    │   ├── MismatchError                 2   the folder was made from other settings or input
    │   ├── NotReadyError                 2   an earlier stage that an array task needs is not done
    │   ├── RunHeldError                  2   another run is using the folder
    │   └── TaskHeldError                 2   the same array task is running already
    ├── InputError                        3   a file, column or tokenizer can't be used
    ├── StoreError                        3   the folder is no store, or it is damaged
    ├── ResourceError                     4   memory or disk is not enough, or fails
    └── WorkerError                       4   a worker process died twice on the same unit

A message says what, where and what to do, in a few lines; the command line prints it and exits with the code. A
setting in it is a `Setting`, which the command line spells as an option and the library as an argument. Errors of the
operating system become one of these by `os_error`. Any other exception is a bug in milldam.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
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
    """A setting is wrong or contradicts another.

    >>> store.windows(0)
    Traceback (most recent call last):
    milldam.errors.ConfigError: seq_len: 0...
    """

    exit_code = 2


class MismatchError(ConfigError):
    """The folder or state was made with other settings or input.

    >>> batches = store.windows(128).batches(8, seed=0)
    >>> store.windows(64).batches(8, seed=0).load_state_dict(batches.state_dict())
    Traceback (most recent call last):
    milldam.errors.MismatchError: ...
    """


class NotReadyError(ConfigError):
    """An earlier stage that an array task needs is not done.

    >>> issubclass(milldam.NotReadyError, milldam.ConfigError)
    True
    """


class RunHeldError(ConfigError):
    """Another run is using the folder: try again when it has ended.

    >>> issubclass(milldam.RunHeldError, milldam.ConfigError)
    True
    """


class TaskHeldError(ConfigError):
    """The same array task is already running.

    >>> issubclass(milldam.TaskHeldError, milldam.ConfigError)
    True
    """


class InputError(MilldamError):
    """A file, column or tokenizer can't be used.

    >>> milldam.tokenize("nowhere.jsonl", "new.milldam", tokenizer="tokenizer/")
    Traceback (most recent call last):
    milldam.errors.InputError: nowhere.jsonl...
    """

    exit_code = 3


class StoreError(MilldamError):
    """The folder is not a store, or it is damaged.

    >>> milldam.Store("books/")
    Traceback (most recent call last):
    milldam.errors.StoreError: books...
    """

    exit_code = 3


class ResourceError(MilldamError):
    """Memory or disk is not enough, or fails.

    >>> milldam.tokenize("corpus.jsonl", "new.milldam", tokenizer="tokenizer/", memory="1MB")
    Traceback (most recent call last):
    milldam.errors.ResourceError: ...
    """

    exit_code = 4


class WorkerError(MilldamError):
    """A worker process died twice on the same unit.

    >>> milldam.WorkerError.exit_code
    4
    """

    exit_code = 4


# ---- errors of the operating system ----

_AGAIN = "Everything finished so far is safe. {} and run the same command again."
_REFUSALS: dict[tuple[int, ...], tuple[type[MilldamError], str]] = {
    (errno.ENOSPC, errno.EDQUOT): (
        ResourceError,
        "The disk is full: {path} could not be written.\n" + _AGAIN.format("Free some space"),
    ),
    (errno.EFBIG,): (
        ResourceError,
        "{path} could not be written: files may not be that large here (a limit of ulimit -f, or of the file system)."
        "\n" + _AGAIN.format("Raise the limit, or choose another place,"),
    ),
    (
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED),
        *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
    ): (
        ResourceError,
        "{path}: the network, or the server of its file system, does not answer ({error}).\n"
        + _AGAIN.format("Wait until it does,"),
    ),
    (errno.ENOMEM,): (
        ResourceError,
        "{path}: the system has no memory left ({error}).\n"
        + _AGAIN.format("End other programs, or use fewer workers,"),
    ),
    (errno.ENOLCK,): (
        ResourceError,
        "{path}: can't be locked ({error}). On NFS, start its lock service, or choose a folder on another file system.",
    ),
    (errno.EMFILE, errno.ENFILE): (
        ResourceError,
        "{path}: can't be opened ({error}).\n" + _AGAIN.format("Raise the limit of open files (ulimit -n)"),
    ),
    (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EISDIR): (
        ConfigError,
        "{path}: can't be made ({error}). Choose another place.",
    ),
    (errno.ENOENT,): (InputError, "{path}: not there, or removed meanwhile ({error}). Put it back, or name another."),
    (errno.EACCES, errno.EPERM, errno.EROFS): (
        ResourceError,
        "{path}: permission denied ({error}). Change its permissions, or name another.",
    ),
}
_OTHER = "{path}: the disk or its file system reports an error ({error}).\n" + _AGAIN.format("See `dmesg`,")


def os_error(error: OSError, path: str | os.PathLike[str] | None = None) -> MilldamError:
    """The error of the operating system, where, and what to do. `path`: where, if the error does not say it better.

    >>> print(os_error(OSError(28, "No space left on device"), "corpus.milldam"))
    The disk is full: corpus.milldam could not be written.
    Everything finished so far is safe. Free some space and run the same command again.
    """
    found = path or error.filename2 or error.filename
    where = os.fsdecode(found) if isinstance(found, str | bytes | os.PathLike) else "A file of this command"
    number = error.errno or 0
    kind, message = next((one for numbers, one in _REFUSALS.items() if number in numbers), (ResourceError, _OTHER))
    return kind(message.format(path=where, error=f"{error.strerror}, {errno.errorcode.get(number, number)}"))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message, empty when nothing is near.

    >>> did_you_mean("txet", ["text", "id"])
    ' Did you mean "text"?'
    """
    near = nearest(word, known)
    return "" if near is None else f' Did you mean "{near}"?'


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a mistyped one is near to, or has all letters or all parts in common with; else None.

    >>> nearest("treshold", ["threshold"]), nearest("vla", ["val"]), nearest("num_workers", ["workers"])
    ('threshold', 'val', 'workers')
    >>> nearest("npz", ["npy"]), nearest("shuffle", ["buffer"])
    ('npy', None)
    """

    def parts(word: str) -> set[str]:
        return set(re.findall(r"[^\W_]+", word.lower())) or {word}

    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.75)
    if not near:
        # In short words one letter is too much of the whole to be near otherwise.
        alike = [name for name in names if parts(word) <= parts(name) or parts(name) <= parts(word)]
        alike += [name for name in names if sorted(name) == sorted(word)]
        short = [name for name in names if 3 <= len(name) == len(word)]
        alike += [name for name in short if sum(a != b for a, b in zip(name, word, strict=True)) == 1]
        near = difflib.get_close_matches(word, alike, n=1, cutoff=0.0)
    return near[0] if near else None
