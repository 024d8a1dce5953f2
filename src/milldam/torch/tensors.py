"""Batches as tensors, without a DataLoader: on the CPU without a copy, on a CUDA device through pinned memory.

A batch on its way to a device is copied by torch, whose pinned memory is used again; the loop does not wait for it, and
computations on the device do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch

from milldam.errors import ConfigError
from milldam.loader.batches import Batches
from milldam.loader.types import Array, TokenPair

TensorsT = TypeVar("TensorsT")


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
            setting = "pin_memory" if pin_memory else f'device="{device}"'
            raise ConfigError(f"{setting}: torch finds no CUDA device here. Leave it out, or look at the driver.")
        self._pin = pin_memory or on_cuda

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[TensorsT]:
        return (converted(batch, self._placed) for batch in self._batches)

    def __next__(self) -> TensorsT:
        batch: TensorsT = converted(next(self._batches), self._placed)
        return batch

    def _placed(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._pin:
            tensor = tensor.pin_memory()
        return tensor if self._device is None else tensor.to(self._device, non_blocking=self._pin)

    def __getattr__(self, name: str) -> Any:
        """`epoch`, `samples_seen`, `state_dict`, `load_state_dict` and `stats` of the batches under it."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)


@overload
def tensors(
    batches: Batches[TokenPair], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[tuple[torch.Tensor, torch.Tensor]]: ...
@overload
def tensors(
    batches: Batches[Any], device: torch.device | str | None = None, pin_memory: bool = False
) -> TensorBatches[dict[str, Any]]: ...
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


def converted(batch: Any, convert: Callable[[Array], Any]) -> Any:
    """A batch with its arrays converted, in dicts, tuples and lists of steps; all else stays."""
    if isinstance(batch, np.ndarray):
        return convert(batch)
    if isinstance(batch, dict):
        return {name: converted(value, convert) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [converted(value, convert) for value in batch]
        return tuple(values) if isinstance(batch, tuple) else values
    return batch
