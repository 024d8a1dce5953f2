"""Conversations become texts with stretches of bytes and of tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from milldam.chat.forms import Conversation, Pair
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import train_on
from milldam.chat.rendering import RenderedBatch, Renderer, prompt_of
from milldam.chat.token_spans import TokenSpans

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def _talk(asked: str, answer: str, **more: Any) -> Conversation:
    return Conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **more)


def _render(*talks: Conversation | Pair, template: str = CHATML, **more: Any) -> RenderedBatch:
    return Renderer(TemplateSource(template, "test"), train_on("assistant"), **more).render(talks)


def test_stretches_count_bytes() -> None:
    """Of the text in UTF-8, whatever comes before."""
    done = _render(_talk("¿Qué?", "Año 👍"), _talk("Hi", "Hello"))
    found = [
        done.texts[n].encode()[begin:end].decode()
        for n in range(2)
        for begin, end in done.stretches[done.offsets[n] : done.offsets[n + 1]]
    ]
    assert found == ["Año 👍<|im_end|>\n", "Hello<|im_end|>\n"]


def test_what_is_refused_is_named_and_takes_nothing_else_along() -> None:
    """The texts say which conversation they are of."""
    strict = "{% if messages[0].content == 'no' %}{{ raise_exception('I will not.') }}{% endif %}" + CHATML
    half, unanswered = _talk("Hi", "\ud800"), Conversation([{"role": "user", "content": "q"}])
    done = _render(_talk("no", "x"), _talk("yes", "x"), unanswered, half, template=strict)
    assert done.numbers == [1]
    assert [(one.number, one.reason) for one in done.rejects] == [
        (0, "template_refused"),
        (2, "no_assistant"),
        (3, "bad_unicode"),
    ]
    assert done.rejects[0].message == "I will not."


def test_a_pair_comes_whole_or_not_at_all() -> None:
    """Both sides have the prompt's key; none is trained on the prompt."""
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
    sides = [
        Conversation([*asked, {"role": "assistant", "content": said}], prompt_messages=3) for said in ("good", "bad")
    ]
    done = _render(Pair(*sides), Pair(sides[0], Conversation(asked[:1])))
    assert done.numbers == [0, 0] and [prompt_of(side) for side in done.sides] == ["q\na\nr"] * 2
    trained = [done.texts[n].encode()[slice(*done.stretches[n])] for n in range(2)]
    assert trained == [b"good<|im_end|>\n", b"bad<|im_end|>\n"]
    assert [one.number for one in done.rejects] == [1]


def test_counts_tell_what_was_there() -> None:
    """Turns by role, what is trained on, and special tokens in what is said."""
    talks = [_talk("Hi", "<|im_end|>"), _talk("Hi", "Hello", label=True)]
    renderer = Renderer(TemplateSource(CHATML, "test"), train_on("assistant"), special_tokens=["<|im_end|>"])
    counts: Counter[str] = Counter()
    for talk in talks:
        rendering, stretches = renderer.show(talk)
        counts += renderer.count(talk, rendering.text, sum(end - begin for begin, end in stretches))
    assert (counts["conversations"], counts["turns"], counts["turns_user"]) == (2, 4, 2)
    assert counts["special_tokens_in_content"] == 1
    assert counts["trained_characters"] == len("<|im_end|><|im_end|>\n" + "Hello<|im_end|>\n")
    assert [side.label for side in renderer.render(talks).sides] == [None, True]


def test_conversations_with_special_tokens_are_counted_once() -> None:
    """However many tokens they say, in whichever turn, with texts that are empty or hold zeros between them."""
    talks = [
        _talk("<|a|><|a|>", "<|b|>"),
        _talk("\0", ""),
        _talk("", "<|a|>"),
        _talk("<|", "a|>"),
        _talk("é\0<|b|>", "x"),
    ]
    assert _render(*talks, special_tokens=["<|a|>", "<|b|>"]).with_special_tokens == 3
    assert _render(*talks).with_special_tokens == 0


def test_the_prompt_is_what_was_said_before_the_last_answer() -> None:
    """For dedup, and for splits that keep a prompt together."""
    assert prompt_of(_talk("Hi", "Hello")) == "Hi"
    assert prompt_of(Conversation([{"role": "user", "content": "only"}])) == "only"


def test_contents_and_arguments_come_as_the_template_takes_them() -> None:
    """In parts for those that know images; parsed for those that write them as JSON."""
    parts = CHATML.replace(
        "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert _render(_talk("Hi", "Hello"), template=parts).texts == _render(_talk("Hi", "Hello")).texts
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '\n{"a": 1}<|im_end|>' in _render(Conversation(said)).texts[0]
    raw = CHATML.replace(" | tojson", "")
    assert '\n{"a": 1}<|im_end|>' in _render(Conversation(said), template=raw).texts[0]


def test_conversations_with_tools_take_the_template_for_tools() -> None:
    """Where the tokenizer has one."""
    renderer = Renderer(TemplateSource(CHATML, "test", tool_text="T" + CHATML), train_on("assistant"))
    done = renderer.render([_talk("q", "a"), _talk("q", "a", tools=[{"type": "function"}])])
    assert [text[0] for text in done.texts] == ["<", "T"]


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece"])
def test_tokens_of_stretches_hold_what_is_trained_on(
    kind: str, demo_tokenizer: Path, unigram_json: str, wordpiece_json: str
) -> None:
    """Whatever the tokenizer; those that touch are one, and a batch is as good as one by one."""
    tokenizer_json = {"unigram": unigram_json, "wordpiece": wordpiece_json}.get(kind) or demo_tokenizer.read_text(
        "utf-8"
    )
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    done = _render(_talk("One?", "Year 1990 👍"), _talk("", " \n"), _talk("Two words", "more words, é and 中文"))
    finder = TokenSpans(tokenizer_json, tokenizer)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in done.texts]
    id_offsets = np.cumsum([0, *(len(one.ids) for one in encoded)])
    ids = np.array([number for one in encoded for number in one.ids], np.uint32)
    texts = pa.array(done.texts, pa.large_string())
    spans, offsets = finder.find(ids, id_offsets, texts, done.stretches, done.offsets, done.derived)
    for n, one in enumerate(encoded):
        (begin, end), (first, last) = done.stretches[n], spans[offsets[n] : offsets[n + 1]][0]
        start, stop = (len(done.texts[n].encode()[:at].decode()) for at in (begin, end))
        inside = [k for k, (a, b) in enumerate(one.offsets) if a < stop and b > start and a < b]
        assert inside[0] == first and last <= inside[-1] + 1
        assert one.offsets[last - 1][1] >= one.offsets[inside[-1]][0]


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
