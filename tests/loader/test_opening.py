"""`milldam.open`: stores, files of other tools, and inputs with what was prepared from them."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import DEMO, TOKENIZER, invoke
from tests.kit.token_stores import write_store

import milldam
from milldam.errors import InputError, MismatchError, StoreError
from milldam.formats.foreign import ForeignFile
from milldam.input_files import bare_name
from milldam.stores.tokens.format import HEADER, MAGIC

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
@pytest.mark.parametrize("way", ["map", "pread"])
def test_views_of_a_foreign_file_give_its_tokens(tmp_path: Path, kind: str, way: Any) -> None:
    """Windows, streams, rows and splits read the tokens that were written."""
    file = open_foreign(KINDS[kind](tmp_path))
    assert (file.vocab_size, file.tokenizer_name) == (None, None)
    assert f"1,000 tokens, uint16, {kind})" in repr(file)
    x, y = next(file.windows(99, read=way).batches(10, shuffle=False))
    assert x.ravel().tolist() == TOKENS[:990].tolist() and y.ravel().tolist() == TOKENS[1:991].tolist()
    x, _ = next(iter(file.streams(3, 111, read=way)))
    assert x.tolist() == [TOKENS[k * 333 : k * 333 + 111].tolist() for k in range(3)]
    parts = file.split(train=0.9, val=...)
    x, y = parts["val"].windows(99, read=way)[0]
    assert [*x.tolist(), y[-1]] == TOKENS[900:].tolist()


def _written(path: Path, tokens: np.ndarray) -> Path:
    tokens.tofile(path)
    return path


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


# ---- nanoGPT and llm.c ----


def test_llm_c_files_of_llama_are_uint32(tmp_path: Path) -> None:
    """The header says which tokenizer's width it is."""
    tokens = np.arange(100_000, 100_300, dtype=np.uint32)
    file = open_foreign(write_llm_c(tmp_path, tokens, 20240801, 7))
    assert (file.dtype, file.tokens, file.windows(10)[0][0][0]) == (np.uint32, 300, 100_000)


# ---- numpy ----


# ---- Megatron ----


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


def test_folders_that_are_no_store_say_what_they_are(tmp_path: Path) -> None:
    """Empty ones, unfinished ones, and ones that hold a store: none is guessed."""
    with pytest.raises(StoreError, match=r"not a token store \(no milldam\.json"):
        milldam.open(tmp_path)
    write_store(tmp_path / "one.milldam", [[5]])
    with pytest.raises(StoreError, match="not a token store"):
        milldam.open(tmp_path)
    (tmp_path / "half.milldam" / "run").mkdir(parents=True)
    with pytest.raises(StoreError, match="unfinished"):
        milldam.open(tmp_path / "half.milldam")


@pytest.fixture(scope="module")
def desk_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """corpus.txt with corpus.milldam and corpus.npy made from it, and books/ with books.milldam."""
    folder = tmp_path_factory.mktemp("desk")
    shutil.copy(DEMO / "notes.txt", folder / "corpus.txt")
    (folder / "books" / "more").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "more/c.txt"):
        (folder / "books" / name).write_text(f"The text of {name}.\n" * 20)
    for name in ("corpus.txt", "books"):
        milldam.tokenize(folder / name, folder / f"{bare_name(name)}.milldam", tokenizer=TOKENIZER, workers=1)
    done = invoke("tokenize", folder / "corpus.txt", "--format", "npy", "--tokenizer", TOKENIZER, "--workers", 1)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def desk(desk_of_module: Path, tmp_path: Path) -> Path:
    """A copy of it that keeps the times."""
    return shutil.copytree(desk_of_module, tmp_path / "desk")


def test_what_was_made_from_an_input_is_found_by_its_name_and_logged(
    desk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store first, or an .npy file; of a folder too; moved together it stays fresh."""
    assert milldam.open(desk / "corpus.txt").path == desk / "corpus.milldam"
    assert f"{desk / 'corpus.txt'}: using {desk / 'corpus.milldam'}, made from it and up to date" in caplog.text
    monkeypatch.chdir(desk / "books")
    assert (
        milldam.open(".").tokens == milldam.open(desk / "books").tokens == milldam.open(desk / "books.milldam").tokens
    )
    shutil.rmtree(desk / "corpus.milldam")
    moved = desk.rename(desk.with_name("moved"))
    file: Any = milldam.open(moved / "corpus.txt")
    assert (file.path, file.vocab_size, file.stream().pad_id) == (moved / "corpus.npy", 4096, 0)


def test_stale_or_unknown_data_is_refused_with_the_command_that_makes_it(desk: Path) -> None:
    """Of a folder with one more file; of a file that was touched or renamed; what is fresh of two is used."""
    (desk / "books" / "new.txt").write_text("More.")
    with pytest.raises(MismatchError, match=r"(?s)books\.milldam: not made from it as it is now.*milldam tokenize"):
        milldam.open(desk / "books")
    text = desk / "corpus.txt"
    shutil.copytree(desk / "books.milldam", desk / "corpus.milldam", dirs_exist_ok=True)
    assert open_foreign(text).path == desk / "corpus.npy"
    (desk / "corpus.npy.json").unlink()
    with pytest.raises(MismatchError, match=r"corpus\.milldam and .*corpus\.npy: not made"):
        milldam.open(text)
    shutil.rmtree(desk / "corpus.milldam")
    with pytest.raises(MismatchError, match=r"it isn't known what it was made from"):
        milldam.open(text)
    (desk / "corpus.npy").unlink()
    with pytest.raises(InputError, match=r"(?s)looked for corpus\.milldam, corpus\.npy.*Make it: milldam tokenize"):
        milldam.open(text)


def test_a_touched_input_makes_its_store_stale(desk: Path) -> None:
    """By the time of its modification alone; the store itself still opens."""
    times = (desk / "corpus.txt").stat()
    os.utime(desk / "corpus.txt", ns=(times.st_atime_ns, times.st_mtime_ns + 10**9))
    with pytest.raises(MismatchError, match=r"corpus\.milldam and .*corpus\.npy: not made"):
        milldam.open(desk / "corpus.txt")
    assert milldam.open(desk / "corpus.milldam").tokens
