"""Which stretches of a rendered conversation are trained on: taken from the template's own tags, or derived and proven.

A template with `{% generation %}` says itself what the assistant wrote, and that is taken as it stands. For one
without, a turn is what was written while the template's loop was at its message, less the header that all turns share:

    <|im_start|>assistant            header: never trained on; how the generation prompt begins
    \\nParis.                         what the assistant wrote
    <|im_end|>\\n                     the turn's end: trained on unless `turn_end` is off

That holds for a conversation only if it is proven for it:

- every trained message was written exactly once, behind its header;
- with other words in the trained messages nothing changes outside their stretches, while each of them does change;
- with other words in all other messages nothing changes within the stretches.

What is not proven raises NotProvenError, with the reason: never all, never none without a word. Three renderings a
conversation, and a dozen short ones for the template; linear in the number of messages.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from milldam.chat.bounds import TemplateRefusedError
from milldam.chat.forms import WEIGHT_FIELDS
from milldam.chat.template import ChatTemplate, Message, Rendering, Stretch, joined
from milldam.errors import ConfigError, MilldamError

ASSISTANT, LAST, ALL = "assistant", "last", "all"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What a message's reasoning may be called."""
_WORDS = ("Aq7", "Zk3w")
"""What no template treats in a way of its own."""
_LETTERS = str.maketrans(
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
    "bcdefghijklmnopqrstuvwxyzaBCDEFGHIJKLMNOPQRSTUVWXYZA1234567890",
)
_TAG = re.compile(r"(<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\])")
"""What a template may look for in a text: <think>, <tool_response>, [INST]."""


class NotProvenError(MilldamError):
    """What is trained on can't be told for certain."""


class NothingToTrainError(NotProvenError):
    """None of the messages is to be trained on."""


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Which messages are trained on: those of `roles`, or those whose `field` is 1; never one with a weight of 0."""

    roles: tuple[str, ...] = (ASSISTANT,)
    last: bool = False
    """Of these the last one alone."""
    everything: bool = False
    field: str | None = None
    turn_end: bool = True
    """Also on what ends a turn, such as <|im_end|>. Where a template has tags, they decide."""

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages that are trained on."""
        if self.field is not None:
            chosen = [n for n, one in enumerate(messages) if _weight(one, self.field, one["role"] == ASSISTANT)]
        else:
            chosen = [n for n, one in enumerate(messages) if one["role"] in self.roles]
        chosen = chosen[-1:] if self.last else chosen
        return [n for n in chosen if all(_weight(messages[n], name, True) for name in WEIGHT_FIELDS)]


def train_on(words: str | Sequence[str], *, turn_end: bool = True) -> TrainOn:
    """`assistant`, `last`, `all`, the name of a weight field, a role, or a list of roles.

    >>> train_on("last").last, train_on(["user", "assistant"]).roles, train_on("weight").field
    (True, ('user', 'assistant'), 'weight')
    """
    if not isinstance(words, str):
        if not words:
            raise ConfigError("train_on: no role is named. Nothing would be trained on.")
        return TrainOn(tuple(words), turn_end=turn_end)
    if words == ALL:
        return TrainOn(everything=True)
    if words in WEIGHT_FIELDS:
        return TrainOn(field=words, turn_end=turn_end)
    return TrainOn((ASSISTANT if words == LAST else words,), last=words == LAST, turn_end=turn_end)


def _weight(message: Message, field: str, default: bool) -> bool:
    value = message.get(field)
    if value is None:
        return default
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise NotProvenError(f"{field} is {value!r}, and only 0 and 1 can be trained by")


class Written(Protocol):
    """A rendering, or a trace that stands for many: places of either can be compared."""

    @property
    def generated(self) -> list[Any]: ...

    @property
    def turns(self) -> dict[int, list[Any]]: ...


