"""The manifest `milldam.json`: written last, and what makes a folder a store.

It holds nothing that differs between two runs of the same job: no times, no worker counts, no paths of
this machine but those of the input. So equal input and settings give equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from milldam.errors import StoreError
from milldam.files import hash_bytes, json_bytes, write_file
from milldam.store.format import DTYPE_CODES
from milldam.store.place import Folder, Place

NAME = "milldam.json"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Shard:
    """One pair of files, `name.bin` and `name.idx`."""

    name: str
    split: str
    documents: int
    tokens: int
    text_bytes: int
    characters: int
    bin: dict[str, Any]
    """Size and hash of the token file."""
    idx: dict[str, Any]
    """Size and hash of the index file."""


@dataclass(frozen=True, slots=True)
class Manifest:
    dtype: str
    vocab_size: int
    tokenizer: dict[str, Any]
    """Name, hash of `tokenizer.json`, and its special tokens with their ids and the policy used.

    A store that was made without one has no hash, and no `tokenizer.json`.
    """
    engine: str
    """What encoded it, with its version."""
    settings: dict[str, Any]
    """Every setting that changes the result."""
    input: dict[str, Any]
    """Number, size and fingerprint of the input files."""
    shards: tuple[Shard, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents left out, by reason."""
    inexact_cuts: int = 0
    """Cuts in giant documents that could not be proved exact; see docs/decisions/0005."""
    format_version: int = FORMAT_VERSION

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def characters(self) -> int:
        return sum(shard.characters for shard in self.shards)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def fingerprint(self) -> str:
        """Names the content: equal fingerprints mean equal tokens in equal order."""
        return hash_bytes("".join(s.bin["xxh3"] + s.idx["xxh3"] for s in self.shards).encode())

    def write(self, folder: Path) -> None:
        value = asdict(self)
        totals = {"documents": self.documents, "tokens": self.tokens, "text_bytes": self.text_bytes}
        head = {"format": "milldam store", "format_version": value.pop("format_version"), "totals": totals}
        write_file(folder / NAME, json_bytes(head | {"fingerprint": self.fingerprint} | value))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        return cls.read_at(Folder(folder))

    @classmethod
    def read_at(cls, place: Place) -> Manifest:
        """The manifest of a store, wherever it lies."""
        data, path = place.read(NAME), f"{place.name}/{NAME}"
        if data is None:
            raise StoreError(place.not_a_store(NAME))
        try:
            value = json.loads(data)
        except ValueError as error:
            raise StoreError(f"{path}: can't be read ({error}).") from None
        return cls._parse(value, path)

    @classmethod
    def _parse(cls, value: Any, path: str) -> Manifest:
        if not isinstance(value, dict) or value.get("format") != "milldam store":
            raise StoreError(f"{path}: not a milldam manifest.")
        if value.get("format_version") != FORMAT_VERSION:
            raise StoreError(
                f"{path}: store format {value.get('format_version')}; this milldam reads format {FORMAT_VERSION}. "
                "Upgrade milldam, or make the store again."
            )
        try:
            shards = tuple(Shard(**shard) for shard in value["shards"])
            for shard in shards:
                _refuse_outside(shard.name, path)
            names = ("dtype", "vocab_size", "tokenizer", "engine", "settings", "input", "dropped", "inexact_cuts")
            if value["dtype"] not in DTYPE_CODES:
                raise StoreError(f"{path}: dtype {value['dtype']}; a store holds {' or '.join(DTYPE_CODES)}.")
            return cls(shards=shards, **{name: value[name] for name in names})
        except (KeyError, TypeError) as error:
            raise StoreError(f"{path}: damaged manifest ({error}).") from None


def _refuse_outside(name: str, path: str) -> None:
    """A manifest may come from anywhere: it must not make us open files elsewhere."""
    if PurePosixPath(name).name != name or name in ("", ".", "..") or "\\" in name:
        raise StoreError(f'{path}: the shard name "{name}" leaves the folder; refused.')
