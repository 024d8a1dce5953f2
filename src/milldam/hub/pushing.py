"""A folder to a repository: huggingface_hub sends the files, in as many commits as it takes; the manifest comes last.

    look     what the repository has at its head, and which of the store's files are missing there
    send     `upload_folder` of what is missing: it compares by sha256 and leaves out what it had sent before a kill
    close    one more commit: the manifest, the card, and the removal of what the store no longer has

After each step the repository is looked at again, until nothing is left to do: so a kill, a lost network and a change
by someone else in between are one case. A repository without the manifest is no store, so half a push is none. Where an
earlier store is replaced, its manifest goes with the first commit. Until the last one, `.milldam-push.json` in the
repository lists the files that are ours, so that the next push, of this store or of another, knows what it may replace.

Nothing is pushed but what the manifest names, the manifest and the card. Memory: the manifest, an entry per file, and
what huggingface_hub holds for the files it sends at a time.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from milldam.errors import ConfigError, MilldamError, MismatchError, Setting, StoreError
from milldam.files import address_of, json_bytes
from milldam.hub import card, client
from milldam.hub.client import (
    REPO_TYPE,
    Entry,
    Tell,
    Tree,
    explained,
    has_token,
    hub_api,
    quiet,
    read_small,
    read_tree,
    repo_name,
    same_bytes,
    tried,
    trouble_of,
)
from milldam.hub.contents import Contents, StoredFile, check_sizes, is_whole, read_contents
from milldam.memory import format_size
from milldam.run.summary import Summary
from milldam.stores.kinds import KINDS

MARK = ".milldam-push.json"
MAIN = "main"
_ROUNDS = 20
"""Looks at the repository: of a few that are needed, and those that others cost."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    folder: Path
    repo: str
    public: bool = False
    revision: str | None = None
    message: str | None = None
    dry_run: bool = False


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


@dataclass(frozen=True, slots=True)
class _ToDo:
    """What is left to do on a tree."""

    missing: tuple[StoredFile, ...]
    small: dict[str, bytes]
    """The card and the manifest, where they differ from what is there."""
    stale: tuple[str, ...]
    """Files of an earlier push that the store no longer has."""
    owned: frozenset[str]
    """All files there that an earlier push put there."""
    note: str | None
    """What the user should know of the card."""


def push_store(request: PushRequest, tell: Tell | None = None) -> PushSummary:
    """Push a store; see the module. `tell` is given a sentence now and then."""
    repo = repo_name(request.repo)
    address = address_of(request.folder)
    if address is not None:
        raise ConfigError(f"{address}: what is pushed lies on this machine. Copy it here first.")
    contents = read_contents(request.folder)
    check_sizes(request.folder, contents)
    api = hub_api()
    if not has_token() and not request.dry_run:
        raise ConfigError(
            "No token for the Hub. Make one that may write at https://huggingface.co/settings/tokens,\n"
            "then `hf auth login` or set HF_TOKEN."
        )
    started = time.monotonic()
    with quiet(tell):
        summary = _Push(request, repo, contents, api, tell or (lambda _: None)).run()
    return replace(summary, seconds=time.monotonic() - started)


