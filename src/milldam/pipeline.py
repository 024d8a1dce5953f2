"""The order of the stages, for one unit: read -> encode -> write. This is the one file that knows it.

Runs in a worker. Holds one batch. A unit gives one shard; a stream that can't be cut beforehand gives several, each
closed at the first batch after `shard_size` bytes of text. What is committed is reported at once, and never made
again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.executors import PART, PROGRESS, Report
from milldam.files import NewFile
from milldam.memory import usage
from milldam.planning import cache_limit
from milldam.prefetch import prefetched
from milldam.run import RUN_FOLDER, PartRecord
from milldam.sources.arrays import byte_count, character_count
from milldam.sources.batch import Batch, Reject, TextRules
from milldam.sources.reading import read_unit
from milldam.sources.units import Unit
from milldam.store import ShardWriter
from milldam.tokenizers.encoder import Encoder, bare_form
from milldam.tokenizers.engines import HUGGINGFACE, Engine, FrugalEngine, make_engine
from milldam.tokenizers.special import SpecialTokens

REPORT_SECONDS = 0.25
READ_AHEAD = 4

_Read = tuple[Batch | None, list[Reject]]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A unit, and how much of it is done already."""

    unit: Unit
    parts: int = 0
    batches: int = 0
    documents: int | None = None
    """Take at most so many documents; None: all."""


@dataclass(frozen=True, slots=True)
class TokenizeTask:
    """What every worker needs to know; it pickles."""

    out: Path
    rules: TextRules
    engine: str
    plain_specials: bool
    special: SpecialTokens
    dtype: str
    shard_size: int
    share_bytes: int
    """Anonymous memory that this worker may use."""
    threads: int

    def start(self) -> UnitTokenizer:
        return UnitTokenizer(self)


class UnitTokenizer:
    """A worker's state: the engine, loaded once."""

    def __init__(self, task: TokenizeTask) -> None:
        self._task = task
        tokenizer_json = (task.out / "tokenizer.json").read_text(encoding="utf-8")
        engine = self._make(task.engine, tokenizer_json)
        # Always by HF tokenizers: it is needed for giant documents alone, and knows every kind.
        self._bare = bare_form(tokenizer_json, partial(self._make, HUGGINGFACE))
        self._engine = FrugalEngine(engine, cache_limit(task.share_bytes, usage().anonymous))

    def _make(self, engine: str, tokenizer_json: str) -> Engine:
        plain = self._task.plain_specials
        return make_engine(engine, tokenizer_json, plain_specials=plain, threads=self._task.threads)

    def _make_encoder(self) -> Encoder:
        return Encoder(self._engine, self._task.special, self._task.dtype, bare=self._bare)

    def __call__(self, assignment: Assignment, report: Report) -> None:
        with _UnitWork(self._task, assignment, self._make_encoder(), report) as work:
            work.run()


