"""The kinds of stores in one registry: what tells a folder's kind, how each is opened and verified, what all share.

A manifest is one JSON object, written last and sealed: its last field is a hash of the text before it, so that a change
of any field is noticed (`milldam.files`). All begin with `format`, `format_version`, `created_by`, `totals` and
`fingerprint`, and have `settings` and `input`. A manifest may come from anywhere, so each field is checked too when it
is read (`milldam.checked`).

Generations of a store: a process keeps reading the one that it opened while the folder gets the next one.

A reader holds a shared `flock` on the manifest that it opened, for as long as the store lives, in forked processes too.
A manifest that is held gets a second name in `run/kept` before it is replaced (`replacing`); afterwards the kept ones
that nobody holds any more are removed, and files that none of the others names may go (`live_files`). So whenever it is
killed, the old store is whole or the new one is, and the next run clears up. Where the file system has no locks or no
hard links, nothing is kept: a reader may miss a shard then, and says so; it never reads other bytes, as shards are
named after their contents. docs/decisions/0023 has the reasons.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict, cast

from milldam import __version__
from milldam.checked import checked, parse_json
from milldam.errors import StoreError
from milldam.files import NewFile, hash_bytes, is_whole_text, json_bytes, sealed_blocks, stays_in_folder, sync_folder

if TYPE_CHECKING:
    from milldam.stores.features.manifest import FeatureManifest
    from milldam.stores.place import Place
    from milldam.stores.table.manifest import TableManifest
    from milldam.stores.tokens.manifest import Manifest

_CLOSED = b"\n}\n"


StoreManifest: TypeAlias = "Manifest | TableManifest | FeatureManifest"
"""All have settings, input, totals, fingerprint, shards, and files(): every file with its size and hash, in order."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    """Also that of its room: `manifest` there reads it, `verify` checks it."""
    manifest: str
    """The name of its manifest."""
    format: str
    phrase: str
    opened: str
    """What opens it, for people; {0} is its folder."""
    opener: str = ""
    """The class that opens it, as module:class."""
    version: int = 1

    # ---- what to do with one ----

    def open(self, path: str | Path, **options: Any) -> Any:
        """The store in a folder, opened for reading."""
        module, _, name = self.opener.partition(":")
        return getattr(import_module(module), name)(path, **options)

    def read_manifest(self, place: Place) -> StoreManifest:
        """The manifest, wherever the store lies."""
        return cast("StoreManifest", self._room("manifest").read(place))

    def head(self, place: Place) -> dict[str, Any]:
        """The object in the manifest, as it was written; without its shards where there may be a million."""
        if self is not TOKENS:
            return self.value(place)
        return cast("dict[str, Any]", self._room("manifest").head(place))

    def files_in(self, path: Path) -> Iterator[tuple[str, int]]:
        """Names and sizes of the files of a manifest that lies here; holds a few shards at a time."""
        return cast("Iterator[tuple[str, int]]", self._room("manifest").files_in(path))

    def audit(self, place: Place) -> dict[str, dict[str, Any]]:
        """Name, size and hash of each file of what was set aside when it was made; see `write_audit`."""
        path = f"{place.name}/{self.manifest}"
        files = checked(dict[str, _AuditFile], self.head(place).get("audit", {}), path)
        for file in files.values():
            if not stays_in_folder(file["name"], hidden=False):
                raise StoreError(f'{path}: the file name "{file["name"]}" leaves the folder; refused.')
        return cast("dict[str, dict[str, Any]]", files)

    def audit_paths(self, place: Place) -> dict[str, Path]:
        """Where these files lie, as far as they are on this machine."""
        if place.folder is None:
            return {}
        paths = {what: place.folder / file["name"] for what, file in self.audit(place).items()}
        return {what: path for what, path in paths.items() if path.exists()}

    def problems(self, place: Place, manifest: StoreManifest) -> Iterator[str]:
        """What is wrong with the files of a store."""
        return cast("Iterator[str]", self._room("verify").problems(place, manifest))

    def _room(self, module: str) -> Any:
        return import_module(f"milldam.stores.{self.name}.{module}")

    # ---- the manifest ----

    def write(self, folder: Path, value: dict[str, Any], listed: tuple[str, Iterable[bytes]] | None = None) -> None:
        """Write the manifest. `listed`: a key whose list is empty in `value`, and what stands between its brackets."""
        head = {"format": self.format, "format_version": self.version, "created_by": f"milldam {__version__}"}
        text = json_bytes(head | value)[: -len(_CLOSED)]
        with NewFile(folder / self.manifest) as new:
            for block in sealed_blocks([text] if listed is None else _filled(text, *listed)):
                new.write(block)
            with replacing(folder / self.manifest):
                new.commit()

    def parse(self, data: bytes, path: str | Path, whole: bool | None = None) -> dict[str, Any]:
        """The object in a manifest of this kind. `whole`: of a part of one, whether all of it is as it was written."""
        value = self.require(parse_json(data, path), path)
        value.pop("check", None)
        if not (is_whole_text(data) if whole is None else whole):
            raise StoreError(
                f"{path}: damaged: it is not as it was written (its check is not that of its text). Make it again."
            )
        return value

    def value(self, place: Place) -> dict[str, Any]:
        """The object in the manifest of a store."""
        data = place.manifest(self.manifest)
        if data is None:
            raise StoreError(place.not_a_store() if place.folder is None else self.missing_in(place.folder))
        return self.parse(data[:], f"{place.name}/{self.manifest}")

    def require(self, value: Any, path: str | Path) -> dict[str, Any]:
        if not isinstance(value, dict) or value.get("format") != self.format:
            raise StoreError(f"{path}: not the manifest of {self.phrase}.")
        if value.get("format_version") != self.version:
            raise StoreError(
                f"{path}: its format_version is {str(value.get('format_version'))[:40]}; this milldam reads "
                f"{self.version}. Upgrade milldam, or make it again."
            )
        return value

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
            how = f"`milldam status {folder}` says how to continue."
            return f"{folder}: unfinished: a run was interrupted here. {how}"
        splits = sorted(path.parent.name for path in folder.glob(f"*/{self.manifest}"))
        if splits:
            named = f"Name {folder / splits[0]}, say."
            return f"{folder}: not {self.phrase} itself, but there is one of each split: {', '.join(splits)}. {named}"
        return f"{folder}: not {self.phrase} (no {self.manifest} in it)."


def _filled(text: bytes, key: str, inner: Iterable[bytes]) -> Iterator[bytes]:
    before, after = text.split(f'\n "{key}": []'.encode(), 1)
    yield before + f'\n "{key}": ['.encode()
    yield from inner
    yield b"]" + after


TOKENS = Kind(
    "tokens",
    "milldam.json",
    "milldam store",
    "a token store",
    "`milldam.open` opens it.",
    "milldam.loader.stores:Store",
)
TABLE = Kind(
    "table",
    "milldam-table.json",
    "milldam table",
    "a table that milldam.map made",
    '`milldam.Table("{0}")` opens it; its `.to_hf()` gives a datasets.Dataset.',
    "milldam.stores.table.reader:Table",
)
FEATURES = Kind(
    "features",
    "milldam-qa.json",
    "milldam features",
    "a store of question-answering features",
    '`milldam.qa.FeatureStore("{0}")` opens it.',
    "milldam.stores.features.reader:FeatureStore",
)
KINDS = (TOKENS, FEATURES, TABLE)


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
    """What was read: all of it, or nothing where nobody knows."""

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
# ---- generations: a process keeps reading what it opened ----

KEPT = Path("run", "kept")
_FINGERPRINT = re.compile(rb'\n "fingerprint": "([0-9a-f]{32})"')
_HEAD_BYTES = 4096
_ATTEMPTS, _WAIT_S = 200, 0.005


class Held:
    """An open file, and a shared lock on it where that can be: both last as long as this, in forked processes too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def lock(self) -> bool:
        """Whether nobody can miss it any more: it is locked and still has its name, or there are no locks here."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True
        try:
            return os.path.samestat(os.fstat(self._descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def map(self) -> mmap.mmap | bytes:
        """What is in it."""
        try:
            return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it is empty, or can't be mapped
            with open(self._descriptor, "rb", closefd=False) as file:
                file.seek(0)
                return file.read()

    def touch(self) -> None:
        """Note that it is used now."""
        with contextlib.suppress(OSError):
            os.utime(self._descriptor)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "_descriptor"):
            # Not unlocked: processes that were forked may still read. When Python ends, `os` may be gone before.
            close(self._descriptor)


def hold(path: Path) -> Held:
    """The file that has this name now, held. FileNotFoundError: there is none."""
    for _ in range(_ATTEMPTS):
        held = Held(path)
        if held.lock():
            return held
        # It was just replaced, or somebody looks whether it is held.
        time.sleep(_WAIT_S)
    return held


def kept_manifest(folder: Path, fingerprint: str) -> Path | None:
    """The manifest of an earlier generation that is still being read."""
    return next((folder / KEPT).glob(f"{fingerprint}-*.json"), None)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[None]:
    """Around the rename that replaces a manifest: those who read the old one keep it, and what it names."""
    try:
        file = path.open("r+b")  # NFS gives the exclusive lock to writers alone
    except OSError:  # there is none
        yield
        return
    with file:
        # When nobody holds it, nobody can begin to before it has lost its name: the lock lasts until then.
        if _is_held(file):
            _keep(path, file)
        yield


def _keep(path: Path, file: IO[bytes]) -> None:
    found, inode = _FINGERPRINT.search(file.read(_HEAD_BYTES)), os.fstat(file.fileno()).st_ino
    kept = path.parent / KEPT
    if found is not None:
        with contextlib.suppress(OSError):  # it is kept already, or there are no hard links here
            kept.mkdir(parents=True, exist_ok=True)
            os.link(path, kept / f"{found[1].decode()}-{inode}.json")
            sync_folder(kept)


def live_files(folder: Path, kind: Kind) -> Iterator[str]:
    """Names of the files that the manifest of a folder, or a generation that is still being read, is made of.

    Kept manifests that nobody holds are removed first. Call it while holding the lock of the run.
    """
    from milldam.stores.place import Folder

    for path in (folder / KEPT).glob("*.json"):
        with path.open("r+b") as file:
            if not _is_held(file):
                path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (folder / KEPT).rmdir()
    for manifest in (folder / kind.manifest, *sorted((folder / KEPT).glob("*.json"))):
        yield from (name for name, _ in kind.files_in(manifest))
        yield from (file["name"] for file in kind.audit(Folder(folder, manifest)).values())


def _is_held(file: IO[bytes]) -> bool:
    """Whether others have a file locked; if not, it is locked for this process alone, until the file is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    return False
