"""Texts, ids and masks equal `apply_chat_template`'s, for conversations that nobody would write."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.quick import first_quick

from milldam.chat.forms import Conversation
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import train_on
from milldam.chat.rendering import Renderer
from milldam.chat.token_spans import TokenSpans
from milldam.tokenizers.loading import load_tokenizer

transformers = pytest.importorskip("transformers")

NAMED = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
TAGGED = """{{ bos_token }}{% for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}"""
"""Its turns end within the tag, what is between them lies outside."""
TIGHT = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"  # noqa: E501
"""Its borders lie within tokens."""
TOKENIZERS = ("qwen2.5", "gpt2", "t5", "bert-base-uncased")

_pieces = st.sampled_from(
    [
        *("", " ", "\n", "\r\n", "\t", "a", "Hello", " world", "é", "e\u0301", "中文", "مرحبا", "\u200b", "ﬁ", "\x00"),
        *("👩\u200d👩\u200d👧", "🏳️\u200d🌈", "<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "</s>", "[SEP]"),
        *("{{ x }}", "{% raw %}", "1234", "...", "<think>"),
    ]
)
_contents = st.lists(_pieces | st.text(max_size=8), max_size=6).map("".join)


@st.composite
def _conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    turns = draw(st.sampled_from([1, 2, 3, 100]))
    said = draw(st.lists(_contents, min_size=4, max_size=8))
    messages = [{"role": "system", "content": said[0]}] if draw(st.booleans()) else []
    for turn in range(turns):
        messages.append({"role": "user", "content": said[turn % len(said)]})
        messages.append({"role": "assistant", "content": said[(turn * 7 + 1) % len(said)]})
    return messages


@lru_cache
def _tokenizers(folder: Path) -> tuple[Any, TokenSpans]:
    loaded = load_tokenizer(str(folder)).huggingface
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=loaded, **NAMED)
    # With the tokens that transformers adds to it.
    return reference, TokenSpans(reference._tokenizer.to_str(), reference._tokenizer)


def _mask(finder: TokenSpans, ids: list[int], text: str, renderer_output: Any) -> list[int]:
    spans, _ = finder.find(
        np.array(ids, np.uint32),
        np.array([0, len(ids)]),
        pa.array([text], pa.large_string()),
        renderer_output.stretches,
        renderer_output.offsets,
        renderer_output.derived,
    )
    mask = [0] * len(ids)
    for begin, end in spans.tolist():
        mask[begin:end] = [1] * (end - begin)
    return mask


def _is_told(encoded: Any, stretches: list[tuple[int, int]]) -> bool:
    """Whether transformers finds a token at all borders: else it goes on to the end, or leaves out the rest."""
    return all(encoded.char_to_token(begin) is not None and encoded.char_to_token(end - 1) for begin, end in stretches)


@pytest.mark.parametrize("name", first_quick(TOKENIZERS, 2))
@pytest.mark.parametrize("template", [TAGGED, TIGHT], ids=["chatml", "tight"])
@given(messages=_conversations())
def test_masks_are_those_of_transformers(
    shared_data: Path, name: str, template: str, messages: list[dict[str, Any]]
) -> None:
    """Unicode, empty turns, newlines at borders, special tokens in content, 100 turns."""
    reference, finder = _tokenizers(shared_data / "tokenizers" / name)
    renderer = Renderer(TemplateSource(template, "test", variables=NAMED), train_on("assistant"))
    done = renderer.render([Conversation(messages)])
    text = reference.apply_chat_template(messages, chat_template=template, tokenize=False)
    if not done.texts:
        assert done.rejects[0].reason == "mask_not_proven" and not any(
            message["content"] for message in messages if message["role"] == "assistant"
        )
        return
    assert done.texts == [text]
    out = reference.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = reference._tokenizer.encode(text, add_special_tokens=False)
    _, stretches = renderer.show(Conversation(messages))
    mine = _mask(finder, encoded.ids, text, done)
    # Of an empty block transformers takes the token around it, if its border lies within one.
    said = template == TAGGED or all(message["content"] for message in messages)
    if said and _is_told(encoded, stretches):
        assert out["input_ids"] == encoded.ids
        assert mine == out["assistant_masks"]


@given(messages=_conversations())
def test_byte_lengths_tell_what_offsets_tell(shared_data: Path, messages: list[dict[str, Any]]) -> None:
    """The fast way and HF's offsets agree, where the fast way is taken."""
    reference, finder = _tokenizers(shared_data / "tokenizers/qwen2.5")
    slow = TokenSpans('{"model": {"type": "Unigram"}}', reference._tokenizer)
    done = Renderer(TemplateSource(TIGHT, "test"), train_on("assistant")).render([Conversation(messages)])
    for text in done.texts:
        ids = reference._tokenizer.encode(text, add_special_tokens=False).ids
        assert _mask(finder, ids, text, done) == _mask(slow, ids, text, done)


@pytest.mark.parametrize("family", ["qwen2_5", "llama3", "gemma", "phi3", "qwen3", "cohere"])
@given(messages=_conversations())
def test_masks_without_tags_are_those_with_tags_or_refused(
    shared_data: Path, family: str, messages: list[dict[str, Any]]
) -> None:
    """Whatever is said, nothing differs in silence."""
    folder = shared_data / "chat/templates"
    renderers = [_renderer(folder / f"{family}{kind}.jinja") for kind in ("_training", "")]
    tagged, plain = (renderer.render([Conversation(messages)]) for renderer in renderers)
    if plain.texts and tagged.texts == plain.texts:
        assert plain.stretches.tolist() == tagged.stretches.tolist()
    for one in plain.rejects:
        assert one.reason in ("mask_not_proven", "template_refused")


@lru_cache
def _renderer(path: Path) -> Renderer:
    return Renderer(TemplateSource(path.read_text(encoding="utf-8"), "test", variables=NAMED), train_on("assistant"))
