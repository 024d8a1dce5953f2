"""A document of any size, in any pieces, has the ids that it has when HF tokenizers encodes it whole, with special
tokens around it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.kit.quick import first_quick
from tests.kit.token_pieces import (
    NO_SPECIAL,
    TokenizerJson,
    cut_at,
    encode_documents,
    encode_in_parts,
    encode_whole,
    reference,
    small_encoder,
    small_windows,
)

from milldam.tokenizers.document_encoder import DocumentEncoder, NoWhiteSpaceError, add_special_tokens
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE
from milldam.tokenizers.loading import SpecialTokens, load_tokenizer

GIANT = "a giant of many words that comes in pieces " * 40
WORDS = ["the", "mill", "turned", "slowly", "while", "water", "Nobody", "counted", "1984", "days", "it'll", "don't"]
EMOJI = ("🙂", "👍🏽", "🏳️‍🌈", "👩‍👩‍👧‍👦", "🇺🇦")
# A failure is told by its recipe of stretches, which needs no shrinking; that would take minutes.
FEW = settings(max_examples=settings.default.max_examples, phases=[Phase.explicit, Phase.generate])
PLACES = st.lists(st.integers(0, 20_000), max_size=12)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
KINDS = ("byte-level bpe", "bpe as Llama 3", "bpe without words", "bpe as Llama 2", "unigram", "wordpiece")


@pytest.fixture(scope="module")
def models(
    demo_tokenizer: Path,
    demo_texts: list[str],
    unigram_json: str,
    wordpiece_json: str,
) -> dict[str, str]:
    """A tokenizer.json of each kind."""
    plain = demo_tokenizer.read_text(encoding="utf-8")
    made = {"byte-level bpe": plain, "unigram": unigram_json, "wordpiece": wordpiece_json}
    split = {"type": "Split", "pattern": {"Regex": LLAMA3}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = {
        "bpe as Llama 3": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "bpe without words": byte_level,
    }
    for name, step in steps.items():
        made[name] = json.dumps(json.loads(plain) | {"pre_tokenizer": step})
    llama2 = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    marks = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    llama2.normalizer = tokenizers.normalizers.Sequence(marks)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    llama2.train_from_iterator((line[:300] for text in demo_texts[:50] for line in text.split("\n")), trainer)
    content = json.loads(llama2.to_str())
    made["bpe as Llama 2"] = json.dumps(content | {"added_tokens": content["added_tokens"][:1]})
    return {name: TokenizerJson(text) for name, text in made.items()}


@pytest.fixture(autouse=True)
def _small_windows() -> Iterator[None]:
    with small_windows():
        yield


# ---- long texts ----


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
        "marks": lambda: "".join(rng.choice("aeo ") + chr(rng.randrange(0x300, 0x370)) for _ in range(size // 3)),
        "lines": lambda: "\n".join(rng.choices(WORDS, k=size // 6)),
        "signs": lambda: "".join(rng.choices("=-#!*/ ", k=size)),
        "line ends": lambda: rng.choice(["\n", "\r\n", "\n \n", "!\n", "a\n\n", "=\t"]) * (size // 3),
        "odd spaces": lambda: "".join(
            rng.choices(["word", "\u3000", "\u00a0", "\u2028", " \u0301", "\x85", " "], k=size // 3)
        ),
    }
    return makers[kind]()


STRETCHES = ("words", "glued words", "spaces", "hex", "one letter", "chinese", "emoji", "marks", "lines", "signs")
DOCUMENTS = st.lists(
    st.tuples(st.sampled_from((*STRETCHES, "line ends", "odd spaces")), st.integers(1, 1500), st.integers(0, 1000)),
    min_size=1,
    max_size=6,
).map(lambda chosen: "".join(stretch(kind, size, random.Random(seed)) for kind, size, seed in chosen))


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(text=DOCUMENTS, places=PLACES)
def test_a_text_in_pieces_has_the_ids_of_the_whole(
    models: dict[str, str], kind: str, text: str, places: list[int]
) -> None:
    """Every kind of model, over text that has words and text that has none; none of it is longer than a run may be."""
    whole = encode_whole(reference(models[kind]), text)
    for name in (HUGGINGFACE, GIGATOKEN) if kind in ("byte-level bpe", "bpe as Llama 2") else (HUGGINGFACE,):
        encoder = DocumentEncoder(small_encoder(models[kind], name), NO_SPECIAL, "uint32")
        try:
            assert encode_in_parts(encoder, cut_at(text, places)) == whole
        except NoWhiteSpaceError:
            assert len(text.encode()) > 8000


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_really_is_cut(models: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above: a text of 20 KB of words is encoded in many pieces, none much larger than asked for."""
    encoder, sizes = small_encoder(models[kind]), []
    encode = encoder.encode

    def watched(texts):  # type: ignore[no-untyped-def]
        sizes.extend(len(text) for text in texts.to_pylist())
        return encode(texts)

    monkeypatch.setattr(encoder, "encode", watched)
    text = stretch("words", 20_000, random.Random(2))
    ids = encode_documents(DocumentEncoder(encoder, NO_SPECIAL, "uint32"), [text])
    assert ids == [encode_whole(reference(models[kind]), text)]
    assert len(sizes) > 50 and max(sizes) < 1000


