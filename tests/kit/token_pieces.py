"""Cuts texts of a few kilobytes as gigabytes are cut: for the tests of encoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers

from milldam.tokenizers import document_encoder
from milldam.tokenizers.document_encoder import DocumentEncoder
from milldam.tokenizers.encoders import HUGGINGFACE, Encoder
from milldam.tokenizers.loading import SpecialTokens

NO_SPECIAL = SpecialTokens(None, None)


@contextmanager
def small_windows() -> Iterator[None]:
    """Cuts are looked for, and checked, within some hundred bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"CONTEXT": 120, "HEAD": 100, "NEAR": 100}.items():
            patch.setattr(document_encoder, name, size)
        yield


class TokenizerJson(str):
    """The text of a tokenizer.json that does not fill the report of a failed test."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<tokenizer.json of {len(self):,} bytes>"


@cache
def small_encoder(tokenizer_json: str, name: str = HUGGINGFACE) -> Encoder:
    """An encoder that cuts a document of more than 300 bytes."""
    encoder = Encoder(name, tokenizer_json, plain_specials=True)
    encoder.batch_bytes, encoder.piece_bytes, encoder.longest_run = 300, 200, 8000
    return encoder


@cache
def reference(tokenizer_json: str) -> Any:
    """HF tokenizers itself, to which the text of special tokens is text."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def encode_in_parts(encoder: DocumentEncoder, parts: Sequence[str]) -> list[int]:
    """The ids of one document that comes in pieces."""
    return [token for ids in encoder.encode_pieces(part.encode() for part in parts) for token in ids.tolist()]


def encode_documents(encoder: DocumentEncoder, texts: Sequence[str]) -> list[list[int]]:
    """The ids of each text of a batch."""
    flat, lengths = encoder.encode(pa.array(texts, pa.large_string()))
    assert len(lengths) == len(texts) and lengths.sum() == len(flat)
    return [part.tolist() for part in np.split(flat, np.cumsum(lengths))[:-1]]


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    """The text in parts."""
    edges = [0, *sorted({place % max(1, len(text)) for place in places}), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]
