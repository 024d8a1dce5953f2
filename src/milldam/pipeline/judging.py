"""Judging the documents of a unit by their texts and tokens: duplicates, samples, filters, splits.

Which split a document belongs to, and whether it is sampled, follows from the hash of its text alone. So the choice
does not depend on where a document stands or on what else there is: it stays when data is added, and equal documents
always go together. The key of a document is the xxh3 of its first MiB. A document in pieces is neither filtered nor
compared with others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.pipeline.documents import HEAD_BYTES, SetRules, recorded_place
from milldam.rules import CleanRules, FilterRules
from milldam.run.units import mixed
from milldam.sources.batch import Batch
from milldam.sources.units import Unit
from milldam.text.arrays import Mask, Verdicts, character_counts, text_offsets

if TYPE_CHECKING:
    from milldam.dedup.drops import DropSet
    from milldam.filters.judging import Filters
    from milldam.pipeline.tokenizing import TokenizeLoad

Keys = npt.NDArray[np.uint64]
SAMPLE, SPLIT = 0x5A3D, 0x591E
"""Salts of the keys that samples and splits go by."""
NOT_SAMPLED = "not_sampled"
FACTS = np.dtype([("key", "<u8"), ("text_bytes", "<i8"), ("characters", "<i8")])
"""Facts of a document besides its tokens; kept until the place of the document is known."""


def content_keys(texts: pa.LargeStringArray, seed: int, salt: int, head_bytes: int = HEAD_BYTES) -> Keys:
    """The hash of the beginning of each text."""
    seed = (seed << 16 ^ salt) & (2**64 - 1)
    data, digest = texts.buffers()[2], xxhash.xxh3_64_intdigest
    view = memoryview(b"" if data is None else data)

    def head(start: int, stop: int) -> memoryview:
        """The whole characters within `head_bytes`."""
        end = min(stop, start + head_bytes)
        while end < stop and view[end] & 0xC0 == 0x80:
            end -= 1
        return view[start:end]

    edges = itertools.pairwise(text_offsets(texts).tolist())
    return np.fromiter((digest(head(start, stop), seed) for start, stop in edges), np.uint64, len(texts))


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
    """The judging steps of one unit. A dataset that is a split of its own is used whole: neither filtered nor
    deduplicated."""

    def __init__(self, load: TokenizeLoad, rules: SetRules, unit: Unit) -> None:
        self._load, self._set, self._share = load, rules, rules.share(unit.copy)
        self._whole_split = None if rules.split is None or load.config.counts_tokens else load.splits.index(rules.split)
        self._filters = _filters(load.config.filters) if rules.split is None else None
        self._seen = load.open_index() if rules.split is None else None
        self._drops: dict[str, DropSet] = {}
        """By stage."""
        if load.drops is not None:
            from milldam.dedup.drops import DEDUP, EVALUATION, DropSet

            for stage, ways in (("dedup", DEDUP), ("decontaminate", (EVALUATION,))):
                self._drops[stage] = DropSet(load.drops, unit.origin, ways)

    def judge_texts(self, batch: Batch) -> Batch:
        """Drop what cleaning dropped, duplicates, what is not in the sample, and what filters drop."""
        in_pieces = batch.pieces is not None
        if batch.verdicts is not None:
            batch = batch.narrow(batch.verdicts, "clean")
        if self._seen is not None and not in_pieces:
            verdicts = Verdicts(len(batch.rows))
            self._seen.apply(self._set.compared(batch), batch.rows, verdicts)
            batch = batch.narrow(verdicts, "dedup")
        for stage, drops in self._drops.items():
            verdicts = Verdicts(len(batch.rows))
            drops.apply(batch.rows, verdicts)
            batch = batch.narrow(verdicts, stage)
        if self._share < 1:
            verdicts = Verdicts(len(batch.rows))
            verdicts.drop(~below(content_keys(batch.texts, self._load.config.seed, SAMPLE), self._share), NOT_SAMPLED)
            batch = batch.narrow(verdicts, "sample")
        if self._filters is not None and self._load.config.filters.on_text and not in_pieces:
            verdicts = Verdicts(len(batch.rows))
            self._filters.judge(batch.texts, verdicts)
            batch = batch.narrow(verdicts, "filter")
        return batch

    def judge_tokens(self, batch: Batch) -> Batch:
        """By how many tokens there are: of a pair, the longer side."""
        if self._filters is None or batch.pieces is not None:
            return batch
        verdicts = Verdicts(len(batch.rows))
        sides = 1 if batch.sides is None else batch.sides.count
        self._filters.judge_tokens(batch.lengths.reshape(-1, sides).max(axis=1, initial=0), verdicts)
        return batch.narrow(verdicts, "encode")

    def describe(self, batch: Batch) -> Batch:
        """The split and the facts of each document."""
        config = self._load.config
        shares = config.split_shares if self._whole_split is None else {}
        by_prompt = self._set.chat is not None and self._set.chat.group_by_prompt and batch.prompts is not None
        keys, splits = np.zeros(len(batch.texts), np.uint64), np.full(len(batch.texts), self._whole_split or 0)
        if config.counts_tokens or shares:
            keys = content_keys(batch.prompts if by_prompt else batch.texts, config.seed, SPLIT)
        if shares and not config.counts_tokens:
            splits = split_numbers(keys, shares)
        texts, each = batch.texts, 1
        if batch.sides is not None:
            texts, each = batch.sides.texts(batch.texts), batch.sides.count
        batch.splits, batch.facts = np.repeat(splits, each), np.empty(len(texts), FACTS)
        batch.facts["key"], batch.facts["text_bytes"] = np.repeat(keys, each), np.diff(text_offsets(texts))
        batch.facts["characters"] = character_counts(texts)
        if batch.text_size is not None:
            batch.facts["text_bytes"], batch.facts["characters"] = batch.text_size
        return batch

    def explain(self, row: int, reason: str) -> dict[str, Any]:
        """The document that a dropped one duplicates, where that is why."""
        drops, folder = self._seen or self._drops.get("dedup"), self._load.drops
        if drops is None:
            return {}
        from milldam.dedup.drops import DUPLICATES, NEAR_DUPLICATE

        of = drops.of(row) if reason in DUPLICATES else None
        if of is None:
            return {}
        like = {"similarity": of.similarity / 1000} if reason == NEAR_DUPLICATE else {}
        if of.indexed_run is not None:
            return {"duplicate_of": {"run": list(self._load.seen)[of.indexed_run]} | like}
        if of.unit is None or of.row is None or folder is None:
            return {"duplicate_of": None}
        return {"duplicate_of": recorded_place(folder, of.unit, of.row) | {"unit": of.unit, "row": of.row} | like}
