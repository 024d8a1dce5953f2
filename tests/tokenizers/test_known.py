"""What is known of a tokenizer is looked up where nothing changed, and found out anew where anything did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER

from milldam.errors import ConfigError
from milldam.tokenizers.loading import NamedTokens, read_tokenizer
from milldam.tokenizers.proof import Question, find_out, settle_encoder


@pytest.fixture
def question() -> Question:
    return Question(read_tokenizer(str(TOKENIZER)), "auto", "none", "auto", plain_specials=False, samples=["some text"])


def test_what_was_proved_is_known(tmp_path: Path, question: Question) -> None:
    """With the same answer for every way to ask for an encoder."""
    found = find_out(question, tmp_path)
    choice = settle_encoder(question, found, tmp_path)
    known = find_out(question, tmp_path)
    assert found.expected is not None and known.expected is None
    assert (known.json, known.special, known.vocab_size) == (found.json, found.special, found.vocab_size)
    assert settle_encoder(question, known, tmp_path) == choice
    assert choice.encoder == "gigatoken" and "same ids" in choice.note
    for wanted in ("gigatoken", "huggingface"):
        asked = replace(question, encoder=wanted)
        assert settle_encoder(asked, find_out(asked, tmp_path), tmp_path).encoder == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"bos": "<|endoftext|>"},
        {"eos": "none"},
        {"plain_specials": True},
        {"samples": ["some other text"]},
        {"samples": []},
        {"text": {"json": TOKENIZER.read_text(encoding="utf-8") + "\n"}},
        {"text": {"named": NamedTokens(eos="a")}},
    ],
)
def test_whatever_changed_is_found_out_anew(tmp_path: Path, question: Question, change: dict[str, Any]) -> None:
    """Settings, samples of the input, the tokenizer and the names beside it."""
    settle_encoder(question, find_out(question, tmp_path), tmp_path)
    text = replace(question.text, **change["text"]) if "text" in change else question.text
    other = replace(question, **change | {"text": text})
    assert find_out(other, tmp_path).expected is not None


@pytest.mark.parametrize("damage", [b"", b"{}", b"not ours at all", None])
def test_what_is_damaged_is_made_anew(tmp_path: Path, question: Question, damage: bytes | None) -> None:
    """A file that was cut, or that somebody else put there."""
    settle_encoder(question, find_out(question, tmp_path), tmp_path)
    (file,) = set(tmp_path.iterdir()) - set(tmp_path.glob("characters-*"))
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"0", b"1") if damage is None else damage)
    found = find_out(question, tmp_path)
    assert found.expected is not None
    settle_encoder(question, found, tmp_path)
    assert file.read_bytes() == whole


def test_only_what_was_proved_is_kept(tmp_path: Path, question: Question) -> None:
    """Neither what gigatoken refuses, nor what HF tokenizers alone is asked for, nor a token that is not there."""
    asked = replace(question, encoder="huggingface")
    settle_encoder(asked, find_out(asked, tmp_path), tmp_path)
    tokenizer = json.loads(question.text.json)
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}
    other = replace(question, text=replace(question.text, json=json.dumps(tokenizer)))
    assert settle_encoder(other, find_out(other, tmp_path), tmp_path).encoder == "huggingface"
    with pytest.raises(ConfigError):
        find_out(replace(question, bos="no such token"), tmp_path)
    assert list(tmp_path.iterdir()) == []
