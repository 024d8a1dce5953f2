"""A column of token ids in Arrow: what hf and parquet have in common. No Python object for any token.

Written as `input_ids`, a plain list of integers; read by its name, a document a row. Beside it stand the columns that
say what is trained on; others are not read. A prompt and the answers to it, as TRL's trainers have them, are
read as a document for each answer.

What is trained on, as columns beside `input_ids`: read as a store's stretches, and written from them.

labels             the id where a token is trained on, else -100
assistant_masks    1 where it is, else 0; completion_mask, as TRL makes it of prompt and completion, is read alike
attention_mask     of conversations one by one: all ones. axolotl takes rows as tokenized by it
position_ids       of packed rows: from 0 on in every conversation
seq_lengths        of packed rows: tokens of each piece, padding as a piece of its own; what TRL's collator takes

Where documents have labels (KTO), also what TRL's KTOTrainer makes:

label                          true or false
prompt_ids, completion_ids     `completion_ids` are the last trained stretch, `prompt_ids` all before it

Of a store of pairs, instead of all of these, what TRL's DPOTrainer makes: `prompt_ids`, `chosen_ids`, `rejected_ids`.
Packed rows are those of `store.packed(seq_len, form="hf")`: whole conversations, padded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milldam.choices import Side
from milldam.errors import InputError, Setting
from milldam.formats.finding import USUAL_COLUMNS, ReadRules, SourceFile, choose_column
from milldam.loader.reading import ranges
from milldam.loader.types import Array, Bools, PackedBatch, PackedRow
from milldam.stores.tokens.format import Int64s, Spans
from milldam.stores.tokens.reader import cut_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.formats.rows import FileRows
    from milldam.formats.writing import Export
    from milldam.loader.samples import Samples
    from milldam.loader.stores import Store

NO_LOSS = -100
MASK_COLUMNS = ("labels", "assistant_masks", "completion_mask")
"""The first of these that there is says what is trained on."""
PROMPTS = ("prompt_ids", "prompt_input_ids")
ANSWERS = (("chosen", "rejected"), ("completion",))
"""What answers to a prompt are called; in names of columns, they take the place of `prompt`."""
_LABEL = "label"
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
_ROWS_AT_ONCE = 1 << 16


# ---- read ----


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The columns that documents are read from."""

    ids: tuple[str, ...]
    """One; or a prompt and the answers to it, each of which makes a document."""
    masks: str | None = None
    label: str | None = None

    @property
    def names(self) -> list[str]:
        return [*self.ids, *(name for name in (self.masks, self.label) if name is not None)]


def choose_columns(schema: pa.Schema, column: str | None, masks: str | None, path: Path) -> TokenColumns:
    """What to read, from what the user says and what there is."""
    import pyarrow as pa

    known = _LABEL in schema.names and pa.types.is_boolean(schema.field(_LABEL).type)
    label = _LABEL if known and masks != "none" else None
    if column is None and masks is None and not any(name in USUAL_COLUMNS for name in schema.names):
        for prompt, answers in itertools.product(PROMPTS, ANSWERS):
            wanted = (prompt, *(prompt.replace("prompt", answer) for answer in answers))
            if all(name in schema.names for name in wanted):
                return TokenColumns(wanted, label=label if len(wanted) == 2 else None)
    found, own = choose_column(schema.names, column, path), choose_masks(schema, masks, path)
    return TokenColumns((found,), own, None if own is None else label)


def choose_masks(schema: pa.Schema, asked: str | None, path: Path) -> str | None:
    """The column that says what is trained on; None: none does, or none is to."""
    import pyarrow as pa

    if asked == "none":
        return None
    if asked is not None:
        if asked not in schema.names:
            told = f'{path}: no column "{asked}"; it has {", ".join(schema.names)}. Say which one with '
            raise InputError(told, Setting("masks"), ".")
        return asked
    # `labels` of another dataset may be classes.
    lists = (name for name in MASK_COLUMNS if name in schema.names and pa.types.is_nested(schema.field(name).type))
    return next(lists, None)