class Masks:
    """Finds the trained stretches of conversations by one template."""

    def __init__(self, template: ChatTemplate, rule: TrainOn, *, in_parts: bool = False) -> None:
        """`in_parts`: the template takes contents as lists of parts."""
        self._template, self.rule = template, rule
        self._probing = _Probing(template, in_parts)
        self._headers: dict[tuple[str, str], _Header | str] = {}

    def find(
        self,
        messages: Sequence[Message],
        tools: Any,
        rendering: Rendering,
        variables: dict[str, Any],
        *,
        prompt_messages: int = 0,
    ) -> list[Stretch]:
        """Stretches of characters, in order, none empty; NotProvenError where they can't be told.

        The first `prompt_messages` are never trained on, unless everything is.
        """
        if self.rule.everything:
            if not all(_weight(one, name, True) for one in messages for name in WEIGHT_FIELDS):
                raise NotProvenError("a message has a weight of 0, and all is to be trained on")
            return joined([(0, len(rendering.text))])
        wanted = self.wanted(messages, prompt_messages)
        if self.tagged(messages, wanted):
            return self.by_tags(messages, wanted, rendering)
        return self._derived(_Given(messages, tools, variables), rendering, wanted)

    def wanted(self, messages: Sequence[Message], prompt_messages: int) -> list[int]:
        """The numbers of the messages to train on."""
        wanted = [n for n in self.rule.messages(messages) if n >= prompt_messages]
        if not wanted:
            raise NothingToTrainError("none of its messages is one to train on")
        return wanted

    # ---- by the template's tags ----

    def tagged(self, messages: Sequence[Message], wanted: list[int]) -> bool:
        """Whether the template's tags tell what is trained on."""
        return self._template.tagged and all(messages[n]["role"] == ASSISTANT for n in wanted)

    def by_tags(self, messages: Sequence[Message], wanted: list[int], written: Written) -> list[Any]:
        """Stretches of what was written, or of a trace of it."""
        found = written.generated
        assistants = [n for n, one in enumerate(messages) if one["role"] == ASSISTANT]
        if wanted != assistants:
            found = [one for n in wanted for one in _within(found, block_of(written, n, messages))]
        found = joined(found)
        if not found:
            raise NotProvenError("the template's {% generation %} blocks hold nothing of it")
        return found

    # ---- by what was written for each message ----

    def _derived(self, given: _Given, rendering: Rendering, wanted: list[int]) -> list[Stretch]:
        found = [self._stretch(given, number, rendering) for number in wanted]
        if any(one[1] > other[0] for one, other in itertools.pairwise(found)):
            raise NotProvenError("the template writes a turn within another one, or turns in another order")
        self._prove_outside(given, rendering, wanted, found)
        self._prove_within(given, rendering, wanted, found)
        return joined(found)

    def _prove_outside(self, given: _Given, rendering: Rendering, wanted: list[int], found: list[Stretch]) -> None:
        """With other words in the trained messages nothing changes but their stretches."""
        reworded, again = self._reworded(given, set(wanted))
        there = [self._stretch(reworded, number, again) for number in wanted]
        if _outside(rendering.text, found) != _outside(again.text, there):
            raise NotProvenError("what is trained on is also written outside its own turn")
        for number, one, other in zip(wanted, found, there, strict=True):
            same = rendering.text[slice(*one)] == again.text[slice(*other)]
            if same and reworded.messages[number] != given.messages[number]:
                raise NotProvenError(f"nothing that message {number} says is written by the template")

    def _prove_within(self, given: _Given, rendering: Rendering, wanted: list[int], found: list[Stretch]) -> None:
        """With other words in the messages that are not trained on the stretches stay as they are."""
        kept = set(wanted)
        reworded, again = self._reworded(given, {n for n in range(len(given.messages)) if n not in kept})
        for number, one in zip(wanted, found, strict=True):
            there = self._stretch(reworded, number, again)
            if rendering.text[slice(*one)] != again.text[slice(*there)]:
                raise NotProvenError(f"the turn of message {number} holds what other messages say")

    def _reworded(self, given: _Given, numbers: set[int]) -> tuple[_Given, Rendering]:
        messages = [_in_other_words(one) if n in numbers else one for n, one in enumerate(given.messages)]
        reworded = _Given(messages, given.tools, given.variables)
        try:
            return reworded, self._template.render(messages, given.tools, **given.variables)
        except TemplateRefusedError as error:
            raise NotProvenError(f"with other words in it the template refuses it ({error})") from None

    def _stretch(self, given: _Given, number: int, rendering: Rendering) -> Stretch:
        messages = given.messages
        begin, end = block_of(rendering, number, messages)
        header = self.header(str(messages[number]["role"]), given.variables)
        text = rendering.text
        # The first turn may come behind what begins the text, such as a default system prompt.
        at = text.find(header.text, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header.text, at, end):
            raise NotProvenError(f"message {number} does not begin with {header.text!r} as others of its role do")
        last = number == len(messages) - 1
        if not self.rule.turn_end:
            tail = header.last_tail if last else header.tail
            if not text.endswith(tail, at + len(header.text), end):
                raise NotProvenError(f"message {number} does not end with {tail!r} as others of its role do")
            end -= len(tail)
        elif last:
            # What is written behind all turns, such as an end token, ends the last one.
            if header.text.strip() and header.text.strip() in text[end:]:
                raise NotProvenError("the template begins another turn after the last one")
            end = len(text)
        return at + len(header.text), end

    def header(self, role: str, variables: dict[str, Any]) -> _Header:
        """What turns of a role begin and end with."""
        key = role, repr(variables) if variables else ""
        known = self._headers.get(key)
        if known is None:
            try:
                known = self._probing.header(role, variables)
            except (NotProvenError, TemplateRefusedError) as error:
                known = str(error)
            if len(self._headers) < 1000:
                self._headers[key] = known
        if isinstance(known, str):
            raise NotProvenError(known)
        return known


