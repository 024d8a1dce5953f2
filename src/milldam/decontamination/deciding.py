"""The matches of all units -> which documents hold a passage, and which of them are dropped. One pass over small files.

A passage is found in a document that holds at least `min_share` of its n-grams, as far as they count: those of common
phrases do not. Common are n-grams in more than `max_items` passages (the index knows) and n-grams in more than
`common_share` of the documents, and more than `COMMON_DOCUMENTS` of them, that dedup leaves. So the verdict on a
document depends on the whole input, never on who read which part of it first.

Holds the matches of one unit, and 9 bytes an n-gram of the evaluation sets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milldam.decontamination.array_file import write_arrays
from milldam.decontamination.index import Index
from milldam.decontamination.letters import Int64s
from milldam.decontamination.matches import Matches, counted_grams, joined
from milldam.files import NewFile
from milldam.rules import DROP, REPORT, EvaluationSet

COMMON_DOCUMENTS = 20
TEXT_SHOWN = 600
SHOWN = 20
"""Findings of each set that a summary has."""


@dataclass(frozen=True, slots=True)
class Found:
    """A passage in a document."""

    row: int
    passage: int
    ngrams: int
    of: int
    start: int
    end: int
    match: int
    """The first of its matches."""


@dataclass(slots=True)
class SetFigures:
    """What was found of one evaluation set."""

    name: str
    action: str
    searched: dict[str, int]
    """Items, passages, and those that are not looked for: too short, repeated, common."""
    items: set[int] = field(default_factory=set)
    documents: int = 0
    findings: int = 0
    common: int = 0
    """Passages that are nothing but phrases that occur everywhere in the corpus."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The findings with the largest share, longest first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "set": self.name,
            "action": self.action,
            "searched": self.searched,
            "items_found": len(self.items),
            "documents": self.documents,
            "findings": self.findings,
            "common": self.common,
            "worst": self.worst,
        }


def left_out(searched: Mapping[str, int]) -> str:
    """Why passages of a set are not looked for, with their numbers; empty: all are."""
    names = ("too_short", "repeated", "common", "everywhere")
    return ", ".join(f"{searched[name]:,} {name.replace('_', ' ')}" for name in names if searched.get(name))


def warning_of(name: str, searched: Mapping[str, int]) -> str | None:
    """What to say of a set of which nothing is looked for: it would pass for one that is not in the corpus."""
    if searched["too_short"] + searched["common"] < max(1, searched["passages"]):
        return None
    return f"{name}: nothing of this evaluation set is looked for (passages: {left_out(searched)})."


def warnings_of(index: Index, sets: tuple[EvaluationSet, ...]) -> Iterator[str]:
    told = (warning_of(_name(one), index.searched(number)) for number, one in enumerate(sets))
    return filter(None, told)


class Decision:
    """Decides unit after unit, in plan order."""

    def __init__(self, index: Index, sets: tuple[EvaluationSet, ...], counts: Int64s, documents: int) -> None:
        self._index, self._sets = index, sets
        shares = np.array([one.common_share for one in sets])
        most = np.maximum(shares * documents, COMMON_DOCUMENTS)
        owner = np.repeat(index.sets, np.diff(index.gram_bounds)) if index.passages else np.zeros(0, np.int64)
        self._counts = ~index.ignored & (counts <= most[owner]) if index.passages else np.zeros(0, np.bool_)
        self._below = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._counts)))
        self._min_share = np.array([one.min_share for one in sets])
        self.documents = documents

    def common(self, number: int) -> int:
        """Passages of a set of which no n-gram counts, since all occur everywhere in the corpus."""
        index = self._index
        if not index.passages:
            return 0
        first, stop = index.gram_bounds[:-1], index.gram_bounds[1:]
        known = np.concatenate((np.zeros(1, np.int64), np.cumsum(~index.ignored)))
        gone = (self._below[stop] == self._below[first]) & (known[stop] != known[first])
        return int(np.count_nonzero(gone & (index.sets == number)))

    def found(self, unit: Matches) -> Iterator[Found]:
        """The passages that documents of a unit hold, in order."""
        owner, first, stop = joined(unit)
        if not len(owner):
            return
        each = self._below[stop] - self._below[first]
        begins = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
        ngrams = np.add.reduceat(each, begins)
        match = owner[begins]
        passage = unit.passage[match]
        bounds = self._index.gram_bounds
        of = self._below[bounds[passage + 1]] - self._below[bounds[passage]]
        enough = (ngrams > 0) & (ngrams >= self._min_share[self._index.sets[passage]] * of - 1e-9)
        for k in np.flatnonzero(enough).tolist():
            last = int(match[k + 1]) if k + 1 < len(match) else len(unit.row)
            mine = slice(int(match[k]), last)
            yield Found(
                int(unit.row[match[k]]),
                int(passage[k]),
                int(ngrams[k]),
                int(of[k]),
                int(unit.start[mine].min()),
                int(unit.end[mine].max()),
                int(match[k]),
            )


