"""Texts, ids and masks equal `apply_chat_template`'s, for conversations that nobody would write."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.chat_jobs import trained_tokens
from tests.kit.quick import first_quick

from milldam.chat.forms import BadRowError, Conversation
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import Masks, train_on
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
    said = draw(st.lists(_contents, min_size=4, max_size=8))
    messages = [{"role": "system", "content": said[0]}] if draw(st.booleans()) else []
    for turn in range(draw(st.sampled_from([1, 2, 3, 100]))):
        messages.append({"role": "user", "content": said[turn % len(said)]})
        messages.append({"role": "assistant", "content": said[(turn * 7 + 1) % len(said)]})
    return messages


@lru_cache
def _tokenizer(folder: Path) -> tuple[Any, TokenSpans]:
    """transformers' own, and ours with the tokens that transformers adds to it."""
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(str(folder)).huggingface, **NAMED)
    return reference, TokenSpans(reference._tokenizer.to_str())


@lru_cache
def _renderer(template: str) -> Masks:
    return Masks(TemplateSource(template, "test", variables=NAMED), train_on("assistant"))


@pytest.mark.parametrize("name", first_quick(("qwen2.5", "gpt2", "t5", "bert-base-uncased"), 2))
@pytest.mark.parametrize("template", [TAGGED, TIGHT], ids=["chatml", "tight"])
@given(messages=_conversations())
def test_masks_are_those_of_transformers(
    shared_data: Path, name: str, template: str, messages: list[dict[str, Any]]
) -> None:
    """Unicode, empty turns, newlines at borders, special tokens in content, 100 turns."""
    reference, finder = _tokenizer(shared_data / "tokenizers" / name)
    renderer = _renderer(template)
    try:
        ids, spans = trained_tokens(renderer, finder, reference._tokenizer, Conversation(messages))
    except BadRowError as error:
        assert error.reason == "mask_not_proven"
        assert not any(message["content"] for message in messages if message["role"] == "assistant")
        return
    rendering, stretches, _ = renderer.find(Conversation(messages))
    made = reference.apply_chat_template(
        messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = reference._tokenizer.encode(rendering.text, add_special_tokens=False)
    assert (rendering.text, made["input_ids"]) == (
        reference.apply_chat_template(messages, chat_template=template, tokenize=False),
        ids,
    )
    # Where no token holds a border transformers goes on to the end of the text, or leaves out the rest; of an empty
    # block it takes the token around it, if its border lies within one.
    held = all(encoded.char_to_token(begin) is not None and encoded.char_to_token(end - 1) for begin, end in stretches)
    if held and (template == TAGGED or all(message["content"] for message in messages)):
        trained = {at for begin, end in spans for at in range(begin, end)}
        assert [int(at in trained) for at in range(len(ids))] == made["assistant_masks"]
