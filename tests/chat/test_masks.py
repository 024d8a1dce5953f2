"""Which characters, bytes and tokens of a conversation are trained on: proven, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.kit.chat_jobs import trained_tokens

from milldam.chat.forms import BadRowError, Conversation
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import Masks, train_on
from milldam.chat.reading import prompt_of
from milldam.chat.token_spans import TokenSpans
from milldam.errors import ConfigError

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Uno."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Dos."},
]


def _trained(template: str, messages: list[dict[str, Any]], words: Any = "assistant", **variables: Any) -> list[str]:
    masks = Masks(TemplateSource(template, "test"), train_on(words))
    rendering, stretches, _ = masks.find(Conversation(messages, variables=variables))
    return [rendering.text[begin:end] for begin, end in stretches]


def _refused(reason: str, match: str = ".") -> Any:
    return pytest.raises(BadRowError, match=match, check=lambda error: error.reason == reason)


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ("assistant", ["Uno.<|im_end|>\n", "Dos.<|im_end|>\n"]),
        ("last", ["Dos.<|im_end|>\n"]),
        ("user", ["One?<|im_end|>\n", "Two?<|im_end|>\n"]),
        (["system", "assistant"], ["Be brief.<|im_end|>\n", "Uno.<|im_end|>\n", "Dos.<|im_end|>\n"]),
        ("weight", ["Uno.<|im_end|>\n", "Dos.<|im_end|>\n"]),
        ("all", ["".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in TALK)]),
    ],
)
def test_what_is_to_be_trained_on_is_found(words: Any, trained: list[str]) -> None:
    """Roles, the last answer, or a field; behind the header, to the turn's end. Of everything headers too."""
    assert _trained(CHATML, TALK, words) == trained


def test_what_is_written_behind_all_turns_ends_the_last_one() -> None:
    """Such as an end token; but not a prompt that the template writes whether it is asked or not."""
    assert _trained(CHATML.replace("{% endif %}", "{% else %}<eos>{% endif %}"), TALK)[-1] == "Dos.<|im_end|>\n<eos>"
    assert _trained(CHATML.replace("if add_generation_prompt", "if true"), TALK)[-1] == "Dos.<|im_end|>\n"
    channels = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    )
    final = "<|start|>assistant<|channel|>final<|message|>Dos.<|end|>"
    assert _trained(channels + "<|start|>assistant", TALK)[-1] == final


def test_a_weight_that_is_neither_0_nor_1_is_refused() -> None:
    """A message is trained on as a whole or not at all."""
    with _refused("mask_not_proven", r"0\.5"):
        _trained(CHATML, [*TALK[:2], TALK[2] | {"weight": 0.5}], "weight")


LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"""
FORGETS = CHATML.replace("m.content }}", "m.content if loop.last else m.content.split('</think>')[-1].lstrip() }}")
THINKING = [m | {"content": f"<think>hm</think> {m['content']}"} if m["role"] == "assistant" else m for m in TALK]
BY_PLACE = """{% for n in range(messages | length) %}{% set m = messages[n] %}<{{ m.role }}>{{ m.content }}</s>\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
APART = """{% for m in messages[:-1] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}\
{% set m = messages[-1] %}<{{ m.role }}>{{ m.content }}</s>{% if add_generation_prompt %}<assistant>{% endif %}"""
WITH_RESULTS = """{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}\
<call>{{ m.tool_calls[0].function.name }}</call>{% for n in range(loop.index, messages | length) %}\
{% if messages[n].role == 'tool' %}<result>{{ messages[n].content }}</result>{% endif %}{% endfor %}{% endif %}</s>\
{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
UNHEADED = """{% for m in messages %}{% if m.role == 'assistant' %}\
{% if loop.previtem.role != 'tool' %}<assistant>{% endif %}{{ m.content }}</s>\
{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"""
CALLS = [
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [{"type": "function", "function": {"name": "look"}}]},
    {"role": "tool", "content": "It."},
    {"role": "assistant", "content": "Dos."},
]


@pytest.mark.parametrize(
    ("template", "messages", "trained"),
    [
        (LLAMA2, TALK[1:], [" Uno. </s>", " Dos. </s>"]),
        (FORGETS, THINKING, ["Uno.<|im_end|>\n", "<think>hm</think> Dos.<|im_end|>\n"]),
        (BY_PLACE, TALK, ["Uno.</s>", "Dos.</s>"]),
        (APART, TALK[1:], ["Uno.</s>", "Dos.</s>"]),
        (WITH_RESULTS, CALLS, ["Hm.<call>look</call>", "</s>", "Dos.</s>"]),
        (UNHEADED, CALLS, ["Hm.</s>", "Dos.</s>"]),
    ],
)
def test_turns_are_found_however_a_template_goes_over_messages(
    template: str, messages: list[dict[str, Any]], trained: list[str]
) -> None:
    """Without headers, without earlier thinking, by their places, the last one apart, results of tools within a call's
    turn, or no header behind them."""
    assert _trained(template, messages) == trained


def test_variables_of_a_conversation_have_headers_of_their_own() -> None:
    """What a row's variables change in the header is seen."""
    template = CHATML.replace("assistant\n{% endif", "{{ name or 'assistant' }}\n{% endif").replace(
        "{{ m.role }}", "{{ name if name and m.role == 'assistant' else m.role }}"
    )
    assert _trained(template, TALK, name="bot") == ["Uno.<|im_end|>\n", "Dos.<|im_end|>\n"]


_ASKED = "{% if add_generation_prompt %}<|im_start|>assistant\n"
_SAID = "{{ m.content }}"
_LONG = "{% if messages | length > 3 %}"
"""So that what a template is first asked does not show it."""


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (f"{_LONG}{{{{ messages[-1].content }}}}{{% endif %}}{CHATML}", "also written outside"),
        (f"{_LONG}{{{{ messages[2].content[:1] }}}}{{% endif %}}{CHATML}", "also written outside"),
        (
            CHATML.replace(_SAID, _SAID + _LONG + "{{ messages[1].content }}{% endif %}"),
            "holds what other messages say",
        ),
        (CHATML.replace(_SAID, _SAID + _LONG + "{{ messages[-1].content }}{% endif %}"), "also written outside"),
        (CHATML.replace(_SAID, _LONG + "{% else %}" + _SAID + "{% endif %}"), "nothing that message 2 says"),
        (
            CHATML.replace("<|im_end|>", _LONG + "{% for n in messages %}{{ n.content }}{% endfor %}{% endif %}"),
            "times",
        ),
        (CHATML.replace(_ASKED, "{% if false %}"), "generation prompt"),
        (CHATML.replace("{{ m.role }}", "{{ 'x' if messages | length > 3 else m.role }}"), "does not begin with"),
        (CHATML + CHATML, "written 2 times"),
        ("{% macro all() %}" + CHATML + "{% endmacro %}{{ all() }}", "written nowhere"),
        ("{{ messages | map(attribute='content') | join }}", "written nowhere"),
    ],
)
def test_what_can_not_be_proven_is_refused_with_the_reason(template: str, reason: str) -> None:
    """Never all, never none without a word."""
    with _refused("mask_not_proven", reason):
        _trained(template, TALK)


def test_tags_within_a_macro_are_refused() -> None:
    """Transformers would put them in another place."""
    template = (
        "{% macro turn(m) %}<{{ m.role }}>{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    with _refused("template_refused", "macro"):
        _trained(template, TALK)


def test_tags_and_a_choice_of_answers_go_together() -> None:
    """The last one, or those of a weight."""
    tagged = CHATML.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
    )
    assert _trained(tagged, TALK) == ["Uno.<|im_end|>", "Dos.<|im_end|>"]
    assert _trained(tagged, TALK, "last") == ["Dos.<|im_end|>"]
    assert _trained(tagged, [*TALK[:4], TALK[4] | {"train": 0}], "train") == ["Uno.<|im_end|>"]


THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""
CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
THOUGHT = [
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Dos.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "It."},
    {"role": "assistant", "content": "<think>So.</think> Yes."},
]
_CALLED = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("words", "trained"),
    [
        ("assistant", [f"<think>\nHm.\n</think>\n\nDos.{_CALLED}<|im_end|>\n", "<think>So.</think> Yes.<|im_end|>\n"]),
        ({"reasoning": False}, [f"Dos.{_CALLED}<|im_end|>\n", "Yes.<|im_end|>\n"]),
        (["assistant", "-reasoning"], [f"Dos.{_CALLED}<|im_end|>\n", "Yes.<|im_end|>\n"]),
        (
            {"assistant": True, "tool_calls": False},
            ["<think>\nHm.\n</think>\n\nDos.", "<|im_end|>\n", "<think>So.</think> Yes.<|im_end|>\n"],
        ),
        (
            {"content": False, "reasoning": False},
            [f"{_CALLED}<|im_end|>\n"],
        ),
        ({"last": True, "reasoning": False}, ["Yes.<|im_end|>\n"]),
    ],
)
def test_fields_of_a_message_are_trained_on_or_not(words: Any, trained: list[str]) -> None:
    """With the tags that the template writes around them; what is left of a turn keeps its end."""
    assert _trained(THINKS, THOUGHT, words) == trained


