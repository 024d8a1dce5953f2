"""Which stretches of a rendered conversation are trained on: taken from the template's own tags, or derived and proven.

A template with `{% generation %}` says itself what the assistant wrote, and that is taken as it stands. For one
without, a turn is what was written while the template's loop was at the message, less what was written there for other
messages (tool results within a turn), and less its header:

    <|im_start|>assistant            header: the generation prompt, which the model is given: never trained on
    <think>                          a tag that is closed in the turn is the model's, even where the prompt begins it
    \\nParis.                         what the assistant wrote
    <|im_end|>\\n                     the end of the turn: trained on unless `turn_end` is off

Where no turn begins as the prompt does (DeepSeek's), or a turn goes on with a channel or a recipient, so that several
such headers may stand in it (gpt-oss), the model has to write the header too: all of the turn is trained on.

The rendering says whose words each piece of the text is (words.py). So what is trained on is proven for each
conversation: every trained message is written in its own turn, its words stand there alone, and no others do. What is
not proven raises NotProvenError with the reason; nothing is ever trained on in full, or left out, silently.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milldam.chat.forms import WEIGHT_FIELDS
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate, Message, Rendering, Stretch
from milldam.chat.words import Source
from milldam.errors import ConfigError, MilldamError

ASSISTANT, LAST, ALL = "assistant", "last", "all"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field that holds a message's reasoning."""
FIELDS = ("content", "reasoning", "tool_calls")
"""Parts of a message that can be left out."""
_WEIGHT_FIELDS = frozenset(WEIGHT_FIELDS)
_TAG = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]")
_OPENING = re.compile(r"<([\w:]+)>\s*$|\[([A-Z_]+)\]\s*$")
"""A tag of words alone, such as <think> or [THINK], which </think> or [/THINK] closes."""
_CLOSING = re.compile(r"(?:</[^<>\s]{1,64}>|\[/[A-Z_]{1,32}\]|<[a-z_]+\|>|<\|[a-z_▁]*end[a-z_▁]*\|>(?=.*<))\s*", re.S)
_END_OF_THOUGHT = re.compile(r"\s*(?:</(?:think|thinking|thought|reasoning)>|\[/THINK\])\s*")


class NotProvenError(MilldamError):
    """The trained parts of a conversation are not certain."""


class NothingToTrainError(NotProvenError):
    """None of the messages is to be trained on."""


# ---- the rule ----


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
    left_out: frozenset[str] = frozenset()
    """Parts of these messages that are not trained on, of FIELDS."""

    def messages(self, messages: Sequence[Message], prompt_messages: int = 0) -> list[int]:
        """The numbers of the messages that are trained on, none of them in the prompt."""
        if self.field is not None:
            chosen = [n for n, one in enumerate(messages) if _weight(one, self.field, one["role"] == ASSISTANT)]
        else:
            chosen = [n for n, one in enumerate(messages) if one["role"] in self.roles]
        chosen = chosen[-1:] if self.last else chosen
        chosen = [n for n in chosen if n >= prompt_messages and _weighs(messages[n])]
        if not chosen:
            raise NothingToTrainError("none of its messages is one to train on")
        return chosen


def train_on(words: str | Sequence[str] | Mapping[str, bool], *, turn_end: bool = True) -> TrainOn:
    """`assistant`, `last`, `all`, the name of a weight field, a role, a list of roles, or roles and fields by name.

    >>> train_on("last").last, train_on(["user", "assistant"]).roles, train_on("weight").field
    (True, ('user', 'assistant'), 'weight')
    >>> train_on({"assistant": True, "reasoning": False}).left_out
    frozenset({'reasoning'})
    """
    if isinstance(words, str):
        if words == ALL:
            return TrainOn(everything=True)
        if words in WEIGHT_FIELDS:
            return TrainOn(field=words, turn_end=turn_end)
        return TrainOn((ASSISTANT if words == LAST else words,), last=words == LAST, turn_end=turn_end)
    if not isinstance(words, Mapping):
        if not words:
            raise ConfigError("train_on: no role is named. Nothing would be trained on.")
        if not any(name.startswith("-") for name in words):
            return TrainOn(tuple(words), turn_end=turn_end)
        words = {name.removeprefix("-"): not name.startswith("-") for name in words}
    roles = [name for name, wanted in words.items() if wanted and name not in (*FIELDS, LAST)]
    left_out = frozenset(name for name in FIELDS if not words.get(name, True))
    if left_out == set(FIELDS):
        raise ConfigError("train_on: content, reasoning and tool_calls are all false. Nothing would be trained on.")
    rule = train_on(roles or ASSISTANT, turn_end=turn_end)
    return replace(rule, last=bool(words.get(LAST)), left_out=left_out)


