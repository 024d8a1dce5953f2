"""A document of any size, in any parts, has the ids that it has when HF tokenizers encodes it whole."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.kit.quick import first_quick
from tests.kit.token_pieces import (
    NO_SPECIAL,
    TokenizerJson,
    cut_at,
    document_encoder,
    encode_in_parts,
    encode_whole,
    reference,
    small_encoder,
    small_windows,
    texts_of,
)
from tests.kit.token_runs import LLAMA3, O200K, RULES, small_links, with_rule

from milldam.tokenizers import cutting
from milldam.tokenizers.document_encoder import DocumentEncoder, bare_form
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, make_encoder
from milldam.tokenizers.loading import load_tokenizer
from milldam.tokenizers.runs import Runs, Words, find_runs

WORDS = [
    "the",
    "mill",
    "turned",
    "slowly",
    "while",
    "water",
    "ran",
    "over",
    "old",
    "wheels",
    "and",
    "Nobody",
    "counted",
    "1984",
    "days",
    "it'll",
    "don't",
]
EMOJI = ("🙂", "👍🏽", "🏳️‍🌈", "👩‍👩‍👧‍👦", "🇺🇦")
# A failure is told by its recipe of stretches, which needs no shrinking; that would take minutes.
# Each example encodes a text of several kilobytes twice; what `make test-all` asks for is known by now.
FEW = settings(max_examples=settings.default.max_examples // 2, phases=[Phase.explicit, Phase.generate])
MORE = settings(FEW, max_examples=2 * settings.default.max_examples)
PLACES = st.lists(st.integers(0, 20_000), max_size=12)


def stretch(kind: str, size: int, rng: random.Random) -> str:
    """Text of one kind, of about so many characters."""
    makers = {
        "words": lambda: " ".join(rng.choices(WORDS, k=size // 6)),
        "glued words": lambda: "".join(rng.choices(WORDS, k=size // 6)),
        "spaces": lambda: " " * size,
        "hex": lambda: "".join(rng.choices("0123456789abcdef", k=size)),
        "one letter": lambda: rng.choice("xqZé") * size,
        "chinese": lambda: "".join(chr(rng.randrange(0x4E00, 0x9F00)) for _ in range(size // 3)),
        "emoji": lambda: "".join(rng.choices(EMOJI, k=size // 20)),
        "marks": lambda: "".join(rng.choice("aeo") + chr(rng.randrange(0x300, 0x370)) for _ in range(size // 3)),
        "lines": lambda: "\n".join(rng.choices(WORDS, k=size // 6)),
        "signs": lambda: "".join(rng.choices("=-#!*/", k=size)),
        "line ends": lambda: rng.choice(["\n", "\r\n", "\n \n"]) * (size // 3),
    }
    return makers[kind]()


SAFE = ("words", "glued words", "spaces", "hex", "one letter", "chinese", "emoji", "marks")
ALL = (*SAFE, "lines", "signs", "line ends")


def documents(*kinds: str) -> st.SearchStrategy[str]:
    """Stretches of several kinds, one after the other."""
    stretches = st.tuples(st.sampled_from(kinds), st.integers(1, 1500), st.integers(0, 1000))
    parts = st.lists(stretches, min_size=1, max_size=6)
    return parts.map(lambda chosen: "".join(stretch(kind, size, random.Random(seed)) for kind, size, seed in chosen))


@pytest.fixture(autouse=True)
def _small_windows() -> Iterator[None]:
    with small_windows(), small_links():
        yield


def check(tokenizer_json: str, encoder: str, text: str, places: list[int]) -> None:
    encoder = document_encoder(small_encoder(tokenizer_json, encoder), tokenizer_json, bare=encoder)
    ids = encode_in_parts(encoder, cut_at(text, places))
    counted = encoder.take_inexact_cuts()
    if '"BPE"' in tokenizer_json:
        assert counted == 0
    # For the others a cut inside a run is checked, not proved: never wrong in silence.
    assert ids == encode_whole(reference(tokenizer_json), text) or counted


# ---- every kind of tokenizer ----


@pytest.mark.parametrize("encoder", [GIGATOKEN, HUGGINGFACE])
@given(text=documents(*ALL), places=PLACES)
def test_bpe_in_pieces_is_bpe_of_the_whole(demo_tokenizer: Path, encoder: str, text: str, places: list[int]) -> None:
    """The demo tokenizer by both encoders, over text that has words and text that has none."""
    check(demo_tokenizer.read_text(encoding="utf-8"), encoder, text, places)


# Not "one letter" and "spaces": how a run of one sign is divided among equal scores depends on all of it, and
# these windows are a tenth of the real ones.
VARIED = ("words", "glued words", "hex", "chinese", "emoji")


@FEW
@given(text=documents(*VARIED), places=PLACES)
def test_unigram_in_pieces_is_unigram_of_the_whole(unigram_json: str, text: str, places: list[int]) -> None:
    """With marks at word starts, which a piece from inside a word must not get."""
    check(unigram_json, HUGGINGFACE, text, places)


@pytest.mark.parametrize(
    "recipe",
    [
        [("one letter", 735, 814), ("words", 954, 794), ("hex", 1330, 53), ("spaces", 232, 380), ("marks", 505, 389)],
        [("one letter", 995, 271), ("one letter", 697, 665), ("spaces", 1190, 872), ("words", 972, 560)],
        [("glued words", 1179, 112), ("one letter", 836, 345), ("glued words", 1064, 442), ("words", 452, 430)],
        [("emoji", 774, 309), ("spaces", 1211, 954), ("glued words", 1321, 459), ("words", 435, 541)],
    ],
    ids=lambda recipe: ", ".join(kind for kind, _, _ in recipe),
)
@pytest.mark.parametrize("part", first_quick([137, 700, 100_000]))
def test_words_behind_a_long_run_keep_their_marks(
    unigram_json: str, recipe: list[tuple[str, int, int]], part: int
) -> None:
    """A piece that continues a text is over where the next word begins, or has its marks too."""
    text = "".join(stretch(kind, size, random.Random(seed)) for kind, size, seed in recipe)
    check(unigram_json, HUGGINGFACE, text, list(range(0, len(text), part)))


@pytest.mark.slow
@FEW
@given(text=documents("chinese", "glued words", "hex", "lines", "line ends"), places=PLACES)
def test_unigram_in_pieces_across_line_ends_is_unigram_of_the_whole(
    unigram_json: str, text: str, places: list[int]
) -> None:
    """Lines without spaces: there is no word start between them. Never wrong in silence."""
    encoder = document_encoder(small_encoder(unigram_json), unigram_json)
    ids = encode_in_parts(encoder, cut_at(text, places))
    # Equal scores are settled by rounding, which depends on all the text before: such a cut must at least be counted.
    expected = encode_whole(reference(unigram_json), text)
    assert ids == expected or encoder.take_inexact_cuts() or ties_only(unigram_json, ids, expected)


def ties_only(tokenizer_json: str, ids: list[int], expected: list[int]) -> bool:
    """Whether the difference is only how a stretch of line ends is divided."""
    tokenizer = reference(tokenizer_json)
    ends = {number for token, number in tokenizer.get_vocab().items() if not token.strip("\n\r ")}
    return [token for token in ids if token not in ends] == [token for token in expected if token not in ends]


@FEW
@given(text=documents(*(kind for kind in SAFE if kind != "spaces")), places=PLACES)
def test_wordpiece_in_pieces_is_wordpiece_of_the_whole(wordpiece_json: str, text: str, places: list[int]) -> None:
    """Where a word of any length is one unknown token."""
    check(wordpiece_json, HUGGINGFACE, text, places)


@FEW
@given(text=documents(*ALL), places=PLACES)
def test_wordpiece_in_pieces_is_right_also_where_it_cannot_know(
    wordpiece_json: str, text: str, places: list[int]
) -> None:
    """A cut in a long stretch of spaces may be counted as inexact, though it is not."""
    encoder = document_encoder(small_encoder(wordpiece_json), wordpiece_json)
    ids = encode_in_parts(encoder, cut_at(text, places))
    assert ids == encode_whole(reference(wordpiece_json), text)


SENTENCEPIECE = {
    "unigram, as T5": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "bpe, as Llama 2": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
}


@pytest.fixture(scope="module")
def sentencepiece_json(demo_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Sentencepiece models as tokenizer.json."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    made = {}
    for number, (name, options) in enumerate(SENTENCEPIECE.items()):
        out = io.BytesIO()
        lines = (line for text in demo_texts for line in text.split("\n") if line)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=out,
            vocab_size=1500,
            character_coverage=0.98,
            minloglevel=2,
            **options,
        )
        path = folder / f"{number}.model"
        path.write_bytes(out.getvalue())
        made[name] = TokenizerJson(load_tokenizer(str(path)).json)
    return made


@pytest.mark.parametrize("name", first_quick(SENTENCEPIECE))
@FEW
@given(text=documents("words", "glued words", "hex", "chinese", "lines", "spaces"), places=PLACES)
def test_sentencepiece_in_pieces_is_sentencepiece_of_the_whole(
    sentencepiece_json: dict[str, str], name: str, text: str, places: list[int]
) -> None:
    """Each with its own rules for spaces."""
    check(sentencepiece_json[name], HUGGINGFACE, text, places)


@FEW
@given(text=documents(*ALL), places=PLACES)
def test_sentencepiece_in_pieces_by_gigatoken_is_sentencepiece_of_the_whole(
    sentencepiece_json: dict[str, str], text: str, places: list[int]
) -> None:
    """The bare form runs on the fast encoder too."""
    check(sentencepiece_json["bpe, as Llama 2"], GIGATOKEN, text, places)


def test_characters_that_normalise_to_spaces_are_marks_in_every_piece(sentencepiece_json: dict[str, str]) -> None:
    """What the bare form normalises is still text with marks."""
    text = "می\u200cگذاشت" * 400
    check(sentencepiece_json["unigram, as T5"], HUGGINGFACE, text, [])


# ---- where cuts fall ----


def test_a_document_really_is_cut(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: a text of 5 KB is encoded in many pieces, none much larger than asked for."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    encoder = small_encoder(tokenizer_json)
    sizes: list[int] = []
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts: [sizes.extend(map(len, texts.to_pylist())), encode(texts)][1])
    encode_in_parts(document_encoder(encoder, tokenizer_json), ["word by word " * 400])
    assert len(sizes) > 15
    assert max(sizes) < 500


@pytest.mark.parametrize("kind", ["one letter", "hex", "chinese", "glued words"])
def test_a_run_without_any_word_is_cut_too(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where ids(left) + ids(right) = ids(both); no piece grows with the run."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    encoder = small_encoder(tokenizer_json)
    sizes: list[int] = []
    encode = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts: [sizes.extend(map(len, texts.to_pylist())), encode(texts)][1])
    text = stretch(kind, 12_000, random.Random(1))
    ids = encode_in_parts(document_encoder(encoder, tokenizer_json), cut_at(text, list(range(0, 12_000, 500))))
    assert ids == encode_whole(reference(tokenizer_json), text)
    assert max(sizes) < 3000


def test_a_word_that_is_one_unknown_token_is_one_at_any_size(wordpiece_json: str) -> None:
    """Its second half adds nothing, again and again."""
    text = "before " + "x" * 50_000 + " after"
    check(wordpiece_json, HUGGINGFACE, text, list(range(0, 50_000, 700)))


@pytest.mark.slow
@pytest.mark.parametrize("extra", first_quick([1, 5, 9]))
def test_a_cut_that_later_text_could_move_is_counted_as_inexact(unigram_json: str, extra: int) -> None:
    """Never wrong in silence."""
    tokenizer = reference(unigram_json)
    sign = next(c for c in "-\n=*.#" if any(t == c * len(t) and len(t) > 3 for t in tokenizer.get_vocab()))
    text = sign * (6000 + extra)
    encoder = document_encoder(small_encoder(unigram_json), unigram_json)
    ids = encode_in_parts(encoder, cut_at(text, list(range(0, 6000, 450))))
    assert ids == encode_whole(tokenizer, text) or encoder.take_inexact_cuts()


def test_a_cut_that_cannot_be_proved_is_made_and_counted(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather a cut that is told than a run that fills the memory."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    monkeypatch.setattr("milldam.tokenizers.cutting._TRIES", 0)
    encoder = document_encoder(small_encoder(tokenizer_json), tokenizer_json)
    ids = encode_in_parts(encoder, cut_at("x" * 60_000, list(range(0, 60_000, 900))))
    assert encoder.take_inexact_cuts() > 0
    assert encoder.take_inexact_cuts() == 0
    assert reference(tokenizer_json).decode(ids) == "x" * 60_000


@pytest.mark.parametrize("name", first_quick(["gpt2", "qwen2.5", "t5", "xlnet-base-cased"]))
@pytest.mark.parametrize("encoder", [GIGATOKEN, HUGGINGFACE])
def test_real_text_in_pieces_is_the_whole_for_real_tokenizers(shared_data: Path, name: str, encoder: str) -> None:
    """The works of Shakespeare, and notes in eleven languages in one line."""
    tokenizer_json = load_tokenizer(str(shared_data / "tokenizers" / name)).json
    if encoder == GIGATOKEN and name in ("t5", "xlnet-base-cased"):
        pytest.skip("gigatoken knows BPE alone")
    text = (shared_data / "text/tinyshakespeare.txt").read_text(encoding="utf-8")[:30_000]
    text += (shared_data / "text/emoji-test.txt").read_text(encoding="utf-8")[20_000:40_000]
    check(tokenizer_json, encoder, text, list(range(0, 50_000, 3000)))


# ---- links: pieces that overlap ----

RUNS = (
    "letters",
    "capitals",
    "case",
    "digits",
    "one digit",
    "one letter",
    "chinese",
    "thai",
    "jamo",
    "signs",
    "period",
)


def run(kind: str, size: int, rng: random.Random) -> str:
    """Text of one kind without a space."""
    alphabets = {
        "letters": "etaoinshr",
        "capitals": "ACGT",
        "case": "etaoinETAOIN",
        "digits": "0123456789",
        "one digit": rng.choice("0123456789"),
        "one letter": rng.choice("xeZé"),
        "chinese": "".join(map(chr, range(0x4E00, 0x4E40))),
        "thai": "".join(map(chr, [*range(0xE01, 0xE2F), *range(0xE31, 0xE3A)])),
        "jamo": "".join(map(chr, [*range(0x1100, 0x1106), *range(0x1161, 0x1166), *range(0x11A8, 0x11AC), 0xAC00])),
        "signs": "=-#!*/'<>|",
        "apostrophes": "'slltdm",
    }
    if kind == "period":
        return "".join(rng.choices("the mill", k=rng.randint(1, 7))).replace(" ", "") * (size // 4) + "e"
    return "".join(rng.choices(alphabets[kind], k=size))


def runs_in_a_row(*kinds: str) -> st.SearchStrategy[str]:
    one = st.tuples(st.sampled_from(kinds), st.sampled_from([1, 3, 40, 500, 900, 1500]), st.integers(0, 1000))
    return st.lists(one, min_size=1, max_size=4).map(
        lambda chosen: "".join(run(kind, size, random.Random(seed)) for kind, size, seed in chosen)
    )


@pytest.mark.parametrize(("name", "normalizer"), [(name, None) for name in RULES] + [("Qwen", "NFC")])
@settings(FEW, max_examples=12)
@given(text=runs_in_a_row(*RUNS, "period", "apostrophes"), places=PLACES)
def test_runs_in_links_are_the_whole_for_every_known_rule(
    demo_tokenizer: Path, name: str, normalizer: str | None, text: str, places: list[int]
) -> None:
    """Digits in threes, words that end at a capital, letters that the normaliser joins."""
    tokenizer_json = with_rule(demo_tokenizer.read_text(encoding="utf-8"), RULES[name], normalizer=normalizer)
    assert find_runs(tokenizer_json) is not None
    encoder = document_encoder(small_encoder(tokenizer_json), tokenizer_json)
    ids = encode_in_parts(encoder, cut_at(text, places))
    assert ids == encode_whole(reference(tokenizer_json), text) or encoder.take_inexact_cuts()


HARD_RUNS = {
    "letters": lambda rng: "".join(rng.choices("etaoinshrdlu", k=45_000)),
    "case": lambda rng: "".join(rng.choices("etaoinETAOIN", k=45_000)),
    "digits": lambda rng: "".join(rng.choices("0123456789", k=45_000)),
    "one digit": lambda rng: "7" * 45_000,
    "one letter": lambda rng: "x" * 45_000,
    "chinese": lambda rng: "".join(chr(rng.randrange(0x4E00, 0x9F00)) for _ in range(16_000)),
    "thai": lambda rng: run("thai", 16_000, rng),
    "emoji": lambda rng: "".join(rng.choices(EMOJI, k=3_000)),
    "base64": lambda rng: base64.b64encode(rng.randbytes(36_000)).decode(),
    "syllables": lambda rng: "banana" * 8_000,
    "signs": lambda rng: "".join(rng.choices("=-#!*/.,;:%$", k=45_000)),
    "equal signs": lambda rng: "=" * 45_000,
    "line ends": lambda rng: "\n" * 45_000,
    "special tokens": lambda rng: "".join(rng.choices(["word", "<|endoftext|>", "<|im_end|>"], k=6_000)),
}


REAL_SIZES = {
    name: getattr(cutting, name) for name in ("_REACH", "_WINDOW", "_RUN", "_RUN_TAIL", "MAX_RUN", "_LINK", "_OVERLAP")
}


def windows_of_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in REAL_SIZES.items():
        monkeypatch.setattr(cutting, name, size)


def encoder_of_links(tokenizer_json: str) -> DocumentEncoder:
    """With links and overlaps of their real size, for documents of a few of them."""
    encoder = make_encoder(GIGATOKEN, tokenizer_json, plain_specials=False, threads=1)
    encoder.document_bytes, encoder.piece_bytes, encoder.batch_bytes = 24 << 10, 18 << 10, 32 << 10
    return DocumentEncoder(encoder, NO_SPECIAL, "uint32", bare=lambda: bare_form(tokenizer_json, small_encoder))


def encode_giant(encoder: DocumentEncoder, text: str) -> list[int]:
    return [token for tokens in encoder.encode(texts_of(text)) for token in tokens.flat.tolist()]


@pytest.mark.parametrize("rule", first_quick([None, "o200k", "Llama 3"]))
@pytest.mark.parametrize("name", first_quick(["gpt2", "qwen2.5"]))
def test_hard_runs_are_the_whole_for_real_tokenizers(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch, name: str, rule: str | None
) -> None:
    """Without a space for as long as they last."""
    if rule and name != ("gpt2" if rule == "o200k" else "qwen2.5"):
        pytest.skip("one vocabulary a rule is enough")
    windows_of_real_size(monkeypatch)
    tokenizer_json = (shared_data / "tokenizers" / name / "tokenizer.json").read_text(encoding="utf-8")
    if rule:
        tokenizer_json = with_rule(tokenizer_json, RULES[rule], ignore_merges=True)
    encoder, whole = encoder_of_links(tokenizer_json), tokenizers.Tokenizer.from_str(tokenizer_json)
    for kind, make in HARD_RUNS.items():
        text = make(random.Random(1))
        assert encode_giant(encoder, text) == encode_whole(whole, text), kind
        assert encoder.take_inexact_cuts() == 0, kind


def test_a_run_in_links_is_encoded_about_once(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The overlaps and their trials add less than a fifth."""
    windows_of_real_size(monkeypatch)
    encoder = encoder_of_links(demo_tokenizer.read_text(encoding="utf-8"))
    sizes: list[int] = []
    encode_text, encode = encoder.encoder.encode_text, encoder.encoder.encode
    monkeypatch.setattr(encoder.encoder, "encode_text", lambda text: [sizes.append(len(text)), encode_text(text)][1])
    monkeypatch.setattr(
        encoder.encoder, "encode", lambda texts: [sizes.extend(map(len, texts.to_pylist())), encode(texts)][1]
    )
    text = "".join(random.Random(1).choices("etaoinshrdlu", k=200_000))
    encode_giant(encoder, text)
    assert sum(sizes) < 1.2 * len(text)
    assert max(sizes) < 40_000


