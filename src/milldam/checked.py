"""JSON from anywhere -> values of known types, or an error that names the file and the field.

The types are the annotations of a dataclass or a TypedDict:

    int             a count, a size or an id: 0 to 2^53
    float           any finite number from 0 on
    str, bool, None, Literal, unions of them
    list[X], tuple[X, ...], dict[str, X]
    a TypedDict     stays a dict; it may have keys that are not named
    a dataclass     is made from an object with all of its fields, but for those that are None by default; the object
                    may have keys that are not fields
    Any             anything that is not nested deeper than `DEEPEST`
    Annotated[X, Y] checked as Y; type checkers read X

A check is put together once for each type; an object of ten fields takes some microseconds. Needs nothing but Python.
"""

from __future__ import annotations

import functools
import json
import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from milldam.errors import StoreError

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Returns the value as it is kept, or raises `_WrongError`."""

LARGEST = 2**53
"""Every reader of JSON can tell integers up to here apart, and no sum of a thousand of them overflows 64 bits."""
DEEPEST = 50


class _WrongError(Exception):
    def __init__(self, expected: str, found: str, field: str = "") -> None:
        self.expected, self.found, self.field = expected, found, field

    def inside(self, name: str | int) -> _WrongError:
        """The same, as seen from the value that this one is part of."""
        between = "." if self.field and not self.field.startswith("[") else ""
        place = name if isinstance(name, str) else f"[{name}]"
        return _WrongError(self.expected, self.found, f"{place}{between}{self.field}")


def parse_json(data: bytes, name: str | Path) -> Any:
    """The value of a file's bytes."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise StoreError(f"{name}: damaged: can't be read as JSON ({error}).") from None
    except RecursionError:
        raise StoreError(f"{name}: damaged: its JSON is nested too deeply.") from None


def read_json(path: Path) -> Any:
    """The value of a file; FileNotFoundError if there is none."""
    try:
        return parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: can't be read ({error.strerror}).") from None


def checked(kind: type[T], value: Any, name: str | Path) -> T:
    """The value as this type; `name`: where it is from, for the message.

    >>> checked(list[int], [3, "x"], "a.json")
    Traceback (most recent call last):
    milldam.errors.StoreError: a.json: damaged: [1] is "x", where a whole number from 0 on is expected. Make it again.
    """
    try:
        return cast("T", _checker(cast("Any", kind))(value))
    except _WrongError as wrong:
        found = f"{wrong.field or 'it'} is {wrong.found}" if wrong.found else f"no {wrong.field}"
        raise StoreError(f"{name}: damaged: {found}, where {wrong.expected} is expected. Make it again.") from None


def _is_text(value: Any) -> bool:
    """Half of a surrogate pair can't be written anywhere."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """JSON that is not nested deeply, with texts that can be written."""
    if not isinstance(value, dict | list):
        return not isinstance(value, str) or _is_text(value)
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return depth < DEEPEST and all(_is_plain(one, depth + 1) for one in inner)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    # By its very type: True is an int too.
    int: ("a whole number from 0 on", lambda value: type(value) is int and 0 <= value <= LARGEST),
    float: ("a number from 0 on", lambda value: type(value) in (int, float) and math.isfinite(value) and value >= 0),
    str: ("text", _is_text),
    bool: ("true or false", lambda value: type(value) is bool),
    types.NoneType: ("null", lambda value: value is None),
    Any: ("plain JSON", _is_plain),
    list: ("a list", lambda value: type(value) is list),
    dict: ("an object", lambda value: type(value) is dict),
}


def _inside(check: Check, name: str | int, value: Any) -> Any:
    try:
        return check(value)
    except _WrongError as wrong:
        raise wrong.inside(name) from None


@functools.cache
def _checker(kind: Any) -> Check:
    """The check of a type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in _PLAIN or origin is Literal:
        words = [(type(one), one) for one in inner]
        literal = " or ".join(json.dumps(one) for one in inner), lambda value: (type(value), value) in words
        expected, holds = _PLAIN.get(kind, literal)

        def check_plain(value: Any) -> Any:
            if not holds(value):
                raise _wrong(expected, value)
            return value

        return check_plain
    if origin is Annotated:
        return _checker(inner[1])
    if origin in (Union, types.UnionType):
        return _any_of([_checker(one) for one in inner])
    if origin in (list, tuple):
        as_list, check_item = _checker(list), _checker(inner[0])
        return lambda value: origin(_inside(check_item, number, one) for number, one in enumerate(as_list(value)))
    as_dict = _checker(dict)
    if origin is dict:
        check_key, check_value = _checker(str), _checker(inner[1])
        return lambda value: {check_key(key): _inside(check_value, key, one) for key, one in as_dict(value).items()}
    if not (is_typeddict(kind) or is_dataclass(kind)):
        raise TypeError(f"no check for {kind}")
    hints, stays = get_type_hints(kind, include_extras=True), is_typeddict(kind)
    needed = kind.__required_keys__ if stays else {one.name for one in fields(kind) if one.default is not None}
    names = hints if stays else [one.name for one in fields(kind) if one.init]
    checks = [(name, _checker(hints[name]), name in needed) for name in names]

    def check_object(value: Any) -> Any:
        as_dict(value)
        made = {}
        for name, check, is_needed in checks:
            if name in value:
                made[name] = _inside(check, name, value[name])
            elif is_needed:
                raise _WrongError("one", "", name)
        return value if stays else kind(**made)

    return check_object


def _any_of(checks: list[Check]) -> Check:
    def check(value: Any) -> Any:
        wrongs = []
        for one in checks:
            try:
                return one(value)
            except _WrongError as wrong:
                # Its traceback would keep this call, and those that wait for it, until garbage is collected.
                wrongs.append(wrong.with_traceback(None))
        # An error deep inside says more than that the whole is none of several kinds.
        deepest = max(wrongs, key=lambda wrong: len(wrong.field))
        raise deepest if deepest.field else _wrong(" or ".join(wrong.expected for wrong in wrongs), value)

    return check


def _wrong(expected: str, value: Any) -> _WrongError:
    try:
        shown = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        shown = type(value).__name__
    return _WrongError(expected, shown if len(shown) <= 40 else f"{shown[:37]}...")
