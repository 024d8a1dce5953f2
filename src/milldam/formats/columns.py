"""Columns of token ids in Arrow and Parquet files, read as documents. No Python object for any token.

Ids are read by the name of their column, a document a row; other columns are not read, but for those that say what is
trained on: `labels` (the id, or -100), `assistant_masks` or `completion_mask` (1 or 0), and of whole documents `label`
(true or false). A prompt and the answers to it, as TRL's trainers have them, are a document for each answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from milldam.errors import InputError, Setting
from milldam.formats.finding import ReadRules, SourceFile
from milldam.loader.reading import ranges
from milldam.loader.types import Array, Bools
from milldam.stores.tokens.format import Int64s, Spans
from milldam.stores.tokens.reader import cut_blocks
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

NO_LOSS = -100
_USUAL = ("input_ids", "tokens", "token_ids", "ids")
_MASKS = ("labels", "assistant_masks", "completion_mask")
"""The first of these that there is says what is trained on."""
_PROMPTS = ("prompt_ids", "prompt_input_ids")
_ANSWERS = (("chosen", "rejected"), ("completion",))
"""Words for answers to a prompt; in names of columns, they take the place of `prompt`."""
_LABEL = "label"


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


def choose_columns(schema: pa.Schema, rules: ReadRules, path: Path) -> TokenColumns:
    """The columns that the user names, or those with usual names."""
    import pyarrow as pa

    names, column, masks = schema.names, rules.column, rules.masks
    usual = [name for name in _USUAL if name in names]
    label = None
    if masks != "none" and _LABEL in names and pa.types.is_boolean(schema.field(_LABEL).type):
        label = _LABEL
    if column is None and masks is None and not usual:
        for prompt, answers in itertools.product(_PROMPTS, _ANSWERS):
            wanted = (prompt, *(prompt.replace("prompt", answer) for answer in answers))
            if all(name in names for name in wanted):
                return TokenColumns(wanted, label=label if len(wanted) == 2 else None)
    if column is None:
        column = usual[0] if usual else names[0] if len(names) == 1 else None
    if column is None or column not in names:
        problem = "no column of a usual name" if rules.column is None else f'no column "{column}"'
        advice = "Say which one holds the ids with "
        raise InputError(f"{path}: {problem}; it has {', '.join(names)}. {advice}", Setting("column"), ".")
    if masks is None:
        # `labels` of another dataset may be classes.
        lists = (name for name in _MASKS if name in names and pa.types.is_nested(schema.field(name).type))
        masks = next(lists, None)
    elif masks == "none":
        masks = None
    elif masks not in names:
        problem = f'no column "{masks}"; it has {", ".join(names)}. Say which one with '
        raise InputError(f"{path}: {problem}", Setting("masks"), ".")
    return TokenColumns((column,), masks, None if masks is None else label)


def read_column(source: SourceFile, rules: ReadRules, format: str) -> Iterator[Tokens]:
    """The documents of a Parquet or Arrow file, a few megabytes at a time, both of a pair together."""
    from milldam.sources.compression import DamagedError
    from milldam.sources.tables import table_batches
    from milldam.sources.units import Slice

    path = source.path
    try:
        slice = Slice(str(path), format, None)
        for _, batch in table_batches(slice, lambda schema: choose_columns(schema, rules, path).names):
            columns = choose_columns(batch.schema, rules, path)
            documents = (_documents_of if len(columns.ids) == 1 else _answers_of)(batch, columns, path)
            each = documents.documents_each
            for first, stop in cut_blocks(documents.lengths.reshape(-1, each).sum(axis=1)):
                yield documents.pieces(first * each, stop * each)
    except DamagedError as error:
        raise InputError(f"{path}: {error}. Get or make it again.") from None


def _documents_of(batch: pa.RecordBatch, columns: TokenColumns, path: Path) -> Tokens:
    """The rows of a batch, with what is trained on where another column says it."""
    name, masks = columns.ids[0], columns.masks
    ids, lengths = _values(batch.column(name), path)
    if masks is None:
        return Tokens(ids, lengths)
    values, of_each = _values(batch.column(masks), path, masks)
    if not np.array_equal(of_each, lengths):
        raise InputError(f'{path}: "{masks}" has not as many values as "{name}" has tokens in every row.')
    trained: Bools = values.astype(np.bool_)
    # Labels that are all 0 or 1 are the ids 0 and 1.
    if masks == "labels" or not np.array_equal(values, trained):
        trained = values != NO_LOSS
        if not np.array_equal(values[trained], ids[trained]):
            raise InputError(
                f'{path}: the column "{masks}" is neither a mask of zeros and ones nor labels that are {NO_LOSS} or '
                "the token at the same place (as HF has them, which shifts by itself). Name another column, or none, "
                "with ",
                Setting("masks"),
                ".",
            )
    return Tokens(ids, lengths, spans=_labelled(spans_of(trained, lengths), batch, columns, path))


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
        problem = f"{path}: the column {name}is {kind}; a list of integers is wanted. Say which with "
        raise InputError(problem, Setting("masks" if name else "column"), ".")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InputError(f"{path}: the column has nulls, which are not tokens. Drop these rows first.")
    flat = values.to_numpy(zero_copy_only=False)
    return flat, np.asarray(column.value_lengths().to_numpy(zero_copy_only=False), np.int64)
