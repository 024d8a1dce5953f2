"""Batches as tensors, without a DataLoader: on the CPU without a copy, on a CUDA device while it works.

Calls of CUDA cost the training thread more than making a batch. So on the way to a device batches are gathered in
blocks of pinned memory, one or two whenever one is handed out, and a block goes to the device as a whole, tokens as
narrow as they are stored; one call there widens them all. A batch is a view of its block. The first block is one batch
and the next ones grow, so that the first batch comes at once. So a batch costs the training thread some tens of
microseconds.

Holds `_BLOCKS` blocks of pinned memory of `_BLOCK_BYTES`, or of one batch where that is more; on the device the block
that is handed out, and for as long as one of its batches is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar, overload

import numpy as np
import torch

from milldam.errors import ConfigError
from milldam.loader.batches import Batches, handed_out
from milldam.loader.types import Array, Labelled, PackedBatch, State, TokenPair

_BLOCK_BYTES = 1 << 20
_BLOCK_BATCHES = 16
_BLOCKS = 3
"""One is filled while the device may still have to come to the copies out of the others."""
_ALIGNED = 16
"""Every array of a block begins at a multiple of so many bytes: tensors of any dtype can be views of it."""
TensorsT = TypeVar("TensorsT")


class LabelledTensors(TypedDict):
    """`Labelled` as tensors."""

    input_ids: torch.Tensor
    labels: torch.Tensor


class PackedTensors(LabelledTensors):
    """`PackedBatch` as tensors."""

    position_ids: torch.Tensor
    document_ids: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int


class TensorBatches(Generic[TensorsT]):
    """Batches as tensors, made by `tensors`; its position is that of the batches under it.

    >>> batches = milldam.torch.tensors(store.windows(128).batches(16, seed=0))
    >>> len(batches), next(batches)[0].shape
    (12, torch.Size([16, 128]))
    """

    def __init__(self, batches: Batches[Any], device: torch.device | str | None, pin_memory: bool) -> None:
        if not hasattr(batches, "state_dict"):
            raise ConfigError(f"tensors: {batches!r} are not batches. Give it store.windows(...).batches(...).")
        self._batches = batches
        self._device = None if device is None else torch.device(device)
        on_cuda = self._device is not None and self._device.type == "cuda"
        if (pin_memory or on_cuda) and not torch.cuda.is_available():
            asked = "pin_memory" if pin_memory else f'device="{device}"'
            raise ConfigError(f"{asked}: torch finds no CUDA device here. Leave it out, or look at the driver.")
        self._pin = pin_memory
        self._staging = Staging(self._device, _widening(batches)) if on_cuda and self._device is not None else None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TensorsT]:
        if self._staging is not None:
            return self._batches._loop.items(self._begin)
        return (converted(batch, self._placed) for batch in self._batches)

    def __next__(self) -> TensorsT:
        if self._staging is not None:
            staged: TensorsT = handed_out(self._batches._loop.next(self._begin))
            return staged
        made: TensorsT = converted(next(self._batches), self._placed)
        return made

    def _begin(self, place: int) -> tuple[Iterator[tuple[TensorsT, int]], Callable[[], int]]:
        """What follows in a loop of the batches, so that where it stands is behind the last that was handed out."""
        made, end = self._batches._begin(place)
        assert self._staging is not None
        return self._staging.staged(made), end

    def _placed(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._pin:
            tensor = tensor.pin_memory()
        return tensor if self._device is None else tensor.to(self._device)

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._batches.epoch

    @property
    def samples_seen(self) -> int:
        """Samples delivered to all ranks together since the very first epoch."""
        return self._batches.samples_seen

    def state_dict(self) -> State:
        """The position: after the last batch that was handed out."""
        return self._batches.state_dict()

    def load_state_dict(self, state: State, *, new_weights: bool = False) -> None:
        """Continue from a state; see `Batches.load_state_dict`."""
        self._batches.load_state_dict(state, new_weights=new_weights)


def _widening(batches: Batches[Any]) -> Widening | None:
    """Let batches come as they are stored, where that is narrower than what is wanted."""
    stored, wanted = batches.samples.token_dtype, batches.dtype
    # Numbers below zero, such as labels of -100, are in no narrow batch.
    if batches.samples._signed or stored.itemsize >= wanted.itemsize or not _known(stored):
        return None
    batches.dtype = stored
    return Widening(stored, wanted)


def _known(dtype: np.dtype[Any]) -> bool:
    """Whether torch has it; uint16 came with torch 2.3."""
    try:
        torch.from_numpy(np.empty(0, dtype))
    except (TypeError, ValueError):
        return False
    return True


@overload
def tensors(
    batches: Batches[TokenPair], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[tuple[torch.Tensor, torch.Tensor]]: ...
@overload
def tensors(
    batches: Batches[Labelled], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[LabelledTensors]: ...
@overload
def tensors(
    batches: Batches[PackedBatch], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[PackedTensors]: ...
@overload
def tensors(
    batches: Batches[dict[str, Array]], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[dict[str, torch.Tensor]]: ...
def tensors(
    batches: Batches[Any], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[Any]:
    """The same batches as tensors, on a device if one is named.

    On the CPU they share the arrays' memory, without a copy. To a CUDA device they are copied through pinned memory
    while the loop continues; computations on the device wait for the copy automatically. With `pin_memory` alone they
    stay in pinned memory, for code that copies itself. Afterwards use only the result, not `batches`.

    >>> batches = milldam.torch.tensors(store.windows(128).batches(16, epochs=None), device="cpu")
    >>> x, y = next(batches)
    >>> x.shape, x.dtype
    (torch.Size([16, 128]), torch.int64)
    >>> checkpoint = {"data": batches.state_dict()}
    """
    return TensorBatches(batches, device, pin_memory)


# ---- several batches in one copy ----


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
