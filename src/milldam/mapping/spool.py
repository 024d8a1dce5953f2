"""Rows that the program holds or makes, and standard input -> files, which are read as all files are.

Of `map`: Arrow files of about a unit in the run folder, with record batches of about a megabyte. They are named by
their content and have no time, so a unit is the same unit if the same rows are spooled again. Holds one record batch.
Disk: the rows as Arrow holds them.

    00000-3f0c6a1e9b3d2748.arrow    the rows, in the order of the names; another file where their types change
    complete.json                   what they were made from, written last; without it the rows are spooled again

Of `tokenize`: the same files beside the store, while the store is made. Equal rows are equal input, and a killed run is
resumed.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, explain_os_errors, hash_bytes, is_whole, read_sealed, write_sealed
from milldam.input_files import COMPRESSIONS, version_of
from milldam.mapping.function import ResultError, as_table, batches
from milldam.mapping.identity import identify
from milldam.mapping.schema import fit, to_array, unified
from milldam.mapping.settings import MapSettings
from milldam.sources.compression import STDIN, open_bytes
from milldam.sources.rows import from_records, value_size
from milldam.sources.units import InputFile, list_inputs

BATCH_BYTES, BATCH_ROWS = 1 << 20, 4096
_COMPLETE = "complete.json"
_NO_KEY = "Give source_key a name for its content, and change that when the content changes"
_AT_ONCE = 1000
"""Rows of a dataset."""
_FILE_BYTES = 1 << 30
_KNOWN = (
    "Known are paths, a pandas or polars frame, an Arrow table, a datasets.Dataset or IterableDataset, a list of "
    "dicts, and a function that yields dicts; `tokenize` also takes iterators, and texts as rows."
)


@dataclass(frozen=True, slots=True)
class Spool:
    """Rows that are read from the spool."""

    name: str
    rows: Callable[[], Iterable[Any]] | None
    """Makes them once: dicts, or Arrow tables. None: standard input."""
    fingerprint: str | None
    """Equal ones mean equal rows; None: they can't be identified."""
    why: str = ""
    """Why they can't be identified."""
    schema: pa.Schema | None = None
    columns: list[str] | None = None
    """Their columns, if known."""
    input_format: str | None = None

    @classmethod
    def of_standard_input(cls, input_format: str | None) -> Spool:
        return cls(STDIN, None, None, "standard input can't be read again", input_format=input_format)

    def files(self, folder: Path) -> Iterator[InputFile]:
        """The files that were written; none before that."""
        for name in (read_sealed(folder / _COMPLETE) or {"files": {}})["files"]:
            status = (folder / name).stat()
            _, format, *ending = name.split(".")
            compression = COMPRESSIONS.get(f".{ending[0]}") if ending else None
            yield InputFile(str(folder / name), format, compression, status.st_size, version_of(status))

    def write(self, folder: Path, columns: Sequence[str] | None, file_bytes: int) -> None:
        """Go through the rows once. Files that identified rows left complete are used as they are."""
        facts = read_sealed(folder / _COMPLETE) or {}
        made_from = [self.fingerprint, columns, file_bytes]
        is_known = self.fingerprint is not None and facts.get("made_from") == json.loads(json.dumps(made_from))
        if is_known and all(is_whole(folder / name, record) for name, record in facts["files"].items()):
            return
        with explain_os_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        files = self._copy(folder) if self.rows is None else self._write_rows(self.rows, folder, columns, file_bytes)
        for name in files:
            os.utime(folder / name, (0, 0))
        write_sealed(folder / _COMPLETE, {"made_from": made_from, "files": files})

    def _copy(self, folder: Path) -> dict[str, Any]:
        """Standard input as it is."""
        file = next(iter(list_inputs([STDIN], self.input_format)))
        ending = next((end for end, name in COMPRESSIONS.items() if name == file.compression), "")
        with NewFile(folder / "standard-input") as new:
            source = open_bytes(STDIN)
            while block := source.read(BATCH_BYTES):
                new.write(block)
            name = f"standard-input-{new.record['xxh3']}.{file.format}{ending}"
            return {name: new.commit(name)}

    def _write_rows(
        self, rows: Callable[[], Iterable[Any]], folder: Path, columns: Sequence[str] | None, file_bytes: int
    ) -> dict[str, Any]:
        files: dict[str, Any] = {}
        schema: pa.Schema | None = None
        count = 0
        arrays_of = self._arrays(rows(), columns)
        arrays = next(arrays_of, None)
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
                        raise InputError(f"{self.name}: rows from number {count:,} on: {error}") from None
                    writer = writer or pa.ipc.new_file(pa.PythonFile(new, mode="w"), schema)
                    writer.write_batch(batch)
                    count += batch.num_rows
                    arrays = next(arrays_of, None)
                assert writer is not None
                writer.close()
                name = f"{len(files):05}-{new.record['xxh3']}.arrow"
                files[name] = new.commit(name)
        return files

    def _arrays(self, rows: Iterable[Any], columns: Sequence[str] | None) -> Iterator[dict[str, pa.Array]]:
        """The columns of about a megabyte of rows at a time."""
        count = 0
        for piece in _pieces(rows, self.name):
            names = columns or list(piece)
            try:
                length = len(next(iter(piece.values())))
                yield {name: to_array(name, piece.get(name, [None] * length)) for name in names}
            except ResultError as error:
                raise InputError(f"{self.name}: rows {count + 1:,} to {count + length:,}: {error}") from None
            count += length


