"""A giant JSON line gives, in parts, the very text that json.loads gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from milldam.sources import giant
from milldam.sources.batch import MalformedError, TextRules
from milldam.sources.giant import GiantLine

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
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=30)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=12), inner, max_size=3)),
    max_leaves=8,
)


@contextmanager
def sizes(part: int, long_string: int) -> Iterator[None]:
    """Small parts; strings longer than `long_string`, which the name "text" must not be, are read from disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(giant, "_PART", part)
        patch.setattr(giant, "_LONG_STRING", long_string)
        yield


def parts_of(line: bytes, path: str = "text", feed: int = 7) -> list[tuple[str, bool]]:
    """What a line gives when it is fed in small pieces."""
    reader = GiantLine(path.split("."), None, RULES)
    found: list[tuple[str, bool]] = []
    for start in range(0, len(line), feed):
        found += reader.feed(line[start : start + feed], last=start + feed >= len(line))
    return found


def text_of(line: bytes, path: str = "text") -> str:
    found = parts_of(line, path)
    assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
    return "".join(text for text, _ in found)


@given(raw=RAW_STRINGS, part=st.integers(1, 20), long_string=st.integers(4, 20))
@example(raw="\\\\" * 10, part=3, long_string=4)
@example(raw="\\ud83d\\ude42" * 4, part=5, long_string=4)
@example(raw="\\\\ud83d\\\\", part=4, long_string=4)
@example(raw="é🙂" * 10, part=1, long_string=4)
def test_the_text_is_what_json_loads_gives(raw: str, part: int, long_string: int) -> None:
    """With escapes, surrogate pairs and characters of several bytes cut at every place."""
    line = f'{{"id": "x", "text": "{raw}", "n": 1}}'
    with sizes(part, long_string):
        assert text_of(line.encode()) == json.loads(line)["text"]


@given(record=st.dictionaries(st.text(max_size=12), VALUES, max_size=4), text=st.text(max_size=80), ascii=st.booleans())
def test_other_fields_do_not_matter(record: dict[str, Any], text: str, ascii: bool) -> None:
    """Long strings in other fields, as keys, or in lists are passed over."""
    line = json.dumps({**record, "text": text}, ensure_ascii=ascii)
    with sizes(6, 5):
        assert text_of(line.encode()) == text


@given(text=st.text(max_size=60))
def test_a_dotted_name_leads_into_nested_objects(text: str) -> None:
    """A field of the same name on the way is not taken for it."""
    line = json.dumps({"text": "x" * 50, "a": {"text": "y" * 50, "b": {"text": text}}})
    with sizes(8, 10):
        assert text_of(line.encode(), "a.b.text") == text


@given(text=st.text(min_size=1, max_size=200), part=st.integers(12, 40))
def test_parts_are_bounded(text: str, part: int) -> None:
    """No part is larger than the size asked for and what a cut may hold back."""
    with sizes(part, 4):
        found = parts_of(json.dumps({"text": text}).encode())
    assert max(len(piece) for piece, _ in found) <= part + 16


def test_an_empty_text_is_a_text() -> None:
    """It is given once, as the last part."""
    with sizes(4, 4):
        assert parts_of(b'{"x": "' + b"y" * 100 + b'", "text": ""}') == [("", True)]


def test_a_repeated_field_counts_the_last_time() -> None:
    """As json.loads has it."""
    with sizes(8, 8):
        assert text_of(b'{"text": "%s", "text": "%s"}' % (b"a" * 40, b"b" * 40)) == "b" * 40


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
        b'{"body": "' + b"x" * 50 + b'"}',
        b'{"text": ["' + b"x" * 50 + b'"]}',
        b'"' + b"x" * 50 + b'"',
        b"\xff" * 50,
        b"{" * 50,
    ],
    ids=repr,
)
def test_a_line_without_such_a_text_raises_before_anything_is_given(line: bytes) -> None:
    """What is wrong at the end is found before the first part is handed on."""
    with sizes(8, 8):
        reader = GiantLine(["text"], None, RULES)
        with pytest.raises(MalformedError):
            next(iter(reader.feed(line, last=True)))


def test_a_reader_is_ready_for_the_next_line_after_a_bad_one() -> None:
    """Nothing of a line stays behind."""
    reader = GiantLine(["text"], None, RULES)
    with pytest.raises(MalformedError, match="Expecting"):
        list(reader.feed(b"bad", last=True))
    assert list(reader.feed(b'{"text": "good"}', last=True)) == [("good", True)]


def test_too_many_small_strings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The skeleton is bounded too."""
    monkeypatch.setattr(giant, "_LARGEST_SKELETON", 100)
    with pytest.raises(MalformedError, match="too large"):
        text_of(json.dumps({"text": "x", "list": ["y"] * 100}).encode())


def test_a_text_that_looks_like_a_mark_is_text() -> None:
    """No text of the input can lead to another field."""
    text = "\ue000 0"
    line = json.dumps({"secret": "s" * 100, "text": text}, ensure_ascii=False)
    with sizes(64, 50):
        assert text_of(line.encode()) == text


@given(record=st.dictionaries(st.sampled_from(["text", "body", "n"]), VALUES, min_size=1))
def test_the_outline_has_the_fields_of_the_line(record: dict[str, Any]) -> None:
    """Enough to find the text column: names, and which of them hold text."""
    with sizes(8, 5):
        outline = GiantLine.outline([json.dumps(record).encode()], None)
    assert {name: type(value) for name, value in outline.items()} == {n: type(v) for n, v in record.items()}


def test_the_line_is_spooled_where_asked(tmp_path: Path) -> None:
    """The spool folder must exist, and nothing stays in it."""
    reader = GiantLine(["text"], str(tmp_path), RULES)
    assert list(reader.feed(b'{"text": "a"}', last=True)) == [("a", True)]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        list(GiantLine(["text"], str(tmp_path / "none"), RULES).feed(b"x", last=False))
