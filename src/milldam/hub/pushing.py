"""`milldam push`: a folder -> a repository, its manifest in the last commit.

    look     what the repository has at its head; what is in the way is refused
    send     the shards that it does not have, some hundreds a commit
    close    one more commit: manifest, tokenizer and card, and the removal of what the store no longer has

Shards are named after their bytes. So until the last commit an earlier store in the repository stays whole, half a
push of a first one is no store, and what is there under its name is not sent again. A kill, a lost network and a
change by someone else are one case: run it again.

Nothing is written to the store, and nothing is pushed but what its manifest names, the manifest and the card. Memory:
the manifest, an entry per file, and what huggingface_hub holds for the files that it sends at a time.
"""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any, TypedDict

from milldam.errors import ConfigError, MismatchError, Setting, StoreError
from milldam.files import address_of
from milldam.hub.card import CARD, local_paths, make_card
from milldam.hub.client import SHARD_FILES, explained, files_at, hub_api, read_file, repo_name
from milldam.hub.contents import Contents, read_contents
from milldam.run.summary import Summary
from milldam.stores.kinds import KINDS

_FILES_AT_ONCE = 512
"""Files that are checked, then sent in one commit."""


class PushFacts(TypedDict):
    """Facts of the summary that only a push has."""

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
    """Push a store, or what is left of it; see the module. A dry run says what would be done, and only reads."""
    repo, address = repo_name(repo), address_of(folder)
    if address is not None:
        raise ConfigError(f"{address}: a store to push must be on this machine. Copy it here first.")
    contents, api = read_contents(folder), hub_api()
    for file in contents.files:
        if problem := file.wrong_size(folder):
            raise StoreError(f"{problem}. `milldam verify {folder}` checks the store; make it again.")
    from huggingface_hub import get_token

    if get_token() is None and not dry_run:
        raise ConfigError(
            "No token for the Hub. Make one that may write at https://huggingface.co/settings/tokens,\n"
            "then `hf auth login` or set HF_TOKEN."
        )
    with explained(f"{'look at' if dry_run else 'push to'} {repo}", progress=progress):
        private = _visibility(api, repo, public)
        if private is None and not dry_run:
            api.create_repo(repo, repo_type="dataset", exist_ok=True, private=not public)
            # Someone else may have made it in the meantime, and not as it was asked for.
            private = bool(_visibility(api, repo, public))
        if revision is not None and not dry_run:
            api.create_branch(repo, repo_type="dataset", branch=revision, exist_ok=True)
        push = _Push(api, repo, revision or "main", folder, contents, exists=private is not None)
        if not dry_run:
            push.run(message or f"Push {contents.kind.phrase} with milldam")
    facts: PushFacts = {
        "repo": repo,
        "revision": push.revision,
        "commit": push.commit,
        "private": not public if private is None else private,
        "kind": contents.kind.name,
        "dry_run": dry_run,
        "removed": push.stale,
    }
    notes = [push.note] if push.note else []
    if paths := local_paths(json.loads(contents.manifest_bytes)):
        notes.append(f"The manifest names {len(paths)} paths of this machine, such as {paths[0]}.")
    sizes = [file.bytes or 0 for file in push.missing]
    sizes += [len(data) for name, data in push.closing.items() if name != CARD]
    files = len(contents.names)
    counts = {"files": files, "sent": len(sizes), "sent_bytes": sum(sizes), "present": files - len(sizes)}
    return Summary(
        job="push",
        out=f"{api.endpoint}/datasets/{repo}",
        up_to_date=not sizes and not push.stale,
        counts=counts | {"removed": len(push.stale)},
        warnings=tuple(notes),
        facts=facts,
    )


def _visibility(api: Any, repo: str, public: bool) -> bool | None:
    """Whether the repository is private; None when there is none. One that is not as asked is refused."""
    from huggingface_hub.utils import RepositoryNotFoundError

    try:
        private = bool(api.repo_info(repo, repo_type="dataset").private)
    except RepositoryNotFoundError:
        return None
    if not private and not public:
        raise ConfigError(
            f"{repo} is public: everybody could read what is pushed. Nothing was pushed.\nAdd ",
            Setting("public"),
            " if that is meant, or choose another name.",
        )
    if private and public:
        raise ConfigError(
            f"{repo} is private, and milldam does not change that. Nothing was pushed.\nLeave out ",
            Setting("public"),
            f", or make it public first: {api.endpoint}/datasets/{repo}/settings",
        )
    return private


class _Push:
    """The work that is left for a store on a branch of a repository."""

    def __init__(self, api: Any, repo: str, revision: str, folder: Path, contents: Contents, *, exists: bool) -> None:
        from huggingface_hub.utils import RevisionNotFoundError

        self._api, self._repo, self._folder, self.revision = api, repo, folder, revision
        self.commit: str | None = None
        there: dict[str, Any] = {}
        if exists:
            try:
                self.commit = api.repo_info(repo, repo_type="dataset", revision=revision).sha
                there = files_at(api, repo, self.commit)
            except RevisionNotFoundError:  # in a dry run
                pass
        kind, others = contents.kind, [kind for kind in KINDS if kind.manifest in there]
        if others and kind not in others:
            raise _in_the_way(repo, f"holds {others[0].phrase}; this is {kind.phrase}.")
        if not others and "tokenizer.json" in there:
            raise _in_the_way(repo, "has a file tokenizer.json that milldam did not put there; it is not replaced.")
        self.missing = [
            file
            for file in contents.files
            if file.bytes is not None and (file.name not in there or there[file.name].size != file.bytes)
        ]
        """Shards to send."""
        manifest = read_file(api, repo, self.commit, kind.manifest) if others else b""
        self.closing = {} if manifest == contents.manifest_bytes else {kind.manifest: contents.manifest_bytes}
        """Small files of the last commit."""
        for file in contents.files:
            if file.bytes is None:
                data = (folder / file.name).read_bytes()
                if file.name not in there or read_file(api, repo, self.commit, file.name) != data:
                    self.closing[file.name] = data
        old = read_file(api, repo, self.commit, CARD).decode(errors="surrogateescape") if CARD in there else None
        card, self.note = make_card(contents, repo, old)
        if card != old:
            self.closing[CARD] = card.encode(errors="surrogateescape")
        ours = {"tokenizer.json", *fnmatch.filter(there, SHARD_FILES)} & there.keys()
        self.stale = tuple(sorted(ours - contents.names))

    def run(self, message: str) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        target = {"repo_type": "dataset", "revision": self.revision, "commit_message": message}
        for first in range(0, len(self.missing), _FILES_AT_ONCE):
            files = self.missing[first : first + _FILES_AT_ONCE]
            for file in files:
                if not file.is_in(self._folder):
                    raise StoreError(
                        f"{self._folder / file.name}: its bytes are not those of the manifest; it was not pushed.\n"
                        f"`milldam verify {self._folder}` checks the store; make it again."
                    )
            added = [CommitOperationAdd(file.name, self._folder / file.name) for file in files]
            self.commit = self._api.create_commit(self._repo, added, **target).oid
        if self.closing or self.stale:
            closing: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in self.stale]
            closing += [CommitOperationAdd(name, data) for name, data in self.closing.items()]
            # Refused by the Hub when someone else made a commit meanwhile.
            self.commit = self._api.create_commit(self._repo, closing, parent_commit=self.commit, **target).oid


def _in_the_way(repo: str, what: str) -> MismatchError:
    return MismatchError(f"{repo} {what}\nChoose another name, or another ", Setting("revision"), ".")
