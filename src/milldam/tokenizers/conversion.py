"""Older tokenizer files -> the text of an equivalent tokenizer.json.

Each function takes a path. What a file does not say (a BERT vocabulary's case, a tiktoken file's split rule) is
taken from the files beside it or from its name, as each docstring states; nothing else is guessed.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

# ---- BPE: vocab.json + merges.txt; WordPiece: vocab.txt ----


def from_vocab_and_merges(path: Path) -> str:
    """GPT-2's pair of files: byte-level BPE with GPT-2's split rule."""
    vocab_path, merges_path = path.with_name("vocab.json"), path.with_name("merges.txt")
    for needed in (vocab_path, merges_path):
        if not needed.is_file():
            raise InputError(f"{path}: {needed.name} is missing beside it; both are needed.")
    vocab = json.loads(vocab_path.read_text(encoding="utf-8"))
    if not isinstance(vocab, dict):
        raise InputError(f"{vocab_path}: not a vocabulary: an object of tokens and numbers is expected.")
    lines = merges_path.read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    specials = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>")
    return _byte_level(vocab, merges, {token: vocab[token] for token in specials if token in vocab}, split=None)


def _byte_level(vocab: dict[str, int], merges: list[Any], specials: dict[str, int], split: str | None) -> str:
    from tokenizers import Regex, decoders, models, pre_tokenizers

    tokenizer = _tokenizer(models.BPE(vocab, [(one, other) for one, other in merges]), specials)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        words = pre_tokenizers.Split(Regex(split), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def _tokenizer(model: models.Model, specials: dict[str, int], plain: dict[str, int] | None = None) -> Tokenizer:
    """`specials`, `plain`: tokens of the vocabulary that are found in text before anything else."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer(model)
    for token in sorted(specials, key=lambda token: specials[token]):
        tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
    for token in plain or {}:
        tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def from_wordpiece(path: Path) -> str:
    """A BERT vocab.txt. Lower case when tokenizer_config.json beside it says so, else when no entry has a capital."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    tokens = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    tokens = [token.removesuffix("\r") for token in tokens]
    vocab = {token: number for number, token in enumerate(tokens)}
    if "[UNK]" not in vocab:
        raise InputError(f"{path}: no [UNK] entry, so this is not a BERT vocabulary.")
    config = path.with_name("tokenizer_config.json")
    lowercase = json.loads(config.read_bytes()).get("do_lower_case") if config.is_file() else None
    if not isinstance(lowercase, bool):
        lowercase = not any(token != token.lower() for token in tokens if not token.startswith("["))
    specials: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    model = models.WordPiece(vocab, unk_token="[UNK]")
    tokenizer = _tokenizer(model, {token: vocab[token] for token in specials if token in vocab})
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return str(tokenizer.to_str())


# ---- sentencepiece: a protobuf with pieces, scores and a normaliser ----

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def from_sentencepiece(path: Path) -> str:
    """A sentencepiece model, unigram or BPE, with its own normaliser and white-space rules."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    model = _read_sentencepiece(path.read_bytes())
    pieces = model["pieces"]
    if not pieces:
        raise InputError(f"{path}: no pieces in it, so this is not a sentencepiece model.")
    kind = model["trainer"].get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise InputError(f"{path}: sentencepiece models of type word and char are not supported.")
    numbered = list(enumerate(pieces))
    specials = {p: i for i, (p, _, t) in numbered if t in (_CONTROL, _UNKNOWN)}
    # Unigram takes its user-defined pieces by their score, the best there is; BPE would merge over them.
    user = {p: i for i, (p, _, t) in numbered if t == _USER_DEFINED and kind == _BPE}
    fallback = any(t == _BYTE for _, _, t in pieces)
    unknown = next((i for i, (_, _, t) in numbered if t == _UNKNOWN), 0)
    if kind == _UNIGRAM:
        made: Any = models.Unigram([(piece, score) for piece, score, _ in pieces], unknown, fallback)
    else:
        vocab = {piece: number for number, (piece, _, _) in numbered}
        names = {"unk_token": pieces[unknown][0], "fuse_unk": True, "byte_fallback": fallback}
        made = models.BPE(vocab, _sentencepiece_merges(pieces, vocab), **names)
    tokenizer = _tokenizer(made, specials, user)
    # Words can be encoded one by one (which is quicker) where no piece and no space reaches over a word's start; what
    # may merge across words gets its word marks from the normaliser alone.
    spec = model["normalizer"]
    drops_spaces, prefix = bool(spec.get(4, 1)), bool(spec.get(3, 1))
    by_words = kind == _UNIGRAM and drops_spaces and not any("▁" in p[1:] for p, _, _ in pieces)
    steps: list[Any] = [normalizers.Precompiled(spec[2])] if spec.get(2) else []
    if drops_spaces:
        # Spaces only: other white space is text to sentencepiece.
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if by_words:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    else:
        steps += [normalizers.Prepend("▁")] if prefix else []
        steps.append(normalizers.Replace(" ", "▁"))
    tokenizer.normalizer = normalizers.Sequence(steps)
    bytes_first = [decoders.ByteFallback(), decoders.Fuse()] if fallback else []
    tokenizer.decoder = decoders.Sequence([*bytes_first, decoders.Metaspace()])
    return str(tokenizer.to_str())


