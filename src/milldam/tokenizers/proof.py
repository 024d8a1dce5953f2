"""Which encoder to use, proved on the spot: gigatoken where it gives the very ids of HF tokenizers.

Encodes all of Unicode (sweep.py), a fixed set of hard strings and the first documents of the real input with both.
Texts with a character on which they differ go to HF tokenizers; another difference falls back to HF tokenizers for
everything, and the caller shows it to the user.

What a job has to know of its tokenizer (special tokens, vocabulary, encoder) is found out once, then looked up.
Loading a tokenizer and proving an encoder takes a third of a second, the sweep a second or two a tokenizer, so what was
found is kept in a folder, a file each. It is named by all that it follows from: the tokenizer's text and the names
beside it, what is asked of it, the texts of the proof, the versions of both libraries and of milldam, the kind of
processor. So nothing kept is ever stale. Only what was proved is kept; what is damaged or foreign is not believed. A
kilobyte or two each, a thousand at most.
"""

from __future__ import annotations

import contextlib
import platform
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from milldam import __version__
from milldam.errors import ConfigError, Setting
from milldam.files import hash_bytes, replace_unsynced, seal_line, unseal_line
from milldam.memory import release
from milldam.tokenizers.encoders import (
    GIGATOKEN,
    HUGGINGFACE,
    Encoder,
    Ids,
    Ranges,
    encode_by_huggingface,
    encode_each,
)
from milldam.tokenizers.loading import SpecialTokens, TokenizerText, choose_special_tokens
from milldam.tokenizers.sweep import sweep_apart

KNOWN_TOKENIZERS = "tokenizers"
"""In the user's cache: what was found out."""
_MOST_FILES = 1000
_ADDED = 500


@dataclass(frozen=True, slots=True)
class Choice:
    encoder: str
    note: str
    """Why, in a sentence."""
    warning: str | None = None
    differing: Ranges = ()
    """The characters that gigatoken leaves to HF tokenizers, with all of their text."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Texts, and the ids that an encoder must give."""

    texts: list[str]
    ids: list[Ids]


def expected_ids(tokenizer: Any, samples: Sequence[str], *, plain_specials: bool) -> Expected:
    """What HF tokenizers makes of the hard strings, of its own added tokens and of samples of the input."""
    tokenizer.encode_special_tokens = plain_specials
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    around = [f"a {token} b{token}{token}c\n{token}\n " for token in added[:_ADDED]]
    texts = [*HARD_STRINGS, *around, *samples]
    return Expected(texts, encode_by_huggingface(tokenizer, texts))


def choose_encoder(
    wanted: str, tokenizer_json: str, expected: Expected, *, plain_specials: bool, folder: Path
) -> Choice:
    """Settle on an encoder. `folder`: where it is kept which characters differ."""
    if wanted == HUGGINGFACE:
        return _agreed(wanted, 0, ())
    try:
        differing = _differing(tokenizer_json, folder, plain_specials=plain_specials)
        fast = Encoder(GIGATOKEN, tokenizer_json, plain_specials=plain_specials, differing=differing or ())
        difference = _first_difference(expected, encode_each(fast, expected.texts))
    except Exception as error:  # gigatoken refuses with several exception types, none of them its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if wanted == GIGATOKEN:
            said = f": gigatoken can't encode with this tokenizer ({reason}). Use "
            raise ConfigError(Setting("tokenizer.encoder"), said, Setting("tokenizer.encoder", "auto"), ".") from None
        return Choice(HUGGINGFACE, f"gigatoken does not know this kind of tokenizer: {reason}")
    del fast
    release()
    if difference is None and differing is None:
        difference = "  with one of ten thousands of characters, or of the most usual ones"
    if difference is None:
        return _agreed(wanted, len(expected.texts), differing or ())
    if wanted == GIGATOKEN:
        return Choice(GIGATOKEN, "as asked", warning=difference)
    fallback = "gigatoken and HF tokenizers disagree, so the slower HF tokenizers is used.\n"
    return Choice(HUGGINGFACE, "gigatoken's ids differ here", warning=fallback + difference)


def _agreed(wanted: str, texts: int, differing: Ranges) -> Choice:
    """What to use where both encoders gave the same ids."""
    if wanted == HUGGINGFACE:
        return Choice(wanted, "as asked")
    count = sum(last - first + 1 for first, last in differing)
    note = f"same ids as HF tokenizers on {texts} texts: this input's first and hard ones"
    note += f"; texts with one of {count:,} rare characters by HF tokenizers" if count else ""
    return Choice(GIGATOKEN, "as asked" if wanted == GIGATOKEN else note, differing=differing)


