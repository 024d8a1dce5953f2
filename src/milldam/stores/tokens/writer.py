"""Tokens and document lengths in, one shard on disk out.

Memory does not grow with the shard: tokens go straight to the file, lengths to a temporary file from which
the index is streamed. Nothing appears under its final name before `commit`.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from milldam.files import NewFile, commit_together, explain_os_errors
from milldam.stores.kinds import shard_name
from milldam.stores.tokens.format import IndexCounts, Int64s, count_sequences, write_index
from milldam.stores.tokens.manifest import Shard


@dataclass(frozen=True, slots=True)
class Tokens:
    """Encoded documents, end to end."""

    flat: np.ndarray[tuple[int], np.dtype[np.generic]]
    lengths: Int64s
    """Tokens of each piece in `flat`."""
    open: bool = False
    """The last piece is not the end of its document: the next batch goes on with it."""
    positions: Int64s | None = None
    """Which of the texts that were encoded each piece comes from."""

    def only(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Tokens:
        """The pieces of a mask."""
        if keep.all():
            return self
        positions = None if self.positions is None else self.positions[keep]
        return Tokens(self.flat[np.repeat(keep, self.lengths)], self.lengths[keep], self.open, positions)


class ShardWriter:
    """Writes a pair of files, `SPLIT-CONTENT.bin` and `.idx`, into a folder; use it as a context manager."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.split, self.dtype = split, dtype
        self.documents = self.tokens = self.text_bytes = self.characters = 0
        self._folder = folder
        self._sequences = 0
        self._open_length = 0
        self._bin = NewFile(folder / f"{split}.bin")
        with explain_os_errors(folder / f"{split}.idx"):
            self._lengths = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed in __exit__

    def append(self, tokens: Tokens) -> None:
        """Add documents; an open one is finished by the appends that follow."""
        self._bin.write(np.ascontiguousarray(tokens.flat, dtype=self.dtype).data)
        self.tokens += len(tokens.flat)
        lengths = tokens.lengths.copy()
        if len(lengths):
            lengths[0] += self._open_length
            self._open_length = 0
        if tokens.open:
            self._open_length = int(lengths[-1])
            lengths = lengths[:-1]
        self.documents += len(lengths)
        self._sequences += count_sequences(lengths)
        with explain_os_errors(self._bin.path):
            self._lengths.write(lengths.astype("<i8").tobytes())

    def count_text(self, text_bytes: int, characters: int) -> None:
        """Book the text that the appended tokens came from."""
        self.text_bytes += text_bytes
        self.characters += characters

    def mark(self) -> None:
        """Remember this point, the start of a document that may have to be taken back."""
        counted = (self.tokens, self.text_bytes, self.characters)
        self._mark = (self._bin.mark(), counted)

    def cancel(self) -> None:
        """Take back the open document: everything since the mark."""
        at, (self.tokens, self.text_bytes, self.characters) = self._mark
        self._bin.rewind(at)
        self._open_length = 0

    def commit(self) -> Shard:
        """Make both files durable under their names, the index last."""
        with NewFile(self._folder / f"{self.split}.idx") as new:
            counts = IndexCounts(self._sequences, self.documents)
            with explain_os_errors(new.path):
                self._lengths.flush()
            write_index(new, self._lengths, self.dtype, counts)
            name, bin_record, idx_record = commit_pair(self.split, self._bin, new)
        self._lengths.close()
        counted = (self.documents, self.tokens, self.text_bytes, self.characters)
        return Shard(name, self.split, *counted, bin_record, idx_record)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On a full disk even closing may fail; that must not hide what went wrong before.
        with contextlib.suppress(OSError):
            self._lengths.close()
        self._bin.__exit__(kind, error, trace)


def commit_pair(split: str, tokens: NewFile, index: NewFile) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Make the files of a shard durable, the index last; its name, and the records of both."""
    name = shard_name(split, tokens.record, index.record)
    bin_record, idx_record = commit_together({f"{name}.bin": tokens, f"{name}.idx": index}).values()
    return name, bin_record, idx_record
