"""Samples -> tensors: batches straight to a device, and a dataset for torch's DataLoader. Needs torch.

    for x, y in tensors(store.windows(1024).batches(16), device="cuda"): ...         no DataLoader; the quickest
    DataLoader(BatchDataset(store.windows(1024), 16), batch_size=None, num_workers=2)   whole batches, made by workers
    DataLoader(store.windows(1024), batch_size=16, shuffle=True)                     for those who bring a sampler

Tokens come as int64, whatever they are stored as. On the CPU a tensor is the array, without a copy. A batch on its way
to a device is copied by torch, whose pinned memory is used again; the loop does not wait for it, and computations on
the device do. Datasets pickle as what they were made from, so a worker that is started copies nothing. Reading is so
cheap that worker processes make it slower: a batch that crosses a process border costs more than to make it. They are
here for loops that ask for a DataLoader.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

try:
    import torch
    import torch.utils.data
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('milldam.torch needs torch: pip install "milldam[torch]"', name="torch") from None

from milldam.errors import ConfigError, MismatchError
from milldam.loader.batches import Batches, differences
from milldam.loader.samples import Samples
from milldam.loader.types import Array, State

__all__ = ["BatchDataset", "TensorBatches", "tensors"]
_START_BYTES = 16 * 1024


class TensorBatches:
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

    def __iter__(self) -> Iterator[Any]:
        return (converted(batch, self._placed) for batch in self._batches)

    def __next__(self) -> Any:
        return converted(next(self._batches), self._placed)

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


def tensors(batches: Batches[Any], device: torch.device | str | None = None, pin_memory: bool = False) -> TensorBatches:
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


class BatchDataset(torch.utils.data.IterableDataset[Any]):
    """Whole batches, for `DataLoader(dataset, batch_size=None, num_workers=N)`.

    Of N workers, worker w makes the batches w, w + N, ...; the DataLoader hands them out in turn. So the training loop
    gets the same batches for any number of workers: those of `samples.batches(...)` in one process.

    Every loop gives the same epoch unless you call `set_epoch(e)` before it, as with torch's DistributedSampler (this
    also reaches persistent workers), or go over all `epochs` in one loop.

    rank, world_size   None: those of torch.distributed if it is initialised, else 0 of 1

    >>> from torch.utils.data import DataLoader
    >>> dataset = milldam.torch.BatchDataset(store.windows(128), 16)
    >>> for taken, (x, y) in enumerate(DataLoader(dataset, batch_size=None), 1):
    ...     if taken == 3:
    ...         break
    >>> checkpoint = {"data": dataset.state_after(taken)}
    >>> checkpoint["data"]["samples_seen"]
    48
    """

    def __init__(
        self,
        samples: Samples[Any, Any],
        batch_size: int,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """`options`: `seed`, `shuffle`, `epochs`, `drop_last` and `prefetch` of `samples.batches`."""
        if not isinstance(samples, Samples):
            raise ConfigError(f"BatchDataset: {samples!r} are not samples. Give it store.windows(...) or the like.")
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank: {rank}, world_size: {world_size}; give both, or neither.")
        self.samples, self._options = samples, {"batch_size": batch_size, "epochs": 1} | options
        self._ranks = None if rank is None or world_size is None else (rank, world_size)
        self._shared = torch.zeros(1 + _START_BYTES, dtype=torch.uint8).share_memory_()
        """Where loops begin, shared with workers, so that `set_epoch` reaches those that persist: the part of a state
        that can change, as JSON, and before it, whether a loop over the rest of an epoch began there."""
        # Wrong settings are refused here, not in a worker.
        samples.batches(rank=rank or 0, world_size=world_size or 1, **self._options)

    def __iter__(self) -> _Loop:
        worker = torch.utils.data.get_worker_info()
        if (worker is None or worker.id == 0) and not self._loop_at()[1]:
            # A second loop over the rest of an epoch would leave out its first part, epoch after epoch.
            if self._shared[0]:
                raise ConfigError(
                    "A loop went over the rest of this epoch already, from the state that was loaded. Call set_epoch "
                    "before each loop, or load a state."
                )
            self._shared[0] = True
        return _Loop(self._at_start(), *((0, 1) if worker is None else (worker.id, worker.num_workers)))

    def __len__(self) -> int:
        """Batches of a whole loop over all epochs, for this rank."""
        return len(self._at_start())

    @property
    def epoch(self) -> int:
        """The number of the next loop: after `load_state_dict`, the first epoch for `set_epoch`."""
        return self._loop_at()[0]

    def _loop_at(self) -> tuple[int, bool]:
        """The number of the loop that begins next, and whether that is its begin; the same for all ranks."""
        now, epochs = self._at_start((0, 1)), self._options["epochs"] or 1
        epoch = now._order.epoch_at(now.samples_seen)
        return epoch // epochs, epoch % epochs == 0 and now._order.is_begin(now.samples_seen)

    def _at_start(self, ranks: tuple[int, int] | None = None) -> Batches[Any]:
        """New batches from where a loop begins."""
        rank, world_size = ranks or self._ranks or _ranks_of_torch()
        batches = self.samples.batches(rank=rank, world_size=world_size, **self._options)
        if start := self._start():
            batches.load_state_dict(batches.state_dict() | start)
        return batches

    def _start(self) -> dict[str, Any]:
        text = self._shared.numpy()[1:].tobytes().rstrip(b"\0")
        return json.loads(text) if text else {}

    def _begin_at(self, start: State) -> None:
        text = json.dumps(start).encode() if start else b""
        if len(text) > _START_BYTES:
            raise ConfigError(f"A state of {len(text):,} bytes; those of a BatchDataset have {_START_BYTES:,} at most.")
        self._shared.numpy()[1:] = np.frombuffer(text.ljust(_START_BYTES, b"\0"), np.uint8)
        self._shared[0] = False

    def set_epoch(self, epoch: int) -> None:
        """The next loop gives epoch `epoch`, counted in loops if a loop goes over several epochs.

        It starts at the beginning of the epoch, or at the position of a loaded state inside it.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch: {epoch}; use 0 or more.")
        start, current = self._start(), self.epoch
        if epoch != current:
            start |= self._at_start((0, 1))._order.epoch_begin(epoch * (self._options["epochs"] or 1))
        self._begin_at(start)

    def state_after(self, batches: int) -> State:
        """The state after a number of batches of a loop were taken; fits any number of workers and ranks."""
        now = self._at_start()
        begin, step = now.samples_seen, now.delivery.step
        until = now._order.until(begin, now.delivery.epochs)
        place = until(begin + batches * step)
        rest = until(place + step) - place
        # What is left out at the end counts as seen with the last batch.
        left_out = now.delivery.drop_last and rest < step
        now.load_state_dict(now.state_dict() | {"samples_seen": place + (rest if left_out else 0)})
        return now.state_dict()

    def load_state_dict(self, state: State) -> None:
        """The next loop continues from a state, to the end of its epoch; see `Batches.load_state_dict`."""
        batches = self._at_start()
        batches.load_state_dict(state)
        now = batches.state_dict()
        self._begin_at({name: now[name] for name in ("samples_seen", "order")})

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned knows nothing of torch.distributed.
        return self.__dict__ | {"_ranks": self._ranks or _ranks_of_torch()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of shared memory, made by `copy` or `pickle`, is not shared any more.
        self.__dict__ = state | {"_shared": state["_shared"].share_memory_()}


class _Loop:
    """A worker's share of one loop, with the state that torchdata's StatefulDataLoader saves of each worker: where the
    whole loop began, and how many batches of it this worker made."""

    def __init__(self, batches: Batches[Any], worker: int, workers: int) -> None:
        self._batches, self._worker, self._workers = batches, worker, workers
        self._begin, self._taken = batches.state_dict(), 0
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._batches._every(self._workers, self._worker + self._taken * self._workers)
        batch = converted(next(self._running), torch.from_numpy)
        self._taken += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        of = self._batches.delivery
        share = {"batch_size": of.batch_size, "world_size": of.world_size}
        share |= {"workers": self._workers, "worker": self._worker}
        return {"begin": self._begin, "taken": self._taken, "share": share}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if changed := differences(state.get("share", {}), self.state_dict()["share"]):
            raise MismatchError(
                f"StatefulDataLoader resumes with the workers and ranks it had: {changed}. To change them, save "
                "dataset.state_after(batches taken), and load that into the dataset."
            )
        self._batches.load_state_dict(state["begin"])
        self._begin, self._taken, self._running = state["begin"], state["taken"], None


def _ranks_of_torch() -> tuple[int, int]:
    """This process's rank, of how many."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Every rank would train on all of the data, and nobody would notice.
        raise ConfigError(
            f"{os.environ['WORLD_SIZE']} ranks were started, and torch.distributed is not initialised yet. Call "
            "init_process_group first, or give rank and world_size."
        )
    return 0, 1
