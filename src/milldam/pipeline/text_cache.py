"""The cleaned texts of a unit, kept by the first pass for the second, which then neither parses nor cleans again.

Only a cache: without it the second pass reads the input once more, with the same result. It is written when it takes a
small part of the free disk, and removed with the run's other intermediate files. Not compressed: that would take longer
than reading the input again (docs/log.md). Disk: the texts, and 8 bytes a document.

A frame per batch, exactly as the reader gave it: sizes, a description in JSON, offsets, text.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import xxhash

from milldam.errors import StoreError
from milldam.files import NewFile
from milldam.pipeline.documents import Documents, Reading, UnitReader
from milldam.sources.batch import Reject
from milldam.text.arrays import Verdicts, text_offsets

_HEADER = struct.Struct("<QQQQ")
"""Bytes of the description, texts, bytes of text, hash of all that follows."""


def print_paths(folder: Path, key: str) -> tuple[Path, Path, Path]:
    """What the first pass leaves of a unit: hashes, signatures, texts."""
    return folder / f"hashes-{key}.parquet", folder / f"signatures-{key}.bin", folder / f"texts-{key}.bin"


def preference_path(folder: Path, key: str) -> Path:
    """The same, where near-duplicates are kept by more than their order: what decides on each document."""
    return folder / f"preferences-{key}.bin"


class CacheWriter:
    """Use it as a context manager; left without a commit, nothing stays."""

    def __init__(self, path: Path) -> None:
        self._new = NewFile(path)

    def add(self, documents: Documents) -> None:
        offsets = text_offsets(documents.texts)
        start, stop = int(offsets[0]), int(offsets[-1])
        description = json.dumps(_describe(documents)).encode()
        parts: list[Any] = [description, np.ascontiguousarray(offsets - start).data]
        if stop > start:
            parts.append(memoryview(documents.texts.buffers()[2])[start:stop])
        header = (len(description), len(documents.texts), stop - start)
        for part in (_HEADER.pack(*header, _hash(header, parts)), *parts):
            self._new.write(part)

    def commit(self) -> None:
        self._new.write(_END)
        self._new.commit()

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._new.discard()


def _describe(documents: Documents) -> dict[str, Any]:
    verdicts = documents.verdicts
    told: dict[str, Any] = {
        "batch": documents.batch,
        "first_row": documents.first_row,
        "part": documents.part,
        "last": documents.last,
        "cancel": documents.cancel,
        "bytes_read": documents.bytes_read,
    }
    if documents.rejects:
        told["rejects"] = [asdict(reject) for reject in documents.rejects]
    if documents.sides is not None:
        prompts = None if documents.prompts is None else documents.prompts.to_pylist()
        special = documents.with_special_tokens
        told |= {"sides": documents.sides.as_json(), "prompts": prompts, "with_special_tokens": special}
    if verdicts.reasons:
        told |= {"reasons": verdicts.reasons, "codes": verdicts.codes.tolist()}
    return told


def open_reader(reading: Reading, path: Path | None) -> UnitReader | CachedReader:
    """The documents of a unit: from where the first pass kept them, when they are there, else from the input."""
    return CachedReader(path, reading) if path is not None and path.exists() else UnitReader(reading)


class CachedReader:
    """What `UnitReader` gave when the cache was written."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self._path, self._reading = path, reading
        self.batches = 0
        self.seconds = {"read": 0.0, "clean": 0.0}

    def __iter__(self) -> Iterator[Documents]:
        with self._path.open("rb", buffering=0) as file:
            while True:
                started = time.perf_counter()
                documents = self._read_frame(file)
                self.seconds["read"] += time.perf_counter() - started
                if documents is None:
                    return
                self.batches = documents.batch
                if documents.batch > self._reading.skip_batches:
                    yield self._reading.without_told_rejects(documents)

    def _read_frame(self, file: IO[bytes]) -> Documents | None:
        header = file.read(_HEADER.size)
        if header == _END:
            return None
        sizes, parts = self._read_parts(file, header)
        told = json.loads(parts[0])
        offsets, count = pa.py_buffer(parts[1]), sizes[1]
        texts = pa.LargeStringArray.from_buffers(count, offsets, pa.py_buffer(parts[2]))
        verdicts = Verdicts(count)
        if "codes" in told:
            verdicts.reasons, verdicts.codes = told.pop("reasons"), np.array(told.pop("codes"), dtype=np.int16)
        rejects = [Reject(**reject) for reject in told.pop("rejects", [])]
        if "sides" in told:
            from milldam.chat.reading import Sides

            prompts = told.pop("prompts")
            told["sides"] = Sides.from_json(told["sides"])
            told["prompts"] = None if prompts is None else pa.array(prompts, pa.large_string())
        return Documents(texts, verdicts, rejects=rejects, **told)

    def _read_parts(self, file: IO[bytes], header: bytes) -> tuple[tuple[int, int, int], list[bytes]]:
        if len(header) == _HEADER.size:
            *sizes, wanted = _HEADER.unpack(header)
            size, count, text_bytes = sizes
            if size + 8 * (count + 1) + text_bytes <= os.fstat(file.fileno()).st_size:
                parts = [_read_up_to(file, part) for part in (size, 8 * (count + 1), text_bytes)]
                if _hash((size, count, text_bytes), parts) == wanted:
                    return (size, count, text_bytes), parts
        # Without it, the unit is read from the input.
        self._path.unlink(missing_ok=True)
        raise StoreError(f"{self._path}: damaged, and now removed. Run the same command again to continue without it.")


def _hash(sizes: tuple[int, int, int], parts: Iterable[Any]) -> int:
    digest = xxhash.xxh3_64(struct.pack("<QQQ", *sizes))
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())


def _read_up_to(file: IO[bytes], size: int) -> bytes:
    """As many bytes, unless the file ends before."""
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


_END = _HEADER.pack(0, 0, 0, _hash((0, 0, 0), ()))
"""Behind the last one: a file that is cut between two has none."""
