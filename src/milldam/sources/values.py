"""A field of the records beside the text -> a number for each document, by which the one that stays is chosen.

A number is what it is, true and false are 1 and 0, a date is the microseconds since 1970 (UTC where it names no zone);
of a text, what it spells: `0.93`, `2024-05`, `2024-05-01T12:00:00Z`. As 64-bit floats: whole numbers beyond 2^53 that
differ by less than these tell apart are equal. NaN: the record has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

ValueKind = Literal["number", "date"]
Floats = npt.NDArray[np.float64]
NOTHING = math.nan
LONGEST = 64
"""Characters of a text that may spell a number or a date."""
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
_MONTH = re.compile(r"\d{4}(-\d{2})?")
_WORDS = {"true": 1.0, "false": 0.0}


@dataclass(frozen=True, slots=True)
class ValueField:
    """Where the number of a record is, and what it must be."""

    name: str
    """Dots for nested fields."""
    kind: ValueKind = "number"

    @property
    def path(self) -> list[str]:
        return self.name.split(".")

    def of_record(self, record: Any) -> float:
        """
        >>> ValueField("meta.score").of_record({"meta": {"score": "0.5"}})
        0.5
        """
        for name in self.path:
            record = record.get(name) if isinstance(record, dict) else None
        return self.of(record)

    def of(self, value: Any) -> float:
        """
        >>> ValueField("day", "date").of("1970-01-02"), ValueField("day").of("1970-01-02")
        (86400000000.0, nan)
        """
        try:
            return _number(value) if self.kind == "number" else _microseconds(value)
        except (ValueError, OverflowError):
            return NOTHING

    def of_all(self, values: Iterable[Any]) -> Floats:
        return np.fromiter(map(self.of, values), np.float64)

    def of_records(self, records: Iterable[Any]) -> Floats:
        return np.fromiter(map(self.of_record, records), np.float64)

    def reads(self, kind: pa.DataType | None) -> bool:
        """Whether a column of this type may hold such values."""
        return kind is not None and (is_text(kind) or kind_of_type(kind) == self.kind)

    def of_column(self, column: pa.Array) -> Floats:
        """Of a column that it reads."""
        if is_text(column.type):
            return self.of_all(texts_of(column))
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if self.kind == "date":
            zone = getattr(column.type, "tz", None)
            column = column.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)


def kind_of(values: Iterable[Any]) -> ValueKind | None:
    """What some values are, by the first that is one of the two alone; None: nothing that could be put in order.

    >>> kind_of([None, "2024", "2024-05"]), kind_of(["2024", "x"]), kind_of(["soon"])
    ('date', 'number', None)
    """
    told: ValueKind | None = None
    for value in values:
        is_number, is_date = (not math.isnan(one.of(value)) for one in (ValueField(""), ValueField("", "date")))
        if is_number or is_date:
            told = "number" if is_number else "date"
        if is_number != is_date:
            break
    return told


def kind_of_type(kind: pa.DataType) -> ValueKind | None:
    """The same of a column that is no text."""
    kind = _plain(kind)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "date"
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return "number" if plain or pa.types.is_boolean(kind) else None


def is_text(kind: pa.DataType) -> bool:
    kind = _plain(kind)
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def texts_of(column: pa.Array) -> Iterator[str | None]:
    """The beginnings of texts, whatever they hold that is no UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for raw in column.cast(pa.large_binary()).to_pylist():
        yield None if raw is None else raw[: 4 * LONGEST + 1].decode("utf-8", "replace")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _number(value: Any) -> float:
    if isinstance(value, str):
        text = _short(value)
        return _WORDS[text.lower()] if text.lower() in _WORDS else float(text)
    return float(value) if isinstance(value, bool | int | float | Decimal) else NOTHING


def _microseconds(value: Any) -> float:
    if isinstance(value, str):
        text = _short(value)
        # A year or a month is its first day.
        value = datetime.fromisoformat(f"{text}-01-01"[:10] if _MONTH.fullmatch(text) else text)
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        return NOTHING
    at = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    return float((at - _EPOCH) // _MICROSECOND)


def _short(text: str) -> str:
    """Raises ValueError for one that is longer than what spells a number or a date."""
    if len(text) > LONGEST:
        raise ValueError
    return text.strip()
