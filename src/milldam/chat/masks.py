"""Which stretches of a rendered conversation are trained on: taken from the template's own tags, or derived and proven.

A template with `{% generation %}` says itself what the assistant wrote, and that is taken as it stands. For one without,
a turn is what was written while the template's loop was at its message, less the header that every such turn shares:

    <|im_start|>assistant            header: never trained on; a part of the generation prompt
    \\nParis.                         what the assistant wrote
    <|im_end|>\\n                     the turn's end: trained on unless `turn_end` is off

That holds for a conversation only if it is proven for it: every trained message was written exactly once, behind its
header; and with other words in the trained messages nothing changes outside their stretches, while each of them does
change. What is not proven raises NotProven, with the reason: never all, never none without a word. Two renderings a
conversation, three for the template; linear in the number of messages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from milldam.chat.template import ChatTemplate, Message, Rendering, Stretch, TemplateRefusal, joined
from milldam.errors import ConfigError, MilldamError

ASSISTANT, LAST, ALL = "assistant", "last", "all"
WEIGHT_FIELDS = ("weight", "loss_weight", "train")
_WORDS = ("Aq7", "Zk3w")
"""What no template treats in a way of its own."""


class NotProven(MilldamError):
    """What is trained on can't be told for certain."""


@dataclass(frozen=True, slots=True)
class TrainOn:
    """Which messages are trained on: those of `roles`, or those whose `field` is not 0."""

    roles: tuple[str, ...] = (ASSISTANT,)
    last: bool = False
    """Of these the last one alone."""
    everything: bool = False
    field: str | None = None
    turn_end: bool = True
    """Also on what ends a turn, such as <|im_end|>."""

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages that are trained on."""
        if self.field is not None:
            return [n for n, one in enumerate(messages) if _weight(one, self.field)]
        chosen = [n for n, one in enumerate(messages) if one["role"] in self.roles]
        return chosen[-1:] if self.last else chosen


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


def _weight(message: Message, field: str) -> bool:
    value = message.get(field)
    if value is None:
        # A field that says nothing of an assistant's message does not take it out.
        return bool(message["role"] == ASSISTANT)
    if value in (0, 1):
        return bool(value)
    raise NotProven(f"{field} is {value!r}, and only 0 and 1 can be trained by")


class Masks:
    """Finds the trained stretches of conversations by one template."""

    def __init__(self, template: ChatTemplate, rule: TrainOn) -> None:
        self._template, self._rule = template, rule
        self._headers: dict[str, _Header | str] = {}

    def find(
        self, messages: Sequence[Message], tools: Any, rendering: Rendering, variables: dict[str, Any]
    ) -> list[Stretch]:
        """Stretches of characters, in order, none empty; NotProven where they can't be told."""
        if self._rule.everything:
            return joined([(0, len(rendering.text))])
        wanted = self._rule.messages(messages)
        if not wanted:
            raise NotProven("none of its messages is one to train on")
        if self._template.tagged and all(messages[n]["role"] == ASSISTANT for n in wanted):
            return self._by_tags(messages, wanted, rendering)
        return self._derived(messages, tools, rendering, wanted, variables)

    # ---- by the template's tags ----

    def _by_tags(self, messages: Sequence[Message], wanted: list[int], rendering: Rendering) -> list[Stretch]:
        found = rendering.generated
        assistants = [n for n, one in enumerate(messages) if one["role"] == ASSISTANT]
        if wanted != assistants:
            found = [one for n in wanted for one in _within(found, _block(rendering, n, messages))]
        found = joined(found)
        if not found:
            raise NotProven("the template's {% generation %} blocks hold nothing of it")
        return found

    # ---- by what was written for each message ----

    def _derived(
        self,
        messages: Sequence[Message],
        tools: Any,
        rendering: Rendering,
        wanted: list[int],
        variables: dict[str, Any],
    ) -> list[Stretch]:
        found = [self._stretch(messages, number, rendering) for number in wanted]
        others = [_in_other_words(one) if number in set(wanted) else one for number, one in enumerate(messages)]
        try:
            again = self._template.render(others, tools, **variables)
        except TemplateRefusal as error:
            raise NotProven(f"with other words in it the template refuses it ({error})") from None
        there = [self._stretch(others, number, again) for number in wanted]
        if _outside(rendering.text, found) != _outside(again.text, there):
            raise NotProven("what is trained on is also written outside its own turn")
        for number, one, other in zip(wanted, found, there, strict=True):
            same = rendering.text[slice(*one)] == again.text[slice(*other)]
            if same and others[number] != messages[number]:
                raise NotProven(f"something that message {number} says is not written by the template")
        return joined(found)

    def _stretch(self, messages: Sequence[Message], number: int, rendering: Rendering) -> Stretch:
        begin, end = _block(rendering, number, messages)
        header = self._header(str(messages[number]["role"]))
        text = rendering.text
        at = text.find(header.text, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header.text, at):
            raise NotProven(f"message {number} does not begin with {header.text!r} as others of its role do")
        last = number == len(messages) - 1
        if last and self._rule.turn_end:
            # What is written behind all turns, such as an end token, ends the last one.
            end = len(text)
        elif not self._rule.turn_end:
            if not text.endswith(header.tail, begin, end):
                raise NotProven(f"message {number} does not end with {header.tail!r} as others of its role do")
            end -= len(header.tail)
        return at + len(header.text), end

    def _header(self, role: str) -> _Header:
        known = self._headers.get(role)
        if known is None:
            try:
                known = _probe(self._template, role)
            except (NotProven, TemplateRefusal) as error:
                known = str(error)
            self._headers[role] = known
        if isinstance(known, str):
            raise NotProven(known)
        return known


