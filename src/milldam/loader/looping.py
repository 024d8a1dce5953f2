"""A loop that can be left, gone on with and moved: what every loader with a state has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT")


Begin = Callable[[PlaceT], "tuple[Iterator[tuple[ItemT, PlaceT]], Callable[[], PlaceT]]"]
"""From a place on: what follows, each item with the place behind it; and what gives the place where that ended."""


class Loop(Generic[PlaceT, ItemT]):
    """The place behind the last item that was handed out, and what follows.

    Who has a loop says with each call how to begin one, so that the loop does not hold its owner.
    """

    def __init__(self, place: PlaceT) -> None:
        self.place = place
        self._running: Iterator[tuple[ItemT, PlaceT]] | None = None
        self._end: Callable[[], PlaceT] = lambda: place
        self._inside = False

    def move(self, place: PlaceT, *, inside: bool = False) -> None:
        """Go on from another place. `inside`: a loop was left there, maybe with its last item in hand."""
        self.place, self._running, self._inside = place, None, inside

    def items(self, begin: Begin[PlaceT, ItemT]) -> Iterator[ItemT]:
        """What is left of a loop; when that is nothing, the next one."""
        left_open = self._running is not None or self._inside
        item = self.next(begin)
        if item is None and left_open:
            # The loop before was left with its last item in hand: it was through.
            item = self.next(begin)
        while item is not None:
            running = self._running
            yield item
            if running is not self._running:
                raise RuntimeError("a state was loaded while this was iterated; begin a new loop")
            item = self.next(begin)

    def next(self, begin: Begin[PlaceT, ItemT]) -> ItemT | None:
        """None: a loop has ended, and the next call begins another."""
        if self._running is None:
            self._running, self._end = begin(self.place)
            self._inside = False
        try:
            for item, place in self._running:
                self.place = place
                return item
        except BaseException:
            # What failed or was interrupted is tried again from where it stands, not taken for the end.
            self._running = None
            raise
        # Also behind the places at the end that gave this rank nothing.
        self.move(self._end())
        return None


def handed_out(item: ItemT | None) -> ItemT:
    """What `__next__` gives."""
    if item is None:
        raise StopIteration
    return item
