"""Rows of a dataset -> conversations, whatever form they have.

    messages       {"messages": [{"role", "content", "tool_calls", ...}], "tools": [...]}          OpenAI
    conversations  {"conversations": [{"from", "value"}], "system", "tools"}                      ShareGPT
    instruction    {"instruction", "input", "output", "history", "system"}                        Alpaca
    completion     {"prompt", "completion"}: texts or messages
    preference     {"prompt", "chosen", "rejected"}: texts or messages; the prompt may also be messages, conversations
                   or an instruction, or be what both answers begin with

A `label` (true or false, as KTO takes it) may stand beside any but the last. The form is recognised from the first
rows, or set. What does not fit raises BadRowError with a reason by name, for that row alone.

Contents are taken as they are. Roles are unified (human -> user, gpt -> assistant, observation -> tool), text parts
joined, ShareGPT's function calls made `tool_calls`, and bare descriptions of functions `tools`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
_ROLES = {
    **dict.fromkeys(("human", "user", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard", "Assistant"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Roles of ShareGPT data. Others stay as they are: the template decides."""
_REFUSED = {
    **dict.fromkeys(("image", "images", "image_url", "input_image"), "has_image"),
    **dict.fromkeys(("audio", "audios", "audio_url", "input_audio"), "has_audio"),
    **dict.fromkeys(("video", "videos", "video_url"), "has_video"),
    "function_call": "bad_tool_call",
    "functions": "bad_tools",
    "train_detail": "trained_in_part",
}
"""Fields of a row, a message or a part that would be lost: the reason for which it is refused."""
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "content"),
    **dict.fromkeys(("reasoning", "thinking"), "reasoning_content"),
}
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field that holds a message's reasoning."""
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


@dataclass(frozen=True)
class Form:
    """How conversations lie in rows."""

    name: str
    columns: Mapping[str, str]
    """What each column of ours is called."""
    seen: tuple[str, ...] = ()
    """Those that the first rows have. Others may come: the first conversations may have no tools."""
    labelled: bool = False

    def conversations(self, row: Row) -> tuple[Conversation, ...]:
        """The one in a row, or the chosen and the rejected side of a pair. BadRowError if there is none."""
        name = self.name
        messages: Any = row.get(self.columns[name]) if name in (MESSAGES, CONVERSATIONS) else None
        if messages is not None and not self.labelled and self.others.isdisjoint(row) and _are_plain(messages):
            return (Conversation(messages),)
        _refuse(row, "the row")
        # Columns by our names.
        row = {ours: row.get(theirs) for ours, theirs in self.columns.items()}
        if name == PREFERENCE:
            return _pair(row)
        prompt: list[Message] = []
        if name == COMPLETION:
            prompt = _turns(row["prompt"], "user", "no_prompt")
            messages = prompt + _turns(row["completion"], "assistant", "no_assistant")
        elif name == INSTRUCTION:
            messages = _instruction(row) + _turns(row["output"], "assistant", "no_assistant")
        else:
            messages = _messages(row[name])
        if self.labelled and not _is_label(row["label"]):
            raise BadRowError("bad_label", f"label is {row['label']!r}, neither true nor false")
        return (_conversation(row, messages, len(prompt), bool(row["label"]) if self.labelled else None),)

    @cached_property
    def others(self) -> frozenset[str]:
        """Columns that matter besides the one with the messages."""
        return frozenset((*self.columns.values(), *_REFUSED)) - {self.columns[self.name]}

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
    named = {name: columns.get(name, name) for name in _COLUMNS if columns.get(name, name) in present}
    if form == "auto":
        form = next((known for known, needed in _NEEDED.items() if all(name in named for name in needed)), form)
    missing = [name for name in _NEEDED.get(form, ()) if name not in named]
    if form not in _NEEDED or missing:
        example = {(missing or ["prompt"])[0]: min(present, default="x")}
        raise InputError(
            f"No conversations found: columns {', '.join(sorted(present)) or 'none'}.\n"
            f"Say what they are ({', '.join(_NEEDED)}): ",
            Setting("chat.form", COMPLETION),
            ", or what the columns are called, each: ",
            Setting("chat.columns", example),
            ".",
        )
    label = named.get("label")
    labelled = form != PREFERENCE and label is not None
    if labelled and "label" not in columns:
        # A column of that name may hold anything. KTO's is true or false.
        labelled = all(_is_label(row.get(str(label))) for row in rows if row)
    seen = tuple(column for name, column in named.items() if name != "label" or labelled)
    return Form(form, {name: name for name in _COLUMNS} | dict(columns) | named, seen, labelled)


