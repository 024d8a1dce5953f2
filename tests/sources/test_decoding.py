"""With `invalid_utf8: drop`, what is no UTF-8 goes and the rest stays: in every format, at any size, however cut."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import Result, read, small_blocks

from milldam.sources import arrays, plain_text
from milldam.sources.batch import TextRules

FILE = TextRules("file", invalid_utf8="drop")
FIELD = TextRules(text_column="text", invalid_utf8="drop")

PIECES = st.sampled_from([b"a", b" ", b"\0", "é".encode(), "🙂".encode(), b"\xff", b"\xe2\x82", b"\xf0", b"\x80"])


@contextmanager
def small_head(characters: int) -> Iterator[None]:
    """So few characters decide whether a text can be mended."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrays, plain_text):
            patch.setattr(module, "HEAD_BYTES", characters)
        yield


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def outcome(result: Result) -> tuple[list[str], list[str]]:
    return result.texts, [reject.reason for reject in result.rejects]


# ---- every format ----


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (rb'{"text": "a\ud800b"}', "ab"),
        (rb'{"text": "\ud83d\ude42 \udc00!"}', "🙂 !"),
        (b'{"id": "\xff\xff\xff", "text": "clean"}', "clean"),
    ],
)
def test_halves_of_surrogate_pairs_are_dropped(tmp_path: Path, line: bytes, text: str) -> None:
    """Flaws in other fields do not count."""
    assert outcome(read(written(tmp_path / "a.jsonl", b'{"text": "x"}\n' + line + b"\n"), FIELD)) == (["x", text], [])


# ---- what can't be mended ----

RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему. "


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        ("some text".encode("utf-16"), "UTF-16"),
        (b"\xfe\xff" + "some text".encode("utf-16-be"), "UTF-16"),
        ("zeros in between".encode("utf-16-le") + b"\xff", "many zero bytes"),
        (RUSSIAN.encode("koi8-r"), "not UTF-8"),
        (("x" * 100 + RUSSIAN).encode("koi8-r"), "not UTF-8"),
        ("日本語のテキスト".encode("shift-jis"), "not UTF-8"),
        (random.Random(0).randbytes(5000), "not UTF-8"),
        (b"\xff", "not UTF-8"),
    ],
    ids=["UTF-16", "UTF-16 BE", "no mark", "KOI8-R", "half KOI8-R", "Shift-JIS", "random", "one byte"],
)
@pytest.mark.parametrize("size", [1, 3000])
def test_another_encoding_is_rejected_not_taken_apart(tmp_path: Path, data: bytes, detail: str, size: int) -> None:
    """What dropping would leave of it is garbage; at any size."""
    result = read(written(tmp_path / "a.txt", data * size), FILE)
    assert outcome(result) == ([], ["not_utf8"])
    assert detail in result.rejects[0].detail


# ---- the same however it is cut ----


@given(pieces=st.lists(PIECES, max_size=80), block=st.integers(1, 40), head=st.integers(1, 12))
def test_a_large_file_is_mended_as_a_small_one(tmp_path: Path, pieces: list[bytes], block: int, head: int) -> None:
    """Compressed or not, in blocks of any size, whole or in pieces."""
    data = b"".join(pieces)
    paths = [written(tmp_path / "a.txt", data), written(tmp_path / "b.txt.gz", gzip.compress(data))]
    for path in paths:
        with small_head(head):
            whole = outcome(read(path, FILE))
            with small_blocks(block):
                assert outcome(read(path, replace(FILE, max_document_bytes=2 * block))) == whole


# ---- found on the way ----
