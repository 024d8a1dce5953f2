"""The rejects of all parts -> `rejects.jsonl` in the output folder, in plan order, with the line in the whole file.

A slice counts lines from where it begins; the lines before that are counted here, and only when there is a reject
to place. Streams.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from milldam.errors import StoreError
from milldam.files import NewFile, names_matching
from milldam.input_files import is_address
from milldam.run import Run
from milldam.sealed import unseal_line
from milldam.sources.compression import read_blocks
from milldam.sources.opening import open_bytes
from milldam.sources.records import count_line_ends

NAME = "rejects.jsonl"
_BLOCK = 1 << 20


def gather_rejects(run: Run, parts: list[Path] | None = None) -> None:
    """Write the file; remove it when there is nothing to write. `parts`: theirs, where names do not tell the order."""
    path = run.out / NAME
    names = sorted(names_matching(run.folder, "rejects-*.jsonl")) if parts is None else []
    if not (names or parts):
        path.unlink(missing_ok=True)
        return
    lines = _LineCounter()
    with NewFile(path) as new:
        for reject in _read(parts or (run.folder / name for name in names)):
            reject["file"] = _current_path(run, reject["file"])
            origin = reject.pop("origin", 0)
            if origin and "line" in reject:
                reject["line"] += lines.before(reject["file"], origin)
            new.write((json.dumps(reject, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        new.commit()


def _read(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for part in parts:
        with part.open("rb") as lines:
            for line in lines:
                value = unseal_line(line)
                if value is None:
                    raise StoreError(
                        f"{part}: damaged. Remove it, and run the same command again: what it belongs to is made anew."
                    )
                yield value


def _current_path(run: Run, file: str) -> str:
    """Where a file lies now: input may move between two runs of a job."""
    if is_address(file) or Path(file).exists():
        return file
    paths = (listed["path"] for listed in run.inputs())
    return next((path for path in paths if Path(path).name == Path(file).name), file)


class _LineCounter:
    """Line ends before a byte of a file; asked in ascending order, it reads each file once."""

    def __init__(self) -> None:
        self._file, self._position, self._count = "", 0, 0

    def before(self, file: str, position: int) -> int:
        if file != self._file or position < self._position:
            self._file, self._position, self._count = file, 0, 0
        with open_bytes(file) as source:
            source.seek(self._position)
            for block in read_blocks(source, None, _BLOCK):
                block = block[: position - self._position]
                self._count += count_line_ends(block)
                self._position += len(block)
                if self._position >= position:
                    break
        return self._count
