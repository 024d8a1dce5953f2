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
from milldam.dedup.index import PINNED, DedupIndex
from milldam.files import read_sealed
from milldam.input_files import RUN_FOLDER
from milldam.rules import DedupRules
from milldam.run.folder import PLAN, RunFolder

INPUT = "index"
"""The key of an identity's input, and the name of the folder."""


def with_index_state(input: dict[str, Any], config: Config, rules: DedupRules) -> dict[str, Any]:
    """The input, with the state of the index: as it was planned, where the rest is, else as it is now."""
    out, index = Path(config.out), DedupIndex.of(rules)
    planned, pinned = (read_sealed(out / RUN_FOLDER / name) or {} for name in (PLAN, f"{INPUT}/{PINNED}"))
    if not config.overwrite and pinned.get("index") == index.place:
        settled = input | {INPUT: pinned["state"]}
        if planned.get("input") == settled:
            return settled
    return input | {INPUT: index.state(str(out.resolve()))}


def pin_index(folder: RunFolder, rules: DedupRules, state: str) -> dict[str, Path]:
    """Link the files of the index into the run folder, as they were planned: ids of runs, with their hash files."""
    place = folder.folder / INPUT
    place.mkdir(exist_ok=True)
    return dict(DedupIndex.of(rules).pin(place, str(folder.out.resolve()), state=state))