def _weight(message: Message, field: str, default: bool) -> bool:
    value = message.get(field)
    if value is None:
        return default
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise NotProvenError(f"{field} is {value!r}, but only 0 and 1 are supported")


def _weighs(message: Message) -> bool:
    return _WEIGHT_FIELDS.isdisjoint(message) or all(_weight(message, name, True) for name in WEIGHT_FIELDS)


# ---- the trained stretches of a conversation ----


@dataclass(frozen=True, slots=True)
class _Header:
    """How every turn of a role begins, and how it ends, before another one and as the last."""

    text: str
    tail: str = ""
    last_tail: str = ""
    prompt: str = ""
    """The generation prompt, where the role is the assistant."""


class Masks:
    """Finds the trained stretches of conversations by one template."""

    def __init__(self, template: ChatTemplate, rule: TrainOn, *, in_parts: bool = False) -> None:
        """`in_parts`: the template takes contents as lists of parts."""
        self._template, self.rule, self._in_parts = template, rule, in_parts
        self._headers: dict[tuple[str, str], _Header | str] = {}

    def tagged(self, messages: Sequence[Message], prompt_messages: int = 0) -> bool:
        """Whether the template's tags tell what is trained on."""
        if not self._template.tagged or self.rule.everything:
            return False
        if self.rule.field is None and self.rule.roles == (ASSISTANT,):
            return True
        return all(messages[n]["role"] == ASSISTANT for n in self.rule.messages(messages, prompt_messages))

    def find(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
        *,
        prompt_messages: int = 0,
    ) -> tuple[Rendering, list[Stretch]]:
        """The rendering, and its trained stretches of characters in order; NotProvenError where they are not certain.

        The first `prompt_messages` are never trained on, unless everything is.
        """
        rule, variables = self.rule, variables or {}
        if rule.everything:
            if not all(map(_weighs, messages)):
                raise NotProvenError("a message has a weight of 0, but everything is to be trained on")
            rendering = self._template.render(messages, tools, **variables)
            return rendering, _joined([(0, len(rendering.text))])
        tagged = self.tagged(messages, prompt_messages)
        follow = not tagged or bool(rule.left_out)
        rendering = self._template.render(messages, tools, follow=follow, **variables)
        wanted = rule.messages(messages, prompt_messages)
        if tagged:
            stretches = self._by_tags(messages, wanted, rendering)
        else:
            turns = {number: self._turn(messages, number, rendering, tools, variables) for number in wanted}
            _prove(rendering, turns, messages)
            stretches = _joined(one for several in turns.values() for one in several)
        if rule.left_out:
            stretches = _without_fields(rendering, stretches, rule.left_out)
        return rendering, stretches

    def _by_tags(self, messages: Sequence[Message], wanted: list[int], rendering: Rendering) -> list[Stretch]:
        generated = rendering.generated
        if wanted != [n for n, one in enumerate(messages) if one["role"] == ASSISTANT]:
            blocks = [_block_of(rendering, n, messages) for n in wanted]
            generated = [one for begin, end in blocks for one in generated if begin <= one[0] and one[1] <= end]
        generated = _joined(generated)
        if not generated:
            raise NotProvenError("the template's {% generation %} blocks hold nothing of it")
        return generated

    def _turn(
        self, messages: Sequence[Message], number: int, rendering: Rendering, tools: Any, variables: Mapping[str, Any]
    ) -> list[Stretch]:
        """The trained stretches of a turn, where the template has no tags."""
        text, (begin, end) = rendering.text, _block_of(rendering, number, messages)
        header, is_last = self._header(str(messages[number]["role"]), variables), number == len(messages) - 1
        # The first turn may come behind what begins the text, such as a default system prompt.
        at = text.find(header.text, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header.text, at, end):
            at = begin
            header = self._asked_header(messages, number, rendering, tools, variables, header)
        begin = at + len(header.text)
        if not self.rule.turn_end:
            tail = header.last_tail if is_last else header.tail
            if not text.endswith(tail, begin, end):
                raise NotProvenError(f"message {number} does not end with {tail!r} as others of its role do")
            end -= len(tail)
        elif is_last and not any(one.strip() and one.strip() in text[end:] for one in (header.text, header.prompt)):
            # What is written behind all turns, such as an end token, ends the last one; but not the next prompt.
            end = len(text)
        others = _joined(
            one
            for other, blocks in rendering.turns.items()
            for one in blocks
            if other != number and begin <= one[0] and one[1] <= end
        )
        ends, begins = [begin, *(stop for _, stop in others)], [*(start for start, _ in others), end]
        return [(start, stop) for start, stop in zip(ends, begins, strict=True) if start < stop]

    def _header(self, role: str, variables: Mapping[str, Any]) -> _Header:
        key = role, repr(variables) if variables else ""
        known = self._headers.get(key)
        if known is None:
            try:
                known = _probed(self._template, role, variables, in_parts=self._in_parts)
            except (NotProvenError, TemplateRefusedError) as error:
                known = str(error)
            if len(self._headers) < 1000:
                self._headers[key] = known
        if isinstance(known, str):
            raise NotProvenError(known)
        return known

    def _asked_header(
        self,
        messages: Sequence[Message],
        number: int,
        rendering: Rendering,
        tools: Any,
        variables: Mapping[str, Any],
        usual: _Header,
    ) -> _Header:
        """The header of a turn that does not begin as others do: what the template writes to ask for this one."""
        begin, end = _block_of(rendering, number, messages)
        if messages[number]["role"] == ASSISTANT:
            asked = self._template.render(messages[:number], tools, generation_prompt=True, **variables).text
            prompt = asked[begin:]
            while (tag := _OPENING.search(prompt)) and _closing(tag) in rendering.text[begin:end]:
                prompt = prompt[: tag.start()]
            if asked[:begin] == rendering.text[:begin] and rendering.text.startswith(prompt, begin, end):
                return replace(usual, text=prompt)
        raise NotProvenError(f"message {number} does not begin with {usual.text!r} as others of its role do")


