"""Stretches of bytes of texts -> stretches of their tokens.

For byte-level BPE a token is as many bytes of the text as its letters: the tokens of a stretch are looked up in the
running sum of a table by id, a whole batch at once. That holds for a text only if it is proven: its tokens have as many
bytes as it has, and it is in the Unicode form of the tokenizer's normalizer. Other texts, and those of other tokenizers
(Unigram, WordPiece), are encoded again by HF tokenizers, which says where each token lies.

Borders within a token follow transformers' rule: a stretch reaches from the token that holds its first character to the
first token that holds its last one. Where no token holds it (WordPiece drops white space), the tokens within count;
transformers would go on to the end of the text, or leave the stretch out. A derived stretch may end in white space that
the tokenizer joins to what the next turn begins with: a token that has nothing else of the stretch is not trained on.
"""

from __future__ import annotations

import json
import unicodedata
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.errors import InputError
from milldam.text.arrays import text_offsets

if TYPE_CHECKING:
    import tokenizers

Ids = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]

_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers that leave ASCII as it is."""
_CONTINUES, _CONTINUATION = 0xC0, 0x80
"""Of a byte that goes on with a character, the first two bits are 10."""


class TokenSpans:
    """Finds the tokens of stretches of bytes, for one tokenizer."""

    def __init__(self, tokenizer_json: str) -> None:
        self._json, content = tokenizer_json, json.loads(tokenizer_json)
        normalizer = content.get("normalizer") or {}
        self._form = normalizer.get("type")
        is_plain = self._form is None or self._form in _UNICODE_FORMS
        self._bytes_of_id = _bytes_of_ids(content) if is_plain else None
        if self._bytes_of_id is None:
            _ = self._huggingface  # is asked for every text: workers that are forked later share it

    @cached_property
    def _huggingface(self) -> tokenizers.Tokenizer:
        """Loaded when it is first needed: that it is is rare, and it takes memory."""
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._json)

    def find(
        self,
        ids: Ids,
        id_offsets: Int64s,
        texts: pa.LargeStringArray,
        stretches: Int64s,
        counts: Int64s,
        derived: npt.NDArray[np.bool_],
    ) -> tuple[Int64s, Int64s]:
        """Stretches of bytes of each text, in order -> stretches of its tokens, those that touch as one.

        ids: flat, those of text i from id_offsets[i] to id_offsets[i + 1]; stretches: (n, 2); counts: (texts,), how
        many each text has; derived: (texts,), whether those of a text are.
        -> The same for tokens: (m, 2), and counts.
        """
        places = text_offsets(texts)
        owner = np.repeat(np.arange(len(texts)), counts)
        spans = np.zeros_like(stretches)
        proven = np.zeros(len(texts), bool)
        if self._bytes_of_id is not None and len(texts):
            # ends: (ids + 1,): how many bytes lie before each token.
            ends = np.zeros(len(ids) + 1, np.int64)
            np.cumsum(self._bytes_of_id.take(ids), out=ends[1:])
            proven = self._proven(ends[id_offsets], texts, places)
            data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)
            here = proven[owner]
            spans[here] = _by_bytes(ends, id_offsets, data, places, stretches[here], owner[here], derived)
        for number in np.flatnonzero(~proven).tolist():
            mine, count = owner == number, int(id_offsets[number + 1] - id_offsets[number])
            spans[mine] = self._by_offsets(texts[number].as_py(), count, stretches[mine], derived=derived[number])
        return _joined(spans, owner, len(texts))

    def _proven(self, begins: Int64s, texts: pa.LargeStringArray, places: Int64s) -> npt.NDArray[np.bool_]:
        """Whose tokens are their bytes, one after the other."""
        proven: npt.NDArray[np.bool_] = np.diff(begins) == np.diff(places)
        if self._form is not None:
            unclear = proven & ~pc.string_is_ascii(texts).to_numpy(zero_copy_only=False)
            for number in np.flatnonzero(unclear).tolist():
                proven[number] = unicodedata.is_normalized(self._form, texts[number].as_py())
        return proven

    def _by_offsets(self, text: str, count: int, stretches: Int64s, *, derived: bool) -> Int64s:
        """Where HF's encoder says that they are. (n, 2)"""
        encoded = self._huggingface.encode(text, add_special_tokens=False)
        if len(encoded.ids) != count:
            raise InputError(
                f"The tokenizer gives {len(encoded.ids)} tokens where {count} were written: what is trained on can't "
                f"be told for {text[:60]!r}."
            )
        places = np.array(encoded.offsets, np.int64).reshape(-1, 2)
        starts = (np.frombuffer(text.encode(), np.uint8) & _CONTINUES) != _CONTINUATION
        found = []
        # Stretches of bytes as stretches of characters.
        for begin, end in np.concatenate(([0], np.cumsum(starts)))[stretches].tolist():
            first, stop = _tokens_within(places, begin, end)
            reaches_beyond = stop > first and places[stop - 1, 1] > end
            if derived and reaches_beyond and text[max(begin, int(places[stop - 1, 0])) : end].isspace():
                stop -= 1
            found.append((first, stop))
        return np.array(found, np.int64).reshape(-1, 2)


