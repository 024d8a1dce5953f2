"""`milldam.open`: stores, files of other tools, and inputs with what was prepared from them."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import DEMO, TOKENIZER, invoke, write_lines
from tests.kit.token_stores import flat_tokens, shard_file, write_store
from tests.stores.test_features import small_store

import milldam
from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile
from milldam.formats.megatron import MegatronFile
from milldam.loader.stores import Store
from milldam.stores.tokens.format import HEADER, MAGIC, Index

TOKENS = (np.arange(1000) % 700 + 1).astype(np.uint16)


# ---- files of every kind, written as their tools write them ----


def write_nanogpt(folder: Path, tokens: np.ndarray = TOKENS) -> Path:
    tokens.tofile(folder / "train.bin")
    return folder / "train.bin"


def write_llm_c(folder: Path, tokens: np.ndarray = TOKENS, magic: int = 20240520, version: int = 1) -> Path:
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    (folder / "fineweb.bin").write_bytes(header.tobytes() + tokens.tobytes())
    return folder / "fineweb.bin"


def write_npy(folder: Path, tokens: np.ndarray = TOKENS) -> Path:
    np.save(folder / "corpus.npy", tokens)
    return folder / "corpus.npy"


DTYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(folder: Path, tokens: np.ndarray = TOKENS, lengths: tuple[int, ...] = (300, 300, 400)) -> Path:
    """Documents of one sequence each."""
    return write_pair(folder / "text_document", tokens, lengths, np.arange(len(lengths) + 1))


def write_pair(prefix: Path, tokens: np.ndarray, lengths: tuple[int, ...], documents: Any) -> Path:
    starts = np.cumsum((0, *lengths))[:-1] * tokens.itemsize
    code = DTYPE_CODES[tokens.dtype.name]
    head = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents))
    arrays = (np.array(lengths, "<i4"), starts.astype("<i8"), np.array(documents, "<i8"))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    tokens.tofile(prefix.with_name(f"{prefix.name}.bin"))
    return prefix.with_name(f"{prefix.name}.bin")


KINDS: dict[str, Callable[[Path], Path]] = {
    "nanoGPT": write_nanogpt,
    "llm.c": write_llm_c,
    "numpy": write_npy,
    "Megatron": write_megatron,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def open_foreign(path: Path | str, **options: Any) -> ForeignFile:
    opened = milldam.open(path, **options)
    assert isinstance(opened, ForeignFile)
    return opened


# ---- every kind ----


@every_kind
def test_a_file_of_another_tool_opens(tmp_path: Path, kind: str) -> None:
    """Tokens, dtype and kind are known, and the text of the object says so."""
    file = open_foreign(KINDS[kind](tmp_path))
    assert (file.tokens, file.dtype, file.kind) == (1000, np.uint16, kind)
    assert (file.vocab_size, file.tokenizer_name) == (None, None)
    assert f"1,000 tokens, uint16, {kind})" in repr(file)


@every_kind
@pytest.mark.parametrize("way", ["map", "pread"])
def test_views_of_a_foreign_file_give_its_tokens(tmp_path: Path, kind: str, way: Any) -> None:
    """Windows, streams, rows and splits read the tokens that were written."""
    file = open_foreign(KINDS[kind](tmp_path))
    x, y = next(file.windows(99, read=way).batches(10, shuffle=False))
    assert x.ravel().tolist() == TOKENS[:990].tolist() and y.ravel().tolist() == TOKENS[1:991].tolist()
    x, _ = next(iter(file.streams(3, 111, read=way)))
    assert x.tolist() == [TOKENS[k * 333 : k * 333 + 111].tolist() for k in range(3)]
    parts = file.split(train=0.9, val=...)
    x, y = parts["val"].windows(99, read=way)[0]
    assert [*x.tolist(), y[-1]] == TOKENS[900:].tolist()


@every_kind
def test_rows_need_documents(tmp_path: Path, kind: str) -> None:
    """Only a pair of Megatron knows where its documents lie; of the others rows are refused, not made up."""
    file = open_foreign(KINDS[kind](tmp_path))
    if kind == "Megatron":
        assert file.packed(64).read(np.arange(15))["input_ids"].ravel().tolist() == TOKENS[:960].tolist()
    else:
        with pytest.raises(ConfigError, match="where its documents begin and end is not known"):
            file.packed(64)[0]


@every_kind
def test_a_foreign_file_pickles_as_its_path(tmp_path: Path, kind: str) -> None:
    """What travels to a worker is small, and opens as the same."""
    file = open_foreign(KINDS[kind](tmp_path))
    travelled = pickle.dumps(file)
    back = pickle.loads(travelled)
    assert len(travelled) < 500 and type(back) is type(file)
    assert (back.path, back.fingerprint, back.tokens) == (file.path, file.fingerprint, file.tokens)


def _first_tokens(windows: Any) -> list[int]:
    return [int(token) for token in windows[0][0]]


def test_windows_of_foreign_files_travel_to_spawned_workers(tmp_path: Path) -> None:
    """A process that shares nothing reads the same."""
    given = [open_foreign(KINDS[kind](tmp_path)).windows(8) for kind in ("nanoGPT", "Megatron")]
    given.append(
        open_foreign(_written(tmp_path / "wide.bin", np.arange(50, dtype=np.uint32)), dtype="uint32").windows(8)
    )
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map(_first_tokens, given)
    assert found == [TOKENS[:8].tolist(), TOKENS[:8].tolist(), list(range(8))]


def _written(path: Path, tokens: np.ndarray) -> Path:
    tokens.tofile(path)
    return path


@every_kind
def test_the_fingerprint_follows_the_content(tmp_path: Path, kind: str) -> None:
    """A copy elsewhere has the same one; other tokens have another."""
    path = KINDS[kind](tmp_path)
    before = open_foreign(path).fingerprint
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert open_foreign(tmp_path / "copy" / path.name).fingerprint == before
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert open_foreign(path).fingerprint != before


def test_the_fingerprint_of_a_large_file_reads_both_ends_and_between(tmp_path: Path) -> None:
    """Of a file larger than the blocks, the first and the last byte count, and so do the dtype and the size."""
    tokens = np.zeros(1_000_000, np.uint16)
    first = open_foreign(_written(tmp_path / "a.bin", tokens)).fingerprint
    for place in (0, -1):
        changed = tokens.copy()
        changed[place] = 1
        assert open_foreign(_written(tmp_path / "b.bin", changed)).fingerprint != first
    assert open_foreign(_written(tmp_path / "b.bin", tokens[:-1])).fingerprint != first
    assert open_foreign(tmp_path / "a.bin", dtype="int16").fingerprint != first


def test_a_state_of_one_file_is_refused_by_another(tmp_path: Path) -> None:
    """A loader does not go on with other tokens, and does with a copy of them."""
    batches = open_foreign(write_nanogpt(tmp_path)).windows(10).batches(4)
    next(batches)
    state = json.loads(json.dumps(batches.state_dict()))
    shutil.copy(tmp_path / "train.bin", tmp_path / "copy.bin")
    again = open_foreign(tmp_path / "copy.bin").windows(10).batches(4)
    again.load_state_dict(state)
    assert next(again)[0].tolist() == next(batches)[0].tolist()
    other = open_foreign(_written(tmp_path / "other.bin", TOKENS[::-1].copy())).windows(10).batches(4)
    with pytest.raises(MismatchError):
        other.load_state_dict(state)


@every_kind
def test_a_split_is_not_asked_of_a_foreign_file(tmp_path: Path, kind: str) -> None:
    """Such files have no splits; the message names the file of that name, when there is one."""
    path = KINDS[kind](tmp_path)
    with pytest.raises(ConfigError, match=r"each split is a file of its own, such as train\.bin and val\.bin"):
        milldam.open(path, split="val")
    val = path.with_name(f"val{path.suffix}")
    shutil.copy(path, val)
    with pytest.raises(ConfigError, match=f"each split is a file of its own: open {val}"):
        milldam.open(path).windows(8, split="val")


@every_kind
def test_a_dtype_must_agree_with_what_a_file_says(tmp_path: Path, kind: str) -> None:
    """Only what does not say its dtype can be given one."""
    path = KINDS[kind](tmp_path)
    assert open_foreign(path, dtype="uint16").dtype == np.uint16
    if kind == "nanoGPT":
        assert open_foreign(path, dtype=np.uint32).tokens == 500
    else:
        with pytest.raises(ConfigError, match="says itself that it holds uint16, and dtype=uint32 is asked for"):
            milldam.open(path, dtype=np.uint32)


@pytest.mark.parametrize(("dtype", "said"), [("float32", "tokens are integers"), ("tokens", "is no dtype of numpy")])
def test_a_dtype_that_holds_no_tokens_is_refused(tmp_path: Path, dtype: str, said: str) -> None:
    """Tokens are integers."""
    with pytest.raises(ConfigError, match=said):
        milldam.open(write_nanogpt(tmp_path), dtype=dtype)


@every_kind
def test_an_empty_file_is_refused(tmp_path: Path, kind: str) -> None:
    """Nothing to train on, in a sentence."""
    path = KINDS[kind](tmp_path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match=rf"{path.name}: empty"):
        milldam.open(path)


# ---- nanoGPT and llm.c ----


def test_bytes_that_are_no_whole_tokens_are_refused(tmp_path: Path) -> None:
    """A file that was cut short, or has another dtype than is thought."""
    (tmp_path / "odd.bin").write_bytes(bytes(1001))
    with pytest.raises(InputError, match=r"1,001 bytes are not a whole number of tokens of uint16, 2 bytes each"):
        milldam.open(tmp_path / "odd.bin")
    (tmp_path / "odd.bin").write_bytes(bytes(1002))
    with pytest.raises(InputError, match=r"tokens of int32, 4 bytes each"):
        milldam.open(tmp_path / "odd.bin", dtype="int32")


def test_a_short_bin_file_opens(tmp_path: Path) -> None:
    """Even one that is shorter than the header that is looked for."""
    assert open_foreign(_written(tmp_path / "s.bin", TOKENS[:2])).tokens == 2


def test_a_pickle_beside_a_bin_file_is_never_opened(tmp_path: Path) -> None:
    """meta.pkl could run anything."""
    path = write_nanogpt(tmp_path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(_Bomb(tmp_path / "went_off")))
    assert open_foreign(path).windows(8)[0] is not None
    assert not (tmp_path / "went_off").exists()


class _Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._folder,)


def test_llm_c_files_of_llama_are_uint32(tmp_path: Path) -> None:
    """The header says which tokenizer's width it is."""
    tokens = np.arange(100_000, 100_300, dtype=np.uint32)
    file = open_foreign(write_llm_c(tmp_path, tokens, 20240801, 7))
    assert (file.dtype, file.tokens, file.windows(10)[0][0][0]) == (np.uint32, 300, 100_000)


