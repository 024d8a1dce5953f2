"""Rows of `input_ids` as `datasets.Dataset.save_to_disk` writes them; `datasets.load_from_disk` maps them.

    data-00000-of-00012.arrow ...   Arrow IPC stream, record batches of about a million tokens
    state.json, dataset_info.json   written last: they make the folder a data set

A store of several splits becomes a DatasetDict: a folder for each and `dataset_dict.json`. The column is a plain list
of int32, as tokenizing with HF gives it, also where all rows are of one length. Needs pyarrow, not datasets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.exporters.arrow_rows import DTYPES, ROW_BYTES, batches, schema
from milldam.exporters.job import Export, Options
from milldam.exporters.rows import FileRows, Part, check_rows, write_rows
from milldam.files import FileSink, NewFile, hash_bytes, write_json

if TYPE_CHECKING:
    from milldam.loader.stores import Store

NAME, KIND, ALL_SPLITS = "hf", "folder", True
OPTIONS = ("seq_len", "dtype", "shard_size")


def check(store: Store, out: Path, options: Options) -> None:
    check_rows(store, options, DTYPES, NAME)


def write(export: Export) -> dict[str, Any]:
    counts = write_rows(export, _SavedDataset())
    if export.store.split_name is None and len(export.store.splits) > 1:
        write_json(export.folder / "dataset_dict.json", {"splits": list(export.store.splits)})
    return counts


class _SavedDataset:
    row_bytes, file_bytes = ROW_BYTES, None

    def file_name(self, number: int, files: int) -> str:
        return f"data-{number:05d}-of-{files:05d}.arrow"

    def write_file(self, new: NewFile, rows: FileRows) -> None:
        import pyarrow as pa

        with pa.ipc.new_stream(FileSink(new), schema(rows.part.dtype)) as writer:
            for batch in batches(rows):
                writer.write_batch(batch)

    def write_index(self, part: Part, made: list[dict[str, Any]]) -> None:
        # "Sequence", not the newer "List": old and new versions of datasets read it.
        value = {"dtype": part.dtype.name, "_type": "Value"}
        features = {"input_ids": {"feature": value, "_type": "Sequence"}}
        split = {"name": part.name, "num_bytes": sum(one["bytes"] for one in made), "num_examples": part.rows}
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        write_json(part.folder / "dataset_info.json", info | {"splits": {part.name: split}})
        state: dict[str, Any] = {
            "_data_files": [{"filename": one["file"]} for one in made],
            # Names the content, as everything that datasets derives from it is cached under this name.
            "_fingerprint": _fingerprint(part, made),
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": part.name,
        }
        write_json(part.folder / "state.json", state)


def _fingerprint(part: Part, made: list[dict[str, Any]]) -> str:
    return hash_bytes("".join([part.name, *(one["xxh3"] for one in made)]).encode())[:16]
