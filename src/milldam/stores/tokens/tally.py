"""What became of the records of a data set: read = rejected + dropped + kept.

Counted once, from the records of a run, and kept in the manifest; summary, `milldam stats` and report take every such
figure from there. A document that a weight repeats counts each time. Size: a number a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

READ = "read"
STAGES = (READ, "clean", "dedup", "sample", "filter", "encode", "arrange")
"""Where a record can be lost, in order: rejected in the first, dropped in the others."""


@dataclass(frozen=True, slots=True)
class Tally:
    """The records of one data set, or of several together."""

    name: str = ""
    read: int = 0
    """Records, those that were rejected among them."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Records that could not be read, by reason."""
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    """Documents by stage and reason."""
    documents: int = 0
    """Documents that were kept."""
    tokens: int = 0

    @classmethod
    def of(cls, name: str, counts: Mapping[str, int], lost: Mapping[tuple[str, str], int]) -> Tally:
        """From documents (`read` without the rejected ones), and what was lost by stage and reason."""
        by_stage: dict[str, dict[str, int]] = {stage: {} for stage in STAGES}
        for (stage, reason), count in sorted(lost.items()):
            by_stage[stage][reason] = count
        rejected = by_stage.pop(READ)
        dropped = {stage: reasons for stage, reasons in by_stage.items() if reasons}
        read = counts[READ] + sum(rejected.values())
        return cls(name, read, rejected, dropped, counts["documents"], counts["tokens"])

    @property
    def reasons(self) -> dict[str, int]:
        """Documents that were dropped, by reason alone."""
        return dict(sorted(_summed(self.dropped.values()).items()))

    @property
    def rejected_count(self) -> int:
        return sum(self.rejected.values())

    @property
    def dropped_count(self) -> int:
        return sum(self.reasons.values())

    def flow(self) -> list[dict[str, Any]]:
        """Records into and out of each stage, with the reasons of what was lost there, the most frequent first."""
        documents, flow = self.read, []
        for stage in STAGES:
            lost = Counter(self.rejected if stage == READ else self.dropped.get(stage, {}))
            left = documents - lost.total()
            reasons = dict(lost.most_common())
            flow.append({"stage": stage, "documents_in": documents, "documents_out": left, "dropped": reasons})
            documents = left
        return flow


def total(tallies: Iterable[Tally]) -> Tally:
    """Those of several data sets together."""
    several = tuple(tallies)
    return Tally(
        read=sum(one.read for one in several),
        rejected=dict(_summed(one.rejected for one in several)),
        dropped={
            stage: reasons
            for stage in STAGES
            if (reasons := dict(_summed(one.dropped.get(stage, {}) for one in several)))
        },
        documents=sum(one.documents for one in several),
        tokens=sum(one.tokens for one in several),
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for one in counts:
        summed.update(one)
    return summed
