"""`milldam push`: a folder -> a repository, its manifest in the last commit.

    look     what the repository has at its head, and what is left to do there
    send     the files that it does not have, by `upload_folder`, in commits of their own
    close    one more commit: the manifest, the card, and the removal of what the store no longer has

Until that last commit an earlier store in the repository stays whole (shards are named after their bytes; a file that
changes under its name comes with the manifest), and half a push of a first one is no store. Meanwhile
`.milldam-push.json` lists the files that are ours, so that the next push, of this store or of another, knows what it
may replace. huggingface_hub sends nothing twice, and the manifest there vouches for the files that it names: so a kill,
a lost network and a change by someone else are one case: look again.

Nothing is written to the store, and nothing is pushed but what its manifest names, the manifest and the card. Memory:
the manifest, an entry per file, and what huggingface_hub holds for the files that it sends at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from milldam.errors import ConfigError, MismatchError, Setting, StoreError
from milldam.files import address_of, json_bytes
from milldam.hub.card import CARD, local_paths, make_card
from milldam.hub.client import explained, files_at, hub_api, read_file, repo_name
from milldam.hub.contents import Contents, StoredFile, parse_contents, read_contents
from milldam.run.summary import Summary
from milldam.stores.kinds import KINDS

MARK = ".milldam-push.json"
_MOST_FILES, _MOST_BYTES = 512, 10 * 10**9
"""Files that are checked, then sent by one call of huggingface_hub."""


class PushFacts(TypedDict):
    """What only a push tells."""

    repo: str
    revision: str
    commit: str | None
    """The head after the push; None where nothing was committed because the repository is not there (dry run)."""
    private: bool
    kind: str
    dry_run: bool
    removed: tuple[str, ...]
    """Files of an earlier push that the store no longer has."""


PushSummary = Summary[PushFacts]


def push_store(
    folder: Path,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: bool = False,
) -> PushSummary:
    """Push a store, or what is left of it; see the module."""
    repo = repo_name(repo)
    address = address_of(folder)
    if address is not None:
        raise ConfigError(f"{address}: a store to push must be on this machine. Copy it here first.")
    contents = read_contents(folder)
    for file in contents.files:
        if problem := file.wrong_size(folder):
            raise StoreError(f"{problem}. `milldam verify {folder}` checks the store; make it again.")
    push = _Push(folder, contents, hub_api(), repo, revision or "main", public)
    push.message = message or push.message
    from huggingface_hub import get_token

    if get_token() is None and not dry_run:
        raise ConfigError(
            "No token for the Hub. Make one that may write at https://huggingface.co/settings/tokens,\n"
            "then `hf auth login` or set HF_TOKEN."
        )
    with explained(f"{'look at' if dry_run else 'push to'} {repo}", progress=progress):
        return push.rehearse() if dry_run else push.run()


@dataclass(frozen=True, slots=True)
class _Look:
    """What the repository has at a commit, and what is left to do."""

    commit: str | None
    there: dict[str, Any]
    """Its files by name."""
    missing: list[StoredFile]
    changed: list[StoredFile]
    """Those that the manifest there names with other bytes."""
    small: dict[str, bytes]
    """The manifest and the card, where they are not there yet."""
    stale: tuple[str, ...]
    ours: set[str]
    """Names of the files there that an earlier push put there."""
    note: str | None

    @property
    def is_closed(self) -> bool:
        return not (self.missing or self.changed or self.small or self.stale or MARK in self.there)


class _Push:
    """A store on its way to a branch of a repository."""

    def __init__(self, folder: Path, contents: Contents, api: Any, repo: str, revision: str, public: bool) -> None:
        self._folder, self._contents, self._api, self._repo = folder, contents, api, repo
        self._revision, self._public = revision, public
        self.message = f"Push {contents.kind.phrase} with milldam"
        self._sent: set[str] = set()

    def run(self) -> PushSummary:
        private = self._visibility()
        if private is None:
            self._api.create_repo(self._repo, repo_type="dataset", exist_ok=True, private=not self._public)
            # Someone else may have made it in the meantime, and not as it was asked for.
            private = bool(self._visibility())
        if self._revision != "main":
            self._api.create_branch(self._repo, repo_type="dataset", branch=self._revision, exist_ok=True)
        before = look = self._look()
        if look.missing:
            self._send(look)
            look = self._look()
        if look.missing:
            raise StoreError(f"{self._repo}: {look.missing[0].name} was sent and is not there. Push again.")
        if not look.is_closed:
            self._close(look)
            look = self._look()
        return self._summary(private, before, look)

    def rehearse(self) -> PushSummary:
        """What would be done; only reads."""
        private = self._visibility()
        look = self._look() if private is not None else self._plan(None, {})
        return self._summary(not self._public if private is None else private, look, None)

    def _visibility(self) -> bool | None:
        """Whether the repository is private; None when there is none. One that is not as asked is refused."""
        from huggingface_hub.utils import RepositoryNotFoundError

        try:
            private = bool(self._api.repo_info(self._repo, repo_type="dataset").private)
        except RepositoryNotFoundError:
            return None
        if not private and not self._public:
            raise ConfigError(
                f"{self._repo} is public: everybody could read what is pushed. Nothing was pushed.\nAdd ",
                Setting("public"),
                " if that is meant, or choose another name.",
            )
        if private and self._public:
            raise ConfigError(
                f"{self._repo} is private, and milldam does not change that. Nothing was pushed.\nLeave out ",
                Setting("public"),
                f", or make it public first: {self._api.endpoint}/datasets/{self._repo}/settings",
            )
        return private

    # ---- look ----

    def _look(self) -> _Look:
        from huggingface_hub.utils import RevisionNotFoundError

        try:
            head = self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision).sha
        except RevisionNotFoundError:  # in a dry run
            return self._plan(None, {})
        return self._plan(head, files_at(self._api, self._repo, head))

    def _plan(self, commit: str | None, there: dict[str, Any]) -> _Look:
        """What is left to do. Refuses what is in the way."""
        earlier, ours, manifest = self._earlier(commit, there)
        missing: list[StoredFile] = []
        changed: list[StoredFile] = []
        for file in self._contents.files:
            is_there, before = file.name in there, earlier.get(file.name)
            if is_there and file.name not in ours:
                self._refuse(f"has a file {file.name} that milldam did not put there; it is not replaced.")
            has_size = is_there and file.bytes in (None, there[file.name].size)
            if not (has_size and (file.name in self._sent or before == file)):
                (changed if is_there and before not in (None, file) else missing).append(file)
        small = {}
        if manifest != self._contents.manifest_bytes:
            small[self._contents.kind.manifest] = self._contents.manifest_bytes
        old = self._read(commit, CARD).decode(errors="surrogateescape") if CARD in there else None
        card, note = make_card(self._contents, self._repo, old)
        if card != old:
            small[CARD] = card.encode(errors="surrogateescape")
        stale = tuple(sorted(name for name in ours - self._contents.names if name in there))
        return _Look(commit, there, missing, changed, small, stale, ours, note)

    def _earlier(self, commit: str | None, there: dict[str, Any]) -> tuple[dict[str, StoredFile], set[str], bytes]:
        """What an earlier push left: the files that its manifest names, names of all that are ours, the manifest."""
        kind = self._contents.kind
        files: dict[str, StoredFile] = {}
        ours, manifest = set[str](), b""
        for other in KINDS:
            if other is not kind and other.manifest in there:
                self._refuse(f"holds {other.phrase}; this is {kind.phrase}.")
        if kind.manifest in there:
            manifest = self._read(commit, kind.manifest)
            try:
                files = {file.name: file for file in parse_contents(manifest, kind, self._repo).files}
            except StoreError as error:
                self._refuse(f"has a manifest that can't be read: {error}")
            ours = {kind.manifest, *files}
        if MARK in there:
            try:
                ours |= set(json.loads(self._read(commit, MARK))["files"])
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self._repo}: {MARK} can't be read. Remove it from the repository.") from None
        return files, ours, manifest

    def _read(self, commit: str | None, name: str) -> bytes:
        return read_file(self._api, self._repo, commit, name)

    def _refuse(self, what: str) -> NoReturn:
        raise MismatchError(f"{self._repo} {what}\nChoose another name, or another ", Setting("revision"), ".")

    # ---- send, close ----

    def _send(self, look: _Look) -> None:
        """Send the files that are not there, on top of what is there now."""
        mark = json_bytes({"files": sorted(look.ours | self._contents.names)})
        for files in _in_groups(look.missing):
            self._check(files)
            # A folder with exactly what is to be sent: thousands of patterns would take huggingface_hub minutes. The
            # mark's name sorts first, so that it is in the first of several commits.
            with tempfile.TemporaryDirectory(prefix="milldam-hub-") as folder:
                Path(folder, MARK).write_bytes(mark)
                for file in files:
                    Path(folder, file.name).symlink_to(self._folder.resolve() / file.name)
                self._api.upload_folder(
                    repo_id=self._repo,
                    repo_type="dataset",
                    folder_path=folder,
                    revision=self._revision,
                    commit_message=self.message,
                )
            self._sent.update(file.name for file in files)

    def _close(self, look: _Look) -> None:
        """The last commit; refused by the Hub when someone else made one since the look."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self._check(look.changed)
        gone = [*look.stale, *([MARK] if MARK in look.there else [])]
        self._api.create_commit(
            self._repo,
            [
                *(CommitOperationDelete(name, is_folder=False) for name in gone),
                *(CommitOperationAdd(file.name, self._folder / file.name) for file in look.changed),
                *(CommitOperationAdd(name, data) for name, data in look.small.items()),
            ],
            commit_message=self.message,
            repo_type="dataset",
            revision=self._revision,
            parent_commit=look.commit,
        )
        self._sent.update(file.name for file in look.changed)

    def _check(self, files: Sequence[StoredFile]) -> None:
        for file in files:
            if not file.is_in(self._folder):
                raise StoreError(
                    f"{self._folder / file.name}: its bytes are not those of the manifest; it was not pushed.\n"
                    f"`milldam verify {self._folder}` checks the store; make it again."
                )

    def _summary(self, private: bool, look: _Look, last: _Look | None) -> PushSummary:
        """`last`: the repository afterwards; None when nothing was done."""
        if last is None:
            sizes = {file.name: file.bytes or 0 for file in (*look.missing, *look.changed)}
            sizes |= {name: len(data) for name, data in look.small.items()}
        else:
            before = {name: entry.blob_id for name, entry in look.there.items()}
            sizes = {name: entry.size for name, entry in last.there.items() if entry.blob_id != before.get(name)}
        sizes = {name: size for name, size in sizes.items() if name in self._contents.names}
        notes = [look.note] if look.note else []
        if paths := local_paths(json.loads(self._contents.manifest_bytes)):
            notes.append(f"The manifest names {len(paths)} paths of this machine, such as {paths[0]}.")
        files = len(self._contents.names)
        counts = {"files": files, "sent": len(sizes), "sent_bytes": sum(sizes.values()), "present": files - len(sizes)}
        return Summary(
            job="push",
            out=f"{self._api.endpoint}/datasets/{self._repo}",
            up_to_date=not sizes and not look.stale,
            counts=counts | {"removed": len(look.stale)},
            warnings=tuple(notes),
            facts={
                "repo": self._repo,
                "revision": self._revision,
                "commit": (last or look).commit,
                "private": private,
                "kind": self._contents.kind.name,
                "dry_run": last is None,
                "removed": look.stale,
            },
        )


def _in_groups(files: list[StoredFile]) -> Iterator[list[StoredFile]]:
    group: list[StoredFile] = []
    for file in files:
        group.append(file)
        if len(group) == _MOST_FILES or sum(one.bytes or 0 for one in group) >= _MOST_BYTES:
            yield group
            group = []
    if group:
        yield group
