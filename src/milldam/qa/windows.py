"""Examples -> windows: a question with one stretch of its context after the other, as columns.

Texts are encoded apart, each distinct context of a batch once, and put together by the template: the ids are those
that the tokenizer gives for the pair. One row a window, in the order of the examples. Holds one batch of examples; the
columns are filled row by row. And a user's word for a tokenizer -> what windows are made with: tokenizer.json with
memory tokens, and the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.files import hash_bytes
from milldam.qa.settings import QARules
from milldam.qa.sources import Example
from milldam.qa.spans import Chosen, choose_answer, overlapping_tokens
from milldam.qa.template import Special, Template, add_memory_tokens, template_of, with_memory
from milldam.stores.features.format import NUMBERS, FeatureForm
from milldam.tokenizers.loading import load_tokenizer

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Features:
    """Windows of some examples. L is max_seq_length; positions count from the first token, padding included."""

    input_ids: Ints
    """(windows, L), padded with the pad token."""
    token_type_ids: Ints
    """(windows, L) uint8: as the tokenizer's template has them, the pad type on padding."""
    offsets: Ints
    """(windows, L, 2) int32: begin and end, in characters of the context, of each context token; (-1, -1) elsewhere."""
    length: Ints
    """(windows,) int32: tokens without padding."""
    start_positions: Ints
    """(windows,) int32: the first token of the answer; cls_index where the window does not hold the whole answer."""
    end_positions: Ints
    """(windows,) int32: the last token of the answer, itself included."""
    cls_index: Ints
    """(windows,) int32."""
    context_begin: Ints
    """(windows,) int32: where in the window the context's tokens begin."""
    context_tokens: Ints
    """(windows,) int32: how many tokens of the context are in the window."""
    segment: Ints
    """(windows,) int32: the window's number in its example, from 0."""
    segments: Ints
    """(windows,) int32: how many windows its example has."""
    example: Ints
    """(windows,) int64: the example's number in what was given (from 0); in a store, the number in the store."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def has_answer(self) -> npt.NDArray[np.bool_]:
        """(windows,): whether the window holds the whole answer."""
        has: npt.NDArray[np.bool_] = self.start_positions != self.cls_index
        return has


COLUMNS = tuple(field.name for field in fields(Features))
_COUNTED = NUMBERS[:-1]
"""Those of one number a window, in the order in which they are stored; but for `example`, which counts in a store."""
_WORD_MARKER = "\u2581"
QUESTION_TOO_LONG = "question_too_long"
NO_TOKENS = "no_tokens"
"""Neither text has any, and the tokenizer adds none."""
VERSION = 1
"""Another number for every change that gives other windows."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Windows of some examples, and what became of each example."""

    features: Features
    chosen: list[Chosen]
    """The answer of each example."""
    dropped: dict[int, str] = field(default_factory=dict)
    """Examples without windows: position -> reason."""


Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Encoded:
    ids: Ids
    offsets: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Window:
    """One window, before it is written down."""

    example: int
    segment: int
    segments: int
    first: int
    """The first token of the context in it."""
    stop: int


