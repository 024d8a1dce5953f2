"""What a job will take, before it begins: documents, tokens, disk, time.

From a small sample spread over the input (at most a quarter of a megabyte of each of some sixteen units), or, for the
check of the disk that every job begins with, from typical text. The figures are estimates and are called so; what
follows from them is in needs.py.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pyarrow as pa

from milldam.config import Config
from milldam.errors import ResourceError
from milldam.filters.judging import Filters
from milldam.job.needs import Load, Machines, Needs, find_needs
from milldam.job.preparing import Prepared, Source, wanted_rows
from milldam.memory import format_size, release
from milldam.passes.documents import Reading, UnitReader
from milldam.sources.compression import DamagedError, read_blocks
from milldam.sources.opening import open_bytes
from milldam.sources.units import Slice, Unit
from milldam.store.format import token_dtype
from milldam.text_arrays import byte_count
from milldam.tokenizers.encoder import groups
from milldam.tokenizers.engines import Engine, make_engine
from milldam.verdicts import Verdicts

UNITS_SAMPLED = 8
SAMPLE_BYTES = 256 << 10
TEXTS_PART_OF_DISK = 8
"""Texts are kept between the passes when they fit this many times on the free disk."""
WARM_SHARE = 0.65
"""An engine that knows the words of a sample encodes it faster than new text by this factor."""
WRITE_SECONDS = 1.4e-9
"""A byte of text, of one core: writing its tokens, with what is around it."""
_LISTED_BYTES = 110
"""A line of the list of files, beside the path."""
_UNPACKED_SAMPLE = 4 << 20
_TYPICAL_RATIO = {"gz": 3.0, "zst": 3.5, "bz2": 4.0, "xz": 4.5}


@dataclass(frozen=True, slots=True)
class Estimate:
    documents: int
    text_bytes: int
    tokens: int
    store_bytes: int
    temporary_bytes: dict[str, int] = field(default_factory=dict)
    """What is on disk meanwhile, by kind; not all of it at a time."""
    seconds: float = 0.0
    free_bytes: int = 0
    disk_bytes: int = 0
    """The most there is at a time, the store included."""
    needs: Needs | None = None


@dataclass(slots=True)
class Sample:
    """How much text, how many documents and tokens some input held, and how long what takes."""

    input_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    work: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of one core by kind: read (and clean), hash, signatures, filter, encode, write."""
    ratios: dict[str, float] = field(default_factory=lambda: dict(_TYPICAL_RATIO))
    """How much larger than a file what it unpacks to is."""


# Measured (docs/scale.md): seconds for a gigabyte of English JSON lines, and for a document.
_TYPICAL_WORK = {"read": 5.8, "hash": 0.2, "signatures": 8.0, "encode": 9.7, "write": 1.4}
_TYPICAL_DOCUMENT = {"hash": 2e-6, "signatures": 18e-6}


def typical(input_bytes: float, documents: float) -> Sample:
    """Text of that much, as most of it is."""
    text = input_bytes * 0.98
    work = {
        kind: seconds * text / 1e9 + _TYPICAL_DOCUMENT.get(kind, 0.0) * documents
        for kind, seconds in _TYPICAL_WORK.items()
    }
    return Sample(int(input_bytes), int(text), int(documents), int(text / 4.4), work)


TYPICAL = typical(4_500_000, 2000)


def estimate(
    config: Config,
    prepared: Prepared,
    survey: Survey,
    sample: Sample,
    stages: tuple[str, ...],
    machines: Machines,
    *,
    documents: dict[int, int] | None = None,
    here: bool = True,
) -> Estimate:
    """What so much input will take when it is like the sample.

    `documents`: of each data set, where they are known. `here`: the output goes to a disk that can be looked at.
    """
    text, found = _amounts(prepared, survey, sample, documents or {})
    scale = text / max(1, sample.text_bytes)
    tokens = int(sample.tokens * scale)
    width = 2 if token_dtype(prepared.vocab_size) == "uint16" else 4
    free = _free_bytes(config)
    load = Load(
        documents=int(found),
        text_bytes=int(text),
        tokens=tokens,
        token_bytes=tokens * width,
        input_bytes=prepared.identity.input["bytes"],
        units=survey.units,
        plan_bytes=int(survey.plan_bytes + prepared.identity.input["files"] * _LISTED_BYTES),
        shard_size=prepared.shard_size,
        keeps_texts=here and keeps_texts(config, text),
        work={kind: seconds * scale for kind, seconds in sample.work.items()},
    )
    needs = find_needs(config, load, stages, machines)
    store = {"tokens", "idx", "packed rows", "dedup index"}
    kinds: Counter[str] = Counter()
    for sizes in needs.disk.values():
        kinds |= Counter(sizes)
    return Estimate(
        documents=load.documents,
        text_bytes=load.text_bytes,
        tokens=tokens,
        store_bytes=load.token_bytes + needs.index_bytes + needs.packed_bytes,
        temporary_bytes={kind: size for kind, size in kinds.items() if kind not in store},
        seconds=sum(needs.seconds.values()),
        free_bytes=free,
        disk_bytes=needs.peak[1],
        needs=needs,
    )


