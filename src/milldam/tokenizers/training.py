"""A sample of text -> a tokenizer trained on it: byte-level BPE or unigram, by the trainers of HF tokenizers.

Both work on bytes and know all 256 of them, so that every text comes back as it was; that is checked on hard strings
and on a part of the sample before anything is saved, and a failure is an error.

The same texts give the same tokenizer.json, byte for byte, whatever the batches, cores and order. For unigram this
rests on rounding: its trainer adds up numbers in another order every time, which shows in the 14th digit of a score;
four are kept.

Memory goes with the different words, not with the text: about 130 bytes for each byte of them, 220 with unigram.
`training_bytes` is what common text takes; with a limit, text of too many different words is refused while it is
read, before the trainer takes its memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

from milldam.errors import ConfigError, InputError, ResourceError, Setting
from milldam.files import explain_os_errors, hash_bytes, json_bytes, write_file
from milldam.memory import format_size, release

Model = Literal["bpe", "unigram"]

BYTES = 256
_FIXED_BYTES = 64_000_000
_PER_WORD_BYTE = {"bpe": 130, "unigram": 220}
_PER_SAMPLE_BYTE = {"bpe": 6, "unigram": 25}
_PER_TOKEN = 1_000
# Longer stretches without white space are cut: the work on a word grows with the square of its length.
_LONGEST_WORD = 256
_LONG_WORD = rf"(\S{{{_LONGEST_WORD}}})"
_LONGEST_TEXT = 1 << 16
_CHECKED_BYTES = 1 << 20
_SCORE_DIGITS = 4
_SCORE_STEP = 0.0001
# About what the pre-tokenizer splits at: enough to count words by.
_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")
_ROLES = {
    "bos_token": re.compile(r"bos|begin|startof|start_of|^<s>$", re.IGNORECASE),
    "pad_token": re.compile(r"pad", re.IGNORECASE),
    "unk_token": re.compile(r"unk", re.IGNORECASE),
}

HARD_STRINGS = (
    "",
    " ",
    "   three   spaces   ",
    "\n\n\t\r\n \u00a0\u2003\u3000end",
    "\x00\x01\x7f\x80\x9f control",
    "".join(map(chr, range(256))),
    "it's we'll I'm 'tis don''t",
    "naïve café, Straße; İstanbul ǆ ﬁ",
    "e\u0301 é \u1e9b\u0323 ç\u0327",
    "\ufeffBOM \u200b\u200d\u2028\u2029\u202e",
    "漢字仮名交じり文、안녕하세요。สวัสดีครับ नमस्ते مرحبا שלום",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇺🇦 1️⃣",
    "\U0001f600\U000e0001\U0010ffff\ufffd\ufffe",
    "3.14159 1,000,000 ½ ² ٣ 〇",
    "def f(x):\n\treturn {x: [1, 2]}  # ok\n",
    "<|endoftext|> </s> [PAD] <unk> ▁Ġ▁",
    "a" * 1000 + "!" * 300,
)


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """What was made, and from how much."""

    path: Path
    model: str
    vocab_size: int
    """Tokens in the vocabulary; fewer than wanted when the sample holds no more."""
    xxh3: str
    """Hash of tokenizer.json."""
    documents: int
    sample_bytes: int
    word_bytes: int
    """Bytes of the different words, which the memory went with."""
    checked_texts: int
    """Texts, hard strings included, that came back as they were."""
    bytes_per_token: float
    """On the part of the sample that was checked."""

    def lines(self) -> list[str]:
        return [
            f"{self.model} tokenizer of {self.vocab_size:,} tokens in {self.path}",
            f"trained on {self.documents:,} documents, {format_size(self.sample_bytes)}; "
            f"{self.bytes_per_token:.2f} bytes a token",
            f"{self.checked_texts:,} texts encoded and decoded, all unchanged",
        ]


def training_bytes(sample_bytes: int, vocab_size: int, model: Model = "bpe") -> int:
    """The anonymous memory that training on so much common text takes; in many languages it may be twice that.

    >>> training_bytes(100_000_000, 32_000)
    696000000
    """
    return _FIXED_BYTES + _PER_SAMPLE_BYTE[model] * sample_bytes + _PER_TOKEN * vocab_size


def train_tokenizer(
    texts: Iterable[pa.LargeStringArray],
    *,
    out: Path,
    model: Model = "bpe",
    vocab_size: int = 32_000,
    special_tokens: tuple[str, ...] = ("<|endoftext|>",),
    memory_bytes: int | None = None,
) -> TrainedTokenizer:
    """Train on the texts and save a folder with tokenizer.json and tokenizer_config.json.

    The first special token ends documents. `memory_bytes`: refuse text that would take more.
    """
    if not special_tokens or not all(special_tokens) or len(set(special_tokens)) != len(special_tokens):
        raise ConfigError("special_tokens: name at least one, each once; the first one ends documents.")
    smallest = BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size: {vocab_size:,} is too few: bytes and special tokens alone are {smallest:,}.")
    sample = _Sample(model, memory_bytes)
    text = _train(sample.feed(texts), model, vocab_size, special_tokens)
    if model == "unigram":
        text = _settled(text, len(special_tokens), vocab_size)
    size, per_token = _check_round_trip(text, sample.checked)
    with explain_os_errors(out / "tokenizer.json"):
        out.mkdir(parents=True, exist_ok=True)
    # Last what makes the folder a tokenizer.
    write_file(out / "tokenizer_config.json", json_bytes(_named_tokens(special_tokens)))
    write_file(out / "tokenizer.json", text.encode())
    figures = sample.documents, sample.size, sample.word_bytes, len(HARD_STRINGS) + len(sample.checked), per_token
    return TrainedTokenizer(out, model, size, hash_bytes(text.encode()), *figures)


# ---- what the trainer is given ----


class _Sample:
    """The texts on their way to the trainer: cut, counted, a part of them kept for the check."""

    def __init__(self, model: Model, memory_bytes: int | None) -> None:
        self.documents = self.size = self.word_bytes = 0
        self.checked: list[str] = []
        self._checked_size = 0
        self._per_word_byte, self._memory_bytes = _PER_WORD_BYTE[model], memory_bytes
        self._words: set[str] = set()

    def feed(self, batches: Iterable[pa.LargeStringArray]) -> Iterator[list[str]]:
        for batch in batches:
            self.documents += len(batch)
            self.size += int(pc.sum(pc.binary_length(batch)).as_py() or 0)
            texts = bounded_texts(batch)
            for text in texts[:2]:
                if self._checked_size < _CHECKED_BYTES:
                    self.checked.append(text)
                    self._checked_size += len(text)
            self._count_words(texts)
            yield texts
        # The trainer takes its memory next.
        self._words.clear()
        release()
        if not self.word_bytes:
            raise InputError("The sample holds no text: nothing to train a tokenizer on.")

    def _count_words(self, texts: list[str]) -> None:
        for text in texts:
            new = set(_WORD.findall(text)) - self._words
            self._words |= new
            self.word_bytes += len("".join(new).encode())
        needed = _FIXED_BYTES + self._per_word_byte * self.word_bytes
        if self._memory_bytes is not None and needed > self._memory_bytes:
            raise ResourceError(
                f"Training the tokenizer would take more than {format_size(self._memory_bytes)}: the first "
                f"{format_size(self.size)} of the sample hold {format_size(self.word_bytes)} of different words.\n"
                "Take a smaller sample (tokenizer.train.sample), or give more ",
                Setting("memory"),
                ".",
            )


def bounded_texts(texts: pa.LargeStringArray) -> list[str]:
    """The texts as the trainer takes them: none of them, and no word in them, longer than it can handle."""
    size = pc.binary_length(texts)
    long = pc.or_(pc.greater(size, _LONGEST_TEXT), pc.match_substring_regex(texts, _LONG_WORD))
    if not pc.any(long).as_py():
        return list(texts.to_pylist())
    cut = pc.replace_substring_regex(texts.filter(long), _LONG_WORD, "\\1\n").to_pylist()
    pieces = [text[at : at + _LONGEST_TEXT] for text in cut for at in range(0, len(text), _LONGEST_TEXT)]
    return [*texts.filter(pc.invert(long)).to_pylist(), *pieces]


# ---- training ----


def _train(texts: Iterator[list[str]], model: Model, vocab_size: int, special_tokens: tuple[str, ...]) -> str:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": list(special_tokens),
        "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()),
        "show_progress": False,
    }
    tokenizer = tokenizers.Tokenizer(models.BPE() if model == "bpe" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(**options) if model == "bpe" else trainers.UnigramTrainer(**options)
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def _settled(tokenizer_json: str, special: int, vocab_size: int) -> str:
    """The unigram tokenizer without what differs from one training to the next, and no larger than wanted.

    Scores are rounded. Bytes that the sample lacks get scores in steps from the lowest one up, in a random order: here
    they all get the lowest. Then the vocabulary is sorted again, behind the special tokens.
    """
    tokenizer = json.loads(tokenizer_json)
    vocab = tokenizer["model"]["vocab"]
    lowest = min(score for _, score in vocab[special:])
    scores: dict[str, float] = {}
    for piece, score in vocab[special:]:
        steps = (score - lowest) / _SCORE_STEP
        is_made_up = len(piece) == 1 and steps < BYTES and abs(steps - round(steps)) < 1e-6
        scores[piece] = round(lowest if is_made_up else score, _SCORE_DIGITS)
    # The trainer keeps a few longer pieces where only bytes have room.
    byte_first = sorted(scores, key=lambda piece: (len(piece) > 1, -scores[piece], piece))[: vocab_size - special]
    pieces = sorted(byte_first, key=lambda piece: (-scores[piece], piece))
    tokenizer["model"]["vocab"] = vocab[:special] + [[piece, scores[piece]] for piece in pieces]
    return json.dumps(tokenizer, ensure_ascii=False, indent=2)


def _check_round_trip(tokenizer_json: str, sample: list[str]) -> tuple[int, float]:
    """Every text must come back as it was; the size of the vocabulary, and bytes a token on the sample."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokens = 0
    for number, text in enumerate((*HARD_STRINGS, *sample)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise InputError(f"The trained tokenizer does not give this text back as it was: {text[:80]!r}. Not saved.")
        tokens += len(ids) if number >= len(HARD_STRINGS) else 0
    sample_bytes = sum(len(text.encode()) for text in sample)
    return int(tokenizer.get_vocab_size()), round(sample_bytes / max(1, tokens), 4)


def _named_tokens(special: tuple[str, ...]) -> dict[str, Any]:
    """What tokenizer_config.json says, so that others find the roles of special tokens."""
    eos, *others = special
    found = {role: next((token for token in others if pattern.search(token)), None) for role, pattern in _ROLES.items()}
    named = {"eos_token": eos} | {role: token for role, token in found.items() if token is not None}
    rest = [token for token in others if token not in named.values()]
    return named | {
        "additional_special_tokens": rest,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
