"""What a function's result depends on -> a hash, the same in every process and on every day.

libraries   tokenizers, arrays, tensors and the like in plain terms; whose code is it, the user's or a library's?
values      any value -> a digest; what has none is named
walking     from a function to all functions, classes and values that it uses, by what its code reaches for

In the hash: code, defaults, captured values, the globals it really uses, and the same of the user's own functions and
classes that it reaches; versions of installed packages; the version of Python. Not in it: where the code stands,
comments, docstrings, annotations. Said to have no hash: what `eval`, `import_module` and their like lead to. Not seen:
files that the function reads, the state of libraries (a seed, an attribute that somebody set), the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from milldam.errors import ConfigError

__all__ = ["FunctionIdentity", "identify"]

_PYTHON = "Python"


@dataclass(frozen=True, slots=True)
class FunctionIdentity:
    """What a function is, for a cache."""

    name: str
    hash: str
    parts: dict[str, str]
    """`code`, `captured value limit`, `global LIMIT`, `function clean`, `module numpy`, ... with the hash of each."""
    unhashable: tuple[str, ...] = ()
    """What has no hash, e.g. `captured value db: sqlite3.Connection`. When there is any, equal hashes prove nothing."""

    def differences(self, newer: FunctionIdentity) -> list[str]:
        """What is different now, part by part; empty when the hashes are equal.

        >>> old = FunctionIdentity("cut", "a", {"captured value limit": "1", "function clean": "2"})
        >>> old.differences(FunctionIdentity("cut", "b", {"captured value limit": "3", "function clean": "2"}))
        ['captured value limit']
        """
        if self.hash == newer.hash:
            return []
        if self.parts.get(_PYTHON) != newer.parts.get(_PYTHON):  # it compiles everything anew
            return [_versions(_PYTHON, self.parts.get(_PYTHON, "?"), newer.parts.get(_PYTHON, "?"))]
        found = []
        for part in {**self.parts, **newer.parts}:
            before, after = self.parts.get(part), newer.parts.get(part)
            if before != after:
                found.append(_difference(part, before, after))
        return found or ["function"]

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "hash": self.hash, "parts": self.parts, "unhashable": list(self.unhashable)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FunctionIdentity:
        return cls(data["name"], data["hash"], dict(data["parts"]), tuple(data["unhashable"]))


def identify(
    function: Callable[..., Any], kwargs: Mapping[str, Any] | None = None, *, key: str | None = None
) -> FunctionIdentity:
    """The identity of a function with the keyword arguments it will be called with.

    `key` stands for everything that can't be hashed: with it nothing is unhashable, and another key is another
    identity.

    >>> limit = 10
    >>> identify(lambda text: text[:limit]).parts.keys()
    dict_keys(['global limit', 'code', 'Python'])
    """
    from milldam.mapping.identity.values import text_digest
    from milldam.mapping.identity.walking import Walk

    if not callable(function):
        what = "Give a function, a method or a callable object."
        raise ConfigError(f"A value of type {type(function).__name__} can't be called. {what}")
    walk = Walk()
    walk.begin(function)
    for name, value in sorted((kwargs or {}).items()):
        walk.root(f"argument {name}", value)
    walk.finish()
    parts = {**walk.parts.hashes, _PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}"}
    if key is not None:
        parts["key"] = text_digest("key", key).hex()
    whole = text_digest("identity", *(text for part in sorted(parts) for text in (part, parts[part])))
    return FunctionIdentity(
        _name(function), whole.hex(), parts, () if key is not None else tuple(walk.parts.unhashable)
    )


def _name(function: Any) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else type(function).__name__


def _versions(what: str, before: str, after: str) -> str:
    return f"{what} ({before}, now {after})"


def _difference(part: str, before: str | None, after: str | None) -> str:
    if before is None:
        return f"{part} (new)"
    if after is None:
        return f"{part} (no longer used)"
    return _versions(part, before, after) if part.startswith("module ") else part
