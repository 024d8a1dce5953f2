"""What a job needs at any size: shards, disk stage by stage, time on one machine or several.

Arithmetic on constants that were measured (docs/scale.md says how, and how far the results were off); nothing is read.
Times are those of a machine like the one they were measured on, with what is read in its memory or on disks that are
never what others wait for. What depends on the data more than on its size, pairs and drops, is as in the corpora
measured.

How many workers the budget holds: what each of them loads, unpacks and works with.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from milldam.config.settings import Config
from milldam.dedup import DECIDE, GROUP, NEAR, RANK, SHINGLE, VERIFY
from milldam.errors import ResourceError
from milldam.memory import Budget, format_size, usage
from milldam.pipeline.preparing import Prepared
from milldam.rules import NearRules
from milldam.run.pools import (
    FILTER_BYTES,
    FUNCTION_BYTES,
    LANGUAGE_BYTES,
    SMALL_INPUT,
    TABLE_BYTES,
    WORK_BYTES,
    WORKER_BYTES,
    Pool,
    Workers,
    fit_workers,
)
from milldam.sources.compression import STDIN
from milldam.sources.units import Slice

# ---- bytes a document ----
HASH_BYTES, TEXT_OFFSET_BYTES, STAGED_BYTES = 17, 8, 24
GROUPING_BYTES = 40
"""While a partition is grouped: 9 to 31, and DuckDB's own files."""
BAND_BYTES, MARK_BYTES, RANK_BYTES, VERDICT_BYTES = 8, 2, 24, 15
"""A key of a band; marks of each document; ranks, while they are made; what is said of it while it is decided on."""
PREFERENCE_BYTES = 8
"""What decides on near-duplicates; as much again while ranks are made, where it takes more bits than fit into a key."""
PAIR_BYTES, EDGE_BYTES, ALIKE_SHARE = 45, 10, 0.5
"""Pairs depend on the data: 13 where 11 % are near-duplicates, 45 where 25 % are. A pair that is alike; their share."""
PAIRED_SHARE, SHINGLE_BYTES, SKETCH_BYTES = 0.3, 0.7, 16
"""Of the documents, those in pairs, where 25 % are near-duplicates; of a byte of text, what its shingles take; and of a
document, where they are."""
INDEX_BYTES, DEDUP_INDEX_BYTES = 20, 14
INDEX_HEAD_BYTES = 42
"""Of a shard's `.idx`."""
# ---- seconds of one core ----
GROUP_SECONDS, GROUP_FILE_SECONDS = 0.4e-6, 1.2e-3
"""A document; and a file of hashes in each partition, however little of it is read."""
BAND_SECONDS, DECIDE_SECONDS, PAIR_SECONDS, EDGE_SECONDS = 0.2e-6, 0.05e-6, 1.5e-6, 0.7e-6
"""A document and band; a document; a pair that is compared by shingles; one that is alike."""
RANK_SECONDS = 0.3e-6
SHINGLE_SHARE = 1.3
"""Of the time that signatures take, what sketches do: they are sorted."""
COMPARED_SHARE = 0.65
"""What is left of the pairs of all steps when each is taken once."""
DROP_FILE_SECONDS = 0.65e-3
"""To open a drop file for a unit."""
ARRANGE_SECONDS, PACK_SECONDS, PACK_TOKEN_SECONDS = 3.0e-9, 1.5e-6, 3.0e-9
"""A byte of tokens; a document; a byte of tokens in rows."""
REPORT_SECONDS = 10e-9
SCAN_SECONDS = 1.5e-9
"""A byte of text that is held against evaluation sets."""
KEPT_TEXT_SECONDS = 0.4e-9
"""A byte of text that is kept between the passes: writing and reading it."""
_STORE = ("tokens", "idx", "packed rows", "dedup index", "near-dedup index")
"""Files that stay."""


@dataclass(frozen=True, slots=True)
class Machines:
    """Who does the job."""

    nodes: int = 1
    workers: int = 1
    """On each."""


