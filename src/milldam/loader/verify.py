"""Check a file of another tool, as far as it says itself what must be in it; opening it has compared the sizes.

An .npy file that milldam made: its bytes, by the hashes beside it. A pair of Megatron-LM: every entry of the index.
Ids, where the vocabulary is known. Reads everything once, in blocks: constant memory. Yields a problem at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np

from milldam.files import hash_rest
from milldam.formats.foreign import ForeignFile
from milldam.formats.megatron import MegatronFile
from milldam.formats.npy import read_sidecar
from milldam.stores.tokens.verify import verify_arrays
from milldam.stores.verify import CHANGED

_BLOCK_BYTES = 1 << 20


def verify(file: ForeignFile) -> Iterator[str]:
    """Every problem found; none means that the file is what it says."""
    if isinstance(file, MegatronFile):
        yield from verify_arrays(str(file.path.with_suffix(".idx")), file.index, len(file), file.tokens)
    known = read_sidecar(file.path) if file.kind == "numpy" else None
    sizes = [file.tokens * file.dtype.itemsize] if known is None else [part["bin"]["bytes"] for part in known["shards"]]
    hashes = [] if known is None else [part["bin"]["xxh3"] for part in known["shards"]]
    if sum(sizes) != file.tokens * file.dtype.itemsize:
        yield f"{file.path}: {file.tokens:,} tokens, which is not the sum of the parts that {file.path.name}.json names"
        return
    with file.path.open("rb", buffering=0) as opened:
        opened.seek(os.fstat(opened.fileno()).st_size - sum(sizes))
        found = [hash_rest(opened, size).hexdigest() for size in sizes] if hashes else []
    if found != hashes:
        yield f"{file.path}: {CHANGED}"
        return
    yield from _verify_ids(file)


def _verify_ids(file: ForeignFile) -> Iterator[str]:
    tokens = np.memmap(file.path, file.dtype, "r", file.stream().files[0].first_byte, (file.tokens,))
    width = _BLOCK_BYTES // file.dtype.itemsize
    for first in range(0, file.tokens, width):
        block = tokens[first : first + width]
        smallest, largest = int(block.min()), int(block.max())
        if smallest < 0 or (file.vocab_size is not None and largest >= file.vocab_size):
            wrong = smallest if smallest < 0 else largest
            yield f"{file.path}: token id {wrong} outside the vocabulary" + (
                "" if file.vocab_size is None else f" of {file.vocab_size:,}"
            )
            return
