"""A unit -> batches of cleaned documents, numbered: what both passes over the input begin with. Holds one batch.

A document's row is its position among the readable documents of its unit, from 0; so (unit, row) names it in both
passes. A text file larger than a document may be is a batch of its own, whose text comes in pieces (`Batch.pieces`).

The first pass keeps its batches for the second, which then neither parses nor cleans again. Only a cache: without it
the second pass reads the input once more, with the same result. It is written when it takes a small part of the free
disk, and removed with the run's other intermediate files. Not compressed: that would take longer than reading the input
again (docs/log.md). Disk: the texts, and some 20 bytes a document.
"""

from __future__ import annotations

import functools
import itertools
import json
import pickle
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    from milldam.sources.splits import RowSlice
    from milldam.text.cleaning import Cleaner

READ_AHEAD = 4
_PLACES_HELD = 64
"""Units whose places are held."""
HEAD_BYTES = 1 << 20
"""So much of a document's text decides on its split and whether it is sampled."""
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class SetRules:
    """The rules of one dataset, as the passes need them."""

    text: TextRules
    weight: float = 1.0
    split: str | None = None
    """The split that all its documents make up, whatever they are; None: splits and filters as for any other."""
    chat: ChatRecipe | None = None
    """Its records are conversations."""
    rows: RowSlice | None = None
    """The slice of its documents that is wanted; None: all."""
    max_documents: int | None = None

    @property
    def counted(self) -> bool:
        """Its documents must be counted before it is known which of them are wanted."""
        return self.rows is not None or self.max_documents is not None

    def wanted(self, total: int) -> tuple[int, int]:
        """(first, behind the last) of its documents that are wanted, when it has `total`."""
        first, stop = self.rows.bounds(total) if self.rows is not None else (0, total)
        return first, stop if self.max_documents is None else min(stop, first + self.max_documents)

    def compared(self, batch: Batch) -> pa.LargeStringArray:
        """The texts that make documents duplicates of each other."""
        by_prompt = self.chat is not None and self.chat.dedup_on_prompt and batch.prompts is not None
        return batch.prompts if by_prompt else batch.texts

    def with_special_tokens(self, tokens: tuple[str, ...]) -> SetRules:
        """So that conversations which hold the text of one of the tokenizer's can be counted."""
        return self if self.chat is None else replace(self, chat=replace(self.chat, special_tokens=tokens))

    def share(self, copy: int) -> float:
        """The share of the documents that is in a repetition."""
        return min(1.0, self.weight - copy)


def read_documents(
    unit: Unit,
    rules: SetRules,
    clean: CleanRules | None = None,
    *,
    rows: Sequence[int] | None = None,
    skip_batches: int = 0,
    ahead: bool = False,
    keep: tuple[str, ...] = (),
) -> Iterator[Batch]:
    """The batches of a unit.

    `rows`: only the documents from, up to. `skip_batches`: those that were done before. `ahead`: read in a thread while
    what was read is worked on. `keep`: fields to read as well.
    """
    first, stop = rows or (0, sys.maxsize)
    if first >= stop:
        return
    cleaner: Cleaner | None = None
    if clean is not None and rules.chat is None:  # conversations are cleaned before they are texts
        from milldam.text.cleaning import Cleaner

        cleaner = Cleaner(clean)
    row, batches = 0, _numbered(unit, rules, keep)
    for batch in prefetched(batches, READ_AHEAD) if ahead else batches:
        batch.rows = row + np.arange(len(batch.texts))
        row += len(batch.texts)
        if batch.number > skip_batches:
            batch = batch.only((batch.rows >= first) & (batch.rows < stop))
            _clean(batch, cleaner)
            yield batch
        if row >= stop:
            return


def _numbered(unit: Unit, rules: SetRules, keep: tuple[str, ...]) -> Iterator[Batch]:
    """Each with its number and the records rejected before it; at the end one with the last rejects."""
    rejects: list[Reject] = []
    number = 0
    if rules.chat is None:
        batches = read_unit(unit, rules.text, rejects.append, keep)
    else:
        from milldam.chat.reading import ConversationReader

        batches = ConversationReader(rules.chat, rules.text, keep).read(unit, rejects.append)
    for number, batch in enumerate(batches, start=1):
        batch.number, batch.rejects = number, rejects.copy()
        rejects.clear()
        yield batch
    none = np.empty(0, np.int64)
    yield Batch(pa.array([], pa.large_string()), number=number + 1, rejects=rejects, origins=none)


def _clean(batch: Batch, cleaner: Cleaner | None) -> None:
    """Clean its texts, and find what is empty."""
    verdicts = batch.verdicts = batch.verdicts or Verdicts(len(batch.texts))
    if batch.pieces is not None and len(batch.texts):
        if cleaner is not None:
            batch.pieces = _cleaned(batch.pieces, cleaner, verdicts)
        text, size = next(batch.pieces)
        batch.texts, batch.pieces = pa.array([text], pa.large_string()), itertools.chain([(text, size)], batch.pieces)
        return
    if cleaner is not None and len(batch.texts):
        batch.texts = cleaner.clean(batch.texts, verdicts)
    empty = np.diff(text_offsets(batch.texts)) == 0
    if empty.any():
        verdicts.drop(empty, EMPTY)


