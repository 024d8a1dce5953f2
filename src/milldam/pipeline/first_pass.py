"""What dedup and decontamination read of a unit before the second pass: each document once, those in pairs once more.

`FirstPass`: every document is read and cleaned, and leaves its hash, signature, preference and matches with evaluation
sets, each kind in a file of the unit. `Shingling`: the documents that may be alike leave their shingles; what filters
will drop leaves none, so that no document is dropped for one that does not stay. (Filters by tokens are not asked:
nothing is encoded yet.)

A worker holds one batch, and a bounded number of hashes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.decontamination.index import Index
from milldam.decontamination.letters import letter_tables
from milldam.decontamination.matches import MatchFinder, Scanner
from milldam.dedup import candidates
from milldam.dedup.candidates import NearWork, marked_rows
from milldam.dedup.fingerprints import FingerprintWriter, fingerprint
from milldam.dedup.minhash import NO_WORDS, MinHasher, SignatureFiles, unit_name
from milldam.dedup.preferred import Floats, ValueField
from milldam.dedup.sketches import Sketcher, SketchWriter, sketch_paths
from milldam.files import NewFile
from milldam.filters.judging import Filters
from milldam.pipeline.documents import (
    SetRules,
    keep_batches,
    kept_batches,
    place_of,
    print_path,
    read_documents,
)
from milldam.pipeline.judging import SAMPLE, below, content_keys
from milldam.rules import CleanRules, DedupRules, FilterRules, NearRules
from milldam.run.engine import Assigned, Make, Progress
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.sources.batch import Batch
from milldam.text.arrays import Verdicts, text_offsets
from milldam.text.cleaning import Cleaner

PRINTS = "prints"
"""The folder of what the first pass leaves, in the run folder."""
_SKIPPED_AT_ONCE = 4096
_LONGEST = (1 << 28) - 1
"""In bytes; longer documents count as this long, so that a length and a number of a document fit into 64 bits."""
_LAST = np.uint64((1 << 64) - 1)


def _whole(batch: Batch) -> Batch:
    """A document in pieces is compared with none: it has no text here, and is dropped."""
    if batch.pieces is not None and batch.verdicts is not None and len(batch.texts):
        batch.texts, batch.pieces = pa.array([""], pa.large_string()), None
        batch.verdicts.drop_one(0, "not_judged")
    return batch


@dataclass(frozen=True, slots=True)
class FirstPass:
    """A unit to files of what is known of its documents, in `run/prints`, under the unit's key."""

    out: Path
    sets: tuple[SetRules, ...]
    clean: CleanRules | None
    rules: DedupRules
    threads: int
    seed: int
    keep_texts: bool
    """Keep the cleaned texts for the second pass."""
    evaluation: Path | None = None
    """The index of evaluation sets whose items are looked for."""
    value: ValueField | None = None
    """The field by which near-duplicates stay."""

    def load(self) -> Make:
        if self.clean is not None:
            Cleaner(self.clean)  # what a user's function loads is there before workers are forked
        hasher, evaluation = None if self.rules.near is None else MinHasher(self.rules.near), self.evaluation
        if evaluation is not None:
            letter_tables()
        # In the worker: a mapped file counts as open, and where one is, nothing is forked.
        scanner = functools.cache(lambda: None if evaluation is None else Scanner(Index(evaluation)))
        return functools.partial(self._make, hasher, scanner)

    def _make(
        self, hasher: MinHasher | None, scanner: Callable[[], Scanner | None], assigned: Assigned, progress: Progress
    ) -> Iterator[Record]:
        unit, folder = assigned.unit, self.out / RUN_FOLDER
        batches = read_documents(
            unit,
            self.sets[unit.dataset],
            self.clean,
            rows=assigned.facts["rows"],
            ahead=self.threads > 1,
            keep=() if self.value is None else (self.value.name,),
        )
        if self.keep_texts:
            batches = keep_batches(batches, print_path(folder / PRINTS, "texts", assigned.key))
        with ExitStack() as stack:
            sink = _PrintSink(self, hasher, scanner(), assigned, stack)
            progress.lap()
            for batch in batches:
                progress.lap("read")
                sink.add(_whole(batch), progress)
                progress.add(documents=len(batch.texts), input_bytes=unit.input_bytes(batch.bytes_read))
            files = sink.commit()
        facts = {} if self.value is None else {"values": sink.values.tolist()}
        files = {f"{RUN_FOLDER}/{PRINTS}/{name}": file for name, file in files.items()}
        yield Record(assigned.key, files=files, facts=facts)


