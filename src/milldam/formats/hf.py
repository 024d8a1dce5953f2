"""HF datasets: rows of `input_ids` as `datasets.Dataset.save_to_disk` writes them; `datasets.load_from_disk` maps them.

    data-00000-of-00012.arrow ...   Arrow IPC stream, record batches of about a million tokens
    state.json, dataset_info.json   written last: they make the folder a dataset

A store of several splits becomes a DatasetDict: a folder for each and `dataset_dict.json`. The column is a plain list
of int32, as tokenizing with HF gives it, also where all rows are of one length. Of conversations also columns for what
is trained on. Read: such folders, and any Arrow file;
they are mapped, batch after batch. Needs pyarrow, not datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from milldam.errors import InputError
from milldam.files import FileSink, NewFile, hash_bytes, write_json
from milldam.formats import rows
from milldam.formats.columns import OFFSET_BYTES, batches, column_types, read_column, schema
from milldam.formats.finding import ReadRules, SourceFile, inside, read_index
from milldam.formats.rows import FileRows, RowFormat
from milldam.formats.writing import Export, has_splits, split_parts
from milldam.stores.tokens.writer import Tokens

SUFFIXES = (".arrow", ".feather")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, (*rows.OPTIONS, "side"), rows.DTYPES
_DICT, _STATE = "dataset_dict.json", "state.json"


# ---- read ----


def indexed(folder: Path, split: str | None) -> list[SourceFile] | None:
    """The files of a dataset or a DatasetDict; what an index names must be there. None: it is neither."""
    whole = read_index(folder / _DICT)
    if whole is None:
        return _saved(folder, split)
    found: list[SourceFile] = []
    for name in whole.get("splits", []):
        inner = inside(folder, name)
        files = _saved(inner, name)
        if files is None:
            raise InputError(f"{inner}: no dataset in it, though {_DICT} names it. Is the folder whole?")
        found += files
    return found


def _saved(folder: Path, split: str | None) -> list[SourceFile] | None:
    state = read_index(folder / _STATE)
    if state is None:
        return None
    if state.get("_indices_data_files"):
        raise InputError(f"{folder}: its rows are chosen by indices. Save it again with .flatten_indices().")
    return [SourceFile("hf", inside(folder, file["filename"]), split) for file in state.get("_data_files", [])]


def read(source: SourceFile, rules: ReadRules) -> Iterator[Tokens]:
    return read_column(source, rules, "arrow")


# ---- write ----


def _write_batches(new: NewFile, rows: FileRows) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(FileSink(new), schema(rows)) as writer:
        for batch in batches(rows):
            writer.write_batch(batch)


_ROWS = RowFormat(
    lambda number, files: f"data-{number:05d}-of-{files:05d}.arrow", OFFSET_BYTES, _write_batches, masked=True
)
files, write_file = _ROWS.files, _ROWS.write_file


def complete_folder(export: Export, split: str, folder: Path, made: list[dict[str, Any]]) -> None:
    # "Sequence", not the newer "List": old and new versions of datasets read it.
    features: dict[str, Any] = {}
    for name, (dtype, lists) in column_types(export, split_parts(export.store)[split]).items():
        value = {"dtype": dtype.name, "_type": "Value"}
        features[name] = {"feature": value, "_type": "Sequence"} if lists else value
    size, rows = (sum(one[what] for one in made) for what in ("bytes", "rows"))
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    told = {"name": split, "num_bytes": size, "num_examples": rows}
    write_json(folder / "dataset_info.json", info | {"splits": {split: told}})
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
    if has_splits(export.store):
        write_json(export.folder / _DICT, {"splits": list(export.store.splits)})
