"""Anything that has rows -> units with keys, and a reader of their rows.

    files       paths, folders, globs, addresses, names on the Hub, tables of ours: cut and gathered as for every job
    datasets    datasets.Dataset: row ranges over its Arrow files, which are mapped, never loaded
    the rest    IterableDataset, generator functions, frames, lists of dicts: spooled once       mapping/spool.py

A unit is known by what it reads: name, size and version of each file, and which part of it; the fingerprint of a
dataset, and its range of rows. Files are listed anew at each call, so that no list of a million is held (but for a
split, which is a list of paths). Standard input is copied to the spool first, since workers could not read it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, hash_bytes, in_home
from milldam.input_files import COMPRESSIONS, InputState, LeftOut, is_address, is_table, version_of, without_secrets
from milldam.mapping.settings import MapSettings
from milldam.memory import parse_size
from milldam.run.units import key_of
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, Places, TextRules, require_columns
from milldam.sources.compression import STDIN, DamagedError, open_bytes
from milldam.sources.data_sets import ALL, Resolved, choose_splits, parse_split, resolve_data_set, split_names
from milldam.sources.reading import TABLES, FileReader, columns_of, rows_between, slice_file
from milldam.sources.rows import Rows, cut_by_size
from milldam.sources.tables import open_schema
from milldam.sources.units import InputFile, Slice, Unit, gather, is_as_listed, list_inputs, whole
from milldam.stores.table.manifest import TableManifest

if TYPE_CHECKING:
    from milldam.mapping.spool import Spooled

AnySource: TypeAlias = "Files | InDataset | Spooled"
Item = TypeVar("Item")
Seen = TypeVar("Seen")
_BLOCK, _GATHERED = 1 << 20, 1024
_FINE = 16
"""For a number of shards, slices are so many times finer than shards."""
KINDS = (
    "paths, a datasets.Dataset or IterableDataset, a frame or table, a list of dicts, or a function that yields dicts"
)


@dataclass(frozen=True, slots=True)
class RowUnit:
    index: int
    key: str
    """Equal keys, equal rows; where rows are numbered, also of equal numbers. Not of its place in the plan."""
    size: int
    """Bytes of input, for progress."""
    place: dict[str, Any]
    """What its reader has to read; plain JSON."""
    first_row: int | None = None
    """Number of its first row among all; None where rows are not numbered."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class RowReader:
    """Reads units in any process; it pickles, by path where that can be."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        """The rows of a unit, a few megabytes at a time (a larger row alone); the same ones each time. `places` is told
        which file they come from, where they come from files."""
        raise NotImplementedError

    def require_unchanged(self, unit: RowUnit) -> None:
        """After a unit is read: raise InputError unless its files are those that its key was made of."""


class Source:
    """Rows that can be planned. Each has besides: `reader`, a `RowReader`; `units()`: in order, made from the input and
    the settings alone, streamed, and the same at each call."""

    schema: Any
    """A pa.Schema of the rows, where the source says it even when it has none; else None."""
    identity: Any
    """{"files", "bytes", "fingerprint"}: equal ones mean equal rows."""

    unidentified: str | None = None
    """Why it can't be identified: what was made of it is not found again. None: it is identified."""
    left_out = ""
    """Files of its folders that are not read, known once `identity` is asked for; empty: none."""
    needs_spooling = False
    """Whether `spool` must be called before `units` and `reader` are used."""

    def __init__(self, settings: MapSettings, spool: Path) -> None:
        self.settings, self.spool_folder = settings, spool

    @property
    def name(self) -> Any:
        """For the cache: where it is, or what is in it."""
        return self.identity

    def files(self) -> Iterator[InputFile]:
        """What is read, with versions, so that a change can be named."""
        return iter(())

    def spool(self) -> None:
        """Write what can be read only once to the spool, durably; nothing is done when it is there already."""


