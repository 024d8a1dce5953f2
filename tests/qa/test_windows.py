"""Windows of a question and its context: the same as fast tokenizers cut, whatever the text and the tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_recipe import (
    KINDS,
    RecipeError,
    RecipeWindow,
    examples,
    recipe_windows,
    tokenizer_of,
    windower_of,
)

from milldam.config.checking import checked_settings
from milldam.errors import ConfigError, InputError
from milldam.qa.examples import Answer, Example
from milldam.qa.settings import QARules
from milldam.qa.template import template_of
from milldam.qa.windows import NO_TOKENS, QUESTION_TOO_LONG

CITY = Example("q1", "what city", "the city of paris", (Answer("paris", 12),))


def unpadded(features: Any, row: int, *, left: bool) -> slice:
    length = int(features.length[row])
    return slice(features.input_ids.shape[1] - length, None) if left else slice(0, length)


def assert_same_windows(features: Any, wanted: list[RecipeWindow], *, left: bool) -> None:
    """Ids, types and places of the context's tokens, window by window; a lone word marker's place aside."""
    assert len(features.input_ids) == len(wanted)
    for row, window in enumerate(wanted):
        part = unpadded(features, row, left=left)
        assert features.input_ids[row, part].tolist() == window.ids
        # HF tokenizers puts types of its own on later windows, where the template has one type for both texts.
        if row == 0 or set(wanted[0].types) != {0}:
            assert features.token_type_ids[row, part].tolist() == window.types
        inside = [at for at, place in enumerate(window.offsets) if place is not None]
        begin = int(features.context_begin[row]) - (part.start or 0)
        assert inside == list(range(begin, begin + int(features.context_tokens[row])))
        ours = features.offsets[row, part]
        for at, place in enumerate(window.offsets):
            # A marker that the next token's first character was given to, too, has none here.
            assert tuple(ours[at]) in ((place, (place[0], place[0])) if place else ((-1, -1),))


@pytest.mark.parametrize("kind", KINDS)
@given(example=examples(), length=st.integers(12, 48), overlap=st.integers(0, 12), context_first=st.booleans())
def test_windows_are_those_of_the_recipe(
    kind: str, example: Example, length: int, overlap: int, context_first: bool
) -> None:
    """Whatever the text, what comes first, the length and the overlap: the same ids, types, offsets and windows."""
    tokenizer = tokenizer_of(kind)
    overlap = min(overlap, length - 6)
    windower = windower_of(
        tokenizer_of(kind),
        "</s>" if kind == "llama" else None,
        max_seq_length=length,
        overlap=overlap,
        first="context" if context_first else "question",
    )
    prepared = windower([example])
    try:
        wanted = recipe_windows(tokenizer, example, length=length, overlap=overlap, context_first=context_first)
    except RecipeError:
        assert prepared.dropped == {0: QUESTION_TOO_LONG}
        assert len(prepared.features) == 0
        return
    assert not prepared.dropped
    assert_same_windows(prepared.features, wanted, left=windower.template.pad_left)


def test_special_tokens_in_texts_do_not_move_cls() -> None:
    """The recipe takes the first CLS that it sees, which may be a word of the context; ours is the template's."""
    example = Example("q", "what <cls> <sep>", "the <cls> city [CLS] of paris")
    features = windower_of(tokenizer_of("xlnet"), max_seq_length=40, overlap=4)([example]).features
    assert features.cls_index[0] == 39
    example = Example("q", "what [CLS]", "the [CLS] city")
    features = windower_of(tokenizer_of("bert"), max_seq_length=40, overlap=4, first="context")([example]).features
    assert features.cls_index[0] == 0


