"""A repository to a folder: the manifest is read first and written last; every file is checked before it has its name.

    OUT/.milldam-pull/plan.json     what is being pulled, and which files of an earlier pull are to go
    OUT/.milldam-pull/files/        files while they are fetched
    OUT/run/pull.json               where a finished store came from

A file is streamed to disk under a temporary name, compared with the manifest (size, xxh3), synced and renamed.
Without its manifest the folder is no store. Run again, files that are there and whole are kept, the rest is fetched;
of a file that a kill cut short, huggingface_hub goes on where it stopped if its version can, else fetches it again.
All of one commit, even when someone pushes meanwhile. Memory: the manifest, an entry per file, and the buffers of a
few streams.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.files import (
    explain_os_errors,
    hash_bytes,
    refuse_address,
    remove_temporaries,
    sync_folder,
    write_file,
)
from milldam.hub.client import hub_api, quiet, repo_name
from milldam.hub.contents import (
    Contents,
    StoredFile,
    is_whole,
    kind_among,
    read_contents,
    select_split,
    wrong_size,
)
from milldam.hub.tree import Tree, fetch, read_tree
from milldam.memory import format_size
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.kinds import FEATURES, KINDS, TOKENS

STREAMS = 4
"""Files that are fetched at a time."""
STAGING = ".milldam-pull"
_RECORD = Path("run") / "pull.json"
_MARK = ".milldam-push.json"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PullRequest:
    repo: str
    out: Path | None = None
    """None: a folder of the repository's name, here."""
    revision: str | None = None
    split: str | None = None


@dataclass(frozen=True, slots=True)
class PullSummary:
    repo: str
    out: Path
    commit: str
    kind: str
    files: int
    """That the store has, its manifest among them."""
    bytes: int
    fetched: int
    fetched_bytes: int
    kept: int
    """Files that were there and whole."""
    removed: int
    """Files of an earlier pull that the store no longer has."""

    @property
    def up_to_date(self) -> bool:
        return not self.fetched and not self.removed

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out), "up_to_date": self.up_to_date}

    def open(self) -> Any:
        """The store, memory-mapped."""
        if self.kind == TOKENS.name:
            from milldam.loader.stores import Store

            return Store(self.out)
        if self.kind == FEATURES.name:
            from milldam.stores.features.reader import FeatureStore

            return FeatureStore(self.out)
        from milldam.stores.table.reader import Table

        return Table(self.out)


def pull_store(request: PullRequest, tell: Tell | None = None) -> PullSummary:
    """Pull a store; see the module. `tell` is given a sentence now and then."""
    repo = repo_name(request.repo)
    out = request.out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    with quiet():
        tree = read_tree(api, repo, request.revision)
        return _Pull(request, repo, out, api, tree, tell or (lambda _: None)).run()


