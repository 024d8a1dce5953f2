"""The sink of the second pass: what a unit leaves, part by part.

A part is a shard for each split, opened when the first document for it comes, and the records and documents that were
set aside. One part is open at a time; left without a commit, nothing of it stays.

Where splits and limits are exact in tokens, documents are first put on one staged shard, with the facts that decide on
each (see arranging.py): key, bytes and characters of its text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.files import NewFile
from milldam.pipeline.documents import HEAD_BYTES, place_of
from milldam.pipeline.rejects import DROPPED, REJECTS, DroppedFile, RejectFile
from milldam.run.engine import Assigned
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Files, Record
from milldam.sources.batch import Batch
from milldam.stores.tokens.manifest import READ, SHARD_FILES
from milldam.stores.tokens.writer import ShardWriter, Tokens

if TYPE_CHECKING:
    from milldam.pipeline.tokenizing import TokenizeLoad

STAGED = "_staged"
"""No split can have this name."""
FACTS_ENDING = ".facts"


class SplitShards:
    """A shard for each split; use it as a context manager: left without a commit, nothing stays."""

    def __init__(self, folder: Path, name: str, splits: tuple[str, ...], dtype: str) -> None:
        """`name`: of the part, for what is not named after its content. `splits`: their names by number."""
        self._folder, self._splits, self._dtype, self.text_bytes = folder, splits, dtype, 0
        self._writers: dict[int, ShardWriter] = {}
        self._facts = NewFile(folder / f"{STAGED}-{name}{FACTS_ENDING}") if splits == (STAGED,) else None

    def add(self, batch: Batch) -> None:
        """Documents, each to its split."""
        assert batch.ids is not None and batch.facts is not None
        tokens = Tokens(batch.ids, batch.lengths, spans=batch.spans)
        # Not by np.unique, which loads numpy.ma.
        for split in np.flatnonzero(np.bincount(batch.splits)).tolist():
            which = batch.splits == split
            if split not in self._writers:
                self._writers[split] = ShardWriter(self._folder, self._splits[split], self._dtype)
            writer, facts = self._writers[split], batch.facts[which]
            writer.append(tokens.only(which), int(facts["text_bytes"].sum()), int(facts["characters"].sum()))
        self.text_bytes += int(batch.facts["text_bytes"].sum())
        if self._facts is not None:
            self._facts.write(batch.facts.tobytes())

    def commit(self) -> tuple[list[dict[str, Any]], Files, Files]:
        """Make everything durable: the shards; files of the result, and what is read again (all of a staged one)."""
        again = {} if self._facts is None else {self._facts.path.name: self._facts.commit()}
        shards = [asdict(self._writers[split].commit()) for split in sorted(self._writers)]
        files = {f"{one['name']}.{kind}": one[kind] for one in shards for kind in SHARD_FILES if one.get(kind)}
        return (shards, files, {}) if self._facts is None else (shards, {}, again | files)

    def __enter__(self) -> SplitShards:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers.values():
            writer.discard()
        if self._facts is not None:
            self._facts.discard()


class UnitSink:
    """Use it as a context manager. `explain`: more to tell of a dropped document, by its row and reason."""

    def __init__(self, load: TokenizeLoad, assigned: Assigned, explain: Callable[[int, str], dict[str, Any]]) -> None:
        self._load, self._assigned, self._explain = load, assigned, explain
        self._part, self.documents = assigned.next_part, 0
        """Documents of all parts."""
        self._rows = self._origins = np.empty(0, np.int64)
        self._last_batch = 0
        self._open_part()

    def _open_part(self) -> None:
        name, folder = f"{self._assigned.key}-{self._part:05d}", self._load.out / RUN_FOLDER
        self._shards = SplitShards(self._load.out, name, self._load.splits, self._load.dtype)
        self._rejects = RejectFile(folder / f"{REJECTS}{name}.jsonl")
        self._dropped = DroppedFile(folder / f"{DROPPED}{name}.jsonl.zst") if self._load.config.write_dropped else None
        self._counts, self._lost, self._read = Counter[str](), dict[str, Counter[str]](), 0
        """Of this part: what is counted on the way; documents dropped, by stage and reason; documents read."""

    @property
    def is_full(self) -> bool:
        return self._shards.text_bytes >= self._load.shard_size

    def begin(self, batch: Batch) -> None:
        """Take what comes with a batch, whatever becomes of its documents."""
        self._last_batch = batch.number
        if batch.origins is not None:
            self._rows, self._origins = batch.rows, batch.origins
        for reject in batch.rejects:
            self._rejects.add(reject)

    def add(self, batch: Batch) -> dict[str, int]:
        """Documents, and those that were dropped on the way; what is counted of them."""
        self._counts.update(batch.counts)
        for stage, reason, rows, _, _ in batch.dropped:
            self._read += len(rows)
            self._lost.setdefault(stage, Counter())[reason] += len(rows)
        if self._dropped is not None:
            each = [
                (stage == "encode", int(row), reason, texts[place].as_py())
                for stage, reason, rows, texts, places in batch.dropped
                for row, place in zip(rows, places, strict=True)
            ]
            for _, row, reason, text in sorted(each, key=lambda drop: drop[:2]):
                unit = self._assigned.unit
                origin = int(self._origins[np.searchsorted(self._rows, row)])
                where = place_of(unit, origin) | {"unit": unit.index, "row": row}
                entry = {"reason": reason, **self._explain(row, reason), **where, "text": text}
                if batch.pieces is not None:
                    entry |= {"text": text[:HEAD_BYTES], "text_truncated": True}
                self._dropped.add_document(entry)
        if batch.ids is None or batch.facts is None or not len(batch.rows):
            return {}
        self._shards.add(batch)
        self._read, self.documents = self._read + len(batch.rows), self.documents + len(batch.lengths)
        sums = {name: int(batch.facts[name].sum()) for name in ("text_bytes", "characters")}
        return {"documents": len(batch.lengths), "tokens": len(batch.ids), **sums}

    def commit(self, *, last: bool) -> Record:
        """Make the open part durable, and open the next one. Of a part that is not the last, the batch at hand is in
        the next one."""
        shards, outputs, files = self._shards.commit()
        self._shards.__exit__()
        aside = self._rejects.commit() | ({} if self._dropped is None else self._dropped.commit())
        lost = self._lost | ({READ: self._rejects.counts} if self._rejects.counts else {})
        facts: dict[str, Any] = {
            "shards": shards,
            "read": self._read,
            "dropped": {stage: dict(counts) for stage, counts in lost.items()},
            "batches": self._last_batch,
            "dataset": self._assigned.unit.dataset,
        }
        counts = +self._counts
        facts |= {name: counts.pop(name) for name in ("exact_documents", "not_judged") if name in counts}
        chat = self._load.sets[self._assigned.unit.dataset].chat
        if chat is not None:
            facts |= {"chat": dict(counts), "sides": chat.sides}
        record = Record(
            self._assigned.key,
            self._part,
            last,
            outputs=outputs,
            files={f"{RUN_FOLDER}/{name}": file for name, file in aside.items()} | files,
            counts={name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "text_bytes")},
            facts=facts,
        )
        self._part += 1
        self._open_part()
        return record

    def __enter__(self) -> UnitSink:
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.__exit__()
        for aside in (self._rejects, self._dropped):
            if aside is not None:
                aside.__exit__()
