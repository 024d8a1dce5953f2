"""What a repository has at one commit, and whether a file there is ours byte by byte.

The Hub tells size and sha256 of large files, size and git's sha1 of small ones. Ours are read in blocks, and only
where a file of the same name and size is there; the digests are remembered in `run/hub.jsonl` beside the store, so
that a push that is run again need not read what it has sent. Memory: an entry a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milldam.errors import StoreError
from milldam.hub.client import REPO_TYPE, tried
from milldam.sealed import seal_line, unseal_line

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the repository."""

    size: int
    sha256: str | None
    """None for a small file, which git has itself."""
    blob: str
    """Git's own id: for a small file, the sha1 of its bytes."""


@dataclass(frozen=True, slots=True)
class Tree:
    commit: str
    entries: dict[str, Entry]
    """By path."""


def read_tree(api: Any, repo: str, revision: str | None, *, passing: tuple[type[Exception], ...] = ()) -> Tree:
    """The files of a revision, all of one commit."""
    info = tried("look at", repo, lambda: api.repo_info(repo, repo_type=REPO_TYPE, revision=revision), passing=passing)
    listed = tried(
        "list the files of",
        repo,
        lambda: list(api.list_repo_tree(repo, recursive=True, repo_type=REPO_TYPE, revision=info.sha)),
    )
    return Tree(info.sha, {one.path: _entry(one) for one in listed if hasattr(one, "blob_id")})


def _entry(file: Any) -> Entry:
    large = file.lfs
    return Entry(int(file.size), None if large is None else str(large.sha256), str(file.blob_id))


def read_small(api: Any, repo: str, tree: Tree, name: str) -> bytes:
    """The bytes of a small file of a commit: a manifest, a card."""
    with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
        path = fetch(api, repo, tree.commit, name, Path(folder))
        return path.read_bytes()


def fetch(api: Any, repo: str, commit: str, name: str, folder: Path) -> Path:
    """Stream a file of a commit into a folder, under its name."""
    found = tried(
        f"fetch {name} from",
        repo,
        lambda: api.hf_hub_download(repo, name, repo_type=REPO_TYPE, revision=commit, local_dir=str(folder)),
    )
    return Path(found)


class Digests:
    """The sha256 of a store's files, computed once and remembered beside the store while they stay as they are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "run" / "hub.jsonl"
        self._known: dict[str, tuple[int, int, str]] = {}
        with contextlib.suppress(OSError), self._path.open("rb") as lines:
            for line in lines:
                # A torn last line is what a kill leaves: its file is read again.
                one = unseal_line(line)
                if one is not None:
                    self._known[one["file"]] = (one["bytes"], one["mtime_ns"], one["sha256"])

    def is_same(self, name: str, entry: Entry) -> bool:
        """Whether our file has the bytes of that one."""
        path = self._folder / name
        if path.stat().st_size != entry.size:
            return False
        if entry.sha256 is None:
            return _digest(path, hashlib.sha1(b"blob %d\0" % entry.size, usedforsecurity=False)) == entry.blob
        return self.sha256(name) == entry.sha256

    def sha256(self, name: str) -> str:
        found = self._path_state(name)
        known = self._known.get(name)
        if known is not None and known[:2] == found:
            return known[2]
        digest = _digest(self._folder / name, hashlib.sha256())
        self.remember(name, digest)
        return digest

    def remember(self, name: str, sha256: str) -> None:
        """Where the folder can't be written, nothing is remembered."""
        size, mtime = self._path_state(name)
        self._known[name] = (size, mtime, sha256)
        record = {"file": name, "bytes": size, "mtime_ns": mtime, "sha256": sha256}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("ab") as lines:
                lines.write(seal_line(record))

    def _path_state(self, name: str) -> tuple[int, int]:
        try:
            found = (self._folder / name).stat()
        except OSError as error:
            raise StoreError(f"{self._folder / name}: can't be read ({error.strerror}).") from None
        return found.st_size, found.st_mtime_ns


def same_bytes(data: bytes, entry: Entry | None) -> bool:
    """The same for bytes at hand."""
    if entry is None or len(data) != entry.size:
        return False
    if entry.sha256 is not None:
        return hashlib.sha256(data).hexdigest() == entry.sha256
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest() == entry.blob


def _digest(path: Path, digest: Any) -> str:
    with path.open("rb", buffering=0) as file:
        read: Callable[[int], bytes | None] = file.read
        while block := read(_BLOCK):
            digest.update(block)
    return str(digest.hexdigest())
