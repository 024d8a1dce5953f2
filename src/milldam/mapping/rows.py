"""Anything that has rows -> units with keys, and a reader of their rows.

    files       paths, folders, globs, addresses, names on the Hub, tables of ours: cut and gathered as for every job
    datasets    datasets.Dataset: row ranges over its Arrow files, which are mapped, never loaded
    the rest    lists, frames, streams, generators: first written to files     mapping/spool.py

A unit is known by what it reads: name, size and version of each file, and which part of it; the fingerprint of a
dataset, and its range of rows. Files are listed at each call, so that no list of a million is held (except for a
split, which is a list of paths).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from milldam.errors import ConfigError
from milldam.files import hash_bytes, in_home
from milldam.input_files import NO_INPUT, add_input, describe_left_out, is_address, version_of, without_secrets
from milldam.mapping.settings import MapSettings
from milldam.mapping.spool import refuse_transform, spool
from milldam.mapping.table_job import RowUnit, changed_while_read, require_unchanged
from milldam.memory import parse_size
from milldam.run.units import key_of
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, TextRules, require_columns
from milldam.sources.compression import STDIN, DamagedError
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import TABLES, columns_of, slice_file
from milldam.sources.rows import FileReader, Places, Rows, cut_by_size, rows_between
from milldam.sources.tables import open_schema
from milldam.sources.units import InputFile, Slice, Unit, gather, list_inputs, whole

Source: TypeAlias = "Files | InDataset"


def source_of(settings: MapSettings, folder: Path) -> Source:
    """Look the source up. `folder`: of the run, for rows that are written to files first.

    Raises ConfigError or InputError for what is not a source, or can't be read as one.
    """
    source, paths = settings.source, _paths(settings.source)
    if paths is not None:
        return Files(settings, paths)
    if settings.split is not None:
        raise ConfigError('split is for files and names on the Hub; of a DatasetDict take dataset["train"].')
    is_dataset = type(source).__module__.split(".")[0] == "datasets" and hasattr(source, "cache_files")
    if is_dataset and not isinstance(source, dict):
        from datasets.table import list_table_cache_files

        tables = (one for one in (source.data, source._indices) if one is not None)
        if all(map(list_table_cache_files, tables)):  # nothing of it lies in memory
            return InDataset(source, settings)
    name = spool(source, folder, settings.columns, settings.unit_bytes)
    return Files(settings, [], folder, name)


def _paths(source: Any) -> list[str] | None:
    """The paths of a source; None if it is something else."""
    table = sys.modules.get("milldam.stores.table.reader")
    if table is not None and isinstance(source, table.Table):
        return [str(source.path)]
    if isinstance(source, str | os.PathLike):
        return [in_home(os.fspath(source))]
    if isinstance(source, list | tuple) and source and all(isinstance(one, str | os.PathLike) for one in source):
        return [in_home(os.fspath(one)) for one in source]
    return None


# ---- files ----


@dataclass(frozen=True, slots=True)
class FileRows:
    """Reads units in any process."""

    files: FileReader

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        """The rows of a unit, a few megabytes at a time (a larger row alone); the same ones each time. `places` gets
        the files they come from."""
        rows = self.files.rows(_slices_of(unit), on_reject, places)
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else rows_between(rows, *chosen)

    def require_unchanged(self, unit: RowUnit) -> None:
        """After a unit is read: raise InputError unless its files are those that its key was made of."""
        require_unchanged(_slices_of(unit))


def _slices_of(unit: RowUnit) -> Iterator[Slice]:
    return (Slice(**slice) for slice in unit.place["slices"])


class Files:
    """Units of files: those that are named, or those of a folder that rows were written to."""

    def __init__(
        self, settings: MapSettings, paths: list[str], spooled: Path | None = None, spooled_name: str = ""
    ) -> None:
        self.settings, self.paths, self.spooled, self.spooled_name = settings, paths, spooled, spooled_name
        if STDIN in paths:
            raise ConfigError(
                f"{STDIN}: rows are read more than once, which standard input can't be. Save it to a file."
            )
        names = settings.split, settings.subset
        self._listed = [resolve_data_set(path, *names, input_format=settings.input_format) for path in paths]
        self._row_slice = next((one.rows for one in self._listed if one.rows is not None), None)
        if self._row_slice is not None and len(paths) > 1:
            raise ConfigError(f'split "{settings.split}": a slice is of one dataset; {len(paths)} are named. Give one.')
        self.left_out = ""
        """Files of its folders that are not read, known once `identity` is asked for."""
        self.schema: pa.Schema | None = None
        """The columns of the first file, if it is a table."""
        first = list(islice(self.files(), 2))
        texts = {name: getattr(settings, name) for name in ("documents", "separator", "invalid_utf8", "strict")}
        most = parse_size(settings.max_document_bytes)
        self._rules = TextRules(**texts, only_file=len(first) == 1 or spooled is not None, max_document_bytes=most)
        try:
            for slice in map(whole, first[:1]):
                self.schema = open_schema(slice) if slice.format in TABLES else None
                columns = columns_of(slice) if settings.columns is not None else []
                if columns:
                    require_columns(settings.columns, columns, without_secrets(slice.path))
        except DamagedError:
            pass  # as its reader will say

    # ---- what it reads ----

    @property
    def name(self) -> Any:
        """For the cache: where it is, or what is in it."""
        return [path if is_address(path) else os.path.abspath(path) for path in self.paths] or self.identity

    def files(self, left_out: Counter[str] | None = None) -> Iterator[InputFile]:
        """The files to read, with versions, so that a change can be named."""
        for path in sorted(self.spooled.glob("*.arrow")) if self.spooled is not None else ():
            status = path.stat()
            yield InputFile(str(path), "arrow", None, status.st_size, version_of(status))
        for one in self._listed:
            yield from list_inputs(one.inputs, one.input_format, left_out)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """{"files", "bytes", "fingerprint"}: equal ones mean equal rows."""
        state, left_out = NO_INPUT, Counter[str]()
        for file in self.files(left_out):
            state = add_input(state, file.path, file.size, file.version)
        self.left_out = describe_left_out(left_out)
        return state

    @property
    def reader(self) -> FileRows:
        spooled = () if self.spooled is None else self.files()
        names = tuple((file.path, self.spooled_name) for file in spooled)
        return FileRows(FileReader(self._rules, self.settings.columns, names))

    # ---- units ----

    def units(self) -> Iterator[RowUnit]:
        """The units that hold the wanted rows, with numbers if `with_indices`. Rows are counted only as far as
        needed."""
        numbered, rows, count = self.settings.with_indices, self._row_slice, self.reader.files.count
        if rows is None and not numbered:
            yield from self._whole_units()
            return
        first, last = 0, sys.maxsize
        if rows is not None:
            counts = (count(_slices_of(unit)) for unit in self._whole_units())
            first, last = rows.bounds(sum(counts) if rows.needs_total else sys.maxsize)
        position = index = 0
        for unit in self._whole_units():
            there = count(_slices_of(unit))
            start, stop = max(0, first - position), min(there, last - position)
            if start < stop:
                first_row = position + start - first if numbered else None
                key, place = key_of(unit.key, start, stop, first_row), unit.place | {"rows": [start, stop]}
                yield RowUnit(index, key, unit.size, place, first_row)
                index += 1
            position += there
            if position >= last:
                return

    def _whole_units(self) -> Iterator[RowUnit]:
        size = self.settings.unit_bytes
        slices = (one for file in self.files() for one in slice_file(file, size, self._rules))
        for index, group in enumerate(gather(slices, size, lambda one: one)):
            unit = Unit(index, tuple(group))
            # Rows of plain text hold the path.
            paths = [one.path for one in group if one.format == "txt"]
            key = key_of(unit.key, paths) if paths else unit.key
            yield RowUnit(index, key, unit.size, {"slices": [one.as_json() for one in group]})


# ---- datasets ----


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """As `FileRows`, for ranges of a dataset."""

    dataset: Any
    """It pickles as the paths of its files."""
    rows_at_once: int
    versions: tuple[tuple[str, str], ...]
    """Of its files."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        start, stop = unit.place["range"]
        places.add("the dataset", 0, np.arange(start, stop))
        for at in range(start, stop, self.rows_at_once):
            for batch in self.dataset[at : min(at + self.rows_at_once, stop)].combine_chunks().to_batches():
                yield from cut_by_size(batch, BATCH_BYTES)

    def require_unchanged(self, unit: RowUnit) -> None:
        for path, version in self.versions:
            if not Path(path).exists() or version_of(os.stat(path)) != version:
                raise changed_while_read(path)


