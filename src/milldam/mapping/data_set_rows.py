"""datasets.Dataset -> row ranges over its Arrow tables, which are mapped, never loaded.

Chosen, shuffled and filtered rows (its indices) and the columns of its format are respected. It is known by its
fingerprint, and size and time of its files. A worker gets the table by path; the indices by a file in the spool.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from milldam.errors import ConfigError
from milldam.files import NewFile, hash_bytes
from milldam.input_files import version_of
from milldam.mapping.plan import Report, RowUnit, SourceOptions, indices_name
from milldam.sources.arrays import BATCH_BYTES
from milldam.sources.batch import OnReject, require_columns
from milldam.sources.large_rows import Room
from milldam.sources.listing import InputFile
from milldam.sources.places import Places
from milldam.sources.rows import Rows, cut_by_size

LARGEST_IN_MEMORY = 16 << 20
"""More bytes than this are not sent to each worker, but spooled."""
_GATHERED = 1024


@dataclass(frozen=True, slots=True)
class DataSetReader:
    table: Any
    """A datasets.table.Table: it pickles as the paths of its files, or by value when it is small and in memory."""
    indices: str | None
    """A file of row numbers; None: the rows in their order."""

    def read(
        self, unit: RowUnit, on_reject: OnReject, places: Places | None = None, room: Room | None = None
    ) -> Iterator[Rows]:
        start, stop = unit.place["range"]
        if self.indices is None:
            batches = iter(self.table.fast_slice(start, stop - start).to_batches())
        else:
            batches = self._gathered(np.load(self.indices, mmap_mode="r")[start:stop])
        for batch in batches:
            yield from cut_by_size(batch, BATCH_BYTES)

    def _gathered(self, numbers: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        """Rows from all over the table: single ones are found without a copy, then put together by their size."""
        held: list[pa.RecordBatch] = []
        size = 0
        for at in range(0, len(numbers), _GATHERED):
            for row in self.table.fast_gather(np.asarray(numbers[at : at + _GATHERED], dtype=np.int64)).to_batches():
                if held and size + row.nbytes > BATCH_BYTES:
                    yield pa.concat_batches(held)
                    held, size = [], 0
                held.append(row)
                size += row.nbytes
        if held:
            yield pa.concat_batches(held)


class DataSetPlan:
    unidentified: str | None = None
    left_out: str = ""
    needs_spooling = False
    has_indices = True

    def __init__(self, dataset: Any, options: SourceOptions, spool: Path) -> None:
        _refuse_transform(dataset)
        self._dataset, self._options, self._spool = dataset, options, spool
        shown = dataset.format
        there = list(dataset.column_names if shown["output_all_columns"] else shown["columns"])
        require_columns(options.columns, there, "the data set")
        self.columns: list[str] | None = list(options.columns) if options.columns is not None else there
        self._table = dataset.data.select(self.columns)
        self.schema: pa.Schema | None = self._table.schema

    @cached_property
    def identity(self) -> dict[str, Any]:
        files = list(self.files())
        known = [self._dataset._fingerprint, [(Path(file.path).name, file.size, file.version) for file in files]]
        fingerprint = hash_bytes(json.dumps(known).encode())
        return {"files": len(files), "bytes": self._bytes, "fingerprint": fingerprint}

    @property
    def _bytes(self) -> int:
        """Of the rows that are chosen, about."""
        rows = self._table.num_rows
        return int(self._table.nbytes * len(self._dataset) / rows) if rows else 0

    def moved_to(self, spool: Path) -> DataSetPlan:
        moved = copy.copy(self)
        moved._spool = spool
        return moved

    def files(self) -> Iterator[InputFile]:
        for cached in self._dataset.cache_files:
            status = os.stat(cached["filename"])
            yield InputFile(cached["filename"], "arrow", None, status.st_size, version_of(status))

    def units(self) -> Iterator[RowUnit]:
        rows, size = len(self._dataset), self._bytes
        count = self._options.shards or round(size / self._options.shard_size)
        count = max(1, min(count, rows))
        edges = [rows * k // count for k in range(count + 1)] if rows else [0]
        for index, (start, stop) in enumerate(pairwise(edges)):
            key = hash_bytes(json.dumps([self.identity["fingerprint"], self.columns, start, stop]).encode())
            yield RowUnit(index, key, size * (stop - start) // rows, {"range": [start, stop]}, start)

    @property
    def reader(self) -> DataSetReader:
        return DataSetReader(self._table, self._write_indices())

    def _write_indices(self) -> str | None:
        indices = self._dataset._indices
        if indices is None:
            return None
        from milldam.formats.npy import npy_header

        path = self._spool / indices_name(self.identity["fingerprint"])
        if not path.exists():
            self._spool.mkdir(parents=True, exist_ok=True)
            with NewFile(path) as new:
                new.write(npy_header(np.dtype("<i8"), len(indices)))
                for chunk in indices.column(0).chunks:
                    new.write(np.ascontiguousarray(chunk.to_numpy(zero_copy_only=False), dtype="<i8").data)
                new.commit()
        return str(path)

    def spool(self, report: Report | None = None) -> None:
        """Nothing to do: it can be read where it lies."""


def _refuse_transform(dataset: Any) -> None:
    if dataset.format["type"] == "custom":
        raise ConfigError(
            "The data set has a transform (with_transform, set_transform), which is applied to rows as they are read.\n"
            "Give the function to milldam.map instead, and the data set without it: dataset.with_format(None)"
        )


def bytes_in_memory(table: Any) -> int:
    """Bytes of a datasets.table.Table that lie in memory, not in files."""
    from datasets.table import ConcatenationTable, InMemoryTable

    if isinstance(table, ConcatenationTable):
        return sum(bytes_in_memory(block) for line in table.blocks for block in line)
    return int(table.nbytes) if isinstance(table, InMemoryTable) else 0
