"""Which files make a store, by its manifest alone: the same answer for a folder here and for a repository there.

A manifest may come from anywhere: names that leave the folder are refused. Memory: the manifest, an entry per file.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, Setting, StoreError, did_you_mean
from milldam.files import hash_file
from milldam.stores.kinds import KINDS, TOKENS, Kind


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    xxh3: str
    bytes: int | None
    """None where the manifest does not say: the tokenizer, the only file that is not named after its bytes."""

    def wrong_size(self, folder: Path) -> str | None:
        """Why the file in a folder can't be this one, without reading it."""
        path = folder / self.name
        if not path.is_file():
            return f"{path}: missing"
        if self.bytes is not None and path.stat().st_size != self.bytes:
            return f"{path}: {path.stat().st_size:,} bytes where the manifest says {self.bytes:,}"
        return None

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has it with its bytes; reads it in blocks."""
        return self.wrong_size(folder) is None and hash_file(folder / self.name) == self.xxh3


@dataclass(frozen=True, slots=True)
class Contents:
    kind: Kind
    manifest: Any
    """That of the kind."""
    manifest_bytes: bytes
    files: tuple[StoredFile, ...]
    """All but the manifest, in its order."""

    @classmethod
    def of(cls, kind: Kind, data: bytes, where: str) -> Contents:
        """The files that the text of a manifest names. `where`: what messages call its place."""
        manifest = kind.parse(data, f"{where}/{kind.manifest}")
        tokenizer = (manifest.tokenizer or {}).get("xxh3")
        files = [StoredFile("tokenizer.json", tokenizer, None)] if tokenizer else []
        files += [StoredFile(name, record["xxh3"], record["bytes"]) for name, record in manifest.files()]
        return cls(kind, manifest, data, tuple(dict.fromkeys(files)))  # equal units share a file

    @property
    def names(self) -> set[str]:
        return {file.name for file in self.files} | {self.kind.manifest}

    def only(self, split: str, where: str) -> Contents:
        """The same store with the shards of one split alone."""
        if self.kind is not TOKENS:
            raise ConfigError(f"{where} is {self.kind.phrase}, which has no splits. Leave out ", Setting("split"), ".")
        known = self.manifest.splits
        if split not in known:
            raise ConfigError(f'{where}: no split "{split}"; it has {", ".join(known)}.{did_you_mean(split, known)}')
        shards = tuple(shard for shard in self.manifest.shards if shard.split == split)
        with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
            dataclasses.replace(self.manifest, shards=shards).write(Path(folder))
            return Contents.of(self.kind, (Path(folder) / self.kind.manifest).read_bytes(), where)


def kind_among(names: set[str], where: str) -> Kind:
    """The kind whose manifest is among the names."""
    kinds = [kind for kind in KINDS if kind.manifest in names]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise StoreError(f"{where}: it has {' and '.join(kind.manifest for kind in kinds)}; a store has one of them.")
    raise StoreError(f"{where}: not a store (none of {', '.join(kind.manifest for kind in KINDS)} in it).")


def read_contents(folder: Path) -> Contents:
    """The files that the manifest in a folder names. The files themselves are not looked at."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder.")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    if not names & {kind.manifest for kind in KINDS} and (folder / "run" / "plan.json").exists():
        raise StoreError(f"{folder}: unfinished: a run was interrupted here. Finish it first.")
    kind = kind_among(names, str(folder))
    return Contents.of(kind, (folder / kind.manifest).read_bytes(), str(folder))
