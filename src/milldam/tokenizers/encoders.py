"""The encoders that encode: Arrow strings in, flat ids with offsets out.

Both give ids without special tokens around a document. Neither may grow without bound: gigatoken's word cache has no
limit of its own, so `FrugalEncoder` rebuilds an encoder that has grown (0.1 to 1 s); HF tokenizers keeps ten thousand
short words at most.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.memory import release, usage
from milldam.text.arrays import Characters, groups

Ids = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
Ranges = tuple[tuple[int, int], ...]
"""First and last code points."""

GIGATOKEN, HUGGINGFACE = "gigatoken", "huggingface"

SMALLEST_CACHE = 12 * 10**6
"""Below this an encoder is not renewed: it would do little else."""
_LONG_DOCUMENT = 2 << 10
"""Bytes of text from which on a call a document costs no more than a call a batch."""
_FEW_DOCUMENTS, _FEW_BYTES = 100_000, 16 << 20
"""Short documents, and bytes for several threads, that are encoded before awkward has paid for itself."""

_AT_ONCE = 256
"""Documents that are encoded one by one before their ids are put together."""


class Encoder(Protocol):
    """Turns text into ids, without special tokens around a document."""

    name: str
    batch_bytes: int
    """Most text to hand over in one call: what bounds the memory of the call."""
    piece_bytes: int
    """Longer texts are cut into pieces of about so many bytes (see long_texts.py)."""
    longest_run: int
    """Bytes without a place to cut at that may be encoded in one call."""

    @property
    def exact_texts(self) -> int:
        """How many texts `encode` left to HF tokenizers, which is slower."""
        ...

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        """Flat ids of all texts, and where each begins: offsets has one entry more than texts."""
        ...

    def encode_text(self, text: bytes) -> Ids:
        """The ids of one text in UTF-8: for small texts, where a batch would cost more to set up than to encode."""
        ...

    def renew(self) -> None:
        """Drop every cache, giving its memory back."""
        ...


def make_encoder(
    name: str, tokenizer_json: str, *, plain_specials: bool, threads: int, differing: Ranges = ()
) -> Encoder:
    """Build an encoder; gigatoken raises ValueError for the kinds of tokenizer that it does not know.

    `differing`: the characters of which gigatoken makes other ids. Texts that hold one are encoded by HF tokenizers.
    """
    if name != GIGATOKEN:
        return HuggingFaceEncoder(tokenizer_json, plain_specials=plain_specials)
    fast = GigatokenEncoder(tokenizer_json, plain_specials=plain_specials, threads=threads)
    if not differing:
        return fast
    # As bytes: a str with one letter outside of Latin-1 takes two to four for each.
    kept = tokenizer_json.encode()
    return MixedEncoder(
        fast, lambda: HuggingFaceEncoder(kept.decode(), plain_specials=plain_specials), Characters(differing)
    )


class GigatokenEncoder:
    """gigatoken: BPE at a hundred megabytes a second and core, straight from Arrow's buffers.

    Batches go through awkward, which takes 0.2 s and 19 MB to import in every process. A call a document costs 1.5 us
    more for each, so it is left alone until many short documents have come, or many bytes for several threads.
    """

    batch_bytes, piece_bytes, longest_run = 1 << 20, 256 << 10, 4 << 20

    def __init__(self, tokenizer_json: str, *, plain_specials: bool, threads: int) -> None:
        self.exact_texts = 0
        # As bytes: a str with one letter outside of Latin-1 takes two to four for each.
        self._json = (without_special_tokens(tokenizer_json) if plain_specials else tokenizer_json).encode()
        self._parallel = threads > 1
        self._short_documents = self._bytes = 0
        self.name = f"gigatoken {version('gigatoken')}"
        self._load()

    def _load(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend = load_hf_json(self._json.decode())
        self.encode_text(b"a")  # what is made for the first text is there from the start
        release()

    def renew(self) -> None:
        del self._backend
        self._load()

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        _, offsets, data = texts.buffers()
        starts = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
        if data is None or not self._pays_off(len(texts), int(starts[-1] - starts[0])):
            return self._encode_singly(starts, data)
        out = self._backend.encode_batch(_as_awkward(starts, data), parallel=self._parallel).layout
        return out.content.data, out.offsets.data

    def _pays_off(self, documents: int, size: int) -> bool:
        """Whether to encode as a batch."""
        self._bytes += size
        if size < documents * _LONG_DOCUMENT:
            self._short_documents += documents
            return self._short_documents > _FEW_DOCUMENTS
        return self._parallel and self._bytes > _FEW_BYTES

    def _encode_singly(self, starts: Offsets, data: pa.Buffer | None) -> tuple[Ids, Offsets]:
        """Some at a time: the array of one call keeps room for 512 ids, however short its text is."""
        text, encode = memoryview(data if data is not None else b""), self._backend.encode
        offsets, flat, size = np.zeros(len(starts), np.int64), [np.empty(0, np.uint32)], 0
        for first in range(0, len(starts) - 1, _AT_ONCE):
            places = starts[first : first + _AT_ONCE + 1].tolist()
            ids, ends = joined([encode(text[start:stop].tobytes()) for start, stop in itertools.pairwise(places)])
            offsets[first + 1 : first + len(ends)] = ends[1:] + size
            flat.append(ids)
            size += len(ids)
        return np.concatenate(flat), offsets

    def encode_text(self, text: bytes) -> Ids:
        ids: Ids = self._backend.encode(text)
        return ids


def joined(arrays: list[Ids]) -> tuple[Ids, Offsets]:
    """Arrays end to end, and where each begins."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint32), offsets


