"""A conversation -> its text, with the stretches of characters that are trained on.

What a template refuses, and what can't be proven, raises BadRowError, with a reason to count by and a message.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from milldam.chat.forms import BadRowError, Conversation, Message
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import ASSISTANT, REASONING, Masks, NothingToTrainError, NotProvenError, TrainOn, in_parts
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate, Rendering, Stretch


class Renderer:
    """Renders conversations by a template, or another one where they have tools, and finds what is trained on."""

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

    def show(self, conversation: Conversation) -> tuple[Rendering, list[Stretch]]:
        """A conversation with its trained stretches of characters; BadRowError if it is refused."""
        try:
            rendering, stretches = self._template_for(conversation).render(conversation)
            if not rendering.text.isascii():
                rendering.text.encode()
            return rendering, stretches
        except UnicodeEncodeError as error:
            raise BadRowError("bad_unicode", f"half a character: {error}") from None
        except TemplateRefusedError as error:
            raise BadRowError("template_refused", str(error)) from None
        except NothingToTrainError as error:
            answers = any(one["role"] == ASSISTANT for one in conversation.messages[conversation.prompt_messages :])
            asked = self._rule.roles == (ASSISTANT,) and self._rule.field is None
            raise BadRowError("no_assistant" if asked and not answers else "nothing_to_train_on", str(error)) from None
        except NotProvenError as error:
            raise BadRowError("mask_not_proven", str(error)) from None

    def derives(self, conversation: Conversation) -> bool:
        """Whether its stretches are derived, not everything or tagged."""
        return self._template_for(conversation).derives(conversation)

    def by_turn(self, conversation: Conversation) -> list[Conversation]:
        """Examples whose trained turns are as a model sees them at inference.

        Trained turns that the template leaves as they are when the next one follows share one; of each example the
        turns of those before it are not trained on. Where nothing is rewritten, that is the conversation itself.
        """
        with contextlib.suppress(BadRowError, NotProvenError, TemplateRefusedError):  # raised when it is rendered
            return self._template_for(conversation).by_turn(conversation)
        return [conversation]

    def says_special(self, conversation: Conversation) -> bool:
        """Whether there are special tokens in what is said."""
        search, letter = self._special_in, self._special_letter
        if search is None:
            return False
        for message in conversation.messages:
            text = message.get("content")
            if type(text) is str and letter in text and search(text):
                return True
        return False

    def _template_for(self, conversation: Conversation) -> _Template:
        return self._plain if conversation.tools is None else self._with_tools


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

        def writes(word: str, *messages: Message) -> bool:
            try:
                return word in self.template.render(messages).text
            except TemplateRefusedError:
                return False

        said = {"role": "user", "content": "Aq7"}
        self._in_parts = not writes("Aq7", said) and writes("Aq7", said | {"content": in_parts("Aq7")})
        call = {"type": "function", "function": {"name": "f", "arguments": '{"k9": 1}'}}
        self._parses = not writes('{"k9": 1}', said, {"role": ASSISTANT, "content": "", "tool_calls": [call]})
        """A template that writes arguments by `tojson` would quote those that are JSON already."""
        self._masks = Masks(self.template, rule, in_parts=self._in_parts)

    def render(self, conversation: Conversation) -> tuple[Rendering, list[Stretch]]:
        messages, prompt = self._fitting(conversation.messages), conversation.prompt_messages
        return self._masks.find(messages, conversation.tools, conversation.variables, prompt_messages=prompt)

    def derives(self, conversation: Conversation) -> bool:
        if self._masks.rule.everything:
            return False
        return not self._masks.tagged(conversation.messages, conversation.prompt_messages)

    def by_turn(self, conversation: Conversation) -> list[Conversation]:
        messages, tools = self._fitting(conversation.messages), conversation.tools
        wanted = self._masks.rule.messages(messages, conversation.prompt_messages)
        examples, first = list[Conversation](), wanted[0]
        for number, after in itertools.pairwise(wanted):
            asked = self.template.render(messages[: number + 1], tools, **conversation.variables)
            end = max((end for _, end in asked.turns.get(number, ())), default=len(asked.text))
            longer = self.template.render(messages[: after + 1], tools, **conversation.variables).text
            if not longer.startswith(asked.text[:end]):
                some = conversation.messages[: number + 1]
                examples.append(replace(conversation, messages=some, prompt_messages=first))
                first = after
        return [*examples, replace(conversation, prompt_messages=first)] if examples else [conversation]

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


def prompt_of(conversation: Conversation) -> str:
    """What was asked: what is said before the last answer, or in the messages of the prompt.

    >>> prompt_of(Conversation([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]))
    'Hi'
    """
    messages = conversation.messages
    end = conversation.prompt_messages or max(
        (number for number, message in enumerate(messages) if message["role"] == ASSISTANT), default=len(messages)
    )
    return "\n".join(text for message in messages[:end] if isinstance(text := message.get("content"), str))


def in_bytes(text: str, stretches: Sequence[Stretch]) -> list[Stretch]:
    """Stretches of characters, in order -> stretches of bytes in UTF-8."""
    if text.isascii():
        return list(stretches)
    pairs, at, size = [], 0, 0
    for begin, end in stretches:
        start = size + len(text[at:begin].encode())
        size = start + len(text[begin:end].encode())
        at = end
        pairs.append((start, size))
    return pairs