def _amounts(prepared: Prepared, survey: Survey, sample: Sample, documents: dict[int, int]) -> tuple[float, float]:
    """(bytes of text, documents) that are taken."""
    text = found = 0.0
    for number, size in survey.unpacked(sample.ratios).items():
        there = documents.get(number) or size * sample.documents / max(1, sample.input_bytes)
        taken = _wanted(prepared.sources[number], there)
        found += taken
        text += size * sample.text_bytes / max(1, sample.input_bytes) * taken / max(1.0, there)
    return text, found


def require_disk(needed: Estimate, out: str) -> None:
    """Refuse a job that would fill the disk."""
    if needed.disk_bytes > needed.free_bytes:
        raise ResourceError(
            f"Not enough disk for {out}: about {format_size(needed.disk_bytes)} are needed "
            f"({format_size(needed.store_bytes)} for the store, the rest on the way), "
            f"{format_size(needed.free_bytes)} are free.\nFree some space, or choose another place for it."
        )


def _wanted(source: Source, documents: float) -> float:
    """How many of a data set's documents are taken: slice, limit, weight."""
    first, stop = wanted_rows(source, round(documents))
    return (stop - first) * source.rules.weight


class Survey:
    """The size of every data set by compression, and some units, spread evenly; holds few however many there are."""

    def __init__(self) -> None:
        self.units = 0
        self.some: list[Unit] = []
        """For a sample; repetitions are none of them."""
        self.dearest: tuple[int, Slice] | None = None
        """The slice that takes most memory to unpack, and its data set; None: none takes more than batches do."""
        self._sizes: Counter[tuple[int, str | None]] = Counter()
        self._first_copies = self._slices = 0
        self._step = 1

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
            self._slices += len(unit.slices)
            if not unit.copy:
                self._add(unit)
            yield unit

    def _add(self, unit: Unit) -> None:
        for slice in unit.slices:
            self._sizes[unit.dataset, slice.compression] += slice.size
            if slice.unpacking > (self.dearest[1].unpacking if self.dearest is not None else 0):
                self.dearest = unit.dataset, slice
        if self._first_copies % self._step == 0:
            self.some.append(unit)
            if len(self.some) > 2 * UNITS_SAMPLED:
                self.some, self._step = self.some[::2], self._step * 2
        self._first_copies += 1

    @property
    def plan_bytes(self) -> float:
        """About the size of the list of units, and of the paths in the list of files."""
        lines = sum(len(json.dumps(unit.as_json())) + 17 for unit in self.some)
        slices = sum(len(unit.slices) for unit in self.some)
        paths = sum(len(slice.path) for unit in self.some for slice in unit.slices)
        return (lines + paths) / max(1, slices) * self._slices

    def unpacked(self, ratios: dict[str, float] = _TYPICAL_RATIO) -> dict[int, float]:
        """About the size of each data set without compression."""
        found: defaultdict[int, float] = defaultdict(float)
        for (dataset, compression), size in self._sizes.items():
            found[dataset] += size * (1.0 if compression is None else ratios.get(compression, 1.0))
        return dict(found)


def unpacked_bytes(unit: Unit) -> float:
    """About the size of its input without compression, as is typical."""
    return sum(slice.size * _TYPICAL_RATIO.get(slice.compression or "", 1.0) for slice in unit.slices)