def _by_bytes(
    ends: Int64s,
    id_offsets: Int64s,
    data: npt.NDArray[np.uint8],
    places: Int64s,
    stretches: Int64s,
    owner: Int64s,
    derived: npt.NDArray[np.bool_],
) -> Int64s:
    """Tokens within their text. ends: (ids + 1,); stretches, owner: (n, 2), (n,)"""
    last = places[owner] + stretches[:, 1] - 1
    for _ in range(3):
        # To the first byte of the last character.
        last -= (data[last] & _CONTINUES) == _CONTINUATION
    base = ends[id_offsets[owner]]
    first_byte = base + stretches[:, 0]
    last_byte = base + last - places[owner]
    tokens = np.searchsorted(ends, np.stack([first_byte, last_byte], 1), side="right") - 1
    spans: Int64s = tokens - id_offsets[owner][:, None]
    spans[:, 1] += 1
    for at in np.flatnonzero(derived[owner] & (ends[tokens[:, 1] + 1] > base + stretches[:, 1])).tolist():
        begin, end = stretches[at].tolist()
        begin, text = max(begin, int(ends[tokens[at, 1]] - base[at])), int(places[owner[at]])
        spans[at, 1] -= data[text + begin : text + end].tobytes().isspace()
    return spans


def _bytes_of_ids(content: dict[str, Any]) -> npt.NDArray[np.int32] | None:
    """How many bytes of text each id is; None for what is no byte-level BPE."""
    from tokenizers import pre_tokenizers

    model = content.get("model") or {}
    vocab = model.get("vocab") or {}
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    if model.get("type") != "BPE" or not letters <= vocab.keys():
        return None
    added = {token["id"]: token["content"] for token in content.get("added_tokens") or ()}
    # As narrow as may be: the table is looked into at random.
    table = np.zeros(1 + max([*vocab.values(), *added], default=0), np.int32)
    for token, number in vocab.items():
        if number not in added:
            if not letters.issuperset(token):
                return None
            table[number] = len(token)
    for number, token in added.items():
        table[number] = len(token.encode())
    return table


def _tokens_within(places: Int64s, begin: int, end: int) -> tuple[int, int]:
    """From the token that holds character `begin` to the one that holds `end - 1`; else those within. (0, 0): none."""
    begins, ends = places[:, 0], places[:, 1]
    within = np.flatnonzero((begins < end) & (ends > begin) & (ends > begins))
    if not within.size:
        return 0, 0
    holds_last = np.flatnonzero((begins <= end - 1) & (ends > end - 1))
    last = holds_last[0] if holds_last.size else within[-1]
    return int(within[0]), int(last) + 1


def _joined(spans: Int64s, owner: Int64s, texts: int) -> tuple[Int64s, Int64s]:
    """Those that touch as one, empty ones left out. -> (m, 2), counts: (texts,)"""
    there = spans[:, 1] > spans[:, 0]
    spans, owner = spans[there], owner[there]
    if not len(spans):
        return spans, np.zeros(texts, np.int64)
    begins_anew = np.ones(len(spans), bool)
    begins_anew[1:] = (owner[1:] != owner[:-1]) | (spans[1:, 0] > spans[:-1, 1])
    first = np.flatnonzero(begins_anew)
    last = np.append(first[1:], len(spans)) - 1
    return np.stack([spans[first, 0], spans[last, 1]], 1), np.bincount(owner[first], minlength=texts).astype(np.int64)
