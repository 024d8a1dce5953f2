"""The first pass, for one unit: read, clean, fingerprint. Only with dedup.

Runs in a worker. Holds one batch and a bounded number of fingerprints. A unit's files appear whole, the hashes last:
when they are there, the unit is done.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.decontamination.index import Index
from milldam.decontamination.letters import letter_tables
from milldam.decontamination.matches import MatchFinder, Scanner, match_path
from milldam.dedup.fingerprints import FingerprintWriter, fingerprint
from milldam.dedup.minhash import NO_WORDS, MinHasher
from milldam.dedup.preferred import Floats, ValueField
from milldam.files import NewFile
from milldam.memory import usage
from milldam.pipeline.documents import (
    HEAD_BYTES,
    REPORT_SECONDS,
    Assignment,
    CacheWriter,
    Documents,
    PlacesWriter,
    Reading,
    SetRules,
    UnitReader,
    places_path,
    preference_path,
    print_paths,
)
from milldam.pipeline.judging import Chooser, below
from milldam.rules import CleanRules, DedupRules, NearRules
from milldam.run.folder import RUN_FOLDER
from milldam.run.records import Record
from milldam.run.tasks import PART, PROGRESS, Report
from milldam.text.arrays import Mask, Verdicts, text_offsets
from milldam.text.cleaning import Cleaner

PRINTS = "prints"
"""The folder of fingerprints, in the run folder."""
_SKIPPED_AT_ONCE = 4096
_LONGEST = (1 << 28) - 1
"""In bytes; longer documents count as this long, so that a length and a number of a document fit into 64 bits."""
_LAST = np.uint64((1 << 64) - 1)


@dataclass(frozen=True, slots=True)
class FingerprintTask:
    """What every worker needs to know; it pickles."""

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

    def start(self) -> UnitFingerprinter:
        return UnitFingerprinter(self)


class UnitFingerprinter:
    """A worker's state."""

    def __init__(self, task: FingerprintTask) -> None:
        self._task = task
        self._near = MinHasher(task.rules.near) if task.rules.near is not None else None
        if task.evaluation is not None:
            letter_tables()  # there before workers are forked
        if task.clean is not None:
            Cleaner(task.clean)  # what a user's function loads is there before workers are forked

    @functools.cached_property
    def _scanner(self) -> Scanner | None:
        """Made in the worker: a mapped file counts as open, and where one is, nothing is forked."""
        return None if self._task.evaluation is None else Scanner(Index(self._task.evaluation))

    def __call__(self, assignment: Assignment, report: Report) -> None:
        task, unit = self._task, assignment.unit
        reader = UnitReader(
            Reading(
                unit,
                task.sets[unit.dataset],
                task.clean,
                rows=assignment.rows,
                spool=str(task.out / RUN_FOLDER),
                ahead=task.threads > 1,
                keep=() if task.value is None else (task.value.name,),
            )
        )
        hash_path, signature_path, text_path = print_paths(task.out / RUN_FOLDER / PRINTS, assignment.key)
        with ExitStack() as stack:
            cache = stack.enter_context(CacheWriter(text_path)) if task.keep_texts else None
            near = None
            if self._near is not None:
                skipped = assignment.rows[0] if assignment.rows else 0
                near = _Near(self._near, stack.enter_context(NewFile(signature_path)), skipped)
            sample = Chooser(task.seed, HEAD_BYTES), task.sets[unit.dataset].share(copy=0)
            kinds: list[_Kind] = [] if near is None else [near]
            if not task.rules.is_off:  # committed last
                hashes = stack.enter_context(FingerprintWriter(hash_path))
                kinds.append(_Exact(task.rules.normalize, hashes))
            preferences = None
            if task.rules.near is not None and task.rules.near.prefer != "first":
                path = preference_path(task.out / RUN_FOLDER / PRINTS, assignment.key)
                preferences = _Preferences(stack.enter_context(NewFile(path)), task.rules.near, task.value, skipped)
                kinds.insert(0, preferences)
            finder = None
            # Validation sets are used whole.
            if self._scanner is not None and task.sets[unit.dataset].split is None:
                finder = MatchFinder(self._scanner, match_path(hash_path.parent, assignment.key))
            new = stack.enter_context(NewFile(places_path(hash_path.parent, assignment.key)))
            places = PlacesWriter(new, unit)
            files = _UnitWork(reader, places, kinds, cache, sample, report, task.sets[unit.dataset], finder).run()
        below = {f"{RUN_FOLDER}/{PRINTS}/{name}": file for name, file in files.items()}
        facts = {} if preferences is None or task.value is None else {"values": preferences.values}
        report(PART, Record(assignment.key, files=below, facts=facts))


