"""`milldam push`: a folder -> a repository, its manifest in the last commit.

    look     what the repository has at its head; what is in the way is refused
    send     the shards that it does not have, some hundreds a commit
    close    one more commit: manifest, tokenizer and card, and the removal of what the store no longer has

Shards are named after their bytes. So until the last commit an earlier store in the repository stays whole, half a
push of a first one is no store, and what is there under its name is not sent again. A kill, a lost network and a
change by someone else are one case: run it again.
"""

from __future__ import annotations

import contextlib
import fnmatch
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, MismatchError, Setting, StoreError
from milldam.files import address_of, is_whole
from milldam.hub.card import CARD, make_card
from milldam.hub.client import (
    SHARD_FILES,
    TOKENIZER,
    Contents,
    explained,
    hub_api,
    read_file,
    repo_name,
    size_of,
    sizes_at,
)
from milldam.run.summary import Summary
from milldam.stores.kinds import KINDS

_FILES_AT_ONCE = 512
"""Files that are checked, then sent in one commit."""
PushSummary = Summary[dict[str, Any]]


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
    contents, api = _contents_in(folder), hub_api()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, get_token
    from huggingface_hub.utils import RepositoryNotFoundError, RevisionNotFoundError

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
        branch = revision or "main"
        if revision is not None and not dry_run:
            api.create_branch(repo, repo_type="dataset", branch=revision, exist_ok=True)
        commit, there = None, dict[str, int]()
        with contextlib.suppress(RepositoryNotFoundError, RevisionNotFoundError):  # in a dry run
            commit = api.repo_info(repo, repo_type="dataset", revision=branch).sha
            there = sizes_at(api, repo, commit)
        if contents.kind.manifest not in there:
            others = [kind.phrase for kind in KINDS if kind.manifest in there]
            if others or TOKENIZER in there:
                held = others[0] if others else f"a {TOKENIZER} that milldam did not put there"
                problem = f"{repo} holds {held}; this is {contents.kind.phrase}."
                raise MismatchError(f"{problem}\nChoose another name, or another ", Setting("revision"), ".")
        missing = [name for name in contents.files if name != TOKENIZER and contents.problem(name, there.get(name))]
        small = {contents.kind.manifest: contents.manifest_bytes}
        if TOKENIZER in contents.files:
            small[TOKENIZER] = (folder / TOKENIZER).read_bytes()
        old = read_file(api, repo, commit, CARD).decode(errors="surrogateescape") if CARD in there else None
        card, note = make_card(contents, repo, old)
        small[CARD] = card.encode(errors="surrogateescape")
        changed = {
            name: data
            for name, data in small.items()
            if name not in there or read_file(api, repo, commit, name) != data
        }
        ours = {TOKENIZER, *fnmatch.filter(there, SHARD_FILES)} & there.keys()
        stale = tuple(sorted(ours - contents.names))
        if not dry_run:
            said = message or f"Push {contents.kind.phrase} with milldam"
            target = {"repo_id": repo, "repo_type": "dataset", "revision": branch, "commit_message": said}
            commit = _send(api, target, folder, contents, missing) or commit
            closing: list[Any] = [CommitOperationDelete(name, is_folder=False) for name in stale]
            closing += [CommitOperationAdd(name, data) for name, data in changed.items()]
            if closing:
                # Refused by the Hub when someone else made a commit meanwhile.
                commit = api.create_commit(operations=closing, parent_commit=commit, **target).oid
    sizes = [contents.files[name]["bytes"] for name in missing]
    sizes += [len(data) for name, data in changed.items() if name != CARD]
    files = len(contents.names)
    counts = {"files": files, "sent": len(sizes), "sent_bytes": sum(sizes), "present": files - len(sizes)}
    facts = {"repo": repo, "revision": branch, "commit": commit, "kind": contents.kind.name, "dry_run": dry_run}
    return Summary(
        job="push",
        out=f"{api.endpoint}/datasets/{repo}",
        up_to_date=not sizes and not stale,
        counts=counts | {"removed": len(stale)},
        warnings=(note,) if note else (),
        facts=facts | {"private": not public if private is None else private, "removed": stale},
    )


def _contents_in(folder: Path) -> Contents:
    """The store in a folder, whose files are there, of their sizes."""
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder.")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    contents = Contents.of(names, lambda name: (folder / name).read_bytes(), str(folder))
    for name in contents.files:
        if problem := contents.problem(name, size_of(folder / name)):
            raise StoreError(f"{folder}/{problem}. `milldam verify {folder}` checks the store; make it again.")
    return contents


def _visibility(api: Any, repo: str, public: bool) -> bool | None:
    """Whether the repository is private; None when there is none. One that is not as asked is refused."""
    from huggingface_hub.utils import RepositoryNotFoundError

    try:
        private = bool(api.repo_info(repo, repo_type="dataset").private)
    except RepositoryNotFoundError:
        return None
    if private == public:
        found = "private" if private else "public: everybody could read what is pushed"
        advice = "Leave out " if private else "Add "
        raise ConfigError(f"{repo} is {found}. Nothing was pushed.\n{advice}", Setting("public"), " if that is meant.")
    return private


def _send(api: Any, target: dict[str, Any], folder: Path, contents: Contents, missing: list[str]) -> str | None:
    """Commit the missing files, if they have the bytes of the manifest; the last commit."""
    from huggingface_hub import CommitOperationAdd

    commit = None
    for first in range(0, len(missing), _FILES_AT_ONCE):
        names = missing[first : first + _FILES_AT_ONCE]
        for name in names:
            if not is_whole(folder / name, contents.files[name]):
                raise StoreError(
                    f"{folder / name}: its bytes are not those of the manifest; it was not pushed.\n"
                    f"`milldam verify {folder}` checks the store; make it again."
                )
        added = [CommitOperationAdd(name, folder / name) for name in names]
        commit = api.create_commit(operations=added, **target).oid
    return commit