def _pieces(rows: Iterable[Any], name: str) -> Iterator[dict[str, Any]]:
    """Columns of lists or of Arrow arrays."""
    number = size = 0
    held: list[dict[str, Any]] = []
    for row in rows:
        full = size >= BATCH_BYTES or len(held) >= BATCH_ROWS
        if held and (full or not isinstance(row, dict)):
            yield from_records(held)
            held, size = [], 0
        if isinstance(row, pa.RecordBatch | pa.Table):
            for piece in batches(row.to_batches() if isinstance(row, pa.Table) else [row], BATCH_ROWS, BATCH_BYTES):
                assert isinstance(piece, pa.RecordBatch)
                number += piece.num_rows
                yield dict(zip(piece.schema.names, piece.columns, strict=True))
        elif isinstance(row, dict) and row and all(isinstance(key, str) for key in row):
            held.append(row)
            number, size = number + 1, size + sum(map(value_size, row.values()))
        else:
            raise InputError(f"{name}: row {number} is of type {type(row).__name__}. Yield rows as dicts of columns.")
    if held:
        yield from_records(held)


def spool_of(source: Any, settings: MapSettings) -> Spool:
    """A table, frame or list is known by its content, to which a key is added; a generator function by its code and
    what that uses (what it reads from files can't be seen); a streamed dataset only by a key."""
    key = settings.source_key
    if inspect.isgenerator(source):
        raise ConfigError(
            "A generator can be gone through only once, so that nothing made of it could be resumed.\n"
            "Give the generator function itself, without calling it; with arguments: functools.partial(function, ...)"
        )
    table, known = as_table(source), None if key is None else _hash(key)
    if table is not None:
        digest = xxhash.xxh3_128(table.schema.serialize())
        for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
            digest.update(batch.serialize())
        fingerprint = _hash(key, digest.hexdigest())
        return Spool("the table", lambda: [table], fingerprint, schema=table.schema, columns=table.schema.names)
    if type(source).__module__.split(".")[0] == "datasets":
        rows, schema = _tables_of(source), source.features and source.features.arrow_schema
        if hasattr(source, "cache_files"):
            return Spool("the dataset", rows, _hash(source._fingerprint), "", schema, source.column_names)
        why = f"an IterableDataset has no fingerprint. {_NO_KEY}"
        return Spool("the streamed dataset", rows, known, why, schema, source.column_names)
    if isinstance(source, list | tuple) and all(isinstance(row, dict) for row in source):
        digest = xxhash.xxh3_128()
        with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):
            for row in source:
                digest.update(pickle.dumps(row, protocol=5))
            known = _hash(key, digest.hexdigest())
        return Spool("the list", lambda: source, known, f"the list holds a value that can't be hashed. {_NO_KEY}")
    if not callable(source) or inspect.isclass(source):
        raise ConfigError(f"{type(source).__name__}: no source of rows. {_KNOWN}")
    function = identify(source)
    if not function.unhashable:
        known = _hash(key, function.hash)
    name = f"the generator {function.name}"

    def generate() -> Iterator[Any]:
        rows = source()
        if isinstance(rows, Mapping | str | bytes) or not hasattr(rows, "__iter__"):
            raise ConfigError(f"{name} returned {type(rows).__name__}. Let it yield rows, each a dict.")
        return iter(rows)

    return Spool(name, generate, known, f"{name} can't be identified: {'; '.join(function.unhashable)}. {_NO_KEY}")


