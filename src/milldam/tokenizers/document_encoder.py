"""Batches of text -> ids with special tokens in place. Documents may be of any size.

A document larger than the encoder takes at once is cut about every `piece_bytes`, at white space behind a word, and
each cut is proven: a piece is encoded together with the `CONTEXT` bytes before it, whose tokens are then left out, and

- the tokens of context and piece begin with those of the context alone: no token reaches over the cut;
- the piece before ends with the tokens of the context, but for the first half of them, which depends on where the
  context begins.

So the last token of a piece and the first of the next stand side by side in an encoding that saw both. For BPE that
is a proof: a sequence of tokens is the encoding of its text when each two neighbours are. Other models divide text at
white space before they look at words. Where a cut does not hold, the next white space is tried; a document that has
none for the encoder's `longest_run` can't be encoded.

Holds one batch, the text of a document that is not cut yet, and its ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import InputError
from milldam.memory import format_size
from milldam.stores.tokens.format import Int64s
from milldam.text.arrays import groups
from milldam.tokenizers.encoders import Encoder, Ids, encode_each
from milldam.tokenizers.loading import SpecialTokens

EMPTY, NO_WHITE_SPACE = "empty", "no_white_space"
CONTEXT = HEAD = 256
"""Bytes before a cut that are encoded again, and bytes behind it that are looked at before the piece is encoded."""
NEAR, _TRIES = 4096, 16
"""Between two words a cut is wanted within so many bytes; so many of a kind are tried."""
_WORD = rb"[A-Za-z0-9\x80-\xff]"
_WHITE = rb"[ \t-\r]|\xc2[\x85\xa0]|\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
_BETWEEN_WORDS = re.compile(rb"(?<=%s)(?= %s|\n)" % (_WORD, _WORD))
_BEHIND_A_WORD = re.compile(rb"(?<=\S)(?=%s)" % _WHITE)


class NoWhiteSpaceError(InputError):
    """A document that would have to be cut and has no white space where that is possible."""


class DocumentEncoder:
    """Ids of documents, in an encoder's pieces."""

    def __init__(self, encoder: Encoder, special: SpecialTokens, dtype: str) -> None:
        self.encoder, self.special = encoder, special
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.uncut: list[int] = []
        """Of the last batch: the texts that could not be cut."""
        self.exact_documents = 0
        """Encoded by HF tokenizers, as a whole or in part, since the fast encoder differs on a character of theirs."""

    def encode(self, texts: pa.LargeStringArray) -> tuple[npt.NDArray[Any], Int64s]:
        """The ids of all texts, end to end, and how many each has: none where it is empty, or in `uncut`."""
        self.uncut = []
        flat, lengths, first = [np.empty(0, self.dtype)], np.zeros(len(texts), np.int64), 0
        for group in groups(texts, self.encoder.batch_bytes):
            size = len(group[0].as_buffer()) if len(group) == 1 else 0
            if size <= self.encoder.batch_bytes:
                before = self.encoder.exact_texts
                ids, offsets = self.encoder.encode(group)
                self.exact_documents += self.encoder.exact_texts - before
                ids, sizes = add_special_tokens(ids, np.diff(offsets), self.special, self.dtype)
                lengths[first : first + len(group)] = sizes
                flat.append(ids)
            else:
                try:
                    pieces = list(self.encode_pieces([memoryview(group[0].as_buffer())]))
                    lengths[first] = sum(map(len, pieces))
                    flat += pieces
                except NoWhiteSpaceError:
                    self.uncut.append(first)
            first += len(group)
        return flat[1] if len(flat) == 2 else np.concatenate(flat), lengths

    def encode_pieces(self, pieces: Iterable[bytes | memoryview]) -> Iterator[npt.NDArray[Any]]:
        """The ids of one document whose text comes in pieces that end between two characters, as they are certain.

        Raises NoWhiteSpaceError where it can't be cut.
        """
        before, last, bos, eos = self.encoder.exact_texts, None, self.special.bos, self.special.eos
        for ids in _encode_long(self.encoder, _parts(pieces, self.encoder.batch_bytes)):
            if len(ids):
                begin = [bos] if last is None and bos not in (None, int(ids[0])) else []
                last = int(ids[-1])
                yield np.concatenate((begin, ids)).astype(self.dtype)
        self.exact_documents += self.encoder.exact_texts > before
        if last is not None and eos not in (None, last):
            yield np.array([eos], self.dtype)


