"""`OUT.bin` as nanoGPT reads it: token ids end to end without a header, for `np.memmap(path, dtype=np.uint16)`.

A store of several splits becomes a folder with a file each, as nanoGPT's `data/NAME/` is: train.bin, val.bin. Ids are
uint16; of a vocabulary beyond 65,536 they are uint32, as forks of nanoGPT for larger vocabularies have it: nanoGPT
itself must then be told so. Holds a block of tokens at a time. No meta.pkl is made: pickles are code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import ConfigError
from milldam.exporters.growing import write_tokens
from milldam.exporters.job import Export, Options
from milldam.exporters.reading import chosen_dtype
from milldam.loader.stores import Store

NAME = "nanogpt"
KIND = "file"
OPTIONS = ("dtype",)
ALL_SPLITS = True
DTYPES = ("uint16", "uint32", "int32", "int64")


def check(store: Store, out: Path, options: Options) -> None:
    if not _several(store) and out.suffix != ".bin":
        raise ConfigError(f"-o {out}: of one split, nanogpt is a file that ends in .bin, such as train.bin.")
    if _several(store) and out.suffix == ".bin":
        raise ConfigError(
            f"-o {out}: of several splits ({', '.join(store.splits)}), nanogpt is a folder with a file for each. "
            f"Name a folder, or choose a split with --split {store.splits[0]}."
        )
    _dtype(store, options)


def write(export: Export) -> dict[str, Any]:
    store = export.store
    dtype = _dtype(store, export.options)
    if not _several(store):
        write_tokens(export, store, export.out.name, dtype)
        return {"dtype": dtype.name}
    tokens = {}
    for split in store.splits:
        part = store.named_part(split)
        write_tokens(export, part, file_name(split, store.splits), dtype)
        tokens[split] = part.tokens
    return {"dtype": dtype.name, "tokens": tokens}


def file_name(split: str, splits: tuple[str, ...]) -> str:
    """nanoGPT's name for the file of a split: it knows train.bin and val.bin.

    >>> file_name("validation", ("train", "validation")), file_name("test", ("train", "test"))
    ('val.bin', 'test.bin')
    """
    return "val.bin" if split == "validation" and "val" not in splits else f"{split}.bin"


def _several(store: Store) -> bool:
    return store.split_name is None and len(store.splits) > 1


def _dtype(store: Store, options: Options) -> np.dtype[Any]:
    default = "uint16" if store.vocab_size <= 2**16 else "uint32"
    return chosen_dtype(store, options.dtype, default, DTYPES)
