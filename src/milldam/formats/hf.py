"""HF datasets: rows of `input_ids` as `datasets.Dataset.save_to_disk` writes them; `datasets.load_from_disk` maps them.

    data-00000-of-00012.arrow ...   Arrow IPC stream, record batches of about a million tokens
    state.json, dataset_info.json   written last: they make the folder a dataset

A store of several splits becomes a DatasetDict: a folder for each and `dataset_dict.json`. The column is a plain list
of int32, as tokenizing with HF gives it, also where all rows are of one length. Read: such folders, and any Arrow file,
mapped batch after batch. Needs pyarrow, not datasets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import InputError
from milldam.files import NewFile, hash_bytes, stays_in_folder, write_json
from milldam.formats import rows
from milldam.formats.columns import read_column
from milldam.formats.finding import ReadRules, SourceFile
from milldam.formats.rows import RowFormat, Rows
from milldam.formats.writing import Export, OutputFile
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".arrow", ".feather")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, (*rows.OPTIONS, "side"), rows.DTYPES
OFFSET_BYTES = 4
_DICT, _STATE = "dataset_dict.json", "state.json"


# ---- read ----


def indexed(folder: Path, split: str | None) -> list[SourceFile] | None:
    """The files of a dataset or a DatasetDict; what an index names must be there. None: it is neither."""
    whole = _read_index(folder / _DICT)
    if whole is None:
        return _saved(folder, split)
    files: list[SourceFile] = []
    for name in whole.get("splits", []):
        inner = _inside(folder, name)
        saved = _saved(inner, name)
        if saved is None:
            raise InputError(f"{inner}: no dataset in it, though {_DICT} names it. Is the folder whole?")
        files += saved
    return files


def _saved(folder: Path, split: str | None) -> list[SourceFile] | None:
    state = _read_index(folder / _STATE)
    if state is None:
        return None
    if state.get("_indices_data_files"):
        raise InputError(f"{folder}: its rows are chosen by indices. Save it again with .flatten_indices().")
    return [SourceFile("hf", _inside(folder, file["filename"]), split) for file in state.get("_data_files", [])]


def _read_index(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not an index that milldam knows.")
    return value


def _inside(folder: Path, name: object) -> Path:
    """A file that an index names. It may come from anywhere: it must not make us read files elsewhere."""
    if not stays_in_folder(name):
        raise InputError(f'{folder}: its index names the file "{name}", which leaves the folder; refused.')
    return folder / str(name)


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    return read_column(source, rules, "arrow")


# ---- write ----


def schema_of(rows: Rows) -> pa.Schema:
    import pyarrow as pa

    kinds = [(name, pa.from_numpy_dtype(dtype), lists) for name, (dtype, lists) in rows.types.items()]
    return pa.schema([(name, pa.list_(kind) if lists else kind) for name, kind, lists in kinds])


def batches(rows: Rows, file: OutputFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file, about a million tokens at a time, or one row that has more."""
    import pyarrow as pa

    schema = schema_of(rows)
    for columns in rows.blocks(file):
        arrays = []
        for values, lengths in (columns[name] for name in schema.names):
            array = pa.array(values)
            if lengths is not None:
                offsets = np.concatenate(([0], lengths.cumsum())).astype(np.int32)  # (rows + 1,)
                array = pa.ListArray.from_arrays(pa.array(offsets), array)
            arrays.append(array)
        yield pa.record_batch(arrays, schema=schema)


def _write_batches(new: NewFile, rows: Rows, file: OutputFile) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(new, schema_of(rows)) as writer:
        for batch in batches(rows, file):
            writer.write_batch(batch)


_ROWS = RowFormat("data-{:05d}-of-{:05d}.arrow".format, OFFSET_BYTES, _write_batches, masked=True)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    # "Sequence", not the newer "List": old and new versions of datasets read it.
    features: dict[str, Any] = {}
    for name, (dtype, lists) in Rows(export, split, masked=True).types.items():
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
    write_json(folder / _STATE, state)
    if export.has_splits:
        write_json(export.folder / _DICT, {"splits": list(export.store.splits)})
