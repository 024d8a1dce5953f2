"""A giant JSON line gives, in parts, the very text that json.loads gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milldam.sources import arrays, giant_line, json_stream
from milldam.sources.batch import Batch, MalformedError, TextRules
from milldam.sources.compression import DamagedError
from milldam.sources.giant_line import GiantLine
from milldam.sources.jsonl import text_of_line

RULES = TextRules()
ESCAPES = st.sampled_from(
    [
        '\\"',
        "\\\\",
        "\\/",
        "\\n",
        "\\t",
        "\\u0041",
        "\\u00e9",
        "\\ud83d\\ude42",
        "\\uD834\\uDD1E",
        "\\u4f60",
        "\\\\u0041",
    ]
)
CHARACTERS = st.characters(codec="utf-8", exclude_characters='"\\', exclude_categories=["Cs", "Cc"])
RAW_STRINGS = st.lists(st.one_of(ESCAPES, CHARACTERS), max_size=60).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=30)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=12), inner, max_size=3)),
    max_leaves=8,
)


# What a slip of the pen puts into a line, or leaves of it.
SLIPS = st.sampled_from([*'"\\{}[],:0-.eE+ tu\x01\x7f', "é", "", "nul", "NaN", "\\u00", "\ufeff", '"text":'])


@contextmanager
def sizes(part: int, head: int = 4) -> Iterator[None]:
    """Small parts, and little looked at first of a string."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_PART", part)
        patch.setattr(arrays, "HEAD_CHARACTERS", head)
        patch.setattr(json_stream, "_FIRST_PART", part)
        yield


def pieces(line: bytes, size: int) -> Iterator[bytes]:
    return (line[start : start + size] for start in range(0, len(line), size))


def batches_of(line: bytes, path: str = "text", feed: int = 7, rules: TextRules = RULES) -> Iterator[Batch]:
    """What a line gives when it comes in small pieces."""
    return GiantLine(pieces(line, feed), rules).batches(path.split("."))


def text_of(line: bytes, path: str = "text", feed: int = 7, rules: TextRules = RULES) -> str:
    """What is left of it when all is said, in the order in which a run hears it."""
    parts: list[str] = []
    open = False
    for batch in batches_of(line, path, feed, rules):
        assert not batch.cancel or open, "nothing to take back"
        parts = parts + batch.texts.to_pylist() if open and not batch.cancel else batch.texts.to_pylist()
        open = batch.open
    assert not open
    return "".join(parts)


def outcome(line: bytes, path: str, feed: int, rules: TextRules = RULES) -> tuple[str, str]:
    try:
        return "text", text_of(line, path, feed, rules)
    except MalformedError as error:
        return "reject", error.reason


def small_outcome(line: bytes, path: str, rules: TextRules = RULES) -> tuple[str, str]:
    """As a line of ordinary size has it."""
    try:
        return "text", text_of_line(line, path.split("."), rules)
    except MalformedError as error:
        return "reject", error.reason


# ---- the text ----


@given(raw=RAW_STRINGS, part=st.integers(1, 20), feed=st.integers(1, 20))
@example(raw="\\\\" * 10, part=3, feed=4)
@example(raw="\\ud83d\\ude42" * 4, part=5, feed=4)
@example(raw="\\\\ud83d\\\\", part=4, feed=4)
@example(raw="é🙂" * 10, part=1, feed=1)
def test_the_text_is_what_json_loads_gives(raw: str, part: int, feed: int) -> None:
    """With escapes, surrogate pairs and characters of several bytes cut at every place."""
    line = f'{{"id": "x", "text": "{raw}", "n": 1}}'
    with sizes(part):
        assert text_of(line.encode(), feed=feed) == json.loads(line)["text"]


@given(text=st.text(min_size=1, max_size=200), part=st.integers(12, 40))
def test_parts_are_bounded(text: str, part: int) -> None:
    """No part is larger than the size asked for, a piece and what a cut may hold back."""
    with sizes(part):
        found = list(batches_of(json.dumps({"text": text}).encode(), feed=10))
    assert max(len(batch.texts[0].as_py()) for batch in found) <= 2 * part + 16
    assert [batch.open for batch in found] == [True] * (len(found) - 1) + [False]


def test_a_short_text_is_no_giant() -> None:
    """However large the line is, it comes whole."""
    line = json.dumps({"a": "y" * 5000, "text": "short", "b": list(range(1000))}).encode()
    assert [(batch.texts.to_pylist(), batch.open) for batch in batches_of(line)] == [(["short"], False)]


def test_an_empty_text_is_a_text() -> None:
    """It is given once."""
    with sizes(4):
        found = list(batches_of(b'{"x": "' + b"y" * 100 + b'", "text": ""}'))
    assert [(batch.texts.to_pylist(), batch.open) for batch in found] == [([""], False)]


# ---- what is not the text ----


