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
not proven raises BadRowError with the reason; nothing is ever trained on in full, or left out, silently.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from milldam.chat.forms import WEIGHT_FIELDS, BadRowError, Conversation, Message, parsed
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate, Rendering, Stretch
from milldam.errors import ConfigError

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


def _not_proven(message: str) -> BadRowError:
    return BadRowError("mask_not_proven", message)


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
            answers = any(one["role"] == ASSISTANT for one in messages[prompt_messages:])
            no_answer = self.roles == (ASSISTANT,) and self.field is None and not answers
            reason = "no_assistant" if no_answer else "nothing_to_train_on"
            raise BadRowError(reason, "none of its messages is one to train on")
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
    raise _not_proven(f"{field} is {value!r}, but only 0 and 1 are supported")


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
    """A template, the form in which it takes messages, and what of its texts is trained on."""

    def __init__(self, template: ChatTemplate, rule: TrainOn) -> None:
        self.template, self.rule = template, rule
        self._headers: dict[tuple[str, str], _Header | str] = {}
        """By role and variables; a text says why there is none."""

        def writes(word: str, *messages: Message) -> bool:
            try:
                return word in template.render(messages).text
            except TemplateRefusedError:
                return False

        said = {"role": "user", "content": "Aq7"}
        self._in_parts = not writes("Aq7", said) and writes("Aq7", said | {"content": _in_parts("Aq7")})
        """Some templates that know of images take texts in parts alone."""
        call = {"type": "function", "function": {"name": "f", "arguments": '{"k9": 1}'}}
        self._parses = not writes('{"k9": 1}', said, {"role": ASSISTANT, "content": "", "tool_calls": [call]})
        """A template that writes arguments by `tojson` would quote those that are JSON already."""

    def fitting(self, talk: Conversation) -> Conversation:
        """A conversation as the template takes it."""
        messages, fields = talk.messages, set().union(*talk.messages)
        if not fields.isdisjoint(REASONING):
            messages = [_with_reasoning(message) for message in messages]
        if self._in_parts:
            messages = [
                one | {"content": _in_parts(one["content"])} if isinstance(one.get("content"), str) else one
                for one in messages
            ]
        if self._parses and "tool_calls" in fields:
            messages = [_with_parsed_arguments(one) if "tool_calls" in one else one for one in messages]
        return talk if messages is talk.messages else replace(talk, messages=messages)

    def derives(self, talk: Conversation) -> bool:
        """Whether its stretches are derived: not everything, nor what the template's tags hold."""
        rule = self.rule
        if rule.everything:
            return False
        if not self.template.tagged:
            return True
        if rule.field is None and rule.roles == (ASSISTANT,):
            return False
        return any(talk.messages[n]["role"] != ASSISTANT for n in rule.messages(talk.messages, talk.prompt_messages))

    def find(self, talk: Conversation) -> tuple[Rendering, list[Stretch]]:
        """The rendering, and its trained stretches of characters in order; BadRowError where they are not certain."""
        rule, talk = self.rule, self.fitting(talk)
        messages = talk.messages
        if rule.everything:
            if not all(map(_weighs, messages)):
                raise _not_proven("a message has a weight of 0, but everything is to be trained on")
            rendering = self.template.render(messages, talk.tools, **talk.variables)
            return rendering, _joined([(0, len(rendering.text))])
        derives = self.derives(talk)
        follow = derives or bool(rule.left_out)
        rendering = self.template.render(messages, talk.tools, follow=follow, **talk.variables)
        wanted = rule.messages(messages, talk.prompt_messages)
        if derives:
            turns = {number: self._turn(talk, number, rendering) for number in wanted}
            _prove(rendering, turns, messages)
            stretches = _joined(one for several in turns.values() for one in several)
        else:
            generated = rendering.generated
            if wanted != [n for n, one in enumerate(messages) if one["role"] == ASSISTANT]:
                blocks = [_block_of(rendering, n, messages) for n in wanted]
                generated = [one for begin, end in blocks for one in generated if begin <= one[0] and one[1] <= end]
            stretches = _joined(generated)
            if not stretches:
                raise _not_proven("the template's {% generation %} blocks hold nothing of it")
        return rendering, _without_fields(rendering, stretches, rule.left_out) if rule.left_out else stretches

    def by_turn(self, talk: Conversation) -> list[Conversation]:
        """Examples whose trained turns are as a model sees them at inference.

        Trained turns that the template leaves as they are when the next one follows share one; of each example the
        turns of those before it are not trained on. Where nothing is rewritten, that is the conversation itself.
        """
        fitting, examples = self.fitting(talk), list[Conversation]()

        def written(count: int) -> Rendering:
            return self.template.render(fitting.messages[:count], fitting.tools, **fitting.variables)

        wanted = self.rule.messages(fitting.messages, talk.prompt_messages)
        first = wanted[0]
        for number, after in itertools.pairwise(wanted):
            asked = written(number + 1)
            end = max((end for _, end in asked.turns.get(number, ())), default=len(asked.text))
            if not written(after + 1).text.startswith(asked.text[:end]):
                examples.append(replace(talk, messages=talk.messages[: number + 1], prompt_messages=first))
                first = after
        return [*examples, replace(talk, prompt_messages=first)] if examples else [talk]

    def _turn(self, talk: Conversation, number: int, rendering: Rendering) -> list[Stretch]:
        """The trained stretches of a turn, where the template has no tags."""
        text, (begin, end) = rendering.text, _block_of(rendering, number, talk.messages)
        header, is_last = self._header(str(talk.messages[number]["role"]), talk), number == len(talk.messages) - 1
        # The first turn may come behind what begins the text, such as a default system prompt.
        at = text.find(header.text, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header.text, at, end):
            at, header = begin, self._header_of_turn(talk, number, rendering, header)
        begin = at + len(header.text)
        if not self.rule.turn_end:
            tail = header.last_tail if is_last else header.tail
            if not text.endswith(tail, begin, end):
                raise _not_proven(f"message {number} does not end with {tail!r} as others of its role do")
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

    def _header(self, role: str, talk: Conversation) -> _Header:
        """How turns of a role begin, with the variables of a conversation."""
        key = role, repr(talk.variables) if talk.variables else ""
        known = self._headers.get(key)
        if known is None:
            try:
                known = _probed(self.template, role, talk.variables, in_parts=self._in_parts)
            except BadRowError as error:
                known = str(error)
            if len(self._headers) < 1000:
                self._headers[key] = known
        if isinstance(known, str):
            raise _not_proven(known)
        return known

    def _header_of_turn(self, talk: Conversation, number: int, rendering: Rendering, usual: _Header) -> _Header:
        """The header of a turn that does not begin as others do: what the template writes to ask for this one."""
        begin, end = _block_of(rendering, number, talk.messages)
        if talk.messages[number]["role"] == ASSISTANT:
            asked = self.template.render(
                talk.messages[:number], talk.tools, generation_prompt=True, **talk.variables
            ).text
            prompt = _without_open_tags(asked[begin:], [rendering.text[begin:end]])
            if asked[:begin] == rendering.text[:begin] and rendering.text.startswith(prompt, begin, end):
                return replace(usual, text=prompt)
        raise _not_proven(f"message {number} does not begin with {usual.text!r} as others of its role do")


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _with_reasoning(message: Message) -> Message:
    """Under all names that templates have for it, as transformers gives it to them."""
    said = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if said is None else {"thinking": said} | message | {"reasoning_content": said}


