"""Ids and masks of real templates are those that transformers makes; without tags they are the same, or refused."""

from __future__ import annotations

import gzip
import hashlib
import json
import runpy
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tests.kit.chat_jobs import trained_tokens

from milldam.chat.forms import BadRowError, recognise
from milldam.chat.loading import find_template
from milldam.chat.masks import Masks, train_on
from milldam.chat.token_spans import TokenSpans
from milldam.tokenizers.loading import load_tokenizer

FAMILIES = ("cohere", "deepseekv3", "gemma", "gemma3", "glm4moe", "llama3", "phi3", "qwen2_5", "qwen3")
CHECKS = Path(__file__).parents[2] / "benchmarks/masks.py"
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@lru_cache
def _tokenizer(shared_data: Path) -> tuple[TokenSpans, Any]:
    loaded = load_tokenizer(str(shared_data / "tokenizers/qwen2.5"))
    return TokenSpans(loaded.json), loaded.huggingface


def _compared(shared_data: Path, family: str, kind: str) -> list[tuple[dict[str, Any], Any]]:
    """What transformers made of each conversation, and what we make of it: (hash of ids, stretches), or a reason."""
    rows = [json.loads(line) for line in (shared_data / "chat/messages.jsonl").read_text("utf-8").splitlines()]
    template = str(shared_data / f"chat/templates/{family}{kind}.jinja")
    source = find_template(str(shared_data / "tokenizers/qwen2.5"), template=template, variables=NAMED)
    renderer, form = Masks(source, train_on("assistant")), recognise(rows)
    compared = []
    for line in gzip.decompress((shared_data / f"chat/golden/{family}.jsonl.gz").read_bytes()).splitlines():
        wanted = json.loads(line)
        (talk,) = form.conversations(rows[wanted["row"]])
        try:
            ids, spans = trained_tokens(renderer, *_tokenizer(shared_data), talk)
            made: Any = hashlib.sha1(json.dumps(ids).encode()).hexdigest()[:16], spans
        except BadRowError as error:
            made = error.reason
        compared.append((wanted, made))
    return compared


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tagged_template_gives_the_ids_and_masks_of_transformers(shared_data: Path, family: str) -> None:
    """Every id, every stretch, and the same conversations refused."""
    for wanted, made in _compared(shared_data, family, "_training"):
        assert isinstance(made, str) if "error" in wanted else made == (wanted["sha"], wanted["spans"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_without_tags_gives_the_same_masks_or_refuses_by_name(shared_data: Path, family: str) -> None:
    """Where it gives the same text. Nothing differs silently."""
    compared = _compared(shared_data, family, "")
    assert {made for _, made in compared if isinstance(made, str)} <= {"template_refused", "mask_not_proven"}
    same = [(wanted, made) for wanted, made in compared if wanted.get("plain_same") and not isinstance(made, str)]
    assert all(made == (wanted["sha"], wanted["spans"]) for wanted, made in same)
    assert len(same) > 190 or family in ("deepseekv3", "glm4moe")


def test_no_odd_conversation_gets_a_wrong_mask(shared_data: Path) -> None:
    """Of nine families with and without tags, thinking, calls and texts that look like a template's own."""
    odd = runpy.run_path(str(CHECKS))["odd"]
    totals = sum(map(odd, sorted((shared_data / "chat/templates").glob("*.jinja"))), Counter[str]())
    right = totals.pop("right")
    assert totals.keys() <= {"template_refused", "mask_not_proven", "no_assistant", "nothing_to_train_on"}
    assert right > 800
