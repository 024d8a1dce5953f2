"""Rows that can be read only once -> Arrow files in the run folder, from which units are read.

    rows.arrows     frames of about a megabyte, one after the other; each is an Arrow IPC stream with its own schema
    frames.jsonl    a line per frame: its bytes, its rows, its hash
    complete.json   rows, bytes and frames in all, written last; without it the rows are spooled anew

A unit is a run of frames, known by their hashes: so it is the same unit when the same rows are spooled again. Holds one
frame; a larger row is a frame of its own. Disk: the rows as Arrow holds them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from milldam.errors import InputError
from milldam.files import NewFile, explain_os_errors, is_whole, read_sealed, remove_temporaries, write_sealed
from milldam.mapping.file_rows import Piece, gather_evenly
from milldam.mapping.plan import RowUnit, hash_json
from milldam.mapping.settings import MapSettings
from milldam.sources.batch import OnReject, Places, require_columns
from milldam.sources.rows import Rows, byte_size, cut_by_size, from_records, row_count, value_size
from milldam.sources.units import InputFile, Slice

FRAME_BYTES, FRAME_ROWS = 1 << 20, 4096
_ROWS, _FRAMES, _COMPLETE = "rows.arrows", "frames.jsonl", "complete.json"
_REFUSED = (pa.ArrowException, TypeError, ValueError, OverflowError)


# ---- rows to frames ----


def frames_of(rows: Iterable[Any], name: str) -> Iterator[pa.RecordBatch]:
    """Dicts, and Arrow tables where they come, as record batches of about a megabyte."""
    number = 0
    for are_tables, run in itertools.groupby(rows, lambda row: isinstance(row, pa.RecordBatch | pa.Table)):
        for batch in _of_tables(run) if are_tables else _of_dicts(run, number, name):
            number += batch.num_rows
            yield batch


def _of_tables(tables: Iterable[pa.RecordBatch | pa.Table]) -> Iterator[pa.RecordBatch]:
    """Tables cut and put together to the size of a frame, those of one schema."""
    held: list[pa.RecordBatch] = []
    size = 0
    for table in tables:
        for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
            for part in cut_by_size(batch, FRAME_BYTES):
                assert isinstance(part, pa.RecordBatch)
                full = size >= FRAME_BYTES or len(held) >= FRAME_ROWS
                if held and (full or not part.schema.equals(held[0].schema)):
                    yield pa.concat_batches(held)
                    held, size = [], 0
                held.append(part)
                size += byte_size(part)
    if held:
        yield pa.concat_batches(held)


def _of_dicts(rows: Iterable[Any], number: int, name: str) -> Iterator[pa.RecordBatch]:
    """Where the values of a column fit no common type, the batch ends: each has types of its own."""
    held: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        if not isinstance(row, dict):
            raise InputError(f"{name}: row {number} is of type {type(row).__name__}. Yield rows as dicts.")
        held.append(row)
        number += 1
        size += sum(map(value_size, row.values()))
        if size >= FRAME_BYTES or len(held) >= FRAME_ROWS:
            yield from _batches(held, number - len(held), name)
            held, size = [], 0
    yield from _batches(held, number - len(held), name)


def _batches(records: list[dict[str, Any]], first: int, name: str) -> Iterator[pa.RecordBatch]:
    if not records:
        return
    try:
        yield _batch(records)
        return
    except _REFUSED as error:
        problem = str(error)
    if len(records) > 1:
        half = len(records) // 2
        yield from _batches(records[:half], first, name)
        yield from _batches(records[half:], first + half, name)
        return
    try:
        # Arrays and tensors of any shape as lists.
        items = records[0].items()
        yield _batch([{key: value.tolist() if hasattr(value, "tolist") else value for key, value in items}])
    except _REFUSED:
        raise InputError(
            f"{name}: row {first} can't be stored ({' '.join(problem.split())[:200]}).\n"
            "Yield text, bytes, numbers, dates, None, arrays, and lists and dicts of them, under names of columns."
        ) from None


def _batch(records: list[dict[str, Any]]) -> pa.RecordBatch:
    columns = from_records(records)
    if not all(isinstance(name, str) for name in columns):
        raise TypeError("the name of a column is not a string")
    if not columns:
        return pa.RecordBatch.from_struct_array(pa.array(records, pa.struct([])))
    return pa.record_batch([pa.array(values) for values in columns.values()], names=list(columns))


# ---- frames to disk ----


def _write_frames(folder: Path, stream: Stream) -> None:
    """Go through the rows once; when everything is on disk, `complete.json` says so."""
    content = xxhash.xxh3_128()
    rows = frames = 0
    with NewFile(folder / _ROWS) as data, NewFile(folder / _FRAMES) as lines:
        for batch in frames_of(stream.rows(), stream.name):
            if not row_count(batch):
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
        facts = {"rows": rows, "bytes": data.size, "frames": frames, "identity": stream.fingerprint}
        files = {_ROWS: data.commit(), _FRAMES: lines.commit()}
    write_sealed(folder / _COMPLETE, facts | {"content": content.hexdigest(), "files": files})


# ---- disk to rows ----


@dataclass(frozen=True, slots=True)
class SpoolReader:
    folder: str
    columns: tuple[str, ...] | None

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places | None = None) -> Iterator[Rows]:
        for fields in unit.place["slices"]:
            slice = Slice(*fields)
            with pa.memory_map(str(Path(self.folder) / slice.path)) as source:
                source.seek(slice.start)
                while source.tell() < (slice.stop or 0):
                    yield from map(self._wanted, pa.ipc.open_stream(source))

    def _wanted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The wanted columns; null where the rows have none."""
        if self.columns is None:
            return batch
        there, missing = set(batch.schema.names), pa.nulls(batch.num_rows)
        found = [batch.column(name) if name in there else missing for name in self.columns]
        return pa.record_batch(found, names=list(self.columns))


