"""Both encoders give the ids of HF tokenizers, from Arrow strings to flat ids; and which one is used is proved."""

from __future__ import annotations

import copy
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
from milldam.files import user_cache
from milldam.tokenizers import encoders, proof
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, Encoder, encode_each
from milldam.tokenizers.proof import HARD_STRINGS, Choice, choose_encoder, expected_ids

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
    """In the same order."""
    texts = [f"text number {n} " * (n % 50) for n in range(300)]
    one, many = (Encoder(name, demo_json, plain_specials=True, threads=threads) for threads in (1, 4))
    assert [ids.tolist() for ids in encode_each(one, texts)] == [ids.tolist() for ids in encode_each(many, texts)]


@pytest.mark.parametrize("name", BOTH)
def test_a_renewed_encoder_is_the_same_encoder(demo_json: str, name: str) -> None:
    """Only its caches are gone."""
    encoder = Encoder(name, demo_json, plain_specials=True)
    before = encode_each(encoder, HARD_STRINGS)
    encoder.renew()
    assert all(map(np.array_equal, before, encode_each(encoder, HARD_STRINGS)))


@pytest.mark.parametrize(
    ("grown", "renewed"), [([10, 10], 0), ([10, 25], 0), ([10, 99, 20], 0), ([10, 99, 95, 30], 1), ([90, 99], 0)]
)
def test_a_frugal_encoder_is_renewed_when_the_process_has_grown(
    both: dict[str, Any], demo_json: str, monkeypatch: pytest.MonkeyPatch, grown: list[int], renewed: int
) -> None:
    """Not while there is room, nor when giving back what allocators keep is enough, nor for what was there before."""
    seen = iter(grown)
    monkeypatch.setattr(encoders, "usage", lambda: SimpleNamespace(anonymous=next(seen) << 20))
    monkeypatch.setattr(encoders, "release", lambda: None)
    encoder = Encoder(HUGGINGFACE, demo_json, plain_specials=True)
    encoder.stay_within(lambda: 50 << 20)
    assert encode_each(encoder, ["a text"])[0].tolist() == both[HUGGINGFACE].encode_text(b"a text").tolist()
    assert encoder.renewals == renewed


# ---- the proof ----


def choose(wanted: str, tokenizer_json: str, *samples: str, plain: bool = True, folder: Path | None = None) -> Choice:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    expected = expected_ids(tokenizer, samples, plain_specials=plain)
    folder = folder or user_cache() / "tokenizers"
    return choose_encoder(wanted, tokenizer_json, expected, plain_specials=plain, folder=folder)


@pytest.mark.parametrize("plain", [True, False])
def test_gigatoken_is_used_where_it_is_the_same(demo_json: str, plain: bool) -> None:
    """And the note says on how many texts that was seen."""
    choice = choose("auto", demo_json, "one sample", plain=plain)
    assert (choice.encoder, choice.warning) == (GIGATOKEN, None)
    counted = re.search(r"same ids as HF tokenizers on (\d+) texts", choice.note)
    assert counted is not None
    assert int(counted[1]) > len(HARD_STRINGS)


def test_a_tokenizer_on_which_gigatoken_differs_falls_back_with_a_warning(demo_json: str) -> None:
    """Byte-level BPE that does not split words: the warning shows a text and the ids of both."""
    tokenizer_json = changed(demo_json, lambda tokenizer: tokenizer["pre_tokenizer"].update(use_regex=False))
    choice = choose("auto", tokenizer_json)
    assert choice.encoder == HUGGINGFACE
    assert choice.warning is not None
    for words in ("text: '", "at token ", "gigatoken [", "HF tokenizers ["):
        assert words in choice.warning


class Differing:
    """An encoder that is wrong about one text."""

    def __init__(self, inner: Any, about: str, ids: list[int]) -> None:
        self._inner, self._about, self._ids = inner, about, ids

    def encode(self, texts: pa.LargeStringArray) -> tuple[Any, Any]:
        each = [
            self._ids if text == self._about else self._inner.encode_text(text.encode()) for text in texts.to_pylist()
        ]
        flat = np.concatenate([np.array(ids, np.uint32) for ids in each])
        return flat, np.concatenate(([0], np.cumsum([len(ids) for ids in each])))


@pytest.mark.parametrize("wrong", [[1, 2, 3], [], "longer"])
def test_one_wrong_sample_of_the_input_is_enough_to_fall_back(
    both: dict[str, Any], demo_json: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    """Other ids, none at all, or one more at the end: the warning shows that text, and both ids from there on."""
    text = "the text of the input on which they differ"
    right = whole(demo_json, text)
    ids = [*right, 77] if wrong == "longer" else wrong
    monkeypatch.setattr(proof, "Encoder", lambda *_, **__: Differing(both[GIGATOKEN], text, ids))
    choice = choose("auto", demo_json, "fine", text, "fine too", folder=tmp_path)
    at = len(right) if wrong == "longer" else 0
    assert choice.encoder == HUGGINGFACE
    assert choice.warning is not None
    assert repr(text) in choice.warning
    assert f"at token {at}: gigatoken {ids[at : at + 6]}, HF tokenizers {right[at : at + 6]}" in choice.warning


@pytest.mark.parametrize("kind", ["unigram_json", "wordpiece_json"])
def test_a_kind_that_gigatoken_does_not_know_falls_back_quietly(request: pytest.FixtureRequest, kind: str) -> None:
    """With a note, but no warning: nothing is wrong."""
    choice = choose("auto", request.getfixturevalue(kind), "one sample")
    assert (choice.encoder, choice.warning) == (HUGGINGFACE, None)
    assert "does not know this kind of tokenizer" in choice.note


@pytest.mark.parametrize("kind", ["unigram_json", "wordpiece_json"])
def test_gigatoken_by_name_for_a_kind_it_does_not_know_is_a_setting_that_is_wrong(
    request: pytest.FixtureRequest, kind: str
) -> None:
    """With what to say instead."""
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
