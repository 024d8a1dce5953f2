"""Tensors for training: the same batches for any workers and ranks, and exact states, with real DataLoaders."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.kit.quick import first_quick  # noqa: E402
from tests.kit.token_stores import write_store  # noqa: E402
from tests.kit.unit_stores import LateParts, random_plan, unit_store  # noqa: E402
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, random_split  # noqa: E402

import milldam  # noqa: E402
from milldam.errors import ConfigError, MismatchError  # noqa: E402
from milldam.loader.stores import Store  # noqa: E402
from milldam.torch import BatchDataset, tensors  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
    # torchdata's doing.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

SEQ_LEN = 4


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """53 windows of four tokens, over two shards."""
    return write_store(tmp_path_factory.mktemp("torch") / "s", [[13, 50, 70], [83]])


def firsts(batches: Any) -> list[list[int]]:
    """The first token of every sample, batch by batch: windows of these stores all begin with another one."""
    return [batch[0][:, 0].tolist() for batch in batches]


def taken(batches: Any, count: int) -> list[list[int]]:
    """The first batches, as `firsts`."""
    return firsts(itertools.islice(batches, count))


def samples_of(batches: list[list[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(batches))


def loader_of(dataset: BatchDataset, workers: int = 0, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


# ---- samples one by one ----


# ---- whole batches ----


@pytest.mark.parametrize("workers", first_quick([3, 0, 1, 2], 2))
def test_workers_together_give_the_sequence_of_one_process(store: Store, workers: int) -> None:
    """The training loop sees the same batches, in the same order, for any number of workers."""
    options: dict[str, Any] = {"seed": 3, "epochs": 2}
    dataset = BatchDataset(store.windows(SEQ_LEN), 6, **options)
    loader = loader_of(dataset, workers)
    batches = list(loader)
    assert firsts(batches) == firsts(store.windows(SEQ_LEN).batches(6, **options))
    assert len(batches) == len(loader) == len(dataset) == 18
    assert all(tensor.dtype == torch.int64 for batch in batches for tensor in batch)


@pytest.mark.parametrize(
    ("context", "persistent"), [("fork", False), ("fork", True), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_workers_are_reached_by_set_epoch(store: Store, context: str, persistent: bool) -> None:
    """Epochs with workers are the epochs without, also of a copy of the dataset."""
    dataset = copy.deepcopy(BatchDataset(store.windows(SEQ_LEN), 8))
    with_workers = loader_of(dataset, 2, persistent_workers=persistent, multiprocessing_context=context)
    alone = BatchDataset(store.windows(SEQ_LEN), 8)
    for epoch in (0, 1, 4, 2):
        dataset.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert dataset.epoch == epoch
        assert firsts(with_workers) == firsts(alone)


# ---- ranks ----


def test_ranks_are_those_of_torch_distributed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being told, each rank of a process group takes its share, also in workers that know of no group."""
    dataset = BatchDataset(store.windows(SEQ_LEN), 4)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    sent = pickle.dumps(dataset)
    expected = firsts(store.windows(SEQ_LEN).batches(4, rank=1, world_size=3))
    assert firsts(dataset) == expected
    monkeypatch.undo()
    assert firsts(pickle.loads(sent)) == expected


# ---- any sizes, workers, ranks and points of interruption ----


class Line:
    """Windows of one token, each another one: as many samples as wanted."""

    stores: dict[int, Store] = {}  # noqa: RUF012

    @classmethod
    def of(cls, folder: Path, samples: int) -> Any:
        if samples not in cls.stores:
            cls.stores[samples] = write_store(folder / str(samples), [[samples + 1]])
        return cls.stores[samples].windows(1)


def in_turn(dataset: BatchDataset, workers: int) -> Iterator[Any]:
    """The batches of a DataLoader with so many workers: one batch of each in turn, until it has no more."""
    shares: list[Iterator[Any]] = []
    for number in range(workers):
        worker = SimpleNamespace(id=number, num_workers=workers)
        with patch.object(torch.utils.data, "get_worker_info", return_value=worker):
            shares.append(iter(dataset))
    while shares:
        for share in list(shares):
            batch = next(share, None)
            if batch is None:
                shares.remove(share)
            else:
                yield batch


