"""A repository to a folder: the manifest is read first and written last; every file is compared with it in between.

    OUT/run/pull.json               what is being pulled, or where a finished store came from
    OUT/.cache/huggingface/         huggingface_hub's own, while it fetches: how far it is

`snapshot_download` fetches what is missing, and takes up what a kill cut short if its version can. Then size and xxh3
are compared with the manifest, and the files synced. Without its manifest the folder is no store. Run again, files that
are there and whole are kept. All of one commit, even when someone pushes meanwhile. Memory: the manifest, an entry per
file, and the buffers of a few streams.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.files import explain_os_errors, hash_bytes, refuse_address, remove_temporaries, sync_folder, write_file
from milldam.hub.client import REPO_TYPE, Tell, Tree, hub_api, quiet, read_small, read_tree, repo_name, tried
from milldam.hub.contents import Contents, StoredFile, is_whole, kind_among, read_contents, select_split, wrong_size
from milldam.hub.pushing import MARK
from milldam.memory import format_size
from milldam.run.summary import Summary
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.kinds import KINDS, Kind, store_kind

STREAMS = 4
"""Files that are fetched at a time."""
RECORD = Path("run") / "pull.json"
_AT_ONCE = 200
"""Files in a call: huggingface_hub compares every name of the repository with every one that is asked for."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    repo: str
    out: Path | None = None
    """None: a folder of the repository's name, here."""
    revision: str | None = None
    split: str | None = None


class PullFacts(TypedDict):
    """What only a pull tells."""

    repo: str
    commit: str
    kind: str


PullSummary = Summary[PullFacts]


def pull_store(request: PullRequest, tell: Tell | None = None) -> PullSummary:
    """Pull a store; see the module. `tell` is given a sentence now and then."""
    repo = repo_name(request.repo)
    out = request.out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    started = time.monotonic()
    with quiet(tell):
        tree = read_tree(api, repo, request.revision)
        summary = _Pull(request, repo, out, api, tree, tell or (lambda _: None)).run()
    return replace(summary, seconds=time.monotonic() - started)


@dataclass(frozen=True, slots=True)
class _Here:
    """What the folder holds of earlier pulls."""

    begun: bool = False
    """A pull was interrupted."""
    names: frozenset[str] = field(default_factory=frozenset)


