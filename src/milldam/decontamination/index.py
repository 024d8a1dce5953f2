"""The passages of all evaluation sets, so laid out that a document is held against them in one look at its words.

Every n-gram that counts has a seed: the sixteen letters from one of its words on, the rarest of the evaluation sets.
Where a document has these from one of its words on, the letters around are compared. So no n-gram is missed, and what
is found is equal letter by letter; the hashes only say where to look. Marks inside of words make no difference: parts
of a word that an apostrophe, a hyphen (at a line's end, too) or the like joins are one word here, and a document's
letters are looked up from each of its parts on, whatever lies between letters.

An n-gram that occurs in more than `max_items` passages does not count: it is a phrase of the sets' own making. One that
its passage has had before counts once, and one of fewer than `SEED_LETTERS` bytes of letters tells nothing. A
passage of fewer than `MIN_WORDS` words or `MIN_LETTERS` bytes of letters is too short to tell anything, and is not
looked for; nor is one of fewer than `SHORT_WORDS` words that comes after another one of its item: behind a question, an
answer such as "the Cape of Good Hope" is no evidence.

Building it takes `BUILDING_FACTOR` times the text of the sets. The file: letters, words and texts of the passages, 40
bytes a seed: about 5 times the text. It is mapped: processes hold nothing of it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from milldam.decontamination.letters import BLOCK, Bytes, Hashes, Int64s, blocks_at, letters_in, words_of
from milldam.errors import StoreError
from milldam.files import NewFile
from milldam.rules import EvaluationSet

MIN_WORDS, SHORT_WORDS, MIN_LETTERS = 4, 8, 16
SEED_LETTERS = 16
"""Bytes of letters that are looked up."""
LAYOUT = 5
"""Another number whenever the file is laid out, or hashed, in another way."""
BUILDING_FACTOR = 24
"""Bytes that building takes for each byte of the passages' texts, as measured."""
_SLICE_BYTES, _HASHED_BYTES = 1 << 20, 1 << 15
"""Of text that is taken at once; of letters, so that the processor's cache holds what is made of them."""
_RARITY = np.array([0, 0, 1, 3, 8, 12, 14, 16, 17])
"""Of words, by their letters, in half bits. Words of fewer than four are everywhere, so a pair of two middling words is
rarer than one of a long word and an article."""
_HYPHEN = rb"-|\xc2\xad|\xe2\x80[\x90\x91]"
_APOSTROPHE = rb"'|\xe2\x80[\x98\x99]|\xca\xbc|\xef\xbc\x87"
_UNSEEN = rb"\xe2\x80[\x8b-\x8d]|\xe2\x81\xa0|\xef\xbb\xbf"
_JOINS = re.compile(
    rb"(?:(?:%b)[ \t]*\r?\n[ \t]*|%b|%b|%b)+|(?<=[0-9])[.,](?=[0-9])" % (_HYPHEN, _HYPHEN, _APOSTROPHE, _UNSEEN)
)
"""What joins parts of a word: in UTF-8, so that places are those of words."""
_SPACES = np.isin(np.arange(256), list(b" \t\n\r\f\v"))
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
_ALIGNED = 64


@dataclass(slots=True)
class Passages:
    """Fill it with `add`."""

    texts: bytearray = field(default_factory=bytearray)
    stops: array[int] = field(default_factory=lambda: array("q", [0]))
    sets: array[int] = field(default_factory=lambda: array("H"))
    items: array[int] = field(default_factory=lambda: array("q"))
    columns: array[int] = field(default_factory=lambda: array("H"))
    follows: array[int] = field(default_factory=lambda: array("B"))
    """Whether another passage of its item came before, which says more."""
    names: dict[str, int] = field(default_factory=dict)
    """Of columns, with their numbers."""
    repeated: Counter[int] = field(default_factory=Counter)
    """Passages that were there before, by set."""
    _seen: set[int] = field(default_factory=set)
    _leader: tuple[int, int] | None = None
    """The last item of which a passage came that is not too short."""

    def add(self, set: int, item: int, column: str, text: str) -> None:
        """A text of an evaluation set. `item`: row of the set, from 0."""
        data = text.encode("utf-8", "replace")
        mine = set, item
        follows = self._leader == mine
        if len(data) >= MIN_LETTERS:
            self._leader = mine
        seen = xxhash.xxh3_64_intdigest(data)
        if seen in self._seen:
            self.repeated[set] += 1
            return
        self._seen.add(seen)
        self.texts += data
        self.stops.append(len(self.texts))
        self.follows.append(follows)
        self.sets.append(set)
        self.items.append(item)
        self.columns.append(self.names.setdefault(column, len(self.names)))

    def __len__(self) -> int:
        return len(self.sets)

    @property
    def offsets(self) -> Int64s:
        """Where each begins, and the end."""
        return np.frombuffer(self.stops, np.int64)

    @property
    def digest(self) -> str:
        """Another one whenever what is looked for, or said of it, is another."""
        digest = xxhash.xxh3_128(repr((list(self.names), sorted(self.repeated.items()), len(self))).encode())
        for part in (self.stops, self.sets, self.items, self.columns, self.follows, self.texts):
            digest.update(part)
        return digest.hexdigest()


