"""What a unit leaves, part by part: shards, rejected records, dropped documents, and the counts of all of them.

One part is open at a time; left without a commit, nothing of it stays. A document whose tokens come in pieces is
written as they come, and taken back where its end says so.

Shards are one per split, opened when the first document for it comes. Where splits and limits are exact in tokens,
documents are first put on one staged shard, with the facts that decide on each (see arranging.py): key, bytes and
characters of its text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from milldam.files import NewFile
from milldam.pipeline.documents import Assignment, place_of
from milldam.pipeline.judging import Facts, Judge
from milldam.pipeline.rejects import DROPPED, REJECTS, DroppedFile, RejectFile
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Files
from milldam.sources.batch import Mark, Reject
from milldam.stores.tokens.manifest import SHARD_FILES, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.text.arrays import Verdicts

if TYPE_CHECKING:
    from milldam.pipeline.tokenizing import TokenizeLoad

STAGED = "_staged"
"""No split can have this name."""
FACTS_ENDING = ".facts"


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
        self.discard()
        return sorted(shards, key=lambda shard: self._splits.index(shard.split))

    def files(self, shards: list[dict[str, Any]]) -> tuple[Files, Files]:
        """What a committed shelf has made, size and hash by name: for the result, and what is read again (all of a
        staged one)."""
        made = {f"{shard['name']}.{kind}": shard[kind] for shard in shards for kind in SHARD_FILES if shard.get(kind)}
        return (made, {}) if self._facts is None else ({}, {self._facts.path.name: self._facts_record} | made)

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        for writer in self._writers.values():
            writer.discard()
        if self._facts is not None:
            self._facts.discard()


@dataclass(frozen=True, slots=True)
class Committed:
    """A part that is durable."""

    shards: list[dict[str, Any]]
    outputs: Files
    files: Files
    """What is read again when the run finishes."""
    rejected: Counter[str]


class UnitOutput:
    """Use it as a context manager."""

    def __init__(self, task: TokenizeLoad, assignment: Assignment, judge: Judge) -> None:
        self._task, self._given, self._judge = task, assignment, judge
        self.part = assignment.parts
        """Number of the part that is open."""
        self.documents = 0
        """Of all parts."""
        self.counts: Counter[str] = Counter()
        """Of all parts: tokens, bytes, characters."""
        self.marks: tuple[Mark, ...] = ()
        """Where the documents at hand are from."""
        self._pieces: ShardWriter | None = None
        self._piece_tokens = 0
        self._open_part()

    def _open_part(self) -> None:
        name, folder = f"{self._given.key}-{self.part:05d}", self._task.out / RUN_FOLDER
        self._shelf = Shelf(self._task.out, name, self._task.splits, self._task.dtype)
        self._rejects = RejectFile(folder / f"{REJECTS}{name}.jsonl")
        dropped = folder / f"{DROPPED}{name}.jsonl.zst"
        self._dropped = DroppedFile(dropped) if self._task.selection.write_dropped else None

    def __enter__(self) -> UnitOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._shelf.discard()
        self._rejects.discard()
        if self._dropped is not None:
            self._dropped.discard()

    @property
    def text_bytes(self) -> int:
        """Of the part that is open."""
        return self._shelf.text_bytes

    def add(self, tokens: Tokens, facts: Facts) -> None:
        """Whole documents."""
        if len(tokens.lengths):
            self._shelf.add(tokens, facts)
        self._count(len(tokens.lengths), len(tokens.flat), facts)

    def _count(self, documents: int, tokens: int, facts: Facts) -> None:
        self.documents += documents
        text_bytes, characters = int(facts.text_bytes.sum()), int(facts.characters.sum())
        self.counts += Counter(tokens=tokens, text_bytes=text_bytes, characters=characters)

    @property
    def in_pieces(self) -> bool:
        """Whether a document is open of which more pieces come."""
        return self._pieces is not None

    def add_piece(self, tokens: Tokens, facts: Facts) -> str | None:
        """A piece of a document whose tokens come in several; at its end, why it is dropped if it is."""
        if self._pieces is None:
            self._pieces, self._piece_tokens = self._shelf.writer(int(facts.splits[0])), 0
            self._pieces.mark()
        writer = self._pieces
        self._piece_tokens += len(tokens.flat)
        if tokens.open:
            writer.append(tokens)
            return None
        self._pieces = None
        reason = self._judge.judge_tokens(np.array([self._piece_tokens])).reason(0)
        if reason is not None:
            writer.cancel()
            return reason
        writer.append(tokens)
        writer.count_text(int(facts.text_bytes[0]), int(facts.characters[0]))
        self._shelf.note(facts)
        self._count(1, self._piece_tokens, facts)
        return None

    def take_back(self) -> None:
        """Forget the pieces of the document that is open."""
        if self._pieces is not None:
            self._pieces.cancel()
            self._pieces = None

    def reject(self, reject: Reject) -> None:
        self._rejects.add(reject)

    def set_aside(self, texts: pa.LargeStringArray, verdicts: Verdicts, rows: Any) -> None:
        """Write the dropped ones of some texts out, where they are wanted."""
        if self._dropped is not None:
            for position in np.flatnonzero(~verdicts.keep).tolist():
                self.drop(texts[position].as_py(), str(verdicts.reason(position)), int(rows[position]))

    def drop(self, text: str, reason: str, row: int, *, truncated: bool = False) -> None:
        if self._dropped is not None:
            unit = self._given.unit
            place = place_of(self.marks, unit, row) | {"unit": unit.index, "row": row}
            cut = {"text_truncated": True} if truncated else {}
            self._dropped.add({"reason": reason, **self._judge.explain(row, reason), **place, "text": text, **cut})

    def commit(self) -> Committed:
        """Make the open part durable, and open the next one."""
        shards = [asdict(shard) for shard in self._shelf.commit()]
        aside = self._rejects.commit() | (self._dropped.commit() if self._dropped is not None else {})
        outputs, staged = self._shelf.files(shards)
        files = {f"{RUN_FOLDER}/{name}": file for name, file in aside.items()} | staged
        committed = Committed(shards, outputs, files, self._rejects.counts)
        self.part += 1
        self._open_part()
        return committed