def test_damaged_llm_c_files_are_refused(tmp_path: Path) -> None:
    """The count in the header must fit the file, and its version must be known."""
    path = write_llm_c(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"3,022 bytes where 1,000 tokens of uint16.* take 3,024 with it"):
        milldam.open(path)
    with pytest.raises(InputError, match="version 2; this milldam reads version 1"):
        milldam.open(write_llm_c(tmp_path, version=2))
    with pytest.raises(InputError, match="no tokens in it"):
        milldam.open(write_llm_c(tmp_path, TOKENS[:0]))


# ---- numpy ----


@pytest.mark.parametrize("dtype", ["uint8", "int16", "<u4", "int64", ">u2", ">i8"])
def test_an_npy_file_of_any_integers_opens(tmp_path: Path, dtype: str) -> None:
    """Whatever their width and byte order, batches have the tokens."""
    tokens = (np.arange(500) % 120).astype(dtype)
    file = open_foreign(write_npy(tmp_path, tokens))
    assert file.dtype == np.dtype(dtype)
    for way in ("map", "pread"):
        x, y = next(file.windows(30, read=way).batches(4, shuffle=False))
        assert x.dtype == np.int64 and x.ravel().tolist() == tokens[:120].tolist()
        assert y.ravel().tolist() == tokens[1:121].tolist()


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (np.zeros((3, 4), np.uint16), r"a 2-D array of shape \(3, 4\)"),
        (np.array(5, np.uint16), "a 0-D array"),
        (np.zeros(3, np.float32), "holds float32"),
        (np.zeros(3, bool), "holds bool"),
        (np.array([1, None], object), "Python objects, which are never loaded"),
        (np.zeros(0, np.uint16), "no tokens in it"),
    ],
)
def test_npy_files_of_something_else_are_refused(tmp_path: Path, array: np.ndarray, said: str) -> None:
    """Tokens are a 1-D array of integers."""
    with pytest.raises(InputError, match=said):
        milldam.open(write_npy(tmp_path, array))


