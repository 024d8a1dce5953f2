"""The manifest `milldam.json`: written last, and what makes a folder a store.

It holds nothing that differs between two runs of the same job: no times, no worker counts, no paths of this machine but
those of the input. So equal input and settings give equal bytes.

A shard is a line of it; they are written and read some hundreds at a time. Read, a shard takes about 0.9 KB of memory
(its text 0.4 KB): a store of 60,000 shards, 15 TB of text, about 55 MB and half a second.

A `Tally` is what became of the records of a dataset: read = rejected + dropped + kept. Counted once, from the records
of a run, and kept in the manifest; summary, `milldam stats` and report take every such figure from there. A document
that a weight repeats counts each time. Size: a number a reason.

`ShardSpool` makes a manifest of shards in plan order without holding them: the text of each split goes to a file of its
own, and the manifest is put together from these. Disk: a second manifest until it is written. Memory: some buffers.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

import xxhash

from milldam.checked import checked
from milldam.files import explain_os_errors, hash_bytes
from milldam.stores.kinds import (
    TOKENS,
    AuditFiles,
    ChatFacts,
    FileRecord,
    InputFacts,
    ManifestText,
    TokenDtype,
    TokenizerFacts,
)
from milldam.stores.place import Folder, Place

READ = "read"
STAGES = (READ, "clean", "dedup", "decontaminate", "sample", "filter", "encode", "arrange")
"""Where a record can be lost, in order: rejected in the first, dropped in the others."""


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

    @classmethod
    def of(cls, name: str, counts: Mapping[str, int], lost: Mapping[tuple[str, str], int]) -> Tally:
        """From documents (`read` without the rejected ones), and what was lost by stage and reason."""
        by_stage: dict[str, dict[str, int]] = {stage: {} for stage in STAGES}
        for (stage, reason), count in sorted(lost.items()):
            by_stage[stage][reason] = count
        rejected = by_stage.pop(READ)
        dropped = {stage: reasons for stage, reasons in by_stage.items() if reasons}
        read = counts[READ] + sum(rejected.values())
        return cls(name, read, rejected, dropped, counts["documents"], counts["tokens"])

    @property
    def reasons(self) -> dict[str, int]:
        """Documents that were dropped, by reason alone."""
        return dict(sorted(_summed(self.dropped.values()).items()))

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


def total(tallies: Iterable[Tally]) -> Tally:
    """Those of several datasets together."""
    several = tuple(tallies)
    dropped = {stage: dict(_summed(one.dropped.get(stage, {}) for one in several)) for stage in STAGES}
    return Tally(
        read=sum(one.read for one in several),
        rejected=dict(_summed(one.rejected for one in several)),
        dropped={stage: reasons for stage, reasons in dropped.items() if reasons},
        documents=sum(one.documents for one in several),
        tokens=sum(one.tokens for one in several),
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for one in counts:
        summed.update(one)
    return summed


NAME = TOKENS.manifest
_HASH = re.compile(rb'"xxh3": "([0-9a-f]+)"')
_BLOCK_BYTES = 1 << 18
SHARD_FILES = ("bin", "idx", "spans", "labels")
"""How the names of a shard's files may end, in the order in which they name the shard."""


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

    def named_files(self) -> Iterator[tuple[str, FileRecord]]:
        return ((f"{self.name}.{ending}", record) for ending, record in self.files.items())

    def as_line(self) -> str:
        known = ((one.name, getattr(self, one.name)) for one in fields(self))
        return json.dumps({name: value for name, value in known if value is not None}, ensure_ascii=False)


SHARD = Shard


@dataclass(slots=True)
class Totals:
    """Sums over shards."""

    shards: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    characters: int = 0

    @classmethod
    def of(cls, counted: Iterable[Shard | Totals]) -> Totals:
        sums = cls()
        for one in counted:
            sums.shards += one.shards if isinstance(one, Totals) else 1
            sums.documents += one.documents
            sums.tokens += one.tokens
            sums.text_bytes += one.text_bytes
            sums.characters += one.characters
        return sums

    def as_json(self) -> dict[str, int]:
        """As the manifest has them."""
        return {"documents": self.documents, "tokens": self.tokens, "text_bytes": self.text_bytes}


def totals_by_split(shards: Iterable[Shard]) -> dict[str, Totals]:
    """In the order the splits come; holds no shard."""
    splits: dict[str, Totals] = {}
    for shard in shards:
        splits[shard.split] = Totals.of((splits.get(shard.split, Totals()), shard))
    return splits