class _Exact:
    """Hashes of the documents of a unit."""

    def __init__(self, normalize: bool, writer: FingerprintWriter) -> None:
        self._normalize, self._writer = normalize, writer

    def add(self, texts: pa.LargeStringArray, documents: Documents, wanted: Mask) -> None:
        self._writer.add(fingerprint(texts, normalize=self._normalize), documents.first_row, wanted)

    def commit(self) -> dict[str, dict[str, Any]]:
        return self._writer.commit()


class _Near:
    """Signatures of the documents of a unit."""

    def __init__(self, hasher: MinHasher, new: NewFile, skipped_rows: int) -> None:
        self._hasher, self._new = hasher, new
        # A document's place in the file is its row: those that are not wanted take theirs.
        for start in range(0, skipped_rows, _SKIPPED_AT_ONCE):
            some = min(_SKIPPED_AT_ONCE, skipped_rows - start)
            new.write(np.full((some, hasher.size), NO_WORDS, dtype=np.uint8).data)

    def add(self, texts: pa.LargeStringArray, documents: Documents, wanted: Mask) -> None:
        signatures = self._hasher.signatures(texts)
        signatures[~wanted] = NO_WORDS
        self._new.write(signatures.data)

    def commit(self) -> dict[str, dict[str, Any]]:
        return {self._new.path.name: self._new.commit()}


class _Preferences:
    """What decides on which of near-duplicates stays: a number for each document of a unit, the lowest first."""

    def __init__(self, new: NewFile, rules: NearRules, field: ValueField | None, skipped_rows: int) -> None:
        self._new, self._rules, self._field = new, rules, field
        self.values = [0, 0]
        """Documents without a value of the field, and with one."""
        for start in range(0, skipped_rows, _SKIPPED_AT_ONCE):
            new.write(np.zeros(min(_SKIPPED_AT_ONCE, skipped_rows - start), np.uint64).data)

    def add(self, texts: pa.LargeStringArray, documents: Documents, wanted: Mask) -> None:
        lengths, by_field = np.diff(text_offsets(texts)), self._rules.preferred_field
        if by_field is not None:
            values = np.full(len(lengths), np.nan)
            if self._field is not None and documents.columns is not None:
                values = self._field.of_column(documents.columns.column(0))
            counts = np.bincount(~np.isnan(values[wanted]), minlength=2).tolist()
            self.values = [before + count for before, count in zip(self.values, counts, strict=True)]
            self._new.write(in_order_of(values, highest=by_field.order == "highest").astype("<u8").data)
        else:
            lengths = np.minimum(lengths, _LONGEST)
            self._new.write((_LONGEST - lengths if self._rules.prefer == "longest" else lengths).astype("<u8").data)

    def commit(self) -> dict[str, dict[str, Any]]:
        return {self._new.path.name: self._new.commit()}


