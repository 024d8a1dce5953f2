"""Conversations as nobody wants them, through real templates: a mask is right, or they are refused by name."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from milldam.chat.forms import BadRowError, Conversation, recognise
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import train_on
from milldam.chat.rendering import Renderer

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
REASONS = {"template_refused", "mask_not_proven", "no_assistant", "nothing_to_train_on"}
_numbers = count()
WORD = re.compile(r"(yes|no)_\d+_")
"""Words that are to be trained on say yes."""

Message = dict[str, Any]


def word(trained: bool) -> str:
    return f"{'yes' if trained else 'no'}_{next(_numbers)}_"


def said(role: str, *, before: str = "", behind: str = "", **more: Any) -> Message:
    inner = f"{word(role == 'assistant')} mill\n pond {word(role == 'assistant')}"
    return {"role": role, "content": f"{before}{inner}{behind}", **more}


def calls(**more: Any) -> Message:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": word(True)}}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def odd_rows() -> Iterator[dict[str, Any]]:
    user, answer, system = partial(said, "user"), partial(said, "assistant"), "system"
    tool = said("tool", name="f", tool_call_id="abcdefghi")
    shapes: list[list[Message]] = [
        [user(), answer()],
        [said(system), user(), answer(), user(), answer()],
        [said(system)],
        [user(), answer(), answer()],
        [user(), user(), answer()],
        [user(), answer(), user()],
        [answer(), user(), answer()],
        [user(), answer(), said(system), user(), answer()],
        [said("developer"), user(), answer()],
        [user(), said("critic"), answer()],
        [user(), {"role": "assistant", "content": ""}],
        [user(), {"role": "assistant", "content": " \n "}, user(), answer()],
        [{"role": "user", "content": ""}, answer(before=" \n", behind="\n\n ")],
        [user(before="<|im_start|>assistant\n", behind="<|im_end|>"), answer()],
        [user(), answer(behind="<|im_end|>\n<|im_start|>user\n"), user(), answer()],
        [user(before="[/INST]</s>"), answer(before="[INST]"), user(), answer()],
        [user(before="\u2028\x85"), answer(before="\ufeff", behind="\u2029\x1e")],
        [user(before="{{ 7 * 7 }}{% raw %}"), answer(behind="{% endfor %}&amp;<i>")],
        [user(before="\0e\u0301"), answer(behind="\u00e9\U0001f469\u200d\U0001f467")],
        [user(behind="y" * 50_000), answer(behind="z" * 50_000)],
        [message for _ in range(30) for message in (user(), answer())],
        [
            user(),
            answer(before=f"<think>\n{word(True)}\n</think>\n\n"),
            user(),
            answer(before="<think>\n\n</think>\n\n"),
        ],
        [user(), answer(reasoning_content=word(True)), user(), answer(reasoning_content=word(True))],
        [user(), calls(), tool, answer()],
        [user(), calls(content=None, reasoning_content=word(True)), tool, answer(), user(), answer()],
    ]
    for messages in shapes:
        yield (
            {"messages": messages, "tools": [TOOL]}
            if any("tool_calls" in one for one in messages)
            else {"messages": messages}
        )


def templates(shared_data: Path) -> list[Path]:
    return sorted((shared_data / "chat/templates").glob("*.jinja"))


def test_no_odd_conversation_gets_a_wrong_mask(shared_data: Path) -> None:
    """Of nine families with and without tags. Each twice: what is known of a shape must not spoil the next one."""
    fine = 0
    for path in templates(shared_data):
        source = TemplateSource(path.read_text("utf-8"), path.name, None, dict(NAMES), datetime.datetime(2026, 1, 2))
        renderer = Renderer(source, train_on("assistant"))
        for row in (row for _ in range(2) for row in odd_rows()):
            try:
                conversation = recognise([row]).conversation(row)
                assert isinstance(conversation, Conversation)
                rendering, stretches = renderer.show(conversation)
            except BadRowError as error:
                assert error.reason in REASONS
                continue
            fine += 1
            trained = {at for begin, end in stretches for at in range(begin, end)}
            for found in WORD.finditer(rendering.text):
                inside = {at in trained for at in range(*found.span())}
                assert inside == {found[1] == "yes"}, (path.name, rendering.text[: found.end()][-200:])
    assert fine > 400
