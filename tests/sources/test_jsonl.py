"""JSON lines: every good document once and in order, every bad line counted with its reason and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, Result, line_of, read, small_blocks

from milldam.errors import InputError
from milldam.sources.batch import TextRules

BOM = b"\xef\xbb\xbf"
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


@pytest.mark.parametrize("line", ODD, ids=lambda line: line.decode())
def test_what_is_odd_but_valid_is_kept(tmp_path: Path, line: bytes) -> None:
    """As json.loads understands it, without touching the lines around it."""
    result = read_lines(tmp_path, b"\n".join([GOOD, line, GOOD]) + b"\n")
    assert result.texts == ["good", ODD[line], "good"]
    assert result.rejects == []


@pytest.mark.parametrize("before", [b"", BOM], ids=["", "bom"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n \n"], ids=["open end", "newline", "blank lines"])
def test_marks_line_ends_and_file_ends_change_nothing(tmp_path: Path, before: bytes, end: bytes, last: bytes) -> None:
    """A byte order mark, either line end, and any end of the file."""
    result = read_lines(tmp_path, before + end.join([GOOD] * 3) + last)
    assert (result.texts, result.rejects) == (["good"] * 3, [])


def test_a_number_of_any_length_costs_no_record(tmp_path: Path) -> None:
    """Python reads no whole number of more than 4,300 digits; JSON has them."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one", "n": %s}\n{"text": "two", "n": 1}\n{"text": "\\ud800"}\n' % ("7" * 5000))
    result = read(path, TextRules(text_column="text"))
    assert result.texts == ["one", "two"]


def test_blank_lines_are_no_records(tmp_path: Path) -> None:
    """They are neither documents nor rejects, and they count as lines."""
    result = read_lines(tmp_path, b"\n\n" + GOOD + b"\n  \n\r\n" + b"bad\n" + GOOD + b"\n")
    assert result.texts == ["good", "good"]
    assert [reject.line for reject in result.rejects] == [6]


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n  \n", BOM])
def test_an_empty_file_holds_nothing(tmp_path: Path, content: bytes) -> None:
    """And is no error."""
    result = read_lines(tmp_path, content)
    assert (result.texts, result.rejects) == ([], [])


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


def test_nested_documents_without_any_flaw_are_read(tmp_path: Path) -> None:
    """The fast way reads nested fields too."""
    data = b"".join(b'{"meta": {"n": %d, "text": "t%d"}, "text": 5}\n' % (n, n) for n in range(10))
    assert read_lines(tmp_path, data, TextRules(text_column="meta.text")).texts == [f"t{n}" for n in range(10)]


# ---- all that is bad ----


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line)[2:-1])
def test_a_bad_line_in_the_middle_is_rejected_alone(tmp_path: Path, line: bytes) -> None:
    """With its reason and place; the lines around it are kept."""
    data = b"\n".join([GOOD, GOOD, line, GOOD]) + b"\n"
    result = read_lines(tmp_path, data)
    assert result.texts == ["good"] * 3
    assert [(reject.line, reject.origin, reject.reason) for reject in result.rejects] == [(3, 0, BAD[line])]
    assert line_of(result.rejects[0], data) == line
    assert result.rejects[0].record == line.decode("utf-8", "backslashreplace")
    assert result.rejects[0].detail


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


@pytest.mark.parametrize("size", [1, 5_000])
@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "a"}{"text": "b"}\n\n',
        b'{"text": "a"}{"text": "b"}\n{"text":\n"c"}\n',
        b'\n{"text": "a"}{"text": "b"}',
    ],
)
def test_two_objects_on_a_line_are_rejected_whatever_is_around_them(tmp_path: Path, data: bytes, size: int) -> None:
    """A blank line, or an object over two lines, does not make up for it, be the lines short or long."""
    result = read_lines(tmp_path, data.replace(b'"a"', b'"%s"' % (b"a" * size)))
    assert result.texts == []
    assert set(result.reasons) == {"bad_json"}


def test_invalid_bytes_in_another_field_have_the_same_result_beside_any_line(tmp_path: Path) -> None:
    """What becomes of a line must not depend on its block."""
    line = b'{"text": "a", "x": "\xff"}\n'
    beside_good, beside_bad = (read_lines(tmp_path, line + neighbour) for neighbour in (GOOD, b"bad"))
    assert ("a" in beside_good.texts) == ("a" in beside_bad.texts)
    assert beside_good.reasons["not_utf8"] == beside_bad.reasons["not_utf8"]


def test_the_detail_of_a_missing_field_names_those_there_are(tmp_path: Path) -> None:
    """So that the right --text-column can be read off the rejects."""
    (reject,) = read_lines(tmp_path, b'{"body": "a", "title": "b"}\n').rejects
    assert reject.detail == 'no field "text"; found "body", "title"'


