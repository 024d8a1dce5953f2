"""`Table`: what `milldam.map` or `milldam qa` made, opened memory-mapped.

Opening reads the manifest and nothing else; a shard is mapped when a row of it is asked for, and at most a few dozen
stay open. Rows that are read are the only memory it takes; what is mapped the kernel takes back at will. A table
pickles as its path, so that a worker process opens it anew.

Rows come as Python lists, numpy arrays, or Arrow itself. Numbers without nulls become numpy arrays without a copy;
lists of equal fixed length a 2-D array; lists of any length an array of arrays; texts an array of `str` objects.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import operator
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from milldam.errors import ConfigError, StoreError, did_you_mean
from milldam.files import address_of, in_home
from milldam.markup import counted
from milldam.memory import format_size
from milldam.stores.kinds import TABLE
from milldam.stores.place import Folder, hold, same_generation
from milldam.stores.table.manifest import IN_USE, NAME, TableManifest

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

    from milldam.run.summary import Summary

FORMATS = ("python", "numpy", "arrow")


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table with the columns of a schema that holds all its values; columns that it lacks are null. Those of the same
    type are not copied. Raises what Arrow raises where a value does not fit."""
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    if set(table.schema.names) - set(schema.names):
        raise pa.ArrowInvalid(f"other columns: {', '.join(table.schema.names)}")
    columns = []
    for field in schema:
        at = table.schema.get_field_index(field.name)
        columns.append(pa.nulls(len(table), field.type) if at < 0 else cast_column(table.column(at), field.type))
    return pa.table(columns, schema=schema)


