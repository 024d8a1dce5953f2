"""A conversation -> its text, with the stretches of characters that are trained on.

What a template refuses, and what can't be proven, raises BadRowError, with a reason to count by and a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from milldam.chat.forms import BadRowError, Conversation
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import ASSISTANT, Masks, TrainOn
from milldam.chat.template import ChatTemplate, Rendering, Stretch


class Renderer:
    """Renders conversations by a template, or another one where they have tools, and finds what is trained on."""

    def __init__(self, source: TemplateSource, rule: TrainOn, *, special_tokens: Iterable[str] = ()) -> None:
        plain, tool_text = Masks(ChatTemplate(source.text, source.variables, source.date), rule), source.tool_text
        self._plain = self._with_tools = plain
        if tool_text is not None:
            self._with_tools = Masks(ChatTemplate(tool_text, source.variables, source.date), rule)
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
        rendering, stretches = self.masks(conversation).find(conversation)
        if not rendering.text.isascii():
            try:
                rendering.text.encode()
            except UnicodeEncodeError as error:
                raise BadRowError("bad_unicode", f"half a character: {error}") from None
        return rendering, stretches

    def masks(self, conversation: Conversation) -> Masks:
        return self._plain if conversation.tools is None else self._with_tools

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
