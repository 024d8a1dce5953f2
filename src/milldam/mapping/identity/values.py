"""Any Python value -> a digest that is the same in every process.

Plain values and containers by content (sets whatever their order, dicts in theirs), instances by their class and what
pickling would keep of them, libraries' values as libraries.py tells. Functions, classes and modules are left to the
caller (`Named`). What has no content to go by is reported with the path that leads to it, never guessed. A value that
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
from typing import Any, Protocol

from milldam.mapping.identity.libraries import NoContentError, describe

Digest = bytes

NAMED = (types.FunctionType, type, types.ModuleType, types.BuiltinFunctionType)
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(...), type(NotImplemented))
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_PLACES = (types.MemberDescriptorType, types.GetSetDescriptorType)


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


class Named(Protocol):
    """What the caller knows better than by value."""

    def named(self, value: Any, where: str) -> Digest:
        """Of a function, class, module, or an object a library has a name for."""
        ...

    def has_name(self, value: Any) -> bool:
        """Whether `named` takes it."""
        ...

    def unhashable(self, where: str, kind: type) -> None:
        """Note a value that has no content to go by."""
        ...

    def alone(self, value: Any) -> Digest:
        """Of a value for itself, whatever was met before: to put the members of a set in order."""
        ...


class Values:
    """The digests of one walk."""

    def __init__(self, names: Named) -> None:
        self._names = names
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
        if self._names.has_name(value):
            return self._names.named(value, where)
        for makers in (_CONTAINERS, _CALLABLES):
            maker = makers.get(type(value))
            if maker is not None:
                return maker(self, value, where)
        for kind, make in _KINDS:
            if isinstance(value, kind):
                return make(self, value, where)
        return self._described(value, where)

    def several(self, kind: str, values: Iterable[Any], where: str) -> Digest:
        return digest_of(kind, *(self.digest(one, f"{where}[{n}]") for n, one in enumerate(values)))

    def _unordered(self, value: Any, where: str) -> Digest:
        """A set: its members by their digests; those that are more than plain are brought in order first."""
        plain = sorted(_plain(one) for one in value if type(one) in _PLAIN)
        others = sorted((one for one in value if type(one) not in _PLAIN), key=self._names.alone)
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

    def _described(self, value: Any, where: str) -> Digest:
        try:
            described = describe(value)
        except NoContentError:
            return self._refused(value, where)
        if described is not None:
            self._alive.append(described)
            return digest_of("library value", self.digest(described, where))
        return self._reduced(value, where)

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
        self._names.unhashable(where, type(value))
        return text_digest("unhashable", type_name(type(value)))

    # ---- what calls something else ----

    def _partial(self, value: functools.partial[Any], where: str) -> Digest:
        arguments = self.several("arguments", value.args, where)
        return digest_of(
            "partial", self.digest(value.func, where), arguments, self.attributes("keywords", value.keywords, where)
        )

    def _method(self, value: Any, where: str) -> Digest:
        return digest_of("method", self.digest(value.__func__, where), self.digest(value.__self__, where))

    def _bound_builtin(self, value: Any, where: str) -> Digest:
        return digest_of("bound", _plain(value.__name__), self.digest(value.__self__, where))

    def _descriptor(self, value: Any, where: str) -> Digest:
        return digest_of("descriptor", _plain(value.__name__), self.digest(value.__objclass__, where))

    def _property(self, value: property, where: str) -> Digest:
        return self.several("property", (value.fget, value.fset, value.fdel), where)

    def _wrapper(self, value: Any, where: str) -> Digest:
        return digest_of(type(value).__name__, self.digest(value.__func__, where))

    def _cached_property(self, value: Any, where: str) -> Digest:
        return digest_of("cached property", self.digest(value.func, where))

    def _cached_function(self, value: Any, where: str) -> Digest:
        return digest_of("cached function", self.digest(value.__wrapped__, where))

    def _enum_member(self, value: enum.Enum, where: str) -> Digest:
        return digest_of("enum", self.digest(type(value), where), _plain(value.name), self.digest(value.value, where))

    def _data_field(self, value: Any, where: str) -> Digest:
        return self.several("field", (value.name, value.default, value.default_factory, value.init), where)

    def _cell(self, value: types.CellType, where: str) -> Digest:
        try:
            return digest_of("cell", self.digest(value.cell_contents, where))
        except ValueError:
            return digest_of("empty cell")


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

_CONTAINERS: dict[type, Maker] = {
    list: lambda values, value, where: values.several("list", value, where),
    tuple: lambda values, value, where: values.several("tuple", value, where),
    dict: lambda values, value, where: values.pairs("dict", value.items(), where),
    types.MappingProxyType: lambda values, value, where: values.pairs("dict", value.items(), where),
    collections.OrderedDict: lambda values, value, where: values.pairs("ordered dict", value.items(), where),
    set: Values._unordered,
    frozenset: Values._unordered,
    bytearray: lambda values, value, where: digest_of("bytearray", bytes(value)),
    slice: lambda values, value, where: values.several("slice", (value.start, value.stop, value.step), where),
    types.CellType: Values._cell,
}
_CALLABLES: dict[type, Maker] = {
    functools.partial: Values._partial,
    types.MethodType: Values._method,
    types.BuiltinMethodType: Values._bound_builtin,
    types.MethodWrapperType: Values._bound_builtin,
    property: Values._property,
    staticmethod: Values._wrapper,
    classmethod: Values._wrapper,
    functools.cached_property: Values._cached_property,
    type(functools.lru_cache(lambda: None)): Values._cached_function,
    **dict.fromkeys(_DESCRIPTORS, Values._descriptor),
    **dict.fromkeys(_PLACES, lambda values, value, where: text_digest("place", value.__name__)),
}


_KINDS: tuple[tuple[type, Maker], ...] = (
    (enum.Enum, Values._enum_member),
    (re.Pattern, lambda values, value, where: values.several("pattern", (value.pattern, value.flags), where)),
    (pathlib.PurePath, lambda values, value, where: text_digest("path", type(value).__name__, str(value))),
    (logging.Logger, lambda values, value, where: text_digest("logger", value.name)),
    (dataclasses.Field, Values._data_field),
)
