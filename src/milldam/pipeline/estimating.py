"""What a job will take, before it begins: documents, tokens, disk, time.

From a small sample of each dataset (the heads of some sixteen slices of files spread over the input, at most a
quarter of a megabyte of each), or, for the check of the disk that every job begins with, from typical text. What fits
into the sample is counted exactly; else the figures are estimates and are called so. What follows from them is in
needs.py.

Which rows of which units a dataset gives, when not all of its documents are wanted.

Documents are counted by reading them, unit by unit in plan order, no further than needed: the first hundred thousand
of a terabyte are found in the first units; a share of all (10%:20%) reads the dataset once more.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from milldam.config.settings import Config
from milldam.errors import ResourceError
from milldam.memory import format_size, release, usage
from milldam.pipeline.documents import Assignment, Documents, Reading, SetRules, UnitReader
from milldam.pipeline.needs import Load, Machines, Needs, find_needs
from milldam.pipeline.preparing import Prepared, Source, wanted_rows
from milldam.run.folder import RunFolder
from milldam.run.records import Record, Records
from milldam.run.tasks import PART, PROGRESS, Report
from milldam.sources.compression import DamagedError, open_head, read_blocks
from milldam.sources.units import TYPICAL_RATIO, Slice, Unit
from milldam.stores.tokens.format import token_dtype
from milldam.text.arrays import Verdicts, byte_count
from milldam.tokenizers.document_encoder import groups
from milldam.tokenizers.encoders import make_encoder

UNITS_SAMPLED = 8
SAMPLE_BYTES, SMALLEST_SAMPLE = 256 << 10, 16 << 10
TEXTS_PART_OF_DISK = 8
"""Texts are kept between the passes when they fit this many times on the free disk."""
WARM_SHARE = 0.65
"""An encoder that knows the words of a sample encodes it faster than new text by this factor."""
WRITE_SECONDS = 1.4e-9
"""A byte of text, of one core: writing its tokens, with what is around it."""
_UNPACKED_SAMPLE = 4 << 20


@dataclass(slots=True)
class Sample:
    """How much text, how many documents and tokens some input holds, and how long what takes."""

    input_bytes: float = 0
    text_bytes: float = 0
    documents: float = 0
    tokens: float = 0
    work: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of one core by kind: read (and clean), hash, signatures, filter, encode, write."""
    slices: float = 0

    def add(self, other: Sample, factor: float = 1.0) -> None:
        """What another one holds, so many times."""
        for name in ("input_bytes", "text_bytes", "documents", "tokens", "slices"):
            setattr(self, name, getattr(self, name) + factor * getattr(other, name))
        for kind, seconds in other.work.items():
            self.work[kind] += factor * seconds


# Measured (docs/scale.md): a gigabyte of English JSON lines, in documents of 2.2 KB.
TYPICAL_WORK = {"read": 5.8, "hash": 1.1, "signatures": 16.2, "encode": 9.7, "write": 1.4}
TYPICAL = Sample(1.02e9, 1e9, 453_500, 1e9 / 4.4, defaultdict(float, TYPICAL_WORK))
Kind = tuple[int, str, str | None]
"""Files that are alike: the number of their dataset, their format, their compression."""


@dataclass(frozen=True, slots=True)
class Samples:
    """What is known of the input, by kind: what is true of one dataset need not be of another."""

    other: Sample
    """For what has no sample of its own; by bytes without compression."""
    own: dict[Kind, Sample] = field(default_factory=dict)

    def expect(self, kind: Kind, size: int, slices: int) -> Sample:
        """What so many bytes of files of a kind hold, in so many slices."""
        sample, ratio = self.own.get(kind), 1.0
        if sample is None:
            sample, ratio = self.other, _ratio(kind)
        expected = Sample()
        expected.add(sample, size * ratio / max(1, sample.input_bytes))
        if sample.documents == sample.slices > 0:
            expected.documents = slices  # a file is a document, however large
        return expected


def _ratio(kind: Kind) -> float:
    """How much larger than a file what it unpacks to is, as is typical."""
    return TYPICAL_RATIO.get(kind[2] or "", 1.0)


# ---- what the whole job comes to ----


