"""The kinds of stores in one registry: what tells a folder's kind, how each is opened and verified, what all share.

A manifest is one JSON object, written last and sealed: its last field is a hash of the text before it, so that a change
of any field is noticed (`milldam.files`). All begin with `format`, `format_version`, `created_by`, `totals` and
`fingerprint`, and have `settings` and `input`. A manifest may come from anywhere, so each field is checked too when it
is read (`milldam.checked`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict, TypeVar, cast

from milldam import __version__
from milldam.checked import checked, parse_json
from milldam.errors import StoreError
from milldam.files import NewFile, hash_bytes, is_whole_text, json_bytes, sealed_blocks, stays_in_folder
from milldam.stores.generations import keep

if TYPE_CHECKING:
    from milldam.stores.place import Place
    from milldam.stores.table.manifest import TableManifest
    from milldam.stores.tokens.manifest import Manifest

StoreManifest: TypeAlias = "Manifest | TableManifest"
"""Both have settings, input, totals, fingerprint, shards, and files(): every file with its size and hash, in order."""
ShardT = TypeVar("ShardT")
_CLOSED, _NO_SHARDS = b"\n}\n", b'\n "shards": []'
# Whole lines of the text: a string in it has no line ends, so nothing else can look like them.
_BEFORE_SHARDS, _BEHIND_SHARDS = b'\n "shards": [\n', b"\n ],\n"
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    """Also that of its room: `manifest` there reads it."""
    manifest: str
    """The name of its manifest."""
    format: str
    phrase: str
    opened: str
    """How people open it; {0} is its folder."""
    version: int = 1

    def read_manifest(self, place: Place) -> StoreManifest:
        """The manifest, wherever the store lies."""
        return cast("StoreManifest", import_module(f"milldam.stores.{self.name}.manifest").read(place))

    def head(self, place: Place) -> dict[str, Any]:
        """The object in the manifest, as it was written, without its shards: there may be a million."""
        return ManifestText(self, place).head()

    def files_in(self, path: Path) -> Iterator[tuple[str, int]]:
        """Names and sizes of the files of a manifest that lies here; holds a few shards at a time."""
        shard: Any = import_module(f"milldam.stores.{self.name}.manifest").SHARD
        for one in ManifestText(self, _folder(path)).shards(shard):
            yield from ((name, record["bytes"]) for name, record in one.named_files())

    def names_in(self, path: Path) -> Iterator[str]:
        """The names of these files, and of those that were set aside."""
        yield from (name for name, _ in self.files_in(path))
        yield from (file["name"] for file in self.audit(_folder(path)).values())

    def audit(self, place: Place) -> dict[str, dict[str, Any]]:
        """Name, size and hash of each file of what was set aside when it was made; see `write_audit`."""
        path = f"{place.name}/{self.manifest}"
        files = checked(dict[str, _AuditFile], self.head(place).get("audit", {}), path)
        for file in files.values():
            if not stays_in_folder(file["name"], hidden=False):
                raise StoreError(f'{path}: the file name "{file["name"]}" leaves the folder; refused.')
        return cast("dict[str, dict[str, Any]]", files)

    def write(self, folder: Path, facts: dict[str, Any], shards: Iterable[list[bytes]] = ()) -> None:
        """Write the manifest. `shards`: their lines, some at a time, in the place of an empty list in the facts."""
        head = {"format": self.format, "format_version": self.version, "created_by": f"milldam {__version__}"}
        before, found, after = json_bytes(head | facts)[: -len(_CLOSED)].partition(_NO_SHARDS)

        def text() -> Iterator[bytes]:
            yield before + found[:-1]
            between, end = b"\n  ", b""
            for lines in shards:
                if lines:
                    yield between + b",\n  ".join(lines)
                    between, end = b",\n  ", b"\n "
            yield end + found[-1:] + after

        with NewFile(folder / self.manifest) as new:
            for block in sealed_blocks(text()):
                new.write(block)
            keep(folder / self.manifest)
            new.commit()

    def missing_in(self, folder: Path) -> str:
        """Why a folder without the manifest is none of this kind."""
        if folder.is_file():
            return f"{folder}: a file, not {self.phrase}, which is a folder. `milldam.open` says what it is."
        if not folder.is_dir():
            return f"{folder}: no such folder."
        other = store_kind(folder)
        if other is not None:
            return f"{folder}: {other.phrase}, not {self.phrase}. {other.opened.format(folder)}"
        if (folder / "run").exists():
            return f"{folder}: unfinished: a run was interrupted here. `milldam status {folder}` says how to continue."
        splits = sorted(path.parent.name for path in folder.glob(f"*/{self.manifest}"))
        if splits:
            advice = f"Name {folder / splits[0]}, say."
            return f"{folder}: not {self.phrase} itself, but there is one of each split: {', '.join(splits)}. {advice}"
        return f"{folder}: not {self.phrase} (no {self.manifest} in it)."


class ManifestText:
    """The text of a manifest, mapped where that can be. Its shards are parsed as they are asked for."""

    def __init__(self, kind: Kind, place: Place) -> None:
        data = place.manifest(kind.manifest)
        if data is None:
            raise StoreError(place.not_a_store() if place.folder is None else kind.missing_in(place.folder))
        self._kind, self._data, self._path = kind, data, f"{place.name}/{kind.manifest}"
        self._is_whole = is_whole_text(data)
        first = data.find(_BEFORE_SHARDS) + len(_BEFORE_SHARDS)
        stop = data.find(_BEHIND_SHARDS, first)
        self._range = (first, stop) if self._is_whole and stop > first >= len(_BEFORE_SHARDS) else None

    def head(self) -> dict[str, Any]:
        """The object itself, without its shards where they are lines of their own."""
        kind, path, data = self._kind, self._path, self._data
        value = parse_json(data[:] if self._range is None else data[: self._range[0]] + data[self._range[1] :], path)
        if not isinstance(value, dict) or value.get("format") != kind.format:
            raise StoreError(f"{path}: not the manifest of {kind.phrase}.")
        if value.get("format_version") != kind.version:
            raise StoreError(
                f"{path}: its format_version is {str(value.get('format_version'))[:40]}; this milldam reads "
                f"{kind.version}. Upgrade milldam, or make it again."
            )
        if not self._is_whole:
            raise StoreError(
                f"{path}: damaged: it is not as it was written (its check is not that of its text). Make it again."
            )
        del value["check"]
        return value

    def shards(self, kind: type[ShardT]) -> Iterator[ShardT]:
        """Every shard, in order, as this type."""
        for block in self._blocks():
            for shard in checked(list[kind], block, f"{self._path}: shards"):  # type: ignore[valid-type]
                # A manifest may come from anywhere: it must not make us open files elsewhere, nor exports write there.
                for what in ("name", "split"):
                    name = getattr(shard, what, "none")
                    if not stays_in_folder(name, hidden=False):
                        what = "split" if what == "split" else "shard name"
                        raise StoreError(f'{self._path}: the {what} "{name}" leaves the folder; refused.')
                yield shard

    def _blocks(self) -> Iterator[Any]:
        """Some shards at a time."""
        if self._range is None:
            yield self.head().get("shards")
            return
        at, stop = self._range
        while at < stop:
            end = self._data.find(b",\n", at + _BLOCK_BYTES, stop)
            end = stop if end < 0 else end
            yield parse_json(b"[" + self._data[at:end] + b"]", self._path)
            at = end + 2


def _folder(manifest: Path) -> Place:
    """The place of a manifest that may be of an earlier generation."""
    from milldam.stores.place import Folder

    return Folder(manifest.parent, manifest)


TOKENS = Kind("tokens", "milldam.json", "milldam store", "a token store", "`milldam.open` opens it.")
TABLE = Kind(
    "table",
    "milldam-table.json",
    "milldam table",
    "a table",
    '`milldam.Table("{0}")` opens it; its `.to_hf()` gives a datasets.Dataset.',
)
KINDS = (TOKENS, TABLE)


def result_id(settings: dict[str, Any], input: dict[str, Any]) -> str:
    """Names what is made with these settings from this input, before it is made."""
    return hash_bytes(json.dumps([settings, input], sort_keys=True).encode())[:16]


def store_kind(folder: str | Path) -> Kind | None:
    """The kind of store that a folder is; None: none, or not finished."""
    return next((kind for kind in KINDS if (Path(folder) / kind.manifest).is_file()), None)


# ---- names of shards ----


def shard_name(split: str, *files: dict[str, Any]) -> str:
    """The name of a shard: its split, then a hash of its content, all 128 bits of it (the records of its files).

    So two shards share a name only when they share their bytes: a store can be updated while it is read
    (docs/decisions/0023).

    >>> shard_name("train", {"bytes": 2, "xxh3": "d0"}, {"bytes": 58, "xxh3": "9a"})
    'train-bc274ec07b8ef97bb493fc18d040e7a6'
    """
    return f"{split}-{hash_bytes(''.join(file['xxh3'] for file in files).encode())}"


# ---- what a run set aside ----

AUDIT = {"rejects": "jsonl", "dropped": "jsonl.zst", "contamination": "jsonl"}
"""The files of what was set aside, and how their names end."""
AUDIT_FILES = tuple(f"{what}-{'[0-9a-f]' * 32}.{ending}" for what, ending in AUDIT.items())
"""Patterns of their names."""


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


# ---- what several manifests have ----


class _FileRecord(TypedDict):
    """A file as it was written."""

    bytes: int
    xxh3: str


class _AuditFile(_FileRecord):
    """The same, with its name."""

    name: str


class _InputFacts(TypedDict, total=False):
    """The input: all of it, or nothing where nobody knows."""

    files: int
    bytes: int
    fingerprint: str


class _TokenizerFacts(TypedDict, total=False):
    name: str | None
    xxh3: str | None
    """Of `tokenizer.json`; None: there is none."""
    vocab_size: int
    bos: int | None
    eos: int | None
    bos_token: str | None
    eos_token: str | None
    cls_id: int | None


class _ChatFacts(TypedDict):
    """Of a store of conversations."""

    form: str
    """Of the records that they were made from."""
    pairs: bool
    """Documents 2k and 2k + 1 are the chosen and the rejected one of a pair."""
    conversations: int
    turns: int
    trained_tokens: int


ChatFacts = Annotated[dict[str, Any], _ChatFacts]
FileRecord = Annotated[dict[str, Any], _FileRecord]
AuditFiles = Annotated[dict[str, Any], dict[str, _AuditFile]]
InputFacts = Annotated[dict[str, Any], _InputFacts]
TokenizerFacts = Annotated[dict[str, Any], _TokenizerFacts]
TokenDtype = Annotated[str, Literal["uint16", "int32"]]
