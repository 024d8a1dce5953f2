"""Conversations -> texts with the stretches of bytes that are trained on.

A batch goes in, and comes out as flat arrays; what a template refuses, and what can't be proven, comes out as rejects,
each with its number, a reason to count by and the words for it. Of a pair both sides come out, or neither. Nothing is
kept between batches but what is known of the template.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from milldam.chat.bounds import TemplateRefusedError
from milldam.chat.forms import BadRowError, Conversation, Message, Pair
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import ASSISTANT, REASONING, Masks, NothingToTrainError, NotProvenError, TrainOn, in_parts
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
    prompts: list[str] = field(default_factory=list)
    """What each was asked: the same for both sides of a pair."""
    labels: list[bool | None] = field(default_factory=list)
    stretches: Int64s = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    """(stretches, 2): bytes of the text in UTF-8, from and to, that are trained on."""
    offsets: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    """(texts + 1,): where the stretches of each text begin."""
    rejects: list[Rejected] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """conversations, turns, turns_ROLE, characters, trained_characters, special_tokens_in_content."""


@dataclass(frozen=True, slots=True)
class _Side:
    """A conversation as a text."""

    text: str
    stretches: list[Stretch]
    conversation: Conversation


class Renderer:
    """Renders conversations by a template, and finds what is trained on."""

    def __init__(self, source: TemplateSource, rule: TrainOn, *, special_tokens: Iterable[str] = ()) -> None:
        self._plain = _Template(source.text, source, rule)
        self._with_tools = self._plain if source.tool_text is None else _Template(source.tool_text, source, rule)
        self._rule = rule
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    @property
    def tagged(self) -> bool:
        """Whether the template says itself what the assistant writes."""
        return self._plain.template.tagged

    def render(self, batch: Sequence[Conversation | Pair]) -> RenderedBatch:
        done = RenderedBatch()
        pairs: list[Stretch] = []
        ends = [0]
        for number, one in enumerate(batch):
            try:
                sides = [self._side(side) for side in _sides(one)]
            except BadRowError as error:
                done.rejects.append(Rejected(number, error.reason, str(error)))
                continue
            prompt = prompt_of(sides[0].conversation)
            for side in sides:
                pairs += in_bytes(side.text, side.stretches)
                ends.append(len(pairs))
                done.texts.append(side.text)
                done.numbers.append(number)
                done.prompts.append(prompt)
                done.labels.append(side.conversation.label)
                self.count(done.counts, side.conversation, side.text, side.stretches)
        done.stretches = np.array(pairs, np.int64).reshape(-1, 2)
        done.offsets = np.array(ends, np.int64)
        return done

    def show(self, conversation: Conversation) -> tuple[Rendering, list[Stretch]]:
        """One conversation with its stretches of characters; BadRowError if it is refused."""
        template = self._with_tools if conversation.tools is not None else self._plain
        try:
            return template.render(conversation)
        except TemplateRefusedError as error:
            raise BadRowError(REFUSED, str(error)) from None
        except NothingToTrainError as error:
            reason = NO_ASSISTANT if self._rule.roles == (ASSISTANT,) and self._rule.field is None else NOTHING
            raise BadRowError(reason, str(error)) from None
        except NotProvenError as error:
            raise BadRowError(NOT_PROVEN, str(error)) from None

    def _side(self, conversation: Conversation) -> _Side:
        rendering, stretches = self.show(conversation)
        try:
            rendering.text.isascii() or rendering.text.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(BAD_UNICODE, f"half a character: {error}") from None
        return _Side(rendering.text, stretches, conversation)

    def count(self, counts: Counter[str], conversation: Conversation, text: str, stretches: Sequence[Stretch]) -> None:
        """Add a conversation to the counts of RenderedBatch."""
        counts["conversations"] += 1
        counts["turns"] += len(conversation.messages)
        for message in conversation.messages:
            counts[f"turns_{message['role']}"] += 1
        counts["characters"] += len(text)
        counts["trained_characters"] += sum(end - begin for begin, end in stretches)
        if self._special is not None and any(map(self._special.search, _contents(conversation.messages))):
            counts["special_tokens_in_content"] += 1


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
        messages = self._fitting(conversation.messages)
        rendering = self.template.render(messages, conversation.tools, **conversation.variables)
        stretches = self._masks.find(
            messages,
            conversation.tools,
            rendering,
            conversation.variables,
            prompt_messages=conversation.prompt_messages,
        )
        return rendering, stretches

    def _fitting(self, messages: list[Message]) -> list[Message]:
        """As the template takes them: some that know of images take texts in parts alone."""
        if any(name in message for message in messages for name in REASONING):
            messages = [_with_reasoning(message) for message in messages]
        if self._in_parts:
            messages = [
                message | {"content": in_parts(message["content"])}
                if isinstance(message.get("content"), str)
                else message
                for message in messages
            ]
        if self._parses and any("tool_calls" in message for message in messages):
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
                raise BadRowError("bad_tool_call", "the arguments of a tool call are no JSON") from None
        calls.append(call)
    return message | {"tool_calls": calls}


def _sides(one: Conversation | Pair) -> tuple[Conversation, ...]:
    return (one.chosen, one.rejected) if isinstance(one, Pair) else (one,)


def _contents(messages: Iterable[Message]) -> Iterator[str]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content


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
