"""Files -> a plan of units: what `milldam.map` reads from paths, folders, globs, addresses, names on the Hub and tables
of ours.

Files are listed anew at each call, so that no list of a million is held (but for a split, which is a list of paths).
Standard input is copied to the spool first, since workers could not read it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, hash_bytes
from milldam.input_files import COMPRESSIONS, InputState, LeftOut, is_table, version_of, without_secrets
from milldam.mapping.pieces import Hashes, Piece, gather_evenly, pieces_of
from milldam.mapping.plan import RowUnit, SourceOptions
from milldam.sources.batch import OnReject, require_columns
from milldam.sources.compression import STDIN, open_bytes
from milldam.sources.data_sets import RowSlice, resolve_data_set
from milldam.sources.listing import InputFile, list_inputs
from milldam.sources.reading import FileReader, columns_of, rows_between
from milldam.sources.rows import Places, Room, Rows
from milldam.sources.tables import open_schema
from milldam.sources.units import Slice, gather, whole
from milldam.stores.table.manifest import TableManifest

_STDIN = "standard-input"
_FINE = 16
"""For a number of shards, pieces are so many times finer than shards."""
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Inputs:
    """What to list: paths with the format that they are said to have, and which of all rows to take."""

    listed: tuple[tuple[tuple[str, ...], str | None] | Path, ...]
    """Paths to list, and the format that they are said to have; or the folder of a table of ours."""
    rows: RowSlice | None = None

    @property
    def has_stdin(self) -> bool:
        return any(STDIN in given[0] for given in self.listed if not isinstance(given, Path))

    def files(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for given in self.listed:
            yield from _shards(given) if isinstance(given, Path) else list_inputs(*given, left_out)


def find_inputs(paths: Sequence[str], options: SourceOptions) -> Inputs:
    """Look up the names of datasets and tables."""
    listed: list[tuple[tuple[str, ...], str | None] | Path] = []
    rows = None
    for path in paths:
        if is_table(Path(path)):
            if options.split is not None or options.subset is not None:
                raise ConfigError(f"{path}: a table has neither splits nor subsets. Leave them out.")
            listed.append(Path(path))
            continue
        found = resolve_data_set(path, options.split, options.subset, input_format=options.input_format)
        listed.append((found.inputs, found.input_format))
        rows = found.rows
    if rows is not None and len(listed) > 1:
        raise ConfigError(f'split "{options.split}": a slice is of one dataset; {len(listed)} are given. Give one.')
    return Inputs(tuple(listed), rows)


def _shards(folder: Path) -> Iterator[InputFile]:
    for shard in TableManifest.read(folder).shards:
        # The version is the content: a shard that was made again as it was is the same input.
        yield InputFile(str(folder / shard.name), "arrow", None, shard.bytes, f"xxh3 {shard.xxh3}")


@dataclass(frozen=True, slots=True)
class FileUnits:
    """Reads units of files."""

    files: FileReader

    def read(
        self, unit: RowUnit, on_reject: OnReject, places: Places | None = None, room: Room | None = None
    ) -> Iterator[Rows]:
        places = places if places is not None else Places()
        rows = self.files.rows(_slices_of(unit), on_reject, places, room)
        chosen = unit.place.get("rows")
        places.before = 0 if chosen is None else chosen[0]
        return rows if chosen is None else rows_between(rows, *chosen)


def _slices_of(unit: RowUnit) -> Iterator[Slice]:
    return (Slice(*slice) for slice in unit.place["slices"])


def can_be_checked(unit: RowUnit) -> bool:
    """Whether `require_unchanged` sees every file that it reads."""
    versions = unit.place.get("versions", ())
    return bool(versions) and None not in versions


def require_unchanged(unit: RowUnit) -> None:
    """After a unit is read: whether its files are still those that its key was made of. A stat for each."""
    for slice, version in zip(unit.place.get("slices", ()), unit.place.get("versions", ()), strict=False):
        if version is None:
            continue
        try:
            now = version_of(os.stat(slice[0]))
        except OSError:
            now = None
        if now != version:
            raise InputError(
                f"{slice[0]}: changed while it was mapped. Run the same call again: finished units of files that did "
                "not change are reused."
            )


class FilePlan:
    """Units of files, cut from the names, sizes and versions of the files, and the bytes of large ones, alone."""

    def __init__(self, paths: Sequence[str], options: SourceOptions, spool: Path) -> None:
        self._inputs, self._options, self.spool_folder = find_inputs(paths, options), options, spool
        self.needs_spooling = self._inputs.has_stdin
        self.unidentified = "standard input can't be read again" if self.needs_spooling else None
        self.left_out = ""
        file, wanted = next(self._inputs.files(), None), self._options.columns
        there = columns_of(whole(file), self._made_spool_folder()) if file is not None else []
        if file is not None and (there or file.format not in ("jsonl", "json")):
            require_columns(wanted, there, without_secrets(file.path))
        self.columns = list(wanted) if wanted is not None else there or None
        self._counted: list[int] = []

    # ---- what it reads ----

    def files(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for file in self._inputs.files(left_out):
            yield self._spooled(file) if file.path == STDIN else file

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
        first = self._inputs.listed[0]
        if isinstance(first, Path):
            return TableManifest.read(first).schema.to_arrow()
        file = next(self.files(), None)
        is_table = file is not None and file.format in ("parquet", "arrow")
        return open_schema(whole(file), str(self.spool_folder)) if file is not None and is_table else None

    def _made_spool_folder(self) -> str:
        """Tables are unpacked into it."""
        self.spool_folder.mkdir(parents=True, exist_ok=True)
        return str(self.spool_folder)

    @property
    def _files(self) -> FileReader:
        names = ((str(self._stdin_path()), STDIN),) if self.needs_spooling else ()
        return FileReader(self._options.rules, self._options.columns, self._made_spool_folder(), names)

    @property
    def reader(self) -> FileUnits:
        return FileUnits(self._files)

    # ---- standard input ----

    def _stdin_path(self) -> Path:
        """Where standard input lies once it is copied."""
        file = next(file for file in self._inputs.files() if file.path == STDIN)
        ending = next((end for end, name in COMPRESSIONS.items() if name == file.compression), "")
        return self.spool_folder / f"{_STDIN}.{file.format}{ending}"

    def _spooled(self, file: InputFile) -> InputFile:
        path = self._stdin_path()
        if not path.exists():
            return file
        status = path.stat()
        return replace(file, path=str(path), size=status.st_size, version=version_of(status))

    def spool(self) -> None:
        """Copy standard input, if it is one of the inputs. Holds a block."""
        if not self.needs_spooling:
            return
        self._made_spool_folder()
        with NewFile(self._stdin_path()) as new:
            source = open_bytes(STDIN)
            while block := source.read(_BLOCK):
                new.write(block)
            new.commit()

    # ---- units ----

    def units(self) -> Iterator[RowUnit]:
        units = (self._unit(index, group) for index, group in enumerate(self._groups()))
        if self._inputs.rows is None and not self._options.numbered:
            return units
        return self._chosen(units)

    def _groups(self) -> Iterator[list[Piece]]:
        options = self._options
        if options.shards is None:
            pieces = self._pieces(options.shard_size, Hashes(self.spool_folder))
            return gather(pieces, options.shard_size, lambda piece: piece.slice)
        stride = max(1, sum(file.size for file in self.files()) // (_FINE * options.shards))
        count = total = 0
        for piece in self._pieces(stride, None):
            count, total = count + 1, total + piece.slice.size
        return gather_evenly(self._pieces(stride, None), options.shards, count=count, total=total)

    def _pieces(self, shard_size: int, hashes: Hashes | None) -> Iterator[Piece]:
        for file in self.files():
            yield from pieces_of(file, shard_size, self._options.rules, hashes)

    def _unit(self, index: int, group: list[Piece]) -> RowUnit:
        options = self._options
        # What the rows depend on besides the bytes.
        formats = list(dict.fromkeys(piece.slice.format for piece in group))
        how = [formats, options.columns, options.documents, options.separator, options.invalid_utf8]
        key = _hash([how, [piece.identity for piece in group]])
        size = sum(piece.slice.size for piece in group)
        slices = [list(astuple(piece.slice)) for piece in group]
        return RowUnit(index, key, size, {"slices": slices, "versions": [piece.version for piece in group]})

    # ---- a slice of all rows, and their numbers ----

    def _chosen(self, units: Iterator[RowUnit]) -> Iterator[RowUnit]:
        """The units that hold the wanted rows, with their numbers. Rows are counted as far as needed, and only once."""
        first, last = self._bounds()
        position = index = 0
        for number, unit in enumerate(units):
            if position >= last:
                return
            known = not self._options.numbered and position >= first and last == math.inf
            count = self._count(number, unit) if not known else 0
            start, stop = max(0, first - position), min(count, last - position)
            if known or start < stop:
                part = None if known or (start, stop) == (0, count) else (int(start), int(stop))
                place = unit.place if part is None else unit.place | {"rows": list(part)}
                numbered = int(position + start - first) if self._options.numbered else None
                key = unit.key if part is None and numbered is None else _hash([unit.key, part, numbered])
                yield RowUnit(index, key, unit.size, place, numbered)
                index += 1
            position += count

    def _bounds(self) -> tuple[int, float]:
        rows = self._inputs.rows
        if rows is None:
            return 0, math.inf
        if not rows.needs_total:
            return rows.start or 0, math.inf if rows.stop is None else rows.stop
        units = (self._unit(index, group) for index, group in enumerate(self._groups()))
        return rows.bounds(sum(self._count(number, unit) for number, unit in enumerate(units)))

    def _count(self, number: int, unit: RowUnit) -> int:
        if number == len(self._counted):
            self._counted.append(self._files.count(_slices_of(unit), self._options.room))
        return self._counted[number]


def _hash(value: Any) -> str:
    return hash_bytes(json.dumps(value).encode())
