"""A user's own function, by name: found, hashed, and called so that one bad document does not end a run.

A name is `package.module:function` or `path/to/file.py:function`. The current folder is importable while it is looked
up, as with `python -m`; so is the folder of a file. `sys.path` is left as it was.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import xxhash

from milldam.errors import ConfigError, did_you_mean, os_error

FIRST_DOCUMENTS: Final = 10
"""A function that fails on so many documents from the first one on is broken, not unlucky."""
SHOWN_CHARACTERS: Final = 60

_loaded: dict[str, str] = {}
"""Modules that were loaded here, with the hash of their source: an edited one is loaded again."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function of that name.

    >>> load_function("textwrap:dedent")("  a")
    'a'
    """
    place, function_name = _split(spec)
    with _importable(place):
        digest, path, name = function_hash(spec), Path(place).absolute(), place
        if _is_file(place):  # a name of its own, so that two files of the same name do not take each other's place
            name = f"milldam_user_{path.stem}_{xxhash.xxh3_64_hexdigest(os.fsencode(path))}"
        if name not in sys.modules or _loaded.get(name, digest) != digest:
            sys.modules.pop(name, None)
            try:
                if _is_file(place):
                    found = importlib.util.spec_from_file_location(name, path)
                    assert found is not None and found.loader is not None
                    module = sys.modules[name] = importlib.util.module_from_spec(found)
                    found.loader.exec_module(module)
                else:
                    importlib.import_module(place)
            except Exception as error:
                sys.modules.pop(name, None)
                raise _broken(spec, place, error) from error
            _loaded[name] = digest
    members = vars(sys.modules[name])
    if not callable(members.get(function_name)):
        known = [one for one, value in members.items() if callable(value)]
        hint = did_you_mean(function_name, known)
        raise ConfigError(f'"{spec}": there is no function "{function_name}" in {place}.{hint}')
    return members[function_name]  # type: ignore[no-any-return]


def function_hash(spec: str) -> str:
    """A hash of the source file that the function is in, so that an edited function makes a new result.

    What that file imports in turn is not in it. Of what is built into Python, a hash of the version.
    """
    place, _ = _split(spec)
    path = Path(place)
    if _is_file(place):
        if not path.is_file():
            raise ConfigError(f'"{spec}": there is no file {place} (the current folder is {Path.cwd()}).')
    else:
        with _importable(place):
            try:
                found = importlib.util.find_spec(place)
            except (ImportError, ValueError, AttributeError):
                found = None
            except Exception as error:  # a parent package, which has to be imported to look into it
                raise _broken(spec, place, error) from error
        if found is None:
            raise ConfigError(
                f'"{spec}": there is no module {place}. It is looked for in {Path.cwd()} and in installed packages; '
                "a file can be given as path/to/file.py:function."
            )
        path = Path(found.origin or "")
    try:
        return xxhash.xxh3_128_hexdigest(path.read_bytes() if path.is_file() else f"{place} {sys.version}".encode())
    except OSError as error:
        raise os_error(error, path) from None


class UserFunction:
    """Calls a user's function on one text at a time.

    When it raises, the answer is `FAILED`, for the caller to drop the document; on each of the first
    `FIRST_DOCUMENTS` texts: a ConfigError that shows the exception.
    """

    FAILED: Final = object()

    def __init__(self, spec: str) -> None:
        self.spec, self._function = spec, load_function(spec)
        self._failures, self._has_worked = 0, False

    def __call__(self, text: str) -> Any:
        try:
            result = self._function(text)
        except Exception as error:
            self._failures += 1
            if not self._has_worked and self._failures >= FIRST_DOCUMENTS:
                shown = repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")
                raise ConfigError(
                    f'"{self.spec}" failed on each of the first {FIRST_DOCUMENTS} documents, last with\n'
                    f"{type(error).__name__}: {error}\non the text that begins {shown}"
                ) from error
            return self.FAILED
        self._has_worked = True
        return result

    def wrong_type(self, result: object, expected: str) -> ConfigError:
        """The error for an answer of a type that means nothing."""
        return ConfigError(f'"{self.spec}" returned {type(result).__name__}; it must return {expected}.')


def _split(spec: str) -> tuple[str, str]:
    """(module or file, function)"""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f'"{spec}" names no function. Write it as module:function or path/to/file.py:function.')
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _broken(spec: str, place: str, error: Exception) -> ConfigError:
    return ConfigError(f'"{spec}": importing {place} failed with\n{type(error).__name__}: {error}')


@contextlib.contextmanager
def _importable(place: str) -> Iterator[None]:
    """The current folder, and that of a file, first on the path. Worker processes run without it (`python -P`)."""
    before = list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [*([str(Path(place).absolute().parent)] if _is_file(place) else []), str(Path.cwd())]
    importlib.invalidate_caches()
    # A .pyc of ours would hide an edit that leaves the size and comes within the same second.
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = before