@dataclass(frozen=True, slots=True)
class Load:
    """What goes through a job."""

    documents: int
    text_bytes: int
    tokens: int
    token_bytes: int
    """All of them."""
    input_bytes: int
    units: int
    shard_size: int
    keeps_texts: bool
    work: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of one core by kind: read (and clean), hash, signatures, filter, encode, write."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What it comes to."""

    documents: int
    text_bytes: int
    tokens: int
    """Before anything is dropped."""
    store_bytes: int
    index_bytes: int
    """The `.idx` files, part of the store."""
    shards: int
    partitions: int
    """Of the hashes; 0 without exact dedup."""
    band_steps: int
    """Of the signatures; 0 without near-dedup."""
    disk: dict[str, dict[str, int]]
    """Stage -> kind of file -> bytes, when the stage has most of them."""
    seconds: dict[str, float]
    """Stage -> time."""

    @property
    def peak(self) -> tuple[str, int]:
        """The stage that takes most disk, and how much, the store included."""
        sizes = {stage: sum(kinds.values()) for stage, kinds in self.disk.items()}
        stage = max(sizes, key=sizes.__getitem__)
        return stage, sizes[stage]

    @property
    def temporary_bytes(self) -> dict[str, int]:
        """What is on disk meanwhile, by kind; not all of it at a time."""
        kinds: Counter[str] = Counter()
        for sizes in self.disk.values():
            kinds |= Counter(sizes)
        return {kind: size for kind, size in kinds.items() if kind not in _STORE}


def find_needs(config: Config, load: Load, stages: tuple[str, ...], machines: Machines) -> Needs:
    """What the stages of a job need on some machines."""
    sizes = _Sizes(config, load, stages)
    disk = {stage: _on_disk(sizes, stage, machines) for stage in stages if stage not in ("count", "report")}
    seconds = _seconds(sizes, machines)
    return Needs(
        documents=load.documents,
        text_bytes=load.text_bytes,
        tokens=load.tokens,
        store_bytes=load.token_bytes + sizes.index_bytes + sizes.packed_bytes,
        index_bytes=sizes.index_bytes,
        shards=sizes.shards,
        partitions=sizes.partitions,
        band_steps=sizes.band_steps,
        disk={stage: sizes for stage, sizes in disk.items() if sizes},
        seconds={stage: seconds[stage] for stage in stages},
    )


