"""Iterators that work ahead: in order, by a bounded number of items, with errors where they happened."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from milldam.prefetch import in_threads


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_make_items_in_order_and_not_too_far_ahead(threads: int) -> None:
    """At most one more than there are threads is taken before what was made of it is."""
    taken, given = [], []

    def items() -> Iterator[int]:
        for number in range(20):
            taken.append(number)
            yield number

    for made in in_threads(lambda number: number * number, items(), threads):
        given.append(made)
        assert len(taken) <= len(given) + threads + 1
    assert given == [number * number for number in range(20)]


def test_threads_work_side_by_side() -> None:
    """Two that wait for each other come to an end."""
    both = threading.Barrier(2, timeout=30)
    assert sorted(in_threads(lambda number: both.wait() * 0 + number, range(2), 2)) == [0, 1]


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_thread_comes_out_behind_what_was_made_before_it(threads: int) -> None:
    """And nothing comes after it."""
    given: list[int] = []
    with pytest.raises(ZeroDivisionError):
        given.extend(in_threads(lambda number: 6 // (2 - number), range(9), threads))
    assert given == [3, 6]
