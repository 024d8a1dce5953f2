"""Shards in plan order -> a manifest, split after split, without holding them.

The text of each split goes to a file of its own, beside it the hashes that make up the fingerprint; the manifest is put
together from these files. Disk: a second manifest and 64 bytes a shard, until it is written. Memory: some buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import xxhash

from milldam.files import TEMPORARY_SUFFIX, explain_os_errors
from milldam.stores.tokens.manifest import Manifest, Shard, Totals, hashes_of, join_texts, shard_text

_BLOCK_BYTES = 1 << 20


@dataclass(slots=True)
class _Split:
    totals: Totals
    text: Path
    hashes: Path
    opened: list[IO[str]] = field(default_factory=list)

    def add(self, shard: Shard) -> None:
        text, hashes = self.opened
        text.write((",\n" if self.totals.shards else "") + shard_text(shard))
        hashes.write(hashes_of(shard))
        self.totals.add(shard)


class ShardSpool:
    """Shards of a manifest to be. What it writes into `folder` is removed by `remove`, or with other temporaries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._splits: dict[str, _Split] = {}

    def fill(self, shards: Iterable[Shard]) -> None:
        """Take all shards, in plan order; the splits may come in any."""
        with explain_os_errors(self._folder), ExitStack() as stack:
            for shard in shards:
                split = self._splits.get(shard.split) or self._begin(shard.split, stack)
                split.add(shard)

    def _begin(self, name: str, stack: ExitStack) -> _Split:
        number = len(self._splits)
        text, hashes = (self._folder / f".shards-{number}.{kind}{TEMPORARY_SUFFIX}" for kind in ("text", "hashes"))
        opened: list[IO[str]] = [
            stack.enter_context(path.open("w", encoding="utf-8", newline="\n")) for path in (text, hashes)
        ]
        self._splits[name] = split = _Split(Totals(), text, hashes, opened)
        return split

    @property
    def splits(self) -> dict[str, Totals]:
        """Training first; the others by name."""
        names = sorted(self._splits, key=in_manifest_order)
        return {name: self._splits[name].totals for name in names}

    def write(self, facts: Manifest, folder: Path) -> None:
        """Make the manifest, with these shards in the place of its own."""
        totals, ordered = Totals(), [self._splits[name] for name in self.splits]
        fingerprint = xxhash.xxh3_128()
        for split in ordered:
            totals.add(split.totals)
            for block in _blocks(split.hashes):
                fingerprint.update(block)
        facts.write_with(folder, totals, fingerprint.hexdigest(), join_texts(_blocks(split.text) for split in ordered))

    def remove(self) -> None:
        for split in self._splits.values():
            split.text.unlink(missing_ok=True)
            split.hashes.unlink(missing_ok=True)


def in_manifest_order(split: str) -> tuple[bool, str]:
    return split != "train", split


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
