"""Which evaluation sets are kept out of the data, and what counts as holding one of their items: the settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le

Action = Literal["drop", "cut", "report"]
DROP, CUT, REPORT = "drop", "cut", "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSet:
    """An evaluation set whose items must not be trained on."""

    path: str
    """File, folder, glob or address; a dataset saved by HF `save_to_disk`; or the name of one on the Hub."""
    columns: str | tuple[str, ...] = ()
    """Fields to look for; dots for nested fields, also through lists. Default: every field that holds text."""
    split: str | None = None
    """Split of an HF dataset, with an optional slice of its rows."""
    subset: str | None = None
    """Configuration of a dataset on the Hub."""
    input_format: Literal["txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"] | None = None
    """Format of the files, if their names do not say."""
    ngram: Annotated[int, Ge(3), Le(50)] = 13
    """Words in an n-gram; a passage of fewer words is one n-gram. In scripts without spaces a character is a word."""
    min_share: Annotated[float, Gt(0), Le(1)] = 0.5
    """A passage is found in a document that holds at least this share of its n-grams."""
    max_items: Annotated[int, Ge(1)] = 10
    """N-grams that occur in more passages than this, of all sets together, do not count."""
    common_share: Annotated[float, Gt(0), Le(1)] = 0.05
    """N-grams that occur in more than this share of the documents, and in more than 20, do not count."""
    action: Action = "drop"
    """Drop the document, cut the passage out of it, or only report it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,)

    @property
    def column_names(self) -> tuple[str, ...]:
        return (self.columns,) if isinstance(self.columns, str) else tuple(self.columns)
