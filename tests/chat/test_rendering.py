"""Conversations become texts with stretches of characters, of bytes and of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from tests.kit.chat_jobs import trained_tokens

from milldam.chat.forms import BadRowError, Conversation
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import train_on
from milldam.chat.rendering import Renderer, in_bytes, prompt_of
from milldam.chat.token_spans import TokenSpans

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _talk(asked: str, answer: str, **more: Any) -> Conversation:
    return Conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **more)


def _renderer(template: str = CHATML, **more: Any) -> Renderer:
    return Renderer(TemplateSource(template, "test"), train_on("assistant"), **more)


def test_stretches_count_bytes() -> None:
    """Of the text in UTF-8, whatever comes before."""
    for answer in ("Año 👍", "Hello"):
        rendering, stretches = _renderer().show(_talk("¿Qué?", answer))
        ((begin, end),) = in_bytes(rendering.text, stretches)
        assert rendering.text.encode()[begin:end].decode() == f"{answer}<|im_end|>\n"


@pytest.mark.parametrize(
    ("talk", "reason", "message"),
    [
        (_talk("no", "x"), "template_refused", "I will not."),
        (Conversation([{"role": "user", "content": "q"}]), "no_assistant", "none of its messages"),
        (_talk("Hi", "\ud800"), "bad_unicode", "half a character"),
    ],
)
def test_what_is_refused_is_named(talk: Conversation, reason: str, message: str) -> None:
    """With the template's own words, and nothing is left behind for the next one."""
    renderer = _renderer("{% if messages[0].content == 'no' %}{{ raise_exception('I will not.') }}{% endif %}" + CHATML)
    with pytest.raises(BadRowError, match=message) as refused:
        renderer.show(talk)
    assert refused.value.reason == reason
    assert renderer.show(_talk("yes", "x"))[0].text.endswith("x<|im_end|>\n")


def test_a_prompt_is_never_trained_on() -> None:
    """Whoever speaks in it; it is what tells duplicates and splits by prompt."""
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    talk = Conversation([*asked, {"role": "assistant", "content": "good"}], prompt_messages=3)
    rendering, stretches = _renderer().show(talk)
    assert [rendering.text[begin:end] for begin, end in stretches] == ["good<|im_end|>\n"]
    assert prompt_of(talk) == "q\na\nr"
    assert prompt_of(_talk("Hi", "Hello")) == "Hi"
    assert prompt_of(Conversation([{"role": "user", "content": "only"}])) == "only"


def test_conversations_that_say_special_tokens_are_known() -> None:
    """In whichever turn, with texts that are empty or hold zeros between them."""
    renderer = _renderer(special_tokens=["<|a|>", "<|b|>"])
    assert all(map(renderer.says_special, [_talk("<|a|><|a|>", "<|b|>"), _talk("", "<|a|>"), _talk("é\0<|b|>", "x")]))
    assert not any(map(renderer.says_special, [_talk("\0", ""), _talk("<|", "a|>")]))
    assert not _renderer().says_special(_talk("<|a|>", ""))


def test_contents_and_arguments_come_as_the_template_takes_them() -> None:
    """In parts for those that know images; parsed for those that write JSON; tools by a template of their own."""
    parts = CHATML.replace(
        "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert _renderer(parts).show(_talk("Hi", "Hello"))[0].text == _renderer().show(_talk("Hi", "Hello"))[0].text
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for template in (CHATML, CHATML.replace(" | tojson", "")):
        assert '\n{"a": 1}<|im_end|>' in _renderer(template).show(Conversation(said))[0].text
    both = Renderer(TemplateSource(CHATML, "test", tool_text="T" + CHATML), train_on("assistant"))
    assert both.show(_talk("q", "a", tools=[{"type": "function"}]))[0].text.startswith("T")
    assert both.show(_talk("q", "a"))[0].text.startswith("<")


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece"])
def test_tokens_of_stretches_hold_what_is_trained_on(
    kind: str, demo_tokenizer: Path, unigram_json: str, wordpiece_json: str
) -> None:
    """Whatever the tokenizer; those that touch are one."""
    tokenizer_json = {"unigram": unigram_json, "wordpiece": wordpiece_json}.get(kind) or demo_tokenizer.read_text()
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    finder, renderer = TokenSpans(tokenizer_json, tokenizer), _renderer()
    for talk in (_talk("One?", "Year 1990 👍"), _talk("", " \n"), _talk("Two words", "more words, é and 中文")):
        rendering, ((begin, end),) = renderer.show(talk)
        _, ((first, last),) = trained_tokens(renderer, finder, tokenizer, talk)
        places = tokenizer.encode(rendering.text, add_special_tokens=False).offsets
        inside = [at for at, (start, stop) in enumerate(places) if start < end and stop > begin and start < stop]
        assert inside[0] == first and last <= inside[-1] + 1
        assert places[last - 1][1] >= places[inside[-1]][0]


def test_nothing_to_find_is_nothing_found(demo_tokenizer: Path) -> None:
    """An empty batch, and texts without a stretch."""
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_tokenizer))
    finder = TokenSpans(demo_tokenizer.read_text("utf-8"), tokenizer)
    nothing = np.zeros((0, 2), np.int64)
    for texts in ([], ["a b"]):
        ids = np.array([n for text in texts for n in tokenizer.encode(text).ids], np.uint32)
        offsets = np.zeros(len(texts) + 1, np.int64)
        ends = np.array([0, len(ids)][: len(texts) + 1], np.int64)
        spans, found = finder.find(ids, ends, pa.array(texts, pa.large_string()), nothing, offsets, ends[1:] > 0)
        assert (len(spans), found.tolist()) == (0, offsets.tolist())
