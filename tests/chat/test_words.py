"""Templates reach nothing but the conversation; words know who said them, and a template writes the same with them."""

from __future__ import annotations

import pytest

from milldam.chat.template import ChatTemplate, TemplateRefusedError
from milldam.errors import ConfigError

MARK = "qzx"
"""Said by one message, and by no template."""
THOUGHT, ODD = f"<think>a</think>{MARK}", f"%s {{x}} <b>&amp;{MARK}"
SAID = ["", f" {MARK} ", THOUGHT, f"{MARK} a\n{MARK}", ODD, "5", "-1", "[INST]"]
LOOKS = [
    *("m.content|length", "m.content|upper|lower", "m.content[0]", "m.content[:4]", "m.content[-3:]"),
    *("m.content|int", "m.content|float", "m.content|string", "m.content|list|join", "m.content|reverse|reverse"),
    *("m", "m.content|tojson", "m.content|replace('a', 'b')", "m.content.split('</think>')[-1]", "m.content|e"),
    *("m.content * 2", "'%s|' % m.content", "'{}|'.format(m.content)", "m.content ~ '|' ~ 1", "m.content|safe"),
    *("[m.content]|join('|')", "','.join([m.content])", "m.content|default('no', true)", "m.content|d('no')"),
    *("m.content is string", "m.content is mapping", "m.content is sameas(m.content)", "m.content is lower"),
    *("m.content is in('abc')", "m.content in 'abc'", "m.content in ['x', 'abc']", "m.content in {'x': 1}"),
    *("'x' in m.content", "m.content == 'x'", "m.content != 'x'", "m.content < 'b'", "m.content is eq('x')"),
    *("m.content.startswith('<')", "m.content.endswith('x')", "m.content.startswith(('a', 'x'))", "m.content|trim"),
    *("m.content.strip(' <')", "m.content.lstrip('\n')", "m.content|trim|length", "('[' ~ m.content ~ ']').strip('[')"),
    *("m.content and 'yes'", "not m.content", "m.content or 'no'", "(m.content == '') | string", "m.content|count"),
    *("m.get('content')", "m['con' ~ 'tent']", "m.items()|list", "m.values()|list", "m.content|abs", "m.content|round"),
    *("loop.changed(m.content)", "messages|map(attribute='content')|join('|')", "range(m.content|int)|list"),
    *("messages|selectattr('content', 'equalto', 'x')|list|length", "messages|map(attribute='content')|unique|list"),
    *("messages|sort(attribute='content')|first", "messages|groupby('content')|length", "dict(a=m.content)['a']"),
    *("m.content|batch(2)|list", "m.content|center(9)", "m.content|indent", "m.content|wordcount", "m.content.nothing"),
    *("m.content.format(x=1)", "m.content % 1", "{'x': 1}[m.content]", "[1, 2][m.content]", "namespace(a=m.content).a"),
    *("m.content|filesizeformat", "m == messages[0]", "messages.index(m)", "m.content|min"),
    *("messages[0].content == m.content", "(m.content, 1)|string", "m.content|trim('x')", "m.content is iterable"),
    *("m.content if m.content is defined else 'no'", "m.content|select|list", "raise_exception(m.content)"),
    *("m.content|wordwrap(2)", "m.content|urlize", "{'a': m.content}|xmlattr", "[m.content]|pprint", "m.content|title"),
    *("cycler(m.content).next()", "m.content.partition('<')", "m.content.splitlines()|join", "m.content.title()|lower"),
]


@pytest.mark.parametrize("look", LOOKS)
def test_words_are_told_from_the_template_whatever_is_done_with_them(look: str) -> None:
    """The same text or the same refusal as without following; every trace of a message's words is known as such."""
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}|{{ " + look + " }}{% endfor %}")
    for said in SAID:
        messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "fine"}]
        try:
            text = template.render(messages).text
        except TemplateRefusedError:
            with pytest.raises(TemplateRefusedError):
                template.render(messages, follow=True)
            continue
        followed = template.render(messages, follow=True)
        assert followed.text == text
        marks = [at for at in range(len(text)) if text.startswith(MARK, at)]
        for at in marks:
            assert any(begin <= at and at + len(MARK) <= end for begin, end, _ in _runs(followed.words)), text


def _runs(words: list[tuple[int, int, tuple[object, ...]]]) -> list[tuple[int, int, object]]:
    """Words that touch as one."""
    runs: list[tuple[int, int, object]] = []
    for begin, end, source in words:
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end, source)
        else:
            runs.append((begin, end, source))
    return runs


@pytest.mark.parametrize(
    ("template", "sources"),
    [
        ("{{ messages[0].content | trim }}|{{ messages[1].content }}", ["0", "1"]),
        ("{{ messages[0].content ~ messages[1].content }}", ["0", "1"]),
        ("{{ (messages[0].content ~ '] ' ~ messages[1].content) | upper }}", ["None"]),
        ("{{ ('[' ~ messages[0].content ~ ']')[1:-1] }}", ["0"]),
        ("{% set x %}<{{ messages[0].content }}>{% endset %}{{ x }}", ["0"]),
        ("{% macro say(m) %}<{{ m.content }}>{% endmacro %}{{ say(messages[1]) }}", ["1"]),
        ("{{ {'a': messages[0].content, 'b': 1} | tojson }}", ["0"]),
        ("{{ messages[0] | tojson }}", ["0"]),
        ("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}", ["0"]),
        ("{{ messages[0].role }}", []),
    ],
)
def test_sources_of_words_are_their_messages(template: str, sources: list[str]) -> None:
    """Of several messages that are mixed, nobody's alone."""
    messages = [{"role": "user", "content": " One <b> "}, {"role": "assistant", "content": "two"}]
    words = ChatTemplate(template).render(messages, follow=True).words
    assert [str(source[1]) for _, _, source in words] == sources


# ---- the sandbox ----

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
