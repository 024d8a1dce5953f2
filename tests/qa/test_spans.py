"""Answers as tokens: exactly those that share a character with the answer; answers that lie elsewhere than stated."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_recipe import KINDS, Features, examples, tokenizer_of, windower_of

from milldam.qa.examples import Answer, Example
from milldam.qa.windows import Chosen, choose_answer

PAD = "</s>"


def one_window(kind: str, context: str, answer: str, start: int | None = None) -> tuple[Any, Features]:
    """A context in one window, with an answer at its first occurrence, or where it is said to be."""
    tokenizer = tokenizer_of(kind)
    at = context.index(answer) if start is None else start
    example = Example("q", "what", context, (Answer(answer, at),))
    features = windower_of(tokenizer, PAD, max_seq_length=200, overlap=8)([example]).features
    assert len(features) == 1
    return tokenizer, features


def span_text(kind: str, context: str, answer: str, start: int | None = None) -> str:
    """The characters of the context that the tokens of the answer cover."""
    _, features = one_window(kind, context, answer, start)
    assert features.has_answer.all()
    places = features.offsets[0, int(features.start_positions[0]) : int(features.end_positions[0]) + 1]
    return context[int(places[0, 0]) : int(places[-1, 1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("it was $500 a year", "500"),
        ("the city (Paris) is", "Paris"),
        ("the \u201cParis\u201d of it", "Paris"),
        ("St.Denis, Paris.", "Paris"),
    ],
)
def test_answers_beside_punctuation_are_alone(kind: str, context: str, answer: str) -> None:
    """`500` in `$500`, `Paris` in `(Paris)`: no mark comes with them."""
    assert span_text(kind, context, answer) == answer


def test_a_mark_that_the_tokenizer_drops_does_not_pull_the_next_word_in() -> None:
    """The recipe looks for a token that ends where the answer ends, and takes the next word's."""
    assert span_text("bert", "it was cafe\u0301 and he", "cafe\u0301") == "cafe"
    assert span_text("bert", "it was cafe\u0301", "cafe\u0301") == "cafe"  # the recipe says: no answer


def test_a_lone_word_marker_is_not_part_of_the_word() -> None:
    """`▁` before `$500` stands for the space."""
    tokenizer, features = one_window("xlnet", "it was $500", "$500")
    first = tokenizer.id_to_token(int(features.input_ids[0, int(features.start_positions[0])]))
    assert first == "$"


@pytest.mark.parametrize("kind", KINDS)
@given(example=examples(answered=True), length=st.integers(24, 80), overlap=st.integers(0, 12))
def test_spans_are_the_tokens_that_share_a_character_with_the_answer(
    kind: str, example: Example, length: int, overlap: int
) -> None:
    """Any text, answer and tokenizer: every such token, no other, in every window that has them all."""
    prepared = windower_of(tokenizer_of(kind), PAD, max_seq_length=length, overlap=overlap)([example])
    answer = prepared.chosen[0]
    if prepared.dropped:
        return
    assert (answer.status, answer.text) == ("ok", example.answers[0].text)
    rows = whole_answers(prepared.features, answer, overlap)
    for row, wanted in enumerate(rows):
        cls = int(prepared.features.cls_index[row])
        found = (int(prepared.features.start_positions[row]), int(prepared.features.end_positions[row]))
        assert found == (wanted or (cls, cls))


def whole_answers(features: Features, answer: Chosen, overlap: int) -> list[tuple[int, int] | None]:
    """By brute force: for every window, the first and the last token of the answer when it has all of them."""
    tokens: list[list[int]] = []
    numbers: set[int] = set()  # in the whole context
    for row in range(len(features)):
        begin, before = int(features.context_begin[row]), row * (int(features.context_tokens[0]) - overlap)
        inside = []
        for at in range(begin, begin + int(features.context_tokens[row])):
            low, high = features.offsets[row, at].tolist()
            if set(range(low, high)) & set(range(answer.start, answer.stop)):
                inside.append(at)
                numbers.add(before + at - begin)
        tokens.append(inside)
    return [(inside[0], inside[-1]) if inside and len(inside) == len(numbers) else None for inside in tokens]


