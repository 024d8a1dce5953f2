"""Conversations -> texts with the stretches of bytes that are trained on.

A batch goes in, and comes out as flat arrays; what a template refuses, and what can't be proven, comes out as rejects,
each with its number, a reason to count by and a message. Of a pair both sides come out, or neither.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from milldam.chat.forms import BadRowError, Conversation, Message, Pair
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import ASSISTANT, REASONING, Masks, NothingToTrainError, NotProvenError, TrainOn, in_parts
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate, Rendering, Stretch

Int64s = npt.NDArray[np.int64]

REFUSED, NOT_PROVEN = "template_refused", "mask_not_proven"
NO_ASSISTANT, NOTHING, BAD_UNICODE = "no_assistant", "nothing_to_train_on", "bad_unicode"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A conversation that gave no text."""

    number: int
    """Its place in the batch."""
    reason: str
    message: str


@dataclass(slots=True)
class RenderedBatch:
    """What a batch of conversations gave. Documents 2k and 2k + 1 are a pair where pairs came in."""

    texts: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Which conversation of the batch each text is of."""
    sides: list[Conversation] = field(default_factory=list)
    """Which one each text is of: of a pair both."""
    stretches: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """(stretches, 2): bytes of the text in UTF-8, from and to, that are trained on."""
    offsets: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    """(texts + 1,): where the stretches of each text begin."""
    derived: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """(texts,): whether the stretches of each were derived; else they are everything, or what the template tags."""
    rejects: list[Rejected] = field(default_factory=list)
    with_special_tokens: int = 0
    """Texts of conversations in which special tokens are said."""


class Renderer:
    """Renders conversations by a template, and finds what is trained on."""

    def __init__(self, source: TemplateSource, rule: TrainOn, *, special_tokens: Iterable[str] = ()) -> None:
        self._plain = _Template(source.text, source, rule)
        self._with_tools = self._plain if source.tool_text is None else _Template(source.tool_text, source, rule)
        self._rule = rule
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special_in = re.compile("|".join(map(re.escape, tokens))).search if tokens else None
        letters = {token[0] for token in tokens}
        self._special_letter = letters.pop() if len(letters) == 1 else ""
        """What all begin with, found ten times as fast: most texts do not even have that."""

    @property
    def tagged(self) -> bool:
        """Whether the template says itself what the assistant writes."""
        return self._plain.template.tagged

    def render(self, batch: Iterable[Conversation | Pair]) -> RenderedBatch:
        """The texts of a batch, of which each conversation is rendered as soon as it is read."""
        done = RenderedBatch()
        pairs: list[Stretch] = []
        ends, derived = [0], []
        for number, one in enumerate(batch):
            sides = (one.chosen, one.rejected) if isinstance(one, Pair) else (one,)
            try:
                shown = [self.show(side) for side in sides]
            except BadRowError as error:
                done.rejects.append(Rejected(number, error.reason, str(error)))
                continue
            for side, (rendering, stretches) in zip(sides, shown, strict=True):
                text = rendering.text
                pairs += stretches if text.isascii() else in_bytes(text, stretches)
                ends.append(len(pairs))
                done.texts.append(text)
                done.numbers.append(number)
                done.sides.append(side)
                derived.append(self._template_for(side).derives(side))
                done.with_special_tokens += self._says_special(side)
        done.stretches = np.array(pairs, np.int64).reshape(-1, 2)
        done.offsets, done.derived = np.array(ends, np.int64), np.array(derived, np.bool_)
        return done

    def show(self, conversation: Conversation) -> tuple[Rendering, list[Stretch]]:
        """One conversation with its stretches of characters; BadRowError if it is refused."""
        try:
            rendering, stretches = self._template_for(conversation).render(conversation)
            if not rendering.text.isascii():
                rendering.text.encode()
            return rendering, stretches
        except UnicodeEncodeError as error:
            raise BadRowError(BAD_UNICODE, f"half a character: {error}") from None
        except TemplateRefusedError as error:
            raise BadRowError(REFUSED, str(error)) from None
        except NothingToTrainError as error:
            answers = any(one["role"] == ASSISTANT for one in conversation.messages[conversation.prompt_messages :])
            asked = self._rule.roles == (ASSISTANT,) and self._rule.field is None
            reason = NO_ASSISTANT if asked and not answers else NOTHING
            raise BadRowError(reason, str(error)) from None
        except NotProvenError as error:
            raise BadRowError(NOT_PROVEN, str(error)) from None

    def by_turn(self, conversation: Conversation) -> list[Conversation]:
        """One for each trained turn, as a model sees it at inference, where the template writes that turn or one before
        it in another way once others follow; else the conversation itself."""
        with contextlib.suppress(BadRowError, NotProvenError, TemplateRefusedError):  # told when it is rendered
            return self._template_for(conversation).by_turn(conversation)
        return [conversation]

    def _template_for(self, conversation: Conversation) -> _Template:
        return self._plain if conversation.tools is None else self._with_tools

    def count(self, side: Conversation, text: str, trained: int) -> Counter[str]:
        """Turns in all and by role, characters, special tokens; `trained`: characters of all stretches."""
        counts = Counter([f"turns_{message['role']}" for message in side.messages])
        counts |= Counter(conversations=1, turns=len(side.messages), characters=len(text), trained_characters=trained)
        return counts | Counter(special_tokens_in_content=int(self._says_special(side)))

    def _says_special(self, side: Conversation) -> bool:
        """Whether there are special tokens in what is said."""
        search, letter = self._special_in, self._special_letter
        if search is None:
            return False
        for message in side.messages:
            text = message.get("content")
            if type(text) is str and letter in text and search(text):
                return True
        return False


_idle: dict[str, Renderer] = {}
"""One at most, by its settings. Taking it out is atomic: a thread that reads ahead may outlive its unit."""


@contextmanager
def shared_renderer(source: TemplateSource, rule: TrainOn, special_tokens: tuple[str, ...]) -> Iterator[Renderer]:
    """One that nobody else uses: the one that the last unit left, if it has the same settings."""
    settings = repr((source, rule, special_tokens))
    renderer = _idle.pop(settings, None) or Renderer(source, rule, special_tokens=special_tokens)
    try:
        yield renderer
    finally:
        _idle.clear()
        _idle[settings] = renderer


class _Template:
    """A template, its masks, and the form in which it takes messages."""

    def __init__(self, text: str, source: TemplateSource, rule: TrainOn) -> None:
        self.template = ChatTemplate(text, source.variables, source.date)
        self._in_parts = not self._writes([{"role": "user", "content": "Aq7"}], "Aq7") and self._writes(
            [{"role": "user", "content": in_parts("Aq7")}], "Aq7"
        )
        self._masks = Masks(self.template, rule, in_parts=self._in_parts)
        call = {"type": "function", "function": {"name": "f", "arguments": '{"k9": 1}'}}
        asked: list[Message] = [
            {"role": "user", "content": "q"},
            {"role": ASSISTANT, "content": "", "tool_calls": [call]},
        ]
        self._parses = not self._writes(asked, '{"k9": 1}')
        """A template that writes arguments by `tojson` would quote those that are JSON already."""

    def _writes(self, messages: list[Message], word: str) -> bool:
        try:
            return word in self.template.render(messages).text
        except TemplateRefusedError:
            return False

    def render(self, conversation: Conversation) -> tuple[Rendering, list[Stretch]]:
        messages, prompt = self._fitting(conversation.messages), conversation.prompt_messages
        return self._masks.find(messages, conversation.tools, conversation.variables, prompt_messages=prompt)

    def derives(self, conversation: Conversation) -> bool:
        """Whether its stretches are derived, not everything or tagged."""
        if self._masks.rule.everything:
            return False
        return not self._masks.tagged(conversation.messages, conversation.prompt_messages)

    def by_turn(self, conversation: Conversation) -> list[Conversation]:
        messages, tools = self._fitting(conversation.messages), conversation.tools
        wanted = self._masks.rule.messages(messages, conversation.prompt_messages)
        examples: list[Conversation] = []
        first = wanted[0]
        for number, after in zip(wanted, [*wanted[1:], len(messages)], strict=True):
            asked = self.template.render(messages[: number + 1], tools, **conversation.variables)
            end = max((end for _, end in asked.turns.get(number, ())), default=len(asked.text))
            longer = self.template.render(messages[: after + 1], tools, **conversation.variables).text
            if number == wanted[-1] or not longer.startswith(asked.text[:end]):
                some = conversation.messages[: number + 1] if number < wanted[-1] else conversation.messages
                examples.append(replace(conversation, messages=some, prompt_messages=first, roles=None))
                first = after
        return examples if len(examples) > 1 else [conversation]

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """As the template takes them: some that know of images take texts in parts alone."""
        fields = set().union(*messages)
        if not fields.isdisjoint(REASONING):
            messages = [_with_reasoning(message) for message in messages]
        if self._in_parts:
            messages = [
                message | {"content": in_parts(message["content"])}
                if isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
        if self._parses and "tool_calls" in fields:
            messages = [_with_parsed_arguments(message) if "tool_calls" in message else message for message in messages]
        return messages


def _with_reasoning(message: Message) -> Message:
    """Under all names that templates have for it, as transformers gives it to them."""
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said} | message | {"reasoning_content": said}


def _with_parsed_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                call = call | {"function": function | {"arguments": json.loads(function["arguments"])}}
            except (ValueError, RecursionError):
                raise BadRowError("bad_tool_call", "the arguments of a tool call are not JSON") from None
        calls.append(call)
    return message | {"tool_calls": calls}


def _contents(messages: Iterable[Message]) -> list[str]:
    return [text for message in messages if isinstance(text := message.get("content"), str)]


def prompt_of(conversation: Conversation) -> str:
    """What was asked: what is said before the last answer, or in the messages of the prompt.

    >>> prompt_of(Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]))
    'Hi'
    """
    messages = conversation.messages
    end = conversation.prompt_messages or max(
        (number for number, message in enumerate(messages) if message["role"] == ASSISTANT), default=len(messages)
    )
    return "\n".join(_contents(messages[:end]))


def in_bytes(text: str, stretches: Sequence[Stretch]) -> list[Stretch]:
    """Stretches of characters, in order -> stretches of bytes in UTF-8."""
    if text.isascii():
        return list(stretches)
    found, at, size = [], 0, 0
    for begin, end in stretches:
        start = size + len(text[at:begin].encode())
        size = start + len(text[begin:end].encode())
        at = end
        found.append((start, size))
    return found
