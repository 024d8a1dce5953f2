"""The matches of all units -> which documents hold a passage, and which of them are dropped. One pass over small files.

A passage is found in a document that holds at least `min_share` of its n-grams, as far as they count: those of common
phrases do not. Common are n-grams in more than `max_items` passages (the index knows) and n-grams in more than
`common_share` of the documents, and more than `COMMON_DOCUMENTS` of them, that dedup leaves. So the verdict on a
document depends on the whole input, never on who read which part of it first.

Holds the matches of one unit, and 9 bytes an n-gram of the evaluation sets.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
    return filter(None, (warning_of(_name(one), index.searched(number)) for number, one in enumerate(sets)))


class Decision:
    """Decides unit after unit, in plan order."""

    def __init__(self, index: Index, sets: tuple[EvaluationSet, ...], counts: Int64s, documents: int) -> None:
        self._index = index
        shares = np.array([one.common_share for one in sets])
        most = np.maximum(shares * documents, COMMON_DOCUMENTS)
        owner = np.repeat(index.sets, np.diff(index.gram_bounds)) if index.passages else np.zeros(0, np.int64)
        self._counts = ~index.ignored & (counts <= most[owner]) if index.passages else np.zeros(0, np.bool_)
        self._below = np.concatenate((np.zeros(1, np.int64), np.cumsum(self._counts)))
        self._min_share = np.array([one.min_share for one in sets])

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
    drop: Callable[[int, list[int]], None],
    findings: Path,
) -> dict[str, Any]:
    """Tell which documents are dropped (`drop`: rows of a unit) and write what was found (`findings`); the figures.

    `units`: the matches of each unit, in plan order, of documents that dedup leaves; gone through twice. `place`: what
    to say of where a unit lies.
    """
    counts, documents = counted_grams(index, (matches for _, matches in units()))
    decision = Decision(index, sets, counts, documents)
    figures = [_new_figures(_name(one), one.action, index, number, decision) for number, one in enumerate(sets)]
    items: list[set[int]] = [set() for _ in sets]
    actions: Counter[str] = Counter()
    with NewFile(findings) as new:
        for unit, matches in units():
            dropped = []
            for row, several in itertools.groupby(decision.found(matches), key=lambda found: found.row):
                passages = list(several)
                holders = {int(index.sets[found.passage]) for found in passages}
                action = DROP if any(sets[holder].action == DROP for holder in holders) else REPORT
                actions[action] += 1
                if action == DROP:
                    dropped.append(row)
                for holder in holders:
                    figures[holder]["documents"] += 1
                for found in passages:
                    number = int(index.sets[found.passage])
                    line = _line(found, index, matches, action, sets[number]) | place(unit, row)
                    line |= {"unit": unit, "row": row}
                    new.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
                    items[number].add(int(index.items[found.passage]))
                    figures[number]["findings"] += 1
                    _keep_worst(figures[number]["worst"], line)
            if dropped:
                drop(unit, dropped)
        new.put_in_place()
    for one, found_items in zip(figures, items, strict=True):
        one["items_found"] = len(found_items)
        one["worst"] = _worst(one["worst"])
    return {"documents": documents, "actions": dict(actions), "sets": figures}


def _name(one: EvaluationSet) -> str:
    return ", ".join(filter(None, (one.path, one.subset, one.split)))


def _new_figures(name: str, action: str, index: Index, number: int, decision: Decision) -> dict[str, Any]:
    """What is told of one evaluation set.

    `searched`: items, passages, and those that are not looked for: too short, repeated, common. `common`: passages that
    are nothing but phrases that occur everywhere in the corpus. `worst`: the findings with the largest share.
    """
    searched, common = dict(index.searched(number)), decision.common(number)
    told = {"set": name, "action": action, "searched": searched, "items_found": 0, "documents": 0, "findings": 0}
    return told | {"common": common, "worst": []}


def _line(found: Found, index: Index, matches: Matches, action: str, one: EvaluationSet) -> dict[str, Any]:
    return {
        "set": _name(one),
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


def _keep_worst(lines: list[dict[str, Any]], line: dict[str, Any]) -> None:
    lines.append(line)
    if len(lines) > 4 * SHOWN:
        lines[:] = _worst(lines)


def _worst(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with the largest share, and of equal ones the longest; then as they came."""
    return sorted(lines, key=lambda line: (-line["share"], -line["ngrams"]))[:SHOWN]
