"""The tokens of a store in one large file: npy, nanoGPT, Megatron-LM.

npy         all tokens as one 1-D array of integers, for `np.load(mmap_mode="r")`
nanogpt     token ids end to end without a header, for `np.memmap(path, dtype=np.uint16)`. A store of several splits
            becomes a folder with a file each, as nanoGPT's `data/NAME/` is: train.bin, val.bin. Ids are uint16; of a
            vocabulary beyond 65,536 uint32, as forks for larger vocabularies have it: nanoGPT itself must be told so
megatron    X.bin and X.idx, as IndexedDataset reads them: one pair over all shards; the index has 20 bytes a document.
            A document is one sequence, or several when it is longer than an int32 can say (docs/format.md)

Files are read, not mapped, so nothing stays resident: a block holds at most a million tokens, or documents. Beside the
pair, 8 bytes a document on disk while the index is made.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from milldam.errors import StoreError
from milldam.files import NewFile, explain_os_errors
from milldam.loader.reading import Reader, TokenArray, open_reader
from milldam.loader.stream import TokenStream
from milldam.stores.tokens.format import Int64s, write_index

if TYPE_CHECKING:
    from milldam.formats.exporting import Export, OutputFile
    from milldam.run.engine import Progress

BLOCK_TOKENS = 1 << 20
_WRITE_BYTES = 1 << 16
"""At a time: for aligned writes of 2 MB the kernel (6.18, ext4) looks for pages as large, which takes it twice to four
times the CPU time of small writes."""


def flat_files(export: Export) -> Iterator[tuple[str, str, int]]:
    """(name, split, bytes of input) of the files to make; nanoGPT knows train.bin and val.bin."""
    for split, store in export.parts.items():
        size, name = store.tokens * store.dtype.itemsize, export.out.name
        if export.to == "megatron":
            yield f"{name}.idx", split, 20 * len(store)
            name += ".bin"
        elif export.has_splits:
            is_val = split == "validation" and "val" not in export.parts
            name = f"{'val' if is_val else split}.bin"
        yield name, split, size


def write_flat(new: NewFile, export: Export, file: OutputFile, progress: Progress) -> None:
    """Write all tokens of a split; of a pair's index, where its documents lie."""
    store, dtype = export.parts[file.split], export.dtype
    if file.name.endswith(".idx"):
        # The index has three arrays that each need all lengths: spooled once, so that no shard is opened three times.
        with explain_os_errors(new.path), tempfile.TemporaryFile(dir=new.path.parent) as lengths:
            for some in store.document_lengths():
                lengths.write(some.astype("<i8").data)
            lengths.flush()
            write_index(new, np.memmap(lengths, "<i8", "r"), dtype.name)
        return
    if export.to == "npy":
        new.write(npy_header(dtype, store.tokens))
    for block in token_blocks(store.stream()):
        data = block_as(block, dtype).data.cast("B")
        for at in range(0, len(data), _WRITE_BYTES):
            new.write(data[at : at + _WRITE_BYTES])
        progress.add(tokens=len(block), input_bytes=block.nbytes)


def npy_header(dtype: np.dtype[Any], count: int) -> bytes:
    """The first bytes of an .npy file that holds one array of so many numbers."""
    header = io.BytesIO()
    shape = {"descr": npy_format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    npy_format.write_array_header_1_0(header, shape)
    return header.getvalue()


def token_blocks(stream: TokenStream) -> Iterator[TokenArray]:
    """All tokens of a stream. A block is valid until the next is asked for."""
    return read_blocks(open_reader(stream, "pread"), 0, stream.tokens)


def read_blocks(reader: Reader, begin: int, tokens: int) -> Iterator[TokenArray]:
    """So many tokens from a position on."""
    for at in range(begin, begin + tokens, BLOCK_TOKENS):
        left = begin + tokens - at
        if reader.announces and left > BLOCK_TOKENS:
            # The disk reads the next block while this one is written.
            reader.announce(np.array([at + BLOCK_TOKENS]), np.array([min(BLOCK_TOKENS, left - BLOCK_TOKENS)]))
        yield reader.runs(np.array([at]), np.array([min(BLOCK_TOKENS, left)]))


def cut_blocks(lengths: Int64s) -> Iterator[tuple[int, int, int]]:
    """(first, stop, tokens) of rows of about a block's tokens, or one row that has more."""
    ends, first, before = lengths.cumsum(), 0, 0
    while first < len(lengths):
        stop = max(first + 1, int(ends.searchsorted(before + BLOCK_TOKENS, side="right")))
        yield first, stop, int(ends[stop - 1]) - before
        first, before = stop, int(ends[stop - 1])


def block_as(block: TokenArray, dtype: np.dtype[Any]) -> TokenArray:
    """The same tokens in another dtype. An id that it can't hold is an error, never another id."""
    limits = np.iinfo(dtype)
    if block.dtype != dtype and not limits.min <= block.min(initial=0) <= block.max(initial=0) <= limits.max:
        ids = f"Token ids from {block.min():,} to {block.max():,}"
        raise StoreError(f"{ids} do not fit {dtype.name}: the store is damaged. `milldam verify` says where.")
    return block.astype(dtype, copy=False)