def _block_of(rendering: Rendering, number: int, messages: Sequence[Message]) -> Stretch:
    """What was written for a message, and nowhere else."""
    blocks = rendering.turns.get(number, [])
    if len(blocks) != 1:
        count = "nowhere" if not blocks else f"{len(blocks)} times"
        raise NotProvenError(f"message {number} ({messages[number]['role']}) is written {count}")
    return blocks[0]


def _prove(rendering: Rendering, turns: dict[int, list[Stretch]], messages: Sequence[Message]) -> None:
    """Words of trained messages stand in their own stretches, and no others do."""
    stretches = sorted((*one, number) for number, several in turns.items() for one in several)
    if any(one[1] > other[0] for one, other in itertools.pairwise(stretches)):
        raise NotProvenError("the template writes a turn within another one, or turns in another order")
    begins, heard = [begin for begin, _, _ in stretches], set[int]()
    for begin, end, source in rendering.words:
        message = _message_of(source)
        where = bisect_right(begins, begin) - 1
        if where >= 0 and end <= stretches[where][1]:
            number = stretches[where][2]
            if message != number:
                raise NotProvenError(f"the turn of message {number} holds what other messages say")
            if number not in heard and not rendering.text[begin:end].isspace():
                heard.add(number)
            continue
        # Results of tools may name the call that they answer.
        names_a_call = source[2:3] == ("tool_calls",) and source[-1] in ("name", "id")
        touches = (where + 1 < len(begins) and end > begins[where + 1]) or (where >= 0 and begin < stretches[where][1])
        if touches or (message in turns and not names_a_call):
            raise NotProvenError("what is trained on is also written outside its own turn")
    for number in turns.keys() - heard:
        if any(map(_is_said, (messages[number].get(name) for name in ("content", "tool_calls", *REASONING)))):
            raise NotProvenError(f"nothing that message {number} says is written by the template")


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Stretches in order, those that touch or overlap as one, empty ones left out."""
    found: list[Stretch] = []
    for begin, end in sorted(stretches):
        if begin == end:
            continue
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _message_of(source: Source) -> int | None:
    number: int | None = source[1] if source[0] == "messages" else None
    return number


def _is_said(value: Any) -> bool:
    """Whether there is a text in it that is not blank."""
    if isinstance(value, str):
        return bool(value.strip())
    if isinstance(value, dict):
        return any(_is_said(one) for key, one in value.items() if key not in ("type", "id"))
    return isinstance(value, list) and any(map(_is_said, value))


# ---- by field ----


def _without_fields(rendering: Rendering, stretches: list[Stretch], left_out: frozenset[str]) -> list[Stretch]:
    """What is left of trained stretches without some fields, and without what the template writes around these.

    What stands in front of a field's words opens it (<think>, <tool_call>), a closing tag behind them closes it; the
    rest behind the last one ends the turn. A stretch that has no words left is left out.
    """

    def closed(begin: int, end: int) -> int:
        """Where the last closing tag of a text ends, with the white space behind it."""
        return begin + max((tag.end() for tag in _CLOSING.finditer(rendering.text[begin:end])), default=0)

    kept: list[Stretch] = []
    for begin, end in stretches:
        parts, at, before = list[tuple[int, int, str]](), begin, ""
        for start, stop, field in [*_fields_in(rendering, begin, end), (end, end, "")]:
            closes = closed(at, start) if before and before != field else at
            parts += [(at, closes, before), (closes, stop, field)]
            at, before = stop, field
        if any(field and field not in left_out and start < stop for start, stop, field in parts):
            kept += [(start, stop) for start, stop, field in parts if field not in left_out]
    if not kept:
        raise NothingToTrainError("its messages say nothing of what is to be trained on")
    return _joined(kept)


def _fields_in(rendering: Rendering, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Words in a stretch with their field; thinking within a content is reasoning."""
    for start, stop, source in rendering.words:
        if not begin <= start < end:
            continue
        if len(source) < 3:
            raise NotProvenError(f"the template mixes the fields of message {_message_of(source)}")
        name = "reasoning" if source[2] in REASONING else str(source[2])
        if name == "content":
            # Thinking that the content holds, or that the template has cut out of it.
            ends = [tag.end() for tag in _END_OF_THOUGHT.finditer(rendering.text, start, stop)]
            if ends:
                yield start, ends[-1], "reasoning"
                start = ends[-1]
            elif _END_OF_THOUGHT.match(rendering.text, stop, end):
                name = "reasoning"
        if start < stop:
            yield start, stop, name


