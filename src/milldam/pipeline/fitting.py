"""How many workers the budget holds, and whether the disk holds the result: by the size of the input alone.

The disk is judged by typical text (a token for 4.4 bytes, documents of 2.2 KB); nothing is read. Only a disk that is
surely too small is refused; a job that runs out of disk all the same ends with an error, and resumes later.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.config.settings import Config
from milldam.errors import ResourceError
from milldam.memory import Budget, format_size, usage
from milldam.pipeline.preparing import Prepared
from milldam.run.budget import (
    FILTER_BYTES,
    FUNCTION_BYTES,
    LANGUAGE_BYTES,
    SMALL_INPUT,
    TABLE_BYTES,
    TOKENIZER_FACTOR,
    WORK_BYTES,
    WORKER_BYTES,
    fit_workers,
)
from milldam.run.pools import Pool
from milldam.run.tasks import Workers
from milldam.sources.compression import STDIN
from milldam.sources.units import TYPICAL_RATIO, Slice, Unit
from milldam.stores.tokens.format import token_dtype

TOKEN_TEXT, DOCUMENT_TEXT = 4.4, 2200
"""Bytes of text for a token, and of a document, of typical text."""
_LEAST = 0.5
"""Of what typical text takes, so much is surely needed."""
TEXTS_PART_OF_DISK = 8
"""Texts are kept between the passes when they fit this many times on the free disk."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk that typical text of the input's size takes."""

    store_bytes: int
    most_bytes: int
    """While the job is at work, the store included."""
    free_bytes: int

    def require(self, out: str) -> None:
        """Refuse a job that would surely fill the disk."""
        if _LEAST * self.most_bytes > self.free_bytes:
            needed, store, free = map(format_size, (self.most_bytes, self.store_bytes, self.free_bytes))
            raise ResourceError(
                f"Not enough disk for {out}: typical text of this size takes about {needed} ({store} for the store, "
                f"the rest on the way), {free} are free.\nFree some space, or choose another place for it."
            )


def keeps_texts(config: Config, text_bytes: float) -> bool:
    """Whether the first pass keeps its texts for the second: where they take a small part of the free disk."""
    return text_bytes < _free_bytes(config.out) // TEXTS_PART_OF_DISK


def _free_bytes(out: str) -> int:
    """On the disk that a folder is, or will be, on."""
    path = Path(out).absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


