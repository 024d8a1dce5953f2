"""Which stretches of a rendered conversation are trained on: taken from the template's own tags, or derived and proven.

A template with `{% generation %}` says itself what the assistant wrote, and that is taken as it stands. For one
without, a turn is what was written while the template's loop was at the message, less what was written there for other
messages (tool results within a turn), and less its header:

    <|im_start|>assistant            header: the generation prompt, which the model is given: never trained on
    <think>                          a tag that is closed in the turn is the model's, even where the prompt begins it
    \\nParis.                         what the assistant wrote
    <|im_end|>\\n                     the end of the turn

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

from milldam.chat.forms import REASONING, WEIGHT_FIELDS, BadRowError, Conversation, Message
from milldam.chat.loading import TemplateSource
from milldam.chat.template import ChatTemplate, Rendering, Stretch, TemplateRefusedError
from milldam.errors import ConfigError

ASSISTANT, LAST, ALL = "assistant", "last", "all"
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


def train_on(words: str | Sequence[str] | Mapping[str, bool]) -> TrainOn:
    """`assistant`, `last`, `all`, the name of a weight field, a role, a list of roles, or roles and fields by name.

    >>> train_on("last").last, train_on(["user", "assistant"]).roles, train_on("weight").field
    (True, ('user', 'assistant'), 'weight')
    >>> train_on({"assistant": True, "reasoning": False}).left_out
    frozenset({'reasoning'})
    """
    if words == ALL:
        return TrainOn(everything=True)
    if isinstance(words, str):
        if words in WEIGHT_FIELDS:
            return TrainOn(field=words)
        words = [words]
    if not isinstance(words, Mapping):
        words = {name.removeprefix("-"): not name.startswith("-") for name in words}
    roles = tuple(name for name, wanted in words.items() if wanted and name not in (*FIELDS, LAST))
    left_out = frozenset(name for name in FIELDS if not words.get(name, True))
    if not words or left_out == set(FIELDS):
        raise ConfigError("train_on: no role is named, or all fields are false. Nothing would be trained on.")
    return TrainOn(roles or (ASSISTANT,), last=bool(words.get(LAST)), left_out=left_out)


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


class Masks:
    """Renders conversations by a template, or another one where they have tools, and finds what is trained on."""

    def __init__(self, source: TemplateSource, rule: TrainOn, special_tokens: Iterable[str] = ()) -> None:
        self._rule = rule
        self._plain = self._with_tools = ChatTemplate(source.text, source.variables, source.date)
        if source.tool_text is not None:
            self._with_tools = ChatTemplate(source.tool_text, source.variables, source.date)
        self.tagged = self._plain.tagged
        """Whether the template says itself what the assistant writes."""
        self._headers: dict[tuple[str, ...], tuple[str, str] | str] = {}
        """By role, variables and template; a text says why there is none."""
        tokens = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special_in = re.compile("|".join(map(re.escape, tokens))).search if tokens else None
        letters = {token[0] for token in tokens}
        self._special_letter = letters.pop() if len(letters) == 1 else ""
        """What all begin with, found ten times as fast: most texts do not even have that."""

    def says_special(self, talk: Conversation) -> bool:
        """Whether there are special tokens in what is said."""
        search, letter = self._special_in, self._special_letter
        if search is None:
            return False
        for message in talk.messages:
            text = message.get("content")
            if type(text) is str and letter in text and search(text):
                return True
        return False

    def find(self, talk: Conversation) -> tuple[Rendering, list[Stretch], bool]:
        """The rendering, its trained stretches of characters in order, and whether these are derived: not everything,
        nor what the template's tags hold. BadRowError where it is refused, or they are not certain."""
        rule, messages, template = self._rule, talk.messages, self._template(talk)
        if rule.everything:
            if not all(map(_weighs, messages)):
                raise _not_proven("a message has a weight of 0, but everything is to be trained on")
            rendering = _rendered(template, talk)
            return rendering, _joined([(0, len(rendering.text))]), False
        wanted = rule.messages(messages, talk.prompt_messages)
        derives = not template.tagged or any(messages[number]["role"] != ASSISTANT for number in wanted)
        rendering = _rendered(template, talk, follow=derives or bool(rule.left_out))
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
        return rendering, _without_fields(rendering, stretches, rule.left_out) if rule.left_out else stretches, derives

    def by_turn(self, talk: Conversation) -> list[Conversation]:
        """Examples whose trained turns are as a model sees them at inference.

        Trained turns that the template leaves as they are when the next one follows share one; of each example the
        turns of those before it are not trained on. Where nothing is rewritten, that is the conversation itself.
        """
        template, examples = self._template(talk), list[Conversation]()
        wanted = self._rule.messages(talk.messages, talk.prompt_messages)
        first = wanted[0]
        for number, after in itertools.pairwise(wanted):
            asked = _rendered(template, talk, number + 1)
            end = max((end for _, end in asked.turns.get(number, ())), default=len(asked.text))
            if not _rendered(template, talk, after + 1).text.startswith(asked.text[:end]):
                examples.append(replace(talk, messages=talk.messages[: number + 1], prompt_messages=first))
                first = after
        return [*examples, replace(talk, prompt_messages=first)] if examples else [talk]

    def _template(self, talk: Conversation) -> ChatTemplate:
        return self._plain if talk.tools is None else self._with_tools

    def _turn(self, talk: Conversation, number: int, rendering: Rendering) -> list[Stretch]:
        """The trained stretches of a turn, where the template has no tags."""
        text, (begin, end) = rendering.text, _block_of(rendering, number, talk.messages)
        header, prompt = self._header(str(talk.messages[number]["role"]), talk)
        # The first turn may come behind what begins the text, such as a default system prompt.
        at = text.find(header, begin, end) if begin == 0 or number == 0 else begin
        if at < 0 or not text.startswith(header, at, end):
            at, header = begin, self._header_of_turn(talk, number, rendering, header)
        begin, is_last = at + len(header), number == len(talk.messages) - 1
        if is_last and not any(one.strip() and one.strip() in text[end:] for one in (header, prompt)):
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

    def _header(self, role: str, talk: Conversation) -> tuple[str, str]:
        """How turns of a role begin, with the variables of a conversation, and the generation prompt."""
        key = role, repr(talk.variables) if talk.variables else "", "" if talk.tools is None else "tools"
        known = self._headers.get(key)
        if known is None:
            try:
                known = _probed(self._template(talk), role, talk.variables)
            except BadRowError as error:
                known = str(error)
            if len(self._headers) < 1000:
                self._headers[key] = known
        if isinstance(known, str):
            raise _not_proven(known)
        return known

    def _header_of_turn(self, talk: Conversation, number: int, rendering: Rendering, usual: str) -> str:
        """The header of a turn that does not begin as others do: what the template writes to ask for this one."""
        begin, end = _block_of(rendering, number, talk.messages)
        if talk.messages[number]["role"] == ASSISTANT:
            asked = _rendered(self._template(talk), talk, number, generation_prompt=True).text
            prompt = _without_open_tags(asked[begin:], [rendering.text[begin:end]])
            if asked[:begin] == rendering.text[:begin] and rendering.text.startswith(prompt, begin, end):
                return prompt
        raise _not_proven(f"message {number} does not begin with {usual!r} as others of its role do")


