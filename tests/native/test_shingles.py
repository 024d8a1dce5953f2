"""The kernels that read texts for near-dedup: the words, hashes, signatures and sketches of numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.native import oracles

from milldam.dedup import sketches
from milldam.dedup.minhash import MinHasher
from milldam.dedup.sketches import Sketcher
from milldam.rules import NearRules

ODD = "aZ09 _-\n\x00\x1a@[`{\x7f\x80\xa0\xbf\xc0éÉßİıſΩΣҐⱥȺẞK…“’℃Ω中文ไทยကខ្མཀ한あꭰᎠႠა𐐀𐐨😀𝒳\U0001ffff\U00020000\uffff"
WORDS = st.text(st.sampled_from(ODD) | st.characters(codec="utf-8"), max_size=30)
LONG = st.builds(str.__mul__, st.sampled_from(["a", "É", "Ⱥ", "ab cd ", "中", "x" * 63 + "é"]), st.integers(1, 150))
TEXTS = st.lists(st.lists(WORDS | LONG, max_size=6).map(" ".join), max_size=8)


def as_array(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(["not in the slice", *texts], pa.large_string())[1:]


@given(TEXTS, st.sampled_from([(1, 1), (32, 8), (3, 5), (64, 16)]))
def test_signatures_are_those_of_numpy(texts: list[str], shape: tuple[int, int]) -> None:
    bands, rows = shape
    hasher = MinHasher(NearRules(ngram=3, bands=bands, rows=rows))
    assert np.array_equal(hasher.signatures(as_array(texts)), oracles.signatures(as_array(texts), 3, bands * rows))


def test_signatures_of_texts_of_all_lengths_are_those_of_numpy() -> None:
    """From one filled bin to all of them: bins borrow in two ways."""
    random = np.random.default_rng(0)
    texts = as_array([" ".join(map(str, random.integers(0, 10**6, k).tolist())) for k in [*range(120), 300, 900, 3000]])
    rules = NearRules()
    expected = oracles.signatures(texts, rules.ngram, rules.bands * rules.rows)
    assert np.array_equal(MinHasher(rules).signatures(texts), expected)


def sketches_of(texts: pa.LargeStringArray, ngram: int) -> list[list[int]]:
    made = Sketcher(ngram).sketches(texts)
    return [part.tolist() for values, counts in made for part in np.split(values, np.cumsum(counts)[:-1])]


@given(TEXTS, st.sampled_from([1, 2, 5, 100]), st.sampled_from([3, 40, 1 << 14]))
def test_sketches_are_those_of_numpy(texts: list[str], ngram: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sketches, "MOST", most)
        found = sketches_of(as_array(texts), ngram)
    assert found == oracles.sketches(as_array(texts), ngram, most)


def test_every_character_is_read_as_by_numpy() -> None:
    """Alone, between letters, and beside itself."""
    characters = [chr(k) for k in range(0x20100) if not 0xD800 <= k < 0xE000]
    texts = as_array([f"{one} a{one}b {one}{one}" for one in characters])
    assert sketches_of(texts, 2) == oracles.sketches(texts, 2, 1 << 14)