def test_a_link_that_does_not_hold_is_counted_and_loses_no_text(
    demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a piece began with when it was cut it must still begin with when it is encoded."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    monkeypatch.setattr(cutting, "_begins_with", lambda ids, link: link is None)
    encoder = document_encoder(small_encoder(tokenizer_json), tokenizer_json)
    text = run("letters", 9000, random.Random(1))
    ids = encode_in_parts(encoder, cut_at(text, list(range(0, 9000, 700))))
    assert encoder.take_inexact_cuts() > 0
    assert reference(tokenizer_json).decode(ids) == text


def test_runs_are_known_for_plain_byte_level_bpe_alone(
    demo_tokenizer: Path, unigram_json: str, wordpiece_json: str, sentencepiece_json: dict[str, str]
) -> None:
    """Also where a token has the name of a field."""
    plain = json.dumps(json.loads(demo_tokenizer.read_text(encoding="utf-8")))
    assert find_runs(plain) == Runs(Words(), frozenset("<>"), normalises=False)
    assert find_runs(plain.replace('"vocab": {', '"vocab": {"normalizer": 99999, ')) == find_runs(plain)
    assert find_runs(with_rule(plain, LLAMA3, ignore_merges=True)).words == Words(digits=3)  # type: ignore[union-attr]
    others = (unigram_json, wordpiece_json, *sentencepiece_json.values(), with_rule(plain, r"\w+|\W"))
    others += (with_rule(plain, LLAMA3, normalizer="NFKC"), with_rule(plain, LLAMA3, unk_token="<unk>"))
    others += (plain.replace('"add_prefix_space": false', '"add_prefix_space": true'),)
    others += (with_rule(plain, LLAMA3, ignore_merges=True).replace('"vocab": {', '"vocab": {"%s": 9, ' % ("x" * 300)),)
    assert [find_runs(one) for one in others] == [None] * len(others)


@pytest.mark.parametrize(
    ("rule", "normalizer", "yes", "no"),
    [
        (
            "GPT-2",
            None,
            ["letters", "Éa漢", "123", "١٢٣", "=-'", "🙂👍🏽"],
            ["a1", "a b", "\n\n", "   ", "<=", "กิ", "\t"],
        ),
        ("Llama 3", None, ["aBc", "123", "!!"], ["١٢٣", "!\n"]),
        ("Qwen", "NFC", ["漢字", "éa", "각", "!!"], ["\u1112\u1161\u11ab", "\uf900", "🙂", "́́"]),
        ("o200k", None, ["lower", "ünter", "!!", "123"], ["Upper", "ABC", "漢字", "a漢", "☀️", "aʰ"]),
    ],
)
def test_an_overlap_is_of_one_kind_of_characters(
    demo_tokenizer: Path, rule: str, normalizer: str | None, yes: list[str], no: list[str]
) -> None:
    """That the rule for words, the normaliser and added tokens leave together wherever the text around it goes."""
    runs = find_runs(with_rule(demo_tokenizer.read_text(encoding="utf-8"), RULES[rule], normalizer=normalizer))
    assert runs is not None
    assert [text for text in yes if not runs.holds(text.encode())] == []
    assert [text for text in no if runs.holds(text.encode())] == []


def test_digits_in_threes_are_in_step_where_each_token_is_three(demo_tokenizer: Path) -> None:
    """Else the same tokens could come of other groups."""
    runs = find_runs(with_rule(demo_tokenizer.read_text(encoding="utf-8"), O200K))
    assert runs is not None
    assert [runs.in_step(b"12345678", tokens) for tokens in (2, 3, 4)] == [False, True, False]
    assert runs.in_step(b"letters", 7)
