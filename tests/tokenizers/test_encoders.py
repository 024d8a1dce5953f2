"""Both encoders give the ids of HF tokenizers, from Arrow strings to flat ids; and which one is used is proved."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import ConfigError
from milldam.tokenizers import encoders
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, Encoder, encode_each
from milldam.tokenizers.loading import Tokenizer, read_tokenizer
from milldam.tokenizers.proof import HARD_STRINGS, ProvedTokenizer, prove

BOTH = (GIGATOKEN, HUGGINGFACE)
TEXTS = st.lists(
    st.one_of(st.text(max_size=40), st.sampled_from(["", " ", "the mill's wheel", "<|endoftext|>"])), max_size=8
)


@pytest.fixture(scope="module")
def demo_json(demo_tokenizer: Path) -> str:
    return demo_tokenizer.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def both(demo_json: str) -> dict[str, Any]:
    """The demo tokenizer in both encoders; special tokens' text is text."""
    return {name: Encoder(name, demo_json, plain_specials=True) for name in BOTH}


def changed(tokenizer_json: str, change: Callable[[dict[str, Any]], None]) -> str:
    """A tokenizer.json with something changed in it."""
    tokenizer = copy.deepcopy(json.loads(tokenizer_json))
    change(tokenizer)
    return json.dumps(tokenizer, ensure_ascii=False)


def whole(tokenizer_json: str, text: str, *, plain: bool = True) -> list[int]:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = plain
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


# ---- encoders ----


@pytest.mark.parametrize("name", BOTH)
@given(texts=TEXTS, start=st.integers(0, 3))
def test_flat_ids_and_offsets_are_those_of_each_text(
    both: dict[str, Any], demo_json: str, name: str, texts: list[str], start: int
) -> None:
    """Of a slice of an array too, whose buffers hold more than its own."""
    tokenizer = tokenizers.Tokenizer.from_str(demo_json)
    tokenizer.encode_special_tokens = True
    flat, offsets = both[name].encode(pa.array(texts, pa.large_string())[start:])
    assert len(offsets) == len(texts[start:]) + 1
    assert flat.dtype == np.uint32
    found = [flat[a:b].tolist() for a, b in itertools.pairwise(offsets)]
    assert found == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts[start:]]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("text", ["<|endoftext|>", "a<|endoftext|>b", " <|endoftext|><|endoftext|> "])
def test_the_text_of_a_special_token_is_text_or_that_token_as_asked(
    demo_json: str, name: str, plain: bool, text: str
) -> None:
    """By both encoders alike."""
    encoder = Encoder(name, demo_json, plain_specials=plain)
    ids = encode_each(encoder, [text])[0].tolist()
    assert ids == whole(demo_json, text, plain=plain)
    assert (0 in ids) is not plain


@pytest.mark.parametrize("name", BOTH)
def test_many_threads_give_what_one_gives(demo_json: str, name: str) -> None:
    """In the same order, by single calls and by whole batches, whose caches are dropped in between."""
    texts = [f"text number {n} " * (n % 50) for n in range(300)]
    one, many = (Encoder(name, demo_json, plain_specials=True, threads=threads) for threads in (1, 4))
    expected = [ids.tolist() for ids in encode_each(one, texts)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "_FEW_DOCUMENTS", 0)
        for _ in range(2):
            assert [ids.tolist() for ids in encode_each(many, texts)] == expected
            many.renew()


@pytest.mark.parametrize(
    ("grown", "renewed"), [([10, 10], 0), ([10, 25], 0), ([10, 99, 20], 0), ([10, 99, 95, 30], 1), ([90, 99], 0)]
)
def test_an_encoder_is_renewed_when_the_process_has_grown(
    demo_json: str, monkeypatch: pytest.MonkeyPatch, grown: list[int], renewed: int
) -> None:
    """Not while there is room, nor when giving back what allocators keep is enough, nor for what was there before."""
    seen, renewals = iter([*grown, grown[-1]]), []
    monkeypatch.setattr(encoders, "usage", lambda: SimpleNamespace(anonymous=next(seen) << 20))
    encoder = Encoder(HUGGINGFACE, demo_json, plain_specials=True)
    renew = encoder.renew
    monkeypatch.setattr(encoder, "renew", lambda: renewals.append(renew()))
    encoder.room = lambda: 50 << 20
    for _ in range(2):
        assert encode_each(encoder, ["a text"])[0].tolist() == whole(demo_json, "a text")
    assert len(renewals) == renewed


# ---- the proof ----


def choose(wanted: str, tokenizer_json: str, *samples: str, plain: bool = True) -> ProvedTokenizer:
    text = Tokenizer("a tokenizer", tokenizer_json, {})
    return prove(text, encoder=wanted, bos="none", eos="none", plain_specials=plain, samples=samples)


