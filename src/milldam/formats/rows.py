"""A store as rows in files of about `shard_size`: HF datasets, Parquet and MDS (`milldam.formats.mds`).

hf          `data-00000-of-00012.arrow` ..., Arrow IPC streams as `datasets.Dataset.save_to_disk` writes them;
            `load_from_disk` maps them. Written last, state.json and dataset_info.json make the folder a dataset; of
            several splits, a DatasetDict. Needs pyarrow, not datasets
parquet     `part-00000.parquet` ..., zstd; pyarrow, DuckDB, Polars, Spark and `load_dataset("parquet", data_dir=...)`
            read it. `shard_size` counts the tokens before compression

A row is a document, or with `seq_len` exactly so many tokens, end to end across documents; tokens at the end that fill
no row are left out and counted. Which rows go into which file follows from the store's index and the options alone, so
every file is a unit. A store of several splits becomes a folder for each. Record batches and row groups are of about a
million tokens, or one row where a document is longer: so much is held.

A row has `input_ids`, a plain list of int32, as tokenizing with HF gives it. Of a store of conversations it also has
what is trained on:

labels             the id where a token is trained on, else -100
assistant_masks    1 where it is, else 0
attention_mask     of conversations one by one: all ones. axolotl takes rows as tokenized by it
position_ids       of packed rows (those of `store.packed(seq_len, form="hf")`): from 0 on in every conversation
seq_lengths        of packed rows: tokens of each piece, padding as a piece of its own; what TRL's collator takes
label, prompt_ids, completion_ids    where documents have labels, as TRL's KTOTrainer makes them: the last trained
                   stretch is the completion, the prompt is what precedes it

A pair gives `prompt_ids`, `chosen_ids` and `rejected_ids` instead, as TRL's DPOTrainer makes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, Setting
from milldam.files import NewFile, hash_bytes, write_json
from milldam.formats.columns import NO_LOSS, spans_of
from milldam.formats.flat import block_as, cut_blocks
from milldam.loader.reading import open_reader, ranges
from milldam.loader.types import Array
from milldam.stores.tokens.format import Int64s

if TYPE_CHECKING:
    from milldam.formats.exporting import Export, OutputFile

MOST_ROWS = 1 << 20
"""Of a file: bounds what is held of documents of a token or two."""
MOST_BYTES = 1 << 31
"""Of a row: fewer than an offset of Arrow can say, half of what one of MDS can."""
_ROW_BYTES = 16
"""Of a row besides its tokens, at most."""
_ROWS_AT_ONCE = 1 << 16
_PAIR = ("prompt_ids", "chosen_ids", "rejected_ids")
NAMES = {"hf": "data-{:05d}-of-{:05d}.arrow", "parquet": "part-{:05d}.parquet", "mds": "shard.{:05d}.mds"}
Columns = dict[str, tuple[Array, Int64s | None]]
"""Of some rows: the values of each column end to end, and how many each row has; None: one a row."""


class Rows:
    """The rows of a split as columns; of conversations with what is trained on, where the format has columns for it."""

    def __init__(self, export: Export, split: str) -> None:
        self.store, self.dtype, self.seq_len = export.parts[split], export.dtype, export.seq_len
        self.masked = export.to != "mds" and self.store.has_spans
        stream = self.store.stream()
        signed = self.dtype if self.dtype.kind == "i" else np.dtype(np.int32 if self.dtype.itemsize < 4 else np.int64)
        bits, places = (np.dtype(np.int8), True), (np.dtype(np.int32), True)
        self.types: dict[str, tuple[np.dtype[Any], bool]] = {"input_ids": (self.dtype, True)}
        """Each column's dtype, and whether it holds lists."""
        self._in_pairs = self.masked and stream.pairs
        if self._in_pairs:
            self.types = dict.fromkeys(_PAIR, (self.dtype, True))
        elif self.masked:
            self.types |= {"labels": (signed, True), "assistant_masks": bits}
            if self.seq_len is not None:
                self.types |= {"position_ids": places, "seq_lengths": places}
            else:
                self.types["attention_mask"] = bits
                if stream.has_labels:
                    self.types |= dict.fromkeys(("prompt_ids", "completion_ids"), (self.dtype, True))
                    self.types["label"] = np.dtype(np.bool_), False

    @cached_property
    def samples(self) -> Any:
        """Of conversations, the samples that are the rows."""
        if self.seq_len is not None:
            return self.store.packed(self.seq_len, form="hf", read="pread")
        return self.store.pairs(read="pread") if self._in_pairs else self.store.conversations(read="pread")

    def lengths(self, first: int = 0, rows: int | None = None) -> Iterator[Int64s]:
        """Tokens of each row in order, or of so many from `first` on, many at a time."""
        if rows is None:
            plain = len(self.store) if self.seq_len is None else self.store.tokens // self.seq_len
            rows = plain if not self.masked else len(self.samples)
        if self.seq_len is None and not self.masked:
            for shard in self.store.shards:
                stop = min(shard.documents, first + rows)
                for at in range(max(0, first), stop, _ROWS_AT_ONCE):
                    yield self.store.open_index(shard).document_lengths(at, min(at + _ROWS_AT_ONCE, stop))
                first -= shard.documents
            return
        for at in range(first, first + rows, _ROWS_AT_ONCE):
            numbers = np.arange(at, min(at + _ROWS_AT_ONCE, first + rows))
            each = self.samples.lengths(numbers).sum(axis=1) if self.seq_len is None else None
            yield np.full(len(numbers), self.seq_len, np.int64) if each is None else each

    def lengths_of(self, file: OutputFile) -> Int64s:
        return np.concatenate([*self.lengths(file.first, file.rows)])

    def files(self, to: str, shard_size: int) -> Iterator[tuple[str, int, int]]:
        """(name, rows, tokens) of the files: each begins with the row that passes another multiple of the size."""
        size, before = min(shard_size, MOST_BYTES), 0
        files: dict[int, list[int]] = {}
        for lengths in self.lengths():
            costs = lengths * self.dtype.itemsize + _ROW_BYTES
            if int(costs.max(initial=0)) > MOST_BYTES:
                what = f"A document of {int(lengths.max()):,} tokens is more than a row of this format holds."
                raise ConfigError(f"{what} Cut the tokens into rows with ", Setting("seq_len"), ".")
            costs = np.maximum(costs, -(-size // MOST_ROWS))
            numbers = (before + costs.cumsum() - costs) // size
            before += int(costs.sum())
            for number in dict.fromkeys(numbers.tolist()):
                begin, stop = numbers.searchsorted((number, number + 1))
                rows, tokens = files.get(number, (0, 0))
                files[number] = [rows + int(stop - begin), tokens + int(lengths[begin:stop].sum())]
        for number, (rows, tokens) in enumerate(files.values()):
            yield NAMES[to].format(number, len(files)), rows, tokens

    def blocks(self, file: OutputFile) -> Iterator[Columns]:
        """The rows of a file, about a million tokens at a time, or one row that has more."""
        # Exactly the bytes that are asked for: nothing stays mapped, whatever the size of the store.
        reader = None if self.masked else open_reader(self.store.stream(), "pread")
        number, position, lengths = file.first, file.start, self.lengths_of(file)
        for first, stop, count in cut_blocks(lengths):
            if reader is None:
                columns = self._columns(np.arange(number + first, number + stop))
                yield {name: (values.astype(self.types[name][0]), each) for name, (values, each) in columns.items()}
            else:
                tokens = reader.runs(np.array([position]), np.array([count])) if count else np.empty(0, self.dtype)
                yield {"input_ids": (np.ascontiguousarray(block_as(tokens, self.dtype)), lengths[first:stop])}
            position += count

    def _columns(self, numbers: Int64s) -> Columns:
        if self.seq_len is not None:
            batch, lengths = self.samples.read(numbers), np.full(len(numbers), self.seq_len)
            borders = batch["cu_seqlens"].astype(np.int64)
            # A piece never crosses the end of its row.
            pieces = np.bincount(borders[:-1] // self.seq_len, minlength=len(numbers))
            trained = (batch["labels"] != NO_LOSS).reshape(-1)
            packed = {name: (batch[name].reshape(-1), lengths) for name in ("input_ids", "labels", "position_ids")}
            return {**packed, "assistant_masks": (trained, lengths), "seq_lengths": (np.diff(borders), pieces)}
        if self._in_pairs:
            pairs = self.samples.__getitems__(numbers.tolist())
            parts = {name: [pair[name] for pair in pairs] for name in _PAIR}
            return {name: (np.concatenate(ids), np.array([*map(len, ids)], np.int64)) for name, ids in parts.items()}
        ids, trained, lengths = self.samples.flat(numbers)
        labels = np.where(trained, ids.astype(np.int64), NO_LOSS)
        columns: Columns = {"input_ids": (ids, lengths), "labels": (labels, lengths)}
        columns |= {"assistant_masks": (trained, lengths), "attention_mask": (np.ones(len(ids), np.int8), lengths)}
        if "label" in self.types:
            spans, begins = spans_of(trained, lengths), lengths.cumsum() - lengths
            some = spans.counts > 0
            last = np.repeat(lengths[:, None], 2, axis=1)  # without a stretch all is prompt
            last[some] = spans.pairs[spans.counts.cumsum()[some] - 1]
            prompts, answers = last[:, 0], last[:, 1] - last[:, 0]
            columns["prompt_ids"] = ids[ranges(begins, prompts)], prompts
            columns["completion_ids"] = ids[ranges(begins + prompts, answers)], answers
            columns["label"] = self.samples.labels_of(numbers), None
        return columns


def write_rows(new: NewFile, to: str, rows: Rows, file: OutputFile) -> None:
    """Write a file of Arrow or Parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = [(name, pa.from_numpy_dtype(dtype), lists) for name, (dtype, lists) in rows.types.items()]
    schema = pa.schema([(name, pa.list_(kind) if lists else kind) for name, kind, lists in kinds])
    opened: Any = pa.ipc.new_stream(new, schema) if to == "hf" else pq.ParquetWriter(new, schema, compression="zstd")
    with opened as writer:
        for columns in rows.blocks(file):
            arrays = []
            for values, lengths in (columns[name] for name in schema.names):
                array = pa.array(values)
                if lengths is not None:
                    offsets = np.concatenate(([0], lengths.cumsum())).astype(np.int32)  # (rows + 1,)
                    array = pa.ListArray.from_arrays(pa.array(offsets), array)
                arrays.append(array)
            batch = pa.record_batch(arrays, schema=schema)
            # A row group for each: nothing is held from one to the next.
            writer.write_batch(batch, *[max(1, batch.num_rows)] * (to == "parquet"))


def complete_hf(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    """Write what makes a folder a dataset. `made`: of each file its name, rows, bytes and hash."""
    # "Sequence", not the newer "List": old and new versions of datasets read it.
    features: dict[str, Any] = {}
    for name, (dtype, lists) in Rows(export, split).types.items():
        value = {"dtype": dtype.name, "_type": "Value"}
        features[name] = {"feature": value, "_type": "Sequence"} if lists else value
    size, rows = (sum(one[what] for one in made) for what in ("bytes", "rows"))
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    splits = {split: {"name": split, "num_bytes": size, "num_examples": rows}}
    write_json(folder / "dataset_info.json", info | {"splits": splits})
    state: dict[str, Any] = {
        "_data_files": [{"filename": one["file"]} for one in made],
        # Names the content, as everything that datasets derives from it is cached under this name.
        "_fingerprint": hash_bytes("".join([split, *(one["xxh3"] for one in made)]).encode())[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": split,
    }
    write_json(folder / "state.json", state)
    if export.has_splits:
        write_json(export.folder / "dataset_dict.json", {"splits": list(export.parts)})
