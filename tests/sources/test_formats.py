"""What holds of every format: each document once and in order, flaws set aside with their place, batches bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from tests.kit.source_reading import FORMATS, place_of, read, small_blocks, write_texts

from milldam.errors import InputError
from milldam.sources import arrays, csv_records, tables
from milldam.sources.batch import TextRules

RULES = TextRules("line", text_column="text", only_file=True)
TEXTS = [f"document {number} é🙂 " + "word " * (number % 7) for number in range(60)]
LINE_BEFORE = {"csv": 1, "tsv": 1}
"""The header."""
every_format = pytest.mark.parametrize("format", FORMATS)
BOM = b"\xef\xbb\xbf"


@every_format
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_documents_come_once_in_order_from_any_units(tmp_path: Path, format: str, ending: str) -> None:
    """From a file that can be cut many units, from any other one."""
    if ending and format in ("parquet", "arrow"):
        return  # refused: they are read from their end
    texts = [text.strip() for text in TEXTS]
    path = write_texts(tmp_path / f"a.{format}{ending}", texts, rows=10)
    with small_blocks(100):
        result = read(path, RULES, shard_size=300)
    assert (result.texts, result.rejects) == (texts, [])
    assert (result.units > 3) == (not ending and format not in ("json", "csv", "tsv"))


@pytest.mark.parametrize("format", ["txt", "jsonl", "parquet", "arrow"])
def test_an_address_is_read_in_units_too(tmp_path: Path, format: str) -> None:
    """By seeking in the remote file."""
    path = write_texts(tmp_path / f"a.{format}", TEXTS, rows=10)
    fsspec.filesystem("memory").pipe(f"/formats/a.{format}", path.read_bytes())
    result = read(f"memory://formats/a.{format}", RULES, shard_size=300)
    assert result.texts == TEXTS
    assert (result.units > 3) == (format != "arrow")  # which would have to be read through for it


@pytest.mark.parametrize("format", ["txt", "jsonl", "json", "csv", "tsv"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("last", [b"", b"\n", b"\n\n"], ids=["open end", "newline", "blank lines"])
def test_marks_and_line_ends_change_nothing(tmp_path: Path, format: str, end: bytes, last: bytes) -> None:
    """A byte order mark, either line end, and any end of the file."""
    path = write_texts(tmp_path / f"a.{format}", ["one", "two", "three"])
    plain = path.read_bytes().replace(b"\r\n", b"\n").rstrip(b"\n")
    path.write_bytes(BOM + plain.replace(b"\n", end) + last)
    assert (read(path, RULES).texts, read(path, RULES).rejects) == (["one", "two", "three"], [])


@every_format
@pytest.mark.parametrize("shard_size", [200, 1 << 30])
def test_what_is_no_utf8_is_rejected_with_its_place(tmp_path: Path, format: str, shard_size: int) -> None:
    """Or replaced, or dropped; and strict stops there."""
    texts = [text.strip().encode() for text in TEXTS]
    texts[17] = b"caf\xe9 au lait and more"
    path, before = write_texts(tmp_path / f"a.{format}", texts, rows=7), LINE_BEFORE.get(format, 0)
    with small_blocks(150):
        result = read(path, RULES, shard_size)
        assert result.texts == [text.decode() for text in texts if b"\xe9 au" not in text]
        (reject,) = result.rejects
        assert reject.reason == "not_utf8" and "caf\\xe9" in reject.record
        if not reject.origin:
            assert place_of(reject) == 18 + before
        for rule, mended in (("replace", "caf\ufffd au lait and more"), ("drop", "caf au lait and more")):
            result = read(path, replace(RULES, invalid_utf8=rule), shard_size)
            assert (result.texts[17], len(result.texts), result.rejects) == (mended, 60, [])
    with pytest.raises(InputError, match=rf"a\.{format}:{18 + before}: not_utf8: .*\n.*to set such records aside"):
        read(path, replace(RULES, strict=True))


@pytest.mark.parametrize("format", ["jsonl", "json", "parquet", "arrow"])
def test_null_is_no_text(tmp_path: Path, format: str) -> None:
    """It is rejected with its place."""
    path = write_texts(tmp_path / f"a.{format}", [None, "one", None, "two"], rows=2)
    result = read(path, RULES)
    assert (result.texts, result.reasons) == (["one", "two"], {"no_text": 2})
    assert [place_of(reject) for reject in result.rejects] == [1, 3]
    with pytest.raises(InputError, match=rf"a\.{format}:1: no_text"):
        read(path, replace(RULES, strict=True))


@every_format
def test_batches_are_bounded(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many documents never become one batch; a larger one stands alone; what was read adds up to the file."""
    for module in (arrays, tables, csv_records):
        monkeypatch.setattr(module, "BATCH_BYTES", 20_000)
    texts = [*["word " * 20] * 2000, "x" * 50_000, *["word " * 20] * 10]
    path = write_texts(tmp_path / f"a.{format}", texts, rows=1500)
    with small_blocks(10_000):
        result = read(path, RULES)
    assert [text.strip() for text in result.texts] == [text.strip() for text in texts]
    assert all(batch.texts.nbytes < 30_000 or len(batch.texts) == 1 for batch in result.batches)
    assert 6 < len(result.batches) < 100
    assert sum(batch.bytes_read for batch in result.batches) >= 0.8 * sum(map(len, texts))
