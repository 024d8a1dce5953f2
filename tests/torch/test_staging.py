"""Batches that go to a device in blocks arrive as they were made, in their order, with their places and errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from tests.kit.token_stores import write_store  # noqa: E402

from milldam.torch import tensors  # noqa: E402
from milldam.torch.tensors import Staging, Widening  # noqa: E402

CPU = torch.device("cpu")
TOKENS = Widening(np.dtype(np.uint16), np.dtype(np.int64))
DTYPES = ("uint16", "int64", "int32", "bool", "uint8")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@st.composite
def made_batches(draw: st.DrawFn) -> list[Any]:
    """Tuples, dicts and lists of steps, whose arrays may be empty and of other shapes from batch to batch."""
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["tuple", "dict", "steps"]))

    def batch(rows: int) -> Any:
        arrays = [rng.integers(0, 2 if dtype == "bool" else 200, (rows, 3)).astype(dtype) for dtype in dtypes]
        if kind == "tuple":
            return tuple(arrays)
        named = {f"array {number}": array for number, array in enumerate(arrays)} | {"longest": rows}
        return named if kind == "dict" else [named, named]

    return [batch(rows) for rows in draw(st.lists(st.sampled_from([0, 1, 2, 700, 90_000]), max_size=40))]


def as_lists(batch: Any, *, widened: bool) -> Any:
    """A batch of arrays or tensors as (dtype, values) in the same containers."""
    if isinstance(batch, dict):
        return {name: as_lists(value, widened=widened) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(as_lists(value, widened=widened) for value in batch)
    if isinstance(batch, int):
        return batch
    array = batch.numpy() if isinstance(batch, torch.Tensor) else batch
    array = array.astype(np.int64) if widened and array.dtype == np.uint16 else array
    return str(array.dtype), array.shape, array.tobytes()


@given(batches=made_batches(), widening=st.sampled_from([None, TOKENS]))
def test_batches_arrive_as_they_were_made(batches: list[Any], widening: Widening | None) -> None:
    """Whatever their sizes and dtypes, in order, each with its place, and none changes after it was handed out."""
    staged = list(Staging(CPU, widening).staged((batch, place) for place, batch in enumerate(batches)))
    assert [place for _, place in staged] == list(range(len(batches)))
    wanted = [as_lists(batch, widened=widening is not None) for batch in batches]
    assert [as_lists(batch, widened=False) for batch, _ in staged] == wanted


@given(good=st.integers(0, 50))
def test_an_error_comes_where_it_was_made(good: int) -> None:
    """The batches before it are handed out first."""

    def made() -> Iterator[tuple[Any, int]]:
        for number in range(good):
            yield (np.full((2, 2), number),), number
        raise ValueError("the disk is gone")

    staged = Staging(CPU).staged(made())
    assert [int(batch[0][0, 0]) for batch, _ in itertools.islice(staged, good)] == list(range(good))
    with pytest.raises(ValueError, match="the disk is gone"):
        next(staged)


def test_the_first_batch_waits_for_no_other() -> None:
    """It is handed out when one was made, and never are more than two blocks made ahead."""
    made = 0

    def batches() -> Iterator[tuple[Any, int]]:
        nonlocal made
        for made in itertools.count(1):
            yield (np.zeros((4, 4), np.uint16),), made

    staged = Staging(CPU, TOKENS).staged(batches())
    ahead = [made - place for _, place in itertools.islice(staged, 200)]
    assert ahead[0] == 0
    assert max(ahead) < 32


def test_a_batch_can_be_changed_in_place_while_another_waits_for_its_gradient() -> None:
    """Autograd sees a change of one batch as a change of that one alone."""
    made = (((np.array([[1, 2]], np.uint16), np.array([[2, 3]], np.uint16)), place) for place in range(4))
    (_, _), ((x, y), _), ((_, other), _), _ = Staging(CPU, TOKENS).staged(made)
    weights = torch.ones(5, 5, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(torch.nn.functional.embedding(x, weights).flatten(0, 1), y.flatten())
    other.fill_(-100)
    loss.backward()
    assert x.tolist() == [[1, 2]]


@needs_cuda
def test_another_stream_waits_for_its_batch(tmp_path: Path) -> None:
    """Batches of one block, taken on several streams while the first is busy, are whole on each."""
    windows = write_store(tmp_path / "s", [[400_001]]).windows(100)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    busy = torch.randn(4096, 4096, device="cuda")
    made = iter(tensors(windows.batches(8), device="cuda"))
    totals = []
    for stream in itertools.islice(itertools.cycle(streams), 120):
        with torch.cuda.stream(stream):
            busy @ busy
            x, _ = next(made)
            totals.append(x.sum())
    torch.cuda.synchronize()
    expected = [int(x.sum()) for x, _ in itertools.islice(windows.batches(8), 120)]
    assert [int(total) for total in totals] == expected