class _PrintSink:
    """Documents to the files of a unit, a file for each kind of what is wanted; the hashes are committed last."""

    def __init__(
        self, load: FirstPass, hasher: MinHasher | None, scanner: Scanner | None, assigned: Assigned, stack: ExitStack
    ) -> None:
        self._load, self._unit, self._hasher, near = load, assigned.unit, hasher, load.rules.near
        self._set = load.sets[self._unit.dataset]
        self._share, self._last_step = self._set.share(copy=0), -1
        self.values = np.zeros(2, np.int64)
        """Documents without a value of the field that decides on near-duplicates, and with one."""

        def path(kind: str) -> Path:
            return print_path(load.out / RUN_FOLDER / PRINTS, kind, assigned.key)

        def new(kind: str, entry: bytes) -> NewFile:
            """A document's place in a file is its row: those that are not wanted take theirs."""
            file, skipped = stack.enter_context(NewFile(path(kind))), (assigned.facts["rows"] or (0,))[0]
            for start in range(0, skipped, _SKIPPED_AT_ONCE):
                file.write(entry * min(_SKIPPED_AT_ONCE, skipped - start))
            return file

        self._places = stack.enter_context(NewFile(path("places")))
        # Validation sets are used whole.
        self._finder = MatchFinder(scanner, path("matches")) if scanner and self._set.split is None else None
        self._signatures = None if hasher is None else new("signatures", bytes([NO_WORDS]) * hasher.size)
        by_order = near is None or near.prefer == "first"
        self._preferences = None if by_order else new("preferences", bytes(8))
        self._hashes = None if load.rules.is_off else stack.enter_context(FingerprintWriter(path("hashes")))

    def add(self, batch: Batch, progress: Progress) -> None:
        if not len(batch.texts) or batch.origins is None:
            return
        steps = batch.origins - batch.rows
        for at in np.flatnonzero(np.diff(steps, prepend=self._last_step)).tolist():  # of each file, and each gap
            place = place_of(self._unit, int(batch.origins[at]))
            self._places.write((json.dumps([int(batch.rows[at]), place]) + "\n").encode())
        self._last_step = int(steps[-1])
        # What is dropped for another reason, or not in the sample, makes no other document a duplicate.
        assert batch.verdicts is not None
        wanted, row, rules = batch.verdicts.keep, batch.first_row, self._load.rules
        if self._share < 1:
            wanted &= below(content_keys(batch.texts, self._load.seed, SAMPLE), self._share)
        texts = self._set.compared(batch)
        if self._preferences is not None and rules.near is not None:
            values = np.full(len(texts), np.nan)
            if self._load.value is not None and batch.columns is not None:
                values = self._load.value.of_column(batch.columns.column(0))
            numbers, known = preferred(rules.near, texts, values)
            self._preferences.write(numbers.data)
            self.values += np.bincount(known[wanted], minlength=2)
        if self._signatures is not None and self._hasher is not None:
            signatures = self._hasher.signatures(texts)
            signatures[~wanted] = NO_WORDS
            self._signatures.write(signatures.data)
        if self._hashes is not None:
            self._hashes.add(fingerprint(texts, normalize=rules.normalize), row, wanted)
        progress.lap("fingerprint")
        if self._finder is not None:
            self._finder.add(batch.texts, row, wanted)
            progress.lap("decontaminate")

    def commit(self) -> dict[str, dict[str, Any]]:
        files = {} if self._finder is None else self._finder.commit()
        for new in (self._places, self._preferences, self._signatures):
            files |= {} if new is None else {new.path.name: new.put_in_place()}
        return files if self._hashes is None else files | self._hashes.commit()


