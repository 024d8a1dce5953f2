"""A record larger than `max_document_bytes` is set aside by name, with its place and size; a text file may be of any
size."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import FORMATS, place_of, read, small_blocks, write_texts

from milldam.sources.batch import Reject, TextRules
from milldam.sources.reading import read_unit
from milldam.sources.units import Slice, Unit

MOST = 1000
RULES = TextRules("line", text_column="text", max_document_bytes=MOST)
LARGE = "é word " * 200
TEXTS = ["one", LARGE, "two", "x" * 900, LARGE + LARGE[:100], "last"]


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [50, 1 << 20])
def test_a_record_that_is_too_large_costs_itself_alone(tmp_path: Path, format: str, ending: str, block: int) -> None:
    """Those around it are kept, and its place, its size and its head are told."""
    if ending and format in ("parquet", "arrow"):
        return  # refused: they are read from their end
    with small_blocks(block):
        result = read(write_texts(tmp_path / f"a.{format}{ending}", TEXTS, rows=4), RULES)
    assert result.texts == [text for text in TEXTS if len(text) < MOST]
    assert result.reasons == {"too_large": 2}
    first, second = result.rejects
    assert (place_of(first), place_of(second)) == ((3, 6) if format in ("csv", "tsv") else (2, 5))
    assert "the limit is 1,000 (max_document_bytes)" in first.detail
    assert int(second.detail.split()[0].replace(",", "")) >= len(LARGE + LARGE[:100])


def test_a_field_with_line_ends_is_passed_over_to_its_end(tmp_path: Path) -> None:
    """What is in its quotes begins no record; a quote that is never closed costs some lines, not the file."""
    path = tmp_path / "a.csv"
    path.write_text('id,text\n1,"' + '2,no record\n""quoted""\n' * 100 + '"\n3,after\n')
    result = read(path, RULES)
    assert (result.texts, result.reasons) == (["after"], {"too_large": 1})
    path.write_text('id,text\n1,"open\n' + "2,b\n" * 10_000)
    result = read(path, RULES)
    assert set(result.texts) == {"b"} and len(result.texts) > 7000
    assert [(reject.line, reject.reason) for reject in result.rejects] == [(2, "too_large")]


def test_a_file_cut_off_in_a_large_record_keeps_what_is_before(tmp_path: Path) -> None:
    """And says which record was cut off."""
    noise = "".join(chr(97 + (k * k * 7919) % 23) for k in range(100_000))
    for name, data in {
        "a.csv.gz": f'id,text\n0,before\n1,"{noise}"\n',
        "a.jsonl.gz": '{"text": "before"}\n{"text": "' + noise,
    }.items():
        path = tmp_path / name
        packed = gzip.compress(data.encode())
        path.write_bytes(packed[: len(packed) - 20])
        with small_blocks(4000):
            result = read(path, RULES)
        assert result.texts == ["before"]
        assert [(reject.reason, reject.line) for reject in result.rejects] == [("truncated", 3 if "csv" in name else 2)]


# ---- a text file that is one document ----


def pieces_of(path: Path, rejects: list[Reject], **rules: Any) -> list[str]:
    given = TextRules(max_document_bytes=MOST, **rules)
    unit = Unit(0, (Slice(str(path), "txt", "gz" if path.suffix == ".gz" else None),))
    batches = read_unit(unit, given, rejects.append)
    return [text for batch in batches for text in ([one for one, _ in batch.pieces or ()] or batch.texts.to_pylist())]


@given(pieces=st.lists(st.sampled_from(["word ", "é", "🙂\n", "x" * 30]), max_size=200), block=st.integers(5, 300))
def test_a_text_file_of_any_size_is_one_document(tmp_path: Path, pieces: list[str], block: int) -> None:
    """Above the limit in pieces."""
    text = "".join(pieces)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rejects: list[Reject] = []
    with small_blocks(block):
        found = pieces_of(path, rejects)
    assert "".join(found) == text
    assert len(found) > 1 or len(text.encode()) + 3 <= MOST
    assert not rejects


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"word " * 2000 + b"\xff", "not_utf8"),
        (b"word " * 2000 + "é".encode()[:1], "not_utf8"),
        (b"word " * 2000 + b"x" * 4_200_000, "no_white_space"),
        (b"x" * 4_200_000 + b" word" * 2000, "no_white_space"),
    ],
)
def test_a_large_text_file_with_a_flaw_anywhere_gives_nothing(tmp_path: Path, data: bytes, reason: str) -> None:
    """It was read through before anything was handed on, so that nothing has to be taken back."""
    (tmp_path / "a.txt").write_bytes(data)
    rejects: list[Reject] = []
    assert pieces_of(tmp_path / "a.txt", rejects) == []
    assert [reject.reason for reject in rejects] == [reason]