@pytest.mark.parametrize("plain", [True, False])
def test_gigatoken_is_used_where_it_is_the_same(demo_json: str, plain: bool) -> None:
    """And the note says on how many texts that was seen."""
    choice = choose("auto", demo_json, "one sample", plain=plain)
    assert (choice.encoder, choice.warning) == (GIGATOKEN, None)
    counted = re.search(r"same ids as HF tokenizers on (\d+) texts", choice.note)
    assert counted is not None
    assert int(counted[1]) > len(HARD_STRINGS)
    assert choose(HUGGINGFACE, demo_json, plain=plain).encoder == HUGGINGFACE


def test_a_tokenizer_on_which_gigatoken_differs_falls_back_with_a_warning(demo_json: str) -> None:
    """Byte-level BPE that does not split words: the warning shows a text and the ids of both."""
    tokenizer_json = changed(demo_json, lambda tokenizer: tokenizer["pre_tokenizer"].update(use_regex=False))
    choice = choose("auto", tokenizer_json)
    assert choice.encoder == HUGGINGFACE
    assert choice.warning is not None
    for words in ("text: '", "at token ", "gigatoken [", "HF tokenizers ["):
        assert words in choice.warning
    assert choose(GIGATOKEN, tokenizer_json).encoder == GIGATOKEN


@pytest.mark.parametrize("kind", ["unigram_json", "wordpiece_json"])
def test_a_kind_that_gigatoken_does_not_know_falls_back_quietly(request: pytest.FixtureRequest, kind: str) -> None:
    """With a note, but no warning: nothing is wrong; asked for by name, it is a setting that is wrong."""
    choice = choose("auto", request.getfixturevalue(kind), "one sample")
    assert (choice.encoder, choice.warning) == (HUGGINGFACE, None)
    assert "does not know this kind of tokenizer" in choice.note
    with pytest.raises(ConfigError, match=r"encoder: gigatoken can't .*Use encoder='auto'"):
        choose(GIGATOKEN, request.getfixturevalue(kind))


@pytest.mark.parametrize(
    "added",
    [{"single_word": True}, {"id": 5000}, {"single_word": True, "special": True}],
    ids=["word", "id", "special"],
)
def test_added_tokens_are_part_of_the_proof(demo_json: str, added: dict[str, Any]) -> None:
    """The choice is the same whether or not the first documents hold such a token."""
    plain = {"id": 4096, "content": "<x>", "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    token = {**plain, "single_word": False, **added}
    tokenizer_json = changed(demo_json, lambda tokenizer: tokenizer["added_tokens"].append(token))
    told = choose("auto", tokenizer_json, "a <x> b<x><x>c <x>\n<x>", plain=False)
    untold = choose("auto", tokenizer_json, "no such token here", plain=False)
    assert told.encoder == untold.encoder


# ---- what was found out before ----

ASKED: dict[str, Any] = {
    "encoder": "auto", "bos": "none", "eos": "auto", "plain_specials": False, "samples": ["some text"]
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of an empty cache."""
    monkeypatch.setenv("MILLDAM_CACHE", str(tmp_path))
    return tmp_path / "tokenizers"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *(({}, one) for one in ({}, {"eos": "a"})),
        *((one, {}) for one in ({"bos": "<|endoftext|>"}, {"eos": "none"}, {"plain_specials": True}, {"samples": []})),
    ],
)
def test_what_was_proved_is_looked_up_where_nothing_changed(
    demo_tokenizer: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], named: dict[str, str]
) -> None:
    """And found out anew for other settings, samples of the input, or names beside the tokenizer."""
    text = read_tokenizer(str(demo_tokenizer))
    proved = prove(text, **ASKED)
    loaded = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda self: loaded.append(self) or load(self))
    assert prove(text, **ASKED) == proved
    assert not loaded
    prove(dataclasses.replace(text, named=text.named | named), **ASKED | change)
    assert len(loaded) == (1 if change or named else 0)


@pytest.mark.parametrize("damage", [b"", b"{}", b"not ours at all", None])
def test_what_is_damaged_is_made_anew(demo_tokenizer: Path, cache: Path, damage: bytes | None) -> None:
    """A file that was cut, or that somebody else put there."""
    text = read_tokenizer(str(demo_tokenizer))
    proved = prove(text, **ASKED)
    (file,) = set(cache.iterdir()) - set(cache.glob("characters-*"))
    content = file.read_bytes()
    file.write_bytes(content.replace(b"0", b"1") if damage is None else damage)
    assert prove(text, **ASKED) == proved
    assert file.read_bytes() == content


def test_only_what_was_proved_is_kept(demo_tokenizer: Path, cache: Path) -> None:
    """Neither what gigatoken refuses, nor what HF tokenizers alone is asked for, nor a token that is not there."""
    text = read_tokenizer(str(demo_tokenizer))
    prove(text, **ASKED | {"encoder": "huggingface"})
    refused = changed(text.json, lambda tokenizer: tokenizer.update(pre_tokenizer={"type": "Whitespace"}))
    assert prove(dataclasses.replace(text, json=refused), **ASKED).encoder == "huggingface"
    with pytest.raises(ConfigError):
        prove(text, **ASKED | {"bos": "no such token"})
    assert not cache.exists() or list(cache.iterdir()) == []
