"""Logits of windows become answers: the best stretches of the context over all windows, and the score of none."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_recipe import Shelf

from milldam.errors import ConfigError, InputError
from milldam.qa.answering import Prediction, answers
from milldam.qa.examples import Example

LENGTH = 10


def shelf_of(*contexts: str) -> Shelf:
    """Windows of 10 tokens: CLS, a question of one token, SEP, up to 6 letters of the context, SEP, padding."""
    given = [Example(f"q{number}", "a", context) for number, context in enumerate(contexts)]
    return Shelf("bert", given, max_seq_length=LENGTH, overlap=2)


def made(shelf: Shelf, start: Any, end: Any, **options: Any) -> list[Prediction]:
    return list(answers(shelf, start, end, **options))  # type: ignore[arg-type]


def logits(shelf: Shelf, *places: tuple[int, int, float], rest: float = -5.0) -> np.ndarray:
    """Logits with some (window, place, value) set."""
    values = np.full((len(shelf), LENGTH), rest, np.float32)
    for window, place, value in places:
        values[window, place] = value
    return values


def by_hand(
    shelf: Shelf, start: np.ndarray, end: np.ndarray, n: int, longest: int
) -> list[list[tuple[float, int, int]]]:
    """The same, pair by pair: (score, begin, stop) of the n best stretches of each example."""
    found: list[dict[tuple[int, int], float]] = [{} for _ in range(shelf.examples)]
    features = shelf.features
    for window, example in enumerate(features.example.tolist()):
        first = int(features.offsets[window, 3, 0])
        inside = range(3, 3 + int(features.context_tokens[window]))
        starts = sorted(inside, key=lambda place: (-start[window, place], place))[:n]
        ends = sorted(inside, key=lambda place: (-end[window, place], place))[:n]
        pairs = [(one, two) for one, two in itertools.product(sorted(starts), sorted(ends)) if 0 <= two - one < longest]
        scores = {pair: float(start[window, pair[0]]) + float(end[window, pair[1]]) for pair in pairs}
        for pair in sorted(pairs, key=lambda pair: (-scores[pair], pair))[:n]:
            span = pair[0] - 3 + first, pair[1] - 2 + first
            found[example][span] = max(scores[pair], found[example].get(span, -math.inf))
    return [
        sorted(((score, *span) for span, score in one.items()), key=lambda row: (-row[0], *row[1:]))[:n]
        for one in found
    ]


@given(
    contexts=st.lists(st.text("abc", min_size=1, max_size=25), min_size=1, max_size=4),
    n=st.integers(1, 8),
    longest=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_answers_are_those_found_pair_by_pair(contexts: list[str], n: int, longest: int, seed: int) -> None:
    """The n best agree with looking at every pair, ties included, and do not depend on the order of the rows."""
    shelf = shelf_of(*contexts)
    start, end = np.random.default_rng(seed).integers(-3, 4, (2, len(shelf), LENGTH)).astype(np.float32)
    whole = made(shelf, start, end, n_best=n, max_answer_length=longest, null_threshold=None)
    expected = by_hand(shelf, start, end, n, longest)
    for found, context, rows in zip(whole, contexts, expected, strict=True):
        texts = [(one["score"], one["text"]) for one in found.n_best if one["text"]]
        assert texts == [(score, context[first:stop]) for score, first, stop in rows]
        assert found.span == (rows[0][1:] if rows else None)
    other = np.random.default_rng(seed + 1).permutation(len(shelf))
    options: dict[str, Any] = {"n_best": n, "max_answer_length": longest, "null_threshold": None}
    assert made(shelf, start[other], end[other], windows=other, **options) == whole


def test_no_answer_wins_by_more_than_the_threshold() -> None:
    """The null score is the smallest over the windows; the answer is empty when it leads by more than the threshold."""
    shelf = shelf_of("abcdefghij")
    start = logits(shelf, (0, 0, 9.0), (1, 0, 4.0), (0, 3, 2.0))
    end = logits(shelf, (0, 0, 9.0), (1, 0, 3.0), (0, 3, 2.0))
    (found,) = made(shelf, start, end)
    assert (found.null_score, found.score, found.null_odds, found.text, found.span) == (7.0, 4.0, 3.0, "", None)
    assert made(shelf, start, end, null_threshold=3.0)[0].text == "a"
    assert made(shelf, start, end, null_threshold=2.9)[0].text == ""
    (never,) = made(shelf, start, end, null_threshold=None)
    assert (never.text, never.span) == ("a", (0, 1))
    assert all(one["text"] for one in never.n_best)


def test_probabilities_are_over_the_n_best_with_no_answer_among_them() -> None:
    """They sum to 1; no answer has its place by score, or comes last when it is not one of the n best."""
    shelf = shelf_of("abcdef")
    start, end = logits(shelf, (0, 3, 2.0), (0, 0, 1.0)), logits(shelf, (0, 3, 2.0), (0, 0, 1.0))
    (found,) = made(shelf, start, end, n_best=3)
    assert math.isclose(sum(one["probability"] for one in found.n_best), 1)
    assert [one["text"] for one in found.n_best][:2] == ["a", ""] and len(found.n_best) == 3
    (low,) = made(shelf, logits(shelf, (0, 0, -50.0)), logits(shelf), n_best=3)
    assert [one["text"] for one in low.n_best] == ["a", "ab", "abc", ""]
    assert low.n_best[-1]["probability"] < 1e-9


def test_files_are_those_of_the_scripts(tmp_path: Path) -> None:
    """{id: text}, the n best with probabilities and logits, and the null odds, in one pass."""
    shelf: Any = shelf_of("abcdef", "ghi\u00e9")
    start = logits(shelf, (0, 3, 2.0), (1, 6, 2.0), rest=0.0)
    predictions = answers(shelf, start, start)
    files = [tmp_path / f"{name}.json" for name in ("predictions", "nbest", "odds")]
    assert predictions.write_predictions(files[0], n_best=files[1], null_odds=files[2]) == 2
    texts, n_best, odds = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    assert texts == {"q0": "a", "q1": "\u00e9"} == predictions.texts()
    assert odds == {"q0": -4.0, "q1": -4.0}
    assert set(n_best["q0"][0]) == {"text", "probability", "score", "start_logit", "end_logit"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_the_score_of_no_answer_must_be_a_number(bad: float, side: int) -> None:
    """CLS is outside the context and read all the same; -inf there means that there is always an answer."""
    shelf = shelf_of("abcdef", "ghi")
    pair = [logits(shelf), logits(shelf)]
    pair[side] = logits(shelf, (1, 0, bad))
    with pytest.raises(InputError, match="window 1 has logits that are NaN or infinite"):
        made(shelf, *pair)
    pair[side] = logits(shelf, (1, 0, -math.inf), (1, 1, bad))
    assert made(shelf, *pair)[1].null_score == -math.inf


def test_logits_come_as_a_model_has_them() -> None:
    """With a gradient and in bfloat16, in any order, of some windows; others are refused."""
    torch = pytest.importorskip("torch")
    shelf = shelf_of("abcdefghijkl", "bcd")
    start = torch.randn(len(shelf), LENGTH, dtype=torch.bfloat16, requires_grad=True)
    expected = made(shelf, *[start.detach().float().numpy()] * 2)
    assert made(shelf, start, start) == expected
    assert made(shelf, start.flip(0), start.flip(0), windows=range(len(shelf) - 1, -1, -1)) == expected
    assert made(shelf, start[-1:], start[-1:], windows=[len(shelf) - 1]) == expected[1:]
    for first, other in ((start[:1], start[:1]), (start, start[:, :9])):
        with pytest.raises(InputError, match=r"_logits are \(.*\(4, 10\) are needed"):
            made(shelf, first, other)
    with pytest.raises(ConfigError, match="n_best: 0"):
        made(shelf, start, start, n_best=0)


def test_a_context_without_tokens_gives_an_empty_answer() -> None:
    """There is nothing to answer with, and that is no error."""
    shelf = shelf_of("")
    (found,) = made(shelf, logits(shelf), logits(shelf), null_threshold=None)
    assert (found.text, found.score, [one["text"] for one in found.n_best]) == ("", None, [""])
