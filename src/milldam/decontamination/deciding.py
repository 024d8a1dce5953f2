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
Line = dict[str, Any]
"""A finding: a passage in a document, as it is written."""


def left_out(searched: Mapping[str, int]) -> str:
    """Why passages of a set are not looked for, with their numbers; empty: all are."""
    names = ("too_short", "repeated", "common", "everywhere")
    return ", ".join(f"{searched[name]:,} {name.replace('_', ' ')}" for name in names if searched.get(name))


def warning_of(name: str, searched: Mapping[str, int]) -> str | None:
    """A warning about a set of which nothing is looked for: it would pass for one that is not in the corpus."""
    if searched["too_short"] + searched["common"] < max(1, searched["passages"]):
        return None
    return f"{name}: nothing of this evaluation set is looked for (passages: {left_out(searched)})."


def warnings_of(index: Index, sets: tuple[EvaluationSet, ...]) -> Iterator[str]:
    return filter(None, (warning_of(_name(one), index.searched(number)) for number, one in enumerate(sets)))


class _Decision:
    """Decides unit after unit, in plan order."""

    def __init__(self, index: Index, sets: tuple[EvaluationSet, ...], counts: Int64s, documents: int) -> None:
        self._index, self._sets = index, sets
        most = np.maximum(np.array([one.common_share for one in sets]) * documents, COMMON_DOCUMENTS)
        counted = ~index.ignored & (counts <= most[np.repeat(index.sets, np.diff(index.gram_bounds))])
        self._below = np.concatenate((np.zeros(1, np.int64), np.cumsum(counted)))
        self._min_share = np.array([one.min_share for one in sets])

    def common(self, number: int) -> int:
        """Passages of a set of which no n-gram counts, since all occur everywhere in the corpus."""
        index = self._index
        first, stop = index.gram_bounds[:-1], index.gram_bounds[1:]
        known = np.concatenate((np.zeros(1, np.int64), np.cumsum(~index.ignored)))
        gone = (self._below[stop] == self._below[first]) & (known[stop] != known[first])
        return int(np.count_nonzero(gone & (index.sets == number)))

    def found(self, unit: Matches) -> Iterator[tuple[int, int, Line]]:
        """The passages that documents of a unit hold, in order: row, passage, and what is told of it."""
        owner, first, stop = joined(unit)
        if not len(owner):
            return
        each, index = self._below[stop] - self._below[first], self._index
        begins = np.flatnonzero(np.concatenate(([True], owner[1:] != owner[:-1])))
        ngrams, match = np.add.reduceat(each, begins), owner[begins]
        passages = unit.passage[match]
        of = self._below[index.gram_bounds[passages + 1]] - self._below[index.gram_bounds[passages]]
        enough = (ngrams > 0) & (ngrams >= self._min_share[index.sets[passages]] * of - 1e-9)
        for k in np.flatnonzero(enough).tolist():
            passage, last = int(passages[k]), int(match[k + 1]) if k + 1 < len(match) else len(unit.row)
            mine = slice(int(match[k]), last)
            line = {
                "set": _name(self._sets[int(index.sets[passage])]),
                "item": int(index.items[passage]),
                "column": index.column(passage),
                "action": "",
                "share": round(int(ngrams[k]) / int(of[k]), 4),
                "ngrams": int(ngrams[k]),
                "of": int(of[k]),
                "start": int(unit.start[mine].min()),
                "end": int(unit.end[mine].max()),
                "passage": index.text(passage)[:TEXT_SHOWN],
                "document": unit.text(mine.start),
            }
            yield int(unit.row[match[k]]), passage, line


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
    decision, actions, items = _Decision(index, sets, counts, documents), Counter[str](), [set[int]() for _ in sets]
    # `common`: passages that are nothing but phrases that occur everywhere in the corpus.
    figures: list[dict[str, Any]] = [
        {"set": _name(one), "action": one.action, "searched": dict(index.searched(number)), "items_found": 0}
        | {"documents": 0, "findings": 0, "common": decision.common(number), "worst": []}
        for number, one in enumerate(sets)
    ]
    with NewFile(findings) as new:
        for unit, matches in units():
            dropped = []
            for row, several in itertools.groupby(decision.found(matches), key=lambda found: found[0]):
                passages = [(int(index.sets[passage]), passage, line) for _, passage, line in several]
                holders = {number for number, _, _ in passages}
                action = DROP if any(sets[number].action == DROP for number in holders) else REPORT
                actions[action] += 1
                if action == DROP:
                    dropped.append(row)
                for number in holders:
                    figures[number]["documents"] += 1
                for number, passage, line in passages:
                    line |= {"action": action} | place(unit, row) | {"unit": unit, "row": row}
                    new.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
                    items[number].add(int(index.items[passage]))
                    figures[number]["findings"] += 1
                    figures[number]["worst"].append(line)
                    if len(figures[number]["worst"]) > 4 * SHOWN:
                        figures[number]["worst"] = _worst(figures[number]["worst"])
            if dropped:
                drop(unit, dropped)
        new.put_in_place()
    for one, found_items in zip(figures, items, strict=True):
        one |= {"items_found": len(found_items), "worst": _worst(one["worst"])}
    return {"documents": documents, "actions": dict(actions), "sets": figures}


def _name(one: EvaluationSet) -> str:
    return ", ".join(filter(None, (one.path, one.subset, one.split)))


def _worst(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with the largest share, and of equal ones the longest; then as they came."""
    return sorted(lines, key=lambda line: (-line["share"], -line["ngrams"]))[:SHOWN]
