"""Which encoder to use, proved on the spot: gigatoken where it gives the very ids of HF tokenizers.

Encodes all of Unicode (sweep.py), a fixed set of hard strings and the first documents of the real input with both.
Texts with a character on which they differ go to HF tokenizers; another difference falls back to HF tokenizers for
everything, and the caller shows it to the user.

What a job has to know of its tokenizer (special tokens, vocabulary, encoder) is found out once, then looked up.
Loading a tokenizer and proving an encoder takes a third of a second, the sweep a second or two a tokenizer, so what was
found is kept in the user's cache, a file each. It is named by all that it follows from: the tokenizer's text and the
names beside it, what is asked of it, the texts of the proof, the versions of both libraries and of milldam, the kind of
processor. So nothing kept is ever stale, and what is damaged is not believed. A kilobyte or two each, a thousand at
most.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from milldam import __version__
from milldam.errors import ConfigError, Setting
from milldam.files import hash_bytes, replace_unsynced, seal_line, unseal_line, user_cache
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE, Encoder, Ranges, encode_by_huggingface, encode_each
from milldam.tokenizers.loading import SpecialTokens, Tokenizer, choose_special_tokens
from milldam.tokenizers.sweep import sweep_apart

FOLDER = "tokenizers"
"""In the user's cache."""
_MOST_FILES = 1000
_ADDED = 500

_BLOCKS = (
    *(0x20, 0xA0, 0x370, 0x400, 0x530, 0x590, 0x600, 0x900, 0x980, 0xB80, 0xE00, 0xF00, 0x10A0, 0x1200, 0x1780),
    *(0x1E00, 0x2000, 0x2190, 0x2500, 0x2E80, 0x3040, 0x4E00, 0xAC00, 0xFB00, 0xFF00, 0x10330, 0x1D400, 0x1F300),
    *(0x1F600, 0x20000),
)
HARD_STRINGS = [
    *("".join(chr(block + place * 37 % 0x5F) for place in range(60)) for block in _BLOCKS),
    "".join(chr(_BLOCKS[place * 13 % len(_BLOCKS)] + place * 37 % 0x5F) for place in range(400)),
    "".join(map(chr, range(0x20))) + "\x7f\x80\x85\xa0\u2028\u2029\u200b\u200d\ufeff\ufffd\ufffe\U0010ffff",
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


@dataclass(frozen=True, slots=True)
class ProvedTokenizer:
    """All that a job has to know of its tokenizer."""

    name: str
    json: str
    """As HF tokenizers loads it: nothing in it that changes ids in silence."""
    special: SpecialTokens
    vocab_size: int
    added: tuple[str, ...]
    """The texts of its added tokens."""
    encoder: str
    note: str
    """Why this encoder, in a sentence."""
    warning: str | None = None
    differing: Ranges = ()
    """The characters that gigatoken leaves to HF tokenizers, with all of their text."""


def prove(
    text: Tokenizer, *, encoder: str, bos: str, eos: str, plain_specials: bool, samples: Sequence[str] = ()
) -> ProvedTokenizer:
    """Settle on special tokens and an encoder, or look up what was found before. `encoder`: auto, or the one wanted.

    Raises InputError for what is no tokenizer, ConfigError for tokens or an encoder that can't be had.
    """
    asked = (encoder, bos, eos, plain_specials, list(samples), HARD_STRINGS)
    name = _name(hash_bytes(text.json.encode()), text.named, asked)
    kept = _read(name)
    if kept is not None:
        kept["special"], kept["added"] = SpecialTokens(*kept["special"]), tuple(kept["added"])
        kept["differing"] = tuple((first, last) for first, last in kept["differing"])
        return ProvedTokenizer(text.name, text.json, **kept)
    loaded = text.load()
    tokenizer = loaded.huggingface
    special = choose_special_tokens(tokenizer, text.named, bos=bos, eos=eos)
    added = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())
    choice: dict[str, Any] = {"encoder": encoder, "note": "as asked"}
    if encoder != HUGGINGFACE:
        around = [f"a {token} b{token}{token}c\n{token}\n " for token in added[:_ADDED]]
        tokenizer.encode_special_tokens = plain_specials
        choice = _choose(encoder, loaded, [*HARD_STRINGS, *around, *samples], plain_specials)
    proved = ProvedTokenizer(text.name, loaded.json, special, loaded.vocab_size, added, **choice)
    if proved.encoder == GIGATOKEN and loaded.json == text.json:
        found = asdict(proved) | {"special": list(asdict(special).values())}
        del found["name"], found["json"]
        _write(name, found)
    return proved


