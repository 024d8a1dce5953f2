"""What counts as a duplicate: the settings of this room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt


@dataclass(frozen=True, slots=True, kw_only=True)
class NearRules:
    """MinHash-LSH over word n-grams."""

    ngram: Annotated[int, Ge(1), Le(100)] = 5
    """Words in an n-gram."""
    bands: Annotated[int, Ge(1), Le(1024)] = 32
    """Bands of the signature; two documents are compared if one of their bands is equal."""
    rows: Annotated[int, Ge(1), Le(1024)] = 8
    """Values in a band. The signature has bands x rows values, 1,024 at most."""
    threshold: Annotated[float, Gt(0), Le(1)] = 0.8
    """Jaccard similarity of the sets of n-grams from which two documents are near-duplicates."""
    prefer: Literal["first", "longest", "shortest"] = "first"
    """Which of several similar documents stays: the first in the order of the input, the longest or the shortest."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupRules:
    """Which duplicates to drop. The first one in the order of the input stays."""

    method: Literal["exact", "bloom", "index", "off"] = "exact"
    """exact: equal texts, by a 128-bit hash, on disk. bloom: the same in a fixed amount of memory, with a stated rate
    of false positives. index: only what the index holds, in one pass; documents are not compared with each other, and
    none enters. off: only near, if set."""
    normalize: bool = False
    """Ignore case, white space and punctuation."""
    index: str | None = None
    """Folder that keeps the hashes of finished runs: documents that one of them has seen are dropped too."""
    near: NearRules | None = None
    """Drop near-duplicates as well."""
    false_positive_rate: Annotated[float, Gt(0), Lt(0.5)] = 1e-6
    """For bloom: the share of new documents that are dropped by mistake."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    @property
    def is_off(self) -> bool:
        """Whether no duplicate is looked for: the first pass is for evaluation sets alone."""
        return self.method == "off" and self.near is None
