"""Samples of several sources in one read: their streams end to end are one stream.

Where all sources are mapped, their files are mapped side by side, so that a batch of a mixture is one gather, as that
of one source is, not one for each of them; to map files once more takes addresses alone. Where all are read by pread,
so is the stream of all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.loader.boundaries import Losses
from milldam.loader.order import Stretches
from milldam.loader.packed import PackedRows, RowForm, RowReading
from milldam.loader.permutation import Int64s
from milldam.loader.reading import (
    MOST_MAPPINGS,
    OPEN_FILES,
    MappedReader,
    MappingError,
    PositionedReader,
    Reader,
    Way,
    open_reader,
    ranges,
)
from milldam.loader.row_pieces import Outline, RowFinder, RowPieces
from milldam.loader.samples import ReadPart, Samples, StreamSamples
from milldam.loader.stream import TokenStream
from milldam.loader.types import Array
from milldam.loader.windows import Windows, read_windows

log = logging.getLogger("milldam")


class Sources:
    """Samples of several sources by number, counted through all of them end to end."""

    def __init__(self, sources: Sequence[Samples[Any, Any]]) -> None:
        self.sources = sources
        # begins: (sources + 1,), the number of the first sample of each, and the end
        self.begins: Int64s = np.array([0, *accumulate(source._numbered for source in sources)], np.int64)

    def groups(self, numbers: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """(source, where in the numbers, ascending, numbers in the source) of each source that comes."""
        sources = self.begins.searchsorted(numbers, side="right") - 1
        for source, where in groups(sources, len(self.sources)):
            yield source, where, numbers[where] - self.begins[source]

    def look_up(
        self, numbers: Int64s, dtype: npt.DTypeLike, padding: Mapping[str, int] | None, rows_each: int = 1
    ) -> ReadPart[Any]:
        """Look up samples, each source by itself. `padding`, `rows_each`: as those of `Samples`."""
        found = [(where, self.sources[source]._look_up(local, dtype)) for source, where, local in self.groups(numbers)]
        return lambda part, out: read_by_source(found, part, out, padding, rows_each)


def groups(sources: npt.NDArray[Any], count: int) -> Iterator[tuple[int, Int64s]]:
    """(source, where it stands, ascending) of each source that comes."""
    places = sources.argsort(kind="stable")
    ends = np.bincount(sources, minlength=count).cumsum()
    for source, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        if first < end:
            yield source, places[first:end]


@dataclass(frozen=True, slots=True)
class _Part:
    """What one source gave of a batch."""

    rows: Int64s
    """The rows of the batch that it is for."""
    batch: Any


def read_by_source(
    found: list[tuple[Int64s, ReadPart[Any]]],
    part: slice,
    out: Any,
    padding: Mapping[str, int] | None,
    rows_each: int = 1,
) -> Any:
    """A part of the samples that were looked up; where each source's stand among them, with what reads them."""
    parts: list[tuple[ReadPart[Any], slice, Int64s]] = []
    for where, read in found:
        first, stop = where.searchsorted((part.start, part.stop)).tolist()
        if first < stop:
            parts.append((read, slice(first, stop), where[first:stop] - part.start))
    if len(parts) == 1:
        (read, own, _) = parts[0]
        return read(own, out)
    count = sum(len(rows) for _, _, rows in parts)
    made = [
        _Part(np.concatenate([rows + half * count for half in range(rows_each)]), read(own, None))
        for read, own, rows in parts
    ]
    return _joined(made if padding is None else _as_wide(made, padding), out)


def _as_wide(parts: list[_Part], padding: Mapping[str, int]) -> list[_Part]:
    """The same, with arrays as wide as the widest part's."""
    widest = max(part.batch[name].shape[1] for part in parts for name in padding)

    def padded(batch: Any) -> Any:
        return batch | {
            name: np.pad(batch[name], ((0, 0), (0, widest - batch[name].shape[1])), constant_values=fill)
            for name, fill in padding.items()
        }

    return [_Part(part.rows, padded(part.batch)) for part in parts]


def _joined(parts: list[_Part], out: Any) -> Any:
    """The parts as one batch, every row at its place."""
    first = parts[0].batch
    if isinstance(first, tuple):
        return tuple(_put(parts, name, None if out is None else out[name]) for name in range(len(first)))
    joined: dict[str, Any] = {}
    for name in first:
        if name == "cu_seqlens":
            joined[name] = _piece_borders(parts)
        elif name == "max_seqlen":
            joined[name] = max(part.batch[name] for part in parts)
        else:
            joined[name] = _put(parts, name, None if out is None else out[name])
    return joined


def _put(parts: list[_Part], name: int | str, out: Array | None) -> Array:
    like: Array = parts[0].batch[name]
    count = sum(len(part.rows) for part in parts)
    rows = np.empty((count, *like.shape[1:]), like.dtype) if out is None else out[:count]
    for part in parts:
        rows[part.rows] = part.batch[name]
    return rows


def _piece_borders(parts: list[_Part]) -> Array:
    """Where pieces of documents begin, over all rows end to end, and the end. No piece goes over the end of a row."""
    length = parts[0].batch["input_ids"].shape[1]
    borders = [np.array([length * sum(len(part.rows) for part in parts)])]
    for part in parts:
        row, inside = np.divmod(part.batch["cu_seqlens"][:-1], length)
        borders.append(part.rows[row] * length + inside)
    return np.sort(np.concatenate(borders)).astype(parts[0].batch["cu_seqlens"].dtype)