def test_a_text_without_white_space_is_named_and_others_stay(models: dict[str, str]) -> None:
    """As long as it would have to be cut, whole or in pieces; what comes after is not touched."""
    encoder = DocumentEncoder(small_encoder(models["byte-level bpe"]), NO_SPECIAL, "uint32")
    long, whole = "x" * 9000, reference(models["byte-level bpe"])
    found = encode_documents(encoder, ["one", "words " * 200 + long, "two"])
    assert found == [encode_whole(whole, "one"), [], encode_whole(whole, "two")]
    assert encoder.uncut == [1]
    with pytest.raises(NoWhiteSpaceError, match="no white space"):
        encode_in_parts(encoder, [long[:4000], long[4000:], " and more"])
    assert encode_documents(encoder, ["next"]) == [encode_whole(whole, "next")]
    assert encoder.uncut == []


@pytest.mark.parametrize("name", first_quick(["gpt2", "qwen2.5", "t5", "xlnet-base-cased", "bert-base-uncased"]))
def test_real_text_in_pieces_is_the_whole_for_real_tokenizers(shared_data: Path, name: str) -> None:
    """The works of Shakespeare, and notes in eleven languages in one line."""
    tokenizer_json = load_tokenizer(str(shared_data / "tokenizers" / name)).json
    text = (shared_data / "text/tinyshakespeare.txt").read_text(encoding="utf-8")[:30_000]
    text += (shared_data / "text/emoji-test.txt").read_text(encoding="utf-8")[20_000:40_000]
    for encoder in (HUGGINGFACE, GIGATOKEN) if name in ("gpt2", "qwen2.5") else (HUGGINGFACE,):
        one = DocumentEncoder(small_encoder(tokenizer_json, encoder), NO_SPECIAL, "uint32")
        parts = cut_at(text, list(range(0, 50_000, 3000)))
        assert encode_in_parts(one, parts) == encode_whole(reference(tokenizer_json), text)


# ---- batches ----


@pytest.mark.parametrize("name", [GIGATOKEN, HUGGINGFACE])
@settings(max_examples=50)
@given(texts=st.lists(st.sampled_from(["one", "", "two words", "é🙂", "\n", GIANT, "x" * 290, "y" * 301]), max_size=12))
def test_documents_keep_their_order_among_giants(models: dict[str, str], name: str, texts: list[str]) -> None:
    """Small, giant and empty ones in any mix: the ids of each with the end of a document, of an empty one none."""
    tokenizer_json = models["byte-level bpe"]
    encoder = DocumentEncoder(small_encoder(tokenizer_json, name), SpecialTokens(None, 0), "uint32")
    whole = (encode_whole(reference(tokenizer_json), text) for text in texts)
    assert encode_documents(encoder, texts) == [[*ids, 0] if ids else [] for ids in whole]
    assert encode_in_parts(encoder, ["", ""]) == []


# ---- special tokens ----


def naive_special(documents: list[list[int]], bos: int | None, eos: int | None) -> list[list[int]]:
    return [
        [*([bos] if bos not in (None, ids[0]) else []), *ids, *([eos] if eos not in (None, ids[-1]) else [])]
        if ids
        else []
        for ids in documents
    ]  # type: ignore[list-item]


token = st.integers(0, 4)
documents_of_ids = st.lists(st.lists(token, max_size=6), max_size=12)


@given(documents=documents_of_ids, bos=st.none() | token, eos=st.none() | token)
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_special_tokens_are_put_around_documents_and_never_doubled(
    documents: list[list[int]], bos: int | None, eos: int | None, dtype: str
) -> None:
    """As a plain loop would do it."""
    flat = np.array([number for ids in documents for number in ids], np.uint32)
    lengths = np.array([len(ids) for ids in documents], np.int64)
    out, out_lengths = add_special_tokens(flat, lengths, SpecialTokens(bos, eos), np.dtype(dtype))
    wanted = naive_special(documents, bos, eos)
    assert out.tolist() == [number for ids in wanted for number in ids]
    assert out_lengths.tolist() == [len(ids) for ids in wanted]
    assert out.dtype == dtype


@pytest.mark.parametrize("text", ["{0}a", "a{0}", "{0}a{0}"])
def test_special_tokens_that_a_giant_has_already_are_not_doubled(models: dict[str, str], text: str) -> None:
    """As in a small document: here the token of a letter is also the special one."""
    tokenizer = reference(models["byte-level bpe"])
    sign = tokenizer.token_to_id("#")
    encoder = DocumentEncoder(small_encoder(models["byte-level bpe"]), SpecialTokens(sign, sign), "uint32")
    texts = [text.replace("a", " b ").format("#"), text.replace("a", f" {GIANT}").format("#")]
    plain = [encode_whole(tokenizer, one) for one in texts]
    assert encode_documents(encoder, texts) == naive_special(plain, sign, sign)
