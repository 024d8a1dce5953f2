"""Which files make a store, from its manifest alone: the same answer for a folder here and for a repository there.

Three kinds: tokens (`milldam.json`), features of question answering (`milldam-qa.json`), a table (`milldam-
table.json`). A manifest may come from anywhere: names that leave the folder are refused when it is read. Memory: the
manifest.
"""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, Setting, StoreError, did_you_mean
from milldam.files import hash_file, stays_in_folder
from milldam.stores.kinds import KINDS, TOKENS, Kind

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class StoredFile:
    name: str
    xxh3: str
    bytes: int | None
    """None where the manifest does not say: the tokenizer."""


@dataclass(frozen=True, slots=True)
class Contents:
    kind: Kind
    manifest: Any
    """Manifest, FeatureManifest or TableManifest."""
    manifest_bytes: bytes
    files: tuple[StoredFile, ...]
    """All but the manifest, in its order."""

    @property
    def names(self) -> set[str]:
        return {file.name for file in self.files} | {self.kind.manifest}

    @property
    def size(self) -> int:
        return sum(file.bytes or 0 for file in self.files)


def kind_among(names: set[str], where: str) -> Kind:
    """The kind whose manifest is among the names."""
    found = [kind for kind in KINDS if kind.manifest in names]
    if len(found) == 1:
        return found[0]
    if found:
        raise StoreError(f"{where}: it has {' and '.join(kind.manifest for kind in found)}; a store has one of them.")
    raise StoreError(f"{where}: not a store (none of {', '.join(kind.manifest for kind in KINDS)} in it).")


def read_contents(folder: Path, kind: Kind | None = None) -> Contents:
    """What the manifest in a folder names. The files themselves are not looked at."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder.")
    if kind is None:
        there = {one.manifest for one in KINDS if (folder / one.manifest).is_file()}
        if not there and (folder / "run" / "plan.json").exists():
            raise StoreError(f"{folder}: unfinished: a run was interrupted here. Finish it first.")
        kind = kind_among(there, str(folder))
    data = (folder / kind.manifest).read_bytes()
    manifest, found = _READERS[kind.name](folder)
    # Equal units of a table share a file.
    files = tuple(dict.fromkeys(found))
    for file in files:
        _refuse_outside(file.name, folder / kind.manifest)
    if len({file.name for file in files} | {kind.manifest}) <= len(files):
        raise StoreError(f"{folder / kind.manifest}: it names a file twice.")
    return Contents(kind, manifest, data, files)


def select_split(contents: Contents, split: str, where: str) -> Contents:
    """The same store with the shards of one split alone: its manifest names no others."""
    if contents.kind is not TOKENS:
        raise ConfigError(f"{where} is {contents.kind.phrase}, which has no splits. Leave out ", Setting("split"), ".")
    known = contents.manifest.splits
    if split not in known:
        raise ConfigError(f'{where}: no split "{split}"; it has {", ".join(known)}.{did_you_mean(split, known)}')
    kept = tuple(shard for shard in contents.manifest.shards if shard.split == split)
    manifest = dataclasses.replace(contents.manifest, shards=kept)
    with tempfile.TemporaryDirectory() as folder:
        manifest.write(Path(folder))
        data = (Path(folder) / contents.kind.manifest).read_bytes()
    return Contents(contents.kind, manifest, data, tuple(_token_files(manifest)))


def check_sizes(folder: Path, contents: Contents) -> None:
    """Every file is there with its size; reads none."""
    for file in contents.files:
        if problem := wrong_size(folder, file):
            raise StoreError(f"{problem}. `milldam verify {folder}` checks the store; make it again.")


def wrong_size(folder: Path, file: StoredFile) -> str | None:
    path = folder / file.name
    if not path.is_file():
        return f"{path}: missing"
    if file.bytes is not None and path.stat().st_size != file.bytes:
        return f"{path}: {path.stat().st_size:,} bytes where the manifest says {file.bytes:,}"
    return None


def is_whole(folder: Path, file: StoredFile) -> bool:
    """It is there, of its size and with its bytes; reads it in blocks."""
    return wrong_size(folder, file) is None and hash_file(folder / file.name) == file.xxh3


def _read_tokens(folder: Path) -> tuple[Any, list[StoredFile]]:
    from milldam.stores.tokens.manifest import Manifest

    manifest = Manifest.read(folder)
    return manifest, _token_files(manifest)


def _token_files(manifest: Any) -> list[StoredFile]:
    files = _tokenizer_file(manifest.tokenizer)
    for shard in manifest.shards:
        for suffix, record in (("bin", shard.bin), ("idx", shard.idx)):
            files.append(_file(f"{shard.name}.{suffix}", record))
    return files


def _read_features(folder: Path) -> tuple[Any, list[StoredFile]]:
    from milldam.stores.features.manifest import FeatureManifest

    manifest = FeatureManifest.read(folder)
    files = _tokenizer_file(manifest.tokenizer)
    return manifest, files + [_file(name, one) for shard in manifest.shards for name, one in shard.files.items()]


def _read_table(folder: Path) -> tuple[Any, list[StoredFile]]:
    from milldam.stores.table.manifest import TableManifest

    manifest = TableManifest.read(folder)
    return manifest, [StoredFile(shard.name, shard.xxh3, shard.bytes) for shard in manifest.shards]


_READERS = {"tokens": _read_tokens, "features": _read_features, "table": _read_table}


def _tokenizer_file(tokenizer: dict[str, Any]) -> list[StoredFile]:
    """None for a store that was made without one."""
    return [StoredFile(TOKENIZER, str(tokenizer["xxh3"]), None)] if tokenizer.get("xxh3") else []


def _file(name: str, record: dict[str, Any]) -> StoredFile:
    try:
        return StoredFile(name, str(record["xxh3"]), int(record["bytes"]))
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{name}: the manifest does not say its size and hash ({error}).") from None


def _refuse_outside(name: str, manifest: Path) -> None:
    if not stays_in_folder(name, hidden=False):
        raise StoreError(f'{manifest}: the file name "{name}" leaves the folder; refused.')
