"""Datasets for torch's DataLoader: samples one by one, and whole batches whose workers take turns."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from milldam.checked import checked
from milldam.errors import ConfigError, MismatchError
from milldam.loader.batches import NEVER, Batches, differences
from milldam.loader.mixing import MixedSamples
from milldam.loader.order import Shuffle
from milldam.loader.samples import Samples
from milldam.loader.types import State
from milldam.loader.windows import StreamBatches
from milldam.torch.tensors import converted

_START_BYTES = 16 * 1024


# ---- samples one by one ----


class MapDataset(torch.utils.data.Dataset[Any]):
    """Samples by number, for tools with their own sampler: DataLoader, DistributedSampler, HF Trainer, Lightning.

    A sample is (x, y) or a dict, as set by `form`. Packed rows have no `cu_seqlens` and `max_seqlen`, which belong to a
    whole batch and vary in length; `position_ids` and `document_ids` say the same for a row.

    >>> from torch.utils.data import DataLoader
    >>> dataset = milldam.torch.MapDataset(store.windows(128))
    >>> x, y = next(iter(DataLoader(dataset, batch_size=16, shuffle=True)))
    >>> x.shape
    torch.Size([16, 128])
    """

    def __init__(self, samples: Samples[Any, Any]) -> None:
        _require_samples("MapDataset", samples)
        if not samples._length_known:
            raise ConfigError(
                "MapDataset: a sampler has to know how many samples there are, and a feed may not know yet. Use "
                "BatchDataset, or open the finished store without units."
            )
        if isinstance(samples, MixedSamples):
            raise ConfigError(
                "MapDataset: a sampler would never get beyond the first epoch of a mixture. Use BatchDataset."
            )
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Many samples in one read: what a DataLoader asks for when it makes a batch."""
        return [converted(sample, torch.from_numpy) for sample in self.samples.__getitems__(numbers)]

    def __repr__(self) -> str:
        return f"MapDataset({self.samples!r})"


def _require_samples(name: str, samples: Any) -> None:
    if isinstance(samples, StreamBatches):
        raise ConfigError(
            f"{name}: streams come in one order, in this process. Use tensors(store.streams(...).batches())."
        )
    if not isinstance(samples, Samples):
        raise ConfigError(f"{name}: {samples!r} are not samples. Give it store.windows(...) or store.packed(...).")


