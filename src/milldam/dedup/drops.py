"""Drop files: which documents to drop, and what each of them duplicates. Written by every way of dedup, read per unit.

`drops-<way>-<partition>.parquet`, the way being exact, bloom or near: (unit, row) of each dropped document and
(of_unit, of_row) of the one that is kept, how alike they are in thousandths, sorted by (unit, row), in row groups
whose statistics name their units. About 4 bytes of disk a dropped document, 6 of a near-duplicate. A
negative `of_unit` is no unit: -1 - k for what the run k of the index has seen, `UNKNOWN` where the way can't tell.

Reading holds one row group's share of the unit per file, at most 0.8 MB, however many documents the unit has.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from milldam.files import NewFile
from milldam.text.arrays import Verdicts

UNKNOWN = -(1 << 62)
"""`of_unit` where it is not known what a document duplicates."""

EXACT, BLOOM, NEAR = "exact", "bloom", "near"
DUPLICATE, SEEN_BEFORE, NEAR_DUPLICATE = "duplicate", "seen_before", "near_duplicate"
DUPLICATES = (DUPLICATE, SEEN_BEFORE, NEAR_DUPLICATE)
"""The reasons that this room gives."""

_GROUP_ROWS = 1 << 15
_SCHEMA = pa.schema(
    [
        ("unit", pa.uint32()),
        ("row", pa.uint64()),
        ("of_unit", pa.int64()),
        ("of_row", pa.uint64()),
        ("similarity", pa.uint16()),
    ]
)
_DELTA = ["unit", "row", "of_unit", "of_row"]
EQUAL = 1000
"""The similarity of equal texts, in thousandths."""

Integers = npt.NDArray[np.integer[Any]]


def drop_file_name(way: str, partition: int) -> str:
    """Where one way of dedup puts the drops of one partition.

    >>> drop_file_name(EXACT, 3)
    'drops-exact-00003.parquet'
    """
    return f"drops-{way}-{partition:05d}.parquet"


def unit_folder(folder: Path, unit: int) -> Path:
    """Where the drops of one unit are, when units are decided on one by one."""
    return folder / f"{unit:07d}"


class NewTable:
    """A Parquet file that appears under its name only when it is committed; a row group a call of `write`."""

    def __init__(self, path: Path, schema: pa.Schema, delta: list[str]) -> None:
        self._new = NewFile(path)
        plain = [name for name in schema.names if name not in delta]
        encoding = dict.fromkeys(delta, "DELTA_BINARY_PACKED") | dict.fromkeys(plain, "PLAIN")
        self._writer = pq.ParquetWriter(
            _Sink(self._new), schema, compression="zstd", use_dictionary=False, column_encoding=encoding
        )

    def write(self, columns: dict[str, npt.NDArray[Any]]) -> None:
        """Add one row group."""
        table = pa.table(columns, schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=max(1, len(table)))

    def commit(self) -> dict[str, Any]:
        """Make it durable under its name; its size and hash."""
        self._writer.close()
        return self._new.commit()

    def __enter__(self) -> NewTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The footer of a file that is given up goes nowhere; after a full disk not even that could be written.
        self._new.__exit__(kind, error, trace)
        self._writer.is_open = False


class _Sink:
    """What Parquet needs to see of a new file. Closing it commits nothing."""

    closed = False

    def __init__(self, new: NewFile) -> None:
        self._new = new

    def write(self, data: bytes | memoryview) -> int:
        self._new.write(data)
        return len(data)

    def tell(self) -> int:
        return self._new.size

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class DropWriter:
    """Writes one drop file; use it as a context manager. Holds 32,768 drops and what one call adds.

    with DropWriter(folder / drop_file_name(NEAR, 0)) as writer:
        writer.add(unit, row, of_unit, of_row)      # arrays, sorted by (unit, row), over all calls
        writer.commit()
    """

    def __init__(self, path: Path) -> None:
        self.dropped = 0
        self._last = (-1, -1)
        self._waiting: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _SCHEMA.names}
        self._table = NewTable(path, _SCHEMA, delta=_DELTA)

    def add(
        self, unit: Integers, row: Integers, of_unit: Integers, of_row: Integers, similarity: Integers | None = None
    ) -> None:
        """Add drops, in the order of (unit, row); without a similarity, of equal documents."""
        if not len(unit):
            return
        if similarity is None:
            similarity = np.full(len(unit), EQUAL)
        self._check_order(unit, row)
        self.dropped += len(unit)
        for name, values in zip(_SCHEMA.names, (unit, row, of_unit, of_row, similarity), strict=True):
            self._waiting[name].append(values.astype(_SCHEMA.field(name).type.to_pandas_dtype()))
        if sum(map(len, self._waiting["unit"])) >= _GROUP_ROWS:
            self._flush(whole_groups_only=True)

    def commit(self) -> dict[str, Any]:
        """Make the file durable under its name."""
        self._flush()
        return self._table.commit()

    def _check_order(self, unit: Integers, row: Integers) -> None:
        first, last = (int(unit[0]), int(row[0])), (int(unit[-1]), int(row[-1]))
        later = (unit[1:] > unit[:-1]) | ((unit[1:] == unit[:-1]) & (row[1:] > row[:-1]))
        if first <= self._last or not later.all():
            raise ValueError("drops must come in the order of (unit, row), each once")
        self._last = last

    def _flush(self, *, whole_groups_only: bool = False) -> None:
        """Groups of a constant size, so that the file does not depend on the sizes of the calls."""
        waiting = {name: np.concatenate(parts or [np.empty(0)]) for name, parts in self._waiting.items()}
        rows = len(waiting["unit"])
        stop = rows - rows % _GROUP_ROWS if whole_groups_only else rows
        for start in range(0, stop, _GROUP_ROWS):
            group = slice(start, min(stop, start + _GROUP_ROWS))
            self._table.write({name: values[group] for name, values in waiting.items()})
        # A copy: a view would keep all that was written.
        self._waiting = {name: [values[stop:].copy()] for name, values in waiting.items()}

    def __enter__(self) -> DropWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._table.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class Original:
    """What a dropped document duplicates."""

    reason: str
    unit: int | None = None
    row: int | None = None
    """The document that is kept; None when another run has it, or when the way can't tell."""
    indexed_run: int | None = None
    """The position, among the runs of the index, of the run that has seen it."""
    similarity: int = EQUAL
    """How alike the two are, in thousandths."""


