"""Byte-level tokenizers of every known rule for words, and links of hundreds of bytes: for the tests of cutting."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.kit.token_pieces import TokenizerJson

from milldam.tokenizers import cutting

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace("{1,3}", "")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES = {"GPT-2": GPT2, "Llama 3": LLAMA3, "Qwen": QWEN, "o200k": O200K}


def with_rule(tokenizer_json: str, pattern: str, *, normalizer: str | None = None, **model: Any) -> str:
    """The same vocabulary with another rule for words."""
    tokenizer = json.loads(tokenizer_json)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    tokenizer["normalizer"] = {"type": normalizer} if normalizer else None
    tokenizer["model"] |= model
    return TokenizerJson(json.dumps(tokenizer))


@contextmanager
def small_links() -> Iterator[None]:
    """Pieces overlap every few hundred bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cutting, "_LINK", 400)
        patch.setattr(cutting, "_OVERLAP", 64)
        yield
