"""The Hugging Face Hub: a store as a dataset repository, and back.

    client      which files make a store; calls of huggingface_hub: errors in our words, without the token
    card        the dataset card, of which one marked section is ours
    pushing     a folder -> a repository, the manifest in the last commit
    pulling     a repository -> a folder, every file checked, the manifest last

The bytes are moved by huggingface_hub (extra `hf`), which sends and fetches nothing twice: the same call resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from milldam.hub.pushing import PushSummary
    from milldam.loader.stores import Store
    from milldam.qa.store import FeatureStore
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
    """Push a token store or a table to the Hub; what `milldam push` does.

    Private unless `public`. Files that are already there are not sent again; the manifest comes last, so that an
    unfinished push is not a store. The access token comes from HF_TOKEN or `hf auth login`.

    >>> milldam.push("corpus.milldam", "user/corpus").out      # doctest: +SKIP
    'https://huggingface.co/datasets/user/corpus'
    """
    from milldam.files import in_home
    from milldam.hub.pushing import push_store

    folder = Path(in_home(store)) if isinstance(store, str | Path) else Path(store.path)
    return push_store(folder, repo, public=public, revision=revision, message=message, dry_run=dry_run)


def pull(repo: str, out: str | Path | None = None, *, revision: str | None = None) -> Store | Table:
    """Fetch a store from the Hub and open it, memory-mapped; what `milldam pull` does.

    `out`: a folder; default: the name of the repository. Every file is compared with the manifest, which is written
    last. Files that are already there are kept.

    >>> milldam.pull("user/corpus", "corpus.milldam")          # doctest: +SKIP
    Store('corpus.milldam': 18,511 documents, 15,293,621 tokens, uint16)
    """
    from milldam.api import open as open_store
    from milldam.files import in_home
    from milldam.hub.pulling import pull_store

    summary = pull_store(repo, None if out is None else Path(in_home(out)), revision=revision)
    opened: Store | Table = open_store(summary.out)
    return opened
