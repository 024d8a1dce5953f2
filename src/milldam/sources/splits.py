"""How a split of a dataset is asked for, as HF datasets has it: names, sums of them, or a slice of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from milldam.errors import ConfigError, InputError, did_you_mean

TRAIN, ALL = "train", "all"
_CANONICAL = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_NAME, _EDGE = r"\w+(?:[.-]\w+)*", r"-?\d+(?:_\d+)*%?"
_ASKED = re.compile(
    rf"(?P<sum>{_NAME}(?:\s*\+\s*{_NAME})*)|"
    rf"(?P<name>{_NAME})\s*\[\s*(?P<start>{_EDGE})?\s*:\s*(?P<stop>{_EDGE})?\s*\]"
)
_EXAMPLES = "Examples: train, train[:100_000], train[10%:20%], train[-5%:], train+test."


@dataclass(frozen=True, slots=True)
class RowSlice:
    """A slice of a dataset's documents, as Python slices a list; None: from its begin, to its end.

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

        def place(edge: int) -> int:
            """Counted from the end when below zero, even where the percents of a few documents round to none."""
            count = round(edge * total / 100.0) if self.percent else edge
            return min(max(total + count if edge < 0 else count, 0), total)

        first = 0 if self.start is None else place(self.start)
        return first, max(first, total if self.stop is None else place(self.stop))


def parse_split(text: str) -> tuple[tuple[str, ...], RowSlice | None]:
    """Splits one after the other, or a slice of one.

    >>> parse_split("train[:100_000]")
    (('train',), RowSlice(start=None, stop=100000, percent=False))
    """
    found = _ASKED.fullmatch(text.strip())
    edges = [edge for edge in (found["start"], found["stop"]) if edge] if found is not None else []
    percents = {edge.endswith("%") for edge in edges}
    if found is None or len(percents) > 1 or (True in percents and any(abs(int(edge[:-1])) > 100 for edge in edges)):
        raise ConfigError(
            f'split "{text}": neither names joined by "+" nor a name with a slice of its rows. {_EXAMPLES}'
        )
    if found["sum"] is not None:
        return tuple(name.strip() for name in found["sum"].split("+")), None
    start, stop = (int(edge.rstrip("%")) if edge else None for edge in (found["start"], found["stop"]))
    if stop is not None and (start or 0) >= stop and ((start or 0) < 0) == (stop < 0):
        raise ConfigError(f'split "{text}": it ends where it begins, so that it has no documents. {_EXAMPLES}')
    return (found["name"],), RowSlice(start, stop, True in percents)


def choose_splits(names: tuple[str, ...] | None, there: Mapping[str, Any], path: str) -> list[str]:
    """The names of the wanted splits, as they are called there: "val" and "dev" are "validation" too. None asked for:
    train, or the only one there is."""
    listed = ", ".join(f'"{name}"' for name in there) or "none"
    if names is None:
        if TRAIN not in there and len(there) != 1:
            raise InputError(f"{path}: which split? There are {listed}. Set split.")
        return [TRAIN] if TRAIN in there else list(there)
    if names == (ALL,) and ALL not in there:
        return list(there)
    by_meaning = {_CANONICAL.get(name, name): name for name in there}
    chosen = []
    for name in names:
        found = name if name in there else by_meaning.get(_CANONICAL.get(name, name))
        if found is None:
            hint = did_you_mean(name, there)
            raise InputError(f'{path}: no split "{name}" in it; there are: {listed}.{hint} Set split.')
        chosen.append(found)
    return chosen