def _hash(*parts: str | None) -> str:
    return hash_bytes(repr(parts).encode())


# ---- datasets of HF ----


def refuse_transform(dataset: Any) -> None:
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "The dataset has a transform (with_transform, set_transform), which is applied to rows as they are "
            "read.\nGive the function to milldam.map instead, and the dataset without it: dataset.with_format(None)"
        )


def in_memory_bytes(dataset: Any) -> int:
    """Bytes of a dataset and of its row numbers that lie in memory, not in files."""
    from datasets.table import ConcatenationTable, InMemoryTable

    def of(table: Any) -> int:
        if isinstance(table, ConcatenationTable):
            return sum(of(block) for line in table.blocks for block in line)
        return int(table.nbytes) if isinstance(table, InMemoryTable) else 0

    return of(dataset.data) + of(dataset._indices)


def _tables_of(dataset: Any) -> Callable[[], Iterator[Any]]:
    """Makes its rows as Arrow tables; pictures and sounds as their bytes."""
    from datasets import Dataset, IterableDataset

    if isinstance(dataset, dict):
        which = f'which split? Give one: dataset["{next(iter(dataset), "train")}"].'
        raise ConfigError(f"{type(dataset).__name__}: {which}")
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ConfigError(f"{type(dataset).__name__} of datasets: no source of rows. {_KNOWN}")
    if isinstance(dataset, Dataset):
        refuse_transform(dataset)
        plain = dataset.with_format("arrow", columns=dataset.column_names)
        return lambda: iter(plain.iter(batch_size=_AT_ONCE))
    plain = dataset.with_format(None)
    if plain.features is not None and any(hasattr(feature, "decode") for feature in plain.features.values()):
        plain = plain.decode(False)
    return lambda: iter(plain)


# ---- for jobs that read texts ----


@contextlib.contextmanager
def as_files(source: Any, out: Path) -> Iterator[str]:
    """A pattern of files with the rows of frames, datasets, generators and lists, while the block runs."""
    folder = out.with_name(f"{out.name}.input")
    try:
        spool = Spool("the input", lambda: _records(source), None)
        spool.write(folder, None, _FILE_BYTES)
        if next(spool.files(folder), None) is None:
            raise InputError("The input has no rows.")
        yield str(folder / "*.arrow")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _records(source: Any) -> Iterable[Any]:
    """Dicts or tables; texts as dicts."""
    table = as_table(pa.table({"text": source}) if isinstance(source, pa.Array | pa.ChunkedArray) else source)
    if table is not None:
        return [table]
    if type(source).__module__.split(".")[0] == "datasets":
        return _tables_of(source)()
    rows = source() if callable(source) and not isinstance(source, type) else source
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise ConfigError(f"{type(rows).__name__}: no input. {_KNOWN}")
    return ({"text": row} if isinstance(row, str) else row for row in rows)
