"""A unit -> batches of cleaned documents, numbered: what both passes over the input begin with.

A document's row is its position among the readable documents of its unit, from 0; so (unit, row) names it in both
passes. Holds one batch. A text file larger than a document may be comes in pieces, cut where white space ends, so that
each is cleaned by itself.

The first pass keeps its batches for the second, which then neither parses nor cleans again. Only a cache: without it
the second pass reads the input once more, with the same result. It is written when it takes a small part of the free
disk, and removed with the run's other intermediate files. Not compressed: that would take longer than reading the input
again (docs/log.md). Disk: the texts, and 10 bytes a document. A frame for each batch: sizes and a hash, what is told of
it in JSON, its texts as an Arrow record batch.
"""

from __future__ import annotations

import functools
import json
import struct
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from milldam.errors import StoreError
from milldam.files import NewFile
from milldam.prefetch import prefetched
from milldam.rules import CleanRules
from milldam.sources.batch import NUMBER_BITS, Batch, Reject, TextRules
from milldam.sources.reading import TABLES, read_unit
from milldam.sources.units import Unit
from milldam.text.arrays import Verdicts, text_offsets

if TYPE_CHECKING:
    from milldam.chat.reading import ChatRecipe
    from milldam.text.cleaning import Cleaner

READ_AHEAD = 4
_PLACES_HELD = 64
"""Units whose places are held."""
HEAD_BYTES = 1 << 20
"""What decides on a document from its text alone looks at so much of it."""
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class SetRules:
    """What the passes need to know of one dataset."""

    text: TextRules
    weight: float = 1.0
    split: str | None = None
    """The split that all its documents make up, whatever they are; None: splits and filters as for any other."""
    chat: ChatRecipe | None = None
    """Its records are conversations."""

    def compared(self, batch: Batch) -> pa.LargeStringArray:
        """What makes documents duplicates of each other."""
        by_prompt = self.chat is not None and self.chat.dedup_on_prompt and batch.prompts is not None
        return batch.prompts if by_prompt else batch.texts

    def with_special_tokens(self, tokens: tuple[str, ...]) -> SetRules:
        """So that conversations which hold the text of one of the tokenizer's can be counted."""
        return self if self.chat is None else replace(self, chat=replace(self.chat, special_tokens=tokens))

    def share(self, copy: int) -> float:
        """The share of the documents that is in a repetition."""
        return min(1.0, self.weight - copy)


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read of a unit, and how."""

    unit: Unit
    rules: SetRules
    clean: CleanRules | None
    rows: Sequence[int] | None = None
    """Only the documents from, up to; None: all."""
    skip_batches: int = 0
    """Batches that were done before."""
    spool: str | None = None
    ahead: bool = False
    """Read in a thread while what was read is worked on."""
    keep: tuple[str, ...] = ()
    """Fields to read as well."""


class UnitReader:
    """The batches of a unit; iterate over it once."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._cleaner: Cleaner | None = None
        # What is said in conversations is cleaned before they are texts.
        if reading.clean is not None and reading.rules.chat is None:
            from milldam.text.cleaning import Cleaner

            self._cleaner = Cleaner(reading.clean)
        self._tail, self._begun = "", False
        """Of a document in pieces: what is not cleaned yet, and whether a piece was."""

    def __iter__(self) -> Iterator[Batch]:
        reading, row, inside = self._reading, 0, False
        first, stop = reading.rows or (0, sys.maxsize)
        if first >= stop:
            return
        batches = self._read()
        for batch in prefetched(batches, READ_AHEAD) if reading.ahead else batches:
            batch.part = batch.open or (inside and len(batch.texts) == 1)
            batch.rows = row + np.arange(len(batch.texts))
            row, inside = row + (0 if batch.open else len(batch.texts)), batch.open
            if batch.number > reading.skip_batches:
                batch = batch.only((batch.rows >= first) & (batch.rows < stop))
                self._clean(batch)
                yield batch
            if row >= stop and not inside:
                return

    def _read(self) -> Iterator[Batch]:
        """Each with its number and what was rejected on the way to it; at the end one with the last rejects."""
        rejects: list[Reject] = []
        reading, number = self._reading, 0
        if reading.rules.chat is None:
            batches = read_unit(reading.unit, reading.rules.text, rejects.append, reading.spool, reading.keep)
        else:
            from milldam.chat.reading import ConversationReader

            reader = ConversationReader(reading.rules.chat, reading.rules.text, reading.spool, reading.keep)
            batches = reader.read(reading.unit, rejects.append)
        for number, batch in enumerate(batches, start=1):
            batch.number, batch.rejects = number, rejects.copy()
            rejects.clear()
            yield batch
        none = np.empty(0, np.int64)
        yield Batch(pa.array([], pa.large_string()), number=number + 1, rejects=rejects, origins=none)

    def _clean(self, batch: Batch) -> None:
        """Clean its texts, and find what is empty."""
        verdicts = batch.verdicts or Verdicts(len(batch.texts))
        batch.verdicts = verdicts
        if self._cleaner is not None and len(batch.texts):
            if batch.part:
                text = self._tail + batch.texts[0].as_py()
                cut = self._cleaner.last_cut(text) if batch.open else len(text)
                piece = pa.array([text[:cut]], pa.large_string())
                first, last, self._tail = not self._begun, not batch.open, text[cut:]
                batch.texts = self._cleaner.clean_piece(piece, verdicts, first=first, last=last)
                self._begun = batch.open and (self._begun or cut > 0)
            else:
                batch.texts = self._cleaner.clean(batch.texts, verdicts)
        empty = np.diff(text_offsets(batch.texts)) == 0
        if empty.any() and not batch.part:
            verdicts.drop(empty, EMPTY)


