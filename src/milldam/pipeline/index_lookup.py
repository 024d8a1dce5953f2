"""The index that documents are compared with in one pass (`dedup.method: index`).

What it holds counts as input: its state is part of a run's identity and of the keys of its units. It is settled when
the input is planned, and stays so until the input changes: whoever resumes the run, or asks whether its store is up to
date, goes by that, whatever the index gained or lost meanwhile. `run/index/` has links to its files until the store is
finished, and `pinned.json`, which says what they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from milldam.config.settings import Config
from milldam.dedup.index import DedupIndex
from milldam.dedup.seen import PinnedIndex, lookup_name
from milldam.files import has_size, read_sealed, remove_matching, write_sealed
from milldam.input_files import RUN_FOLDER
from milldam.rules import DedupRules
from milldam.run.folder import PLAN, RunFolder

INPUT = "index"
"""The key of an identity's input."""
_FOLDER, _PINNED = "index", "pinned.json"


class IndexLookup:
    """Of one job."""

    def __init__(self, config: Config, rules: DedupRules) -> None:
        assert rules.index is not None
        self._rules, self._overwrite, self._place = rules, config.overwrite, str(Path(rules.index).resolve())
        self._out = Path(config.out)
        self._index = DedupIndex.of(rules)

    def with_state(self, input: dict[str, Any]) -> dict[str, Any]:
        """The input, with the state of the index: as it was planned, where the rest is, else as it is now."""
        folder = self._out / RUN_FOLDER
        planned, told = read_sealed(folder / PLAN) or {}, read_sealed(folder / _FOLDER / _PINNED) or {}
        if not self._overwrite and told.get("folder") == self._place:
            settled = input | {INPUT: told["state"]}
            if planned.get("input") == settled:
                return settled
        return input | {INPUT: self._index.state(str(self._out.resolve()))}

    def pin(self, folder: RunFolder, state: str) -> PinnedIndex:
        """Let the files of the index be found in the run folder, as they were planned."""
        place = folder.folder / _FOLDER
        told = read_sealed(place / _PINNED) or {}
        if (told.get("folder"), told.get("state")) != (self._place, state) or not _is_whole(place, told):
            place.mkdir(exist_ok=True)
            runs = self._index.pin_lookups(place, out=str(self._out.resolve()), state=state)
            sizes = [(place / lookup_name(number)).stat().st_size for number in range(len(runs))]
            told = {"folder": self._place, "state": state, "runs": runs, "bytes": sizes}
            write_sealed(place / _PINNED, told)
        paths = (place / lookup_name(number) for number in range(len(told["runs"])))
        return PinnedIndex(tuple(told["runs"]), tuple(paths), self._rules.normalize)


def _is_whole(place: Path, told: dict[str, Any]) -> bool:
    return all(has_size(place / lookup_name(number), size) for number, size in enumerate(told["bytes"]))


def remove_lookups(folder: RunFolder) -> None:
    """Remove what a finished store does not need; what it was compared with stays told."""
    if (folder.folder / _FOLDER).exists():
        remove_matching(folder.folder / _FOLDER, "*.hashes")
