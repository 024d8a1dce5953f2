"""What a job will take, before it begins: documents, tokens, disk, time.

From a small sample spread over the input (at most a quarter of a megabyte of each of some sixteen units), or, for the
check of the disk that every job begins with, from typical text. The figures are estimates and are called so.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from milldam.config import Config
from milldam.errors import ResourceError
from milldam.job.preparing import Prepared, Source, wanted_rows
from milldam.memory import format_size, release
from milldam.passes.documents import Reading, UnitReader
from milldam.sources.units import Unit
from milldam.store.format import token_dtype
from milldam.text_arrays import byte_count
from milldam.tokenizers.encoder import groups
from milldam.tokenizers.engines import make_engine

UNITS_SAMPLED = 8
SAMPLE_BYTES = 256 << 10
# Measured (docs/log.md), bytes a document: fingerprints with their row numbers; what grouping puts on disk on its way.
HASH_BYTES, GROUPING_BYTES, NEAR_BYTES = 20, 40, 65
INDEX_BYTES = 20
TEXTS_PART_OF_DISK = 8
"""Texts are kept between the passes when they fit this many times on the free disk."""
READ_RATE, NEAR_RATE = 200e6, 50e6
"""Bytes a second of the first pass on one core, without and with signatures."""
ENCODE_EFFICIENCY = 0.6
"""What is left of the engine's own speed with reading and writing around it."""
_PACKED_RATIO = {None: 1.0, "gz": 3.0, "zst": 3.5, "bz2": 4.0, "xz": 4.5}


@dataclass(frozen=True, slots=True)
class Estimate:
    documents: int
    text_bytes: int
    tokens: int
    store_bytes: int
    temporary_bytes: dict[str, int] = field(default_factory=dict)
    """What is on disk meanwhile, by kind."""
    seconds: float = 0.0
    free_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        return self.store_bytes + sum(self.temporary_bytes.values())


@dataclass(slots=True)
class Sample:
    """How much text, how many documents and tokens some input held, and how long encoding it took."""

    input_bytes: int = 0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    seconds: float = 0.0


TYPICAL = Sample(input_bytes=4500, text_bytes=4400, documents=2, tokens=1000, seconds=4400 / 50e6)


def estimate(
    config: Config, prepared: Prepared, input_bytes: dict[int, float], sample: Sample, workers: int
) -> Estimate:
    """What so much input by data set, unpacked, will take when it is like the sample."""
    per_byte = sample.documents / max(1, sample.input_bytes)
    wanted = (_wanted(prepared.sources[k], size * per_byte) for k, size in input_bytes.items())
    scale = sum(wanted) / max(1, sample.documents)
    documents, text = int(sample.documents * scale), int(sample.text_bytes * scale)
    tokens = int(sample.tokens * scale)
    width = 2 if token_dtype(prepared.vocab_size) == "uint16" else 4
    store = tokens * width + documents * INDEX_BYTES
    packing = config.packing_rules
    if packing is not None and packing.write:
        store += tokens * width
    return Estimate(
        documents=documents,
        text_bytes=text,
        tokens=tokens,
        store_bytes=store,
        temporary_bytes=_temporary(config, documents, text, tokens * width),
        seconds=_seconds(config, text, sample, workers),
        free_bytes=_free_bytes(config),
    )


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


def survey(units: Iterable[Unit]) -> tuple[dict[int, float], list[Unit]]:
    """The size of every data set, unpacked, and some units, spread evenly; holds few however many there are."""
    kept: list[Unit] = []
    sizes: dict[int, float] = {}
    step = 1
    for count, unit in enumerate(unit for unit in units if not unit.copy):
        sizes[unit.dataset] = sizes.get(unit.dataset, 0.0) + unpacked_bytes(unit)
        if count % step == 0:
            kept.append(unit)
            if len(kept) > 2 * UNITS_SAMPLED:
                kept, step = kept[::2], step * 2
    return sizes, kept


def unpacked_bytes(unit: Unit) -> float:
    """About the size of its input without compression."""
    return sum(slice.size * _PACKED_RATIO.get(slice.compression, 1.0) for slice in unit.slices)


def measure(config: Config, prepared: Prepared, units: list[Unit], engine_name: str) -> Sample:
    """Read and encode the heads of some units."""
    sample = Sample()
    plain = config.tokenizer_rules.special_text == "plain"
    engine = make_engine(engine_name, prepared.tokenizer_json, plain_specials=plain, threads=1)
    for unit in units:
        for texts, bytes_read in _head(config, prepared, unit):
            sample.input_bytes += bytes_read
            sample.text_bytes += byte_count(texts)
            sample.documents += len(texts)
            started = time.perf_counter()
            for group in groups(texts, engine.batch_bytes):
                flat, _ = engine.encode(group)
                sample.tokens += len(flat) + len(group)
            sample.seconds += time.perf_counter() - started
    del engine
    release()
    return sample


def _head(config: Config, prepared: Prepared, unit: Unit) -> Iterator[tuple[pa.LargeStringArray, int]]:
    """The first texts of a unit, up to the size of the sample."""
    read = 0
    for documents in UnitReader(Reading(unit, prepared.sets[unit.dataset].text, config.clean_rules)):
        texts, taken = documents.texts, documents.bytes_read
        size = byte_count(texts)
        if size > SAMPLE_BYTES and len(texts) > 1:
            fewer = max(1, len(texts) * SAMPLE_BYTES // size)
            texts = texts[:fewer]
            taken = taken * byte_count(texts) // size
        read += byte_count(texts)
        yield texts, taken
        if read >= SAMPLE_BYTES:
            return


def keeps_texts(config: Config, text_bytes: float) -> bool:
    """Whether the first pass keeps its texts for the second: where they take a small part of the free disk."""
    return text_bytes < _free_bytes(config) // TEXTS_PART_OF_DISK


def _free_bytes(config: Config) -> int:
    return shutil.disk_usage(_existing(Path(config.out))).free


def _temporary(config: Config, documents: int, text_bytes: int, token_bytes: int) -> dict[str, int]:
    found: dict[str, int] = {}
    rules = config.dedup_rules
    if rules is not None:
        found["fingerprints"] = documents * HASH_BYTES
        if keeps_texts(config, text_bytes):
            found["texts"] = text_bytes
        found["grouping"] = documents * GROUPING_BYTES if rules.method == "exact" else 0
        if rules.near is not None:
            found["signatures"] = documents * (rules.near.bands * rules.near.rows + NEAR_BYTES)
    if config.counts_tokens:
        found["staged tokens"] = token_bytes
    return {kind: size for kind, size in found.items() if size}


def _seconds(config: Config, text_bytes: int, sample: Sample, workers: int) -> float:
    rules = config.dedup_rules
    rate = sample.text_bytes / max(sample.seconds, 1e-9) * ENCODE_EFFICIENCY * workers
    seconds = text_bytes / max(rate, 1.0)
    if rules is not None:
        seconds += text_bytes / (READ_RATE if rules.near is None else NEAR_RATE) / workers
    return seconds


def _existing(path: Path) -> Path:
    """The nearest folder that exists."""
    return next(parent for parent in itertools.chain([path.absolute()], path.absolute().parents) if parent.exists())