def _rendered(template: ChatTemplate, talk: Conversation, count: int | None = None, **how: bool) -> Rendering:
    """The first `count` messages of a conversation; None: all."""
    return template.render(talk.messages[:count], talk.tools, **how, **talk.variables)


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


def _probed(template: ChatTemplate, role: str, variables: Mapping[str, Any]) -> tuple[str, str]:
    """The header that turns of a role have in common, whatever is said in them; for the assistant with the prompt."""
    ask, answer = {"role": "user", "content": "q"}, {"role": ASSISTANT, "content": "a"}
    before, behind = [ask], [[], [ask]]
    if role == "user":
        before, behind = [ask, answer], [[], [answer]]
    elif role in ("system", "developer"):
        before, behind = [], [[ask]]

    def turns(**said: Any) -> Iterator[tuple[str, str]]:
        """Of a message as the last one, and before another: its block, and its text up to words."""
        for more in behind:
            with contextlib.suppress(TemplateRefusedError):
                rendering = template.render([*before, {"role": role, **said}, *more], follow=True, **variables)
                blocks = rendering.turns.get(len(before), ())
                if len(blocks) == 1:
                    begin, end = blocks[0]
                    own = (at for at, _, source in rendering.words if source[:2] == ("messages", len(before)))
                    first = next((at for at in own if at >= begin), end)
                    yield rendering.text[begin:end], rendering.text[begin:first]

    plain = [*turns(content="Aq7"), *turns(content="")]
    if not plain:
        raise _not_proven(f'the template does not go over messages of role "{role}" one by one')
    header = _common_start([lead for _, lead in plain])
    if role != ASSISTANT:
        if not header.strip():
            raise _not_proven(f'the template writes nothing in front of what "{role}" says')
        return header, ""
    thinking, calling = dict.fromkeys(REASONING, "Rx9"), {"tool_calls": _ButEmpty()}
    every = [*plain, *turns(content="Aq7", **thinking), *turns(content="", **calling)]
    whole = template.render([ask, {"role": ASSISTANT, "content": "Aq7"}], **variables)
    asked = template.render([ask], generation_prompt=True, **variables).text
    if len(whole.turns.get(1, ())) != 1:
        raise _not_proven("the template does not go over messages one by one")
    begin = whole.turns[1][0][0]
    if asked[:begin] != whole.text[:begin]:
        raise _not_proven("the template writes a question in another way where it is to be answered")
    prompt = asked[begin:]
    return _given_header(header, [block for block, _ in every], [lead for _, lead in every], prompt), prompt


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
