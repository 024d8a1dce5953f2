"""Windows of a question and its context: those of fast tokenizers, whatever the text and the tokenizer; answers as
exactly the tokens that share a character with them; memory tokens, with lengths and spans to match."""

from __future__ import annotations

import itertools
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
    Shelf,
    examples,
    recipe_windows,
    tokenizer_of,
    windower_of,
)

from milldam import qa
from milldam.config.checking import checked_settings
from milldam.errors import ConfigError, InputError
from milldam.qa.examples import Answer, Example
from milldam.qa.settings import QARules
from milldam.qa.template import add_memory_tokens, template_of
from milldam.qa.windows import NO_TOKENS, QUESTION_TOO_LONG, Chosen, choose_answer

PAD = "</s>"
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


def test_what_can_not_be_windows_is_dropped_and_named() -> None:
    """A question that leaves no room; no token for "no answer" to point to. The other examples are as they were."""
    long = Example("long", "what " * 50, "the city of paris")
    prepared = windower_of(tokenizer_of("bert"), max_seq_length=20, overlap=4)([CITY, long, CITY])
    assert prepared.dropped == {1: QUESTION_TOO_LONG}
    assert prepared.features.example.tolist() == [0, 2] and len(prepared.chosen) == 3
    windower = windower_of(without_special_tokens(), max_seq_length=40, overlap=4, padding_side="left")
    prepared = windower([Example("q", " ", ""), Example("q", "", "a"), Example("q", "b", "a")])
    assert prepared.dropped == {0: NO_TOKENS, 1: NO_TOKENS}
    assert prepared.features.length.tolist() == [2]


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


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"overlap": 1, "hop": 1}, "give one"),
        ({"max_seq_length": 7}, "max_seq_length: must be at least 8"),
        ({"hop": 0}, "hop: must be at least 1"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, int], says: str) -> None:
    """At once, and with what to do."""
    with pytest.raises(ConfigError, match=says):
        checked_settings(QARules, rules)


