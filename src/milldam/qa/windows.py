"""Examples -> windows: a question with one stretch of its context after the other.

Texts are encoded apart, each distinct context of a batch once, and put together by the template: the ids are those
that the tokenizer gives for the pair. One row a window, in the order of the examples. Holds a batch of examples and
their windows. A long context is encoded in pieces, each cut proven by an encoding of both its sides.

And a user's word for a tokenizer -> what windows are made with: tokenizer.json with memory tokens, and the template.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError
from milldam.files import hash_bytes
from milldam.qa.examples import Example
from milldam.qa.settings import QARules
from milldam.qa.spans import Chosen, choose_answer, overlapping_tokens
from milldam.qa.store import NUMBERS, Form, MemoryTokens
from milldam.qa.template import Special, Template, add_memory_tokens, template_of, with_memory
from milldam.tokenizers.loading import load_tokenizer

VERSION = 2
"""Another number for every change that gives other windows."""
QUESTION_TOO_LONG, NO_TOKENS, TOO_LARGE, NO_CUT = "question_too_long", "no_tokens", "too_large", "no_place_to_cut"
"""Why an example is dropped. no_tokens: neither text has any, and the tokenizer adds none. too_large: its windows are
more than `MOST_WINDOW_BYTES`. no_place_to_cut: its context can't be encoded in pieces."""
MOST_WINDOW_BYTES = 32 << 20
"""Of one example: they are made and stored together."""
PIECE, _AROUND, _TRIES = 64_000, 256, 32
"""Characters of a context that are encoded in one call, those on each side of a cut that prove it, and places that are
tried."""
_WORD_MARKER = "\u2581"

Ids = npt.NDArray[np.int32]


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
    """(windows, 9): `NUMBERS`; `example` counts in what was given."""
    chosen: list[Chosen]
    """The answer of each example."""
    dropped: dict[int, str]
    """Examples without windows: position -> reason."""

    def __len__(self) -> int:
        return len(self.input_ids)

    def column(self, name: str) -> npt.NDArray[np.int32]:
        """One of `NUMBERS`."""
        column: npt.NDArray[np.int32] = self.numbers[:, NUMBERS.index(name)]
        return column


@dataclass(frozen=True, slots=True)
class _Encoded:
    ids: Ids
    offsets: npt.NDArray[np.int32]


