"""The passages of all evaluation sets, so laid out that a document is held against them in one look at its words.

Every n-gram that counts has a seed: two neighbouring words in it, the rarest pair of the evaluation sets. Where a
document has such a pair, its letters are compared with the passage's to both sides. So no n-gram is missed, and what is
found is equal letter by letter; the hashes only say where to look.

An n-gram that occurs in more than `max_items` passages does not count: it is a phrase of the sets' own making. A
passage of fewer than `MIN_WORDS` words or `MIN_LETTERS` bytes of letters is too short to tell anything, and is not
looked for; nor is one of fewer than `SHORT_WORDS` words that comes after another one of its item: behind a question, an
answer such as "the Cape of Good Hope" is no evidence.

Building it takes `BUILDING_FACTOR` times the text of the sets. The file: letters, words and texts of the passages, 30
bytes a seed: about 5 times the text. It is mapped: processes hold nothing of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.decontamination.array_file import map_arrays, write_arrays
from milldam.decontamination.letters import BLOCK, Bytes, Hashes, Int64s, blocks_at, letters_in, pair_hashes, words_of
from milldam.decontamination.passages import MIN_LETTERS, Passages
from milldam.rules import EvaluationSet

MIN_WORDS, SHORT_WORDS = 4, 8
SEED_LETTERS = 16
"""Letters from a seed on that are looked up. Where an n-gram has fewer from each of its pairs on, the pair is."""
LAYOUT = 4
"""Another number whenever the file is laid out, or hashed, in another way."""
BUILDING_FACTOR = 24
"""Bytes that building takes for each byte of the passages' texts, as measured."""
_SLICE_BYTES, _HASHED_BYTES = 1 << 20, 1 << 15
"""Of text that is taken at once; of letters, so that the processor's cache holds what is made of them."""
_RARITY = np.array([0, 0, 1, 3, 8, 12, 14, 16, 17])
"""Of words, by their letters, in half bits. Words of fewer than four are everywhere, so a pair of two middling words is
rarer than one of a long word and an article."""
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
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
    blocks: Hashes
    """The first eight letters of each word."""
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
        starts, ends, lengths = words.starts, words.stops, words.lengths
        gaps = np.append(starts[1:], len(data)) - ends
        raw = np.frombuffer(data + b" ", np.uint8)[ends]
        joined = ((gaps == 1) & (raw > ord(" "))) | ((gaps == 3) & (raw == 0xE2)) | ((gaps == 2) & (raw == 0xC2))
        counts = np.diff(np.searchsorted(starts, inner))
        sizes = np.add.reduceat(np.append(lengths, 0), np.minimum(np.cumsum(counts) - counts, len(lengths)))
        sizes = np.where(counts > 0, sizes, 0)
        parts.append((letters_in(words), sizes, lengths, counts, joined, words.blocks))
        start = stop
    letters, sizes, lengths, counts, joined, blocks = (np.concatenate(part) for part in zip(*parts, strict=True))
    words_at = np.cumsum(lengths) - lengths
    return _Text(letters, _bounds(sizes), words_at, lengths, _bounds(counts), joined, blocks, pair_hashes(blocks))


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
    size = max(_HASHED_BYTES, int((stop - first).max(initial=0)))
    powers, inverse = (np.cumprod(np.full(size + 1, factor)) for factor in (_BASE, _INVERSE))
    done = 0
    while done < len(first):
        low = int(first[done])
        # Those that end within a slice, all from its beginning on.
        more = int(np.searchsorted(stop, low + size, side="right"))
        letters = text.letters[low : int(stop[more - 1])]
        sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(letters * powers[: len(letters)])))
        begin, end = first[done:more] - low, stop[done:more] - low
        hashes[done:more] = (sums[end] - sums[begin]) * inverse[begin] + (end - begin).astype(np.uint64)
        done = more
    return hashes


def _alike(hashes: Hashes) -> Int64s:
    """For each hash how many have its first bits: nearly as many as are equal to it, and never fewer."""
    shift = np.uint64(63 - len(hashes).bit_length())
    first_bits = (hashes >> shift).view(np.int64)
    return np.bincount(first_bits)[first_bits]


def _common(text: _Text, grams: _Grams, most: npt.NDArray[np.int32]) -> Mask:
    """N-grams that occur in more passages than the set of theirs allows. `most`: for each passage."""
    found = np.zeros(len(grams.first_words), np.bool_)
    if not len(found):
        return found
    hashes = _hashes(text, *grams.letters(text))
    passage = np.repeat(np.arange(len(most), dtype=np.int32), np.diff(grams.bounds))
    # Few are left to be sorted; stable: within equal ones, passages stay in order.
    order = np.flatnonzero(_alike(hashes) > most.min())
    order = order[np.argsort(hashes[order], kind="stable")]
    hashes, passage = hashes[order], passage[order]
    begins = np.diff(hashes, prepend=~hashes[:1]) != 0
    another = np.flatnonzero(begins | (np.diff(passage, prepend=-1) != 0))
    group = np.cumsum(begins) - 1
    found[order] = np.bincount(group[another])[group] > most[passage]
    return found


def _seeds(text: _Text, grams: _Grams, counted: Mask) -> tuple[Int64s, Int64s]:
    """Numbers of the words that begin a seed, the rarest pair of each n-gram: of n-grams that have sixteen letters from
    some pair on, and of those that do not."""
    rarity = _RARITY.take(text.lengths, mode="clip")
    score = np.log2(_alike(text.pairs)).astype(np.int64) - rarity
    score[:-1] -= rarity[1:]
    # Never, if there is another pair, what others may write as one word.
    risky = text.joined.copy()
    risky[1:] |= text.joined[:-1]
    risky[:-1] |= text.joined[1:]
    score += risky * (np.int64(1) << 20)
    first = grams.first_words[counted]
    _, stop = grams.letters(text)
    stop, last = stop[counted], first + grams.sizes[counted] - 1
    roomy = np.minimum(np.searchsorted(text.words, stop - SEED_LETTERS, side="right"), last)
    tight = roomy <= first
    chosen = _least(score, first, np.where(tight, last, roomy))
    long, short = (np.zeros(len(text.words), np.bool_) for _ in range(2))
    long[chosen[~tight]], short[chosen[tight]] = True, True
    return np.flatnonzero(long), np.flatnonzero(short)


