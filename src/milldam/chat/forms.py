"""Rows of a dataset -> conversations, whatever form they have.

    messages       {"messages": [{"role", "content", "tool_calls", ...}], "tools": [...]}          OpenAI
    conversations  {"conversations": [{"from", "value"}], "system", "tools"}                      ShareGPT
    instruction    {"instruction", "input", "output", "history", "system"}                        Alpaca
    completion     {"prompt", "completion"}: texts or messages
    preference     {"prompt", "chosen", "rejected"}: texts or messages; the prompt may also be messages, conversations
                   or an instruction, or be what both answers begin with

A `label` (true or false, as KTO takes it) may stand beside any but the last. The form is recognised from the first
rows, or set. What does not fit raises BadRowError with a reason by name, for that row alone.

Nothing is invented: contents are taken as they are. Roles are put into one form (human -> user, gpt -> assistant,
observation -> tool), text parts joined, function calls made `tool_calls`, and bare descriptions of functions `tools`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
FORMS = (MESSAGES, CONVERSATIONS, INSTRUCTION, COMPLETION, PREFERENCE)
COLUMNS = (
    *("messages", "conversations", "instruction", "input", "output", "history", "system", "tools"),
    *("prompt", "completion", "chosen", "rejected", "label", "chat_template_kwargs"),
)
"""What the columns are called, unless settings say otherwise."""
_OTHER_NAMES = {"messages": ("conversation", "dialogue", "dialog", "chat"), "completion": ("response", "answer")}

_ROLES = {
    **dict.fromkeys(("human", "user", "User", "Human"), "user"),
    **dict.fromkeys(("gpt", "assistant", "model", "bot", "chatgpt", "bing", "bard", "Assistant"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""What ShareGPT data call the roles. Others stay as they are: the template decides."""
_MEDIA = {
    "has_image": ("image", "images", "image_url", "input_image"),
    "has_audio": ("audio", "audios", "audio_url", "input_audio"),
    "has_video": ("video", "videos", "video_url"),
}
_MEDIA_NAMES = {name: reason for reason, names in _MEDIA.items() for name in names}
WEIGHT_FIELDS = ("weight", "loss_weight", "train")
"""Of a message, or of its parts: whether it is trained on."""
_TRAINED_IN_PART = "trained_in_part"
_RESERVED = ("messages", "tools", "add_generation_prompt")
_OLD_TOOLS = "functions"
"""What OpenAI had before it had tools."""
_PLAIN, _PLAIN_ROLES = {("role", "content")}, frozenset(("system", "developer", "user", "assistant", "tool"))
_role, content_of = itemgetter("role"), itemgetter("content")


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
    roles: tuple[str, ...] | None = None
    """What `plain_roles` said of the messages, where it was asked."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt."""

    chosen: Conversation
    rejected: Conversation


@dataclass(frozen=True, slots=True)
class Form:
    """How conversations lie in rows."""

    name: str
    columns: Mapping[str, str]
    """What each column of COLUMNS is called."""
    seen: tuple[str, ...] = ()
    """Those that the first rows have. Others may come: the first conversations may have no tools."""
    labelled: bool = False

    def conversation(self, row: Row) -> Conversation | Pair:
        """BadRowError if there is none in the row."""
        if len(row) == 1 and not self.labelled and self.name in (MESSAGES, CONVERSATIONS):
            # Most rows have messages alone, and most messages a role and a text.
            messages: Any = row.get(self.columns[self.name])
            roles = plain_roles(messages)
            if roles is not None:
                return Conversation(messages, roles=roles)
        return _READERS[self.name](_Row(row, self.columns), self)

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
    present = {name for row in rows for name, value in row.items() if value is not None}
    named = _named_columns(present, columns or {})
    found = _form_of(named) if form == "auto" else form
    if found not in FORMS:
        seen = ", ".join(sorted(present)) or "nothing"
        raise InputError(
            f"No conversations found: columns {seen}.\nSay what they are ({', '.join(FORMS)}): ",
            Setting("chat.form", COMPLETION),
            ", or what the columns are called, each: ",
            Setting("chat.columns", {"prompt": min(present, default="x")}),
            ".",
        )
    missing = [name for name in _NEEDED[found] if name not in named]
    if missing:
        told = f"{found}: no column {missing[0]!r}; found {', '.join(sorted(present)) or 'nothing'}."
        raise InputError(
            f"{told} Say what it is called: ",
            Setting("chat.columns", {missing[0]: min(present, default="x")}),
            ".",
        )
    label = named.get("label")
    labelled = found != PREFERENCE and label is not None
    if labelled and not (columns or {}).get("label"):
        # A column of that name may hold anything. KTO's is true or false.
        labelled = all(_is_label(row.get(label)) for row in rows if label)
    shown = tuple(column for name, column in named.items() if name != "label" or labelled)
    return Form(found, {name: name for name in COLUMNS} | dict(columns or {}) | named, shown, labelled)