class _Push:
    def __init__(self, request: PushRequest, repo: str, contents: Contents, api: Any, tell: Tell) -> None:
        self.request, self.repo, self.contents, self.api, self.tell = request, repo, contents, api, tell
        self.revision = request.revision or MAIN
        self.url = f"{api.endpoint}/datasets/{repo}"
        self.message = request.message or f"Push {contents.kind.phrase} with milldam"
        self.checked: set[str] = set()
        """Files that were compared with the manifest."""
        self.sent: set[str] = set()
        """Files that the last step has sent."""
        self.same: dict[str, Entry] = {}
        """What the repository has for files that are known to have our bytes."""

    def run(self) -> PushSummary:
        private = self._visibility()
        if private is None:
            private = not self.request.public
            if self.request.dry_run:
                nothing = Tree("", {})
                return self._summary(private, nothing, self._look(nothing), None)
            self._create(private)
        before = self._tree()
        todo = self._look(before)
        after = None if self.request.dry_run else self._bring_up_to_date(before, todo)
        return self._summary(private, before, todo, after)

    # ---- the repository ----

    def _visibility(self) -> bool | None:
        """Whether it is private; None when there is none. One that is not as asked is refused."""
        from huggingface_hub.utils import RepositoryNotFoundError

        try:
            info = tried(
                "look at",
                self.repo,
                lambda: self.api.repo_info(self.repo, repo_type=REPO_TYPE),
                passing=(RepositoryNotFoundError,),
            )
        except RepositoryNotFoundError:
            return None
        if not info.private and not self.request.public:
            raise ConfigError(
                f"{self.repo} is public: everybody could read what is pushed. Nothing was pushed.\nAdd ",
                Setting("public"),
                " if that is meant, or choose another name.",
            )
        if info.private and self.request.public:
            raise ConfigError(
                f"{self.repo} is private, and milldam does not change that. Nothing was pushed.\nLeave out ",
                Setting("public"),
                f", or make it public first: {self.url}/settings",
            )
        return bool(info.private)

    def _create(self, private: bool) -> None:
        self.tell(f"Making {self.repo}, {'private' if private else 'public'}")
        make = self.api.create_repo
        tried("make", self.repo, lambda: make(self.repo, repo_type=REPO_TYPE, private=private, exist_ok=True))
        # Someone else may have made it in the meantime, and not as it was asked for.
        if self._visibility() is None:
            raise StoreError(f"{self.repo}: was made and is not there. Run the same command again.")

    def _tree(self) -> Tree:
        """The head of the branch, which is made when it is not there."""
        from huggingface_hub.utils import RevisionNotFoundError

        try:
            return read_tree(self.api, self.repo, self.revision, passing=(RevisionNotFoundError,))
        except RevisionNotFoundError:
            if self.request.dry_run:
                return Tree("", {})
        tried(
            f"make the branch {self.revision} of",
            self.repo,
            lambda: self.api.create_branch(self.repo, repo_type=REPO_TYPE, branch=self.revision, exist_ok=True),
        )
        return read_tree(self.api, self.repo, self.revision)

    # ---- look ----

    def _look(self, tree: Tree) -> _ToDo:
        owned, known = self._earlier(tree)
        self.same |= {
            file.name: tree.entries[file.name]
            for file in self.contents.files
            if (file in known or file.name in self.sent) and _has_size(tree, file)
        }
        self.sent.clear()
        missing = tuple(file for file in self.contents.files if not self._is_there(tree, file))
        foreign = [file.name for file in missing if file.name in tree.entries and file.name not in owned]
        if foreign:
            raise MismatchError(
                f"{self.repo} has a file {foreign[0]} that milldam did not put there; it is not replaced.\n"
                "Choose another name, or another ",
                Setting("revision"),
                ".",
            )
        stale = tuple(sorted(name for name in owned - self.contents.names if name in tree.entries))
        small, note = self._small_files(tree)
        return _ToDo(missing, small, stale, frozenset(owned), note)

    def _is_there(self, tree: Tree, file: StoredFile) -> bool:
        return file.name in tree.entries and tree.entries[file.name] == self.same.get(file.name)

    def _earlier(self, tree: Tree) -> tuple[set[str], set[StoredFile]]:
        """Names of the files there that an earlier push put there, and those whose bytes its manifest vouches for."""
        kind = self.contents.kind
        for other in KINDS:
            if other is not kind and other.manifest in tree.entries:
                raise MismatchError(
                    f"{self.repo} holds {other.phrase}; this is {kind.phrase}.\nChoose another name, or another ",
                    Setting("revision"),
                    ".",
                )
        owned: set[str] = set()
        known: set[StoredFile] = set()
        if kind.manifest in tree.entries:
            there = self._contents_there(tree)
            owned, known = owned | there.names, set(there.files)
        if MARK in tree.entries:
            try:
                owned |= set(json.loads(read_small(self.api, self.repo, tree, MARK))["files"])
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self.repo}: {MARK} can't be read. Remove it from the repository.") from None
        return owned, known

    def _contents_there(self, tree: Tree) -> Contents:
        """What the manifest in the repository names."""
        kind = self.contents.kind
        if same_bytes(self.contents.manifest_bytes, tree.entries[kind.manifest]):
            return self.contents
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / kind.manifest).write_bytes(read_small(self.api, self.repo, tree, kind.manifest))
            try:
                return read_contents(folder, kind)
            except StoreError as error:
                reason = str(error).replace(f"{folder}/", "")
                raise MismatchError(
                    f"{self.repo}: what is there is not replaced, for it can't be read: {reason}\nChoose another name."
                ) from None

    def _small_files(self, tree: Tree) -> tuple[dict[str, bytes], str | None]:
        existing = None
        if card.NAME in tree.entries:
            existing = read_small(self.api, self.repo, tree, card.NAME).decode("utf-8", errors="surrogateescape")
        made = card.make_card(self.contents, self.repo, existing)
        found: dict[str, bytes] = {}
        if made.text != existing:
            found[card.NAME] = made.text.encode("utf-8", errors="surrogateescape")
        name = self.contents.kind.manifest
        if not same_bytes(self.contents.manifest_bytes, tree.entries.get(name)):
            found[name] = self.contents.manifest_bytes
        return found, made.note

    # ---- send, close ----

    def _bring_up_to_date(self, tree: Tree, todo: _ToDo) -> Tree:
        """Do what is left, step by step, each followed by a look; after trouble that may pass, too. The last tree."""
        waits = iter(client.WAITS)
        for _ in range(_ROUNDS):
            try:
                if todo.missing:
                    self._send(tree, todo)
                elif todo.small or todo.stale or MARK in tree.entries:
                    self._close(tree, todo)
                else:
                    return tree
                waits = iter(client.WAITS)
            except MilldamError:
                raise
            except Exception as error:
                trouble = trouble_of(error)
                wait = next(waits, None)
                if wait is None or not trouble.transient:
                    raise explained("push to", self.repo, trouble, error) from None
                self.tell(f"The Hub did not take it ({trouble.text}); trying again in {wait:.0f} s")
                time.sleep(wait)
            tree = read_tree(self.api, self.repo, self.revision)
            todo = self._look(tree)
        raise StoreError(f"{self.repo}: someone else keeps changing it. Run the same command again later.")

    def _send(self, tree: Tree, todo: _ToDo) -> None:
        self._check(todo.missing)
        size = sum(file.bytes or 0 for file in todo.missing)
        self.tell(f"Sending {len(todo.missing)} files, {format_size(size)}, as far as they are not there")
        manifest = self.contents.kind.manifest
        with tempfile.TemporaryDirectory(prefix="milldam-push-") as name:
            # A folder with exactly what is to be sent: thousands of patterns would take huggingface_hub minutes.
            folder = Path(name)
            for file in todo.missing:
                (folder / file.name).symlink_to(self.request.folder.resolve() / file.name)
            # Its name sorts first, so that it is in the first of several commits.
            (folder / MARK).write_bytes(json_bytes({"files": sorted(todo.owned | self.contents.names)}))
            self.api.upload_folder(
                repo_id=self.repo,
                repo_type=REPO_TYPE,
                folder_path=folder,
                revision=self.revision,
                commit_message=self.message,
                delete_patterns=[manifest] if manifest in tree.entries else None,
                parent_commit=tree.commit,
            )
        self.sent.update(file.name for file in todo.missing)

    def _check(self, files: tuple[StoredFile, ...]) -> None:
        """What is sent is what the manifest says."""
        for file in files:
            if file.name not in self.checked and not is_whole(self.request.folder, file):
                raise StoreError(
                    f"{self.request.folder / file.name}: its bytes are not those of the manifest; it was not pushed.\n"
                    f"`milldam verify {self.request.folder}` checks the store; make it again."
                )
            self.checked.add(file.name)

    def _close(self, tree: Tree, todo: _ToDo) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        self.tell(f"Closing with {', '.join([*todo.small, *(f'the removal of {name}' for name in todo.stale)])}")
        gone = [*todo.stale, *([MARK] if MARK in tree.entries else [])]
        self.api.create_commit(
            self.repo,
            [
                *(CommitOperationDelete(name, is_folder=False) for name in gone),
                *(CommitOperationAdd(name, data) for name, data in todo.small.items()),
            ],
            commit_message=self.message,
            repo_type=REPO_TYPE,
            revision=self.revision,
            parent_commit=tree.commit,
        )

    # ---- the summary ----

    def _summary(self, private: bool, before: Tree, todo: _ToDo, after: Tree | None) -> PushSummary:
        """Of the repository before and after, or, in a dry run, of what was to do."""
        names, manifest = self.contents.names, self.contents.kind.manifest
        if after is None:
            sizes = {file.name: file.bytes or 0 for file in todo.missing}
            if manifest in todo.small:
                sizes[manifest] = len(todo.small[manifest])
        else:
            changed = (name for name in names if after.entries[name] != before.entries.get(name))
            sizes = {name: after.entries[name].size for name in changed}
        notes = []
        if paths := card.local_paths(json.loads(self.contents.manifest_bytes)):
            notes.append(f"The manifest names {len(paths)} paths of this machine, such as {paths[0]}.")
        if todo.note:
            notes.append(todo.note)
        counts = {"files": len(names), "sent": len(sizes), "sent_bytes": sum(sizes.values())}
        return Summary(
            job="push",
            out=self.url,
            up_to_date=not sizes and not todo.stale,
            counts=counts | {"present": len(names) - len(sizes), "removed": len(todo.stale)},
            warnings=tuple(notes),
            facts={
                "repo": self.repo,
                "revision": self.revision,
                "commit": (after or before).commit or None,
                "private": private,
                "kind": self.contents.kind.name,
                "dry_run": self.request.dry_run,
                "removed": todo.stale,
            },
        )


def _has_size(tree: Tree, file: StoredFile) -> bool:
    entry = tree.entries.get(file.name)
    return entry is not None and file.bytes in (None, entry.size)