# ---- what the first pass leaves ----


def print_paths(folder: Path, key: str) -> tuple[Path, Path, Path]:
    """What the first pass leaves of a unit: hashes, signatures, texts."""
    return folder / f"hashes-{key}.bin", folder / f"signatures-{key}.bin", folder / f"texts-{key}.bin"


def preference_path(folder: Path, key: str) -> Path:
    """The same, where near-duplicates are kept by more than their order: what decides on each document."""
    return folder / f"preferences-{key}.bin"


def places_path(folder: Path, key: str) -> Path:
    """The same: which files the rows of a unit are from."""
    return folder / f"places-{key}.jsonl"


def place_of(unit: Unit, origin: int) -> dict[str, Any]:
    """The file of a unit's row, and its line or number there, from 1; in a piece of a large file, from a byte on."""
    slice = unit.slices[origin >> NUMBER_BITS]
    name = "line" if slice.format == "jsonl" else "record"
    from_byte = slice.start if slice.format not in TABLES else 0
    place = {"file": slice.path, name: (origin & ((1 << NUMBER_BITS) - 1)) + 1}
    return place | ({"from_byte": from_byte} if from_byte else {})


def found_place(folder: Path, unit: int, row: int) -> dict[str, Any]:
    """The same of any unit, by what the first pass wrote and put under the numbers of units."""
    path = places_path(folder, f"{unit:07d}")
    status = path.stat()
    places, ats = _written_places(path, status.st_ino, status.st_mtime_ns)
    at, place = places[bisect_right(ats, row) - 1]
    name = "line" if "line" in place else "record"
    return place | {name: place[name] + row - at}


@functools.lru_cache(_PLACES_HELD)
def _written_places(path: Path, inode: int, changed: int) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    with path.open(encoding="utf-8") as lines:
        places = [(at, place) for at, place in map(json.loads, lines)]
    return places, [at for at, _ in places]


class PlacesWriter:
    """Writes the places of a unit's rows: a line for each file, and each gap."""

    def __init__(self, new: NewFile, unit: Unit) -> None:
        self._new, self._unit, self._last = new, unit, -1
        """What an origin and its row differ by, of the last row."""

    def note(self, batch: Batch) -> None:
        if batch.origins is None or not len(batch.rows):
            return
        steps = batch.origins - batch.rows
        for at in np.flatnonzero(np.diff(steps, prepend=self._last)).tolist():
            place = place_of(self._unit, int(batch.origins[at]))
            self._new.write((json.dumps([int(batch.rows[at]), place]) + "\n").encode())
        self._last = int(steps[-1])

    def commit(self) -> dict[str, dict[str, Any]]:
        return {self._new.path.name: self._new.put_in_place()}


