"""Batches of text -> batches of tokens: special tokens in place, ids narrowed, documents of any size.

Holds one batch and, for a document larger than the encoder takes at once, the part of it not yet cut. A document that
gives no token is left out and counted as `empty`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from milldam.native import kernel
from milldam.stores.tokens.format import Int64s
from milldam.stores.tokens.writer import Tokens
from milldam.text.arrays import byte_count, groups, text_offsets
from milldam.tokenizers.encoders import Encoder, Ids, Offsets, json_model_type
from milldam.tokenizers.loading import SpecialTokens

if TYPE_CHECKING:
    from milldam.tokenizers.cutting import Cutter
    from milldam.tokenizers.runs import Runs

EMPTY = "empty"
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class BareForm:
    """How pieces that continue a text are encoded."""

    make: Callable[[], Encoder] | None = None
    """The tokenizer without the mark at a word's start; None: it has no such mark."""
    spans_words: bool = False
    """The mark belongs to the whole text, not to each word: a bare piece may run on over spaces."""
    weighs_words: bool = False
    """Unigram: how a word is divided depends on all of it."""
    runs: Runs | None = None
    """Byte-level BPE: where pieces may overlap."""


class DocumentEncoder:
    """One per worker. `encode` takes batches in order; an open batch holds one text, a part of a document."""

    def __init__(
        self, encoder: Encoder, special: SpecialTokens, dtype: str, *, bare: Callable[[], BareForm] = BareForm
    ) -> None:
        self.encoder, self.special = encoder, special
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.dropped: Counter[str] = Counter()
        self.exact_documents = 0
        """Encoded by HF tokenizers, as a whole or in part, since the fast encoder differs on a character of theirs."""
        self._bare = bare
        self._cutter: Cutter | None = None
        """Made when a document comes that needs it: looking for its rules takes as long as encoding megabytes."""
        self._inside = self._differs = False
        self._last_token: int | None = None

    def take_inexact_cuts(self) -> int:
        """Cuts in giant documents that could not be proved, since the last call."""
        if self._cutter is None:
            return 0
        count, self._cutter.inexact_cuts = self._cutter.inexact_cuts, 0
        return count

    def encode(self, texts: pa.LargeStringArray, *, open: bool = False) -> Iterator[Tokens]:
        """Tokens of a batch. `open`: the batch is one text, whose document goes on in the next batch.

        A batch that ends an open document holds nothing else.
        """
        if open or self._inside:
            assert len(texts) == 1
            yield from self._encode_part(_bytes_of(texts), 0, final=not open)
            return
        first = 0
        for run in self._runs(texts):
            if byte_count(run) > self.encoder.document_bytes and len(run) == 1:
                yield from self._encode_giant(run[0].as_buffer(), first)
            elif len(run):
                yield self._encode_documents(run, first)
            first += len(run)

    def cancel(self) -> None:
        """Forget the document that is open."""
        if self._cutter is not None:
            self._cutter.forget()
        self._inside, self._differs, self._last_token = False, False, None

    def _runs(self, texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
        """Slices of the batch: giant documents alone, others in groups."""
        giants = np.flatnonzero(np.diff(text_offsets(texts)) > self.encoder.document_bytes)
        start = 0
        for giant in giants.tolist():
            yield from groups(texts[start:giant], self.encoder.batch_bytes)
            yield texts[giant : giant + 1]
            start = giant + 1
        yield from groups(texts[start:], self.encoder.batch_bytes)

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

    # ---- a document larger than the encoder takes at once ----

    def _make_cutter(self) -> Cutter:
        from milldam.tokenizers.cutting import Cutter

        form = self._bare()
        return Cutter(
            _Encoding(lambda: self.encoder),
            _Encoding(form.make) if form.make is not None else None,
            bare_spans_words=form.spans_words,
            weighs_words=form.weighs_words,
            runs=form.runs,
            piece_bytes=self.encoder.piece_bytes,
            buffer_bytes=2 * self.encoder.batch_bytes,
        )

    def _encode_giant(self, text: pa.Buffer, position: int) -> Iterator[Tokens]:
        """A whole document, fed in parts: it may lie in a mapped file and need not be copied whole."""
        from milldam.tokenizers.cutting import character_start

        start = 0
        while start < text.size:
            stop = start + self.encoder.batch_bytes
            part = text.slice(start, min(stop + _LONGEST_CHARACTER, text.size) - start).to_pybytes()
            size = len(part) if stop >= text.size else character_start(part, self.encoder.batch_bytes)
            start += size
            yield from self._encode_part(part[:size], position, final=start >= text.size)

    def _encode_part(self, text: bytes, position: int, *, final: bool) -> Iterator[Tokens]:
        if self._cutter is None:
            self._cutter = self._make_cutter()
        known = self.encoder.exact_texts
        pieces = [ids for ids in self._cutter.feed(text, final=final) if len(ids)]
        self._differs |= self.encoder.exact_texts > known
        if final:
            self.exact_documents, self._differs = self.exact_documents + self._differs, False
        flat = pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, np.uint32)])
        first = self._last_token is None
        if first and not len(flat):
            self._inside = not final
            if final:
                self.dropped[EMPTY] += 1
            return
        before = [self.special.bos] if first and self.special.bos not in (None, int(flat[0])) else []
        last = int(flat[-1]) if len(flat) else self._last_token
        after = [self.special.eos] if final and self.special.eos not in (None, last) else []
        tokens = flat.astype(self.dtype)
        if before or after:
            tokens = np.concatenate((before, tokens, after), dtype=self.dtype, casting="unsafe")
        self._last_token = None if final else last
        self._inside = not final
        yield Tokens(tokens, np.array([len(tokens)], np.int64), open=not final, positions=np.array([position]))