# ---- whole batches ----


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
        seed: int = 0,
        shuffle: Shuffle = True,
        rank: int | None = None,
        world_size: int | None = None,
        epochs: int | None = 1,
        drop_last: bool = False,
        prefetch: int = 0,
    ) -> None:
        _require_samples("BatchDataset", samples)
        if (rank is None) != (world_size is None):
            raise ConfigError(f"rank: {rank}, world_size: {world_size}; give both, or neither.")
        self.samples = samples
        self._epochs = epochs
        self._options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, "epochs": epochs}
        self._options |= {"drop_last": drop_last, "prefetch": prefetch}
        self._ranks = None if rank is None or world_size is None else (rank, world_size)
        self._start = _Start()
        self._before_load: State | None = None
        self._loop: _Loop | None = None
        # What is wrong with the settings is said here, not in a worker.
        samples.batches(rank=rank or 0, world_size=world_size or 1, **self._options)

    def __iter__(self) -> _Loop:
        worker = torch.utils.data.get_worker_info()
        if worker is None or worker.id == 0:
            self._refuse_the_rest_twice()
        if worker is not None:
            self._start.mark(_Mark.SEEN_BY_WORKER)
            return _Loop(self, worker.id, worker.num_workers)
        self._loop = _Loop(self, 0, 1)
        return self._loop

    def _refuse_the_rest_twice(self) -> None:
        """A second loop over the rest of an epoch would leave out its first part, epoch after epoch."""
        if self._loop_at()[1]:
            return
        if self._start.marked(_Mark.REST_BEGUN):
            raise ConfigError(
                "A loop went over the rest of this epoch already, from the state that was loaded. Call set_epoch "
                "before each loop, or load a state."
            )
        self._start.mark(_Mark.REST_BEGUN)

    def __len__(self) -> int:
        """Batches of a whole loop over all epochs, for this rank."""
        return len(self._at_start())

    @property
    def epoch(self) -> int:
        """The number of the next loop: after `load_state_dict`, the first epoch for `set_epoch`."""
        return self._loop_at()[0]

    def _loop_at(self) -> tuple[int, bool]:
        """The number of the loop that begins next, and whether that is its begin; the same for all ranks."""
        return self._at_start((0, 1))._loop_at()

    def _at_start(self, ranks: tuple[int, int] | None = None) -> Batches[Any]:
        """New batches that stand where a loop begins."""
        rank, world_size = ranks or self._ranks or _ranks_of_torch()
        batches = self.samples.batches(rank=rank, world_size=world_size, **self._options)
        start = self._start.read()
        if start:
            batches.load_state_dict(batches.state_dict() | start)
        return batches

    def set_epoch(self, epoch: int) -> None:
        """The next loop gives epoch `epoch`, counted in loops if a loop goes over several epochs.

        It starts at the beginning of the epoch, or at the position of a loaded state inside it.
        """
        if epoch < 0:
            raise ConfigError(f"set_epoch: {epoch}; use 0 or more.")
        start = self._start.read()
        if epoch < self.epoch:
            # What a state brought along (a mixture's change of weights) may lie ahead of there.
            start = {}
        if epoch != self.epoch:
            start |= self._at_start((0, 1))._loop_begin(epoch)
        self._begin_at(start)

    def _begin_at(self, start: State) -> None:
        self._start.write(start)
        self._loop = self._before_load = None

    def state_after(self, batches: int) -> State:
        """The state after a number of batches of a loop were taken; fits any number of workers and ranks."""
        return _state_after(self._at_start(), batches)

    def state_dict(self) -> State:
        """The position of this process, in the form of `Batches.state_dict`.

        This process does not see the progress of workers: with workers use `state_after`, or torchdata's
        StatefulDataLoader.
        """
        if torch.utils.data.get_worker_info() is not None:
            # StatefulDataLoader asks; the state of the loop says it all.
            return {}
        if self._start.marked(_Mark.SEEN_BY_WORKER):
            raise ConfigError(
                "state_dict: the DataLoader's workers made the batches, and this process can't see how many of them "
                "the training loop took. Use state_after(batches taken), or torchdata's StatefulDataLoader."
            )
        return self.state_after(0) if self._loop is None else self._loop.stands()

    def load_state_dict(self, state: State, *, new_weights: bool = False) -> None:
        """The next loop continues from a state, to the end of its epoch; see `Batches.load_state_dict`."""
        if torch.utils.data.get_worker_info() is not None:
            return
        before, batches = self._start.read(), self._at_start()
        batches.load_state_dict(state, new_weights=new_weights)
        now = batches.state_dict()
        self._begin_at({name: now[name] for name in ("samples_seen", "order")})
        self._before_load = before

    def _undo_load(self) -> None:
        """StatefulDataLoader loads the dataset, then the loop over it: where other loops begin is not its business."""
        if self._before_load is not None:
            self._begin_at(self._before_load)

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned knows nothing of torch.distributed.
        ranks = _ranks_of_torch() if self._ranks is None and _distributed() else self._ranks
        return self.__dict__ | {"_ranks": ranks, "_loop": None}

    def __repr__(self) -> str:
        return f"BatchDataset({self.samples!r}, batch_size={self._options['batch_size']})"