# ---- batches that are kept ----

_HEADER = struct.Struct("<QQQ")
"""Bytes of what is told, of the record batch, and a hash of both."""
_END = _HEADER.pack(0, 0, 1)
"""Behind the last one: a file that is cut between two has none."""
_TOLD = ("number", "open", "part", "bytes_read")


class CacheWriter:
    """Use it as a context manager; left without a commit, nothing stays."""

    def __init__(self, path: Path) -> None:
        self._new = NewFile(path)

    def add(self, batch: Batch) -> None:
        verdicts = batch.verdicts or Verdicts(len(batch.texts))
        told: dict[str, Any] = {name: getattr(batch, name) for name in _TOLD}
        told |= {"first_row": batch.first_row, "reasons": verdicts.reasons, "counts": batch.counts}
        told |= {"rejects": [asdict(reject) for reject in batch.rejects]}
        told |= {"sides": None if batch.sides is None else batch.sides.as_json()}
        columns = {"text": batch.texts, "code": pa.array(verdicts.codes), "origin": pa.array(batch.origins)}
        columns |= {} if batch.prompts is None else {"prompt": batch.prompts}
        parts = json.dumps(told).encode(), pa.record_batch(columns)
        frame = pa.BufferOutputStream()
        with pa.ipc.new_stream(frame, parts[1].schema) as stream:
            stream.write_batch(parts[1])
        table = frame.getvalue()
        digest = xxhash.xxh3_64(parts[0])
        digest.update(table)
        for part in (_HEADER.pack(len(parts[0]), table.size, digest.intdigest()), parts[0], table):
            self._new.write(part)

    def commit(self) -> None:
        self._new.write(_END)
        self._new.put_in_place()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._new.discard()


def open_reader(reading: Reading, path: Path | None) -> Iterator[Batch]:
    """The batches of a unit: from where the first pass kept them, when they are there, else from the input."""
    return _kept(path, reading) if path is not None and path.exists() else iter(UnitReader(reading))


def _kept(path: Path, reading: Reading) -> Iterator[Batch]:
    with path.open("rb") as file:
        while (header := file.read(_HEADER.size)) != _END:
            size, table_size, wanted = _HEADER.unpack(header) if len(header) == _HEADER.size else (0, 0, 0)
            left = path.stat().st_size - file.tell()
            parts = [file.read(size), file.read(table_size)] if size + table_size <= left else [b"", b""]
            digest = xxhash.xxh3_64(parts[0])
            digest.update(parts[1])
            if not size or digest.intdigest() != wanted:
                # Without it, the unit is read from the input.
                path.unlink(missing_ok=True)
                raise StoreError(
                    f"{path}: damaged, and now removed. Run the same command again to continue without it."
                )
            told = json.loads(parts[0])
            if told["number"] > reading.skip_batches:
                yield _as_kept(told, parts[1])


def _as_kept(told: dict[str, Any], data: bytes) -> Batch:
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        table = stream.read_next_batch()
    batch = Batch(table["text"], **{name: told[name] for name in _TOLD})
    batch.rows = told["first_row"] + np.arange(len(table))
    batch.verdicts = Verdicts(len(table))
    batch.verdicts.reasons, batch.verdicts.codes = told["reasons"], table["code"].to_numpy()
    batch.origins = table["origin"].to_numpy()
    batch.rejects, batch.counts = [Reject(**reject) for reject in told["rejects"]], Counter(told["counts"])
    if told["sides"] is not None:
        from milldam.chat.reading import Sides

        batch.sides = Sides.from_json(told["sides"])
        batch.prompts = table["prompt"] if "prompt" in table.schema.names else None
    return batch
