"""What a unit of rows is: the unit of work, of reuse and of output."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RowUnit:
    index: int
    key: str
    """The identity of what it reads: equal keys, equal rows. Made of content or versions, not of its place in the plan
    (but for `first_row`, where rows are numbered)."""
    size: int
    """Bytes of input, for progress."""
    place: dict[str, Any]
    """What its reader has to read; plain JSON."""
    first_row: int | None = None
    """Number of its first row among all; None where rows are not numbered."""

    @property
    def numbered_key(self) -> str:
        """Where rows are numbered, their numbers are part of what the function is given."""
        return self.key if self.first_row is None else f"{self.key} {self.first_row}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RowUnit:
        return cls(**value)