@given(record=st.dictionaries(st.text(max_size=12), VALUES, max_size=4), text=st.text(max_size=80), ascii=st.booleans())
def test_other_fields_do_not_matter(record: dict[str, Any], text: str, ascii: bool) -> None:
    """Whatever they hold, before and behind the text."""
    line = json.dumps({**record, "text": text, "behind": record}, ensure_ascii=ascii)
    with sizes(6):
        assert text_of(line.encode()) == text


LONG = {
    "numbers": list(range(3000)),
    "floats": [k / 7 * 10 ** (k % 40 - 20) for k in range(1000)],
    "short strings": [f'"{k}\\\n' for k in range(1000)],
    "a string": 'long \n"é🙂' * 1000,
    "long strings": ["x\n" * 300] * 10,
    "objects": [{"id": k, "tags": ["a", None], "at": {"x": 1.5, "y": [True]}} for k in range(300)],
    "fields": {f"key {k}": {"k": k} for k in range(1000)},
    "a long key": {"k" * 9000: 1},
    "long rows": [list(range(200)) for _ in range(10)],
    "rows in rows in rows": [[[[[k, [k]]] * 3] * 3] for k in range(100)],
    "white space": [1, 2],
}


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
@pytest.mark.parametrize("feed", [1, 100, 10_000])
def test_a_value_of_any_size_and_kind_is_passed_over(value: Any, feed: int) -> None:
    """Before the text, behind it and around it; in small pieces and all at once."""
    indent = 50 if value == [1, 2] else None
    line = json.dumps({"a": value, "b": {"c": value, "text": "one", "d": value}, "e": value}, indent=indent).encode()
    assert text_of(line, "b.text", feed) == "one"


def test_a_value_may_be_nested_deeper_than_the_ordinary_parser_goes() -> None:
    """Python's gives up after a thousand levels."""
    line = b'{"a": ' + b'[{"b": ' * 5000 + b"1" + b"}]" * 5000 + b', "text": "one"}'
    assert text_of(line, feed=1000) == "one"


