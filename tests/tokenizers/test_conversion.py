"""Older tokenizer files give the very ids of the programs they belong to."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers

from milldam.errors import InputError
from milldam.tokenizers.loading import load_tokenizer


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


# ---- sentencepiece ----


class Models(dict[str, tuple[sentencepiece.SentencePieceProcessor, Any]]):
    """By the kind's name: sentencepiece's own, and ours."""

    def __repr__(self) -> str:
        return "models"


AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "unigram, as T5 and XLNet": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "unigram with byte fallback": {"model_type": "unigram", "byte_fallback": True},
    "bpe, as Llama 2": {"model_type": "bpe", "byte_fallback": True, **AS_IT_IS},
    "bpe, as Gemma": {"model_type": "bpe", "byte_fallback": True, **AS_IT_IS, "add_dummy_prefix": False},
    "unigram, cased down": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
    "unigram, not normalised": {"model_type": "unigram", "normalization_rule_name": "identity"},
    "bpe, not normalised": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "unigram, spaces kept": {"model_type": "unigram", **AS_IT_IS},
    "unigram, marks of our own": {"model_type": "unigram", "user_defined_symbols": ["<sep>", "<cls>"]},
    "bpe, marks of our own": {"model_type": "bpe", "user_defined_symbols": ["<sep>", "<cls>"]},
}


@pytest.fixture(scope="module")
def models(demo_texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Each kind of sentencepiece model: as sentencepiece has it, and as we load it."""
    lines = [line for text in demo_texts for line in text.split("\n") if line]
    folder = tmp_path_factory.mktemp("sentencepiece")
    return {
        name: train(lines, folder / f"{number}.model", options) for number, (name, options) in enumerate(KINDS.items())
    }


def train(
    lines: list[str], path: Path, options: dict[str, Any]
) -> tuple[sentencepiece.SentencePieceProcessor, tokenizers.Tokenizer]:
    out = io.BytesIO()
    fixed = {"vocab_size": 1500, "character_coverage": 0.98, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, hard_vocab_limit=False, **fixed, **options
    )
    path.write_bytes(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()), plain(path)


def plain(path: Path) -> Any:
    """The loaded tokenizer, to which the text of a special token is text, as to sentencepiece."""
    tokenizer = load_tokenizer(str(path)).huggingface
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("name", KINDS)
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(models: Models, demo_texts: list[str], name: str) -> None:
    """On every line of the corpus and on whole documents, but for ties, which each settles in its own way."""
    original, loaded = models[name]
    # HF tokenizers drops marks in stacks of combining ones ("Zalgo"); that is theirs, and not what is tested here.
    texts = [text for text in demo_texts if not any("\u0300" <= char <= "\u036f" for char in text)]
    texts += [line for text in texts for line in text.split("\n")]
    different = [text for text in texts if encode(loaded, text) != original.encode(text)]
    assert len(different) <= len(texts) // 500


@pytest.mark.parametrize("kind", ["word", "char"])
def test_other_kinds_of_sentencepiece_model_are_refused(tmp_path: Path, kind: str) -> None:
    """Not read as something they are not."""
    out = io.BytesIO()
    lines = iter(["some words to train on", "and some more of them"])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=out, model_type=kind, vocab_size=18, minloglevel=2, hard_vocab_limit=False
    )
    (tmp_path / "a.model").write_bytes(out.getvalue())
    with pytest.raises(InputError, match="type word and char are not supported"):
        load_tokenizer(str(tmp_path / "a.model"))


@pytest.mark.parametrize("name", ["t5", "xlnet-base-cased"])
def test_real_sentencepiece_models_give_the_ids_of_sentencepiece(shared_data: Path, name: str) -> None:
    """On a thousand lines of real text that do not hold the name of a special token."""
    path = shared_data / "tokenizers" / name / "spiece.model"
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    loaded = plain(path)
    lines = (shared_data / "text/wikitext2-test.txt").read_text(encoding="utf-8").split("\n")[:1000]
    lines = [line.replace("<unk>", "unknown") for line in lines]
    assert [line for line in lines if encode(loaded, line) != original.encode(line)] == []


# ---- WordPiece ----

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "mill", "##s", "cafe", "café", ",", "你"]


def bert(folder: Path, vocab: list[str], config: dict[str, Any] | None = None) -> Any:
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(str(folder / "vocab.txt")).huggingface


def tokens_of(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.encode(text, add_special_tokens=False).tokens)


def test_a_bert_vocabulary_without_capitals_lowers_case_and_accents(tmp_path: Path) -> None:
    """As bert-base-uncased does; Chinese characters stand alone."""
    assert tokens_of(bert(tmp_path, VOCAB), "The MILLS,Café你你") == ["the", "mill", "##s", ",", "cafe", "你", "你"]


def test_a_bert_vocabulary_with_capitals_keeps_case_and_accents(tmp_path: Path) -> None:
    """As bert-base-cased does."""
    tokenizer = bert(tmp_path, [*VOCAB, "The"])
    assert tokens_of(tokenizer, "The the MILL café") == ["The", "the", "[UNK]", "café"]


# ---- vocab.json + merges.txt ----


def test_gpt2s_pair_of_files_equals_its_tokenizer_json(
    shared_data: Path, tmp_path: Path, demo_texts: list[str]
) -> None:
    """On every document of the demo corpus, and on the special token's text."""
    folder = shared_data / "tokenizers/gpt2"
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    pair, whole = (load_tokenizer(str(place)).huggingface for place in (tmp_path, folder))
    texts = [*demo_texts, "a<|endoftext|>b", " \n\n  x"]
    assert [encode(pair, text) for text in texts] == [encode(whole, text) for text in texts]
