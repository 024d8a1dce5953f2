"""A listing of input files that are not here (a cluster's, or a thought experiment): what `milldam plan` can plan on.

JSON lines (`{"path": ..., "size": ...}`) or CSV with a header (`path,size`); `documents`, the number in a file, where
it is known. Format and compression follow from a path's ending. Streams: a listing of ten million files is never held.
"""

from __future__ import annotations

import csv
import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from milldam.errors import ConfigError, InputError
from milldam.input_files import COMPRESSIONS, kind_of
from milldam.memory import parse_size
from milldam.sources.batch import TextRules
from milldam.sources.listing import InputFile
from milldam.sources.reading import can_cut
from milldam.sources.units import Slice, by_bytes, whole

_FIELDS = ("path", "size", "documents")


@dataclass(frozen=True, slots=True)
class Listing:
    """What stands for the input: a file that lists it, and real files that are like it."""

    path: Path
    sample: tuple[str, ...] = ()
    """Files or folders to learn from how many documents and tokens a byte holds; empty: typical text."""

    def files(self, input_format: str | None = None) -> Iterator[tuple[InputFile, int | None]]:
        """Every file with its number of documents, where that is given."""
        try:
            with self.path.open(encoding="utf-8", errors="surrogateescape", newline="") as lines:
                for number, entry in _entries(self.path, lines):
                    try:
                        yield _file(entry, input_format)
                    except (KeyError, ValueError, AttributeError, TypeError, ConfigError) as error:
                        _refuse(f"{self.path}:{number}", entry, error)
        except OSError as error:
            raise InputError(f"{self.path}: can't be read ({error.strerror}).") from None


def _entries(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, fields)"""
    if path.suffix not in (".jsonl", ".ndjson", ".csv", ".tsv"):
        raise ConfigError(f"{path}: a listing is JSON lines (.jsonl) or CSV (.csv, .tsv) with path and size.")
    if path.suffix in (".jsonl", ".ndjson"):
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise InputError(f"{path}:{number}: no JSON ({error}).") from None
            yield number, entry if isinstance(entry, dict) else {}
        return
    rows = csv.reader(lines, delimiter="\t" if path.suffix == ".tsv" else ",")
    header = next(rows, [])
    unknown = [name for name in _FIELDS[:2] if name not in header]
    if unknown:
        raise InputError(f'{path}: its first line names no column "{unknown[0]}"; it needs path,size.')
    for row in rows:
        if row:
            yield rows.line_num, dict(zip(header, row, strict=False))


def _file(entry: dict[str, Any], input_format: str | None) -> tuple[InputFile, int | None]:
    path, size, documents = str(entry["path"]), entry["size"], entry.get("documents")
    size = int(size) if isinstance(size, int) or size.isdecimal() else parse_size(size)
    kind = _kind(_endings(path))
    if input_format is None and kind is None:
        raise _UnknownFormatError(path)
    format = input_format or (kind[0] if kind else "")
    compression = kind[1] if kind else COMPRESSIONS.get(PurePosixPath(path).suffix.lower())
    return InputFile(path, format, compression, size, ""), int(documents) if documents not in (None, "") else None


class _UnknownFormatError(ValueError):
    """The ending of a path says nothing."""


def _refuse(where: str, entry: dict[str, Any], error: Exception) -> NoReturn:
    if isinstance(error, _UnknownFormatError):
        raise InputError(f"{where}: {error}: its ending says no known format. Set input_format of the data set.")
    raise InputError(f"{where}: needs a path and a size in bytes; found {json.dumps(entry)[:200]}") from None


def _endings(path: str) -> str:
    """The last two endings of a name: what tells its kind. Not by pathlib, which takes longer than all the rest.

    >>> _endings("s3://web/2024.1/part-00.jsonl.zst")
    'jsonl.zst'
    """
    return ".".join(path[path.rfind("/") + 1 :].rsplit(".", 2)[1:])


@functools.lru_cache(maxsize=1024)
def _kind(endings: str) -> tuple[str, str | None] | None:
    return kind_of(f"x.{endings}")


def belongs(path: str, data_set: Sequence[str]) -> bool:
    """Whether a listed file is one of a data set's: it is named, below a folder that is, or fits a glob.

    >>> belongs("s3://web/a/0.jsonl", ["s3://web"]), belongs("s3://web2/0.jsonl", ["s3://web/"])
    (True, False)
    """
    return any(
        path == given or path.startswith(given.rstrip("/") + "/") or fnmatchcase(path, given) for given in data_set
    )


def slice_listed(file: InputFile, shard_size: int, rules: TextRules) -> Iterator[Slice]:
    """Cut a file that can't be opened, as if it could be cut anywhere that its format allows."""
    if can_cut(file, rules):
        yield from by_bytes(file, shard_size)
    else:
        yield whole(file)
