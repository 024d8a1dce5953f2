"""Arrays of batches are used again, and never while somebody holds them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.kit.token_stores import write_store

import milldam
from milldam.loader.samples import Samples

Cut = Callable[[Any], Samples]

KINDS: dict[str, Cut] = {
    "windows": lambda store: store.windows(16),
    "hf windows": lambda store: store.windows(16, form="hf"),
    "positioned": lambda store: store.windows(16, read="pread"),
    "wrapped": lambda store: store.packed(16),
    "best fit": lambda store: store.packed(16, strategy="best_fit"),
    "mixture": lambda store: milldam.mix({store.windows(16): 2, store.windows(16, stride=8): 1}),
    "mixture of rows": lambda store: milldam.mix({store.packed(16): 2, store.packed(16, pad_last=True): 1}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Samples]]:
    store = write_store(tmp_path_factory.mktemp("recycling") / "s", [[30, 40, 50, 10] * 20, [7, 9] * 30])
    yield lambda kind: KINDS[kind](store)


def arrays_of(batch: Any) -> list[np.ndarray[Any, Any]]:
    values = batch.values() if isinstance(batch, dict) else batch
    return [value for value in values if isinstance(value, np.ndarray)]


HOLDS: list[Callable[[np.ndarray[Any, Any]], Any]] = [
    lambda array: array,
    lambda array: array[1:],
    lambda array: array[:1][..., ::2],
    lambda array: array.T,
    lambda array: memoryview(array),
    lambda array: array.reshape(-1),
]


@every_kind
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_held_stays_what_it_is(samples: Callable[[str], Samples], kind: str, prefetch: int, seed: int) -> None:
    """A batch, one array of it or a view of one: whatever is kept, for as long as it is kept."""
    choose = random.Random(seed)
    held: list[tuple[Any, np.ndarray[Any, Any]]] = []
    batches = samples(kind).batches(4, epochs=4, prefetch=prefetch)
    for _ in range(len(batches) - 1):
        batch = next(batches)
        if choose.random() < 0.5:
            kept: Any = choose.choice(HOLDS)(choose.choice(arrays_of(batch)))
            held.append((kept, np.array(kept)))
        del batch
        while len(held) > 3:
            held.pop(choose.randrange(len(held)))
        assert all(np.array_equal(kept, was) for kept, was in held)


@every_kind
def test_memory_is_used_again(samples: Callable[[str], Samples], kind: str) -> None:
    """In a loop that keeps nothing, a few arrays do for all batches: new memory costs a fault for every page."""
    places = set()
    batches = samples(kind).batches(4, epochs=4)
    for _ in range(20):
        batch = next(batches)
        places.add(arrays_of(batch)[0].__array_interface__["data"][0])
        del batch
    assert len(places) <= 4
