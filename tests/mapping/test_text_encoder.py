"""`TextEncoder`: the ids of HF tokenizers for texts of any size, in bounded memory, in any process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from milldam.errors import ConfigError
from milldam.mapping.identity import identify
from milldam.mapping.text_encoder import TextEncoder

FOLDER = Path(__file__).parents[3] / "shared/data/tokenizers"
GPT2 = FOLDER / "gpt2/tokenizer.json"
pytestmark = pytest.mark.skipif(not GPT2.exists(), reason="no shared data beside the project")


@pytest.fixture(scope="module")
def encode() -> TextEncoder:
    return TextEncoder(GPT2)


@pytest.fixture(scope="module")
def huggingface() -> Any:
    return tokenizers.Tokenizer.from_file(str(GPT2))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text()))
def test_ids_are_those_of_huggingface(encode: TextEncoder, huggingface: Any, texts: list[str]) -> None:
    """One array a text, narrow, also for texts that give no id."""
    found = encode(texts)
    assert [ids.tolist() for ids in found] == [huggingface.encode(text, add_special_tokens=False).ids for text in texts]
    assert all(ids.dtype == np.uint16 for ids in found)


def test_the_text_of_a_special_token(encode: TextEncoder) -> None:
    """Is that token, or plain text."""
    assert encode("<|endoftext|>").tolist() == [50256]
    plain = TextEncoder(GPT2, special_text="plain", encoder="huggingface")
    assert len(plain("<|endoftext|>")) > 1
    with pytest.raises(ConfigError, match="special_text"):
        TextEncoder(GPT2, special_text="none")


def test_it_pickles_and_is_identified(encode: TextEncoder) -> None:
    """Used or not, here or in another process; another setting is another identity."""
    again = pickle.loads(pickle.dumps(encode))
    assert again("some text").tolist() == encode("some text").tolist()
    fresh, other = (TextEncoder(GPT2, eos=eos, encoder="huggingface") for eos in ("none", "auto"))
    hashes = [identify(len, {"encode": one}) for one in (fresh, encode, again, other)]
    assert not hashes[0].unhashable and [one == hashes[0] for one in hashes] == [True, True, True, False]
