"""Shapes of conversations: what a template makes of all conversations that differ in their words alone.

Conversations have the same form where their roles, the fields of their messages, and all values but texts are the
same; and where the same texts are empty. The second rendering of a form, with what is trained on, becomes a shape:
what the template wrote around the words, and what it asked about them. Another conversation of the form that gives the
same answers is then put together from the shape, without a rendering.

A shape gives what the rendering gives, text and stretches, or nothing; then the template is asked as always:

- all that the template did with words can be told (`Log.lost`): they were not looked at but by the noted questions;
- no words that it writes are empty, so that places are in the same order as in the conversation that was rendered;
- the proof of a derived mask is in the pieces: words of trained messages stand in their own stretches alone.

Each is compared with the rendering when it is learned, and again at its 1st, 2nd, 4th, 8th, ... use. Holds shapes of
50,000 words in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from milldam.chat.forms import content_of, plain_roles
from milldam.chat.said import Op, Path, Words, is_object, is_role
from milldam.chat.template import Message, Rendering, Stretch
from milldam.errors import MilldamError

MOST_CHARACTERS = 1 << 18
"""Of the words of a conversation. What a template makes of them is then far below its bounds, however it uses them."""
_MOST_WORDS = 50_000
"""Of all shapes."""
_MOST_FORMS = 10_000
_MOST_TRIES = 8
"""To learn a shape of a form."""
_DEEPEST, _LONGEST = 8, 1_000
Done = tuple[str, list[Stretch]]
"""A text, and the stretches of its characters that are trained on."""


class Shape:
    """What a template writes around the words of a conversation."""

    def __init__(self, rendering: Rendering, stretches: Sequence[Stretch], *, derived: bool) -> None:
        """`derived`: words in each stretch must not be white space."""
        literals, extents = [""], list(rendering.said())
        for piece, words in rendering.pieces:
            if words is None:
                literals[-1] += piece
            else:
                literals.append("")
        self.uses = 0
        self.words = len(extents)
        self._pieces = [""] * (2 * len(extents) + 1)
        self._pieces[::2] = literals
        # What is left of a border: literals, and so many words.
        lengths = [0, *accumulate(end - begin for begin, end, _ in extents)]
        before = [[sum(end <= border for _, end, _ in extents) for border in one] for one in stretches]
        self._spans = [
            (begin - lengths[first], first, end - lengths[last], last)
            for (begin, end), (first, last) in zip(stretches, before, strict=True)
        ]
        self._proven_by = [first for _, first, _, last in self._spans if first < last] if derived else []
        self._values = [(one.path[1], None) if _is_content(one) else (0, one) for _, _, one in extents]
        """Of each of the words the message whose content it is, or how to find it otherwise."""
        self._answers = list(rendering.log.answers.items())

    def fill(self, messages: Sequence[Message], tools: Any) -> Done | None:
        """The text of a conversation of the form; None if it has another shape."""
        for (words, op), answer in self._answers:
            if not _holds(words, op, answer, _value(messages, tools, words.path)):
                return None
        values = [
            messages[number]["content"] if words is None else words.of(_value(messages, tools, words.path))
            for number, words in self._values
        ]
        if not all(values) or any(values[number].isspace() for number in self._proven_by):
            return None
        ends = [0, *accumulate(map(len, values))]
        if ends[-1] > MOST_CHARACTERS:
            return None
        pieces = self._pieces.copy()
        pieces[1::2] = values
        stretches = [(begin + ends[first], end + ends[last]) for begin, first, end, last in self._spans]
        return "".join(pieces), stretches


def _holds(words: Words, op: Op, answer: Any, value: Any) -> bool:
    try:
        return bool(op.of(words.of(value)) == answer)
    except (LookupError, TypeError, ValueError):
        return False


def _is_content(words: Words) -> bool:
    """Whether they are what a message says, as it is."""
    return words.path[0::2] == ("messages", "content") and not words.ops


def _value(messages: Sequence[Message], tools: Any, path: Path) -> Any:
    value: Any = messages if path[0] == "messages" else tools
    for key in path[1:]:
        value = value[key]
    return value


@dataclass(slots=True)
class _Known:
    """What is known of a form."""

    shapes: list[Shape] = field(default_factory=list)
    tries: int = 0
    seen: bool = False


class Shapes:
    """Those that are known of one template and one rule of what is trained on."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}
        self._words = 0

    @property
    def is_full(self) -> bool:
        """Whether no more can be learned."""
        return len(self._known) >= _MOST_FORMS or self._words > _MOST_WORDS

    def fill(self, form: Any, messages: Sequence[Message], tools: Any) -> tuple[Done | None, bool]:
        """What a shape makes of a conversation, and whether it is time to compare it."""
        known = self._known.get(form)
        for shape in known.shapes if known is not None else ():
            done = shape.fill(messages, tools)
            if done is not None:
                shape.uses += 1
                return done, shape.uses & (shape.uses - 1) == 0
        return None, False

    def learn(
        self,
        messages: Sequence[Message],
        tools: Any,
        prompt_messages: int,
        rendering: Rendering,
        stretches: list[Stretch],
        *,
        derived: bool,
    ) -> None:
        """A conversation was rendered. Where its form came before, learn its shape."""
        form = form_of(messages, tools, prompt_messages)
        if form is None or len(rendering.text) > MOST_CHARACTERS:
            return
        if form not in self._known and len(self._known) >= _MOST_FORMS:
            return
        known = self._known.setdefault(form, _Known())
        if not known.seen or known.tries >= _MOST_TRIES or self._words > _MOST_WORDS:
            known.seen = True
            return
        known.tries += 1
        borders = [border for one in stretches for border in one]
        if rendering.log.lost or any(begin < at < end for begin, end, _ in rendering.said() for at in borders):
            return
        shape = Shape(rendering, stretches, derived=derived)
        self._words += shape.words
        if shape.fill(messages, tools) == (rendering.text, stretches):
            known.shapes.append(shape)


