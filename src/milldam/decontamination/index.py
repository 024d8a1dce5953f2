"""The passages of all evaluation sets, so laid out that a document is held against them in one look at its words.

Every n-gram that counts has a seed: two neighbouring words in it, the rarest pair of the evaluation sets. Where a
document has such a pair, its letters are compared with the passage's to both sides. So no n-gram is missed, and what is
found is equal letter by letter; the hashes only say where to look.

An n-gram that occurs in more than `max_items` passages does not count: it is a phrase of the sets' own making. A
passage of fewer than `MIN_WORDS` words or `MIN_LETTERS` bytes of letters is too short to tell anything, and is not
looked for; nor is one of fewer than `SHORT_WORDS` words that comes after another one of its item: behind a question, an
answer such as "the Cape of Good Hope" is no evidence.

Building it takes `BUILDING_FACTOR` times the text of the sets. The file: letters, words and texts of the passages, 16
bytes a seed: about 4 times the text. It is mapped; a process holds three tables of at most 4 MB beside it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.decontamination.array_file import map_arrays, write_arrays
from milldam.decontamination.letters import BLOCK, Bytes, Hashes, Int64s, blocks_at, pair_hashes, words_of
from milldam.decontamination.passages import MIN_LETTERS, Passages
from milldam.decontamination.rules import EvaluationSet

MIN_WORDS, SHORT_WORDS = 4, 8
SEED_LETTERS = 16
"""Letters from a seed on that are compared at once; an n-gram has as many behind its seed."""
ROOMY = SEED_LETTERS + 2 * BLOCK
"""Letters of n-grams that can't be found without a block of letters being equal on one side of their seed."""
LAYOUT = 2
"""Another number whenever the file is laid out, or hashed, in another way."""
REACH = 64 * 50
"""Letters of the longest n-gram."""
BUILDING_FACTOR = 20
"""Bytes that building takes for each byte of the passages' texts, as measured."""
_SLICE_BYTES = 1 << 20
_WINDOWS = 1 << 16
_TELLING = 10
"""A word of more letters is no rarer than one of so many."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_SMALLEST_TABLE, _LARGEST_TABLE = 16, 22
"""Bits of a hash that the table goes by."""
Mask = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Text:
    """Letters and words of all passages, end to end."""

    letters: Bytes
    bounds: Int64s
    """Where each passage begins in `letters`, and the end."""
    words: Int64s
    """Where each word begins in `letters`."""
    lengths: Int64s
    word_bounds: Int64s
    """Where each passage begins in `words`, and the end."""
    joined: Mask
    """Words that only a mark such as an apostrophe parts from the next: others may write them as one."""
    pairs: Hashes


def _read_text(passages: Passages) -> _Text:
    offsets = passages.offsets
    parts: list[tuple[Any, ...]] = []
    start = 0
    while start < len(passages):
        stop = int(np.searchsorted(offsets, offsets[start] + _SLICE_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), len(passages))
        data = bytes(passages.texts[offsets[start] : offsets[stop]])
        inner = offsets[start : stop + 1] - offsets[start]
        words = words_of(data, inner)
        ends = words.starts + words.lengths
        gaps = np.append(words.starts[1:], len(data)) - ends
        raw = np.frombuffer(data + b" ", np.uint8)[ends]
        joined = ((gaps == 1) & (raw > ord(" "))) | ((gaps == 3) & (raw == 0xE2)) | ((gaps == 2) & (raw == 0xC2))
        counts = np.diff(np.searchsorted(words.starts, inner))
        sizes = np.add.reduceat(np.append(words.lengths, 0), np.minimum(np.cumsum(counts) - counts, len(words.lengths)))
        sizes = np.where(counts > 0, sizes, 0)
        parts.append((words.folded[words.folded != 0], sizes, words.lengths, counts, joined, pair_hashes(words.blocks)))
        start = stop
    letters, sizes, lengths, counts, joined, pairs = (np.concatenate(part) for part in zip(*parts, strict=True))
    words_at = np.cumsum(lengths) - lengths
    return _Text(letters, _bounds(sizes), words_at, lengths, _bounds(counts), joined, pairs)


def _bounds(sizes: Int64s) -> Int64s:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


@dataclass(slots=True)
class _Grams:
    """Every n-gram of every passage, in order."""

    bounds: Int64s
    """Where each passage's begin, and the end."""
    first_words: Int64s
    sizes: Int64s
    """Words of each."""

    @classmethod
    def of(cls, text: _Text, ngram: Int64s, follows: Mask) -> _Grams:
        """`follows`: passages that come after another one of their item."""
        words = np.diff(text.word_bounds)
        sizes = np.minimum(ngram, words)
        short = (words < MIN_WORDS) | (np.diff(text.bounds) < MIN_LETTERS)
        short |= (words < SHORT_WORDS) & follows
        counts = np.where(short, 0, words - sizes + 1)
        bounds = _bounds(counts)
        passage = np.repeat(np.arange(len(counts)), counts)
        first = text.word_bounds[passage] + np.arange(bounds[-1]) - bounds[passage]
        return cls(bounds, first, sizes[passage])

    def letters(self, text: _Text) -> tuple[Int64s, Int64s]:
        """From, up to."""
        last = self.first_words + self.sizes - 1
        return text.words[self.first_words], text.words[last] + text.lengths[last]


