"""Everything the page tells, gathered from a store and its run folder.

Only the manifest and the index are needed. What `run/summary.json` and `run/memory.csv` tell comes on top; a damaged or
missing one costs only what it would tell: a page with less in it is better than none.

Lengths are counted, not collected: half a megabyte a split however many documents there are, read in blocks. Exact up
to 65,535 tokens a document, by powers of two beyond. A billion documents are some 4 GB of index to read. Of the
samples, spread evenly over the store, only the first tokens are decoded, so a document of gigabytes costs no more than
a short one.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milldam.files import read_sealed
from milldam.markup import shorten
from milldam.report.timeline import Timeline, read_timeline
from milldam.stores.tokens.format import Index, Int64s
from milldam.stores.tokens.manifest import Manifest
from milldam.stores.tokens.reader import Store, open_store

MAX_SPLITS = 50
_EXACT = 1 << 16
CHARACTERS = 500
_SAMPLES, _TOKENS = 5, 400
_DROPPED, _PER_REASON, _DROPPED_BYTES = 6, 2, 1 << 20


# ---- lengths ----


@dataclass(frozen=True, slots=True)
class Bucket:
    """Documents of `low` to `high` tokens."""

    low: int
    high: int
    documents: int


@dataclass(slots=True)
class Lengths:
    """Documents by their number of tokens."""

    exact: int = _EXACT
    """Up to so many tokens, documents are counted exactly."""
    counts: Int64s = field(init=False)
    """Documents of exactly so many tokens."""
    longer: Int64s = field(default_factory=lambda: np.zeros(64, dtype=np.int64))
    """Documents of 2**k and more, but not 2**(k + 1), tokens, where those are not counted above."""
    documents: int = 0
    tokens: int = 0
    longest: int = 0

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.exact, dtype=np.int64)

    def add(self, lengths: Int64s) -> None:
        if not len(lengths):
            return
        self.documents += len(lengths)
        self.tokens += int(lengths.sum(dtype=np.int64))
        self.longest = max(self.longest, int(lengths.max()))
        short = lengths < self.exact
        self.counts += np.bincount(lengths[short], minlength=self.exact)
        # frexp: the exponent of 2**k is k + 1, exactly.
        self.longer += np.bincount(np.frexp(lengths[~short].astype(np.float64))[1] - 1, minlength=64)

    def quantile(self, part: float) -> int | None:
        """The length that this part of the documents does not exceed; None when it is beyond what is counted exactly.

        >>> lengths = Lengths()
        >>> lengths.add(np.array([5, 1, 9]))
        >>> lengths.quantile(0.5)
        5
        """
        wanted = max(1, int(np.ceil(part * self.documents)))
        position = int(np.searchsorted(np.cumsum(self.counts), wanted))
        return position if position < self.exact else None

    def buckets(self) -> list[Bucket]:
        """By powers of two, from the shortest to the longest there is; one for empty documents when there are any."""
        powers = [int(self.counts[2**k : 2 ** (k + 1)].sum()) + int(self.longer[k]) for k in range(64)]
        used = [k for k in range(64) if powers[k]]
        found = [Bucket(0, 0, int(self.counts[0]))] if self.counts[0] else []
        span = range(used[0], used[-1] + 1) if used else range(0)
        return found + [Bucket(2**k, 2 ** (k + 1) - 1, powers[k]) for k in span]


def count_lengths(folder: Path, manifest: Manifest) -> dict[str, Lengths]:
    """Tokens per document, by split in the manifest's order; each takes memory, so only the first are counted."""
    found = {split: Lengths() for split in manifest.splits[:MAX_SPLITS]}
    for shard in (shard for shard in manifest.shards if shard.split in found):
        for block in Index.map(folder / f"{shard.name}.idx").length_blocks():
            found[shard.split].add(block)
    return found


