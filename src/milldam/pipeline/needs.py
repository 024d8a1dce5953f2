"""What a job needs at any size: shards, disk stage by stage, time on one machine or several, the start of a loader.

Arithmetic on constants that were measured (docs/scale.md says how, and how far the results were off); nothing is read.
Times are those of a machine like the one they were measured on, with what is read in its memory or on disks that are
never what others wait for. What depends on the data more than on its size, pairs and drops, is as in the corpora
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from milldam.config.settings import Config
from milldam.dedup.fingerprints import partition_count
from milldam.dedup.rules import DedupRules, NearRules
from milldam.pipeline.resolving import GROUP, JOIN, NEAR

# ---- bytes a document ----
HASH_BYTES = 17
TEXT_OFFSET_BYTES = 8
GROUPING_BYTES = 40
"""While a partition is grouped: 9 to 31, and DuckDB's own files."""
BAND_BYTES, LABEL_BYTES = 8, 13
"""A key of a band; label, size and mark of each document while pairs are joined."""
PAIR_BYTES = 45
"""Depends on the data: 13 where 11 % are near-duplicates, 45 where 25 % are."""
INDEX_BYTES, DEDUP_INDEX_BYTES = 20, 14
# ---- bytes a shard ----
MANIFEST_BYTES, RECORD_BYTES, INDEX_HEAD_BYTES = 350, 420, 42
TIMELINE_BYTES = 60
"""A line of the memory timeline: one a process and second."""
# ---- seconds of one core ----
GROUP_SECONDS, GROUP_FILE_SECONDS = 0.4e-6, 1.2e-3
"""A document; and a file of hashes in each partition, however little of it is read."""
BAND_SECONDS, JOIN_SECONDS, PAIR_SECONDS = 0.16e-6, 0.12e-6, 1.3e-6
"""A document and band; a document; a pair that is compared."""
COMPARED_SHARE = 0.65
"""What is left of the pairs of all steps when each is taken once."""
DROP_FILE_SECONDS = 0.65e-3
"""To open a drop file for a unit."""
ARRANGE_SECONDS, PACK_SECONDS, PACK_TOKEN_SECONDS = 3.0e-9, 1.5e-6, 3.0e-9
"""A byte of tokens; a document; a byte of tokens in rows."""
REPORT_SECONDS = 10e-9
KEPT_TEXT_SECONDS = 0.4e-9
"""A byte of text that is kept between the passes: writing and reading it."""
# ---- a loader, for each shard ----
OPEN_SECONDS, FIRST_BATCH_SECONDS, LOADER_BYTES = 11e-6, 16e-6, 1700

_ALONE = (JOIN, "index", "pack", "report")
"""Stages that one process does."""


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
    plan_bytes: int
    """The lists of files and units."""
    shard_size: int
    keeps_texts: bool
    work: dict[str, float]
    """Seconds of one core by kind: read (and clean), hash, signatures, filter, encode, write."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What it comes to."""

    shards: int
    manifest_bytes: int
    run_folder_bytes: int
    """What stays of it when the store is finished."""
    index_bytes: int
    """The `.idx` files, part of the store."""
    packed_bytes: int
    partitions: int
    """Of the hashes; 0 without exact dedup."""
    band_steps: int
    """Of the signatures; 0 without near-dedup."""
    dedup_index_bytes: int
    """What the run adds to the index across runs."""
    disk: dict[str, dict[str, int]] = field(default_factory=dict)
    """Stage -> kind of file -> bytes, when the stage has most of them."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Stage -> time."""
    loader: dict[str, float] = field(default_factory=dict)
    """Seconds to open the store and to the first batch, and bytes of memory of each process that has it open."""

    @property
    def peak(self) -> tuple[str, int]:
        """The stage that takes most disk, and how much."""
        sizes = {stage: sum(kinds.values()) for stage, kinds in self.disk.items()}
        stage = max(sizes, key=sizes.__getitem__)
        return stage, sizes[stage]


