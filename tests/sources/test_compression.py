"""Compressed files flow in bounded blocks. Of a damaged one every whole record before the damage is kept, what was lost
is counted as it is, and nothing of it is silent."""

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
from tests.kit.source_reading import TEXT, read

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
WRONG_CHECKSUM = {"gz": "bad_checksum", "zst": "bad_checksum", "bz2": "damaged", "xz": "damaged"}
every_compression = pytest.mark.parametrize("kind", first_quick(COMPRESS, 2))


def texts_of(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [f"{number} " + "".join(rng.choices("abcdefghij ", k=250)) for number in range(count)]


def as_lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def as_csv(texts: list[str]) -> bytes:
    return b"id,text\n" + b"".join(b'%d,"%s\n"\n' % (number, text.encode()) for number, text in enumerate(texts))


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 0x55
    return bytes(changed)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


FORMATS: dict[str, tuple[Callable[[list[str]], bytes], TextRules, str]] = {
    "jsonl": (as_lines, TEXT, ""),
    "json": (lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(), TEXT, ""),
    "csv": (as_csv, TEXT, "\n"),
    "txt": (lambda texts: "".join(f"{text}\n" for text in texts).encode(), TextRules("line"), ""),
}
every_format = pytest.mark.parametrize("format", FORMATS)


# ---- bytes ----


@every_compression
@given(members=st.lists(st.binary(max_size=300), min_size=1, max_size=5), block_bytes=st.integers(1, 400))
def test_all_members_are_read_through_in_bounded_blocks(kind: str, members: list[bytes], block_bytes: int) -> None:
    """Several members, frames or streams, empty ones too, are the bytes of all; no block is larger than asked for."""
    data = b"".join(COMPRESS[kind](member) for member in members)
    blocks = list(read_blocks(io.BytesIO(data), kind, block_bytes))
    assert b"".join(blocks) == b"".join(members)
    assert all(0 < len(block) <= block_bytes for block in blocks)


@every_compression
def test_a_file_that_compresses_a_thousandfold_stays_in_bounded_blocks(kind: str) -> None:
    """A few kilobytes that hold 20 MB are handed on little by little."""
    packed = COMPRESS[kind](b"x" * 20_000_000)
    assert len(packed) < 100_000
    sizes = [len(block) for block in read_blocks(io.BytesIO(packed), kind, 65_536)]
    assert (max(sizes), sum(sizes)) == (65_536, 20_000_000)


@every_compression
@given(kept=st.integers(1, 3000))
def test_a_cut_file_gives_a_start_of_its_bytes_then_says_so(kind: str, kept: int) -> None:
    """Never anything that was not there, and never silence."""
    data = random.Random(1).randbytes(3000)
    packed = COMPRESS[kind](data)[: min(kept, len(COMPRESS[kind](data)) - 1)]
    found, error = decompressed(packed, kind, 100)
    assert data.startswith(found) and "it ends in the middle of its compressed data" in str(error)


@every_compression
@every_format
def test_a_compressed_file_gives_the_documents_of_the_plain_one(tmp_path: Path, kind: str, format: str) -> None:
    """As one unit, however small the shards."""
    write_as, rules, end = FORMATS[format]
    result = read(write(tmp_path / f"a.{format}.{kind}", COMPRESS[kind](write_as(texts_of(50)))), rules, shard_size=100)
    assert (result.units, result.texts, result.rejects) == (1, [text + end for text in texts_of(50)], [])


# ---- damage ----


@every_compression
def test_damage_in_the_middle_gives_all_that_can_be_had(kind: str) -> None:
    """As much as the library gives when it is asked for every byte, one at a time."""
    packed = flipped(COMPRESS[kind](as_lines(texts_of(1000))), 60_000)
    found, error = decompressed(packed, kind)
    assert error is not None
    assert found == decompressed(packed, kind, block_bytes=1)[0]


@every_compression
@pytest.mark.parametrize("garbage", [b"x", b"garbage", b"\x1e\x8b\x08" + b"\xff" * 200_000])
def test_what_follows_the_last_member_is_told_and_not_read(kind: str, garbage: bytes) -> None:
    """All before it is proved."""
    data = as_lines(texts_of(50))
    found, error = decompressed(COMPRESS[kind](data) + garbage, kind)
    assert found == data
    assert error is not None and error.reason == "trailing_data"
    assert f"byte {len(COMPRESS[kind](data)):,} is not" in str(error)


def decompressed(data: bytes, kind: str, block_bytes: int = 1 << 20) -> tuple[bytes, DamagedError | None]:
    found = b""
    try:
        for block in read_blocks(io.BytesIO(data), kind, block_bytes):
            found += block
    except DamagedError as error:
        return found, error
    return found, None


# ---- records ----


@every_compression
@every_format
@pytest.mark.parametrize("count", first_quick([5, 400]))
def test_a_wrong_checksum_keeps_every_record(tmp_path: Path, kind: str, format: str, count: int) -> None:
    """And is told without a record that is lost."""
    write_as, rules, end = FORMATS[format]
    data = write_as(texts_of(count))
    result = read(write(tmp_path / f"a.{format}.{kind}", flipped(COMPRESS[kind](data), CHECKSUM[kind])), rules)
    assert result.texts == [text + end for text in texts_of(count)]
    assert [(one.reason, one.records) for one in result.rejects] == [(WRONG_CHECKSUM[kind], 0)]


@every_compression
@every_format
def test_a_cut_file_keeps_all_whole_records_and_rejects_the_one_that_was_cut(
    tmp_path: Path, kind: str, format: str
) -> None:
    """With what there is of it, and where: what is kept and what is rejected add up to what decompressed."""
    write_as, rules, end = FORMATS[format]
    texts = texts_of(6000)
    packed = COMPRESS[kind](write_as(texts))
    cut = packed[: len(packed) * 2 // 3]
    there, _ = decompressed(cut, kind)
    result = read(write(tmp_path / f"a.{format}.{kind}", cut), rules)
    kept = result.texts
    (reject,) = result.rejects
    assert kept == [text + end for text in texts[: len(kept)]]
    assert reject.reason == "truncated"
    assert reject.records == (1 if reject.record else 0)
    if format != "json":
        assert (write_as(texts[: len(kept)]) + reject.record.encode()) == there
    else:
        assert reject.row == (len(kept) if reject.records else None)


@every_compression
@pytest.mark.parametrize("size", [1, 12_000], ids=["small", "in parts"])
def test_a_file_that_is_one_document_is_rejected_whole(tmp_path: Path, kind: str, size: int) -> None:
    """Whatever is damaged: nobody knows where the document would have ended."""
    data = "\n".join(texts_of(size)).encode()
    for number, packed in enumerate((COMPRESS[kind](data)[:-9], flipped(COMPRESS[kind](data), CHECKSUM[kind]))):
        write(tmp_path / f"{number}.txt.{kind}", packed)
    write(tmp_path / "good.txt", b"good")
    result = read(tmp_path, TextRules("file"))
    assert result.texts == ["good"]
    assert [one.records for one in result.rejects] == [1, 1]


# ---- jobs ----


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """500 documents whose checksum is wrong, beside 10 good ones."""
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl.gz", flipped(gzip.compress(as_lines(texts_of(500))), CHECKSUM["gz"]))
    write(folder / "b.jsonl", as_lines(texts_of(10, 1)))
    return folder


def test_a_store_of_damaged_input_says_so_everywhere(tmp_path: Path, damaged: Path) -> None:
    """In a warning, the summary, the manifest and the rejects; no document is counted as lost."""
    out = tmp_path / "out"
    result = invoke("tokenize", str(damaged), "-o", str(out), "--tokenizer", str(TOKENIZER), "--json")
    summary = json.loads(result.stdout)
    told = (summary["counts"]["documents"], summary["dropped"], summary["facts"]["damaged_files"])
    assert told == (510, {}, 1)
    assert "Warning: 1 input file is damaged:" in result.stderr
    assert "a.jsonl.gz: bad_checksum: the checksum of its gzip data is wrong" in result.stderr
    assert milldam.open(out).manifest.damaged_files == 1
    (reject,) = set_aside(out)
    assert (reject["reason"], reject["records"]) == ("bad_checksum", 0)
