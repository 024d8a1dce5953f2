"""The input of a run, listed file by file on disk: what a plan is made from, and what changed since.

`inputs.jsonl` is the input of the plan, `inputs.new.jsonl` the input as it is now. Nothing of it is held in memory but,
for a message, the first files that differ.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from milldam.files import explain_os_errors, hash_file
from milldam.input_files import InputState

_FILES_COMPARED = 200_000


class InputList:
    """`folder`: of the run; `own`: where this process lists what is there now."""

    def __init__(self, folder: Path, own: Path) -> None:
        self._planned, self._now = folder / "inputs.jsonl", own / "inputs.new.jsonl"
        self._listed_at: dict[int, int] = {}
        """Where the files of each dataset begin in what was just listed."""

    def write(self, files: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        """List the input (number of the dataset, file) as it is now; its number, size and fingerprint.

        The files of a dataset come one after the other.
        """
        state, at = InputState(), 0
        self._listed_at.clear()
        with explain_os_errors(self._now), self._now.open("w", encoding="utf-8") as listing:
            names: tuple[str, ...] = ()
            for dataset, file in files:
                names = names or tuple(one.name for one in fields(file))
                # ASCII, with escapes: a file's name need not be UTF-8.
                # Not by asdict, which copies: it would take longer than all the rest.
                entry = {name: getattr(file, name) for name in names}
                line = json.dumps(entry | ({"dataset": dataset} if dataset else {})) + "\n"
                self._listed_at.setdefault(dataset, at)
                at += listing.write(line)
                state.add(file.path, file.size, file.version, dataset)
        return state.as_json()

    def planned(self) -> Iterator[dict[str, Any]]:
        """The files of the plan."""
        with self._planned.open("rb") as listing:
            for line in listing:
                yield json.loads(line)

    def listed(self, dataset: int = 0) -> Iterator[dict[str, Any]]:
        """The files of a dataset, as `write` has just listed them; those of others are not read."""
        if dataset not in self._listed_at:
            return
        with self._now.open("rb") as listing:
            listing.seek(self._listed_at[dataset])
            for line in listing:
                file = json.loads(line)
                if file.pop("dataset", 0) != dataset:
                    return
                yield file

    def differs(self) -> bool:
        """Whether the input as it is now is not that of the plan, in content or in place."""
        return not self._planned.exists() or hash_file(self._planned) != hash_file(self._now)

    def changes(self) -> list[str]:
        """The files that are new, gone or changed since the plan, in words; of very many files not all are compared."""
        if not self._planned.exists() or not self._now.exists():
            return []
        before, after = _by_name(self._planned), _by_name(self._now)
        found = []
        for name, now in after.items():
            was = before.get(name)
            if was is None:
                found.append(f"new: {name}")
            elif was != now:
                found.append(f"changed: {name}")
        return found + [f"gone: {name}" for name in before if name not in after]

    def take(self) -> None:
        """Make the input as it is now that of the plan."""
        self._now.replace(self._planned)

    def forget(self) -> None:
        """Remove what was listed and did not become a plan."""
        self._now.unlink(missing_ok=True)


def _by_name(listing: Path) -> dict[str, tuple[int, str]]:
    """For a message alone: what is damaged in it is left out. By name, since input may have moved as a whole."""
    found: dict[str, tuple[int, str]] = {}
    with listing.open("rb") as lines:
        for line in itertools.islice(lines, _FILES_COMPARED):
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                file = json.loads(line)
                name = os.path.basename(file["path"])  # noqa: PTH119
                found[name] = int(file["size"]), str(file["version"])
    return found