def _with_parsed_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            arguments = parsed(function["arguments"], "bad_tool_call", "the arguments of a tool call")
            call = call | {"function": function | {"arguments": arguments}}
        calls.append(call)
    return message | {"tool_calls": calls}


def _block_of(rendering: Rendering, number: int, messages: Sequence[Message]) -> Stretch:
    """What was written for a message, and nowhere else."""
    blocks = rendering.turns.get(number, [])
    if len(blocks) != 1:
        count = "nowhere" if not blocks else f"{len(blocks)} times"
        raise _not_proven(f"message {number} ({messages[number]['role']}) is written {count}")
    return blocks[0]


def _prove(rendering: Rendering, turns: dict[int, list[Stretch]], messages: Sequence[Message]) -> None:
    """Words of trained messages stand in their own stretches, and no others do."""
    stretches = sorted((*one, number) for number, several in turns.items() for one in several)
    if any(one[1] > other[0] for one, other in itertools.pairwise(stretches)):
        raise _not_proven("the template writes a turn within another one, or turns in another order")
    begins, heard = [begin for begin, _, _ in stretches], set[int]()
    for begin, end, source in rendering.words:
        message = source[1] if source[0] == "messages" else None
        where = bisect_right(begins, begin) - 1
        if where >= 0 and end <= stretches[where][1]:
            number = stretches[where][2]
            if message != number:
                raise _not_proven(f"the turn of message {number} holds what other messages say")
            if number not in heard and not rendering.text[begin:end].isspace():
                heard.add(number)
            continue
        # Results of tools may name the call that they answer.
        names_a_call = source[2:3] == ("tool_calls",) and source[-1] in ("name", "id")
        touches = (where + 1 < len(begins) and end > begins[where + 1]) or (where >= 0 and begin < stretches[where][1])
        if touches or (message in turns and not names_a_call):
            raise _not_proven("what is trained on is also written outside its own turn")
    for number in turns.keys() - heard:
        if any(map(_is_said, (messages[number].get(name) for name in ("content", "tool_calls", *REASONING)))):
            raise _not_proven(f"nothing that message {number} says is written by the template")


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
        raise BadRowError("nothing_to_train_on", "its messages say nothing of what is to be trained on")
    return _joined(kept)


