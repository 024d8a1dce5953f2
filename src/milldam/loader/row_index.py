"""The rows of best-fit packing, in a file that is made once by streaming and then mapped.

The file has the layout of a shard's index (milldam.stores.tokens.format): its documents are the rows, its sequences
their pieces, and an offset is where a piece begins in the stream of tokens. Its name says by two hashes which place of
the data it is for and what its rows follow from; a file that is damaged is made anew. It lies in the data's own cache
folder, or, where that can't be written, in the user's.

Making it holds what `best_fit_rows` holds, whatever the number of documents: some megabytes. About 1.5 us a document,
and 12 bytes a piece and 8 a row on disk, twice that while it is made.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from milldam.errors import ResourceError, StoreError
from milldam.files import NewFile, explain_os_errors, hash_bytes
from milldam.loader.documents import document_extents
from milldam.loader.stream import TokenStream
from milldam.packing.best_fit import Cutter, Pieces, best_fit_rows
from milldam.packing.rows import IndexColumns
from milldam.stores.tokens.format import Index

if TYPE_CHECKING:
    from milldam.loader.packed import RowRules

ALGORITHM = 1
"""Another number for every change of `best_fit_rows` that gives other rows."""
_OFFSETS_IN_TOKENS = 1
"""The code of a dtype of one byte: offsets count tokens, whatever their size."""
log = logging.getLogger("milldam")


def open_row_index(stream: TokenStream, rules: RowRules) -> Index:
    """The rows of a stream, from a file that was made before or is made now."""
    home = os.environ.get("XDG_CACHE_HOME")
    users = (Path(home) if home else Path.home() / ".cache") / "milldam" / "rows"
    folders = [users] if stream.cache is None else [stream.cache, users]
    for folder in folders:
        if (index := _map(_path_in(folder, stream, rules))) is not None:
            return index
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        return _make(_path_in(folder, stream, rules), stream, rules)
    raise ResourceError(
        f"{stream.name}: its rows have to be kept in a file, and neither of these can be written: "
        f"{', '.join(str(folder) for folder in folders)}. Set XDG_CACHE_HOME to a folder that can be."
    )


def _path_in(folder: Path, stream: TokenStream, rules: RowRules) -> Path:
    """The file for these rows; names for one place of the data begin alike, so that outdated files are recognised."""

    def key(*parts: object) -> str:
        return hash_bytes(json.dumps(parts).encode())[:12]

    place = os.path.relpath(stream.files[0].path.parent, folder)
    # A cache of stores at addresses has them all in one folder.
    name = Path(stream.name).name if stream.origin is None else stream.fingerprint
    data = key(place, name, stream.first, stream.stop, rules.facts)
    return folder / f"best_fit-{rules.seq_len}-{data}-{key(rules.facts, stream.identity)}.rows"


def _map(path: Path) -> Index | None:
    """The index in a file, when there is one and it is whole."""
    try:
        index = Index.map(path)
    except StoreError:
        return None
    ends = (int(index.documents[0]), int(index.documents[-1]))
    return index if len(index.documents) > 1 and ends == (0, len(index.lengths)) else None


def _make(path: Path, stream: TokenStream, rules: RowRules) -> Index:
    """Processes that start together all do it, to the same end."""
    begun = perf_counter()
    log.info("%s: making the best-fit rows of %d tokens", stream.name, rules.seq_len)
    with explain_os_errors(path), closing(IndexColumns(path.parent)) as columns, NewFile(path) as new:
        for rows in best_fit_rows(_pieces(stream, rules), rules.seq_len, buffer=rules.buffer):
            columns.add(rows.counts, rows.pieces.starts + stream.first, rows.pieces.lengths)
        columns.write(new, _OFFSETS_IN_TOKENS)
        new.commit()
    for outdated in path.parent.glob(f"{path.stem.rpartition('-')[0]}-*{path.suffix}"):
        if outdated != path:
            outdated.unlink(missing_ok=True)
    index = _map(path)
    if index is None:
        raise ResourceError(f"{path}: was written, but not so that it can be read. Is the disk failing?")
    count, took = len(index.documents) - 1, perf_counter() - begun
    fill = 100 * int(index.lengths.sum(dtype=np.int64)) / (count * rules.seq_len)
    log.info("%s: %d rows, %.2f %% full, in %.1f s: %s", stream.name, count, fill, took, path)
    return index


def _pieces(stream: TokenStream, rules: RowRules) -> Iterator[Pieces]:
    """Documents, or the pieces of those that are longer than a row; positions count from the stream's first token."""
    cutter = Cutter(rules.seq_len, wrapped=False)
    for begins, ends in document_extents(stream, rules.side):
        if rules.too_long == "split":
            yield from cutter.cut(begins, ends)
        else:
            pieces = Pieces(begins, np.minimum(ends - begins, rules.seq_len))
            yield pieces if rules.too_long == "cut" else pieces[ends - begins <= rules.seq_len]