class Windower:
    """`windower(examples)` -> their windows."""

    def __init__(self, tokenizer: Any, rules: QARules, template: Template) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer, self._rules, self._template = tokenizer, rules, template
        self._marker = tokenizer.token_to_id(_WORD_MARKER)
        # Not the size: a vocabulary may have gaps.
        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._dtype = np.uint16 if largest < 1 << 16 else np.int32
        # Rules under which nothing, or nothing but short contexts, could become windows.
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
        own = template
        read, write = Special(own.memory_read, (own.first_type,)), Special(own.memory_write, (own.second_type,))
        self._head, self._between = _joined(own.before, read), _joined(own.between)
        self._tail = _joined(write, own.after)

    def __call__(self, examples: Sequence[Example]) -> Windows:
        # White space in front of a question says nothing, and some tokenizers would make tokens of it.
        # Ids alone: without offsets it is faster.
        questions = [
            np.array(found.ids, np.int32)
            for found in self._tokenizer.encode_batch_fast(
                [example.question.lstrip() for example in examples], add_special_tokens=False
            )
        ]
        # Questions on one context follow each other: it is encoded once.
        distinct = list(dict.fromkeys(example.context for example in examples))
        known = dict(zip(distinct, self._encode(distinct), strict=True))
        chosen = [choose_answer(example) for example in examples]
        cuts: list[list[tuple[int, int]]] = []
        dropped: dict[int, str] = {}
        for number, (question, example) in enumerate(zip(questions, examples, strict=True)):
            context = known[example.context]
            found = NO_CUT if context is None else self._cut(len(question), len(context.ids))
            if isinstance(found, str):
                dropped[number] = found
            cuts.append([] if isinstance(found, str) else found)
        count, length, own = sum(map(len, cuts)), self._rules.max_seq_length, self._template
        made = Windows(
            np.full((count, length), own.pad_id, self._dtype),
            np.full((count, length), own.pad_type, np.uint8),
            np.full((count, length, 2), -1, np.int32),
            np.empty((count, len(NUMBERS)), np.int32),
            chosen,
            dropped,
        )
        row = 0
        for number, (example, cut) in enumerate(zip(examples, cuts, strict=True)):
            context, answer = known[example.context], chosen[number]
            if context is None:
                continue
            span = overlapping_tokens(context.offsets, answer.start, answer.stop) if answer else None
            for segment, part in enumerate(cut):
                numbers = self._fill(made, row, questions[number], context, part, span)
                made.numbers[row] = (*numbers, segment, len(cut), number)
                row += 1
        return made

    # ---- texts to tokens ----

    def _encode(self, texts: list[str]) -> Iterator[_Encoded | None]:
        """None: a long text that could not be cut into pieces."""
        short = [text for text in texts if len(text) <= PIECE]
        encoded = iter(self._tokenizer.encode_batch(short, add_special_tokens=False))
        for text in texts:
            if len(text) <= PIECE:
                one = next(encoded)
                found: _Encoded | None = _Encoded(
                    np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2)
                )
            else:
                found = self._in_pieces(text)
            # A marker alone stands for the space before a word; where there is none, it is said to cover the word's
            # first character, which the next token has, too.
            if found is not None and self._marker is not None:
                alone = np.flatnonzero(found.ids[:-1] == self._marker)
                alone = alone[found.offsets[alone + 1, 0] < found.offsets[alone, 1]]
                found.offsets[alone, 1] = found.offsets[alone, 0]
            yield found

    def _tokens(self, text: str, shift: int = 0) -> npt.NDArray[np.int32]:
        """(tokens, 3): ids and offsets."""
        one = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(one.offsets, np.int32).reshape(-1, 2) + shift
        return np.column_stack((np.array(one.ids, np.int32), offsets.astype(np.int32)))

    def _in_pieces(self, text: str) -> _Encoded | None:
        """Cut about every `PIECE`, at white space if possible. A cut holds where the last tokens before it and the
        first ones behind it stand side by side in an encoding of the text around it."""
        parts, begin = [], 0
        while len(text) - begin > PIECE:
            for stop in _places(text, begin + PIECE - _TRIES * _AROUND, begin + PIECE):
                around = self._tokens(text[stop - _AROUND : stop + _AROUND], stop - _AROUND)
                left, right = around[around[:, 2] <= stop], around[around[:, 1] >= stop]
                last, first = left[len(left) // 2 :], right[: (len(right) + 1) // 2]
                behind = self._tokens(text[stop : stop + _AROUND], stop)
                if not len(left) or len(left) + len(right) < len(around) or not _begins(behind, first):
                    continue
                piece = self._tokens(text[begin:stop], begin)
                if np.array_equal(piece[-len(last) :], last):
                    break
            else:
                return None
            parts.append(piece)
            begin = stop
        tokens = np.concatenate([*parts, self._tokens(text[begin:], begin)])
        return _Encoded(np.ascontiguousarray(tokens[:, 0]), np.ascontiguousarray(tokens[:, 1:]))

    # ---- tokens to windows ----

    @cached_property
    def _has_edge(self) -> bool:
        """Whether a window without a question has a token that is not of the context, for "no answer" to point to."""
        own = self._template
        if own.cls_id is not None:
            return True
        return bool(own.memory_write or own.after if own.context_first else own.before or own.memory_read)

    def _cut(self, question: int, context: int) -> list[tuple[int, int]] | str:
        """The parts of a context that windows hold; or why there are none."""
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
        self, made: Windows, row: int, question: Ids, context: _Encoded, part: tuple[int, int], span: Any
    ) -> tuple[int, ...]:
        """Write one window, a few whole parts at a time; its first numbers."""
        own, (first, stop) = self._template, part
        count = stop - first
        length = own.taken + len(question) + count
        begin = self._rules.max_seq_length - length if own.pad_left else 0
        texts = (context.ids[first:stop], question) if own.context_first else (question, context.ids[first:stop])
        ids, types = made.input_ids[row], made.token_type_ids[row]
        at = begin
        places = []
        for parts, text, kind in ((self._head, texts[0], own.first_type), (self._between, texts[1], own.second_type)):
            special, kinds = parts
            text_at = at + len(special)
            ids[at:text_at], types[at:text_at] = special, kinds
            at = text_at + len(text)
            ids[text_at:at], types[text_at:at] = text, kind
            places.append(text_at)
        ids[at : begin + length], types[at : begin + length] = self._tail
        context_at = places[0 if own.context_first else 1]
        made.offsets[row, context_at : context_at + count] = context.offsets[first:stop]
        cls = begin + self._cls_at(length)
        inside = span is not None and first <= span[0] and span[1] < stop
        start, end = (context_at + place - first for place in span) if inside else (cls, cls)
        return length, start, end, cls, context_at, count

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


def _begins(tokens: npt.NDArray[Any], first: npt.NDArray[Any]) -> bool:
    return np.array_equal(tokens[: len(first)], first)


def _places(text: str, least: int, most: int) -> Iterator[int]:
    """Where a text may be cut, from the surest: before white space, then anywhere."""
    spaces = (at for at in range(most, least, -1) if text[at].isspace() and not text[at - 1].isspace())
    found = list(itertools.islice(spaces, _TRIES))
    return itertools.chain(found, range(most, most - _TRIES, -1))


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

    def form(self, rules: QARules) -> Form:
        dtype = "uint16" if self.vocab_size <= 1 << 16 else "int32"
        own = self.template
        around = len(own.before), len(own.after)
        memory = MemoryTokens(own.memory_read, own.memory_write)
        return Form(rules.max_seq_length, dtype, own.pad_id, own.pad_type, own.pad_left, *around, memory)


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
