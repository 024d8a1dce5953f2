"""What a chat template can't do: run for ever, eat memory, read files."""

from __future__ import annotations

import tracemalloc

import pytest

from milldam.chat import sandbox
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate
from milldam.errors import ConfigError

HELLO = [{"role": "user", "content": "Hello"}]
_GROW = (
    "{% set ns = namespace(x=START) %}{% for i in range(1000) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x | length }}"
)


def _grow(start: str, step: str) -> str:
    return _GROW.replace("START", start).replace("STEP", step)


_BOMBS = {
    "repeat": "{{ 'x' * 10**9 }}",
    "repeat twice": "{{ (('x' * 1000000) * 1000000) | length }}",
    "repeat a list": "{{ ([0] * 1000000 * 1000000) | length }}",
    "double by joining": _grow("'x'", "ns.x ~ ns.x"),
    "double by adding": _grow("'x'", "ns.x + ns.x"),
    "double a list": _grow("[1]", "ns.x + ns.x"),
    "nest a list": _grow("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
    "nest a tuple": _grow("(1,)", "(ns.x, ns.x)") + "{{ ns.x }}",
    "nest a dict": _grow("{}", "dict(a=ns.x, b=ns.x)") + "{{ ns.x | tojson }}",
    "gather texts": _grow("[]", "ns.x + ['x' * 1000000]"),
    "squares": _grow("10", "ns.x * ns.x"),
    "power": "{{ 10 ** 1000000 }}",
    "centre": "{{ 'x'.center(10**9) }}",
    "centre by filter": "{{ 'x' | center(10**9) }}",
    "pad": "{{ 'x'.ljust(10**9) }}{{ 'x'.zfill(10**9) }}",
    "indent": "{{ ('x\\n' * 100000) | indent(100000) }}",
    "indent by a text": "{{ ('x\\n' * 100000) | indent('y' * 100000) }}",
    "tabs": "{{ ('\\t' * 100000).expandtabs(100000) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "replace by filter": "{{ ('x' * 100000) | replace('x', 'y' * 100000) }}",
    "join": "{{ ('y' * 100000).join(['x'] * 100000) }}",
    "join by filter": "{{ range(100000) | join('y' * 100000) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format by a width": "{{ '{:{}}'.format(1, 99999) * 10000 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent by filter": "{{ '%1000000000d' | format(1) }}",
    "format one text often": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "json": "{{ {'a': messages} | tojson(indent=10**9) }}",
    "list": "{% for i in range(100000) %}{{ range(100000) | list | length }}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "streams": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a tree of macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a loop of itself": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "much output": "{% for i in range(99999) %}{% for j in range(99) %}{{ messages }}{% endfor %}{% endfor %}",
}
_BREAK_OUT = {
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as x %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.keys() }}",
    "a method's": "{{ messages.__class__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "through format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "changes": "{{ messages.append(1) }}",
    "changes of a message": "{{ messages[0].update(role='assistant') }}",
}


@pytest.mark.parametrize("name", _BOMBS)
def test_a_template_that_takes_too_much_is_refused_before_it_has_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the memory that it asks for."""
    monkeypatch.setattr(sandbox, "MOST_STEPS", 50_000)
    template = ChatTemplate(_BOMBS[name])
    tracemalloc.start()
    try:
        with pytest.raises(TemplateRefusedError):
            template.render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", _BREAK_OUT)
def test_a_template_does_not_leave_its_sandbox(name: str) -> None:
    """Neither files nor Python's insides are in reach, and the conversation can't be changed."""
    with pytest.raises(TemplateRefusedError):
        template = ChatTemplate(_BREAK_OUT[name])
        template.render(HELLO)
        pytest.fail(template.render(HELLO).text)


def test_a_refusal_leaves_nothing_behind() -> None:
    """The next conversation begins with nothing counted."""
    template = ChatTemplate("{% for m in messages %}{{ m.content * m.times }}{% endfor %}")
    with pytest.raises(TemplateRefusedError):
        template.render([{"role": "user", "content": "x", "times": 10**9}])
    assert template.render([{"role": "user", "content": "x", "times": 3}]).text == "xxx"


def test_a_long_conversation_may_be_put_together_message_by_message() -> None:
    """The bounds grow with the conversation: text gathered in a variable takes quadratic room, and is no bomb."""
    template = ChatTemplate(
        "{% set ns = namespace(t='', l=[]) %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}"
        "{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.t }}{{ ns.l | length }}"
    )
    messages = [{"role": "user", "content": "x" * 5000} for _ in range(200)]
    assert template.render(messages).text == "x" * 1_000_000 + "200"


def test_large_numbers_in_a_conversation_are_no_bomb() -> None:
    """A tool's arguments may hold any number, and macros take them."""
    template = ChatTemplate(
        "{% macro m(v) %}{{ v }}{% endmacro %}{{ m(messages[0].n) }} {{ messages[0].n | default(1) }}"
    )
    assert template.render([{"role": "user", "n": 10**15}]).text == "1000000000000000 1000000000000000"


def test_a_template_that_is_no_jinja_is_refused_with_its_line() -> None:
    """The user sees where."""
    with pytest.raises(ConfigError, match=r"line 2: .*endfro"):
        ChatTemplate("{% for m in messages %}\n{% endfro %}")


def test_what_comes_from_the_conversation_is_no_variable_to_set() -> None:
    """A setting that the conversation would overrule is refused, not ignored."""
    with pytest.raises(ConfigError, match="tools"):
        ChatTemplate("{{ tools }}", {"tools": []})


def test_sums_of_texts_and_lists_are_those_of_jinja() -> None:
    """Chains of + go from left to right, whatever they add; what can't be added is refused."""
    template = ChatTemplate("{{ 1 + 2 + messages[0].n }}{{ ['a'] + ['b'] + messages[0].l }}{{ 'a' + 'b' + 'c' }}")
    assert template.render([{"role": "user", "n": 3, "l": ["c"]}]).text == "6['a', 'b', 'c']abc"
    with pytest.raises(TemplateRefusedError, match="no attribute 'l'"):
        template.render([{"role": "user", "n": 3}])
