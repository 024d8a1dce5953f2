"""What a run of `milldam.map` tells when it is done: what was made, what was reused, what made the rest stale."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milldam.memory import format_size


@dataclass(frozen=True, slots=True)
class MapSummary:
    """What a finished run tells."""

    out: Path
    up_to_date: bool
    rows: int
    read: int
    """Rows that the function was given."""
    units: int
    cached: int
    """Units that were not made again."""
    changed: list[str]
    """What made others stale."""
    rejected: dict[str, int]
    """Reason -> records that were set aside."""
    columns: dict[str, str]
    bytes: int
    seconds: float = 0.0
    wall: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""
    stages: dict[str, float] = field(default_factory=dict)
    """Work by kind, summed over workers."""
    memory: dict[str, Any] = field(default_factory=dict)
    workers: int = 0

    @property
    def reuse(self) -> str:
        """
        >>> MapSummary(Path("t"), False, 1, 1, 16, 4, [], {}, {}, 1).reuse
        'cached: 4 of 16 units'
        """
        return f"cached: {self.cached} of {self.units} units"

    @property
    def over_budget(self) -> str:
        """A sentence when more memory was taken than the budget has; else empty."""
        peak, budget = self.memory.get("peak", 0), self.memory.get("budget", 0)
        if peak <= budget:
            return ""
        return f"memory: the peak of {format_size(peak)} was over the budget of {format_size(budget)}"

    @property
    def set_aside(self) -> str:
        """How many records were rejected, by reason, and where they are; else empty."""
        if not self.rejected:
            return ""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.rejected.items())
        return f"{sum(self.rejected.values()):,} ({reasons}), in {self.out / 'rejects.jsonl'}"

    def __str__(self) -> str:
        """
        >>> print(MapSummary(Path("t"), False, 8, 8, 16, 4, ["function f: code"], {}, {}, 1))
        t: 8 rows; cached: 4 of 16 units; changed: function f: code
        >>> print(MapSummary(Path("t"), False, 300, 3000, 1, 0, [], {}, {}, 1))
        t: 3,000 rows in, 300 out; cached: 0 of 1 units
        """
        counts = f"{self.read:,} rows in, {self.rows:,} out" if self.read != self.rows else f"{self.rows:,} rows"
        changed = f"; changed: {'; '.join(self.changed)}" if self.changed else ""
        rejected = f"; rejected: {sum(self.rejected.values()):,}" if self.rejected else ""
        warning = f"; {self.over_budget}" if self.over_budget else ""
        return f"{self.out}: {counts}; {self.reuse}{changed}{rejected}{warning}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}
