"""Rows and texts that a program holds or makes -> a file of JSON lines beside the store, from which they are tokenized.

pandas and polars frames, Arrow tables, HF datasets, generators, generator functions, lists of dicts. They are gone
through once, a thousand rows at a time in memory; the file takes the disk that they take as JSON, and is removed in the
end. It is named by its content and has no time of its own: equal rows are equal input, and a killed run is resumed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from milldam.errors import ConfigError, InputError
from milldam.files import explain_os_errors
from milldam.mapping.calling import as_table
from milldam.mapping.plan import RowUnit
from milldam.mapping.settings import MapSettings
from milldam.mapping.sources import DataSetPlan, iterable_rows

_ROWS_AT_ONCE = 1000
_KNOWN = (
    "Known are paths, a pandas or polars DataFrame, an Arrow table, a datasets.Dataset or IterableDataset, a list of "
    "dicts, and an iterator or a generator function of texts or dicts."
)


@contextlib.contextmanager
def as_file(rows: Any, out: Path) -> Iterator[str]:
    """The path of a file with these rows, while the block runs."""
    folder = out.with_name(f"{out.name}.input")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    try:
        with explain_os_errors(folder):
            folder.mkdir(parents=True)
            yield str(_write(rows, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(rows: Any, folder: Path) -> Path:
    content, path = xxhash.xxh3_128(), folder / "rows.jsonl"
    with path.open("wb") as file:
        for number, row in enumerate(_rows(rows, folder)):
            if isinstance(row, str):
                row = {"text": row}
            if not isinstance(row, Mapping):
                raise InputError(f"row {number} is of type {type(row).__name__}. Give texts, or rows as dicts.")
            line = _json(row).encode("utf-8", "surrogatepass") + b"\n"
            content.update(line)
            file.write(line)
    named = path.rename(folder / f"rows-{content.hexdigest()}.jsonl")
    os.utime(named, (0, 0))
    return named


def _rows(source: Any, folder: Path) -> Iterator[Any]:
    """Texts or dicts, in order. `folder`: for the row numbers of a dataset."""
    if type(source).__module__.split(".")[0] == "datasets":
        yield from _of_dataset(source, folder)
        return
    if isinstance(source, pa.Array | pa.ChunkedArray):
        source = pa.table({"text": source})
    table = as_table(source)
    if table is not None:
        yield from _of_batches(table.to_batches() if isinstance(table, pa.Table) else [table])
        return
    made = source() if callable(source) and not isinstance(source, type) else source
    if isinstance(made, Mapping | str | bytes) or not isinstance(made, Iterable):
        raise ConfigError(f"{type(made).__name__}: no input. {_KNOWN}")
    yield from made


def _of_dataset(source: Any, folder: Path) -> Iterator[dict[str, Any]]:
    from datasets import Dataset, IterableDataset

    if isinstance(source, dict):
        raise ConfigError(f'{type(source).__name__}: which split? Give one: dataset["{next(iter(source), "train")}"].')
    if isinstance(source, IterableDataset):
        yield from iterable_rows(source)
    elif isinstance(source, Dataset):
        reader = DataSetPlan(source, MapSettings(source=source, function=_json), folder).reader
        yield from _of_batches(reader.read(RowUnit(0, "", 0, {"range": [0, len(source)]}), lambda reject: None))
    else:
        raise ConfigError(f"{type(source).__name__} of datasets: no input. {_KNOWN}")


def _of_batches(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


def _json(row: Mapping[str, Any]) -> str:
    """A row as JSON; what JSON has no value for as its words, and no number as null."""
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        return json.dumps(_without_nan(dict(row)), ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
