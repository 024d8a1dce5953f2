"""The store: what is written comes back, the bytes are those of Megatron-LM, and damage is found."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.damage import edit_manifest
from tests.kit.token_stores import shard_file

import milldam
from milldam.errors import StoreError
from milldam.files import seal_text
from milldam.stores.tokens import format
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.reader import Store
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.stores.verify import verify

Document = list[int]

small_documents = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=12), max_size=30)
# Where a stream of tokens is cut into appends: any token may be the last of its batch.
cut_seeds = st.randoms(use_true_random=False)


def write_shard(folder: Path, name: str, written: list[Document], dtype: str = "uint16", split: str = "train") -> Shard:
    """A shard, a document an append."""
    with ShardWriter(folder, split, dtype) as writer:
        for document in written:
            writer.append(Tokens(np.array(document, dtype=dtype), np.array([len(document)], np.int64)))
        return writer.commit()


def write_manifest(folder: Path, shards: list[Shard], vocab_size: int = 2**16, dtype: str = "uint16") -> None:
    (folder / "tokenizer.json").write_bytes(b"{}")
    tokenizer = {"name": "t <b>", "xxh3": xxhash.xxh3_128(b"{}").hexdigest(), "eos": 0, "bos": None}
    Manifest(
        dtype=dtype,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        encoder="test",
        settings={},
        input={"files": 1, "bytes": 1, "fingerprint": ""},
        shards=tuple(shards),
    ).write(folder)


def make_store(folder: Path, shards: list[list[Document]], vocab_size: int = 2**16, dtype: str = "uint16") -> Store:
    folder.mkdir(parents=True, exist_ok=True)
    made = [write_shard(folder, f"train-{k:05d}", written, dtype) for k, written in enumerate(shards)]
    write_manifest(folder, made, vocab_size, dtype)
    return Store(folder)


# ---- writing and reading ----


@given(written=small_documents, rng=cut_seeds)
def test_documents_come_back_whatever_the_batches(tmp_path: Path, written: list[Document], rng: Any) -> None:
    """Documents written in any batches, open ones included, are read back one by one."""
    with ShardWriter(tmp_path, "train", "uint16") as writer:
        flat, lengths = list[int](), list[int]()
        for document in written:
            cuts = sorted(rng.randrange(len(document)) for _ in range(rng.randrange(3)))
            for begin, end in itertools.pairwise([0, *cuts, len(document)]):
                flat, lengths = flat + document[begin:end], [*lengths, end - begin]
                if end < len(document) or rng.random() < 0.3 or document is written[-1]:
                    tokens = Tokens(np.array(flat, "uint32"), np.array(lengths, np.int64), open=end < len(document))
                    writer.append(tokens)
                    flat, lengths = [], []
        shard = writer.commit()
    write_manifest(tmp_path, [shard])
    store = Store(tmp_path)
    assert [document.tolist() for document in store] == written
    assert (len(store), store.tokens) == (len(written), sum(map(len, written)))
    assert list(verify(tmp_path)) == []


@given(written=small_documents, largest=st.integers(1, 5))
def test_documents_longer_than_a_sequence_come_back_whole(
    tmp_path: Path, written: list[Document], largest: int
) -> None:
    """A document beyond the longest sequence is several sequences in the index and one document to the reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(format, "MAX_SEQUENCE", largest)
        store = make_store(tmp_path, [written])
        index = store.open_index(store.shards[0])
        assert index.lengths.max(initial=0) <= largest
        assert np.diff(index.documents).tolist() == [-(-len(document) // largest) for document in written]
        assert [document.tolist() for document in store] == written
        assert [n for part in store.document_lengths() for n in part.tolist()] == [len(d) for d in written]
        assert list(verify(tmp_path)) == []


# ---- as a sequence ----


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Six documents in three shards, one of which is empty."""
    return make_store(tmp_path / "s", [[[1], [2, 2], [3, 3, 3]], [], [[4], [5, 5], [6]]])


def test_a_store_is_a_sequence_of_its_documents(store: Store) -> None:
    """From both ends, across shards, empty ones included; in order; safe from who reads; equal wherever it lies."""
    every = [[1], [2, 2], [3, 3, 3], [4], [5, 5], [6]]
    assert [store[k].tolist() for k in range(6)] == [store[k - 6].tolist() for k in range(6)] == every
    assert [document.tolist() for document in store] == every and store[np.int64(3)].tolist() == [4]
    assert np.concatenate(list(store.shard_tokens())).tolist() == [token for one in every for token in one]
    for number in (6, -7, 10**12):
        with pytest.raises(IndexError, match="6 documents"):
            store[number]
    with pytest.raises(ValueError, match="read-only"):
        store[0][0] = 9
    assert repr(store) == f"Store({str(store.path)!r}: 6 documents, 10 tokens, uint16)"
    same = make_store(store.path.with_name("a"), [every[:3], [], every[3:]])
    other = make_store(store.path.with_name("b"), [[[1, 2, 2], *every[2:]]])
    assert store.fingerprint == same.fingerprint != other.fingerprint


def test_a_store_pickles_as_its_path(store: Store) -> None:
    """Pickling copies no data, mapped or not, and keeps the split."""
    list(store)
    pickled = pickle.dumps(Store(store.path, split="train"))
    assert len(pickled) < 500 and len(pickle.dumps(store)) < 500
    again = pickle.loads(pickled)
    assert [d.tolist() for d in again] == [d.tolist() for d in store]
    assert again.split_name == "train"


# ---- many shards ----


def test_more_shards_than_open_files_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the 1,024 open files that many systems allow, a store of as many shards can still be read whole."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    make_store(tmp_path, [[[k]] for k in range(1100)])
    resource_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource, sys, milldam;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (1024, {resource_limit}));"
        "store = milldam.open(sys.argv[1]);"
        "print(sum(int(document[0]) for document in store))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.strip() == str(sum(range(1100))), done.stderr[-500:]


# ---- what is refused ----


@pytest.mark.parametrize("name", ["../other/train-00000", "/etc/passwd", "sub/train", "..", ".", "", "a\\b"])
def test_a_shard_name_that_leaves_the_folder_is_refused(store: Store, name: str) -> None:
    """A manifest from elsewhere can't make us open files outside of its folder."""
    edit_manifest(store.path, lambda value: value["shards"][0].update(name=name))
    with pytest.raises(StoreError, match="leaves the folder; refused"):
        milldam.open(store.path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "can't be read"),
        (b"[]", "not the manifest of a token store"),
        (b'{"format": "other"}', "not the manifest of a token store"),
        (b'{"format": "milldam store", "format_version": 1}', "damaged: it is not as it was written"),
        (b'{"format": "milldam store", "format_version": 2}', "its format_version is 2"),
        (seal_text(b'{"format": "milldam store", "format_version": 1, "shards": [{"name": "x"}]\n}\n'), "no dtype"),
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path: Path, content: bytes, said: str) -> None:
    """Whatever lies there as a manifest, the error is ours and names the file."""
    (tmp_path / "milldam.json").write_bytes(content)
    with pytest.raises(StoreError, match=said) as caught:
        milldam.open(tmp_path)
    assert str(tmp_path / "milldam.json") in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "can't be mapped"),
        (b"x" * 100, "not a token index"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 2, 8, 0, 1) + bytes(8), "index version 2"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 9, 0, 1) + bytes(8), "dtype code 9"),
        (struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**62, 1) + bytes(8), "bytes where its header says"),
    ],
)
def test_a_file_that_is_no_index_is_refused(store: Store, data: bytes, said: str) -> None:
    """An index of another kind, or one whose header lies about its size, is an error that names the file."""
    shard_file(store.path, 0, "idx").write_bytes(data)
    with pytest.raises(StoreError, match=said):
        Store(store.path)[0]


