"""Answers as stretches of characters, and as the tokens that overlap them.

A token belongs to an answer when they share a character: exact also where an answer begins or ends inside a token. An
answer that does not lie where the data says is looked for nearby, and what was done about it is told.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt

from milldam.qa.examples import Answer, Example

Status = Literal["ok", "repaired", "unrepairable", "none"]

NEARBY = 64
"""Characters around its stated begin in which one of several occurrences of an answer is taken for it."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer that an example is trained on."""

    text: str = ""
    start: int = 0
    stop: int = 0
    status: Status = "none"
    """none: the question has no answer; unrepairable: its answers are not in the context."""

    def __bool__(self) -> bool:
        return self.status in ("ok", "repaired")


def choose_answer(example: Example) -> Chosen:
    """The first answer that lies where it should, else the first that can be repaired."""
    for answer in example.answers:
        if answer.text and example.context[answer.start : answer.stop] == answer.text and answer.start >= 0:
            return Chosen(answer.text, answer.start, answer.stop, "ok")
    for answer in example.answers:
        found = _repaired(example.context, answer)
        if found is not None:
            return Chosen(example.context[found[0] : found[1]], *found, "repaired")
    # Some sets write "no answer" as an empty text.
    return Chosen(status="unrepairable" if any(answer.text.strip() for answer in example.answers) else "none")


def _repaired(context: str, answer: Answer) -> tuple[int, int] | None:
    """Where an answer's text really is: near its stated begin, or the only place there is."""
    for text in _spellings(answer.text):
        places = list(_places(context, text))
        near = [place for place in places if abs(place[0] - answer.start) <= NEARBY]
        if near:
            return min(near, key=partial(_deviation, context, text, answer.start))
        if len(places) == 1:
            return places[0]
    return None


def _deviation(context: str, text: str, stated: int, place: tuple[int, int]) -> tuple[bool, bool, int]:
    """How far a place is from what the data says: first in its letters, then in cutting words, then in distance."""
    return context[slice(*place)] != text, _cuts_word(context, *place), abs(place[0] - stated)


def _cuts_word(context: str, start: int, stop: int) -> bool:
    """Whether a stretch begins or ends inside a word, as "in" in "Berlin"."""
    return any(context[at - 1 : at].isalnum() and context[at : at + 1].isalnum() for at in (start, stop))


def _spellings(text: str) -> Iterator[str]:
    """The text as it is, without white space around it, and in other normal forms."""
    seen = {""}
    stripped = text.strip()
    for spelling in (text, stripped, *(unicodedata.normalize(form, stripped) for form in ("NFC", "NFD", "NFKC"))):
        if spelling not in seen:
            seen.add(spelling)
            yield spelling


def _places(context: str, text: str) -> Iterator[tuple[int, int]]:
    """Occurrences of a text, regardless of case and of which white space it has."""
    pattern = r"\s+".join(re.escape(word) for word in text.split()) or re.escape(text)
    for match in re.finditer(pattern, context, re.IGNORECASE):
        yield match.start(), match.end()


def overlapping_tokens(offsets: npt.NDArray[np.int32], start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last token that share a character with [start, stop); None: no token does.

    >>> overlapping_tokens(np.array([[0, 1], [1, 4]], np.int32), 1, 4)      # "500" in "$500"
    (1, 1)
    """
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start) & (offsets[:, 0] < offsets[:, 1]))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None