def _as_awkward(starts: Offsets, data: pa.Buffer) -> Any:
    """The same buffers as an awkward array of strings: no copy, and no Python object per document."""
    import awkward as ak

    characters = ak.contents.NumpyArray(np.frombuffer(data, dtype=np.uint8), parameters={"__array__": "char"})
    layout = ak.contents.ListOffsetArray(ak.index.Index64(starts), characters, parameters={"__array__": "string"})
    return ak.Array(layout)


class HuggingFaceEncoder:
    """HF tokenizers: every kind of tokenizer, two megabytes a second and core; the environment sets its threads."""

    # An HF encoding takes some 150 bytes a token while it lives, and a word of its lattice as much a character.
    batch_bytes, piece_bytes, longest_run = 256 << 10, 64 << 10, 1 << 20

    def __init__(self, tokenizer_json: str, *, plain_specials: bool) -> None:
        if plain_specials and json_model_type(tokenizer_json) == "Unigram":
            tokenizer_json = without_special_pieces(tokenizer_json)
        self._json, self._plain_specials = tokenizer_json, plain_specials
        self.name = f"huggingface tokenizers {version('tokenizers')}"
        self.exact_texts = 0
        self._load()

    def _load(self) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_str(self._json)
        self._tokenizer.encode_special_tokens = self._plain_specials
        release()

    def renew(self) -> None:
        del self._tokenizer
        self._load()

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        return joined(encode_by_huggingface(self._tokenizer, texts.to_pylist()))

    def encode_text(self, text: bytes) -> Ids:
        return encode_by_huggingface(self._tokenizer, [text.decode()])[0]


