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

An object of ten fields takes some microseconds. Needs nothing but Python: pydantic takes longer to import than a store
to open.
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

LARGEST = 2**53
"""Every reader of JSON can tell integers up to here apart, and no sum of a thousand of them overflows 64 bits."""
DEEPEST = 50


class _WrongError(Exception):
    """(place, what is expected there, what is found there; empty: nothing)"""


def parse_json(data: bytes, name: str | Path) -> Any:
    """The value of a file's bytes."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name}: damaged: can't be read as JSON ({error}).") from None


def checked(kind: type[T], value: Any, name: str | Path) -> T:
    """The value as this type; `name`: where it is from, for the message.

    >>> checked(list[int], [3, "x"], "a.json")
    Traceback (most recent call last):
    milldam.errors.StoreError: a.json: damaged: [1] is "x", where a whole number from 0 on is expected. Make it again.
    """
    try:
        return cast("T", _check(kind, value, ""))
    except _WrongError as wrong:
        place, expected, shown = wrong.args
        place = place.removeprefix(".")
        found = f"{place or 'it'} is {shown}" if shown else f"no {place}"
        raise StoreError(f"{name}: damaged: {found}, where {expected} is expected. Make it again.") from None


def _is_plain(value: Any, depth: int = 0) -> bool:
    """JSON that is not nested deeply, with texts that can be written: half of a surrogate pair can't be."""
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value)
    if not isinstance(value, dict | list):
        return True
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return depth < DEEPEST and all(_is_plain(one, depth + 1) for one in inner)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    # By its very type: True is an int too.
    int: ("a whole number from 0 on", lambda value: type(value) is int and 0 <= value <= LARGEST),
    float: ("a number from 0 on", lambda value: type(value) in (int, float) and math.isfinite(value) and value >= 0),
    str: ("text", lambda value: type(value) is str and _is_plain(value)),
    bool: ("true or false", lambda value: type(value) is bool),
    types.NoneType: ("null", lambda value: value is None),
    Any: ("plain JSON", _is_plain),
    list: ("a list", lambda value: type(value) is list),
    dict: ("an object", lambda value: type(value) is dict),
}


@functools.cache
def _parts(kind: Any) -> tuple[Any, Any]:
    """The form of a type and what it consists of: types, words, or (field, type, whether it must be there)."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is not None:
        return (Union if origin is types.UnionType else origin), inner
    if kind in _PLAIN:
        return kind, ()
    if not (is_typeddict(kind) or is_dataclass(kind)):
        raise TypeError(f"no check for {kind}")
    hints, stays = get_type_hints(kind, include_extras=True), is_typeddict(kind)
    needed = kind.__required_keys__ if stays else {one.name for one in fields(kind) if one.default is not None}
    names = hints if stays else [one.name for one in fields(kind) if one.init]
    return (dict if stays else "dataclass"), [(name, hints[name], name in needed) for name in names]


def _check(kind: Any, value: Any, place: str) -> Any:
    """The value as it is kept; raises _WrongError."""
    form, inner = _parts(kind)
    if form is Annotated:
        return _check(inner[1], value, place)
    if form is Literal:
        if not any(type(one) is type(value) and one == value for one in inner):
            raise _wrong(place, " or ".join(json.dumps(one) for one in inner), value)
        return value
    if form is Union:
        wrongs = []
        for one in inner:
            try:
                return _check(one, value, place)
            except _WrongError as wrong:
                wrongs.append(wrong.args)
        # An error deep inside says more than that the whole is none of several kinds.
        deepest = max(wrongs, key=lambda wrong: len(wrong[0]))
        expected = " or ".join(wrong[1] for wrong in wrongs)
        raise _WrongError(*deepest) if deepest[0] != place else _wrong(place, expected, value)
    shape = list if form is tuple else dict if form == "dataclass" else form
    expected, holds = _PLAIN[shape]
    if not holds(value):
        raise _wrong(place, expected, value)
    if not inner:
        return value
    if shape is list:
        return form(_check(inner[0], one, f"{place}[{number}]") for number, one in enumerate(value))
    if inner[0] is str:
        return {_check(str, key, place): _check(inner[1], one, f"{place}.{key}") for key, one in value.items()}
    made = {}
    for name, hint, is_needed in inner:
        if name in value:
            made[name] = _check(hint, value[name], f"{place}.{name}")
        elif is_needed:
            raise _WrongError(f"{place}.{name}", "one", "")
    return kind(**made) if form == "dataclass" else value


def _wrong(place: str, expected: str, value: Any) -> _WrongError:
    try:
        shown = json.dumps(value)
    except (RecursionError, TypeError, ValueError):
        shown = type(value).__name__
    return _WrongError(place, expected, shown if len(shown) <= 40 else f"{shown[:37]}...")