def test_overlap_is_shared_and_hop_is_the_way_on() -> None:
    """The same windows, said in two ways; the last one ends with the context."""
    context = " ".join(["paris"] * 30)
    examples_ = [Example("q", "what", context)]
    by_overlap = windower_of(tokenizer_of("bert"), max_seq_length=14, overlap=4)(examples_).features
    by_hop = windower_of(tokenizer_of("bert"), max_seq_length=14, hop=6)(examples_).features
    assert np.array_equal(by_overlap.offsets, by_hop.offsets)
    assert by_overlap.context_tokens.tolist() == [10, 10, 10, 10, 6]
    begins = by_overlap.offsets[np.arange(5), by_overlap.context_begin, 0]
    assert (begins // 6).tolist() == [0, 6, 12, 18, 24]
    assert by_overlap.segment_index.tolist() == [0, 1, 2, 3, 4]
    assert set(by_overlap.total_segments.tolist()) == {5}


def test_questions_that_leave_no_room_are_dropped_and_named() -> None:
    """The recipe fails on them; the other examples of the batch are as they were."""
    long = Example("long", "what " * 50, "the city of paris")
    prepared = windower_of(tokenizer_of("bert"), max_seq_length=20, overlap=4)([CITY, long, CITY])
    assert prepared.dropped == {1: QUESTION_TOO_LONG}
    assert prepared.features.example.tolist() == [0, 2]
    assert len(prepared.chosen) == 3


def test_max_segments_keeps_the_first_windows() -> None:
    """And the stated number of windows is what is kept."""
    examples_ = [Example("q", "what", " ".join(["paris"] * 30))]
    whole = windower_of(tokenizer_of("bert"), max_seq_length=14, overlap=4)(examples_).features
    some = windower_of(tokenizer_of("bert"), max_seq_length=14, overlap=4, max_segments=2)(examples_).features
    assert np.array_equal(some.input_ids, whole.input_ids[:2])
    assert some.total_segments.tolist() == [2, 2]


def without_special_tokens() -> Any:
    made = tokenizer_of("roberta")
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return made


@pytest.mark.parametrize("side", ["left", "right"])
def test_without_a_cls_token_a_token_of_the_question_stands_for_it(side: str) -> None:
    """The first one or the last, where no answer can be; never padding, which the recipe takes on the left."""
    for first in ("question", "context"):
        windower = windower_of(without_special_tokens(), max_seq_length=40, overlap=4, padding_side=side, first=first)
        example = Example("q", "what", "paris it was", (Answer("paris", 0),))
        features = windower([example]).features
        begin = 40 - int(features.length[0]) if side == "left" else 0
        assert features.cls_index[0] == begin + (0 if first == "question" else features.length[0] - 1)
        assert features.has_answer.all()


def test_a_window_of_context_alone_is_left_out() -> None:
    """No token would be there for "no answer" to point to; an answer at the very begin would count as none."""
    windower = windower_of(without_special_tokens(), max_seq_length=40, overlap=4, padding_side="left")
    prepared = windower([Example("q", " ", ""), Example("q", "", "a"), Example("q", "b", "a")])
    assert prepared.dropped == {0: NO_TOKENS, 1: NO_TOKENS}
    assert prepared.features.length.tolist() == [2]


def test_padding_is_no_word_of_the_text() -> None:
    """A vocabulary may have "<unk>" as a word like any other; a special token is taken instead."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    assert template_of(tokenizer, QARules(), {}).pad_id == tokenizer.token_to_id("<|endoftext|>")


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"overlap": 1, "hop": 1}, "give one"),
        ({"max_seq_length": 7}, "max_seq_length: must be at least 8"),
        ({"overlap": -1}, "overlap: must be at least 0"),
        ({"hop": 0}, "hop: must be at least 1"),
        ({"max_segments": 0}, "max_segments: must be at least 1"),
        ({"memory_tokens": -1}, "memory_tokens: must be at least 0"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, int], says: str) -> None:
    """At once, and with what to do."""
    with pytest.raises(ConfigError, match=says):
        checked_settings(QARules, rules)


def test_a_tokenizer_that_knows_no_latin_letter_has_its_template_found() -> None:
    """A probe of letters that it lacks would find no texts between its special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1, "日": 2, "本": 3}, []))
    made.post_processor = tokenizers.processors.BertProcessing(("</s>", 1), ("<s>", 0))
    template = template_of(made, QARules(), {"pad": "</s>"})
    assert [[id for id, _ in part] for part in (template.before, template.between, template.after)] == [[0], [1], [1]]


def test_a_tokenizer_without_a_token_to_pad_with_is_refused() -> None:
    """With where to name one."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(InputError, match="no token to pad with"):
        template_of(made, QARules(), {})
