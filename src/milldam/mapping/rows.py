"""Anything that has rows -> units with keys, and a reader of their rows.

    files       paths, folders, globs, addresses, names on the Hub, tables of ours: cut and gathered as for every job
    datasets    datasets.Dataset: row ranges over its Arrow files, which are mapped, never loaded
    the rest    standard input, streams, generators, frames, lists: first written to files     mapping/spool.py

A unit is known by what it reads: name, size and version of each file, and which part of it; the fingerprint of a
dataset, and its range of rows. Files are listed at each call, so that no list of a million is held (except for a
split, which is a list of paths).
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from milldam.errors import ConfigError, InputError
from milldam.files import hash_bytes, in_home
from milldam.input_files import (
    NO_INPUT,
    add_input,
    describe_left_out,
    is_address,
    is_table,
    version_of,
    without_secrets,
)
from milldam.mapping.settings import MapSettings
from milldam.mapping.spool import Spool, in_memory_bytes, refuse_transform, spool_of
from milldam.mapping.table_job import RowUnit, changed_while_read, require_unchanged
from milldam.memory import parse_size
from milldam.run.units import key_of
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, TextRules, require_columns
from milldam.sources.compression import STDIN, DamagedError
from milldam.sources.data_sets import Resolved, resolve_data_set, split_names
from milldam.sources.reading import TABLES, columns_of, slice_file
from milldam.sources.rows import FileReader, Places, Rows, cut_by_size, rows_between
from milldam.sources.splits import ALL, choose_splits, parse_split
from milldam.sources.tables import open_schema
from milldam.sources.units import InputFile, Slice, Unit, gather, list_inputs, whole
from milldam.stores.table.manifest import TableManifest

Seen = TypeVar("Seen")
_FINE = 16
"""For a number of shards, slices are this many times finer than shards."""
LARGEST_IN_MEMORY = 16 << 20
"""A dataset with more bytes than this in memory is not sent to each worker, but spooled."""


class RowReader(Protocol):
    """Reads units in any process; it pickles, by path if possible."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        """The rows of a unit, a few megabytes at a time (a larger row alone); the same ones each time. `places` gets
        the files they come from, if they come from files."""

    def require_unchanged(self, unit: RowUnit) -> None:
        """After a unit is read: raise InputError unless its files are those that its key was made of."""


def source_of(settings: MapSettings, spool: Path) -> Files | InDataset:
    """Look the source up. `spool`: a folder of the run, for what can be read only once.

    Raises ConfigError or InputError for what is not a source, or can't be read as one.
    """
    if settings.columns is not None and not settings.columns:
        raise ConfigError("columns is empty. Name at least one, or leave it out to read all.")
    source, paths = settings.source, _paths(settings.source)
    if paths is not None:
        return Files(paths, settings, spool)
    if type(source).__module__.split(".")[0] == "datasets":
        if settings.subset is not None:
            raise ConfigError("subset is for names on the Hub; this dataset is loaded already. Leave it out.")
        source = _choose_split(source, settings.split)
        if hasattr(source, "cache_files") and in_memory_bytes(source) <= LARGEST_IN_MEMORY:
            return InDataset(source, settings, spool)
    elif settings.split is not None or settings.subset is not None:
        raise ConfigError("split and subset are for files, the Hub and datasets. Leave them out.")
    rows = spool_of(source, settings)
    if rows.columns is not None:
        require_columns(settings.columns, rows.columns, rows.name)
    return Files([], settings, spool, rows)


def each_split(options: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
    """The arguments of `map` for each split of a dataset that is named whole; None: there is one table to make."""
    source = options["source"]
    if options.get("split") is not None:
        return None
    if isinstance(source, dict) and type(source).__module__.split(".")[0] == "datasets":
        of_split = {name: {"source": one} for name, one in source.items()}
    else:
        paths = _paths(source) or []
        names = split_names(paths[0], options.get("subset")) if len(paths) == 1 else []
        if len(names) < 2:
            return None
        of_split = {name: {"source": source, "split": name} for name in names}
    out = options.get("out")
    places = {name: {} if out is None else {"out": Path(out) / name} for name in of_split}
    return {name: {**options, **of_split[name], **places[name]} for name in of_split}


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
    files: FileReader

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        rows = self.files.rows(_slices_of(unit), on_reject, places)
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else rows_between(rows, *chosen)

    def require_unchanged(self, unit: RowUnit) -> None:
        require_unchanged(_slices_of(unit))


def _slices_of(unit: RowUnit) -> Iterator[Slice]:
    return (Slice(**slice) for slice in unit.place["slices"])


class Files:
    """Units of files: those that are named, or those that rows are spooled to."""

    def __init__(self, paths: Sequence[str], settings: MapSettings, folder: Path, rows: Spool | None = None) -> None:
        self.settings, self.spool_folder, self._paths = settings, folder, paths
        self._listed: list[Resolved] = []
        self._row_slice = None
        self._counted: list[int] = []
        """Rows of each unit, as far as they were counted."""
        names = settings.split, settings.subset
        if rows is None:
            self._listed = [resolve_data_set(path, *names, input_format=settings.input_format) for path in paths]
            self._row_slice = next((one.rows for one in self._listed if one.rows is not None), None)
            if self._row_slice is not None and len(paths) > 1:
                raise ConfigError(
                    f'split "{settings.split}": a slice is of one dataset; {len(paths)} are named. Give one.'
                )
            if any(STDIN in one.inputs for one in self._listed):
                if len(paths) > 1:
                    raise ConfigError("Standard input comes alone: name no files beside it.")
                rows = Spool.of_standard_input(settings.input_format)
            file, there = self._first_sound(self._named_files(), columns_of)
            if file is not None and (there or file.format not in ("jsonl", "json")):
                require_columns(settings.columns, there or [], without_secrets(file.path))
        self.rows = rows
        self.left_out = ""
        """Files of its folders that are not read, known once `identity` is asked for."""
        texts = {name: getattr(settings, name) for name in ("documents", "separator", "invalid_utf8", "strict")}
        only_file = rows is not None or len(list(islice(self._named_files(), 2))) == 1
        most = parse_size(settings.max_document_bytes)
        self._rules = TextRules(**texts, only_file=only_file, max_document_bytes=most)

    # ---- what it reads ----

    @property
    def unidentified(self) -> str | None:
        """Why it can't be identified, so that nothing made of it is found again; None: it is identified."""
        return None if self.rows is None or self.rows.fingerprint is not None else self.rows.why

    @property
    def name(self) -> Any:
        """For the cache: where it is, or what is in it."""
        return [path if is_address(path) else os.path.abspath(path) for path in self._paths] or self.identity

    def _named_files(self, left_out: Counter[str] | None = None) -> Iterator[InputFile]:
        for one in self._listed:
            table = _table_of(one)
            if table is None or table.shards:
                yield from list_inputs(one.inputs, one.input_format, left_out)

    def files(self, left_out: Counter[str] | None = None) -> Iterator[InputFile]:
        """The files to read, with versions, so that a change can be named."""
        return self._named_files(left_out) if self.rows is None else self.rows.files(self.spool_folder)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """{"files", "bytes", "fingerprint"}: equal ones mean equal rows. For rows that can't be identified, it is known
        once they are spooled."""
        if self.rows is not None and self.rows.fingerprint is not None:
            return {"files": 0, "bytes": 0, "fingerprint": self.rows.fingerprint}
        known, left_out = NO_INPUT, Counter[str]()
        for file in self.files(left_out):
            known = add_input(known, file.path, file.size, file.version)
        self.left_out = describe_left_out(left_out)
        if known["files"] or self.schema is None:
            return known
        return known | {"fingerprint": hash_bytes(self.schema.serialize().to_pybytes())}  # a table without rows

    @cached_property
    def schema(self) -> pa.Schema | None:
        """The columns of the first table, or of the first file that has some; None: they are not known beforehand."""
        if self.rows is not None:
            return self.rows.schema
        table = _table_of(self._listed[0])
        if table is not None:
            return table.schema.to_arrow()

        def look(file: Slice) -> pa.Schema | None:
            return open_schema(file) if file.format in TABLES else None

        return self._first_sound(self.files(), look)[1]

    def _first_sound(
        self, files: Iterator[InputFile], look: Callable[[Slice], Seen]
    ) -> tuple[InputFile | None, Seen | None]:
        """The first file that is not damaged, and what `look` sees in it; the others are rejected when read."""
        damaged: InputError | None = None
        for file in files:
            try:
                return file, look(whole(file))
            except DamagedError as error:
                damaged = damaged or InputError(f"{without_secrets(file.path)}: {error}. Get or make it again.")
        if damaged is not None:
            raise damaged
        return None, None

    @property
    def reader(self) -> FileRows:
        names = () if self.rows is None else tuple((file.path, self.rows.name) for file in self.files())
        return FileRows(FileReader(self._rules, self.settings.columns, names))

    def spool(self) -> None:
        """Write rows that can be read only once to files, unless they are there already."""
        if self.rows is not None:
            self.spool_folder.mkdir(parents=True, exist_ok=True)
            self.rows.write(self.spool_folder, self.settings.columns, self.settings.unit_bytes)

    # ---- units ----

    def units(self) -> Iterator[RowUnit]:
        """The units that hold the wanted rows, with numbers if `with_indices`. Rows are counted only as far as needed,
        and only once."""
        numbered = self.settings.with_indices
        first, last = self._bounds()
        position = index = 0
        for number, unit in enumerate(self._whole_units()):
            if position >= last:
                return
            if not numbered and position >= first and last == math.inf:
                yield replace(unit, index=index)
                index += 1
                continue
            count = self._count(number, unit)
            start, stop = max(0, first - position), int(min(count, last - position))
            if start < stop:
                part = None if (start, stop) == (0, count) else [start, stop]
                place = unit.place if part is None else unit.place | {"rows": part}
                first_row = position + start - first if numbered else None
                key = unit.key if part is None and first_row is None else key_of(unit.key, part, first_row)
                yield RowUnit(index, key, unit.size, place, first_row)
                index += 1
            position += count

    def _whole_units(self) -> Iterator[RowUnit]:
        shards, size = self.settings.shards, self.settings.unit_bytes
        groups: Iterable[Sequence[Slice]]
        if shards is None:
            groups = gather(self._slices(size), size, lambda one: one)
        else:
            stride = max(1, sum(file.size for file in self.files()) // (_FINE * shards))
            groups = evenly(self._slices(stride), shards, [one.size for one in self._slices(stride)])
        for index, slices in enumerate(groups):
            unit = Unit(index, tuple(slices))
            # Rows of plain text hold the path.
            paths = [one.path for one in slices if one.format == "txt"]
            key = key_of(unit.key, paths) if paths else unit.key
            yield RowUnit(index, key, unit.size, {"slices": [one.as_json() for one in slices]})

    def _slices(self, size: int) -> Iterator[Slice]:
        return (one for file in self.files() for one in slice_file(file, size, self._rules))

    def _bounds(self) -> tuple[int, float]:
        """The numbers of the first row and of the one behind the last."""
        rows = self._row_slice
        if rows is None:
            return 0, math.inf
        if not rows.needs_total:
            return rows.start or 0, math.inf if rows.stop is None else rows.stop
        return rows.bounds(sum(self._count(number, unit) for number, unit in enumerate(self._whole_units())))

    def _count(self, number: int, unit: RowUnit) -> int:
        if number == len(self._counted):
            self._counted.append(self.reader.files.count(_slices_of(unit)))
        return self._counted[number]


def evenly(slices: Iterator[Slice], groups: int, sizes: list[int]) -> Iterator[list[Slice]]:
    """This many groups of even size, or as many as there are slices."""
    group: list[Slice] = []
    total, done, begun, number = sum(sizes), 0, 0, 0
    for place, slice in enumerate(slices):
        goal = begun + (total - begun) / (groups - number)
        # Each of the groups that are still to come needs a slice.
        short = len(sizes) - place <= groups - 1 - number
        if group and number < groups - 1 and (short or done + slice.size / 2 > goal):
            yield group
            group, begun, number = [], done, number + 1
        group.append(slice)
        done += slice.size
    if group:
        yield group


def _table_of(listed: Resolved) -> TableManifest | None:
    """The manifest of a folder that is a table of ours."""
    folder = Path(listed.inputs[0]) if len(listed.inputs) == 1 else None
    return TableManifest.read(folder) if folder is not None and is_table(folder) else None


# ---- datasets ----


@dataclass(frozen=True, slots=True)
class DatasetRows:
    dataset: Any
    """It pickles as the paths of its files, or by value if it is small and in memory."""
    rows_at_once: int
    versions: tuple[tuple[str, str], ...]
    """Of its files."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        start, stop = unit.place["range"]
        for at in range(start, stop, self.rows_at_once):
            for batch in self.dataset[at : min(at + self.rows_at_once, stop)].combine_chunks().to_batches():
                yield from cut_by_size(batch, BATCH_BYTES)

    def require_unchanged(self, unit: RowUnit) -> None:
        for path, version in self.versions:
            if not Path(path).exists() or version_of(os.stat(path)) != version:
                raise changed_while_read(path)


class InDataset:
    """Ranges of a datasets.Dataset. Chosen, shuffled and filtered rows are respected."""

    rows, unidentified, left_out = None, None, ""

    def __init__(self, dataset: Any, settings: MapSettings, folder: Path) -> None:
        self.settings, self.spool_folder = settings, folder
        refuse_transform(dataset)
        require_columns(settings.columns, dataset.column_names, "the dataset")
        columns = list(settings.columns or dataset.column_names)
        self._dataset = dataset.with_format("arrow", columns=columns)
        self.schema = dataset.data.select(columns).schema
        rows = dataset.data.num_rows
        self._bytes = int(dataset.data.select(columns).nbytes * len(dataset) / rows) if rows else 0
        """Of the rows that are chosen, about."""
        self._versions = tuple((file.path, file.version) for file in self.files())
        versions = [(Path(file.path).name, file.size, file.version) for file in self.files()]
        fingerprint = hash_bytes(repr([dataset._fingerprint, versions]).encode())
        self.identity = {"files": len(versions), "bytes": self._bytes, "fingerprint": fingerprint}
        self.name = self.identity

    def files(self) -> Iterator[InputFile]:
        for cached in self._dataset.cache_files:
            status = os.stat(cached["filename"])
            yield InputFile(cached["filename"], "arrow", None, status.st_size, version_of(status))

    def units(self) -> Iterator[RowUnit]:
        rows, size = len(self._dataset), self._bytes
        count = max(1, min(self.settings.shards or round(size / self.settings.unit_bytes), rows))
        edges = [rows * k // count for k in range(count + 1)] if rows else [0]
        for index, (start, stop) in enumerate(pairwise(edges)):
            key = key_of(self.identity["fingerprint"], self.schema.names, start, stop)
            yield RowUnit(index, key, size * (stop - start) // rows, {"range": [start, stop]}, start)

    @property
    def reader(self) -> DatasetRows:
        at_once = BATCH_BYTES * max(1, len(self._dataset)) // max(1, self._bytes)
        return DatasetRows(self._dataset, max(1, min(1000, at_once)), self._versions)

    def spool(self) -> None:
        """Its rows are read where they lie."""


def _choose_split(source: Any, split: str | None) -> Any:
    """A dataset of a dict of them, or the only one, with the slice that is asked for."""
    names, rows = (None, None) if split is None else parse_split(split)
    if isinstance(source, dict):
        from datasets import concatenate_datasets

        several = [source[name] for name in choose_splits(names, source, "the dataset")]
        source = several[0] if len(several) == 1 else concatenate_datasets(several)
    elif names is not None and names not in ((ALL,), (str(source.split),)):
        raise ConfigError(f'split "{split}": the dataset is split "{source.split}" alone. Leave split out.')
    if rows is None:
        return source
    if not hasattr(source, "__len__"):
        raise ConfigError(f'split "{split}": a streamed dataset has no slices. Use .skip() and .take() on it.')
    return source.select(range(*rows.bounds(len(source))))