class InDataset:
    """Ranges of a datasets.Dataset. Chosen, shuffled and filtered rows are respected."""

    spooled, left_out = None, ""

    def __init__(self, dataset: Any, settings: MapSettings) -> None:
        refuse_transform(dataset)
        require_columns(settings.columns, dataset.column_names, "the dataset")
        columns = list(settings.columns or dataset.column_names)
        self._dataset = dataset.with_format("arrow", columns=columns)
        self.schema, rows = dataset.data.select(columns).schema, dataset.data.num_rows
        self._bytes = int(dataset.data.select(columns).nbytes * len(dataset) / rows) if rows else 0
        """Of the rows that are chosen, about."""
        self._unit_bytes = settings.unit_bytes
        self.paths = [file.path for file in self.files()]
        versions = [(Path(file.path).name, file.size, file.version) for file in self.files()]
        fingerprint = hash_bytes(repr([dataset._fingerprint, versions]).encode())
        self.name = self.identity = {"files": len(versions), "bytes": self._bytes, "fingerprint": fingerprint}

    def files(self) -> Iterator[InputFile]:
        for cached in self._dataset.cache_files:
            status = os.stat(cached["filename"])
            yield InputFile(cached["filename"], "arrow", None, status.st_size, version_of(status))

    def units(self) -> Iterator[RowUnit]:
        rows, size = len(self._dataset), self._bytes
        count = max(1, min(round(size / self._unit_bytes), rows))
        edges = [rows * k // count for k in range(count + 1)] if rows else [0]
        for index, (start, stop) in enumerate(pairwise(edges)):
            key = key_of(self.identity["fingerprint"], self.schema.names, start, stop)
            yield RowUnit(index, key, size * (stop - start) // rows, {"range": [start, stop]}, start)

    @property
    def reader(self) -> DatasetRows:
        at_once = BATCH_BYTES * max(1, len(self._dataset)) // max(1, self._bytes)
        versions = tuple((file.path, file.version) for file in self.files())
        return DatasetRows(self._dataset, max(1, min(1000, at_once)), versions)
