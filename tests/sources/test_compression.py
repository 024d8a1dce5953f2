"""Compressed files flow in bounded blocks; what is cut off gives all that is whole, then a reject."""

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
from tests.kit.source_reading import TEXT, read

from milldam.sources.batch import TextRules
from milldam.sources.compression import DamagedError, read_blocks

try:
    from compression import zstd
except ImportError:
    from backports import zstd


def with_checksum(data: bytes) -> bytes:
    """As the zstd command writes it; without a checksum, damage need not show."""
    return bytes(zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": with_checksum,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}
every_compression = pytest.mark.parametrize("kind", COMPRESS)


def decompressed(data: bytes, kind: str | None, block_bytes: int = 1000) -> list[bytes]:
    return list(read_blocks(io.BytesIO(data), kind, block_bytes))


def documents(count: int, seed: int = 0) -> list[str]:
    """Texts that compress badly, so that a cut file loses about what was cut."""
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz     \n", k=300)) for _ in range(count)]


def as_jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


# ---- bytes ----


@every_compression
@given(members=st.lists(st.binary(max_size=300), min_size=1, max_size=5), block_bytes=st.integers(1, 400))
def test_all_members_are_read_through_in_bounded_blocks(kind: str, members: list[bytes], block_bytes: int) -> None:
    """Several members, frames or streams, empty ones too, are the bytes of all; no block is larger than asked for."""
    data = b"".join(COMPRESS[kind](member) for member in members)
    blocks = decompressed(data, kind, block_bytes)
    assert b"".join(blocks) == b"".join(members)
    assert all(0 < len(block) <= block_bytes for block in blocks)


@every_compression
def test_members_across_the_reading_size_are_read(kind: str) -> None:
    """Larger than what is read at a time, with member borders anywhere."""
    members = [random.Random(n).randbytes(50_000 + 7777 * n) for n in range(5)]
    assert b"".join(decompressed(b"".join(map(COMPRESS[kind], members)), kind)) == b"".join(members)


@every_compression
def test_a_file_that_compresses_a_thousandfold_stays_in_bounded_blocks(kind: str) -> None:
    """A few kilobytes that hold 20 MB are handed on little by little."""
    packed = COMPRESS[kind](b"x" * 20_000_000)
    assert len(packed) < 100_000
    sizes = [len(block) for block in read_blocks(io.BytesIO(packed), kind, 65_536)]
    assert (max(sizes), sum(sizes)) == (65_536, 20_000_000)


@every_compression
def test_zero_bytes_between_and_after_members_are_padding(kind: str) -> None:
    """As tape archives and block devices leave them."""
    data = COMPRESS[kind](b"one") + b"\0" * 100 + COMPRESS[kind](b"two") + b"\0" * 7
    assert b"".join(decompressed(data, kind)) == b"onetwo"


@every_compression
def test_much_padding_does_not_hide_the_member_behind_it(kind: str) -> None:
    """More zero bytes than are read at a time are padding too."""
    data = COMPRESS[kind](b"one") + b"\0" * 200_000 + COMPRESS[kind](b"two")
    assert b"".join(decompressed(data, kind)) == b"onetwo"


def test_a_skippable_zst_frame_is_skipped() -> None:
    """Seekable archives carry their index in one."""
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"index"
    data = zstd.compress(b"one") + skippable + zstd.compress(b"two") + skippable
    assert b"".join(decompressed(data, "zst")) == b"onetwo"


@pytest.mark.parametrize("kind", [None, *COMPRESS])
def test_an_empty_file_gives_nothing(kind: str | None) -> None:
    """Zero bytes are no damage."""
    assert decompressed(b"", kind) == []


@every_compression
@given(kept=st.integers(1, 3000))
def test_a_cut_file_gives_a_start_of_its_bytes_then_says_so(kind: str, kept: int) -> None:
    """Never anything that was not there, and never silence."""
    data = random.Random(1).randbytes(3000)
    packed = COMPRESS[kind](data)[: min(kept, len(COMPRESS[kind](data)) - 1)]
    found = b""
    with pytest.raises(DamagedError, match="it ends in the middle of its compressed data"):
        for block in read_blocks(io.BytesIO(packed), kind, 100):
            found += block
    assert data.startswith(found)


@every_compression
def test_damage_is_told_from_a_cut(kind: str) -> None:
    """With the words of the library that found it."""
    packed = bytearray(COMPRESS[kind](as_jsonl(documents(100))))
    packed[1000:2000] = b"\xaa" * 1000
    with pytest.raises(DamagedError, match=r"damaged \w+ data|checksum"):
        decompressed(bytes(packed), kind)


@every_compression
def test_what_is_not_compressed_at_all_is_damage(kind: str) -> None:
    """A wrong ending is found at the first bytes."""
    with pytest.raises(DamagedError, match=r"not \w+ data, whatever its name says"):
        decompressed(b"this is plain text, whatever its name says" * 100, kind)


# ---- documents ----


@every_compression
@pytest.mark.parametrize("rules", [TextRules("line"), TEXT], ids=["txt", "jsonl"])
def test_a_compressed_file_gives_the_documents_of_the_plain_one(tmp_path: Path, kind: str, rules: TextRules) -> None:
    """As one unit, however small the shards."""
    texts = [text.replace("\n", " ").strip() for text in documents(50)]
    name, data = ("a.txt", "\n".join(texts).encode()) if rules.text_column is None else ("a.jsonl", as_jsonl(texts))
    path = tmp_path / f"{name}.{kind}"
    path.write_bytes(COMPRESS[kind](data))
    result = read(path, rules, shard_size=100)
    assert (result.units, result.texts, result.rejects) == (1, texts, [])


@every_compression
def test_a_truncated_file_keeps_every_whole_document_before_the_cut(tmp_path: Path, kind: str) -> None:
    """Of two members, the first is kept to the last document; then one reject says what happened."""
    first, second = documents(2000, 1), documents(2000, 2)
    path = tmp_path / f"a.jsonl.{kind}"
    tail = COMPRESS[kind](as_jsonl(second))
    path.write_bytes(COMPRESS[kind](as_jsonl(first)) + tail[: len(tail) // 2])
    result = read(path)
    assert len(result.texts) >= len(first)
    assert result.texts == (first + second)[: len(result.texts)]
    assert [(reject.reason, reject.file) for reject in result.rejects] == [("truncated", str(path))]


@pytest.mark.parametrize("kind", ["gz", "zst", "xz"])
def test_little_is_lost_at_a_cut(tmp_path: Path, kind: str) -> None:
    """Nine tenths of a file give most of its documents."""
    texts = documents(3000)
    path = tmp_path / f"a.jsonl.{kind}"
    packed = COMPRESS[kind](as_jsonl(texts))
    path.write_bytes(packed[: len(packed) * 9 // 10])
    assert len(read(path).texts) > 2000


def test_a_truncated_file_that_is_one_document_is_rejected_whole(tmp_path: Path) -> None:
    """Half a document is none; the files around it are kept."""
    for name, data in {
        "a.txt": b"first",
        "b.txt.gz": gzip.compress(b"second" * 1000)[:-20],
        "c.txt.gz": gzip.compress(random.Random(0).randbytes(3_000_000).hex().encode())[:-20],
        "d.txt": b"last",
    }.items():
        (tmp_path / name).write_bytes(data)
    result = read(tmp_path, TextRules("file"))
    assert result.texts == ["first", "last"]
    assert [Path(reject.file).name for reject in result.rejects] == ["b.txt.gz", "c.txt.gz"]
    assert result.reasons == {"truncated": 2}


@pytest.mark.parametrize(("name", "least"), [("truncated.jsonl.gz", 10), ("truncated.jsonl.zst", 0)])
def test_real_truncated_files_give_what_is_whole(shared_data: Path, name: str, least: int) -> None:
    """And one reject; the zst file is cut inside its first block, so nothing of it can be had."""
    result = read(shared_data / "messy" / name)
    assert len(result.texts) >= least
    assert result.reasons == {"truncated": 1}
