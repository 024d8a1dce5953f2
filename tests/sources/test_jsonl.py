"""JSON lines: every good document once and in order, every bad line counted with its reason and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, Result, read, small_blocks

from milldam.sources.batch import Reject, TextRules

GOOD = b'{"text": "good"}'
BAD = {
    b"not json": "bad_json",
    b'{"text": "cut': "bad_json",
    b'{"text": "a"} {"text": "b"}': "bad_json",
    b'{"text": "a"},': "bad_json",
    b'{"text": "tab\there"}': "bad_json",
    b'{"body": "a"}': "no_field",
    b"[1, 2]": "no_field",
    b'"text"': "no_field",
    b"{}": "no_field",
    b'{"text": null}': "no_text",
    b'{"text": 5}': "no_text",
    b'{"text": ["a"]}': "no_text",
    b'{"text": {"text": "a"}}': "no_text",
    b'{"text": "\xff"}': "not_utf8",
    b'{"text": "caf\xe9"}': "not_utf8",
    b'{"text": "\\ud800"}': "not_utf8",
    b'{"text": "\\udc00\\ud800"}': "not_utf8",
}
ODD = {
    b'{"text": "a", "text": "b"}': "b",
    b'{"text": 1, "text": "b"}': "b",
    b'{"text": "a", "x": NaN}': "a",
    b'{"text": "a", "x": Infinity}': "a",
    b'{"text": "a", "x": {"text": 1}}': "a",
    b'{"text": "a", "x": 1, "x": "2"}': "a",
    b'{"text": "a", "x": "\\ud800"}': "a",
    b'{"text": ""}': "",
    b'{"text": "\\u0000\\n\\ud83d\\ude42"}': "\0\n🙂",
    b' {"text": "a"} \t\r': "a",
    '{"é": 1, "text": "é你🙂"}'.encode(): "é你🙂",
}


def line_of(reject: Reject, data: bytes) -> bytes:
    """The line of the file that a reject points to."""
    assert reject.line is not None
    return data[reject.origin :].split(b"\n")[reject.line - 1]


def read_lines(folder: Path, data: bytes, rules: TextRules = TEXT, shard_size: int = 1 << 30) -> Result:
    path = folder / "a.jsonl"
    path.write_bytes(data)
    return read(path, rules, shard_size)


# ---- all that is good ----

values = st.one_of(st.none(), st.integers(), st.floats(allow_nan=False), st.text(max_size=10), st.lists(st.integers()))


@given(
    documents=st.lists(st.tuples(st.text(max_size=40), values), max_size=25),
    shard_size=st.integers(1, 400),
    block=st.integers(10, 80),
    ascii=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_documents_of_any_shards_are_those_of_the_file(
    tmp_path: Path, documents: list[tuple[str, Any]], shard_size: int, block: int, ascii: bool, end: str
) -> None:
    """Each text once, in order, equal to what json.loads gives, whatever the sizes of shards and blocks."""
    lines = [json.dumps({"x": x, "text": text}, ensure_ascii=ascii) for text, x in documents]
    with small_blocks(block):
        result = read_lines(tmp_path, end.join(lines).encode(), shard_size=shard_size)
    assert result.texts == [text for text, _ in documents]
    assert result.rejects == []


def test_a_dotted_name_leads_into_nested_objects(tmp_path: Path) -> None:
    """At any depth; where the way is missing or ends early, the line is rejected."""
    lines = [
        b'{"a": {"b": {"text": "deep"}}}',
        b'{"a": {"b": null}}',
        b'{"a": {"b": {"text": "again", "x": 1}}, "text": "no"}',
        b'{"a": {"b": {"text": null}}}',
        b'{"a": "b"}',
    ]
    result = read_lines(tmp_path, b"\n".join(lines), TextRules(text_column="a.b.text"))
    assert result.texts == ["deep", "again"]
    assert [(reject.line, reject.reason) for reject in result.rejects] == [
        (2, "no_field"),
        (4, "no_text"),
        (5, "no_field"),
    ]


# ---- all that is bad ----


@given(
    lines=st.lists(st.sampled_from([GOOD, b"", b" ", *BAD, *ODD]), max_size=30),
    shard_size=st.integers(1, 300),
    block=st.integers(60, 200),
    final=st.booleans(),
)
def test_any_mix_of_lines_gives_what_a_line_by_line_reading_gives(
    tmp_path: Path, lines: list[bytes], shard_size: int, block: int, final: bool
) -> None:
    """Texts and rejects, each in order and with its place, for any shards and blocks."""
    data = b"\n".join(lines) + (b"\n" if final else b"")
    with small_blocks(block):
        result = read_lines(tmp_path, data, shard_size=shard_size)
    good = {GOOD: "good"} | ODD
    assert result.texts == [good[line] for line in lines if line in good]
    assert [reject.reason for reject in result.rejects] == [BAD[line] for line in lines if line in BAD]
    assert [line_of(reject, data) for reject in result.rejects] == [line for line in lines if line in BAD]


# ---- what is no UTF-8 ----


# ---- real broken files ----


@pytest.mark.parametrize("column", ["text", "meta.text"])
@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a", "meta": {"text": "a"}, "x": "\xff"}',
        b'{"text": "a", "meta": {"text": "a"}, "x": %s%s}' % (b"[" * 2000, b"]" * 2000),
        b'{"text": "a", "meta": {"text": "a"}} {"text": "b", "meta": {"text": "b"}}\n{"text": "c", "x":\n{"y": 1}}',
    ],
    ids=["not UTF-8", "deep", "three objects on three lines"],
)
def test_what_becomes_of_a_line_does_not_depend_on_its_neighbours(tmp_path: Path, line: bytes, column: str) -> None:
    sound = b'\n{"text": "good", "meta": {"text": "good"}}'
    alone, beside = (
        read_lines(tmp_path, line + more, TextRules(text_column=column)) for more in (sound, sound + b"\nbad")
    )
    assert alone.texts == beside.texts == ["good"]
    assert alone.rejects == beside.rejects[:-1] and alone.rejects
