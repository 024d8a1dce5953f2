"""The memory gate: what all workers hold stays within the budget, and nobody waits for nothing."""

from __future__ import annotations

import gc
import itertools
import json
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import wait_until

from milldam.mapping import memory_gate
from milldam.mapping.memory_gate import SMALL_BYTES, Board, MemoryGate, gate_path, remove_gates
from milldam.memory import Usage, usage

MB = 10**6


def gate_of(folder: Path, limit: int, first: tuple[int, int] = (MB, 50 * MB)) -> MemoryGate:
    return MemoryGate(folder, limit, first, (os.uname().nodename, os.getpid()))


def hold(gate: MemoryGate, size: int, entered: Path, leave: Path) -> None:
    """In another process: take a turn, and keep it until told."""
    with gate.passed(size):
        entered.touch()
        while not leave.exists():
            time.sleep(0.01)


class Other:
    """A worker that holds a turn."""

    def __init__(self, folder: Path, gate: MemoryGate, size: int) -> None:
        self.entered, self.leave = folder / f"entered-{size}", folder / f"leave-{size}"
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=hold, args=(gate, size, self.entered, self.leave))
        self.process.start()

    def end(self) -> None:
        self.leave.touch()
        self.process.join()


def enters(gate: MemoryGate, size: int) -> bool:
    return gate.admits(size)


def test_a_batch_waits_while_another_leaves_no_room(tmp_path: Path) -> None:
    """With room for one, the second comes when the first is gone; a small one needs no turn."""
    gate = gate_of(tmp_path, 300 * MB, (MB, 10_000 * MB))
    other = Other(tmp_path, gate, MB)
    assert wait_until(other.entered.exists)
    assert not enters(gate, MB)
    with gate.passed(SMALL_BYTES - 1):
        pass
    other.end()
    with gate.passed(MB):
        assert not enters(gate, MB)


def test_batches_that_fit_together_are_worked_on_together(tmp_path: Path) -> None:
    """With room for both there is no waiting."""
    gate = gate_of(tmp_path, 100_000 * MB)
    other = Other(tmp_path, gate, MB)
    assert wait_until(other.entered.exists)
    assert enters(gate, MB)
    other.end()


def test_what_others_hold_while_they_read_counts(tmp_path: Path) -> None:
    """A worker that once had a turn, and now reads a large row, leaves that much less for the others."""
    gate = gate_of(tmp_path, 10**12, (MB, MB))
    reader = Other(tmp_path, gate, MB)
    assert wait_until(reader.entered.exists)
    with gate.board() as board:
        board.workers = dict.fromkeys(board.workers)
        assert not board.is_busy
        assert board.held_by_others("") >= usage(reader.process.pid).anonymous > 0
    reader.end()
    with gate.board() as board:
        board.forget_the_dead()
        assert board.held_by_others("") == 0


def test_workers_count_before_their_first_large_batch(tmp_path: Path) -> None:
    """What they hold is held."""
    gate = gate_of(tmp_path, 10**12)
    gate.join()
    with gate.board() as board:
        assert not board.is_busy
        assert board.held_by_others("") >= 0.9 * usage().anonymous


def test_alone_any_batch_may_begin(tmp_path: Path) -> None:
    """Whatever it is expected to take: waiting would not help."""
    with gate_of(tmp_path, 1).passed(1 << 40):
        pass


def test_who_is_killed_holds_no_turn(tmp_path: Path) -> None:
    """The turn of a dead worker is free, also when another process has its number by now."""
    gate = gate_of(tmp_path, 1)
    other = Other(tmp_path, gate, MB)
    assert wait_until(other.entered.exists)
    os.kill(other.process.pid or 0, signal.SIGKILL)
    other.process.join()
    assert enters(gate, MB)
    with gate.board() as board:
        board.workers = {f"{os.getppid()}.1": (MB, MB)}
    assert enters(gate, MB)
    remove_gates(tmp_path)
    assert list(tmp_path.glob("gate-*")) == []


def test_who_is_killed_while_the_table_is_written_makes_nobody_forget(tmp_path: Path) -> None:
    """The half that it wrote counts for nothing: the other is still at work, and there is no room."""
    gate = gate_of(tmp_path, 300 * MB, (MB, 10_000 * MB))
    other = Other(tmp_path, gate, MB)
    assert wait_until(other.entered.exists)
    gate_path(tmp_path).with_suffix(".new").write_bytes(b'{"workers": {"1')
    assert not enters(gate, MB)
    other.end()


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Waits until what this process holds now was looked at, however busy the machine is."""
    gc.collect()  # what tests before this one held must not be given back while it measures
    looks = itertools.count()
    looked = [0]

    def look(*arguments: Any) -> Usage:
        number, found = next(looks), usage(*arguments)
        looked[0] = number
        return found

    monkeypatch.setattr(memory_gate, "usage", look)

    def wait() -> bool:
        # One look may have begun before.
        before = looked[0]
        return wait_until(lambda: looked[0] > before + 1)

    return wait


def taken(size: int) -> mmap.mmap:
    """Memory that the process did not have before, whatever malloc keeps of what other tests gave back."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for place in range(0, size, mmap.PAGESIZE):
        held[place] = 1
    return held


def test_what_stays_is_no_part_of_the_next_batch(tmp_path: Path, sampled: Callable[[], object]) -> None:
    """A model that is loaded in the first call is held from then on, not expected of every batch."""
    gate = gate_of(tmp_path, 10**12, (MB, MB))
    with gate.passed(4 * MB, is_first=True):
        model = taken(80 * MB)
        sampled()
    with gate.board() as board:
        assert board.expected(4 * MB) < 20 * MB
    model.close()


def test_what_batches_take_is_learned(tmp_path: Path, sampled: Callable[[], object]) -> None:
    """A batch that takes much makes the next one of its size expect as much."""
    gate = gate_of(tmp_path, 10**12, (MB, MB))
    with gate.passed(4 * MB):
        held = taken(80 * MB)
        sampled()
        held.close()
    with gate.board() as board:
        assert 75 * MB < board.expected(4 * MB) < 120 * MB
        assert board.expected(MB) < 75 * MB
        assert board.expected(16 * MB) == pytest.approx(4 * board.expected(4 * MB))


@given(st.dictionaries(st.integers(1, 1 << 34), st.integers(0, 1 << 34), min_size=1), st.integers(1, 1 << 36))
def test_never_less_is_expected_than_a_smaller_batch_took(seen: dict[int, int], size: int) -> None:
    """Whatever was seen, in whatever order."""
    board = Board()
    for one, taken in seen.items():
        board.learn(one, taken)
    assert board.expected(size) >= max((taken for one, taken in seen.items() if one <= size), default=0)
    again = Board.parse(json.dumps(asdict(board)).encode())
    assert again == board
