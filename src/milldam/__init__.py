"""milldam: any amount of text into training-ready tokens in a fixed amount of memory.

>>> import milldam
>>> store = milldam.tokenize("corpus.jsonl", "corpus.milldam", tokenizer="gpt2/")   # doctest: +SKIP
>>> store = milldam.open("corpus.milldam")                                          # doctest: +SKIP
>>> store[0]                                                                        # doctest: +SKIP
array([1212,  318, ...], dtype=uint16)
"""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milldam import qa
    from milldam.api import open, preprocess, tokenize
    from milldam.errors import MilldamError
    from milldam.formats import export, import_tokens
    from milldam.hub import pull, push
    from milldam.loader.mixing import mix
    from milldam.loader.stores import Store
    from milldam.mapping import map
    from milldam.mapping.text_encoder import TextEncoder
    from milldam.memory import Budget
    from milldam.stores.table import Table

__all__ = [
    "Budget",
    "MilldamError",
    "Store",
    "Table",
    "TextEncoder",
    "__version__",
    "export",
    "import_tokens",
    "map",
    "mix",
    "open",
    "preprocess",
    "pull",
    "push",
    "qa",
    "tokenize",
]

__version__ = _version("milldam")

# Loaded when first used: `import milldam` and `milldam --help` stay quick, and training needs numpy alone.
_HOMES = {
    "Budget": "milldam.memory",
    "MilldamError": "milldam.errors",
    "Store": "milldam.loader.stores",
    "Table": "milldam.stores.table",
    "TextEncoder": "milldam.mapping.text_encoder",
    "export": "milldam.formats",
    "import_tokens": "milldam.formats",
    "map": "milldam.mapping",
    "mix": "milldam.loader.mixing",
    "open": "milldam.api",
    "preprocess": "milldam.api",
    "pull": "milldam.hub",
    "push": "milldam.hub",
    "tokenize": "milldam.api",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("qa", "torch"):
        return import_module(f"milldam.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'milldam' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