def from_table(rows: pa.RecordBatch) -> list[dict[str, Any]]:
    """Rows of an Arrow table as dicts, without what only the table's type put into them.

    In a table all tools have the fields of any, and so have all arguments: those of another tool are null. A template
    would write them.
    """
    return [
        {name: _without_nulls(value) if isinstance(value, (list, dict)) else value for name, value in row.items()}
        for row in rows.to_pylist()
    ]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


_NEEDED = {
    MESSAGES: ("messages",),
    CONVERSATIONS: ("conversations",),
    INSTRUCTION: ("instruction",),
    COMPLETION: ("prompt", "completion"),
    PREFERENCE: ("chosen", "rejected"),
}


def _named_columns(present: set[str], columns: Mapping[str, str]) -> dict[str, str]:
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown:
        told = f": no column is called {unknown[0]!r}; there are {', '.join(COLUMNS)}."
        raise ConfigError(Setting("chat.columns"), told)
    named: dict[str, str] = {}
    for name in COLUMNS:
        for candidate in (columns[name],) if name in columns else (name, *_OTHER_NAMES.get(name, ())):
            if candidate in present:
                named.setdefault(name, candidate)
    return named


def _form_of(named: Mapping[str, str]) -> str | None:
    for form in (PREFERENCE, MESSAGES, CONVERSATIONS, COMPLETION):
        if all(name in named for name in _NEEDED[form]):
            return form
    return INSTRUCTION if "instruction" in named and "output" in named else None


class _Row:
    """The columns of a row by our names."""

    def __init__(self, row: Row, columns: Mapping[str, str]) -> None:
        self._row, self._columns = row, columns
        if not _MEDIA_NAMES.keys().isdisjoint(row):
            for name, reason in _MEDIA_NAMES.items():
                if row.get(name):
                    raise BadRowError(reason, f'there is something in "{name}"')

    def get(self, name: str) -> Any:
        column = self._columns.get(name)
        return None if column is None else self._row.get(column)

    def conversation(self, messages: list[Message], *, prompt: int = 0, label: bool | None = None) -> Conversation:
        system = self.get("system")
        if isinstance(system, str) and system and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
            prompt += 1 if prompt else 0
        if not messages:
            raise BadRowError("empty_conversation", "it has no messages")
        tools = self.get("tools")
        tools = tools if tools is not None else self._row.get(_OLD_TOOLS)
        return Conversation(messages, _tools(tools), self._variables(), label, prompt)

    def _variables(self) -> dict[str, Any]:
        value = self.get("chat_template_kwargs")
        value = _parsed(value, "bad_variables", "chat_template_kwargs") if isinstance(value, str) else value
        if value is None:
            return {}
        if not isinstance(value, dict) or any(name in value for name in _RESERVED):
            raise BadRowError("bad_variables", f"chat_template_kwargs: {str(value)[:80]}")
        return {str(name): one for name, one in value.items() if one is not None}

    def label(self, form: Form) -> bool | None:
        if not form.labelled:
            return None
        value = self.get("label")
        if not _is_label(value):
            raise BadRowError("bad_label", f"label is {value!r}, neither true nor false")
        return bool(value)


# ---- one reader a form ----


