"""Which stretches of a rendered conversation are trained on: taken from the template's own tags, or derived and proven.

A template with `{% generation %}` says itself what the assistant wrote, and that is taken as it stands. For one
without, a turn is what was written while the template's loop was at its message, less what was written there for other
messages (tool results within a turn), and less its header:

    <|im_start|>assistant            header: what the model is given, the generation prompt: never trained on
    <think>                          a tag that is closed in the turn is the model's, also where the prompt begins it
    \\nParis.                         what the assistant wrote
    <|im_end|>\\n                     the turn's end: trained on unless `turn_end` is off

Where no turn begins as the prompt does (DeepSeek's), or a turn goes on with a channel or a recipient, so that several
such headers may stand in it (gpt-oss), the model is to write the header too: all of the turn is trained on.

The rendering says whose words each piece of the text is (said.py). So what is trained on is proven for each
conversation: every trained message is written in its own turn, its words stand there alone, and no others do. What is
not proven raises NotProvenError, with the reason: never all, never none without a word.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milldam.chat.forms import WEIGHT_FIELDS
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate, Message, Rendering, Stretch, joined
from milldam.errors import ConfigError, MilldamError

ASSISTANT, LAST, ALL = "assistant", "last", "all"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""What a message's reasoning may be called."""
_SAID = ("content", "tool_calls", *REASONING)
_TAG = re.compile(r"<[^<>\s]{1,64}>|\[/?[A-Z_]{1,32}\]")
_OPENING = re.compile(r"<(\w+)>\s*$|\[([A-Z_]+)\]\s*$")
"""A tag of words alone, such as <think> or [THINK], which </think> or [/THINK] closes."""


_CLOSING = re.compile(r"(?:</[^<>\s]{1,64}>|\[/[A-Z_]{1,32}\]|<[a-z_]+\|>|<\|[a-z_▁]*end[a-z_▁]*\|>(?=.*<))\s*", re.S)
_END_OF_THOUGHT = re.compile(r"\s*(?:</(?:think|thinking|thought|reasoning)>|\[/THINK\])\s*")
FIELDS = ("content", "reasoning", "tool_calls")
"""What of a message can be left out."""


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
    left_out: frozenset[str] = frozenset()
    """Of these messages, what is not trained on: content, reasoning, tool_calls."""

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """The numbers of the messages that are trained on."""
        if self.field is not None:
            chosen = [n for n, one in enumerate(messages) if _weight(one, self.field, one["role"] == ASSISTANT)]
        else:
            chosen = [n for n, one in enumerate(messages) if one["role"] in self.roles]
        chosen = chosen[-1:] if self.last else chosen
        return [n for n in chosen if all(_weight(messages[n], name, True) for name in WEIGHT_FIELDS)]


def train_on(words: str | Sequence[str] | Mapping[str, bool], *, turn_end: bool = True) -> TrainOn:
    """`assistant`, `last`, `all`, the name of a weight field, a role, a list of roles, or what of them by field.

    >>> train_on("last").last, train_on(["user", "assistant"]).roles, train_on("weight").field
    (True, ('user', 'assistant'), 'weight')
    >>> train_on({"assistant": True, "reasoning": False}).left_out
    frozenset({'reasoning'})
    """
    if isinstance(words, Mapping):
        roles = [name for name, wanted in words.items() if wanted and name not in (*FIELDS, LAST)]
        left_out = frozenset(name for name in FIELDS if not words.get(name, True))
        if left_out == set(FIELDS):
            raise ConfigError("train_on: content, reasoning and tool_calls are all false. Nothing would be trained on.")
        rule = train_on(roles or ASSISTANT, turn_end=turn_end)
        return replace(rule, last=bool(words.get(LAST)), left_out=left_out)
    if not isinstance(words, str) and any(name.startswith("-") for name in words):
        return train_on({name.removeprefix("-"): not name.startswith("-") for name in words}, turn_end=turn_end)
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