# ---- verify ----


def test_verify_finds_flipped_bits_and_another_tokenizer(store: Store) -> None:
    """The file is named."""
    for ending, position in itertools.product(("bin", "idx"), (0, -1)):
        path = shard_file(store.path, 0, ending)
        whole = path.read_bytes()
        data = bytearray(whole)
        data[position] ^= 1
        path.write_bytes(data)
        problems = list(verify(store.path))
        assert len(problems) == 1 and str(path) in problems[0] and "hash differs" in problems[0]
        path.write_bytes(whole)
    path = store.path / "tokenizer.json"
    path.write_bytes(b"{ }")
    assert list(verify(store.path)) == [f"{path}: not the tokenizer that made this store (its hash differs)"]
    path.unlink()
    assert list(verify(store.path)) == [f"{path}: missing"]


@pytest.mark.parametrize(("dtype", "token"), [("uint16", 11), ("int32", 10), ("int32", -5)])
def test_verify_finds_an_id_outside_the_vocabulary(tmp_path: Path, dtype: str, token: int) -> None:
    """An id that the tokenizer does not have is found and named, though all hashes match."""
    make_store(tmp_path, [[[1, 2], [3, token, 9]]], vocab_size=10, dtype=dtype)
    problems = list(verify(tmp_path))
    assert len(problems) == 1 and str(shard_file(tmp_path, 0, "bin")) in problems[0]
    assert f"token id {token} outside the vocabulary of 10" in problems[0]


def forge_index(folder: Path, lengths: list[int], pointers: list[int], indices: list[int]) -> None:
    """An index with the given arrays, and a manifest whose hash matches it."""
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(indices))
    parts = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(indices, "<i8"))
    data = head + b"".join(part.tobytes() for part in parts)
    shard_file(folder, 0, "idx").write_bytes(data)
    record = {"bytes": len(data), "xxh3": xxhash.xxh3_128(data).hexdigest()}
    edit_manifest(folder, lambda value: value["shards"][0].update(idx=record))


@pytest.mark.parametrize(
    ("lengths", "pointers", "indices"),
    [
        pytest.param([2, 3], [0, 2], [0, 1, 2], id="pointers that do not follow from lengths"),
        pytest.param([2, 2], [0, 4], [0, 1, 2], id="lengths that do not add up"),
        pytest.param([2, 3], [0, 4], [0, 2], id="fewer documents than the manifest"),
        pytest.param([2, 3], [0, 4], [0, 1, 1], id="a sequence that belongs to no document"),
        pytest.param([1, 1, 3], [0, 2, 4], [0, 2, 1, 3], id="document indices that go back"),
        pytest.param([2, 3], [0, 4], [], id="no document indices"),
    ],
)
def test_verify_finds_an_index_that_contradicts_itself(
    tmp_path: Path, lengths: list[int], pointers: list[int], indices: list[int]
) -> None:
    """An index is checked by its arrays too: matching hashes are not enough."""
    make_store(tmp_path, [[[1, 2], [3, 4, 5]]])
    if len(indices) == 4:
        edit_manifest(tmp_path, lambda value: value["shards"][0].update(documents=3))
    forge_index(tmp_path, lengths, pointers, indices)
    assert list(verify(tmp_path))
