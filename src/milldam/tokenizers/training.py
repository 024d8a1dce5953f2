"""A sample of text -> a tokenizer trained on it: byte-level BPE, by the trainer of HF tokenizers.

It works on bytes and knows all 256 of them, so that every text comes back as it was; that is checked on hard strings
and on a part of the sample before anything is saved, and a failure is an error. The same texts give the same
tokenizer.json, byte for byte, whatever the batches, cores and order.

Memory goes with the different words, not with the text: about 130 bytes for each byte of them. `training_bytes` is what
common text takes; with a limit, text of too many different words is refused while it is read, before the trainer takes
its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from milldam.errors import ConfigError, InputError, ResourceError, Setting
from milldam.files import explain_os_errors, hash_bytes, json_bytes, write_file
from milldam.memory import format_size, release
from milldam.tokenizers.proof import HARD_STRINGS

BYTES = 256
_FIXED_BYTES = 64_000_000
_PER_WORD_BYTE, _PER_SAMPLE_BYTE, _PER_TOKEN = 130, 6, 1_000
# Longer stretches without white space are cut: the work on a word grows with the square of its length.
_LONGEST_WORD, _LONGEST_TEXT = 256, 1 << 16
_LONG_WORD = rf"(\S{{{_LONGEST_WORD}}})"
_CHECKED_BYTES = 1 << 20
# About what the pre-tokenizer splits at: enough to count words by.
_WORD = re.compile(r" ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+")


@dataclass(frozen=True, slots=True)
class TrainedTokenizer:
    """What was made, and from how much."""

    path: Path
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
            f"tokenizer of {self.vocab_size:,} tokens in {self.path}",
            f"trained on {self.documents:,} documents, {format_size(self.sample_bytes)}; "
            f"{self.bytes_per_token:.2f} bytes a token",
            f"{self.checked_texts:,} texts encoded and decoded, all unchanged",
        ]


def training_bytes(sample_bytes: int, vocab_size: int) -> int:
    """The anonymous memory that training on so much common text takes; in many languages it may be twice that.

    >>> training_bytes(100_000_000, 32_000)
    696000000
    """
    return _FIXED_BYTES + _PER_SAMPLE_BYTE * sample_bytes + _PER_TOKEN * vocab_size


def train_tokenizer(
    texts: Iterable[pa.LargeStringArray],
    *,
    out: Path,
    vocab_size: int = 32_000,
    special_tokens: tuple[str, ...] = ("<|endoftext|>",),
    memory_bytes: int | None = None,
) -> TrainedTokenizer:
    """Train on the texts and save a folder with tokenizer.json and tokenizer_config.json.

    The first special token ends documents. `memory_bytes`: refuse text that would take more.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not special_tokens or not all(special_tokens) or len(set(special_tokens)) != len(special_tokens):
        raise ConfigError("special_tokens: name at least one, each once; the first one ends documents.")
    smallest = BYTES + len(special_tokens)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size: {vocab_size:,} is too few: bytes and special tokens alone are {smallest:,}.")
    sample = _Sample(memory_bytes)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample.feed(texts), trainer)
    tokens = 0
    for number, text in enumerate((*sample.checked, *HARD_STRINGS)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise InputError(f"The trained tokenizer does not give this text back as it was: {text[:80]!r}. Not saved.")
        tokens += len(ids) if number < len(sample.checked) else 0
    checked_bytes, saved = sum(len(text.encode()) for text in sample.checked), str(tokenizer.to_str()).encode()
    with explain_os_errors(out / "tokenizer.json"):
        out.mkdir(parents=True, exist_ok=True)
    roles = {"eos_token": special_tokens[0], "additional_special_tokens": special_tokens[1:]}
    facts = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_file(out / "tokenizer_config.json", json_bytes(roles | facts))
    # Last what makes the folder a tokenizer.
    write_file(out / "tokenizer.json", saved)
    return TrainedTokenizer(
        out,
        int(tokenizer.get_vocab_size()),
        hash_bytes(saved),
        sample.documents,
        sample.size,
        sample.word_bytes,
        len(HARD_STRINGS) + len(sample.checked),
        round(checked_bytes / max(1, tokens), 4),
    )


class _Sample:
    """The texts on their way to the trainer: cut, counted, a part of them kept for the check."""

    def __init__(self, memory_bytes: int | None) -> None:
        self.documents = self.size = self.word_bytes = 0
        self.checked: list[str] = []
        self._memory_bytes = memory_bytes

    def feed(self, batches: Iterable[pa.LargeStringArray]) -> Iterator[list[str]]:
        words, checked_size = set[str](), 0
        for batch in batches:
            self.documents += len(batch)
            self.size += int(pc.sum(pc.binary_length(batch)).as_py() or 0)
            texts = bounded_texts(batch)
            for text in texts[:2] if checked_size < _CHECKED_BYTES else ():
                self.checked.append(text)
                checked_size += len(text)
            for text in texts:
                new = set(_WORD.findall(text)) - words
                words |= new
                self.word_bytes += len("".join(new).encode())
            needed = _FIXED_BYTES + _PER_WORD_BYTE * self.word_bytes
            if self._memory_bytes is not None and needed > self._memory_bytes:
                raise ResourceError(
                    f"Training the tokenizer would take more than {format_size(self._memory_bytes)}: the first "
                    f"{format_size(self.size)} of the sample hold {format_size(self.word_bytes)} of different words.\n"
                    "Take a smaller sample (tokenizer.train.sample), or give more ",
                    Setting("memory"),
                    ".",
                )
            yield texts
        # The trainer takes its memory next.
        words.clear()
        release()
        if not self.word_bytes:
            raise InputError("The sample holds no text: nothing to train a tokenizer on.")


def bounded_texts(texts: pa.LargeStringArray) -> list[str]:
    """The texts as the trainer takes them: none of them, and no word in them, longer than it can handle."""
    size = pc.binary_length(texts)
    long = pc.or_(pc.greater(size, _LONGEST_TEXT), pc.match_substring_regex(texts, _LONG_WORD))
    if not pc.any(long).as_py():
        return list(texts.to_pylist())
    cut = pc.replace_substring_regex(texts.filter(long), _LONG_WORD, "\\1\n").to_pylist()
    pieces = [text[at : at + _LONGEST_TEXT] for text in cut for at in range(0, len(text), _LONGEST_TEXT)]
    return [*texts.filter(pc.invert(long)).to_pylist(), *pieces]
