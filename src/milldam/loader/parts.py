"""What a feed is made of: parts of units, which a finished store has, or which are still to be made.

A unit of the plan leaves one part, or several where it is a stream that can't be cut (docs/decisions/0006); a part is
at most one shard for each split. The order in which a feed brings samples is defined over units and parts
(`unit_order`), so whoever implements `Parts` decides when a part is there, never which one comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from milldam.loader.stores import Store, token_file
from milldam.loader.stream import TokenFile
from milldam.stores.kinds import result_id
from milldam.stores.place import Place
from milldam.stores.tokens.manifest import Shard


@dataclass(frozen=True, slots=True)
class Part:
    """What a part of a unit left."""

    files: Mapping[str, TokenFile]
    """Its shard by split; a split that it has nothing of is missing."""
    last: bool
    """No part of this unit follows."""


@dataclass(frozen=True, slots=True)
class FeedFacts:
    """What is known of the data as soon as it is planned."""

    name: str
    """What messages call it: the path of the store."""
    identity: str
    """`result_id` of settings and input: equal ones mean equal parts."""
    units: int
    """How many units the plan has."""
    splits: tuple[str, ...]
    """Every split that was asked for, train first, whether or not a document went there."""
    dtype: np.dtype[Any]
    vocab_size: int
    """Every token id is less than this."""
    rows: Path
    """Folder for the rows of best-fit packing."""
    pad_id: int = 0
    tokenizer: str | None = None
    """Names the tokenizer by content."""
    in_order: bool = False
    """While it is made, units come in the order of the plan alone."""
    chat: bool = False
    """Conversations, which say what is trained on."""
    pairs: bool = False
    """Documents 2k and 2k + 1 of a part are the chosen and the rejected one of a pair."""


class Parts(Protocol):
    """The parts of a plan's units. Used by any number of threads; pickles, and what is unpickled only reads."""

    @property
    def facts(self) -> FeedFacts: ...

    def part(self, unit: int, number: int) -> Part:
        """Part `number` of a unit. Waits until it is made; raises what went wrong, in words.

        Whatever was wanted, this unit is now wanted first: several orders may share these parts. Parts of a unit are
        asked for in order, but not always from the first on: a state may begin in the middle.
        """

    def want(self, units: Sequence[int]) -> None:
        """The units that are needed next, in this order. Replaces what was wanted before."""

    def finished(self) -> Place | None:
        """The store, once all units are made."""

    def stats(self) -> dict[str, float]:
        """What tokenizing took and how far ahead it is; empty for a finished store."""

    def close(self) -> None:
        """Stop making. What was made stays."""


def splits_asked(settings: Mapping[str, Any], found: Sequence[str]) -> tuple[str, ...]:
    """The splits of a plan by its settings; of a store that was not made from text, those that it has.

    >>> splits_asked({"datasets": [{}], "splits": {"test_tokens": 1000}, "validation": [{}]}, ["train"])
    ('train', 'test', 'val')
    """
    if "datasets" not in settings:
        return tuple(found)
    named = [name.removesuffix("_tokens") for name in settings["splits"]]
    return tuple(dict.fromkeys(["train", *sorted([*named, *(["val"] if settings["validation"] else [])])]))


class FinishedParts:
    """The parts of a store: nothing is made, so nothing waits. Holds an entry for each part besides the manifest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        manifest = store.manifest
        self._shards: dict[tuple[int, int], list[Shard]] = {}
        self._last: dict[int, int] = {}
        """The last part of each unit that left any."""
        for number, shard in enumerate(manifest.shards):
            unit, part = (number, 0) if shard.unit is None else (shard.unit, shard.part or 0)
            self._shards.setdefault((unit, part), []).append(shard)
            self._last[unit] = max(part, self._last.get(unit, 0))
        made_from_text = "datasets" in manifest.settings
        self.facts = FeedFacts(
            name=store.name,
            identity=result_id(manifest.settings, manifest.input) if made_from_text else manifest.fingerprint,
            units=len(manifest.shards) if manifest.units is None else manifest.units,
            splits=splits_asked(manifest.settings, manifest.splits),
            dtype=store.dtype,
            vocab_size=manifest.vocab_size,
            rows=store.place.rows,
            pad_id=manifest.tokenizer.get("eos") or 0,
            tokenizer=manifest.tokenizer.get("xxh3"),
            chat=manifest.chat is not None,
            pairs=manifest.chat is not None and manifest.chat["pairs"],
        )

    def part(self, unit: int, number: int) -> Part:
        shards = self._shards.get((unit, number), ())
        files = {shard.split: token_file(self._store.place, shard) for shard in shards}
        # Parts without a document at the end of a unit left no trace.
        return Part(files, last=number >= self._last.get(unit, 0))

    def want(self, units: Sequence[int]) -> None:
        """All are there."""

    def finished(self) -> Place:
        return self._store.place

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing is made."""

    def __reduce__(self) -> tuple[Any, ...]:
        return FinishedParts, (self._store,)
