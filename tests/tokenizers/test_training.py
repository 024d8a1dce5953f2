"""Training a tokenizer: every text comes back, the same texts give the same bytes, and memory has a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.errors import ConfigError, InputError, ResourceError
from milldam.tokenizers.loading import choose_special_tokens, load_tokenizer
from milldam.tokenizers.training import (
    TrainedTokenizer,
    train_tokenizer,
    training_bytes,
)

SAMPLE = [f"the cat {verb} the mat, and the dog {verb} the cat.\n" for verb in ("sat on", "saw", "left", "knew")] * 9


def batches(texts: list[str], size: int = 1000) -> Iterator[pa.LargeStringArray]:
    for start in range(0, len(texts), size):
        yield pa.array(texts[start : start + size], pa.large_string())


def train(out: Path, texts: list[str] = SAMPLE, vocab_size: int = 300) -> TrainedTokenizer:
    return train_tokenizer(batches(texts), out=out, vocab_size=vocab_size)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tokenizers.Tokenizer:
    folder = tmp_path_factory.mktemp("trained")
    train(folder)
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_round_trips(trained: tokenizers.Tokenizer, text: str) -> None:
    """Scripts that the sample never had, control characters, anything that is text."""
    ids = trained.encode(text).ids
    assert trained.decode(ids, skip_special_tokens=False) == text


def test_a_tokenizer_that_changes_text_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed round trip is an error that shows the text, and leaves no file."""
    monkeypatch.setattr("tokenizers.decoders.ByteLevel", tokenizers.decoders.WordPiece)
    with pytest.raises(InputError, match="does not give this text back as it was: 'the cat"):
        train(tmp_path / "t")
    assert not (tmp_path / "t").exists()


# ---- what is saved ----


def test_the_folder_is_a_tokenizer_with_its_end_of_document(tmp_path: Path) -> None:
    """The first special token, by any name, is what milldam puts after documents."""
    special = ("<fin>", "<bos>", "<|pad|>", "<mine>")
    told = train_tokenizer(batches(SAMPLE), out=tmp_path / "a" / "t", vocab_size=300, special_tokens=special)
    loaded = load_tokenizer(str(tmp_path / "a" / "t"))
    assert loaded.vocab_size == told.vocab_size <= 300
    assert [loaded.huggingface.token_to_id(token) for token in special] == [0, 1, 2, 3]
    chosen = choose_special_tokens(loaded.huggingface, loaded.named, bos="auto", eos="auto")
    assert (chosen.eos_token, chosen.bos_token) == ("<fin>", "<bos>")
    config = json.loads((told.path / "tokenizer_config.json").read_text())
    assert config["additional_special_tokens"] == ["<bos>", "<|pad|>", "<mine>"]
    assert sorted(path.name for path in told.path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


# ---- the same every time ----


def test_the_same_texts_give_the_same_bytes(tmp_path: Path, demo_texts: list[str]) -> None:
    """In another process, on another number of cores, in other batches, in another order."""
    texts = demo_texts[:40]
    first = train(tmp_path / "0", texts, 500)
    program = """
import json, sys
from pathlib import Path
import pyarrow as pa
from milldam.tokenizers.training import train_tokenizer
texts = json.load(sys.stdin)
batches = (pa.array(texts[k : k + 7], pa.large_string()) for k in range(0, len(texts), 7))
train_tokenizer(batches, out=Path(sys.argv[1]), vocab_size=500)
"""
    for number, (cores, order) in enumerate(((1, 1), (2, -1)), start=1):
        folder = tmp_path / str(number)
        environment = os.environ | {"RAYON_NUM_THREADS": str(cores)}
        command = [sys.executable, "-c", program, str(folder)]
        subprocess.run(command, input=json.dumps(texts[::order]).encode(), env=environment, check=True, timeout=120)
        assert (folder / "tokenizer.json").read_bytes() == (first.path / "tokenizer.json").read_bytes()


# ---- limits ----


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    """Too small a vocabulary, no or doubled special tokens, no text."""
    with pytest.raises(ConfigError, match="vocab_size: 256 is too few"):
        train(tmp_path / "t", vocab_size=256)
    for special in ((), ("a", "a"), ("",)):
        with pytest.raises(ConfigError, match="special_tokens"):
            train_tokenizer(batches(SAMPLE), out=tmp_path / "t", special_tokens=special)
    for texts in ([], [""]):
        with pytest.raises(InputError, match="no text"):
            train(tmp_path / "t", texts=texts)
    assert not (tmp_path / "t").exists()


def test_too_many_different_words_are_refused_while_reading(tmp_path: Path) -> None:
    """What would take more than the limit is found before the trainer takes it, with what to change."""
    read = 0

    def texts() -> Iterator[pa.LargeStringArray]:
        nonlocal read
        for start in range(10**9):
            read += 1
            yield pa.array([" ".join(f"{k:o}x{k:x}" for k in range(start * 1000, start * 1000 + 1000))])

    with pytest.raises(ResourceError, match=r"different words.\n.*tokenizer.train.sample"):
        train_tokenizer(texts(), out=tmp_path / "t", memory_bytes=training_bytes(0, 0) + 20_000_000)
    assert 5 < read < 100
