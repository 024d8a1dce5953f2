"""Rows that the program holds or makes -> Arrow files, which are read as all files are.

A list, a frame, a table, a stream and a generator are gone through once a call. `map` writes them to files of about a
unit in the run folder, `tokenize` beside the store, while it is made. The files are named by their content and have no
time, so equal rows are equal input: what was made of them is reused, and a killed run is resumed. Holds one record
batch of about a megabyte. Disk: the rows as Arrow holds them.

    00000-3f0c6a1e9b3d2748.arrow    the rows, in the order of the names; another file where their types change
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, explain_os_errors
from milldam.mapping.function import ResultError, as_table, batches
from milldam.mapping.schema import fit, to_array, unified
from milldam.sources.batch import require_columns
from milldam.sources.rows import from_records, value_size

BATCH_BYTES, BATCH_ROWS = 1 << 20, 4096
_KNOWN = (
    "Known are paths, a pandas or polars frame, an Arrow table, a datasets.Dataset or IterableDataset, a list of dicts "
    "or an iterator of dicts or texts, and a function that yields them."
)


def spool(source: Any, folder: Path, columns: Sequence[str] | None = None, file_bytes: int = 1 << 30) -> str:
    """Write the rows to files of a new folder; return a name of the source for messages."""
    name, rows, known = _rows_of(source)
    if known is not None and columns is not None:
        require_columns(columns, known.names, name)
        known = pa.schema([known.field(one) for one in columns], metadata=known.metadata)
    with explain_os_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    pieces = _pieces(rows, columns, name)
    arrays = next(pieces, None)
    if arrays is None and known is not None:  # no rows, but columns
        arrays = {field.name: pa.array([], field.type) for field in known}
    schema: pa.Schema | None = None
    files = count = 0
    while arrays is not None:
        with NewFile(folder / "rows") as new:
            writer = None
            while arrays is not None:
                types = pa.schema([(name, array.type) for name, array in arrays.items()])
                try:
                    wider = types if schema is None else unified([schema, types])
                    if writer is not None and (wider != schema or new.size >= file_bytes):
                        break
                    batch, schema = fit(arrays, wider), wider
                except (ValueError, ResultError) as error:
                    raise InputError(f"{name}: rows from number {count + 1:,} on: {error}") from None
                if writer is None:
                    shown = schema.with_metadata(None if known is None else known.metadata)
                    writer = pa.ipc.new_file(pa.PythonFile(new, mode="w"), shown)
                writer.write_batch(batch)
                count += batch.num_rows
                arrays = next(pieces, None)
            assert writer is not None
            writer.close()
            path = folder / f"{files:05}-{new.record['xxh3']}.arrow"
            new.commit(path.name)
        os.utime(path, (0, 0))
        files += 1
    return name


def _pieces(rows: Iterable[Any], names: Sequence[str] | None, name: str) -> Iterator[dict[str, pa.Array]]:
    """The columns of about a megabyte of rows at a time."""
    count = size = 0
    held: list[dict[str, Any]] = []

    def arrays_of(piece: Mapping[str, Any], first: int, length: int) -> dict[str, pa.Array]:
        try:
            return {one: to_array(one, piece.get(one, [None] * length)) for one in names or piece}
        except ResultError as error:
            raise InputError(f"{name}: rows {first + 1:,} to {first + length:,}: {error}") from None

    for row in rows:
        if held and (size >= BATCH_BYTES or len(held) >= BATCH_ROWS or not isinstance(row, dict)):
            yield arrays_of(from_records(held), count - len(held), len(held))
            held, size = [], 0
        if isinstance(row, pa.RecordBatch | pa.Table):
            for piece in batches(row.to_batches() if isinstance(row, pa.Table) else [row], BATCH_ROWS, BATCH_BYTES):
                assert isinstance(piece, pa.RecordBatch)
                yield arrays_of(dict(zip(piece.schema.names, piece.columns, strict=True)), count, piece.num_rows)
                count += piece.num_rows
        elif isinstance(row, dict) and row and all(isinstance(key, str) for key in row):
            held.append(row)
            count, size = count + 1, size + sum(map(value_size, row.values()))
        else:
            raise InputError(f"{name}: row {count} is of type {type(row).__name__}. Yield rows as dicts of columns.")
    if held:
        yield arrays_of(from_records(held), count - len(held), len(held))


def _rows_of(source: Any) -> tuple[str, Iterable[Any], pa.Schema | None]:
    """What a source is called, its rows as dicts or Arrow tables, and its columns, if known."""
    table = as_table(pa.table({"text": source}) if isinstance(source, pa.Array | pa.ChunkedArray) else source)
    if table is not None:
        return "the table", [table], table.schema
    if type(source).__module__.split(".")[0] == "datasets":
        from datasets import Dataset, IterableDataset

        if isinstance(source, dict):
            which = f'which split? Give one: dataset["{next(iter(source), "train")}"].'
            raise ConfigError(f"{type(source).__name__}: {which}")
        if isinstance(source, Dataset | IterableDataset):
            schema = source.features and source.features.arrow_schema
            return "the dataset", _rows_of_dataset(source), schema
    rows = source() if callable(source) and not isinstance(source, type) else source
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise ConfigError(f"{type(rows).__name__}: no input. {_KNOWN}")
    name = "the list" if isinstance(source, list | tuple) else f"the {type(rows).__name__}"
    return name, ({"text": row} if isinstance(row, str) else row for row in rows), None


def _rows_of_dataset(dataset: Any) -> Iterator[Any]:
    """Arrow tables, or rows of a stream; pictures and sounds as their bytes."""
    if hasattr(dataset, "cache_files"):
        refuse_transform(dataset)
        yield from dataset.with_format("arrow", columns=dataset.column_names).iter(batch_size=BATCH_ROWS)
        return
    plain = dataset.with_format(None)
    if plain.features is not None and any(hasattr(feature, "decode") for feature in plain.features.values()):
        plain = plain.decode(False)
    yield from plain


def refuse_transform(dataset: Any) -> None:
    if dataset.format["type"] == "custom":
        what = (
            "The dataset has a transform, which is applied to rows as they are read. Give the function to milldam.map"
        )
        raise ConfigError(f"{what}, and the dataset without it: dataset.with_format(None)")


@contextlib.contextmanager
def as_files(source: Any, out: Path) -> Iterator[str]:
    """For jobs that read texts: a pattern of files with the rows of a source, while the block runs."""
    folder = out.with_name(f"{out.name}.input")
    try:
        spool(source, folder)
        if not any(folder.glob("*.arrow")):
            raise InputError("The input has no rows.")
        yield str(folder / "*.arrow")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
