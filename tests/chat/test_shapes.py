"""A conversation of a known shape gives what the template gives, to the letter; or the template is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.quick import first_quick

from milldam.chat.forms import BadRowError, Conversation, plain_roles
from milldam.chat.loading import TemplateSource
from milldam.chat.masks import train_on
from milldam.chat.rendering import Renderer
from milldam.chat.shapes import form_of, require_same
from milldam.errors import MilldamError

FAMILIES = ("cohere", "deepseekv3", "gemma", "gemma3", "glm4moe", "llama3", "phi3", "qwen2_5", "qwen3")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPTED = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def _same_as_rendered(template: str, talks: list[Conversation], words: Any = "assistant") -> int:
    """All talks, thrice, so that shapes are learned and used, against each rendered alone. -> How many gave a text."""
    source = TemplateSource(template, "test", variables=NAMED)
    # As forms.py tells the roles of those that are nothing but roles and texts.
    told = [replace(talk, roles=plain_roles(talk.messages)) for talk in talks]
    done = Renderer(source, train_on(words), special_tokens=["<|im_end|>"]).render(talks * 2 + told)
    found: dict[int, Any] = {one.number: one.reason for one in done.rejects}
    for at, number in enumerate(done.numbers):
        spans = done.stretches[done.offsets[at] : done.offsets[at + 1]].tolist()
        found[number] = done.texts[at], [done.texts[at].encode()[begin:end].decode() for begin, end in spans]
    asked = Renderer(source, train_on(words))
    for number, talk in enumerate(talks):
        expected: Any
        try:
            rendering, stretches = asked.show(talk)
            expected = rendering.text, [rendering.text[begin:end] for begin, end in stretches]
        except BadRowError as error:
            expected = error.reason
        assert [found[number + turn * len(talks)] for turn in range(3)] == [expected] * 3
    return len(done.texts)


def _talk(*said: str, roles: tuple[str, ...] = ("user", "assistant"), **more: Any) -> Conversation:
    messages = [{"role": roles[n % len(roles)], "content": text} for n, text in enumerate(said)]
    return Conversation(messages, **more)


ODD_WORDS = [
    *("", " ", "\n", "x", " x ", "abc", "ABC", "5", "-1", "0", "é", "<think>a</think>b", "</think>", "<tool_response>"),
    *("[INST]", "<|im_end|>", "assistant", "<|im_start|>assistant\n", "a b c", "{'a': 1}", "%s", "{x}", "<b>&amp;"),
]
LOOKS = [
    *("m.content|length", "m.content|upper", "m.content[0]", "m.content[:2]", "m.content[-1:]", "m.content|first"),
    *("m.content|int", "m.content|float", "m.content|string", "m.content|list", "m.content|reverse", "m|tojson"),
    *("m", "m.content|tojson", "m.content|replace('a', 'b')", "m.content.split('</think>')[-1]", "m.content|e"),
    *("m.content * 2", "'%s|' % m.content", "'{}|'.format(m.content)", "m.content ~ '|' ~ 1", "m.content|safe"),
    *("[m.content]|join('|')", "','.join([m.content])", "m.content|default('no', true)", "m.content|d('no')"),
    *("m.content is string", "m.content is mapping", "m.content is sameas(m.content)", "m.content is lower"),
    *("m.content is in('abc')", "m.content in 'abc'", "m.content in ['x', 'abc']", "m.content in {'x': 1}"),
    *("'x' in m.content", "m.content == 'x'", "m.content != 'x'", "m.content < 'b'", "m.content is eq('x')"),
    *("m.content.startswith('<')", "m.content.endswith('x')", "m.content.startswith(('a', 'x'))", "m.content|trim"),
    *("m.content.strip('x')", "m.content.lstrip('\n')", "m.content|trim|length", "m.content.strip().strip('x')"),
    *("m.content and 'yes'", "not m.content", "m.content or 'no'", "(m.content == '') | string", "m.content|count"),
    *("m.get('content')", "m['con' ~ 'tent']", "m.items()|list", "m.values()|list", "m.content|abs"),
    *(
        "loop.changed(m.content)",
        "messages|map(attribute='content')|join('|')",
        "m.content|round",
        "range(m.content|int)|list",
    ),
    *("messages|selectattr('content', 'equalto', 'x')|list|length", "messages|map(attribute='content')|unique|list"),
    *("messages|sort(attribute='content')|first", "messages|groupby('content')|length", "dict(a=m.content)['a']"),
    *("m.content|batch(2)|list", "m.content|center(9)", "m.content|indent", "m.content|wordcount", "m.content.nothing"),
    *("m.content.format(x=1)", "m.content % 1", "{'x': 1}[m.content]", "[1, 2][m.content]", "namespace(a=m.content).a"),
    *("m.content|attr('upper')", "m.content|filesizeformat", "m == messages[0]", "messages.index(m)", "m.content|min"),
    *("messages[0].content == m.content", "(m.content, 1)|string", "m.content|trim('x')", "m.content is iterable"),
    *(
        "m.content if m.content is defined else 'no'",
        "m.content|select|list",
        "raise_exception(m.content)",
        "cycler(m.content).next()",
    ),
]


@pytest.mark.parametrize("look", LOOKS)
def test_what_a_template_does_with_words_is_followed_or_left_to_it(look: str) -> None:
    """Whatever it asks, cuts, counts or compares: same texts, same masks, same refusals."""
    template = PROMPTED.replace("{{ m.content }}", "{{ m.content }}|{{ " + look + " }}", 1)
    talks = [_talk(a, b) for a in ("", " x ", "abc") for b in ODD_WORDS]
    _same_as_rendered(template, talks)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("{{ m.content }}", "{% if m.content %}{{ m.content.strip() }}{% else %}none{% endif %}"),
        PROMPTED + "{{ messages[-1].content }}",
        PROMPTED + "{{ messages[0].content }}<|im_start|>assistant\n",
        "{{ messages[-1].content }}" + PROMPTED,
        "{% if 'b' in messages[-1].content %}C{% endif %}" + PROMPTED,
        "{% if '</think>' in messages[-1].content %}C{% endif %}" + PROMPTED,
        "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all + m.content %}{% endfor %}"
        + PROMPTED,
        "{% macro say(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% set x %}<{{ m.role }}>{{ m.content }}{% endset %}{{ x }}{% endfor %}",
        "{% autoescape true %}" + CHATML + "{% endautoescape %}",
        "{% for m in messages|reverse %}<{{ m.role }}>{{ m.content }}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{% generation %}{{ m.content|trim }}{% endgeneration %}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% set c = m.content %}"
        "{% if '</think>' in c %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.content }}{{ loop.previtem.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    ],
)
@pytest.mark.parametrize("words", ["assistant", "last", "all", "user"])
def test_masks_of_a_shape_are_those_of_the_rendering(template: str, words: str) -> None:
    """By tags or derived; what can't be proven is refused in any order of conversations."""
    pairs = [_talk(a, b) for a in ("Hi", " ", "<tool_response>x") for b in ODD_WORDS]
    longer = [_talk("Hi", "Hello", a, b, "and", "so") for a in ODD_WORDS[3:9] for b in ODD_WORDS]
    _same_as_rendered(template, pairs + longer, words)


