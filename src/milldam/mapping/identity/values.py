"""Any Python value -> a digest that is the same in every process.

Plain values and containers by content (sets whatever their order, dicts in theirs), instances by their class and what
pickling would keep of them, libraries' values as libraries.py tells. Functions, classes and modules are left to the
walk. What has no content to go by is reported with the path that leads to it, never guessed. A value that
contains itself is met again by its depth. Holds every value it has seen until the walk is over, and no copies.
"""

from __future__ import annotations

import collections
import copyreg
import dataclasses
import enum
import functools
import hashlib
import logging
import pathlib
import re
import struct
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from milldam.mapping.identity.libraries import NoContentError, describe

if TYPE_CHECKING:
    from milldam.mapping.identity.walking import Walk

Digest = bytes

NAMED = (types.FunctionType, type, types.ModuleType, types.BuiltinFunctionType)
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(...), type(NotImplemented))


def digest_of(kind: str, *parts: bytes) -> Digest:
    """One digest of several parts, in order; where one ends and the next begins counts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (kind.encode(), *parts):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def text_digest(kind: str, *texts: str) -> Digest:
    return digest_of(kind, *(text.encode("utf-8", "surrogatepass") for text in texts))


def type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


class Values:
    """The digests of one walk."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._known: dict[int, Digest] = {}
        self._open: dict[int, int] = {}
        self._alive: list[Any] = []

    def digest(self, value: Any, where: str) -> Digest:
        """Of any value; `where` is how to call it in a message, e.g. `captured value limit`."""
        if type(value) in _PLAIN:
            return _plain(value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        if id(value) in self._open:
            return text_digest("again", str(self._open[id(value)]))
        self._alive.append(value)  # an id may not be given to another value
        self._open[id(value)] = len(self._open)
        try:
            made = self._made(value, where)
        finally:
            del self._open[id(value)]
        self._known[id(value)] = made
        return made

    def _made(self, value: Any, where: str) -> Digest:
        if self._walk.has_name(value):
            return self._walk.named(value, where)
        make = _MAKERS.get(type(value))
        if make is not None:
            return make(self, value, where)
        families = (told for kind, told in _FAMILIES.items() if isinstance(value, kind))
        told = _ATTRIBUTES.get(type(value)) or next(families, None)
        if told is None:
            try:
                described = describe(value)
            except NoContentError:
                return self._refused(value, where)
            if described is not None:
                self._alive.append(described)
                return digest_of("library value", self.digest(described, where))
            return self._reduced(value, where)
        name, *attributes = told
        return self.several(name, (getattr(value, one) for one in attributes), where)

    def several(self, kind: str, values: Iterable[Any], where: str) -> Digest:
        return digest_of(kind, *(self.digest(one, f"{where}[{n}]") for n, one in enumerate(values)))

    def _unordered(self, value: Any, where: str) -> Digest:
        """A set: its members by their digests; those that are more than plain are brought in order first."""
        plain = sorted(_plain(one) for one in value if type(one) in _PLAIN)
        others = sorted((one for one in value if type(one) not in _PLAIN), key=self._walk.alone)
        return digest_of(type(value).__name__, *plain, *(self.digest(one, f"{where}[...]") for one in others))

    def pairs(self, kind: str, items: Iterable[tuple[Any, Any]], where: str) -> Digest:
        digests = []
        for key, value in items:
            inner = f"{where}[{key!r}]" if isinstance(key, str | int) else f"{where}[...]"
            digests += [self.digest(key, inner), self.digest(value, inner)]
        return digest_of(kind, *digests)

    def attributes(self, kind: str, state: dict[str, Any], where: str) -> Digest:
        """Attributes of an object, whatever their order."""
        return digest_of(
            kind,
            *(
                digest_of("attribute", _plain(str(name)), self.digest(value, f"{where}.{name}"))
                for name, value in sorted(state.items(), key=lambda item: str(item[0]))
            ),
        )

    def _reduced(self, value: Any, where: str) -> Digest:
        """By what pickling would write."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Exception:  # whatever a foreign __reduce__ raises: it can't be pickled
            return self._refused(value, where)
        if isinstance(reduced, str):
            return text_digest("global", type_name(type(value)), reduced)
        self._alive.append(reduced)
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        return digest_of(
            "object",
            self.digest(make, where),
            digest_of("arguments", *(self.digest(one, where) for one in arguments)),
            self._state(state, where),
            self.several("items", items or (), where),
            self.pairs("pairs", pairs or (), where),
        )

    def _state(self, state: Any, where: str) -> Digest:
        both = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if all(one is None or type(one) is dict for one in both):  # attributes, and those in slots
            return digest_of("state", self.attributes("attributes", (both[0] or {}) | (both[1] or {}), where))
        return self.digest(state, where)

    def _refused(self, value: Any, where: str) -> Digest:
        self._walk.unhashable(where, type(value))
        return text_digest("unhashable", type_name(type(value)))

    def _cell(self, value: types.CellType, where: str) -> Digest:
        try:
            return digest_of("cell", self.digest(value.cell_contents, where))
        except ValueError:
            return digest_of("empty cell")

    def _partial(self, value: functools.partial[Any], where: str) -> Digest:
        given = self.several("partial", (value.func, value.args), where)
        return digest_of("partial", given, self.attributes("keywords", value.keywords, where))


def _plain(value: Any) -> Digest:
    """Of a value without parts. The type counts: 1, 1.0 and True differ."""
    if isinstance(value, str):
        return digest_of("str", value.encode("utf-8", "surrogatepass"))
    if isinstance(value, bytes):
        return digest_of("bytes", value)
    if isinstance(value, float):
        return digest_of("float", struct.pack("<d", value))
    if isinstance(value, complex):
        return digest_of("complex", struct.pack("<dd", value.real, value.imag))
    if type(value) is int:
        return digest_of("int", hex(value).encode())
    return digest_of("constant", repr(value).encode())


Maker = Callable[[Values, Any, str], Digest]

_MAKERS: dict[type, Maker] = {
    list: lambda values, value, where: values.several("list", value, where),
    tuple: lambda values, value, where: values.several("tuple", value, where),
    dict: lambda values, value, where: values.pairs("dict", value.items(), where),
    types.MappingProxyType: lambda values, value, where: values.pairs("dict", value.items(), where),
    collections.OrderedDict: lambda values, value, where: values.pairs("ordered dict", value.items(), where),
    set: Values._unordered,
    frozenset: Values._unordered,
    bytearray: lambda values, value, where: digest_of("bytearray", bytes(value)),
    types.CellType: Values._cell,
    functools.partial: Values._partial,
    # Where a slot of a class lies; `__slots__` tells which there are.
    types.MemberDescriptorType: lambda values, value, where: text_digest("place", value.__name__),
    types.GetSetDescriptorType: lambda values, value, where: text_digest("place", value.__name__),
}
"""By the very type of the value."""

_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    slice: ("slice", "start", "stop", "step"),
    types.MethodType: ("method", "__func__", "__self__"),
    types.BuiltinMethodType: ("bound", "__name__", "__self__"),
    types.MethodWrapperType: ("bound", "__name__", "__self__"),
    types.MethodDescriptorType: ("descriptor", "__name__", "__objclass__"),
    types.WrapperDescriptorType: ("descriptor", "__name__", "__objclass__"),
    types.ClassMethodDescriptorType: ("descriptor", "__name__", "__objclass__"),
    property: ("property", "fget", "fset", "fdel"),
    staticmethod: ("static method", "__func__"),
    classmethod: ("class method", "__func__"),
    functools.cached_property: ("cached property", "func"),
    type(functools.lru_cache(lambda: None)): ("cached function", "__wrapped__"),
}
"""What a few attributes tell completely: what to call it, and the attributes."""

_FAMILIES: dict[type, tuple[str, ...]] = {
    enum.Enum: ("enum", "__class__", "name", "value"),
    re.Pattern: ("pattern", "pattern", "flags"),
    pathlib.PurePath: ("path", "__class__", "parts"),
    logging.Logger: ("logger", "name"),
    dataclasses.Field: ("field", "name", "default", "default_factory", "init"),
}
"""The same, with classes derived from them."""
