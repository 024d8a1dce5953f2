"""What the kernels compute, written in numpy: the oracles of their tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from milldam.dedup.minhash import NO_WORDS, Bytes, Hashes, Int64s, _fold, mix, raw

_LONGEST_WORD = 64
_BLOCK = 8
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_BLOCK + 1)], dtype=np.uint64)
_ORDER_FACTOR = np.uint64(0xD6E8FEB86659FD93)
_EMPTY = np.uint64(2**64 - 1)


# ---- shingles ----


class Shingles(NamedTuple):
    """The n-gram hashes of some documents, end to end, and where each document begins in them."""

    flat: Hashes
    offsets: Int64s


def shingle(texts: pa.LargeStringArray, ngram: int) -> Shingles:
    return ngrams(*word_hashes(*lowered(texts)), ngram)


def lowered(texts: pa.LargeStringArray) -> tuple[Bytes, Int64s]:
    """The same in lower case. Goes character by character, so cuts do no harm."""
    data, offsets = raw(texts)
    if not len(data):
        return data, offsets
    # Unicode's table gives what ASCII's gives where there is nothing else, at a sixth of its speed.
    return raw(pc.utf8_lower(texts) if data.max() >= 0x80 else pc.ascii_lower(texts))


def word_hashes(data: Bytes, offsets: Int64s) -> tuple[Hashes, Int64s]:
    """A hash for each word of lower-cased texts that lie end to end, and where each text's words begin."""
    starts, lengths = word_bounds(data, offsets)
    return hash_words(data, starts, lengths), np.searchsorted(starts, offsets).astype(np.int64)


def word_bounds(data: Bytes, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """Where each word begins, and how many bytes it has."""
    if not len(data):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    inside, borders = _word_bytes(data)
    borders = np.concatenate((borders, offsets))
    borders = borders[(borders > 0) & (borders < len(data))]
    first, last = inside.copy(), inside.copy()
    first[1:] = inside[1:] > inside[:-1]
    last[:-1] = inside[:-1] > inside[1:]
    first[borders] = inside[borders]
    last[borders - 1] = inside[borders - 1]
    starts = np.flatnonzero(first)
    return _cut_long(starts, np.flatnonzero(last) + 1 - starts)


def _word_bytes(data: Bytes) -> tuple[npt.NDArray[np.bool_], Int64s]:
    """Which bytes belong to words, and where words end although the next byte belongs to one as well."""
    # Below the first letter the difference wraps round to large numbers.
    inside = (data - np.uint8(ord("a")) < 26) | (data - np.uint8(ord("0")) < 10)
    if data.max() < 0x80:
        return inside, np.empty(0, np.int64)
    inside |= data >= 0x80
    at = np.flatnonzero(data >= 0xC2)  # where a character of more than one byte begins
    lead, second = data[at], data[np.minimum(at + 1, len(data) - 1)]
    size = 2 + (lead >= 0xE0).astype(np.int64) + (lead >= 0xF0)
    mark = (lead == 0xC2) | ((lead == 0xE2) & (second < 0xB0))
    for k in range(3):
        inside[(at + k)[mark & (size > k)]] = False
    alone = _stands_alone(lead, second)
    return inside, np.concatenate((at[alone], (at + size)[alone]))


def _stands_alone(lead: Bytes, second: Bytes) -> npt.NDArray[np.bool_]:
    """Characters of scripts without spaces, by the first two bytes of their UTF-8."""
    east_asian = (lead >= 0xE3) & (lead <= 0xED)
    thai_lao_tibetan = (lead == 0xE0) & (second >= 0xB8)
    burmese_khmer = (lead == 0xE1) & ((second <= 0x82) | (second == 0x9E) | (second == 0x9F))
    alone: npt.NDArray[np.bool_] = east_asian | thai_lao_tibetan | burmese_khmer | (lead >= 0xF0)
    return alone


def _cut_long(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Cut words that are too long (of a binary file, say), so that the end of a giant text is never far behind."""
    if not len(lengths) or lengths.max() <= _LONGEST_WORD:
        return starts, lengths
    pieces = -(-lengths // _LONGEST_WORD)
    before = np.cumsum(pieces) - pieces
    moved = (np.arange(int(pieces.sum())) - np.repeat(before, pieces)) * _LONGEST_WORD
    return np.repeat(starts, pieces) + moved, np.minimum(np.repeat(lengths, pieces) - moved, _LONGEST_WORD)


def hash_words(data: Bytes, starts: Int64s, lengths: Int64s) -> Hashes:
    """Eight bytes of each word at a time; longer words take more rounds, at most eight."""
    padded = np.zeros(len(data) + _BLOCK, dtype=np.uint8)
    padded[: len(data)] = data
    # The eight bytes from every position on, as one number each; a view, no copy.
    blocks: Hashes = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
    hashes = _fold(blocks[starts] & _MASKS[np.minimum(lengths, _BLOCK)])
    longer = np.flatnonzero(lengths > _BLOCK)
    for done in range(_BLOCK, _LONGEST_WORD, _BLOCK):
        longer = longer[lengths[longer] > done]
        if not len(longer):
            break
        block = blocks[starts[longer] + done] & _MASKS[np.minimum(lengths[longer] - done, _BLOCK)]
        hashes[longer] = _fold(hashes[longer] * _ORDER_FACTOR + block)
    return hashes


def ngrams(words: Hashes, offsets: Int64s, ngram: int) -> Shingles:
    """The hashes of neighbouring words put together, within each document. offsets: (documents + 1,)."""
    counts = np.diff(offsets)
    if not len(words):
        return Shingles(words, np.zeros(len(counts) + 1, np.int64))
    chained, ends = _chain(words, ngram), offsets[1:]
    keep = np.ones(len(words), dtype=bool)
    for back in range(1, ngram):
        keep[(ends - back)[counts >= back]] = False  # here an n-gram would run over the document's end
        short = offsets[:-1][counts == back]
        chained[short] = _chain_few(words, short, back)
    keep[offsets[:-1][counts > 0]] = True
    sizes = np.where(counts > 0, np.maximum(counts - (ngram - 1), 1), 0)
    return Shingles(mix(chained[keep]), np.concatenate(([0], np.cumsum(sizes))))


def _chain(words: Hashes, ngram: int) -> Hashes:
    """For each word, itself and the next ones; the last few of all have no meaning."""
    chained = words.copy()
    for k in range(1, min(ngram, len(words))):
        chained *= _ORDER_FACTOR
        chained[: len(words) - k] += words[k:]
    return chained


def _chain_few(words: Hashes, starts: Int64s, count: int) -> Hashes:
    chained = words[starts]
    for k in range(1, count):
        chained = chained * _ORDER_FACTOR + words[starts + k]
    return chained


# ---- signatures and sketches ----


def signatures(texts: pa.LargeStringArray, ngram: int, size: int) -> npt.NDArray[np.uint8]:
    """The smallest hash in each bin of each document; an empty bin asks one bin after the other."""
    shingles = shingle(texts, ngram)
    counts = np.diff(shingles.offsets)
    minima = np.full((len(counts), size), _EMPTY)
    bins = ((shingles.flat >> np.uint64(32)) * np.uint64(size) >> np.uint64(32)).astype(np.int64)
    bins += np.repeat(np.arange(len(counts)) * size, counts)
    np.minimum.at(minima.reshape(-1), bins, shingles.flat)
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
    found = shingle(texts, ngram)
    parts = np.split((found.flat >> np.uint64(32)).astype(np.uint32), found.offsets[1:-1])
    return [np.unique(part)[:most].tolist() for part in parts[: len(texts)]]


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