def test_templates_of_odd_tokenizers() -> None:
    """Without a Latin letter; with "<unk>" as a word like any other; without a token to pad with."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "</s>": 1, "日": 2, "本": 3}, []))
    made.post_processor = tokenizers.processors.BertProcessing(("</s>", 1), ("<s>", 0))
    template = template_of(made, QARules(), {"pad": PAD})
    assert [[id for id, _ in part] for part in (template.before, template.between, template.after)] == [[0], [1], [1]]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[]))
    made.add_special_tokens(["<|endoftext|>"])
    assert template_of(made, QARules(), {}).pad_id == made.token_to_id("<|endoftext|>")
    with pytest.raises(InputError, match="no token to pad with"):
        template_of(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), QARules(), {})


# ---- answers as tokens ----


@pytest.mark.parametrize("kind", KINDS)
@given(example=examples(answered=True), length=st.integers(24, 80), overlap=st.integers(0, 12))
def test_spans_are_the_tokens_that_share_a_character_with_the_answer(
    kind: str, example: Example, length: int, overlap: int
) -> None:
    """Any text, answer and tokenizer: every such token (`500` of `$500`), in every window that has all."""
    prepared = windower_of(tokenizer_of(kind), PAD, max_seq_length=length, overlap=overlap)([example])
    answer, features = prepared.chosen[0], prepared.features
    if prepared.dropped:
        return
    assert (answer.status, answer.text) == ("ok", example.answers[0].text)
    tokens: list[list[int]] = []
    numbers: set[int] = set()  # in the whole context
    for row in range(len(features)):
        begin, before = int(features.context_begin[row]), row * (int(features.context_tokens[0]) - overlap)
        places = range(begin, begin + int(features.context_tokens[row]))
        characters = set(range(answer.start, answer.stop))
        inside = [at for at in places if characters & set(range(*features.offsets[row, at].tolist()))]
        numbers.update(before + at - begin for at in inside)
        tokens.append(inside)
    for row, inside in enumerate(tokens):
        cls = int(features.cls_index[row])
        found = (int(features.start_positions[row]), int(features.end_positions[row]))
        assert found == ((inside[0], inside[-1]) if inside and len(inside) == len(numbers) else (cls, cls))


CONTEXT = (
    "In the May of 1990 Berlin may have paid $500 in Caf\u00e9 Zoo, a cafe\u0301 in Berlin  City; it paid $500 twice."
)


def chosen(context: str, *answers: tuple[str, int]) -> Chosen:
    return choose_answer(Example("q", "what", context, tuple(Answer(text, start) for text, start in answers)))


@pytest.mark.parametrize(
    ("text", "stated", "found"),
    [
        *(("1990", 14 + shift, "1990") for shift in (-15, -7, -1, 2, 40)),
        (" 1990 ", 14, "1990"),
        ("berlin", 19, "Berlin"),
        ("BERLIN\nCITY", 60, "Berlin  City"),
        ("Cafe\u0301 Zoo", 47, "Caf\u00e9 Zoo"),
        ("caf\u00e9 in", 59, "cafe\u0301 in"),
        ("twice", 3, "twice"),
    ],
)
def test_answers_elsewhere_or_in_another_spelling_are_repaired(text: str, stated: int, found: str) -> None:
    """Case, white space and normal form aside; what is chosen is what the context has."""
    repaired = chosen(CONTEXT, (text, stated))
    assert (repaired.text, repaired.status) == (found, "repaired")
    assert CONTEXT[repaired.start : repaired.stop] == found


def test_which_answer_is_chosen() -> None:
    """The first that lies where it should, else the same letters before nearer ones; never a guess."""
    assert chosen(CONTEXT, ("Berlin", 19), ("1990", 14)) == Chosen("Berlin", 19, 25, "ok")
    assert chosen(CONTEXT, ("Berlin", 20), ("1990", 14)) == Chosen("1990", 14, 18, "ok")
    assert chosen(CONTEXT, ("May", 20)).start == CONTEXT.index("May")
    assert chosen(CONTEXT, ("in", 24)).start == CONTEXT.index(" in Caf") + 1
    assert chosen(CONTEXT, ("Hamburg", 3)) == Chosen(status="unrepairable")
    far = f"paris {'x ' * 200}paris"
    assert chosen(far, ("paris", 200)) == Chosen(status="unrepairable")
    assert chosen(far, ("paris", 5)).start == 0
    # Some sets have an empty text for no answer.
    assert chosen(CONTEXT) == chosen(CONTEXT, ("", 0)) == Chosen()


# ---- memory tokens ----


def test_memory_tokens_get_ids_of_their_own() -> None:
    """Read tokens first, then write tokens, behind the old ones; a vocabulary with gaps is refused."""
    tokenizer = tokenizer_of("bert")
    before = tokenizer.get_vocab()
    memory = add_memory_tokens(tokenizer, 4)
    assert memory.read + memory.write == tuple(range(len(before), len(before) + 8))
    after = tokenizer.get_vocab()
    assert {name: after[name] for name in before} == before
    assert (after["[MEM_READ_0]"], after["[MEM_WRITE_3]"]) == (memory.read[0], memory.write[3])
    with pytest.raises(InputError, match="gaps"):
        add_memory_tokens(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 3}, unk_token="a")), 2)


@pytest.mark.parametrize("kind", KINDS)
@given(example=examples())
def test_windows_with_memory_are_those_of_shorter_ones_without(kind: str, example: Example) -> None:
    """Windows of 40 with 2 * 3 memory tokens hold the texts, answers and offsets of windows of 34, moved."""
    plain = windower_of(tokenizer_of(kind), PAD, max_seq_length=34, overlap=4)([example])
    windower: Any = windower_of(tokenizer_of(kind), PAD, memory=3, max_seq_length=40, overlap=4)
    prepared = windower([example])
    assert prepared.dropped == plain.dropped
    assert len(prepared.features) == len(plain.features)
    for row in range(len(plain.features)):
        kept = ~np.isin(prepared.features.input_ids[row], (*windower.memory.read, *windower.memory.write))
        for name in ("input_ids", "token_type_ids", "offsets"):
            assert np.array_equal(getattr(prepared.features, name)[row, kept], getattr(plain.features, name)[row])
        moved = np.flatnonzero(kept)
        for name in ("start_positions", "end_positions", "cls_index"):
            assert getattr(prepared.features, name)[row] == moved[getattr(plain.features, name)[row]]
        assert not (prepared.features.offsets[row, ~kept] >= 0).any()


# ---- what tokens stand for ----


@pytest.mark.parametrize("kind", KINDS)
def test_answers_keep_what_is_dropped_beside_their_tokens_and_gain_nothing(kind: str) -> None:
    """Accents, vowel signs, joiners, soft hyphens, control characters, from logits that are right; but not what stands
    alone or belongs to the word before, and not the byte order mark of a file."""
    wanted = [
        ("a cafe\u0301, in paris", "a cafe\u0301"),
        ("it was a cafe\u0301\u0301", "cafe\u0301\u0301"),
        ("the \u0939\u093f\u0928\u094d\u0926\u0940 city", "\u0939\u093f\u0928\u094d\u0926\u0940"),
        ("he \u0645\u062f\u064b\u0651 the", "\u0645\u062f\u064b\u0651"),
        *((f"the paris{mark} city", f"paris{mark}") for mark in "\u00ad\u200d\x07"),
        ("in \u200dparis it", "\u200dparis"),
        ("\u200dparis it", "\u200dparis"),
        ("in \ufffdparis\ufffd it", "\ufffdparis\ufffd"),
    ]
    if kind in ("bert", "xlnet"):  # others have tokens of every byte
        wanted += [("cafe\u0301 \u200d paris", "paris"), ("the cafe\u0301paris", "paris"), ("a cafe\u0301 was", "was")]
        wanted += [("\ufeffparis it", "paris"), ("(paris)\u0301 it", "paris")]
    given = [
        Example(str(number), "what", context, (Answer(answer, context.index(answer)),))
        for number, (context, answer) in enumerate(wanted)
    ]
    store: Any = Shelf(kind, given, PAD, max_seq_length=96, overlap=8)
    start, end = np.zeros((2, len(store), 96), np.float32)
    for logits, positions in ((start, store.features.start_positions), (end, store.features.end_positions)):
        logits[np.arange(len(store)), positions] = 1
    texts = qa.answers(store, start, end, n_best=1, null_threshold=None, max_answer_length=96).texts()
    assert list(texts.values()) == [answer for _, answer in wanted]


@given(example=examples(answered=True), kind=st.sampled_from(KINDS), overlap=st.integers(0, 6))
def test_tokens_gain_dropped_characters_alone(example: Example, kind: str, overlap: int) -> None:
    """Neither white space nor a character of another token, and the same in every window that has the token."""
    shelf: Any = Shelf(kind, [example, example], PAD, max_seq_length=26, overlap=overlap)
    plain, wide = shelf.features.offsets, qa.stretches(shelf, np.arange(len(shelf)))
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
