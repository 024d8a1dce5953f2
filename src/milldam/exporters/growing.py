"""One large file that grows over several runs.

After every CHECKPOINT_BYTES the file is made durable and the ledger told how far it is. A later run cuts the file off
there and goes on, so at most that much is written twice, once it has seen by its hash that what is there is what was
written. Holds no memory of its own.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import xxhash

from milldam.exporters.job import Export
from milldam.exporters.reading import as_dtype, token_blocks
from milldam.files import explain_os_errors, sync_folder
from milldam.loader.stores import Store

CHECKPOINT_BYTES = 256_000_000
_READ_BYTES = 1 << 20
_WRITE_BYTES = 1 << 16
"""At a time: for aligned writes of 2 MB the kernel (6.18, ext4) looks for pages as large, which takes it twice to four
times the CPU time of small writes."""


class GrowingFile:
    """A file in an export's folder; `size` says how much of it is there. Use it as a context manager."""

    def __init__(self, export: Export, name: str) -> None:
        self.path = export.folder / name
        self._ledger = export.ledger
        recorded = [record for record in export.ledger.records() if record.get("file") == name]
        self._hash = xxhash.xxh3_128()
        self.size = self._durable = self._usable(recorded[-1]) if recorded else 0
        with explain_os_errors(self.path):
            # Not "append": that would write behind what is cut off here on some file systems.
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
            sync_folder(self.path.parent)

    def _usable(self, recorded: dict[str, Any]) -> int:
        """What is recorded, unless the file is gone, shorter, or not as it was written: then it begins anew."""
        found, left = xxhash.xxh3_128(), int(recorded["bytes"])
        try:
            with self.path.open("rb", buffering=0) as file:
                while left and (block := file.read(min(left, _READ_BYTES))):
                    found.update(block)
                    left -= len(block)
        except FileNotFoundError:
            return 0
        if left or found.hexdigest() != recorded["xxh3"]:
            return 0
        self._hash = found
        return int(recorded["bytes"])

    def write(self, data: bytes | memoryview) -> None:
        """Add whole tokens, or the header: a later run may go on behind them."""
        left = memoryview(data).cast("B")
        self.size += len(left)
        self._hash.update(left)
        with explain_os_errors(self.path):
            while left:
                left = left[os.write(self._file, left[:_WRITE_BYTES]) :]
        if self.size - self._durable >= CHECKPOINT_BYTES:
            self.checkpoint()

    def checkpoint(self) -> None:
        """Make all of it durable, and say so in the ledger."""
        if self.size == self._durable:
            return
        with explain_os_errors(self.path):
            os.fsync(self._file)
        self._ledger.add({"file": self.path.name, "bytes": self.size, "xxh3": self._hash.hexdigest()})
        self._durable = self.size

    def __enter__(self) -> GrowingFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def write_tokens(export: Export, store: Store, name: str, dtype: np.dtype[Any], header: bytes = b"") -> int:
    """All tokens of the store end to end behind a header, or what is left of them to write; the bytes of the file."""
    with GrowingFile(export, name) as file:
        if file.size == 0:
            file.write(header)
        first = (file.size - len(header)) // dtype.itemsize
        for block in as_dtype(token_blocks(store, first), dtype):
            file.write(block.data)
        file.checkpoint()
        return file.size
