"""What a unit of rows is: the unit of work, of reuse and of output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowUnit:
    index: int
    key: str
    """The identity of what it reads: equal keys, equal rows. Made of content or versions, not of its place in the plan;
    where rows are numbered, also of `first_row`."""
    size: int
    """Bytes of input, for progress."""
    place: dict[str, Any]
    """What its reader has to read; plain JSON."""
    first_row: int | None = None
    """Number of its first row among all; None where rows are not numbered."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RowUnit:
        return cls(**value)
