"""The job of `milldam push`: a folder -> a repository, in the frame of run/job.py. A group of files is a unit.

    look     what the repository has at its head, and which of the store's files it is known to have
    send     `upload_folder` of a group, as far as it is not there, in a commit or several; then a record
    close    one more commit: the manifest, the card, and the removal of what the store no longer has

A record stands while the repository has what was recorded: so a kill, a lost network and a change by someone else in
between are one case. A repository without the manifest is no store, so half a push is none. Where an earlier store is
replaced, its manifest goes with the first commit. Until the last one, `.milldam-push.json` in the repository lists the
files that are ours, so that the next push, of this store or of another, knows what it may replace.

Nothing is written to the store: plan and records lie in the cache folder, by repository and branch, until all is done.
Nothing is pushed but what the manifest names, the manifest and the card. Memory: the manifest, an entry per file, and
what huggingface_hub holds for the files it sends at a time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import quote

from milldam.errors import ConfigError, MismatchError, Setting, StoreError
from milldam.files import address_of, json_bytes, user_cache
from milldam.hub import card
from milldam.hub.client import (
    REPO_TYPE,
    Entry,
    Tree,
    awaited,
    has_token,
    hub_api,
    quiet,
    read_entries,
    read_small,
    read_tree,
    repo_name,
    same_bytes,
    tried,
)
from milldam.hub.contents import (
    Contents,
    FileGroup,
    StoredFile,
    check_sizes,
    is_whole,
    moving,
    parse_contents,
    plan_groups,
    read_contents,
)
from milldam.run import job as frame
from milldam.run.folder import RunFolder, WorkFolder
from milldam.run.pools import WorkPlan
from milldam.run.records import RECORDS, Record, Records
from milldam.run.session import Session, Stage
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity
from milldam.stores.kinds import KINDS, Kind

PUSH = Kind("push", "milldam-push.json", "milldam push", "a push", "Run it again.")
MARK = ".milldam-push.json"
MAIN = "main"
_ROUNDS = 20
"""Looks at the repository: one or two that are needed, and those that others cost."""


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


def push_store(request: PushRequest, observer: Observer | None = None) -> PushSummary:
    """Push a store, or what is left of it; see the module."""
    repo = repo_name(request.repo)
    address = address_of(request.folder)
    if address is not None:
        raise ConfigError(f"{address}: a store to push must be on this machine. Copy it here first.")
    contents = read_contents(request.folder)
    check_sizes(request.folder, contents)
    api = hub_api()
    if not has_token() and not request.dry_run:
        raise ConfigError(
            "No token for the Hub. Make one that may write at https://huggingface.co/settings/tokens,\n"
            "then `hf auth login` or set HF_TOKEN."
        )
    job = PushJob(request, repo, contents, api)
    with quiet():
        if request.dry_run:
            return job.rehearse()
        summary = frame.run(job, frame.Options(job.place.work, name=Path(repo)), observer)
        job.place.remove()
    return summary


def push_folder(repo: str, revision: str | None = None) -> Path:
    """Where a push to a branch works, until it is done."""
    return user_cache() / "pushes" / quote(f"{repo}@{revision or MAIN}", safe="@")


@dataclass(frozen=True, slots=True)
class _Look:
    """What a tree has of the store, and what is left to do beside its files."""

    tree: Tree
    known: dict[str, Entry]
    """The files of the store that the manifest there vouches for."""
    small: dict[str, bytes]
    """The card and the manifest, where they differ from what is there."""
    stale: tuple[str, ...]
    """Files of an earlier push that the store no longer has."""
    owned: frozenset[str]
    """All files there that an earlier push put there."""
    note: str | None
    """What the user should know of the card."""

    @property
    def is_closed(self) -> bool:
        return not self.small and not self.stale and MARK not in self.tree.entries


@dataclass(frozen=True, slots=True)
class _Prepared:
    identity: Identity
    private: bool
    before: _Look


@dataclass(frozen=True, slots=True)
class _Done:
    after: Tree
    reused: int


class PushJob:
    """A store to a branch of a repository."""

    kind = PUSH

    def __init__(self, request: PushRequest, repo: str, contents: Contents, api: Any) -> None:
        self._request, self._repo, self._contents, self._api = request, repo, contents, api
        self._revision = request.revision or MAIN
        self._url = f"{api.endpoint}/datasets/{repo}"
        self._message = request.message or f"Push {contents.kind.phrase} with milldam"
        self.place = WorkFolder(push_folder(repo, request.revision), PUSH, Path(repo))

    # ---- the job ----

    def prepare(self, session: Session) -> _Prepared:
        private = self._visibility()
        if private is None:
            private = self._create()
        session.folder.inputs.write(())
        asked = {"repo": self._repo, "revision": self._revision}
        return _Prepared(Identity({"push": asked}, self._contents.state), private, self._look(self._tree()))

    def has_results(self, folder: RunFolder) -> bool:
        return True

    def plan(self, session: Session, prepared: _Prepared, begin: str) -> WorkPlan:
        return plan_groups(session, prepared.identity, begin, self._contents)

    def stages(self, session: Session, prepared: _Prepared, plan: WorkPlan) -> Generator[Stage, None, _Done]:
        folder, warn = session.folder, session.observer.warn
        reused = self._records(folder, prepared.before).complete
        for _ in range(_ROUNDS):
            look, records = tried("push to", self._repo, partial(self._settle, folder), warn=warn)
            if records.complete < plan.units:
                yield moving(partial(self._send, look, warn), folder, records, plan)
            elif look.is_closed:
                return _Done(look.tree, reused)
        raise StoreError(f"{self._repo}: someone else keeps changing it. Run the same command again later.")

    def finish(self, session: Session, prepared: _Prepared, plan: WorkPlan, done: _Done) -> PushSummary:
        before, after = prepared.before.tree.entries, done.after.entries
        sizes = {name: after[name].size for name in self._contents.names if after[name] != before.get(name)}
        summary = self._summary(prepared.private, sizes, prepared.before, done.after)
        return session.measured(replace(summary, units=plan.units, reused=done.reused, workers=plan.workers))

    def up_to_date(self, session: Session, prepared: _Prepared) -> PushSummary | None:
        """A work folder is removed when all is done."""
        return None

    def rehearse(self) -> PushSummary:
        """What would be done; only reads."""
        private = self._visibility()
        look = self._look(Tree("", {}) if private is None else self._tree())
        sizes = {file.name: file.bytes or 0 for file in self._contents.files if file.name not in look.known}
        sizes |= {name: len(data) for name, data in look.small.items() if name in self._contents.names}
        return self._summary(not self._request.public if private is None else private, sizes, look, look.tree)

    # ---- the repository ----

    def _visibility(self) -> bool | None:
        """Whether it is private; None when there is none. One that is not as asked is refused."""
        from huggingface_hub.utils import RepositoryNotFoundError

        try:
            info = tried(
                "look at",
                self._repo,
                lambda: self._api.repo_info(self._repo, repo_type=REPO_TYPE),
                passing=(RepositoryNotFoundError,),
            )
        except RepositoryNotFoundError:
            return None
        if not info.private and not self._request.public:
            raise ConfigError(
                f"{self._repo} is public: everybody could read what is pushed. Nothing was pushed.\nAdd ",
                Setting("public"),
                " if that is meant, or choose another name.",
            )
        if info.private and self._request.public:
            raise ConfigError(
                f"{self._repo} is private, and milldam does not change that. Nothing was pushed.\nLeave out ",
                Setting("public"),
                f", or make it public first: {self._url}/settings",
            )
        return bool(info.private)

    def _create(self) -> bool:
        """Make it; whether it is private."""
        make = partial(self._api.create_repo, self._repo, repo_type=REPO_TYPE, exist_ok=True)
        tried("make", self._repo, lambda: make(private=not self._request.public))
        # Someone else may have made it in the meantime, and not as it was asked for.
        private = self._visibility()
        if private is None:
            raise StoreError(f"{self._repo}: was made and is not there. Run the same command again.")
        return private

    def _tree(self) -> Tree:
        """The head of the branch, which is made when it is not there."""
        from huggingface_hub.utils import RevisionNotFoundError

        try:
            return read_tree(self._api, self._repo, self._revision, passing=(RevisionNotFoundError,))
        except RevisionNotFoundError:
            if self._request.dry_run:
                return Tree("", {})
        tried(
            f"make the branch {self._revision} of",
            self._repo,
            lambda: self._api.create_branch(self._repo, repo_type=REPO_TYPE, branch=self._revision, exist_ok=True),
        )
        return read_tree(self._api, self._repo, self._revision)

    # ---- look ----

    def _look(self, tree: Tree) -> _Look:
        """Refuses what is in the way."""
        owned, vouched = self._earlier(tree)
        foreign = [file.name for file in self._contents.files if file.name in tree.entries and file.name not in owned]
        if foreign:
            raise MismatchError(
                f"{self._repo} has a file {foreign[0]} that milldam did not put there; it is not replaced.\n"
                "Choose another name, or another ",
                Setting("revision"),
                ".",
            )
        known = {
            file.name: tree.entries[file.name]
            for file in self._contents.files
            if file in vouched and _has_size(tree.entries, file)
        }
        stale = tuple(sorted(name for name in owned - self._contents.names if name in tree.entries))
        small, note = self._small_files(tree)
        return _Look(tree, known, small, stale, frozenset(owned), note)

    def _earlier(self, tree: Tree) -> tuple[set[str], set[StoredFile]]:
        """Names of the files there that an earlier push put there, and those whose bytes its manifest vouches for."""
        kind = self._contents.kind
        for other in KINDS:
            if other is not kind and other.manifest in tree.entries:
                raise MismatchError(
                    f"{self._repo} holds {other.phrase}; this is {kind.phrase}.\nChoose another name, or another ",
                    Setting("revision"),
                    ".",
                )
        owned: set[str] = set()
        vouched: set[StoredFile] = set()
        if kind.manifest in tree.entries:
            there = self._contents_there(tree)
            owned, vouched = owned | there.names, set(there.files)
        if MARK in tree.entries:
            try:
                owned |= set(json.loads(read_small(self._api, self._repo, tree, MARK))["files"])
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self._repo}: {MARK} can't be read. Remove it from the repository.") from None
        return owned, vouched

    def _contents_there(self, tree: Tree) -> Contents:
        """What the manifest in the repository names."""
        kind = self._contents.kind
        if same_bytes(self._contents.manifest_bytes, tree.entries[kind.manifest]):
            return self._contents
        try:
            return parse_contents(read_small(self._api, self._repo, tree, kind.manifest), kind, self._repo)
        except StoreError as error:
            raise MismatchError(
                f"{self._repo}: what is there is not replaced, for it can't be read: {error}\nChoose another name."
            ) from None

    def _small_files(self, tree: Tree) -> tuple[dict[str, bytes], str | None]:
        existing = None
        if card.NAME in tree.entries:
            existing = read_small(self._api, self._repo, tree, card.NAME).decode("utf-8", errors="surrogateescape")
        made = card.make_card(self._contents, self._repo, existing)
        found: dict[str, bytes] = {}
        if made.text != existing:
            found[card.NAME] = made.text.encode("utf-8", errors="surrogateescape")
        name = self._contents.kind.manifest
        if not same_bytes(self._contents.manifest_bytes, tree.entries.get(name)):
            found[name] = self._contents.manifest_bytes
        return found, made.note

    # ---- send, close ----

    def _records(self, folder: RunFolder, look: _Look) -> Records:
        """What is done: records of what the repository still has, and what the manifest there vouches for."""
        there = look.tree.entries

        def stands(record: Record) -> bool:
            return all(there.get(name) == Entry(*entry) for name, entry in record.facts["entries"].items())

        records = Records(folder.journal, RECORDS, folder.out, folder.units.keys(), stands)
        for number in records.pending():
            group = folder.units.at(number, FileGroup.from_json)
            if all(file.name in look.known for file in group.files):
                records.add(_record(group, look.known, records.keys[number]))
        return records

    def _send(self, look: _Look, warn: Callable[[str], None], group: FileGroup, tell: Callable[[int], None]) -> Record:
        """Send a group of files, as far as the repository is not known to have them."""
        folder = self._request.folder
        missing = [file for file in group.files if file.name not in look.known]
        for file in missing:
            if not is_whole(folder, file):
                raise StoreError(
                    f"{folder / file.name}: its bytes are not those of the manifest; it was not pushed.\n"
                    f"`milldam verify {folder}` checks the store; make it again."
                )
        present = group.size - sum(file.bytes or 0 for file in missing)
        mark = json_bytes({"files": sorted(look.owned | self._contents.names)})
        call = partial(self._commit, missing, mark)
        sent = tried("push to", self._repo, lambda: awaited(call, lambda: tell(present)), warn=warn)
        return _record(group, look.known | sent)

    def _commit(self, files: list[StoredFile], mark: bytes) -> dict[str, Entry]:
        """Send files on top of what is there now; what the repository has then."""
        names, manifest, folder = [file.name for file in files], self._contents.kind.manifest, self.place.files
        head = self._api.repo_info(self._repo, repo_type=REPO_TYPE, revision=self._revision).sha
        there = read_entries(self._api, self._repo, head, [manifest, MARK])
        # A folder with exactly what is to be sent: thousands of patterns would take huggingface_hub minutes.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in names:
            (folder / name).symlink_to(self._request.folder.resolve() / name)
        if not same_bytes(mark, there.get(MARK)):
            # Its name sorts first, so that it is in the first of several commits.
            (folder / MARK).write_bytes(mark)
        made = self._api.upload_folder(
            repo_id=self._repo,
            repo_type=REPO_TYPE,
            folder_path=folder,
            revision=self._revision,
            commit_message=self._message,
            delete_patterns=[manifest] if manifest in there else None,
            parent_commit=head,
        )
        sent = read_entries(self._api, self._repo, made.oid, names)
        wrong = next((file.name for file in files if not _has_size(sent, file)), None)
        if wrong is not None:
            raise StoreError(f"{self._repo}: {wrong} was sent and is not there. Run the same command again.")
        return sent

    def _settle(self, folder: RunFolder) -> tuple[_Look, Records]:
        """Look at what is there; when all files are, make the last commit, and look again."""
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        look = self._look(self._tree())
        records = self._records(folder, look)
        if records.complete < len(records.keys) or look.is_closed:
            return look, records
        gone = [*look.stale, *([MARK] if MARK in look.tree.entries else [])]
        self._api.create_commit(
            self._repo,
            [
                *(CommitOperationDelete(name, is_folder=False) for name in gone),
                *(CommitOperationAdd(name, data) for name, data in look.small.items()),
            ],
            commit_message=self._message,
            repo_type=REPO_TYPE,
            revision=self._revision,
            parent_commit=look.tree.commit,
        )
        look = self._look(self._tree())
        return look, self._records(folder, look)

    # ---- the summary ----

    def _summary(self, private: bool, sizes: dict[str, int], look: _Look, after: Tree) -> PushSummary:
        """`sizes`: of the files that were sent, or would be."""
        files = len(self._contents.names)
        notes = []
        if paths := card.local_paths(json.loads(self._contents.manifest_bytes)):
            notes.append(f"The manifest names {len(paths)} paths of this machine, such as {paths[0]}.")
        if look.note:
            notes.append(look.note)
        counts = {"files": files, "sent": len(sizes), "sent_bytes": sum(sizes.values())}
        return Summary(
            job="push",
            out=self._url,
            up_to_date=not sizes and not look.stale,
            counts=counts | {"present": files - len(sizes), "removed": len(look.stale)},
            warnings=tuple(notes),
            facts={
                "repo": self._repo,
                "revision": self._revision,
                "commit": after.commit or None,
                "private": private,
                "kind": self._contents.kind.name,
                "dry_run": self._request.dry_run,
                "removed": look.stale,
            },
        )


def _record(group: FileGroup, entries: dict[str, Entry], key: str = "") -> Record:
    sent = {file.name: dataclasses.astuple(entries[file.name]) for file in group.files}
    return Record(key, counts={"files": len(sent)}, facts={"entries": sent})


def _has_size(entries: dict[str, Entry], file: StoredFile) -> bool:
    entry = entries.get(file.name)
    return entry is not None and file.bytes in (None, entry.size)