def in_order_of(values: Floats, *, highest: bool) -> npt.NDArray[np.uint64]:
    """Whole numbers in the order of the values, the highest or the lowest first; what is none comes last.

    >>> in_order_of(np.array([0.5, 2.0, np.nan, -1.0]), highest=True).argsort().tolist()
    [1, 0, 3, 2]
    """
    bits = (values + 0.0).view(np.uint64)  # -0.0 is 0.0
    # Of floats, the bits of the positive ones are in their order, those of the negative ones against it.
    rising = np.where(bits >> np.uint64(63), ~bits, bits | np.uint64(1 << 63))
    return np.where(np.isnan(values), _LAST, ~rising if highest else rising)


_Kind = _Exact | _Near | _Preferences


def whole(documents: Documents, parts: list[bytes]) -> Documents:
    """Documents that come in parts, put together with their last one. (Until readers give whole ones.)"""
    if not documents.part:
        return documents
    parts.append(documents.bytes)
    if not documents.last:
        return replace(documents, texts=documents.texts[:0], verdicts=Verdicts(0), columns=None)
    texts = pa.array([b"".join(parts)], pa.large_binary()).cast(pa.large_string())
    parts.clear()
    return replace(documents, texts=texts, part=False)


class _UnitWork:
    """One unit on its way through the first pass."""

    def __init__(
        self,
        reader: UnitReader,
        places: PlacesWriter,
        kinds: list[_Kind],
        cache: CacheWriter | None,
        sample: tuple[Chooser, float],
        report: Report,
        rules: SetRules,
        finder: MatchFinder | None = None,
    ) -> None:
        self._rules, self._finder = rules, finder
        self._reader, self._kinds, self._cache, self._report = reader, kinds, cache, report
        self._places = places
        self._chooser, self._share = sample
        self._unit, self._bytes_read = reader.unit, 0
        self._counts: Counter[str] = Counter()
        self._seconds = {"fingerprint": 0.0}
        self._reported = time.monotonic()
        self._parts: list[bytes] = []

    def run(self) -> dict[str, dict[str, Any]]:
        """Size and hash of each file that was made, by its name."""
        for documents in self._reader:
            started = time.perf_counter()
            self._places.note(documents)
            if self._cache is not None:
                self._cache.add(documents)
            documents = whole(documents, self._parts)
            wanted = self._wanted(documents)
            for kind in self._kinds:
                self._fingerprint(kind, documents, wanted)
            self._seconds["fingerprint"] += time.perf_counter() - started
            if self._finder is not None:
                self._find_matches(self._finder, documents, wanted)
            self._bytes_read += documents.bytes_read
            self._counts["input_bytes"] = self._unit.input_bytes(self._bytes_read)
            self._counts["documents"] += len(documents.texts) if documents.last else 0
            if time.monotonic() - self._reported > REPORT_SECONDS:
                self._send_progress()
        self._counts["input_bytes"] = self._unit.size
        if self._cache is not None:
            self._cache.commit()
        files = self._places.commit() | ({} if self._finder is None else self._finder.commit())
        for kind in self._kinds:
            files |= kind.commit()
        self._send_progress()
        return files

    def _wanted(self, documents: Documents) -> Mask:
        """What is dropped for another reason, or not in the sample, makes no other document a duplicate."""
        keep = documents.verdicts.keep
        if self._share < 1:
            keep &= below(self._chooser.sample_keys(documents.texts), self._share)
        return keep

    def _fingerprint(self, kind: _Kind, documents: Documents, wanted: Mask) -> None:
        if len(documents.texts):
            kind.add(self._rules.compared(documents), documents, wanted)

    def _find_matches(self, finder: MatchFinder, documents: Documents, wanted: Mask) -> None:
        started = time.perf_counter()
        if len(documents.texts):
            finder.add(documents.texts, documents.first_row, wanted)
        self._seconds["decontaminate"] = self._seconds.get("decontaminate", 0.0) + time.perf_counter() - started

    def _send_progress(self) -> None:
        self._reported = time.monotonic()
        seconds = self._reader.seconds | self._seconds
        self._report(PROGRESS, {"counts": dict(self._counts), "seconds": seconds, "anonymous_bytes": usage().anonymous})
