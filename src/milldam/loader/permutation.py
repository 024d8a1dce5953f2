"""A permutation of [0, n) that follows from a key, computed where it is needed: no array of n numbers.

From 2^16 on a modular Feistel network: x is (left, right) of a rectangle of about sqrt(n) times sqrt(n); six rounds
add to one half a hash of the other, in turn; what falls outside [0, n) goes round again. Below that, the sorted order
of a hash of each number, held as an array of at most 512 KB. About 60 ns a number in calls of some thousands.

Tested by tests/loader/test_permutation.py on gaps, pairs, low bits and places: those in use elsewhere fail such tests
(docs/decisions/0015).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Int64s = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
UInt64s = npt.NDArray[np.uint64]

SMALL = 1 << 16
_ROUNDS = 6
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*parts: int) -> int:
    """A 64-bit key made of several numbers, which their order is part of."""
    state = 0
    for part in parts:
        state = (state + _GOLDEN + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def hashed(numbers: UInt64s, key: int) -> UInt64s:
    """A 64-bit hash of each number."""
    state = numbers + np.uint64(key)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return state


class Permutation:
    """Numbers by place: `permutation(places)`, for places in [0, n).

    >>> Permutation(5, key=7)(np.arange(5))
    array([1, 0, 3, 4, 2])
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        self._keys = [mix(key, round) for round in range(_ROUNDS)]
        self._table: Int64s | None = None
        if n < SMALL:
            self._table = np.argsort(hashed(np.arange(n, dtype=np.uint64), self._keys[0]), kind="stable")
        root = math.isqrt(max(n, 1) - 1) + 1
        self._left, self._right = root, -(-n // root)

    def __call__(self, places: Int64s) -> Int64s:
        if self._table is not None:
            return self._table[places]
        numbers = self._network(places.astype(np.uint64))
        outside = (numbers >= self.n).nonzero()[0]
        while len(outside):
            numbers[outside] = self._network(numbers[outside])
            outside = outside[numbers[outside] >= self.n]
        return numbers.view(np.int64)

    def _network(self, numbers: UInt64s) -> UInt64s:
        right_size = np.uint64(self._right)
        left, right = np.divmod(numbers, right_size)
        for round in range(0, _ROUNDS, 2):
            left = _add(left, hashed(right, self._keys[round]), self._left)
            right = _add(right, hashed(left, self._keys[round + 1]), self._right)
        left *= right_size
        left += right
        return left


def _add(half: UInt64s, hash: UInt64s, size: int) -> UInt64s:
    """half + hash, the hash scaled into [0, size), modulo size."""
    hash >>= np.uint64(32)
    hash *= np.uint64(size)
    hash >>= np.uint64(32)
    hash += half
    hash -= np.uint64(size) * (hash >= size)
    return hash
