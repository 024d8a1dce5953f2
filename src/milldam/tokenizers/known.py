"""What a job has to know of its tokenizer: special tokens, vocabulary, which encoder; found out once, then looked up.

Loading a tokenizer and proving an encoder takes a third of a second, so what was found is kept in a folder, a file
each. It is named by all that it follows from: the tokenizer's text and the names beside it, what is asked of it, the
texts of the proof, the versions of both libraries and of milldam, the kind of processor. So nothing kept is ever stale.
Only what was proved is kept; what is damaged or foreign is not believed. Half a kilobyte each, a thousand at most.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from milldam import __version__
from milldam.files import hash_bytes
from milldam.sealed import seal_line, unseal_line
from milldam.tokenizers.encoders import GIGATOKEN, HUGGINGFACE
from milldam.tokenizers.loading import TokenizerText
from milldam.tokenizers.proof import HARD_STRINGS, Choice, Expected, agreed, choose_encoder, expected_ids
from milldam.tokenizers.special import SpecialTokens, choose_special_tokens

_MOST_FILES = 1000


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
        libraries = (__version__, version("gigatoken"), version("tokenizers"), platform.machine())
        tokenizer = (hash_bytes(self.text.json.encode()), self.text.named)
        asked = (self.bos, self.eos, self.plain_specials, list(self.samples), HARD_STRINGS)
        return hash_bytes(repr((libraries, tokenizer, asked)).encode())


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


def find_out(question: Question, folder: Path) -> KnownTokenizer:
    """Look it up, or load the tokenizer; raises InputError for what is none, ConfigError for tokens that it lacks."""
    known = _kept(question, folder)
    if known is not None:
        return known
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
        return agreed(question.encoder, known.texts)
    choice = choose_encoder(question.encoder, known.json, known.expected, plain_specials=question.plain_specials)
    if choice.encoder == GIGATOKEN and choice.warning is None and known.json == question.text.json:
        _keep(question, known, folder)
    return choice


def _kept(question: Question, folder: Path) -> KnownTokenizer | None:
    with contextlib.suppress(OSError):
        found = unseal_line((folder / question.name).read_bytes())
        if found is not None and "added" in found:
            special, added = SpecialTokens(**found["special"]), tuple(found["added"])
            return KnownTokenizer(question.text.json, special, found["vocab_size"], added, texts=found["texts"])
    return None


def _keep(question: Question, known: KnownTokenizer, folder: Path) -> None:
    """Where the folder can't be written, nothing is kept."""
    found = {"special": asdict(known.special), "vocab_size": known.vocab_size, "texts": known.texts}
    found["added"] = known.added
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{question.name}.{os.getpid()}.new"
        # Not synced: what a power failure tears is not believed.
        new.write_bytes(seal_line(found))
        new.replace(folder / question.name)
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MOST_FILES]:
            path.unlink(missing_ok=True)
