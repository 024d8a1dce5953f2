"""Chat templates: a conversation -> its text, and where in it messages, `{% generation %}` blocks and words lie.

Templates are those that models ship (Jinja). They run in a sandbox (sandbox.py) and, if asked, on words that know who
said them (words.py). Positions are taken while the text is written: one rendering, linear in the number of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2.runtime import Context

from milldam.chat.forms import Message
from milldam.chat.sandbox import Sandbox, TemplateRefusedError
from milldam.chat.words import Source, joined_words, marked, pieces_of
from milldam.errors import ConfigError

GIVEN = ("messages", "tools", "add_generation_prompt")
MOST_CHARACTERS = 64 << 20
"""Of a text."""
_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError),
    *(RecursionError, TypeError, ValueError),
)
"""What a template's own mistakes raise."""

Stretch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendering:
    """The text of a conversation. Positions count characters; ends are exclusive."""

    text: str
    generated: list[Stretch]
    """What stands in `{% generation %}` blocks."""
    turns: dict[int, list[Stretch]]
    """What was written for each message: one stretch, or several where a template goes over the messages again."""
    words: list[tuple[int, int, Source]]
    """Where words of the conversation lie, and whose they are, in order; empty unless they were followed."""


class ChatTemplate:
    """A compiled template with the tokenizer's special tokens and the user's variables.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}]).text
    '<user>Hello'
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, date: datetime | None = None) -> None:
        """`date`: what `strftime_now` gives; None: the time at which the template is made."""
        for name in GIVEN:
            if name in (variables or {}):
                raise ConfigError(f"{name} is not a template variable that can be set: it comes from the conversation.")
        self._sandbox = Sandbox(date or datetime.now())
        try:
            self._template = self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template can't be read: line {error.lineno}: {error.message}.") from None
        except RecursionError:
            raise ConfigError("The chat template can't be read: it is nested too deeply.") from None
        self._variables = {**self._template.globals, "documents": None, **(variables or {})}
        self.tagged = self._sandbox.tagged
        """Whether it has `{% generation %}` blocks."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        generation_prompt: bool = False,
        follow: bool = False,
        **variables: Any,
    ) -> Rendering:
        """The text, or TemplateRefusedError with the template's own words. `follow`: tell whose words it writes."""
        # Each message is an object of its own: where the template is with it is told by that.
        sandbox, template = self._sandbox, self._template
        if follow:
            given = marked(list(messages), ("messages",)), marked(tools, ("tools",))
        else:
            given = [message.copy() for message in messages], tools
        sandbox.begin(given[0])
        # As `Template.generate` does it, which takes twice the time.
        names = self._variables | variables | dict(zip(GIVEN, (*given, generation_prompt), strict=True))
        chunks: list[str] = []
        try:
            context = Context(sandbox, names, template.name, template.blocks)
            for chunk in template.root_render_func(context):
                chunks.append(chunk)
                sandbox.position += len(chunk)
                if sandbox.position > MOST_CHARACTERS:
                    raise TemplateRefusedError(f"the text has more than {MOST_CHARACTERS:,} characters")
        except TemplateRefusedError:
            raise
        except _FAILURES as error:
            raise TemplateRefusedError(_words_of(error)) from None
        text = "".join(chunks)
        words: list[tuple[int, int, Source]] = []
        at = 0
        for piece, source in pieces_of(joined_words(chunks)) if follow else ():
            if source is not None:
                words.append((at, at + len(piece), source))
            at += len(piece)
        return Rendering(text, sandbox.generated_in(text), sandbox.turns(), words)


def _words_of(error: BaseException) -> str:
    words = str(getattr(error, "message", None) or error or type(error).__name__)[:300]
    words = words.replace("'WordsObject'", "'dict'").replace("'Words'", "'str'")
    if words.endswith("_token' is undefined"):
        words += ": the tokenizer's files name none; set it as a variable of the template"
    return words