CONTEXT = (
    "In the May of 1990 Berlin may have paid $500 in Caf\u00e9 Zoo, a cafe\u0301 in Berlin  City; it paid $500 twice."
)


def chosen(context: str, *answers: tuple[str, int]) -> Chosen:
    return choose_answer(Example("q", "what", context, tuple(Answer(text, start) for text, start in answers)))


def test_the_first_answer_that_lies_where_it_should_is_chosen() -> None:
    """The recipe takes the first in any case."""
    assert chosen(CONTEXT, ("Berlin", 19), ("1990", 14)) == Chosen("Berlin", 19, 25, "ok")
    assert chosen(CONTEXT, ("Berlin", 20), ("1990", 14)) == Chosen("1990", 14, 18, "ok")


@pytest.mark.parametrize("shift", [-7, -2, -1, 1, 2, 5, 40])
def test_answers_a_few_characters_off_are_repaired(shift: int) -> None:
    """As in sets whose begins were counted in another unit, or before white space was changed."""
    assert chosen(CONTEXT, ("1990", 14 + shift)) == Chosen("1990", 14, 18, "repaired")


@pytest.mark.parametrize(
    ("text", "stated", "found"),
    [
        (" 1990 ", 14, "1990"),
        ("berlin", 19, "Berlin"),
        ("Berlin City", 60, "Berlin  City"),
        ("BERLIN\nCITY", 60, "Berlin  City"),
        ("Cafe\u0301 Zoo", 47, "Caf\u00e9 Zoo"),
        ("caf\u00e9 in", 59, "cafe\u0301 in"),
        ("twice", 3, "twice"),
        ("1990", -1, "1990"),
    ],
)
def test_answers_in_another_spelling_are_repaired(text: str, stated: int, found: str) -> None:
    """Case, white space and normal form aside; what is chosen is what the context has."""
    repaired = chosen(CONTEXT, (text, stated))
    assert (repaired.text, repaired.status) == (found, "repaired")
    assert CONTEXT[repaired.start : repaired.stop] == found


def test_the_same_letters_are_preferred_to_nearer_ones() -> None:
    """`May` is not `may`, and `in` is not a part of `Berlin`, as long as there is another."""
    assert chosen(CONTEXT, ("May", 20)).start == CONTEXT.index("May")
    assert chosen(CONTEXT, ("in", 24)).start == CONTEXT.index(" in Caf") + 1


def test_what_is_nowhere_or_far_and_twice_is_not_repaired() -> None:
    """A guess would be a wrong label."""
    assert chosen(CONTEXT, ("Hamburg", 3)) == Chosen(status="unrepairable")
    far = f"paris {'x ' * 200}paris"
    assert chosen(far, ("paris", 200)) == Chosen(status="unrepairable")
    assert chosen(far, ("paris", 5)).start == 0


def test_no_answer_is_no_fault() -> None:
    """Neither is an empty one, which some sets have for it."""
    assert chosen(CONTEXT) == Chosen()
    assert chosen(CONTEXT, ("", 0)).status == "none"
    assert not chosen(CONTEXT)


@given(example=examples(answered=True), shift=st.integers(-30, 30))
def test_a_shifted_answer_is_found_or_given_up_but_never_mistaken(example: Example, shift: int) -> None:
    """What is chosen is in the context, and reads as the answer does but for case, white space and normal form."""
    text, start = example.answers[0].text, example.answers[0].start
    found = chosen(example.context, (text, start + shift))
    if found:
        assert example.context[found.start : found.stop] == found.text
        assert folded(found.text) == folded(text)
    else:
        assert not text.strip() or shift


def folded(text: str) -> str:
    # Some letters have no one lower-case form: \u017f is an s, \u0130 an i.
    upper = unicodedata.normalize("NFKC", text).casefold().upper().lower()
    return unicodedata.normalize("NFKD", " ".join(upper.split())).replace("\u0307", "").replace("\u0131", "i")
