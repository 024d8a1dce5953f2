"""Batches of text -> batches of tokens: special tokens in place, ids narrowed, documents of any size.

Holds one batch, and the ids of a document that is longer than the encoder takes at once. A document that gives no
token is left out and counted as `empty`; one that would have to be cut and has no white space, as `no_white_space`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.native import kernel
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import byte_count, groups
from milldam.tokenizers.encoders import Encoder, Ids
from milldam.tokenizers.loading import SpecialTokens
from milldam.tokenizers.long_texts import LongTexts, NoWhiteSpaceError, character_start

EMPTY, NO_WHITE_SPACE = "empty", "no_white_space"


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
        self._long = LongTexts(encoder)
        self.cancel()

    def cancel(self) -> None:
        """Forget the document that is open."""
        self._long.forget()
        self._inside = self._differs = False
        self._last_token: int | None = None

    def encode(self, texts: pa.LargeStringArray, *, open: bool = False) -> Iterator[Tokens]:
        """Tokens of a batch. `open`: the batch is one text, whose document goes on in the next batch.

        A batch that ends an open document holds nothing else. Raises NoWhiteSpaceError where an open document can't
        be cut; `cancel` forgets it.
        """
        self.uncut = []
        if open or self._inside:
            assert len(texts) == 1
            self._inside = True
            yield from self._tokens(self._encode_long(texts, final=not open), 0, final=not open)
            return
        first = 0
        for group in groups(texts, self.encoder.batch_bytes):
            if byte_count(group) <= self.encoder.batch_bytes:
                yield self._encode_documents(group, first)
            else:
                try:
                    yield from self._tokens(self._encode_long(group, final=True), first, final=True)
                except NoWhiteSpaceError:
                    self.cancel()
                    self.dropped[NO_WHITE_SPACE] += 1
                    self.uncut.append(first)
            first += len(group)

    def _encode_documents(self, texts: pa.LargeStringArray, first: int) -> Tokens:
        before = self.encoder.exact_texts
        flat, offsets = self.encoder.encode(texts)
        self.exact_documents += self.encoder.exact_texts - before
        lengths = np.diff(offsets)
        positions = np.arange(first, first + len(texts))
        empty = int(np.count_nonzero(lengths == 0))
        if empty:
            self.dropped[EMPTY] += empty
            positions, lengths = positions[lengths > 0], lengths[lengths > 0]
        flat, lengths = add_special_tokens(flat, lengths, self.special, self.dtype)
        return Tokens(flat, lengths, positions=positions)

    def _encode_long(self, texts: pa.LargeStringArray, *, final: bool) -> list[npt.NDArray[Any]]:
        """The ids of one text, or of those parts of it that can be told by now. It need not be copied whole."""
        text, start, pieces = texts[0].as_buffer(), 0, []
        known = self.encoder.exact_texts
        while True:
            part = text.slice(start, min(self.encoder.batch_bytes + 3, text.size - start)).to_pybytes()
            part = part[: character_start(part, self.encoder.batch_bytes)]
            start += len(part)
            ended = start == text.size
            pieces += [ids.astype(self.dtype) for ids in self._long.feed(part, final=final and ended)]
            if ended:
                self._differs |= self.encoder.exact_texts > known
                return pieces

    def _tokens(self, pieces: list[npt.NDArray[Any]], position: int, *, final: bool) -> Iterator[Tokens]:
        """The next ids of a document, with the special tokens at its begin and end; none where it has none so far."""
        pieces = [ids for ids in pieces if len(ids)]
        first, last = self._last_token is None, int(pieces[-1][-1]) if pieces else self._last_token
        if final:
            self.exact_documents += self._differs
            self.cancel()
        else:
            self._last_token = last
        if last is not None:
            before = [self.special.bos] if first and self.special.bos not in (None, int(pieces[0][0])) else []
            after = [self.special.eos] if final and self.special.eos not in (None, last) else []
            flat = np.concatenate((before, *pieces, after), dtype=self.dtype, casting="unsafe")
            yield Tokens(flat, np.array([len(flat)], np.int64), open=not final, positions=np.array([position]))
        elif final:
            self.dropped[EMPTY] += 1


def add_special_tokens(
    flat: Ids, lengths: Int64s, special: SpecialTokens, dtype: np.dtype[Any]
) -> tuple[np.ndarray[Any, Any], Int64s]:
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
