"""Older tokenizer files -> the text of an equivalent tokenizer.json.

What a file does not say (a BERT vocabulary's case) is taken from the files beside it or from its content, as each
docstring states; nothing else is guessed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milldam.errors import InputError


def convert(path: Path) -> str:
    """vocab.json with merges.txt, a BERT vocab.txt, or a sentencepiece .model."""
    if path.suffix == ".model":
        return _from_sentencepiece(path)
    return _from_vocab_and_merges(path) if path.name in ("vocab.json", "merges.txt") else _from_wordpiece(path)


def _from_vocab_and_merges(path: Path) -> str:
    """GPT-2's pair of files: byte-level BPE with GPT-2's split rule."""
    from tokenizers import ByteLevelBPETokenizer

    vocab_path, merges_path = path.with_name("vocab.json"), path.with_name("merges.txt")
    for needed in (vocab_path, merges_path):
        if not needed.is_file():
            raise InputError(f"{path}: {needed.name} is missing beside it; both are needed.")
    tokenizer = ByteLevelBPETokenizer(str(vocab_path), str(merges_path))
    specials = ("<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>")
    tokenizer.add_special_tokens([token for token in specials if tokenizer.token_to_id(token) is not None])
    return str(tokenizer.to_str())


def _from_wordpiece(path: Path) -> str:
    """A BERT vocab.txt. Lower case when tokenizer_config.json beside it says so, else when no entry has a capital."""
    from tokenizers import BertWordPieceTokenizer

    tokens = path.read_bytes().decode("utf-8").split("\n")
    if "[UNK]" not in (token.removesuffix("\r") for token in tokens):
        raise InputError(f"{path}: no [UNK] entry, so this is not a BERT vocabulary.")
    config = path.with_name("tokenizer_config.json")
    lowercase = json.loads(config.read_bytes()).get("do_lower_case") if config.is_file() else None
    if not isinstance(lowercase, bool):
        lowercase = not any(token != token.lower() for token in tokens if not token.startswith("["))
    return str(BertWordPieceTokenizer(str(path), lowercase=lowercase).to_str())


# ---- sentencepiece: a protobuf with pieces, scores and a normaliser ----

_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6


def _from_sentencepiece(path: Path) -> str:
    """A sentencepiece model, unigram or BPE, with its own normaliser and white-space rules."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    # Field numbers from sentencepiece_model.proto: pieces 1, trainer 2, normaliser 3.
    pieces: list[tuple[str, float, int]] = []
    trainer, spec = dict[int, Any](), dict[int, Any]()
    for number, value in _fields(path.read_bytes()):
        if number == 1:
            one = dict(_fields(value))
            score = struct.unpack("<f", one.get(2, b"\0\0\0\0"))[0]
            pieces.append((one.get(1, b"").decode("utf-8"), score, one.get(3, _NORMAL)))
        elif number in (2, 3):
            (trainer if number == 2 else spec).update(_fields(value))
    if not pieces:
        raise InputError(f"{path}: no pieces in it, so this is not a sentencepiece model.")
    kind = trainer.get(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE):
        raise InputError(f"{path}: sentencepiece models of type word and char are not supported.")
    fallback = any(t == _BYTE for _, _, t in pieces)
    unknown = next((i for i, (_, _, t) in enumerate(pieces) if t == _UNKNOWN), 0)
    if kind == _UNIGRAM:
        model: Any = models.Unigram([(piece, score) for piece, score, _ in pieces], unknown, fallback)
    else:
        vocab = {piece: number for number, (piece, _, _) in enumerate(pieces)}
        names = {"unk_token": pieces[unknown][0], "fuse_unk": True, "byte_fallback": fallback}
        model = models.BPE(vocab, _merges(pieces, vocab), **names)
    tokenizer = Tokenizer(model)
    for piece, _, t in pieces:
        if t in (_CONTROL, _UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True)])
        elif t == _USER_DEFINED and kind == _BPE:
            # Unigram takes its user-defined pieces by their score, the best there is; BPE would merge over them.
            tokenizer.add_tokens([AddedToken(piece, normalized=False)])
    # Words can be encoded one by one (which is quicker) where no piece and no space reaches over a word's start; what
    # may merge across words gets its word marks from the normaliser alone.
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


def _merges(pieces: list[tuple[str, float, int]], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best piece first."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score, kind in pieces:
        if kind in (_NORMAL, _USER_DEFINED):
            splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            ranked += [(-score, vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
    return [(a, b) for _, _, _, a, b in sorted(ranked)]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: numbers for varints, bytes for all else."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise ValueError("truncated sentencepiece model")
            value, shift, at = value | (message[at] & 0x7F) << shift, shift + 7, at + 1
            if message[at - 1] < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        if key & 7 not in (1, 2, 5):
            raise ValueError("not a sentencepiece model")
        size = varint() if key & 7 == 2 else 8 if key & 7 == 1 else 4
        if at + size > len(message):
            raise ValueError("truncated sentencepiece model")
        at += size
        yield key >> 3, message[at - size : at]