# ---- samples ----


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a document."""

    text: str
    origin: str
    """Where it is, or why it was dropped."""
    size: str
    cut: bool
    """There is more of it."""
    trained: tuple[tuple[int, int], ...] = ()
    """Of a conversation: the stretches of characters that are trained on."""


def sample_documents(store: Store) -> tuple[Sample, ...]:
    documents = len(store)
    chosen = min(_SAMPLES, documents)
    return tuple(_sample(store, (2 * k + 1) * documents // (2 * chosen)) for k in range(chosen))


def _sample(store: Store, number: int) -> Sample:
    shards = store.manifest.shards
    ends = list(itertools.accumulate(shard.documents for shard in shards))
    split = shards[bisect.bisect_right(ends, number)].split
    document = store[number]
    text = _decode(store, document[:_TOKENS])
    cut = len(document) > _TOKENS or len(text) > CHARACTERS
    # The cut may have gone through a character.
    text = text[:CHARACTERS].rstrip("\ufffd") if cut else text
    origin, size = f"document {number:,}, {shorten(split)}", f"{len(document):,} tokens"
    if not store.has_spans:
        return Sample(text, origin, size, cut)
    spans = store.spans(number)
    trained = int((spans[:, 1] - spans[:, 0]).sum())
    return Sample(text, origin, f"{size}, {trained:,} trained on", cut, _characters(store, document, spans, len(text)))


def _characters(store: Store, document: Any, spans: Int64s, most: int) -> tuple[tuple[int, int], ...]:
    """Stretches of tokens -> of the characters of their text, up to `most`."""
    found = []
    for begin, end in spans[spans[:, 0] < _TOKENS].tolist():
        # A border within a character is put before it.
        first, stop = (
            min(most, len(_decode(store, document[: min(at, _TOKENS)]).rstrip("\ufffd"))) for at in (begin, end)
        )
        if first < stop:
            found.append((first, stop))
    return tuple(found)


def _decode(store: Store, tokens: Any) -> str:
    try:
        return store.decode(tokens)
    except Exception:  # tokenizers raises nothing narrower, and the rest of the page is worth having
        return f"(the store's tokenizer can't decode it) {' '.join(map(str, tokens[:60].tolist()))}"


def sample_dropped(path: Path) -> tuple[Sample, ...]:
    """The first documents of each reason at the head of `dropped.jsonl.zst`; none when it is missing or damaged."""
    found: list[Sample] = []
    seen: Counter[str] = Counter()
    for record in _records_at_head(path):
        reason, text = record.pop("reason"), record.pop("text")
        seen[reason] += 1
        if seen[reason] <= _PER_REASON and len(found) < _DROPPED:
            beside = ", ".join(f"{name} {value}" for name, value in record.items())
            origin = f"{shorten(reason)}: {beside[:200]}" if beside else shorten(reason)
            found.append(Sample(text[:CHARACTERS], origin, f"{len(text):,} characters", len(text) > CHARACTERS))
    return tuple(found)


def _records_at_head(path: Path) -> list[dict[str, Any]]:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        with zstd.open(path, "rb") as file:
            head = file.read(_DROPPED_BYTES)
        return [json.loads(line) for line in head[: head.rfind(b"\n") + 1].splitlines()]
    except (OSError, EOFError, ValueError, zstd.ZstdError):
        return []


@dataclass(frozen=True, slots=True)
class Facts:
    path: Path
    manifest: Manifest
    summary: dict[str, Any]
    """What every kind of job tells; empty where the run left none."""
    told: dict[str, Any]
    """What only this kind does."""
    timeline: Timeline | None
    lengths: dict[str, Lengths]
    samples: tuple[Sample, ...]
    dropped_samples: tuple[Sample, ...]

    @property
    def sessions(self) -> int:
        """How many times the run was begun; 1 unless it was ended and resumed."""
        return 1 + (len(self.timeline.restarts) if self.timeline else 0)

    @property
    def seconds(self) -> float:
        """How long it took; 0: not recorded. The summary knows its own session only; the timeline knows all."""
        seconds = float(self.summary.get("seconds", 0.0))
        if self.timeline is not None and (self.sessions > 1 or not seconds):
            return max(self.timeline.seconds, seconds)
        return seconds

    @property
    def memory(self) -> dict[str, Any]:
        return self.summary.get("memory") or {}

    @property
    def budget(self) -> int | None:
        return self.memory.get("budget")

    @property
    def peak_memory(self) -> int:
        """The most that was measured, in any session; 0: not recorded."""
        return max(int(self.memory.get("peak", 0)), self.timeline.peak.anonymous if self.timeline else 0)


def gather(out: Path) -> Facts:
    """Read it all, in memory that does not grow with the store."""
    store = open_store(out)
    summary = read_sealed(out / "run" / "summary.json") or {}
    return Facts(
        path=out,
        manifest=store.manifest,
        summary=summary,
        told=summary.get("facts", {}),
        timeline=_read_timeline(out / "run", summary.get("finished")),
        lengths=count_lengths(out, store.manifest),
        samples=sample_documents(store),
        dropped_samples=sample_dropped(out / "dropped.jsonl.zst"),
    )


def _read_timeline(run: Path, finished: float | None) -> Timeline | None:
    """The file outlives an overwritten run, and a later command that finds nothing to do adds to it: both are cut off.

    When this run was planned is seen from its file. A copied store has later times: then all is shown.
    """
    plan = run / "plan.json"
    begin = plan.stat().st_mtime if plan.exists() else -math.inf
    end = math.inf if finished is None else finished + 1
    return read_timeline(run / "memory.csv", begin=begin, end=end) or read_timeline(run / "memory.csv")
