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
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import xxhash

from milldam.errors import ConfigError, did_you_mean, os_error

FIRST_DOCUMENTS: Final = 10
"""A function that fails on so many documents from the first one on is broken, not unlucky."""
SHOWN_CHARACTERS: Final = 60

_loaded: dict[str, str] = {}
"""Modules that came in by this room, with the hash of their source: an edited one is loaded again."""


def load_function(spec: str) -> Callable[..., Any]:
    """The function of that name.

    >>> load_function("textwrap:dedent")("  a")
    'a'
    """
    place, name = _split(spec)
    module = _load_module(place, spec)
    function = getattr(module, name, None)
    if function is None:
        known = [one for one, value in vars(module).items() if callable(value)]
        raise ConfigError(f'"{spec}": there is no function "{name}" in {place}.{did_you_mean(name, known)}')
    if not callable(function):
        raise ConfigError(f'"{spec}": "{name}" in {place} is a {type(function).__name__}, not a function.')
    return function  # type: ignore[no-any-return]


def function_hash(spec: str) -> str:
    """A hash of the source file that the function is in, so that an edited function makes a new result.

    What that file imports in turn is not in it.
    """
    place, _ = _split(spec)
    with _importable(_folder(place)):
        source = _source(place, spec)
    return _hash(source) if source is not None else xxhash.xxh3_128_hexdigest(f"{place} {sys.version}".encode())


class UserFunction:
    """Calls a user's function on one text at a time.

    When it raises, the answer is `FAILED`, for the caller to drop the document; on each of the first
    `FIRST_DOCUMENTS` texts: a ConfigError that shows the exception.
    """

    FAILED: Final = object()

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._function = load_function(spec)
        self._failures = 0
        self._has_worked = False

    def __call__(self, text: str) -> Any:
        try:
            result = self._function(text)
        except Exception as error:
            self._failures += 1
            if not self._has_worked and self._failures >= FIRST_DOCUMENTS:
                raise ConfigError(
                    f'"{self.spec}" failed on each of the first {FIRST_DOCUMENTS} documents, last with\n'
                    f"{type(error).__name__}: {error}\non the text that begins {shown(text)}"
                ) from error
            return self.FAILED
        self._has_worked = True
        return result

    def wrong_type(self, result: object, expected: str) -> ConfigError:
        """The error for an answer of a type that means nothing."""
        return ConfigError(f'"{self.spec}" returned {type(result).__name__}; it must return {expected}.')


def shown(text: str) -> str:
    """The start of a text, for a message."""
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


def _split(spec: str) -> tuple[str, str]:
    """(module or file, function)"""
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(f'"{spec}" names no function. Write it as module:function or path/to/file.py:function.')
    return place, name


def _is_file(place: str) -> bool:
    return place.endswith(".py") or os.sep in place


def _folder(place: str) -> str | None:
    """The folder of a file, which its own imports may need."""
    return str(Path(place).absolute().parent) if _is_file(place) else None


@contextlib.contextmanager
def _importable(folder: str | None) -> Iterator[None]:
    """The current folder, and another, first on the path. Worker processes run without it (`python -P`)."""
    added = [one for one in (folder, str(Path.cwd())) if one is not None]
    sys.path[:0] = added
    importlib.invalidate_caches()
    # A .pyc of ours would hide an edit that leaves the size and comes within the same second.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before
        for one in added:
            with contextlib.suppress(ValueError):
                sys.path.remove(one)


def _load_module(place: str, spec: str) -> ModuleType:
    with _importable(_folder(place)):
        source = _source(place, spec)
        name = _module_name(place)
        digest = "" if source is None else _hash(source)
        if name in sys.modules and _loaded.get(name, digest) == digest:
            return sys.modules[name]
        sys.modules.pop(name, None)
        try:
            module = _load_file(place, name) if _is_file(place) else importlib.import_module(place)
        except Exception as error:
            sys.modules.pop(name, None)
            raise ConfigError(f'"{spec}": importing {place} failed with\n{type(error).__name__}: {error}') from error
        _loaded[name] = digest
        return module


def _module_name(place: str) -> str:
    """Files get a name of their own, so that two of the same name do not take each other's place."""
    if not _is_file(place):
        return place
    path = Path(place).absolute()
    return f"milldam_user_{path.stem}_{xxhash.xxh3_64_hexdigest(os.fsencode(path))}"


def _load_file(place: str, name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, Path(place).absolute())
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _source(place: str, spec: str) -> Path | None:
    """The file with the source; None for what is built into Python."""
    if _is_file(place):
        if not Path(place).is_file():
            raise ConfigError(f'"{spec}": there is no file {place} (the current folder is {Path.cwd()}).')
        return Path(place)
    try:
        found = _find(place)
    except (ImportError, ValueError, AttributeError):
        found = None
    except Exception as error:  # a parent package, which has to be imported to look into it
        raise ConfigError(f'"{spec}": importing {place} failed with\n{type(error).__name__}: {error}') from error
    if found is None:
        raise ConfigError(
            f'"{spec}": there is no module {place}. It is looked for in {Path.cwd()} and in installed packages; '
            "a file can be given as path/to/file.py:function."
        )
    return Path(found.origin) if found.origin and Path(found.origin).is_file() else None


def _find(place: str) -> ModuleSpec | None:
    """Where a module is now: one that was loaded before would answer for where it was then."""
    loaded = sys.modules.pop(place) if place in _loaded and place in sys.modules else None
    try:
        return importlib.util.find_spec(place)
    finally:
        if loaded is not None:
            sys.modules[place] = loaded


def _hash(source: Path) -> str:
    try:
        return xxhash.xxh3_128_hexdigest(source.read_bytes())
    except OSError as error:
        raise os_error(error, source) from None
