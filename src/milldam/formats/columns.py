"""A column of token ids in Arrow: what hf and parquet have in common. No Python object for any token.

Written as `input_ids`, a plain list of integers; read by its name, a document a row. Beside it stand the columns that
say what is trained on (`masks`); others are not read. A prompt and the answers to it, as TRL's trainers have them, are
read as a document for each answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.formats.documents import ReadRules, SourceFile
from milldam.formats.masks import MaskedRows, TokenColumns, choose_columns, spans_of, trained_of
from milldam.loader.reading import ranges
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import Int64s, Spans
from milldam.stores.tokens.reader import cut_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.formats.rows import FileRows
    from milldam.formats.writing import Export
    from milldam.loader.stores import Store

COLUMN = "input_ids"
OFFSET_BYTES = 4
"""What a row takes besides its tokens."""


def column_types(export: Export, store: Store) -> dict[str, tuple[np.dtype[Any], bool]]:
    """Each column's dtype, and whether it holds lists."""
    if not store.has_spans:
        return {COLUMN: (export.dtype, True)}
    return MaskedRows(store, export.seq_len, export.dtype).types


def schema(rows: FileRows) -> pa.Schema:
    import pyarrow as pa

    types = column_types(rows.export, rows.store)
    kinds = {name: pa.from_numpy_dtype(dtype) for name, (dtype, _) in types.items()}
    return pa.schema([(name, pa.list_(kinds[name]) if lists else kinds[name]) for name, (_, lists) in types.items()])


def batches(rows: FileRows) -> Iterator[pa.RecordBatch]:
    """About a million tokens each, or one row that has more."""
    import pyarrow as pa

    form = schema(rows)
    if rows.store.has_spans:
        masked = MaskedRows(rows.store, rows.seq_len, rows.dtype)
        for columns in masked.blocks(rows.file.first, rows.file.rows, rows.lengths):
            yield pa.record_batch([_array(*columns[name]) for name in form.names], schema=form)
        return
    for start, lengths in rows.blocks():
        yield pa.record_batch([_array(rows.tokens(start, int(lengths.sum())), lengths)], schema=form)


def _array(values: Array, lengths: Int64s | None) -> pa.Array:
    """Values as lists of so many each; None: as they are."""
    import pyarrow as pa

    if lengths is None:
        return pa.array(values)
    # offsets: (rows + 1,)
    offsets = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def read_column(source: SourceFile, rules: ReadRules, format: str) -> Iterator[Tokens]:
    """The column of token ids of a parquet or Arrow file, a few megabytes at a time."""
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    def choose(schema: pa.Schema) -> TokenColumns:
        return choose_columns(schema, rules.column, rules.masks, source.path)

    for _, batch in table_batches(Slice(str(source.path), format, None), lambda schema: choose(schema).names):
        columns = choose(batch.schema)
        read = _documents_of if len(columns.ids) == 1 else _answers_of
        yield from _in_blocks(read(batch, columns, source.path))


def _in_blocks(documents: Tokens) -> Iterator[Tokens]:
    """A few at a time, both of a pair together."""
    lengths, each, spans = documents.lengths, documents.documents_each, documents.spans
    begins = np.concatenate((np.zeros(1, np.int64), lengths.cumsum()))
    for first, stop in cut_blocks(lengths.reshape(-1, each).sum(axis=1)):
        first, stop = first * each, stop * each
        own = None if spans is None else spans.between(first, stop)
        yield Tokens(documents.flat[begins[first] : begins[stop]], lengths[first:stop], spans=own, documents_each=each)


def _documents_of(batch: pa.RecordBatch, columns: TokenColumns, path: Path) -> Tokens:
    """The rows of a batch, with what is trained on where a second column says it; packed rows piece by piece."""
    name, masks = columns.ids[0], columns.masks
    flat, lengths = _values(batch.column(name), path)
    mask: Bools | None = None
    if masks is not None:
        values, of_each = _values(batch.column(masks), path, masks)
        if not np.array_equal(of_each, lengths):
            raise InputError(f'{path}: "{masks}" has not as many values as "{name}" has tokens in every row.')
        mask = trained_of(flat, values, masks, path)
    if columns.pieces is not None:
        return _pieces_of(
            Tokens(flat, lengths), mask, _values(batch.column(columns.pieces), path, columns.pieces), path
        )
    spans = None if mask is None else _labelled(spans_of(mask, lengths), batch, columns, path)
    return Tokens(flat, lengths, spans=spans)