def measure(config: Config, prepared: Prepared, units: list[Unit], engine_name: str) -> Sample:
    """Read and encode the heads of some units, and do with them what the job will do."""
    sample = Sample()
    plain = config.tokenizer_rules.special_text == "plain"
    engine = make_engine(engine_name, prepared.tokenizer_json, plain_specials=plain, threads=1)
    first_pass, filters = _FirstPass(config), Filters(config.filters)
    for unit in units:
        for texts, bytes_read, seconds in _head(config, prepared, unit):
            sample.input_bytes += bytes_read
            sample.text_bytes += byte_count(texts)
            sample.documents += len(texts)
            sample.work["read"] += seconds
            first_pass.work_on(texts, sample.work)
            with _Timed(sample.work, "filter"):
                filters.judge(texts, Verdicts(len(texts)))
            for _ in _encoded(engine, texts):
                pass  # what an engine learns from the first words is no measure of the millions that follow
            with _Timed(sample.work, "encode", 1 / WARM_SHARE):
                sample.tokens += sum(_encoded(engine, texts))
    sample.work["write"] = sample.text_bytes * WRITE_SECONDS
    sample.ratios |= _packed_ratios(units)
    del engine
    release()
    return sample


class _Timed:
    """Adds the processor's time, which others on the machine change less than the clock's."""

    def __init__(self, work: dict[str, float], kind: str, factor: float = 1.0) -> None:
        self._work, self._kind, self._factor = work, kind, factor

    def __enter__(self) -> None:
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._work[self._kind] += (time.process_time() - self._started) * self._factor


class _FirstPass:
    """What dedup does with texts."""

    def __init__(self, config: Config) -> None:
        from milldam.dedup.fingerprints import Fingerprinter
        from milldam.dedup.minhash import MinHasher

        rules = config.dedup_rules
        self._fingerprinter = Fingerprinter(rules.normalize) if rules is not None else None
        self._hasher = MinHasher(rules.near) if rules is not None and rules.near is not None else None

    def work_on(self, texts: pa.LargeStringArray, work: dict[str, float]) -> None:
        if self._fingerprinter is not None:
            with _Timed(work, "hash"):
                self._fingerprinter.hash(texts)
        if self._hasher is not None:
            with _Timed(work, "signatures"):
                self._hasher.signatures(texts)


def _encoded(engine: Engine, texts: pa.LargeStringArray) -> Iterator[int]:
    """Tokens of each group of texts, with one more a document."""
    for group in groups(texts, engine.batch_bytes):
        flat, _ = engine.encode(group)
        yield len(flat) + len(group)


def _head(config: Config, prepared: Prepared, unit: Unit) -> Iterator[tuple[pa.LargeStringArray, int, float]]:
    """The first texts of a unit, up to the size of the sample, with the input they took and the time."""
    read = 0
    started = time.process_time()
    for documents in UnitReader(Reading(unit, prepared.sets[unit.dataset].text, config.clean_rules)):
        seconds = time.process_time() - started
        texts, taken = documents.texts, documents.bytes_read
        size = byte_count(texts)
        if size > SAMPLE_BYTES and len(texts) > 1:
            fewer = max(1, len(texts) * SAMPLE_BYTES // size)
            texts = texts[:fewer]
            part = byte_count(texts) / size
            taken, seconds = int(taken * part), seconds * part
        read += byte_count(texts)
        yield texts, taken, seconds
        if read >= SAMPLE_BYTES:
            return
        started = time.process_time()


def _packed_ratios(units: list[Unit]) -> dict[str, float]:
    """How much larger the heads of compressed files are than what they are packed in, by compression."""
    packed: Counter[str] = Counter()
    unpacked: Counter[str] = Counter()
    for slice in (unit.slices[0] for unit in units):
        if slice.compression is not None:
            with open_bytes(slice.path) as file:
                counted = _CountedReads(file)
                unpacked[slice.compression] += _size_of_head(counted, slice.compression)
                packed[slice.compression] += counted.size
    return {kind: unpacked[kind] / size for kind, size in packed.items() if size and unpacked[kind]}


def _size_of_head(file: _CountedReads, compression: str) -> int:
    size = 0
    try:
        for block in read_blocks(file, compression, 1 << 20):  # type: ignore[arg-type]
            size += len(block)
            if size >= _UNPACKED_SAMPLE:
                break
    except DamagedError:
        pass
    return size


class _CountedReads:
    """A file that knows how much was read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size = file, 0

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.size += len(data)
        return data


def keeps_texts(config: Config, text_bytes: float) -> bool:
    """Whether the first pass keeps its texts for the second: where they take a small part of the free disk."""
    return text_bytes < _free_bytes(config) // TEXTS_PART_OF_DISK


def _free_bytes(config: Config) -> int:
    return shutil.disk_usage(_existing(Path(config.out))).free


def _existing(path: Path) -> Path:
    """The nearest folder that exists."""
    return next(parent for parent in itertools.chain([path.absolute()], path.absolute().parents) if parent.exists())