def _sentencepiece_merges(pieces: list[tuple[str, float, int]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind in (_NORMAL, _USER_DEFINED):
            splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            ranked += [(-score, vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
    return [(a, b) for _, _, _, a, b in sorted(ranked)]


def _read_sentencepiece(data: bytes) -> dict[str, Any]:
    """Field numbers from sentencepiece_model.proto: pieces 1, trainer 2, normaliser 3."""
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
            pieces.append((piece.get(1, b"").decode("utf-8"), score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return {"pieces": pieces, "trainer": trainer, "normalizer": normalizer}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: numbers for varints, bytes for all else."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(message, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("not a sentencepiece model")
        if at + size > len(message):
            raise ValueError("truncated sentencepiece model")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ValueError("not a sentencepiece model")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


# ---- tiktoken: ranks in base64; the split rule and special tokens belong to the encoding's name ----

_GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_SPLIT = _CL100K_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": (_GPT2_SPLIT, {"<|endoftext|>": 50256}),
    "p50k_base": (_GPT2_SPLIT, {"<|endoftext|>": 50256}),
    "cl100k_base": (_CL100K_SPLIT, {"<|endoftext|>": 100257, **_FIM, "<|endofprompt|>": 100276}),
    "o200k_base": (_O200K_SPLIT, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
    "qwen": (_QWEN_SPLIT, {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}),
}


def from_tiktoken(path: Path) -> str:
    """A .tiktoken file named after a published encoding: r50k_base, p50k_base, cl100k_base, o200k_base or qwen."""
    if path.stem not in _ENCODINGS:
        known = ", ".join(f"{name}.tiktoken" for name in _ENCODINGS)
        raise InputError(
            f"{path}: a .tiktoken file does not say how to split text, and its name is not one of {known}.\n"
            "Name it after the encoding it belongs to, or give the model's tokenizer.json."
        )
    split, specials = _ENCODINGS[path.stem]
    lines = (line.split() for line in path.read_bytes().splitlines() if line.strip())
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    letters = _byte_letters()
    vocab = {"".join(letters[byte] for byte in token): rank for token, rank in ranks.items()}
    named = {rank: token for token, rank in vocab.items()}
    pairs = ((_merge_of(token, ranks), rank) for token, rank in ranks.items() if len(token) > 1)
    ordered = sorted((rank, pair) for pair, rank in pairs if pair is not None)
    merges = [(named[ranks[a]], named[ranks[b]]) for _, (a, b) in ordered]
    # In the vocabulary too: HF tokenizers would number a special token anew where the ranks leave a gap.
    return _byte_level(vocab | specials, merges, specials, split)


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The two tokens that merge into this one: what is left of its bytes after every earlier merge."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        candidates = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(candidates)
        if rank >= limit:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _byte_letters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