@dataclass(frozen=True, slots=True)
class Manifest:
    dtype: TokenDtype
    vocab_size: int
    tokenizer: TokenizerFacts
    """Name, hash of `tokenizer.json`, and its special tokens with their ids and the policy used.

    A store that was made without one has no hash, and no `tokenizer.json`.
    """
    encoder: str
    """The encoder, with its version."""
    settings: dict[str, Any]
    """Every setting that changes the result."""
    input: InputFacts
    """Number, size and fingerprint of the input files."""
    shards: tuple[Shard, ...]
    sources: tuple[Tally, ...] = ()
    """The records of each dataset, in plan order; none: it was not made from records."""
    damaged_files: int = 0
    """Input files that were damaged: what came before the damage is in the store, though no checksum proves it."""
    chat: ChatFacts | None = None
    """Facts of its conversations; None: it has none."""
    units: int | None = None
    """How many units its plan had, of which some may have left no shard; None: every shard is one."""
    audit: AuditFiles | None = None
    """The files of what was set aside when it was made (`kinds.write_audit`); None: there are none."""

    @property
    def sums(self) -> Totals:
        return Totals.of(self.shards)

    @property
    def documents(self) -> int:
        return self.sums.documents

    @property
    def tokens(self) -> int:
        return self.sums.tokens

    @property
    def text_bytes(self) -> int:
        return self.sums.text_bytes

    @property
    def characters(self) -> int:
        return self.sums.characters

    @property
    def totals(self) -> dict[str, int]:
        return self.sums.as_json()

    @property
    def tally(self) -> Tally:
        """All records together; where nothing is known, every document was one."""
        if not self.sources:
            return Tally(read=self.documents, documents=self.documents, tokens=self.tokens)
        return total(self.sources)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal tokens in equal order."""
        return hash_bytes("".join(file["xxh3"] for _, file in self.files()).encode())

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for shard in self.shards:
            yield from shard.named_files()

    def write(
        self, folder: Path, sums: tuple[Totals, str] | None = None, shards: Iterable[list[bytes]] | None = None
    ) -> None:
        """`shards`: the lines of shards, some at a time, in the place of its own; `sums`: their totals and
        fingerprint."""
        totals, fingerprint = sums or (self.sums, self.fingerprint)
        facts = {one.name: getattr(self, one.name) for one in fields(self)}
        facts |= {"sources": [asdict(one) for one in self.sources], "shards": []}
        facts = {name: fact for name, fact in facts.items() if fact is not None}
        lines = ([shard.as_line().encode()] for shard in self.shards)
        summed = {"totals": totals.as_json(), "fingerprint": fingerprint}
        TOKENS.write(folder, summed | facts, lines if shards is None else shards)

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        return read(Folder(folder))


def read(place: Place) -> Manifest:
    """The manifest of a store, wherever it lies."""
    return replace(read_facts(place), shards=tuple(read_shards(place)))


def read_facts(place: Place) -> Manifest:
    """All but the shards, in milliseconds however many there are."""
    return checked(Manifest, ManifestText(TOKENS, place).head() | {"shards": []}, f"{place.name}/{NAME}")


def read_shards(place: Place) -> Iterator[Shard]:
    """Every shard, in order; some are held at a time."""
    for shard in ManifestText(TOKENS, place).shards(Shard):
        object.__setattr__(shard, "split", sys.intern(shard.split))  # one string for all shards of a split
        yield shard


class ShardSpool:
    """Shards of a manifest to be, a line each in a temporary file for each split."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, IO[bytes]] = {}
        self._totals: dict[str, Totals] = {}

    def fill(self, shards: Iterable[Shard]) -> None:
        """Take all shards, in plan order; the splits may come in any."""
        with explain_os_errors(self._folder / NAME):
            for shard in shards:
                if shard.split not in self._texts:
                    self._totals[shard.split] = Totals()
                    self._texts[shard.split] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                self._texts[shard.split].write(shard.as_line().encode() + b"\n")
                self._totals[shard.split] = Totals.of((self._totals[shard.split], shard))

    @property
    def splits(self) -> dict[str, Totals]:
        """Training first; the others by name."""
        return {name: self._totals[name] for name in sorted(self._totals, key=in_manifest_order)}

    def write(self, facts: Manifest, folder: Path) -> None:
        """Make the manifest, with these shards in the place of its own."""
        fingerprint = xxhash.xxh3_128()
        for lines in self._lines():
            for found in _HASH.finditer(b"".join(lines)):
                fingerprint.update(found[1])
        facts.write(folder, (Totals.of(self._totals.values()), fingerprint.hexdigest()), self._lines())

    def __del__(self) -> None:
        for text in self._texts.values():
            text.close()

    def _lines(self) -> Iterator[list[bytes]]:
        for split in self.splits:
            file = self._texts[split]
            file.seek(0)
            while lines := file.readlines(_BLOCK_BYTES):
                yield [line[:-1] for line in lines]


def in_manifest_order(split: str) -> tuple[bool, str]:
    return split != "train", split
