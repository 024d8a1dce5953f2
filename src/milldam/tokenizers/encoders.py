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
from milldam.text.arrays import Characters, groups, text_offsets

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
        self._json, self._plain_specials, self._threads = tokenizer_json.encode(), plain_specials, threads
        self._differing = Characters(differing) if differing else None
        self._is_fast = name == GIGATOKEN
        self._short_documents = self._bytes = 0
        self.exact_texts = 0
        """Texts that gigatoken left to HF tokenizers, which is slower."""
        self.room: Callable[[], int] | None = None
        """Bytes by a third of which the process may grow before the caches are dropped: a table of words doubles, and
        then the old one and the new one are there for a moment. None: without end."""
        if self._is_fast:
            self.name = f"gigatoken {version('gigatoken')}"
            self.batch_bytes, self.piece_bytes, self.longest_run = 1 << 20, 256 << 10, 4 << 20
        else:
            self.name = f"huggingface tokenizers {version('tokenizers')}"
            self.batch_bytes, self.piece_bytes, self.longest_run = _HUGGINGFACE_BYTES, 64 << 10, 1 << 20
        self.renew()

    def renew(self) -> None:
        """Load what encodes, dropping every cache, whose memory is given back."""
        self._fast: Any = None
        self._huggingface: Any = None
        if self._is_fast:
            from gigatoken.gigatoken_rs import load_hf_json

            plain = self._plain_specials
            self._fast = load_hf_json((without_special(self._json) if plain else self._json).decode())
            self._fast.encode(b"a")  # what is made for the first text is there from the start
        else:
            self._encode_exactly([])
        release()
        self._bare_bytes: int | None = None

    def encode(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        """Flat ids of all texts, and where each begins: offsets has one entry more than texts."""
        if self.room is not None:
            self._stay_within(self.room())
        if not self._is_fast:
            return _joined(self._encode_exactly(texts.to_pylist()))
        differs = None if self._differing is None else self._differing.held_by(texts)
        if differs is None or not differs.any():
            return self._encode_fast(texts)
        self.exact_texts += int(differs.sum())
        fast, offsets = self._encode_fast(texts.filter(pa.array(~differs)))
        exact: list[Ids] = []
        for group in groups(texts.filter(pa.array(differs)), _HUGGINGFACE_BYTES):
            exact += self._encode_exactly(group.to_pylist())
        lengths = np.empty(len(texts), np.int64)
        lengths[~differs], lengths[differs] = np.diff(offsets), [len(ids) for ids in exact]
        flat, by_exact = np.empty(int(lengths.sum()), np.uint32), np.repeat(differs, lengths)
        flat[~by_exact], flat[by_exact] = fast, np.concatenate(exact)
        return flat, np.concatenate(([0], np.cumsum(lengths)))

    def _encode_fast(self, texts: pa.LargeStringArray) -> tuple[Ids, Offsets]:
        """By gigatoken, straight from Arrow's buffers.

        A batch goes through awkward, which takes 0.2 s and 19 MB to import in every process. A call a document costs
        1.5 us more for each, so awkward is left alone until many short documents, or many bytes for several threads,
        have come.
        """
        starts, data = text_offsets(texts), texts.buffers()[2]
        size = int(starts[-1] - starts[0])
        self._bytes += size
        is_short = size < len(texts) * _LONG_DOCUMENT
        self._short_documents += len(texts) if is_short else 0
        enough = self._short_documents > _FEW_DOCUMENTS if is_short else self._threads > 1 and self._bytes > _FEW_BYTES
        if size == 0 or not enough:
            text, encode = memoryview(data if data is not None else b""), self._fast.encode
            places, flat, lengths = starts.tolist(), list[Ids](), list[int]()
            # Some at a time: the array of one call keeps room for 512 ids, however short its text is.
            for first in range(0, len(texts), 256):
                several = itertools.pairwise(places[first : first + 257])
                ids = [encode(text[start:stop].tobytes()) for start, stop in several]
                lengths += map(len, ids)
                flat.append(np.concatenate(ids))
            return np.concatenate([np.empty(0, np.uint32), *flat]), np.cumsum([0, *lengths])
        import awkward as ak

        # The same buffers as strings: no copy, and no Python object per document.
        characters = ak.contents.NumpyArray(np.frombuffer(data, dtype=np.uint8), parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(ak.index.Index64(starts), characters, parameters={"__array__": "string"})
        out = self._fast.encode_batch(ak.Array(strings), parallel=self._threads > 1).layout
        return out.content.data, out.offsets.data

    def _encode_exactly(self, texts: list[str]) -> list[Ids]:
        """By HF tokenizers, loaded when it is first needed."""
        if self._huggingface is None:
            import tokenizers

            is_unigram = self._plain_specials and isinstance(json.loads(self._json)["model"].get("vocab"), list)
            loaded = without_special(self._json, pieces=True) if is_unigram else self._json
            self._huggingface = tokenizers.Tokenizer.from_str(loaded.decode())
            self._huggingface.encode_special_tokens = self._plain_specials
            release()
        return encode_by_huggingface(self._huggingface, texts)

    def _stay_within(self, room: int) -> None:
        """What Arrow holds, texts on their way, is left out: no renewal would give that back."""
        held = usage().anonymous - pa.total_allocated_bytes()
        if self._bare_bytes is None:
            self._bare_bytes, self._spare_bytes = held, 0
        most, grown = max(SMALLEST_CACHE, room // 3), held - self._bare_bytes
        if grown > most + self._spare_bytes:
            # What the allocators keep is given back first, but not for every batch: getting it again takes time.
            release()
            in_use = usage().anonymous - pa.total_allocated_bytes() - self._bare_bytes
            self._spare_bytes = grown - in_use
            if in_use > most:
                self.renew()


def _joined(arrays: list[Ids]) -> tuple[Ids, Offsets]:
    """Arrays end to end, and where each begins."""
    offsets = np.cumsum([0, *map(len, arrays)])
    return np.concatenate([np.empty(0, np.uint32), *arrays]), offsets


def encode_by_huggingface(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """The ids that every other encoder must match."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def encode_each(encoder: Encoder, texts: Sequence[str] | Sequence[bytes]) -> list[Ids]:
    """The ids of some texts, one array each."""
    kind = pa.large_binary() if texts and isinstance(texts[0], bytes) else pa.large_string()
    flat, offsets = encoder.encode(pa.array(texts, kind).cast(pa.large_string()))
    return [flat[start:stop] for start, stop in itertools.pairwise(offsets)]


def without_special(tokenizer_json: bytes, *, pieces: bool = False) -> bytes:
    """The same tokenizer, for which the text of a special token is text like any other. `pieces`: those of a Unigram
    tokenizer get names that no text holds."""
    tokenizer = json.loads(tokenizer_json)
    special = {token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    if pieces:
        vocab = tokenizer["model"]["vocab"]
        for number in special:
            vocab[number][0] = f"\ufdd0{number}"
    return json.dumps(tokenizer, ensure_ascii=False).encode()
