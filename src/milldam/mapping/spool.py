"""Rows that can be read only once -> a file, from which units are read.

Of `map`: frames of about a megabyte in the run folder, each a pickle: an Arrow IPC stream, or columns of dicts,
whose values need not fit one Arrow type.

    rows.pickles    the frames, one after the other
    frames.jsonl    a line per frame: its bytes, its rows, its hash
    complete.json   rows, bytes and frames in all, written last; without it the rows are spooled anew

A unit is a run of frames, known by their hashes: so it is the same unit when the same rows are spooled again. Holds one
frame; a larger row is a frame of its own. Disk: the rows as Arrow or pickle holds them.

Of `tokenize`: a file of JSON lines beside the store, while the store is made. It is named by its content and has no
time of its own: equal rows are equal input, and a killed run is resumed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import math
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, explain_os_errors, hash_bytes, is_whole, read_sealed, write_sealed
from milldam.mapping.function import as_table, batches
from milldam.mapping.identity import identify
from milldam.mapping.rows import KINDS, InDataset, RowReader, RowUnit, Source, evenly, refuse_transform
from milldam.mapping.settings import MapSettings
from milldam.run.units import key_of
from milldam.sources.batch import OnReject, Places, require_columns
from milldam.sources.rows import Rows, from_records, row_count, value_size

FRAME_BYTES, FRAME_ROWS = 1 << 20, 4096
LARGEST_IN_MEMORY = 16 << 20
"""A dataset with more bytes than this in memory is not sent to each worker, but spooled."""
_ROWS, _FRAMES, _COMPLETE = "rows.pickles", "frames.jsonl", "complete.json"
_NO_PICKLE = (pickle.PicklingError, TypeError, AttributeError)
_NO_KEY = "Give source_key a name for its content, and change that when the content changes"
_AT_ONCE = 1000
"""Rows of a dataset or a table."""


# ---- what is given ----


def spooled(source: Any, settings: MapSettings, spool: Path) -> Spooled:
    """A table or frame and a list are known by their content, to which a key is added; a generator function by its code
    and what that uses: what it reads from files can't be seen."""
    key, made = settings.source_key, functools.partial(Spooled, settings, spool)
    if inspect.isgenerator(source):
        raise ConfigError(
            "A generator can be gone through only once, so that nothing made of it could be resumed.\n"
            "Give the generator function itself, without calling it; with arguments: functools.partial(function, ...)"
        )
    table = as_table(source)
    if table is not None:
        digest = xxhash.xxh3_128(table.schema.serialize())
        for batch in _batches_of(table):
            digest.update(batch.serialize())
        return made("the table", lambda: [table], _hash(key, digest.hexdigest()), schema=table.schema)
    if isinstance(source, list | tuple) and all(isinstance(row, dict) for row in source):
        content = _hash_of_rows(source)
        known = None if content is None and key is None else _hash(key, content)
        return made("the list", lambda: source, known, f"the list holds a value that can't be hashed. {_NO_KEY}")
    if not callable(source) or inspect.isclass(source):
        raise ConfigError(f"{type(source).__name__}: no source of rows. Known are {KINDS}.")
    found = identify(source)
    name = f"the generator {found.name}"
    known = None if found.unhashable and key is None else _hash(key, None if found.unhashable else found.hash)
    why = f"{name} can't be identified: {'; '.join(found.unhashable)}. {_NO_KEY}"
    return made(name, functools.partial(_generated, source, name), known, why)


def spooled_dataset(source: Any, settings: MapSettings, spool: Path) -> Spooled | None:
    """A streamed dataset, which carries no fingerprint: only a key names it. Or a large one in memory; None: a dataset
    whose units can be read where it lies."""
    from datasets import Dataset, IterableDataset

    if isinstance(source, IterableDataset):
        known = None if settings.source_key is None else _hash(settings.source_key)
        why = f"an IterableDataset has no fingerprint. {_NO_KEY}"
        rows, schema = functools.partial(_streamed, source), source.features and source.features.arrow_schema
        return Spooled(settings, spool, "the streamed dataset", rows, known, why, source.column_names, schema)
    if not isinstance(source, Dataset):
        raise ConfigError(f"{type(source).__name__} of datasets: no source of rows. Known are {KINDS}.")
    if _bytes_in_memory(source.data) <= LARGEST_IN_MEMORY:
        return None
    whole = InDataset(source, settings, spool)
    chosen = source.select_columns(settings.columns) if settings.columns else source
    known = _hash(str(whole.identity["fingerprint"]), *(settings.columns or ()))
    return Spooled(settings, spool, "the dataset", lambda: _tables_of(chosen), known, schema=whole.schema)


def _hash_of_rows(rows: Iterable[Any]) -> str | None:
    """Of the content, a row at a time; None where a value can't be pickled."""
    digest = xxhash.xxh3_128()
    try:
        for row in rows:
            digest.update(pickle.dumps(row, protocol=5))
    except _NO_PICKLE:
        return None
    return digest.hexdigest()


def _hash(*parts: str | None) -> str:
    return hash_bytes(repr(parts).encode())