class MixedEncoder:
    """gigatoken, and HF tokenizers, loaded when it is first needed, for texts with characters on which they differ."""

    batch_bytes, piece_bytes = GigatokenEncoder.batch_bytes, GigatokenEncoder.piece_bytes
    longest_run = GigatokenEncoder.longest_run

    def __init__(self, fast: GigatokenEncoder, make_exact: Callable[[], Encoder], differing: Characters) -> None:
        self._fast, self._make_exact, self._differing = fast, make_exact, differing
        self._exact: Encoder | None = None
        self.exact_texts = 0
        self.name = fast.name

    def renew(self) -> None:
        self._fast.renew()

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        differs = self._differing.held_by(texts)
        if not differs.any():
            return self._fast.encode(texts)
        self.exact_texts += int(differs.sum())
        encoded = [self._fast.encode(texts.filter(pa.array(~differs)))]
        encoded += map(self._load().encode, groups(texts.filter(pa.array(differs)), HuggingFaceEncoder.batch_bytes))
        lengths = np.zeros(len(texts), np.int64)
        lengths[~differs] = np.diff(encoded[0][1])
        lengths[differs] = np.concatenate([np.diff(offsets) for _, offsets in encoded[1:]])
        flat, by_exact = np.empty(int(lengths.sum()), np.uint32), np.repeat(differs, lengths)
        flat[~by_exact] = encoded[0][0]
        flat[by_exact] = np.concatenate([ids for ids, _ in encoded[1:]])
        return flat, np.concatenate(([0], np.cumsum(lengths)))

    def encode_text(self, text: bytes) -> Ids:
        if not text.isascii() and self._differing.held_by(pa.array([text]).cast(pa.large_string()))[0]:
            return self._load().encode_text(text)
        return self._fast.encode_text(text)

    def _load(self) -> Encoder:
        if self._exact is None:
            self._exact = self._make_exact()
        return self._exact


class FrugalEncoder:
    """An encoder that is renewed between two calls when it has grown by more than a third of `room()` bytes: its table
    of words doubles, and then the old one and the new one are there for a moment.

    What Arrow holds, texts on their way, is left out: no renewal would give that back.
    """

    def __init__(self, encoder: Encoder, room: Callable[[], int]) -> None:
        self._encoder, self._room = encoder, room
        self.name, self.batch_bytes = encoder.name, encoder.batch_bytes
        self.piece_bytes, self.longest_run = encoder.piece_bytes, encoder.longest_run
        self.renewals = 0
        self._start()

    def _start(self) -> None:
        release()
        self._bare_bytes, self._spare_bytes = self._held(), 0

    @property
    def exact_texts(self) -> int:
        return self._encoder.exact_texts

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        most, grown = max(SMALLEST_CACHE, self._room() // 3), self._held() - self._bare_bytes
        if grown > most + self._spare_bytes:
            # What the allocators keep is given back first, but not for every batch: getting it again takes time.
            release()
            in_use = self._held() - self._bare_bytes
            self._spare_bytes = grown - in_use
            if in_use > most:
                self.renew()
        return self._encoder.encode(texts)

    def encode_text(self, text: bytes) -> Ids:
        return self._encoder.encode_text(text)

    def renew(self) -> None:
        self._encoder.renew()
        self.renewals += 1
        self._start()

    def _held(self) -> int:
        return usage().anonymous - int(pa.total_allocated_bytes())


def encode_by_huggingface(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """The ids that every other encoder must match."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def encode_each(encoder: Encoder, texts: Sequence[str] | Sequence[bytes]) -> list[Ids]:
    """The ids of some texts, one array each."""
    kind = pa.large_binary() if texts and isinstance(texts[0], bytes) else pa.large_string()
    flat, offsets = encoder.encode(pa.array(texts, kind).cast(pa.large_string()))
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets)]


def json_model_type(tokenizer_json: str) -> str | None:
    """The model's type as a tokenizer.json states it; old files leave it out, but only Unigram has a list of pieces."""
    model = json.loads(tokenizer_json)["model"]
    return "Unigram" if isinstance(model.get("vocab"), list) else model.get("type")


def without_special_tokens(tokenizer_json: str) -> str:
    """The same tokenizer, for which the text of a special token is text like any other."""
    tokenizer = json.loads(tokenizer_json)
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    return json.dumps(tokenizer, ensure_ascii=False)


def without_special_pieces(tokenizer_json: str) -> str:
    """The same Unigram tokenizer, whose special pieces have names that no text holds."""
    tokenizer = json.loads(tokenizer_json)
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = [
        [f"\ufdd0{n}" if n in special else piece, score] for n, (piece, score) in enumerate(vocab)
    ]
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    return json.dumps(tokenizer, ensure_ascii=False)
