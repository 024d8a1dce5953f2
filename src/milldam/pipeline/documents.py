"""A unit -> its cleaned documents, numbered: what both passes over the input begin with.

A document's row is its position among the readable documents of its unit, from 0; so (unit, row) names it in both
passes. Holds one batch; a document larger than a batch comes in parts. A conversation is a document that comes whole,
with what is trained on beside its text.

What a worker is given: a unit, and what both passes need to know of its dataset.

The first pass keeps the cleaned texts for the second, which then neither parses nor cleans again. Only a cache: without
it the second pass reads the input once more, with the same result. It is written when it takes a small part of the free
disk, and removed with the run's other intermediate files. Not compressed: that would take longer than reading the input
again (docs/log.md). Disk: the texts, and 8 bytes a document. A frame per batch, exactly as the reader gave it: sizes, a
description in JSON, offsets, text.
"""

from __future__ import annotations

import functools
import json
import os
import struct
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from milldam.errors import StoreError
from milldam.files import NewFile
from milldam.prefetch import prefetched
from milldam.rules import CleanRules
from milldam.sources.batch import Batch, Mark, Places, Reject, TextRules
from milldam.sources.reading import read_unit
from milldam.sources.units import Unit
from milldam.text.arrays import Verdicts, text_offsets

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from milldam.chat.reading import ChatBatch, ChatRecipe, Sides
    from milldam.text.cleaning import Cleaner

READ_AHEAD = 4
_PLACES_HELD = 64
"""Units whose places are held."""
HEAD_BYTES = 1 << 20
"""What decides on a document from its text alone looks at so much of it."""
EMPTY = "empty"


@functools.cache
def _no_texts() -> pa.LargeStringArray:
    """Not made at import: the first array of Python values loads pandas, unless `keep_arrow_lean` was called."""
    return pa.array([], pa.large_string())


_Read = tuple["Batch | ChatBatch | None", list[Reject], tuple[Mark, ...]]


