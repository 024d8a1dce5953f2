"""Answers as stretches of characters, and as the tokens that overlap them.

A token belongs to an answer when they share a character: exact also where an answer begins or ends inside a token. An
answer that does not lie where the data says is looked for nearby, and its status says so.

A token stands for the characters of its offsets and, beside them, for what the tokenizer dropped: normalization removes
accents, vowel signs and invisible characters (joiners, soft hyphens, control characters). Offsets end before them, and
an answer cut out by offsets would lack them. Here such a character belongs to the token before it, or to the one after
it if white space or nothing comes before it. No token gains white space, or a character that another token has. Holds
the requested windows, their neighbors and one context. Needs only numpy.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from milldam.qa.examples import Answer, Example

if TYPE_CHECKING:
    from milldam.qa.store import FeatureStore

Status = Literal["ok", "repaired", "unrepairable", "none"]
NEARBY = 64
"""Of several occurrences of an answer, one within this many characters of its stated start is taken."""


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
        place = _repaired(example.context, answer)
        if place is not None:
            return Chosen(example.context[place[0] : place[1]], *place, "repaired")
    # Some sets write "no answer" as an empty text.
    return Chosen(status="unrepairable" if any(answer.text.strip() for answer in example.answers) else "none")


def _repaired(context: str, answer: Answer) -> tuple[int, int] | None:
    """Where an answer's text really is: near its stated start, or the only place there is."""

    def deviation(place: tuple[int, int]) -> tuple[bool, bool, int]:
        """First in its letters, then in cutting words (as "in" cuts "Berlin"), then in distance."""
        cuts_word = any(context[at - 1 : at].isalnum() and context[at : at + 1].isalnum() for at in place)
        return context[slice(*place)] != text, cuts_word, abs(place[0] - answer.start)

    stripped = answer.text.strip()
    spellings = [answer.text, stripped, *(unicodedata.normalize(form, stripped) for form in ("NFC", "NFD", "NFKC"))]
    for text in filter(None, dict.fromkeys(spellings)):
        # Regardless of case and of the kind of white space.
        pattern = r"\s+".join(re.escape(word) for word in text.split()) or re.escape(text)
        places = [match.span() for match in re.finditer(pattern, context, re.IGNORECASE)]
        near = [place for place in places if abs(place[0] - answer.start) <= NEARBY]
        if near:
            return min(near, key=deviation)
        if len(places) == 1:
            return places[0]
    return None


def overlapping_tokens(offsets: npt.NDArray[np.int32], start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last token that share a character with [start, stop); None: no token does.

    >>> overlapping_tokens(np.array([[0, 1], [1, 4]], np.int32), 1, 4)      # "500" in "$500"
    (1, 1)
    """
    inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start) & (offsets[:, 0] < offsets[:, 1]))
    return (int(inside[0]), int(inside[-1])) if len(inside) else None


Tokens = npt.NDArray[np.int32]
"""(tokens, 2): begin and end, in characters of the context."""


def stretches(store: FeatureStore, windows: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """(windows, L, 2): begin and end of what the tokens stand for; (-1, -1) on what is no token of the context.

    >>> features = milldam.qa.prepare("train-v2.0.json", "squad.milldam", tokenizer="bert-base-uncased/")
    >>> context = next(milldam.qa.examples_of("train-v2.0.json")).context
    >>> found = milldam.qa.stretches(features, [0])[0]
    >>> begin, end = found[found[:, 0] >= 0][1]
    >>> context[begin:end]
    'city'
    """
    numbers = np.asarray(windows, np.int64)
    around = np.unique(np.concatenate((numbers - 1, numbers, numbers + 1)).clip(0, len(store) - 1))
    rows = store.rows(around, ("offsets", "context_begin", "context_tokens", "example"))
    offsets, examples = rows["offsets"], rows["example"].tolist()
    parts = [slice(at, at + count) for at, count in zip(rows["context_begin"], rows["context_tokens"], strict=True)]
    places = np.searchsorted(around, numbers)
    made: npt.NDArray[np.int32] = offsets[places]
    for example, group in itertools.groupby(enumerate(places.tolist()), lambda pair: examples[pair[1]]):
        context = store.example(example)["context"]
        for row, place in group:
            beside = [at for at in (place - 1, place + 1) if 0 <= at < len(around) and examples[at] == example]
            near = np.concatenate([np.empty((0, 2), np.int32), *(offsets[at, parts[at]] for at in beside)])
            made[row, parts[place]] = _widened(made[row, parts[place]], near, context)
    return made


def _may_be_dropped(character: str) -> bool:
    """Marks, what can't be seen, modifiers as of half-width kana, and what stands for a letter that was lost.

    But not the byte order mark, which is the file's and no word's; nor letters, digits and punctuation, which a
    tokenizer drops when it does not know them.
    """
    kind = unicodedata.category(character)
    fitting = kind[0] in "MC" or kind in ("Lm", "Sk") or character == "\ufffd"
    return fitting and character != "\ufeff" and not character.isspace()


def _widened(tokens: Tokens, near: Tokens, context: str) -> Tokens:
    """Tokens of a window that reach into the gaps beside them; `near`: those of the windows beside it.

    All tokens of a character reach as far, and an empty one moves along.
    """
    before = near[:, 1][near[:, 1] <= tokens[:1, 0].max(initial=0)].max(initial=0)
    # Behind a document's last window there are no tokens, or, with max_segments, none that a window has.
    behind = near[:, 0][near[:, 0] >= tokens[:, 1].max(initial=0)].min(initial=len(context))
    dropped = "".join(filter(_may_be_dropped, set(context[before:behind])))
    if not dropped:
        return tokens
    stops, begins = np.maximum.accumulate(np.r_[before, tokens[:, 1]]), np.r_[tokens[:, 0], behind]
    earlier: dict[int, int] = {}
    later: dict[int, int] = {}
    for stop, begin in np.stack((stops, begins), axis=1)[begins > stops].tolist():
        gap = context[stop:begin]
        rest = gap.rstrip(dropped)
        later[stop] = begin - len(gap.lstrip(dropped))
        if rest[-1:].isspace() or (stop == 0 and not rest):
            earlier[begin] = stop + len(rest)
    made = [
        (earlier.get(begin, begin), later.get(end, end) if end > begin else earlier.get(end, end))
        for begin, end in tokens.tolist()
    ]
    return np.array(made, np.int32).reshape(-1, 2)
