"""What a chat template can't do: loop without end, write without end, read files, change the conversation."""

from __future__ import annotations

import pytest

from milldam.chat import sandbox
from milldam.chat.sandbox import TemplateRefusedError
from milldam.chat.template import ChatTemplate
from milldam.errors import ConfigError

HELLO = [{"role": "user", "content": "Hello"}]
_TOO_MUCH = {
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "a loop of itself": "{% for m in [messages] recursive %}{{ loop([m]) }}{% endfor %}",
    "output": "{% for i in range(9999) %}{{ 'x' * 100000 }}{% endfor %}",
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
    "chance": "{{ [1, 2] | random }}",
}


@pytest.mark.parametrize("name", [*_TOO_MUCH, *_BREAK_OUT])
def test_a_template_that_runs_wild_or_leaves_its_sandbox_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither files nor Python's insides are in reach, the conversation can't be changed, and loops end."""
    monkeypatch.setattr(sandbox, "MOST_ROUNDS", 50_000)
    with pytest.raises((TemplateRefusedError, ConfigError)):
        template = ChatTemplate((_TOO_MUCH | _BREAK_OUT)[name])
        template.render(HELLO)
        pytest.fail(template.render(HELLO).text)


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
