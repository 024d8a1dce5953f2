"""A document of any size, fed in parts -> the same ids as if it were encoded whole, in bounded memory.

The text is cut about every `piece_bytes`, and each cut is checked before it is used:

1. Between words, where the kind of character changes. There a tokenizer can't merge across, and that is checked with
   the tokenizer itself: a window around the cut must encode to the same ids whole and in two.
2. Inside a run without such a place (a megabyte of letters): where ids(run) = ids(left) + ids(right). For BPE
   that is exact for whatever follows: a sequence of tokens is the encoding of its text when each adjacent pair is.
   For Unigram, which weighs the whole word, the left part must also stay the same wherever the text might end.
   Tokenizers that mark word starts encode the right part with their bare form, which adds no mark: up to the next
   space where each word gets its mark from a pre-tokenizer, or all through where only the whole text gets one.
3. Inside a run that is one unknown token whatever its length: the second half adds nothing and is dropped.

Where runs.py knows the rule for words of a byte-level BPE, the second is done in links, which encodes each byte once:
a piece ends inside a run and the next begins `_OVERLAP` before that end. The overlap is also encoded alone. Where its
last tokens are those of the one piece and its first tokens those of the other, and two tokens side by side are in
all three, each adjacent pair of tokens on both sides of that place is its own encoding, so the whole is.

When none of these holds for runs of up to `MAX_RUN`, the cut is made all the same and counted in `inexact_cuts`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from milldam.tokenizers.encoders import Ids, Offsets
from milldam.tokenizers.runs import Runs

_REACH = 2048
_WINDOW = 256
_RUN = 1 << 17
MAX_RUN = 1 << 20
_RUN_TAIL = 2048
_TRIES = 64
_TRIES_AT_ONCE = 16
_ENDINGS = 24
_LINK = 1 << 14
_OVERLAP = 256
_AGREEING = 2

# Text is UTF-8. From the surest place to the least: before a single space between words, at a line's end, where
# letters, digits and signs meet, before a Chinese or Japanese full stop or comma. Each begins at a character.
_WORD = rb"[A-Za-z0-9\x80-\xff]"
_BOUNDARIES = (
    re.compile(rb"(?<=%s)(?= %s)" % (_WORD, _WORD)),
    re.compile(rb"(?<=\S)(?=\n\S)"),
    re.compile(rb"(?<=\n)(?=%s)" % _WORD),
    re.compile(
        rb"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])|(?<=%s)(?=[!-/:-@\[-`{-~])|(?<=\S)(?= )"
        rb"|(?=\xe3\x80[\x81\x82])|(?=\xef\xbc[\x81\x8c\x9b\x9f])" % _WORD
    ),
)
_SPACE = re.compile(rb"[ \t-\r]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80")


def character_start(text: bytes, place: int) -> int:
    """The first place from here on that is not inside a character."""
    while place < len(text) and 0x80 <= text[place] < 0xC0:
        place += 1
    return place


def _character_before(text: bytes, place: int) -> int:
    """The start of the character before a place."""
    place -= 1
    while place > 0 and 0x80 <= text[place] < 0xC0:
        place -= 1
    return place


def _halves(text: bytes, place: int, reach: int) -> tuple[bytes, bytes]:
    """What lies to the left and right of a place, in whole characters."""
    start, stop = character_start(text, max(0, place - reach)), character_start(text, place + reach)
    return text[start:place], text[place:stop]


def _is_sum(whole: Ids, left: Ids, right: Ids) -> bool:
    return len(left) > 0 and len(right) > 0 and np.array_equal(whole, np.concatenate((left, right)))


@dataclass(frozen=True, slots=True)
class _Link:
    """How a piece overlaps the one before it."""

    lead: Ids
    """The tokens it must begin with. All but the last belong to the piece before it."""
    lead_bytes: int
    """Of the text of those that belong to the piece before it."""
    overlap_bytes: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a piece begins."""

    at: int
    bare: bool = False
    """Inside a word: the piece is encoded with the bare tokenizer."""
    first: int | None = None
    """The token it must begin with for the cut to hold."""
    link: _Link | None = None
    """The piece overlaps the one before it."""
    ids: Ids | None = None
    """Of the piece, where they are known already."""

    @property
    def overlap_end(self) -> int:
        return self.at + (self.link.overlap_bytes if self.link else 0)