def _hashes(text: _Text, first: Int64s, stop: Int64s) -> Hashes:
    """A number for the letters of each n-gram."""
    hashes = np.empty(len(first), np.uint64)
    done = 0
    while done < len(first):
        low = int(first[done])
        # Those that end within a slice, all from its beginning on.
        more = int(np.searchsorted(stop, low + _SLICE_BYTES, side="right"))
        more = max(more, done + 1)
        high = int(stop[more - 1])
        powers = np.cumprod(np.full(high - low + 1, _BASE))
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(text.letters[low:high] * powers[:-1])))
        inverse = np.cumprod(np.full(high - low + 1, _INVERSE))
        begin, end = first[done:more] - low, stop[done:more] - low
        hashes[done:more] = (sums[end] - sums[begin]) * inverse[begin] + (end - begin).astype(np.uint64)
        done = more
    return hashes


def _common(text: _Text, grams: _Grams, most: npt.NDArray[np.int32]) -> Mask:
    """N-grams that occur in more passages than the set of theirs allows. `most`: for each passage."""
    found = np.zeros(len(grams.first_words), np.bool_)
    if not len(found):
        return found
    hashes = _hashes(text, *grams.letters(text))
    passage = np.repeat(np.arange(len(most), dtype=np.int32), np.diff(grams.bounds))
    # Stable: within equal ones, passages stay in order.
    order = np.argsort(hashes, kind="stable")
    hashes, passage = hashes[order], passage[order]
    begins = np.concatenate(([True], hashes[1:] != hashes[:-1]))
    another = np.flatnonzero(begins | np.concatenate(([True], passage[1:] != passage[:-1])))
    group = (np.cumsum(begins, dtype=np.int32) - 1).astype(np.int32)
    several = np.bincount(group[another])
    found[order] = several[group] > most[passage]
    return found


def _seeds(text: _Text, grams: _Grams, counted: Mask) -> Int64s:
    """Numbers of the words that begin a seed: the rarest pair of each n-gram."""
    _, inverse, counts = np.unique(text.pairs, return_inverse=True, return_counts=True)
    # Long words are rare everywhere; never, if there is another pair, what others may write as one word.
    letters = np.minimum(text.lengths, _TELLING)
    letters[:-1] += np.minimum(text.lengths[1:], _TELLING)
    score = np.log2(counts[inverse]).astype(np.int64) - letters
    risky = text.joined.copy()
    risky[1:] |= text.joined[:-1]
    risky[:-1] |= text.joined[1:]
    score = score + risky * (np.int64(1) << 40)
    _, stop = grams.letters(text)
    which = np.flatnonzero(counted)
    widest = int(grams.sizes[which].max(initial=2))
    found = np.zeros(len(text.words), np.bool_)
    for start in range(0, len(which), _WINDOWS):
        some = which[start : start + _WINDOWS]
        words = grams.first_words[some][:, None] + np.arange(widest - 1)
        inside = (np.arange(widest - 1) < grams.sizes[some][:, None] - 1) & (words < len(text.words))
        words = np.minimum(words, len(text.words) - 1)
        inside &= text.words[words] + SEED_LETTERS <= stop[some][:, None]
        best = np.where(inside, score[words], np.int64(1) << 60).argmin(axis=1)
        found[words[np.arange(len(some)), best]] = True
    return np.flatnonzero(found)


def _shortest(text: _Text, grams: _Grams) -> Int64s:
    """Letters of the shortest n-gram of each passage."""
    first, stop = grams.letters(text)
    shortest = np.full(len(text.bounds) - 1, REACH)
    passage = np.repeat(np.arange(len(shortest)), np.diff(grams.bounds))
    np.minimum.at(shortest, passage, stop - first)
    return shortest


def seed_keys(low: Hashes, high: Hashes) -> Hashes:
    """A number for sixteen letters, given as two numbers."""
    keys = low * _BASE
    keys ^= keys >> np.uint64(29)
    keys += high
    keys *= _INVERSE
    keys ^= keys >> np.uint64(32)
    return keys