def _choose(wanted: str, loaded: Tokenizer, texts: list[str], plain_specials: bool) -> dict[str, Any]:
    """The encoder to use, and why."""
    right, difference = encode_by_huggingface(loaded.huggingface, texts), None
    try:
        differing = _differing(loaded.json, plain_specials)
        fast = Encoder(GIGATOKEN, loaded.json, plain_specials=plain_specials, differing=differing or ())
        for text, wished, ids in zip(texts, right, encode_each(fast, texts), strict=True):
            if not np.array_equal(ids, wished):
                shorter = min(len(ids), len(wished))
                at = next(iter(np.flatnonzero(ids[:shorter] != wished[:shorter]).tolist()), shorter)
                both = f"gigatoken {ids[at : at + 6].tolist()}, HF tokenizers {wished[at : at + 6].tolist()}"
                difference = f"  text: {text[:60]!r}{' ...' if len(text) > 60 else ''}\n  at token {at}: {both}"
                break
    except Exception as error:  # gigatoken refuses with several exception types, none of them its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if wanted == GIGATOKEN:
            message = f": gigatoken can't encode with this tokenizer ({reason}). Use "
            auto = Setting("tokenizer.encoder", "auto")
            raise ConfigError(Setting("tokenizer.encoder"), message, auto, ".") from None
        return {"encoder": HUGGINGFACE, "note": f"gigatoken does not know this kind of tokenizer: {reason}"}
    if difference is None and differing is None:
        difference = "  with one of ten thousands of characters, or of the most usual ones"
    if difference is None:
        count = sum(last - first + 1 for first, last in differing or ())
        note = f"same ids as HF tokenizers on {len(texts)} texts: this input's first and hard ones"
        note += f"; texts with one of {count:,} rare characters by HF tokenizers" if count else ""
        return {"encoder": GIGATOKEN, "note": note if wanted != GIGATOKEN else "as asked", "differing": differing or ()}
    if wanted == GIGATOKEN:
        return {"encoder": GIGATOKEN, "note": "as asked", "warning": difference}
    fallback = "gigatoken and HF tokenizers disagree, so the slower HF tokenizers is used.\n"
    return {"encoder": HUGGINGFACE, "note": "gigatoken's ids differ here", "warning": fallback + difference}


def _differing(tokenizer_json: str, plain_specials: bool) -> Ranges | None:
    """The characters on which the encoders differ, looked up or found out; None: they differ on too much."""
    name = f"characters-{_name(tokenizer_json, plain_specials)}"
    kept = _read(name)
    if kept is None:
        normalizes = re.search(r'"normalizer"\s*:\s*null', tokenizer_json) is None
        kept = {"differing": sweep_apart(tokenizer_json, plain_specials=plain_specials, normalizes=normalizes)}
        _write(name, kept)
    return kept["differing"] and tuple((first, last) for first, last in kept["differing"])


# ---- what was found out before ----


def _name(*follows_from: object) -> str:
    libraries = (__version__, version("gigatoken"), version("tokenizers"), platform.machine())
    return hash_bytes(repr((libraries, follows_from)).encode())


def _read(name: str) -> dict[str, Any] | None:
    with contextlib.suppress(OSError):
        kept = unseal_line((user_cache() / FOLDER / name).read_bytes())
        return kept if kept is not None and "differing" in kept else None
    return None


def _write(name: str, found: dict[str, Any]) -> None:
    """Keep what was found out; where the folder can't be written, nothing is kept."""
    folder = user_cache() / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        replace_unsynced(folder / name, seal_line(found))
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
            path.unlink(missing_ok=True)