def trained_of(ids: Array, values: Array, name: str, path: Path) -> Bools:
    """Which tokens are trained on, from a column of labels or of zeros and ones."""
    ones = values.astype(np.bool_)
    # Labels that are all 0 or 1 are the ids 0 and 1.
    if name != "labels" and np.array_equal(values, ones):
        return ones
    trained: Bools = values != NO_LOSS
    if np.array_equal(values[trained], ids[trained]):
        return trained
    told = (
        f'{path}: the column "{name}" is neither a mask of zeros and ones nor labels that are {NO_LOSS} or the token '
        "at the same place (as HF has them, which shifts by itself). Name another column, or none, with "
    )
    raise InputError(told, Setting("masks"), ".")


def spans_of(mask: Bools, lengths: Int64s) -> Spans:
    """The stretches of documents that lie end to end."""
    ends = lengths.cumsum()
    border = np.zeros(len(mask) + 1, np.bool_)
    border[0] = border[-1] = True
    border[ends] = True
    before = np.concatenate(([False], mask))
    behind = np.concatenate((mask, [False]))
    first = np.flatnonzero(behind & (~before | border))
    stop = np.flatnonzero(before & (~behind | border))
    owners = ends.searchsorted(first, side="right")
    shift = (ends - lengths)[owners]
    return Spans(np.stack((first - shift, stop - shift), axis=1), np.bincount(owners, minlength=len(lengths)))


# ---- write ----