def test_a_deeply_nested_line_is_rejected_not_a_crash(tmp_path: Path) -> None:
    """Recursion ends in a reject."""
    result = read_lines(tmp_path, b'{"x": ' + b"[" * 100_000 + b"\n" + GOOD + b"\n")
    assert result.texts == ["good"]
    assert result.reasons == {"bad_json": 1}


# ---- what is no UTF-8 ----


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b'{"text": "a\xffb"}', "a\ufffdb"),
        (b'{"text": "caf\xe9 au lait"}', "caf\ufffd au lait"),
        (b'{"text": "a\\ud800b"}', "a\ufffdb"),
        (b'{"text": "\\ud83d\\ude42 \\udc00"}', "🙂 \ufffd"),
    ],
)
def test_invalid_text_can_be_replaced(tmp_path: Path, line: bytes, text: str) -> None:
    """Bytes that are no UTF-8 and halves of surrogate pairs alike."""
    result = read_lines(tmp_path, GOOD + b"\n" + line + b"\n", TextRules(text_column="text", invalid_utf8="replace"))
    assert (result.texts, result.rejects) == (["good", text], [])


@pytest.mark.parametrize("line", [b'{"text": "\xff"}', b'{"text": "\\ud800"}'])
def test_strict_utf8_stops_with_the_place(tmp_path: Path, line: bytes) -> None:
    """With file and line in the first words."""
    with pytest.raises(InputError, match=r"a\.jsonl:2: not_utf8: "):
        read_lines(tmp_path, GOOD + b"\n" + line + b"\n", TextRules(text_column="text", invalid_utf8="strict"))


def test_strict_utf8_still_sets_other_flaws_aside(tmp_path: Path) -> None:
    """It is about bytes alone."""
    result = read_lines(tmp_path, b"bad\n" + GOOD, TextRules(text_column="text", invalid_utf8="strict"))
    assert (result.texts, result.reasons) == (["good"], {"bad_json": 1})


def test_strict_names_the_line_in_the_file_from_any_unit(tmp_path: Path) -> None:
    """Or says from where it is counted."""
    data = (GOOD + b"\n") * 30 + b"bad\n"
    with pytest.raises(InputError) as caught:
        read_lines(tmp_path, data, TextRules(text_column="text", strict=True), shard_size=100)
    assert "a.jsonl:31:" in str(caught.value) or "counted from byte" in str(caught.value)


@pytest.mark.parametrize("line", [b"bad", b"{}", b'{"text": null}', b'{"text": "\xff"}'])
def test_strict_stops_at_any_flaw(tmp_path: Path, line: bytes) -> None:
    """And says how to go on without it."""
    with pytest.raises(InputError, match=r"a\.jsonl:2: .*\n.*strict=True"):
        read_lines(tmp_path, GOOD + b"\n" + line, TextRules(text_column="text", strict=True))


def test_batches_are_bounded(tmp_path: Path) -> None:
    """Many documents never become one batch."""
    data = b'{"text": "%s"}\n' % (b"word " * 200) * 8000
    sizes = [batch.texts.nbytes for batch in read_lines(tmp_path, data).batches]
    assert sum(sizes) >= 8_000_000
    assert max(sizes) < 3 << 20


def test_bytes_read_add_up_to_the_file(tmp_path: Path) -> None:
    """Progress ends near a hundred percent, with rejects and giants on the way."""
    data = b"".join(b'{"text": "%d"}\n' % n for n in range(50)) + b'{"text": "' + b"x" * 900 + b'"}\nbad\n\n'
    with small_blocks(100):
        result = read_lines(tmp_path, data)
    assert sum(batch.bytes_read for batch in result.batches) == pytest.approx(len(data), rel=0.02)


# ---- real broken files ----


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("bad_line_in_middle.jsonl", {"bad_json": 1}),
        ("blank_lines.jsonl", {}),
        ("bom.jsonl", {}),
        ("crlf.jsonl", {}),
        ("dup_keys.jsonl", {}),
        ("nan.jsonl", {}),
        ("no_final_newline.jsonl", {}),
        ("truncated_last_line.jsonl", {"bad_json": 1}),
        ("zero_bytes.jsonl", {}),
        ("zalgo_emoji.jsonl", {}),
    ],
)
@pytest.mark.parametrize("shard_size", [1 << 30, 10_000])
def test_real_messy_files_lose_nothing_but_what_is_broken(
    shared_data: Path, name: str, reasons: dict[str, int], shard_size: int
) -> None:
    """Against json.loads, line by line."""
    path = shared_data / "messy" / name
    result = read(path, TEXT, shard_size)
    assert result.texts == list(loadable(path.read_bytes()))
    assert result.reasons == reasons


def loadable(data: bytes) -> list[str]:
    found = []
    for line in data.removeprefix(BOM).split(b"\n"):
        try:
            found.append(json.loads(line)["text"])
        except ValueError:
            continue
    return found


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
