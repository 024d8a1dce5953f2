"""A stretch of tokens end to end, over any number of files: what every view of the loader reads from.

A position is that of a token, counted from the begin of the first file. Nothing is opened here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from milldam.stores.place import Origin


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens in a file, from a byte onwards."""

    path: Path
    tokens: int
    first_byte: int = 0
    index: Path | None = None
    """Where its documents lie, when that is known."""
    spans: Path | None = None
    """Which tokens of its documents are trained on, when it says so."""
    labels: Path | None = None
    """A label for each of its documents."""
    empty_documents: bool = False
    """Documents may be empty, as Megatron's may: then their number does not tell whether each is one sequence."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The tokens [first, stop) of some files."""

    name: str
    """Its name in messages."""
    files: tuple[TokenFile, ...]
    dtype: np.dtype[Any]
    first: int
    stop: int
    fingerprint: str
    """Names the content of the files: another one means other tokens."""
    cache: Path | None = None
    """Folder for what is computed from the stream once."""
    pad_id: int = 0
    tokenizer: str | None = None
    """Names the tokenizer by content, where that is known: tokens of another one mean other words."""
    pairs: bool = False
    """Documents 2k and 2k + 1 are the chosen and the rejected one of a pair."""
    origin: Origin | None = field(default=None, repr=False)
    """Fetches the files when they are needed; None: they lie here."""

    @property
    def tokens(self) -> int:
        return self.stop - self.first

    @property
    def fits_cache(self) -> bool:
        """Whether all files that it is made of can lie on this machine at once."""
        if self.origin is None:
            return True
        ends = itertools.accumulate(file.tokens for file in self.files)
        needed = (
            file.tokens
            for file, end in zip(self.files, ends, strict=True)
            if end > self.first and end - file.tokens < self.stop
        )
        return sum(needed) * self.dtype.itemsize <= self.origin.cache_bytes

    @property
    def has_spans(self) -> bool:
        """Whether it says which tokens are trained on."""
        return any(file.spans is not None for file in self.files)

    @property
    def has_labels(self) -> bool:
        """Whether each document has a label."""
        return any(file.labels is not None for file in self.files)

    def hold_indexes(self) -> object:
        """Let the files that lie beside the tokens be here while the result lives."""
        if self.origin is None:
            return None
        beside = (path for file in self.files for path in (file.index, file.spans, file.labels))
        return self.origin.hold([path for path in beside if path is not None])

    @property
    def identity(self) -> dict[str, object]:
        """The part of a loader's state that names the data."""
        return {"data": self.fingerprint, "first": self.first, "stop": self.stop}

    def part(self, first: int, stop: int) -> TokenStream:
        """The tokens [first, stop) of this stretch."""
        return replace(self, first=self.first + first, stop=self.first + stop)
