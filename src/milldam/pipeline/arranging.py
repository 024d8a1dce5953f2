"""Splits and limits that are exact in tokens: staged shards -> the shards of the splits.

Documents are taken for a split in the order of their keys (the hash of the text, see judging.py) until it has its
tokens, the last one cut to make the number exact; a dataset with `max_tokens` gives its first documents in plan
order. Both are settled by streaming over lengths and keys, once and once more for each split; then each unit's staged
shard is copied, unit by unit in parallel. Memory: 16 bytes a shard. Disk: the tokens twice, until the manifest is
written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.config.settings import TRAIN, VAL, Config
from milldam.errors import InputError
from milldam.pipeline.judging import FACTS, split_numbers
from milldam.pipeline.unit_output import FACTS_ENDING, SplitShards
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.tasks import Workers
from milldam.run.units import UnitList, keys_of
from milldam.sources.batch import Batch
from milldam.stores.tokens.format import Index

ARRANGE, RECORDS = "arrange", "arranged.jsonl"
OVER_MAX_TOKENS, EQUAL_TO_CUT = "over_max_tokens", "equal_to_cut"
CHUNK_TOKENS, CHUNK_DOCUMENTS = 1 << 21, 1 << 18
_BUCKETS, _BUCKET_SHIFT = 1 << 16, np.uint64(48)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The last document of a split, in the order of keys."""

    key: int
    place: tuple[int, int, int]
    """(unit, part, document)."""
    tokens: int
    """So many of its tokens are the split's; the rest is left out."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One staged shard, and what its dataset's limit leaves of it."""

    unit: int
    """The number of its unit."""
    record: Record
    kept: int
    """Documents that stay."""
    last: int | None = None
    """Tokens that stay of the last one of them; None: all."""

    @property
    def shard(self) -> dict[str, Any]:
        shard: dict[str, Any] = self.record.facts["shards"][0]
        return shard

    @property
    def dataset(self) -> int:
        return int(self.record.facts["dataset"])

    @property
    def size(self) -> int:
        return int(self.shard["bin"]["bytes"])

    @property
    def key(self) -> str:
        return self.record.key

    def as_json(self) -> dict[str, Any]:
        return {"unit": self.unit, "record": self.record.as_json(), "kept": self.kept, "last": self.last}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Staged:
        return cls(**value | {"record": Record(**value["record"])})


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some documents of a staged shard, as views into its files."""

    first: int
    start: int
    """Where their tokens begin."""
    lengths: npt.NDArray[np.int64]
    facts: npt.NDArray[Any]


def _chunks(out: Path, staged: Staged) -> Iterator[_Chunk]:
    """The documents that stay, a bounded number of tokens at a time; a giant document stands alone."""
    name, begin = staged.shard["name"], 0
    index = Index.map(out / f"{name}.idx")
    facts_name = next(name for name in staged.record.files if name.endswith(FACTS_ENDING))
    facts = np.memmap(out / facts_name, dtype=FACTS, mode="r")
    for first in range(0, staged.kept, CHUNK_DOCUMENTS):
        stop = min(staged.kept, first + CHUNK_DOCUMENTS)
        lengths = index.document_lengths(first, stop)
        if stop == staged.kept and staged.last is not None:
            lengths[-1] = staged.last
        ends, done = np.cumsum(lengths), 0
        while done < len(ends):
            start = int(ends[done - 1]) if done else 0
            behind = max(done + 1, int(np.searchsorted(ends, start + CHUNK_TOKENS, side="right")))
            yield _Chunk(first + done, begin + start, lengths[done:behind], facts[first + done : first + behind])
            done = behind
        begin += int(ends[-1])


# ---- what stays, and where splits end ----


def _boundaries(out: Path, shards: Callable[[], Iterator[Staged]], wanted: dict[str, int]) -> list[Boundary]:
    """The last document of each split. `shards`: gives the staged shards that splits are taken from, each time anew."""
    histogram = np.zeros(_BUCKETS, dtype=np.int64)
    for staged in shards() if wanted else ():
        for chunk in _chunks(out, staged):
            np.add.at(histogram, chunk.facts["key"] >> _BUCKET_SHIFT, chunk.lengths)
    ends, boundaries, reached = np.cumsum(histogram), list[Boundary](), 0
    for tokens in wanted.values():
        bucket, target = int(np.searchsorted(ends, reached + tokens)), reached + tokens
        if bucket == _BUCKETS:
            break
        reached = int(ends[bucket - 1]) if bucket else 0
        # (key, place, tokens) of the documents in the bucket, one in 65,536.
        entries = sorted(
            (int(chunk.facts["key"][k]), (staged.unit, staged.record.part, chunk.first + k), int(chunk.lengths[k]))
            for staged in shards()
            for chunk in _chunks(out, staged)
            for k in np.flatnonzero(chunk.facts["key"] >> _BUCKET_SHIFT == bucket).tolist()
        )
        for number, (key, place, length) in enumerate(entries):
            if target <= reached + length:
                boundaries.append(Boundary(key, place, target - reached))
                # What equals the last one is in no split.
                reached += sum(length for other, _, length in entries[number:] if other == key)
                break
            reached += length
    if wanted and (len(boundaries) < len(wanted) or reached >= ends[-1]):
        wish = ", ".join(f"{name}_tokens: {tokens:,}" for name, tokens in wanted.items())
        raise InputError(f"splits: {wish} leaves nothing to train: there are {int(ends[-1]):,} tokens.")
    return boundaries


def arrange(
    config: Config, session: Session, staged: Records, readers: Workers, dtype: str
) -> Generator[Stage, None, Records]:
    """The stage that puts staged shards where they belong; the records of what it made, a unit each staged shard."""
    session.enter(ARRANGE)
    folder, validation = session.folder, len(config.validation)
    # In a file: what is known of each shard would otherwise be held of all of them, several times over.
    listed = UnitList(folder.own, ARRANGE)
    try:
        with listed.listing(_limited(config, folder, staged)) as put_in_place:
            put_in_place()

        def free() -> Iterator[Staged]:
            return (one for one in listed.all(Staged.from_json) if one.dataset >= validation)

        boundaries = _boundaries(folder.out, free, config.split_tokens if len(listed) else {})
        ends = [asdict(one) for one in boundaries]
        # A key names the documents, and what decides where they go.
        keys = keys_of(
            (one.record.key, one.record.part, one.unit, ends, one.kept, one.last)
            for one in listed.all(Staged.from_json)
        )
        chosen = (TRAIN, *config.split_shares) if config.split_shares else (*config.split_tokens, TRAIN)
        load = Arranging(
            out=folder.out,
            splits=(*chosen, VAL) if validation else chosen,
            boundaries=tuple(boundaries),
            shares=config.split_shares,
            validation=validation,
            dtype=dtype,
        )
        records = Records(folder, RECORDS, keys)
        yield Stage(ARRANGE, load, records, Staged.from_json, readers, listed=listed)
    finally:
        listed.remove()
    return records


def _limited(config: Config, folder: RunFolder, staged: Records) -> Iterator[Staged]:
    """The staged shards in plan order, each with what its dataset's limit leaves of it."""
    rooms = {k: one.max_tokens for k, one in enumerate(config.sources) if one.max_tokens is not None}
    for unit, record in staged.in_plan_order():
        if not record.facts["shards"]:
            continue
        one = Staged(unit, record, record.facts["shards"][0]["documents"])
        for chunk in _chunks(folder.out, one) if one.dataset in rooms else ():
            ends, room = np.cumsum(chunk.lengths), rooms[one.dataset]
            rooms[one.dataset] = max(0, room - int(ends[-1]))
            if ends[-1] > room:
                whole = int(np.searchsorted(ends, room, side="right"))
                rest = room - (int(ends[whole - 1]) if whole else 0)
                one = replace(one, kept=chunk.first + whole + bool(rest), last=rest or None)
                break
        yield one


