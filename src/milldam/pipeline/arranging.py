"""Splits and limits that are exact in tokens: staged shards -> the shards of the splits.

Documents are taken for a split in the order of their keys (the hash of the text, see judging.py) until it has its
tokens, the last one cut to make the number exact; a dataset with `max_tokens` gives its first documents in plan
order. Both are settled by streaming over lengths and keys, once and once more for each split; then each unit's staged
shard is copied, unit by unit in parallel. Memory: 16 bytes a shard. Disk: the tokens twice, until the manifest is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.config.settings import TRAIN, VAL, Config
from milldam.errors import InputError
from milldam.pipeline.judging import FACTS, Facts, split_numbers
from milldam.pipeline.unit_output import FACTS_ENDING, Shelf
from milldam.run.engine import Assigned, Make, Stage, Telling
from milldam.run.folder import RunFolder
from milldam.run.pools import Workers
from milldam.run.records import Record, Records
from milldam.run.session import Session
from milldam.run.units import Keys, UnitList, key_of
from milldam.stores.tokens.format import Index
from milldam.stores.tokens.writer import Tokens

RECORDS = "arranged.jsonl"
OVER_MAX_TOKENS, EQUAL_TO_CUT = "over_max_tokens", "equal_to_cut"
CHUNK_TOKENS = 1 << 21
_CHUNK_DOCUMENTS = 1 << 18
_BUCKETS = 1 << 16
_BUCKET_SHIFT = np.uint64(48)

Place = tuple[int, int, int]
"""(unit, part, document)."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """The last document of a split, in the order of keys."""

    key: int
    place: Place
    tokens: int
    """So many of its tokens are the split's; the rest is left out."""