class _Encoding:
    """An encoder as the cutter uses it, made when it is first needed."""

    def __init__(self, make: Callable[[], Encoder]) -> None:
        self._make = make

    @cached_property
    def _encoder(self) -> Encoder:
        return self._make()

    def texts(self, texts: Sequence[bytes]) -> list[Ids]:
        return [self._encoder.encode_text(text) for text in texts]

    def pieces(self, text: bytes, offsets: Sequence[int]) -> tuple[Ids, Offsets]:
        starts, data = pa.py_buffer(np.array(offsets, dtype=np.int64)), pa.py_buffer(text)
        pieces = pa.LargeStringArray.from_buffers(len(offsets) - 1, starts, data)
        encoded = [self._encoder.encode(group) for group in groups(pieces, self._encoder.batch_bytes)]
        lengths = np.concatenate([np.diff(starts) for _, starts in encoded])
        return np.concatenate([flat for flat, _ in encoded]), np.concatenate(([0], np.cumsum(lengths)))


def _bytes_of(texts: pa.LargeStringArray) -> bytes:
    return bytes(texts[0].as_buffer())


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


def bare_form(tokenizer_json: str, make: Callable[[str], Encoder]) -> BareForm:
    """How to continue a text in pieces: without a mark, where the tokenizer marks the start of words or of the text."""
    marks_text, marks_words = '"Prepend"' in tokenizer_json, '"Metaspace"' in tokenizer_json
    if not marks_text and not marks_words:
        from milldam.tokenizers.runs import find_runs

        return BareForm(runs=find_runs(tokenizer_json))
    by_merges = json_model_type(tokenizer_json) == "BPE"
    return BareForm(lambda: make(bare_json(tokenizer_json)), spans_words=marks_text, weighs_words=not by_merges)


def bare_json(tokenizer_json: str) -> str:
    """The tokenizer without what marks the start of a word."""
    tokenizer = json.loads(tokenizer_json)
    if '"Metaspace"' in json.dumps(tokenizer["pre_tokenizer"]):
        tokenizer["pre_tokenizer"] = None
    normalizer = tokenizer["normalizer"]
    steps = normalizer.get("normalizers", [normalizer]) if normalizer else []
    kept = [step for step in steps if step["type"] != "Prepend"]
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": kept}
    return json.dumps(tokenizer, ensure_ascii=False)
