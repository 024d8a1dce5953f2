"""Examples -> windows: a question with one stretch of its context after the other.

Texts are encoded separately, each distinct context of a batch once, and put together by the template: the ids are those
that the tokenizer gives for the pair. One row a window, in the order of the examples. Holds a batch of examples and
their windows. A long context is encoded in pieces, each cut proven by an encoding of both its sides.

A token belongs to an answer when they share a character: exact also where an answer begins or ends inside a token. An
answer that does not lie where the data says is looked for nearby, and its status says so.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.qa.examples import Answer, Example
from milldam.qa.settings import QARules
from milldam.qa.store import NUMBERS
from milldam.qa.template import Template

VERSION = 2
"""Another number for every change that gives other windows."""
QUESTION_TOO_LONG, NO_TOKENS, TOO_LARGE, NO_CUT = "question_too_long", "no_tokens", "too_large", "no_place_to_cut"
"""Why an example is dropped. no_tokens: neither text has any, and the tokenizer adds none. too_large: its windows are
more than `MOST_WINDOW_BYTES`. no_place_to_cut: its context can't be encoded in pieces."""
MOST_WINDOW_BYTES = 32 << 20
"""Windows of one example, which are made and stored together."""
PIECE, _AROUND, _TRIES = 64_000, 256, 32
"""Characters of a context that are encoded in one call, characters on each side of a cut that prove it, and places to
try."""
_WORD_MARKER = "\u2581"
NEARBY = 64
"""Of several occurrences of an answer, one within this many characters of its stated start is taken."""

Tokens = npt.NDArray[np.int32]
"""(tokens, 4) of a context: id, type, and begin and end in characters."""


# ---- answers ----


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer that an example is trained on."""

    text: str = ""
    start: int = 0
    stop: int = 0
    status: Literal["ok", "repaired", "unrepairable", "none"] = "none"
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


# ---- windows ----


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of some examples. L is max_seq_length; positions count from the first token, padding included."""

    input_ids: npt.NDArray[Any]
    """(windows, L), padded with the pad token."""
    token_type_ids: npt.NDArray[np.uint8]
    """(windows, L): as the tokenizer's template has them, the pad type on padding."""
    offsets: npt.NDArray[np.int32]
    """(windows, L, 2): begin and end, in characters of the context, of each context token; (-1, -1) elsewhere."""
    numbers: npt.NDArray[np.int32]
    """(windows, 9): `NUMBERS`; `example` counts within these examples."""
    chosen: list[Chosen]
    """The answer of each example."""
    dropped: dict[int, str]
    """Examples without windows: position -> reason."""

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """One of `NUMBERS`."""
        column: npt.NDArray[np.int32] = self.numbers[:, NUMBERS.index(name)]
        return column