@dataclass(frozen=True, slots=True)
class _Given:
    """What a template is given."""

    messages: Sequence[Message]
    tools: Any
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Header:
    """What every turn of a role begins with, and what it ends with, before another one and as the last."""

    text: str
    tail: str
    last_tail: str


class _ButEmpty(list[Any]):
    """Tool calls that are there, and none: what a template writes for a turn in which nothing is said."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class _Probing:
    """Asks a template what it writes around what is said."""

    template: ChatTemplate
    in_parts: bool

    def header(self, role: str, variables: dict[str, Any]) -> _Header:
        """Turns of a role with all kinds of things said in them -> what they have in common."""
        plain = [self._says(role, word) for word in (*_WORDS, "")]
        odd: list[Message] = []
        if role == ASSISTANT:
            thought, called = self._says(role, _WORDS[0]), self._says(role, "")
            odd = [thought | {"reasoning_content": "Rx9"}, called | {"tool_calls": _ButEmpty()}]
        inner, last = self._turns(plain, variables)
        others = itertools.chain(*self._turns(odd, variables))
        if not (inner or last):
            raise NotProvenError(f'the template does not go over messages of role "{role}" one by one')
        text = _common_start([*inner, *last])
        if role == ASSISTANT:
            text = _before_answer(text, [*inner, *last, *others], self._generation_prompt(variables))
        elif not text.strip():
            raise NotProvenError(f'the template writes nothing in front of what "{role}" says')
        tails = [_common_end([block[len(text) :] for block in blocks]) for blocks in (inner or last, last or inner)]
        return _Header(text, tails[0], tails[1])

    def _says(self, role: str, text: str) -> Message:
        return {"role": role, "content": in_parts(text) if self.in_parts else text}

    def _turns(self, said: Iterable[Message], variables: dict[str, Any]) -> tuple[list[str], list[str]]:
        """What is written for each message before another one, and as the last one."""
        inner: list[str] = []
        last: list[str] = []
        for message in said:
            for dialogue in self._dialogues(message):
                number = next(n for n, one in enumerate(dialogue) if one is message)
                try:
                    rendering = self.template.render(dialogue, **variables)
                except TemplateRefusedError:
                    continue
                if len(rendering.turns.get(number, ())) == 1:
                    block = rendering.text[slice(*rendering.turns[number][0])]
                    (last if number == len(dialogue) - 1 else inner).append(block)
        return inner, last

    def _dialogues(self, message: Message) -> list[list[Message]]:
        """The message as the last one and before others, never as the first if others can be."""
        # Each message an object of its own: positions are told by it.
        ask, ask_again, answer, answer_again = (
            self._says(role, text) for role, text in (("user", "q"), ("user", "q"), (ASSISTANT, "a"), (ASSISTANT, "a"))
        )
        if message["role"] == "user":
            return [[ask, answer, message], [ask, answer, message, answer_again]]
        if message["role"] in ("system", "developer"):
            return [[message, ask]]
        return [[ask, message], [ask, message, ask_again]]

    def _generation_prompt(self, variables: dict[str, Any]) -> str:
        """What the template writes where the assistant is to go on."""
        ask = self._says("user", "q")
        whole = self.template.render([ask, self._says(ASSISTANT, _WORDS[0])], **variables)
        asked = self.template.render([ask], generation_prompt=True, **variables).text
        if len(whole.turns.get(1, ())) != 1:
            raise NotProvenError("the template does not go over messages one by one")
        begin = whole.turns[1][0][0]
        if asked[:begin] != whole.text[:begin]:
            raise NotProvenError("the template writes a question in another way where it is to be answered")
        return asked[begin:]


def in_parts(text: str) -> list[dict[str, str]]:
    """A content as a list of parts."""
    return [{"type": "text", "text": text}]


def _before_answer(shared: str, blocks: list[str], prompt: str) -> str:
    """What plain turns of an assistant share, all turns, and the generation prompt -> the header.

    What turns share and the prompt must be the same but for white space: of fixed words that only one of them has,
    such as <think> or a channel, nobody can tell whether the model is to write them. A turn that says nothing but tool
    calls may leave out white space at the prompt's end, and then all do without it.
    """
    header = _common_start([prompt, *blocks])
    if not shared.startswith(prompt) or shared[len(prompt) :].strip() or prompt[len(header) :].strip():
        raise NotProvenError(
            f"the template's generation prompt {prompt!r} is not how it begins an assistant's turn, {shared!r}; "
            "a template with {% generation %} tags would tell what is trained on"
        )
    return header


def block_of(written: Written, number: int, messages: Sequence[Message]) -> Any:
    """What was written for a message, and nowhere else."""
    found = written.turns.get(number, [])
    if len(found) != 1:
        count = "nowhere" if not found else f"{len(found)} times"
        raise NotProvenError(f"message {number} ({messages[number]['role']}) is written {count}")
    return found[0]


def _within(stretches: Collection[Any], block: Any) -> list[Any]:
    return [one for one in stretches if block[0] <= one[0] and one[1] <= block[1]]


def _outside(text: str, stretches: list[Stretch]) -> list[str]:
    ends = [0, *(end for _, end in stretches)]
    begins = [*(begin for begin, _ in stretches), len(text)]
    return [text[end:begin] for end, begin in zip(ends, begins, strict=True)]


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with: what the first and the last of them in order do."""
    low, high = min(texts), max(texts)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return low[: sum(1 for _ in same)]