class _Pull:
    def __init__(self, request: PullRequest, repo: str, out: Path, api: Any, tree: Tree, tell: Tell) -> None:
        self.request, self.repo, self.out, self.api, self.tree, self.tell = request, repo, out, api, tree, tell
        self.identity = {"repo": repo, "revision": request.revision, "split": request.split}

    def run(self) -> PullSummary:
        kind = self._kind()
        _refuse_other_things(self.out)
        contents = self._contents(kind)
        here = self._here(contents)
        stale = here.names - contents.names
        if not here.begun and not stale and self._is_finished(contents):
            return self._summary(contents, [], stale)
        with self._locked():
            missing = [] if self._is_finished(contents) else self._fetch_all(contents, here)
            for name in stale:
                (self.out / name).unlink(missing_ok=True)
            self._record(contents.names, commit=self.tree.commit, manifest=hash_bytes(contents.manifest_bytes))
            self._clear_cache()
        return self._summary(contents, missing, stale)

    def _summary(self, contents: Contents, missing: list[StoredFile], stale: frozenset[str]) -> PullSummary:
        # The manifest comes with them.
        fetched = len(missing) + 1 if missing else 0
        size = sum((self.out / file.name).stat().st_size for file in missing)
        counts = {"files": len(contents.names), "fetched": fetched, "kept": len(contents.names) - fetched}
        counts["fetched_bytes"] = size + (len(contents.manifest_bytes) if missing else 0)
        return Summary(
            job="pull",
            out=str(self.out),
            up_to_date=not fetched and not stale,
            counts=counts | {"removed": len(stale)},
            output_bytes=contents.size,
            facts={"repo": self.repo, "commit": self.tree.commit, "kind": contents.kind.name},
        )

    # ---- there ----

    def _kind(self) -> Kind:
        names = set(self.tree.entries)
        if MARK in names and not any(kind.manifest in names for kind in KINDS):
            raise StoreError(f"{self.repo}: a push to it is not finished. Run that `milldam push` again, then pull.")
        return kind_among(names, self.repo)

    def _contents(self, kind: Kind) -> Contents:
        """What the manifest there names; every file must be in the repository, of its size."""
        with tempfile.TemporaryDirectory(prefix="milldam-pull-") as name:
            (Path(name) / kind.manifest).write_bytes(read_small(self.api, self.repo, self.tree, kind.manifest))
            try:
                contents = read_contents(Path(name), kind)
            except StoreError as error:
                raise StoreError(str(error).replace(name, self.repo)) from None
        for file in contents.files:
            entry = self.tree.entries.get(file.name)
            if entry is None or file.bytes not in (None, entry.size):
                found = "missing" if entry is None else f"{entry.size:,} bytes where the manifest says {file.bytes:,}"
                raise StoreError(f"{self.repo}: {file.name}: {found}. The repository is damaged; push the store again.")
        return contents if self.request.split is None else select_split(contents, self.request.split, self.repo)

    # ---- here ----

    @contextlib.contextmanager
    def _locked(self) -> Any:
        from filelock import FileLock, Timeout

        with explain_os_errors(self.out / RECORD):
            (self.out / RECORD).parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.out / RECORD.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.out}: another `milldam pull` is at work here. Wait for it.") from None
        try:
            remove_temporaries(self.out)
            yield
        finally:
            lock.release()
            (self.out / RECORD.with_suffix(".lock")).unlink(missing_ok=True)

    def _here(self, contents: Contents) -> _Here:
        """What earlier pulls left in this folder. What was pulled from elsewhere, or made here, is refused."""
        record = read_sealed(self.out / RECORD) or {}
        held = store_kind(self.out) if self.out.is_dir() else None
        begun = bool(record) and record.get("manifest") is None
        if begun:
            self._refuse_other(record, "an unfinished pull of")
        if held is None or (self.out / held.manifest).read_bytes() == contents.manifest_bytes:
            return _Here(begun, frozenset(record["files"]) if begun else frozenset())
        # Another manifest than the one that was pulled: since then, a store was made here.
        if not begun and record.get("manifest") != hash_bytes((self.out / held.manifest).read_bytes()):
            raise MismatchError(f"{self.out} holds another store, which is not replaced. Choose another folder.")
        self._refuse_other(record, "what was pulled from")
        return _Here(begun, frozenset(record["files"]))

    def _refuse_other(self, record: dict[str, Any], what: str) -> None:
        if any(record.get(key) != value for key, value in self.identity.items()):
            more = [f"{name} {record[name]}" for name in ("revision", "split") if record.get(name)]
            told = ", ".join([str(record.get("repo")), *more])
            raise MismatchError(f"{self.out} holds {what} {told}, which is not replaced. Choose another folder.")

    def _is_finished(self, contents: Contents) -> bool:
        """The manifest is there, and the files have their sizes; `milldam verify` reads them."""
        path = self.out / contents.kind.manifest
        if not path.exists() or path.read_bytes() != contents.manifest_bytes:
            return False
        return not any(wrong_size(self.out, file) for file in contents.files)

    def _record(self, names: set[str] | frozenset[str], **finished: str) -> None:
        write_sealed(self.out / RECORD, self.identity | {"files": sorted(names)} | finished)

    # ---- fetching ----

    def _fetch_all(self, contents: Contents, here: _Here) -> list[StoredFile]:
        """Fetch what is not here and whole, then write the manifest. The files that were fetched."""
        self._record(here.names | contents.names)
        # Its files are about to change.
        for kind in KINDS:
            (self.out / kind.manifest).unlink(missing_ok=True)
        sync_folder(self.out)
        missing = [file for file in contents.files if not is_whole(self.out, file)]
        size = format_size(sum(file.bytes or 0 for file in missing))
        self.tell(f"Fetching {len(missing)} files, {size}; {len(contents.files) - len(missing)} are here")
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            # Twice if bytes are wrong.
            wrong = self._fetch(self._fetch(some))
            if wrong:
                raise StoreError(
                    f"{self.repo}: {wrong[0].name} is not what its manifest says (size or hash differs), fetched "
                    "twice.\nThe repository is damaged: remove that file there, and push the store again."
                )
            if len(missing) > _AT_ONCE:
                self.tell(f"{first + len(some)} of {len(missing)} files")
        write_file(self.out / contents.kind.manifest, contents.manifest_bytes)
        return missing

    def _fetch(self, files: list[StoredFile]) -> list[StoredFile]:
        """Fetch files, and compare them with the manifest; those that are wrong, which are removed again."""
        if not files:
            return []
        for file in files:
            # What is here under its name is not whole, and huggingface_hub might take it for what it fetched.
            (self.out / file.name).unlink(missing_ok=True)
        tried(
            "fetch the files of",
            self.repo,
            lambda: self.api.snapshot_download(
                self.repo,
                repo_type=REPO_TYPE,
                revision=self.tree.commit,
                local_dir=self.out,
                allow_patterns=[glob.escape(file.name) for file in files],
                max_workers=STREAMS,
            ),
        )
        if not any((self.out / file.name).exists() for file in files):
            # It returns an empty folder too, when the Hub can't be reached.
            raise InputError(f"Can't fetch the files of {self.repo}: the Hub does not answer.\nRun the command again.")
        wrong = []
        for file in files:
            path = self.out / file.name
            if is_whole(self.out, file):
                _sync(path)
            else:
                path.unlink(missing_ok=True)
                wrong.append(file)
        sync_folder(self.out)
        return wrong

    def _clear_cache(self) -> None:
        """What huggingface_hub kept of its work; `.cache` itself may be someone's."""
        shutil.rmtree(self.out / ".cache" / "huggingface", ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.out / ".cache").rmdir()


def _sync(path: Path) -> None:
    with explain_os_errors(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _refuse_other_things(out: Path) -> None:
    """A folder that is neither empty, nor a store, nor a pull that was interrupted."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: a file, not a folder. Choose another place.")
    if not out.exists() or (out / RECORD).exists() or store_kind(out) is not None:
        return
    others = sorted(path.name for path in out.iterdir() if path.name not in ("run", ".cache"))
    if others:
        raise ConfigError(f"{out} holds something else ({others[0]}). Choose another folder.")