def _generated(function: Callable[[], Any], name: str) -> Iterator[Any]:
    rows = function()
    if isinstance(rows, Mapping | str | bytes) or not hasattr(rows, "__iter__"):
        raise ConfigError(f"{name} returned {type(rows).__name__}. Let it yield rows, each a dict.")
    return iter(rows)


def _bytes_in_memory(table: Any) -> int:
    """Bytes of a datasets.table.Table that lie in memory, not in files."""
    from datasets.table import ConcatenationTable, InMemoryTable

    if isinstance(table, ConcatenationTable):
        return sum(_bytes_in_memory(block) for line in table.blocks for block in line)
    return int(table.nbytes) if isinstance(table, InMemoryTable) else 0


def _tables_of(dataset: Any) -> Iterator[pa.Table]:
    plain = dataset.with_format("arrow", columns=dataset.column_names)
    return iter(plain.iter(batch_size=_AT_ONCE))


def _streamed(source: Any) -> Iterator[dict[str, Any]]:
    """Rows as Python values; pictures and sounds as their bytes."""
    plain = source.with_format(None)
    if plain.features is not None and any(hasattr(feature, "decode") for feature in plain.features.values()):
        plain = plain.decode(False)
    yield from plain


def _batches_of(table: pa.Table | pa.RecordBatch) -> list[pa.RecordBatch]:
    return table.to_batches() if isinstance(table, pa.Table) else [table]


# ---- rows to frames ----


def _frames(rows: Iterable[Any], name: str) -> Iterator[Rows]:
    """Dicts, and Arrow tables where they come, in pieces of about a megabyte."""
    number = size = 0
    held: list[dict[str, Any]] = []
    for row in rows:
        full = size >= FRAME_BYTES or len(held) >= FRAME_ROWS
        if held and (full or not isinstance(row, dict)):
            yield _columns_of(held)
            held, size = [], 0
        if isinstance(row, pa.RecordBatch | pa.Table):
            for piece in batches(_batches_of(row), FRAME_ROWS, FRAME_BYTES):
                number += row_count(piece)
                yield piece
            continue
        if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
            raise InputError(f"{name}: row {number} is of type {type(row).__name__}. Yield rows as dicts of columns.")
        held.append(row)
        number, size = number + 1, size + sum(map(value_size, row.values()))
    if held:
        yield _columns_of(held)


def _columns_of(records: list[dict[str, Any]]) -> Rows:
    # Rows without any column are rows all the same.
    return from_records(records) or pa.RecordBatch.from_struct_array(pa.array(records, pa.struct([])))


def _packed(rows: Rows) -> bytes:
    """Arrow by its own format: pickled, a slice would take all that it is a slice of."""
    if isinstance(rows, dict):
        return pickle.dumps(rows, protocol=5)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_batch(rows)
    return pickle.dumps(sink.getvalue().to_pybytes(), protocol=5)


# ---- frames to units ----


@dataclass(frozen=True, slots=True)
class SpooledRows(RowReader):
    folder: str
    columns: tuple[str, ...] | None

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        start, stop = unit.place["bytes"]
        with (Path(self.folder) / _ROWS).open("rb") as source:
            source.seek(start)
            while source.tell() < stop:
                rows = pickle.load(source)
                yield self._wanted(rows if isinstance(rows, dict) else next(iter(pa.ipc.open_stream(rows))))

    def _wanted(self, rows: Rows) -> Rows:
        """The wanted columns; null where the rows have none."""
        if self.columns is None:
            return rows
        if isinstance(rows, dict):
            return {name: rows.get(name, [None] * row_count(rows)) for name in self.columns}
        there, missing = set(rows.schema.names), pa.nulls(rows.num_rows)
        found = [rows.column(name) if name in there else missing for name in self.columns]
        return pa.record_batch(found, names=list(self.columns))