@dataclass(slots=True)
class _Text:
    """Letters and words of all passages, end to end."""

    letters: Bytes
    bounds: Int64s
    """Where each passage begins in `letters`, and the end."""
    edges: Int64s
    """Where each word begins in `letters`, and the end."""
    word_bounds: Int64s
    """Where each passage begins in `edges`, and the end."""
    parts: Int64s
    """How many words each passage has when what marks join counts as several."""
    risky: Mask
    """Words that a mark parts from the one before, without a space: others may write both as one."""
    keys: Hashes
    """A number for the sixteen letters from each word on."""


def _read_text(passages: Passages) -> _Text:
    offsets = passages.offsets
    columns: list[tuple[Any, ...]] = []
    start = 0
    while start < len(passages):
        stop = int(np.searchsorted(offsets, offsets[start] + _SLICE_BYTES, side="right")) - 1
        stop = min(max(stop, start + 1), len(passages))
        data, inner = bytes(passages.texts[offsets[start] : offsets[stop]]), offsets[start : stop + 1] - offsets[start]
        words = words_of(data, inner)
        passage = np.searchsorted(inner, words.starts, side="right") - 1
        first = np.diff(passage, prepend=-1) != 0
        joined, risky = _marked(data, words.starts, words.stops)
        joined &= ~first
        parts = np.bincount(passage, minlength=stop - start)
        whole = np.bincount(passage[~joined], minlength=stop - start)
        sizes = np.bincount(passage, words.lengths, stop - start).astype(np.int64)
        at = np.cumsum(words.lengths) - words.lengths
        columns.append((letters_in(words), sizes, at[~joined], whole, parts, (risky & ~first)[~joined]))
        start = stop
    letters, sizes, _, whole, parts, risky = (np.concatenate(column) for column in zip(*columns, strict=True))
    before = np.cumsum([0, *(len(column[0]) for column in columns)])
    words_at = np.concatenate([column[2] + shift for column, shift in zip(columns, before, strict=False)])
    padded = np.concatenate((letters, np.zeros(SEED_LETTERS, np.uint8)))
    keys = seed_keys(blocks_at(padded)[words_at], blocks_at(padded)[words_at + BLOCK])
    return _Text(padded, _bounds(sizes), np.append(words_at, len(letters)), _bounds(whole), parts, risky, keys)


def _marked(data: bytes, starts: Int64s, stops: Int64s) -> tuple[Mask, Mask]:
    """Which parts of words go on the one before, and which only marks part from it; of the first neither is true."""
    joins = [match.span() for match in _JOINS.finditer(data)]
    begins, ends = np.array(joins or [(-1, -1)], np.int64).T
    nearest = np.maximum(np.searchsorted(begins, stops[:-1], side="right") - 1, 0)
    joined, risky = np.zeros(len(starts), np.bool_), np.zeros(len(starts), np.bool_)
    joined[1:] = (begins[nearest] == stops[:-1]) & (ends[nearest] == starts[1:])
    spaces = np.concatenate((np.zeros(1, np.int64), np.cumsum(_SPACES[np.frombuffer(data, np.uint8)])))
    risky[1:] = (starts[1:] > stops[:-1]) & (spaces[starts[1:]] == spaces[stops[:-1]])
    return joined, risky


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
        short = (text.parts < MIN_WORDS) | (np.diff(text.bounds) < MIN_LETTERS)
        short |= (text.parts < SHORT_WORDS) & follows
        counts = np.where(short, 0, words - sizes + 1)
        bounds = _bounds(counts)
        passage = np.repeat(np.arange(len(counts)), counts)
        first = text.word_bounds[passage] + np.arange(bounds[-1]) - bounds[passage]
        return cls(bounds, first, sizes[passage])

    def letters(self, text: _Text) -> tuple[Int64s, Int64s]:
        """From, up to."""
        return text.edges[self.first_words], text.edges[self.first_words + self.sizes]


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