sizes = st.integers(1, 60)
few = st.integers(1, 5)


@given(data=st.data(), samples=sizes, batch_size=few, epochs=st.integers(1, 2), stop=st.integers(0, 30))
def test_interrupted_anywhere_and_resumed_elsewhere(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, samples: int, batch_size: int, epochs: int, stop: int
) -> None:
    """Before and after an interruption together are exactly the epochs, on other ranks, workers and batch sizes."""
    windows = Line.of(tmp_path_factory.getbasetemp(), samples)
    draw = {"world_size": few, "workers": few, "batch_size": few}
    before, after = ({name: data.draw(one) for name, one in draw.items()} for _ in range(2))
    seen: Counter[int] = Counter()
    states = []
    for rank in range(before["world_size"]):
        share = {"rank": rank, "world_size": before["world_size"], "epochs": epochs}
        dataset = BatchDataset(windows, before["batch_size"], **share)
        seen += samples_of(taken(in_turn(dataset, before["workers"]), stop))
        steps = -(-samples * epochs // (before["batch_size"] * before["world_size"]))
        states.append(dataset.state_after(min(stop, steps)))
    assert all(state == states[0] for state in states)
    state = json.loads(json.dumps(states[0]))
    if state["samples_seen"] < samples * epochs:
        for rank in range(after["world_size"]):
            dataset = BatchDataset(
                windows, after["batch_size"], rank=rank, world_size=after["world_size"], epochs=epochs
            )
            dataset.load_state_dict(state)
            seen += samples_of(firsts(in_turn(dataset, after["workers"])))
    assert seen == Counter(dict.fromkeys(seen, epochs))
    assert len(seen) == samples


# ---- state ----


def test_a_resumed_epoch_is_followed_by_whole_ones(store: Store) -> None:
    """The loop that every trainer has: from the epoch that was interrupted on, `set_epoch` and a loop."""
    undisturbed = BatchDataset(store.windows(SEQ_LEN), 6)
    whole = []
    for epoch in range(3):
        undisturbed.set_epoch(epoch)
        whole.append(firsts(undisturbed))
    undisturbed.set_epoch(1)
    state = undisturbed.state_after(4)
    for workers in (0, 2):
        dataset = BatchDataset(store.windows(SEQ_LEN), 6)
        dataset.load_state_dict(state)
        loader = loader_of(dataset, workers, persistent_workers=workers > 0)
        resumed = []
        for epoch in range(dataset.epoch, 3):
            dataset.set_epoch(epoch)
            resumed.append(firsts(loader))
        assert resumed == [whole[1][4:], whole[2]]


# ---- torchdata's StatefulDataLoader ----


@pytest.mark.parametrize(("workers", "stop"), first_quick([(0, 4), (2, 3), (0, 0), (2, 4), (2, 9)], 2))
def test_stateful_data_loader_goes_on_exactly(store: Store, workers: int, stop: int) -> None:
    """Interrupted in the second epoch, at its begin, within it or behind its last batch; the epoch after it too."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def fresh(batch_size: int = 6) -> tuple[BatchDataset, Any]:
        dataset = BatchDataset(store.windows(SEQ_LEN), batch_size)
        return dataset, torchdata.StatefulDataLoader(dataset, batch_size=None, num_workers=workers)

    def epoch(number: int, dataset: BatchDataset, batches: Any) -> list[list[int]]:
        dataset.set_epoch(number)
        return firsts(batches)

    alone = fresh()[0]
    whole = [epoch(number, alone, alone) for number in range(3)]
    dataset, loader = fresh()
    assert epoch(0, dataset, loader) == whole[0]
    dataset.set_epoch(1)
    assert taken(iter(loader), stop) == whole[1][:stop]
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    dataset, loader = fresh()
    loader.load_state_dict(state)
    assert [epoch(number, dataset, loader) for number in (1, 2)] == [whole[1][stop:], whole[2]]
    dataset, loader = fresh(batch_size=5)
    loader.load_state_dict(state)
    with pytest.raises(MismatchError, match="batch_size was 6, is 5"):
        epoch(1, dataset, loader)


# ---- without a DataLoader ----


def test_tensors_are_the_batches_without_a_copy(store: Store) -> None:
    """On the CPU a tensor is the array, seen by torch."""
    (array, _), *_ = batches = list(store.windows(SEQ_LEN).batches(6))
    assert torch.from_numpy(array).data_ptr() == array.ctypes.data
    made = tensors(store.windows(SEQ_LEN).batches(6))
    assert len(made) == 9
    assert firsts(made) == firsts(batches)
    x, y = next(made)
    assert x.dtype == y.dtype == torch.int64


# ---- what it costs, and what it needs ----


@pytest.mark.parametrize("workers", first_quick([2, 0]))
@pytest.mark.parametrize("verb", ["windows", "packed"])
@pytest.mark.parametrize("form", ["plain", "hf"])
def test_samples_go_into_a_data_loader_as_they_are(tmp_path: Path, verb: str, form: str, workers: int) -> None:
    """All samples, as int64: alone, in a Subset or split, one after another, with a sampler for ranks."""
    store = write_store(tmp_path / "s", [[40] * 9, [300]])
    samples = getattr(store, verb)(8, **({"form": "hf"} if form == "hf" else {}))
    ids: Any = "input_ids" if verb == "packed" or form == "hf" else 0
    wanted = samples.read(np.arange(len(samples)))[ids].tolist()
    halves = random_split(samples, [0.5, 0.5])
    for one in (samples, Subset(samples, range(len(samples))), ConcatDataset([samples]), ConcatDataset(halves)):
        batches = [batch[ids] for batch in DataLoader(one, batch_size=4, num_workers=workers)]
        assert {batch.dtype for batch in batches} == {torch.int64}
        assert sorted(torch.cat(batches).tolist()) == sorted(wanted)
    ranks = [DistributedSampler(samples, 2, rank) for rank in range(2)]
    shared = [batch[ids] for sampler in ranks for batch in DataLoader(samples, 4, sampler=sampler)]
    assert {tuple(row) for row in torch.cat(shared).tolist()} == {tuple(row) for row in wanted}


def test_a_mixture_in_a_data_loader(tmp_path: Path) -> None:
    """A sampler never gets beyond the first epoch of a mixture: refused with the line to write."""
    store = write_store(tmp_path / "s", [[40] * 9, [300]])
    mixed = milldam.mix({store.windows(8): 1, store.windows(8, stride=4): 9})
    with pytest.raises(ConfigError, match=r"DataLoader\(BatchDataset\(samples, batch_size\), batch_size=None\)"):
        next(iter(DataLoader(mixed, batch_size=4)))
    assert len(next(iter(DataLoader(BatchDataset(mixed, 4), batch_size=None)))[0]) == 4


def test_a_feed_in_the_making_has_no_length_and_all_batches(tmp_path: Path) -> None:
    """`len` is refused as trainers expect it, tensors and datasets bring everything, a sampler can't draw."""
    plan = random_plan(8, units=12)
    finished = milldam.open(unit_store(tmp_path / "a.milldam", plan).path, units=True, split="train")
    parts = LateParts(milldam.open(finished.name), plan)
    late = milldam.Feed(parts, split="train").windows(16)
    wanted = [x.tolist() for x, _ in finished.windows(16).batches(7, seed=3)]
    dataset = BatchDataset(late, 7, seed=3)
    with pytest.raises(TypeError):
        len(dataset)
    assert [x.tolist() for x, _ in dataset] == wanted
    assert [x.tolist() for x, _ in tensors(late.batches(7, seed=3))] == wanted
    with pytest.raises(ConfigError, match="A sampler of torch can't draw from a feed"):
        next(iter(DataLoader(late, sampler=[0])))
    parts.close()