def test_a_line_of_nothing_but_brackets_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an end to how deep a value may be."""
    monkeypatch.setattr(json_stream, "_DEEPEST", 100)
    with pytest.raises(MalformedError, match="nested deeper than 100 levels"):
        text_of(b'{"a": ' + b"[" * 1000, feed=10)


@given(text=st.text(max_size=60))
def test_a_dotted_name_leads_into_nested_objects(text: str) -> None:
    """A field of the same name on the way is not taken for it."""
    line = json.dumps({"text": "x" * 50, "a": {"text": "y" * 50, "b": {"text": text}}})
    with sizes(8):
        assert text_of(line.encode(), "a.b.text") == text


@pytest.mark.parametrize(
    ("line", "path"),
    [
        (b'{"text": "%s", "text": "%s"}' % (b"a" * 40, b"b" * 40), "text"),
        (b'{"te\\u0078t": "%s"}' % (b"a" * 40), "text"),
        (b'{"text": "%s", "te\\u0078t": ["b"]}' % (b"a" * 40), "text"),
        (b'{"text": 5, "text": "%s"}' % (b"b" * 40), "text"),
        (b'{"text": "%s\\ud800", "text": "%s"}' % (b"a" * 40, b"b" * 40), "text"),
        (b'{"a": {"b": "%s"}, "a": {"b": "%s"}}' % (b"a" * 40, b"b" * 40), "a.b"),
        (b'{"a": {"b": "%s"}, "a": {"c": 1}}' % (b"a" * 40), "a.b"),
        (b'{"a": {"b": "%s"}, "a": [{"b": "x"}]}' % (b"a" * 40), "a.b"),
        (b'{"a.b": "%s", "a": {"b": "x"}}' % (b"a" * 40), "a.b"),
    ],
    ids=repr,
)
def test_a_repeated_field_counts_the_last_time(line: bytes, path: str) -> None:
    """As json.loads has it, at every level and however its name is written."""
    with sizes(8):
        assert outcome(line, path, 7) == small_outcome(line, path)


# ---- what is wrong ----


@given(
    record=st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    slips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), SLIPS), max_size=3),
    cut=st.one_of(st.none(), st.integers(0, 400)),
    feed=st.integers(1, 40),
)
def test_a_giant_line_is_judged_as_a_small_one(
    record: dict[str, Any], slips: list[tuple[int, int, str]], cut: int | None, feed: int
) -> None:
    """Kept with the same text or rejected for the same reason, wherever it is broken."""
    line = json.dumps({"a": record, "text": "what it says", "b": [record, 1]}, ensure_ascii=False)[:cut]
    for at, replaced, slip in slips:
        line = line[:at] + slip + line[at + replaced :]
    with sizes(5):
        assert outcome(line.encode(), "text", feed) == small_outcome(line.encode(), "text")


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "' + b"x" * 50,
        b'{"text": "' + b"x" * 50 + b'"',
        b'{"text": "' + b"x" * 50 + b'"} x',
        b'{"text": "' + b"x" * 50 + b'\\"}',
        b'{"text": "' + b"x" * 50 + b'\\q"}',
        b'{"text": "' + b"x" * 50 + b'\\u12"}',
        b'{"text": "' + b"x" * 50 + b'\xff"}',
        b'{"text": "' + b"x" * 50 + b'\\ud800"}',
        b'{"text": "' + b"x" * 50 + b'\\ud800\\u0041"}',
        b'{"text": "' + b"x" * 50 + b'\n"}',
        b'{"text": "' + b"x" * 50 + b'", "a": [1, 2,]}',
        b'{"text": "' + b"x" * 50 + b'", "a": [01]}',
        b'{"text": "' + b"x" * 50 + b'", "a": [1.]}',
        b'{"text": "' + b"x" * 50 + b'", "a": {"b" 1}}',
        b'{"text": "' + b"x" * 50 + b'", "a": {"b": 1, "c"}}',
        b'{"text": "' + b"x" * 50 + b'", "a": [1 2]}',
        b'{"text": "' + b"x" * 50 + b'", "a": [{]}',
        b'{"text": "' + b"x" * 50 + b'", "a": "\x01"}',
        b'{"text": "' + b"x" * 50 + b'", "a": "\xff"}',
        b'{"text": "' + b"x" * 50 + b'", "a": bare, "b": "\xff"}',
        b'{"text": "' + b"x" * 50 + b'", "a": %s}' % (b"1" * 5000),
        b'{"body": "' + b"x" * 50 + b'"}',
        b'{"text": ["' + b"x" * 50 + b'"]}',
        b'"' + b"x" * 50 + b'"',
        b"\xff" * 50,
        b"{" * 50,
        b" " * 50,
    ],
    ids=repr,
)
@pytest.mark.parametrize("mode", ["reject", "replace", "drop"])
def test_a_line_without_such_a_text_is_rejected_as_a_small_one(line: bytes, mode: str) -> None:
    """What is wrong behind the text takes it back; the reason is the same under every rule for what is no UTF-8."""
    rules = TextRules(invalid_utf8=mode)
    with sizes(8):
        assert outcome(line, "text", 7, rules) == small_outcome(line, "text", rules)


def test_a_reject_says_where() -> None:
    """In characters of the line, or in bytes where it is no text."""
    behind = b'{"text": "' + b"x" * 500 + b'", "a": [1, 2, nil]}'
    with pytest.raises(MalformedError, match="Expecting value at character 525"):
        text_of(behind)
    with pytest.raises(MalformedError, match="byte 0xff at 510: not UTF-8"):
        text_of(b'{"text": "' + b"x" * 500 + b'\xff"}')


def test_the_whole_line_is_read_when_it_is_bad() -> None:
    """What follows it begins at the next line."""
    line = iter([b'{"text": oh', b" no", b" and on", b"}\n"])
    with pytest.raises(MalformedError):
        list(GiantLine(line, RULES).batches(["text"]))
    assert list(line) == []


def test_a_file_that_ends_in_the_text_takes_it_back() -> None:
    """And what is wrong with the file is not lost."""

    def parts() -> Iterator[bytes]:
        yield b'{"text": "' + b"x" * 50
        yield b"x" * 50
        raise DamagedError("truncated", "cut off")

    given: list[Batch] = []
    with sizes(8), pytest.raises(DamagedError, match="cut off"):
        given.extend(GiantLine(parts(), RULES).batches(["text"]))
    assert [batch.open for batch in given] == [True] * (len(given) - 1) + [False]
    assert given[-1].cancel


# ---- the fields ----


def outline_of(line: bytes, feed: int = 7) -> dict[str, Any]:
    return GiantLine(pieces(line, feed), RULES).outline()


@given(record=st.dictionaries(st.sampled_from(["text", "body", "n"]), VALUES, min_size=1))
def test_the_outline_has_the_fields_of_the_line(record: dict[str, Any]) -> None:
    """Enough to find the text column: names, and which of them hold text."""
    with sizes(8):
        outline = outline_of(json.dumps(record).encode())
    shown = {name: type(value) if isinstance(value, str | dict) else type(None) for name, value in record.items()}
    assert {name: type(value) for name, value in outline.items()} == shown


def test_the_outline_of_a_line_that_breaks_off_has_what_was_there() -> None:
    """Of standard input no more than the head can be looked at."""
    outline = outline_of(b'{"a": {"b": "x"}, "n": [1, 2], "text": "' + b"y" * 50)
    assert outline == {"a": {"b": "x"}, "n": None, "text": "yy"}


def test_the_outline_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may have any number of fields."""
    monkeypatch.setattr(giant_line, "_OUTLINE", 100)
    outline = outline_of(json.dumps({f"key {k}": "text" for k in range(1000)}).encode())
    assert 5 < len(outline) < 20
