"""What decides on the documents of a unit by their texts and tokens, each a step: duplicates, samples, filters, splits.

Which split a document belongs to, and whether it is in a sample, follows from the hash of its text alone. So the choice
does not depend on where a document stands or on what else there is: it stays when data is added, and equal documents
always go together. The key of a document is the xxh3 of its first MiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.pipeline.documents import HEAD_BYTES, SetRules, found_place
from milldam.rules import CleanRules, FilterRules
from milldam.run.units import mixed
from milldam.sources.batch import Batch
from milldam.sources.units import Unit
from milldam.text.arrays import Mask, Verdicts, character_counts, text_offsets

if TYPE_CHECKING:
    from milldam.dedup.drops import DropSet
    from milldam.dedup.near_drops import Place
    from milldam.dedup.seen import PinnedIndex, SeenBefore
    from milldam.filters.judging import Filters

Keys = npt.NDArray[np.uint64]
Step = Callable[[Batch], Batch]
_SAMPLE_SALT, _SPLIT_SALT = 0x5A3D, 0x591E
NOT_SAMPLED = "not_sampled"
FACTS = np.dtype([("key", "<u8"), ("text_bytes", "<i8"), ("characters", "<i8")])
"""What is known of a document besides its tokens; kept as it is until the place of the document is known."""


@dataclass(frozen=True, slots=True)
class Chooser:
    """Seeded choices by content."""

    seed: int
    head_bytes: int

    def sample_keys(self, texts: pa.LargeStringArray) -> Keys:
        return self._keys(texts, _SAMPLE_SALT)

    def split_keys(self, texts: pa.LargeStringArray) -> Keys:
        return self._keys(texts, _SPLIT_SALT)

    def _keys(self, texts: pa.LargeStringArray, salt: int) -> Keys:
        seed = (self.seed << 16 ^ salt) & (2**64 - 1)
        data, digest, most = texts.buffers()[2], xxhash.xxh3_64_intdigest, self.head_bytes
        view = memoryview(b"" if data is None else data)

        def head_end(start: int, stop: int) -> int:
            """After the last whole character within `most` bytes."""
            end = min(stop, start + most)
            while end < stop and view[end] & 0xC0 == 0x80:
                end -= 1
            return end

        edges = itertools.pairwise(text_offsets(texts).tolist())
        hashes = (digest(view[start : head_end(start, stop)], seed) for start, stop in edges)
        return np.fromiter(hashes, np.uint64, len(texts))


def below(keys: Keys, share: float) -> Mask:
    """The documents of a share, by their keys."""
    return np.ones(len(keys), dtype=bool) if share >= 1 else keys < np.uint64(int(share * 2.0**64))


def split_numbers(keys: Keys, shares: Mapping[str, float]) -> npt.NDArray[np.int64]:
    """0 for what is left to train, k for the k-th split of `shares`.

    Each split draws with a hash of its own from what the ones before it leave: another split takes documents from all,
    but does not move them between the others.
    """
    numbers = np.zeros(len(keys), dtype=np.int64)
    left = 1.0
    for number, (name, share) in enumerate(shares.items(), start=1):
        drawn = below(mixed(keys ^ np.uint64(xxhash.xxh3_64_intdigest(name.encode()))), share / left)
        numbers[drawn & (numbers == 0)] = number
        left -= share
    return numbers


@dataclass(frozen=True, slots=True)
class Selection:
    """What is done to the documents of every dataset between reading and writing."""

    clean: CleanRules | None = None
    drops: Path | None = None
    """Folder of the drop files; None: there was no first pass."""
    seen: PinnedIndex | None = None
    """The index whose documents are dropped without a first pass; None: there is none."""
    seen_by: tuple[str, ...] = ()
    """Ids of the runs of the index, in the order in which they are numbered."""
    shown: tuple[Place, ...] = ()
    """Documents whose texts are set aside beside the drop sets, to be looked at."""
    filters: FilterRules = field(default_factory=FilterRules)
    shares: dict[str, float] = field(default_factory=dict)
    """Splits beside train."""
    staged: bool = False
    """Splits are settled later, by tokens."""
    seed: int = 0
    write_dropped: bool = False


def preload_rules(filters: FilterRules, clean: CleanRules | None) -> None:
    """Load what rules keep in their modules, a language model or users' code, where workers forked later share it."""
    _filters(filters)
    if clean is not None:
        from milldam.text.cleaning import Cleaner

        Cleaner(clean)


def _filters(rules: FilterRules) -> Filters | None:
    """None where nothing is filtered: most jobs do not, and load nothing for it."""
    if rules == FilterRules():
        return None
    from milldam.filters.judging import Filters

    return Filters(rules)


def drop_cleaned(batch: Batch) -> Batch:
    """What cleaning dropped, and what is empty."""
    return batch if batch.verdicts is None else batch.narrow(batch.verdicts, "clean")


