"""The kinds of stores: what tells a folder's kind, and how a manifest is written, read and replaced.

A manifest is one JSON object, written last and sealed: its last field is a hash of the text before it, so that a change
of any field is noticed (`milldam.files`). All begin with `format`, `format_version`, `created_by`, and each shard is on
a line of its own. A manifest may come from anywhere, so each field is checked when it is read (`milldam.checked`).
Memory: about 1 KB a shard.

Only the manifest of a store is ever replaced; all else is named after its content. A reader holds a shared lock on the
manifest that it opened (`milldam.stores.place`). Before a manifest is replaced it gets a second name in `run/kept`;
afterwards those that nobody holds are removed, and files that none of the others names may go (`live_files`). So
whenever it is killed, the old store is whole or the new one is, and the next run clears up. Where the file system has
no locks or no hard links, nothing is kept: a reader may miss a shard then, and says so; it never reads other bytes.
docs/decisions/0023 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

from milldam import __version__
from milldam.checked import checked, parse_json
from milldam.errors import StoreError
from milldam.files import (
    NewFile,
    commit_together,
    hash_bytes,
    is_whole_text,
    json_bytes,
    seal_text,
    stays_in_folder,
    sync_folder,
    write_file,
)

if TYPE_CHECKING:
    import mmap

    from milldam.stores.place import Place


class _FileRecord(TypedDict):
    bytes: int
    xxh3: str


FileRecord = Annotated[dict[str, Any], _FileRecord]
"""Size and hash of a file as it was written."""


AuditFiles = Annotated[dict[str, Any], dict[str, FileRecord]]
TokenDtype = Annotated[str, Literal["uint16", "int32"]]
Facts = Annotated[dict[str, Any], dict[str, int | str | bool | None]]
KEPT = Path("run", "kept")
"""Manifests that were replaced while somebody read them."""
_NO_SHARDS = b'\n "shards": []'
"""A line of the object itself: a string in it has no line ends."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    """Also that of its room."""
    manifest: str
    """The name of its manifest."""
    format: str
    phrase: str
    opened: str = ""
    """How people open it; {0} is its folder."""
    shape: str = ""
    """The class of its manifest, in `manifest` of its room."""
    version: int = 1

    def facts(self, data: bytes | mmap.mmap, path: str | Path) -> dict[str, Any]:
        """The object that is a manifest, as it was written."""
        value = parse_json(data[:], path)
        if not isinstance(value, dict) or value.get("format") != self.format:
            raise StoreError(f"{path}: not the manifest of {self.phrase}.")
        if value.get("format_version") != self.version:
            raise StoreError(
                f"{path}: its format_version is {str(value.get('format_version'))[:40]}; this milldam reads "
                f"{self.version}. Upgrade milldam, or make it again."
            )
        if not is_whole_text(data):
            raise StoreError(
                f"{path}: damaged: it is not as it was written (its check is not that of its text). Make it again."
            )
        del value["check"]
        return value

    def read(self, place: Place) -> Any:
        """The manifest of a store, wherever it lies. Each kind has settings, input, totals, fingerprint, shards and
        files(): every file with its size and hash, in order."""
        data = place.manifest(self.manifest)
        if data is None:
            raise StoreError(place.not_a_store() if place.folder is None else self.missing_in(place.folder))
        return self.parse(data, f"{place.name}/{self.manifest}")

    def parse(self, data: bytes | mmap.mmap, path: str | Path) -> Any:
        """The same from its text, each field checked."""
        shape = getattr(import_module(f"milldam.stores.{self.name}.manifest"), self.shape)
        manifest = checked(shape, self.facts(data, path), path)
        # It must not make us open files elsewhere, nor exports write there.
        names = {"split": {getattr(shard, "split", "train") for shard in manifest.shards}}
        names["shard name"] = {shard.name for shard in manifest.shards}
        names["file name"] = {file.get("name") for file in (getattr(manifest, "audit", None) or {}).values()}
        for what, name in ((what, name) for what, several in names.items() for name in several):
            if not stays_in_folder(name, hidden=False):
                raise StoreError(f'{path}: the {what} "{name}" leaves the folder; refused.')
        return manifest

    def write(self, folder: Path, facts: dict[str, Any], shards: Iterable[dict[str, Any]] = ()) -> None:
        """Write the manifest, or replace it. `shards`: a line each, in the place of an empty list in the facts."""
        head = {"format": self.format, "format_version": self.version, "created_by": f"milldam {__version__}"}
        before, mark, after = json_bytes(head | facts).partition(_NO_SHARDS)
        lines = b",\n  ".join(json.dumps(shard, ensure_ascii=False).encode() for shard in shards)
        keep(folder / self.manifest)
        text = before + (mark[:-1] + b"\n  " + lines + b"\n ]" if lines else mark) + after
        write_file(folder / self.manifest, seal_text(text))

    def missing_in(self, folder: Path) -> str:
        """Why a folder without the manifest is none of this kind."""
        if not folder.is_dir():
            return f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}."
        other = store_kind(folder)
        if other is not None:
            return f"{folder}: {other.phrase}, not {self.phrase}. {other.opened.format(folder)}"
        if (folder / "run").exists():
            return f"{folder}: unfinished: a run was interrupted here. `milldam status {folder}` says how to continue."
        return f"{folder}: not {self.phrase} (no {self.manifest} in it)."


TOKENS = Kind("tokens", "milldam.json", "milldam store", "a token store", "`milldam.open` opens it.", shape="Manifest")
TABLE = Kind(
    "table",
    "milldam-table.json",
    "milldam table",
    "a table",
    '`milldam.Table("{0}")` opens it; its `.to_hf()` gives a datasets.Dataset.',
    shape="TableManifest",
)
KINDS = (TOKENS, TABLE)


def store_kind(folder: str | Path) -> Kind | None:
    """The kind of store that a folder is; None: none, or not finished."""
    return next((kind for kind in KINDS if (Path(folder) / kind.manifest).is_file()), None)


def result_id(settings: dict[str, Any], input: dict[str, Any]) -> str:
    """Names what is made with these settings from this input, before it is made."""
    return hash_bytes(json.dumps([settings, input], sort_keys=True).encode())[:16]


# ---- replaced while it is read ----


def keep(manifest: Path) -> None:
    """Before a manifest is replaced: those who read it keep it, and what it names."""
    kept = manifest.parent / KEPT
    with contextlib.suppress(OSError):  # there is none, it is kept already, or there are no hard links here
        inode = manifest.stat().st_ino
        kept.mkdir(parents=True, exist_ok=True)
        os.link(manifest, kept / f"{inode}.json")
        sync_folder(kept)


def live_files(folder: Path, kind: Kind) -> Iterator[str]:
    """Names of the files that the manifest of a folder, or a generation that is still being read, is made of.

    Kept manifests that nobody holds are removed first. Call it while holding the lock of the run.
    """
    for path in (folder / KEPT).glob("*.json"):
        with path.open("r+b") as file:  # NFS gives the exclusive lock to writers alone
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:  # no locks here
                pass
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / KEPT).rmdir()
        (folder / KEPT.parent).rmdir()
    for path in (folder / kind.manifest, *sorted((folder / KEPT).glob("*.json"))):
        manifest = kind.parse(path.read_bytes(), path)
        yield from (name for name, _ in manifest.files())
        yield from (file["name"] for file in (getattr(manifest, "audit", None) or {}).values())


# ---- files of a store ----

AUDIT = {"rejects": "jsonl", "dropped": "jsonl.zst", "contamination": "jsonl"}
"""The files of what was set aside, and how their names end."""
AUDIT_FILES = tuple(f"{what}-{'[0-9a-f]' * 32}.{ending}" for what, ending in AUDIT.items())
"""Patterns of their names."""


def commit_shard(prefix: str, files: dict[str, NewFile]) -> tuple[str, dict[str, Any]]:
    """Make the files of a shard durable, by how their names end, an index last; its name, and the record of each.

    The name is the prefix, a split say, and a hash of its content, all 128 bits of it. So two shards share a name only
    when they share their bytes: a store can be updated while it is read (docs/decisions/0023).
    """
    name = f"{prefix}-{hash_bytes(''.join(new.record['xxh3'] for new in files.values()).encode())}"
    order = sorted(files, key=lambda ending: ending == "idx")
    commit_together({f"{name}.{ending}": files[ending] for ending in order})
    return name, {ending: new.record for ending, new in files.items()}


def write_audit(folder: Path, what: str, blocks: Iterable[bytes]) -> dict[str, dict[str, Any]]:
    """Write a file of `AUDIT` under a name with the hash of its content; {what: its record}, {} if there is nothing.

    A manifest lists these records as `audit`, so that they are replaced with it: files that no manifest lists are left
    to `sweep`. A store can be read without them, and `push` leaves them out.
    """
    with NewFile(folder / f"{what}.{AUDIT[what]}") as new:
        for block in blocks:
            new.write(block)
        if not new.size:
            return {}
        name = f"{what}-{new.record['xxh3']}.{AUDIT[what]}"
        return {what: {"name": name, **new.commit(name)}}
