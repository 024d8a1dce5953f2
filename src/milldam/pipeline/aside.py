"""What a part of a unit sets aside: rejected records, and dropped documents when they are wanted.

A file of each kind per part, which appears when the part is committed, in the run folder; gathered at the end.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from milldam.files import NewFile
from milldam.sealed import seal_line
from milldam.sources.batch import Reject

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

REJECTS, DROPPED = "rejects-", "dropped-"
"""How the names of files of parts begin."""
_FRAME_BYTES = 1 << 20


class RejectFile:
    """Records that are set aside: a file that appears when it is committed, if there are any."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: NewFile | None = None
        self.counts: Counter[str] = Counter()

    def add(self, reject: Reject) -> None:
        if self._file is None:
            self._file = NewFile(self._path)
        if reject.records:
            self.counts[reject.reason] += reject.records
        self._file.write(seal_line(reject.as_json()))

    def commit(self) -> dict[str, dict[str, Any]]:
        """Make it durable; size and hash by its name, where there is a file."""
        if self._file is not None:
            return {self._path.name: self._file.commit()}
        self._path.unlink(missing_ok=True)
        return {}

    def discard(self) -> None:
        """Leave nothing, unless it was committed."""
        if self._file is not None:
            self._file.__exit__(None, None, None)

    def __enter__(self) -> RejectFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class DroppedFile:
    """Dropped documents as zstd frames of about a MiB of JSON lines, which can be put end to end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: NewFile | None = None
        self._held = bytearray()

    def add(self, document: dict[str, Any]) -> None:
        self._held += (json.dumps(document, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        if len(self._held) >= _FRAME_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._file is None:
            self._file = NewFile(self._path)
        self._file.write(zstd.compress(bytes(self._held)))
        self._held.clear()

    def commit(self) -> dict[str, dict[str, Any]]:
        """Make it durable; size and hash by its name, where there is a file."""
        if self._held:
            self._flush()
        return {} if self._file is None else {self._path.name: self._file.commit()}

    def discard(self) -> None:
        if self._file is not None:
            self._file.__exit__(None, None, None)
