"""A folder to a repository: files streamed in commits of a bounded size, the manifest in the last one.

    look      what the repository has at its head: names, sizes, digests, and which files are ours
    plan      what is missing, cut into steps; one step when it all fits
    commit    step by step, each on the commit that was looked at; if someone else comes between, look again

A repository without the manifest is no store, so half a push is none. When an earlier store is replaced, its manifest
goes with the first step and what it alone named with the last. While a push takes several steps, `.milldam-push.json`
in the repository lists the files that are ours, so that the next push, of this store or of another, knows what it may
replace.

Nothing is pushed but what the manifest names, the manifest and the card. Memory: the manifest, an entry per file, and
what huggingface_hub holds for the files it sends at a time.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, MilldamError, MismatchError, StoreError
from milldam.files import address_of, json_bytes
from milldam.hub import card, client
from milldam.hub.client import REPO_TYPE, explained, has_token, hub_api, quiet, repo_name, tried, trouble_of
from milldam.hub.contents import Contents, StoredFile, check_sizes, is_whole, read_contents
from milldam.hub.tree import Digests, Entry, Tree, read_small, read_tree, same_bytes
from milldam.memory import format_size
from milldam.stores.kinds import KINDS

log = logging.getLogger("milldam")

FILES_A_COMMIT = 100
BYTES_A_COMMIT = 8 * 10**9
THREADS = 4
"""Files that are sent at a time."""
MARK = ".milldam-push.json"
MAIN = "main"

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PushRequest:
    folder: Path
    repo: str
    public: bool = False
    revision: str | None = None
    message: str | None = None
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class PushSummary:
    repo: str
    url: str
    revision: str
    commit: str | None
    """The head after the push; None where nothing was committed because the repository is not there (dry run)."""
    private: bool
    kind: str
    uploaded: int
    """Files of the store that were sent, the manifest among them."""
    uploaded_bytes: int
    present: int
    """Files that were there already."""
    deleted: tuple[str, ...]
    """Files of an earlier push that the store no longer has."""
    dry_run: bool = False
    notes: tuple[str, ...] = ()

    @property
    def up_to_date(self) -> bool:
        return not self.uploaded and not self.deleted

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"up_to_date": self.up_to_date}


@dataclass(frozen=True, slots=True)
class Step:
    """One commit."""

    files: tuple[StoredFile, ...] = ()
    data: dict[str, bytes] = field(default_factory=dict)
    """Small files by name: manifest, card, mark."""
    deleted: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        if not self.files:
            return ", ".join(name for name in self.data if name != MARK) or "removals"
        return f"{len(self.files)} files, {format_size(sum(file.bytes or 0 for file in self.files))}"


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
    with quiet():
        return _Push(request, repo, contents, api, tell or (lambda _: None)).run()


class _Push:
    def __init__(self, request: PushRequest, repo: str, contents: Contents, api: Any, tell: Tell) -> None:
        self.request, self.repo, self.contents, self.api, self.tell = request, repo, contents, api, tell
        self.revision = request.revision or MAIN
        self.digests = Digests(request.folder)
        self.notes: list[str] = []
        self.sent: dict[str, int] = {}
        """Files of the store that this push has committed, with their sizes."""
        self.deleted: list[str] = []

    def run(self) -> PushSummary:
        private = self._visibility()
        if paths := card.local_paths(json.loads(self.contents.manifest_bytes)):
            self.notes.append(f"The manifest names {len(paths)} paths of this machine, such as {paths[0]}.")
        if private is None:
            private = not self.request.public
            if self.request.dry_run:
                return self._summary(private, None)
            self._create(private)
        tree = self._tree()
        if self.request.dry_run:
            return self._summary(private, tree.commit or None, self._plan(tree))
        return self._summary(private, self._commit_all(tree))

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
                f"{self.repo} is public: everybody could read what is pushed. Nothing was pushed.\n"
                "Add --public if that is meant, or choose another name."
            )
        if info.private and self.request.public:
            raise ConfigError(
                f"{self.repo} is private, and milldam does not change that. Nothing was pushed.\n"
                f"Leave out --public, or make it public first: {self.url}/settings"
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

    # ---- the plan ----

    def _plan(self, tree: Tree) -> list[Step]:
        """What is left to do on a tree, in order."""
        manifest = self.contents.kind.manifest
        owned = self._owned(tree)
        missing = [file for file in self.contents.files if not self._is_there(file, tree.entries.get(file.name))]
        self._refuse_foreign(missing, owned, tree)
        stale = tuple(sorted(name for name in owned - self.contents.names if name in tree.entries))
        data = self._small_files(tree)
        if MARK in tree.entries:
            stale += (MARK,)
        if not missing and not stale and not data:
            return []
        batches = list(_batches(missing))
        if len(batches) <= 1:
            return [Step(tuple(missing), data, stale)]
        old = (manifest,) if manifest in tree.entries else ()
        mark = {MARK: json_bytes({"files": sorted(owned | self.contents.names)})}
        data[manifest] = self.contents.manifest_bytes
        last = Step((), data, tuple(dict.fromkeys((*stale, MARK))))
        return [Step(batches[0], mark, old), *(Step(batch) for batch in batches[1:]), last]

    def _is_there(self, file: StoredFile, entry: Entry | None) -> bool:
        return entry is not None and self.digests.is_same(file.name, entry)

    def _small_files(self, tree: Tree) -> dict[str, bytes]:
        """The card and the manifest, where they differ from what is there. The manifest comes last."""
        found: dict[str, bytes] = {}
        existing = None
        if card.NAME in tree.entries:
            existing = read_small(self.api, self.repo, tree, card.NAME).decode("utf-8", errors="surrogateescape")
        made = card.make_card(self.contents, self.repo, existing)
        if made.note and made.note not in self.notes:
            self.notes.append(made.note)
        if made.text != existing:
            found[card.NAME] = made.text.encode("utf-8", errors="surrogateescape")
        name = self.contents.kind.manifest
        if not same_bytes(self.contents.manifest_bytes, tree.entries.get(name)):
            found[name] = self.contents.manifest_bytes
        return found

    def _owned(self, tree: Tree) -> set[str]:
        """The files there that an earlier push put there: what its manifest names, or its mark."""
        kind = self.contents.kind
        for other in KINDS:
            if other is not kind and other.manifest in tree.entries:
                raise MismatchError(
                    f"{self.repo} holds {other.phrase}; this is {kind.phrase}.\n"
                    "Choose another name, or another --revision."
                )
        owned: set[str] = set()
        if kind.manifest in tree.entries:
            owned |= self._earlier(tree)
        if MARK in tree.entries:
            try:
                owned |= set(json.loads(read_small(self.api, self.repo, tree, MARK))["files"])
            except (ValueError, KeyError, TypeError):
                raise StoreError(f"{self.repo}: {MARK} can't be read. Remove it from the repository.") from None
        return owned

    def _earlier(self, tree: Tree) -> set[str]:
        kind = self.contents.kind
        if same_bytes(self.contents.manifest_bytes, tree.entries[kind.manifest]):
            return self.contents.names
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / kind.manifest).write_bytes(read_small(self.api, self.repo, tree, kind.manifest))
            try:
                return read_contents(folder, kind).names
            except StoreError as error:
                reason = str(error).replace(f"{folder}/", "")
                raise MismatchError(
                    f"{self.repo}: what is there is not replaced, for it can't be read: {reason}\nChoose another name."
                ) from None

    def _refuse_foreign(self, missing: list[StoredFile], owned: set[str], tree: Tree) -> None:
        foreign = [file.name for file in missing if file.name in tree.entries and file.name not in owned]
        if foreign:
            raise MismatchError(
                f"{self.repo} has a file {foreign[0]} that milldam did not put there; it is not replaced.\n"
                "Choose another name, or another --revision."
            )

    # ---- the commits ----

    def _commit_all(self, tree: Tree) -> str:
        """Commit step by step; after trouble that may pass, look again and go on with what is left. The new head."""
        waits = iter(client.WAITS)
        while True:
            head = tree.commit
            steps = self._plan(tree)
            try:
                for number, step in enumerate(steps, 1):
                    self._check(step)
                    self.tell(f"Commit {number} of {len(steps)}: {step.told}")
                    head = self._commit(step, head, number, len(steps))
                    waits = iter(client.WAITS)
                return head
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

    def _check(self, step: Step) -> None:
        """What is sent is what the manifest says."""
        for file in step.files:
            if not is_whole(self.request.folder, file):
                raise StoreError(
                    f"{self.request.folder / file.name}: its bytes are not those of the manifest; it was not pushed.\n"
                    f"`milldam verify {self.request.folder}` checks the store; make it again."
                )

    def _commit(self, step: Step, head: str, number: int, steps: int) -> str:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        added = {file.name: CommitOperationAdd(file.name, str(self.request.folder / file.name)) for file in step.files}
        small = [CommitOperationAdd(name, data) for name, data in step.data.items()]
        gone = [CommitOperationDelete(name, is_folder=False) for name in step.deleted]
        message = self.request.message or f"Push {self.contents.kind.phrase} with milldam"
        info = self.api.create_commit(
            self.repo,
            [*gone, *added.values(), *small],
            commit_message=message if steps == 1 else f"{message} ({number} of {steps})",
            repo_type=REPO_TYPE,
            revision=self.revision,
            parent_commit=head or None,
            num_threads=THREADS,
        )
        for name, operation in added.items():
            self.sent[name] = operation.upload_info.size
            self.digests.remember(name, operation.upload_info.sha256.hex())
        self._count(step)
        return str(info.oid)

    def _count(self, step: Step) -> None:
        manifest = self.contents.kind.manifest
        if manifest in step.data:
            self.sent[manifest] = len(step.data[manifest])
        self.deleted += [name for name in step.deleted if name not in (MARK, manifest)]

    # ---- the summary ----

    @property
    def url(self) -> str:
        return f"{self.api.endpoint}/datasets/{self.repo}"

    def _summary(self, private: bool, commit: str | None, planned: list[Step] | None = None) -> PushSummary:
        if self.request.dry_run:
            steps = planned if planned is not None else [Step(self.contents.files, self._manifest_alone())]
            for step in steps:
                self.sent |= {file.name: file.bytes or 0 for file in step.files}
                self._count(step)
        return PushSummary(
            repo=self.repo,
            url=self.url,
            revision=self.revision,
            commit=commit,
            private=private,
            kind=self.contents.kind.name,
            uploaded=len(self.sent),
            uploaded_bytes=sum(self.sent.values()),
            present=len(self.contents.names - set(self.sent)),
            deleted=tuple(self.deleted),
            dry_run=self.request.dry_run,
            notes=tuple(self.notes),
        )

    def _manifest_alone(self) -> dict[str, bytes]:
        return {self.contents.kind.manifest: self.contents.manifest_bytes}


def _batches(files: list[StoredFile]) -> Iterator[tuple[StoredFile, ...]]:
    """Runs of files of at most `FILES_A_COMMIT` files and, but for a single larger one, `BYTES_A_COMMIT` bytes."""
    batch: list[StoredFile] = []
    size = 0
    for file in files:
        if batch and (len(batch) >= FILES_A_COMMIT or size + (file.bytes or 0) > BYTES_A_COMMIT):
            yield tuple(batch)
            batch, size = [], 0
        batch.append(file)
        size += file.bytes or 0
    if batch:
        yield tuple(batch)
