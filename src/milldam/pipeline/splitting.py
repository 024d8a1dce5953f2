"""Which split a document belongs to, and whether it is in a sample: by the hash of its text alone.

So the choice does not depend on where a document stands or on what else there is: it stays when data is added, and
equal documents always go together. The key of a document is the xxh3 of its first MiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from milldam.run.units import mixed
from milldam.text.verdicts import Mask

Keys = npt.NDArray[np.uint64]

_SAMPLE_SALT, _SPLIT_SALT = 0x5A3D, 0x591E


@dataclass(frozen=True, slots=True)
class Chooser:
    """Seeded choices by content."""

    seed: int
    head_bytes: int

    def sample_keys(self, texts: pa.LargeStringArray) -> Keys:
        return self._keys(texts, _SAMPLE_SALT)

    def split_keys(self, texts: pa.LargeStringArray) -> Keys:
        return self._keys(texts, _SPLIT_SALT)

    def _keys(self, texts: pa.LargeStringArray, salt: int) -> Keys:
        seed = (self.seed << 16 ^ salt) & (2**64 - 1)
        _, offsets, data = texts.buffers()
        view = memoryview(data) if data is not None else memoryview(b"")
        edges = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1].tolist()
        digest, most = xxhash.xxh3_64_intdigest, self.head_bytes
        ranges = ((start, _head_end(view, start, stop, most)) for start, stop in itertools.pairwise(edges))
        return np.fromiter((digest(view[start:stop], seed) for start, stop in ranges), np.uint64, len(texts))


def _head_end(view: memoryview, start: int, stop: int, most: int) -> int:
    """Where the head of a text ends: after the last whole character within `most` bytes."""
    if stop - start <= most:
        return stop
    end = start + most
    while view[end] & 0xC0 == 0x80:
        end -= 1
    return end


def below(keys: Keys, share: float) -> Mask:
    """The documents of a share, by their keys."""
    return np.ones(len(keys), dtype=bool) if share >= 1 else keys < np.uint64(int(share * 2.0**64))


def split_numbers(keys: Keys, shares: Mapping[str, float]) -> npt.NDArray[np.int64]:
    """0 for what is left to train, k for the k-th split of `shares`.

    Each split draws with a hash of its own from what the ones before it leave: another split takes documents from all,
    but does not move them between the others.
    """
    numbers = np.zeros(len(keys), dtype=np.int64)
    left = 1.0
    for number, (name, share) in enumerate(shares.items(), start=1):
        drawn = below(mixed(keys ^ np.uint64(xxhash.xxh3_64_intdigest(name.encode()))), share / left)
        numbers[drawn & (numbers == 0)] = number
        left -= share
    return numbers
