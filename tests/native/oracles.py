"""What the kernels compute, written plainly: the oracles of their tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.dedup.minhash import NO_WORDS, Int64s, mix

_EMPTY = np.uint64(2**64 - 1)
_ALL, _WORD_FACTOR, _ORDER_FACTOR = 2**64 - 1, 0x9FB21C651E98DF25, 0xD6E8FEB86659FD93


# ---- shingles, signatures and sketches ----


def fold(value: int) -> int:
    value = (value ^ value >> 32) * _WORD_FACTOR & _ALL
    return value ^ value >> 29


def words(lowered: str) -> list[bytes]:
    """The words of a text in lower case: at most 64 bytes each, in scripts without spaces a character each."""
    spaced = []
    for character in lowered:
        code = ord(character)
        is_word = character.isalnum() if code < 0x80 else code >= 0xC0 and not 0x2000 <= code < 0x2C00
        alone = 0x3000 <= code < 0xE000 or 0x0E00 <= code < 0x10C0 or 0x1780 <= code < 0x1800 or code >= 0x10000
        spaced.append(f" {character} " if alone else character if is_word else " ")
    whole = [word.encode() for word in "".join(spaced).split(" ") if word]
    return [word[at : at + 64] for word in whole for at in range(0, len(word), 64)]


def shingles(texts: pa.LargeStringArray, ngram: int) -> list[npt.NDArray[np.uint64]]:
    """The hashes of the n-grams of each text; one of all its words where there are fewer."""
    found = []
    for lowered in pc.utf8_lower(texts).to_pylist():
        hashes, chains = [], []
        for word in words(lowered):
            value = 0
            for at in range(0, len(word), 8):
                value = fold(value * _ORDER_FACTOR + int.from_bytes(word[at : at + 8], "little") & _ALL)
            hashes.append(value)
        for at in range(max(1, len(hashes) - ngram + 1) if hashes else 0):
            chain = 0
            for one in hashes[at : at + ngram]:
                chain = chain * _ORDER_FACTOR + one & _ALL
            chain = fold(chain) * _ORDER_FACTOR & _ALL
            chains.append(chain ^ chain >> 32)
        found.append(np.array(chains, np.uint64))
    return found


def signatures(texts: pa.LargeStringArray, ngram: int, size: int) -> npt.NDArray[np.uint8]:
    """The smallest hash in each bin of each document; an empty bin asks one bin after the other."""
    minima = np.full((len(texts), size), _EMPTY)
    for document, hashes in enumerate(shingles(texts, ngram)):
        bins = ((hashes >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
        np.minimum.at(minima[document], bins, hashes)
    scores = mix(np.arange(size * size, dtype=np.uint64).reshape(size, size) + np.uint64(1))
    np.fill_diagonal(scores, 0)
    order, filled = np.argsort(scores, axis=1), minima != _EMPTY
    for document, borrower in zip(*np.nonzero(~filled & filled.any(axis=1, keepdims=True)), strict=True):
        lender = next(one for one in order[borrower] if filled[document, one])
        minima[document, borrower] = minima[document, lender]
    factors = mix(~np.arange(size, dtype=np.uint64)) | np.uint64(1)
    found = np.minimum((minima * factors >> np.uint64(56)).astype(np.uint8), NO_WORDS - 1)
    found[~filled.any(axis=1)] = NO_WORDS
    return found


def sketches(texts: pa.LargeStringArray, ngram: int, most: int) -> list[list[int]]:
    """Of each document the smallest halves of its hashes, each once."""
    return [np.unique((one >> np.uint64(32)).astype(np.uint32))[:most].tolist() for one in shingles(texts, ngram)]


# ---- rows ----


def fill_rows(tokens: npt.NDArray[Any], table: Int64s, form: int, batch: dict[str, Any]) -> int:
    """As the kernel in rows.c. table: (pieces, 4): place, length, document, goes_on."""
    names = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")
    ids, labels, positions, documents, mask = (batch[name].reshape(-1) for name in names)
    ends = table[:, 1].cumsum()
    begins = ends - table[:, 1]
    batch["cu_seqlens"][:] = np.concatenate(([0], ends))
    place = table[:, 0].repeat(table[:, 1])
    documents[:] = table[:, 2].repeat(table[:, 1])
    positions[:] = np.arange(len(ids)) - begins.repeat(table[:, 1])
    padding = place < 0
    ids[:] = np.where(padding, -1 - place, tokens[np.where(padding, 0, place + positions)])
    mask[:] = True
    if form == 0:
        goes_on = table[:, 3] > 0
        labels[:-1] = ids[1:]
        labels[ends[goes_on] - 1] = tokens[(table[:, 0] + table[:, 1])[goes_on]]
        mask[ends - 1] = goes_on
    else:
        labels[:] = ids
        mask[begins] = form == 2
    mask[padding] = False
    labels[~mask] = -100
    return int(table[:, 1].max())