class MixedReading:
    """Reads samples of sources from the stream of all."""

    def __init__(self, sources: Sequence[StreamSamples[Any, Any]], reader: Reader) -> None:
        self._sources, self.reader = Sources(sources), reader
        # shifts: (sources,), where the stream of each begins among all
        sizes = (sum(file.tokens for file in source._stream.files) for source in sources)
        self._shifts: list[int] = [0, *accumulate(sizes)][:-1]

    def look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[Any]:
        first: Any = self._sources.sources[0]
        if isinstance(first, Windows):
            return read_windows(self.reader, self._starts(numbers), first.rules, dtype)
        form = RowForm(first.rules.seq_len, first.rules.form, dtype)
        return RowReading(_MixedRows(self._sources, self._shifts), self.reader, numbers, form)

    def spans(self, stretches: Stretches) -> Iterator[tuple[Int64s, Int64s]]:
        """Begins and lengths of what samples are made of, source by source."""
        for number, _, local in self._sources.groups(stretches.numbers):
            source: Any = self._sources.sources[number]
            starts, lengths = source._lie(Stretches.single(local))
            yield starts + self._shifts[number], lengths

    def _starts(self, numbers: Int64s) -> Int64s:
        starts = np.empty_like(numbers)
        for number, where, local in self._sources.groups(numbers):
            source: Any = self._sources.sources[number]
            starts[where] = source._starts(local) + self._shifts[number]
        return starts


def mixed_reading(sources: Sequence[Samples[Any, Any]]) -> MixedReading | None:
    """What reads all sources at once; None where they can't be: not of one kind and dtype, or not read in one way."""
    found = _of_one_kind(sources)
    if found is None or len({type(source._reader) for source in found}) > 1:
        return None
    reader = _open_reader(_stream_of_all(found), type(found[0]._reader), len(found))
    return None if reader is None else MixedReading(found, reader)


def joint_reading(sources: Sequence[Samples[Any, Any]], way: Way) -> MixedReading | None:
    """The same for sources that have not been read from yet: one reader for all, and none for each."""
    found = _of_one_kind(sources)
    return None if found is None else MixedReading(found, open_reader(_stream_of_all(found), way))


def _of_one_kind(sources: Sequence[Samples[Any, Any]]) -> list[Windows[Any] | PackedRows] | None:
    found = [source for source in sources if isinstance(source, Windows | PackedRows)]
    alike = len({(type(source), source.token_dtype) for source in found}) == 1
    return found if alike and len(found) == len(sources) else None


def _stream_of_all(sources: Sequence[StreamSamples[Any, Any]]) -> TokenStream:
    files = tuple(file for source in sources for file in source._stream.files)
    return replace(sources[0]._stream, files=files, first=0, stop=sum(file.tokens for file in files))


def _open_reader(stream: TokenStream, kind: type[object], sources: int) -> Reader | None:
    if kind is PositionedReader:
        return PositionedReader(stream, OPEN_FILES * sources)
    if kind is MappedReader and len(stream.files) <= MOST_MAPPINGS:
        try:
            return MappedReader(stream)
        except MappingError as error:
            log.debug("a mixture of %d sources is read source by source: %s", sources, error)
    return None


class _MixedRows(RowFinder):
    """Packed rows of several sources, with positions in the stream of all of them."""

    def __init__(self, sources: Sources, shifts: list[int]) -> None:
        self._sources, self._shifts = sources, shifts
        rows: list[Any] = list(sources.sources)
        self.pieces_at_once = min(source._rows.pieces_at_once for source in rows)
        self._shifted = rows[0].rules.form == "shifted"

    def outline(self, numbers: Int64s) -> Outline:
        firsts, counts = np.empty((2, len(numbers)), np.int64)
        for number, where, local in self._sources.groups(numbers):
            source: Any = self._sources.sources[number]
            own = source._rows.outline(local)
            firsts[where], counts[where] = own.firsts, own.counts
        return Outline(numbers, firsts, counts)

    def pieces(self, rows: Outline) -> RowPieces:
        parts: list[RowPieces] = []
        placed: list[Int64s] = []
        for number, where, local in self._sources.groups(rows.numbers):
            source: Any = self._sources.sources[number]
            own = source._rows.pieces(replace(rows[where], numbers=local))
            begins = own.table[:, 0]
            begins[begins >= 0] += self._shifts[number]
            parts.append(own)
            placed.append(where)
        if any(part.losses is not None for part in parts):
            parts = [part.with_losses(shifted=self._shifted) for part in parts]
        return _in_order(parts, np.concatenate(placed).argsort())


def _in_order(parts: list[RowPieces], order: Int64s) -> RowPieces:
    """The rows of all parts, by their numbers when these are counted through."""
    pieces, counts = _stretches(np.concatenate([part.counts for part in parts]), order)
    table = np.concatenate([part.table for part in parts])[pieces]
    of_each = [part.losses for part in parts if part.losses is not None]
    return RowPieces(table, counts, _losses_in_order(of_each, pieces) if of_each else None)


def _losses_in_order(parts: list[Losses], pieces: Int64s) -> Losses:
    counts, begins, ends = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("counts", "begins", "ends")
    )
    which, sorted_counts = _stretches(counts, pieces)
    return Losses(sorted_counts, begins[which], ends[which])


def _stretches(counts: Int64s, order: Int64s) -> tuple[Int64s, Int64s]:
    """Where what rows have lies, row after row in an order, and how much each has."""
    firsts = counts.cumsum() - counts
    return ranges(firsts[order], counts[order]), counts[order]
