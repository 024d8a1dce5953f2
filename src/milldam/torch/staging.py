"""Batches of arrays -> the same as tensors on a device, several of them in one copy.

Calls of CUDA cost the training thread more than making a batch. So batches are gathered in blocks of pinned memory, one
or two whenever one is handed out, and a block goes to the device as a whole, tokens as narrow as they are stored; one
call there widens them all. A batch is a view of its block. The first block is one batch and the next ones grow, so that
the first batch comes at once.

Holds `_BLOCKS` blocks of pinned memory of `_BLOCK_BYTES`, or of one batch where that is more; on the device the block
that is handed out, and for as long as one of its batches is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from milldam.loader.types import Array

_BLOCK_BYTES = 1 << 20
_BLOCK_BATCHES = 16
_BLOCKS = 3
"""One is filled while the device may still have to come to the copies out of the others."""
_ALIGNED = 16
"""Every array of a block begins at a multiple of so many bytes: tensors of any dtype can be views of it."""


def converted(batch: Any, convert: Callable[[Any], Any], kind: type = np.ndarray) -> Any:
    """A batch with its arrays converted, in dicts, tuples and lists of steps; what is no array stays."""
    if isinstance(batch, kind):
        return convert(batch)
    if isinstance(batch, dict):
        return {name: converted(value, convert, kind) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        made = [converted(value, convert, kind) for value in batch]
        return tuple(made) if isinstance(batch, tuple) else made
    return batch


class Widening(NamedTuple):
    """Tokens travel as they are stored, and are handed out as the user wants them."""

    stored: np.dtype[Any]
    wanted: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in making the batch that would be here."""

    error: Exception


class _Part(NamedTuple):
    """A batch with a `_Spot` for every array, and the place behind it."""

    batch: Any
    place: Any


@dataclass(slots=True)
class _Spot:
    """Where an array lies in a block."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Staging:
    """Batches as tensors on a device, each with the place behind it."""

    def __init__(self, device: torch.device, widening: Widening | None = None) -> None:
        self._device, self._widening = device, widening
        self._hosts = itertools.cycle([_Host(pinned=device.type == "cuda") for _ in range(_BLOCKS)])

    def staged(self, made: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """The same batches as tensors; an error comes out where it would have come without reading ahead."""
        made = _with_failure(made)
        coming = _Block(next(self._hosts))
        coming.add(made)
        while coming.parts:
            sent = _Sent(coming, self._device, self._widening)
            coming = _Block(next(self._hosts))
            for part in sent.parts:
                if isinstance(part.batch, _Failure):
                    raise part.batch.error
                yield sent.tensors(part), part.place
                coming.add(made)
                if len(sent.parts) < _BLOCK_BATCHES:
                    # Two for one, so that blocks grow.
                    coming.add(made)


def _with_failure(made: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    try:
        # Nothing here may hold a batch: its arrays could not be used again.
        yield from made
    except Exception as error:
        yield _Failure(error), None


class _Host:
    """Memory that the device copies from, used again when the last copy is through."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._copied = torch.cuda.Event() if pinned else None
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.array = self.memory.numpy()

    def wait(self) -> None:
        """Until what was sent last has left."""
        if self._copied is not None:
            self._copied.synchronize()

    def reserve(self, size: int, used: int) -> None:
        """Room for so many bytes; those used stay."""
        if size > len(self.array):
            memory = torch.empty(max(size, _BLOCK_BYTES), dtype=torch.uint8, pin_memory=self._pinned)
            memory[:used] = self.memory[:used]
            self.memory, self.array = memory, memory.numpy()

    def send(self, size: int, device: torch.device) -> torch.Tensor:
        there = self.memory[:size].to(device, non_blocking=True, copy=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))
        return there


class _Block:
    """Batches that are gathered."""

    def __init__(self, host: _Host) -> None:
        host.wait()
        self.host, self.size = host, 0
        self.parts: list[_Part] = []
        self.dtypes: set[np.dtype[Any]] = set()

    def add(self, made: Iterator[tuple[Any, Any]]) -> None:
        """One batch more, unless there is none, or no room."""
        count = len(self.parts)
        if count >= _BLOCK_BATCHES or (count > 0 and self.size + self.size // count > _BLOCK_BYTES):
            return
        for batch, place in itertools.islice(made, 1):
            self.parts.append(_Part(converted(batch, self._put), place))

    def _put(self, array: Array) -> _Spot:
        begin = self.size
        self.size += -(-array.nbytes // _ALIGNED) * _ALIGNED
        self.host.reserve(self.size, begin)
        np.copyto(np.ndarray(array.shape, array.dtype, self.host.array, begin), array)
        self.dtypes.add(array.dtype)
        return _Spot(begin, begin + array.nbytes, array.shape, array.dtype)


class _Sent:
    """A block on the device."""

    def __init__(self, block: _Block, device: torch.device, widening: Widening | None) -> None:
        self.parts, self._device, self._widening = block.parts, device, widening
        self._bytes = block.host.send(block.size, device)
        self._wide: torch.Tensor | None = None
        if widening is not None and block.dtypes == {widening.stored}:
            self._wide = self._bytes.view(_torch_dtype(widening.stored)).to(_torch_dtype(widening.wanted))
        self._stream = self._ready = None
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
            self._ready = self._stream.record_event()

    def tensors(self, part: _Part) -> Any:
        if self._stream is not None:
            # Let the stream that works now wait for the block, when it was sent on another one.
            stream = torch.cuda.current_stream(self._device)
            if stream != self._stream:
                stream.wait_event(self._ready)
                (self._bytes if self._wide is None else self._wide).record_stream(stream)
        return converted(part.batch, self._view, _Spot)

    def _view(self, spot: _Spot) -> torch.Tensor:
        if self._wide is not None:
            width = spot.dtype.itemsize
            view = self._wide[spot.begin // width : spot.end // width].view(spot.shape)
        else:
            view = self._bytes[spot.begin : spot.end].view(_torch_dtype(spot.dtype)).view(spot.shape)
            if self._widening is not None and spot.dtype == self._widening.stored:
                return view.to(_torch_dtype(self._widening.wanted))
        # Counts its changes apart: else autograd takes a change of one batch for one of all in the block.
        return view.data


@lru_cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
