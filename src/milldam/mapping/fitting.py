"""From what the probe saw and the budget to a number of workers; and when a worker has grown too large."""

from __future__ import annotations

from dataclasses import dataclass

from milldam.errors import ResourceError, Setting
from milldam.mapping.memory_gate import MARGIN, ROOM_BYTES
from milldam.mapping.preparing import Prepared
from milldam.mapping.probing import Probed
from milldam.memory import format_size
from milldam.run.planning import WORK_BYTES, WORKER_BYTES
from milldam.stores.table.manifest import TableSchema


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """What a worker takes: between two batches, and on a batch."""

    prepared: Prepared
    probed: Probed

    @property
    def schema(self) -> TableSchema:
        """The columns that the probe found."""
        assert self.probed.schema is not None
        return self.probed.schema

    @property
    def recipe(self) -> str:
        """All that a unit's rows depend on besides what it reads."""
        return f"{self.prepared.recipe} {self.schema.hash}"

    @property
    def _batch_bytes(self) -> int:
        return self.prepared.settings.most_batch_bytes

    @property
    def first_batch(self) -> tuple[int, int]:
        """Bytes of the largest batch that the probe saw, and what it took."""
        return self.probed.batch_bytes, int(MARGIN * self.probed.work_bytes)

    def workers(self, parent_bytes: int, useful: int) -> int:
        """How many workers the budget holds beside this process; 0: this process has to do it alone.

        Raises ResourceError with the smallest budget that would do when it can't do it either.
        """
        probed, limit = self.probed, self.prepared.room.limit_bytes
        took = self.first_batch[1] + ROOM_BYTES
        work = max(WORK_BYTES, 4 * self._batch_bytes, took)
        idle = max(WORKER_BYTES, probed.worker_bytes)
        # What the function loads and keeps is loaded here, too, where this process works.
        alone = parent_bytes + idle - WORKER_BYTES + work
        if limit < alone:
            raise self._too_small(work, alone)
        # What workers have in common is held once, by the process that forks them.
        left, own = limit - parent_bytes - probed.inherited_bytes, idle - probed.shared_bytes
        if left < own + work:
            return 0
        usual = max(WORK_BYTES, 4 * self._batch_bytes, self._usually(took))
        # While one works on a row as large as the first, each of the others may have read one, too.
        others = (left - own - work) // (own + probed.reading_bytes)
        return min(useful, 1 + others, max(1, left // (own + usual)))

    def most_idle_bytes(self, share_bytes: int) -> int | None:
        """A worker that holds more after a unit is replaced: its next batch would not fit. None: not known."""
        return share_bytes - self._usually(self.probed.work_bytes) if self.probed.apart else None

    def _usually(self, taken: int) -> int:
        """What a batch takes where the first one took so much. A row larger than a batch may be is an exception: there
        are workers for the others, which wait for it."""
        return taken * self._batch_bytes // max(self._batch_bytes, self.probed.batch_bytes)

    def _too_small(self, work: int, alone: int) -> ResourceError:
        # What the program held before comes on top of what is given.
        room, settings = self.prepared.room, self.prepared.settings
        held, name = room.held_bytes, self.prepared.function.name
        smallest = max(0, alone * 103 // 100 - held) // 10**6 + 1
        return ResourceError(
            f"A budget of {format_size(room.limit_bytes - held)} is too small: {name} takes about {format_size(work)} "
            f"on a batch, beside {format_size(max(0, alone - work - held))} that stay. It takes at least ",
            Setting("memory", f"{smallest}MB"),
            ", or a smaller ",
            Setting("batch_bytes"),
            f" (now {format_size(self._batch_bytes)}) or ",
            Setting("batch_size"),
            f" (now {settings.batch_size}).",
        )
