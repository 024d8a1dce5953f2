"""Feeds in torch's DataLoader: workers only read, and what the training loop gets is the same for any number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from tests.kit.unit_stores import LateParts, random_plan, unit_store

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

import milldam  # noqa: E402
from milldam import ConfigError, Feed  # noqa: E402
from milldam.torch import BatchDataset, tensors  # noqa: E402

PLAN = random_plan(8, units=12)
SEQ_LEN = 16


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    return milldam.open(
        unit_store(tmp_path_factory.mktemp("feeds") / "a.milldam", PLAN).path, units=True, split="train"
    )


@pytest.fixture
def late(finished: Feed) -> Iterator[Feed]:
    parts = LateParts(milldam.open(finished.name), PLAN)
    yield Feed(parts, split="train")
    parts.close()


def rows(batches: Any) -> list[list[int]]:
    return [x.tolist() for x, _ in batches]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_batches_are_those_of_one_process(finished: Feed, workers: int) -> None:
    """Workers take turns, over two epochs, with any number of them."""
    windows = finished.windows(SEQ_LEN)
    dataset = BatchDataset(windows, 7, seed=3, epochs=2)
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert rows(loader) == rows(windows.batches(7, seed=3, epochs=2))


def test_a_state_after_some_batches_resumes_in_the_middle(finished: Feed) -> None:
    """As that of `batches`; behind the last batch the next epoch begins."""
    windows = finished.windows(SEQ_LEN)
    dataset, whole = BatchDataset(windows, 7, seed=3), windows.batches(7, seed=3)
    taken = rows(itertools.islice(whole, 5))
    assert dataset.state_after(5) == whole.state_dict()
    resumed = BatchDataset(windows, 7, seed=3)
    resumed.load_state_dict(dataset.state_after(5))
    wanted = rows(whole)
    assert rows(resumed) == wanted
    assert dataset.state_after(len(taken) + len(wanted))["epoch"] == 1


def test_a_store_in_the_making_has_no_length_and_all_batches(finished: Feed, late: Feed) -> None:
    """`len` is refused as trainers expect it, tensors and datasets bring everything."""
    dataset = BatchDataset(late.windows(SEQ_LEN), 7, seed=3)
    with pytest.raises(TypeError):
        len(dataset)
    wanted = rows(finished.windows(SEQ_LEN).batches(7, seed=3))
    assert rows(dataset) == wanted
    assert rows(tensors(late.windows(SEQ_LEN).batches(7, seed=3))) == wanted
    with pytest.raises(ConfigError, match="A sampler of torch can't draw from a feed"):
        next(iter(DataLoader(late.windows(SEQ_LEN), sampler=[0])))
