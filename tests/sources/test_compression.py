"""Compressed files flow in bounded blocks. Of a damaged one the whole records before the damage are kept."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import TOKENIZER, invoke, set_aside, zstd
from tests.kit.quick import first_quick
from tests.kit.source_reading import TEXT, read, small_blocks

import milldam
from milldam.sources.batch import TextRules
from milldam.sources.compression import DamagedError, read_blocks

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: bytes(zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
CHECKSUM = {"gz": -6, "zst": -2, "bz2": -3, "xz": -30}
"""A byte of the last checksum: of the content, but of xz, whose index is hit."""
every_compression = pytest.mark.parametrize("kind", first_quick(COMPRESS, 2))


def texts_of(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{number} " + "".join(rng.choices("abcdefghij ", k=250)) for number in range(count)]


def as_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def as_csv(texts: list[str]) -> bytes:
    return b"id,text\n" + b"".join(b'%d,"%s\n"\n' % (number, text.encode()) for number, text in enumerate(texts))


FORMATS: dict[str, tuple[Callable[[list[str]], bytes], TextRules, str]] = {
    "jsonl": (as_lines, TEXT, ""),
    "json": (lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(), TEXT, ""),
    "csv": (as_csv, TEXT, "\n"),
    "txt": (lambda texts: "".join(f"{text}\n" for text in texts).encode(), TextRules("line"), ""),
}
every_format = pytest.mark.parametrize("format", FORMATS)


@every_compression
@given(members=st.lists(st.binary(max_size=300), min_size=1, max_size=5), block_bytes=st.integers(1, 400))
def test_all_members_are_read_through_in_bounded_blocks(kind: str, members: list[bytes], block_bytes: int) -> None:
    """Several members, frames or streams, empty ones too, are the bytes of all."""
    data = b"".join(COMPRESS[kind](member) for member in members)
    with small_blocks(block_bytes):
        blocks = list(read_blocks(io.BytesIO(data), kind))
    assert b"".join(blocks) == b"".join(members)
    assert all(0 < len(block) <= block_bytes for block in blocks)


@every_compression
@given(kept=st.integers(12, 3000))
def test_a_cut_file_gives_a_start_of_its_bytes_then_says_so(kind: str, kept: int) -> None:
    """Never anything that was not there, and never silence."""
    data = random.Random(1).randbytes(3000)
    packed = COMPRESS[kind](data)[: min(kept, len(COMPRESS[kind](data)) - 1)]
    found = b""
    with pytest.raises(DamagedError, match="ends in the middle of its compressed data"):
        for block in read_blocks(io.BytesIO(packed), kind):
            found += block
    assert data.startswith(found)


@every_compression
@every_format
def test_a_compressed_file_gives_the_documents_of_the_plain_one(tmp_path: Path, kind: str, format: str) -> None:
    """As one unit, however small the shards."""
    write_as, rules, end = FORMATS[format]
    path = tmp_path / f"a.{format}.{kind}"
    path.write_bytes(COMPRESS[kind](write_as(texts_of(50))))
    result = read(path, rules, shard_size=100)
    assert (result.units, result.texts, result.rejects) == (1, [text + end for text in texts_of(50)], [])


@every_compression
@every_format
@pytest.mark.parametrize("flaw", ["cut", "wrong checksum", "not compressed"])
def test_a_damaged_file_keeps_whole_records_and_is_one_reject(
    tmp_path: Path, kind: str, format: str, flaw: str
) -> None:
    """Those before the damage, as they are."""
    write_as, rules, end = FORMATS[format]
    texts = texts_of(20_000)
    packed = bytearray(COMPRESS[kind](write_as(texts)))
    packed[CHECKSUM[kind]] ^= 0x55
    data = {"cut": packed[: len(packed) // 2], "wrong checksum": packed, "not compressed": write_as(texts)}[flaw]
    path = tmp_path / f"a.{format}.{kind}"
    path.write_bytes(data)
    result = read(path, rules)
    kept = len(result.texts)
    assert result.texts == [text + end for text in texts[:kept]]
    assert (kept > 500) == (flaw != "not compressed") or kind == "bz2"
    assert [(one.reason, one.damaged) for one in result.rejects] == [
        ("truncated" if flaw == "cut" else "damaged", True)
    ]


@every_compression
@pytest.mark.parametrize("size", [1, 12_000], ids=["small", "in parts"])
def test_a_file_that_is_one_document_is_rejected_whole(tmp_path: Path, kind: str, size: int) -> None:
    """Whatever is damaged: nobody knows where the document would have ended."""
    (tmp_path / f"a.txt.{kind}").write_bytes(COMPRESS[kind]("\n".join(texts_of(size)).encode())[:-9])
    (tmp_path / "good.txt").write_bytes(b"good")
    result = read(tmp_path, TextRules("file"))
    assert result.texts == ["good"]
    assert [one.damaged for one in result.rejects] == [True]


def test_a_store_of_damaged_input_says_so_everywhere(tmp_path: Path) -> None:
    """In a warning, the summary, the manifest and the rejects."""
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    packed = bytearray(gzip.compress(as_lines(texts_of(500))))
    packed[CHECKSUM["gz"]] ^= 0x55
    (folder / "a.jsonl.gz").write_bytes(packed)
    (folder / "b.jsonl").write_bytes(as_lines(texts_of(10, 1)))
    result = invoke("tokenize", str(folder), "-o", str(out), "--tokenizer", str(TOKENIZER), "--json")
    summary = json.loads(result.stdout)
    told = (summary["counts"]["documents"], summary["dropped"], summary["facts"]["damaged_files"])
    assert told == (510, {}, 1)
    assert "Warning: 1 input file is damaged:" in result.stderr
    assert "a.jsonl.gz: damaged: damaged gz data (CRC check failed" in result.stderr
    assert milldam.open(out).manifest.damaged_files == 1
    (reject,) = set_aside(out)
    assert (reject["reason"], reject["damaged"]) == ("damaged", True)