@dataclass(frozen=True, slots=True)
class _Header:
    """What every turn of a role begins and ends with."""

    text: str
    tail: str


class _ButEmpty(list[Any]):
    """Tool calls that are there, and none: what a template writes for a turn in which nothing is said."""

    def __bool__(self) -> bool:
        return True


def _probe(template: ChatTemplate, role: str) -> _Header:
    """Turns of a role with all kinds of things said in them -> what they have in common."""
    said: list[Message] = [{"content": word} for word in _WORDS] + [{"content": ""}]
    if role == ASSISTANT:
        said += [{"content": _WORDS[0], "reasoning_content": "Rx9"}, {"content": "", "tool_calls": _ButEmpty()}]
    blocks = [block for one in said for block in _turns_of(template, {"role": role} | one)]
    if not blocks:
        raise NotProven(f'the template does not go over messages of role "{role}" one by one')
    text = commonprefix(blocks)
    tail = commonprefix([block[::-1] for block in blocks])[::-1] if len(text) < min(map(len, blocks)) else ""
    if role == ASSISTANT:
        text = commonprefix([text, _generation_prompt(template)])
    if not text:
        raise NotProven(f'the template writes nothing in front of what "{role}" says')
    return _Header(text, tail)


def _turns_of(template: ChatTemplate, message: Message) -> list[str]:
    """What is written for a message, as the last one and before another."""
    user = {"role": "user", "content": "q"}
    dialogues: list[list[Message]] = [[user, message], [user, message, dict(user)], [dict(user), message, user]]
    if message["role"] == "user":
        answer = {"role": ASSISTANT, "content": "a"}
        dialogues = [[message], [message, answer], [dict(user), answer, message]]
    if message["role"] == "system":
        dialogues = [[message, user]]
    found = []
    for messages in dialogues:
        number = messages.index(message)
        try:
            rendering = template.render(messages)
        except TemplateRefusal:
            continue
        if len(rendering.turns.get(number, ())) == 1:
            begin, end = rendering.turns[number][0]
            found.append(rendering.text[begin:end])
    return found


def _generation_prompt(template: ChatTemplate) -> str:
    """What the template writes where the assistant is to go on; it must be how it writes the assistant's turns."""
    user = {"role": "user", "content": "q"}
    answer = {"role": ASSISTANT, "content": _WORDS[0]}
    whole = template.render([user, answer])
    asked = template.render([user], generation_prompt=True).text
    if len(whole.turns.get(1, ())) != 1:
        raise NotProven("the template does not go over messages one by one")
    begin, end = whole.turns[1][0]
    prompt = asked[begin:]
    if asked[:begin] != whole.text[:begin] or not whole.text[begin:end].startswith(prompt):
        raise NotProven(
            f"the template's generation prompt {prompt!r} is not how it begins an assistant's turn, "
            f"{whole.text[begin : begin + len(prompt)]!r}"
        )
    return prompt


def _block(rendering: Rendering, number: int, messages: Sequence[Message]) -> Stretch:
    found = rendering.turns.get(number, [])
    if len(found) != 1:
        count = "nowhere" if not found else f"{len(found)} times"
        raise NotProven(f"message {number} ({messages[number]['role']}) is written {count}")
    return found[0]


def _within(stretches: Collection[Stretch], block: Stretch) -> list[Stretch]:
    return [one for one in stretches if block[0] <= one[0] and one[1] <= block[1]]


def _outside(text: str, stretches: list[Stretch]) -> list[str]:
    ends = [0, *(end for _, end in stretches)]
    begins = [*(begin for begin, _ in stretches), len(text)]
    return [text[end:begin] for end, begin in zip(ends, begins, strict=True)]


def _in_other_words(message: Message) -> Message:
    """The same message with something else said in it, in the same form: in texts, reasoning and tool calls."""
    other = dict(message)
    for name in ("content", "reasoning_content", "tool_calls"):
        if name in other:
            other[name] = _other(other[name])
    return other


def _other(value: Any) -> Any:
    """Another value of the same form: texts reworded, also those in lists and behind the keys that hold what is said."""
    if isinstance(value, str):
        return _reworded(value) if value.strip() else value
    if isinstance(value, list):
        return [_other(one) for one in value]
    if isinstance(value, dict):
        return {key: _other(one) if key in ("text", "function", "arguments") else one for key, one in value.items()} | (
            {"name": f"{value['name']}{_WORDS[1]}"} if isinstance(value.get("name"), str) else {}
        )
    return value


def _reworded(text: str) -> str:
    """Another word in front of the last one, white space and tags around it as they were."""
    kept = text.rstrip()
    return f"{kept} {_WORDS[1]}{text[len(kept) :]}"
