"""Decontamination in a job: matches of units in the first pass, one decision on all of them, removals for the second.

The index of the evaluation sets lies in the run folder, mapped by every worker; the matches of a unit beside its
fingerprints, kept by key, so that only those of units that changed, or all when an evaluation set did, are made again.
It is decided before near-duplicates are looked for: a document that is dropped here is none that others are like.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milldam.decontamination.deciding import decide
from milldam.decontamination.index import Index
from milldam.decontamination.matches import Matches
from milldam.dedup.drops import BLOOM, EVALUATION, EXACT, UNKNOWN, DropSet, DropWriter, drop_file_name, place_of
from milldam.files import is_whole, read_sealed, record_of, write_sealed
from milldam.pipeline.documents import found_place
from milldam.rules import EvaluationSet
from milldam.run.tasks import PART, Report

STAGE = "decontaminate"
FEW_BYTES = 64 << 20
"""Of index, which is mapped, and matches."""
FINDINGS, _DECIDED = "contamination.jsonl", "decided.json"


@dataclass(frozen=True, slots=True)
class DecideTask:
    """The matches of all units -> what is removed."""

    folder: Path
    """Of drop sets and matches, by the numbers of units."""
    index: Path
    sets: tuple[EvaluationSet, ...]

    def start(self) -> Any:
        return self._decide

    def _decide(self, step: int, report: Report) -> None:
        drops = self.folder / drop_file_name(EVALUATION, 0)
        with DropWriter(drops) as writer:
            figures = decide(
                Index(self.index),
                self.sets,
                self._units,
                lambda number, row: found_place(self.folder, number, row),
                lambda number, rows: writer.add(place_of(number, np.array(rows)), np.full(len(rows), UNKNOWN)),
                self.folder / FINDINGS,
            )
            writer.commit()
        files = {path.name: record_of(path) for path in (drops, self.folder / FINDINGS)}
        write_sealed(self.folder / _DECIDED, {"figures": figures, "files": files})
        report(PART, None)

    def _units(self) -> Iterator[tuple[int, Matches]]:
        """The matches of documents that exact dedup leaves, unit by unit. What near-dedup drops follows from them."""
        for path in sorted(self.folder.glob("matches-*.bin")):
            number = int(path.stem.rpartition("-")[2])
            matches = Matches.read(path)
            if len(matches.row):
                dropped = DropSet(self.folder, number, (EXACT, BLOOM))
                gone = [row for row in np.unique(matches.row).tolist() if dropped.of(row) is not None]
                matches = matches.only(~np.isin(matches.row, gone))
            yield number, matches

    @property
    def is_small(self) -> bool:
        """Whether it takes too little time and memory for a process of its own."""
        files = (self.index, *self.folder.glob("matches-*.bin"))
        return sum(path.stat().st_size for path in files) <= FEW_BYTES

    @property
    def findings(self) -> Path:
        return self.folder / FINDINGS

    def figures(self) -> dict[str, Any] | None:
        """What was found; None: it is not decided yet."""
        told = read_sealed(self.folder / _DECIDED)
        if told is None or not all(is_whole(self.folder / name, file) for name, file in told["files"].items()):
            return None
        return dict(told["figures"])