# ---- what a template writes around what is said ----


def in_parts(text: str) -> list[dict[str, str]]:
    """A content as a list of parts."""
    return [{"type": "text", "text": text}]


class _ButEmpty(list[Any]):
    """Tool calls that are there, and none: what a template writes for a turn in which nothing is said."""

    def __bool__(self) -> bool:
        return True


def _probed(template: ChatTemplate, role: str, variables: Mapping[str, Any], *, in_parts: bool) -> _Header:
    """What turns of a role have in common, whatever is said in them."""

    def says(who: str, text: str) -> Message:
        return {"role": who, "content": [{"type": "text", "text": text}] if in_parts else text}

    def turns(said: Message) -> Iterator[tuple[bool, str, str]]:
        """What is written for a message before another one, and as the last one: the block, and its text up to words"""
        for dialogue in _dialogues(said, says):
            number = next(n for n, one in enumerate(dialogue) if one is said)
            with contextlib.suppress(TemplateRefusedError):
                rendering = template.render(dialogue, follow=True, **variables)
                if len(rendering.turns.get(number, ())) == 1:
                    begin, end = rendering.turns[number][0]
                    own = (at for at, _, source in rendering.words if _message_of(source) == number and at >= begin)
                    yield number == len(dialogue) - 1, rendering.text[begin:end], rendering.text[begin : next(own, end)]

    plain = [turn for text in ("Aq7", "") for turn in turns(says(role, text))]
    if not plain:
        raise NotProvenError(f'the template does not go over messages of role "{role}" one by one')
    header, prompt = _common_start([lead for _, _, lead in plain]), ""
    if role == ASSISTANT:
        odd = [says(role, "Aq7") | dict.fromkeys(REASONING, "Rx9"), says(role, "") | {"tool_calls": _ButEmpty()}]
        everything = [*plain, *(turn for one in odd for turn in turns(one))]
        prompt = _prompt(template, says, variables)
        header = _given_header(header, everything, prompt)
    elif not header.strip():
        raise NotProvenError(f'the template writes nothing in front of what "{role}" says')
    ends = [
        [block[len(header) :][::-1] for is_last, block, _ in plain if is_last == at_end] for at_end in (False, True)
    ]
    tail, last_tail = (_common_start(some)[::-1] for some in (ends[0] or ends[1], ends[1] or ends[0]))
    return _Header(header, tail, last_tail, prompt)