class Windower:
    """`windower(examples)` makes their windows. Rules under which no context, or only short ones, could become windows
    are refused at once."""

    def __init__(self, tokenizer: Any, rules: QARules, template: Template) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._rules, self._template = tokenizer, rules, template
        self._marker = tokenizer.token_to_id(_WORD_MARKER)
        # Not the size: a vocabulary may have gaps.
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._dtype = np.uint16 if largest < 1 << 16 else np.int32
        length, taken = rules.max_seq_length, template.taken
        if length - taken < 2:
            raise ConfigError(
                f"qa: max_seq_length: {length}; special and memory tokens take {taken} of it, "
                "and nothing is left for the texts."
            )
        most = length - taken - 1
        if rules.step(most) < 1:
            raise ConfigError(
                f"qa: overlap: {most - rules.step(most)}; a window of {length} tokens holds at most {most} of a "
                f"context, so the next window would not advance. Use an overlap well below {most}."
            )
        types = template.text_types
        read, write = (
            tuple((token, kind) for token in tokens)
            for tokens, kind in zip((template.memory.read, template.memory.write), types, strict=True)
        )
        parts = (*template.before, *read), template.between, (*write, *template.after)
        self._head, self._between, self._tail = (np.array(part, np.int32).reshape(-1, 2) for part in parts)
        self._context_type, self._question_type = types if template.context_first else types[::-1]
        # Whether a window without a question has a token outside the context for "no answer" to point to.
        edge = self._tail if template.context_first else self._head
        self._has_edge = template.cls_id is not None or len(edge) > 0

    def __call__(self, examples: Sequence[Example]) -> Windows:
        # White space in front of a question says nothing, and some tokenizers would make tokens of it.
        texts = [example.question.lstrip() for example in examples]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # ids alone, which is faster
        # Questions on one context follow each other: it is encoded once.
        distinct = list(dict.fromkeys(example.context for example in examples))
        contexts = dict(zip(distinct, self._encode(distinct), strict=True))
        parts: list[list[tuple[int, int]]] = []
        dropped: dict[int, str] = {}
        for number, (question, example) in enumerate(zip(encoded, examples, strict=True)):
            context = contexts[example.context]
            cut = NO_CUT if context is None else self._cut(len(question), len(context))
            if isinstance(cut, str):
                dropped[number] = cut
            parts.append([] if isinstance(cut, str) else cut)
        count, length, template = sum(map(len, parts)), self._rules.max_seq_length, self._template
        windows = Windows(
            np.full((count, length), template.pad_id, self._dtype),
            np.full((count, length), template.pad_type, np.uint8),
            np.full((count, length, 2), -1, np.int32),
            np.empty((count, len(NUMBERS)), np.int32),
            [choose_answer(example) for example in examples],
            dropped,
        )
        row = 0
        for number, (one, example, answer) in enumerate(zip(encoded, examples, windows.chosen, strict=True)):
            context = contexts[example.context]
            if context is None or not parts[number]:
                continue
            question = np.column_stack((one.ids, np.full(len(one), self._question_type))).astype(np.int32)
            span = overlapping_tokens(context[:, 2:], answer.start, answer.stop) if answer else None
            for segment, (first, stop) in enumerate(parts[number]):
                part = context[first:stop]
                if template.context_first:
                    pieces, context_at = (self._head, part[:, :2], self._between, question, self._tail), 0
                else:
                    pieces = self._head, question, self._between, part[:, :2], self._tail
                    context_at = len(question) + len(self._between)
                tokens = np.concatenate(pieces)
                begin = length - len(tokens) if template.pad_left else 0
                context_at += begin + len(self._head)
                windows.input_ids[row, begin : begin + len(tokens)] = tokens[:, 0]
                windows.token_type_ids[row, begin : begin + len(tokens)] = tokens[:, 1]
                windows.offsets[row, context_at : context_at + len(part)] = part[:, 2:]
                start = end = cls = begin + template.cls_at % len(tokens)
                if span is not None and first <= span[0] and span[1] < stop:
                    start, end = (context_at + place - first for place in span)
                numbers = len(tokens), start, end, cls, context_at, len(part), segment, len(parts[number]), number
                windows.numbers[row] = numbers
                row += 1
        return windows

    def _cut(self, question: int, context: int) -> list[tuple[int, int]] | str:
        """The parts of a context that windows hold, or why there are none."""
        room = self._rules.max_seq_length - self._template.taken - question
        step = self._rules.step(room)
        if not (question or self._has_edge):
            return NO_TOKENS
        if context > room and (room < 1 or step < 1):
            return QUESTION_TOO_LONG
        segments = 1 if context <= room else 1 + -(-(context - room) // step)
        kept = min(segments, self._rules.max_segments or segments)
        if kept * self._rules.max_seq_length * (9 + np.dtype(self._dtype).itemsize) > MOST_WINDOW_BYTES:
            return TOO_LARGE
        firsts = (segment * step if segment else 0 for segment in range(kept))
        return [(first, min(first + room, context)) for first in firsts]

    # ---- texts to tokens ----

    def _encode(self, texts: list[str]) -> Iterator[Tokens | None]:
        """None: a long text that could not be cut into pieces."""
        short = [text for text in texts if len(text) <= PIECE]
        encoded = iter(self._tokenizer.encode_batch(short, add_special_tokens=False))
        for text in texts:
            tokens = self._tokens(next(encoded), 0) if len(text) <= PIECE else self._in_pieces(text)
            # A marker alone stands for the space before a word; where there is none, the tokenizer says that it covers
            # the word's first character, which belongs to the next token.
            if tokens is not None and self._marker is not None:
                alone = np.flatnonzero(tokens[:-1, 0] == self._marker)
                alone = alone[tokens[alone + 1, 2] < tokens[alone, 3]]
                tokens[alone, 3] = tokens[alone, 2]
            yield tokens

    def _tokens(self, encoding: Any, shift: int) -> Tokens:
        tokens = np.empty((len(encoding.ids), 4), np.int32)
        tokens[:, 0], tokens[:, 1] = encoding.ids, self._context_type
        tokens[:, 2:] = np.array(encoding.offsets, np.int32).reshape(-1, 2) + shift
        return tokens

    def _in_pieces(self, text: str) -> Tokens | None:
        """Cut about every `PIECE`, at white space if possible. A cut holds if the last tokens before it and the first
        ones after it stand side by side in an encoding of the text around it."""

        def encode(begin: int, stop: int) -> Tokens:
            return self._tokens(self._tokenizer.encode(text[begin:stop], add_special_tokens=False), begin)

        pieces, begin = [], 0
        while len(text) - begin > PIECE:
            most = begin + PIECE
            before_space = (
                at for at in range(most, most - _TRIES * _AROUND, -1) if text[at].isspace() > text[at - 1].isspace()
            )
            for stop in itertools.chain(itertools.islice(before_space, _TRIES), range(most, most - _TRIES, -1)):
                around = encode(stop - _AROUND, stop + _AROUND)
                left, right = around[around[:, 3] <= stop], around[around[:, 2] >= stop]
                if not len(left) or len(left) + len(right) < len(around):
                    continue
                last, first = left[len(left) // 2 :], right[: (len(right) + 1) // 2]
                if not np.array_equal(encode(stop, stop + _AROUND)[: len(first)], first):
                    continue
                piece = encode(begin, stop)
                if np.array_equal(piece[-len(last) :], last):
                    break
            else:
                return None
            pieces.append(piece)
            begin = stop
        return np.concatenate([*pieces, encode(begin, len(text))])