def source_of(settings: MapSettings, spool: Path) -> AnySource:
    """Look the source up. `spool`: a folder of the run, for what can be read only once, and what is worth keeping.

    Raises ConfigError or InputError for what is no source, or can't be read as one.
    """
    if settings.columns is not None and not settings.columns:
        raise ConfigError("columns is empty. Name at least one, or leave it out to read all.")
    source, paths = settings.source, _paths(settings.source)
    if paths is not None:
        return Files(paths, settings, spool)
    from milldam.mapping.spool import spooled, spooled_dataset

    if type(source).__module__.split(".")[0] != "datasets":
        if settings.split is not None or settings.subset is not None:
            raise ConfigError("split and subset are for files, the Hub and datasets. Leave them out.")
        return spooled(source, settings, spool)
    if settings.subset is not None:
        raise ConfigError("subset is for names on the Hub; this dataset is loaded already. Leave it out.")
    chosen = _choose_split(source, settings.split)
    return spooled_dataset(chosen, settings, spool) or InDataset(chosen, settings, spool)


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
    """What names files; None when the source is something else."""
    table = sys.modules.get("milldam.stores.table.reader")
    if table is not None and isinstance(source, table.Table):
        return [str(source.path)]
    if isinstance(source, str | os.PathLike):
        return [in_home(os.fspath(source))]
    if isinstance(source, list | tuple) and source and all(isinstance(one, str | os.PathLike) for one in source):
        return [in_home(os.fspath(one)) for one in source]
    return None


def evenly(
    items: Iterable[Item], size_of: Callable[[Item], int], groups: int, *, count: int, total: int
) -> Iterator[list[Item]]:
    """So many groups of even size, or as many as there are items. `count`, `total`: items, and bytes in all."""
    group: list[Item] = []
    done = number = begun = 0
    for seen, item in enumerate(items):
        size = size_of(item)
        goal = begun + (total - begun) / (groups - number)
        # An item for each of the groups that are still to come must be left.
        short = count - seen <= groups - 1 - number
        if group and number < groups - 1 and (short or done + size / 2 > goal):
            yield group
            group, begun, number = [], done, number + 1
        group.append(item)
        done += size
    if group:
        yield group


def _changed(path: str) -> InputError:
    again = "Run the same call again: finished units of files that did not change are reused."
    return InputError(f"{path}: changed while it was mapped. {again}")


# ---- files ----


@dataclass(frozen=True, slots=True)
class FileRows(RowReader):
    files: FileReader

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        rows = self.files.rows(_slices_of(unit), on_reject, places)
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else rows_between(rows, *chosen)

    def require_unchanged(self, unit: RowUnit) -> None:
        for path, state in {slice.path: slice.state for slice in _slices_of(unit)}.items():
            if not is_as_listed(path, state):
                raise _changed(without_secrets(path))


def _slices_of(unit: RowUnit) -> Iterator[Slice]:
    return (Slice(**slice) for slice in unit.place["slices"])