class Windower:
    """`windower(examples)` -> their windows."""

    def __init__(self, tokenizer: Any, rules: QARules, template: Template) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self.rules, self.template = tokenizer, rules, template
        self._marker = tokenizer.token_to_id(_WORD_MARKER)
        # Not the size: a vocabulary may have gaps.
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._dtype = np.uint16 if largest < 1 << 16 else np.int32
        # Rules under which nothing, or nothing but short contexts, could become windows.
        length, taken = self.rules.max_seq_length, self.template.taken
        if length - taken < 2:
            raise ConfigError(
                f"qa: max_seq_length: {length}; special and memory tokens take {taken} of it, "
                "and nothing is left for the texts."
            )
        most = length - taken - 1
        if self.rules.step(most) < 1:
            overlap = most - self.rules.step(most)
            raise ConfigError(
                f"qa: overlap: {overlap}; a window of {length} tokens holds at most {most} of a context, so the "
                f"next window would not advance. Use an overlap well below {most}."
            )

    def __call__(self, examples: Sequence[Example]) -> Prepared:
        # White space in front of a question says nothing, and some tokenizers would make tokens of it.
        # Ids alone: without offsets it is faster.
        encoded = self._tokenizer.encode_batch_fast(
            [example.question.lstrip() for example in examples], add_special_tokens=False
        )
        questions = [np.array(found.ids, np.int32) for found in encoded]
        contexts = self._encode([example.context for example in examples])
        chosen = [choose_answer(example) for example in examples]
        windows: list[_Window] = []
        dropped: dict[int, str] = {}
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
            cut = list(self._cut(number, len(question), len(context.ids)))
            windows += cut
            if not cut:
                dropped[number] = QUESTION_TOO_LONG if len(question) else NO_TOKENS
        rows = _Rows(len(windows), self.rules.max_seq_length, self.template, self._dtype)
        spans = [
            overlapping_tokens(context.offsets, answer.start, answer.stop) if answer else None
            for answer, context in zip(chosen, contexts, strict=True)
        ]
        for row, window in enumerate(windows):
            rows.fill(row, window, questions[window.example], contexts[window.example], spans[window.example])
        return Prepared(rows.features(), chosen, dropped)

    def _encode(self, texts: list[str]) -> list[_Encoded]:
        """Questions on one context follow each other: it is encoded once."""
        distinct = list(dict.fromkeys(texts))
        encoded = self._tokenizer.encode_batch(distinct, add_special_tokens=False)
        known = {text: self._arrays(one.ids, one.offsets) for text, one in zip(distinct, encoded, strict=True)}
        return [known[text] for text in texts]

    def _arrays(self, ids: list[int], offsets: list[tuple[int, int]]) -> _Encoded:
        made = _Encoded(np.array(ids, np.int32), np.array(offsets, np.int32).reshape(-1, 2))
        # A marker alone stands for the space before a word; where there is none, it is said to cover the word's
        # first character, which the next token has, too.
        if self._marker is not None:
            alone = np.flatnonzero(made.ids[:-1] == self._marker)
            alone = alone[made.offsets[alone + 1, 0] < made.offsets[alone, 1]]
            made.offsets[alone, 1] = made.offsets[alone, 0]
        return made

    def _has_edge(self) -> bool:
        """Whether a window without a question has a token that is not of the context, for "no answer" to point to."""
        own = self.template
        if own.cls_id is not None:
            return True
        return bool(own.memory_write or own.after if own.context_first else own.before or own.memory_read)

    def _cut(self, example: int, question: int, context: int) -> Iterator[_Window]:
        """The windows of one example; none when its question leaves no room to go on."""
        room = self.rules.max_seq_length - self.template.taken - question
        step = self.rules.step(room)
        if (context > room and (room < 1 or step < 1)) or not (question or self._has_edge()):
            return
        segments = 1 if context <= room else 1 + -(-(context - room) // step)
        kept = min(segments, self.rules.max_segments or segments)
        for segment in range(kept):
            first = segment * step if segment else 0
            yield _Window(example, segment, kept, first, min(first + room, context))


class _Rows:
    """The columns, being filled: a row is a few writes of whole parts, since rows are many and parts are short."""

    def __init__(self, count: int, length: int, template: Template, dtype: npt.DTypeLike) -> None:
        self._template, self._length = template, length
        self._ids = np.full((count, length), template.pad_id, dtype)
        self._types = np.full((count, length), template.pad_type, np.uint8)
        self._offsets = np.full((count, length, 2), -1, np.int32)
        self._numbers = np.empty((count, len(_COUNTED)), np.int32)
        self._example = np.empty(count, np.int64)
        own = template
        read, write = Special(own.memory_read, (own.first_type,)), Special(own.memory_write, (own.second_type,))
        self._head, self._between, self._tail = (
            _joined(own.before, read),
            _joined(own.between),
            _joined(write, own.after),
        )

    def fill(self, row: int, window: _Window, question: Ids, context: _Encoded, span: tuple[int, int] | None) -> None:
        own, part = self._template, slice(window.first, window.stop)
        count = window.stop - window.first
        length = own.taken + len(question) + count
        begin = self._length - length if own.pad_left else 0
        texts = (context.ids[part], question) if own.context_first else (question, context.ids[part])
        places = self._write(row, begin, texts)
        context_at = places[0 if own.context_first else 1]
        self._offsets[row, context_at : context_at + count] = context.offsets[part]
        cls = begin + self._cls_at(length)
        inside = span is not None and window.first <= span[0] and span[1] < window.stop
        start, end = (context_at + place - window.first for place in span) if span and inside else (cls, cls)
        self._numbers[row] = (length, start, end, cls, context_at, count, window.segment, window.segments)
        self._example[row] = window.example

    def _write(self, row: int, begin: int, texts: tuple[Ids, Ids]) -> tuple[int, int]:
        """Ids and types of a window; where its texts begin."""
        own, ids, types = self._template, self._ids[row], self._types[row]
        first = begin + len(self._head[0])
        between = first + len(texts[0])
        second = between + len(self._between[0])
        tail = second + len(texts[1])
        for at, (part, kinds) in ((begin, self._head), (between, self._between), (tail, self._tail)):
            ids[at : at + len(part)] = part
            types[at : at + len(part)] = kinds
        ids[first:between], ids[second:tail] = texts
        types[first:between], types[second:tail] = own.first_type, own.second_type
        return first, second

    def _cls_at(self, length: int) -> int:
        """Where the CLS token is; the special one, which comes first or last, not one that the text has."""
        own = self._template
        if own.cls_id is None:
            # A token of the question, where no answer can be.
            return length - 1 if own.context_first else 0
        if own.cls_id in own.before.ids:
            return own.before.ids.index(own.cls_id)
        if own.cls_id in own.after.ids:
            return length - len(own.after) + own.after.ids.index(own.cls_id)
        return 0

    def features(self) -> Features:
        numbers = {name: np.ascontiguousarray(self._numbers[:, at]) for at, name in enumerate(_COUNTED)}
        return Features(
            input_ids=self._ids, token_type_ids=self._types, offsets=self._offsets, example=self._example, **numbers
        )


def _joined(*parts: Special) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Ids and types of special tokens that lie side by side; one type may stand for all of a part."""
    ids = [token for part in parts for token in part.ids]
    types = [kind for part in parts for kind in (part.types * len(part) if len(part.types) == 1 else part.types)]
    return np.array(ids, np.int32), np.array(types, np.uint8)


_FACTS = ("cls_token", "pad_token", "padding_side")


@dataclass(frozen=True, slots=True)
class QATokenizer:
    name: str
    json: str
    """With memory tokens."""
    plain_hash: str
    """Of the tokenizer as it was given."""
    vocab_size: int
    template: Template

    def form(self, rules: QARules) -> FeatureForm:
        dtype = "uint16" if self.vocab_size <= 1 << 16 else "int32"
        own = self.template
        return FeatureForm(rules.max_seq_length, dtype, own.pad_id, own.pad_type, own.pad_left)


def load_qa_tokenizer(spec: str, rules: QARules) -> QATokenizer:
    """Load it, add the memory tokens, and try the rules on it. Raises ConfigError and InputError."""
    loaded = load_tokenizer(spec)
    tokenizer, plain = loaded.huggingface, loaded.json
    template = template_of(tokenizer, rules, facts_beside(spec))
    if rules.memory_tokens:
        template = with_memory(template, add_memory_tokens(tokenizer, rules.memory_tokens))
    text = tokenizer.to_str() if rules.memory_tokens else plain
    Windower(tokenizer, rules, template)
    return QATokenizer(loaded.name, text, hash_bytes(plain.encode()), loaded.vocab_size, template)


def load_windower(path: Path, rules: QARules, template: Template) -> Windower:
    """The windower of a worker, from the tokenizer.json in the store."""
    from tokenizers import Tokenizer

    return Windower(Tokenizer.from_str(path.read_text(encoding="utf-8")), rules, template)


def facts_beside(spec: str) -> dict[str, Any]:
    """What the files beside a tokenizer say of its special tokens and padding."""
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = _beside(spec, name)
        try:
            content = json.loads(path.read_bytes()) if path is not None else {}
        except (OSError, ValueError):
            continue
        for key in _FACTS if isinstance(content, dict) else ():
            value = content.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                found[key] = value
    return found


def _beside(spec: str, name: str) -> Path | None:
    path = Path(spec).expanduser()
    if path.exists():
        return (path if path.is_dir() else path.parent) / name
    import huggingface_hub

    cached = huggingface_hub.try_to_load_from_cache(spec, name)
    return Path(cached) if isinstance(cached, str) else None