@dataclass(frozen=True, slots=True)
class Documents:
    """Whole documents in order; or a part of one that is larger than a batch."""

    texts: pa.LargeStringArray
    verdicts: Verdicts
    first_row: int = 0
    part: bool = False
    """`texts` is one text, a part of a document."""
    last: bool = True
    """A part: the document ends with it."""
    bytes_read: int = 0
    rejects: list[Reject] = field(default_factory=list)
    batch: int = 0
    """Which batch of the unit it was, from 1; what comes after the last counts as one more."""
    sides: Sides | None = None
    """Of conversations: what is trained on."""
    prompts: pa.LargeStringArray | None = None
    """Of conversations: what was asked, where duplicates or splits go by that."""
    with_special_tokens: int = 0
    """Of conversations: how many have special tokens in what is said."""
    columns: pa.RecordBatch | None = None
    """The fields that are kept, a row for each document; of one in parts, with the last."""
    marks: tuple[Mark, ...] = ()
    """Which file each row is from, and its number there."""

    @property
    def bytes(self) -> bytes:
        """The text of a part."""
        return bytes(self.texts[0].as_buffer())

    def within(self, first: int, stop: int) -> Documents:
        """Conversations: those with rows from `first` up to `stop`."""
        assert self.sides is not None
        rows = self.first_row + np.arange(len(self.texts))
        keep = (rows >= first) & (rows < stop)
        if keep.all():
            return self
        mask, verdicts = pa.array(keep), Verdicts(int(np.count_nonzero(keep)))
        verdicts.reasons, verdicts.codes = self.verdicts.reasons, self.verdicts.codes[keep]
        prompts = None if self.prompts is None else self.prompts.filter(mask)
        texts, row = self.texts.filter(mask), max(first, self.first_row)
        columns, sides = None if self.columns is None else self.columns.filter(mask), self.sides.only(keep)
        told = {"texts": texts, "verdicts": verdicts, "sides": sides, "prompts": prompts, "columns": columns}
        return replace(self, first_row=row, **told)


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read of a unit, and how."""

    unit: Unit
    rules: SetRules
    clean: CleanRules | None
    rows: tuple[int, int] | None = None
    """Only the documents from, up to; None: all."""
    skip_batches: int = 0
    """Batches that were done before."""
    spool: str | None = None
    ahead: bool = False
    """Read in a thread while what was read is worked on."""
    keep: tuple[str, ...] = ()
    """Fields to read as well."""

    def without_told_rejects(self, documents: Documents) -> Documents:
        """What was rejected on the way to the batch after a finished part was recorded with that part."""
        told = self.skip_batches and documents.batch == self.skip_batches + 1
        return replace(documents, rejects=[]) if told else documents


def _make_cleaner(rules: CleanRules) -> Cleaner:
    from milldam.text.cleaning import Cleaner

    return Cleaner(rules)


def _is_chat(batch: Batch | ChatBatch) -> TypeIs[ChatBatch]:
    return not isinstance(batch, Batch)


class UnitReader:
    """Iterate over it once; `batches` and `seconds` tell how far it is and what took how long."""

    def __init__(self, reading: Reading) -> None:
        self._reading, self.unit = reading, reading.unit
        chat = reading.rules.chat
        # What is said in conversations is cleaned before they are texts.
        self._cleaner = _make_cleaner(reading.clean) if reading.clean is not None and chat is None else None
        self._row = 0
        self._inside = False
        self.batches = 0
        self.seconds = {"read": 0.0, "clean": 0.0}

    def __iter__(self) -> Iterator[Documents]:
        first, stop = self._reading.rows or (0, None)
        if stop is not None and first >= stop:
            return
        for batch, rejects, marks in self._timed():
            if batch is None:
                yield Documents(_no_texts(), Verdicts(0), rejects=rejects, batch=self.batches + 1)
                return
            self.batches += 1
            if self.batches > self._reading.skip_batches:
                documents = self._conversations(batch) if _is_chat(batch) else self._documents(batch)
                documents = replace(
                    documents, bytes_read=batch.bytes_read, rejects=rejects, batch=self.batches, marks=marks
                )
                yield self._reading.without_told_rejects(documents)
            else:
                self._row += 0 if not _is_chat(batch) and batch.open else len(batch.texts)
            if stop is not None and self._row >= stop and not self._inside:
                return

    def _timed(self) -> Iterator[_Read]:
        reads = prefetched(self._read(), READ_AHEAD) if self._reading.ahead else self._read()
        while True:
            started = time.perf_counter()
            read = next(reads, None)
            self.seconds["read"] += time.perf_counter() - started
            if read is None:
                return
            yield read

    def _read(self) -> Iterator[_Read]:
        """Each batch with what was rejected on the way to it; at the end None with the last rejects."""
        rejects: list[Reject] = []
        reading, places = self._reading, Places(lines=True)
        batches: Iterator[Batch | ChatBatch]
        if reading.rules.chat is None:
            batches = read_unit(reading.unit, reading.rules.text, rejects.append, reading.spool, reading.keep, places)
        else:
            from milldam.chat.reading import ConversationReader

            reader = ConversationReader(reading.rules.chat, reading.rules.text, reading.spool, reading.keep)
            batches = reader.read(reading.unit, rejects.append, places)
        for batch in batches:
            whole = _is_chat(batch) or not batch.open
            yield batch, rejects.copy(), places.passed(len(batch.texts) if whole else 0)
            rejects.clear()
        yield None, rejects, ()

    def _documents(self, batch: Batch) -> Documents:
        if batch.open or (self._inside and len(batch.texts)):
            assert len(batch.texts) == 1
            row, self._inside = self._row, batch.open
            self._row += not batch.open
            if not self._wanted(row):
                return Documents(_no_texts(), Verdicts(0))
            verdicts = Verdicts(1)
            texts = self._clean(batch.texts, verdicts, open=batch.open)
            return Documents(texts, verdicts, row, part=True, last=not batch.open, columns=batch.columns)
        return self._whole(batch.texts, batch.columns)

    def _conversations(self, batch: ChatBatch) -> Documents:
        row, self._row = self._row, self._row + len(batch.texts)
        verdicts = batch.verdicts
        empty = np.diff(text_offsets(batch.texts)) == 0
        if empty.any():
            verdicts.drop(empty, EMPTY)
        told = {name: getattr(batch, name) for name in ("sides", "prompts", "with_special_tokens", "columns")}
        documents = Documents(batch.texts, verdicts, row, **told)
        return documents if self._reading.rows is None else documents.within(*self._reading.rows)

    def _whole(self, texts: pa.LargeStringArray, columns: pa.RecordBatch | None) -> Documents:
        row = self._row
        self._row += len(texts)
        if self._reading.rows is not None:
            first, stop = self._reading.rows
            skipped = max(0, first - row)
            wanted = slice(skipped, max(skipped, stop - row))
            row, texts, columns = row + skipped, texts[wanted], None if columns is None else columns[wanted]
        verdicts = Verdicts(len(texts))
        texts = self._clean(texts, verdicts, open=False)
        empty = np.diff(text_offsets(texts)) == 0
        if empty.any():
            verdicts.drop(empty, EMPTY)
        return Documents(texts, verdicts, row, columns=columns)

    def _wanted(self, row: int) -> bool:
        return self._reading.rows is None or self._reading.rows[0] <= row < self._reading.rows[1]

    def _clean(self, texts: pa.LargeStringArray, verdicts: Verdicts, *, open: bool) -> pa.LargeStringArray:
        if self._cleaner is None or not len(texts):
            return texts
        started = time.perf_counter()
        cleaned = self._cleaner.clean(texts, verdicts, open=open)
        self.seconds["clean"] += time.perf_counter() - started
        return cleaned


REPORT_SECONDS = 0.25
"""How often a worker tells how it gets on."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A unit, and how much of it is done already."""

    unit: Unit
    key: str
    """Names what is made of it."""
    parts: int = 0
    batches: int = 0
    documents: int | None = None
    """Take at most so many documents; None: all."""
    rows: tuple[int, int] | None = None
    """Only the documents from, up to; None: all."""
    prints: str | None = None
    """Names what the first pass left of it; None: there was none."""