def find_needs(config: Config, load: Load, stages: tuple[str, ...], machines: Machines) -> Needs:
    """What the stages of a job need on some machines."""
    return _Reckoning(config, load, stages, machines).needs()


@dataclass(frozen=True, slots=True)
class _Reckoning:
    config: Config
    load: Load
    stages: tuple[str, ...]
    machines: Machines

    def needs(self) -> Needs:
        shards, seconds = self._shards, self._seconds()
        timeline = sum(TIMELINE_BYTES * seconds[stage] * self._processes(stage) for stage in seconds)
        return Needs(
            shards=shards,
            manifest_bytes=1500 + shards * MANIFEST_BYTES,
            run_folder_bytes=int(self.load.plan_bytes + shards * RECORD_BYTES + timeline),
            index_bytes=self._index_bytes,
            packed_bytes=self._packed_bytes,
            partitions=self._partitions if GROUP in self.stages else 0,
            band_steps=self._band_steps,
            dedup_index_bytes=self.load.documents * DEDUP_INDEX_BYTES if "index" in self.stages else 0,
            disk=self._disk(),
            seconds=seconds,
            loader={
                "open_seconds": shards * OPEN_SECONDS,
                "first_batch_seconds": shards * (OPEN_SECONDS + FIRST_BATCH_SECONDS),
                "memory_bytes": shards * LOADER_BYTES,
            },
        )

    def _processes(self, stage: str) -> int:
        """At work in a stage, with the one that hands out the work."""
        nodes = self.machines.nodes
        if stage in _ALONE:
            return 2
        return 1 + nodes * (1 if stage in (GROUP, NEAR) else self.machines.workers)

    # ---- counts and sizes ----

    @property
    def _dedup(self) -> DedupRules | None:
        return self.config.dedup_rules

    @property
    def _near(self) -> NearRules | None:
        return None if self._dedup is None else self._dedup.near

    @property
    def _shards(self) -> int:
        """A unit is one, or several where it unpacks to more text than a shard holds; each once for every split."""
        load = self.load
        parts = max(1, round(load.text_bytes / max(1, load.units) / load.shard_size))
        shares = len(self.config.split_shares) + len(self.config.validation_sets[:1])
        return load.units * parts * (1 + shares)

    @property
    def _partitions(self) -> int:
        return partition_count(self.load.input_bytes)

    @property
    def _band_steps(self) -> int:
        from milldam.dedup.near import pair_steps

        return 0 if self._near is None else pair_steps(self._near)

    @property
    def _index_bytes(self) -> int:
        return self.load.documents * INDEX_BYTES + self._shards * INDEX_HEAD_BYTES

    @property
    def _packed_bytes(self) -> int:
        rules = self.config.packing_rules
        if rules is None or not rules.write:
            return 0
        rows = self.load.tokens // (self.config.sequence_len or 1)
        return self.load.token_bytes + (self.load.documents + rows // 2) * INDEX_BYTES

    # ---- disk ----

    def _disk(self) -> dict[str, dict[str, int]]:
        kinds = {stage: self._on_disk(stage) for stage in self.stages if stage not in ("count", "report")}
        found = {stage: {kind: size for kind, size in sizes.items() if size} for stage, sizes in kinds.items()}
        return {stage: sizes for stage, sizes in found.items() if sizes}

    def _on_disk(self, stage: str) -> dict[str, int]:
        """What lies there while a stage is at work."""
        load = self.load
        store = {"tokens": load.token_bytes, "idx": self._index_bytes}
        passes = {
            "tokenize": self._while_tokenizing(store),
            "arrange": store | {"staged tokens": load.token_bytes + load.documents * 24},
            "index": store | {"dedup index": load.documents * DEDUP_INDEX_BYTES},
            "pack": store | {"packed rows": self._packed_bytes},
        }
        kept = self._kept()
        if stage in passes:
            return kept | passes[stage]
        return kept | self._texts() | self._while_grouping(stage)

    def _kept(self) -> dict[str, int]:
        """What the first pass leaves, until the end."""
        if self._dedup is None:
            return {}
        near = self._near
        signatures = 0 if near is None else near.bands * near.rows
        return {"fingerprints": self.load.documents * HASH_BYTES, "signatures": self.load.documents * signatures}

    def _texts(self) -> dict[str, int]:
        load = self.load
        kept = self._dedup is not None and load.keeps_texts
        return {"texts": load.text_bytes + load.documents * TEXT_OFFSET_BYTES if kept else 0}

    def _while_tokenizing(self, store: dict[str, int]) -> dict[str, int]:
        """Kept texts go unit by unit as the store grows: the larger of the two is the most there is."""
        texts = self._texts()
        return texts if sum(texts.values()) > sum(store.values()) else store

    def _while_grouping(self, stage: str) -> dict[str, int]:
        load, nodes = self.load, self.machines.nodes
        if stage == GROUP and self._dedup is not None and self._dedup.method == "exact":
            share = min(1.0, nodes / self._partitions)
            return {"grouping": int(load.documents * GROUPING_BYTES * share)}
        if stage == NEAR and self._near is not None:
            at_once = min(nodes, self._band_steps) * -(-self._near.bands // self._band_steps)
            return {"bands": load.documents * (BAND_BYTES * at_once + 1), "pairs": load.documents * PAIR_BYTES}
        if stage == JOIN:
            return {"labels": load.documents * LABEL_BYTES, "pairs": load.documents * PAIR_BYTES}
        return {}

    # ---- time ----

    def _seconds(self) -> dict[str, float]:
        """Units are worked on by everyone; partitions and bands by one process a node; the rest by one alone."""
        load, nodes = self.load, self.machines.nodes
        everyone = min(nodes * self.machines.workers, max(1, load.units))
        work = load.work
        again = load.text_bytes * KEPT_TEXT_SECONDS if load.keeps_texts else work.get("read", 0.0)
        drops = load.units * self._drop_files * DROP_FILE_SECONDS
        partition = load.documents / self._partitions * GROUP_SECONDS + load.units * GROUP_FILE_SECONDS
        bands = self._near.bands if self._near is not None else 0
        step = load.documents * bands * BAND_SECONDS / max(1, self._band_steps)
        pairs = load.documents * PAIR_BYTES / 8 * COMPARED_SHARE
        known = {
            "count": work.get("read", 0.0) / everyone,
            "fingerprint": self._first_pass / everyone,
            GROUP: -(-self._partitions // nodes) * partition,
            NEAR: -(-self._band_steps // nodes) * step,
            JOIN: load.documents * JOIN_SECONDS + pairs * PAIR_SECONDS,
            "tokenize": (again * ("fingerprint" in self.stages) + self._second_pass + drops) / everyone,
            "arrange": load.token_bytes * ARRANGE_SECONDS / everyone,
            "index": load.documents * GROUP_SECONDS,
            "pack": load.documents * PACK_SECONDS + self._packed_bytes * PACK_TOKEN_SECONDS,
            "report": load.documents * REPORT_SECONDS,
        }
        return {stage: known[stage] for stage in self.stages}

    @property
    def _first_pass(self) -> float:
        kinds = ("read", "hash") if self._near is None else ("read", "hash", "signatures")
        return sum(self.load.work.get(kind, 0.0) for kind in kinds)

    @property
    def _second_pass(self) -> float:
        work = self.load.work
        own = sum(work.get(kind, 0.0) for kind in ("filter", "encode", "write"))
        return own if "fingerprint" in self.stages else own + work.get("read", 0.0)

    @property
    def _drop_files(self) -> int:
        exact = self._partitions if GROUP in self.stages else 0
        return exact + (JOIN in self.stages)
