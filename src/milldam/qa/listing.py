"""What the user names -> files with examples: their format found, in a fixed order. Reads the head of each at most."""

from __future__ import annotations

import glob
import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from milldam.errors import ConfigError, InputError
from milldam.input_files import COMPRESSIONS, files_below, is_address, version_of
from milldam.sources.compression import DamagedError, compression_of, read_blocks
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.listing import InputFile, list_inputs
from milldam.sources.opening import STDIN, open_bytes
from milldam.sources.splits import Place, canonical, group_by_split, parse_split

HEAD_BYTES = 1 << 18
FORMATS = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
ARRAY = "json array"
"""A format that no ending tells: .json, as JSON lines and SQuAD's JSON may be."""
_TABLES = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
_SAVED = ("dataset_dict.json", "state.json")
_KNOWN = "Known are SQuAD's JSON, JSON lines, parquet and Arrow, each also as .gz, .zst, .bz2 or .xz."


def list_files(inputs: Sequence[str], split: str = "train") -> Iterator[InputFile]:
    """The files behind each input, in the order given.

    A file is taken as it is named. Of a folder, of what `save_to_disk` wrote and of a data set on the Hub, the files of
    the split are taken.
    """
    if parse_split(split).rows is not None:
        raise ConfigError(f'split "{split}": slices are not known here. Use max_examples for the first ones.')
    for given in inputs:
        found = False
        for path in _paths(str(given), split):
            found = True
            yield _described(path)
        if not found:
            raise InputError(f"{given}: no input files in it. {_KNOWN}")


def _paths(given: str, split: str) -> Iterator[str]:
    if given == STDIN:
        raise InputError("Standard input can't be read for question answering: name a file.")
    if os.path.isfile(given):
        yield given
    elif os.path.isdir(given) and not any((Path(given) / name).exists() for name in _SAVED):
        yield from _of_split(given, split)
    elif not is_address(given) and glob.has_magic(given):
        yield from (path for path in sorted(glob.iglob(given, recursive=True)) if os.path.isfile(path))
    elif is_address(given):
        yield from (file.path for file in list_inputs((given,), "json"))
    else:
        yield from resolve_data_set(given, split, None).inputs


def _of_split(folder: str, split: str) -> Iterator[str]:
    """The files of a folder that belong to the split, by HF's conventions for their names."""
    places = []
    for path in files_below(Path(folder), any_format=True):
        if _ending(path)[0] is not None:
            inner = PurePosixPath(os.path.relpath(path, folder))
            places.append(Place(path, inner.parts[:-1], inner.name, inner.parts[:-1] == ("data",)))
    groups = group_by_split(places)
    names = {canonical(name): name for name in groups}
    for wanted in parse_split(split).names:
        if places and canonical(wanted) not in names:
            there = ", ".join(f'"{name}"' for name in groups)
            raise InputError(f'{folder}: no split "{wanted}" in it; there are {there}. Set split, or name the files.')
        yield from groups[names[canonical(wanted)]] if places else ()


def _described(path: str) -> InputFile:
    if is_address(path):
        (listed,) = list_inputs((path,), "json")
    elif os.path.isfile(path) and os.access(path, os.R_OK):
        status = os.stat(path)
        listed = InputFile(path, "", None, status.st_size, version_of(status))
    else:
        raise InputError(f"{path}: not a readable file. Check that it is there, and its permissions.")
    format, compression = kind_of(path)
    return replace(listed, format=format, compression=compression)


def kind_of(path: str) -> tuple[str, str | None]:
    """(format, compression) by the name; by the content where the name does not say."""
    format, compression = _ending(path)
    if format in ("jsonl", "parquet", "arrow"):
        return format, compression
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    if compression is None:
        compression = compression_of(head)
    unpacked = _unpacked(head, compression)
    table = next((kind for magic, kind in _TABLES.items() if unpacked.startswith(magic)), None)
    return table or _json_kind(unpacked, path), compression


def _ending(path: str) -> tuple[str | None, str | None]:
    name = PurePosixPath(path.lower())
    compression = COMPRESSIONS.get(name.suffix)
    return FORMATS.get((name.with_suffix("") if compression else name).suffix), compression


def _unpacked(head: bytes, compression: str | None) -> bytes:
    found = b""
    try:
        for block in read_blocks(io.BytesIO(head), compression, HEAD_BYTES):
            found += block
            if len(found) >= HEAD_BYTES:
                break
    except DamagedError:
        pass  # only the head was given
    return found


def _json_kind(head: bytes, path: str) -> str:
    """JSON lines when the first line is a record by itself; else an array of records, or SQuAD's JSON."""
    text = head.decode("utf-8-sig", "replace").lstrip()
    if text[:1] not in ("{", "["):
        raise InputError(f"{path}: no examples of question answering in it. {_KNOWN}")
    if text.startswith("["):
        return ARRAY
    try:
        first = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return "json"
    return "jsonl" if isinstance(first, dict) and not isinstance(first.get("data"), list) else "json"