def records_of(rows: pa.RecordBatch | Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows of columns or of an Arrow table as dicts, without nulls: those of fields that the row has not.

    In a table all tools have the fields of any, and so have all arguments: those of another tool are null. A template
    would write them.
    """
    if isinstance(rows, Mapping):
        return [
            {name: value for name, value in zip(rows, values, strict=True) if value is not None}
            for values in zip(*rows.values(), strict=True)
        ]

    def without_nulls(value: Any) -> Any:
        if isinstance(value, list):
            return [without_nulls(one) for one in value]
        if isinstance(value, dict):
            return {key: without_nulls(one) for key, one in value.items() if one is not None}
        return value

    return list(map(without_nulls, rows.to_pylist()))


def _conversation(row: Row, messages: list[Message], prompt: int, label: bool | None = None) -> Conversation:
    """Messages with the tools, the variables and the system prompt that stand beside them in a row."""
    system, variables = row["system"], row["chat_template_kwargs"]
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
    return Conversation(messages, _tools(row["tools"]), variables, label, prompt)


def _instruction(row: Row) -> list[Message]:
    messages: list[Message] = []
    for turn in row["history"] or ():
        if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
            raise BadRowError("bad_history", f"a turn of the history is {str(turn)[:80]!r}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    parts = [one for one in (row["instruction"], row["input"]) if one]
    if not parts or not all(isinstance(one, str) for one in parts):
        raise BadRowError("no_prompt", "there is no instruction")
    return [*messages, {"role": "user", "content": "\n".join(parts)}]


def _pair(row: Row) -> tuple[Conversation, ...]:
    chosen, rejected = (_turns(row[name], "assistant", f"no_{name}") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRowError("same_answers", "chosen and rejected are the same")
    turns = row[CONVERSATIONS] if row[CONVERSATIONS] is not None else row[MESSAGES]
    if row["prompt"] is not None:
        prompt = _turns(row["prompt"], "user", "no_prompt")
    elif turns is not None:
        prompt = _messages(turns)
    elif row["instruction"] is not None:
        prompt = _instruction(row)
    else:
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        prompt = [one for one, _ in same]
    if not prompt:
        raise BadRowError("no_prompt", "chosen and rejected do not begin with the same messages")
    # Both may hold the prompt again, as those of UltraFeedback do.
    sides = [one if one[: len(prompt)] == prompt else prompt + one for one in (chosen, rejected)]
    if any(len(one) <= len(prompt) for one in sides):
        raise BadRowError("no_assistant", "there is nothing after the prompt")
    return tuple(_conversation(row, one, len(prompt)) for one in sides)


def _turns(value: Any, role: str, reason: str) -> list[Message]:
    """A text of a role, a message, or messages."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, dict):
        return [_message(value)]
    if isinstance(value, (list, tuple)) and value:
        return _messages(value)
    kind = type(value).__name__ if value else "nothing"
    raise BadRowError(reason, f"there is {kind} where a text should be")


def _refuse(fields: Row, what: str) -> None:
    for name in () if _REFUSED.keys().isdisjoint(fields) else _REFUSED:
        if fields.get(name):
            raise BadRowError(_REFUSED[name], f'{what} has a field "{name}"')


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


def _message(value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRowError("bad_message", f"a message is {str(value)[:80]!r}")
    # As transformers does: of null, templates would write "None". And a column of Parquet has every key in each.
    message = {key: one for key, one in value.items() if one is not None}
    role = message.pop("from", None) if "role" not in message else message["role"]
    if not isinstance(role, str) or not role:
        raise BadRowError("no_role", "a message has no role")
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    # `role` goes first, as templates that write a message whole show it.
    message = {"role": _ROLES.get(role, role)} | {key: one for key, one in message.items() if key != "role"}
    if message["role"] == "function_call":  # a turn of ShareGPT
        weights = {name: message[name] for name in WEIGHT_FIELDS if name in message}
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(message.get("content")), **weights}
    _refuse(message, f"a message of {role}")
    if isinstance(message.get("content"), (list, tuple)):
        message = _joined(message)
    if isinstance(message.get("tool_calls"), (str, list, tuple)):
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise BadRowError("no_content", f"a message of {role} has no content")
    if content is not None and not isinstance(content, str):
        raise BadRowError("bad_content", f"the content of {role} is {type(content).__name__}, not a text")
    return message


def _joined(message: Message) -> Message:
    """A message whose content is in parts, with the texts, the reasoning and the tool calls in them."""
    joined = message | {"content": ""}
    calls = _tool_calls(message.get("tool_calls") or [])
    for part in message["content"]:
        part = {"text": part} if isinstance(part, str) else part
        if not isinstance(part, dict):
            raise BadRowError("bad_content", f"a part of a message is {str(part)[:80]!r}")
        kind = part.get("type", "text")
        _refuse({**part, kind: True}, "a part of a message")
        if any(part.get(name) is not None for name in WEIGHT_FIELDS):
            raise BadRowError("trained_in_part", "a part of a message has a weight: only whole messages may have one")
        value = next((part[key] for key in ("text", "value", kind) if part.get(key) is not None), None)
        if kind == "tool_call" and value is not None:
            calls += _tool_calls(value)
        elif kind in _TEXT_PARTS and isinstance(value, str):
            joined[_TEXT_PARTS[kind]] = joined.get(_TEXT_PARTS[kind], "") + value
        else:
            raise BadRowError("bad_content", f"a message has a part of type {kind!r} without a text")
    return joined | {"tool_calls": calls} if calls else joined


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
    tools = []
    for tool in value if isinstance(value, (list, tuple)) else [value]:
        tool = parsed(tool, "bad_tools", "a tool") if isinstance(tool, str) else tool
        if not isinstance(tool, dict):
            raise BadRowError("bad_tools", f"a tool is {str(tool)[:80]!r}")
        if "function" not in tool and "name" in tool and tool.get("type", "function") == "function":
            tool = {"type": "function", "function": {key: one for key, one in tool.items() if key != "type"}}
        tools.append(tool)
    return tools


def parsed(text: str, reason: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(reason, f"{what}: not JSON ({error})") from None


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, int)) and value in (0, 1)