# ---- in a worker ----


@dataclass(frozen=True, slots=True)
class Arranging:
    """A staged shard to the shards of its splits."""

    out: Path
    splits: tuple[str, ...]
    """By number; those in tokens in the order of their boundaries."""
    boundaries: tuple[Boundary, ...]
    shares: dict[str, float]
    """Splits by share of the documents; there are no boundaries then."""
    validation: int
    """So many datasets, the first ones, are the split val."""
    dtype: str

    def load(self) -> Make:
        return self._make

    def _make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        staged: Staged = assigned.unit
        equal, beyond = 0, staged.shard["documents"] - staged.kept
        with SplitShards(self.out, assigned.key, self.splits, self.dtype) as made:
            tokens = np.memmap(self.out / f"{staged.shard['name']}.bin", dtype=self.dtype, mode="r")
            for chunk in _chunks(self.out, staged):
                ids = tokens[chunk.start : chunk.start + int(chunk.lengths.sum())]
                splits, lengths = self._destinations(staged, chunk)
                if not np.array_equal(lengths, chunk.lengths):  # only the first tokens of each
                    place = np.arange(len(ids)) - np.repeat(np.cumsum(chunk.lengths) - chunk.lengths, chunk.lengths)
                    ids = ids[place < np.repeat(lengths, chunk.lengths)]
                kept = lengths > 0
                if kept.any():
                    made.add(Batch(None, ids=ids, lengths=lengths[kept], splits=splits[kept], facts=chunk.facts[kept]))
                equal += len(kept) - int(np.count_nonzero(kept))
                progress.add(documents=len(kept))
            shards, files, _ = made.commit()
        lost = {reason: count for reason, count in ((OVER_MAX_TOKENS, beyond), (EQUAL_TO_CUT, equal)) if count}
        before = staged.record.facts
        facts = before | {"shards": shards, "dropped": before["dropped"] | ({ARRANGE: lost} if lost else {})}
        yield Record(assigned.key, outputs=files, facts=facts)

    def _destinations(self, staged: Staged, chunk: _Chunk) -> tuple[Any, Any]:
        """Split of each document, and how many of its tokens go there: none where it equals the one that was cut."""
        lengths, keys = chunk.lengths.copy(), chunk.facts["key"]
        if staged.dataset < self.validation:
            return np.full(len(keys), self.splits.index(VAL)), lengths
        if self.shares:
            return split_numbers(keys, self.shares), lengths
        splits, shard = np.zeros(len(keys), dtype=np.int64), (staged.unit, staged.record.part)
        documents = np.arange(chunk.first, chunk.first + len(keys))
        for boundary in self.boundaries:
            *of, last = boundary.place
            later = documents > last if shard == tuple(of) else np.full(len(keys), shard > tuple(of))
            equal = keys == np.uint64(boundary.key)
            splits += (keys > np.uint64(boundary.key)) | (equal & later)
            # A document must not be in two splits: what equals the last one of a split goes with its rest.
            lengths[equal & later] = 0
            if shard == tuple(of):
                lengths[documents == last] = boundary.tokens
        return splits, lengths
