"""Batches as tensors, without a DataLoader: on the CPU without a copy, on a CUDA device while it works.

To a CUDA device batches go through pinned memory, several in one copy that nobody waits for (`staging.py`). So a batch
costs the training thread some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypedDict, TypeVar, overload

import numpy as np
import torch

from milldam.errors import ConfigError
from milldam.loader.batches import Batches
from milldam.loader.looping import handed_out
from milldam.loader.types import Array, Labelled, PackedBatch, State, TokenPair
from milldam.torch.staging import Staging, Widening, converted

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
