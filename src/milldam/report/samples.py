"""A few documents to look at: some of the store, spread evenly over it, and some of those that were dropped.

Of each, only the first tokens are decoded, so a document of gigabytes costs no more than a short one.
"""

from __future__ import annotations

import bisect
import itertools
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.markup import shorten
from milldam.stores.tokens import Store

CHARACTERS = 500
_SAMPLES, _TOKENS = 5, 400
_DROPPED, _PER_REASON, _DROPPED_BYTES = 6, 2, 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """The beginning of a document."""

    text: str
    origin: str
    """Where it is, or why it was dropped."""
    size: str
    cut: bool
    """There is more of it."""


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
    return Sample(text, f"document {number:,}, {shorten(split)}", f"{len(document):,} tokens", cut)


def _decode(store: Store, tokens: Any) -> str:
    try:
        return store.decode(tokens)
    except Exception:  # tokenizers raises nothing narrower, and the rest of the page is worth having
        return f"(the store's tokenizer can't decode it) {' '.join(map(str, tokens[:60].tolist()))}"


def sample_dropped(path: Path) -> tuple[Sample, ...]:
    """The first documents of each reason at the head of `dropped.jsonl.zst`; none when there is no such file."""
    found: list[Sample] = []
    seen: Counter[str] = Counter()
    for line in _head_of(path).splitlines():
        record = _parse(line)
        reason, text = str(record.pop("reason", "")), record.pop("text", None)
        if not isinstance(text, str) or seen[reason] == _PER_REASON:
            continue
        seen[reason] += 1
        beside = ", ".join(f"{name} {value}" for name, value in record.items() if isinstance(value, str | int))
        origin = f"{shorten(reason)}: {beside[:200]}" if beside else shorten(reason)
        found.append(Sample(text[:CHARACTERS], origin, f"{len(text):,} characters", len(text) > CHARACTERS))
        if len(found) == _DROPPED:
            break
    return tuple(found)


def _head_of(path: Path) -> bytes:
    """The first bytes, cut after a line."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    try:
        with zstd.open(path, "rb") as file:
            head: bytes = file.read(_DROPPED_BYTES)
    except (OSError, EOFError, zstd.ZstdError):
        return b""
    return head[: head.rfind(b"\n") + 1]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