class Fitting:
    """The workers and the disk of one job, by the units that it was shown."""

    def __init__(self, config: Config, prepared: Prepared, budget: Budget, pool: Pool) -> None:
        self._config, self._prepared, self._budget, self._pool = config, prepared, budget, pool
        self.cores = config.workers or pool.cores
        """To use, on each machine."""
        self.tokenizer_bytes = TOKENIZER_FACTOR * len(prepared.known.json)
        """Memory of the loaded tokenizer, as measured of many."""
        filters, clean = config.filters, config.clean_rules
        self._filter_bytes = FILTER_BYTES * filters.on_text + LANGUAGE_BYTES * (filters.language is not None)
        function = FUNCTION_BYTES if clean is not None and clean.function is not None else 0
        self.loaded_bytes = self.tokenizer_bytes + self._filter_bytes + function + pool.overhead_bytes
        """Memory of a worker of the second pass besides its batches."""
        paths = [path for one in config.sources for path in one.paths]
        small = config.executor == "local" and config.workers is None and prepared.identity.input["bytes"] < SMALL_INPUT
        closed = any(path == STDIN or path.startswith("memory://") for path in paths)
        self._one_process = small or closed or config.limit is not None
        """Other processes are not worth their start, or could not open the input or know when it is enough."""
        self.unpacked: Counter[int] | None = None
        """Bytes of each dataset, about, without compression; None: it was shown none yet."""
        self._largest: Slice | None = None
        """The slice that takes most memory to unpack; None: none takes more than batches do."""
        self._unpacking_bytes = 0

    def survey(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Look at all units as they pass."""
        self.unpacked, self._largest, self._unpacking_bytes = Counter(), None, 0
        for unit in units:
            for slice in () if unit.copy else unit.slices:
                self.unpacked[unit.dataset] += int(slice.size * TYPICAL_RATIO.get(slice.compression or "", 1.0))
                if slice.unpacking > self._unpacking_bytes:
                    self._largest, self._unpacking_bytes = slice, slice.unpacking
            yield unit

    @property
    def worker_bytes(self) -> int:
        """All that a worker of the second pass holds."""
        return WORKER_BYTES + self.loaded_bytes + self._unpacking_bytes + WORK_BYTES

    def disk(self) -> Disk:
        config, dedup, packing = self._config, self._config.dedup_rules, self._config.packing_rules
        documents = text = 0.0
        for number, rules in enumerate(self._prepared.sets):
            size = 0 if self.unpacked is None else self.unpacked[number]
            held = size / DOCUMENT_TEXT
            first, stop = rules.wanted(round(held))
            share = (stop - first) * rules.weight / max(1.0, held)
            documents, text = documents + held * share, text + size * share
        tokens = text / TOKEN_TEXT * (2 if token_dtype(self._prepared.known.vocab_size) == "uint16" else 4)
        most = store = (tokens + documents * 20) * (2 if packing is not None and packing.write else 1)
        if config.counts_tokens:
            most += tokens  # they are staged before they are arranged
        if dedup is not None:
            near = dedup.near
            prints = documents * (24 + (0 if near is None else near.bands * near.rows))
            most += prints + (documents * 16 if dedup.index is not None else 0)
            # Kept texts, pairs and shingles are gone, or going, when the store is written.
            before = text if keeps_texts(config, text) else 0.0
            before += documents * 20 + (0.0 if near is None else documents * 75 + text * 0.2)
            most = max(most, before + prints)
        return Disk(int(store), int(most), _free_bytes(config.out))

    def fit(self, loaded_bytes: int, wanted: int, *, forked: bool = False) -> int:
        """How many workers the budget holds when each can unpack the largest part of the input."""
        own = self._unpacking_bytes
        try:
            return fit_workers(self._budget, usage().anonymous, loaded_bytes, wanted, own_bytes=own, forked=forked)
        except ResourceError as error:
            if self._largest is None:
                raise
            unpacking = f"\n{self._largest.path} takes about {format_size(own)} of that to unpack."
            raise ResourceError(*error.args, unpacking) from None

    def workers_for(self, units: int) -> dict[str, Any]:
        """The workers of the second pass, as a plan has them."""
        useful = 1 if self._one_process else max(1, min(self.cores, units))
        held = usage().anonymous
        workers = self.fit(self.loaded_bytes, useful, forked=self._pool.forks)
        held = held if workers > 1 or self._pool.machine else 0
        return {"workers": workers, "useful": useful, "cores": self.cores, "held_bytes": held}

    def share_bytes(self, planned: dict[str, Any]) -> int:
        """The most that each of these workers may hold, unpacking the input not included."""
        return (self._budget.limit_bytes - int(planned["held_bytes"])) // int(
            planned["workers"]
        ) - self._unpacking_bytes

    def readers(self, units: int, *, judging: bool = False) -> Workers:
        """Workers that read without encoding: no tokenizer takes memory, but filters do where they judge."""
        loaded = self._pool.overhead_bytes + (self._filter_bytes if judging else 0)
        if self._config.decontaminate:
            from milldam.decontamination.matches import SCANNING_BYTES

            loaded += SCANNING_BYTES
        useful = 1 if self._one_process else max(1, min(self.cores, units))
        count = self.fit(loaded, useful, forked=self._pool.forks)
        return Workers(count, max(1, self.cores // count), here=self._one_process)

    def tokenizers(self, planned: dict[str, Any]) -> Workers:
        """Workers that encode, as many as are planned.

        A forked worker whose encoder has little room left is replaced: a new one has the encoder without its caches,
        and shares it again, where renewing it would make a copy.
        """
        count, most = int(planned["workers"]), self.share_bytes(planned) - TABLE_BYTES
        return Workers(count, max(1, self.cores // count), here=self._one_process, worker_bytes=most)
