"""Iterators that work ahead in threads, by a bounded number of items."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

_END = object()
_this_thread = threading.local()


class _ClosedError(BaseException):
    """Nobody takes the items any more."""


def leave_if_closed() -> None:
    """End the work of a thread that reads ahead for an iterator that was closed; nothing in any other thread.

    Called wherever an item may be long in coming.
    """
    stopped = getattr(_this_thread, "stopped", None)
    if stopped is not None and stopped.is_set():
        raise _ClosedError


def prefetched(items: Iterator[Item], ahead: int) -> Iterator[Item]:
    """The same items in the same order; at most `ahead` of them wait. An error comes out where it happened."""
    waiting: queue.Queue[Any] = queue.Queue(ahead)
    stopped = threading.Event()

    thread = threading.Thread(target=_work, args=(items, waiting, stopped), name="milldam-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = waiting.get()
            if error is not None:
                raise error
            if item is _END:
                return
            yield item
    finally:
        stopped.set()
        # It may be waiting for input that never comes: then it ends with the process.
        thread.join(timeout=1)


def in_threads(make: Callable[[Item], Made], items: Iterable[Item], threads: int) -> Iterator[Made]:
    """The results for all items, in order; at most one more than there are threads is made or waits."""
    if threads == 1:
        yield from map(make, items)
        return
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(make, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for one in waiting:
                one.cancel()


def _work(items: Iterator[Any], waiting: queue.Queue[Any], stopped: threading.Event) -> None:
    _this_thread.stopped = stopped
    try:
        for item in items:
            _hand_over((item, None), waiting, stopped)
            leave_if_closed()
        _hand_over((_END, None), waiting, stopped)
    except BaseException as error:
        _hand_over((_END, error), waiting, stopped)


def _hand_over(item: Any, waiting: queue.Queue[Any], stopped: threading.Event) -> None:
    """Put it in the queue, unless the iterator was closed."""
    while not stopped.is_set():
        try:
            waiting.put(item, timeout=0.1)
            return
        except queue.Full:
            continue
