"""A document of any size, in any parts, has the ids that it has when HF tokenizers encodes it whole."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from milldam.tokenizers.engines import GIGATOKEN, HUGGINGFACE
from milldam.tokenizers.loading import load_tokenizer
from token_pieces import (
    TokenizerJson,
    cut_at,
    encode_in_parts,
    encode_whole,
    make_encoder,
    reference,
    small_engine,
    small_windows,
)

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
FEW = settings(max_examples=40, phases=[Phase.explicit, Phase.generate])
MORE = settings(FEW, max_examples=150)
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
    with small_windows():
        yield


def check(tokenizer_json: str, engine: str, text: str, places: list[int]) -> None:
    encoder = make_encoder(small_engine(tokenizer_json, engine), tokenizer_json, bare=engine)
    ids = encode_in_parts(encoder, cut_at(text, places))
    counted = encoder.take_inexact_cuts()
    if '"BPE"' in tokenizer_json:
        assert counted == 0
    # For the others a cut inside a run is checked, not proved: never wrong in silence.
    assert ids == encode_whole(reference(tokenizer_json), text) or counted


# ---- every kind of tokenizer ----


@pytest.mark.parametrize("engine", [GIGATOKEN, HUGGINGFACE])
@given(text=documents(*ALL), places=PLACES)
def test_bpe_in_pieces_is_bpe_of_the_whole(demo_tokenizer: Path, engine: str, text: str, places: list[int]) -> None:
    """The demo tokenizer by both engines, over text that has words and text that has none."""
    check(demo_tokenizer.read_text(encoding="utf-8"), engine, text, places)


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
@pytest.mark.parametrize("part", [137, 700, 100_000])
def test_words_behind_a_long_run_keep_their_marks(
    unigram_json: str, recipe: list[tuple[str, int, int]], part: int
) -> None:
    """A piece that continues a text is over where the next word begins, or has its marks too."""
    text = "".join(stretch(kind, size, random.Random(seed)) for kind, size, seed in recipe)
    check(unigram_json, HUGGINGFACE, text, list(range(0, len(text), part)))


@FEW
@given(text=documents("chinese", "glued words", "hex", "lines", "line ends"), places=PLACES)
def test_unigram_in_pieces_across_line_ends_is_unigram_of_the_whole(
    unigram_json: str, text: str, places: list[int]
) -> None:
    """Lines without spaces: there is no word start between them. Never wrong in silence."""
    encoder = make_encoder(small_engine(unigram_json), unigram_json)
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
    encoder = make_encoder(small_engine(wordpiece_json), wordpiece_json)
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


@pytest.mark.parametrize("name", SENTENCEPIECE)
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
    """The bare form runs on the fast engine too."""
    check(sentencepiece_json["bpe, as Llama 2"], GIGATOKEN, text, places)


def test_characters_that_normalise_to_spaces_are_marks_in_every_piece(sentencepiece_json: dict[str, str]) -> None:
    """What the bare form normalises is still text with marks."""
    text = "می\u200cگذاشت" * 400
    check(sentencepiece_json["unigram, as T5"], HUGGINGFACE, text, [])


# ---- where cuts fall ----


def test_a_document_really_is_cut(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: a text of 5 KB is encoded in many pieces, none much larger than asked for."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    engine = small_engine(tokenizer_json)
    sizes: list[int] = []
    encode = engine.encode
    monkeypatch.setattr(engine, "encode", lambda texts: [sizes.extend(map(len, texts.to_pylist())), encode(texts)][1])
    encode_in_parts(make_encoder(engine, tokenizer_json), ["word by word " * 400])
    assert len(sizes) > 15
    assert max(sizes) < 500


@pytest.mark.parametrize("kind", ["one letter", "hex", "chinese", "glued words"])
def test_a_run_without_any_word_is_cut_too(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Where ids(left) + ids(right) = ids(both); no piece grows with the run."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    engine = small_engine(tokenizer_json)
    sizes: list[int] = []
    encode = engine.encode
    monkeypatch.setattr(engine, "encode", lambda texts: [sizes.extend(map(len, texts.to_pylist())), encode(texts)][1])
    text = stretch(kind, 12_000, random.Random(1))
    ids = encode_in_parts(make_encoder(engine, tokenizer_json), cut_at(text, list(range(0, 12_000, 500))))
    assert ids == encode_whole(reference(tokenizer_json), text)
    assert max(sizes) < 3000


def test_a_word_that_is_one_unknown_token_is_one_at_any_size(wordpiece_json: str) -> None:
    """Its second half adds nothing, again and again."""
    text = "before " + "x" * 50_000 + " after"
    check(wordpiece_json, HUGGINGFACE, text, list(range(0, 50_000, 700)))


@pytest.mark.parametrize("extra", [1, 5, 9])
def test_a_cut_that_later_text_could_move_is_counted_as_inexact(unigram_json: str, extra: int) -> None:
    """Never wrong in silence."""
    tokenizer = reference(unigram_json)
    sign = next(c for c in "-\n=*.#" if any(t == c * len(t) and len(t) > 3 for t in tokenizer.get_vocab()))
    text = sign * (6000 + extra)
    encoder = make_encoder(small_engine(unigram_json), unigram_json)
    ids = encode_in_parts(encoder, cut_at(text, list(range(0, 6000, 450))))
    assert ids == encode_whole(tokenizer, text) or encoder.take_inexact_cuts()


def test_a_cut_that_cannot_be_proved_is_made_and_counted(demo_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather a cut that is told than a run that fills the memory."""
    tokenizer_json = demo_tokenizer.read_text(encoding="utf-8")
    monkeypatch.setattr("milldam.tokenizers.cutting._TRIES", 0)
    encoder = make_encoder(small_engine(tokenizer_json), tokenizer_json)
    ids = encode_in_parts(encoder, cut_at("x" * 60_000, list(range(0, 60_000, 900))))
    assert encoder.take_inexact_cuts() > 0
    assert encoder.take_inexact_cuts() == 0
    assert reference(tokenizer_json).decode(ids) == "x" * 60_000


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "t5", "xlnet-base-cased"])
@pytest.mark.parametrize("engine", [GIGATOKEN, HUGGINGFACE])
def test_real_text_in_pieces_is_the_whole_for_real_tokenizers(shared_data: Path, name: str, engine: str) -> None:
    """The works of Shakespeare, and notes in eleven languages in one line."""
    tokenizer_json = load_tokenizer(str(shared_data / "tokenizers" / name)).json
    if engine == GIGATOKEN and name in ("t5", "xlnet-base-cased"):
        pytest.skip("gigatoken knows BPE alone")
    text = (shared_data / "text/tinyshakespeare.txt").read_text(encoding="utf-8")[:30_000]
    text += (shared_data / "text/emoji-test.txt").read_text(encoding="utf-8")[20_000:40_000]
    check(tokenizer_json, engine, text, list(range(0, 50_000, 3000)))