def _pieces_of(rows: Tokens, mask: Bools | None, pieces: tuple[Array, Int64s], path: Path) -> Tokens:
    """The documents that rows were packed of. `pieces`: tokens of each, and how many pieces a row has."""
    lengths, of_rows = pieces[0].astype(np.int64), pieces[1]
    owners = np.arange(len(of_rows)).repeat(of_rows)
    covered = np.bincount(owners, lengths, minlength=len(of_rows)).astype(np.int64)
    if not np.array_equal(covered, rows.lengths) or (lengths < 1).any():
        raise InputError(f"{path}: its seq_lengths are not the lengths of pieces that fill each row.")
    if mask is None:
        return Tokens(rows.flat, lengths)
    spans = spans_of(mask, lengths)
    # What is behind the last piece of a row, if it is not full: one id, which nothing is trained on.
    begins = lengths.cumsum() - lengths
    one_id = np.minimum.reduceat(rows.flat, begins) == np.maximum.reduceat(rows.flat, begins)
    last = np.concatenate((owners[1:] != owners[:-1], [True])) if len(owners) else one_id
    return Tokens(rows.flat, lengths, spans=spans).only(~(last & one_id & (spans.counts == 0)))


def _answers_of(batch: pa.RecordBatch, columns: TokenColumns, path: Path) -> Tokens:
    """A prompt and each answer to it: a document of which the answer is trained on."""
    (prompts, shared), *answers = (_values(batch.column(name), path, name) for name in columns.ids)
    each = len(answers)
    # (rows, answers): where parts lie in all columns end to end
    flat = np.concatenate([prompts, *(ids for ids, _ in answers)])
    own = np.stack([lengths for _, lengths in answers], axis=1)
    prompt_lengths = np.repeat(shared[:, None], each, axis=1)
    columns_at = len(prompts) + np.cumsum([0, *(len(ids) for ids, _ in answers)])[:-1]
    prompts_at = np.repeat((shared.cumsum() - shared)[:, None], each, axis=1)
    parts_at = np.stack((prompts_at, own.cumsum(axis=0) - own + columns_at), axis=-1)
    parts = np.stack((prompt_lengths, own), axis=-1)
    lengths = parts.sum(axis=-1).reshape(-1)
    pairs = np.stack((prompt_lengths.reshape(-1), lengths), axis=1)
    some = pairs[:, 0] < pairs[:, 1]
    spans = Spans(pairs[some], some.astype(np.int64))
    ids = flat[ranges(parts_at.reshape(-1), parts.reshape(-1))]
    return Tokens(ids, lengths, spans=_labelled(spans, batch, columns, path), documents_each=each)


def _labelled(spans: Spans, batch: pa.RecordBatch, columns: TokenColumns, path: Path) -> Spans:
    if columns.label is None:
        return spans
    labels = batch.column(columns.label)
    if labels.null_count:
        raise InputError(f'{path}: the column "{columns.label}" has nulls. Drop these rows first.')
    return replace(spans, labels=labels.to_numpy(zero_copy_only=False).astype(np.uint8))


def _values(column: pa.Array, path: Path, name: str = "") -> tuple[Array, Int64s]:
    """The numbers of a column of lists end to end, and how many each row has."""
    import pyarrow as pa

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_integer(kind.value_type):
        told = f"{path}: the column {name}is {kind}; a list of integers is wanted. Say which with "
        raise InputError(told, Setting("masks" if name else "column"), ".")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{path}: the column has nulls, which are not tokens. Drop these rows first.")
    flat = values.to_numpy(zero_copy_only=False)
    return flat, np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
