"""What tokens stand for: answers keep the marks that the tokenizer drops, and gain nothing else."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_recipe import KINDS, examples, tokenizer_of, windower_of

from milldam import qa
from milldam.qa.examples import Answer, Example

PAD = "</s>"


class Shelf:
    """What is needed of a feature store, over the windows of some examples."""

    def __init__(self, tokenizer: Any, given: list[Example], **rules: Any) -> None:
        self._given, self.features = given, windower_of(tokenizer, PAD, **rules)(given).features
        self.form = SimpleNamespace(max_seq_length=self.features.input_ids.shape[1])

    def __len__(self) -> int:
        return len(self.features)

    def example(self, number: int) -> dict[str, Any]:
        return {"id": self._given[number].id, "context": self._given[number].context}

    def rows(self, numbers: Any, columns: Any) -> dict[str, np.ndarray]:
        return {name: getattr(self.features, name)[numbers] for name in columns}


def perfect(positions: np.ndarray, has_answer: np.ndarray, length: int) -> np.ndarray:
    """Logits of a model that knows: the stored position of each window; those that hold the answer are surest."""
    logits = np.zeros((len(positions), length), np.float32)
    logits[np.arange(len(positions)), positions] = np.where(has_answer, 2, 1)
    return logits


def answered(store: Any, columns: Any, length: int, **options: Any) -> dict[str, str]:
    has = columns["start_positions"] != columns["cls_index"]
    start, end = (perfect(columns[name], has, length) for name in ("start_positions", "end_positions"))
    return qa.answers(
        store, start, end, n_best=1, null_threshold=None, **{"max_answer_length": length, **options}
    ).texts()


def answer_from(kind: str, context: str, answer: str, **rules: Any) -> str:
    given = [Example("q", "what", context, (Answer(answer, context.index(answer)),))]
    shelf = Shelf(tokenizer_of(kind), given, **{"max_seq_length": 96, "overlap": 8, **rules})
    columns = shelf.rows(slice(None), ("start_positions", "end_positions", "cls_index"))
    return answered(shelf, columns, shelf.features.input_ids.shape[1])["q"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("a cafe\u0301 in paris", "cafe\u0301"),
        ("a cafe\u0301, in paris", "a cafe\u0301"),
        ("it was a cafe\u0301\u0301", "cafe\u0301\u0301"),
        ("the \u0939\u093f\u0928\u094d\u0926\u0940 city", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        ("he \u0645\u062f\u064b\u0651 the", "\u0645\u062f\u064b\u0651"),
        ("the paris\u00ad city", "paris\u00ad"),
        ("the paris\u200d city", "paris\u200d"),
        ("the paris\x07 city", "paris\x07"),
        ("in \u200dparis it", "\u200dparis"),
        ("in \u0301paris it", "\u0301paris"),
        ("\u200dparis it", "\u200dparis"),
        ("in \ufffdparis\ufffd it", "\ufffdparis\ufffd"),
    ],
)
def test_answers_keep_what_is_dropped_beside_their_tokens(kind: str, context: str, answer: str) -> None:
    """Accents, vowel signs, joiners, soft hyphens, control characters: at the end of a word, and at its begin."""
    assert answer_from(kind, context, answer) == answer


@pytest.mark.parametrize("kind", ["bert", "xlnet"])
@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("cafe\u0301 \u200d paris", "paris"),
        ("the cafe\u0301paris", "paris"),
        ("a cafe\u0301 was", "was"),
        ("\ufeffparis it", "paris"),
        ("(paris)\u0301 it", "paris"),
    ],
)
def test_answers_do_not_gain_what_is_of_others(kind: str, context: str, answer: str) -> None:
    """What stands alone, what belongs to the word or mark before, and the byte order mark of a file."""
    assert answer_from(kind, context, answer) == answer


@given(example=examples(answered=True), kind=st.sampled_from(KINDS), overlap=st.integers(0, 6))
def test_tokens_gain_dropped_characters_alone(example: Example, kind: str, overlap: int) -> None:
    """Neither white space nor a character of another token, and the same in every window that has the token."""
    shelf = Shelf(tokenizer_of(kind), [example, example], max_seq_length=26, overlap=overlap)
    plain, wide = shelf.features.offsets, qa.stretches(shelf, np.arange(len(shelf)))  # type: ignore[arg-type]
    assert ((plain == -1) == (wide == -1)).all()
    tokens = [tuple(one) for one in plain.reshape(-1, 2).tolist()]
    covered = {at for begin, end in tokens for at in range(begin, end)}
    found: dict[tuple[int, int], tuple[int, int]] = {}
    owners: dict[int, set[int]] = {}
    for (begin, end), (first, stop) in zip(tokens, wide.reshape(-1, 2).tolist(), strict=True):
        assert found.setdefault((begin, end), (first, stop)) == (first, stop)
        if begin == end:
            assert first == stop
            continue
        assert first <= begin < end <= stop
        for at in itertools.chain(range(first, begin), range(end, stop)):
            assert at not in covered
            assert not example.context[at].isspace()
            owners.setdefault(at, set()).add(begin if at < begin else end - 1)
    assert all(len(letters) == 1 for letters in owners.values()), "a dropped character is of one letter"


"""Exact match with perfect logits: answers of any length, and of at most 30 tokens. docs/qa.md says what is missing."""