def _ignored(text: _Text, grams: _Grams, most: npt.NDArray[np.int32]) -> Mask:
    """N-grams that do not count: too few letters, those that their passage has had before, and those in more passages
    than the set of theirs allows. `most`: for each passage."""
    begin, stop = grams.letters(text)
    found: Mask = stop - begin < SEED_LETTERS
    if not len(found):
        return found
    hashes = _hashes(text, begin, stop)
    passage = np.repeat(np.arange(len(most), dtype=np.int32), np.diff(grams.bounds))
    # Few are left to be sorted; stable: within equal ones, passages stay in order.
    order = np.flatnonzero(_alike(hashes) > 1)
    order = order[np.argsort(hashes[order], kind="stable")]
    hashes, passage = hashes[order], passage[order]
    begins = np.diff(hashes, prepend=~hashes[:1]) != 0
    first = begins | (np.diff(passage, prepend=-1) != 0)
    group = np.cumsum(begins) - 1
    found[order] |= ~first | (np.bincount(group[first])[group] > most[passage])
    return found


def _seeds(text: _Text, grams: _Grams, counted: Mask) -> tuple[Int64s, Int64s, Int64s]:
    """The words from which on n-grams are looked up, the rarest of each, and of each word the first n-gram that it
    stands for and the one behind the last."""
    rarity = _RARITY.take(np.diff(text.edges), mode="clip")
    score = np.log2(_alike(text.keys)).astype(np.int64) - rarity
    score[:-1] -= rarity[1:]
    # Never, if there is another word, where a document may have no beginning of one.
    score += text.risky * (np.int64(1) << 20)
    numbers = np.flatnonzero(counted)
    first = grams.first_words[numbers]
    _, stop = grams.letters(text)
    # As many letters are left in the n-gram.
    until = np.searchsorted(text.edges, stop[numbers] - SEED_LETTERS, side="right")
    chosen = _least(score, first, np.minimum(until, first + grams.sizes[numbers]))
    begins = np.flatnonzero(np.diff(chosen, prepend=-1))
    ends = np.append(begins[1:], len(chosen))[: len(begins)] - 1
    return chosen[begins], numbers[begins], numbers[ends] + 1


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


def seed_keys(low: Hashes, high: Hashes) -> Hashes:
    """A number for sixteen letters, given as two numbers."""
    keys = low * _BASE
    keys ^= keys >> np.uint64(29)
    keys += high
    keys *= _INVERSE
    keys ^= keys >> np.uint64(32)
    return keys


