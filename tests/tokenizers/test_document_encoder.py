"""Batches of text become batches of tokens: order kept, special tokens in place, nothing lost but what is empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_pieces import (
    encode_documents,
    encode_in_parts,
    encode_whole,
    reference,
    small_encoder,
    small_windows,
    texts_of,
)

from milldam.tokenizers.document_encoder import DocumentEncoder, add_special_tokens
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE
from milldam.tokenizers.loading import SpecialTokens

GIANT = "a giant of many words that comes in pieces " * 40
SMALL = ("one", "", "two words", "é🙂", "\n", "three")


@pytest.fixture(autouse=True)
def _small_windows() -> Iterator[None]:
    with small_windows():
        yield


@pytest.fixture(params=[GIGATOKEN, HUGGINGFACE])
def encoder(request: pytest.FixtureRequest, demo_tokenizer: Path) -> DocumentEncoder:
    """The demo tokenizer with small pieces; the end of a document is token 0."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    return DocumentEncoder(small_encoder(tokenizer_json, request.param), SpecialTokens(None, 0), "uint32")


def expected(demo_tokenizer: Path, *texts: str) -> list[list[int]]:
    tokenizer = reference(demo_tokenizer.read_text(encoding="utf-8"))
    return [[*ids, 0] for text in texts if (ids := encode_whole(tokenizer, text))]


# ---- batches ----


@settings(max_examples=50)
@given(batches=st.lists(st.lists(st.sampled_from([*SMALL, GIANT, "x" * 290, "y" * 301]), max_size=6), max_size=5))
def test_documents_keep_their_order_among_giants(
    encoder: DocumentEncoder, demo_tokenizer: Path, batches: list[list[str]]
) -> None:
    """Small, giant and empty ones in any mix: one list of tokens a document, in the order given."""
    encoder.dropped.clear()
    texts = [text for batch in batches for text in batch]
    assert encode_documents(encoder, batches) == expected(demo_tokenizer, *texts)
    assert encoder.dropped["empty"] == texts.count("")


def test_a_document_in_parts_between_batches_is_one_document(encoder: DocumentEncoder, demo_tokenizer: Path) -> None:
    """Its parts come alone, the last one too; what comes before and after is not touched."""
    before = list(encoder.encode(texts_of("first", "second")))
    parts = [one for part in ("some ", "words ", "in parts ") for one in encoder.encode(texts_of(part), open=True)]
    parts += encoder.encode(texts_of("and the end"))
    after = list(encoder.encode(texts_of("another", GIANT)))
    found = [token for tokens in [*before, *parts, *after] for token in tokens.flat.tolist()]
    texts = ("first", "second", "some words in parts and the end", "another", GIANT)
    assert found == [token for document in expected(demo_tokenizer, *texts) for token in document]
    assert [tokens.open for tokens in parts] == [True] * (len(parts) - 1) + [False]


# ---- empty documents ----


def test_documents_without_tokens_are_counted_and_left_out(encoder: DocumentEncoder, demo_tokenizer: Path) -> None:
    """In a batch, as a document in parts, and as nothing at all."""
    assert encode_documents(encoder, [["", "a", ""]]) == expected(demo_tokenizer, "a")
    assert encode_in_parts(encoder, ["", "", ""]) == []
    assert encoder.dropped == {"empty": 3}


# ---- taking back ----


@pytest.mark.parametrize("parts", [1, 5, 40])
def test_cancel_forgets_the_open_document(encoder: DocumentEncoder, demo_tokenizer: Path, parts: int) -> None:
    """Whether nothing or much of it has been handed on: what follows is as if it had not been."""
    for _ in range(parts):
        list(encoder.encode(texts_of("lost words in parts " * 10), open=True))
    encoder.cancel()
    assert encode_documents(encoder, [["next", GIANT]]) == expected(demo_tokenizer, "next", GIANT)


# ---- special tokens ----


def naive_special(documents: list[list[int]], bos: int | None, eos: int | None) -> list[list[int]]:
    return [
        [
            *([bos] if bos is not None and ids[0] != bos else []),
            *ids,
            *([eos] if eos is not None and ids[-1] != eos else []),
        ]
        for ids in documents
    ]


token = st.integers(0, 4)
documents_of_ids = st.lists(st.lists(token, min_size=1, max_size=6), max_size=12)


@given(documents=documents_of_ids, bos=st.none() | token, eos=st.none() | token)
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_special_tokens_are_put_around_documents_and_never_doubled(
    documents: list[list[int]], bos: int | None, eos: int | None, dtype: str
) -> None:
    """As a plain loop would do it."""
    flat = np.array([number for ids in documents for number in ids], np.uint32)
    lengths = np.array([len(ids) for ids in documents], np.int64)
    out, out_lengths = add_special_tokens(flat, lengths, SpecialTokens(bos, eos), np.dtype(dtype))
    wanted = naive_special(documents, bos, eos)
    assert out.tolist() == [number for ids in wanted for number in ids]
    assert out_lengths.tolist() == [len(ids) for ids in wanted]
    assert out.dtype == dtype


@pytest.mark.parametrize("text", ["{0}a", "a{0}", "{0}a{0}"])
def test_special_tokens_that_a_giant_has_already_are_not_doubled(demo_tokenizer: Path, text: str) -> None:
    """As in a small document: here the token of a letter is also the special one."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    tokenizer = reference(tokenizer_json)
    sign = tokenizer.token_to_id("#")
    encoder = DocumentEncoder(small_encoder(tokenizer_json), SpecialTokens(sign, sign), "uint32")
    small, giant = text.replace("a", " b ").format("#"), text.replace("a", f" {GIANT}").format("#")
    plain = [encode_whole(tokenizer, one) for one in (small, giant)]
    assert encode_documents(encoder, [[small, giant]]) == naive_special(plain, sign, sign)