_SAID = st.one_of(st.sampled_from(ODD_WORDS), st.text(max_size=12))
_CALL = st.fixed_dictionaries(
    {
        "name": _SAID.filter(bool),
        "arguments": st.dictionaries(st.text(max_size=3), st.one_of(_SAID, st.integers()), max_size=2),
    }
)


@st.composite
def _conversations(draw: st.DrawFn) -> Conversation:
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(_SAID)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        messages.append({"role": "user", "content": draw(_SAID)})
        answer: dict[str, Any] = {"role": "assistant", "content": draw(_SAID)}
        if draw(st.booleans()):
            answer["reasoning_content"] = draw(_SAID)
        messages.append(answer)
        if draw(st.booleans()):
            answer["tool_calls"] = [{"type": "function", "id": draw(_SAID), "function": draw(_CALL)}]
            messages += [
                {"role": "tool", "content": draw(_SAID), "name": draw(_SAID)},
                {"role": "assistant", "content": "So."},
            ]
    tools = [{"type": "function", "function": draw(_CALL)}] if draw(st.booleans()) else None
    return Conversation(messages, tools)


@pytest.mark.parametrize(
    "name", first_quick([f"{family}{kind}.jinja" for family in FAMILIES for kind in ("", "_training")], 6)
)
@settings(max_examples=15, deadline=None)
@given(talks=st.lists(_conversations(), min_size=1, max_size=6))
def test_templates_of_real_models_give_the_same_by_shapes(
    name: str, shared_data: Path, talks: list[Conversation]
) -> None:
    """Nine families with and without tags, whatever is said, thought and called."""
    _same_as_rendered((shared_data / "chat/templates" / name).read_text(encoding="utf-8"), talks)


def test_a_form_leaves_out_words_alone() -> None:
    """Roles, fields, their order, empty texts and numbers tell conversations apart."""
    plain: dict[str, Any] = {"role": "user", "content": "Hi"}
    others: list[dict[str, Any]] = [
        {"role": "tool", "content": "Hi"},
        {"content": "Hi", "role": "user"},
        {"role": "user", "content": ""},
        {"role": "user", "content": None},
        {"role": "user", "content": "Hi", "weight": 0},
        {"role": "user", "content": "Hi", "weight": False},
        {"role": "user", "content": "Hi", "weight": 1},
        {"role": "user", "content": "Hi", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    more: list[tuple[Any, int]] = [(None, 0), (None, 1), ([{}], 0), ([{}, {}], 0)]
    forms = [form_of([one], tools, prompt) for one in [plain, *others] for tools, prompt in more]
    assert len({repr(form) for form in forms}) == len(forms)
    assert form_of([plain], None, 0) == form_of([{"role": "user", "content": "Ho"}], None, 0)


def test_a_shape_that_gives_something_else_ends_the_run() -> None:
    """Never silently."""
    require_same(("a", [(0, 1)]), ("a", [(0, 1)]))
    with pytest.raises(MilldamError, match="please report the template"):
        require_same(("a", [(0, 1)]), ("a", []))


def test_long_conversations_and_many_turns_are_the_same_too() -> None:
    """Beyond the size of shapes the template is asked, within its bounds."""
    turns = [_talk(*["Hi", "Hello"] * count) for count in (1, 2, 50, 200)]
    assert _same_as_rendered(PROMPTED, [*turns, _talk("Hi", "x" * 300_000), _talk("é" * 1000, "b" * 1000)]) == 18


def test_arguments_that_are_texts_are_parsed_first() -> None:
    """As for the rendering; broken ones are refused alike."""
    template = PROMPTED.replace(
        "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments|tojson }}{% endfor %}"
    )
    talks = []
    for arguments in ('{"a": 1}', '{"b": "é"}', "{", "[1]", "5"):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        talks.append(
            Conversation(
                [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
            )
        )
    assert _same_as_rendered(template, talks) == 12
