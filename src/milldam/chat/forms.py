"""Rows of a dataset -> conversations, whatever form they have.

    messages       {"messages": [{"role", "content", "tool_calls", ...}], "tools": [...]}          OpenAI
    conversations  {"conversations": [{"from", "value"}], "system", "tools"}                      ShareGPT
    instruction    {"instruction", "input", "output", "history", "system"}                        Alpaca
    completion     {"prompt", "completion"}: texts or messages
    preference     {"prompt", "chosen", "rejected"}: texts or messages; the prompt may also be messages, conversations
                   or an instruction, or be what both answers begin with

A `label` (true or false, as KTO takes it) may stand beside any but the last. The form is recognised from the first
rows, or set. What does not fit raises BadRowError with a reason by name, for that row alone.

Nothing is invented: contents are taken as they are. Roles are unified (human -> user, gpt -> assistant, observation ->
tool), text parts joined, function calls made `tool_calls`, and bare descriptions of functions `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from milldam.errors import ConfigError, InputError, MilldamError, Setting

if TYPE_CHECKING:
    import pyarrow as pa

Row = Mapping[str, Any]
Message = dict[str, Any]

MESSAGES, CONVERSATIONS, INSTRUCTION = "messages", "conversations", "instruction"
COMPLETION, PREFERENCE = "completion", "preference"
_NEEDED = {
    PREFERENCE: ("chosen", "rejected"),
    MESSAGES: ("messages",),
    CONVERSATIONS: ("conversations",),
    COMPLETION: ("prompt", "completion"),
    INSTRUCTION: ("instruction", "output"),
}
"""Columns of each form, in the order in which they are tried."""
_COLUMNS = (
    *("messages", "conversations", "instruction", "input", "output", "history", "system", "tools"),
    *("prompt", "completion", "chosen", "rejected", "label", "chat_template_kwargs"),
)
_OTHER_NAMES = {"messages": ("conversation", "dialogue", "dialog", "chat"), "completion": ("response", "answer")}
_OLD_TOOLS = "functions"
"""OpenAI's name for tools before there were tools."""
_ROLES = {
    **dict.fromkeys(("human", "user", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard", "Assistant"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Roles of ShareGPT data. Others stay as they are: the template decides."""
_MEDIA = {
    "has_image": ("image", "images", "image_url", "input_image"),
    "has_audio": ("audio", "audios", "audio_url", "input_audio"),
    "has_video": ("video", "videos", "video_url"),
}
_MEDIA_NAMES = {name: reason for reason, names in _MEDIA.items() for name in names}
WEIGHT_FIELDS = ("weight", "loss_weight", "train")
"""Of a message, or of its parts: whether it is trained on."""
_RESERVED = ("messages", "tools", "add_generation_prompt")
_PLAIN, _PLAIN_ROLES = {("role", "content")}, frozenset(("system", "developer", "user", "assistant", "tool"))
_role, _content = itemgetter("role"), itemgetter("content")


class BadRowError(MilldamError):
    """A row is no conversation. `reason` is a name to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Conversation:
    """Never changed. Not frozen: making one would take twice as long."""

    messages: list[Message]
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """For the template, besides those of the settings: the row's `chat_template_kwargs`."""
    label: bool | None = None
    prompt_messages: int = 0
    """So many messages at the front are a prompt, and never trained on."""

    @property
    def sides(self) -> tuple[Conversation, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Conversation
    rejected: Conversation

    @property
    def sides(self) -> tuple[Conversation, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class Form:
    """How conversations lie in rows."""

    name: str
    columns: Mapping[str, str]
    """What each column of ours is called."""
    seen: tuple[str, ...] = ()
    """Those that the first rows have. Others may come: the first conversations may have no tools."""
    labelled: bool = False

    def conversation(self, row: Row) -> Conversation | Pair:
        """BadRowError if there is none in the row."""
        if len(row) == 1 and not self.labelled and self.name in (MESSAGES, CONVERSATIONS):
            messages: Any = row.get(self.columns[self.name])
            if _are_plain(messages):
                return Conversation(messages)
        return _Row(row, self).read()

    def reads(self, column: str) -> bool:
        """Whether it matters what is in a column of that name."""
        return column in self.columns.values() or column == _OLD_TOOLS or column in _MEDIA_NAMES

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.seen)})"


def recognise(rows: Sequence[Row], *, form: str = "auto", columns: Mapping[str, str] | None = None) -> Form:
    """The form of the first rows; InputError if it is none of ours.

    >>> str(recognise([{"conversations": [{"from": "human", "value": "Hi"}], "tools": "[]"}]))
    'conversations (conversations, tools)'
    """
    columns = columns or {}
    for name in columns:
        if name not in _COLUMNS:
            message = f": no column is called {name!r}; there are {', '.join(_COLUMNS)}."
            raise ConfigError(Setting("chat.columns"), message)
    present = {name for row in rows for name, value in row.items() if value is not None}
    named: dict[str, str] = {}
    for name in _COLUMNS:
        for candidate in (columns[name],) if name in columns else (name, *_OTHER_NAMES.get(name, ())):
            if candidate in present:
                named.setdefault(name, candidate)
    if form == "auto":
        form = next((known for known, needed in _NEEDED.items() if all(name in named for name in needed)), form)
    listed, example = ", ".join(sorted(present)) or "nothing", min(present, default="x")
    if form not in _NEEDED:
        raise InputError(
            f"No conversations found: columns {listed}.\nSay what they are ({', '.join(_NEEDED)}): ",
            Setting("chat.form", COMPLETION),
            ", or what the columns are called, each: ",
            Setting("chat.columns", {"prompt": example}),
            ".",
        )
    for name in _NEEDED[form]:
        if name not in named:
            message = f"{form}: no column {name!r}; found {listed}. Say what it is called: "
            raise InputError(message, Setting("chat.columns", {name: example}), ".")
    label = named.get("label")
    labelled = form != PREFERENCE and label is not None
    if labelled and "label" not in columns:
        # A column of that name may hold anything. KTO's is true or false.
        labelled = all(_is_label(row.get(str(label))) for row in rows if row)
    seen = tuple(column for name, column in named.items() if name != "label" or labelled)
    return Form(form, {name: name for name in _COLUMNS} | dict(columns) | named, seen, labelled)


def from_table(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of an Arrow table as dicts, without what only the table's type put into them.

    In a table all tools have the fields of any, and so have all arguments: those of another tool are null. A template
    would write them.
    """

    def without_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(one) for one in value]
        if isinstance(value, dict):
            return {key: without_nulls(one) for key, one in value.items() if one is not None}
        return value

    return [{name: without_nulls(value) for name, value in row.items()} for row in rows.to_pylist()]


class _Row:
    """A row that is to become a conversation."""

    def __init__(self, row: Row, form: Form) -> None:
        self._row, self._form = row, form
        if not _MEDIA_NAMES.keys().isdisjoint(row):
            for name, reason in _MEDIA_NAMES.items():
                if row.get(name):
                    raise BadRowError(reason, f'there is something in "{name}"')

    def get(self, name: str) -> Any:
        return self._row.get(self._form.columns[name])

    def read(self) -> Conversation | Pair:
        name, prompt = self._form.name, 0
        if name == PREFERENCE:
            return self._pair()
        if name == COMPLETION:
            asked = _said(self.get("prompt"), "user", "no_prompt")
            messages, prompt = asked + _said(self.get("completion"), "assistant", "no_assistant"), len(asked)
        elif name == INSTRUCTION:
            messages, output = self._instruction(), self.get("output")
            if not isinstance(output, str):
                raise BadRowError("no_assistant", "there is no output")
            messages.append({"role": "assistant", "content": output})
        else:
            messages = _messages(self.get(name))
        label = None
        if self._form.labelled:
            label = self.get("label")
            if not _is_label(label):
                raise BadRowError("bad_label", f"label is {label!r}, neither true nor false")
        return self._conversation(messages, prompt, None if label is None else bool(label))

    def _conversation(self, messages: list[Message], prompt: int, label: bool | None = None) -> Conversation:
        system, tools, variables = self.get("system"), self.get("tools"), self.get("chat_template_kwargs")
        if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
            prompt += 1 if prompt else 0
        if not messages:
            raise BadRowError("empty_conversation", "it has no messages")
        if isinstance(variables, str):
            variables = parsed(variables, "bad_variables", "chat_template_kwargs")
        variables = {} if variables is None else variables
        if not isinstance(variables, dict) or any(name in variables for name in _RESERVED):
            raise BadRowError("bad_variables", f"chat_template_kwargs: {str(variables)[:80]}")
        variables = {str(name): one for name, one in variables.items() if one is not None}
        tools = _tools(tools if tools is not None else self._row.get(_OLD_TOOLS))
        return Conversation(messages, tools, variables, label, prompt)

    def _instruction(self) -> list[Message]:
        messages: list[Message] = []
        for turn in self.get("history") or ():
            if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
                raise BadRowError("bad_history", f"a turn of the history is {str(turn)[:80]!r}")
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
        asked = [one for one in (self.get("instruction"), self.get("input")) if one]
        if not asked or not all(isinstance(one, str) for one in asked):
            raise BadRowError("no_prompt", "there is no instruction")
        return [*messages, {"role": "user", "content": "\n".join(asked)}]

    def _pair(self) -> Pair:
        chosen, rejected = (_said(self.get(name), "assistant", f"no_{name}") for name in ("chosen", "rejected"))
        if chosen == rejected:
            raise BadRowError("same_answers", "chosen and rejected are the same")
        prompt: list[Message] = []
        if self.get("prompt") is not None:
            prompt = _said(self.get("prompt"), "user", "no_prompt")
        elif (
            turns := next((name for name in (CONVERSATIONS, MESSAGES) if self.get(name) is not None), None)
        ) is not None:
            prompt = _messages(self.get(turns))
        elif self.get("instruction") is not None:
            prompt = self._instruction()
        if not prompt:
            while len(prompt) < min(len(chosen), len(rejected)) and chosen[len(prompt)] == rejected[len(prompt)]:
                prompt.append(chosen[len(prompt)])
            if not prompt:
                raise BadRowError("no_prompt", "chosen and rejected do not begin with the same messages")
        # Both may hold the prompt again, as those of UltraFeedback do.
        sides = [one if one[: len(prompt)] == prompt else prompt + one for one in (chosen, rejected)]
        if any(len(one) <= len(prompt) for one in sides):
            raise BadRowError("no_assistant", "there is nothing after the prompt")
        return Pair(*(self._conversation(one, len(prompt)) for one in sides))


def _said(value: Any, role: str, reason: str) -> list[Message]:
    """A text of a role, a message, or messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [_message(value)]
    if isinstance(value, (list, tuple)) and value:
        return _messages(value)
    raise BadRowError(
        reason, f"there is {'nothing' if not value else f'{type(value).__name__}'} where a text should be"
    )


# ---- messages ----


def _messages(value: Any) -> list[Message]:
    if isinstance(value, str):
        value = parsed(value, "no_messages", "messages")
    if not isinstance(value, (list, tuple)):
        raise BadRowError("no_messages", "there are no messages")
    if not value:
        raise BadRowError("empty_conversation", "it has no messages")
    return list(value) if _are_plain(value) else [_message(one) for one in value]


def _are_plain(messages: Any) -> bool:
    """Whether each message is a role and a text, in that order, and nothing has to be done to any."""
    # By functions in C alone: it is asked of every conversation.
    try:
        return (
            set(map(tuple, messages)) == _PLAIN
            and _PLAIN_ROLES.issuperset(map(_role, messages))
            and set(map(type, map(_content, messages))) == {str}
        )
    except TypeError:
        return False


def _message(given: Any) -> Message:
    if not isinstance(given, dict):
        raise BadRowError("bad_message", f"a message is {str(given)[:80]!r}")
    # As transformers does: of null, templates would write "None". And a column of Parquet has every key in each.
    message = {key: value for key, value in given.items() if value is not None}
    role = message.pop("from", None) if "role" not in message else message["role"]
    if not isinstance(role, str) or not role:
        raise BadRowError("no_role", "a message has no role")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    # `role` goes first, as templates that write a message whole show it.
    message = {"role": _ROLES.get(role, role)} | {key: value for key, value in message.items() if key != "role"}
    if message["role"] == "function_call":  # a turn of ShareGPT
        weights = {name: message[name] for name in WEIGHT_FIELDS if name in message}
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(message.get("content")), **weights}
    for name in () if _MEDIA_NAMES.keys().isdisjoint(message) else _MEDIA_NAMES:
        if message.get(name):
            raise BadRowError(_MEDIA_NAMES[name], f"a message of {message['role']} has one")
    if message.get("train_detail"):
        raise BadRowError(
            "trained_in_part", f"train_detail: a message of {message['role']} can't be trained on in part"
        )
    if isinstance(message.get("function_call"), dict):
        message["tool_calls"] = [*(message.get("tool_calls") or ()), message.pop("function_call")]
    if isinstance(message.get("content"), (list, tuple)):
        _join_parts(message)
    if isinstance(message.get("tool_calls"), (str, list, tuple)):
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRowError("no_content", f"a message of {message['role']} says nothing")
    if content is not None and not isinstance(content, str):
        raise BadRowError("bad_content", f"what {message['role']} says is {type(content).__name__}, not a text")
    return message


def _join_parts(message: Message) -> None:
    """Parts of a content -> a text, reasoning and tool calls, and the weights on which all parts agree."""
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    parts, calls = message["content"], list[Any]()
    for part in parts:
        kind, said = _part(part)
        if kind == "tool_call":
            calls += _tool_calls(said)
        else:
            texts["reasoning_content" if kind in ("reasoning", "thinking") else "content"].append(said)
    for name in WEIGHT_FIELDS:
        weights = [part.get(name) if isinstance(part, dict) else None for part in parts]
        if any(weight != weights[0] for weight in weights):
            raise BadRowError(
                "trained_in_part", f"{name} of its parts: a message of {message['role']} can't be trained on in part"
            )
        if weights and weights[0] is not None:
            message[name] = weights[0]
    message["content"] = "".join(texts["content"])
    if texts["reasoning_content"]:
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        message["tool_calls"] = [*_tool_calls(message.get("tool_calls") or []), *calls]


def _part(part: Any) -> tuple[str, Any]:
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, dict):
        raise BadRowError("bad_content", f"a part of a message is {str(part)[:80]!r}")
    kind = part.get("type", "text")
    for reason, names in _MEDIA.items():
        if kind in names or (kind != "text" and any(part.get(name) for name in names)):
            raise BadRowError(reason, f"a message has a part of type {kind}")
    said = next((part[key] for key in ("text", "value", kind) if part.get(key) is not None), None)
    known = kind in ("text", "input_text", "output_text", "reasoning", "thinking", "tool_call")
    if not known or said is None or (kind != "tool_call" and not isinstance(said, str)):
        raise BadRowError("bad_content", f"a message has a part of type {kind!r} without a text")
    return kind, said


def _tool_calls(value: Any) -> list[Any]:
    """Calls in any form -> OpenAI's. Arguments stay as they are: a dict, or JSON in a text."""
    if isinstance(value, str):
        value = parsed(value, "bad_tool_call", "a tool call")
    calls = []
    for call in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(call, dict):
            call = {key: one for key, one in call.items() if one is not None}
            call = call if "function" in call or "name" not in call else {"type": "function", "function": call}
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                calls.append(call)
                continue
        raise BadRowError("bad_tool_call", f"a tool call is {str(call)[:80]!r}")
    return calls


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = parsed(value, "bad_tools", "tools") if value.strip() else None
    if not value:
        return None
    tools = [value] if isinstance(value, dict) else value
    if not isinstance(tools, (list, tuple)):
        raise BadRowError("bad_tools", f"tools: {str(value)[:80]!r}")
    tools = [parsed(one, "bad_tools", "a tool") if isinstance(one, str) else one for one in tools]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise BadRowError("bad_tools", f"a tool is {str(tool)[:80]!r}")
        if "function" not in tool and "name" in tool and tool.get("type", "function") == "function":
            function = {key: one for key, one in tool.items() if key != "type"}
            tools[number] = {"type": "function", "function": function}
    return tools


def parsed(text: str, reason: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(reason, f"{what}: not JSON ({error})") from None


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, int)) and value in (0, 1)
