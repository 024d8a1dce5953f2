"""Tokens of a stream whose files come through a cache: fetched when they are touched, given back when they are not.

Reads as `PositionedReader` does, from files that are held open while they are in use, and given back when the last
batches did not need them, or something else needs the room. What is announced is fetched in the background, and the
file behind it too. Where every file is here and all of them can stay, they are mapped, and reading is as fast as for a
store that lies here.
"""

from __future__ import annotations

import os

import numpy as np

from milldam.errors import ConfigError, ResourceError
from milldam.loader.permutation import Int64s
from milldam.loader.reading import (
    OPEN_FILES,
    MappedReader,
    MappingError,
    PositionedReader,
    Reader,
    TokenArray,
    Way,
    fits_memory,
    joined,
)
from milldam.loader.stream import TokenStream
from milldam.memory import format_size

_KEPT_BATCHES = 32
"""A file that so many batches did not need is given back."""
_TOO_MANY = 3
"""Batches in a row beyond the cache that make an error."""


def open_cached(stream: TokenStream, way: Way) -> Reader:
    """Mapped when all files are here, and cache and memory hold them; `way="map"` waits for them."""
    assert stream.origin is not None
    paths = [file.path for file in stream.files if file.tokens]
    if way == "map" and not stream.fits_cache:
        raise ConfigError(f'{stream.name}: read="map" needs all of it here, which its cache does not hold.')
    may_map = way == "auto" and stream.fits_cache and fits_memory(stream) and stream.origin.has(paths)
    if way == "map" or may_map:
        try:
            held, reader = stream.origin.hold(paths), MappedReader(stream)
        except (MappingError, OSError, ResourceError):  # as where so many files may not be open
            if way == "map":
                raise
        else:
            reader.held = held
            return reader
    return CachedReader(stream)


class CachedReader(PositionedReader):
    """Files by pread, each held open while it is in use. As with its parent, every thread has its own."""

    announces = True

    def __init__(self, stream: TokenStream) -> None:
        super().__init__(stream)
        assert stream.origin is not None
        self._name, self._from = stream.name, stream.origin
        self._sizes = np.array([file.tokens * stream.dtype.itemsize for file in self._layout.files], np.int64)
        self._batch = 0
        self._used: dict[int, int] = {}
        """The last batch that needed each file."""
        self._too_much = 0
        """Batches in a row that needed more than the cache holds."""

    def runs(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        self._require_room(starts, starts + np.maximum(lengths, 1) - 1)
        return super().runs(starts, lengths)

    def announce(self, starts: Int64s, lengths: Int64s) -> None:
        files = list(dict.fromkeys(file for file, _, _ in self._layout.parts(*joined(starts, lengths))))
        # Samples side by side go on in the next file.
        following = [files[-1] + 1] if files and files[-1] + 1 < len(self._layout.files) else []
        new = [file for file in dict.fromkeys(files + following) if file not in self._descriptors]
        if new:
            self._from.announce([self._layout.files[file].path for file in new])

    def release(self, starts: Int64s, lengths: Int64s) -> None:
        for file in {file for file, _, _ in self._layout.parts(*joined(starts, lengths))} & self._descriptors.keys():
            self._close(file)
        self._from.announce([])

    def _require_room(self, firsts: Int64s, lasts: Int64s) -> None:
        files = np.unique(np.concatenate((self._layout.find(firsts), self._layout.find(lasts))))
        # A batch of these files; those that none has needed for some time are given back.
        self._batch += 1
        self._used.update(dict.fromkeys(files.tolist(), self._batch))
        idle = [file for file in self._descriptors if self._used[file] < self._batch - _KEPT_BATCHES]
        for file in idle:
            self._close(file)
        if idle:
            # There is room for what waits.
            self._from.announce([])
        needed = int(self._sizes[files].sum())
        # One that goes over the end of a window needs the shards of two, which is no habit.
        self._too_much = self._too_much + 1 if needed > self._from.cache_bytes else 0
        if self._too_much >= _TOO_MANY:
            raise ResourceError(
                f"{self._name}: one batch reads from {len(files):,} shards of {format_size(needed)}, and "
                f"the cache holds {format_size(self._from.cache_bytes)}, so that each batch would fetch them all.\n"
                "Use a larger cache=..., fewer streams or smaller batches, or bring the store here with `milldam pull`."
            )

    def _close(self, file: int) -> None:
        os.close(self._descriptors.pop(file))

    def _open(self, file: int) -> int:
        path = self._layout.files[file].path
        while len(self._descriptors) >= OPEN_FILES:
            self._close(min(self._descriptors, key=self._used.__getitem__))
        descriptor = self._from.open_if_room(path)
        while descriptor is None and self._descriptors:
            self._close(min(self._descriptors, key=self._used.__getitem__))
            descriptor = self._from.open_if_room(path)
        if descriptor is None:
            descriptor = self._from.open(path)
        self._descriptors[file] = descriptor
        return descriptor