def decide(
    index: Index,
    sets: tuple[EvaluationSet, ...],
    units: Callable[[], Iterator[tuple[int, Matches]]],
    place: Callable[[int, int], dict[str, Any]],
    removals: Path,
    findings: Path,
) -> dict[str, Any]:
    """Write which documents are dropped (`removals`) and what was found (`findings`); the figures.

    `units`: the matches of each unit, in plan order, of documents that dedup leaves; gone through twice. `place`: what
    to say of where a unit lies.
    """
    counts, documents = counted_grams(index, (matches for _, matches in units()))
    decision = Decision(index, sets, counts, documents)
    figures = [
        SetFigures(_name(one), one.action, dict(index.searched(number)), common=decision.common(number))
        for number, one in enumerate(sets)
    ]
    writing = _Writing(decision, index, sets, figures)
    with NewFile(findings) as new:
        for number, matches in units():
            for line in writing.unit(number, matches, place):
                new.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        new.commit()
    writing.finish()
    write_arrays(removals, {name: np.array(values, np.int64) for name, values in writing.dropped.items()})
    actions = dict(writing.actions)
    return {"documents": documents, "actions": actions, "sets": [one.as_json() for one in figures]}


def _name(one: EvaluationSet) -> str:
    return ", ".join(filter(None, (one.path, one.subset, one.split)))


class _Writing:
    def __init__(
        self, decision: Decision, index: Index, sets: tuple[EvaluationSet, ...], figures: list[SetFigures]
    ) -> None:
        self._decision, self._index, self._sets, self._figures = decision, index, sets, figures
        self.dropped: dict[str, list[int]] = {"unit": [], "row": []}
        """Documents in plan order."""
        self.actions: Counter[str] = Counter()
        """Documents by what becomes of them."""

    def unit(
        self, number: int, matches: Matches, place: Callable[[int, int], dict[str, Any]]
    ) -> Iterator[dict[str, Any]]:
        by_row: dict[int, list[Found]] = {}
        for found in self._decision.found(matches):
            by_row.setdefault(found.row, []).append(found)
        for row, several in by_row.items():
            holders = {int(self._index.sets[one.passage]) for one in several}
            action = DROP if any(self._sets[holder].action == DROP for holder in holders) else REPORT
            if action == DROP:
                self.dropped["unit"].append(number)
                self.dropped["row"].append(row)
            self.actions[action] += 1
            for holder in holders:
                self._figures[holder].documents += 1
            for one in several:
                line = self._describe(one, matches, action) | place(number, row) | {"unit": number, "row": row}
                self._book(one, line)
                yield line

    def _describe(self, found: Found, matches: Matches, action: str) -> dict[str, Any]:
        index = self._index
        number = int(index.sets[found.passage])
        return {
            "set": self._figures[number].name,
            "item": int(index.items[found.passage]),
            "column": index.column(found.passage),
            "action": action,
            "share": round(found.ngrams / found.of, 4),
            "ngrams": found.ngrams,
            "of": found.of,
            "start": found.start,
            "end": found.end,
            "passage": index.text(found.passage)[:TEXT_SHOWN],
            "document": matches.text(found.match),
        }

    def _book(self, found: Found, line: dict[str, Any]) -> None:
        figures = self._figures[int(self._index.sets[found.passage])]
        figures.items.add(int(self._index.items[found.passage]))
        figures.findings += 1
        figures.worst.append(line)
        if len(figures.worst) > 4 * SHOWN:
            _keep_worst(figures.worst)

    def finish(self) -> None:
        for one in self._figures:
            _keep_worst(one.worst)


def _keep_worst(lines: list[dict[str, Any]]) -> None:
    """Those with the largest share, and of equal ones the longest; then as they came."""
    lines.sort(key=lambda line: (-line["share"], -line["ngrams"]))
    del lines[SHOWN:]
