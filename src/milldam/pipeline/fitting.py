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
from milldam.pipeline.preparing import Prepared, wanted_rows
from milldam.run.budget import (
    FILTER_BYTES,
    FUNCTION_BYTES,
    LANGUAGE_BYTES,
    SMALL_INPUT,
    TABLE_BYTES,
    WORK_BYTES,
    WORKER_BYTES,
    fit_workers,
)
from milldam.run.pools import Pool
from milldam.run.tasks import Workers
from milldam.sources.compression import STDIN
from milldam.sources.units import TYPICAL_RATIO, Slice, Unit
from milldam.stores.tokens.format import token_dtype


class Survey:
    """The size of every dataset without compression, about, and what takes most memory to unpack."""

    def __init__(self) -> None:
        self.unpacked: Counter[int] = Counter()
        """Bytes of each dataset."""
        self.dearest: Slice | None = None
        """The slice that takes most memory to unpack; None: none takes more than batches do."""

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Survey:
        survey = cls()
        for _ in survey.watch(units):
            pass
        return survey

    def watch(self, units: Iterable[Unit]) -> Iterator[Unit]:
        """Look at units as they pass."""
        for unit in units:
            for slice in () if unit.copy else unit.slices:
                self.unpacked[unit.dataset] += int(slice.size * TYPICAL_RATIO.get(slice.compression or "", 1.0))
                if slice.unpacking > (0 if self.dearest is None else self.dearest.unpacking):
                    self.dearest = slice
            yield unit


# ---- disk ----

TOKEN_TEXT, DOCUMENT_TEXT = 4.4, 2200
"""Bytes of text for a token, and of a document, of typical text."""
_LEAST = 0.5
"""Of what typical text takes, so much is surely needed."""
TEXTS_PART_OF_DISK = 8
"""Texts are kept between the passes when they fit this many times on the free disk."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What typical text of the input's size takes."""

    store_bytes: int
    most_bytes: int
    """While the job is at work, the store included."""
    free_bytes: int

    @classmethod
    def of(cls, config: Config, prepared: Prepared, survey: Survey) -> Disk:
        documents = text = 0.0
        for number, source in enumerate(prepared.sources):
            held = survey.unpacked[number] / DOCUMENT_TEXT
            first, stop = wanted_rows(source, round(held))
            share = (stop - first) * source.rules.weight / max(1.0, held)
            documents, text = documents + held * share, text + survey.unpacked[number] * share
        tokens = text / TOKEN_TEXT * (2 if token_dtype(prepared.vocab_size) == "uint16" else 4)
        index, dedup, packing = documents * 20, config.dedup_rules, config.packing_rules
        most = store = (tokens + index) * (2 if packing is not None and packing.write else 1)
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
        return cls(int(store), int(most), free_bytes(config.out))

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
    return text_bytes < free_bytes(config.out) // TEXTS_PART_OF_DISK


def free_bytes(out: str) -> int:
    """On the disk that a folder is, or will be, on."""
    path = Path(out).absolute()
    return shutil.disk_usage(next(one for one in (path, *path.parents) if one.exists())).free


# ---- workers ----


@dataclass(frozen=True, slots=True)
class Fitting:
    """The workers of one job."""

    config: Config
    prepared: Prepared
    budget: Budget
    pool: Pool
    dearest: Slice | None = None
    """The slice that takes most memory to unpack."""

    @property
    def loaded_bytes(self) -> int:
        """What a worker of the second pass holds besides its batches."""
        clean = self.config.clean_rules
        function = FUNCTION_BYTES if clean is not None and clean.function is not None else 0
        return self.prepared.tokenizer_bytes + self._filter_bytes + function + self.pool.overhead_bytes

    @property
    def _filter_bytes(self) -> int:
        filters = self.config.filters
        return (FILTER_BYTES if filters.on_text else 0) + (LANGUAGE_BYTES if filters.language is not None else 0)

    @property
    def unpacking_bytes(self) -> int:
        """What a worker may hold of the input besides batches."""
        return 0 if self.dearest is None else self.dearest.unpacking

    @property
    def worker_bytes(self) -> int:
        """All that a worker of the second pass holds."""
        return WORKER_BYTES + self.loaded_bytes + self.unpacking_bytes + WORK_BYTES

    @property
    def cores(self) -> int:
        """To use, on each machine."""
        return self.config.workers or self.pool.cores

    def fit(self, loaded_bytes: int, wanted: int, *, forked: bool = False) -> int:
        """How many workers the budget holds when each can unpack the largest part of the input."""
        parent, own = usage().anonymous, self.unpacking_bytes
        try:
            return fit_workers(self.budget, parent, loaded_bytes, wanted, own_bytes=own, forked=forked)
        except ResourceError as error:
            if self.dearest is None:
                raise
            told = f"\n{self.dearest.path} takes about {format_size(self.dearest.unpacking)} of that to unpack."
            raise ResourceError(*error.args, told) from None

    def workers_for(self, units: int) -> dict[str, Any]:
        """What a plan says of the workers of the second pass."""
        useful = 1 if self.one_process else max(1, min(self.cores, units))
        parent = usage().anonymous
        workers = self.fit(self.loaded_bytes, useful, forked=self.pool.forks)
        held = parent if workers > 1 or self.pool.machine else 0
        return {"workers": workers, "useful": useful, "cores": self.cores, "held_bytes": held}

    def share_bytes(self, planned: dict[str, Any]) -> int:
        """What each of these workers may hold besides what unpacking the input takes."""
        return (self.budget.limit_bytes - int(planned["held_bytes"])) // int(planned["workers"]) - self.unpacking_bytes

    def readers(self, units: int, *, judging: bool = False) -> Workers:
        """Who reads without encoding: no tokenizer takes memory, but filters do where they are asked."""
        useful = min(1 if self.one_process else self.cores, max(1, units))
        loaded = self.pool.overhead_bytes + (self._filter_bytes if judging else 0)
        if self.config.evaluation_sets:
            from milldam.decontamination.matches import SCANNING_BYTES

            loaded += SCANNING_BYTES
        count = self.fit(loaded, useful, forked=self.pool.forks)
        return Workers(count, max(1, self.cores // count), here=self.one_process)

    def tokenizers(self, planned: dict[str, Any]) -> Workers:
        """Who encodes: as many as are planned.

        A forked worker whose encoder has little room left is replaced: a new one has the encoder without its caches,
        and shares it again, where renewing it would make a copy.
        """
        count, most = int(planned["workers"]), self.share_bytes(planned) - TABLE_BYTES
        return Workers(count, max(1, self.cores // count), here=self.one_process, worker_bytes=most)

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