class Judge:
    """The steps of one unit. A dataset that is a split of its own is used whole: neither filtered nor deduplicated."""

    def __init__(self, selection: Selection, rules: SetRules, splits: tuple[str, ...], unit: Unit) -> None:
        """`splits`: their names by number."""
        self._selection, self._set = selection, rules
        self._whole_split = None if rules.split is None or selection.staged else splits.index(rules.split)
        self._filters = _filters(selection.filters if rules.split is None else FilterRules())
        self._share, self._chooser = rules.share(unit.copy), Chooser(selection.seed, HEAD_BYTES)
        self._seen: SeenBefore | None = None
        if selection.seen is not None and rules.split is None:
            self._seen = selection.seen.open()
        self._drops: dict[str, DropSet] = {}
        """By stage."""
        if selection.drops is not None:
            from milldam.dedup.drops import EVALUATION, DropSet

            self._drops["dedup"] = DropSet(selection.drops, unit.origin)
            self._drops["decontaminate"] = DropSet(selection.drops, unit.origin, (EVALUATION,))

    def steps_on_texts(self) -> list[Step]:
        steps: list[Step] = [drop_cleaned]
        steps += [self._drop_seen] if self._seen is not None else []
        steps += [self._drop_decided] if self._drops else []
        steps += [self.sample] if self._share < 1 else []
        return [*steps, self._filter] if self._filters is not None and self._selection.filters.on_text else steps

    def _drop_seen(self, batch: Batch) -> Batch:
        assert self._seen is not None
        verdicts = Verdicts(len(batch.rows))
        self._seen.apply(self._set.compared(batch), batch.rows, verdicts)
        return batch.narrow(verdicts, "dedup")

    def _drop_decided(self, batch: Batch) -> Batch:
        for stage, drops in self._drops.items():
            verdicts = Verdicts(len(batch.rows))
            drops.apply(batch.rows, verdicts)
            batch = batch.narrow(verdicts, stage)
        return batch

    def sample(self, batch: Batch) -> Batch:
        """What a weight below 1 leaves out; also of the first piece of a document."""
        verdicts = Verdicts(len(batch.rows))
        verdicts.drop(~below(self._chooser.sample_keys(batch.texts), self._share), NOT_SAMPLED)
        return batch.narrow(verdicts, "sample")

    def _filter(self, batch: Batch) -> Batch:
        assert self._filters is not None
        verdicts = Verdicts(len(batch.rows))
        self._filters.judge(batch.texts, verdicts)
        return batch.narrow(verdicts, "filter")

    def judge_tokens(self, batch: Batch) -> Batch:
        """By how many tokens there are: of a pair, the longer side."""
        if self._filters is None:
            return batch
        verdicts = Verdicts(len(batch.rows))
        sides = 1 if batch.sides is None else batch.sides.count
        self._filters.judge_tokens(batch.lengths.reshape(-1, sides).max(axis=1, initial=0), verdicts)
        return batch.narrow(verdicts, "encode")

    def describe(self, batch: Batch) -> Batch:
        """The split and the facts of each document."""
        shares, staged = self._selection.shares, self._selection.staged
        by_prompt = self._set.chat is not None and self._set.chat.group_by_prompt and batch.prompts is not None
        keys = np.zeros(len(batch.texts), np.uint64)
        if staged or (shares and self._whole_split is None):
            keys = self._chooser.split_keys(batch.prompts if by_prompt else batch.texts)
        splits = np.full(len(keys), self._whole_split or 0)
        if shares and not staged and self._whole_split is None:
            splits = split_numbers(keys, shares)
        texts, each = batch.texts, 1
        if batch.sides is not None:
            texts, each = batch.sides.texts(batch.texts), batch.sides.count
        batch.splits, batch.facts = np.repeat(splits, each), np.empty(len(texts), FACTS)
        batch.facts["key"], batch.facts["text_bytes"] = np.repeat(keys, each), np.diff(text_offsets(texts))
        batch.facts["characters"] = character_counts(texts)
        return batch

    def explain(self, row: int, reason: str) -> dict[str, Any]:
        """What a dropped document duplicates, where that is why."""
        drops, folder = self._seen or self._drops.get("dedup"), self._selection.drops
        if drops is None:
            return {}
        from milldam.dedup.drops import DUPLICATES, NEAR_DUPLICATE

        of = drops.of(row) if reason in DUPLICATES else None
        if of is None:
            return {}
        like = {"similarity": of.similarity / 1000} if reason == NEAR_DUPLICATE else {}
        if of.indexed_run is not None:
            return {"duplicate_of": {"run": self._selection.seen_by[of.indexed_run]} | like}
        if of.unit is None or of.row is None or folder is None:
            return {"duplicate_of": None}
        place = found_place(folder, of.unit, of.row)
        return {"duplicate_of": place | {"unit": of.unit, "row": of.row} | like}