class _Sizes:
    """What follows from a load and its settings, whoever does the job."""

    def __init__(self, config: Config, load: Load, stages: tuple[str, ...]) -> None:
        dedup, packing = config.dedup_rules, config.packing_rules
        self.load, self.dedup, self.stages = load, dedup is not None, stages
        self.scan_seconds = load.text_bytes * SCAN_SECONDS if config.evaluation_sets else 0.0
        self.exact = dedup is not None and dedup.method == "exact"
        self.near: NearRules | None = None if dedup is None else dedup.near
        self.band_steps = self.partitions = self.verify_parts = 0
        if self.near is not None:
            from milldam.dedup.candidates import pair_steps
            from milldam.dedup.near import verify_parts

            self.band_steps, self.verify_parts = pair_steps(self.near), verify_parts(load.units)
        self.indexed = dedup is not None and dedup.index is not None
        # What goes into the index is verified against one day: all documents.
        self.paired_share = 1.0 if self.indexed else PAIRED_SHARE
        if GROUP in stages:
            from milldam.dedup.fingerprints import partition_count

            self.partitions = partition_count(load.input_bytes)
        # A unit is one shard, or several where it unpacks to more text than one holds; each once for every split.
        parts = max(1, round(load.text_bytes / max(1, load.units) / load.shard_size))
        self.shards = load.units * parts * (1 + len(config.split_shares) + len(config.validation_sets[:1]))
        self.index_bytes = load.documents * INDEX_BYTES + self.shards * INDEX_HEAD_BYTES
        self.packed_bytes = 0
        if packing is not None and packing.write:
            rows = load.tokens // (config.seq_len or 1)
            self.packed_bytes = load.token_bytes + (load.documents + rows // 2) * INDEX_BYTES


def _on_disk(sizes: _Sizes, stage: str, machines: Machines) -> dict[str, int]:
    """What lies there while a stage is at work: what the first pass left, until the end, and what is its own."""
    load, near = sizes.load, sizes.near
    kept = texts = {}
    if sizes.dedup:
        signatures = 0 if near is None else near.bands * near.rows
        kept = {"fingerprints": load.documents * HASH_BYTES, "signatures": load.documents * signatures}
        if near is not None and near.prefer != "first":
            kept["preferences"] = load.documents * PREFERENCE_BYTES
        texts = {"texts": load.text_bytes + load.documents * TEXT_OFFSET_BYTES} if load.keeps_texts else {}
    store = {"tokens": load.token_bytes, "idx": sizes.index_bytes}
    own = {
        # Kept texts go unit by unit as the store grows: the larger of the two is the most there is.
        "tokenize": max(texts, store, key=lambda kinds: sum(kinds.values())),
        "arrange": store | {"staged tokens": load.token_bytes + load.documents * STAGED_BYTES},
        "index": store | {"dedup index": load.documents * DEDUP_INDEX_BYTES} | _indexed_shingles(sizes),
        "pack": store | {"packed rows": sizes.packed_bytes},
    }
    found = kept | (own[stage] if stage in own else texts | _while_grouping(sizes, stage, machines))
    return {kind: size for kind, size in found.items() if size}


def _indexed_shingles(sizes: _Sizes) -> dict[str, int]:
    """What near-dedup needs of the runs of the index: made by this one, and copied to it."""
    if sizes.near is None or not sizes.indexed:
        return {}
    shingles = int(sizes.load.text_bytes * SHINGLE_BYTES)
    signatures = sizes.load.documents * (sizes.near.bands * sizes.near.rows + SKETCH_BYTES)
    return {"shingles": shingles, "near-dedup index": signatures + shingles}


def _while_grouping(sizes: _Sizes, stage: str, machines: Machines) -> dict[str, int]:
    load, near = sizes.load, sizes.near
    documents, pairs = load.documents, {"pairs": load.documents * PAIR_BYTES}
    if stage == GROUP and sizes.exact:
        return {"grouping": int(documents * GROUPING_BYTES * min(1.0, machines.nodes / sizes.partitions))}
    if stage == RANK:
        by_field = near is not None and near.preferred_field is not None
        return {"ranks": documents * (RANK_BYTES + (PREFERENCE_BYTES if by_field else 0))}
    if stage == NEAR and near is not None:
        at_once = min(machines.nodes * machines.workers, sizes.band_steps)
        bands = BAND_BYTES * -(-near.bands // sizes.band_steps) + MARK_BYTES
        return {"bands": documents * bands * at_once} | pairs
    shingles = {"shingles": int(load.text_bytes * SHINGLE_BYTES * sizes.paired_share)}
    edges = {"edges": int(documents * PAIR_BYTES / 8 * ALIKE_SHARE * EDGE_BYTES)}
    verdicts = {"verdicts": documents * VERDICT_BYTES}
    return {SHINGLE: pairs | shingles, VERIFY: pairs | shingles | edges, DECIDE: shingles | edges | verdicts}.get(
        stage, {}
    )


def _seconds(sizes: _Sizes, machines: Machines) -> dict[str, float]:
    """Units, bands and pairs are worked on by everyone; partitions by one process a node; the rest by one alone."""
    load, work, nodes, two_passes = sizes.load, sizes.load.work, machines.nodes, "fingerprint" in sizes.stages
    everyone = min(nodes * machines.workers, max(1, load.units))
    signatures = work["signatures"] if sizes.near is not None else 0.0
    again = load.text_bytes * KEPT_TEXT_SECONDS if two_passes and load.keeps_texts else work["read"]
    drops = load.units * (sizes.partitions + (DECIDE in sizes.stages)) * DROP_FILE_SECONDS
    partition = load.documents / max(1, sizes.partitions) * GROUP_SECONDS + load.units * GROUP_FILE_SECONDS
    bands = sizes.near.bands if sizes.near is not None else 0
    bands_seconds = load.documents * bands * BAND_SECONDS / max(1, min(nodes * machines.workers, sizes.band_steps))
    pairs = load.documents * PAIR_BYTES / 8 * COMPARED_SHARE
    return {
        "count": work["read"] / everyone,
        "fingerprint": (work["read"] + work["hash"] + signatures + sizes.scan_seconds) / everyone,
        "decontaminate": load.units * GROUP_FILE_SECONDS,
        GROUP: -(-sizes.partitions // nodes) * partition,
        RANK: load.documents * RANK_SECONDS,
        NEAR: bands_seconds,
        SHINGLE: (again + signatures * SHINGLE_SHARE * sizes.paired_share) / everyone,
        VERIFY: pairs * PAIR_SECONDS / max(1, min(everyone, sizes.verify_parts)),
        DECIDE: load.documents * DECIDE_SECONDS + pairs * ALIKE_SHARE * EDGE_SECONDS,
        "tokenize": (again + work["filter"] + work["encode"] + work["write"] + drops) / everyone,
        "arrange": load.token_bytes * ARRANGE_SECONDS / everyone,
        "index": load.documents * GROUP_SECONDS,
        "pack": load.documents * PACK_SECONDS + sizes.packed_bytes * PACK_TOKEN_SECONDS,
        "report": load.documents * REPORT_SECONDS,
    }


@dataclass(frozen=True, slots=True)
class Fitting:
    """The workers of one job."""

    config: Config
    prepared: Prepared
    budget: Budget
    pool: Pool
    dearest: tuple[int, Slice] | None = None
    """The slice that takes most memory to unpack, and the number of its dataset; None: not looked for yet."""

    def with_dearest(self, dearest: tuple[int, Slice] | None) -> Fitting:
        return replace(self, dearest=dearest)

    @property
    def loaded_bytes(self) -> int:
        """What a worker of the second pass holds besides its batches."""
        clean = self.config.clean_rules
        function = FUNCTION_BYTES if clean is not None and clean.function is not None else 0
        return self.prepared.tokenizer_bytes + self._filter_bytes + function + self.pool.overhead_bytes

    @property
    def _filter_bytes(self) -> int:
        filters = self.config.filters
        language = LANGUAGE_BYTES if filters.language is not None else 0
        return (FILTER_BYTES if filters.on_text else 0) + language

    @property
    def unpacking_bytes(self) -> int:
        """What a worker may hold of the input besides batches."""
        return self.dearest[1].unpacking if self.dearest is not None else 0

    @property
    def worker_bytes(self) -> int:
        """All that a worker of the second pass holds."""
        return WORKER_BYTES + self.loaded_bytes + self.unpacking_bytes + WORK_BYTES

    def fit(self, loaded_bytes: int, wanted: int, *, forked: bool = False) -> int:
        """How many workers the budget holds when each can unpack the largest part of the input."""
        parent, own = usage().anonymous, self.unpacking_bytes
        try:
            return fit_workers(self.budget, parent, loaded_bytes, wanted, own_bytes=own, forked=forked)
        except ResourceError as error:
            if self.dearest is None:
                raise
            from milldam.sources.tables import unpacking_place

            dataset, slice = self.dearest
            place = unpacking_place(slice, self.prepared.sets[dataset].text.text_column)
            size = format_size(slice.unpacking)
            told = f"\n{slice.path}, {place}, takes {size} of that to unpack."
            raise ResourceError(*error.args, told) from None

    def workers_for(self, units: int) -> dict[str, Any]:
        """What a plan says of the workers of the second pass."""
        useful = 1 if self.one_process else max(1, min(self.cores, units))
        parent = usage().anonymous
        workers = self.fit(self.loaded_bytes, useful, forked=self.pool.forks)
        held = parent if workers > 1 or self.pool.machine else 0
        return {"workers": workers, "useful": useful, "cores": self.cores, "held_bytes": held}

    def readers(self, units: int, *, judging: bool = False) -> Workers:
        """Who reads without encoding: no tokenizer takes memory, but filters do where they are asked."""
        wanted = 1 if self.one_process else self.cores
        useful = min(wanted, max(1, units))
        loaded = self.pool.overhead_bytes + (self._filter_bytes if judging else 0)
        if self.config.evaluation_sets:
            from milldam.decontamination.scanning import scanning_bytes

            loaded += scanning_bytes()
        count = self.fit(loaded, useful, forked=self.pool.forks)
        alone = self.fit(loaded, useful)
        return Workers(count, max(1, self.cores // count), here=self.one_process, alone=alone)

    def tokenizers(self, count: int, threads: int, share_bytes: int) -> Workers:
        """Who encodes: `count`, or as many as the budget holds where each has to load for itself.

        A forked worker whose encoder has little room left is replaced: a new one has the encoder without its caches,
        and shares it again, where renewing it would make a copy.
        """
        alone, most = self.fit(self.loaded_bytes, count), share_bytes - self.unpacking_bytes - TABLE_BYTES
        return Workers(count, threads, here=self.one_process, alone=alone, worker_bytes=most)

    @property
    def cores(self) -> int:
        """To use, on each machine."""
        return self.config.workers or self.pool.cores

    @property
    def one_process(self) -> bool:
        """Whether other processes are not worth their start, or could not open the input or know when it is enough."""
        config = self.config
        if config.limit is not None:
            return True
        small = self.prepared.identity.input["bytes"] < SMALL_INPUT
        if config.executor == "local" and config.workers is None and small:
            return True
        paths = (path for one in config.sources for path in one.paths)
        return any(path == STDIN or path.startswith("memory://") for path in paths)
