"""A document of any size, in parts -> the ids that the encoder gives for the whole of it, in bounded memory.

The text is cut about every `piece_bytes`, at white space behind a word. Each piece is encoded together with the
`CONTEXT` bytes before it, whose tokens are then left out. A cut is used where two things hold:

- The tokens of the context and the piece begin with those of the context alone: no token reaches over the cut.
- The piece before ends with the tokens of the context, but for the first half of them, which depends on where the
  context begins.

So the last token of a piece and the first of the next stand side by side in an encoding that saw both. For BPE that
is a proof: a sequence of tokens is the encoding of its text when each two neighbours are. Other models divide text at
white space before they look at words. Where a cut does not hold, the next white space is tried.

Holds the text that is not cut yet: a piece, and while no cut holds up to the encoder's `longest_run`. Beyond that the
document can't be encoded: `NoWhiteSpaceError`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from milldam.errors import InputError
from milldam.memory import format_size
from milldam.tokenizers.encoders import Encoder, Ids, encode_each

CONTEXT = 256
_HEAD = 256
"""Of the text behind a cut, what is looked at before it is encoded."""
_NEAR, _TRIES = 4096, 16
"""The best cut within so many bytes is wanted; so many of a kind are tried."""
_WORD = rb"[A-Za-z0-9\x80-\xff]"
_WHITE = rb"[ \t-\r]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEHIND_A_WORD = re.compile(rb"(?<=\S)(?=%s)" % _WHITE)
_CUTS = (re.compile(rb"(?<=%s)(?= %s)" % (_WORD, _WORD)), re.compile(rb"(?<=%s)(?=\n)" % _WORD), _BEHIND_A_WORD)
"""From the surest: between two words, at the end of a line, before any white space."""


class NoWhiteSpaceError(InputError):
    """A document that would have to be cut and has no white space where that is possible."""


@dataclass(frozen=True, slots=True)
class _Cut:
    at: int
    context: int
    """Bytes before it that are encoded with the piece that begins here."""
    lead: Ids
    """Their tokens."""


_START = _Cut(0, 0, np.empty(0, np.uint32))


class LongTexts:
    """Encodes one document at a time: `feed` its parts in order, the last one with `final`."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.forget()

    def forget(self) -> None:
        """Be ready for a new document."""
        self._text, self._begin, self._search = b"", _START, 0

    def feed(self, part: bytes, *, final: bool) -> list[Ids]:
        """The ids that are certain by now. Each part ends between two characters."""
        self._text += part
        cuts, piece_bytes = [self._begin], self._encoder.piece_bytes
        start = max(self._search, self._begin.at + piece_bytes)
        while cut := self._find_cut(start, final=final):
            cuts.append(cut)
            start = cut.at + piece_bytes
        ids = self._encode(cuts, final=final)
        if final:
            self.forget()
            return ids
        rest = cuts[-1].at - cuts[-1].context
        self._text, self._search = self._text[rest:], max(0, self._search - rest)
        self._begin = replace(cuts[-1], at=cuts[-1].context)
        return ids

    def _find_cut(self, start: int, *, final: bool) -> _Cut | None:
        """The next cut from `start` on; None: there is none before the end, or more text is needed to tell."""
        text, near, last = self._text, start + _NEAR, start + self._encoder.longest_run
        known = len(text) if final else len(text) - _HEAD
        if known <= start or (known < near and not final):
            return None
        kinds = [pattern.finditer(text, start, min(near, known)) for pattern in _CUTS]
        kinds.append(_BEHIND_A_WORD.finditer(text, near, min(last, known)))
        for match in chain.from_iterable(islice(kind, _TRIES) for kind in kinds):
            at = match.start()
            begin = character_start(text, max(0, at - CONTEXT))
            context, head = text[begin:at], text[at : character_start(text, at + _HEAD)]
            lead = self._encoder.encode_text(context)
            if len(lead) and _begins_with(self._encoder.encode_text(context + head), lead):
                return _Cut(at, len(context), lead)
        if known >= last:
            size = format_size(self._encoder.longest_run)
            raise NoWhiteSpaceError(f"a document has no white space for {size} where it could be cut to be encoded.")
        return None

    def _encode(self, cuts: list[_Cut], *, final: bool) -> list[Ids]:
        """The ids of the pieces between the cuts. Those that do not hold are taken out."""
        while True:
            stops = [cut.at for cut in cuts[1:]] + [len(self._text)] * final
            pieces = [self._text[cut.at - cut.context : stop] for cut, stop in zip(cuts, stops, strict=False)]
            encoded = encode_each(self._encoder, pieces)
            if encoded and not _begins_with(encoded[0], cuts[0].lead):
                raise NoWhiteSpaceError("a document has other ids in pieces than as a whole.")
            broken = (n for n in range(1, len(cuts)) if not self._holds(cuts[n], *encoded[n - 1 : n + 1]))
            wrong = next(broken, None)
            if wrong is None:
                return [ids[len(cut.lead) :] for ids, cut in zip(encoded, cuts, strict=False)]
            self._search = cuts.pop(wrong).at + 1

    @staticmethod
    def _holds(cut: _Cut, before: Ids, behind: Ids | None = None) -> bool:
        """Whether the pieces on both sides have the tokens of the context where they should."""
        second_half = cut.lead[len(cut.lead) // 2 :]
        return np.array_equal(before[-len(second_half) :], second_half) and (
            behind is None or _begins_with(behind, cut.lead)
        )


def character_start(text: bytes, place: int) -> int:
    """The first place from here on that is not inside a character."""
    while place < len(text) and 0x80 <= text[place] < 0xC0:
        place += 1
    return place


def _begins_with(ids: Ids, lead: Ids) -> bool:
    return np.array_equal(ids[: len(lead)], lead)
