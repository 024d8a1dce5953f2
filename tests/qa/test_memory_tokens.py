"""Memory tokens: new in the tokenizer, and really in every window, with lengths and spans to match."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from tests.kit.qa_recipe import KINDS, examples, tokenizer_of, windower_of

from milldam.errors import InputError
from milldam.qa.examples import Answer, Example
from milldam.qa.template import add_memory_tokens

PAD = "</s>"
LONG = Example("q", "what city", " ".join(["the city of paris was"] * 16), (Answer("paris", 12),))


def with_memory_tokens(kind: str, count: int, **rules: Any) -> tuple[Any, Any]:
    windower: Any = windower_of(tokenizer_of(kind), PAD, memory=count, **rules)
    return windower, windower.memory


@pytest.mark.parametrize("kind", KINDS)
def test_new_ids_follow_the_old_ones(kind: str) -> None:
    """Read tokens first, then write tokens, each once; what was there keeps its id."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer.get_vocab()
    memory = add_memory_tokens(tokenizer, 4)
    assert memory.read + memory.write == tuple(range(len(before), len(before) + 8))
    assert len(memory) == 4
    after = tokenizer.get_vocab()
    assert {name: after[name] for name in before} == before
    assert tokenizer.token_to_id("[MEM_READ_0]") == memory.read[0]
    assert tokenizer.token_to_id("[MEM_WRITE_3]") == memory.write[3]


def test_a_vocabulary_with_gaps_is_refused() -> None:
    """HF tokenizers would give a memory token the id of another token, without a word."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    with pytest.raises(InputError, match="gaps"):
        add_memory_tokens(tokenizer, 2)


@pytest.mark.parametrize("kind", KINDS)
@given(example=examples())
def test_windows_with_memory_are_those_of_shorter_ones_without(kind: str, example: Example) -> None:
    """Windows of 40 with 2 * 3 memory tokens hold the texts, answers and offsets of windows of 34, moved."""
    plain = windower_of(tokenizer_of(kind), PAD, max_seq_length=34, overlap=4)([example])
    windower, memory = with_memory_tokens(kind, 3, max_seq_length=40, overlap=4)
    prepared = windower([example])
    assert prepared.dropped == plain.dropped
    assert len(prepared.features) == len(plain.features)
    for row in range(len(plain.features)):
        kept = ~np.isin(prepared.features.input_ids[row], (*memory.read, *memory.write))
        assert np.array_equal(prepared.features.input_ids[row, kept], plain.features.input_ids[row])
        assert np.array_equal(prepared.features.token_type_ids[row, kept], plain.features.token_type_ids[row])
        assert np.array_equal(prepared.features.offsets[row, kept], plain.features.offsets[row])
        moved = np.flatnonzero(kept)
        for name in ("start_positions", "end_positions", "cls_index"):
            assert getattr(prepared.features, name)[row] == moved[getattr(plain.features, name)[row]]
        assert not (prepared.features.offsets[row, ~kept] >= 0).any()
