"""Makes the cutter work on texts of a few kilobytes as it does on gigabytes: for the tests of cutting and encoding."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
import tokenizers

from milldam.tokenizers import cutting
from milldam.tokenizers.document_encoder import DocumentEncoder, bare_form
from milldam.tokenizers.encoders import HUGGINGFACE, Encoder, make_encoder
from milldam.tokenizers.loading import SpecialTokens

NO_SPECIAL = SpecialTokens(None, None)


@contextmanager
def small_windows() -> Iterator[None]:
    """Cuts are looked for, and checked, within hundreds of bytes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"_REACH": 64, "_WINDOW": 256, "_RUN": 512, "_RUN_TAIL": 256, "MAX_RUN": 16384}.items():
            patch.setattr(cutting, name, size)
        yield


class TokenizerJson(str):
    """The text of a tokenizer.json that does not fill the report of a failed test."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<tokenizer.json of {len(self):,} bytes>"


@cache
def small_encoder(tokenizer_json: str, name: str = HUGGINGFACE) -> Encoder:
    """An encoder that takes a document of more than 300 bytes for a giant."""
    encoder = make_encoder(name, tokenizer_json, plain_specials=True, threads=1)
    encoder.document_bytes, encoder.piece_bytes, encoder.batch_bytes = 300, 200, 600
    return encoder


def document_encoder(
    encoder: Encoder, tokenizer_json: str, special: SpecialTokens = NO_SPECIAL, *, bare: str = HUGGINGFACE
) -> DocumentEncoder:
    """An encoder as a worker makes it; the bare form runs on the encoder named."""
    return DocumentEncoder(
        encoder, special, "uint32", bare=lambda: bare_form(tokenizer_json, lambda text: small_encoder(text, bare))
    )


@cache
def reference(tokenizer_json: str) -> Any:
    """HF tokenizers itself, to which the text of special tokens is text."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_whole(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def texts_of(*texts: str) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def encode_in_parts(encoder: DocumentEncoder, parts: Sequence[str]) -> list[int]:
    """The ids of one document that comes in open batches."""
    found: list[int] = []
    for number, part in enumerate(parts, start=1):
        for tokens in encoder.encode(texts_of(part), open=number < len(parts)):
            assert len(tokens.lengths) <= 1
            found += tokens.flat.tolist()
    return found


def encode_documents(encoder: DocumentEncoder, batches: Sequence[Sequence[str]]) -> list[list[int]]:
    """The ids of each document of some batches, joined where a giant comes in parts."""
    documents: list[list[int]] = []
    inside = False
    for batch in batches:
        for tokens in encoder.encode(texts_of(*batch)):
            start = 0
            for length in tokens.lengths.tolist():
                ids = tokens.flat[start : start + length].tolist()
                documents[-1:] = [documents[-1] + ids] if inside else [*documents[-1:], ids]
                inside, start = False, start + length
            inside = tokens.open
    return documents


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    """The text in parts."""
    edges = [0, *sorted({place % max(1, len(text)) for place in places}), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(edges)]
