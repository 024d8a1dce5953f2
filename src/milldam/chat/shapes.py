"""Shapes of conversations: what a template makes of all conversations that differ in their words alone.

Conversations have the same form where their roles, the fields of their messages, and all values but texts are the
same; and where the same texts are empty. A conversation whose form was seen before is traced (tracing.py): what the
template wrote around the words, what it asked about them, and what is trained on, become a shape. Another conversation
of the form that gives the same answers is then put together from the shape, without a rendering.

A shape gives what the rendering gives, text and stretches, or nothing; then the template is asked as always:

- it was traced, so the words were not looked at but by the noted questions;
- no words that it writes are empty, also when stripped, so that places are in the same order as in the conversation
  that was traced;
- of a derived mask the proof is in the trace: words of trained messages stand in their own stretches alone, and no
  others do; the rendering with other words, by which masks.py proves it, would have given the same answers.

Each is compared with the rendering when it is learned, and again at its 1st, 2nd, 4th, 8th, ... use. Holds shapes of
50,000 words in all.

What is trained on in all conversations that a trace stands for: what masks.py finds for one, found for all of them.

With `{% generation %}` it is what stands in these blocks. Without, stretches are found as for one conversation, as long
as headers and ends lie within literals; and the proof needs no other words, since a trace tells which words are where:
those of a trained message stand in its own stretch alone, and no others do. What is not sure raises NotProvenError.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from milldam.chat.forms import content_of, plain_roles
from milldam.chat.masks import REASONING, Masks, NotProvenError, block_of, is_tag, other_text
from milldam.chat.template import ChatTemplate, Message, Position, Stretch, joined
from milldam.chat.tracing import ASKED, Answer, Path, Span, Trace, Tracer, Words, is_object, is_role, starts
from milldam.errors import MilldamError


def find_traced(
    masks: Masks, trace: Trace, messages: Sequence[Message], prompt_messages: int
) -> tuple[list[Span], list[int]]:
    """The spans; and of each that was derived, the number of words in it, which must not be white space."""
    text = _Text(trace)
    if masks.rule.everything:
        return [((0, 0), text.end)], []
    wanted = masks.wanted(messages, prompt_messages)
    if masks.tagged(messages, wanted):
        return masks.by_tags(messages, wanted, trace), []
    found = []
    for number in wanted:
        header, is_last = masks.header(str(messages[number]["role"]), {}), number == len(messages) - 1
        block = text.behind(header.text, block_of(trace, number, messages), is_first=number == 0)
        if not masks.rule.turn_end:
            found.append(text.without(header.last_tail if is_last else header.tail, block))
        else:
            found.append(text.to_the_end(header.text.strip(), block) if is_last else block)
    if any(one[1] > other[0] for one, other in itertools.pairwise(found)):
        raise NotProvenError("turns are not in order")
    return joined(found), _proven_by(trace, wanted, found)


def _proven_by(trace: Trace, wanted: list[int], found: list[Span]) -> list[int]:
    """Words of trained messages stand in their stretches, one at least, and no others do."""
    owners = [one.path[1] if one.path[0] == "messages" else None for one in trace.words]
    inside: list[int] = []
    for number, ((_, first), (_, last)) in zip(wanted, found, strict=True):
        texts = [at for at in range(first, last) if _is_reworded(trace.words[at])]
        if any(owner != number for owner in owners[first:last]) or not texts:
            raise NotProvenError("words of several messages, or none, are in a stretch")
        inside.append(texts[0])
    count = sum(last - first for (_, first), (_, last) in found)
    if count != sum(owner in set(wanted) for owner in owners):
        raise NotProvenError("what is trained on is also written outside its own turn")
    return inside


def _is_reworded(words: Words) -> bool:
    """Whether masks.py would replace them by another text in its proof."""
    said, name = words.path[2], words.path[-1]
    in_call = said == "tool_calls" and name in ("arguments", "name")
    return words.made[:1] != ("json",) and (in_call or (said in ("content", *REASONING) and name in (said, "text")))


class _Text:
    """The literals of a trace end to end, and where words are between them."""

    def __init__(self, trace: Trace) -> None:
        self._literals = "".join(trace.literals)
        # A place behind all words, and one in front of them.
        self._starts = [*starts(trace.literals), len(self._literals)]
        self.end: Position = len(self._literals), len(trace.words)

    def behind(self, header: str, block: Span, *, is_first: bool) -> Span:
        """A block without its header, which must lie in front of all words."""
        (begin, words), end = block
        stop = min(self._starts[words], end[0])
        at = self._literals.find(header, begin, stop) if block[0] == (0, 0) or is_first else begin
        if at < 0 or not self._literals.startswith(header, at, stop):
            raise NotProvenError("a header is not where it can be told")
        return (at + len(header), words), end

    def without(self, tail: str, span: Span) -> Span:
        """A span without what ends it, which must lie behind all words."""
        (begin, _), (end, words) = span
        start = max(begin, self._starts[words - 1] if words else 0)
        if not self._literals.endswith(tail, start, end):
            raise NotProvenError("a turn's end is not where it can be told")
        return span[0], (end - len(tail), words)

    def to_the_end(self, header: str, span: Span) -> Span:
        """A span that goes on to the end, if no words and no turn are behind it."""
        end, words = span[1]
        if words != self.end[1] or (header and header in self._literals[end:]):
            raise NotProvenError("there is something after the last turn")
        return span[0], self.end


# ---- shapes ----

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

    def __init__(self, trace: Trace, spans: Sequence[Any], proven_by: Sequence[int]) -> None:
        """`proven_by`: of a derived mask, words in each stretch, by number, that must not be white space."""
        self.uses = 0
        self._pieces = [""] * (2 * len(trace.words) + 1)
        self._pieces[::2] = trace.literals
        self._spans = [(*begin, *end) for begin, end in spans]
        self._answers = [_Check(one, reworded=bool(proven_by) and not _same_reworded(one)) for one in trace.answers]
        self._proven_by = proven_by
        self._values = [(one.path[1], None) if _is_content(one) else (0, one) for one in trace.words]
        """Of each of the words the message whose content it is, or how to find it otherwise."""

    def fill(self, messages: Sequence[Message], tools: Any) -> Done | None:
        """The text of a conversation of the form; None if it has another shape."""
        values = [
            messages[number]["content"] if words is None else words.of(_value(messages, tools, words.path))
            for number, words in self._values
        ]
        if not all(values):
            return None
        for number in self._proven_by:
            if values[number].isspace():
                return None
        for answer in self._answers:
            if not answer.holds(messages, tools):
                return None
        ends = [0, *accumulate(map(len, values))]
        if ends[-1] > MOST_CHARACTERS:
            return None
        pieces = self._pieces.copy()
        pieces[1::2] = values
        stretches = [(begin + ends[first], end + ends[last]) for begin, first, end, last in self._spans]
        return "".join(pieces), stretches


class _Check:
    """Whether words give the answer that was noted; `reworded`: and other words in their place, too."""

    def __init__(self, answer: Answer, *, reworded: bool) -> None:
        self._words, self._other, self._said = answer.words, answer.other, answer.said
        self._asked, self._reworded = ASKED[answer.asked], reworded

    def holds(self, messages: Sequence[Message], tools: Any) -> bool:
        value = _value(messages, tools, self._words.path)
        if self._asked(self._words.of(value), self._other) != self._said:
            return False
        return not self._reworded or self._asked(self._words.of(other_text(value)), self._other) == self._said


def _is_content(words: Words) -> bool:
    """Whether they are what a message says, as it is."""
    return words.path[0::2] == ("messages", "content") and not words.made


def _same_reworded(answer: Answer) -> bool:
    """Whether other words (masks.other_text) always give the same answer: they keep tags and what is white space."""
    how, letters = answer.words.made or ("strip", None)
    if how == "json":
        return answer.asked == "true"
    if letters is not None and not letters.isspace():
        return False
    tag = answer.other is not None and is_tag(answer.other)
    return answer.asked == "true" or (tag and answer.asked in ("holds", "startswith"))


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

    def __init__(self, template: ChatTemplate, masks: Masks) -> None:
        self._template, self._masks = template, masks
        self._tracer: Tracer | None = None
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

    def learn(self, messages: Sequence[Message], tools: Any, prompt_messages: int, done: Done) -> None:
        """A conversation was rendered. Where its form came before, learn its shape."""
        form = form_of(messages, tools, prompt_messages)
        if form is None or len(done[0]) > MOST_CHARACTERS:
            return
        if form not in self._known and len(self._known) >= _MOST_FORMS:
            return
        known = self._known.setdefault(form, _Known())
        if not known.seen or known.tries >= _MOST_TRIES or self._words > _MOST_WORDS:
            known.seen = True
            return
        known.tries += 1
        if self._tracer is None:
            self._tracer = Tracer(self._template)
        trace = self._tracer.trace(messages, tools)
        if trace is None:
            return
        self._words += len(trace.words)
        try:
            spans, proven_by = find_traced(self._masks, trace, messages, prompt_messages)
        except NotProvenError:
            return
        shape = Shape(trace, spans, proven_by)
        if shape.fill(messages, tools) == done:
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
    """As `tracing` puts unknowns into it: texts by their type, unless they are empty; all else by value."""
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
