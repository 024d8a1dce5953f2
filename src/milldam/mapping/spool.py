"""Rows that can be read only once -> a file, from which units are read.

Of `map`: Arrow frames of about a megabyte in the run folder, each an IPC stream with its own schema.

    rows.arrows     the frames, one after the other
    frames.jsonl    a line per frame: its bytes, its rows, its hash
    complete.json   rows, bytes and frames in all, written last; without it the rows are spooled anew

A unit is a run of frames, known by their hashes: so it is the same unit when the same rows are spooled again. Holds one
frame; a larger row is a frame of its own. Disk: the rows as Arrow holds them.

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
from milldam.sources.rows import Rows, from_records, value_size

FRAME_BYTES, FRAME_ROWS = 1 << 20, 4096
LARGEST_IN_MEMORY = 16 << 20
"""A dataset with more bytes than this in memory is not sent to each worker, but spooled."""
_ROWS, _FRAMES, _COMPLETE = "rows.arrows", "frames.jsonl", "complete.json"
_REFUSED = (pa.ArrowException, TypeError, ValueError, OverflowError)
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
    except (pickle.PicklingError, TypeError, AttributeError):
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


def _frames(rows: Iterable[Any], name: str) -> Iterator[pa.RecordBatch]:
    """Dicts, and Arrow tables where they come, as record batches of about a megabyte."""
    number = size = 0
    held: list[dict[str, Any]] = []
    for row in rows:
        if isinstance(row, pa.RecordBatch | pa.Table):
            yield from _as_arrow(held, number - len(held), name)
            held, size = [], 0
            for frame in batches(_batches_of(row), FRAME_ROWS, FRAME_BYTES):
                number += frame.num_rows  # type: ignore[union-attr]
                yield frame
            continue
        if not isinstance(row, dict):
            raise InputError(f"{name}: row {number} is of type {type(row).__name__}. Yield rows as dicts.")
        held.append(row)
        number += 1
        size += sum(map(value_size, row.values()))
        if size >= FRAME_BYTES or len(held) >= FRAME_ROWS:
            yield from _as_arrow(held, number - len(held), name)
            held, size = [], 0
    yield from _as_arrow(held, number - len(held), name)


def _as_arrow(records: list[dict[str, Any]], first: int, name: str) -> Iterator[pa.RecordBatch]:
    """Where the values of a column fit no common type, the frame is halved: each half has types of its own."""
    if not records:
        return
    try:
        yield _frame(records)
        return
    except _REFUSED as error:
        problem = str(error)
    if len(records) > 1:
        half = len(records) // 2
        yield from _as_arrow(records[:half], first, name)
        yield from _as_arrow(records[half:], first + half, name)
        return
    try:  # arrays and tensors of any shape as lists
        items = records[0].items()
        yield _frame([{key: value.tolist() if hasattr(value, "tolist") else value for key, value in items}])
    except _REFUSED:
        raise InputError(
            f"{name}: row {first} can't be stored ({' '.join(problem.split())[:200]}).\n"
            "Yield text, bytes, numbers, dates, None, arrays, and lists and dicts of them, under names of columns."
        ) from None


def _frame(records: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = from_records(records)
    if not all(isinstance(name, str) for name in columns):
        raise TypeError("the name of a column is not a string")
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array(records, pa.struct([])))
    return pa.record_batch([pa.array(values) for values in columns.values()], names=list(columns))


# ---- frames to units ----


@dataclass(frozen=True, slots=True)
class SpooledRows(RowReader):
    folder: str
    columns: tuple[str, ...] | None

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        start, stop = unit.place["bytes"]
        with pa.memory_map(str(Path(self.folder) / _ROWS)) as source:
            source.seek(start)
            while source.tell() < stop:
                yield from map(self._wanted, pa.ipc.open_stream(source))

    def _wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted columns; null where the rows have none."""
        if self.columns is None:
            return batch
        there, missing = set(batch.schema.names), pa.nulls(batch.num_rows)
        found = [batch.column(name) if name in there else missing for name in self.columns]
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
            for batch in _frames(self._rows(), self._name):
                if not batch.num_rows:
                    continue
                sink = pa.BufferOutputStream()
                with pa.ipc.new_stream(sink, batch.schema) as writer:
                    writer.write_batch(batch)
                frame = memoryview(sink.getvalue())
                digest = xxhash.xxh3_128_hexdigest(frame)
                data.write(frame)
                lines.write(json.dumps([len(frame), batch.num_rows, digest]).encode() + b"\n")
                content.update(digest.encode())
                rows, frames = rows + batch.num_rows, frames + 1
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