class Files(Source):
    """Units of files."""

    def __init__(self, paths: Sequence[str], settings: MapSettings, spool: Path) -> None:
        super().__init__(settings, spool)
        asked = settings.split, settings.subset
        self._listed = [resolve_data_set(path, *asked, input_format=settings.input_format) for path in paths]
        self._rows = next((one.rows for one in self._listed if one.rows is not None), None)
        if self._rows is not None and len(paths) > 1:
            raise ConfigError(f'split "{settings.split}": a slice is of one dataset; {len(paths)} are given. Give one.')
        self._names = [path if is_address(path) else os.path.abspath(path) for path in paths]
        self.needs_spooling = any(STDIN in one.inputs for one in self._listed)
        self.unidentified = "standard input can't be read again" if self.needs_spooling else None
        file, names = self._first_sound(self._as_listed(), columns_of)
        if file is not None and (names or file.format not in ("jsonl", "json")):
            require_columns(settings.columns, names or [], without_secrets(file.path))
        given = {name: getattr(settings, name) for name in ("documents", "separator", "invalid_utf8", "strict")}
        only_file = len(list(islice(self._as_listed(), 2))) == 1
        most = parse_size(settings.max_document_bytes)
        self._rules = TextRules(**given, only_file=only_file, max_document_bytes=most)
        self._counted: list[int] = []
        """Rows of each unit, as far as they were counted."""

    # ---- what it reads ----

    @property
    def name(self) -> Any:
        return self._names

    def _as_listed(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for one in self._listed:
            table = _table_of(one)
            if table is None or table.shards:
                yield from list_inputs(one.inputs, one.input_format, left_out)

    def files(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for file in self._as_listed(left_out):
            copy = next(self.spool_folder.glob("standard-input-*"), None) if file.path == STDIN else None
            if copy is not None:
                status = copy.stat()
                file = replace(file, path=str(copy), size=status.st_size, version=version_of(status))
            yield file

    @cached_property
    def identity(self) -> dict[str, Any]:
        state, left_out = InputState(), LeftOut()
        for file in self.files(left_out):
            state.add(file.path, file.size, file.version)
        self.left_out = str(left_out)
        known = state.as_json()
        if known["files"] or self.schema is None:
            return known
        return known | {"fingerprint": hash_bytes(self.schema.serialize().to_pybytes())}  # a table without rows

    @cached_property
    def schema(self) -> pa.Schema | None:
        """Of the first table, or file that has one."""
        table = _table_of(self._listed[0])
        if table is not None:
            return table.schema.to_arrow()

        def look(file: Slice) -> pa.Schema | None:
            return open_schema(file) if file.format in TABLES else None

        return self._first_sound(self.files(), look)[1]

    def _first_sound(
        self, files: Iterator[InputFile], look: Callable[[Slice], Seen]
    ) -> tuple[InputFile | None, Seen | None]:
        """The first file that is not damaged, and what is seen in it; the others are set aside when they are read."""
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
        names = tuple((str(path), STDIN) for path in self.spool_folder.glob("standard-input-*"))
        return FileRows(FileReader(self._rules, self.settings.columns, names))

    def spool(self) -> None:
        """Copy standard input, if it is one of the inputs, to a file that is known by its content."""
        if not self.needs_spooling:
            return
        file = next(file for file in self._as_listed() if file.path == STDIN)
        ending = next((end for end, name in COMPRESSIONS.items() if name == file.compression), "")
        self.spool_folder.mkdir(parents=True, exist_ok=True)
        with NewFile(self.spool_folder / "standard-input") as new:
            source = open_bytes(STDIN)
            while block := source.read(_BLOCK):
                new.write(block)
            name = f"standard-input-{new.record['xxh3']}.{file.format}{ending}"
            new.commit(name)
        os.utime(self.spool_folder / name, (0, 0))

    # ---- units ----

    def units(self) -> Iterator[RowUnit]:
        """Those that hold the wanted rows, with their numbers where these are wanted. Rows are counted as far as
        needed, and only once."""
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
        if shards is None:
            groups = gather(self._slices(size), size, lambda one: one)
        else:
            stride = max(1, sum(file.size for file in self.files()) // (_FINE * shards))
            count = total = 0
            for slice in self._slices(stride):
                count, total = count + 1, total + slice.size
            groups = evenly(self._slices(stride), lambda one: one.size, shards, count=count, total=total)
        for index, slices in enumerate(groups):
            unit = Unit(index, tuple(slices))
            # Rows of plain text hold the path.
            paths = [one.path for one in slices if one.format == "txt"]
            key = key_of(unit.key, paths) if paths else unit.key
            yield RowUnit(index, key, unit.size, {"slices": [one.as_json() for one in slices]})

    def _slices(self, size: int) -> Iterator[Slice]:
        return (one.of_state(file.state) for file in self.files() for one in slice_file(file, size, self._rules))

    def _bounds(self) -> tuple[int, float]:
        rows = self._rows
        if rows is None:
            return 0, math.inf
        if not rows.needs_total:
            return rows.start or 0, math.inf if rows.stop is None else rows.stop
        return rows.bounds(sum(self._count(number, unit) for number, unit in enumerate(self._whole_units())))

    def _count(self, number: int, unit: RowUnit) -> int:
        if number == len(self._counted):
            self._counted.append(self.reader.files.count(_slices_of(unit)))
        return self._counted[number]


def _table_of(listed: Resolved) -> TableManifest | None:
    """The manifest of a folder that is a table of ours."""
    folder = Path(listed.inputs[0]) if len(listed.inputs) == 1 else None
    return TableManifest.read(folder) if folder is not None and is_table(folder) else None


# ---- datasets ----


@dataclass(frozen=True, slots=True)
class DatasetRows(RowReader):
    table: Any
    """A datasets.table.Table: it pickles as the paths of its files, or by value when it is small and in memory."""
    indices: str | None
    """A file of row numbers, 8 bytes each; None: the rows in their order."""
    versions: tuple[tuple[str, str], ...]
    """Of its files."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places) -> Iterator[Rows]:
        start, stop = unit.place["range"]
        if self.indices is None:
            for batch in self.table.fast_slice(start, stop - start).to_batches():
                yield from cut_by_size(batch, BATCH_BYTES)
            return
        # Rows from all over the table: single ones are found without a copy, then put together by their size.
        held: list[pa.RecordBatch] = []
        size = 0
        for at in range(start, stop, _GATHERED):
            numbers = np.fromfile(self.indices, "<i8", min(_GATHERED, stop - at), offset=8 * at)
            for row in self.table.fast_gather(numbers).to_batches():
                if held and size + row.nbytes > BATCH_BYTES:
                    yield pa.concat_batches(held)
                    held, size = [], 0
                held.append(row)
                size += row.nbytes
        if held:
            yield pa.concat_batches(held)

    def require_unchanged(self, unit: RowUnit) -> None:
        for path, version in self.versions:
            if not Path(path).exists() or version_of(os.stat(path)) != version:
                raise _changed(path)


class InDataset(Source):
    """Ranges of a datasets.Dataset. Chosen, shuffled and filtered rows (its indices) are respected; a worker gets the
    table by path, the indices by a file in the spool."""

    def __init__(self, dataset: Any, settings: MapSettings, spool: Path) -> None:
        super().__init__(settings, spool)
        refuse_transform(dataset)
        require_columns(settings.columns, dataset.column_names, "the dataset")
        self._columns = list(settings.columns or dataset.column_names)
        self._dataset, self._table = dataset, dataset.data.select(self._columns)
        self.schema = self._table.schema
        rows = self._table.num_rows
        self._bytes = int(self._table.nbytes * len(dataset) / rows) if rows else 0
        """Of the rows that are chosen, about."""
        versions = [(Path(file.path).name, file.size, file.version) for file in self.files()]
        fingerprint = hash_bytes(repr([dataset._fingerprint, versions]).encode())
        self.identity = {"files": len(versions), "bytes": self._bytes, "fingerprint": fingerprint}

    def files(self) -> Iterator[InputFile]:
        for cached in self._dataset.cache_files:
            status = os.stat(cached["filename"])
            yield InputFile(cached["filename"], "arrow", None, status.st_size, version_of(status))

    def units(self) -> Iterator[RowUnit]:
        rows, size = len(self._dataset), self._bytes
        count = self.settings.shards or round(size / self.settings.unit_bytes)
        count = max(1, min(count, rows))
        edges = [rows * k // count for k in range(count + 1)] if rows else [0]
        for index, (start, stop) in enumerate(pairwise(edges)):
            key = key_of(self.identity["fingerprint"], self._columns, start, stop)
            yield RowUnit(index, key, size * (stop - start) // rows, {"range": [start, stop]}, start)

    @property
    def reader(self) -> DatasetRows:
        path, indices = self.spool_folder / f"indices-{self.identity['fingerprint']}", self._dataset._indices
        if indices is not None and not path.exists():
            self.spool_folder.mkdir(parents=True, exist_ok=True)
            with NewFile(path) as new:
                for chunk in indices.column(0).chunks:
                    new.write(np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False), dtype="<i8").data)
                new.commit()
        versions = tuple((file.path, file.version) for file in self.files())
        return DatasetRows(self._table, None if indices is None else str(path), versions)


def refuse_transform(dataset: Any) -> None:
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "The dataset has a transform (with_transform, set_transform), which is applied to rows as they are "
            "read.\nGive the function to milldam.map instead, and the dataset without it: dataset.with_format(None)"
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