class Spooled(Source):
    """Units of frames. `rows` makes them once: dicts, or Arrow tables. `fingerprint` names them; None: they can't be
    identified, which `why` says. `columns`: those that they have, where that is known."""

    needs_spooling = True

    def __init__(
        self,
        settings: MapSettings,
        spool: Path,
        name: str,
        rows: Callable[[], Iterable[Any]],
        fingerprint: str | None,
        why: str = "",
        columns: list[str] | None = None,
        schema: pa.Schema | None = None,
    ) -> None:
        super().__init__(settings, spool)
        self.schema, self._name, self._rows, self._fingerprint = schema, name, rows, fingerprint
        self._is_spooled = False
        self.unidentified = why if fingerprint is None else None
        columns = columns if schema is None else schema.names
        if columns is not None:
            require_columns(settings.columns, columns, name)

    @property
    def identity(self) -> dict[str, Any]:
        """Of a source that can't be identified: its content, once it is spooled."""
        known = self._fingerprint or (self._facts()["content"] if self._is_spooled else "")
        return {"files": 0, "bytes": 0, "fingerprint": known}

    @property
    def reader(self) -> SpooledRows:
        return SpooledRows(str(self.spool_folder), self.settings.columns)

    def spool(self) -> None:
        """Go through the rows once. What an identified source left complete is used as it is."""
        folder, facts = self.spool_folder, self._facts()
        is_known = self._fingerprint is not None and facts.get("identity") == self._fingerprint
        if not (is_known and all(is_whole(folder / name, record) for name, record in facts["files"].items())):
            with explain_os_errors(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            self._write_frames()
        self._is_spooled = True

    def _write_frames(self) -> None:
        folder = self.spool_folder
        content, rows, frames = xxhash.xxh3_128(), 0, 0
        with NewFile(folder / _ROWS) as data, NewFile(folder / _FRAMES) as lines:
            for piece in _frames(self._rows(), self._name):
                try:
                    frame = _packed(piece)
                except _NO_PICKLE as error:
                    last = rows + row_count(piece)
                    raise InputError(
                        f"{self._name}: rows {rows + 1:,} to {last:,} can't be stored ({error}). Yield text, bytes, "
                        "numbers, dates, None, arrays, and lists and dicts of them."
                    ) from None
                digest = xxhash.xxh3_128_hexdigest(frame)
                data.write(frame)
                lines.write(json.dumps([len(frame), row_count(piece), digest]).encode() + b"\n")
                content.update(digest.encode())
                rows, frames = rows + row_count(piece), frames + 1
            facts = {"rows": rows, "bytes": data.size, "frames": frames, "identity": self._fingerprint}
            files = {_ROWS: data.commit(), _FRAMES: lines.commit()}
        write_sealed(folder / _COMPLETE, facts | {"content": content.hexdigest(), "files": files})

    def _facts(self) -> dict[str, Any]:
        return read_sealed(self.spool_folder / _COMPLETE) or {}

    def units(self) -> Iterator[RowUnit]:
        facts, numbered = self._facts(), self.settings.with_indices
        shards = self.settings.shards or max(1, round(facts["bytes"] / self.settings.unit_bytes))
        start = first_row = 0
        with (self.spool_folder / _FRAMES).open("rb") as lines:
            frames = map(json.loads, lines)
            groups = evenly(frames, lambda frame: frame[0], shards, count=facts["frames"], total=facts["bytes"])
            for index, group in enumerate(groups):
                stop = start + sum(size for size, _, _ in group)
                first = first_row if numbered else None
                key = key_of(self.settings.columns, [frame[1:] for frame in group], first)
                yield RowUnit(index, key, stop - start, {"bytes": [start, stop]}, first)
                start, first_row = stop, first_row + sum(rows for _, rows, _ in group)


# ---- JSON lines, for jobs that read texts ----

_KNOWN = (
    "Known are paths, a pandas or polars DataFrame, an Arrow table, a datasets.Dataset or IterableDataset, a list of "
    "dicts, and an iterator or a generator function of texts or dicts."
)


@contextlib.contextmanager
def as_file(source: Any, out: Path) -> Iterator[str]:
    """The path of a file with the rows of frames, datasets, generators and lists, while the block runs."""
    folder = out.with_name(f"{out.name}.input")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        with explain_os_errors(folder):
            folder.mkdir(parents=True)
            content, path = xxhash.xxh3_128(), folder / "rows.jsonl"
            with path.open("wb") as file:
                for number, row in enumerate(_records(source)):
                    record = {"text": row} if isinstance(row, str) else row
                    if not isinstance(record, Mapping):
                        raise InputError(f"row {number} is of type {type(row).__name__}. Give texts, or rows as dicts.")
                    line = _json(record).encode("utf-8", "surrogatepass") + b"\n"
                    content.update(line)
                    file.write(line)
            named = path.rename(folder / f"rows-{content.hexdigest()}.jsonl")
            os.utime(named, (0, 0))
        yield str(named)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _records(source: Any) -> Iterator[Any]:
    """Texts or dicts, in order."""
    table = as_table(pa.table({"text": source}) if isinstance(source, pa.Array | pa.ChunkedArray) else source)
    if type(source).__module__.split(".")[0] == "datasets":
        from datasets import Dataset, IterableDataset

        if isinstance(source, IterableDataset):
            return _streamed(source)
        if isinstance(source, dict):
            which = f'which split? Give one: dataset["{next(iter(source), "train")}"].'
            raise ConfigError(f"{type(source).__name__}: {which}")
        if not isinstance(source, Dataset):
            raise ConfigError(f"{type(source).__name__} of datasets: no input. {_KNOWN}")
        refuse_transform(source)
        return itertools.chain.from_iterable(part.to_pylist() for part in _tables_of(source))
    if table is not None:
        slices = (table.slice(start, _AT_ONCE) for start in range(0, table.num_rows, _AT_ONCE))
        return itertools.chain.from_iterable(part.to_pylist() for part in slices)
    rows = source() if callable(source) and not isinstance(source, type) else source
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise ConfigError(f"{type(rows).__name__}: no input. {_KNOWN}")
    return iter(rows)


def _json(row: Mapping[str, Any]) -> str:
    """A row as JSON; what JSON has no value for as its words, and no number as null."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_without_nan(dict(row)), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