def _parts(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """The bytes of all pieces, some at a time, cut between characters."""
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = bytes(piece[start : start + size + 3])
            part = part[: _character_start(part, size)]
            start += len(part)
            yield part


Cut = tuple[int, int, Ids]
"""Where a piece begins, how many bytes before that are encoded with it, and their tokens."""


def _encode_long(encoder: Encoder, parts: Iterable[bytes]) -> Iterator[Ids]:
    """The ids of one text, piece after piece."""
    text, begin, search = b"", (0, 0, np.empty(0, np.uint32)), 0
    for part in chain(parts, [None]):
        text += part or b""
        done = False
        while not done:
            cuts, start = [begin], max(search, begin[0] + encoder.piece_bytes)
            while cut := _find_cut(encoder, text, start, final=part is None):
                cuts.append(cut)
                start = cut[0] + encoder.piece_bytes
            stops = [at for at, _, _ in cuts[1:]] + [len(text)] * (part is None)
            pieces = [text[at - context : stop] for (at, context, _), stop in zip(cuts, stops, strict=False)]
            done = True
            for number, ids in enumerate(encode_each(encoder, pieces)):
                lead, behind = cuts[number][2], cuts[number + 1 : number + 2]
                if not np.array_equal(ids[: len(lead)], lead):
                    raise NoWhiteSpaceError("a document has other ids in pieces than as a whole.")
                tail = behind[0][2][len(behind[0][2]) // 2 :] if behind else ids[:0]
                if not np.array_equal(ids[len(ids) - len(tail) :], tail):
                    search, done = behind[0][0] + 1, False
                    break
                yield ids[len(lead) :]
                begin = behind[0] if behind else begin
        text, search = text[begin[0] - begin[1] :], max(0, search - begin[0] + begin[1])
        begin = (begin[1], *begin[1:])


def _find_cut(encoder: Encoder, text: bytes, start: int, *, final: bool) -> Cut | None:
    """The next cut from `start` on; None: there is none before the end, or more text is needed to tell."""
    near, last = start + NEAR, start + encoder.longest_run
    known = len(text) if final else len(text) - HEAD
    if known <= start or (known < near and not final):
        return None
    kinds = (_BETWEEN_WORDS, start, near), (_BEHIND_A_WORD, start, near), (_BEHIND_A_WORD, near, last)
    matches = (islice(kind.finditer(text, first, min(stop, known)), _TRIES) for kind, first, stop in kinds)
    for match in chain.from_iterable(matches):
        at = match.start()
        begin = _character_start(text, max(0, at - CONTEXT))
        lead, ahead = encode_each(encoder, [text[begin:at], text[begin : _character_start(text, at + HEAD)]])
        if len(lead) and np.array_equal(ahead[: len(lead)], lead):
            return at, at - begin, lead
    if known >= last:
        size = format_size(encoder.longest_run)
        raise NoWhiteSpaceError(f"a document has no white space for {size} where it could be cut to be encoded.")
    return None


def _character_start(text: bytes, place: int) -> int:
    """The first place from here on that is not inside a character."""
    while place < len(text) and 0x80 <= text[place] < 0xC0:
        place += 1
    return place


def add_special_tokens(
    flat: Ids, lengths: Int64s, special: SpecialTokens, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[Any], Int64s]:
    """Put BOS and EOS around each document that is not empty, unless it has them already, and narrow the ids.

    >>> add_special_tokens(np.array([5, 6, 7, 0]), np.array([2, 2]), SpecialTokens(None, 0), np.dtype("uint16"))
    (array([5, 6, 0, 7, 0], dtype=uint16), array([3, 2]))
    """
    flat, ends, there = flat.astype(dtype), np.cumsum(lengths), np.flatnonzero(lengths)
    places, marks, added = [], [], np.zeros(len(lengths), np.int64)
    # Of what is put in one place, the end of a document comes before the beginning of the next.
    for mark, at, next_to in ((special.eos, ends, ends - 1), (special.bos, ends - lengths, ends - lengths)):
        if mark is not None:
            lacking = there[flat[next_to[there]] != mark]
            places.append(at[lacking])
            marks.append(np.full(len(lacking), mark, dtype))
            added[lacking] += 1
    if places:
        flat = np.insert(flat, np.concatenate(places), np.concatenate(marks))
    return flat, lengths + added
