"""Batches as tensors, without a DataLoader: on the CPU without a copy, on a CUDA device while it works.

To a CUDA device a batch goes as one block of pinned memory, in one copy that nobody waits for, with tokens as narrow as
they are stored; they are widened there. So a batch costs the training thread some tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypedDict, TypeVar, overload

import numpy as np
import torch

from milldam.errors import ConfigError
from milldam.loader.batches import Batches
from milldam.loader.types import Array, Labelled, PackedBatch, State, TokenPair

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


_ALIGNED = 16
"""Every array of a block begins at a multiple of so many bytes: tensors of any dtype can be views of it."""


def converted(batch: Any, convert: Callable[[Array], Any]) -> Any:
    """A batch with its arrays converted, in dicts, tuples and lists of steps; what is no array stays."""
    if isinstance(batch, np.ndarray):
        return convert(batch)
    if isinstance(batch, dict):
        return {name: converted(value, convert) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        made = [converted(value, convert) for value in batch]
        return tuple(made) if isinstance(batch, tuple) else made
    return batch


class TensorBatches(Generic[TensorsT]):
    """Batches as tensors, as `tensors` makes them; where it stands is where the batches under it stand."""

    def __init__(self, batches: Batches[Any], device: torch.device | str | None, pin_memory: bool) -> None:
        if not hasattr(batches, "state_dict"):
            raise ConfigError(f"tensors: {batches!r} are no batches. Give it store.windows(...).batches(...).")
        self._batches = batches
        self._device = None if device is None else torch.device(device)
        on_cuda = self._device is not None and self._device.type == "cuda"
        if (pin_memory or on_cuda) and not torch.cuda.is_available():
            asked = "pin_memory" if pin_memory else f'device="{device}"'
            raise ConfigError(f"{asked}: torch finds no CUDA device here. Leave it out, or look at the driver.")
        self._pin = pin_memory
        self._copy = _CudaCopy(batches, self._device) if on_cuda and self._device is not None else None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TensorsT]:
        for batch in self._batches:
            yield self._tensors(batch)

    def __next__(self) -> TensorsT:
        return self._tensors(next(self._batches))

    def _tensors(self, batch: Any) -> TensorsT:
        made: TensorsT = converted(batch, self._placed) if self._copy is None else self._copy(batch)
        return made

    def _placed(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._pin:
            tensor = tensor.pin_memory()
        return tensor if self._device is None else tensor.to(self._device)

    @property
    def epoch(self) -> int:
        """How many epochs are through."""
        return self._batches.epoch

    @property
    def samples_seen(self) -> int:
        """Samples that all ranks together were given, from the very first epoch on."""
        return self._batches.samples_seen

    def state_dict(self) -> State:
        """Where it stands: behind the last batch that was handed out."""
        return self._batches.state_dict()

    def load_state_dict(self, state: State, *, new_weights: bool = False) -> None:
        """Go on from a state; see `Batches.load_state_dict`."""
        self._batches.load_state_dict(state, new_weights=new_weights)


class _CudaCopy:
    """A batch of arrays -> the same as tensors on a CUDA device, in one copy."""

    def __init__(self, batches: Batches[Any], device: torch.device) -> None:
        self._device = device
        self._narrow, self._wide = None, None
        stored, wanted = batches.samples.token_dtype, batches.dtype
        # Numbers below zero, such as labels of -100, are in no narrow batch.
        if not batches.samples._signed and stored.itemsize < wanted.itemsize and _known(stored):
            self._narrow, self._wide = stored, torch.from_numpy(np.empty(0, wanted)).dtype
            batches.dtype = stored

    def __call__(self, batch: Any) -> Any:
        arrays: list[Array] = []
        converted(batch, arrays.append)
        begins = np.cumsum([0, *(-(-array.nbytes // _ALIGNED) * _ALIGNED for array in arrays)]).tolist()
        # Memory of torch's own, which torch gives to nobody else until the copy out of it is through.
        block = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
        bytes_of_block = block.numpy()
        for array, begin in zip(arrays, begins, strict=False):
            np.copyto(np.ndarray(array.shape, array.dtype, bytes_of_block, begin), array)
        there = block.to(self._device, non_blocking=True)
        placed = iter(zip(arrays, begins, strict=False))
        return converted(batch, lambda _: self._view(there, *next(placed)))

    def _view(self, block: torch.Tensor, array: Array, begin: int) -> torch.Tensor:
        part = block[begin : begin + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        return part.to(self._wide) if array.dtype == self._narrow else part


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
    """The same batches as tensors, on a device when one is named.

    On the CPU they share the arrays' memory, without a copy. To a CUDA device they go through pinned memory, while
    the loop goes on: no need to wait, what is computed there next waits by itself. `pin_memory` alone: in pinned
    memory, for those who copy themselves. The batches belong to it from then on: ask it, not them.

    >>> batches = tensors(store.windows(1024).batches(16, epochs=None), device="cuda")      # doctest: +SKIP
    >>> x, y = next(batches)                                                                # doctest: +SKIP
    >>> checkpoint["data"] = batches.state_dict()                                           # doctest: +SKIP
    """
    return TensorBatches(batches, device, pin_memory)