def require_same(filled: Done | None, rendered: Done | None) -> None:
    """Raise if a shape gave something else than the rendering."""
    if filled != rendered:
        raise MilldamError(
            "A learned shape of conversations gives another text or mask than the chat template. This is a bug in "
            f"milldam: please report the template. The text: {filled and filled[0][:200]!r}"
        )


def form_of(messages: Sequence[Message], tools: Any, prompt_messages: int, roles: tuple[str, ...] | None = None) -> Any:
    """What conversations of the same form have in common, to look them up by; None where it can't be told cheaply.

    `roles`: what forms.plain_roles says of the messages, if it was asked.

    >>> form_of([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], None, 0)
    ('user', 'assistant')
    """
    try:
        found = roles or plain_roles(messages)
        if found is None or not all(map(content_of, messages)):
            # Most are a role and a text: no function is called for them.
            found = tuple(
                [
                    one["role"]
                    if len(one) == 2 and type(text := one.get("content")) is str and text and next(iter(one)) == "role"
                    else _form(one, ("messages", 0))
                    for one in messages
                ]
            )
        if tools is None and not prompt_messages:
            return found
        return found, _form(tools, ("tools",)), prompt_messages
    except _OddError:
        return None


class _OddError(Exception):
    """Too deep or too long to be looked at."""


def _form(value: Any, path: Path) -> Any:
    """As `Log.told` puts words into it: texts by their type, unless they are empty; all else by value."""
    kind = type(value)
    if kind is str:
        return value if is_role(path) else str if value else ""
    if is_object(path):
        if kind is not dict:
            raise _OddError
        return dict
    if kind is dict or kind is list:
        if len(path) > _DEEPEST or len(value) > _LONGEST:
            raise _OddError
        items = value.items() if kind is dict else enumerate(value)
        # As for a text alone, without a call for each.
        is_message = len(path) == 2 and path[0] == "messages"
        return kind, *[
            (key, str)
            if type(one) is str and one and not (is_message and key == "role")
            else (key, _form(one, (*path, key)))
            for key, one in items
        ]
    if kind in (int, float, bool, type(None)):
        return kind, value
    raise _OddError
