"""Examples -> windows: a question with one stretch of its context after the other.

Texts are encoded separately, each distinct context of a batch once, and put together by the template: the ids are those
that the tokenizer gives for the pair. One row a window, in the order of the examples. Holds a batch of examples and
their windows. A long context is encoded in pieces, each cut proven by an encoding of both its sides.

Also loads a tokenizer as windows need it: tokenizer.json with memory tokens, and the template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.files import hash_bytes
from milldam.qa.examples import Example
from milldam.qa.settings import QARules
from milldam.qa.spans import Chosen, choose_answer, overlapping_tokens
from milldam.qa.store import NUMBERS, Form
from milldam.qa.template import Template, add_memory_tokens, template_of
from milldam.tokenizers.loading import load_tokenizer

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

Tokens = npt.NDArray[np.int32]
"""(tokens, 3): id, and begin and end in characters."""


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
    """`windower(examples)` makes their windows."""

    def __init__(self, tokenizer: Any, rules: QARules, template: Template) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._rules, self._template = tokenizer, rules, template
        self._marker = tokenizer.token_to_id(_WORD_MARKER)
        # Not the size: a vocabulary may have gaps.
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._dtype = np.uint16 if largest < 1 << 16 else np.int32
        # Refuse rules under which no context, or only short ones, could become windows.
        length, taken = rules.max_seq_length, template.taken
        if length - taken < 2:
            raise ConfigError(
                f"qa: max_seq_length: {length}; special and memory tokens take {taken} of it, "
                "and nothing is left for the texts."
            )
        most = length - taken - 1
        if rules.step(most) < 1:
            overlap = most - rules.step(most)
            raise ConfigError(
                f"qa: overlap: {overlap}; a window of {length} tokens holds at most {most} of a context, so the "
                f"next window would not advance. Use an overlap well below {most}."
            )
        read, write = template.memory.read, template.memory.write
        first_type, second_type = template.text_types
        head = [*template.before, *((token, first_type) for token in read)]
        tail = [*((token, second_type) for token in write), *template.after]
        self._head, self._between, self._tail = (
            np.array(part, np.int32).reshape(-1, 2) for part in (head, template.between, tail)
        )
        # Whether a window without a question has a token outside the context for "no answer" to point to.
        edge = len(self._tail) if template.context_first else len(self._head)
        self._has_edge = template.cls_id is not None or edge > 0

    def __call__(self, examples: Sequence[Example]) -> Windows:
        # White space in front of a question says nothing, and some tokenizers would make tokens of it.
        texts = [example.question.lstrip() for example in examples]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # ids alone, which is faster
        questions = [np.array(one.ids, np.int32) for one in encoded]
        # Questions on one context follow each other: it is encoded once.
        distinct = list(dict.fromkeys(example.context for example in examples))
        contexts = dict(zip(distinct, self._encode(distinct), strict=True))
        parts: list[list[tuple[int, int]]] = []
        dropped: dict[int, str] = {}
        for number, (question, example) in enumerate(zip(questions, examples, strict=True)):
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
        for number, (example, answer) in enumerate(zip(examples, windows.chosen, strict=True)):
            context = contexts[example.context]
            span = None
            if answer and context is not None:
                span = overlapping_tokens(context[:, 1:], answer.start, answer.stop)
            for segment, part in enumerate(parts[number]):
                assert context is not None
                numbers = self._fill(windows, row, questions[number], context, part, span)
                windows.numbers[row] = (*numbers, segment, len(parts[number]), number)
                row += 1
        return windows

    # ---- texts to tokens ----

    def _encode(self, texts: list[str]) -> Iterator[Tokens | None]:
        """None: a long text that could not be cut into pieces."""
        short = [text for text in texts if len(text) <= PIECE]
        encoded = iter(self._tokenizer.encode_batch(short, add_special_tokens=False))
        for text in texts:
            tokens = _tokens(next(encoded)) if len(text) <= PIECE else self._in_pieces(text)
            # A marker alone stands for the space before a word; where there is none, the tokenizer says that it covers
            # the word's first character, which belongs to the next token.
            if tokens is not None and self._marker is not None:
                alone = np.flatnonzero(tokens[:-1, 0] == self._marker)
                alone = alone[tokens[alone + 1, 1] < tokens[alone, 2]]
                tokens[alone, 2] = tokens[alone, 1]
            yield tokens

    def _in_pieces(self, text: str) -> Tokens | None:
        """Cut about every `PIECE`, at white space if possible. A cut holds if the last tokens before it and the first
        ones after it stand side by side in an encoding of the text around it."""

        def encode(begin: int, stop: int) -> Tokens:
            return _tokens(self._tokenizer.encode(text[begin:stop], add_special_tokens=False), begin)

        pieces, begin = [], 0
        while len(text) - begin > PIECE:
            for stop in _places_to_cut(text, begin + PIECE - _TRIES * _AROUND, begin + PIECE):
                around = encode(stop - _AROUND, stop + _AROUND)
                left, right = around[around[:, 2] <= stop], around[around[:, 1] >= stop]
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

    # ---- tokens to windows ----

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

    def _fill(
        self,
        windows: Windows,
        row: int,
        question: npt.NDArray[np.int32],
        context: Tokens,
        part: tuple[int, int],
        span: tuple[int, int] | None,
    ) -> tuple[int, ...]:
        """Write one window; its first six numbers."""
        template, (first, stop) = self._template, part
        count = stop - first
        length = template.taken + len(question) + count
        begin = self._rules.max_seq_length - length if template.pad_left else 0
        texts = [question, context[first:stop, 0]]
        if template.context_first:
            texts.reverse()
        ids, types, at, places = windows.input_ids[row], windows.token_type_ids[row], begin, []
        for special, text, kind in zip((self._head, self._between), texts, template.text_types, strict=True):
            text_at = at + len(special)
            ids[at:text_at], types[at:text_at] = special[:, 0], special[:, 1]
            at = text_at + len(text)
            ids[text_at:at], types[text_at:at] = text, kind
            places.append(text_at)
        ids[at : begin + length], types[at : begin + length] = self._tail[:, 0], self._tail[:, 1]
        context_at = places[0 if template.context_first else 1]
        windows.offsets[row, context_at : context_at + count] = context[first:stop, 1:]
        cls = begin + self._cls_at(length)
        inside = span is not None and first <= span[0] and span[1] < stop
        start, end = (context_at + place - first for place in span) if span and inside else (cls, cls)
        return length, start, end, cls, context_at, count

    def _cls_at(self, length: int) -> int:
        """Where the CLS token is: the special one, which comes first or last, not one that the text has."""
        template = self._template
        if template.cls_id is None:
            # A token of the question, where no answer can be.
            return length - 1 if template.context_first else 0
        before, after = ([token for token, _ in part] for part in (template.before, template.after))
        if template.cls_id in after and template.cls_id not in before:
            return length - len(after) + after.index(template.cls_id)
        return before.index(template.cls_id) if template.cls_id in before else 0


def _tokens(encoding: Any, shift: int = 0) -> Tokens:
    tokens = np.empty((len(encoding.ids), 3), np.int32)
    tokens[:, 0] = encoding.ids
    tokens[:, 1:] = np.array(encoding.offsets, np.int32).reshape(-1, 2) + shift
    return tokens


def _places_to_cut(text: str, least: int, most: int) -> Iterator[int]:
    """Where a text may be cut, the most likely first: before white space, then anywhere."""
    spaces = (at for at in range(most, least, -1) if text[at].isspace() and not text[at - 1].isspace())
    return itertools.chain(list(itertools.islice(spaces, _TRIES)), range(most, most - _TRIES, -1))


# ---- the tokenizer ----


@dataclass(frozen=True, slots=True)
class QATokenizer:
    name: str
    json: str
    """With memory tokens."""
    plain_hash: str
    """Of the tokenizer without memory tokens."""
    vocab_size: int
    template: Template

    def form(self, rules: QARules) -> Form:
        dtype = "uint16" if self.vocab_size <= 1 << 16 else "int32"
        own = self.template
        around = len(own.before), len(own.after)
        return Form(rules.max_seq_length, dtype, own.pad_id, own.pad_type, own.pad_left, *around, own.memory)


def load_qa_tokenizer(spec: str, rules: QARules) -> QATokenizer:
    """Load it, add the memory tokens, and try the rules on it. Raises ConfigError and InputError."""
    loaded = load_tokenizer(spec)
    tokenizer, plain = loaded.huggingface, loaded.json
    template = template_of(tokenizer, rules, facts_beside(spec))
    if rules.memory_tokens:
        template = replace(template, memory=add_memory_tokens(tokenizer, rules.memory_tokens))
    text = tokenizer.to_str() if rules.memory_tokens else plain
    Windower(tokenizer, rules, template)
    return QATokenizer(loaded.name, text, hash_bytes(plain.encode()), loaded.vocab_size, template)


def facts_beside(spec: str) -> dict[str, Any]:
    """What the files beside a tokenizer say about special tokens and padding."""
    facts: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path: Any = Path(spec).expanduser()
        if path.exists():
            path = (path if path.is_dir() else path.parent) / name
        else:
            import huggingface_hub

            path = huggingface_hub.try_to_load_from_cache(spec, name)
        try:
            content = json.loads(Path(path).read_bytes()) if isinstance(path, str | Path) else {}
        except (OSError, ValueError):
            continue
        for key in ("cls_token", "pad_token", "padding_side") if isinstance(content, dict) else ():
            value = content.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                facts[key] = value
    return facts
