"""The tokens and documents of a store in order, in blocks of bounded size: what exports of one file read from.

Files are read, not mapped, so nothing stays resident. A block holds at most a million tokens, or the lengths of 65,536
documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from milldam.errors import ConfigError, StoreError
from milldam.loader.reading import TokenArray, open_reader
from milldam.loader.stores import Store
from milldam.stores.tokens.blocks import in_blocks
from milldam.stores.tokens.format import Int64s


def token_blocks(store: Store, first: int = 0) -> Iterator[TokenArray]:
    """The tokens from `first` on. A block is valid until the next is asked for."""
    reader = open_reader(store.stream(), "pread")
    blocks, ahead = itertools.tee(in_blocks(first, store.tokens - first))
    next(ahead, None)
    for block, following in itertools.zip_longest(blocks, ahead):
        if reader.announces and following is not None:
            # The disk reads the next block while this one is written.
            reader.announce(*_stretch(*following))
        yield reader.runs(*_stretch(*block))


def _stretch(start: int, end: int) -> tuple[Int64s, Int64s]:
    return np.array([start]), np.array([end - start])


def document_lengths(store: Store) -> Iterator[Int64s]:
    """Tokens of the documents in order; one shard's index is mapped at a time."""
    for shard in store.shards:
        yield from store.open_index(shard).length_blocks()


def as_dtype(blocks: Iterator[TokenArray], dtype: np.dtype[Any]) -> Iterator[TokenArray]:
    """The same tokens in another dtype, as `block_as` has them."""
    for block in blocks:
        yield block_as(block, dtype)


def block_as(block: TokenArray, dtype: np.dtype[Any]) -> TokenArray:
    """The same tokens in another dtype. An id that it can't hold is an error, never another id."""
    if block.dtype == dtype:
        return block
    limits = np.iinfo(dtype)
    smallest, largest = int(block.min(initial=0)), int(block.max(initial=0))
    if smallest < limits.min or largest > limits.max:
        wrong = largest if largest > limits.max else smallest
        raise StoreError(
            f"Token id {wrong:,} does not fit {dtype.name}, though the vocabulary says that all do: the store is "
            "damaged. `milldam verify` says where."
        )
    return block.astype(dtype)


def chosen_dtype(store: Store, asked: str | None, default: str, known: tuple[str, ...]) -> np.dtype[Any]:
    """The dtype to write: asked for or the default, one that the format knows and that holds the vocabulary."""
    name = default if asked is None else asked
    if name not in known:
        raise ConfigError(f"--dtype {name}: this format has {', '.join(known)}.")
    dtype = np.dtype(name).newbyteorder("<")
    if store.vocab_size - 1 > np.iinfo(dtype).max:
        wider = [other for other in known if np.iinfo(other).max >= store.vocab_size - 1]
        raise ConfigError(
            f"--dtype {name}: holds ids up to {np.iinfo(dtype).max:,}, and the vocabulary of {store.name} has "
            f"{store.vocab_size:,}. Take {' or '.join(wider)}."
        )
    return dtype