@dataclass(frozen=True, slots=True)
class _Header:
    """What every turn of a role begins with, and what it ends with, before another one and as the last."""

    text: str
    tail: str
    last_tail: str


class Masks:
    """Finds the trained stretches of conversations by one template."""

    def __init__(self, template: ChatTemplate, rule: TrainOn, *, in_parts: bool = False) -> None:
        """`in_parts`: the template takes contents as lists of parts."""
        self._template, self.rule, self._in_parts = template, rule, in_parts
        self._headers: dict[tuple[str, str], _Header | str] = {}

    def find(
        self, messages: Sequence[Message], rendering: Rendering, variables: dict[str, Any], *, prompt_messages: int = 0
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
            stretches = self._by_tags(messages, wanted, rendering)
        else:
            found = {number: self._turn(messages, number, rendering, variables) for number in wanted}
            _prove(rendering, found, messages)
            stretches = joined(one for several in found.values() for one in several)
        return _without_fields(rendering, stretches, self.rule.left_out) if self.rule.left_out else stretches

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

    def _by_tags(self, messages: Sequence[Message], wanted: list[int], rendering: Rendering) -> list[Stretch]:
        found = rendering.generated
        if wanted != [n for n, one in enumerate(messages) if one["role"] == ASSISTANT]:
            blocks = [_block_of(rendering, n, messages) for n in wanted]
            found = [one for begin, end in blocks for one in found if begin <= one[0] and one[1] <= end]
        found = joined(found)
        if not found:
            raise NotProvenError("the template's {% generation %} blocks hold nothing of it")
        return found

    # ---- by what was written for each message ----

    def _turn(
        self, messages: Sequence[Message], number: int, rendering: Rendering, variables: dict[str, Any]
    ) -> list[Stretch]:
        """What is trained on of a turn."""
        text, (begin, end) = rendering.text, _block_of(rendering, number, messages)
        header, is_last = self._header(str(messages[number]["role"]), variables), number == len(messages) - 1
        # The first turn may come behind what begins the text, such as a default system prompt.
        at = text.find(header.text, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header.text, at, end):
            raise NotProvenError(f"message {number} does not begin with {header.text!r} as others of its role do")
        begin = at + len(header.text)
        if not self.rule.turn_end:
            tail = header.last_tail if is_last else header.tail
            if not text.endswith(tail, begin, end):
                raise NotProvenError(f"message {number} does not end with {tail!r} as others of its role do")
            end -= len(tail)
        elif is_last:
            # What is written behind all turns, such as an end token, ends the last one.
            if header.text.strip() and header.text.strip() in text[end:]:
                raise NotProvenError("the template begins another turn after the last one")
            end = len(text)
        inner = [
            one for other, blocks in rendering.turns.items() if other != number for one in blocks
            if begin <= one[0] and one[1] <= end
        ]  # fmt: skip
        ends, begins = [begin, *(stop for _, stop in joined(inner))], [*(start for start, _ in joined(inner)), end]
        pairs = [(a, b) for a, b in zip(ends, begins, strict=True) if a < b]
        if pairs:
            pairs[-1] = pairs[-1][0], _without_spaces(rendering, *pairs[-1])
        return pairs

    def _header(self, role: str, variables: dict[str, Any]) -> _Header:
        """What turns of a role begin and end with."""
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


def _block_of(rendering: Rendering, number: int, messages: Sequence[Message]) -> Stretch:
    """What was written for a message, and nowhere else."""
    found = rendering.turns.get(number, [])
    if len(found) != 1:
        count = "nowhere" if not found else f"{len(found)} times"
        raise NotProvenError(f"message {number} ({messages[number]['role']}) is written {count}")
    return found[0]


def _without_spaces(rendering: Rendering, begin: int, end: int) -> int:
    """Behind a turn's end token spaces are no part of it: they stand before what comes next."""
    said = max((stop for _, stop, _ in rendering.said() if stop <= end), default=0)
    shorter = max(begin, said) + len(rendering.text[max(begin, said) : end].rstrip(" "))
    return shorter if shorter > said and rendering.text[shorter - 1] in ">]" else end


def _prove(rendering: Rendering, found: dict[int, list[Stretch]], messages: Sequence[Message]) -> None:
    """Words of trained messages stand in their own stretches, and no others do."""
    stretches = sorted((*one, number) for number, several in found.items() for one in several)
    if any(one[1] > other[0] for one, other in itertools.pairwise(stretches)):
        raise NotProvenError("the template writes a turn within another one, or turns in another order")
    begins, heard = [begin for begin, _, _ in stretches], set[int]()
    for begin, at, words in rendering.said():
        where = bisect_right(begins, begin) - 1
        if where >= 0 and at <= stretches[where][1]:
            number = stretches[where][2]
            if words.message != number:
                raise NotProvenError(f"the turn of message {number} holds what other messages say")
            heard |= {number} if not rendering.text[begin:at].isspace() else set()
            continue
        # Results of tools may name the call that they answer.
        names_a_call = words.path[2:3] == ("tool_calls",) and words.path[-1] in ("name", "id")
        touches = at > min(begins[where + 1 :], default=at) or (where >= 0 and begin < stretches[where][1])
        if touches or (words.message in found and not names_a_call):
            raise NotProvenError("what is trained on is also written outside its own turn")
    for number in found.keys() - heard:
        if any(map(_is_said, (messages[number].get(name) for name in _SAID))):
            raise NotProvenError(f"nothing that message {number} says is written by the template")


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
    kept: list[Stretch] = []
    for begin, end in stretches:
        parts, at, before = list[tuple[int, int, str]](), begin, ""
        for start, stop, field in _fields_in(rendering, begin, end):
            closes = at + _closing_end(rendering.text[at:start]) if before not in ("", field) else at
            parts += [(at, closes, before), (closes, stop, field)]
            at, before = stop, field
        closes = at + _closing_end(rendering.text[at:end])
        parts += [(at, closes, before), (closes, end, "")]
        wanted = [(start, stop) for start, stop, field in parts if field not in left_out]
        if any(field and field not in left_out and start < stop for start, stop, field in parts):
            kept += wanted
    if not kept:
        raise NothingToTrainError("its messages say nothing of what is to be trained on")
    return joined(kept)


def _fields_in(rendering: Rendering, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Words in a stretch with their field; thinking within a content is reasoning."""
    for start, stop, words in rendering.said():
        if not begin <= start < end:
            continue
        if len(words.path) < 3:
            raise NotProvenError(f"the template mixes the fields of message {words.message}")
        name = "reasoning" if words.path[2] in REASONING else str(words.path[2])
        if name == "content":
            # Thinking that the content holds, or that the template has cut out of it.
            ends = [found.end() for found in _END_OF_THOUGHT.finditer(rendering.text, start, stop)]
            if ends:
                yield start, ends[-1], "reasoning"
                start = ends[-1]
            elif _END_OF_THOUGHT.match(rendering.text, stop, end):
                name = "reasoning"
        if start < stop:
            yield start, stop, name


def _closing_end(literal: str) -> int:
    """Where the last closing tag of a literal ends, with the white space behind it."""
    return max((found.end() for found in _CLOSING.finditer(literal)), default=0)


# ---- what a template writes around what is said ----


def in_parts(text: str) -> list[dict[str, str]]:
    """A content as a list of parts."""
    return [{"type": "text", "text": text}]


class _ButEmpty(list[Any]):
    """Tool calls that are there, and none: what a template writes for a turn in which nothing is said."""

    def __bool__(self) -> bool:
        return True


def _probed(template: ChatTemplate, role: str, variables: dict[str, Any], *, in_parts: bool) -> _Header:
    """Turns of a role with all kinds of things said in them -> what they have in common."""

    def says(who: str, text: str) -> Message:
        # Each an object of its own: positions are told by it.
        return {"role": who, "content": [{"type": "text", "text": text}] if in_parts else text}

    def turns(said: Message) -> Iterator[tuple[bool, _Turn]]:
        """What is written for a message before another one, and as the last one."""
        for dialogue in _dialogues(said, says):
            number = next(n for n, one in enumerate(dialogue) if one is said)
            with contextlib.suppress(TemplateRefusedError):
                rendering = template.render(dialogue, **variables)
                if len(rendering.turns.get(number, ())) == 1:
                    yield number == len(dialogue) - 1, _turn_of(rendering, number)

    plain = [turn for text in ("Aq7", "Zk3w", "") for turn in turns(says(role, text))]
    if not plain:
        raise NotProvenError(f'the template does not go over messages of role "{role}" one by one')
    header = _common_start([turn.lead for _, turn in plain])
    if role == ASSISTANT:
        odd = [says(role, "Aq7") | dict.fromkeys(REASONING, "Rx9"), says(role, "") | {"tool_calls": _ButEmpty()}]
        everything = [turn for _, turn in (*plain, *(turn for one in odd for turn in turns(one)))]
        header = _given_header(header, everything, _prompt(template, says, variables))
    elif not header.strip():
        raise NotProvenError(f'the template writes nothing in front of what "{role}" says')
    inner, last = ([turn for is_last, turn in plain if is_last == wanted] for wanted in (False, True))
    tails = [_common_end([turn.block[len(header) :] for turn in some]) for some in (inner or last, last or inner)]
    return _Header(header, tails[0], tails[1])


def _dialogues(message: Message, says: Callable[[str, str], Message]) -> list[list[Message]]:
    """A message before others and as the last one, never as the first if others can be."""
    role = message["role"]
    if role == "user":
        before = [says("user", "q"), says(ASSISTANT, "a"), message]
        return [before, [*before, says(ASSISTANT, "a")]]
    if role in ("system", "developer"):
        return [[message, says("user", "q")]]
    return [[says("user", "q"), message], [says("user", "q"), message, says("user", "q")]]


@dataclass(frozen=True, slots=True)
class _Turn:
    block: str
    lead: str
    """What stands before the first words."""


def _turn_of(rendering: Rendering, number: int) -> _Turn:
    (begin, end), at = rendering.turns[number][0], 0
    for piece, words in rendering.pieces:
        if words is not None and words.message == number and at >= begin:
            break
        at += len(piece)
    return _Turn(rendering.text[begin:end], rendering.text[begin : min(at, end)])


def _prompt(template: ChatTemplate, says: Callable[[str, str], Message], variables: dict[str, Any]) -> str:
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


def _given_header(shared: str, turns: list[_Turn], prompt: str) -> str:
    """What the model is given of a turn, by what plain turns share, by all turns, and by the generation prompt."""
    leads = [turn.lead for turn in turns]
    if not prompt and shared.strip():
        raise NotProvenError(f"the template has no generation prompt, so that nothing tells whose {shared!r} is")
    if not any(lead.startswith(prompt) for lead in leads):
        return ""
    header = _common_start([prompt, *leads])
    beyond = shared[len(prompt) :] if shared.startswith(prompt) else ""
    while (tag := _OPENING.search(header)) and any(_closing(tag) in turn.block for turn in turns):
        header = header[: tag.start()]
    if any(not _is_pair(tag, shared) for tag in _TAG.findall(beyond)):
        return ""
    return header


def _closing(tag: re.Match[str]) -> str:
    return f"</{tag[1]}>" if tag[1] else f"[/{tag[2]}]"


def _is_pair(tag: str, text: str) -> bool:
    """Whether a tag is one of a pair that a text opens and closes, such as <think></think>."""
    name = tag.strip("<>[]/")
    return (f"<{name}>" in text and f"</{name}>" in text) or (f"[{name}]" in text and f"[/{name}]" in text)


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with: what the first and the last of them in order do."""
    low, high = min(texts), max(texts)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return low[: sum(1 for _ in same)]


def _common_end(texts: Sequence[str]) -> str:
    return _common_start([text[::-1] for text in texts])[::-1]