def _least(values: Int64s, first: Int64s, stop: Int64s) -> Int64s:
    """Where the least of the values from `first` up to `stop` is, the first of equal ones.

    >>> _least(np.array([5, 3, 4, 3]), np.array([0, 1, 2]), np.array([1, 4, 3])).tolist()
    [0, 1, 2]
    """
    # The least of 1, 2, 4, ... values from each place on; two such stretches make up any other.
    bits = len(values).bit_length()
    least, width = values << bits | np.arange(len(values)), 1
    found = np.empty(len(first), np.int64)
    while True:
        mine = (first + width <= stop) & (stop < first + 2 * width)
        found[mine] = np.minimum(least[first[mine]], least[stop[mine] - width])
        if not (stop >= first + 2 * width).any():
            return found & ((1 << bits) - 1)
        least, width = np.minimum(least[:-width], least[width:]), 2 * width


def _shortest(text: _Text, grams: _Grams) -> Int64s:
    """Letters of the shortest n-gram of each passage."""
    first, stop = grams.letters(text)
    shortest = np.full(len(text.bounds) - 1, np.iinfo(np.int64).max)
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


def pair_keys(first: Hashes, second: Hashes) -> Hashes:
    """A number for two words, given as their first letters."""
    return seed_keys(first, ~second)


def bits_of(hashes: Hashes) -> Hashes:
    """A table that says of most hashes that they are not among these: two bits of one number each, in all about 16
    for each hash."""
    hashes = np.sort(hashes)
    hashes = hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]
    table = np.zeros(1 << max(1, (len(hashes) // 4).bit_length()), np.uint64)
    np.bitwise_or.at(table, (hashes >> shift_of(table)).view(np.int64), _two_bits(hashes))
    return table


def shift_of(table: Hashes) -> np.uint64:
    """The first bits of a hash are the place in a table."""
    return np.uint64(65 - len(table).bit_length())


def may_hold(table: Hashes, hashes: Hashes) -> Mask:
    two = _two_bits(hashes)
    found: Mask = table[(hashes >> shift_of(table)).view(np.int64)] & two == two
    return found


def _two_bits(hashes: Hashes) -> Hashes:
    one, low = np.uint64(1), np.uint64(63)
    return one << (hashes >> np.uint64(32) & low) | one << (hashes >> np.uint64(38) & low)


def build_index(path: Path, passages: Passages, sets: tuple[EvaluationSet, ...]) -> dict[str, Any]:
    """Write the file; its size and hash."""
    owners = np.frombuffer(passages.sets, np.uint16).astype(np.int64)
    if not len(passages):
        return write_arrays(path, {}, passages=0)
    text = _read_text(passages)
    follows = np.frombuffer(passages.follows, np.bool_)
    grams = _Grams.of(text, np.array([one.ngram for one in sets])[owners], follows)
    common = _common(text, grams, np.array([one.max_items for one in sets], np.int32)[owners])
    long, short = _seeds(text, grams, ~common)
    padded = np.concatenate((text.letters, np.zeros(SEED_LETTERS, np.uint8)))
    at = text.words[long]
    words, keys = np.concatenate((long, short)), seed_keys(blocks_at(padded)[at], blocks_at(padded)[at + BLOCK])
    keys = np.concatenate((keys, pair_keys(text.blocks[short], text.blocks[short + 1])))
    order = np.argsort(keys, kind="stable")
    at = text.words[words[order]]
    arrays: dict[str, npt.NDArray[Any]] = {
        "letters": padded,
        "bounds": text.bounds,
        "words": text.words.astype(np.uint32),
        "word_bounds": text.word_bounds,
        "gram_bounds": grams.bounds,
        "common": common,
        "seed_keys": keys[order],
        "seed_letters": at,
        "seed_passages": np.searchsorted(text.bounds, at, side="right") - 1,
        "pair_bits": bits_of(text.pairs[words]),
        "key_bits": bits_of(keys),
        "shortest": _shortest(text, grams),
        "texts": np.frombuffer(passages.texts, np.uint8),
        "text_bounds": passages.offsets,
        "sets": owners.astype(np.uint16),
        "items": np.frombuffer(passages.items, np.int64),
        "columns": np.frombuffer(passages.columns, np.uint16),
    }
    repeated = {str(number): count for number, count in passages.repeated.items()}
    return write_arrays(
        path,
        arrays,
        passages=len(passages),
        short_seeds=len(short),
        column_names=list(passages.names),
        repeated=repeated,
    )


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
        self.seed_passages: Int64s = arrays["seed_passages"]
        self.pair_bits: Hashes = arrays["pair_bits"]
        self.key_bits: Hashes = arrays["key_bits"]
        self._texts: Bytes = arrays["texts"]
        self._text_bounds: Int64s = arrays["text_bounds"]
        self.sets: npt.NDArray[np.uint16] = arrays["sets"]
        self.items: Int64s = arrays["items"]
        self._columns: npt.NDArray[np.uint16] = arrays["columns"]

    @property
    def kinds(self) -> int:
        """2: some seeds are looked up by their two words."""
        return 2 if self.facts["short_seeds"] else 1

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