def build_index(path: Path, passages: Passages, sets: tuple[EvaluationSet, ...]) -> dict[str, Any]:
    """Write the file; its size and hash."""
    owners = np.frombuffer(passages.sets, np.uint16).astype(np.int64)
    if not len(passages):
        return write_arrays(path, {}, passages=0)
    text = _read_text(passages)
    follows = np.frombuffer(passages.follows, np.bool_)
    grams = _Grams.of(text, np.array([one.ngram for one in sets])[owners], follows)
    common = _common(text, grams, np.array([one.max_items for one in sets], np.int32)[owners])
    seeds = _seeds(text, grams, ~common)
    padded = np.concatenate((text.letters, np.zeros(ROOMY, np.uint8)))
    at = text.words[seeds]
    keys = seed_keys(blocks_at(padded)[at], blocks_at(padded)[at + BLOCK])
    order = np.argsort(keys, kind="stable")
    arrays: dict[str, npt.NDArray[Any]] = {
        "letters": padded,
        "bounds": text.bounds,
        "words": text.words.astype(np.uint32),
        "word_bounds": text.word_bounds,
        "gram_bounds": grams.bounds,
        "common": common,
        "seed_keys": keys[order],
        "seed_letters": at[order],
        "seed_pairs": text.pairs[seeds],
        "shortest": _shortest(text, grams),
        "texts": np.frombuffer(passages.texts, np.uint8),
        "text_bounds": passages.offsets,
        "sets": owners.astype(np.uint16),
        "items": np.frombuffer(passages.items, np.int64),
        "columns": np.frombuffer(passages.columns, np.uint16),
    }
    repeated = {str(number): count for number, count in passages.repeated.items()}
    return write_arrays(path, arrays, passages=len(passages), column_names=passages.names, repeated=repeated)


class Tables:
    """What can't be a seed, by some bits of two hashes of it: of its two words, and of its letters."""

    def __init__(self, pairs: Hashes, keys: Hashes) -> None:
        bits = (16 * len(pairs)).bit_length()
        bits = min(max(bits, _SMALLEST_TABLE), _LARGEST_TABLE)
        self._shift = np.uint64(64 - bits)
        self._pairs, self._again, self._keys = (np.zeros(1 << bits, np.bool_) for _ in range(3))
        self._pairs[self._first_bits(pairs)] = True
        self._again[self._first_bits(_mixed(pairs))] = True
        self._keys[self._first_bits(keys)] = True

    def pairs(self, hashes: Hashes) -> Int64s:
        """Where there may be one of the pairs: by two tables, the second for the few that the first leaves."""
        at = np.flatnonzero(self._pairs.take(self._first_bits(hashes), mode="clip"))
        return at[self._again[self._first_bits(_mixed(hashes[at]))]]

    def keys(self, hashes: Hashes) -> Int64s:
        """Where there may be one of the keys."""
        return np.flatnonzero(self._keys[self._first_bits(hashes)])

    def _first_bits(self, hashes: Hashes) -> Int64s:
        return (hashes >> self._shift).view(np.int64)


def _mixed(hashes: Hashes) -> Hashes:
    return (hashes ^ hashes >> np.uint64(32)) * _BASE


class Index:
    """An index that was built, mapped."""

    def __init__(self, path: Path) -> None:
        arrays, self.facts = map_arrays(path)
        self.passages: int = self.facts["passages"]
        if not self.passages:
            return
        self.letters: Bytes = arrays["letters"]
        self.bounds: Int64s = arrays["bounds"]
        self.words: npt.NDArray[np.uint32] = arrays["words"]
        self.word_bounds: Int64s = arrays["word_bounds"]
        self.gram_bounds: Int64s = arrays["gram_bounds"]
        self.common: Mask = arrays["common"]
        self.seed_keys: Hashes = arrays["seed_keys"]
        self.seed_letters: Int64s = arrays["seed_letters"]
        self.shortest: Int64s = arrays["shortest"]
        self._pairs: Hashes = arrays["seed_pairs"]
        self._texts: Bytes = arrays["texts"]
        self._text_bounds: Int64s = arrays["text_bounds"]
        self.sets: npt.NDArray[np.uint16] = arrays["sets"]
        self.items: Int64s = arrays["items"]
        self._columns: npt.NDArray[np.uint16] = arrays["columns"]

    def tables(self) -> Tables:
        return Tables(self._pairs, self.seed_keys)

    def text(self, passage: int) -> str:
        return bytes(self._texts[self._text_bounds[passage] : self._text_bounds[passage + 1]]).decode()

    def column(self, passage: int) -> str:
        return str(self.facts["column_names"][int(self._columns[passage])])

    def searched(self, number: int) -> Counter[str]:
        """Of one set: passages in all, too short, repeated, of common phrases alone, and items."""
        mine = np.flatnonzero(self.sets == number) if self.passages else np.zeros(0, np.int64)
        if not len(mine):
            return Counter(passages=0, too_short=0, repeated=0, common=0, items=0)
        first, stop = self.gram_bounds[mine], self.gram_bounds[mine + 1]
        counted = np.concatenate(([0], np.cumsum(~self.common)))
        short = first == stop
        common = ~short & (counted[stop] == counted[first])
        return Counter(
            passages=len(mine),
            items=len(set(self.items[mine].tolist())),
            too_short=int(short.sum()),
            common=int(common.sum()),
            repeated=int(self.facts["repeated"].get(str(number), 0)),
        )
