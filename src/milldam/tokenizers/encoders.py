"""The encoder: Arrow strings in, flat ids with offsets out, without special tokens around a document.

gigatoken encodes a hundred megabytes a second and core, HF tokenizers two, of every kind of tokenizer. Where both are
used, texts with a character on which they differ go to HF tokenizers. gigatoken's cache of words has no limit of its
own, so an encoder that has grown is renewed between two calls (0.1 to 1 s); HF tokenizers keeps ten thousand short
words at most.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

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
_HUGGINGFACE_BYTES = 256 << 10
"""At once: an encoding takes some 150 bytes a token while it lives, and a word of its lattice as much a character."""
_LONG_DOCUMENT = 2 << 10
"""Bytes of text from which on a call a document costs no more than a call a batch."""
_FEW_DOCUMENTS, _FEW_BYTES = 100_000, 16 << 20
"""Short documents, and bytes for several threads, that are encoded before awkward has paid for itself."""
_AT_ONCE = 256
"""Documents that are encoded one by one before their ids are put together."""


class Encoder:
    """Turns text into ids.

    `batch_bytes`: most text to hand over in one call, what bounds the memory of the call. `piece_bytes`: a longer text
    is cut into pieces of about so many bytes. `longest_run`: bytes without a place to cut at that may be encoded in
    one call (see document_encoder.py). `differing`: the characters of which gigatoken makes other ids.

    Raises ValueError where gigatoken does not know the kind of tokenizer.
    """

    def __init__(
        self, name: str, tokenizer_json: str, *, plain_specials: bool, threads: int = 1, differing: Ranges = ()
    ) -> None:
        # As bytes: a str with one letter outside of Latin-1 takes two to four for each.
        self._json, self._plain_specials = tokenizer_json.encode(), plain_specials
        self._differing = Characters(differing) if differing else None
        self._huggingface: Any = None
        self._room: Callable[[], int] | None = None
        self.exact_texts = self.renewals = 0
        """Texts that gigatoken left to HF tokenizers, which is slower; how often the caches were dropped."""
        if name == GIGATOKEN:
            self.name = f"gigatoken {version('gigatoken')}"
            self.batch_bytes, self.piece_bytes, self.longest_run = 1 << 20, 256 << 10, 4 << 20
            self._fast: _Gigatoken | None = _Gigatoken(self._json, plain_specials=plain_specials, threads=threads)
        else:
            self.name = f"huggingface tokenizers {version('tokenizers')}"
            self.batch_bytes, self.piece_bytes, self.longest_run = _HUGGINGFACE_BYTES, 64 << 10, 1 << 20
            self._fast = None
            self._exact()

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        """Flat ids of all texts, and where each begins: offsets has one entry more than texts."""
        if self._room is not None:
            self._stay_within(self._room())
        if self._fast is None:
            return joined(encode_by_huggingface(self._exact(), texts.to_pylist()))
        differs = None if self._differing is None else self._differing.held_by(texts)
        if differs is None or not differs.any():
            return self._fast.encode(texts)
        self.exact_texts += int(differs.sum())
        fast, offsets = self._fast.encode(texts.filter(pa.array(~differs)))
        exact: list[Ids] = []
        for group in groups(texts.filter(pa.array(differs)), _HUGGINGFACE_BYTES):
            exact += encode_by_huggingface(self._exact(), group.to_pylist())
        lengths = np.empty(len(texts), np.int64)
        lengths[~differs], lengths[differs] = np.diff(offsets), [len(ids) for ids in exact]
        flat, by_exact = np.empty(int(lengths.sum()), np.uint32), np.repeat(differs, lengths)
        flat[~by_exact], flat[by_exact] = fast, np.concatenate(exact)
        return flat, np.concatenate(([0], np.cumsum(lengths)))

    def encode_text(self, text: bytes) -> Ids:
        """The ids of one text in UTF-8: for small texts, where a batch would cost more to set up than to encode."""
        differs = False
        if self._differing is not None and not text.isascii():
            differs = bool(self._differing.held_by(pa.array([text]).cast(pa.large_string()))[0])
        if self._fast is not None and not differs:
            return self._fast.encode_text(text)
        return encode_by_huggingface(self._exact(), [text.decode()])[0]

    def _exact(self) -> Any:
        """HF tokenizers, loaded when it is first needed."""
        if self._huggingface is None:
            import tokenizers

            text = self._json.decode()
            is_unigram = self._plain_specials and json_model_type(text) == "Unigram"
            self._huggingface = tokenizers.Tokenizer.from_str(without_special_pieces(text) if is_unigram else text)
            self._huggingface.encode_special_tokens = self._plain_specials
            release()
        return self._huggingface

    # ---- memory ----

    def stay_within(self, room: Callable[[], int]) -> None:
        """From now on the caches are dropped between two calls when the process has grown by a third of `room()` bytes:
        a table of words doubles, and then the old one and the new one are there for a moment.

        What Arrow holds, texts on their way, is left out: no renewal would give that back.
        """
        self._room = room
        self._note_bare()

    def renew(self) -> None:
        """Drop every cache, giving its memory back."""
        self._huggingface = None
        if self._fast is not None:
            self._fast.load()
        self.renewals += 1
        self._note_bare()

    def _note_bare(self) -> None:
        release()
        self._bare_bytes, self._spare_bytes = _held(), 0

    def _stay_within(self, room: int) -> None:
        most, grown = max(SMALLEST_CACHE, room // 3), _held() - self._bare_bytes
        if grown > most + self._spare_bytes:
            # What the allocators keep is given back first, but not for every batch: getting it again takes time.
            release()
            in_use = _held() - self._bare_bytes
            self._spare_bytes = grown - in_use
            if in_use > most:
                self.renew()


def _held() -> int:
    return usage().anonymous - int(pa.total_allocated_bytes())


class _Gigatoken:
    """gigatoken, straight from Arrow's buffers.

    Batches go through awkward, which takes 0.2 s and 19 MB to import in every process. A call a document costs 1.5 us
    more for each, so it is left alone until many short documents have come, or many bytes for several threads.
    """

    def __init__(self, tokenizer_json: bytes, *, plain_specials: bool, threads: int) -> None:
        self._json = without_special_tokens(tokenizer_json) if plain_specials else tokenizer_json
        self._parallel = threads > 1
        self._short_documents = self._bytes = 0
        self.load()

    def load(self) -> None:
        from gigatoken.gigatoken_rs import load_hf_json

        self._backend: Any = None
        self._backend = load_hf_json(self._json.decode())
        self.encode_text(b"a")  # what is made for the first text is there from the start
        release()

    def encode_text(self, text: bytes) -> Ids:
        ids: Ids = self._backend.encode(text)
        return ids

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        _, offsets, data = texts.buffers()
        starts = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
        # A batch pays off for many short documents, or with several threads.
        size = int(starts[-1] - starts[0])
        self._bytes += size
        is_short = size < len(texts) * _LONG_DOCUMENT
        self._short_documents += len(texts) if is_short else 0
        enough = self._short_documents > _FEW_DOCUMENTS if is_short else self._parallel and self._bytes > _FEW_BYTES
        if data is None or not enough:
            return self._encode_singly(starts, data)
        import awkward as ak

        # The same buffers as strings: no copy, and no Python object per document.
        characters = ak.contents.NumpyArray(np.frombuffer(data, dtype=np.uint8), parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(ak.index.Index64(starts), characters, parameters={"__array__": "string"})
        out = self._backend.encode_batch(ak.Array(strings), parallel=self._parallel).layout
        return out.content.data, out.offsets.data

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


def joined(arrays: list[Ids]) -> tuple[Ids, Offsets]:
    """Arrays end to end, and where each begins."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return np.concatenate(arrays) if arrays else np.empty(0, np.uint32), offsets


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


def without_special_tokens(tokenizer_json: bytes) -> bytes:
    """The same tokenizer, for which the text of a special token is text like any other."""
    tokenizer = json.loads(tokenizer_json)
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    return json.dumps(tokenizer, ensure_ascii=False).encode()


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
