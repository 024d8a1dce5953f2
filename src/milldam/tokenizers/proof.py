"""Which encoder to use, proved on the spot: gigatoken where it gives the very ids of HF tokenizers.

Encodes a fixed set of hard strings and the first documents of the real input with both. A difference falls back to
HF tokenizers, and the caller shows it to the user.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from milldam.errors import ConfigError, Setting
from milldam.memory import release
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, Ids, encode_by_huggingface, encode_each, make_encoder

_ADDED = 500


@dataclass(frozen=True, slots=True)
class Expected:
    """Texts, and the ids that an encoder must give."""

    texts: list[str]
    ids: list[Ids]


@dataclass(frozen=True, slots=True)
class Choice:
    encoder: str
    note: str
    """Why, in a sentence."""
    warning: str | None = None


def expected_ids(tokenizer: Any, samples: Sequence[str], *, plain_specials: bool) -> Expected:
    """What HF tokenizers makes of the hard strings and of samples of the input."""
    tokenizer.encode_special_tokens = plain_specials
    texts = [*HARD_STRINGS, *_around_added(tokenizer), *samples]
    return Expected(texts, encode_by_huggingface(tokenizer, texts))


def _around_added(tokenizer: Any) -> list[str]:
    """The tokenizer's own added tokens, in words, between words and doubled."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return [f"a {token} b{token}{token}c\n{token}\n " for token in added[:_ADDED]]


def choose_encoder(wanted: str, tokenizer_json: str, expected: Expected, *, plain_specials: bool) -> Choice:
    """Settle on an encoder."""
    if wanted == HUGGINGFACE:
        return agreed(wanted, 0)
    try:
        fast = make_encoder(GIGATOKEN, tokenizer_json, plain_specials=plain_specials, threads=1)
        difference = _first_difference(expected, encode_each(fast, expected.texts))
    except Exception as error:  # it refuses with several exception types, none of them its own
        return _refused(wanted, str(error).splitlines()[0] if str(error) else type(error).__name__)
    del fast
    release()
    if difference is None:
        return agreed(wanted, len(expected.texts))
    if wanted == GIGATOKEN:
        return Choice(GIGATOKEN, "as asked", warning=difference)
    fallback = "gigatoken and HF tokenizers disagree, so the slower HF tokenizers is used.\n"
    return Choice(HUGGINGFACE, "gigatoken's ids differ here", warning=fallback + difference)


def agreed(wanted: str, texts: int) -> Choice:
    """What to use where both encoders gave the same ids."""
    if wanted in (HUGGINGFACE, GIGATOKEN):
        return Choice(wanted, "as asked")
    return Choice(GIGATOKEN, f"same ids as HF tokenizers on {texts} texts: this input's first and hard ones")


def _refused(wanted: str, reason: str) -> Choice:
    if wanted == GIGATOKEN:
        said = f": gigatoken can't encode with this tokenizer ({reason}). Use "
        raise ConfigError(Setting("tokenizer.encoder"), said, Setting("tokenizer.encoder", "auto"), ".")
    return Choice(HUGGINGFACE, f"gigatoken does not know this kind of tokenizer: {reason}")


def _first_difference(expected: Expected, got: Sequence[Ids]) -> str | None:
    for text, right, ids in zip(expected.texts, expected.ids, got, strict=True):
        if not np.array_equal(ids, right):
            return _describe(text, ids, right)
    return None


def _describe(text: str, got: Ids, right: Ids) -> str:
    shorter = min(len(got), len(right))
    differing = np.flatnonzero(got[:shorter] != right[:shorter])
    at = int(differing[0]) if len(differing) else shorter
    return (
        f"  text: {text[:60]!r}{' ...' if len(text) > 60 else ''}\n"
        f"  at token {at}: gigatoken {got[at : at + 6].tolist()}, HF tokenizers {right[at : at + 6].tolist()}"
    )


def _hard_strings() -> list[str]:
    rng = random.Random(20261115)
    blocks = [0x20, 0xA0, 0x370, 0x400, 0x530, 0x590, 0x600, 0x900, 0x980, 0xB80, 0xE00, 0xF00, 0x10A0, 0x1200]
    blocks += [0x1780, 0x1E00, 0x2000, 0x2190, 0x2500, 0x2E80, 0x3040, 0x4E00, 0xAC00, 0xFB00, 0xFF00]
    blocks += [0x10330, 0x1D400, 0x1F300, 0x1F600, 0x20000]
    scripts = ["".join(chr(block + rng.randrange(0x5F)) for _ in range(60)) for block in blocks]
    mixed = "".join(chr(rng.choice(blocks) + rng.randrange(0x5F)) for _ in range(400))
    controls = "".join(map(chr, range(0x20))) + "\x7f\x80\x85\xa0\u2028\u2029\u200b\u200d\ufeff\ufffd\ufffe\U0010ffff"
    return [
        *scripts,
        mixed,
        controls,
        "".join(f"{chr(c)}a{chr(c)}1{chr(c)} " for c in (0x00, 0x09, 0x0A, 0x0B, 0x0D, 0x1F, 0x85, 0xA0, 0x3000)),
        "I'm, you're, IT'S, she'LL, o'clock, 'tis ''quoted'' don\u2019t l'été ʼn",
        "0 00 000 0000 12345678901234567890 1,000.50 ١٢٣ ४५६ ⅷ ½ x² H₂O 1e-9 0xdeadbeef",
        "a" * 3000,
        "ab1" * 1000,
        " " * 1500 + "x" + "\n" * 700 + "\t" * 50 + " \n \r\n \r",
        "=" * 1000 + "-" * 999 + "#!" * 400,
        "👩‍👩‍👧‍👦🏳️‍🌈👍🏽🇺🇦 é é ñ ǭ̂ Z̷̛̤a̸̧l̶g̴o̷ 각 각",
        "def f(x):\n\treturn {'a': x**2, \"b\": [1, 2.5]}  # comment\n\n\nclass A: ...\n",
        "https://example.org/a?b=c&d=%20#frag me@mail.example <b>bold</b> &amp; C:\\dir\\file.txt",
        "مرحبا بالعالم، שלום עולם। नमस्ते दुनिया สวัสดีชาวโลก 你好，世界。こんにちは世界！안녕하세요 세계",
        " leading and trailing ",
        "x",
        "\n",
    ]


HARD_STRINGS = _hard_strings()
