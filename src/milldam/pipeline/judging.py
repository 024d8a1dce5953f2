"""What decides on the documents of a unit by their texts and tokens: duplicates, samples, filters, splits.

Arrays of a batch; counts what was dropped, by stage and reason.

Which split a document belongs to, and whether it is in a sample, follows from the hash of its text alone. So the choice
does not depend on where a document stands or on what else there is: it stays when data is added, and equal documents
always go together. The key of a document is the xxh3 of its first MiB.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.pipeline.documents import HEAD_BYTES, Documents, SetRules, found_place
from milldam.rules import CleanRules, FilterRules
from milldam.run.units import mixed
from milldam.sources.units import Unit
from milldam.stores.tokens.manifest import STAGES
from milldam.text.arrays import Mask, Verdicts, character_counts, text_offsets

if TYPE_CHECKING:
    from milldam.dedup.drops import DropSet
    from milldam.dedup.near_drops import Place
    from milldam.dedup.seen import PinnedIndex, SeenBefore
    from milldam.filters.judging import Filters

Keys = npt.NDArray[np.uint64]
_SAMPLE_SALT, _SPLIT_SALT = 0x5A3D, 0x591E


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
        _, offsets, data = texts.buffers()
        view = memoryview(data) if data is not None else memoryview(b"")
        edges = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
        digest, most = xxhash.xxh3_64_intdigest, self.head_bytes
        ranges = ((start, _head_end(view, start, stop, most)) for start, stop in itertools.pairwise(edges))
        return np.fromiter((digest(view[start:stop], seed) for start, stop in ranges), np.uint64, len(texts))


def _head_end(view: memoryview, start: int, stop: int, most: int) -> int:
    """Where the head of a text ends: after the last whole character within `most` bytes."""
    if stop - start <= most:
        return stop
    end = start + most
    while view[end] & 0xC0 == 0x80:
        end -= 1
    return end


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


NOT_SAMPLED = "not_sampled"


def no_drops() -> dict[str, Counter[str]]:
    """Counts by stage and reason, to begin with."""
    return {stage: Counter() for stage in STAGES}


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


FACTS = np.dtype([("key", "<u8"), ("text_bytes", "<i8"), ("characters", "<i8")])
"""How the facts of a document are kept until its place is known."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of some texts besides their tokens; an entry a text."""

    splits: npt.NDArray[np.int64]
    """Number of the split."""
    keys: npt.NDArray[np.uint64]
    text_bytes: npt.NDArray[np.int64]
    characters: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    """Where each text stood in its unit."""

    def at(self, positions: npt.NDArray[np.int64]) -> Facts:
        return Facts(
            self.splits[positions],
            self.keys[positions],
            self.text_bytes[positions],
            self.characters[positions],
            self.rows[positions],
        )

    def of_sides(self, texts: pa.LargeStringArray, count: int) -> Facts:
        """Those of the `count` texts that each text is made of."""
        each = self.at(np.repeat(np.arange(len(self.keys)), count))
        characters = character_counts(texts)
        return replace(each, text_bytes=np.diff(text_offsets(texts)), characters=characters)

    def as_table(self) -> npt.NDArray[Any]:
        table = np.empty(len(self.keys), dtype=FACTS)
        table["key"], table["text_bytes"], table["characters"] = self.keys, self.text_bytes, self.characters
        return table


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


