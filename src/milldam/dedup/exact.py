"""Hash files of all units -> a drop file: every document whose hash an earlier one in plan order has.

One partition of the hashes at a time, each on its own, so that partitions can be resolved in parallel. DuckDB sorts
(hash, position) within a memory limit; equal hashes are then neighbours, and the first of them is the one to keep. A
partition that does not fit in memory is sorted in several passes, each over a range of hashes: the files are ordered
so that a pass reads little more than its share. What does not fit then either goes to DuckDB's temporary folder.
The result depends on the hashes alone, not on memory, threads or passes.

Disk beside the hash files (17 bytes a document): at the end 4 bytes a dropped document; while at work 9 more, up to
31 where the drops of a partition don't fit in memory. Time: 0.3 to 0.7 us of one core a document, the less memory the
longer. Up to `FEW_HASHES` of them are sorted in memory at once, without DuckDB.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from milldam.dedup.drops import EXACT, DropWriter, drop_file_name
from milldam.errors import ResourceError, Setting
from milldam.files import explain_os_errors
from milldam.memory import format_size

if TYPE_CHECKING:
    import duckdb

ROW_BITS = 40
"""A position is unit << ROW_BITS | row; what an earlier run has seen comes before all of them, below 0."""

FEW_HASHES = 500_000
"""So many are sorted in memory, in about 50 MB and a second."""
MIN_MEMORY_BYTES = 96 << 20
# Measured: the process grows by 40 to 75 MB more than DuckDB's limit, for limits of 45 to 330 MB.
_FIXED_BYTES, _MARGIN = 40 << 20, 0.75
_THREAD_BYTES = 64 << 20
# Measured: sorting takes 40 bytes a hash.
_SORT_BYTES = 64
_BATCH_ROWS = 1 << 16
_MAX_PASSES = 1 << 12
_POSITION = f"(substr(filename, -15, 7)::BIGINT << {ROW_BITS}) | row::BIGINT"

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What was found; the sum over partitions is the whole."""

    documents: int = 0
    distinct: int = 0
    dropped: int = 0
    seen_before: int = 0
    """Of the dropped, those that an earlier run has seen."""
    clusters: dict[int, int] = field(default_factory=dict)
    """Sets of equal documents by size, in powers of two: {1: alone, 2: 2 or 3, 4: 4 to 7, ...}."""

    def __add__(self, other: Resolved) -> Resolved:
        sizes = sorted({*self.clusters, *other.clusters})
        clusters = {size: self.clusters.get(size, 0) + other.clusters.get(size, 0) for size in sizes}
        return Resolved(
            self.documents + other.documents,
            self.distinct + other.distinct,
            self.dropped + other.dropped,
            self.seen_before + other.seen_before,
            clusters,
        )


def resolve_exact(
    folder: Path,
    partition: int,
    partitions: int,
    *,
    exempt_below: int,
    index_files: Sequence[Path],
    memory_bytes: int,
    threads: int,
) -> Resolved:
    """Write the drop file of one partition of the hashes in a folder.

    Units below `exempt_below` are never dropped, but what they have counts as seen. What is in one of `index_files` is
    dropped. `memory_bytes`: what this call may add to the process.
    """
    clusters = _Clusters(exempt_below << ROW_BITS)
    name = f"{EXACT}-{partition:05d}"
    prints = Prints(files=sorted(folder.glob("hashes-*.parquet")), index_files=list(index_files))
    if prints.are_few and partitions == 1:
        with DropWriter(folder / drop_file_name(EXACT, partition)) as writer:
            for position, first in _sorted_by_position(clusters.add(batch) for batch in _sorted_in_memory(prints)):
                write_drops(writer, position, first, len(index_files))
            writer.commit()
        return clusters.finish()
    with Database.open(folder / f".{name}", memory_bytes, threads) as database:
        with _Unsorted(database.folder / "unsorted.parquet") as unsorted:
            for batch in database.sorted_hashes(prints, partition, partitions):
                unsorted.add(*clusters.add(batch))
        with DropWriter(folder / drop_file_name(EXACT, partition)) as writer:
            for position, first in database.sorted_drops(unsorted.path):
                write_drops(writer, position, first, len(index_files))
            writer.commit()
    return clusters.finish()


def _sorted_in_memory(prints: Prints) -> Iterator[SortedHashes]:
    """All hashes in order, in one batch."""
    hi, lo, position = (np.concatenate(columns) for columns in zip(*prints.read(), strict=True))
    order = np.lexsort((position, lo, hi))
    if len(order):
        yield from _with_first(iter([(hi[order], lo[order], position[order])]))