def bits_of(hashes: Hashes) -> Hashes:
    """A table that says of most hashes that they are not among these: two bits of one number each, in all about 16
    for each hash."""
    hashes, one, low = np.sort(hashes), np.uint64(1), np.uint64(63)
    hashes = hashes[np.diff(hashes, prepend=~hashes[:1]) != 0]
    table = np.zeros(1 << max(1, (len(hashes) // 4).bit_length()), np.uint64)
    bits = one << (hashes >> np.uint64(32) & low) | one << (hashes >> np.uint64(38) & low)
    np.bitwise_or.at(table, (hashes >> shift_of(table)).view(np.int64), bits)
    return table


def shift_of(table: Hashes) -> np.uint64:
    """The first bits of a hash are the place in a table."""
    return np.uint64(65 - len(table).bit_length())


def build_index(path: Path, passages: Passages, sets: tuple[EvaluationSet, ...]) -> dict[str, Any]:
    """Write the file; its size and hash."""
    owners = np.frombuffer(passages.sets, np.uint16).astype(np.int64)
    text = _read_text(passages)
    follows = np.frombuffer(passages.follows, np.bool_)
    grams = _Grams.of(text, np.array([one.ngram for one in sets])[owners], follows)
    ignored = _ignored(text, grams, np.array([one.max_items for one in sets], np.int32)[owners])
    words, first, stop = _seeds(text, grams, ~ignored)
    order = np.argsort(text.keys[words], kind="stable")
    words, keys = words[order], text.keys[words[order]]
    arrays: dict[str, npt.NDArray[Any]] = {
        "letters": text.letters,
        "edges": text.edges.astype(np.uint32),
        "word_bounds": text.word_bounds,
        "gram_bounds": grams.bounds,
        "ignored": ignored,
        "seed_keys": keys,
        "seed_letters": text.edges[words],
        "seed_passages": np.searchsorted(text.word_bounds, words, side="right") - 1,
        "seed_grams": first[order],
        "seed_stops": stop[order],
        "key_bits": bits_of(np.concatenate((keys, keys * _BASE))),
        "texts": np.frombuffer(passages.texts, np.uint8),
        "text_bounds": passages.offsets,
        "sets": owners.astype(np.uint16),
        "items": np.frombuffer(passages.items, np.int64),
        "columns": np.frombuffer(passages.columns, np.uint16),
    }
    repeated = {str(number): count for number, count in passages.repeated.items()}
    facts = {"passages": len(passages), "column_names": list(passages.names), "repeated": repeated}
    return write_arrays(path, arrays, durable=True, **facts)


class Index:
    """An index that was built, mapped."""

    def __init__(self, path: Path) -> None:
        arrays, self.facts = map_arrays(path)
        self.passages: int = self.facts["passages"]
        self.letters: Bytes = arrays["letters"]
        self.edges: npt.NDArray[np.uint32] = arrays["edges"]
        self.word_bounds: Int64s = arrays["word_bounds"]
        self.gram_bounds: Int64s = arrays["gram_bounds"]
        self.ignored: Mask = arrays["ignored"]
        self.seed_keys: Hashes = arrays["seed_keys"]
        self.seed_letters: Int64s = arrays["seed_letters"]
        self.seed_passages: Int64s = arrays["seed_passages"]
        self.seed_grams: Int64s = arrays["seed_grams"]
        self.seed_stops: Int64s = arrays["seed_stops"]
        self.key_bits: Hashes = arrays["key_bits"]
        self._texts: Bytes = arrays["texts"]
        self._text_bounds: Int64s = arrays["text_bounds"]
        self.sets: npt.NDArray[np.uint16] = arrays["sets"]
        self.items: Int64s = arrays["items"]
        self._columns: npt.NDArray[np.uint16] = arrays["columns"]

    def text(self, passage: int) -> str:
        return bytes(self._texts[self._text_bounds[passage] : self._text_bounds[passage + 1]]).decode()

    def column(self, passage: int) -> str:
        return str(self.facts["column_names"][int(self._columns[passage])])

    def searched(self, number: int) -> Counter[str]:
        """Of one set: passages in all, too short, repeated, of common phrases alone, and items."""
        mine = np.flatnonzero(self.sets == number)
        first, stop = self.gram_bounds[mine], self.gram_bounds[mine + 1]
        counted = np.concatenate(([0], np.cumsum(~self.ignored)))
        short = first == stop
        common = ~short & (counted[stop] == counted[first])
        return Counter(
            passages=len(mine),
            items=len(set(self.items[mine].tolist())),
            too_short=int(short.sum()),
            common=int(common.sum()),
            repeated=int(self.facts["repeated"].get(str(number), 0)),
        )


# ---- arrays in one file that is mapped where it is read: processes share its pages ----


def write_arrays(path: Path, arrays: dict[str, Array], *, durable: bool, **facts: Any) -> dict[str, Any]:
    """A line of JSON that says what follows, then the arrays, each at a multiple of 64 bytes. Gives its size and hash.

    `durable`: nobody compares them before it is read.
    """
    layout = {name: [one.dtype.str, len(one)] for name, one in arrays.items()}
    head = json.dumps({"facts": facts, "arrays": layout}).encode()
    head += b" " * (-(len(head) + 1) % _ALIGNED) + b"\n"
    with NewFile(path) as new:
        new.write(head)
        for one in arrays.values():
            new.write(np.ascontiguousarray(one).view(np.uint8).data)
            new.write(bytes(-new.size % _ALIGNED))
        return new.commit() if durable else new.put_in_place()


def map_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays, read when they are looked at, and the facts."""
    try:
        with path.open("rb") as file:
            head = file.readline()
        layout = json.loads(head)
        flat = np.memmap(path, np.uint8, "r")
        arrays, at = {}, len(head)
        for name, (dtype, count) in layout["arrays"].items():
            size = np.dtype(dtype).itemsize * count
            arrays[name] = np.asarray(flat[at : at + size]).view(dtype)
            at += size + -size % _ALIGNED
    except (OSError, ValueError, KeyError) as error:
        raise StoreError(f"{path}: can't be read ({error}). Run the same command again to rebuild it.") from None
    return arrays, layout["facts"]