@dataclass(frozen=True, slots=True)
class SetRules:
    """What the passes need to know of one dataset."""

    text: TextRules
    weight: float = 1.0
    split: str | None = None
    """The split that all its documents make up, whatever they are; None: splits and filters as for any other."""
    chat: ChatRecipe | None = None
    """Its records are conversations."""

    def compared(self, documents: Documents) -> pa.LargeStringArray:
        """What makes documents duplicates of each other."""
        by_prompt = self.chat is not None and self.chat.dedup_on_prompt and documents.prompts is not None
        return documents.prompts if by_prompt else documents.texts

    def with_special_tokens(self, tokens: tuple[str, ...]) -> SetRules:
        """So that conversations which hold the text of one of the tokenizer's can be counted."""
        return self if self.chat is None else replace(self, chat=replace(self.chat, special_tokens=tokens))

    def share(self, copy: int) -> float:
        """The share of the documents that is in a repetition."""
        return min(1.0, self.weight - copy)


# ---- kept by the first pass for the second ----

_HEADER = struct.Struct("<QQQQ")
"""Bytes of the description, texts, bytes of text, hash of all that follows."""


def print_paths(folder: Path, key: str) -> tuple[Path, Path, Path]:
    """What the first pass leaves of a unit: hashes, signatures, texts."""
    return folder / f"hashes-{key}.bin", folder / f"signatures-{key}.bin", folder / f"texts-{key}.bin"


def preference_path(folder: Path, key: str) -> Path:
    """The same, where near-duplicates are kept by more than their order: what decides on each document."""
    return folder / f"preferences-{key}.bin"


def places_path(folder: Path, key: str) -> Path:
    """The same: which files the rows of a unit are from."""
    return folder / f"places-{key}.jsonl"


def place_of(marks: Sequence[Mark], unit: Unit, row: int) -> dict[str, Any]:
    """The file of a unit's row, and its line or number there, from 1; in a piece of a large file, from a byte on."""
    mark = marks[bisect_right(marks, row, key=lambda one: one.at) - 1]
    name = "line" if unit.slices[0].format == "jsonl" else "record"
    return {"file": mark.file, name: mark.row + row - mark.at + 1} | ({"from_byte": mark.origin} if mark.origin else {})


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
        self._new, self._unit, self._last = new, unit, Mark(-1, "", 0)

    def note(self, documents: Documents) -> None:
        for mark in documents.marks:
            if mark != self._last and mark.at >= self._last.at:
                self._new.write((json.dumps([mark.at, place_of((mark,), self._unit, mark.at)]) + "\n").encode())
                self._last = mark

    def commit(self) -> dict[str, dict[str, Any]]:
        return {self._new.path.name: self._new.put_in_place()}