def _sorted_by_position(drops: Iterator[tuple[Positions, Positions]]) -> Iterator[tuple[Positions, Positions]]:
    for position, first in drops:
        order = np.argsort(position)
        yield position[order], first[order]


def write_drops(writer: DropWriter, position: Positions, first: Positions, index_files: int = 0) -> None:
    """Of documents, and the first equal ones; below 0 in one of so many files of the index."""
    low = (1 << ROW_BITS) - 1
    seen = first < 0
    of_unit = np.where(seen, -1 - (first + index_files), first >> ROW_BITS)
    writer.add(position >> ROW_BITS, position & low, of_unit, np.where(seen, 0, first & low))


class _Clusters:
    """Goes through sorted hashes, finds the documents to drop, and counts. Holds one batch."""

    def __init__(self, exempt_below: int) -> None:
        self._exempt_below = exempt_below
        self._open_size = 0
        self._documents = self._dropped = self._seen_before = 0
        self._sizes = np.zeros(64, dtype=np.int64)

    def add(self, batch: SortedHashes) -> tuple[Positions, Positions]:
        """(position, first position of the same hash) of what is to be dropped in the next batch."""
        starts, is_document = batch.position == batch.first, batch.position >= 0
        # Cluster 0 is the one that the last batch left open.
        cluster = np.cumsum(starts)
        sizes = np.bincount(cluster[is_document], minlength=int(cluster[-1]) + 1)
        sizes[0] += self._open_size
        self._count(sizes[:-1])
        self._open_size = int(sizes[-1])
        dropped = ~starts & (batch.position >= self._exempt_below)
        position, first = batch.position[dropped], batch.first[dropped]
        self._documents += int(np.count_nonzero(is_document))
        self._dropped += len(position)
        self._seen_before += int(np.count_nonzero(first < 0))
        return position, first

    def _count(self, sizes: npt.NDArray[np.int64]) -> None:
        sizes = sizes[sizes > 0]
        _, exponents = np.frexp(sizes)
        self._sizes += np.bincount(exponents - 1, minlength=64)

    def finish(self) -> Resolved:
        """The counts, when all hashes have been added."""
        self._count(np.array([self._open_size]))
        clusters = {1 << k: number for k, number in enumerate(self._sizes.tolist()) if number}
        return Resolved(self._documents, sum(clusters.values()), self._dropped, self._seen_before, clusters)