def test_where_nothing_is_left_of_all_fields_it_is_said() -> None:
    """As a setting, and for a conversation that has nothing else."""
    for nothing in ([], {"content": False, "reasoning": False, "tool_calls": False}):
        with pytest.raises(ConfigError, match="Nothing would be trained on"):
            train_on(nothing)
    with _refused("nothing_to_train_on"):
        _trained(CHATML, TALK, {"content": False})


# ---- conversations as they come ----


def _talk(asked: str, answer: str, **more: Any) -> Conversation:
    return Conversation([{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], **more)


def _masks(template: str = CHATML, **more: Any) -> Masks:
    return Masks(TemplateSource(template, "test"), train_on("assistant"), **more)


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
    masks = _masks("{% if messages[0].content == 'no' %}{{ raise_exception('I will not.') }}{% endif %}" + CHATML)
    with _refused(reason, message):
        masks.find(talk)
    assert masks.find(_talk("yes", "x"))[0].text.endswith("x<|im_end|>\n")


def test_a_prompt_is_never_trained_on() -> None:
    """Whoever speaks in it; it is what tells duplicates and splits by prompt."""
    talk = Conversation([*TALK[1:4], {"role": "assistant", "content": "good"}], prompt_messages=3)
    rendering, stretches, _ = _masks().find(talk)
    assert [rendering.text[begin:end] for begin, end in stretches] == ["good<|im_end|>\n"]
    assert prompt_of(talk) == "One?\nUno.\nTwo?"
    assert prompt_of(Conversation([{"role": "user", "content": "only"}])) == "only"


def test_conversations_that_say_special_tokens_are_known() -> None:
    """In whichever turn, with texts that are empty or hold zeros between them."""
    masks = _masks(special_tokens=["<|a|>", "<|b|>"])
    assert all(map(masks.says_special, [_talk("<|a|><|a|>", "<|b|>"), _talk("", "<|a|>"), _talk("é\0<|b|>", "x")]))
    assert not any(map(masks.says_special, [_talk("\0", ""), _talk("<|", "a|>")]))
    assert not _masks().says_special(_talk("<|a|>", ""))


def test_contents_and_arguments_come_as_the_template_takes_them() -> None:
    """In parts for those that know images; parsed for those that write JSON; tools by a template of their own."""
    in_parts = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    parts = CHATML.replace(_SAID, in_parts)
    assert _masks(parts).find(_talk("Hi", "Hello"))[0].text == _masks().find(_talk("Hi", "Hello"))[0].text
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for written in ("c.function.arguments | tojson", "c.function.arguments"):
        template = CHATML.replace(_SAID, f"{_SAID}{{% for c in m.tool_calls or [] %}}{{{{ {written} }}}}{{% endfor %}}")
        assert '\n{"a": 1}<|im_end|>' in _masks(template).find(Conversation(said))[0].text
    both = Masks(TemplateSource(CHATML, "test", tool_text="T" + CHATML), train_on("assistant"))
    assert both.find(_talk("q", "a", tools=[{"type": "function"}]))[0].text.startswith("T")
    assert both.find(_talk("q", "a"))[0].text.startswith("<")


# ---- tokens ----


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece"])
def test_tokens_of_stretches_hold_what_is_trained_on(
    kind: str, demo_tokenizer: Path, unigram_json: str, wordpiece_json: str
) -> None:
    """Whatever the tokenizer; those that touch are one."""
    tokenizer_json = {"unigram": unigram_json, "wordpiece": wordpiece_json}.get(kind) or demo_tokenizer.read_text()
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    finder, masks = TokenSpans(tokenizer_json), _masks()
    for talk in (_talk("One?", "Year 1990 👍"), _talk("", " \n"), _talk("¿Two words?", "more words, é and 中文")):
        rendering, ((begin, end),), _ = masks.find(talk)
        _, ((first, last),) = trained_tokens(masks, finder, tokenizer, talk)
        places = tokenizer.encode(rendering.text, add_special_tokens=False).offsets
        inside = [at for at, (start, stop) in enumerate(places) if start < end and stop > begin and start < stop]
        assert inside[0] == first and last <= inside[-1] + 1
        assert places[last - 1][1] >= places[inside[-1]][0]
