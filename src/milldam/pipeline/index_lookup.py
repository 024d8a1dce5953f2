"""The index that documents are compared with in one pass (`dedup.method: index`).

What it holds counts as input: its state is part of a run's identity and of the keys of its units. It is settled when
the input is planned, and stays so until the input changes: whoever resumes the run, or asks whether its store is up to
date, goes by that, whatever the index gained or lost meanwhile. `run/index/` has links to its files until the store is
finished, and `index-runs.json`, which says what they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milldam.config.settings import Config
from milldam.dedup.index import PINNED, DedupIndex, PinnedIndex
from milldam.files import read_sealed, remove_matching
from milldam.input_files import RUN_FOLDER
from milldam.rules import DedupRules
from milldam.run.folder import PLAN, RunFolder

INPUT = "index"
"""The key of an identity's input, and the name of the folder."""


class IndexLookup:
    """Of one job."""

    def __init__(self, config: Config, rules: DedupRules) -> None:
        self._rules, self._overwrite, self._out = rules, config.overwrite, Path(config.out)
        self._index = DedupIndex.of(rules)

    def with_state(self, input: dict[str, Any]) -> dict[str, Any]:
        """The input, with the state of the index: as it was planned, where the rest is, else as it is now."""
        folder = self._out / RUN_FOLDER
        planned, pinned = read_sealed(folder / PLAN) or {}, read_sealed(folder / INPUT / PINNED) or {}
        if not self._overwrite and pinned.get("index") == self._index.place:
            settled = input | {INPUT: pinned["state"]}
            if planned.get("input") == settled:
                return settled
        return input | {INPUT: self._index.state(str(self._out.resolve()))}

    def pin(self, folder: RunFolder, state: str) -> PinnedIndex:
        """Let the files of the index be found in the run folder, as they were planned."""
        place = folder.folder / INPUT
        place.mkdir(exist_ok=True)
        runs = self._index.pin(place, str(self._out.resolve()), state=state)
        ids, paths = zip(*runs, strict=True)
        return PinnedIndex(ids, paths, self._rules.normalize)


def remove_lookups(folder: RunFolder) -> None:
    """Remove what a finished store does not need; what it was compared with stays told."""
    remove_matching(folder.folder / INPUT, "*.hashes")