@dataclass(frozen=True, slots=True)
class Cap:
    """Where a dataset's tokens are full, in one of its staged shards."""

    documents: int
    """Documents that stay."""
    last_tokens: int | None = None
    """Tokens that stay of the last one of them; None: all."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged shard."""

    unit: int
    """The number of its unit."""
    record: Record
    cap: Cap | None = None
    key: str = ""
    """Names what is made of it."""

    @property
    def dataset(self) -> int:
        return int(self.record.facts["dataset"])

    @property
    def size(self) -> int:
        return int(self.shard["bin"]["bytes"])

    def as_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "record": self.record.as_json(),
            "cap": None if self.cap is None else asdict(self.cap),
            "key": self.key,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Staged:
        cap = None if value["cap"] is None else Cap(**value["cap"])
        return cls(value["unit"], Record(**value["record"]), cap, value["key"])

    @property
    def shard(self) -> dict[str, Any]:
        shard: dict[str, Any] = self.record.facts["shards"][0]
        return shard

    @property
    def name(self) -> str:
        return str(self.shard["name"])

    @property
    def facts(self) -> str:
        """The file with the facts of its documents."""
        return next(name for name in self.record.files if name.endswith(FACTS_ENDING))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some documents of a staged shard, as views into its files."""

    first: int
    lengths: npt.NDArray[np.int64]
    facts: npt.NDArray[Any]


def chunks(out: Path, staged: Staged) -> Iterator[_Chunk]:
    """Lengths and facts of the documents that the cap leaves, a bounded number at a time."""
    index = Index.map(out / f"{staged.name}.idx")
    facts = np.memmap(out / staged.facts, dtype=FACTS, mode="r")
    documents = len(facts) if staged.cap is None else staged.cap.documents
    for first in range(0, documents, _CHUNK_DOCUMENTS):
        stop = min(documents, first + _CHUNK_DOCUMENTS)
        lengths = index.document_lengths(first, stop)
        if staged.cap is not None and stop == documents and staged.cap.last_tokens is not None:
            lengths[-1] = staged.cap.last_tokens
        yield _Chunk(first, lengths, facts[first:stop])


def find_cap(out: Path, staged: Staged, room: int) -> tuple[Cap | None, int]:
    """What stays of a shard whose dataset has `room` tokens left, and the room behind it."""
    for chunk in chunks(out, staged):
        total = int(chunk.lengths.sum())
        if total > room:
            ends = np.cumsum(chunk.lengths)
            last = int(np.searchsorted(ends, room))
            before = int(ends[last - 1]) if last else 0
            kept = room - before
            return (Cap(chunk.first + last + 1, kept) if kept else Cap(chunk.first + last)), 0
        room -= total
    return None, room


def find_boundaries(out: Path, shards: Callable[[], Iterator[Staged]], wanted: dict[str, int]) -> list[Boundary]:
    """The last document of each split. `shards`: gives the staged shards that splits are taken from, each time anew."""
    if not wanted:
        return []
    histogram = np.zeros(_BUCKETS, dtype=np.int64)
    for staged in shards():
        for chunk in chunks(out, staged):
            np.add.at(histogram, chunk.facts["key"] >> _BUCKET_SHIFT, chunk.lengths)
    ends = np.cumsum(histogram)
    boundaries = []
    reached = 0
    for tokens in wanted.values():
        bucket = int(np.searchsorted(ends, reached + tokens))
        if bucket == _BUCKETS:
            raise InputError(_too_many(wanted, int(ends[-1])))
        before = int(ends[bucket - 1]) if bucket else 0
        boundary, reached = _boundary(_documents_in(out, shards, bucket), before, reached + tokens)
        boundaries.append(boundary)
    if reached >= ends[-1]:
        raise InputError(_too_many(wanted, int(ends[-1])))
    return boundaries


def _too_many(wanted: dict[str, int], there: int) -> str:
    asked = ", ".join(f"{name}_tokens: {tokens:,}" for name, tokens in wanted.items())
    return f"splits: {asked} leaves nothing to train: there are {there:,} tokens."


def _documents_in(out: Path, shards: Callable[[], Iterator[Staged]], bucket: int) -> list[tuple[int, Place, int]]:
    """(key, place, tokens) of the documents in a bucket, one in 65,536, in order."""
    found: list[tuple[int, Place, int]] = []
    for staged in shards():
        for chunk in chunks(out, staged):
            for k in np.flatnonzero(chunk.facts["key"] >> _BUCKET_SHIFT == bucket).tolist():
                place = (staged.unit, staged.record.part, chunk.first + k)
                found.append((int(chunk.facts["key"][k]), place, int(chunk.lengths[k])))
    return sorted(found)


def _boundary(entries: list[tuple[int, Place, int]], reached: int, target: int) -> tuple[Boundary, int]:
    """The document in which the tokens, counted from `reached`, come to the target; and where the next one begins."""
    for number, (key, place, tokens) in enumerate(entries):
        if target <= reached + tokens:
            equal = sum(tokens for other, _, tokens in entries[number:] if other == key)
            return Boundary(key, place, target - reached), reached + equal
        reached += tokens
    raise AssertionError("the histogram and the documents disagree")


class Arrangement:
    """The stage of a job that puts staged shards where they belong."""

    def __init__(self, config: Config, folder: RunFolder, dtype: str) -> None:
        self._config, self._folder, self._dtype = config, folder, dtype

    def stages(self, session: Session, staged: Records, readers: Workers) -> Generator[Stage, None, Records]:
        """The records of what was arranged, a unit each staged shard."""
        session.enter("arrange")
        config, out = self._config, self._folder.out
        validation = len(config.validation_sets)
        # In a file: what is known of each shard would otherwise be held of all of them, several times over.
        listed = UnitList(self._folder.own, "arrange")
        try:
            count = listed.write(self._capped(staged))

            def free() -> Iterator[Staged]:
                return (one for one in listed.all(Staged.from_json) if one.dataset >= validation)

            boundaries = find_boundaries(out, free, config.split_tokens) if count else []
            load = ArrangeLoad(
                out=out,
                splits=tuple(config.split_tokens),
                boundaries=tuple(boundaries),
                shares=config.split_shares,
                validation=frozenset(range(validation)),
                dtype=self._dtype,
            )
            keys = Keys.of(_key(one, boundaries) for one in listed.all(Staged.from_json))
            records = Records(self._folder.journal, RECORDS, out, keys)
            yield Stage("arrange", load, records, workers=readers, facts=lambda number: listed.at(number, dict))
        finally:
            listed.remove()
        return records

    def _capped(self, records: Records) -> Iterator[Staged]:
        """The staged shards in plan order, each with what its dataset's limit leaves of it."""
        rooms = {k: one.max_tokens for k, one in enumerate(self._config.sources) if one.max_tokens is not None}
        for unit, record in records.in_plan_order():
            if not record.facts["shards"]:
                continue
            one = Staged(unit, record, key=record.key)
            if one.dataset in rooms:
                cap, rooms[one.dataset] = find_cap(self._folder.out, one, rooms[one.dataset])
                one = replace(one, cap=cap)
            yield one


def _key(staged: Staged, boundaries: list[Boundary]) -> str:
    """Names what is made of a staged shard: of its documents, and of what decides where they go."""
    places = [asdict(one) for one in boundaries]
    cap = None if staged.cap is None else asdict(staged.cap)
    return key_of(staged.record.key, staged.record.part, staged.unit, places, cap)