def _fields_in(rendering: Rendering, begin: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Words in a stretch with their field; thinking within a content is reasoning."""
    for start, stop, source in rendering.words:
        if not begin <= start < end:
            continue
        if len(source) < 3:
            raise _not_proven("the template mixes the fields of messages")
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


class _ButEmpty(list[Any]):
    """Tool calls that are there, and none: what a template writes for a turn in which nothing is said."""

    def __bool__(self) -> bool:
        return True


def _probed(template: ChatTemplate, role: str, variables: Mapping[str, Any], *, in_parts: bool) -> _Header:
    """What turns of a role have in common, whatever is said in them."""

    def says(who: str, text: str) -> Message:
        return {"role": who, "content": _in_parts(text) if in_parts else text}

    ask, answer = says("user", "q"), says(ASSISTANT, "a")
    before, behind = [ask], [[], [ask]]
    if role == "user":
        before, behind = [ask, answer], [[], [answer]]
    elif role in ("system", "developer"):
        before, behind = [], [[ask]]

    def turns(said: Message) -> Iterator[tuple[bool, str, str]]:
        """Of a message as the last one, and before another: whether it is, its block, and its text up to words."""
        for more in behind:
            with contextlib.suppress(TemplateRefusedError):
                rendering = template.render([*before, said, *more], follow=True, **variables)
                blocks = rendering.turns.get(len(before), ())
                if len(blocks) == 1:
                    begin, end = blocks[0]
                    own = (at for at, _, source in rendering.words if source[:2] == ("messages", len(before)))
                    first = next((at for at in own if at >= begin), end)
                    yield not more, rendering.text[begin:end], rendering.text[begin:first]

    plain = [turn for text in ("Aq7", "") for turn in turns(says(role, text))]
    if not plain:
        raise _not_proven(f'the template does not go over messages of role "{role}" one by one')
    header, prompt = _common_start([lead for _, _, lead in plain]), ""
    if role == ASSISTANT:
        odd = [says(role, "Aq7") | dict.fromkeys(REASONING, "Rx9"), says(role, "") | {"tool_calls": _ButEmpty()}]
        every = [*plain, *(turn for one in odd for turn in turns(one))]
        whole = template.render([ask, says(ASSISTANT, "Aq7")], **variables)
        asked = template.render([ask], generation_prompt=True, **variables).text
        if len(whole.turns.get(1, ())) != 1:
            raise _not_proven("the template does not go over messages one by one")
        begin = whole.turns[1][0][0]
        if asked[:begin] != whole.text[:begin]:
            raise _not_proven("the template writes a question in another way where it is to be answered")
        prompt = asked[begin:]
        header = _given_header(header, [block for _, block, _ in every], [lead for _, _, lead in every], prompt)
    elif not header.strip():
        raise _not_proven(f'the template writes nothing in front of what "{role}" says')
    ends = [
        [block[len(header) :][::-1] for is_last, block, _ in plain if is_last == at_end] for at_end in (False, True)
    ]
    tail, last_tail = (_common_start(some)[::-1] for some in (ends[0] or ends[1], ends[1] or ends[0]))
    return _Header(header, tail, last_tail, prompt)


def _given_header(shared: str, blocks: Sequence[str], leads: Sequence[str], prompt: str) -> str:
    """What the model is given of a turn, by what plain turns share, by all turns, and by the generation prompt."""
    if not prompt and shared.strip():
        raise _not_proven(f"the template has no generation prompt, so that nothing tells whose {shared!r} is")
    if not any(lead.startswith(prompt) for lead in leads):
        return ""
    header = _without_open_tags(_common_start([prompt, *leads]), blocks)
    beyond = shared[len(prompt) :] if shared.startswith(prompt) else ""
    for tag in _TAG.findall(beyond):
        # Only pairs that are opened and closed, such as <think></think>, belong to it.
        name, opens, closes = tag.strip("<>[]/"), tag[0], tag[-1]
        if f"{opens}{name}{closes}" not in shared or f"{opens}/{name}{closes}" not in shared:
            return ""
    return header


def _common_start(texts: Sequence[str]) -> str:
    """What all texts begin with: what the first and the last of them in order do."""
    low, high = min(texts), max(texts)
    return low[: next((at for at, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), len(low))]


def _without_open_tags(header: str, blocks: Sequence[str]) -> str:
    """A header up to a tag, such as <think>, that a turn closes."""
    while tag := _OPENING.search(header):
        closing = f"</{tag[1]}>" if tag[1] else f"[/{tag[2]}]"
        if not any(closing in block for block in blocks):
            break
        header = header[: tag.start()]
    return header
