"""Words that a setting may be: types of keys and arguments, choices of options. Light: the command line needs them."""

from __future__ import annotations

from typing import Literal

Documents = Literal["file", "line", "paragraph"]
InvalidUtf8 = Literal["drop", "reject", "replace"]
InputFormat = Literal["txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow"]
SpecialText = Literal["special", "plain"]
Encoder = Literal["auto", "gigatoken", "huggingface"]
Executor = Literal["local", "ray"]
ChatForm = Literal["auto", "messages", "conversations", "instruction", "completion", "preference"]
Action = Literal["drop", "report"]
Side = Literal["chosen", "rejected"]
"""Of a preference pair."""