class _UnitWork:
    """One unit on its way through the stages."""

    def __init__(self, task: TokenizeTask, assignment: Assignment, encoder: Encoder, report: Report) -> None:
        self._task, self._given, self._encoder, self._report = task, assignment, encoder, report
        self._part = assignment.parts
        self._writer: ShardWriter | None = None
        self._rejects = self._new_rejects()
        self._batch_number = 0
        self._documents = 0
        self._inside = False
        self._counts: Counter[str] = Counter()
        self._seconds = {"read": 0.0, "encode": 0.0, "write": 0.0}
        self._reported = time.monotonic()

    def __enter__(self) -> _UnitWork:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)
        self._rejects.discard()

    def _new_rejects(self) -> _Rejects:
        return _Rejects(self._task.out / RUN_FOLDER, self._given.unit.index, self._part)

    def run(self) -> None:
        for batch, rejects in self._timed(self._batches()):
            # What was rejected on the way to the batch after a finished part was recorded with that part.
            if self._batch_number > self._given.batches or self._given.batches == 0:
                for reject in rejects:
                    self._rejects.add(reject)
            if batch is None:
                break
            self._batch_number += 1
            if self._batch_number <= self._given.batches:
                continue
            if not self._inside and self._writer is not None and self._writer.text_bytes >= self._task.shard_size:
                self._commit(last=False)
            self._work_on(batch)
            if self._enough():
                break
        self._commit(last=True)

    def _batches(self) -> Iterator[tuple[Batch | None, list[Reject]]]:
        """Each batch with what was rejected on the way to it; at the end None with the last rejects."""
        rejects: list[Reject] = []
        spool = str(self._task.out / RUN_FOLDER)
        for batch in read_unit(self._given.unit, self._task.rules, rejects.append, spool):
            yield batch, rejects.copy()
            rejects.clear()
        yield None, rejects

    def _timed(self, batches: Iterator[_Read]) -> Iterator[_Read]:
        # With cores to spare, reading goes on in a thread while the engine, which holds no lock, encodes.
        if self._task.threads > 1:
            batches = prefetched(batches, READ_AHEAD)
        while True:
            started = time.perf_counter()
            read = next(batches, None)
            self._seconds["read"] += time.perf_counter() - started
            if read is None:
                return
            yield read

    def _work_on(self, batch: Batch) -> None:
        if batch.cancel:
            self._encoder.cancel()
            if self._writer is not None:
                self._writer.cancel()
            self._inside = False
        elif len(batch.texts):
            writer = self._open_writer()
            if batch.open and not self._inside:
                writer.mark()
            self._inside = batch.open
            for texts in self._within_limit(batch.texts):
                self._encode(texts, writer, open=batch.open)
        self._counts["input_bytes"] += batch.bytes_read
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._send_progress()

    def _open_writer(self) -> ShardWriter:
        if self._writer is None:
            part = f"-{self._part:03d}" if self._part else ""
            name = f"train-{self._given.unit.index:05d}{part}"
            self._writer = ShardWriter(self._task.out, name, "train", self._task.dtype)
        return self._writer

    def _within_limit(self, texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
        """As many documents as may still be taken; those that turn out empty make room for others."""
        while len(texts) and not self._enough():
            taken = len(texts) if self._given.documents is None else self._given.documents - self._documents
            yield texts[:taken]
            texts = texts[taken:]

    def _encode(self, texts: pa.LargeStringArray, writer: ShardWriter, *, open: bool) -> None:
        started = time.perf_counter()
        for tokens in self._encoder.encode(texts, open=open):
            encoded = time.perf_counter()
            self._seconds["encode"] += encoded - started
            before = writer.documents
            writer.append(tokens)
            self._documents += writer.documents - before
            self._counts["tokens"] += len(tokens.flat)
            started = time.perf_counter()
            self._seconds["write"] += started - encoded
        text_bytes, characters = byte_count(texts), character_count(texts)
        writer.count_text(text_bytes, characters)
        self._counts += Counter(text_bytes=text_bytes, characters=characters)
        self._seconds["encode"] += time.perf_counter() - started

    def _enough(self) -> bool:
        return self._given.documents is not None and self._documents >= self._given.documents

    def _commit(self, *, last: bool) -> None:
        started = time.perf_counter()
        shard = None
        if self._writer is not None:
            with self._writer as writer:
                shard = asdict(writer.commit()) if writer.documents else None
        self._seconds["write"] += time.perf_counter() - started
        self._rejects.commit()
        dropped = dict(self._encoder.dropped + self._rejects.counts)
        record = PartRecord(
            unit=self._given.unit.index,
            part=self._part,
            shard=shard,
            dropped=dropped,
            batches=self._batch_number - (not last),
            last=last,
            inexact_cuts=self._encoder.take_inexact_cuts(),
        )
        self._send_progress()
        self._report(PART, record)
        self._encoder.dropped.clear()
        self._writer, self._part = None, self._part + 1
        self._rejects = self._new_rejects()

    def _send_progress(self) -> None:
        self._reported = time.monotonic()
        counts = dict(self._counts) | {"documents": self._documents}
        told = {"counts": counts, "seconds": dict(self._seconds), "anonymous_bytes": usage().anonymous}
        self._report(PROGRESS, told)


class _Rejects:
    """Rejected records of one part, in a file of their own that appears when the part is committed."""

    def __init__(self, folder: Path, unit: int, part: int) -> None:
        self._path = folder / f"rejects-{unit:07d}-{part:05d}.jsonl"
        self._file: NewFile | None = None
        self.counts: Counter[str] = Counter()

    def add(self, reject: Reject) -> None:
        if self._file is None:
            self._file = NewFile(self._path)
        self.counts[reject.reason] += 1
        self._file.write((json.dumps(reject.as_json()) + "\n").encode())

    def commit(self) -> None:
        if self._file is not None:
            self._file.commit()

    def discard(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