@dataclass(frozen=True, slots=True)
class Shingling:
    """A unit to the shingles of those of its documents that are in a pair; of a unit without such, nothing is read."""

    out: Path
    sets: tuple[SetRules, ...]
    clean: CleanRules | None
    filters: FilterRules
    work: NearWork
    threads: int

    def load(self) -> Make:
        Filters(self.filters)  # what rules load is there before workers are forked
        return functools.partial(self._make, candidates.Documents(self.work).signatures)

    def _make(self, signatures: SignatureFiles, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        folder, number, files = self.work.folder, assigned.unit.index, dict[str, dict[str, Any]]()
        base = signatures.before(number)
        marked = marked_rows(folder, base, signatures.before(number + 1) - base)
        if marked.any():
            with SketchWriter(*sketch_paths(folder, unit_name(number))) as writer:
                self._shingle(assigned, progress, marked, writer)
                files = writer.commit(durable=False)
        below = folder.relative_to(self.out)
        yield Record(assigned.key, files={f"{below}/{name}": file for name, file in files.items()})

    def _shingle(
        self, assigned: Assigned, progress: Progress, marked: npt.NDArray[np.bool_], writer: SketchWriter
    ) -> None:
        unit, folder, last = assigned.unit, self.out / RUN_FOLDER, int(np.flatnonzero(marked)[-1])
        rules = self.sets[unit.dataset]
        # A dataset that is a split of its own is used whole.
        filters = Filters(self.filters if rules.split is None else FilterRules())
        sketcher = Sketcher(self.work.rules.ngram)
        kept = print_path(folder / PRINTS, "texts", assigned.facts["prints"])
        reading: dict[str, Any] = {"rows": assigned.facts["rows"], "ahead": self.threads > 1}
        progress.lap()
        for batch in kept_batches(kept) if kept.exists() else read_documents(unit, rules, self.clean, **reading):
            progress.lap("read")
            if batch.first_row > last:
                break
            if not len(_whole(batch).texts):
                continue
            row = batch.first_row
            rows = np.flatnonzero(marked[row : row + len(batch.texts)])
            verdicts, done = Verdicts(len(rows)), 0
            filters.judge(batch.texts.take(pa.array(rows)), verdicts)
            for values, counts in sketcher.sketches(rules.compared(batch).take(pa.array(rows))):
                part = slice(done, done + len(counts))
                keep = verdicts.keep[part]
                if not keep.all():
                    values = values[np.repeat(keep, counts)]
                writer.add(row + rows[part], values, np.where(keep, counts, 0))
                done += len(counts)
            progress.lap("shingle")
            progress.add(documents=len(batch.texts), input_bytes=unit.input_bytes(batch.bytes_read))


def preferred(
    near: NearRules, texts: pa.LargeStringArray, values: Floats
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """What decides on which of near-duplicates stays: a number for each document, the lowest first; and which of them
    have a value of the field that decides."""
    lengths = np.minimum(np.diff(text_offsets(texts)), _LONGEST)
    field = near.preferred_field
    if field is None:
        numbers = _LONGEST - lengths if near.prefer == "longest" else lengths
        return numbers.astype(np.uint64), np.zeros(len(texts), np.int64)
    return in_order_of(values, highest=field.order == "highest"), (~np.isnan(values)).astype(np.int64)


def in_order_of(values: Floats, *, highest: bool) -> npt.NDArray[np.uint64]:
    """Whole numbers in the order of the values, the highest or the lowest first; what is none comes last.

    >>> in_order_of(np.array([0.5, 2.0, np.nan, -1.0]), highest=True).argsort().tolist()
    [1, 0, 3, 2]
    """
    bits = (values + 0.0).view(np.uint64)  # -0.0 is 0.0
    # Of floats, the bits of the positive ones are in their order, those of the negative ones against it.
    rising = np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))
    return np.where(np.isnan(values), _LAST, ~rising if highest else rising)
