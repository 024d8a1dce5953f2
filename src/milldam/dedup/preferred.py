"""A field kept beside the texts -> a number for each document, by which near-duplicates stay or go.

A number is what it is, true and false are 1 and 0, a date is the microseconds since 1970 (UTC where it names no zone);
of a text, what it spells: `0.93`, `2024-05`, `2024-05-01T12:00:00Z`. As 64-bit floats: whole numbers beyond 2^53 that
differ by less than these tell apart are equal. NaN: the record has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.dedup.candidates import POSITIONS, RANKS, Documents, NearWork
from milldam.dedup.drops import EXACT, drop_files, drops_in, unit_and_row
from milldam.dedup.keys import Hashes, Int64s, SortedKeys, mapped, new_mapped, work_folder
from milldam.dedup.minhash import unit_name
from milldam.errors import InputError

ValueKind = Literal["number", "date"]
Floats = npt.NDArray[np.float64]
_LONGEST = 64
"""Characters of a text that may spell a number or a date."""
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)
_MONTH = re.compile(r"\d{4}(-\d{2})?")


@dataclass(frozen=True, slots=True)
class ValueField:
    """Which field holds the values, and what they must be."""

    name: str
    """Dots for nested fields."""
    kind: ValueKind = "number"

    def of_column(self, column: pa.Array) -> Floats:
        """
        >>> ValueField("day", "date").of_column(pa.array(["1970-01-02", "soon"])).tolist()
        [86400000000.0, nan]
        """
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if _is_text(column.type):
            return np.fromiter(map(self._of_text, _beginnings(column)), np.float64, len(column))
        if _kind_of_type(column.type) != self.kind:
            return np.full(len(column), math.nan)
        if self.kind == "date":
            column = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)

    def _of_text(self, text: str | None) -> float:
        if text is None or len(text) > _LONGEST:
            return math.nan
        text = text.strip()
        try:
            if self.kind == "number":
                return float(text.lower() == "true") if text.lower() in ("true", "false") else float(text)
            # A year or a month is its first day.
            at = datetime.fromisoformat(f"{text}-01-01"[:10] if _MONTH.fullmatch(text) else text)
            return float(((at if at.tzinfo is not None else at.replace(tzinfo=UTC)) - _EPOCH) // _MICROSECOND)
        except (ValueError, OverflowError):
            return math.nan


def value_field(name: str, path: str, values: pa.Array, setting: str) -> ValueField:
    """The field `name`, of which the head of a file holds these values; raises InputError where they are neither."""
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):
        return ValueField(name)  # nothing in it so far: numbers, then
    kind, shown = _kind_of_type(values.type), str(values.type)
    if _is_text(values.type):
        numbers = ~np.isnan(ValueField(name, "number").of_column(values))
        dates = ~np.isnan(ValueField(name, "date").of_column(values))
        # The first value that is one of the two alone tells; 2024 may be either.
        alone = np.flatnonzero(numbers != dates)
        kind = "date" if len(alone) and dates[alone[0]] else "number"
        first = next(filter(None, _beginnings(values)), None)
        if first is not None and not (numbers | dates).any():
            kind, shown = None, f'"{first[:60]}"'
    if kind is None:
        raise InputError(f'{path}: the field "{name}" holds neither numbers nor dates, but {shown}. Change {setting}.')
    return ValueField(name, kind)


def _kind_of_type(kind: pa.DataType) -> ValueKind | None:
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "date"
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    return "number" if plain or pa.types.is_boolean(kind) else None


def _is_text(kind: pa.DataType) -> bool:
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(text or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _beginnings(column: pa.Array) -> Iterator[str | None]:
    """Of texts, whatever they hold that is no UTF-8."""
    for raw in column.cast(pa.large_binary()).to_pylist():
        yield None if raw is None else raw[: 4 * _LONGEST + 1].decode("utf-8", "replace")


# ---- preferences -> ranks ----

_HELD_BYTES = 48
"""What is held of a document at a time."""


def rank(work: NearWork) -> None:
    """Put the documents in the order of preference: two files of 8 bytes a document. Without them, plan order it is."""
    with work_folder(work.folder / "near-ranking") as folder:
        documents = Documents(work)
        if documents.count:
            positions = _sorted(work, documents, folder)
            ranks = new_mapped(folder / RANKS, np.int64, documents.count)
            for some in _numbers(work, 0, documents.count):
                ranks[positions[some]] = some
            for name in (RANKS, POSITIONS):
                (folder / name).replace(work.folder / name)


def _sorted(work: NearWork, documents: Documents, folder: Path) -> Int64s:
    """The positions in order; also in the file `POSITIONS`."""
    preferences, most = _preferences(work, documents, folder / "preferences")
    bits = max(1, (documents.count - 1).bit_length())
    before: Int64s | None = None
    for shift in range(0, max(1, most.bit_length()), 64 - bits):
        keys = SortedKeys(folder / "keys", work.share(_HELD_BYTES))
        for some in _numbers(work, documents.exempt, documents.count):
            part = preferences[some if before is None else before[some]] >> np.uint64(shift)
            # What goes over the left edge is sorted by in the next round.
            keys.add(part << np.uint64(bits) | some.astype(np.uint64))
        (folder / POSITIONS).unlink(missing_ok=True)  # it is still mapped
        after = new_mapped(folder / POSITIONS, np.int64, documents.count)
        for some in _numbers(work, 0, documents.exempt):
            after[some] = some
        done = documents.exempt
        for block in keys.blocks(work.share(_HELD_BYTES)):
            places = (block & np.uint64((1 << bits) - 1)).astype(np.int64)
            after[done : done + len(places)] = places if before is None else before[places]
            done += len(places)
        keys.remove()
        before = after
    return after


def _preferences(work: NearWork, documents: Documents, path: Path) -> tuple[Hashes, int]:
    """By position, and the largest of them. A text that occurs several times has the best that a field gives it."""
    preferences, most = new_mapped(path, np.uint64, documents.count), 0
    table = documents.signatures
    for unit in table.units[table.units >= work.exempt_below].tolist():
        base, stop = table.before(unit), table.before(unit + 1)
        written = mapped(work.folder / f"preferences-{unit_name(unit)}.bin", np.uint64)
        for some in _numbers(work, base, stop):
            preferences[some] = written[some - base]
            most = max(most, int(preferences[some].max()))
    for path in drop_files(work.folder, EXACT) if work.rules.preferred_field is not None else ():
        for drops in drops_in(path):
            units, _ = unit_and_row(drops["of"])
            ranked = drops[units >= work.exempt_below]
            copies, first = (table.positions(*unit_and_row(ranked[name])) for name in ("place", "of"))
            np.minimum.at(preferences, first, preferences[copies])
    return preferences, most


def _numbers(work: NearWork, first: int, stop: int) -> Iterator[Int64s]:
    """From one up to another, some at a time."""
    for start in range(first, stop, work.share(_HELD_BYTES)):
        yield np.arange(start, min(stop, start + work.share(_HELD_BYTES)))
