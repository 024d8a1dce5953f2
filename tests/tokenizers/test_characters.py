"""Characters on which the fast encoder and HF tokenizers differ: the ids are those of HF tokenizers all the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.kit.jobs import TOKENIZER, documents, run_here, write_lines

import milldam

NEW_LETTER = "\u088f"
"""A letter of Unicode 17: elsewhere `'s` behind it is no word of its own."""
WORDS = {"gpt2": {}, "nfc": {"normalizer": {"type": "NFC"}}}


def mixtures(count: int) -> Iterator[str]:
    """Of ASCII, marks, and characters of a few blocks, or of all of Unicode."""
    rng = random.Random(27)
    for _ in range(count):
        ends = rng.choice(((0xA0, 0xD800), (0x10000, 0x20000), (0x20000, 0x110000)))
        blocks = [range(start := rng.randrange(*ends) & ~0x7F, start + 0x80) for _ in range(2)]
        some = [range(0x20, 0x7F), [0x20, 0x20, 0x27, 0x73, 0x0A], [0x301, 0x334, 0x345, 0x200D], *blocks, *blocks]
        points = (rng.choice(rng.choice(some)) for _ in range(rng.randrange(60)))
        yield "".join(map(chr, points))


def check(tokenizer: Path, texts: list[str]) -> None:
    encode, right = milldam.TextEncoder(tokenizer), tokenizers.Tokenizer.from_file(str(tokenizer))
    for text, ids in zip(texts, encode(texts), strict=True):
        assert ids.tolist() == right.encode(text, add_special_tokens=False).ids, ascii(text)


@pytest.mark.parametrize("words", WORDS)
def test_ids_are_those_of_hf_tokenizers_on_all_of_unicode(tmp_path: Path, words: str) -> None:
    """By any rule for words; with letters, signs and marks that only one of the libraries knows."""
    content: dict[str, Any] = json.loads(TOKENIZER.read_text(encoding="utf-8")) | WORDS[words]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    known = [
        "a\u1acf's b",
        "x  \u1acf",
        "e\u0897\u0334",
        "\U000113c2\U000113c2",
        "\U0001138b\U000113c5",
        "  \U000323b1's",
    ]
    check(tmp_path / "tokenizer.json", [*known, *mixtures(800)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "t5", "xlnet-base-cased"])
def test_ids_are_those_of_hf_tokenizers_for_real_tokenizers(shared_data: Path, name: str) -> None:
    check(shared_data / "tokenizers" / name / "tokenizer.json", list(mixtures(20_000)))


def test_documents_with_such_characters_are_counted(tmp_path: Path) -> None:
    """Also a giant one, of which one piece has them; the summary tells."""
    texts = ["a plain one", f"{NEW_LETTER}'s", *["plain too"] * 50, f"{NEW_LETTER}'s " + "some words " * 110_000]
    corpus = write_lines(tmp_path / "corpus.jsonl", texts)
    done = run_here("tokenize", corpus, "-o", tmp_path / "store", "--tokenizer", TOKENIZER, "--eos", "none", "-v")
    assert "(2 documents by HF tokenizers)" in done.stdout + done.stderr
    right = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    assert documents(tmp_path / "store") == [right.encode(text, add_special_tokens=False).ids for text in texts]
