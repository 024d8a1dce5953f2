"""Reads files as a run does, unit by unit, and hands back what came out: for the tests of the sources."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from milldam.sources import compression, plain_text, records
from milldam.sources.batch import Batch, Reject, TextRules
from milldam.sources.reading import read_unit, slice_file
from milldam.sources.units import Unit, list_inputs, plan_units

ONE_UNIT = 1 << 30
TEXT = TextRules(text_column="text")


@dataclass
class Result:
    """What reading gave."""

    texts: list[str] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    units: int = 0

    @property
    def reasons(self) -> Counter[str]:
        return Counter(reject.reason for reject in self.rejects)


def plan(paths: Path | str | list[Path], rules: TextRules, shard_size: int = ONE_UNIT) -> list[Unit]:
    """The units of some files."""
    given = paths if isinstance(paths, list) else [paths]
    files = list_inputs([str(path) for path in given])
    return list(plan_units(files, shard_size, lambda file, size: slice_file(file, size, rules)))


def read(paths: Path | str | list[Path], rules: TextRules = TEXT, shard_size: int = ONE_UNIT) -> Result:
    """All documents of some files, in order, with the pieces of each joined."""
    result = Result()
    for unit in plan(paths, rules, shard_size):
        result.units += 1
        result.texts += _join(read_unit(unit, rules, result.rejects.append), result)
    return result


def _join(batches: Iterator[Batch], result: Result) -> Iterator[str]:
    for batch in batches:
        result.batches.append(batch)
        if batch.pieces is None:
            yield from batch.texts.to_pylist()
        else:
            yield "".join(text for text, _ in batch.pieces)


@contextmanager
def small_blocks(block_bytes: int) -> Iterator[None]:
    """Blocks so small that tiny data straddles them."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (records, plain_text, compression):
            patch.setattr(module, "BLOCK_BYTES", block_bytes)
        yield


FORMATS = ("txt", "jsonl", "json", "csv", "tsv", "parquet", "arrow")


def write_texts(path: Path, texts: Sequence[str | bytes | None], *, rows: int = 1000) -> Path:
    """Texts as the format of the file's name has them, a line each where it is plain text: bytes that are no UTF-8 as
    they stand, None as null. `rows`: in a row group or record batch."""
    name = path.name.removesuffix(".gz")
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    escaped = [None if one is None else one.decode("utf-8", "surrogateescape") for one in data]
    out = io.BytesIO()
    if name.endswith((".parquet", ".arrow")):
        column = pa.array(data, pa.binary())
        strings = pa.StringArray.from_buffers(len(column), *column.buffers()[1:3], column.buffers()[0])
        table = pa.table({"id": range(len(data)), "text": strings})
        if name.endswith(".parquet"):
            pq.write_table(table, out, row_group_size=rows)
        else:
            with pa.ipc.new_stream(out, table.schema) as stream:
                stream.write_table(table, max_chunksize=rows)
    elif name.endswith((".csv", ".tsv")):
        file = io.StringIO(newline="")
        writer = csv.writer(file, delimiter="," if name.endswith(".csv") else "\t")
        writer.writerows([("id", "text"), *enumerate(escaped)])
        out.write(file.getvalue().encode("utf-8", "surrogateescape"))
    else:
        lines = escaped
        if not name.endswith(".txt"):
            lines = [json.dumps({"id": k, "text": text}, ensure_ascii=False) for k, text in enumerate(escaped)]
        text = f"[{', '.join(map(str, lines))}]" if name.endswith(".json") else "".join(f"{line}\n" for line in lines)
        out.write(text.encode("utf-8", "surrogateescape"))
    path.write_bytes(gzip.compress(out.getvalue()) if path.suffix == ".gz" else out.getvalue())
    return path


def place_of(reject: Reject) -> int:
    """The number of the line or row that a user is told."""
    told = reject.as_json()
    return int(told.get("row") or told["line"])