class _Pull:
    def __init__(self, request: PullRequest, repo: str, out: Path, api: Any, tree: Tree, tell: Tell) -> None:
        self.request, self.repo, self.out, self.api, self.tree, self.tell = request, repo, out, api, tree, tell
        self.staging = out / STAGING
        self.identity = {"repo": repo, "revision": request.revision, "split": request.split}
        self.fetched = self.fetched_bytes = self.kept = 0

    def run(self) -> PullSummary:
        kind = self._kind()
        _refuse_other_things(self.out)
        with self._at_work():
            contents = self._contents(kind)
            earlier = self._earlier(contents)
            stale = earlier - contents.names
            begun = (self.staging / "plan.json").exists()
            if not self._is_finished(contents):
                begun = True
                self._begin(contents, earlier)
                self._fetch_all(contents)
                write_file(self.out / kind.manifest, contents.manifest_bytes)
            for name in stale:
                (self.out / name).unlink(missing_ok=True)
            if begun:
                self._record(contents)
        return PullSummary(
            repo=self.repo,
            out=self.out,
            commit=self.tree.commit,
            kind=kind.name,
            files=len(contents.names),
            bytes=contents.size,
            fetched=self.fetched,
            fetched_bytes=self.fetched_bytes,
            kept=self.kept,
            removed=len(stale),
        )

    # ---- there ----

    def _kind(self) -> Any:
        names = set(self.tree.entries)
        if _MARK in names and not any(kind.manifest in names for kind in KINDS):
            raise StoreError(f"{self.repo}: a push to it is not finished. Run that `milldam push` again, then pull.")
        return kind_among(names, self.repo)

    def _contents(self, kind: Any) -> Contents:
        """What the manifest there names; every file must be in the repository, of its size."""
        folder = self.staging / "files"
        fetch(self.api, self.repo, self.tree.commit, kind.manifest, folder)
        try:
            contents = read_contents(folder, kind)
        except StoreError as error:
            raise StoreError(str(error).replace(str(folder), self.repo)) from None
        for file in contents.files:
            entry = self.tree.entries.get(file.name)
            if entry is None or file.bytes not in (None, entry.size):
                found = "missing" if entry is None else f"{entry.size:,} bytes where the manifest says {file.bytes:,}"
                raise StoreError(f"{self.repo}: {file.name}: {found}. The repository is damaged; push the store again.")
        return contents if self.request.split is None else select_split(contents, self.request.split, self.repo)

    # ---- here ----

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """The folder with its staging, held by this process alone; staging goes when all is done."""
        with explain_os_errors(self.out / STAGING):
            (self.staging / "files").mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.staging / "lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"{self.out}: another `milldam pull` is at work here. Wait for it.") from None
        try:
            remove_temporaries(self.out)
            _remove_useless_parts(self.staging)
            yield
            shutil.rmtree(self.staging, ignore_errors=True)
        except BaseException:
            self._leave_no_trace_of_nothing()
            raise
        finally:
            lock.release()

    def _leave_no_trace_of_nothing(self) -> None:
        """A pull that failed before it fetched anything leaves the folder as it was."""
        if not (self.staging / "plan.json").exists():
            shutil.rmtree(self.staging, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.out.rmdir()

    def _earlier(self, contents: Contents) -> set[str]:
        """Files of earlier pulls into this folder. What was pulled from elsewhere, or made here, is refused."""
        names: set[str] = set()
        if plan := (read_sealed(self.staging / "plan.json") or {}):
            self._refuse_other(plan, f"an unfinished pull of {_told(plan)}")
            names |= set(plan["files"])
        held = [kind for kind in KINDS if (self.out / kind.manifest).exists()]
        here = (self.out / held[0].manifest).read_bytes() if held else contents.manifest_bytes
        if here == contents.manifest_bytes:
            return names
        record = read_sealed(self.out / _RECORD) or {}
        # Another manifest than the one that was pulled: since then, a store was made here.
        if record.get("manifest") != hash_bytes(here):
            raise MismatchError(
                f"{self.out} holds another store, which is not replaced. Choose another folder with -o."
            )
        self._refuse_other(record, f"what was pulled from {_told(record)}")
        return names | read_contents(self.out, held[0]).names

    def _refuse_other(self, found: dict[str, Any], what: str) -> None:
        if any(found.get(key) != value for key, value in self.identity.items()):
            raise MismatchError(f"{self.out} holds {what}, which is not replaced. Choose another folder with -o.")

    def _is_finished(self, contents: Contents) -> bool:
        """The manifest is there, and the files have their sizes; `milldam verify` reads them."""
        path = self.out / contents.kind.manifest
        if not path.exists() or path.read_bytes() != contents.manifest_bytes:
            return False
        if any(wrong_size(self.out, file) for file in contents.files):
            return False
        self.kept = len(contents.names)
        return True

    def _begin(self, contents: Contents, earlier: set[str]) -> None:
        """Write down what is begun; then the manifest of an earlier pull goes, since its files are about to change."""
        write_sealed(self.staging / "plan.json", self.identity | {"files": sorted(earlier | contents.names)})
        for kind in KINDS:
            (self.out / kind.manifest).unlink(missing_ok=True)
        sync_folder(self.out)

    def _fetch_all(self, contents: Contents) -> None:
        missing = []
        for file in contents.files:
            if is_whole(self.out, file):
                self.kept += 1
            else:
                missing.append(file)
        total = sum(file.bytes or 0 for file in missing)
        self.tell(f"Fetching {len(missing)} files, {format_size(total)}; {self.kept} are here")
        pool = ThreadPoolExecutor(STREAMS)
        try:
            waiting = [pool.submit(self._fetch, file) for file in missing]
            for done in as_completed(waiting):
                self.fetched_bytes += done.result()
                self.fetched += 1
                self.tell(f"{self.fetched} of {len(missing)} files, {format_size(self.fetched_bytes)}")
        except BaseException as error:
            # Ctrl-C does not wait for the network.
            pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
            raise
        pool.shutdown()
        self.fetched += 1
        self.fetched_bytes += len(contents.manifest_bytes)

    def _fetch(self, file: StoredFile) -> int:
        """Fetch one file, twice if its bytes are wrong, and give it its name. Its size."""
        folder = self.staging / "files"
        for _ in range(2):
            path = fetch(self.api, self.repo, self.tree.commit, file.name, folder)
            if is_whole(folder, file):
                return self._settle(path, file)
            path.unlink(missing_ok=True)
        raise StoreError(
            f"{self.repo}: {file.name} is not what its manifest says (size or hash differs), fetched twice.\n"
            "The repository is damaged; push the store again."
        )

    def _settle(self, path: Path, file: StoredFile) -> int:
        target = self.out / file.name
        with explain_os_errors(target):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            path.rename(target)
            sync_folder(self.out)
        return target.stat().st_size

    def _record(self, contents: Contents) -> None:
        (self.out / _RECORD).parent.mkdir(exist_ok=True)
        found = self.identity | {"commit": self.tree.commit, "manifest": hash_bytes(contents.manifest_bytes)}
        write_sealed(self.out / _RECORD, found)


def _refuse_other_things(out: Path) -> None:
    """A folder that is neither empty, nor a store, nor a pull that was interrupted."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: a file, not a folder. Choose another place with -o.")
    if not out.exists() or (out / STAGING / "plan.json").exists():
        return
    if any((out / kind.manifest).exists() for kind in KINDS):
        return
    others = [path.name for path in out.iterdir() if path.name != STAGING]
    if others:
        raise ConfigError(f"{out} holds something else ({sorted(others)[0]}). Choose another folder with -o.")


def _remove_useless_parts(staging: Path) -> None:
    """Parts of files under names that no later attempt of huggingface_hub takes up: NAME.ETAG.RANDOM.incomplete."""
    for path in (staging / "files").glob(".cache/huggingface/download/**/*.incomplete"):
        if path.name.count(".") >= 3:
            path.unlink(missing_ok=True)


def _told(found: dict[str, Any]) -> str:
    more = [f"{name} {found[name]}" for name in ("revision", "split") if found.get(name)]
    return ", ".join([str(found.get("repo")), *more])