def _of_messages(row: _Row, form: Form) -> Conversation:
    return row.conversation(_messages(row.get(form.name)), label=row.label(form))


def _of_instruction(row: _Row, form: Form) -> Conversation:
    messages = _instructed(row)
    output = row.get("output")
    if not isinstance(output, str):
        raise BadRowError("no_assistant", "there is no output")
    return row.conversation([*messages, {"role": "assistant", "content": output}], label=row.label(form))


def _instructed(row: _Row) -> list[Message]:
    messages: list[Message] = []
    for turn in row.get("history") or ():
        if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(one, str) for one in turn):
            raise BadRowError("bad_history", f"a turn of the history is {str(turn)[:80]!r}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    asked = [one for one in (row.get("instruction"), row.get("input")) if one]
    if not asked or not all(isinstance(one, str) for one in asked):
        raise BadRowError("no_prompt", "there is no instruction")
    return [*messages, {"role": "user", "content": "\n".join(asked)}]


def _of_completion(row: _Row, form: Form) -> Conversation:
    prompt = _said(row.get("prompt"), "user", "no_prompt")
    answer = _said(row.get("completion"), "assistant", "no_assistant")
    return row.conversation([*prompt, *answer], prompt=len(prompt), label=row.label(form))


def _of_preference(row: _Row, form: Form) -> Pair:
    answers = [_said(row.get(name), "assistant", f"no_{name}") for name in ("chosen", "rejected")]
    if answers[0] == answers[1]:
        raise BadRowError("same_answers", "chosen and rejected are the same")
    prompt = _prompt_of(row)
    if not prompt:
        shared = 0
        while shared < min(map(len, answers)) and answers[0][shared] == answers[1][shared]:
            shared += 1
        if not shared:
            raise BadRowError("no_prompt", "chosen and rejected do not begin with the same messages")
        return _pair(row, answers, shared)
    # Both may hold the prompt again, as those of UltraFeedback do.
    whole = [one if one[: len(prompt)] == prompt else prompt + one for one in answers]
    return _pair(row, whole, len(prompt))


def _prompt_of(row: _Row) -> list[Message]:
    if row.get("prompt") is not None:
        return _said(row.get("prompt"), "user", "no_prompt")
    for name in ("conversations", "messages"):
        if row.get(name) is not None:
            return _messages(row.get(name))
    return _instructed(row) if row.get("instruction") is not None else []


def _pair(row: _Row, answers: list[list[Message]], prompt: int) -> Pair:
    if any(len(one) <= prompt for one in answers):
        raise BadRowError("no_assistant", "there is nothing after the prompt")
    return Pair(*(row.conversation(one, prompt=prompt) for one in answers))


_READERS: dict[str, Callable[[_Row, Form], Conversation | Pair]] = {
    MESSAGES: _of_messages,
    CONVERSATIONS: _of_messages,
    INSTRUCTION: _of_instruction,
    COMPLETION: _of_completion,
    PREFERENCE: _of_preference,
}


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
        value = _parsed(value, "no_messages", "messages")
    if not isinstance(value, (list, tuple)):
        raise BadRowError("no_messages", "there are no messages")
    if not value:
        raise BadRowError("empty_conversation", "it has no messages")
    # Most are a role and a text: there is nothing to do, and no function is called for them.
    return [
        one
        if type(one) is dict and len(one) == 2 and one.get("role") in _PLAIN_ROLES and type(one.get("content")) is str
        else _message(one)
        for one in value
    ]


def plain_roles(messages: Any) -> tuple[str, ...] | None:
    """The roles, where each message is a role and a text, in that order, and nothing has to be done to any; else None.

    >>> plain_roles([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}])
    ('user', 'assistant')
    """
    # By functions in C alone: it is asked of every conversation.
    try:
        if set(map(tuple, messages)) == _PLAIN:
            roles = tuple(map(_role, messages))
            if _PLAIN_ROLES.issuperset(roles) and set(map(type, map(content_of, messages))) == {str}:
                return roles
    except TypeError:
        pass
    return None


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
    if message["role"] == "function_call":
        return _function_call(message)
    _refuse_media(message)
    if message.get("train_detail"):
        raise BadRowError(_TRAINED_IN_PART, f"train_detail: a message of {message['role']} can't be trained on in part")
    if isinstance(message.get("function_call"), dict):
        message["tool_calls"] = [*(message.get("tool_calls") or ()), message.pop("function_call")]
    if isinstance(message.get("content"), (list, tuple)):
        _join_parts(message)
    if isinstance(message.get("tool_calls"), (str, list, tuple)):
        message["tool_calls"] = _tool_calls(message["tool_calls"])
        if not message["tool_calls"]:
            del message["tool_calls"]
    _check_content(message)
    return message


def _check_content(message: Message) -> None:
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls"):
            raise BadRowError("no_content", f"a message of {message['role']} says nothing")
    elif not isinstance(content, str):
        raise BadRowError("bad_content", f"what {message['role']} says is {type(content).__name__}, not a text")


def _refuse_media(message: Message) -> None:
    if not _MEDIA_NAMES.keys().isdisjoint(message):
        for name, reason in _MEDIA_NAMES.items():
            if message.get(name):
                raise BadRowError(reason, f"a message of {message['role']} has one")


def _join_parts(message: Message) -> None:
    """Parts of a content -> a text, reasoning and tool calls."""
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls: list[Any] = []
    for part in message["content"]:
        kind, said = _part(part)
        if kind == "tool_call":
            calls += _tool_calls(said)
        else:
            texts["reasoning_content" if kind in ("reasoning", "thinking") else "content"].append(said)
    message |= _weights_of_parts(message)
    message["content"] = "".join(texts["content"])
    if texts["reasoning_content"]:
        message["reasoning_content"] = "".join(texts["reasoning_content"])
    if calls:
        message["tool_calls"] = [*_tool_calls(message.get("tool_calls") or []), *calls]


def _weights_of_parts(message: Message) -> Message:
    """The weights that all parts of a message agree on, as those of the message."""
    found = {}
    for name in WEIGHT_FIELDS:
        weights = [part.get(name) if isinstance(part, dict) else None for part in message["content"]]
        if any(weight is not None for weight in weights):
            if any(weight != weights[0] for weight in weights):
                raise BadRowError(
                    _TRAINED_IN_PART, f"{name} of its parts: a message of {message['role']} can't be trained on in part"
                )
            found[name] = weights[0]
    return found


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


def _function_call(message: Message) -> Message:
    """ShareGPT's turn of a function call -> an assistant's message that calls tools."""
    weights = {name: message[name] for name in WEIGHT_FIELDS if name in message}
    return {"role": "assistant", "content": "", "tool_calls": _tool_calls(message.get("content")), **weights}


def _tool_calls(value: Any) -> list[Any]:
    """Calls in any form -> OpenAI's. Arguments stay as they are: a dict, or JSON in a text."""
    if isinstance(value, str):
        value = _parsed(value, "bad_tool_call", "a tool call")
    found = []
    for call in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(call, dict):
            call = {key: one for key, one in call.items() if one is not None}
            call = call if "function" in call or "name" not in call else {"type": "function", "function": call}
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("name"), str):
                found.append(call)
                continue
        raise BadRowError("bad_tool_call", f"a tool call is {str(call)[:80]!r}")
    return found


def _tools(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _parsed(value, "bad_tools", "tools") if value.strip() else None
    if not value:
        return None
    tools = [value] if isinstance(value, dict) else value
    if not isinstance(tools, (list, tuple)):
        raise BadRowError("bad_tools", f"tools: {str(value)[:80]!r}")
    return [_tool(_parsed(one, "bad_tools", "a tool") if isinstance(one, str) else one) for one in tools]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict):
        raise BadRowError("bad_tools", f"a tool is {str(tool)[:80]!r}")
    if "function" not in tool and "name" in tool and tool.get("type", "function") == "function":
        return {"type": "function", "function": {key: one for key, one in tool.items() if key != "type"}}
    return tool


def _parsed(text: str, reason: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRowError(reason, f"{what}: not JSON ({error})") from None


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, int)) and value in (0, 1)
