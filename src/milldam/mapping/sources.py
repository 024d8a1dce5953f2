"""Anything that has rows -> a plan: units, and a reader of their rows.

    files       paths, folders, globs, addresses, names on the Hub, tables of ours             mapping/file_rows.py
    datasets    datasets.Dataset: row ranges over its Arrow files                              here
    the rest    IterableDataset, generator functions, lists of dicts, pa.Table: spooled once   mapping/spooling.py

Reads no data but what the cuts and the identity take. The Arrow tables of a dataset are mapped, never loaded. Chosen,
shuffled and filtered rows (its indices) are respected. It is known by its fingerprint,
and size and time of its files. A worker gets the table by path; the indices by a file in the spool.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.errors import ConfigError
from milldam.files import NewFile, hash_bytes, in_home
from milldam.input_files import version_of
from milldam.mapping.file_rows import FilePlan
from milldam.mapping.identity import identify
from milldam.mapping.plan import RowUnit, SourcePlan, hash_json, indices_name
from milldam.mapping.settings import MapSettings
from milldam.mapping.spooling import SpooledPlan, Stream
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, Places, require_columns
from milldam.sources.data_sets import ALL, choose_splits, parse_split, split_names
from milldam.sources.rows import Rows, cut_by_size
from milldam.sources.units import InputFile

LARGEST_IN_MEMORY = 16 << 20
"""More bytes than this are not sent to each worker, but spooled."""
_GATHERED = 1024


@dataclass(frozen=True, slots=True)
class DataSetReader:
    table: Any
    """A datasets.table.Table: it pickles as the paths of its files, or by value when it is small and in memory."""
    indices: str | None
    """A file of row numbers; None: the rows in their order."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places | None = None) -> Iterator[Rows]:
        start, stop = unit.place["range"]
        if self.indices is None:
            batches = iter(self.table.fast_slice(start, stop - start).to_batches())
        else:
            batches = self._gathered(np.load(self.indices, mmap_mode="r")[start:stop])
        for batch in batches:
            yield from cut_by_size(batch, BATCH_BYTES)

    def _gathered(self, numbers: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Rows from all over the table: single ones are found without a copy, then put together by their size."""
        held: list[pa.RecordBatch] = []
        size = 0
        for at in range(0, len(numbers), _GATHERED):
            for row in self.table.fast_gather(np.asarray(numbers[at : at + _GATHERED], dtype=np.int64)).to_batches():
                if held and size + row.nbytes > BATCH_BYTES:
                    yield pa.concat_batches(held)
                    held, size = [], 0
                held.append(row)
                size += row.nbytes
        if held:
            yield pa.concat_batches(held)


class DataSetPlan:
    unidentified: str | None = None
    left_out: str = ""
    needs_spooling = False

    def __init__(self, dataset: Any, settings: MapSettings, spool: Path) -> None:
        if dataset.format["type"] == "custom":
            raise ConfigError(
                "The dataset has a transform (with_transform, set_transform), which is applied to rows as they are "
                "read.\nGive the function to milldam.map instead, and the dataset without it: dataset.with_format(None)"
            )
        self._dataset, self._settings, self.spool_folder = dataset, settings, spool
        there = list(dataset.column_names)
        require_columns(settings.columns, there, "the dataset")
        self.columns: list[str] | None = list(settings.columns) if settings.columns is not None else there
        self._table = dataset.data.select(self.columns)
        self.schema: pa.Schema | None = self._table.schema

    @cached_property
    def identity(self) -> dict[str, Any]:
        files = list(self.files())
        known = [self._dataset._fingerprint, [(Path(file.path).name, file.size, file.version) for file in files]]
        return {"files": len(files), "bytes": self._bytes, "fingerprint": hash_json(known)}

    @property
    def _bytes(self) -> int:
        """Of the rows that are chosen, about."""
        rows = self._table.num_rows
        return int(self._table.nbytes * len(self._dataset) / rows) if rows else 0

    def files(self) -> Iterator[InputFile]:
        for cached in self._dataset.cache_files:
            status = os.stat(cached["filename"])
            yield InputFile(cached["filename"], "arrow", None, status.st_size, version_of(status))

    def units(self) -> Iterator[RowUnit]:
        rows, size = len(self._dataset), self._bytes
        count = self._settings.shards or round(size / self._settings.unit_bytes)
        count = max(1, min(count, rows))
        edges = [rows * k // count for k in range(count + 1)] if rows else [0]
        for index, (start, stop) in enumerate(pairwise(edges)):
            key = hash_json([self.identity["fingerprint"], self.columns, start, stop])
            yield RowUnit(index, key, size * (stop - start) // rows, {"range": [start, stop]}, start)

    @property
    def reader(self) -> DataSetReader:
        return DataSetReader(self._table, self._write_indices())

    def _write_indices(self) -> str | None:
        indices = self._dataset._indices
        if indices is None:
            return None
        from milldam.formats.npy import npy_header

        path = self.spool_folder / indices_name(self.identity["fingerprint"])
        if not path.exists():
            self.spool_folder.mkdir(parents=True, exist_ok=True)
            with NewFile(path) as new:
                new.write(npy_header(np.dtype("<i8"), len(indices)))
                for chunk in indices.column(0).chunks:
                    new.write(np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False), dtype="<i8").data)
                new.commit()
        return str(path)

    def spool(self) -> None:
        """Nothing to do: it can be read where it lies."""


def bytes_in_memory(table: Any) -> int:
    """Bytes of a datasets.table.Table that lie in memory, not in files."""
    from datasets.table import ConcatenationTable, InMemoryTable

    if isinstance(table, ConcatenationTable):
        return sum(bytes_in_memory(block) for line in table.blocks for block in line)
    return int(table.nbytes) if isinstance(table, InMemoryTable) else 0


_KINDS = "paths, a datasets.Dataset or IterableDataset, a pa.Table, a list of dicts, or a function that yields dicts"
_NO_KEY = "Give source_key a name for its content, and change that when the content changes"


def plan_source(settings: MapSettings, spool: Path) -> SourcePlan:
    """Look the source up. `spool`: a folder of the run, for what can be read only once, and what is worth keeping.

    Raises ConfigError or InputError for what is no source, or can't be read as one.
    """
    if settings.columns is not None and not settings.columns:
        raise ConfigError("columns is empty. Name at least one, or leave it out to read all.")
    source, paths = settings.source, _paths(settings.source)
    if paths is not None:
        return FilePlan(paths, settings, spool)
    if type(source).__module__.split(".")[0] == "datasets":
        return _plan_data_set(source, settings, spool)
    if settings.split is not None or settings.subset is not None:
        raise ConfigError("split and subset are for files, the Hub and datasets; this source has none. Leave them out.")
    return SpooledPlan(_stream(source, settings), settings, spool)


def each_split(given: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """What is said to `map`, for each split of a dataset that is named whole; None: there is one table to make."""
    source = given["source"]
    if given.get("split") is not None:
        return None
    if isinstance(source, dict) and type(source).__module__.split(".")[0] == "datasets":
        said = {name: {"source": one} for name, one in source.items()}
    else:
        paths = _paths(source) or []
        names = split_names(paths[0], given.get("subset")) if len(paths) == 1 else []
        if len(names) < 2:
            return None
        said = {name: {"source": source, "split": name} for name in names}
    out = given.get("out")
    places = {name: {} if out is None else {"out": Path(out) / name} for name in said}
    return {name: {**given, **said[name], **places[name]} for name in said}


def _paths(source: Any) -> list[str] | None:
    """What names files; None when the source is something else."""
    table = sys.modules.get("milldam.stores.table.reader")
    if table is not None and isinstance(source, table.Table):
        return [str(source.path)]
    if isinstance(source, str | os.PathLike):
        return [in_home(os.fspath(source))]
    if isinstance(source, list | tuple) and source and all(isinstance(one, str | os.PathLike) for one in source):
        return [in_home(os.fspath(one)) for one in source]
    return None


# ---- streams ----


def _stream(source: Any, settings: MapSettings) -> Stream:
    if inspect.isgenerator(source):
        raise ConfigError(
            "A generator can be gone through only once, so that nothing made of it could be resumed.\n"
            "Give the generator function itself, without calling it; with arguments: functools.partial(function, ...)"
        )
    if isinstance(source, pa.Table | pa.RecordBatch):
        # A hash of the content as Arrow writes it; equal tables in other chunks have another one.
        digest = xxhash.xxh3_128(source.schema.serialize())
        for batch in source.to_batches() if isinstance(source, pa.Table) else [source]:
            digest.update(batch.serialize())
        stream = _held_stream("the table", lambda: [source], digest.hexdigest(), settings)
        return replace(stream, columns=tuple(source.schema.names), schema=source.schema)
    if isinstance(source, list | tuple) and all(isinstance(row, dict) for row in source):
        return _held_stream("the list", lambda: source, _hash_rows(source), settings)
    if callable(source) and not inspect.isclass(source):
        return _function_stream(source, settings)
    raise ConfigError(f"{type(source).__name__}: no source of rows. Known are {_KINDS}.")


def _held_stream(name: str, rows: Callable[[], Any], content: str | None, settings: MapSettings) -> Stream:
    """Rows that lie in memory, known by their content; a key stands for it only where that can't be hashed."""
    known = content is not None or settings.source_key is not None
    fingerprint = hash_bytes(repr([settings.source_key, content]).encode()) if known else None
    return Stream(name, rows, fingerprint, f"{name} holds a value that can't be hashed. {_NO_KEY}")


def _function_stream(function: Callable[[], Any], settings: MapSettings) -> Stream:
    """A generator function is known by its code and what that uses; what it reads from files can't be seen."""
    found = identify(function)
    name = f"the generator {found.name}"
    parts = [settings.source_key, None if found.unhashable else found.hash]
    fingerprint = hash_bytes(repr(parts).encode()) if parts != [None, None] else None
    why = f"{name} can't be identified: {'; '.join(found.unhashable)}. {_NO_KEY}"
    return Stream(name, functools.partial(_call, function, name), fingerprint, why)


def _call(function: Callable[[], Any], name: str) -> Iterator[Any]:
    made = function()
    if isinstance(made, Mapping | str | bytes) or not hasattr(made, "__iter__"):
        raise ConfigError(f"{name} returned {type(made).__name__}. Let it yield rows, each a dict.")
    return iter(made)


def _hash_rows(rows: Sequence[dict[str, Any]]) -> str | None:
    """A hash of the content, a row at a time; None where a value can't be pickled."""
    digest = xxhash.xxh3_128()
    try:
        for row in rows:
            digest.update(pickle.dumps(row, protocol=5))
    except (pickle.PicklingError, TypeError, AttributeError):
        return None
    return digest.hexdigest()


# ---- datasets ----


def _plan_data_set(source: Any, settings: MapSettings, spool: Path) -> SourcePlan:
    from datasets import Dataset, IterableDataset

    if settings.subset is not None:
        raise ConfigError("subset is for names on the Hub; this dataset is loaded already. Leave it out.")
    source = _choose_split(source, settings.split)
    if isinstance(source, IterableDataset):
        return SpooledPlan(_iterable_stream(source, settings), settings, spool)
    if not isinstance(source, Dataset):
        raise ConfigError(f"{type(source).__name__} of datasets: no source of rows. Known are {_KINDS}.")
    plan = DataSetPlan(source, settings, spool)
    if bytes_in_memory(source.data) <= LARGEST_IN_MEMORY:
        return plan
    columns = plan.columns or []
    everything = RowUnit(0, "", 0, {"range": [0, len(source)]})

    def rows() -> Iterator[Rows]:
        return plan.reader.read(everything, lambda reject: None)

    fingerprint = hash_bytes(repr([plan.identity["fingerprint"], columns]).encode())
    return SpooledPlan(
        Stream("the dataset", rows, fingerprint, columns=tuple(columns), schema=plan.schema), settings, spool
    )


def _choose_split(source: Any, split: str | None) -> Any:
    """A dataset of a dict of them, or of the one there is, with the slice that is asked for."""
    asked = None if split is None else parse_split(split)
    if isinstance(source, dict):
        from datasets import concatenate_datasets

        chosen = [source[name] for name in choose_splits(asked, source, "the dataset")]
        source = chosen[0] if len(chosen) == 1 else concatenate_datasets(chosen)
    elif asked is not None and asked.names not in ((ALL,), (str(source.split),)):
        raise ConfigError(f'split "{split}": the dataset is split "{source.split}" alone. Leave split out.')
    if asked is None or asked.rows is None:
        return source
    if not hasattr(source, "__len__"):
        raise ConfigError(f'split "{split}": a streamed dataset has no slices. Use .skip() and .take() on it.')
    return source.select(range(*asked.rows.bounds(len(source))))


def _iterable_stream(source: Any, settings: MapSettings) -> Stream:
    """A streamed dataset carries no fingerprint, and what it streams from may change: only a key names it."""
    columns = tuple(source.column_names) if source.column_names is not None else None
    fingerprint = hash_bytes(settings.source_key.encode()) if settings.source_key is not None else None
    why = f"an IterableDataset has no fingerprint. {_NO_KEY}"
    schema = source.features.arrow_schema if source.features is not None else None
    return Stream("the streamed dataset", functools.partial(iterable_rows, source), fingerprint, why, columns, schema)


def iterable_rows(source: Any) -> Iterator[dict[str, Any]]:
    """Rows as Python values; pictures and sounds as their bytes."""
    plain = source.with_format(None)
    if plain.features is not None and any(hasattr(feature, "decode") for feature in plain.features.values()):
        plain = plain.decode(False)
    yield from plain
