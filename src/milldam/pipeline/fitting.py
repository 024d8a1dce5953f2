"""How many workers the budget holds: what each of them loads, unpacks and works with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from milldam.config.settings import Config
from milldam.errors import ResourceError
from milldam.memory import Budget, format_size, usage
from milldam.pipeline.preparing import Prepared
from milldam.run.planning import (
    FILTER_BYTES,
    FUNCTION_BYTES,
    LANGUAGE_BYTES,
    SMALL_INPUT,
    WORK_BYTES,
    WORKER_BYTES,
    fit_workers,
)
from milldam.run.pools import Pool, Workers
from milldam.sources.opening import STDIN
from milldam.sources.tables import unpacking_place
from milldam.sources.units import Slice


@dataclass(frozen=True, slots=True)
class Fitting:
    """The workers of one job."""

    config: Config
    prepared: Prepared
    budget: Budget
    pool: Pool
    dearest: tuple[int, Slice] | None = None
    """The slice that takes most memory to unpack, and the number of its data set; None: not looked for yet."""

    def with_dearest(self, dearest: tuple[int, Slice] | None) -> Fitting:
        return replace(self, dearest=dearest)

    @property
    def loaded_bytes(self) -> int:
        """What a worker of the second pass holds besides its batches."""
        filters, clean = self.config.filters, self.config.clean_rules
        text_rules = FILTER_BYTES if filters.on_text else 0
        language = LANGUAGE_BYTES if filters.language is not None else 0
        function = FUNCTION_BYTES if clean is not None and clean.function is not None else 0
        return self.prepared.tokenizer_bytes + text_rules + language + function + self.pool.overhead_bytes

    @property
    def unpacking_bytes(self) -> int:
        """What a worker may hold of the input besides batches."""
        return self.dearest[1].unpacking if self.dearest is not None else 0

    @property
    def worker_bytes(self) -> int:
        """All that a worker of the second pass holds."""
        return WORKER_BYTES + self.loaded_bytes + self.unpacking_bytes + WORK_BYTES

    def fit(self, loaded_bytes: int, wanted: int) -> int:
        """How many workers the budget holds when each can unpack the largest part of the input."""
        try:
            return fit_workers(self.budget, usage().anonymous, loaded_bytes + self.unpacking_bytes, wanted)
        except ResourceError as error:
            if self.dearest is None:
                raise
            dataset, slice = self.dearest
            place = unpacking_place(slice, self.prepared.sets[dataset].text.text_column)
            size = format_size(slice.unpacking)
            told = f"\n{slice.path}, {place}, takes {size} of that to unpack."
            raise ResourceError(*error.args, told) from None

    def workers_for(self, units: int) -> dict[str, Any]:
        """What a plan says of the workers of the second pass."""
        useful = 1 if self.one_process else max(1, min(self.cores, units))
        parent = usage().anonymous
        workers = self.fit(self.loaded_bytes, useful)
        held = parent if workers > 1 or self.pool.machine else 0
        return {"workers": workers, "useful": useful, "cores": self.cores, "held_bytes": held}

    def readers(self, units: int) -> Workers:
        """Who reads without encoding: no tokenizer takes memory."""
        wanted = 1 if self.one_process else self.cores
        count = self.fit(self.pool.overhead_bytes, min(wanted, max(1, units)))
        return Workers(count, max(1, self.cores // count), here=self.one_process)

    @property
    def cores(self) -> int:
        """To use, on each machine."""
        return self.config.workers or self.pool.cores

    @property
    def one_process(self) -> bool:
        """Whether other processes are not worth their start, or could not open the input or know when it is enough."""
        config = self.config
        if config.limit is not None:
            return True
        small = self.prepared.identity.input["bytes"] < SMALL_INPUT
        if config.executor == "local" and config.workers is None and small:
            return True
        paths = (path for one in config.sources for path in one.paths)
        return any(path == STDIN or path.startswith("memory://") for path in paths)