def _differing(tokenizer_json: str, folder: Path, *, plain_specials: bool) -> Ranges | None:
    """The characters on which the encoders differ, looked up or found out; None: they differ on too much."""
    name = f"characters-{hash_bytes(repr((*_libraries(), tokenizer_json, plain_specials)).encode())}"
    kept = _read(folder, name)
    if kept is not None:
        return kept["differing"] and _ranges(kept["differing"])
    normalizes = re.search(r'"normalizer"\s*:\s*null', tokenizer_json) is None
    differing = sweep_apart(tokenizer_json, plain_specials=plain_specials, normalizes=normalizes)
    _write(folder, name, {"differing": differing})
    return differing


def _first_difference(expected: Expected, got: Sequence[Ids]) -> str | None:
    for text, right, ids in zip(expected.texts, expected.ids, got, strict=True):
        if not np.array_equal(ids, right):
            shorter = min(len(ids), len(right))
            differing = np.flatnonzero(ids[:shorter] != right[:shorter])
            at = int(differing[0]) if len(differing) else shorter
            return (
                f"  text: {text[:60]!r}{' ...' if len(text) > 60 else ''}\n"
                f"  at token {at}: gigatoken {ids[at : at + 6].tolist()}, HF tokenizers {right[at : at + 6].tolist()}"
            )
    return None


# ---- hard strings ----


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


# ---- what was found out before ----


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a tokenizer."""

    text: TokenizerText
    encoder: str
    """auto, or the one that is wanted."""
    bos: str
    eos: str
    plain_specials: bool
    samples: Sequence[str]
    """The first documents of the input."""

    @property
    def name(self) -> str:
        """Another one whenever the answer could be another one."""
        tokenizer = (hash_bytes(self.text.json.encode()), self.text.named)
        asked = (self.bos, self.eos, self.plain_specials, list(self.samples), HARD_STRINGS)
        return hash_bytes(repr((_libraries(), tokenizer, asked)).encode())


@dataclass(frozen=True, slots=True)
class KnownTokenizer:
    json: str
    """As HF tokenizers loads it: nothing in it that changes ids in silence."""
    special: SpecialTokens
    vocab_size: int
    added: tuple[str, ...]
    """The texts of its added tokens."""
    expected: Expected | None = None
    """What an encoder has to give; None: it was proved before."""
    texts: int = 0
    """On so many texts."""
    differing: Ranges = ()
    """Where it was proved before: the characters on which the encoders differ."""


def find_out(question: Question, folder: Path) -> KnownTokenizer:
    """Look it up, or load the tokenizer; raises InputError for what is none, ConfigError for tokens that it lacks."""
    kept = _read(folder, question.name)
    if kept is not None:
        special, added = SpecialTokens(**kept["special"]), tuple(kept["added"])
        proved = {"texts": kept["texts"], "differing": _ranges(kept["differing"])}
        return KnownTokenizer(question.text.json, special, kept["vocab_size"], added, **proved)
    tokenizer = question.text.load()
    special = choose_special_tokens(tokenizer.huggingface, tokenizer.named, bos=question.bos, eos=question.eos)
    expected = Expected([], [])
    if question.encoder != HUGGINGFACE:
        expected = expected_ids(tokenizer.huggingface, question.samples, plain_specials=question.plain_specials)
    added = tuple(token.content for token in tokenizer.huggingface.get_added_tokens_decoder().values())
    return KnownTokenizer(tokenizer.json, special, tokenizer.vocab_size, added, expected, len(expected.texts))


def settle_encoder(question: Question, known: KnownTokenizer, folder: Path) -> Choice:
    """The encoder to use, proved now or before; keeps what was proved now."""
    if known.expected is None:
        return _agreed(question.encoder, known.texts, known.differing)
    plain = question.plain_specials
    choice = choose_encoder(question.encoder, known.json, known.expected, plain_specials=plain, folder=folder)
    if choice.encoder == GIGATOKEN and choice.warning is None and known.json == question.text.json:
        found = {"special": asdict(known.special), "vocab_size": known.vocab_size, "texts": known.texts}
        _write(folder, question.name, found | {"added": known.added, "differing": choice.differing})
    return choice


def _libraries() -> tuple[str, ...]:
    return (__version__, version("gigatoken"), version("tokenizers"), platform.machine())


def _ranges(pairs: list[list[int]]) -> Ranges:
    return tuple((first, last) for first, last in pairs)


def _read(folder: Path, name: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError):
        kept = unseal_line((folder / name).read_bytes())
        return kept if kept is not None and "differing" in kept else None
    return None


def _write(folder: Path, name: str, known: dict[str, Any]) -> None:
    """Keep what is known; where the folder can't be written, nothing is kept."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_unsynced(folder / name, seal_line(known))
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
            path.unlink(missing_ok=True)