@dataclass(frozen=True, slots=True)
class ArrangeLoad:
    """What every worker needs to know; it pickles."""

    out: Path
    splits: tuple[str, ...]
    """Splits in the order of their boundaries."""
    boundaries: tuple[Boundary, ...]
    shares: dict[str, float] = field(default_factory=dict)
    """Splits by share of the documents; there are no boundaries then."""
    validation: frozenset[int] = field(default_factory=frozenset)
    """Datasets that are the split val."""
    dtype: str = "uint16"

    @property
    def names(self) -> tuple[str, ...]:
        """All splits by number."""
        chosen = (TRAIN, *self.shares) if self.shares else (*self.splits, TRAIN)
        return (*chosen, VAL) if self.validation else chosen

    def load(self) -> Make:
        return self._arrange

    def _arrange(self, assigned: Assigned, telling: Telling) -> Iterator[Record]:
        staged = replace(Staged.from_json(assigned.facts), key=assigned.key)
        with Shelf(self.out, staged.key, self.names, self.dtype) as shelf:
            tokens = np.memmap(self.out / f"{staged.name}.bin", dtype=self.dtype, mode="r")
            equal = 0
            for start, chunk in _by_tokens(chunks(self.out, staged)):
                equal += self._copy(shelf, staged, tokens[start : start + int(chunk.lengths.sum())], chunk)
            shards = [asdict(shard) for shard in shelf.commit()]
        beyond = 0 if staged.cap is None else staged.shard["documents"] - staged.cap.documents
        counted = {OVER_MAX_TOKENS: beyond, EQUAL_TO_CUT: equal}
        dropped = {"arrange": {reason: number for reason, number in counted.items() if number}}
        before = staged.record.facts
        facts = before | {"shards": shards, "dropped": before["dropped"] | (dropped if equal or beyond else {})}
        yield Record(staged.key, outputs=shelf.files(shards)[0], facts=facts)

    def _destinations(self, staged: Staged, chunk: _Chunk) -> tuple[Any, Any]:
        """Split of each document, and how many of its tokens go there: none where it equals the one that was cut."""
        lengths, keys = chunk.lengths.copy(), chunk.facts["key"]
        if staged.dataset in self.validation:
            return np.full(len(keys), self.names.index(VAL)), lengths
        if self.shares:
            return split_numbers(keys, self.shares), lengths
        splits = np.zeros(len(keys), dtype=np.int64)
        unit, part = staged.unit, staged.record.part
        for boundary in self.boundaries:
            behind = _after(boundary, keys, unit, part, chunk.first)
            splits += behind
            # A document must not be in two splits: what equals the last one of a split goes with its rest.
            lengths[behind & (keys == np.uint64(boundary.key))] = 0
            if boundary.place[:2] == (unit, part) and 0 <= boundary.place[2] - chunk.first < len(keys):
                lengths[boundary.place[2] - chunk.first] = boundary.tokens
        return splits, lengths

    def _copy(self, shelf: Shelf, staged: Staged, tokens: Any, chunk: _Chunk) -> int:
        """Put the documents where they belong; how many were left out."""
        splits, lengths = self._destinations(staged, chunk)
        if not np.array_equal(lengths, chunk.lengths):
            tokens = tokens[: lengths[0]] if len(lengths) == 1 else tokens[_prefixes(chunk.lengths, lengths)]
        known = chunk.facts
        facts = Facts(splits, known["key"], known["text_bytes"], known["characters"], np.arange(len(splits)))
        kept = np.flatnonzero(lengths)
        if len(kept):
            shelf.add(Tokens(tokens, lengths[kept]), facts.at(kept))
        return len(lengths) - len(kept)


def _after(boundary: Boundary, keys: Any, unit: int, part: int, first: int) -> Any:
    """Which documents come behind a boundary, in the order of (key, place)."""
    behind = keys > np.uint64(boundary.key)
    same = keys == np.uint64(boundary.key)
    if (unit, part) != boundary.place[:2]:
        return behind | same if (unit, part) > boundary.place[:2] else behind
    return behind | (same & (np.arange(first, first + len(keys)) > boundary.place[2]))


def _prefixes(lengths: Any, kept: Any) -> Any:
    """A mask of the first `kept` tokens of each document."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.arange(int(lengths.sum())) - starts < np.repeat(kept, lengths)


def _by_tokens(several: Iterator[_Chunk]) -> Iterator[tuple[int, _Chunk]]:
    """Where each of some smaller chunks begins in the tokens; a giant document stands alone."""
    start = 0
    for chunk in several:
        ends = np.cumsum(chunk.lengths)
        done = 0
        while done < len(ends):
            reached = int(ends[done - 1]) if done else 0
            stop = max(done + 1, int(np.searchsorted(ends, reached + CHUNK_TOKENS, side="right")))
            yield start + reached, _Chunk(chunk.first + done, chunk.lengths[done:stop], chunk.facts[done:stop])
            done = stop
        start += int(ends[-1]) if len(ends) else 0
