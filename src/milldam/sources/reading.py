"""A unit -> batches of documents, by the format of its files. Can be iterated again and again with the same result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from milldam.sources import lines
from milldam.sources.batch import Batch, OnReject, TextRules
from milldam.sources.json_items import HEAD_BYTES, is_json_lines
from milldam.sources.jsonl import read_jsonl
from milldam.sources.listing import InputFile
from milldam.sources.opening import STDIN, open_bytes
from milldam.sources.table_text import read_csv, slice_csv
from milldam.sources.tables import read_arrow, read_parquet, slice_arrow, slice_parquet
from milldam.sources.units import Slice, Unit, by_bytes, whole


def slice_file(file: InputFile, shard_size: int, rules: TextRules) -> Iterator[Slice]:
    """Cut one file as its format allows."""
    file = seen_format(file, shard_size)
    if file.format == "parquet":
        yield from slice_parquet(file, shard_size, rules.text_column)
    elif file.format == "arrow":
        yield from slice_arrow(file, shard_size)
    elif file.format in ("csv", "tsv"):
        yield from slice_csv(file, shard_size)
    elif can_cut(file, rules):
        yield from by_bytes(file, shard_size)
    else:
        yield whole(file)


def seen_format(file: InputFile, shard_size: int) -> InputFile:
    """A .json file that is large enough to be cut, and holds JSON lines, as such; all others as they are."""
    if file.format != "json" or file.compression is not None or file.path == STDIN or file.size <= shard_size:
        return file
    with open_bytes(file.path) as opened:
        return replace(file, format="jsonl") if is_json_lines(opened.read(HEAD_BYTES)) else file


def can_cut(file: InputFile, rules: TextRules) -> bool:
    """Whether a file can be read in parts."""
    if file.compression is not None or file.path == STDIN or file.format == "json":
        return False
    if file.format != "txt":
        return True
    boundary = lines.boundary_of(rules)
    return boundary is not None and boundary.splittable


def read_unit(unit: Unit, rules: TextRules, on_reject: OnReject, spool: str | None = None) -> Iterator[Batch]:
    """All documents of a unit. `spool`: a folder for what must go through the disk."""
    if unit.slices[0].format == "txt" and lines.boundary_of(rules) is None:
        yield from lines.read_whole_files(unit.slices, rules, on_reject)
        return
    for slice in unit.slices:
        yield from _read_slice(slice, rules, on_reject, spool)


def _read_slice(slice: Slice, rules: TextRules, on_reject: OnReject, spool: str | None) -> Iterator[Batch]:
    if slice.format == "txt":
        yield from lines.read_separated(slice, rules, on_reject)
    elif slice.format in ("jsonl", "json"):
        yield from read_jsonl(slice, rules, on_reject)
    elif slice.format == "parquet":
        yield from read_parquet(slice, rules, on_reject, spool)
    elif slice.format == "arrow":
        yield from read_arrow(slice, rules, on_reject, spool)
    else:
        yield from read_csv(slice, rules, on_reject)