class _Unsorted:
    """The drops as they are found, in the order of their hashes, on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        schema = pa.schema([("position", pa.int64()), ("first", pa.int64())])
        with explain_os_errors(path):
            self._writer = pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False)

    def add(self, position: Positions, first: Positions) -> None:
        if len(position):
            with explain_os_errors(self.path):
                self._writer.write_table(pa.table({"position": position, "first": first}))

    def __enter__(self) -> _Unsorted:
        return self

    def __exit__(self, *_: object) -> None:
        with explain_os_errors(self.path):
            self._writer.close()


@dataclass(frozen=True, slots=True)
class SortedHashes:
    """A batch of hashes in order, equal ones by position."""

    hi: Words
    lo: Words
    position: Positions
    first: Positions
    """The position of the first with the same hash, wherever in the partition it was."""


def _with_first(batches: Iterator[tuple[Words, Words, Positions]]) -> Iterator[SortedHashes]:
    open_hash, open_first = (-1, -1), 0
    for hi, lo, position in batches:
        starts = np.empty(len(hi), dtype=bool)
        starts[0] = open_hash != (int(hi[0]), int(lo[0]))
        starts[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
        firsts = np.concatenate(([open_first], position[starts]))
        first = firsts[np.cumsum(starts)]
        open_hash, open_first = (int(hi[-1]), int(lo[-1])), int(first[-1])
        yield SortedHashes(hi, lo, position, first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prints:
    """Hash files of a run and of earlier ones."""

    files: list[Path]
    index_files: list[Path] = field(default_factory=list)
    """Sorted hash files of earlier runs: as documents that come before all others."""

    @property
    def rows(self) -> int:
        """How many hashes there are; not by the size of the files: equal ones take next to none."""
        return sum(int(pq.read_metadata(path).num_rows) for path in [*self.files, *self.index_files])

    @property
    def are_few(self) -> bool:
        """Whether all of them can be sorted in memory."""
        return self.rows <= FEW_HASHES

    def read(self) -> Iterator[tuple[Words, Words, Positions]]:
        """(hi, lo, position) of each file, and of none."""
        yield np.empty(0, np.uint64), np.empty(0, np.uint64), np.empty(0, np.int64)
        for path in self.files:
            unit = int(path.stem.split("-")[1])
            hi, lo, row = _columns(path, "hi", "lo", "row")
            yield hi, lo, (unit << ROW_BITS) | row.astype(np.int64)
        for number, path in enumerate(self.index_files):
            hi, lo = _columns(path, "hi", "lo")
            yield hi, lo, np.full(len(hi), number - len(self.index_files), dtype=np.int64)

    def query(self) -> tuple[str, list[Any]]:
        """SQL for (hi, lo, position), and its parameters."""
        query = f"SELECT hi, lo, {_POSITION} AS position FROM read_parquet(?, filename = true)"
        parameters: list[Any] = [_names(self.files)]
        if self.index_files:
            query += (
                f" UNION ALL SELECT hi, lo, list_position(?, filename) - {len(self.index_files) + 1}"
                " FROM read_parquet(?, filename = true)"
            )
            parameters += [_names(self.index_files), _names(self.index_files)]
        return query, parameters


def _columns(path: Path, *names: str) -> list[Words]:
    table = pq.read_table(path, columns=list(names), use_threads=False)
    return [table.column(name).to_numpy() for name in names]


def _names(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


class Database:
    """DuckDB within a memory limit, with its temporary files in a folder of its own."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, folder: Path, limit_bytes: int) -> None:
        self.folder = folder
        self._connection = connection
        self._limit_bytes = limit_bytes

    @classmethod
    @contextmanager
    def open(cls, folder: Path, memory_bytes: int, threads: int) -> Iterator[Database]:
        """Make the folder, anew when a killed run left it; remove it at the end."""
        import duckdb

        if memory_bytes < MIN_MEMORY_BYTES:
            raise ResourceError(
                f"Dedup needs {format_size(MIN_MEMORY_BYTES)} of memory beside the program; "
                f"there are {format_size(max(0, memory_bytes))}.\nGive more ",
                Setting("memory"),
                ".",
            )
        limit_bytes = int((memory_bytes - _FIXED_BYTES) * _MARGIN)
        shutil.rmtree(folder, ignore_errors=True)
        with explain_os_errors(folder):
            folder.mkdir(parents=True)
        options: dict[str, Any] = {
            "memory_limit": f"{limit_bytes}B",
            "threads": max(1, min(threads, limit_bytes // _THREAD_BYTES)),
            "temp_directory": str(folder / "spilled"),
            "preserve_insertion_order": False,
        }
        try:
            with duckdb.connect(":memory:", config=options) as connection:
                yield cls(connection, folder, limit_bytes)
        except (duckdb.OutOfMemoryException, duckdb.IOException) as error:
            raise ResourceError(
                f"Dedup ran out of memory or disk in {folder}: {str(error).splitlines()[0]}\n"
                "Everything finished so far is safe. Give more ",
                Setting("memory"),
                " or free some disk, and run it again.",
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def sorted_hashes(self, prints: Prints, partition: int, partitions: int) -> Iterator[SortedHashes]:
        """The hashes of a partition in order, in batches that are not empty."""
        if not prints.files:
            return
        query, parameters = prints.query()
        passes = self._passes(prints.rows // partitions)
        edges = [((partition * passes + k) << 64) // (partitions * passes) for k in range(passes + 1)]
        ranges = (f"hi >= {start}::UBIGINT AND hi <= {stop - 1}::UBIGINT" for start, stop in itertools.pairwise(edges))
        queries = (f"SELECT * FROM ({query}) WHERE {one} ORDER BY hi, lo, position" for one in ranges)
        yield from _with_first(batch for one in queries for batch in self._stream(one, parameters))

    def sorted_drops(self, path: Path) -> Iterator[tuple[Positions, Positions]]:
        """(position, first) of a file in the order of positions."""
        yield from self._stream("SELECT position, first FROM read_parquet(?) ORDER BY position", [_names([path])])

    def _passes(self, rows: int) -> int:
        """A power of two, so that passes end where row groups end."""
        fitting = max(1, self._limit_bytes // _SORT_BYTES)
        return min(_MAX_PASSES, 1 << max(0, -(-rows // fitting) - 1).bit_length())

    def _stream(self, query: str, parameters: list[Any]) -> Iterator[Any]:
        """Tuples of the columns, a batch at a time."""
        relation = self._connection.sql(query, params=parameters)
        # Older versions of DuckDB have it under another name.
        read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader
        for batch in read(_BATCH_ROWS):
            if len(batch):
                yield tuple(column.to_numpy(zero_copy_only=False) for column in batch.columns)
