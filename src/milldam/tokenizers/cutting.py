"""A document of any size, fed in parts -> the same ids as if it were encoded whole, in bounded memory.

The text is cut about every `piece_chars` characters, and each cut is checked before it is used:

1. Between words, where the kind of character changes. There a tokenizer can't merge across, and that is checked with
   the tokenizer itself: a window around the cut must encode to the same ids whole and in two.
2. Inside a run without such a place (a megabyte of letters): at a place where ids(run) = ids(left) + ids(right). For BPE
   that is exact for whatever follows: a sequence of tokens is the encoding of its text when each adjacent pair is.
   Tokenizers that mark word starts encode the right part with their bare form, which adds no mark.
3. Inside a run that is one unknown token whatever its length: the second half adds nothing and is dropped.

When none of these holds for runs of up to `MAX_RUN`, the cut is made all the same and counted in `inexact_cuts`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milldam.tokenizers.engines import Ids

EncodeTexts = Callable[[Sequence[str]], list[Ids]]

_REACH = 2048
_WINDOW = 1024
MAX_RUN = 1 << 20
_RUN_TAIL = 2048
_RUN_WINDOW = 256
_TRIES = 64
_TRIES_AT_ONCE = 16

# From the surest place to the least: before a single space between words, after a line's end, where letters,
# digits and other signs meet.
_BOUNDARIES = (
    re.compile(r"(?<=[^\W_])(?= [^\W_])"),
    re.compile(r"(?<=\S)(?=\n\S)"),
    re.compile(r"(?<=\n)(?=[^\W_])"),
    re.compile(r"(?<=[^\W\d_])(?=\d)|(?<=\d)(?=[^\W\d_])|(?<=[^\W_])(?=[^\w\s])|(?<=\S)(?= )"),
)
_SPACE = re.compile(r"\s")


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    bare: bool
    """Begins inside a word: encode it with the bare tokenizer."""
    first: int | None = None
    """The token it must begin with for its cut to hold."""


@dataclass(frozen=True, slots=True)
class _Cut:
    at: int
    bare: bool = False
    first: int | None = None


class Cutter:
    """Encodes one document at a time: `feed` its parts in order, the last with `final`."""

    def __init__(self, encode: EncodeTexts, encode_bare: EncodeTexts | None, *, piece_chars: int, buffer_chars: int) -> None:
        self._encode, self._encode_bare = encode, encode_bare
        self._piece_chars, self._buffer_chars = piece_chars, buffer_chars
        self.inexact_cuts = 0
        self.forget()

    def forget(self) -> None:
        """Be ready for a new document."""
        self._parts: list[str] = []
        self._held = 0
        self._next = _Cut(0)

    def feed(self, text: str, *, final: bool) -> list[Ids]:
        """The ids that are certain by now."""
        self._parts.append(text)
        self._held += len(text)
        if not final and self._held < self._buffer_chars:
            return []
        pieces = list(self._cut("".join(self._parts), final))
        if final:
            self.forget()
        return self._encode_pieces(pieces)

    def _cut(self, text: str, final: bool) -> Iterator[_Piece]:
        at = 0
        while len(text) - at > self._piece_chars + _REACH + _WINDOW:
            cut, text = self._find_cut(text, at)
            yield self._piece(text[at : cut.at])
            at, self._next = cut.at, cut
        if final:
            yield from self._last_pieces(text[at:])
        self._parts, self._held = [text[at:]], len(text) - at

    def _piece(self, text: str) -> _Piece:
        return _Piece(text, self._next.bare, self._next.first)

    def _last_pieces(self, text: str) -> Iterator[_Piece]:
        if self._next.bare and (space := _SPACE.search(text)):
            yield self._piece(text[: space.start()])
            text, self._next = text[space.start() :], _Cut(0)
        yield self._piece(text)

    def _find_cut(self, text: str, at: int) -> tuple[_Cut, str]:
        """The next cut after `at`, and the text: shorter when a part of it adds nothing."""
        if self._next.bare:
            space = _SPACE.search(text, at, at + self._piece_chars)
            if space is not None and space.start() > at:
                return _Cut(space.start()), text
        else:
            target = at + self._piece_chars
            found = self._between_words(text, target) or self._before_run(text, at, target)
            if found is not None:
                return _Cut(found), text
        return self._inside_run(text, at)

    # ---- 1. between words ----

    def _between_words(self, text: str, target: int) -> int | None:
        for boundary in _BOUNDARIES:
            places = [m.start() for m in boundary.finditer(text, target - _REACH, target + _REACH)]
            for place in sorted(places, key=lambda place: abs(place - target))[:4]:
                if self._separates(text, place):
                    return place
        return None

    def _before_run(self, text: str, at: int, target: int) -> int | None:
        """The last place between words before a run that reaches over the target."""
        for boundary in _BOUNDARIES:
            places = [m.start() for m in boundary.finditer(text, at + 1, target)]
            for place in reversed(places[-4:]):
                if self._separates(text, place):
                    return place
        return None

    def _separates(self, text: str, place: int) -> bool:
        left, right = text[max(0, place - _WINDOW) : place], text[place : place + _WINDOW]
        whole, *halves = self._encode([left + right, left, right])
        return np.array_equal(whole, np.concatenate(halves))

    # ---- 2. inside a run ----

    def _inside_run(self, text: str, at: int) -> tuple[_Cut, str]:
        size = self._piece_chars // 2
        while size <= MAX_RUN and at + size + _RUN_TAIL <= len(text):
            run = text[at : at + size + _RUN_TAIL]
            whole = self._encode_left()([run])[0]
            if self._adds_nothing(run, whole):
                return self._find_cut_after_drop(text, at, len(run))
            for place in self._plausible_places(run, size):
                cut = self._split_run(run, whole, place)
                if cut is not None:
                    return _Cut(at + cut.at, cut.bare, cut.first), text
            size *= 2
        self.inexact_cuts += 1
        return _Cut(min(len(text), at + self._piece_chars)), text

    def _encode_left(self) -> EncodeTexts:
        bare = self._encode_bare
        return bare if self._next.bare and bare is not None else self._encode

    def _plausible_places(self, run: str, size: int) -> Iterator[int]:
        """Places that hold within a small window; a full check follows."""
        encode_inside = self._encode_bare or self._encode
        for start in range(size, size + _TRIES, _TRIES_AT_ONCE):
            places = range(start, start + _TRIES_AT_ONCE)
            halves = [(run[place - _RUN_WINDOW : place], run[place : place + _RUN_WINDOW]) for place in places]
            ids = encode_inside([text for left, right in halves for text in (left + right, left, right)])
            for n, place in enumerate(places):
                whole, left_ids, right_ids = ids[3 * n : 3 * n + 3]
                if np.array_equal(whole, np.concatenate((left_ids, right_ids))):
                    yield place

    def _split_run(self, run: str, whole: Ids, place: int) -> _Cut | None:
        left = self._encode_left()([run[:place]])[0]
        if not np.array_equal(left, whole[: len(left)]):
            return None
        for encode, bare in ((self._encode, False), (self._encode_bare, True)):
            if encode is None or (bare and _SPACE.search(run, place)):
                continue
            right = encode([run[place:]])[0]
            if len(right) and np.array_equal(right, whole[len(left) :]):
                return _Cut(place, bare, int(right[0]))
        return None

    # ---- 3. one unknown token ----

    def _adds_nothing(self, run: str, whole: Ids) -> bool:
        return len(whole) <= 2 and np.array_equal(self._encode_left()([run[: len(run) // 2]])[0], whole)

    def _find_cut_after_drop(self, text: str, at: int, run: int) -> tuple[_Cut, str]:
        shorter = text[: at + run // 2] + text[at + run :]
        if len(shorter) - at > self._piece_chars + _REACH + _WINDOW:
            return self._find_cut(shorter, at)
        # Too little is left to cut: an empty piece, and the rest waits for more text.
        return _Cut(at, self._next.bare, self._next.first), shorter

    # ---- encoding what was cut ----

    def _encode_pieces(self, pieces: list[_Piece]) -> list[Ids]:
        main = iter(self._encode([p.text for p in pieces if not p.bare]) if pieces else [])
        bare_texts = [p.text for p in pieces if p.bare]
        bare = iter(self._encode_bare(bare_texts) if self._encode_bare and bare_texts else [])
        encoded = [next(bare) if piece.bare else next(main) for piece in pieces]
        for piece, ids in zip(pieces, encoded, strict=True):
            if piece.first is not None and len(ids) and int(ids[0]) != piece.first:
                self.inexact_cuts += 1
        return encoded
