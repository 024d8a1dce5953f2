"""What a chat template can't do: read files, reach Python's insides, change the conversation."""

from __future__ import annotations

import pytest

from milldam.chat.template import ChatTemplate, TemplateRefusedError
from milldam.errors import ConfigError

HELLO = [{"role": "user", "content": "Hello"}]
REFUSED = {
    "range": "{% for i in range(10**12) %}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_leaves_its_sandbox_is_refused(name: str) -> None:
    """Neither files nor Python's insides are in reach, and the conversation can't be changed."""
    with pytest.raises((TemplateRefusedError, ConfigError)):
        pytest.fail(ChatTemplate(REFUSED[name]).render(HELLO).text)


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
