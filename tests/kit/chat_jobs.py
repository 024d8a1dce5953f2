"""Conversations for tests of whole jobs, and what must become of them: by HF tokenizers, message by message."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tests.kit.jobs import demo_texts

from milldam.chat.forms import Conversation
from milldam.chat.masks import Masks
from milldam.chat.reading import in_bytes
from milldam.chat.token_spans import TokenSpans

TEMPLATE = """{% for m in messages %}{% if m.role == 'fail' %}{{ raise_exception('No such role: fail') }}{% endif %}\
<{{ m.role }}>
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}\
{{ m.content }}{% endif %}

{% endfor %}"""

Message = dict[str, Any]


def make_conversations(count: int, seed: int = 0) -> list[list[Message]]:
    """Questions and answers of many scripts, no two of them equal."""
    rng, texts = random.Random(seed), demo_texts()

    def some() -> str:
        source = rng.choice(texts)
        start = rng.randrange(len(source))
        return f"{rng.randrange(10**6)} {source[start : start + rng.randrange(1, 300)]}"

    return [
        [{"role": ("user", "assistant")[n % 2], "content": some()} for n in range(2 * rng.randrange(1, 5))]
        for _ in range(count)
    ]


def write_messages(path: Path, conversations: Iterable[list[Message]]) -> Path:
    lines = (json.dumps({"messages": one}, ensure_ascii=False) + "\n" for one in conversations)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_template(folder: Path) -> Path:
    path = folder / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


def trained_tokens(masks: Masks, finder: TokenSpans, encoder: Any, talk: Conversation) -> tuple[list[int], list[Any]]:
    """(ids, stretches of tokens) of a conversation; BadRowError if it is refused. `encoder`: of HF tokenizers."""
    rendering, stretches, derived = masks.find(talk)
    ids = encoder.encode(rendering.text, add_special_tokens=False).ids
    spans, _ = finder.find(
        np.array(ids, np.uint32),
        np.array([0, len(ids)]),
        pa.array([rendering.text], pa.large_string()),
        np.array(in_bytes(rendering.text, stretches), np.int64).reshape(-1, 2),
        np.array([len(stretches)]),
        np.array([derived]),
    )
    return ids, spans.tolist()