def test_damaged_npy_files_are_refused(tmp_path: Path) -> None:
    """Cut short, or no .npy file at all."""
    path = write_npy(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"2,126 bytes where its header says 2,128"):
        milldam.open(path)
    for content in (b"\x93NUMPY\x01\x00", b"tokens", b"\x93NUMPY\x01\x00\x04\x00{(]\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"not a \.npy file"):
            milldam.open(path)


@pytest.fixture(scope="module")
def desk_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus.txt with corpus.milldam and corpus.npy made from it, and books/ with books.milldam."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copy(DEMO / "notes.txt", folder / "corpus.txt")
    (folder / "books" / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (folder / "books" / name).write_text(f"The text of {name}.\n" * 20)
    milldam.tokenize(folder / "corpus.txt", folder / "corpus.milldam", tokenizer=TOKENIZER, workers=1)
    milldam.tokenize(folder / "books", folder / "books.milldam", tokenizer=TOKENIZER, workers=1)
    done = invoke("tokenize", folder / "corpus.txt", "--format", "npy", "--tokenizer", TOKENIZER, "--workers", 1)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def desk(desk_of_module: Path, tmp_path: Path) -> Path:
    """A copy of it that keeps the times."""
    return shutil.copytree(desk_of_module, tmp_path / "desk")


def test_an_npy_file_of_ours_knows_its_vocabulary(desk: Path) -> None:
    """What milldam wrote beside it is read: vocabulary, tokenizer, and the EOS that rows are padded with."""
    file = open_foreign(desk / "corpus.npy")
    assert (file.vocab_size, file.tokenizer_name, file.stream().pad_id) == (4096, "demo_data", 0)
    assert file.windows(10)[0][0].tolist() == milldam.open(desk / "corpus.milldam")[0][:10].tolist()


def test_an_npy_file_must_agree_with_what_was_written_beside_it(desk: Path) -> None:
    """A file that another tool replaced is not taken for ours."""
    np.save(desk / "corpus.npy", TOKENS)
    with pytest.raises(StoreError, match=r"1000 tokens of uint16, and corpus\.npy\.json beside it says \d+ tokens"):
        milldam.open(desk / "corpus.npy")
    (desk / "corpus.npy.json").write_text("{")
    with pytest.raises(StoreError, match=r"corpus\.npy\.json: damaged: can't be read"):
        milldam.open(desk / "corpus.npy")
    (desk / "corpus.npy.json").write_text('{"format": "of somebody else"}')
    assert open_foreign(desk / "corpus.npy").vocab_size is None


# ---- Megatron ----


@pytest.mark.parametrize("ending", [".bin", ".idx", ""])
def test_a_pair_opens_by_either_file_or_its_prefix(tmp_path: Path, ending: str) -> None:
    """All three name the same tokens."""
    path = write_megatron(tmp_path)
    file = open_foreign(path.with_name(path.stem + ending))
    assert isinstance(file, MegatronFile) and file.path == path
    assert repr(file) == f"MegatronFile({str(path)!r}: 3 documents, 1,000 tokens, uint16, Megatron)"


def test_documents_of_a_pair_are_views(tmp_path: Path) -> None:
    """By number, from the end too, and one after the other; nothing is copied."""
    file = milldam.open(write_megatron(tmp_path))
    assert isinstance(file, MegatronFile)
    expected = [TOKENS[:300].tolist(), TOKENS[300:600].tolist(), TOKENS[600:].tolist()]
    assert [document.tolist() for document in file] == expected
    assert file[-1].tolist() == expected[-1] and file[0].base is not None and not file[0].flags.writeable
    with pytest.raises(IndexError, match="document 3 of 3 documents"):
        file[3]


def test_files_without_documents_have_no_length() -> None:
    """len() is for documents alone: nobody takes tokens for them."""
    assert not hasattr(ForeignFile, "__len__") and not hasattr(ForeignFile, "__getitem__")


@given(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=8).filter(lambda one: any(map(any, one))))
def test_documents_of_several_sequences_or_none_are_found(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    """Megatron may cut a document into sentences, or write one that is empty."""
    lengths = tuple(length for document in documents for length in document)
    firsts = np.cumsum([0, *map(len, documents)])
    tokens = np.arange(sum(lengths), dtype=np.int32)
    path = write_pair(tmp_path_factory.mktemp("pair") / "d", tokens, lengths, firsts)
    file = milldam.open(path)
    assert isinstance(file, MegatronFile)
    assert [len(document) for document in file] == [sum(document) for document in documents]
    assert [token for document in file for token in document] == tokens.tolist()


def test_document_lengths_count_documents_without_sequences(tmp_path: Path) -> None:
    """The index sums what each document has: nothing, for one without a sequence."""
    path = write_pair(tmp_path / "d", TOKENS[:9], (4, 3, 2), [0, 0, 2, 2, 3, 3])
    index = Index.map(path.with_suffix(".idx"))
    assert index.document_lengths().tolist() == [0, 7, 0, 2, 0]
    assert index.document_lengths(1, 3).tolist() == [7, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16"])
def test_a_pair_of_any_integers_opens(tmp_path: Path, dtype: str) -> None:
    """The index says the dtype."""
    tokens = (np.arange(200) % 100).astype(dtype)
    file = open_foreign(write_megatron(tmp_path, tokens, (150, 50)))
    assert file.dtype == np.dtype(dtype)
    assert next(file.windows(10).batches(2, shuffle=False))[0].ravel().tolist() == tokens[:20].tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_pair_of_floats_is_refused(tmp_path: Path, dtype: str) -> None:
    """Floats are no tokens."""
    with pytest.raises(StoreError, match=f"an index of {dtype} numbers, which are not tokens"):
        milldam.open(write_megatron(tmp_path, np.zeros(9, dtype), (4, 5)))


def test_empty_documents_do_not_hide_that_others_have_several_sequences(tmp_path: Path) -> None:
    """As many sequences as documents, and yet not one each: positions begin with documents, not with sequences."""
    tokens = np.arange(1, 23, dtype=np.uint16)
    pair = open_foreign(write_pair(tmp_path / "odd", tokens, (4, 6, 5, 7), [0, 2, 3, 3, 4]))
    rows = pair.packed(11).read(np.arange(2))
    assert rows["position_ids"].tolist() == [[*range(10), 0], [*range(4), *range(7)]]
    assert rows["document_ids"].tolist() == [[0] * 10 + [1], [1] * 4 + [3] * 7]


def test_shards_of_a_store_are_pairs(tmp_path: Path) -> None:
    """A shard opens by itself, with its documents, and its rows are those of the store."""
    store = write_store(tmp_path / "s", [[5, 9, 30], [20]])
    shard = milldam.open(shard_file(tmp_path / "s", 0, "bin"))
    assert isinstance(shard, MegatronFile)
    assert [document.tolist() for document in shard] == [document.tolist() for document in list(store)[:3]]
    rows = shard.packed(8).read(np.arange(5))
    expected = store.packed(8).read(np.arange(5))
    assert all(np.array_equal(rows[name], expected[name]) for name in ("input_ids", "position_ids", "labels"))


def test_pairs_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """The size of the tokens must be what the index says, and the index must cover them."""
    path = write_megatron(tmp_path)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(StoreError, match=r"idx: its documents end at byte 2,000, and there are 1,998 bytes of tokens"):
        milldam.open(path)
    path.unlink()
    with pytest.raises(InputError, match=r"there is no text_document\.bin beside it"):
        milldam.open(path.with_suffix(".idx"))
    write_pair(tmp_path / "text_document", TOKENS, (400, 600), [0, 1])
    with pytest.raises(StoreError, match="do not cover the tokens from end to end"):
        milldam.open(path)
    path.with_suffix(".idx").write_bytes(b"TNTIDX\x00\x00" + struct.pack("<Q", 1) * 8)
    with pytest.raises(StoreError, match="not a token index"):
        milldam.open(path)


# ---- stores, and what is nothing ----


def test_a_store_opens_as_before(tmp_path: Path) -> None:
    """By its folder, and by the name of a split."""
    written = write_store(tmp_path / "s", [[5, 9], [20]], splits=["train", "val"])
    opened = milldam.open(str(written.path))
    assert isinstance(opened, Store) and flat_tokens(opened).tolist() == flat_tokens(written).tolist()
    assert milldam.open(written.path, split="val").tokens == 20
    with pytest.raises(ConfigError, match="a store knows its dtype"):
        milldam.open(written.path, dtype="int32")


def test_a_path_that_is_not_there_is_named_with_what_is_like_it(tmp_path: Path) -> None:
    """A hint at a sibling of about that name."""
    write_npy(tmp_path)
    with pytest.raises(StoreError, match=r'corps\.npy: no such file or folder\. Did you mean ".*/corpus\.npy"\?'):
        milldam.open(tmp_path / "corps.npy")
    with pytest.raises(StoreError, match=r"no such file or folder\.$"):
        milldam.open(tmp_path / "nowhere" / "at.all")


def test_folders_that_are_no_store_say_what_they_are(tmp_path: Path) -> None:
    """Empty ones, unfinished ones, and ones that hold a store: none is guessed."""
    with pytest.raises(StoreError, match=r"not a token store \(no milldam\.json in it\)"):
        milldam.open(tmp_path)
    write_store(tmp_path / "one.milldam", [[5]])
    with pytest.raises(StoreError, match="not a token store"):
        milldam.open(tmp_path)
    (tmp_path / "half.milldam" / "run").mkdir(parents=True)
    with pytest.raises(StoreError, match="unfinished"):
        milldam.open(tmp_path / "half.milldam")


def test_what_was_made_from_an_input_is_found_by_its_name_and_said(
    desk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store first, or an .npy file; of a folder too; moved together it stays fresh."""
    store = milldam.open(desk / "corpus.txt")
    assert isinstance(store, Store) and store.path == desk / "corpus.milldam"
    assert f"{desk / 'corpus.txt'}: using {desk / 'corpus.milldam'}, made from it and up to date" in caplog.text
    assert isinstance(milldam.open(desk / "books"), Store)
    monkeypatch.chdir(desk / "books")
    assert milldam.open(".").tokens == milldam.open(desk / "books.milldam").tokens
    shutil.rmtree(desk / "corpus.milldam")
    moved = desk.rename(desk.with_name("moved"))
    assert open_foreign(moved / "corpus.npy").path == moved / "corpus.npy"
    assert milldam.open(moved / "corpus.txt").tokens == milldam.open(moved / "corpus.npy").tokens  # type: ignore[attr-defined]


def test_stale_data_is_refused_with_what_makes_it(desk: Path) -> None:
    """Grown, touched, renamed, or with another file in the folder; what is not stale of two is used."""
    (desk / "books" / "new.txt").write_text("More.")
    with pytest.raises(MismatchError, match=r"(?s)books.milldam: not made from it as it is now.*milldam tokenize"):
        milldam.open(desk / "books")
    text = desk / "corpus.txt"
    times = text.stat()
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    with pytest.raises(MismatchError, match=r"(?s)corpus.milldam: not made.*corpus.npy: not made"):
        milldam.open(text)
    assert milldam.open(desk / "corpus.milldam").tokens
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    (desk / "corpus.npy.json").unlink()
    assert milldam.open(text).tokens
    (desk / "corpus.milldam" / "milldam.json").write_bytes(b"{")
    with pytest.raises(MismatchError, match="the data beside it can't be used"):
        milldam.open(text)


def test_where_nothing_was_made_the_message_says_what_makes_it(tmp_path: Path) -> None:
    """And where it looked."""
    (tmp_path / "a b.txt").write_text("One.")
    with pytest.raises(InputError, match=r"looked for a b\.milldam, a b\.txt\.milldam.*\nMake it: milldam tokenize"):
        milldam.open(tmp_path / "a b.txt")
    with pytest.raises(InputError, match="a pattern that several files have"):
        milldam.open(tmp_path / "*.txt")


# ---- every kind, by every command ----


def test_stats_take_whatever_opens(tmp_path: Path) -> None:
    """A store, an .npy file, files of other tools: figures."""
    store = write_store(tmp_path / "s", [[5, 9], [20]])
    milldam.export(store, "megatron", tmp_path / "pair")
    milldam.export(store, "nanogpt", tmp_path / "train.bin")
    write_lines(tmp_path / "in.jsonl", ["one two", "three"])
    npy = ("-o", tmp_path / "t.npy", "--format", "npy", "--tokenizer", TOKENIZER)
    made = invoke("tokenize", tmp_path / "in.jsonl", *npy)
    assert made.exit_code == 0
    for name in ("s", "pair", "pair.idx", "train.bin", "t.npy"):
        told = invoke("stats", tmp_path / name, "--json")
        assert told.exit_code == 0 and json.loads(told.output)["tokens"] == milldam.open(tmp_path / name).tokens
    refused = invoke("inspect", tmp_path / "train.bin")
    assert refused.exit_code == 3 and "not a token store" in refused.output


def test_features_and_tables_are_opened_and_their_figures_shown(tmp_path: Path) -> None:
    """As any other kind; what they do not have is not passed over in silence."""
    small_store(tmp_path / "features")
    write_lines(tmp_path / "in.jsonl", ["one two", "three"])
    milldam.map(tmp_path / "in.jsonl", lambda rows: None, tmp_path / "table", workers=1, memory="1GB")
    assert type(milldam.open(tmp_path / "features")).__name__ == "FeatureStore"
    for name, count in (("features", "windows"), ("table", "rows")):
        told = json.loads(invoke("stats", tmp_path / name, "--json").output)
        assert told[count] == len(milldam.open(tmp_path / name))
        assert invoke("verify", tmp_path / "table").exit_code == 0
        with pytest.raises(ConfigError, match="has no split to choose"):
            milldam.open(tmp_path / name, split="train")
        with pytest.raises(StoreError, match="not a token store"):
            milldam.mix({tmp_path / name: 1.0})


@pytest.mark.slow
def test_a_multimodal_pair_is_named_as_one(tmp_path: Path) -> None:
    """Megatron's index with a mode for every sequence: a sentence, in place of a word on damage."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16, multimodal=True)
    for mode in (0, 1, 0):
        builder.add_item(torch.arange(5, dtype=torch.int32), mode=mode)
        builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    with pytest.raises(StoreError, match=r"x\.idx: a multimodal index of Megatron-LM"):
        milldam.open(tmp_path / "x")


def test_what_is_opened_is_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    """So a script that says what it needs gets that or a sentence, whatever lies there."""
    write_store(tmp_path / "tokens", [[3, 4]])
    small_store(tmp_path / "features")
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "file")
    (tmp_path / "file").rename(tmp_path / "file.bin")
    there: dict[Any, Path] = {"tokens": tmp_path / "tokens", "features": tmp_path / "features"}
    there["file"] = tmp_path / "file.bin"
    for found, path in there.items():
        for kind in ("tokens", "table", "features", "file"):
            if kind == found:
                assert type(milldam.open(path, kind=kind)) is type(milldam.open(path))
            else:
                with pytest.raises(StoreError, match=f'its kind is "{found}", and "{kind}" is asked for'):
                    milldam.open(path, kind=kind)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="use tokens, table, features or file"):
        milldam.open(there["tokens"], kind="rows")  # type: ignore[call-overload]
