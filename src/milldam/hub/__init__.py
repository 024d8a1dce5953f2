"""The Hugging Face Hub: a store as a dataset repository, and back.

    contents    which files make a store, from its manifest alone; groups of them, the units of both jobs
    client      calls of huggingface_hub, and what a repository has; the token is in no error
    card        the dataset card, of which one marked section is ours
    pushing     the job of push: a folder -> a repository, the manifest in the last commit
    pulling     the job of pull: a repository -> a folder, every file checked, the manifest last

The bytes are moved by huggingface_hub: by `snapshot_download`, and by `upload_folder`, which does since 2.0 what
`upload_large_folder` did: several commits, and taking up what a kill left.

Needs the extra `hf`, which is imported when something is asked of the Hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from milldam.hub.pushing import PushSummary
    from milldam.loader.stores import Store
    from milldam.stores.features.reader import FeatureStore
    from milldam.stores.table.reader import Table

__all__ = ["pull", "push"]


def push(
    store: str | Path | Store | FeatureStore | Table,
    repo: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
) -> PushSummary:
    """Push a token store, a feature store or a table to the Hub; what `milldam push` does.

    Private unless `public`. Files that are already there are not sent again; the manifest comes last, so that an
    unfinished push is not a store. The access token comes from HF_TOKEN or `hf auth login`.

    >>> milldam.push("corpus.milldam", "user/corpus").out      # doctest: +SKIP
    'https://huggingface.co/datasets/user/corpus'
    """
    from milldam.files import in_home
    from milldam.hub.pushing import PushRequest, push_store

    folder = Path(in_home(store)) if isinstance(store, str | Path) else Path(store.path)
    return push_store(PushRequest(folder, repo, public=public, revision=revision, message=message, dry_run=dry_run))


def pull(
    repo: str, out: str | Path | None = None, *, revision: str | None = None, split: str | None = None
) -> Store | FeatureStore | Table:
    """Fetch a store from the Hub and open it, memory-mapped; what `milldam pull` does.

    `out`: a folder; default: the name of the repository. Every file is compared with the manifest, which is written
    last. Files that are already there and complete are kept.

    >>> milldam.pull("user/corpus", "corpus.milldam")          # doctest: +SKIP
    Store('corpus.milldam': 18,511 documents, 15,293,621 tokens, uint16)
    """
    from milldam.api import open as open_store
    from milldam.files import in_home
    from milldam.hub.pulling import PullRequest, pull_store

    folder = None if out is None else Path(in_home(out))
    summary = pull_store(PullRequest(repo, folder, revision=revision, split=split))
    opened: Store | FeatureStore | Table = open_store(summary.out)
    return opened
