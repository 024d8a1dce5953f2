"""Large batches take turns: what all workers hold stays within the budget, and nobody waits for nothing."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import wait_until

from milldam.mapping.turns import SMALL_BYTES, Turns, _Table, remove_turns, turns_path
from milldam.memory import usage

MB = 10**6


def turns_of(folder: Path, limit: int, first: tuple[int, int] = (MB, 50 * MB)) -> Turns:
    return Turns(folder, limit, first, (os.uname().nodename, os.getpid()))


def hold(turns: Turns, size: int, entered: Path, leave: Path) -> None:
    """In another process: take a turn, and keep it until told."""
    with turns.take(size):
        entered.touch()
        while not leave.exists():
            time.sleep(0.01)


class Other:
    """A worker that holds a turn."""

    def __init__(self, folder: Path, turns: Turns, size: int) -> None:
        self.entered, self.leave = folder / f"entered-{size}", folder / f"leave-{size}"
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=hold, args=(turns, size, self.entered, self.leave))
        self.process.start()

    def end(self) -> None:
        self.leave.touch()
        self.process.join()


def enters(turns: Turns, size: int) -> bool:
    return turns._enter(size)


def test_a_batch_waits_while_another_leaves_no_room(tmp_path: Path) -> None:
    """With room for one, the second comes when the first is gone; a small one needs no turn."""
    turns = turns_of(tmp_path, 300 * MB, (MB, 10_000 * MB))
    other = Other(tmp_path, turns, MB)
    assert wait_until(other.entered.exists)
    assert not enters(turns, MB)
    with turns.take(SMALL_BYTES - 1):
        pass
    other.end()
    with turns.take(MB):
        assert not enters(turns, MB)


def test_batches_that_fit_together_are_worked_on_together(tmp_path: Path) -> None:
    """With room for both there is no waiting."""
    turns = turns_of(tmp_path, 100_000 * MB)
    other = Other(tmp_path, turns, MB)
    assert wait_until(other.entered.exists)
    assert enters(turns, MB)
    other.end()


def test_what_others_hold_while_they_read_counts(tmp_path: Path) -> None:
    """A worker that once had a turn, and now reads a large row, leaves that much less for the others."""
    turns = turns_of(tmp_path, 10**12, (MB, MB))
    reader = Other(tmp_path, turns, MB)
    assert wait_until(reader.entered.exists)
    with turns._table() as table:
        table.workers = dict.fromkeys(table.workers)
        assert not table.is_at_work
        assert table.held_besides("") >= usage(reader.process.pid).anonymous > 0
    reader.end()
    with turns._table() as table:
        table.forget_the_dead()
        assert table.held_besides("") == 0


def test_workers_count_before_their_first_large_batch(tmp_path: Path) -> None:
    """What they hold is held."""
    turns = turns_of(tmp_path, 10**12)
    turns.join()
    with turns._table() as table:
        assert not table.is_at_work
        assert table.held_besides("") >= 0.9 * usage().anonymous


def test_alone_any_batch_may_begin(tmp_path: Path) -> None:
    """Whatever it is expected to take: waiting would not help."""
    with turns_of(tmp_path, 1).take(1 << 40):
        pass


def test_who_is_killed_holds_no_turn(tmp_path: Path) -> None:
    """The turn of a dead worker is free, also when another process has its number by now."""
    turns = turns_of(tmp_path, 1)
    other = Other(tmp_path, turns, MB)
    assert wait_until(other.entered.exists)
    os.kill(other.process.pid or 0, signal.SIGKILL)
    other.process.join()
    assert enters(turns, MB)
    with turns._table() as table:
        table.workers = {f"{os.getppid()} 1": (MB, MB)}
    assert enters(turns, MB)
    remove_turns(tmp_path)
    assert list(tmp_path.glob("turns-*")) == []


def test_who_is_killed_while_the_table_is_written_makes_nobody_forget(tmp_path: Path) -> None:
    """The half that it wrote counts for nothing: the other is still at work, and there is no room."""
    turns = turns_of(tmp_path, 300 * MB, (MB, 10_000 * MB))
    other = Other(tmp_path, turns, MB)
    assert wait_until(other.entered.exists)
    turns_path(tmp_path).with_suffix(".new").write_bytes(b'{"workers": {"1')
    assert not enters(turns, MB)
    other.end()


def test_what_stays_is_no_part_of_the_next_batch(tmp_path: Path) -> None:
    """A model that is loaded in the first call is held from then on, not expected of every batch."""
    turns = turns_of(tmp_path, 10**12, (MB, MB))
    with turns.take(4 * MB):
        model = bytearray(b"x") * (80 * MB)
        time.sleep(0.1)
    with turns._table() as table:
        assert table.expected(4 * MB) < 20 * MB
    del model


def test_what_batches_take_is_learned(tmp_path: Path) -> None:
    """A batch that takes much makes the next one of its size expect as much."""
    turns = turns_of(tmp_path, 10**12, (MB, MB))
    with turns.take(4 * MB):
        held = bytearray(b"x") * (80 * MB)
        time.sleep(0.1)
        del held
    with turns._table() as table:
        assert 75 * MB < table.expected(4 * MB) < 120 * MB
        assert table.expected(MB) < 75 * MB
        assert table.expected(16 * MB) == pytest.approx(4 * table.expected(4 * MB))


@given(st.dictionaries(st.integers(1, 1 << 34), st.integers(0, 1 << 34), min_size=1), st.integers(1, 1 << 36))
def test_never_less_is_expected_than_a_smaller_batch_took(seen: dict[int, int], size: int) -> None:
    """Whatever was seen, in whatever order."""
    table = _Table()
    for one, taken in seen.items():
        table.learn(one, taken)
    assert table.expected(size) >= max((taken for one, taken in seen.items() if one <= size), default=0)
    again = _Table.parse(table.as_bytes())
    assert again == table
