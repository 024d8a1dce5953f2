"""`OUT.bin` and `OUT.idx`: one pair for Megatron-LM's IndexedDataset, over all shards of a store.

The tokens grow over several runs; the index, 20 bytes a document, is made in one go when they are there. Holds a block
of tokens, or of documents, at a time; beside the pair, 8 bytes a document on disk while the index is made. A document
is one sequence, or several when it is longer than an int32 can say (docs/format.md).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import ConfigError
from milldam.exporters.growing import write_tokens
from milldam.exporters.job import Export, Options
from milldam.exporters.reading import chosen_dtype, document_lengths
from milldam.files import NewFile, explain_os_errors
from milldam.loader.stores import Store
from milldam.stores.tokens.format import DTYPE_CODES, IndexCounts, count_sequences, write_index

NAME = "megatron"
KIND = "pair"
OPTIONS = ("dtype",)
DTYPES = tuple(sorted(DTYPE_CODES, reverse=True))


def check(store: Store, out: Path, options: Options) -> None:
    if out.suffix in (".bin", ".idx"):
        raise ConfigError(f"-o {out}: a pair is named without its endings: -o {out.with_suffix('')}.")
    _dtype(store, options)


def write(export: Export) -> dict[str, Any]:
    dtype = _dtype(export.store, export.options)
    write_tokens(export, export.store, f"{export.out.name}.bin", dtype)
    path = export.folder / f"{export.out.name}.idx"
    with NewFile(path) as new:
        counts = _write_index(new, export.store, dtype)
        new.commit()
    return {"dtype": dtype.name, "sequences": counts.sequences}


def _write_index(new: NewFile, store: Store, dtype: np.dtype[Any]) -> IndexCounts:
    sequences = 0
    # The index has three arrays that each need all lengths: spooled once, so that no shard is opened three times.
    with explain_os_errors(new.path), tempfile.TemporaryFile(dir=new.path.parent) as lengths:
        for block in document_lengths(store):
            lengths.write(block.astype("<i8").data)
            sequences += count_sequences(block)
        lengths.flush()
        counts = IndexCounts(sequences, len(store))
        write_index(new, lengths, dtype.name, counts)
    return counts


def _dtype(store: Store, options: Options) -> np.dtype[Any]:
    return chosen_dtype(store, options.dtype, store.dtype.name, DTYPES)
