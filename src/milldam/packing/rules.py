"""How rows are filled: the settings of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRules:
    """Rows of seq_len tokens."""

    strategy: Literal["wrapped", "best_fit"] = "wrapped"
    """wrapped: documents end to end, cut wherever a row is full.
    best_fit: a document is cut only if it is longer than a row; free space is padded."""
    write: bool = False
    """Write the rows out, to packed/ in the store, for trainers that want fixed rows.
    Otherwise they are made when the store is read."""
    pad_last: bool = False
    """wrapped: pad the last row instead of leaving its tokens out."""
    buffer: int = 10_000
    """best_fit: number of documents to choose from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