# ---- the plan ----


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows that are made once."""

    name: str
    """For messages."""
    rows: Callable[[], Iterable[Any]]
    """Makes them: dicts, or Arrow tables."""
    fingerprint: str | None
    """What names them; None: they can't be identified."""
    why: str = ""
    """They can't be identified."""
    columns: tuple[str, ...] | None = None
    """The columns that they have, where that is known."""
    schema: pa.Schema | None = None


class SpooledPlan:
    left_out = ""
    needs_spooling = True

    def __init__(self, stream: Stream, settings: MapSettings, spool: Path) -> None:
        self._stream, self._settings, self.spool_folder = stream, settings, spool
        self.unidentified = stream.why if stream.fingerprint is None else None
        there = list(stream.columns) if stream.columns is not None else None
        if there is not None:
            require_columns(settings.columns, there, stream.name)
        self.columns = list(settings.columns) if settings.columns is not None else there
        self.schema = stream.schema
        self._done = False

    @property
    def identity(self) -> dict[str, Any]:
        """Of a source that can't be identified: its content, once it is spooled."""
        known = self._stream.fingerprint or (self._facts()["content"] if self._done else "")
        return {"files": 0, "bytes": 0, "fingerprint": known}

    def files(self) -> Iterator[InputFile]:
        return iter(())

    @property
    def reader(self) -> SpoolReader:
        return SpoolReader(str(self.spool_folder), self._settings.columns)

    def spool(self) -> None:
        """Go through the rows once. What an identified source left complete is used as it is."""
        folder, wanted, facts = self.spool_folder, self._stream.fingerprint, self._facts()
        known = wanted is not None and facts.get("identity") == wanted
        if not (known and all(is_whole(folder / name, record) for name, record in facts["files"].items())):
            with explain_os_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
            (folder / _COMPLETE).unlink(missing_ok=True)
            remove_temporaries(folder)
            _write_frames(folder, self._stream)
        self._done = True

    def _facts(self) -> dict[str, Any]:
        return read_sealed(self.spool_folder / _COMPLETE) or {}

    def units(self) -> Iterator[RowUnit]:
        facts = self._facts()
        if not self._done and not (facts and facts["identity"] == self._stream.fingerprint):
            raise RuntimeError("spool the rows first")
        shards = self._settings.shards or max(1, round(facts["bytes"] / self._settings.unit_bytes))
        first_row = 0
        groups = gather_evenly(self._pieces(), shards, count=facts["frames"], total=facts["bytes"])
        for index, group in enumerate(groups):
            # identity: (rows, hash) of each frame
            digests = [one for piece in group for one in piece.identity]
            rows = sum(digests[::2])
            numbered = first_row if self._settings.with_indices else None
            key = hash_json([self._settings.columns, digests, numbered])
            place = {"slices": [list(astuple(piece.slice)) for piece in group]}
            yield RowUnit(index, key, sum(piece.slice.size for piece in group), place, numbered)
            first_row += rows

    def _pieces(self) -> Iterator[Piece]:
        at = 0
        with (self.spool_folder / _FRAMES).open("rb") as lines:
            for size, rows, digest in map(json.loads, lines):
                yield Piece(Slice(_ROWS, "spool", None, at, at + size, size), [rows, digest])
                at += size