class Judge:
    """Decides on the documents of a unit by their texts: duplicates, samples, filters, splits."""

    def __init__(self, selection: Selection, rules: SetRules, splits: tuple[str, ...], unit: Unit) -> None:
        """`splits`: their names by number."""
        self._whole_split = None if rules.split is None or selection.staged else splits.index(rules.split)
        # A dataset that is a split of its own is used whole.
        self._rules = selection.filters if rules.split is None else FilterRules()
        self._filters, self._set = _filters(self._rules), rules
        self._drops: DropSet | None = None
        self._removals: DropSet | None = None
        self._folder = selection.drops
        if selection.drops is not None:
            from milldam.dedup.drops import EVALUATION, DropSet

            self._drops = DropSet(selection.drops, unit.origin)
            self._removals = DropSet(selection.drops, unit.origin, (EVALUATION,))
        self.seen: SeenBefore | None = None
        # A dataset that is a split of its own is not deduplicated.
        if selection.seen is not None and rules.split is None:
            self.seen = selection.seen.open()
        self._share = rules.share(unit.copy)
        self._chooser = Chooser(selection.seed, HEAD_BYTES)
        self._shares, self._staged = selection.shares, selection.staged
        self._seen_by = selection.seen_by
        self.dropped = no_drops()

    def judge(self, documents: Documents) -> None:
        """By their texts."""
        texts, verdicts, first_row = documents.texts, documents.verdicts, documents.first_row
        self._book("clean", verdicts, Counter())
        if self.seen is not None:
            before = verdicts.counts()
            self.seen.apply(self._set.compared(documents), first_row, verdicts)
            self._book("dedup", verdicts, before)
        self._judge(texts, verdicts, first_row, None)

    def judge_head(self, head: pa.LargeStringArray, verdicts: Verdicts, row: int) -> None:
        """By the beginning of a document whose length is not known yet."""
        # A number of characters that no rule minds.
        any_length = np.array([self._rules.min_characters or self._rules.max_characters or 0])
        self._book("clean", verdicts, Counter())
        self._judge(head, verdicts, row, any_length)

    def _judge(self, texts: pa.LargeStringArray, verdicts: Verdicts, first_row: int, characters: Any) -> None:
        before = verdicts.counts()
        if self._drops is not None:
            self._drops.apply(first_row, verdicts)
            self._book("dedup", verdicts, before)
            before = verdicts.counts()
        if self._removals is not None:
            self._removals.apply(first_row, verdicts)
            self._book("decontaminate", verdicts, before)
            before = verdicts.counts()
        if self._share < 1:
            verdicts.drop(~below(self._chooser.sample_keys(texts), self._share), NOT_SAMPLED)
            self._book("sample", verdicts, before)
            before = verdicts.counts()
        keep = verdicts.keep
        if self._filters is not None and self._rules.on_text and keep.any():
            filtered = Verdicts(int(np.count_nonzero(keep)))
            self._filters.judge(texts.filter(pa.array(keep)), filtered, characters)
            verdicts.merge(filtered, keep)
            self._book("filter", verdicts, before)

    def judge_characters(self, characters: int) -> str | None:
        """A reason to drop a document whose length is known only now."""
        reason = None if self._filters is None else self._filters.character_fault(characters)
        if reason is not None:
            self.drop("filter", reason)
        return reason

    def judge_tokens(self, lengths: Any) -> Verdicts:
        verdicts = Verdicts(len(lengths))
        if self._filters is not None:
            self._filters.judge_tokens(lengths, verdicts)
        self.dropped["encode"] += verdicts.counts()
        return verdicts

    def drop(self, stage: str, reason: str) -> None:
        self.dropped[stage][reason] += 1

    def _book(self, stage: str, verdicts: Verdicts, before: Counter[str]) -> None:
        self.dropped[stage] += verdicts.counts() - before

    def facts(self, texts: pa.LargeStringArray, rows: Any, grouped: pa.LargeStringArray | None = None) -> Facts:
        """`grouped`: what decides on splits, where it is not the texts."""
        sizes = np.diff(text_offsets(texts))
        characters = character_counts(texts)
        keyed = self._staged or (self._shares and self._whole_split is None)
        by = texts if grouped is None else grouped
        keys = self._chooser.split_keys(by) if keyed else np.zeros(len(texts), dtype=np.uint64)
        return Facts(self._split_numbers(keys), keys, sizes, characters, rows)

    def _split_numbers(self, keys: Any) -> Any:
        if self._whole_split is not None:
            return np.full(len(keys), self._whole_split)
        return split_numbers(keys, self._shares) if self._shares and not self._staged else np.zeros(len(keys), np.int64)

    def explain(self, row: int, reason: str) -> dict[str, Any]:
        """What a dropped document duplicates, where that is why."""
        drops = self.seen or self._drops
        if drops is None:
            return {}
        from milldam.dedup.drops import DUPLICATES, NEAR_DUPLICATE

        of = drops.of(row) if reason in DUPLICATES else None
        if of is None:
            return {}
        like = {"similarity": of.similarity / 1000} if reason == NEAR_DUPLICATE else {}
        if of.indexed_run is not None:
            return {"duplicate_of": {"run": self._seen_by[of.indexed_run]} | like}
        if of.unit is None or of.row is None or self._folder is None:
            return {"duplicate_of": None}
        place = found_place(self._folder, of.unit, of.row)
        return {"duplicate_of": place | {"unit": of.unit, "row": of.row} | like}