def cast_column(column: pa.Array | pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """A column as another type that holds all its values."""
    import pyarrow as pa

    if column.type.equals(kind):
        return column
    try:
        return column.cast(kind, safe=True)
    except pa.ArrowNotImplementedError:  # what casts of nested types lack: by way of values
        return pa.array(column.to_pylist(), kind)


def columns_as(rows: pa.RecordBatch | pa.Table, format: str) -> Any:
    """A dict of columns as lists or numpy arrays, or a `pa.Table`."""
    import pyarrow as pa

    if format == "arrow":
        return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if format == "python":
        return rows.to_pydict()
    return {name: as_numpy(rows.column(name)) for name in rows.schema.names}


def as_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as a numpy array; what numpy has no type for, as an array of objects."""
    import numpy as np
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # too large for one array of its type
        return np.concatenate([as_numpy(chunk) for chunk in array.chunks])
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        shape.append(array.type.list_size)
        array = array.flatten()
    values: np.ndarray[Any, Any] = array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


_OPEN_SHARDS = 64
_ROWS_AT_ONCE = 1000


class Table:
    """Rows by number, and columns by name, in mapped files.

    >>> rows = [{"id": number, "text": "word " * number} for number in range(1000)]
    >>> table = milldam.map(rows, lambda batch: {"length": [len(text) for text in batch["text"]]}, "lengths.table")
    >>> len(table), table[3], table[10:13]["length"]
    (1000, {'id': 3, 'text': 'word word word ', 'length': 15}, [50, 55, 60])
    """

    def __init__(self, path: str | Path | Folder) -> None:
        address = None if isinstance(path, Folder) else address_of(path)
        if address is not None:
            raise ConfigError(f"{address}: a table is read on this machine: `milldam pull` or copy it here first.")
        self._place = path if isinstance(path, Folder) else Folder(Path(in_home(path)))
        self.path = self._place.folder
        with contextlib.suppress(OSError):
            # Keeps a table of the cache from being removed; others have no such file.
            self._use = hold(self.path / IN_USE)
            os.utime(self.path / IN_USE)
        self.manifest: TableManifest = TABLE.read(self._place)
        self.columns = list(self.manifest.schema.columns)
        self.column_names = list(self.columns)
        """The same, as HF datasets calls it."""
        self.fingerprint = self.manifest.fingerprint
        """Names the content: equal fingerprints mean equal rows in equal order."""
        self._files = self.manifest.shards
        self.shards = len(self._files)
        """How many files the rows are in."""
        self._ends = list(itertools.accumulate(shard.rows for shard in self._files))
        self.num_rows = self._ends[-1] if self._ends else 0
        self._open: OrderedDict[int, pa.Table] = OrderedDict()
        self._sound: defaultdict[int, set[int]] = defaultdict(set)
        """Record batches of each file that were looked through."""
        self.report: Summary[Any] | None = None
        """The summary of the `milldam.map` that returned this table; None for one that was opened by its path."""

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        columns, size = ", ".join(self.columns), format_size(self.manifest.bytes)
        rows, shards = counted(len(self), "row"), counted(self.shards, "shard")
        return f"Table('{self.path}': {rows} of {columns}; {shards}, {size})"

    def __eq__(self, other: object) -> bool:
        """Whether the rows are the same, in the same order, under the same columns."""
        if not isinstance(other, Table):
            return NotImplemented
        return self.manifest.fingerprint == other.manifest.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_same, (self._place, self.fingerprint)

    # ---- files ----

    def _map(self, number: int) -> pa.Table:
        """A file, mapped, with the columns that it has; some dozens stay open."""
        import pyarrow as pa

        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self._files[number]
        path = self.path / shard.name
        try:
            if path.stat().st_size != shard.bytes:
                raise self._damaged(number, "not of the size that the manifest says")
            with pa.memory_map(str(path)) as file:
                table = pa.ipc.open_stream(file).read_all()
        except FileNotFoundError:
            raise StoreError(f"{path}: missing. Make the table again: the same call makes what is missing.") from None
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(number, error) from None
        if table.num_rows != shard.rows:
            raise self._damaged(number, f"{table.num_rows:,} rows where the manifest says {shard.rows:,}")
        self._cast(number, table.slice(0, 0))  # it has columns of the manifest
        self._open[number] = table
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return table

    def _cast(self, number: int, rows: pa.Table) -> pa.Table:
        """Rows of one file with the columns that the manifest says."""
        import pyarrow as pa

        try:
            return as_schema(rows, self.schema)
        except pa.ArrowException as error:
            raise self._damaged(number, f"other columns than the manifest says: {error}") from None

    def _damaged(self, number: int, what: object) -> StoreError:
        path = self.path / self._files[number].name
        return StoreError(f"{path}: damaged ({what}). `milldam verify {self.path}` tells more.")

    def rows_of(self, number: int, begin: int, rows: int) -> pa.Table:
        """Rows of one file. Arrow believes what lies in it, and would read elsewhere by an offset that is wrong: so
        each batch is checked whole when a row of it is first asked for."""
        import pyarrow as pa

        table, at = self._map(number), 0
        if table.num_columns and len(self._sound[number]) < table.column(0).num_chunks:
            for k, batch in enumerate(table.to_batches()):
                if at < begin + rows and at + batch.num_rows > begin and k not in self._sound[number]:
                    try:
                        batch.validate(full=True)
                    except pa.ArrowException as error:
                        raise self._damaged(number, error) from None
                    self._sound[number].add(k)
                at += batch.num_rows
        return self._cast(number, table.slice(begin, rows))

    @functools.cached_property
    def schema(self) -> pa.Schema:
        return self.manifest.schema.to_arrow(self.path / NAME)

    # ---- rows ----

    @overload
    def __getitem__(self, which: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, which: slice) -> dict[str, list[Any]]: ...
    @overload
    def __getitem__(self, which: str) -> pa.ChunkedArray: ...
    @overload
    def __getitem__(self, which: Sequence[int] | Sequence[str]) -> Any: ...
    def __getitem__(self, which: int | slice | str | Sequence[int] | Sequence[str]) -> Any:
        """A row as a dict; rows i to j, or those of a list of numbers, as a dict of lists; a column, or those of a list
        of names, mapped."""
        import pyarrow as pa

        if isinstance(which, str):
            return self.to_arrow([which]).column(which)
        if isinstance(which, slice):
            begin, end, step = which.indices(len(self))
            return self.rows(begin, end).to_pydict() if step == 1 else self[list(range(begin, end, step))]
        if hasattr(which, "__len__"):  # also a numpy array
            several: Any = which
            if len(several) and all(isinstance(one, str) for one in several):
                return self.to_arrow([str(one) for one in several])
            if not all(hasattr(one, "__index__") for one in several):
                raise ConfigError("table[[...]]: numbers of rows, or names of columns, are wanted.")
            found = [self.schema.empty_table(), *(self._row(one) for one in several)]
            return pa.concat_tables(found).to_pydict()
        return self._row(which).to_pylist()[0]

    def _row(self, which: Any) -> pa.Table:
        number = operator.index(which)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"row {which} of a table of {len(self):,} rows")
        return self.rows(number, number + 1)

    def rows(self, begin: int, end: int) -> pa.Table:
        """Rows `begin` to `end` as a `pa.Table`, mapped."""
        import pyarrow as pa

        found = [self.schema.empty_table()]
        while begin < min(end, len(self)):
            number = bisect.bisect_right(self._ends, begin)
            start = self._ends[number - 1] if number else 0
            stop = min(end, self._ends[number])
            found.append(self.rows_of(number, begin - start, stop - begin))
            begin = stop
        return pa.concat_tables(found)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for rows in self.batches(_ROWS_AT_ONCE, format="arrow"):
            yield from rows.to_pylist()

    def batches(self, size: int, *, format: str = "python", columns: Sequence[str] | None = None) -> Iterator[Any]:
        """Rows in order, `size` at a time: dicts of lists, of numpy arrays, or Arrow tables. The last may be short."""
        if format not in FORMATS:
            raise ConfigError(f'format: "{format}"; must be one of {", ".join(FORMATS)}.')
        if size < 1:
            raise ConfigError(f"batches of {size} rows; use 1 or more.")
        names = _known(self.columns, columns)
        return (columns_as(self.rows(begin, begin + size).select(names), format) for begin in range(0, len(self), size))

    # ---- other tools ----

    def to_arrow(self, columns: Sequence[str] | None = None) -> pa.Table:
        """All rows as one `pa.Table`, mapped: this takes next to no memory."""
        import pyarrow as pa

        names = _known(self.columns, columns)
        tables = [self.schema.empty_table(), *(self._cast(number, self._map(number)) for number in range(self.shards))]
        return pa.concat_tables([table.select(names) for table in tables])

    def to_hf(self) -> Any:
        """All rows as a `datasets.Dataset` on the same files, mapped: nothing is copied, but for shards of
        narrower types."""
        try:
            from datasets import Dataset, concatenate_datasets
        except ImportError:
            raise ConfigError('to_hf needs HF datasets: pip install "milldam[hf]".') from None
        parts = []
        for number, shard in enumerate(self._files):
            table = self._map(number)  # says which file is missing or damaged, better than datasets would
            if table.schema.equals(self.schema):
                parts.append(Dataset.from_file(str(self.path / shard.name)))
            else:
                parts.append(Dataset(self._cast(number, table)))
        return concatenate_datasets(parts) if parts else Dataset(self.schema.empty_table())


def _reopen_same(place: Folder, fingerprint: str) -> Table:
    """In another process: the table may have been replaced meanwhile."""
    return Table(same_generation(place, TABLE, fingerprint))


def _known(names: list[str], wanted: Sequence[str] | None) -> list[str]:
    for name in wanted or ():
        if name not in names:
            hint = did_you_mean(name, names)
            raise ConfigError(f'no column "{name}"; there are {", ".join(names)}.{hint}')
    return names if wanted is None else list(wanted)
