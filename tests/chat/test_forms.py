"""Rows of all forms become conversations, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from milldam.chat.forms import BadRowError, Conversation, recognise, records_of
from milldam.errors import ConfigError, InputError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object"}}


NO = {"role": "assistant", "content": "No"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TEXT_OF_CALL = '{"name": "f", "arguments": {"a": 1}}'
Messages = list[dict[str, Any]]


def _read(row: dict[str, Any], **settings: Any) -> Conversation:
    return recognise([row], **settings).conversations(row)[0]


def _shared(*turns: tuple[str, str], **more: Any) -> dict[str, Any]:
    """A row of ShareGPT."""
    return {"conversations": [{"from": role, "value": value} for role, value in turns], **more}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER | {"name": None, "tool_calls": None}]}, [USER, ANSWER]),
        ({"messages": [USER, ANSWER | {"name": "Ann", "weight": 0}]}, [USER, ANSWER | {"name": "Ann", "weight": 0}]),
        ({"messages": [USER, CALLS | {"content": None}]}, [USER, {"role": "assistant", "tool_calls": [CALL]}]),
        ({"messages": [USER | {"content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]}, [USER]),
        (_shared(("human", "Hi"), ("gpt", "Hello")), [USER, ANSWER]),
        (_shared(("human", "Hi"), system="Be brief."), [SYSTEM, USER]),
        (_shared(("function_call", TEXT_OF_CALL), ("observation", "7")), [CALLS, {"role": "tool", "content": "7"}]),
        ({"instruction": "Hi", "input": "", "output": "Hello"}, [USER, ANSWER]),
        (
            {"instruction": "Add", "input": "1 2", "output": "No", "history": [["Hi", "Hello"]], "system": "Be brief."},
            [SYSTEM, USER, ANSWER, {"role": "user", "content": "Add\n1 2"}, NO],
        ),
        ({"prompt": "Hi", "completion": "Hello"}, [USER, ANSWER]),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
    ],
)
def test_a_row_of_every_form_becomes_messages(row: dict[str, Any], messages: Messages) -> None:
    """In one form, nothing lost and nothing invented."""
    assert _read(row).messages == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty_conversation"),
        ({"messages": [USER, {"content": "x"}]}, "no_role"),
        ({"messages": [USER, "x"]}, "bad_message"),
        ({"messages": {"a": 1}}, "no_messages"),
        ({"messages": "[oh"}, "no_messages"),
        ({"messages": [USER, {"role": "assistant"}]}, "no_content"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "bad_content"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "riddle"}]}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "has_image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "has_audio"),
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "has_image"),
        ({"messages": [USER, ANSWER], "audios": ["a.wav"]}, "has_audio"),
        ({"messages": [USER | {"images": ["a.png"]}, ANSWER]}, "has_image"),
        ({"messages": [USER, ANSWER | {"function_call": {"name": "f"}}]}, "bad_tool_call"),
        ({"messages": [USER, ANSWER], "functions": [TOOL]}, "bad_tools"),
        ({"messages": [USER, ANSWER | {"train_detail": [{"train": False}]}]}, "trained_in_part"),
        ({"messages": [USER, ANSWER], "tools": "[{"}, "bad_tools"),
        ({"messages": [USER, ANSWER], "tools": "7"}, "bad_tools"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": "{"}, "bad_variables"),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"messages": []}}, "bad_variables"),
        ({"conversations": [{"from": "function_call", "value": "f(1)"}]}, "bad_tool_call"),
        ({"conversations": [{"value": "Hi"}]}, "no_role"),
        ({"instruction": "", "output": "x"}, "no_prompt"),
        ({"instruction": "x", "output": "x", "history": [["only one"]]}, "bad_history"),
        ({"prompt": "x", "completion": []}, "no_assistant"),
        ({"prompt": "x", "chosen": "a", "rejected": "a"}, "same_answers"),
        ({"chosen": "a", "rejected": "b"}, "no_prompt"),
        ({"prompt": [USER], "chosen": [USER], "rejected": [USER, ANSWER]}, "no_assistant"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused_by_name(row: dict[str, Any], reason: str) -> None:
    """So that it can be counted."""
    with pytest.raises(BadRowError) as refused:
        _read(row)
    assert refused.value.reason == reason
    assert str(refused.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [NO]},
        {"chosen": [USER, ANSWER], "rejected": [USER, NO]},
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, NO]},
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"},
        _shared(("human", "Hi"), chosen={"from": "gpt", "value": "Hello"}, rejected={"from": "gpt", "value": "No"}),
    ],
)
def test_preference_data_of_every_form_become_pairs(row: dict[str, Any]) -> None:
    """Two conversations that share their prompt, on which neither is trained."""
    chosen, rejected = recognise([row]).conversations(row)
    assert (chosen.messages, rejected.messages) == ([USER, ANSWER], [USER, NO])
    assert chosen.prompt_messages == rejected.prompt_messages == 1


def test_tools_may_be_json_or_bare_functions() -> None:
    """Templates get them as OpenAI writes them."""
    wanted = [{"type": "function", "function": TOOL}]
    for tools in (json.dumps([TOOL]), [TOOL], [json.dumps(TOOL)], wanted):
        assert _read({"messages": [USER, ANSWER], "tools": tools}).tools == wanted
    for none in ("", "[]", None, []):
        assert _read({"messages": [USER, ANSWER], "tools": none}).tools is None


def test_a_column_that_the_first_rows_lack_is_not_lost() -> None:
    """Most conversations have no tools; those that have them keep them."""
    form = recognise([{"messages": [USER, ANSWER]}])
    (found,) = form.conversations({"messages": [USER, ANSWER], "tools": [TOOL]})
    assert found.tools
    assert str(form) == "messages (messages)"


def test_columns_have_the_names_that_settings_give_them() -> None:
    """And a name that means nothing is a mistake."""
    row = {"dialog": [USER, ANSWER], "api": [TOOL], "good": True}
    found = _read(row, columns={"messages": "dialog", "tools": "api", "label": "good"})
    assert (found.messages, bool(found.tools), found.label) == ([USER, ANSWER], True, True)
    with pytest.raises(ConfigError, match="mesages"):
        recognise([row], columns={"mesages": "dialog"})


def test_a_label_is_ktos_only_if_it_is_true_or_false() -> None:
    """A column of that name may hold anything else, and is then none of our business."""
    assert _read({"messages": [USER, ANSWER], "label": False}).label is False
    assert _read({"messages": [USER, ANSWER], "label": "sports"}).label is None
    form = recognise([{"messages": [USER, ANSWER], "label": True}])
    with pytest.raises(BadRowError) as refused:
        form.conversations({"messages": [USER, ANSWER], "label": None})
    assert refused.value.reason == "bad_label"


def test_tools_from_a_table_have_their_own_fields_alone() -> None:
    """Arrow gives every tool and every call the fields of all others, as nulls."""
    calls = [{"function": {"name": name, "arguments": given}} for name, given in (("f", {"a": 1}), ("g", {"b": "x"}))]
    row = {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}],
        "tools": [TOOL | {"parameters": {"a": {"type": "int"}}}, TOOL | {"parameters": {"b": {"type": "str"}}}],
    }
    (read,) = records_of(pa.RecordBatch.from_pylist([row]))
    assert _read(read).tools == _read(row).tools
    assert [one["function"]["arguments"] for one in _read(read).messages[1]["tool_calls"]] == [{"a": 1}, {"b": "x"}]
    assert "content" not in _read(read).messages[1]


def test_rows_of_no_form_are_refused_with_their_columns() -> None:
    """And with what to do."""
    with pytest.raises(InputError, match="columns text"):
        recognise([{"text": "Hi"}])
    with pytest.raises(InputError, match="No conversations found"):
        recognise([{"prompt": "Hi"}], form="completion")


@pytest.mark.parametrize(
    ("file", "form", "count"),
    [
        ("alpaca_en_demo.json", "instruction", 999),
        ("dpo_en_demo.json", "preference", 300),
        ("dummy_conversation.json", "conversations", 500),
        ("glaive_toolcall_en_demo.json", "conversations", 300),
        ("kto_en_demo.json", "messages", 300),
        ("messages.jsonl", "messages", 461),
        ("reason_tool_use_demo_50.jsonl", "messages", 50),
    ],
)
def test_real_data_sets_come_out_whole(shared_data: Path, file: str, form: str, count: int) -> None:
    """Every row of them."""
    text = (shared_data / "chat" / file).read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if file.endswith("l") else json.loads(text)
    found = recognise(rows[:10])
    assert found.name == form
    assert len([found.conversations(row) for row in rows]) == count
    if file == "messages.jsonl":
        assert [_read(row).messages for row in rows] == [row["messages"] for row in rows]
        assert [found.conversations(row)[0].tools or [] for row in rows] == [row.get("tools", []) for row in rows]


def test_rows_of_messages_alone_are_read_as_others_are() -> None:
    """The short way gives what the long one gives, whose rows have something beside them."""
    form = recognise([{"messages": [], "tools": []}])
    roles = ("system", "developer", "user", "assistant", "tool")
    messages = [{"role": role, "content": text} for role in roles for text in ("", "x", "é")]
    assert form.conversations({"messages": messages}) == form.conversations({"messages": messages, "tools": None})
    with pytest.raises(BadRowError):
        form.conversations({"messages": messages, "images": ["a.png"]})
    for odd in (None, [], {}, [None], ["role"], [["role", "content"]], [{"role": 1, "content": "x"}], [{"role": "u"}]):
        with pytest.raises(BadRowError):
            form.conversations({"messages": odd})
