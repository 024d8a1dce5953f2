"""What parts of units set aside: rejected records, and dropped documents when they are wanted; a file of each kind for
a part, in the run folder, gathered at the end in plan order.

A slice counts lines from where it begins; the lines before that are counted here, and only when there is a reject to
place. Streams.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from milldam.errors import StoreError
from milldam.files import NewFile, seal_line, unseal_line
from milldam.input_files import is_address
from milldam.sources.batch import Reject
from milldam.sources.compression import open_bytes, read_blocks
from milldam.sources.records import count_line_ends

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

NAME, REJECTS, DROPPED = "rejects.jsonl", "rejects-", "dropped-"
"""Of all parts; and how the names of files of parts begin."""
_FRAME_BYTES = 1 << 20
_FILES_SHOWN = 3


@dataclass(slots=True)
class Damage:
    """Files that could be read only in part, or whose checksum is wrong."""

    files: int = 0
    first: list[str] = field(default_factory=list)
    _last: str = ""

    def add(self, reject: dict[str, Any]) -> None:
        if reject["file"] == self._last:
            return  # another slice of the same file
        self.files, self._last = self.files + 1, reject["file"]
        if len(self.first) < _FILES_SHOWN:
            self.first.append(f"{reject['file']}: {reject['reason']}: {reject['detail']}")

    def __str__(self) -> str:
        """A few lines for a message."""
        count = "1 input file is damaged" if self.files == 1 else f"{self.files:,} input files are damaged"
        more = ["... (all are among the rejected records)"] if self.files > len(self.first) else []
        return "\n  ".join([f"{count}:", *self.first, *more])


def gather_rejects(out: Path, parts: Iterable[Path], paths: Callable[[], Iterable[str]]) -> Damage:
    """Write `rejects.jsonl` from the files of the parts; remove it when there is nothing to write."""
    damage = Damage()
    with NewFile(out / NAME) as new:
        for line in reject_lines(parts, paths, damage):
            new.write(line)
        if new.size:
            new.commit()
        else:
            new.path.unlink(missing_ok=True)
    return damage


def reject_lines(parts: Iterable[Path], paths: Callable[[], Iterable[str]], damage: Damage) -> Iterator[bytes]:
    """The lines of all parts, which come in plan order; adds to `damage`. `paths`: of the input as it lies now."""
    counted, position, ends = "", 0, 0
    """The file whose line ends are counted, how far, and how many there are: each file is read once."""
    for part in parts:
        with part.open("rb") as lines:
            for reject in map(unseal_line, lines):
                if reject is None:
                    advice = "Remove it and run the same command again: its unit is then redone."
                    raise StoreError(f"{part}: damaged. {advice}")
                file = reject["file"] = _current_path(paths, reject["file"])
                origin = reject.pop("origin", 0)
                if origin and "line" in reject:
                    if file != counted or origin < position:
                        counted, position, ends = file, 0, 0
                    ends += _line_ends(file, position, origin)
                    position, reject["line"] = origin, reject["line"] + ends
                if "damaged" in reject:  # of damaged files alone
                    damage.add(reject)
                yield (json.dumps(reject, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def _line_ends(path: str, start: int, stop: int) -> int:
    """Line ends between two bytes of a file."""
    with open_bytes(path) as source:
        source.seek(start)
        return sum(map(count_line_ends, read_blocks(source, None, stop - start)))


def first_reject(out: Path, name: str = NAME) -> str:
    """A line to append to a message: the first record that was set aside, and where all of them are; else empty."""
    path = out / name
    if not path.exists():
        return ""
    with path.open("rb") as lines:
        reject = json.loads(lines.readline())
    return f"\nThe first is of {reject['file']}: {reject['detail']}. All rejected records are in {path}."


def _current_path(paths: Callable[[], Iterable[str]], file: str) -> str:
    """The path of a file now: input may move between two runs of a job."""
    if is_address(file) or Path(file).exists():
        return file
    return next((path for path in paths() if Path(path).name == Path(file).name), file)


# ---- the files of a part ----


class RejectFile:
    """Records that are set aside. Use it as a context manager: the file appears when it is committed, if anything was
    written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: NewFile | None = None
        self.counts: Counter[str] = Counter()

    def add(self, reject: Reject) -> None:
        self.counts[reject.reason] += 1
        self._write(seal_line(reject.as_json()))

    def _write(self, data: bytes) -> None:
        self._file = self._file or NewFile(self._path)
        self._file.write(data)

    def commit(self) -> dict[str, dict[str, Any]]:
        """Make it durable; size and hash by its name, where there is a file."""
        if self._file is not None:
            return {self._path.name: self._file.commit()}
        self._path.unlink(missing_ok=True)
        return {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.discard()


class DroppedFile(RejectFile):
    """Dropped documents as zstd frames of about a MiB of JSON lines, which can be put end to end."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held = bytearray()

    def add_document(self, document: dict[str, Any]) -> None:
        self._held += (json.dumps(document, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if len(self._held) >= _FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._write(zstd.compress(bytes(self._held)))
        self._held.clear()

    def commit(self) -> dict[str, dict[str, Any]]:
        if self._held:
            self._flush()
        return super().commit()
