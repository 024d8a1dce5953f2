"""milldam: any amount of text into training-ready tokens in a fixed amount of memory.

>>> import milldam
>>> milldam.tokenize("corpus.jsonl", "corpus.milldam", tokenizer="tokenizer/")
Store('corpus.milldam': 91 documents, 23,862 tokens, uint16)
>>> x, y = next(milldam.open("corpus.milldam").windows(128).batches(16, seed=0))
>>> x.shape
(16, 128)

Names are loaded when they are first used: `import milldam` and `milldam --help` stay quick, and training needs numpy
alone. `milldam.torch` has to be imported by its name.
"""

from __future__ import annotations

import sys as _sys
from importlib import import_module as _import
from typing import TYPE_CHECKING

if _sys.platform == "win32":
    raise ImportError("milldam runs on Linux and macOS. On Windows, install it in WSL: `wsl --install`.")

if TYPE_CHECKING:
    from milldam import qa
    from milldam.api import contamination, open, preprocess, tokenize
    from milldam.errors import (
        ConfigError,
        InputError,
        MilldamError,
        MismatchError,
        NotReadyError,
        ResourceError,
        RunHeldError,
        StoreError,
        TaskHeldError,
        WorkerError,
    )
    from milldam.formats import export, import_tokens
    from milldam.formats.foreign import ForeignFile
    from milldam.hub import pull, push
    from milldam.loader.batches import Batches
    from milldam.loader.feeds import Feed
    from milldam.loader.mixing import MixedSamples, Mixture, mix
    from milldam.loader.samples import Samples
    from milldam.loader.stores import Store
    from milldam.loader.types import Labelled, PackedBatch, PackedRow, TokenPair
    from milldam.loader.views import Part
    from milldam.loader.windows import Streams
    from milldam.mapping import map
    from milldam.mapping.text_encoder import TextEncoder
    from milldam.memory import Budget
    from milldam.stores.table.reader import Table

__all__ = [
    "Batches", "Budget", "ConfigError", "Feed", "ForeignFile", "InputError", "Labelled", "MilldamError",
    "MismatchError", "MixedSamples", "Mixture", "NotReadyError", "PackedBatch", "PackedRow", "Part",
    "ResourceError", "RunHeldError", "Samples", "Store", "StoreError", "Streams", "Table", "TaskHeldError",
    "TextEncoder", "TokenPair", "WorkerError", "__version__", "contamination", "export", "import_tokens", "map",
    "mix", "open", "preprocess", "pull", "push", "qa", "tokenize",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES = {
    "api": "contamination open preprocess tokenize",
    "errors": "ConfigError InputError MilldamError MismatchError NotReadyError ResourceError RunHeldError "
    "StoreError TaskHeldError WorkerError",
    "formats": "export import_tokens",
    "hub": "pull push",
    "loader.batches": "Batches",
    "formats.foreign": "ForeignFile",
    "loader.feeds": "Feed",
    "loader.mixing": "MixedSamples Mixture mix",
    "loader.samples": "Samples",
    "loader.stores": "Store",
    "loader.types": "Labelled PackedBatch PackedRow TokenPair",
    "loader.views": "Part",
    "loader.windows": "Streams",
    "mapping": "map",
    "mapping.text_encoder": "TextEncoder",
    "memory": "Budget",
    "stores.table.reader": "Table",
}
"""Modules, and the names that are loaded from them."""

if not TYPE_CHECKING:  # With it, any name at all would pass for ours.

    def __getattr__(name: str) -> object:
        if name in ("qa", "torch"):
            return _import(f"milldam.{name}")
        for module, names in _HOMES.items():
            if name in names.split():
                return getattr(_import(f"milldam.{module}"), name)
        raise AttributeError(f"module 'milldam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
