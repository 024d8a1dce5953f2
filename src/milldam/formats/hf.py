"""HF datasets: rows of `input_ids` as `datasets.Dataset.save_to_disk` writes them; `datasets.load_from_disk` maps them.

    data-00000-of-00012.arrow ...   Arrow IPC stream, record batches of about a million tokens
    state.json, dataset_info.json   written last: they make the folder a data set

A store of several splits becomes a DatasetDict: a folder for each and `dataset_dict.json`. The column is a plain list
of int32, as tokenizing with HF gives it, also where all rows are of one length. Read: such folders, and any Arrow file;
they are mapped, batch after batch. Needs pyarrow, not datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.errors import InputError
from milldam.files import FileSink, NewFile, hash_bytes, write_json
from milldam.formats import rows
from milldam.formats.columns import OFFSET_BYTES, batches, explain_arrow_errors, schema, tokens_of
from milldam.formats.flat import has_splits
from milldam.formats.reading import ReadRules, SourceFile, choose_column, inside, read_index
from milldam.formats.rows import FileRows, Part, RowFormat, write_rows
from milldam.stores.tokens.writer import Tokens

if TYPE_CHECKING:
    from milldam.formats.exporting import Export

SUFFIXES = (".arrow", ".feather")
SHAPE, ALL_SPLITS, OPTIONS, DTYPES = "folder", True, rows.OPTIONS, rows.DTYPES
_DICT, _STATE = "dataset_dict.json", "state.json"


# ---- read ----


def indexed(folder: Path, split: str | None) -> list[SourceFile] | None:
    """The files of a data set or a DatasetDict; what an index names must be there. None: it is neither."""
    whole = read_index(folder / _DICT)
    if whole is None:
        return _saved(folder, split)
    found: list[SourceFile] = []
    for name in whole.get("splits", []):
        inner = inside(folder, name)
        files = _saved(inner, name)
        if files is None:
            raise InputError(f"{inner}: no data set in it, though {_DICT} names it. Is the folder whole?")
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
    import pyarrow as pa

    with explain_arrow_errors(source.path), pa.memory_map(str(source.path)) as file:
        is_file = bytes(file.read(6)) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        found = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else reader
        name = choose_column(reader.schema.names, rules.column, source.path)
        for batch in found:
            yield from tokens_of(batch.column(batch.schema.get_field_index(name)), source.path)


# ---- write ----


def write(export: Export) -> dict[str, Any]:
    counts = write_rows(export, RowFormat(_file_name, _write_file, _write_index, row_bytes=OFFSET_BYTES))
    if has_splits(export.store):
        write_json(export.folder / _DICT, {"splits": list(export.store.splits)})
    return counts


def _file_name(number: int, files: int) -> str:
    return f"data-{number:05d}-of-{files:05d}.arrow"


def _write_file(new: NewFile, rows: FileRows) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(FileSink(new), schema(rows.part.dtype)) as writer:
        for batch in batches(rows):
            writer.write_batch(batch)


def _write_index(part: Part, made: list[dict[str, Any]]) -> None:
    # "Sequence", not the newer "List": old and new versions of datasets read it.
    value = {"dtype": part.dtype.name, "_type": "Value"}
    features = {"input_ids": {"feature": value, "_type": "Sequence"}}
    split = {"name": part.name, "num_bytes": sum(one["bytes"] for one in made), "num_examples": part.rows}
    info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    write_json(part.folder / "dataset_info.json", info | {"splits": {part.name: split}})
    state: dict[str, Any] = {
        "_data_files": [{"filename": one["file"]} for one in made],
        # Names the content, as everything that datasets derives from it is cached under this name.
        "_fingerprint": hash_bytes("".join([part.name, *(one["xxh3"] for one in made)]).encode())[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": part.name,
    }
    write_json(part.folder / _STATE, state)
