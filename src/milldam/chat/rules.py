"""How conversations become texts, and which of their tokens are trained on: the settings of this room."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

ChatForm = Literal["auto", "messages", "conversations", "instruction", "completion", "preference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRules:
    """Records are conversations."""

    form: ChatForm = "auto"
    """Form of the conversations; auto recognises it from the first ones."""
    columns: dict[str, str] = field(default_factory=dict)
    """Names of your columns, such as {messages: dialogue}."""
    template: str | None = None
    """A Jinja file. Default: the chat template that the tokenizer comes with."""
    named_template: str | None = None
    """Which template to use, if there are several."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the template, such as {enable_thinking: false}."""
    train_on: str | tuple[str, ...] = "assistant"
    """Messages to train on: assistant, last, all, one or more roles; or a field of the message: weight, loss_weight,
    train."""
    turn_end: bool = True
    """Also train on the end of a turn, such as <|im_end|>. If a template has generation tags, they decide."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """Most tokens of a conversation."""
    too_long: Literal["drop", "cut_turn", "cut"] = "drop"
    """What to do with a longer one: drop it, cut it after the last trained turn that fits, or cut it anywhere."""
    dedup_on: Literal["text", "prompt"] = "text"
    """What makes two conversations duplicates: the same text, or the same prompt (everything before the last
    answer)."""
    group_by: Literal["text", "prompt"] = "text"
    """What is kept in the same split: conversations with the same text, or with the same prompt."""
    date: str | None = None
    """Date for templates that write one (strftime_now), such as 2026-01-31. Default: today."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
