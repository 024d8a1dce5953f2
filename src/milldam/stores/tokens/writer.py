"""Tokens and document lengths in, one shard on disk out.

Memory does not grow with the shard: tokens go straight to the file; lengths, and the stretches that are trained on,
wait in temporary files. Nothing appears under its final name before `commit`.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from milldam.files import NewFile, explain_os_errors
from milldam.stores.kinds import commit_shard
from milldam.stores.tokens.format import Int64s, Spans, write_index
from milldam.stores.tokens.manifest import Shard


@dataclass(frozen=True, slots=True)
class Tokens:
    """Encoded documents, end to end."""

    flat: np.ndarray[tuple[int], np.dtype[np.generic]]
    lengths: Int64s
    """Tokens of each piece in `flat`."""
    open: bool = False
    """The last piece is not the end of its document: the next batch goes on with it."""
    spans: Spans | None = None
    """The trained stretches of each document; none is open then."""

    def pieces(self, first: int, stop: int) -> Tokens:
        """The pieces from `first` up to `stop`."""
        begin, end = int(self.lengths[:first].sum()), int(self.lengths[:stop].sum())
        is_open = self.open and stop >= len(self.lengths)
        numbers = np.arange(len(self.lengths))
        spans = None if self.spans is None else self.spans.only((numbers >= first) & (numbers < stop))
        return replace(self, flat=self.flat[begin:end], lengths=self.lengths[first:stop], open=is_open, spans=spans)

    def only(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Tokens:
        """The pieces of a mask."""
        if keep.all():
            return self
        spans = None if self.spans is None else self.spans.only(keep)
        return Tokens(self.flat[np.repeat(keep, self.lengths)], self.lengths[keep], self.open, spans)


class ShardWriter:
    """Writes a pair of files, `SPLIT-CONTENT.bin` and `.idx`, into a folder; use it as a context manager.

    Where documents come with stretches, all of them do, and `.spans` (and `.labels`) lie beside the two.
    """

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.split, self.dtype = split, dtype
        self.documents = self.tokens = self.text_bytes = self.characters = 0
        self._folder, self._open_length = folder, 0
        self._bin = NewFile(folder / f"{split}.bin")
        self._spools: dict[str, IO[bytes]] = {}
        """Temporary files until the index can be written: lengths; counts and pairs of stretches, labels."""

    def append(self, tokens: Tokens, text_bytes: int = 0, characters: int = 0) -> None:
        """Add documents, made from so much text; an open one is finished by the appends that follow."""
        self._bin.write(np.ascontiguousarray(tokens.flat, dtype=self.dtype).data)
        lengths, spans = tokens.lengths.astype("<i8"), tokens.spans
        if len(lengths):
            lengths[0] += self._open_length
            self._open_length = int(lengths[-1]) if tokens.open else 0
            lengths = lengths[: len(lengths) - tokens.open]
        spooled: dict[str, np.ndarray[Any, Any]] = {"lengths": lengths}
        assert (spans is not None) == ("counts" in self._spools) or not self.documents
        if spans is not None:
            assert not tokens.open and len(spans.counts) == len(lengths)
            spooled |= {"counts": spans.counts.astype("<i8"), "pairs": spans.pairs.astype("<i8")}
            assert (spans.labels is not None) == ("labels" in self._spools) or not self.documents
            spooled |= {} if spans.labels is None else {"labels": spans.labels.astype(np.uint8)}
        with explain_os_errors(self._bin.path):
            for name, values in spooled.items():
                if name not in self._spools:
                    self._spools[name] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - closed in discard
                self._spools[name].write(values.tobytes())
        self.documents, self.tokens = self.documents + len(lengths), self.tokens + len(tokens.flat)
        self.text_bytes, self.characters = self.text_bytes + text_bytes, self.characters + characters

    def commit(self) -> Shard:
        """Make all files durable under their names, the index last."""
        with contextlib.ExitStack() as stack:
            arrays: dict[str, np.ndarray[Any, Any]] = {"lengths": np.empty(0, "<i8")}
            with explain_os_errors(self._bin.path):
                for name, spool in self._spools.items():
                    dtype = np.uint8 if name == "labels" else "<i8"
                    arrays[name] = np.memmap(spool, dtype, "r") if spool.tell() else np.empty(0, dtype)
            files = {"bin": self._bin}
            for ending, needed in (("idx", "lengths"), ("spans", "counts"), ("labels", "labels")):
                if needed in arrays:
                    files[ending] = stack.enter_context(NewFile(self._folder / f"{self.split}.{ending}"))
            write_index(files["idx"], arrays["lengths"], self.dtype)
            if "spans" in files:
                files["spans"].write(np.concatenate(([0], np.cumsum(arrays["counts"]))).astype("<i8").data)
                files["spans"].write(arrays["pairs"].tobytes())
            if "labels" in files:
                files["labels"].write(arrays["labels"].tobytes())
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
