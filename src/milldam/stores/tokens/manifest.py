"""The manifest `milldam.json`: written last, and what makes a folder a store.

It holds nothing that differs between two runs of the same job: no times, no worker counts, no paths of this machine but
those of the input. So equal input and settings give equal bytes. A shard takes about 0.9 KB of memory (its line 0.4
KB): a store of 60,000 shards, 15 TB of text, about 55 MB and half a second.

A `Tally` is what became of the records of a dataset: read = rejected + dropped + kept. Counted once, from the records
of a run, and kept in the manifest; summary, `milldam stats` and report take every such figure from there. A document
that a weight repeats counts each time. Size: a number a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from milldam.files import hash_bytes
from milldam.stores.kinds import TOKENS, AuditFiles, Facts, FileRecord, TokenDtype
from milldam.stores.place import Folder

NAME, READ = TOKENS.manifest, "read"
STAGES = (READ, "clean", "dedup", "decontaminate", "sample", "filter", "encode", "arrange")
"""Where a record can be lost, in order: rejected in the first, dropped in the others."""
SHARD_FILES = ("bin", "idx", "spans", "labels")
"""How the names of a shard's files may end, in the order in which they name the shard."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The records of one dataset, or of several together."""

    name: str = ""
    read: int = 0
    """Records, those that were rejected among them."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Records that could not be read, by reason."""
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    """Documents by stage and reason."""
    documents: int = 0
    """Documents that were kept."""
    tokens: int = 0

    @property
    def reasons(self) -> dict[str, int]:
        """Documents that were dropped, by reason alone."""
        return dict(sorted(sum(map(Counter, self.dropped.values()), Counter[str]()).items()))

    @property
    def rejected_count(self) -> int:
        return sum(self.rejected.values())

    @property
    def dropped_count(self) -> int:
        return sum(self.reasons.values())

    def flow(self) -> list[dict[str, Any]]:
        """Records into and out of each stage, with the reasons of what was lost there, the most frequent first."""
        documents, flow = self.read, []
        for stage in STAGES:
            lost = Counter(self.rejected if stage == READ else self.dropped.get(stage, {}))
            left = documents - lost.total()
            reasons = dict(lost.most_common())
            flow.append({"stage": stage, "documents_in": documents, "documents_out": left, "dropped": reasons})
            documents = left
        return flow


@dataclass(frozen=True, slots=True)
class Shard:
    """One pair of files, `name.bin` and `name.idx`; of conversations also `name.spans`, and `name.labels`."""

    name: str
    split: str
    documents: int
    tokens: int
    text_bytes: int
    characters: int
    bin: FileRecord
    """Size and hash of the token file."""
    idx: FileRecord
    """Size and hash of the index file."""
    spans: FileRecord | None = None
    """The same of what is trained on; None: all of it."""
    labels: FileRecord | None = None
    """The same of a label a document; None: there are none."""
    unit: int | None = None
    """The unit of the plan that it is of; None: a unit by itself. Set, as `part`, when the manifest is made."""
    part: int | None = None
    """Which part of the unit it is of, where that has several."""

    @property
    def files(self) -> dict[str, FileRecord]:
        """Size and hash of each file, by how its name ends."""
        known = ((ending, getattr(self, ending)) for ending in SHARD_FILES)
        return {ending: record for ending, record in known if record is not None}


@dataclass(frozen=True, slots=True)
class Manifest:
    dtype: TokenDtype
    vocab_size: int
    tokenizer: Facts
    """Name, hash of `tokenizer.json`, and its special tokens with their ids and the policy used.

    A store that was made without one has no hash, and no `tokenizer.json`.
    """
    encoder: str
    """The encoder, with its version."""
    settings: dict[str, Any]
    """Every setting that changes the result."""
    input: Facts
    """Number, size and fingerprint of the input files."""
    shards: tuple[Shard, ...]
    """Training first, then the other splits by name."""
    sources: tuple[Tally, ...] = ()
    """The records of each dataset, in plan order; none: it was not made from records."""
    damaged_files: int = 0
    """Input files that were damaged: what came before the damage is in the store, though no checksum proves it."""
    chat: Facts | None = None
    """Facts of its conversations; None: it has none."""
    units: int | None = None
    """How many units its plan had, of which some may have left no shard; None: every shard is one."""
    audit: AuditFiles | None = None
    """The files of what was set aside when it was made (`kinds.write_audit`); None: there are none."""

    @property
    def totals(self) -> dict[str, int]:
        names = ("documents", "tokens", "text_bytes", "characters")
        return {"shards": len(self.shards)} | {name: sum(getattr(one, name) for one in self.shards) for name in names}

    @property
    def counts_by_split(self) -> dict[str, dict[str, int]]:
        """Documents and tokens of each split, in order."""
        counted: dict[str, dict[str, int]] = {}
        for shard in self.shards:
            of_split = counted.setdefault(shard.split, {"documents": 0, "tokens": 0})
            of_split["documents"] += shard.documents
            of_split["tokens"] += shard.tokens
        return counted

    @property
    def tally(self) -> Tally:
        """All records together; where nothing is known, every document was one."""
        counted, counts = self.totals, Counter[str]()
        every = Tally("", counted["documents"], documents=counted["documents"], tokens=counted["tokens"])
        rejected: Counter[str] = Counter()
        dropped: dict[str, Counter[str]] = {stage: Counter() for stage in STAGES}
        for one in self.sources or (every,):
            counts.update(read=one.read, documents=one.documents, tokens=one.tokens)
            rejected.update(one.rejected)
            for stage, reasons in one.dropped.items():
                dropped[stage].update(reasons)
        by_stage = {stage: dict(reasons) for stage, reasons in dropped.items() if reasons}
        return Tally("", counts["read"], dict(rejected), by_stage, counts["documents"], counts["tokens"])

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal tokens in equal order."""
        return hash_bytes("".join(record["xxh3"] for _, record in self.files()).encode())

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield from ((f"{shard.name}.{ending}", record) for ending, record in shard.files.items())

    def write(self, folder: Path) -> None:
        facts = {one.name: getattr(self, one.name) for one in fields(self)} | {"shards": []}
        facts |= {"sources": [asdict(one) for one in self.sources]}
        known = {name: fact for name, fact in facts.items() if fact is not None}
        lines = ({name: fact for name, fact in asdict(shard).items() if fact is not None} for shard in self.shards)
        TOKENS.write(folder, {"totals": self.totals, "fingerprint": self.fingerprint} | known, lines)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        manifest: Manifest = TOKENS.read(Folder(folder))
        return manifest
