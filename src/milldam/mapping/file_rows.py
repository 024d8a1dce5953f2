"""Files -> a plan of units: what `milldam.map` reads from paths, folders, globs, addresses, names on the Hub and tables
of ours.

Files are listed anew at each call, so that no list of a million is held (but for a split, which is a list of paths).
Standard input is copied to the spool first, since workers could not read it.

Files are cut into pieces with an identity each. A piece of a large file of lines is known by the hash of its bytes, not
by the file's modification time: what is appended leaves the pieces before it as they are. That costs one pass over the
file at the speed of the disk, when it is new or has changed; the hashes are kept in `Hashes`. Everything else is known
by path, size and version of its file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
import xxhash

from milldam.errors import ConfigError, InputError
from milldam.files import NewFile, explain_os_errors, hash_bytes, hash_rest
from milldam.input_files import COMPRESSIONS, InputState, LeftOut, is_address, is_table, version_of, without_secrets
from milldam.mapping.plan import HASHES, RowUnit, hash_json, text_rules
from milldam.mapping.settings import MapSettings
from milldam.run.records import Journal
from milldam.sources.batch import OnReject, Places, TextRules, require_columns
from milldam.sources.compression import STDIN, DamagedError, open_bytes
from milldam.sources.csv_records import csv_header, slice_csv
from milldam.sources.data_sets import Resolved, resolve_data_set
from milldam.sources.plain_text import boundary_of
from milldam.sources.reading import TABLES, FileReader, can_cut, columns_of, rows_between, seen_format, slice_file
from milldam.sources.records import LINE, Boundary
from milldam.sources.rows import Rows
from milldam.sources.tables import open_schema
from milldam.sources.units import InputFile, Slice, by_bytes, gather, list_inputs, whole
from milldam.stores.table.manifest import TableManifest

Seen = TypeVar("Seen")
_BLOCK, _TAIL = 1 << 20, 1 << 16
_STDIN = "standard-input"
_FINE = 16
"""For a number of shards, pieces are so many times finer than shards."""
Cuts = list[tuple[int, int | None, str]]
"""(start, stop, hash of what the rows between them depend on)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a slice of one."""

    slice: Slice
    identity: list[Any]
    """What its rows depend on, plain JSON."""
    version: str | None = None
    """Of its file, where a look at the file can tell whether it is still that one."""


class Hashes:
    """The hashes of pieces, kept in a file by path, size and version. A line per large file is held in memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, Cuts] | None = None

    def cuts(self, file: InputFile, how: str, find: Callable[[], Cuts]) -> Cuts:
        """As `find` gives them; it is asked only for what is not known."""
        if self._known is None:
            lines = Journal(self._folder).read(HASHES)
            self._known = {line["key"]: [tuple(cut) for cut in line["cuts"]] for line in lines}
        key = hash_json([file.path, file.size, file.version, how])
        if key not in self._known:
            found = find()
            if version_of(os.stat(file.path)) != file.version:
                raise InputError(f"{file.path}: changed while it was read. Run the same call again.")
            self._known[key] = found
            with explain_os_errors(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            journal = Journal(self._folder)
            journal.append(HASHES, {"key": key, "cuts": found})
            journal.close()
        return self._known[key]


def pieces_of(file: InputFile, shard_size: int, rules: TextRules, hashes: Hashes | None) -> Iterator[Piece]:
    """The file, cut as its format allows. `hashes` None: known by version."""
    # A local file is known by the time of its last change, which can be looked up again.
    remote = is_address(file.path)
    version = file.version if file.version.isdigit() and not remote else None
    file = seen_format(file, shard_size)
    # However its path is spelled; but in rows of plain text it stands as it is.
    name = file.path if file.format == "txt" or remote else os.path.abspath(file.path)
    by_lines = file.format not in ("parquet", "arrow") and can_cut(file, rules)
    if hashes is None or remote or not by_lines or file.size <= shard_size * 1.25:
        for slice in slice_file(file, shard_size, rules):
            identity = [name, file.compression, file.size, file.version, slice.start, slice.stop]
            yield Piece(slice, identity, version)
        return
    cuts = _find_cuts(file, shard_size, rules, hashes)
    for (start, stop, digest), end in zip(cuts, [*(start for start, _, _ in cuts[1:]), file.size], strict=True):
        yield Piece(Slice(file.path, file.format, None, start, stop, end - start), [name, start, digest], version)


def _find_cuts(file: InputFile, shard_size: int, rules: TextRules, hashes: Hashes) -> Cuts:
    if file.format in ("csv", "tsv"):
        return hashes.cuts(file, f"{file.format} {shard_size}", lambda: _hash_csv(file, shard_size))
    boundary = LINE if file.format == "jsonl" else boundary_of(rules)
    assert boundary is not None
    how = json.dumps([shard_size, type(boundary).__name__, [one.hex() for one in boundary.separators]])
    return hashes.cuts(file, how, lambda: _hash_records(file, by_bytes(file, shard_size), boundary))


def _hash_csv(file: InputFile, shard_size: int) -> Cuts:
    header = csv_header(file.path, None, file.format)
    with open_bytes(file.path) as source:
        return [
            (one.start, one.stop, hash_json([header, _hash_range(source, one.start, one.stop).hexdigest()]))
            for one in slice_csv(file, shard_size)
        ]


def _hash_records(file: InputFile, slices: Iterable[Slice], boundary: Boundary) -> Cuts:
    """Reads each byte once, but for ends of records. Where a giant record goes on and none begins, there is no cut."""
    cuts: Cuts = []
    reached = 0
    with open_bytes(file.path) as source:
        for start, stop in ((slice.start, slice.stop) for slice in slices):
            if start < reached and (file.size if stop is None else stop) <= reached:
                continue
            # What stands right before tells whether a record begins at `start`.
            digest = _hash_range(source, max(0, start - boundary.longest), stop)
            if stop is not None:
                reached = _hash_tail(digest, source, stop, boundary)
            cuts.append((start, stop, digest.hexdigest()))
    return cuts


def _hash_range(source: IO[bytes], start: int, stop: int | None) -> xxhash.xxh3_128:
    source.seek(start)
    return hash_rest(source, None if stop is None else stop - start)


def _hash_tail(digest: xxhash.xxh3_128, source: IO[bytes], stop: int, boundary: Boundary) -> int:
    """The record that goes on behind `stop` belongs to the piece: to its end, where the next begins."""
    position = max(0, stop - boundary.longest)
    source.seek(position)
    held = b""
    while block := source.read(_TAIL):
        held += block
        end = boundary.first(held, stop - position, at_record=position == 0)
        if end is not None:
            digest.update(held[:end])
            return position + end
        kept = held[-boundary.longest :]
        digest.update(held[: len(held) - len(kept)])
        position += len(held) - len(kept)
        held = kept
    digest.update(held)
    return position + len(held)


# ---- groups ----


def gather_evenly(pieces: Iterable[Piece], shards: int, *, count: int, total: int) -> Iterator[list[Piece]]:
    """`shards` groups of even size, or as many as there are pieces. `count`, `total`: pieces, and bytes in all."""
    group: list[Piece] = []
    done = number = begun = 0
    for seen, piece in enumerate(pieces):
        goal = begun + (total - begun) / (shards - number)
        # A group for each of those that are still to come must be left.
        short = count - seen <= shards - 1 - number
        if group and number < shards - 1 and (short or done + piece.slice.size / 2 > goal):
            yield _merged(group)
            group, begun, number = [], done, number + 1
        group.append(piece)
        done += piece.slice.size
    if group:
        yield _merged(group)


def _merged(group: list[Piece]) -> list[Piece]:
    """Neighbours in a file become one piece."""
    merged = group[:1]
    for piece in group[1:]:
        before, slice = merged[-1], piece.slice
        if before.slice.path == slice.path and before.slice.stop == slice.start:
            joint = replace(before.slice, stop=slice.stop, size=before.slice.size + slice.size)
            merged[-1] = Piece(joint, [*before.identity, *piece.identity], before.version)
        else:
            merged.append(piece)
    return merged


def _look_up(path: str, settings: MapSettings) -> Path | Resolved:
    """A table of ours, or what a path or name stands for."""
    if not is_table(Path(path)):
        return resolve_data_set(path, settings.split, settings.subset, input_format=settings.input_format)
    if settings.split is not None or settings.subset is not None:
        raise ConfigError(f"{path}: a table has neither splits nor subsets. Leave them out.")
    return Path(path)


def _shards(folder: Path) -> Iterator[InputFile]:
    for shard in TableManifest.read(folder).shards:
        # The version is the content: a shard that was made again as it was is the same input.
        yield InputFile(str(folder / shard.name), "arrow", None, shard.bytes, f"xxh3 {shard.xxh3}")


@dataclass(frozen=True, slots=True)
class FileUnits:
    """Reads units of files."""

    files: FileReader

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places | None = None) -> Iterator[Rows]:
        places = places if places is not None else Places()
        rows = self.files.rows(_slices_of(unit), on_reject, places, None)
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

    def __init__(self, paths: Sequence[str], settings: MapSettings, spool: Path) -> None:
        self._settings, self.spool_folder, self.left_out = settings, spool, ""
        self._listed: list[Path | Resolved] = [_look_up(path, settings) for path in paths]
        """Folders of tables of ours, and paths with the format that they are said to have."""
        found = [one for one in self._listed if isinstance(one, Resolved)]
        self._rows = next((one.rows for one in found if one.rows is not None), None)
        if self._rows is not None and len(paths) > 1:
            raise ConfigError(f'split "{settings.split}": a slice is of one dataset; {len(paths)} are given. Give one.')
        self.needs_spooling = any(STDIN in one.inputs for one in found)
        self.unidentified = "standard input can't be read again" if self.needs_spooling else None
        file, there = self._first_sound(self._as_listed(), columns_of)
        there, wanted = there or [], settings.columns
        if file is not None and (there or file.format not in ("jsonl", "json")):
            require_columns(wanted, there, without_secrets(file.path))
        self.columns = list(wanted) if wanted is not None else there or None
        self._counted: list[int] = []
        self._only_file = len(list(islice(self._as_listed(), 2))) == 1

    # ---- what it reads ----

    def _as_listed(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for one in self._listed:
            yield from _shards(one) if isinstance(one, Path) else list_inputs(one.inputs, one.input_format, left_out)

    def files(self, left_out: LeftOut | None = None) -> Iterator[InputFile]:
        for file in self._as_listed(left_out):
            path = self._stdin_path() if file.path == STDIN else None
            if path is not None and path.exists():
                status = path.stat()
                file = replace(file, path=str(path), size=status.st_size, version=version_of(status))
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
        first = self._listed[0]
        if isinstance(first, Path):
            return TableManifest.read(first).schema.to_arrow()

        def look(file: Slice, spool: str) -> pa.Schema | None:
            return open_schema(file, spool) if file.format in TABLES else None

        return self._first_sound(self.files(), look)[1]

    def _first_sound(
        self, files: Iterator[InputFile], look: Callable[[Slice, str], Seen]
    ) -> tuple[InputFile | None, Seen | None]:
        """The first file that is not damaged, and what is seen in it; the others are set aside when they are read."""
        damaged: InputError | None = None
        for file in files:
            try:
                return file, look(whole(file), self._made_spool_folder())
            except DamagedError as error:
                damaged = damaged or InputError(f"{without_secrets(file.path)}: {error}. Get or make it again.")
        if damaged is not None:
            raise damaged
        return None, None

    def _made_spool_folder(self) -> str:
        """Tables are unpacked into it."""
        self.spool_folder.mkdir(parents=True, exist_ok=True)
        return str(self.spool_folder)

    @property
    def _files(self) -> FileReader:
        names = ((str(self._stdin_path()), STDIN),) if self.needs_spooling else ()
        rules = replace(text_rules(self._settings), only_file=self._only_file)
        return FileReader(rules, self._settings.columns, self._made_spool_folder(), names)

    @property
    def reader(self) -> FileUnits:
        return FileUnits(self._files)

    # ---- standard input ----

    def _stdin_path(self) -> Path:
        """Where standard input lies once it is copied."""
        file = next(file for file in self._as_listed() if file.path == STDIN)
        ending = next((end for end, name in COMPRESSIONS.items() if name == file.compression), "")
        return self.spool_folder / f"{_STDIN}.{file.format}{ending}"

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
        if self._rows is None and not self._settings.with_indices:
            return units
        return self._chosen(units)

    def _groups(self) -> Iterator[list[Piece]]:
        settings = self._settings
        if settings.shards is None:
            pieces = self._pieces(settings.unit_bytes, Hashes(self.spool_folder))
            return gather(pieces, settings.unit_bytes, lambda piece: piece.slice)
        stride = max(1, sum(file.size for file in self.files()) // (_FINE * settings.shards))
        count = total = 0
        for piece in self._pieces(stride, None):
            count, total = count + 1, total + piece.slice.size
        return gather_evenly(self._pieces(stride, None), settings.shards, count=count, total=total)

    def _pieces(self, shard_size: int, hashes: Hashes | None) -> Iterator[Piece]:
        for file in self.files():
            yield from pieces_of(file, shard_size, text_rules(self._settings), hashes)

    def _unit(self, index: int, group: list[Piece]) -> RowUnit:
        settings = self._settings
        # What the rows depend on besides the bytes.
        formats = list(dict.fromkeys(piece.slice.format for piece in group))
        how = [formats, settings.columns, settings.documents, settings.separator, settings.invalid_utf8]
        key = hash_json([how, [piece.identity for piece in group]])
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
            known = not self._settings.with_indices and position >= first and last == math.inf
            count = self._count(number, unit) if not known else 0
            start, stop = max(0, first - position), min(count, last - position)
            if known or start < stop:
                part = None if known or (start, stop) == (0, count) else (int(start), int(stop))
                place = unit.place if part is None else unit.place | {"rows": list(part)}
                numbered = int(position + start - first) if self._settings.with_indices else None
                key = unit.key if part is None and numbered is None else hash_json([unit.key, part, numbered])
                yield RowUnit(index, key, unit.size, place, numbered)
                index += 1
            position += count

    def _bounds(self) -> tuple[int, float]:
        rows = self._rows
        if rows is None:
            return 0, math.inf
        if not rows.needs_total:
            return rows.start or 0, math.inf if rows.stop is None else rows.stop
        units = (self._unit(index, group) for index, group in enumerate(self._groups()))
        return rows.bounds(sum(self._count(number, unit) for number, unit in enumerate(units)))

    def _count(self, number: int, unit: RowUnit) -> int:
        if number == len(self._counted):
            self._counted.append(self._files.count(_slices_of(unit)))
        return self._counted[number]