class DropSet:
    """The dropped documents of one unit. Reads what it is asked for; going through a unit in order reads it once."""

    def __init__(self, files: list[_UnitFile]) -> None:
        self._files = files

    @classmethod
    def load(cls, folder: Path, unit: int, *, near: bool = True) -> DropSet:
        """The drops of a unit by all ways, or all but near-dedup; an exact one is named before a near one.

        They are in files for all units, or in a folder for each that has any (`unit_folder`).
        """
        own = unit_folder(folder, unit)
        paths = sorted((own if own.is_dir() else folder).glob("drops-*.parquet"))
        wanted = (path for path in paths if near or not path.name.startswith(f"drops-{NEAR}-"))
        return cls([file for file in (_UnitFile(path, unit) for path in wanted) if file.has_any])

    def apply(self, first_row: int, verdicts: Verdicts) -> None:
        """Mark the dropped among the documents first_row, first_row + 1, ... that the verdicts are about."""
        documents = len(verdicts.codes)
        for file in self._files:
            for row, reason_code in file.between(first_row, first_row + documents):
                for code, reason in enumerate(file.reasons):
                    which = np.zeros(documents, dtype=bool)
                    which[row[reason_code == code] - first_row] = True
                    if which.any():
                        verdicts.drop(which, reason)

    def of(self, row: int) -> Original | None:
        """What a dropped document duplicates; None for one that is kept."""
        found = (file.original(row) for file in self._files)
        return next((one for one in found if one is not None), None)


class _UnitFile:
    """The part of a drop file that is about one unit."""

    def __init__(self, path: Path, unit: int) -> None:
        way = path.name.split("-")[1]
        self.reasons = [NEAR_DUPLICATE if way == NEAR else DUPLICATE, SEEN_BEFORE]
        self._path, self._unit = path, unit
        self._held: tuple[int, dict[str, npt.NDArray[Any]]] | None = None
        with pq.ParquetFile(path) as file:
            self._groups = _groups_of(file.metadata, unit)

    @property
    def has_any(self) -> bool:
        """Whether the file may have drops of the unit."""
        return bool(self._groups)

    def between(self, start: int, stop: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]]:
        """(rows, position in `reasons`) of the drops in a range of rows, group by group."""
        for number, (_, low, high) in enumerate(self._groups):
            if low < stop and start <= high:
                held = self._read(number)
                first, last = np.searchsorted(held["row"], [start, stop]).tolist()
                of_unit = held["of_unit"][first:last]
                seen = (of_unit < 0) & (of_unit != UNKNOWN)
                yield held["row"][first:last], seen.astype(np.int8)

    def original(self, row: int) -> Original | None:
        """What the document of a row duplicates by this file."""
        for number, (_, low, high) in enumerate(self._groups):
            if low <= row <= high:
                held = self._read(number)
                at = int(np.searchsorted(held["row"], row))
                if at < len(held["row"]) and held["row"][at] == row:
                    found = self._describe(int(held["of_unit"][at]), int(held["of_row"][at]))
                    return replace(found, similarity=int(held["similarity"][at]))
        return None

    def _describe(self, of_unit: int, of_row: int) -> Original:
        if of_unit >= 0:
            return Original(self.reasons[0], of_unit, of_row)
        if of_unit == UNKNOWN:
            return Original(self.reasons[0])
        return Original(self.reasons[1], indexed_run=-1 - of_unit)

    def _read(self, number: int) -> dict[str, npt.NDArray[Any]]:
        """The unit's rows of a row group; the last one read is kept."""
        group = self._groups[number][0]
        if self._held is None or self._held[0] != group:
            with pq.ParquetFile(self._path) as file:
                table = file.read_row_group(group)
            columns = {name: table.column(name).to_numpy() for name in table.column_names}
            first, last = np.searchsorted(columns["unit"], [self._unit, self._unit + 1]).tolist()
            # Copies: a view would keep the rows of other units.
            held = {name: columns[name][first:last].astype(np.int64) for name in _SCHEMA.names[1:]}
            self._held = (group, held)
            # The statistics of a group that other units share are too wide: it would be read for every batch.
            rows = held["row"]
            self._groups[number] = (group, int(rows[0]), int(rows[-1])) if len(rows) else (group, 0, -1)
        return self._held[1]


def _groups_of(metadata: pq.FileMetaData, unit: int) -> list[tuple[int, int, int]]:
    """(row group, lowest row, highest row) of the row groups that may hold drops of a unit. They are sorted by unit."""

    def bounds(group: int, column: int) -> tuple[int, int]:
        statistics = metadata.row_group(group).column(column).statistics
        return int(statistics.min), int(statistics.max)

    every = range(metadata.num_row_groups)
    first = bisect.bisect_left(every, unit, key=lambda group: bounds(group, 0)[1])
    last = bisect.bisect_right(every, unit, key=lambda group: bounds(group, 0)[0])
    return [(group, *bounds(group, 1)) for group in range(first, last)]
