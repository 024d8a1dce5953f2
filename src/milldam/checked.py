"""JSON that may come from anywhere -> values of known types, or an error that names the file and the field.

The types are those that the fields of a dataclass or a TypedDict are annotated with, nothing else has to be written:

    int             a count, a size or an id: 0 to 2^53
    float           any number that is finite, 0 or more
    str, bool, None, Literal, unions of them
    list[X], tuple[X, ...], dict[str, X]
    a TypedDict     stays a dict; keys that it does not name may be there
    a dataclass     is made from an object with all of its fields, but for those that are None by default; keys that
                    it does not name may be there
    Any             anything that is not nested deeper than `DEEPEST`
    Annotated[X, Y] checked as Y, for who reads types an X

A check is put together once for a type; an object of ten fields takes some microseconds. Needs nothing but Python.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from milldam.errors import StoreError

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Gives the value as it is kept, or raises `_WrongError`."""

LARGEST = 2**53
"""What every reader of JSON can tell apart, and no sum of a thousand overflows 64 bits."""
DEEPEST = 50


class _WrongError(Exception):
    def __init__(self, expected: str, found: Any) -> None:
        self.expected, self.found = expected, found
        self.field = ""

    def inside(self, name: str) -> _WrongError:
        """The same, seen from what the value is part of."""
        between = "" if self.field.startswith("[") or not self.field else "."
        self.field = f"{name}{between}{self.field}"
        return self


def parse_json(data: bytes, name: str | Path) -> Any:
    """The value of a file's bytes."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise StoreError(f"{name}: damaged: can't be read as JSON ({error}).") from None
    except RecursionError:
        raise StoreError(f"{name}: damaged: its JSON is nested too deeply.") from None


def read_json(path: Path) -> Any:
    """The value of a file; FileNotFoundError when there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: can't be read ({error.strerror}).") from None
    return parse_json(data, path)


def checked(kind: type[T], value: Any, name: str | Path) -> T:
    """The value as this type, when it is one; `name`: where it is from, for the message.

    >>> checked(list[int], [3, "x"], "a.json")
    Traceback (most recent call last):
    milldam.errors.StoreError: a.json: damaged: [1] is "x", where a whole number from 0 on is expected. Make it again.
    """
    try:
        check: Check = _checker(cast("Any", kind))
        made: T = check(value)
        return made
    except _WrongError as wrong:
        raise StoreError(explained(wrong, name)) from None


def explained(wrong: _WrongError, name: str | Path) -> str:
    what = f"{wrong.field or 'it'} is {_shown(wrong.found)}" if wrong.found is not _MISSING else f"no {wrong.field}"
    return f"{name}: damaged: {what}, where {wrong.expected} is expected. Make it again."


class _Missing:
    pass


_MISSING = _Missing()


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."


# ---- a check for every type ----


@functools.cache
def _checker(kind: Any) -> Check:
    """What checks values of a type, and raises `_WrongError`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        return _checker(inner[1])
    if origin in (Union, types.UnionType):
        return _any_of([_checker(one) for one in inner])
    if origin is Literal:
        return _one_of(inner)
    if origin in (list, tuple):
        return _sequence(_checker(inner[0]), origin)
    if origin is dict:
        return _mapping(_checker(inner[1]))
    if is_typeddict(kind):
        return _typed_dict(kind)
    if is_dataclass(kind):
        return _object(kind)
    raise TypeError(f"no check for {kind}")


def _whole_number(value: Any) -> Any:
    # By its very type: True is an int too.
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise _WrongError("a whole number from 0 on", value)
    return value


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
        raise _WrongError("a number from 0 on", value)
    return value


def _text(value: Any) -> Any:
    if type(value) is not str or not _is_unicode(value):
        raise _WrongError("text", value)
    return value


def _is_unicode(value: str) -> bool:
    """Half of a surrogate pair is in no text, and can't be written anywhere."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _truth(value: Any) -> Any:
    if type(value) is not bool:
        raise _WrongError("true or false", value)
    return value


def _nothing(value: Any) -> Any:
    if value is not None:
        raise _WrongError("null", value)
    return value


def _anything(value: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise _WrongError("less nesting", value)
    if isinstance(value, dict):
        for name, one in value.items():
            _text(name)
            _anything(one, depth + 1)
    elif isinstance(value, list):
        for one in value:
            _anything(one, depth + 1)
    elif isinstance(value, str):
        _text(value)
    return value


_PLAIN: dict[Any, Check] = {
    int: _whole_number,
    float: _number,
    str: _text,
    bool: _truth,
    types.NoneType: _nothing,
    Any: _anything,
}


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any) -> Any:
        wrongs = []
        for one in checks:
            try:
                return one(value)
            except _WrongError as wrong:
                # Its traceback would keep this call, and those that wait for it, until garbage is collected.
                wrongs.append(wrong.with_traceback(None))
        # What is wrong inside says more than that the whole is none of several kinds.
        deepest = max(wrongs, key=lambda wrong: len(wrong.field))
        if deepest.field:
            raise deepest
        raise _WrongError(" or ".join(wrong.expected for wrong in wrongs), value)

    return check


def _one_of(known: tuple[Any, ...]) -> Check:
    expected = " or ".join(json.dumps(one) for one in known)

    def check(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in known):
            raise _WrongError(expected, value)
        return value

    return check


def _sequence(check_one: Check, kind: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not list:
            raise _WrongError("a list", value)
        kept: list[Any] = []
        try:
            kept.extend(check_one(one) for one in value)
        except _WrongError as wrong:
            raise wrong.inside(f"[{len(kept)}]") from None
        return kept if kind is list else tuple(kept)

    return check


def _mapping(check_one: Check) -> Check:
    def check(value: Any) -> Any:
        _object_like(value)
        for name, one in value.items():
            _text(name)
            _inside(name, check_one, one)
        return value

    return check


def _typed_dict(kind: Any) -> Check:
    checks = [(name, _checker(hint)) for name, hint in get_type_hints(kind, include_extras=True).items()]
    required = kind.__required_keys__

    def check(value: Any) -> Any:
        _object_like(value)
        for name, check_one in checks:
            if name in value:
                _inside(name, check_one, value[name])
            elif name in required:
                _missing(name)
        return value

    return check


def _object(kind: Any) -> Check:
    """Made in one go; only when something is wrong it is looked for."""
    hints = get_type_hints(kind, include_extras=True)
    known = [one for one in fields(kind) if one.init]
    checks = [(one.name, _checker(hints[one.name])) for one in known if one.default is not None]
    optional = [(one.name, _checker(hints[one.name])) for one in known if one.default is None]
    of_fields = operator.itemgetter(*(name for name, _ in checks))

    def check(value: Any) -> Any:
        _object_like(value)
        try:
            values = of_fields(value)
        except KeyError as error:
            _missing(error.args[0])
        made = {name: _inside(name, one, found) for (name, one), found in zip(checks, values, strict=True)}
        made |= {name: _inside(name, one, value[name]) for name, one in optional if name in value}
        return kind(**made)

    return check


def _object_like(value: Any) -> None:
    if type(value) is not dict:
        raise _WrongError("an object", value)


def _missing(name: str) -> NoReturn:
    raise _WrongError("one", _MISSING).inside(name)


def _inside(name: str, check_one: Check, value: Any) -> Any:
    try:
        return check_one(value)
    except _WrongError as wrong:
        raise wrong.inside(name) from None