class MaskedRows:
    """The rows of a store with stretches, as columns of arrays: (values, tokens of each row), or values a row."""

    def __init__(self, store: Store, seq_len: int | None, dtype: np.dtype[Any], side: Side | None) -> None:
        self._store, self._seq_len, self._side = store, seq_len, side
        self._in_pairs = store.stream().pairs and seq_len is None and side is None
        signed = dtype if dtype.kind == "i" else np.dtype(np.int32 if dtype.itemsize < 4 else np.int64)
        self.types: dict[str, tuple[np.dtype[Any], bool]]
        """Each column's dtype, and whether it holds lists."""
        if self._in_pairs:
            self.types = dict.fromkeys(_PAIR, (dtype, True))
            return
        bits, places = (np.dtype(np.int8), True), (np.dtype(np.int32), True)
        self.types = {"input_ids": (dtype, True), "labels": (signed, True), "assistant_masks": bits}
        if seq_len is not None:
            self.types |= {"position_ids": places, "seq_lengths": places}
            return
        self.types["attention_mask"] = bits
        if store.stream().has_labels:
            self.types |= dict.fromkeys(("prompt_ids", "completion_ids"), (dtype, True))
            self.types[_LABEL] = np.dtype(np.bool_), False

    @cached_property
    def packed(self) -> Samples[PackedRow, PackedBatch]:
        assert self._seq_len is not None
        return self._store.packed(self._seq_len, form="hf", side=self._side, read="pread")

    def row_lengths(self) -> Iterator[Int64s]:
        """Tokens of each row in order, many at a time."""
        if self._seq_len is not None:
            yield np.full(len(self.packed), self._seq_len, np.int64)
            return
        for first in range(0, len(self._whole), _ROWS_AT_ONCE):
            numbers = np.arange(first, min(first + _ROWS_AT_ONCE, len(self._whole)))
            yield self._whole.lengths(numbers).sum(axis=1)

    def blocks(self, first: int, rows: int, lengths: Int64s) -> Iterator[dict[str, tuple[Array, Int64s | None]]]:
        """The rows from `first` on, about a million tokens at a time, or one row that has more."""
        for begin, stop in cut_blocks(lengths[:rows]):
            numbers = np.arange(first + begin, first + stop)
            made = self._packed(numbers) if self._seq_len is not None else self._documents(numbers)
            yield {name: (values.astype(self.types[name][0]), counts) for name, (values, counts) in made.items()}

    def _packed(self, numbers: Int64s) -> dict[str, tuple[Array, Int64s | None]]:
        batch = self.packed.read(numbers)
        assert self._seq_len is not None
        lengths = np.full(len(numbers), self._seq_len)
        borders = batch["cu_seqlens"].astype(np.int64)
        # A piece never goes over the end of its row.
        pieces = np.bincount(borders[:-1] // self._seq_len, minlength=len(numbers))
        trained = batch["labels"] != NO_LOSS
        columns: dict[str, npt.NDArray[Any]] = {"input_ids": batch["input_ids"], "labels": batch["labels"]}
        columns |= {"assistant_masks": trained, "position_ids": batch["position_ids"]}
        made: dict[str, tuple[Array, Int64s | None]] = {
            name: (values.reshape(-1), lengths) for name, values in columns.items()
        }
        return made | {"seq_lengths": (np.diff(borders), pieces)}

    @cached_property
    def _whole(self) -> Any:
        store = self._store
        return store.pairs(read="pread") if self._in_pairs else store.conversations(side=self._side, read="pread")

    def _documents(self, numbers: Int64s) -> dict[str, tuple[Array, Int64s | None]]:
        if self._in_pairs:
            pairs = self._whole.__getitems__(numbers.tolist())
            columns = {name: [pair[name] for pair in pairs] for name in _PAIR}
            return {name: (np.concatenate(ids), np.array([*map(len, ids)], np.int64)) for name, ids in columns.items()}
        ids, trained, lengths = self._whole.flat(numbers)
        labels = ids.astype(np.int64)
        labels[~trained] = NO_LOSS
        made: dict[str, tuple[Array, Int64s | None]] = {"input_ids": (ids, lengths), "labels": (labels, lengths)}
        made |= {"assistant_masks": (trained, lengths), "attention_mask": (np.ones(len(ids), np.int8), lengths)}
        if _LABEL in self.types:
            made |= {_LABEL: (self._whole.labels_of(numbers), None)} | _last_answers(ids, trained, lengths)
        return made


def _last_answers(ids: Array, trained: Bools, lengths: Int64s) -> dict[str, tuple[Array, Int64s | None]]:
    """The last trained stretch of each document, and all before it; what lies behind is neither."""
    spans = spans_of(trained, lengths)
    some = spans.counts > 0
    last = np.zeros((len(lengths), 2), np.int64)
    last[some] = spans.pairs[spans.counts.cumsum()[some] - 1]
    # Without a stretch all is prompt.
    last[~some] = lengths[~some, None]
    begins = lengths.cumsum() - lengths
    prompts, answers = last[:, 0], last[:, 1] - last[:, 0]
    return {
        "prompt_ids": (ids[ranges(begins, prompts)], prompts),
        "completion_ids": (ids[ranges(begins + prompts, answers)], answers),
    }


COLUMN = "input_ids"
OFFSET_BYTES = 4
"""What a row takes besides its tokens."""


def column_types(export: Export, store: Store) -> dict[str, tuple[np.dtype[Any], bool]]:
    """Each column's dtype, and whether it holds lists."""
    if not store.has_spans:
        return {COLUMN: (export.dtype, True)}
    return MaskedRows(store, export.seq_len, export.dtype, export.side).types


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
        masked = MaskedRows(rows.store, rows.seq_len, rows.dtype, rows.export.side)
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
    from milldam.sources.compression import DamagedError
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    def choose(schema: pa.Schema) -> TokenColumns:
        return choose_columns(schema, rules.column, rules.masks, source.path)

    try:
        for _, batch in table_batches(Slice(str(source.path), format, None), lambda schema: choose(schema).names):
            columns = choose(batch.schema)
            read = _documents_of if len(columns.ids) == 1 else _answers_of
            yield from _in_blocks(read(batch, columns, source.path))
    except DamagedError as error:
        raise InputError(f"{source.path}: {error}. Get or make it again.") from None


def _in_blocks(documents: Tokens) -> Iterator[Tokens]:
    """A few at a time, both of a pair together."""
    each = documents.documents_each
    for first, stop in cut_blocks(documents.lengths.reshape(-1, each).sum(axis=1)):
        yield documents.pieces(first * each, stop * each)


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
    spans = None if mask is None else _labelled(spans_of(mask, lengths), batch, columns, path)
    return Tokens(flat, lengths, spans=spans)


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
