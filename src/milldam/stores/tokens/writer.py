"""Tokens and document lengths in, one shard on disk out.

Memory does not grow with the shard: tokens go straight to the file, lengths to a temporary file from which
the index is streamed; the stretches that are trained on, where there are some, likewise. Nothing appears under its
final name before `commit`.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from milldam.files import NewFile, commit_together, explain_os_errors
from milldam.stores.kinds import shard_name
from milldam.stores.tokens.format import Int64s, Spans, blocks_of, write_index, write_spans
from milldam.stores.tokens.manifest import SHARD_FILES, Shard


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
    spans: Spans | None = None
    """The trained stretches of each document; none is open then."""
    documents_each: int = 1
    """So many documents stay together: the two of a pair."""

    def pieces(self, first: int, stop: int) -> Tokens:
        """The pieces from `first` up to `stop`."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:stop].sum())
        is_open = self.open and stop >= len(self.lengths)
        spans = None if self.spans is None else self.spans.between(first, stop)
        return replace(self, flat=self.flat[begin:end], lengths=self.lengths[first:stop], open=is_open, spans=spans)

    def only(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Tokens:
        """The pieces of a mask."""
        if keep.all():
            return self
        positions = None if self.positions is None else self.positions[keep]
        spans = None if self.spans is None else self.spans.only(keep)
        return Tokens(self.flat[np.repeat(keep, self.lengths)], self.lengths[keep], self.open, positions, spans)


class ShardWriter:
    """Writes a pair of files, `SPLIT-CONTENT.bin` and `.idx`, into a folder; use it as a context manager.

    Where documents come with stretches, all of them do, and `.spans` (and `.labels`) lie beside the two.
    """

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.split, self.dtype = split, dtype
        self.documents = self.tokens = self.text_bytes = self.characters = 0
        self._folder = folder
        self._open_length = 0
        self._bin = NewFile(folder / f"{split}.bin")
        self._spools: dict[str, IO[bytes]] = {}
        """Temporary files until the index can be written: lengths; counts and pairs of stretches, labels."""

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
        assert tokens.spans is not None or "counts" not in self._spools
        if tokens.spans is not None:
            assert not tokens.open and len(tokens.spans.counts) == len(lengths)
            self._spool("counts", tokens.spans.counts)
            self._spool("pairs", tokens.spans.pairs)
            if tokens.spans.labels is not None or "labels" in self._spools:
                assert tokens.spans.labels is not None and len(tokens.spans.labels) == len(lengths)
                self._spool("labels", tokens.spans.labels, np.uint8)
        self.documents += len(lengths)
        self._spool("lengths", lengths)

    def _spool(self, name: str, values: np.ndarray[Any, Any], dtype: Any = "<i8") -> None:
        with explain_os_errors(self._bin.path):
            if name not in self._spools:
                self._spools[name] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed in discard
            self._spools[name].write(values.astype(dtype).tobytes())

    def count_text(self, text_bytes: int, characters: int) -> None:
        """Book the text that the appended tokens came from."""
        self.text_bytes += text_bytes
        self.characters += characters

    def commit(self) -> Shard:
        """Make all files durable under their names, the index last."""
        with contextlib.ExitStack() as stack:

            def new(ending: str) -> NewFile:
                return stack.enter_context(NewFile(self._folder / f"{self.split}.{ending}"))

            self._spool("lengths", np.empty(0))
            files = {"bin": self._bin, "idx": new("idx")}
            with explain_os_errors(self._bin.path):
                write_index(files["idx"], self._spools["lengths"], self.dtype)
                if "counts" in self._spools:
                    files["spans"] = new("spans")
                    write_spans(files["spans"], self._spools["counts"], self._spools["pairs"])
                if "labels" in self._spools:
                    files["labels"] = new("labels")
                    for block in blocks_of(self._spools["labels"]):
                        files["labels"].write(block)
            name, records = commit_shard(self.split, files)
        self.discard()
        return Shard(name, self.split, self.documents, self.tokens, self.text_bytes, self.characters, **records)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Leave nothing, unless it was committed."""
        for spool in self._spools.values():
            # On a full disk even closing may fail; that must not hide what went wrong before.
            with contextlib.suppress(OSError):
                spool.close()
        self._bin.discard()


def commit_shard(split: str, files: dict[str, NewFile]) -> tuple[str, dict[str, Any]]:
    """Make the files of a shard, by how their names end, durable, the index last; its name, and the record of each."""
    name = shard_name(split, *(files[ending].record for ending in SHARD_FILES if ending in files))
    order = sorted(files, key=lambda ending: ending == "idx")
    commit_together({f"{name}.{ending}": files[ending] for ending in order})
    return name, {ending: new.record for ending, new in files.items()}
