"""A loop that can be left, gone on with and moved: what every loader with a state has in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
PlaceT = TypeVar("PlaceT")


class Loop(Generic[ItemT, PlaceT]):
    """Items, and the place behind the last one that was handed out.

    `begin` takes a place and gives what follows from there, each item with the place behind it, and the place where
    that ends (None: nowhere), which is where the next loop begins.
    """

    def __init__(
        self, place: PlaceT, begin: Callable[[PlaceT], tuple[Iterator[tuple[ItemT, PlaceT]], PlaceT | None]]
    ) -> None:
        self.place, self._begin = place, begin
        self._running: Iterator[tuple[ItemT, PlaceT]] | None = None
        self._end: PlaceT | None = None
        self._inside = False

    def move(self, place: PlaceT, *, inside: bool = False) -> None:
        """Go on from another place. `inside`: a loop was left there, maybe with its last item in hand."""
        self.place, self._running, self._inside = place, None, inside

    def __iter__(self) -> Iterator[ItemT]:
        left_open = self._running is not None or self._inside
        item = next(self, None)
        if item is None and left_open:
            # The loop before was left with its last item in hand: it was through.
            item = next(self, None)
        while item is not None:
            running = self._running
            yield item
            if running is not self._running:
                raise RuntimeError("a state was loaded while this was iterated; begin a new loop")
            item = next(self, None)

    def __next__(self) -> ItemT:
        if self._running is None:
            self._running, self._end = self._begin(self.place)
            self._inside = False
        try:
            for item, place in self._running:
                self.place = place
                return item
        except BaseException:
            # What failed or was interrupted is tried again from where it stands, not taken for the end.
            self._running = None
            raise
        assert self._end is not None
        # Also behind the places at the end that gave this rank nothing.
        self.move(self._end)
        raise StopIteration
