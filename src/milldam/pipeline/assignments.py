"""What a worker is given: a unit, and what both passes need to know of its data set."""

from __future__ import annotations

from dataclasses import dataclass

from milldam.sources.batch import TextRules
from milldam.sources.units import Unit

REPORT_SECONDS = 0.25
"""How often a worker tells how it gets on."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A unit, and how much of it is done already."""

    unit: Unit
    key: str
    """Names what is made of it."""
    parts: int = 0
    batches: int = 0
    documents: int | None = None
    """Take at most so many documents; None: all."""
    rows: tuple[int, int] | None = None
    """Only the documents from, up to; None: all."""
    prints: str | None = None
    """Names what the first pass left of it; None: there was none."""


@dataclass(frozen=True, slots=True)
class SetRules:
    """What the passes need to know of one data set."""

    text: TextRules
    weight: float = 1.0
    split: str | None = None
    """The split that all its documents make up, whatever they are; None: splits and filters as for any other."""

    def share(self, copy: int) -> float:
        """The share of the documents that is in a repetition."""
        return min(1.0, self.weight - copy)
