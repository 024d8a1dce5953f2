"""Samples of several sources in one read: their streams end to end are one stream.

Where all sources are mapped, their files are mapped side by side, so that a batch of a mixture is one gather, as that
of one source is, not one for each of them; to map files once more takes addresses alone. Where all are read by pread,
so is the stream of all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
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
from milldam.loader.samples import OF_A_WHOLE_BATCH, ReadPart, Samples, StreamSamples
from milldam.loader.stream import TokenStream
from milldam.loader.types import Array
from milldam.loader.windows import Windows, read_windows

log = logging.getLogger("milldam")
OpenJoint = Callable[[Sequence[Samples[Any, Any]]], Reader | None]


class Sources:
    """Samples of several sources by number, counted through all of them end to end."""

    def __init__(self, sources: Sequence[Samples[Any, Any]], open_joint: OpenJoint) -> None:
        """`open_joint`: what reads all of them at once, where that can be."""
        self.sources, self._open_joint = sources, open_joint
        # begins: (sources + 1,), the number of the first sample of each, and the end
        self.begins: Int64s = np.array([0, *accumulate(source._numbered for source in sources)], np.int64)

    @cached_property
    def _reader(self) -> Reader | None:
        return self._open_joint(self.sources)

    @cached_property
    def _shifts(self) -> list[int]:
        """Where the stream of each source begins among all."""
        sources: Sequence[Any] = self.sources
        return [0, *accumulate(sum(file.tokens for file in source._stream.files) for source in sources)][:-1]

    @property
    def readers(self) -> tuple[Reader, ...]:
        if self._reader is not None:
            return (self._reader,)
        return tuple(reader for source in self.sources for reader in source._readers)

    def groups(self, numbers: Int64s) -> Iterator[tuple[int, Int64s, Int64s]]:
        """(source, where in the numbers, ascending, numbers in the source) of each source that comes."""
        sources = self.begins.searchsorted(numbers, side="right") - 1
        for source, where in groups(sources, len(self.sources)):
            yield source, where, numbers[where] - self.begins[source]

    def sample(self, number: int) -> Any:
        ((source, _, local),) = self.groups(np.array([number]))
        return self.sources[source]._sample(int(local[0]))

    def look_up(self, numbers: Int64s, dtype: npt.DTypeLike) -> ReadPart[Any]:
        """Look up samples: all together, or each source by itself."""
        first: Any = self.sources[0]
        if self._reader is None:
            by_source = self.groups(numbers)
            found = [(where, self.sources[source]._look_up(local, dtype)) for source, where, local in by_source]
            return lambda part, out: read_by_source(found, part, out, first._padding, first._rows_each)
        if isinstance(first, Windows):
            return read_windows(self._reader, self._starts(numbers), first.rules, dtype)
        form = RowForm(first.rules.seq_len, first.rules.form, dtype)
        return RowReading(_MixedRows(self, self._shifts), self._reader, numbers, form)

    def _starts(self, numbers: Int64s) -> Int64s:
        starts = np.empty_like(numbers)
        for number, where, local in self.groups(numbers):
            source: Any = self.sources[number]
            starts[where] = source._starts(local) + self._shifts[number]
        return starts

    def spans(self, stretches: Stretches) -> Iterator[tuple[Reader, Int64s, Int64s]]:
        """Where samples lie, source by source: as `Samples._spans`."""
        for number, _, local in self.groups(stretches.numbers):
            for reader, starts, lengths in self.sources[number]._spans(Stretches.single(local)):
                if self._reader is None:
                    yield reader, starts, lengths
                else:
                    yield self._reader, starts + self._shifts[number], lengths


def groups(sources: npt.NDArray[Any], count: int) -> Iterator[tuple[int, Int64s]]:
    """(source, where it stands, ascending) of each source that comes."""
    places = sources.argsort(kind="stable")
    ends = np.bincount(sources, minlength=count).cumsum()
    for source, (first, end) in enumerate(pairwise([0, *ends.tolist()])):
        if first < end:
            yield source, places[first:end]


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
    # rows: those of the batch that each part is for
    rows = np.concatenate([own + half * count for _, _, own in parts for half in range(rows_each)])
    return _joined([read(own, None) for read, own, _ in parts], rows.argsort(), padding or {})


def _joined(batches: list[Any], order: Int64s, padding: Mapping[str, int]) -> Any:
    """What the sources gave as one batch, its rows in order, its arrays as wide as the widest."""

    def joined(name: Any) -> Array:
        arrays = [batch[name] for batch in batches]
        if name in padding:
            widest = max(array.shape[1] for array in arrays)
            missing = [((0, 0), (0, widest - array.shape[1])) for array in arrays]
            arrays = [np.pad(*each, constant_values=padding[name]) for each in zip(arrays, missing, strict=True)]
        return np.concatenate(arrays)[order]

    if isinstance(batches[0], tuple):
        return tuple(map(joined, range(len(batches[0]))))
    batch: dict[str, Any] = {name: joined(name) for name in batches[0] if name not in OF_A_WHOLE_BATCH}
    if "cu_seqlens" in batches[0]:
        positions = batch["position_ids"].reshape(-1)
        batch["cu_seqlens"] = np.append(np.flatnonzero(positions == 0), len(positions)).astype(np.int32)
        batch["max_seqlen"] = max(one["max_seqlen"] for one in batches)
    return batch


def open_mixed(sources: Sequence[Samples[Any, Any]]) -> Reader | None:
    """What reads all sources at once; None where they can't be: not of one kind and dtype, or not read in one way."""
    found = _of_one_kind(sources)
    if found is None or len({type(source._reader) for source in found}) > 1:
        return None
    return _open_reader(_stream_of_all(found), type(found[0]._reader), len(found))


def open_joint(sources: Sequence[Samples[Any, Any]], way: Way) -> Reader | None:
    """The same for sources that have not been read from yet: one reader for all, and none for each."""
    found = _of_one_kind(sources)
    return None if found is None else open_reader(_stream_of_all(found), way)


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
