"""The splits of a data set, by the conventions of HF `datasets`: how they are asked for, and which files belong to one.

`train[10%:20%]` -> the split's name and the slice of its documents; files and folders -> splits by the words in their
names. Nothing is read here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from milldam.errors import ConfigError

TRAIN, ALL = "train", "all"
_KEYWORDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_CANONICAL = {word: split for split, words in _KEYWORDS.items() for word in words}
# A word ends where HF has it end: at punctuation, a digit or the name's own end.
_WORD = re.compile(rf"(?<![^-._ 0-9])(?:{'|'.join(_CANONICAL)})(?![^-._ 0-9])")
_NUMBERED = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}.*")
_NO_SPLITS = ("chunk", "data", "file", "part", "shard")

_ASKED = re.compile(r"(?P<name>\w+(?:[.-]\w+)*)\s*(?:\[(?P<rows>.*)\])?")
_ROWS = re.compile(r"\s*(-?\d+(?:_\d+)*%?)?\s*:\s*(-?\d+(?:_\d+)*%?)?\s*")
_EXAMPLES = "Examples: train, train[:100_000], train[10%:20%], train[-5%:], train+test."


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A slice of a data set's documents, as Python slices a list; None: from its begin, to its end.

    >>> RowSlice(10, 20, percent=True).bounds(1000)
    (100, 200)
    """

    start: int | None = None
    stop: int | None = None
    percent: bool = False

    @property
    def needs_total(self) -> bool:
        """Whether the documents must be counted before it is known which ones are meant."""
        return self.percent or (self.start or 0) < 0 or (self.stop or 0) < 0

    def bounds(self, total: int) -> tuple[int, int]:
        """(first, behind the last) of `total` documents. Percents are rounded to the closest document, as in HF."""
        first = 0 if self.start is None else self._place(self.start, total)
        last = total if self.stop is None else self._place(self.stop, total)
        return first, max(first, last)

    def _place(self, edge: int, total: int) -> int:
        """Counted from the end when below zero, even where the percents of a few documents round to none."""
        count = round(edge * total / 100.0) if self.percent else edge
        return min(max(total + count if edge < 0 else count, 0), total)


@dataclass(frozen=True, slots=True)
class Split:
    """What was asked for: splits one after the other, or a slice of one."""

    names: tuple[str, ...]
    rows: RowSlice | None = None


def parse_split(text: str) -> Split:
    """
    >>> parse_split("train[:100_000]")
    Split(names=('train',), rows=RowSlice(start=None, stop=100000, percent=False))
    """
    asked = [_ASKED.fullmatch(part.strip()) for part in text.split("+")]
    names = tuple(one["name"] for one in asked if one is not None)
    if len(names) < len(asked):
        raise ConfigError(f'split "{text}": no name of a split with an optional slice. {_EXAMPLES}')
    slices = [one["rows"] for one in asked if one is not None and one["rows"] is not None]
    if slices and len(names) > 1:
        raise ConfigError(
            f'split "{text}": a sum of slices is not known. Give each its own entry under datasets, '
            f"with the same path and split: {text.split('+')[0].strip()} and so on."
        )
    return Split(names, _parse_rows(slices[0], text) if slices else None)


def _parse_rows(rows: str, text: str) -> RowSlice:
    edges = _ROWS.fullmatch(rows)
    if edges is None:
        raise ConfigError(f'split "{text}": [{rows}] is no slice of documents. {_EXAMPLES}')
    given = [edge for edge in edges.groups() if edge is not None]
    percent = any(edge.endswith("%") for edge in given)
    if percent and not all(edge.endswith("%") for edge in given):
        raise ConfigError(f'split "{text}": percents on one side only. {_EXAMPLES}')
    start, stop = (None if edge is None else int(edge.rstrip("%")) for edge in edges.groups())
    if percent and any(abs(edge) > 100 for edge in (start or 0, stop or 0)):
        raise ConfigError(f'split "{text}": more than 100 %. {_EXAMPLES}')
    first = start or 0
    if stop is not None and first >= stop and (first < 0) == (stop < 0):
        raise ConfigError(f'split "{text}": it ends where it begins, so that it has no documents. {_EXAMPLES}')
    return RowSlice(start, stop, percent)


def canonical(name: str) -> str:
    """One name for a split whatever it is called: "val" and "dev" are "validation"; other names stay."""
    return _CANONICAL.get(name, name)


def splits_in(name: str) -> list[str]:
    """The splits that the name of a file or folder carries as words.

    >>> splits_in("wiki_dev-00001.jsonl")
    ['validation']
    """
    return list(dict.fromkeys(_CANONICAL[word] for word in _WORD.findall(name)))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file lies in its data set."""

    path: str
    folders: tuple[str, ...]
    """Below the data set's folder."""
    name: str
    in_data: bool
    """Directly in the folder "data" of the data set."""


def group_by_split(places: Sequence[Place]) -> dict[str, list[str]]:
    """Files by split, in their order: by the first of HF's conventions that any file follows.

    data/NAME-00000-of-00005 for any name; then a split's word in a folder's name; then one in the file's. Files that do
    not follow it belong to no split. When there are none of these, everything is "train".
    """
    for convention in _CONVENTIONS:
        groups: dict[str, list[str]] = {}
        for place in places:
            for split in convention(place):
                groups.setdefault(split, []).append(place.path)
        if groups:
            return groups
    return {TRAIN: [place.path for place in places]}


def _numbered(place: Place) -> Iterable[str]:
    match = _NUMBERED.fullmatch(place.name) if place.in_data else None
    return [match[1]] if match is not None and match[1] not in _NO_SPLITS else []


def _in_folders(place: Place) -> Iterable[str]:
    return dict.fromkeys(split for folder in place.folders for split in splits_in(folder))


def _in_name(place: Place) -> Iterable[str]:
    return splits_in(place.name)


_CONVENTIONS: tuple[Callable[[Place], Iterable[str]], ...] = (_numbered, _in_folders, _in_name)