def _common_end(texts: Sequence[str]) -> str:
    return _common_start([text[::-1] for text in texts])[::-1]


def _in_other_words(message: Message) -> Message:
    """The same message with something else said in it, in the same form: in texts, reasoning and tool calls."""
    other = dict(message)
    for name in ("content", "tool_calls", *REASONING):
        if name in other:
            other[name] = _other(other[name], all_keys=False)
    return other


def _other(value: Any, *, all_keys: bool) -> Any:
    """Another value of the same form: texts reworded, also in lists and behind the keys that hold what is said."""
    if isinstance(value, str):
        return other_text(value)
    if isinstance(value, list):
        return [_other(one, all_keys=all_keys) for one in value]
    if isinstance(value, dict):
        said = value if all_keys else ("text", "function", "arguments", "name")
        return {
            key: _other(one, all_keys=all_keys or key == "arguments") if key in said else one
            for key, one in value.items()
        }
    if all_keys and isinstance(value, (int, float)):
        return not value if isinstance(value, bool) else value + 1
    return value


def is_tag(text: str) -> bool:
    """Whether all of a text is what `other_text` keeps."""
    return _TAG.fullmatch(text) is not None


def other_text(text: str) -> str:
    """All letters and digits replaced and a word more at both ends; tags and white space around it as they were."""
    if not text.strip():
        return text
    parts = _TAG.split(text)
    parts[::2] = [part.translate(_LETTERS) for part in parts[::2]]
    front = "" if parts[0].lstrip()[:1] in ("", "{", "[", "<") else f"{_WORDS[0]} "
    other = "".join(parts)
    begin, end = len(other) - len(other.lstrip()), len(other.rstrip())
    return f"{other[:begin]}{front}{other[begin:end]} {_WORDS[1]}{other[end:]}"
