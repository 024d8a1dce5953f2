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
    """How conversations lie in records; auto: as the first ones show."""
    columns: dict[str, str] = field(default_factory=dict)
    """What columns are called, such as {messages: dialogue}."""
    template: str | None = None
    """A Jinja file. Default: the chat template that the tokenizer comes with."""
    named_template: str | None = None
    """Which one, where there are several by name."""
    variables: dict[str, Any] = field(default_factory=dict)
    """For the template, such as {enable_thinking: false}."""
    train_on: str | tuple[str, ...] = "assistant"
    """assistant, last, all, a role or several; or the field of a message that says so: weight, loss_weight, train."""
    turn_end: bool = True
    """Train also on what ends a turn, such as <|im_end|>. Where a template has generation tags, they decide."""
    max_tokens: Annotated[int, Ge(1)] | None = None
    """The longest conversation."""
    too_long: Literal["drop", "cut_turn", "cut"] = "drop"
    """What becomes of a longer one: dropped; cut after the last trained turn that fits; or cut anywhere."""
    dedup_on: Literal["text", "prompt"] = "text"
    """What duplicates have in common: the whole text, or what comes before the last answer."""
    group_by: Literal["text", "prompt"] = "text"
    """What goes to the same split: equal texts, or all that share a prompt."""
    date: str | None = None
    """What strftime_now gives to templates that write the date, such as 2026-01-31. Default: today."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}