def estimate(
    config: Config, prepared: Prepared, survey: Survey, samples: Samples, stages: tuple[str, ...], machines: Machines
) -> Needs:
    """What so much input will take when each dataset is like its sample."""
    job = Sample()
    for number, source in enumerate(prepared.sources):
        held = Sample()
        for kind, size in survey.sizes.items():
            if kind[0] == number:
                held.add(samples.expect(kind, size, survey.slices[kind]))
        job.add(held, _wanted(source, held.documents) / max(1.0, held.documents))
    width = 2 if token_dtype(prepared.vocab_size) == "uint16" else 4
    load = Load(
        documents=round(job.documents),
        text_bytes=int(job.text_bytes),
        tokens=int(job.tokens),
        token_bytes=int(job.tokens) * width,
        input_bytes=prepared.identity.input["bytes"],
        units=survey.units,
        shard_size=prepared.shard_size,
        keeps_texts=keeps_texts(config, job.text_bytes),
        work=job.work,
    )
    return find_needs(config, load, stages, machines)


def _wanted(source: Source, documents: float) -> float:
    """How many of a dataset's documents are taken: slice, limit, weight."""
    first, stop = wanted_rows(source, round(documents))
    return (stop - first) * source.rules.weight


def require_disk(needs: Needs, out: str) -> None:
    """Refuse a job that would fill the disk."""
    needed, free = needs.peak[1], free_bytes(out)
    if needed > free:
        raise ResourceError(
            f"Not enough disk for {out}: about {format_size(needed)} are needed "
            f"({format_size(needs.store_bytes)} for the store, the rest on the way), {format_size(free)} are free.\n"
            "Free some space, or choose another place for it."
        )


def keeps_texts(config: Config, text_bytes: float) -> bool:
    """Whether the first pass keeps its texts for the second: where they take a small part of the free disk."""
    return text_bytes < free_bytes(config.out) // TEXTS_PART_OF_DISK


def free_bytes(out: str) -> int:
    """On the disk that a folder is, or will be, on."""
    path = Path(out).absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


# ---- a look at the input ----