def _state_after(now: Batches[Any], count: int) -> State:
    """The state of batches `count` steps on; behind the last of a loop it is the begin of what follows."""
    if count < 0:
        raise ConfigError(f"state_after: {count:,} batches; use 0 or more.")
    begin, step, until = now.samples_seen, now.delivery.step, now._until(now.samples_seen)
    place = begin + count * step
    # Samples that go to no rank are passed over with the last batch.
    asked = place + step if now.delivery.drop_last else place
    end = until(asked)
    if end < asked:
        usable = (end - begin) // step * step if now.delivery.drop_last else end - begin
        steps = -(-usable // step)
        if count > steps:
            raise ConfigError(f"state_after: {count:,} batches; a loop from here has {steps:,}.")
        place = end if count == steps else place
    return _state_at(now, place)


def _state_at(now: Batches[Any], place: int) -> State:
    now.load_state_dict(now.state_dict() | {"samples_seen": place})
    return now.state_dict()


class _LoopState(TypedDict):
    begin: dict[str, Any]
    batches: int
    batch_size: int
    world_size: int
    workers: int
    worker: int


class _Loop:
    """One loop over a worker's share of the batches.

    Its state is what torchdata's StatefulDataLoader takes from each worker with each batch: where the whole loop began,
    and how many batches of it this worker made.
    """

    def __init__(self, dataset: BatchDataset, worker: int, workers: int) -> None:
        self._dataset, self._worker, self._workers = dataset, worker, workers
        self._batches = dataset._at_start()
        self._begin = self._batches.state_dict()
        self._taken = 0
        self._through = False
        self._running: Iterator[Any] | None = None

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._batches._every(self._workers, self._worker + self._taken * self._workers)
        for batch in self._running:
            self._taken += 1
            return converted(batch, torch.from_numpy)
        self._through = True
        raise StopIteration

    def stands(self) -> State:
        """Where the only worker stands."""
        now = self._dataset._at_start()
        now.load_state_dict(self._begin)
        # At the end, other ranks may have had one batch more.
        return _state_at(now, now._until(now.samples_seen)(NEVER)) if self._through else _state_after(now, self._taken)

    def state_dict(self) -> State:
        return {"begin": self._begin, "batches": self._taken} | self._sharing()

    def load_state_dict(self, state: State) -> None:
        """Go on in the share that the state was made in."""
        self._dataset._undo_load()
        found: _LoopState = checked(_LoopState, state, "The state of a loop")
        if changed := differences({name: state[name] for name in self._sharing()}, {**self._sharing()}):
            raise MismatchError(
                f"StatefulDataLoader resumes with the workers and ranks it had: {changed}. To change them, "
                "save dataset.state_after(batches taken), and load that into the dataset."
            )
        self._batches.load_state_dict(found["begin"])
        self._begin, self._taken = found["begin"], found["batches"]
        self._through, self._running = False, None

    def _sharing(self) -> dict[str, int]:
        delivery = self._batches.delivery
        return {
            "batch_size": delivery.batch_size,
            "world_size": delivery.world_size,
            "workers": self._workers,
            "worker": self._worker,
        }


class _Mark(enum.IntEnum):
    """What is to be known of the place where loops begin, as long as it is the same."""

    SEEN_BY_WORKER = 0
    """A worker began a loop there."""
    REST_BEGUN = 1
    """A loop over the rest of an epoch began there."""


class _Start:
    """Where loops begin, in memory that is shared with the workers: so `set_epoch` reaches those that persist.

    The part of a state that can change, as JSON; nothing for the very begin.
    """

    def __init__(self) -> None:
        self._shared = torch.zeros(_START_BYTES, dtype=torch.uint8).share_memory_()

    def read(self) -> dict[str, Any]:
        text = self._text.tobytes().rstrip(b"\0")
        return json.loads(text) if text else {}

    def write(self, start: State) -> None:
        """A new place, without marks."""
        text, room = json.dumps(start).encode() if start else b"", len(self._text)
        if len(text) > room:
            raise ConfigError(f"A state of {len(text):,} bytes; those of a BatchDataset have {room:,} at most.")
        self._text[:] = np.frombuffer(text.ljust(room, b"\0"), np.uint8)
        self._shared[: len(_Mark)] = 0

    @property
    def _text(self) -> npt.NDArray[np.uint8]:
        text: npt.NDArray[np.uint8] = self._shared.numpy()[len(_Mark) :]
        return text

    def mark(self, mark: _Mark) -> None:
        self._shared[mark] = 1

    def marked(self, mark: _Mark) -> bool:
        return bool(self._shared[mark])

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of shared memory, made by `copy` or `pickle`, is not shared any more.
        self._shared = state["_shared"].share_memory_()


def _distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _ranks_of_torch() -> tuple[int, int]:
    """This process's rank, of how many."""
    if _distributed():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Every rank would train on all of the data, and nobody would notice.
        raise ConfigError(
            f"{os.environ['WORLD_SIZE']} ranks were started, and torch.distributed is not initialised yet. Call "
            "init_process_group first, or give rank and world_size."
        )
    return 0, 1