class CacheWriter:
    """Use it as a context manager; left without a commit, nothing stays."""

    def __init__(self, path: Path) -> None:
        self._new = NewFile(path)

    def add(self, documents: Documents) -> None:
        offsets = text_offsets(documents.texts)
        start, stop = int(offsets[0]), int(offsets[-1])
        description = json.dumps(_describe(documents)).encode()
        parts: list[Any] = [description, np.ascontiguousarray(offsets - start).data]
        if stop > start:
            parts.append(memoryview(documents.texts.buffers()[2])[start:stop])
        header = (len(description), len(documents.texts), stop - start)
        for part in (_HEADER.pack(*header, _hash(header, parts)), *parts):
            self._new.write(part)

    def commit(self) -> None:
        self._new.write(_END)
        self._new.commit()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._new.discard()


def _describe(documents: Documents) -> dict[str, Any]:
    verdicts = documents.verdicts
    told: dict[str, Any] = {
        "batch": documents.batch,
        "first_row": documents.first_row,
        "part": documents.part,
        "last": documents.last,
        "bytes_read": documents.bytes_read,
        "marks": [[mark.at, mark.file, mark.row, mark.origin] for mark in documents.marks],
    }
    if documents.rejects:
        told["rejects"] = [asdict(reject) for reject in documents.rejects]
    if documents.sides is not None:
        prompts = None if documents.prompts is None else documents.prompts.to_pylist()
        special = documents.with_special_tokens
        told |= {"sides": documents.sides.as_json(), "prompts": prompts, "with_special_tokens": special}
    if verdicts.reasons:
        told |= {"reasons": verdicts.reasons, "codes": verdicts.codes.tolist()}
    return told


def open_reader(reading: Reading, path: Path | None) -> UnitReader | CachedReader:
    """The documents of a unit: from where the first pass kept them, when they are there, else from the input."""
    return CachedReader(path, reading) if path is not None and path.exists() else UnitReader(reading)


class CachedReader:
    """What `UnitReader` gave when the cache was written."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self.batches = 0
        self.seconds = {"read": 0.0, "clean": 0.0}

    def __iter__(self) -> Iterator[Documents]:
        with self._path.open("rb") as file:
            while True:
                started = time.perf_counter()
                documents = self._read_frame(file)
                self.seconds["read"] += time.perf_counter() - started
                if documents is None:
                    return
                self.batches = documents.batch
                if documents.batch > self._reading.skip_batches:
                    yield self._reading.without_told_rejects(documents)

    def _read_frame(self, file: IO[bytes]) -> Documents | None:
        header = file.read(_HEADER.size)
        if header == _END:
            return None
        sizes, parts = self._read_parts(file, header)
        told = json.loads(parts[0])
        offsets, count = pa.py_buffer(parts[1]), sizes[1]
        texts = pa.LargeStringArray.from_buffers(count, offsets, pa.py_buffer(parts[2]))
        verdicts = Verdicts(count)
        if "codes" in told:
            verdicts.reasons, verdicts.codes = told.pop("reasons"), np.array(told.pop("codes"), dtype=np.int16)
        rejects = [Reject(**reject) for reject in told.pop("rejects", [])]
        told["marks"] = tuple(Mark(*mark) for mark in told["marks"])
        if "sides" in told:
            from milldam.chat.reading import Sides

            prompts = told.pop("prompts")
            told["sides"] = Sides.from_json(told["sides"])
            told["prompts"] = None if prompts is None else pa.array(prompts, pa.large_string())
        return Documents(texts, verdicts, rejects=rejects, **told)

    def _read_parts(self, file: IO[bytes], header: bytes) -> tuple[tuple[int, int, int], list[bytes]]:
        if len(header) == _HEADER.size:
            *sizes, wanted = _HEADER.unpack(header)
            size, count, text_bytes = sizes
            if size + 8 * (count + 1) + text_bytes <= os.fstat(file.fileno()).st_size:
                parts = [file.read(part) for part in (size, 8 * (count + 1), text_bytes)]
                if _hash((size, count, text_bytes), parts) == wanted:
                    return (size, count, text_bytes), parts
        # Without it, the unit is read from the input.
        self._path.unlink(missing_ok=True)
        raise StoreError(f"{self._path}: damaged, and now removed. Run the same command again to continue without it.")


def _hash(sizes: tuple[int, int, int], parts: Iterable[Any]) -> int:
    digest = xxhash.xxh3_64(struct.pack("<QQQ", *sizes))
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


_END = _HEADER.pack(0, 0, 0, _hash((0, 0, 0), ()))
"""Behind the last one: a file that is cut between two has none."""