class Survey:
    """The size of every dataset by compression, and some slices of each, spread evenly; holds few of however many."""

    def __init__(self) -> None:
        self.units = 0
        self._spread: defaultdict[int, _Spread] = defaultdict(_Spread)
        self.sizes: Counter[Kind] = Counter()
        self.slices: Counter[Kind] = Counter()
        """By kind of file."""
        self.dearest: tuple[int, Slice] | None = None
        """The slice that takes most memory to unpack, and its dataset; None: none takes more than batches do."""

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Survey:
        survey = cls()
        for _ in survey.watch(units):
            pass
        return survey

    def watch(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Look at units as they pass."""
        for unit in units:
            self.units += 1
            if not unit.copy:
                self._add(unit)
            yield unit

    def _add(self, unit: Unit) -> None:
        spread = self._spread[unit.dataset]
        for slice in unit.slices:
            kind = (unit.dataset, slice.format, slice.compression)
            self.sizes[kind] += slice.size
            self.slices[kind] += 1
            spread.add(unit, slice)
            if slice.unpacking > (self.dearest[1].unpacking if self.dearest is not None else 0):
                self.dearest = unit.dataset, slice

    @property
    def some(self) -> list[Unit]:
        """For a sample: units of one slice each, of every dataset; repetitions are none of them."""
        each = max(1, 2 * UNITS_SAMPLED // max(1, len(self._spread)))
        return [unit for spread in self._spread.values() for unit in spread.some[:: -(-len(spread.some) // each)]]

    @property
    def unpacked_bytes(self) -> float:
        """About the size of all without compression."""
        return sum(size * _ratio(kind) for kind, size in self.sizes.items())


@dataclass(slots=True)
class _Spread:
    """Some of many slices, each as a unit of its own."""

    some: list[Unit] = field(default_factory=list)
    seen: int = 0
    step: int = 1

    def add(self, unit: Unit, slice: Slice) -> None:
        if self.seen % self.step == 0:
            self.some.append(replace(unit, slices=(slice,)))
            if len(self.some) > 2 * UNITS_SAMPLED:
                self.some, self.step = self.some[::2], self.step * 2
        self.seen += 1


def measure(config: Config, prepared: Prepared, units: list[Unit], encoder_name: str) -> Samples:
    """Read and encode the heads of some units of one slice each, and do with them what the job will do."""
    working = _Working(config, prepared, encoder_name)
    limit = max(SMALLEST_SAMPLE, min(SAMPLE_BYTES, 2 * UNITS_SAMPLED * SAMPLE_BYTES // max(1, len(units))))
    samples = Samples(Sample())
    for unit in units:
        (slice,) = unit.slices
        reading = Reading(unit, prepared.sets[unit.dataset], config.clean_rules)
        head, whole = working.on_head(UnitReader(reading), limit)
        size = slice.size * _packed_ratio(slice)
        times = 1.0 if whole else _times(slice, head, size)
        head.slices = 1 / times
        if not whole:
            head.documents = max(head.documents, 1 / times)  # the one that goes on behind the head
        own = samples.own.setdefault((unit.dataset, slice.format, slice.compression), Sample())
        for one, counted in ((own, slice.size), (samples.other, size)):
            head.input_bytes = counted / times
            one.add(head, times)
    del working
    release()
    return samples


def _times(slice: Slice, head: Sample, size: float) -> float:
    """How many times more than its head a slice holds: by its rows where it has some, else by bytes."""
    from milldam.sources.tables import row_count

    rows = row_count(slice)
    if rows is not None and head.documents:
        return max(1.0, rows / head.documents)
    return max(1.0, size / max(1.0, head.input_bytes))


class _Working:
    """What the job does with texts."""

    def __init__(self, config: Config, prepared: Prepared, encoder: str) -> None:
        from milldam.dedup.fingerprints import Fingerprinter
        from milldam.dedup.minhash import MinHasher
        from milldam.filters.judging import Filters

        plain, rules = config.tokenizer_rules.special_text == "plain", config.dedup_rules
        self._encoder = make_encoder(encoder, prepared.tokenizer_json, plain_specials=plain, threads=1)
        self._fingerprinter = Fingerprinter(rules.normalize) if rules is not None else None
        self._hasher = MinHasher(rules.near) if rules is not None and rules.near is not None else None
        self._filters = Filters(config.filters)

    def on_head(self, batches: Iterable[Documents], limit: int) -> tuple[Sample, bool]:
        """What the first batches hold, the last one cut to what is wanted of it, and whether that was all."""
        head = Sample()
        started = time.process_time()
        for documents in batches:
            seconds, texts = time.process_time() - started, documents.texts
            size = byte_count(texts)
            wanted = max(1, int(len(texts) * (limit - head.text_bytes) / size)) if size else len(texts)
            some = texts[:wanted]
            part = byte_count(some) / size if size else 1.0
            head.input_bytes += documents.bytes_read * part
            head.text_bytes += byte_count(some)
            head.documents += len(some) if documents.last else 0
            head.work["read"] += seconds * part
            self._work_on(some, head)
            if wanted < len(texts) or head.text_bytes >= limit:
                return head, False
            started = time.process_time()
        return head, True

    def _work_on(self, texts: pa.LargeStringArray, head: Sample) -> None:
        if self._fingerprinter is not None:
            with _timed(head.work, "hash"):
                self._fingerprinter.hash(texts)
        if self._hasher is not None:
            with _timed(head.work, "signatures"):
                self._hasher.signatures(texts)
        with _timed(head.work, "filter"):
            self._filters.judge(texts, Verdicts(len(texts)))
        self._encode(texts)  # what an encoder learns from the first words is no measure of the millions that follow
        with _timed(head.work, "encode", 1 / WARM_SHARE):
            head.tokens += self._encode(texts)
        head.work["write"] += byte_count(texts) * WRITE_SECONDS

    def _encode(self, texts: pa.LargeStringArray) -> int:
        """Tokens of the texts, with one more a document."""
        return len(texts) + sum(
            len(self._encoder.encode(group)[0]) for group in groups(texts, self._encoder.batch_bytes)
        )


@contextmanager
def _timed(work: dict[str, float], kind: str, factor: float = 1.0) -> Iterator[None]:
    """Adds the processor's time, which others on the machine change less than the clock's."""
    started = time.process_time()
    yield
    work[kind] += (time.process_time() - started) * factor


def _packed_ratio(slice: Slice) -> float:
    """How much larger the head of a compressed file is than what it is packed in."""
    if slice.compression is None:
        return 1.0
    size = 0
    with open_head(slice.path) as file:
        try:
            for block in read_blocks(file, slice.compression, 1 << 20):
                size += len(block)
                if size >= _UNPACKED_SAMPLE:
                    break
        except DamagedError:
            pass
        packed = file.tell()
    return size / packed if size and packed else 1.0


NAME = "counts.jsonl"
_HEAR_SECONDS = 5.0
Rows = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CountTask:
    """What every worker needs to know; it pickles."""

    sets: tuple[SetRules, ...]
    spool: str

    def start(self) -> Callable[[Assignment, Report], None]:
        return self._count

    def _count(self, assignment: Assignment, report: Report) -> None:
        unit = assignment.unit
        count = 0
        for documents in UnitReader(Reading(unit, self.sets[unit.dataset], None, spool=self.spool)):
            count += len(documents.texts) if documents.last else 0
        told = {"counts": {"documents": count, "input_bytes": unit.size}, "seconds": {}}
        report(PROGRESS, told | {"anonymous_bytes": usage().anonymous})
        report(PART, Record(assignment.key, counts={"documents": count}))


class RowCounts:
    """What has been counted, and what follows from it. Holds a number per unit of the datasets that are counted."""

    def __init__(self, folder: RunFolder, sources: tuple[Source, ...]) -> None:
        self._folder, self._sources = folder, sources
        self._units: dict[int, list[int]] = {k: [] for k, source in enumerate(sources) if source.counted}
        """Dataset -> its units in order."""
        for unit in folder.units.all(Unit.from_json):
            if unit.dataset in self._units and not unit.copy:
                self._units[unit.dataset].append(unit.index)
        self.keys = folder.units.keys()
        self._records = Records(folder.journal, NAME, folder.out, self.keys)
        self._counts: dict[int, int] = {}
        """Unit -> its documents."""
        self._learn(self._records.all())
        self._heard = time.monotonic()
        self._reached = dict.fromkeys(self._units, (0, 0))
        """Dataset -> how many of its units are counted without a gap, and their documents."""

    def _learn(self, records: Iterable[Record]) -> None:
        for record in records:
            number = self.keys.number_of(record.key)
            if number is not None:
                self._counts[number] = record.counts["documents"]

    @property
    def units(self) -> int:
        """Units of the datasets that are counted."""
        return sum(map(len, self._units.values()))

    def add(self, record: Record) -> None:
        self._records.add(record)
        self._learn([record])

    def missing(self) -> Iterator[int]:
        """Units to count, in plan order, as long as more are needed."""
        for dataset, units in self._units.items():
            for unit in units:
                self._hear_of_others()
                if self._is_settled(dataset):
                    break
                if unit not in self._counts:
                    yield unit

    def _hear_of_others(self) -> None:
        """An array task alone, which leaves units out, would never know that enough are counted."""
        if self._folder.task is not None and time.monotonic() - self._heard > _HEAR_SECONDS:
            self._learn(self._records.all())
            self._heard = time.monotonic()

    def _is_settled(self, dataset: int) -> bool:
        """Whether enough units are counted, without a gap, to reach the last document wanted."""
        stop = _known_stop(self._sources[dataset])
        units, (position, documents) = self._units[dataset], self._reached[dataset]
        while position < len(units) and units[position] in self._counts:
            documents += self._counts[units[position]]
            position += 1
        self._reached[dataset] = (position, documents)
        return stop is not None and documents >= stop

    def ranges(self) -> dict[int, Rows]:
        """Unit -> the rows wanted of it, for every unit of the datasets that are counted."""
        found: dict[int, Rows] = {}
        for dataset, units in self._units.items():
            total = sum(self._counts.get(unit, 0) for unit in units)
            first, stop = wanted_rows(self._sources[dataset], total)
            before = 0
            for unit in units:
                count = self._counts.get(unit, 0)
                found[unit] = (max(0, min(count, first - before)), max(0, min(count, stop - before)))
                before += count
        return found


def _known_stop(source: Source) -> int | None:
    """The number of documents to count to; None when all have to be counted."""
    if source.rows is not None and source.rows.needs_total:
        return None
    _, stop = wanted_rows(source, 2**62)
    return stop if stop < 2**62 else None