def _begins_with(ids: Ids, link: _Link | None) -> bool:
    return link is None or np.array_equal(ids[: len(link.lead)], link.lead)


def _common_end(one: Ids, other: Ids) -> int:
    """How many of the last tokens are the same."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[len(one) - size :] != other[len(other) - size :])
    return size - 1 - int(differing[-1]) if len(differing) else size


class Encoding(Protocol):
    """How the cutter encodes; all texts are UTF-8."""

    def texts(self, texts: Sequence[bytes]) -> list[Ids]:
        """Ids of a few small texts."""
        ...

    def pieces(self, text: bytes, offsets: Sequence[int]) -> tuple[Ids, Offsets]:
        """Flat ids of the pieces between offsets, and where each begins."""
        ...


class _Links:
    """Pieces inside a run of which each overlaps the one before it."""

    def __init__(self, main: Encoding, runs: Runs) -> None:
        self._main, self._runs = main, runs

    def find(self, text: bytes, begin: _Cut) -> tuple[_Cut, _Cut] | None:
        """The piece that begins here, with its ids, and the next one, which overlaps it. None: not in this way."""
        stop = character_start(text, begin.at + _LINK)
        if begin.bare or stop >= len(text):
            return None
        start, ids = character_start(text, stop - _OVERLAP), None
        for _ in range(_TRIES):
            overlap = text[start:stop]
            if start <= begin.overlap_end or not self._runs.holds(overlap):
                return None
            if ids is None:
                ids = self._main.texts([text[begin.at : stop]])[0]
                if not _begins_with(ids, begin.link):
                    return None
            if found := self._link(ids, overlap):
                link, dropped = found
                skipped = len(begin.link.lead) - 1 if begin.link else 0
                return replace(begin, ids=ids[skipped : len(ids) - dropped]), _Cut(start, link=link)
            start = _character_before(text, start)
        return None

    def _link(self, ids: Ids, overlap: bytes) -> tuple[_Link, int] | None:
        """A place inside the overlap between two tokens that end a piece too; and how many tokens follow it there."""
        whole = self._main.texts([overlap])[0]
        differing = len(whole) - _common_end(ids, whole)
        if differing > len(whole) // 2 or not self._runs.in_step(overlap, len(whole)):
            return None
        place = character_start(overlap, len(overlap) // 2)
        for _ in range(_TRIES):
            if place >= len(overlap):
                return None
            left, right = self._main.texts([overlap[:place], overlap[place:]])
            if _is_sum(whole, left, right) and len(left) >= differing + _AGREEING:
                return _Link(whole[: len(left) + 1], place, len(overlap)), len(right)
            place = character_start(overlap, place + 1)
        return None


class Cutter:
    """Encodes one document at a time: `feed` its parts in order, the last with `final`."""

    def __init__(
        self,
        main: Encoding,
        bare: Encoding | None,
        *,
        bare_spans_words: bool = False,
        weighs_words: bool = False,
        runs: Runs | None = None,
        piece_bytes: int,
        buffer_bytes: int,
    ) -> None:
        self._main, self._bare = main, bare
        self._links = None if runs is None else _Links(main, runs)
        self._bare_spans_words, self._weighs_words = bare_spans_words, weighs_words
        self._piece_bytes, self._buffer_bytes = piece_bytes, buffer_bytes
        self.inexact_cuts = 0
        self.forget()

    def forget(self) -> None:
        """Be ready for a new document."""
        self._parts: list[bytes] = []
        self._held = 0
        self._begin = _Cut(0)

    def feed(self, text: bytes, *, final: bool) -> list[Ids]:
        """The ids that are certain by now."""
        self._parts.append(text)
        self._held += len(text)
        if not final and self._held < self._buffer_bytes:
            return []
        cuts, text = self._cut(b"".join(self._parts), final)
        if final:
            self.forget()
        else:
            rest = text[cuts[-1].at :]
            self._parts, self._held, self._begin = [rest], len(rest), replace(cuts[-1], at=0)
        return self._encode(text, cuts)

    def _cut(self, text: bytes, final: bool) -> tuple[list[_Cut], bytes]:
        """Where pieces begin and, last, where the text that is certain ends; the text may have become shorter."""
        cuts = [self._begin]
        while len(text) - cuts[-1].at > self._piece_bytes + _REACH + _WINDOW:
            if self._links is not None and (linked := self._links.find(text, cuts[-1])):
                cuts[-1:] = linked
                continue
            found, text = self._find_cut(text, cuts[-1])
            if found is None:
                break
            if found.at > cuts[-1].at:
                cuts.append(found)
        if final:
            cuts += self._last_cuts(text, cuts[-1])
        return cuts, text

    def _last_cuts(self, text: bytes, begin: _Cut) -> list[_Cut]:
        word_end = self._word_end(text, begin.at, len(text)) if self._ends_with_word(begin) else None
        return [*([word_end] if word_end else []), _Cut(len(text))]

    def _ends_with_word(self, begin: _Cut) -> bool:
        return begin.bare and not self._bare_spans_words

    def _word_end(self, text: bytes, start: int, stop: int) -> _Cut | None:
        """Where the word that a bare piece continues is over: a space from which the main tokenizer goes on."""
        for space in itertools.islice(_SPACE.finditer(text, start + 1, stop), _TRIES):
            if self._joint(text, space.start()) == _Cut(space.start()):
                return _Cut(space.start())
        plain = text.find(b" ", start + 1, stop)
        if plain < 0:
            return None
        self.inexact_cuts += 1
        return _Cut(plain)

    def _find_cut(self, text: bytes, begin: _Cut) -> tuple[_Cut | None, bytes]:
        """The next cut, None when more text is needed; and the text: shorter when a part of it adds nothing."""
        target = max(begin.at + self._piece_bytes, begin.overlap_end)
        if self._ends_with_word(begin):
            return self._inside_run(text, begin)
        found = self._between_words(text, target) or self._before_run(text, begin.overlap_end, target)
        return (found, text) if found is not None else self._inside_run(text, begin)

    # ---- 1. between words ----

    def _between_words(self, text: bytes, target: int) -> _Cut | None:
        for boundary in _BOUNDARIES:
            for match in itertools.islice(boundary.finditer(text, target, target + _REACH), 4):
                if cut := self._joint(text, match.start()):
                    return cut
        return None

    def _before_run(self, text: bytes, at: int, target: int) -> _Cut | None:
        """The last place between words before a run that reaches over the target."""
        for boundary in _BOUNDARIES:
            places = [m.start() for m in boundary.finditer(text, at + 1, target)]
            for place in reversed(places[-4:]):
                if cut := self._joint(text, place):
                    return cut
        return None

    def _joint(self, text: bytes, place: int) -> _Cut | None:
        """A cut here, if a window around it has the same ids whole and in two; sides without any id prove nothing."""
        left, right = _halves(text, place, _WINDOW)
        whole, left_ids, right_ids = self._main.texts([left + right, left, right])
        if _is_sum(whole, left_ids, right_ids):
            return _Cut(place)
        if self._bare is not None and self._bare_spans_words and _is_sum(whole, left_ids, self._bare.texts([right])[0]):
            return _Cut(place, bare=True)
        return None

    # ---- 2. inside a run ----

    def _inside_run(self, text: bytes, begin: _Cut) -> tuple[_Cut | None, bytes]:
        size = _RUN
        while size <= MAX_RUN:
            if begin.at + size + 2 * _RUN_TAIL > len(text):
                return None, text
            run = text[begin.at : character_start(text, begin.at + size + _RUN_TAIL)]
            if self._ends_with_word(begin) and (word_end := self._word_end(text, begin.at, begin.at + len(run))):
                return word_end, text
            whole = self._left(begin).texts([run])[0]
            if self._adds_nothing(run, whole, begin):
                half = character_start(text, begin.at + len(run) // 2)
                return begin, text[:half] + text[begin.at + len(run) :]
            for place in self._plausible_places(run, size):
                cut = self._split_run(run, whole, place, begin)
                if cut is not None:
                    return replace(cut, at=begin.at + cut.at), text
            size *= 2
        self.inexact_cuts += 1
        return _Cut(character_start(text, begin.at + self._piece_bytes)), text

    def _left(self, begin: _Cut) -> Encoding:
        return self._bare if begin.bare and self._bare is not None else self._main

    def _plausible_places(self, run: bytes, size: int) -> Iterator[int]:
        """Places that hold within a small window; a full check follows."""
        inside = self._bare or self._main
        for start in range(size, size + _TRIES, _TRIES_AT_ONCE):
            places = sorted({character_start(run, place) for place in range(start, start + _TRIES_AT_ONCE)})
            halves = [_halves(run, place, _WINDOW) for place in places]
            ids = inside.texts([text for left, right in halves for text in (left + right, left, right)])
            for n, place in enumerate(places):
                if _is_sum(*ids[3 * n : 3 * n + 3]):
                    yield place

    def _split_run(self, run: bytes, whole: Ids, place: int, begin: _Cut) -> _Cut | None:
        if self._weighs_words and not self._is_stable(run, place):
            return None
        left = self._left(begin).texts([run[:place]])[0]
        for encoding, bare in ((self._main, False), (self._bare, True)):
            if encoding is None or (bare and not self._bare_spans_words and _SPACE.search(run, place)):
                continue
            right = encoding.texts([run[place:]])[0]
            if _is_sum(whole, left, right):
                return _Cut(place, bare, int(right[0]))
        return None

    def _is_stable(self, run: bytes, place: int) -> bool:
        """Whether what lies left of a place has the same ids wherever the text behind it ends."""
        inside = self._bare or self._main
        left, right = _halves(run, place, _WINDOW)
        ends = sorted({character_start(right, max(0, len(right) - cut)) for cut in range(_ENDINGS)})
        known, *continued = inside.texts([left, *(left + right[:end] for end in ends)])
        return all(np.array_equal(known, ids[: len(known)]) for ids in continued)

    # ---- 3. one unknown token ----

    def _adds_nothing(self, run: bytes, whole: Ids, begin: _Cut) -> bool:
        half = run[: character_start(run, len(run) // 2)]
        return len(whole) <= 2 and np.array_equal(self._left(begin).texts([half])[0], whole)

    # ---- encoding what was cut ----

    def _encode(self, text: bytes, cuts: list[_Cut]) -> list[Ids]:
        """Ids of the pieces, neighbours of a kind in one go."""
        encoded: list[Ids] = []
        kinds = itertools.groupby(range(len(cuts) - 1), key=lambda n: (cuts[n].bare, cuts[n].ids is None))
        for (bare, is_new), group in kinds:
            numbers = list(group)
            if is_new:
                encoding = self._bare if bare and self._bare is not None else self._main
                encoded.append(self._encode_new(encoding, text, cuts[numbers[0] : numbers[-1] + 2]))
            else:
                encoded += [ids for n in numbers if (ids := cuts[n].ids) is not None]
        return encoded

    def _encode_new(self, encoding: Encoding, text: bytes, cuts: list[_Cut]) -> Ids:
        """Of these the first alone may overlap what is before it."""
        flat, offsets = encoding.pieces(text, [cut.at for cut in cuts])
        firsts = (cut.first for cut in cuts[:-1])
        starts = zip(firsts, offsets[:-1], offsets[1:], strict=True)
        self.inexact_cuts += sum(first is not None and a < b and int(flat[a]) != first for first, a, b in starts)
        link = cuts[0].link
        if link is None:
            return flat
        if _begins_with(flat, link):
            return flat[len(link.lead) - 1 :]
        self.inexact_cuts += 1
        return encoding.pieces(text, [cuts[0].at + link.lead_bytes, *(cut.at for cut in cuts[1:])])[0]
