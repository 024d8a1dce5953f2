"""A stretch of tokens end to end, over any number of files: what every view of the loader reads from.

A position is that of a token, counted from the begin of the first file. Nothing is opened here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import ConfigError
from milldam.stores.place import Origin


@dataclass(frozen=True, slots=True)
class TokenFile:
    """Tokens in a file, from a byte onwards."""

    path: Path
    tokens: int
    first_byte: int = 0
    index: Path | None = None
    """Where its documents lie, when that is known."""
    empty_documents: bool = False
    """Documents may be empty, as Megatron's may: then their number does not tell whether each is one sequence."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The tokens [first, stop) of some files."""

    name: str
    """What a message calls it."""
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
    origin: Origin | None = field(default=None, repr=False)
    """What fetches the files when they are needed; None: they lie here."""

    @property
    def tokens(self) -> int:
        return self.stop - self.first

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.dtype.itemsize

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

    def hold_indexes(self) -> object:
        """Let the index files lie here while the result lives."""
        if self.origin is None:
            return None
        return self.origin.hold([file.index for file in self.files if file.index is not None])

    @property
    def identity(self) -> dict[str, object]:
        """What a loader's state must agree with."""
        return {"data": self.fingerprint, "first": self.first, "stop": self.stop}

    def part(self, first: int, stop: int) -> TokenStream:
        """The tokens [first, stop) of this stretch."""
        if not 0 <= first <= stop <= self.tokens:
            raise ConfigError(f"{self.name}: tokens {first:,} to {stop:,} of {self.tokens:,}.")
        return replace(self, first=self.first + first, stop=self.first + stop)
