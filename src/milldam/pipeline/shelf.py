"""The shards of one part of a unit: one per split, opened when the first document for it comes.

Where splits and limits are exact in tokens, documents are first put on one staged shard, with the facts that decide
on each (see arranging.py): key, bytes and characters of its text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.files import NewFile
from milldam.run.records import Files
from milldam.stores.tokens import ShardWriter
from milldam.stores.tokens.manifest import SHARD_FILES, Shard
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import character_counts, text_offsets

STAGED = "_staged"
"""No split can have this name."""
FACTS_ENDING = ".facts"
FACTS = np.dtype([("key", "<u8"), ("text_bytes", "<i8"), ("characters", "<i8")])


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


class Shelf:
    """Use it as a context manager; left without a commit, nothing stays."""

    def __init__(self, folder: Path, name: str, splits: tuple[str, ...], dtype: str) -> None:
        """`name`: of the part, for what is not named after its content. `splits`: their names by number."""
        self._folder, self._splits, self._dtype = folder, splits, dtype
        self._writers: dict[str, ShardWriter] = {}
        self._facts = NewFile(folder / f"{STAGED}-{name}{FACTS_ENDING}") if splits == (STAGED,) else None

    @property
    def text_bytes(self) -> int:
        return sum(writer.text_bytes for writer in self._writers.values())

    def writer(self, split: int) -> ShardWriter:
        name = self._splits[split]
        if name not in self._writers:
            self._writers[name] = ShardWriter(self._folder, name, self._dtype)
        return self._writers[name]

    def add(self, tokens: Tokens, facts: Facts) -> None:
        """Whole documents, each to its split; `facts` has an entry for each."""
        # Not by np.unique, which loads numpy.ma.
        for split in np.flatnonzero(np.bincount(facts.splits)).tolist():
            which = facts.splits == split
            writer = self.writer(split)
            writer.append(tokens.only(which))
            writer.count_text(int(facts.text_bytes[which].sum()), int(facts.characters[which].sum()))
        self.note(facts)

    def note(self, facts: Facts) -> None:
        """Keep the facts of documents that were added, where they are needed later."""
        if self._facts is not None:
            self._facts.write(facts.as_table().tobytes())

    def commit(self) -> list[Shard]:
        """Make everything durable; the shards that hold a document."""
        if self._facts is not None:
            self._facts_record = self._facts.commit()
        shards = [writer.commit() for writer in self._writers.values() if writer.documents]
        self.__exit__(None, None, None)
        return sorted(shards, key=lambda shard: self._splits.index(shard.split))

    def files(self, shards: list[dict[str, Any]]) -> tuple[Files, Files]:
        """What a committed shelf has made, size and hash by name: for the result, and what is read again (all of a
        staged one)."""
        made = {f"{shard['name']}.{kind}": shard[kind] for shard in shards for kind in SHARD_FILES if shard.get(kind)}
        return (made, {}) if self._facts is None else ({}, {self._facts.path.name: self._facts_record} | made)

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._writers.values():
            writer.__exit__(kind, error, trace)
        if self._facts is not None:
            self._facts.__exit__(kind, error, trace)
