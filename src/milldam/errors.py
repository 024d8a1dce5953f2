"""Every error that milldam raises, in one tree.

    MilldamError                exit code 1
    ├── ConfigError                       2   a setting is wrong or contradicts another
    │   ├── MismatchError                 2   the folder was made from other settings or input
    │   ├── NotReadyError                 2   what comes before a share of a job is not done
    │   └── ShareHeldError                2   another task is at work on the same share
    ├── InputError                        3   a file, column or tokenizer can't be used
    ├── StoreError                        3   the folder is no store, or it is damaged
    ├── ResourceError                     4   memory or disk is not enough
    └── WorkerError                       4   a worker process died twice on the same unit

A message says what, where and what to do, in a few lines; the command line prints it as it is and
exits with the code. Anything else that escapes is a bug in milldam.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MilldamError(Exception):
    """The root: catch this to catch everything milldam reports."""

    exit_code = 1


class ConfigError(MilldamError):
    exit_code = 2


class MismatchError(ConfigError):
    pass


class NotReadyError(ConfigError):
    pass


class ShareHeldError(ConfigError):
    pass


class InputError(MilldamError):
    exit_code = 3


class StoreError(MilldamError):
    exit_code = 3


class ResourceError(MilldamError):
    exit_code = 4


class WorkerError(MilldamError):
    exit_code = 4


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint to append to a message, empty when nothing is near.

    >>> did_you_mean("txet", ["text", "id"])
    ' Did you mean "text"?'
    """
    near = difflib.get_close_matches(word, list(known), n=1)
    return f' Did you mean "{near[0]}"?' if near else ""
