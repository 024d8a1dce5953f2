"""Ids and masks of real templates are those that transformers makes; without tags they are the same, or refused."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from milldam.chat.forms import recognise
from milldam.chat.loading import find_template
from milldam.chat.masks import train_on
from milldam.chat.rendering import RenderedBatch, Renderer
from milldam.chat.token_spans import TokenSpans
from milldam.tokenizers.encoders import Encoder
from milldam.tokenizers.loading import load_tokenizer

FAMILIES = ("cohere", "deepseekv3", "gemma", "gemma3", "glm4moe", "llama3", "phi3", "qwen2_5", "qwen3")
NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@lru_cache
def _tokenizer(shared_data: Path) -> tuple[Any, TokenSpans]:
    loaded = load_tokenizer(str(shared_data / "tokenizers/qwen2.5"))
    encoder = Encoder("gigatoken", loaded.json, plain_specials=False)
    return encoder, TokenSpans(loaded.json, loaded.huggingface)


def _rendered(shared_data: Path, template: str) -> tuple[RenderedBatch, list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (shared_data / "chat/messages.jsonl").read_text("utf-8").splitlines()]
    source = find_template(
        str(shared_data / "tokenizers/qwen2.5"),
        template=str(shared_data / f"chat/templates/{template}.jinja"),
        variables=NAMED,
    )
    form = recognise(rows)
    packed = (shared_data / f"chat/golden/{template.removesuffix('_training')}.jsonl.gz").read_bytes()
    wanted = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    conversations = [form.conversation(rows[one["row"]]) for one in wanted]
    return Renderer(source, train_on("assistant")).render(conversations), wanted


def _found(shared_data: Path, done: RenderedBatch) -> dict[int, tuple[str, list[list[int]]]]:
    encoder, finder = _tokenizer(shared_data)
    texts = pa.array(done.texts, pa.large_string())
    ids, id_offsets = encoder.encode(texts)
    id_offsets = np.asarray(id_offsets, np.int64)
    spans, offsets = finder.find(ids, id_offsets, texts, done.stretches, done.offsets, done.derived)
    found = {}
    for at, number in enumerate(done.numbers):
        mine = ids[id_offsets[at] : id_offsets[at + 1]].tolist()
        sha = hashlib.sha1(json.dumps(mine).encode()).hexdigest()[:16]
        found[number] = sha, spans[offsets[at] : offsets[at + 1]].tolist()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tagged_template_gives_the_ids_and_masks_of_transformers(shared_data: Path, family: str) -> None:
    """Every id, every stretch, and the same conversations refused."""
    done, wanted = _rendered(shared_data, f"{family}_training")
    found = _found(shared_data, done)
    assert {one.number for one in done.rejects} == {n for n, one in enumerate(wanted) if "error" in one}
    assert found == {n: (one["sha"], one["spans"]) for n, one in enumerate(wanted) if "error" not in one}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_template_without_tags_gives_the_same_masks_or_refuses_by_name(shared_data: Path, family: str) -> None:
    """Where it gives the same text. Nothing differs in silence."""
    done, wanted = _rendered(shared_data, family)
    found = _found(shared_data, done)
    same = {n: (one["sha"], one["spans"]) for n, one in enumerate(wanted) if one.get("plain_same")}
    assert {n: found[n] for n in same if n in found} == {n: one for n, one in same.items() if n in found}
    reasons = Counter(one.reason for one in done.rejects)
    assert set(reasons) <= {"template_refused", "mask_not_proven"}
    if family not in ("deepseekv3", "glm4moe"):
        assert sum(n in found for n in same) > 190
