"""Batches of text -> batches of tokens, special tokens in place, ids narrowed. Documents may be of any size.

A document that gives no token is left out and counted as `empty`. One larger than the encoder takes at once is cut
about every `piece_bytes`, at white space behind a word, and each cut is proven: a piece is encoded together with the
`CONTEXT` bytes before it, whose tokens are then left out, and

- the tokens of context and piece begin with those of the context alone: no token reaches over the cut;
- the piece before ends with the tokens of the context, but for the first half of them, which depends on where the
  context begins.

So the last token of a piece and the first of the next stand side by side in an encoding that saw both. For BPE that
is a proof: a sequence of tokens is the encoding of its text when each two neighbours are. Other models divide text at
white space before they look at words. Where a cut does not hold, the next white space is tried; a document that has
none for the encoder's `longest_run` is left out and counted as `no_white_space`.

Holds one batch, the text of a document that is not cut yet, and its ids.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError
from milldam.memory import format_size
from milldam.native import kernel
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import byte_count, groups
from milldam.tokenizers.encoders import Encoder, Ids, encode_each
from milldam.tokenizers.loading import SpecialTokens

EMPTY, NO_WHITE_SPACE = "empty", "no_white_space"
CONTEXT = HEAD = 256
"""Bytes before a cut that are encoded again, and bytes behind it that are looked at before the piece is encoded."""
NEAR, _TRIES = 4096, 16
"""The best cut within so many bytes is wanted; so many of a kind are tried."""
_WORD = rb"[A-Za-z0-9\x80-\xff]"
_WHITE = rb"[ \t-\r]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BEHIND_A_WORD = re.compile(rb"(?<=\S)(?=%s)" % _WHITE)
_CUTS = (re.compile(rb"(?<=%s)(?= %s)" % (_WORD, _WORD)), re.compile(rb"(?<=%s)(?=\n)" % _WORD), _BEHIND_A_WORD)
"""From the surest: between two words, at the end of a line, before any white space."""


class NoWhiteSpaceError(InputError):
    """A document that would have to be cut and has no white space where that is possible."""


class DocumentEncoder:
    """One per worker. `encode` takes batches in order; an open batch holds one text, a piece of a document."""

    def __init__(self, encoder: Encoder, special: SpecialTokens, dtype: str) -> None:
        self.encoder, self.special = encoder, special
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.dropped: Counter[str] = Counter()
        self.uncut: list[int] = []
        """Of the last batch: the texts that were dropped as `no_white_space`."""
        self.exact_documents = 0
        """Encoded by HF tokenizers, as a whole or in part, since the fast encoder differs on a character of theirs."""
        self.cancel()

    def cancel(self) -> None:
        """Forget the document that is open."""
        self._long: _LongText | None = None
        self._last_token: int | None = None

    def encode(self, texts: pa.LargeStringArray, *, open: bool = False) -> Iterator[Tokens]:
        """Tokens of a batch. `open`: the batch is one text, whose document goes on in the next batch.

        A batch that ends an open document holds nothing else. Raises NoWhiteSpaceError where an open document can't
        be cut; `cancel` forgets it.
        """
        self.uncut = []
        if open or self._long is not None:
            assert len(texts) == 1
            yield from self._encode_long(texts, 0, final=not open)
            return
        first = 0
        for group in groups(texts, self.encoder.batch_bytes):
            if byte_count(group) <= self.encoder.batch_bytes:
                yield self._encode_short(group, first)
            else:
                try:
                    yield from self._encode_long(group, first, final=True)
                except NoWhiteSpaceError:
                    self.cancel()
                    self.dropped[NO_WHITE_SPACE] += 1
                    self.uncut.append(first)
            first += len(group)

    def _encode_short(self, texts: pa.LargeStringArray, first: int) -> Tokens:
        before = self.encoder.exact_texts
        flat, offsets = self.encoder.encode(texts)
        self.exact_documents += self.encoder.exact_texts - before
        lengths = np.diff(offsets)
        there = np.flatnonzero(lengths)
        if len(there) < len(texts):
            self.dropped[EMPTY] += len(texts) - len(there)
        flat, lengths = add_special_tokens(flat, lengths[there], self.special, self.dtype)
        return Tokens(flat, lengths, positions=first + there)

    def _encode_long(self, texts: pa.LargeStringArray, position: int, *, final: bool) -> Iterator[Tokens]:
        """The next tokens of a document: those that are certain by now. Its text is taken some at a time."""
        if self._long is None:
            self._long = _LongText(self.encoder)
        text, start = texts[0].as_buffer(), 0
        pieces: list[npt.NDArray[Any]] = []
        while start < text.size or not pieces:
            part = text.slice(start, min(self.encoder.batch_bytes + 3, text.size - start)).to_pybytes()
            part = part[: _character_start(part, self.encoder.batch_bytes)]
            start += len(part)
            pieces.append(self._long.encode(part, final=final and start == text.size).astype(self.dtype))
        ids = np.concatenate(pieces)
        begins, last = self._last_token is None, int(ids[-1]) if len(ids) else self._last_token
        if final:
            self.exact_documents += self.encoder.exact_texts > self._long.exact_before
            self.cancel()
        else:
            self._last_token = last
        if last is not None:
            before = [self.special.bos] if begins and self.special.bos not in (None, int(ids[0])) else []
            after = [self.special.eos] if final and self.special.eos not in (None, last) else []
            flat = np.concatenate((before, ids, after), dtype=self.dtype, casting="unsafe")
            yield Tokens(flat, np.array([len(flat)], np.int64), open=not final, positions=np.array([position]))
        elif final:
            self.dropped[EMPTY] += 1


class _Cut(NamedTuple):
    at: int
    context: int
    """Bytes before it that are encoded with the piece that begins here."""
    lead: Ids
    """Their tokens."""


class _LongText:
    """One document, whose text comes in parts that end between two characters."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self.exact_before = encoder, encoder.exact_texts
        self._text, self._begin, self._search = b"", _Cut(0, 0, np.empty(0, np.uint32)), 0

    def encode(self, part: bytes, *, final: bool) -> Ids:
        """The next ids that are certain."""
        self._text += part
        cuts, piece_bytes = [self._begin], self._encoder.piece_bytes
        start = max(self._search, self._begin.at + piece_bytes)
        while cut := self._find_cut(start, final=final):
            cuts.append(cut)
            start = cut.at + piece_bytes
        ids = self._encode_between(cuts, final=final)
        begin = cuts[-1].at - cuts[-1].context
        self._text, self._search = self._text[begin:], max(0, self._search - begin)
        self._begin = cuts[-1]._replace(at=cuts[-1].context)
        return np.concatenate([*ids, np.empty(0, np.uint32)])

    def _find_cut(self, start: int, *, final: bool) -> _Cut | None:
        """The next cut from `start` on; None: there is none before the end, or more text is needed to tell."""
        text, near, last = self._text, start + NEAR, start + self._encoder.longest_run
        known = len(text) if final else len(text) - HEAD
        if known <= start or (known < near and not final):
            return None
        kinds = [pattern.finditer(text, start, min(near, known)) for pattern in _CUTS]
        kinds.append(_BEHIND_A_WORD.finditer(text, near, min(last, known)))
        for match in chain.from_iterable(islice(kind, _TRIES) for kind in kinds):
            at = match.start()
            begin = _character_start(text, max(0, at - CONTEXT))
            lead = self._encoder.encode_text(text[begin:at])
            ahead = self._encoder.encode_text(text[begin : _character_start(text, at + HEAD)])
            if len(lead) and _begins_with(ahead, lead):
                return _Cut(at, at - begin, lead)
        if known >= last:
            size = format_size(self._encoder.longest_run)
            raise NoWhiteSpaceError(f"a document has no white space for {size} where it could be cut to be encoded.")
        return None

    def _encode_between(self, cuts: list[_Cut], *, final: bool) -> list[Ids]:
        """The ids of the pieces between the cuts. Those that do not hold are taken out."""
        while True:
            stops = [cut.at for cut in cuts[1:]] + [len(self._text)] * final
            pieces = [self._text[cut.at - cut.context : stop] for cut, stop in zip(cuts, stops, strict=False)]
            encoded = encode_each(self._encoder, pieces)
            if encoded and not _begins_with(encoded[0], cuts[0].lead):
                raise NoWhiteSpaceError("a document has other ids in pieces than as a whole.")
            for number, cut in enumerate(cuts[1:], start=1):
                tail = cut.lead[len(cut.lead) // 2 :]
                holds = np.array_equal(encoded[number - 1][-len(tail) :], tail)
                if not holds or (number < len(encoded) and not _begins_with(encoded[number], cut.lead)):
                    self._search = cuts.pop(number).at + 1
                    break
            else:
                return [ids[len(cut.lead) :] for ids, cut in zip(encoded, cuts, strict=False)]


def _begins_with(ids: Ids, lead: Ids) -> bool:
    return np.array_equal(ids[: len(lead)], lead)


def _character_start(text: bytes, place: int) -> int:
    """The first place from here on that is not inside a character."""
    while place < len(text) and 0x80 <= text[place] < 0xC0:
        place += 1
    return place


def add_special_tokens(
    flat: Ids, lengths: Int64s, special: SpecialTokens, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], Int64s]:
    """Put BOS and EOS around each document, none of which is empty, unless it has them already, and narrow the ids.

    >>> add_special_tokens(np.array([5, 6, 7, 0]), np.array([2, 2]), SpecialTokens(None, 0), np.dtype("uint16"))
    (array([5, 6, 0, 7, 0], dtype=uint16), array([3, 2]))
    """
    place = kernel("place_tokens", np.uint32, np.int64, int, int, int, np.uint8)
    bos, eos = (-1 if mark is None else mark for mark in (special.bos, special.eos))
    lengths, out = lengths.copy(), np.empty(len(flat) + 2 * len(lengths), dtype)
    ids = np.ascontiguousarray(flat, np.uint32)
    size = place(ids, lengths, bos, eos, dtype.itemsize, out.view(np.uint8))
    return out[:size], lengths