def _cleaned(pieces: Iterator[tuple[str, int]], cleaner: Cleaner, verdicts: Verdicts) -> Iterator[tuple[str, int]]:
    """The pieces of a document, cut again where white space ends, so that each is cleaned by itself."""
    tail, begun = "", False

    def clean(text: str, *, last: bool) -> str:
        cleaned: str = cleaner.clean_piece(pa.array([text], pa.large_string()), verdicts, first=not begun, last=last)[
            0
        ].as_py()
        return cleaned

    for text, size in pieces:
        tail += text
        cut = cleaner.last_cut(tail)
        yield clean(tail[:cut], last=False), size
        tail, begun = tail[cut:], begun or cut > 0
    yield clean(tail, last=True), 0


# ---- what the first pass leaves ----


def print_path(folder: Path, kind: str, key: str) -> Path:
    """A file that the first pass leaves of a unit: hashes, signatures, preferences, matches, places or texts."""
    return folder / f"{kind}-{key}.{'jsonl' if kind == 'places' else 'bin'}"


def place_of(unit: Unit, origin: int) -> dict[str, Any]:
    """The file of a unit's row, and its line or number there, from 1; in a piece of a large file, from a byte on."""
    slice = unit.slices[origin >> NUMBER_BITS]
    name = "line" if slice.format == "jsonl" else "record"
    from_byte = slice.start if slice.format not in TABLES else 0
    place = {"file": slice.path, name: (origin & ((1 << NUMBER_BITS) - 1)) + 1}
    return place | ({"from_byte": from_byte} if from_byte else {})


def recorded_place(folder: Path, unit: int, row: int) -> dict[str, Any]:
    """The same of any unit, by the places that the first pass recorded."""
    path = print_path(folder, "places", f"{unit:07d}")
    status = path.stat()
    places, ats = _recorded_places(path, status.st_ino, status.st_mtime_ns)
    at, place = places[bisect_right(ats, row) - 1]
    name = "line" if "line" in place else "record"
    return place | {name: place[name] + row - at}


@functools.lru_cache(_PLACES_HELD)
def _recorded_places(path: Path, inode: int, changed: int) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    with path.open(encoding="utf-8") as lines:
        places = [(at, place) for at, place in map(json.loads, lines)]
    return places, [at for at, _ in places]


# ---- batches that are kept ----

_HASH_BYTES = 16


def keep_batches(batches: Iterator[Batch], path: Path) -> Iterator[Batch]:
    """Hand batches on, and write them to a file, which appears when all are written; with a document in pieces, none
    does. Each is a pickle and the buffers of its arrays, behind their number and sizes; a hash of all at the end."""
    with NewFile(path) as new:
        whole = True
        for batch in batches:
            whole = whole and batch.pieces is None
            if whole:
                texts = batch.texts
                if texts.nbytes < texts.get_total_buffer_size():  # a slice of a larger array would be written whole
                    texts = pa.concat_arrays([texts, texts[:0]])
                buffers: list[pickle.PickleBuffer] = []
                kept = replace(batch, texts=texts, columns=None)
                parts = [memoryview(pickle.dumps(kept, protocol=5, buffer_callback=buffers.append))]
                parts += [buffer.raw() for buffer in buffers]
                new.write(np.array([len(parts), *(len(part) for part in parts)], "<i8").data)
                for part in parts:
                    new.write(part)
                    new.write(bytes(-len(part) % 8))  # the next one is aligned, as kernels want it
            yield batch
        if whole:
            new.write(bytes.fromhex(new.record["xxh3"]))
            new.put_in_place()


def kept_batches(path: Path, skip_batches: int = 0) -> Iterator[Batch]:
    """The batches in such a file, whose arrays lie in it."""
    with pa.memory_map(str(path)) as file:
        data = memoryview(file.read_buffer())
    at, end = 0, max(0, len(data) - _HASH_BYTES)
    if bytes(data[end:]) != xxhash.xxh3_128_digest(data[:end]):
        # Without it, the unit is read from the input.
        path.unlink(missing_ok=True)
        raise StoreError(f"{path}: damaged, and now removed. Run the same command again: it does without it.")
    while at < end:
        count = int.from_bytes(data[at : at + 8], "little")
        sizes = np.frombuffer(data, "<i8", count, at + 8)
        ends = at + 8 * (count + 1) + np.cumsum(sizes + -sizes % 8)
        starts = (ends - (sizes + -sizes % 8)).tolist()
        head, *buffers = (data[start : start + size] for start, size in zip(starts, sizes.tolist(), strict=True))
        batch: Batch = pickle.loads(head, buffers=buffers)
        at = int(ends[-1])
        if batch.number > skip_batches:
            yield batch
