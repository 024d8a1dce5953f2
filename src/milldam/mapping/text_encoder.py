"""`TextEncoder`: text in, a numpy array of token ids out, for use inside a function that is mapped over documents.

The ids of HF tokenizers, also of a long text, which is cut at white space where that provably changes nothing
(tokenizers/document_encoder.py), so that a call holds its texts twice (once as Arrow), their ids, and a few megabytes.
A long text with megabytes without white space is refused. The encoder's word cache is dropped when the process has
grown by `CACHE_BYTES`. No Python object per token.

Pickles with its tokenizer.json, a few megabytes, and loads the encoder when it is first called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from milldam.errors import ConfigError, InputError, Setting
from milldam.memory import format_size, release

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.tokenizers.document_encoder import DocumentEncoder

CACHE_BYTES = 48 << 20

Ids: TypeAlias = "npt.NDArray[np.uint16] | npt.NDArray[np.uint32]"
Texts: TypeAlias = "Sequence[str | None] | npt.NDArray[np.object_] | pa.Array | pa.ChunkedArray"


class TextEncoder:
    """Texts to token ids, as a store would have them.

    >>> encode = milldam.TextEncoder("tokenizer/")
    >>> encode("A text.")
    array([  33,  854, 1418,   14], dtype=uint16)
    >>> [len(ids) for ids in encode(["A text.", "And another."])]
    [4, 3]

    `tokenizer`: a file, a folder or a Hub name. `bos`, `eos`: "none", "auto" (what the tokenizer has), or a token.
    `special_text`: "special" encodes the text of a special token as that token, "plain" like any other text.
    `encoder`: "auto" is the fast one if it gives the ids of HF tokenizers.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        bos: str = "none",
        eos: str = "none",
        special_text: Literal["special", "plain"] = "special",
        encoder: Literal["auto", "gigatoken", "huggingface"] = "auto",
    ) -> None:
        from milldam.stores.tokens.format import token_dtype
        from milldam.tokenizers.loading import read_tokenizer
        from milldam.tokenizers.proof import prove

        if special_text not in ("special", "plain"):
            raise ConfigError(Setting("special_text"), f': must be special or plain, not "{special_text}".')
        self._plain = special_text == "plain"
        proved = prove(read_tokenizer(str(tokenizer)), encoder=encoder, bos=bos, eos=eos, plain_specials=self._plain)
        self._json, self._special, self.vocab_size = proved.json, proved.special, proved.vocab_size
        self.dtype = np.dtype(token_dtype(self.vocab_size))
        self._encoder, self._differing = proved.encoder, proved.differing
        self._document_encoder: DocumentEncoder | None = None
        release()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_document_encoder": None}

    @property
    def fingerprint(self) -> tuple[Any, ...]:
        """What the ids depend on, for a cache; not which encoder makes them, which is the same."""
        return (self._json, self._plain, self._special.bos, self._special.eos)

    @overload
    def __call__(self, texts: str) -> Ids: ...  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    @overload
    def __call__(self, texts: Texts) -> list[Ids]: ...
    def __call__(self, texts: str | Texts) -> Ids | list[Ids]:
        """The ids of a text, or of each of several: a list, a numpy or an Arrow array. None has none."""
        import pyarrow as pa

        if isinstance(texts, str):
            return self([texts])[0]
        array: Any = texts if isinstance(texts, pa.Array | pa.ChunkedArray) else pa.array(texts, pa.large_string())
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        array = array.cast(pa.large_string()).fill_null("")
        encoder = self._document_encoder
        if encoder is None:
            from milldam.tokenizers.document_encoder import DocumentEncoder
            from milldam.tokenizers.encoders import Encoder

            encoder_inside = Encoder(self._encoder, self._json, plain_specials=self._plain, differing=self._differing)
            encoder_inside.room = lambda: 3 * CACHE_BYTES
            encoder = self._document_encoder = DocumentEncoder(encoder_inside, self._special, self.dtype.name)
        flat, lengths = encoder.encode(array)
        if encoder.uncut:
            size = format_size(encoder.encoder.longest_run)
            raise InputError(f"text {encoder.uncut[0]} has {size} without white space: too long to encode whole.")
        return [ids.copy() for ids in np.split(flat, np.cumsum(lengths))[:-1]]