def _dialogues(message: Message, says: Callable[[str, str], Message]) -> list[list[Message]]:
    """A message before others and as the last one, never as the first if others can be."""
    role = message["role"]
    if role == "user":
        before = [says("user", "q"), says(ASSISTANT, "a"), message]
        return [before, [*before, says(ASSISTANT, "a")]]
    if role in ("system", "developer"):
        return [[message, says("user", "q")]]
    return [[says("user", "q"), message], [says("user", "q"), message, says("user", "q")]]


def _prompt(template: ChatTemplate, says: Callable[[str, str], Message], variables: Mapping[str, Any]) -> str:
    """What the template writes where the assistant is to go on."""
    ask = says("user", "q")
    whole = template.render([ask, says(ASSISTANT, "Aq7")], **variables)
    asked = template.render([ask], generation_prompt=True, **variables).text
    if len(whole.turns.get(1, ())) != 1:
        raise NotProvenError("the template does not go over messages one by one")
    begin = whole.turns[1][0][0]
    if asked[:begin] != whole.text[:begin]:
        raise NotProvenError("the template writes a question in another way where it is to be answered")
    return asked[begin:]


def _given_header(shared: str, turns: Iterable[tuple[bool, str, str]], prompt: str) -> str:
    """What the model is given of a turn, by what plain turns share, by all turns, and by the generation prompt."""
    blocks, leads = [block for _, block, _ in turns], [lead for _, _, lead in turns]
    if not prompt and shared.strip():
        raise NotProvenError(f"the template has no generation prompt, so that nothing tells whose {shared!r} is")
    if not any(lead.startswith(prompt) for lead in leads):
        return ""
    header = _common_start([prompt, *leads])
    while (tag := _OPENING.search(header)) and any(_closing(tag) in block for block in blocks):
        header = header[: tag.start()]
    beyond = shared[len(prompt) :] if shared.startswith(prompt) else ""
    return header if all(_is_pair(tag, shared) for tag in _TAG.findall(beyond)) else ""


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with: what the first and the last of them in order do."""
    low, high = min(texts), max(texts)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return low[: sum(1 for _ in same)]


def _closing(tag: re.Match[str]) -> str:
    return f"</{tag[1]}>" if tag[1] else f"[/{tag[2]}]"


def _is_pair(tag: str, text: str) -> bool:
    """Whether a tag is one of a pair that a text opens and closes, such as <think></think>."""
    name = tag.strip("<>[]/")
    return (f"<{name}>" in text and f"</{name}>" in text) or (f"[{name}]" in text and f"[/{name}]" in text)
