"""Tokens of a stream, by position: ways to read the same, chosen by size and place.

`MappedReader`: all files of a stream side by side in one stretch of addresses, so that any number of rows from any
number of files is one gather, at the speed of memory copies. Holds no memory of its own; the pages it touches are the
kernel's page cache, and show as resident.

`PositionedReader`: for data that does not fit in memory, where mapped reads collapse (the kernel reads around each
fault what is thrown away before it is used). Reads exactly the bytes that are asked for into a reused buffer, and
tells the kernel ahead of time what will be asked for next.

`CachedReader`: for files that come through a cache, fetched when they are touched, given back when they are not. Reads
as a `PositionedReader` does. Where every file is here and all of them can stay, they are mapped.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from milldam.errors import StoreError
from milldam.loader.permutation import Int64s
from milldam.loader.stream import TokenFile, TokenStream
from milldam.memory import available_bytes

TokenArray = npt.NDArray[np.integer[Any]]
T = TypeVar("T", bound=np.generic)
Way = Literal["auto", "map", "pread"]

MOST_MAPPINGS = 16_384
"""A process may have 65,530 mappings on Linux, and others want some too."""
OPEN_FILES = 64
"""For each reader and thread; a process may often have no more than 1,024."""
_KEPT_BATCHES = 32
"""A file from a cache that so many batches did not need is given back."""
_SHORTEST_SLICE = 64
"""Longer runs are copied as slices; for shorter ones a slice costs more than a place for each token."""
_MAP_FIXED = 0x10
log = logging.getLogger("milldam")
_CAN_MAP = hasattr(mmap, "MAP_SHARED")
_CAN_ADVISE = hasattr(os, "posix_fadvise")


def ranges(firsts: Int64s, counts: Int64s) -> Int64s:
    """The numbers [first, first + count) of each pair, end to end.

    >>> ranges(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    ends = counts.cumsum()
    # (numbers,): counted through, plus what each range is ahead of the count
    numbers: Int64s = (firsts - ends + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers


def gathered(array: npt.NDArray[T], begins: Int64s, lengths: Int64s) -> npt.NDArray[T]:
    """Stretches of an array, one after the other; of a single one, which may be giant, no copy."""
    if lengths.sum() < _SHORTEST_SLICE * len(lengths):
        return array[ranges(begins, lengths)]
    ends = (begins + lengths).tolist()
    slices = [array[begin:end] for begin, end in zip(begins.tolist(), ends, strict=True)]
    return slices[0] if len(slices) == 1 else np.concatenate(slices)


def end_to_end(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """The same stretches, of which those that lie end to end are one."""
    first = np.flatnonzero(np.concatenate(([True], starts[1:] != (starts + lengths)[:-1])))
    return starts[first], np.add.reduceat(lengths, first)


def joined(starts: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s]:
    """All that stretches cover, those that touch or overlap the one before as one."""
    ends = starts + lengths
    first = np.flatnonzero(np.concatenate(([True], (starts[1:] > ends[:-1]) | (starts[1:] < starts[:-1]))))
    return starts[first], np.maximum.reduceat(ends, first) - starts[first]


ReadRows = Callable[[slice], TokenArray]
"""Some of the rows that were looked up: valid until the next call."""


class Reader:
    """Tokens by position, in the dtype they are stored in."""

    dtype: np.dtype[Any]
    announces = False
    """Whether it is any use to announce what comes next."""

    def rows(self, starts: Int64s, length: int) -> TokenArray:
        """(len(starts), length): valid until the next call."""
        return self.look_up(starts, length)(slice(None))

    def look_up(self, starts: Int64s, length: int) -> ReadRows:
        """Rows of which some at a time are read, once all were looked up together."""

        def read(part: slice) -> TokenArray:
            some = starts[part]
            return self.runs(some, np.full(len(some), length)).reshape(len(some), length)

        return read

    def runs(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        """Stretches of any length, end to end; valid until the next call."""
        raise NotImplementedError

    def announce(self, starts: Int64s, lengths: Int64s) -> None:
        """These stretches are read soon."""

    def release(self, starts: Int64s, lengths: Int64s) -> None:
        """These stretches are not read again soon."""


def open_reader(stream: TokenStream, way: Way = "auto", most_open: int | None = None) -> Reader:
    """The reader for a stream: mapped while it fits in half of the memory that is free, else positioned.

    Where its files come through a cache, they are mapped once they all are here; `way="map"` waits for them.
    """
    origin, paths = stream.origin, [file.path for file in stream.files if file.tokens]
    if way == "map" and not stream.fits_cache:
        raise StoreError(f'{stream.name}: read="map" needs all of it here, which its cache does not hold.')
    here = origin is None or (stream.fits_cache and origin.has(paths))
    if way == "map" or (way == "auto" and here and fits_memory(stream)):
        try:
            held = None if origin is None else origin.hold(paths)
            reader = MappedReader(stream)
            reader.held = held
            return reader
        except StoreError as error:
            if way == "map":
                raise
            # A limit on addresses, as clusters set it.
            log.warning(f"{stream.name}: read without mapping it, since that failed: {error}")
    return PositionedReader(stream, most_open) if origin is None else CachedReader(stream)


def fits_memory(stream: TokenStream) -> bool:
    """Whether a stream is to be mapped."""
    if not _CAN_MAP or len(stream.files) > MOST_MAPPINGS or not _aligned(stream):
        return False
    return stream.tokens * stream.dtype.itemsize <= available_bytes()[0] // 2


def _aligned(stream: TokenStream) -> bool:
    return all(file.first_byte % stream.dtype.itemsize == 0 for file in stream.files)


class Layout:
    """Which file a position lies in."""

    def __init__(self, files: tuple[TokenFile, ...]) -> None:
        self.files = [file for file in files if file.tokens]
        ends = np.fromiter(itertools.accumulate(file.tokens for file in self.files), np.int64, len(self.files))
        self.ends = ends
        """Positions behind the last token of each file."""
        self.begins = np.concatenate((np.zeros(1, np.int64), ends[:-1]))

    def find(self, positions: Int64s) -> Int64s:
        # A stretch of no tokens may begin behind the last one.
        return np.minimum(self.ends.searchsorted(positions, side="right"), len(self.files) - 1)

    def parts(self, starts: Int64s, lengths: Int64s) -> Iterator[tuple[int, int, int]]:
        """(file, token in it, tokens) of stretches, cut where files end."""
        files = self.find(starts)
        if len(files) and (starts + lengths <= self.ends[files]).all():
            yield from zip(files.tolist(), (starts - self.begins[files]).tolist(), lengths.tolist(), strict=True)
            return
        for file, start, length in zip(files.tolist(), starts.tolist(), lengths.tolist(), strict=True):
            while length > 0:
                here = min(length, int(self.ends[file]) - start)
                yield file, start - int(self.begins[file]), here
                file, start, length = file + 1, start + here, length - here


class MappedReader(Reader):
    """Every file of a stream mapped into one stretch of addresses."""

    held: object = None
    """Keeps the files where they are, if anything must."""

    def __init__(self, stream: TokenStream) -> None:
        if not _aligned(stream):
            raise StoreError(
                f"{stream.name}: its tokens begin in the middle of a {stream.dtype} and can't be mapped. "
                'read="pread" reads them.'
            )
        self._layout = Layout(stream.files)
        self.dtype = stream.dtype
        self._space, first_bytes = map_side_by_side(self._layout.files, stream.dtype.itemsize)
        # A token's place in the space is its position plus the shift of its file.
        self._shifts = first_bytes // stream.dtype.itemsize - self._layout.begins
        self.tokens: TokenArray = np.frombuffer(self._space, stream.dtype)
        """The whole stretch, what lies between files included: see `places`."""

    def look_up(self, starts: Int64s, length: int) -> ReadRows:
        places, windows = self.places(starts, length), sliding_window_view(self.tokens, length)
        in_two = places < 0
        if not in_two.any():
            return lambda part: windows[places[part]]

        def read(part: slice) -> TokenArray:
            rows: TokenArray = windows[np.maximum(places[part], 0)]
            for row in in_two[part].nonzero()[0]:
                rows[row] = self._joined(starts[part][row : row + 1], np.array([length]))
            return rows

        return read

    def places(self, starts: Int64s, lengths: int | Int64s) -> Int64s:
        """Where stretches begin in `tokens`; below 0: they lie in two files."""
        file = self._layout.find(starts)
        places = starts + self._shifts[file]
        places[starts + lengths > self._layout.ends[file]] = -1
        return places

    def runs(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        places = self.places(starts, lengths)
        if not len(places) or places.min() < 0:
            return self._joined(starts, lengths)
        return gathered(self.tokens, places, lengths)

    def _joined(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        parts = [self.tokens[:0]]
        for file, token, length in self._layout.parts(starts, lengths):
            place = int(self._layout.begins[file] + self._shifts[file]) + token
            parts.append(self.tokens[place : place + length])
        return np.concatenate(parts)


def map_side_by_side(files: list[TokenFile], width: int) -> tuple[mmap.mmap, Int64s]:
    """One stretch of addresses with every file in it, and the byte in it where the tokens of each begin.

    The stretch is reserved first and then filled file by file; it is given back as a whole. So no file is held open,
    and it does not matter how many there are.
    """
    page = mmap.PAGESIZE
    sizes = [file.first_byte + file.tokens * width for file in files]
    places = list(itertools.accumulate((-(-size // page) * page for size in sizes), initial=0))
    try:
        space = mmap.mmap(-1, max(places[-1], page), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON, prot=mmap.PROT_READ)
    except OSError as error:
        raise _unmapped(files[0], str(error.strerror)) from None
    # The reserved bytes are read-only, so their address can't be had from a writable view.
    address = np.frombuffer(space, np.uint8).__array_interface__["data"][0]
    for file, size, place in zip(files, sizes, places, strict=False):
        descriptor = _open(file, size)
        try:
            flags = mmap.MAP_SHARED | _MAP_FIXED
            mapped = _mmap()(address + place, size, mmap.PROT_READ, flags, descriptor, 0)
            if mapped != address + place:
                raise _unmapped(file, os.strerror(ctypes.get_errno()))
        finally:
            os.close(descriptor)
    return space, np.array([place + file.first_byte for file, place in zip(files, places, strict=False)], np.int64)


@functools.cache
def _mmap() -> Any:
    """The system's mmap, which can map at a given address."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return call


def _unmapped(file: TokenFile, error: str) -> StoreError:
    return StoreError(f'{file.path}: can\'t be mapped ({error}). read="pread" reads it without a mapping.')


def _open(file: TokenFile, size: int) -> int:
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{file.path}: can't be read ({error.strerror}).") from None
    actual = os.fstat(descriptor).st_size
    # Reading a mapping behind the end of its file would end the process.
    if actual < size:
        os.close(descriptor)
        raise StoreError(f"{file.path}: {actual:,} bytes where {size:,} are expected. Make it again.")
    return descriptor


class PositionedReader(threading.local, Reader):
    """Exactly the bytes that are asked for, by pread.

    Every thread that uses it has its own buffer and its own open files (a `threading.local` is made anew for each), so
    that loaders that read ahead from the same samples never overwrite one another's batches.
    """

    announces = _CAN_ADVISE

    def __init__(self, stream: TokenStream, most_open: int | None = None) -> None:
        self._layout = Layout(stream.files)
        self.dtype = stream.dtype
        self._most_open = OPEN_FILES if most_open is None else most_open
        self._first_bytes = [file.first_byte for file in self._layout.files]
        self._descriptors = _Descriptors()
        self._buffer = np.empty(0, np.uint8)

    def runs(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        width, first_bytes = self.dtype.itemsize, self._first_bytes
        size = int(lengths.sum()) * width
        if len(self._buffer) < size:
            self._buffer = np.empty(size, np.uint8)
        # Attributes of a `threading.local` are slow: once a batch, not once a row.
        layout, descriptors, at, target = self._layout, self._descriptors, 0, self._buffer.data
        try:
            for file, token, length in layout.parts(starts, lengths):
                slot = target[at : at + length * width]
                descriptor = descriptors.get(file)
                descriptor = self._open(file) if descriptor is None else descriptor
                offset = first_bytes[file] + token * width
                read = os.preadv(descriptor, (slot,), offset)
                while read < len(slot):
                    # A network file system may give less at a time.
                    more = os.preadv(descriptor, (slot[read:],), offset + read)
                    if not more:
                        raise StoreError(f"{layout.files[file].path}: has become shorter than it was. Make it again.")
                    read += more
                at += length * width
        except OSError as error:
            error.filename = error.filename or str(layout.files[file].path)
            raise
        return self._buffer[:size].view(self.dtype)

    def announce(self, starts: Int64s, lengths: Int64s) -> None:
        self._advise(starts, lengths, os.POSIX_FADV_WILLNEED)

    def release(self, starts: Int64s, lengths: Int64s) -> None:
        self._advise(starts, lengths, os.POSIX_FADV_DONTNEED)

    def _advise(self, starts: Int64s, lengths: Int64s, advice: int) -> None:
        width = self.dtype.itemsize
        for file, token, length in self._layout.parts(*joined(starts, lengths)):
            offset = self._first_bytes[file] + token * width
            descriptor = self._descriptors.get(file)
            descriptor = self._open(file) if descriptor is None else descriptor
            os.posix_fadvise(descriptor, offset, length * width, advice)

    def _open(self, file: int) -> int:
        opened = self._layout.files[file]
        descriptor = _open(opened, opened.first_byte + opened.tokens * self.dtype.itemsize)
        if _CAN_ADVISE:
            # Without it the kernel reads around every sample what nobody asked for.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self._descriptors[file] = descriptor
        if len(self._descriptors) > self._most_open:
            self._descriptors.close_oldest()
        return descriptor


class _Descriptors(OrderedDict[int, int]):
    """Open files by number, closed when a thread that used them or the reader is gone."""

    def close_oldest(self) -> None:
        os.close(self.popitem(last=False)[1])

    def __del__(self) -> None:
        while self:
            self.close_oldest()


class CachedReader(PositionedReader):
    """Files by pread, each held open while it is in use. As with its parent, every thread has its own."""

    announces = True

    def __init__(self, stream: TokenStream) -> None:
        super().__init__(stream)
        assert stream.origin is not None
        self._from, self._batch = stream.origin, 0
        self._used: dict[int, int] = {}
        """The last batch that needed each file."""

    def runs(self, starts: Int64s, lengths: Int64s) -> TokenArray:
        lasts = starts + np.maximum(lengths, 1) - 1
        files = np.unique(np.concatenate((self._layout.find(starts), self._layout.find(lasts))))
        # A batch of these files; those that none has needed for some time are given back.
        self._batch += 1
        self._used.update(dict.fromkeys(files.tolist(), self._batch))
        idle = [file for file in self._descriptors if self._used[file] < self._batch - _KEPT_BATCHES]
        for file in idle:
            self._close(file)
        if idle:
            # There is room for what waits.
            self._from.announce([])
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
