"""`milldam pull`: a repository -> a folder, every file compared with the manifest, which is written last.

`snapshot_download` fetches what is not here yet: shards are named after their content, so a store that was here stays
whole until the new manifest takes its place, also for those who read it. All of one commit, even when someone pushes
meanwhile. After a kill, files that are here are read and kept. `OUT/.milldam-pull.json` says where the store comes
from: nothing is replaced but what was pulled from the same. Memory: the manifest, an entry per file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from pathlib import Path
from typing import Any, TypedDict

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.files import (
    explain_os_errors,
    hash_bytes,
    names_matching,
    read_sealed,
    refuse_address,
    remove_temporaries,
    sync_folder,
    write_file,
    write_sealed,
)
from milldam.hub.client import SHARD_FILES, explained, files_at, hub_api, read_file, repo_name
from milldam.hub.contents import Contents, kind_among
from milldam.run.summary import Summary
from milldam.stores.kinds import keep, live_files, store_kind

_STREAMS = 4
"""Files that are fetched at a time."""
_RECORD = ".milldam-pull.json"


class PullFacts(TypedDict):
    """Facts of the summary that only a pull has."""

    repo: str
    commit: str
    kind: str


PullSummary = Summary[PullFacts]


def pull_store(
    repo: str, out: Path | None = None, *, revision: str | None = None, split: str | None = None, progress: bool = False
) -> PullSummary:
    """Pull a store, or what is left of it; `out`: by default a folder of the repository's name, here."""
    repo = repo_name(repo)
    out = out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    fetched, stale = dict[str, int](), list[str]()
    with explained(f"pull {repo}", progress=progress):
        commit = api.repo_info(repo, repo_type="dataset", revision=revision).sha
        contents = _contents_at(api, repo, commit, split)
        source = {"repo": repo, "revision": revision, "split": split}
        before = _refuse_to_replace(out, contents, source)
        manifest, new = out / contents.kind.manifest, hash_bytes(contents.manifest_bytes)
        if before != new or any(file.wrong_size(out) for file in contents.files):
            with explain_os_errors(manifest):
                out.mkdir(parents=True, exist_ok=True)
                write_sealed(out / _RECORD, source | {"manifests": [before, new]})
            fetched = _fetch(api, repo, commit, contents, out)
            with explain_os_errors(manifest):
                if before != new:
                    keep(manifest)
                    write_file(manifest, contents.manifest_bytes)
                    fetched[manifest.name] = len(contents.manifest_bytes)
                # What someone still reads goes with a later pull.
                live = {contents.kind.manifest, *live_files(out, contents.kind)}
                stale = [name for name in names_matching(out, SHARD_FILES) if name not in live]
                for name in stale:
                    (out / name).unlink()
                remove_temporaries(out)
    files = len(contents.names)
    counts = {"files": files, "fetched": len(fetched), "kept": files - len(fetched), "removed": len(stale)}
    return Summary(
        job="pull",
        out=str(out),
        up_to_date=not fetched and not stale,
        facts={"repo": repo, "commit": commit, "kind": contents.kind.name},
        counts=counts | {"fetched_bytes": sum(fetched.values())},
        output_bytes=sum(file.bytes or 0 for file in contents.files),
    )


def _contents_at(api: Any, repo: str, commit: str, split: str | None) -> Contents:
    """The files that the manifest there names; every file must be in the repository, of its size."""
    there = files_at(api, repo, commit)
    kind = kind_among(set(there), repo)
    contents = Contents.of(kind, read_file(api, repo, commit, kind.manifest), repo)
    contents = contents if split is None else contents.only(split, repo)
    for file in contents.files:
        size = there[file.name].size if file.name in there else None
        if size is None or file.bytes not in (None, size):
            problem = "missing" if size is None else f"{size:,} bytes where the manifest says {file.bytes:,}"
            raise StoreError(f"{repo}: {file.name}: {problem}. The repository is damaged; push the store again.")
    return contents


def _refuse_to_replace(out: Path, contents: Contents, source: dict[str, str | None]) -> str:
    """The hash of the manifest that is there. Nothing is replaced but what was pulled from the same."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: a file, not a folder. Choose another place.")
    pulled, kind = read_sealed(out / _RECORD) or {}, store_kind(out)
    others = sorted(path.name for path in out.iterdir()) if out.exists() else []
    if kind is None and not pulled and others:
        raise ConfigError(f"{out} holds something else ({others[0]}). Choose another folder.")
    before = hash_bytes(b"" if kind is None else (out / kind.manifest).read_bytes())
    if before == hash_bytes(contents.manifest_bytes):
        return before
    if kind is not None and before not in pulled.get("manifests", ()):
        # Another manifest than the one that was pulled: since then, a store was made here.
        raise MismatchError(f"{out} holds another store, which is not replaced. Choose another folder.")
    if pulled and any(pulled.get(name) != value for name, value in source.items()):
        more = [f"{name} {pulled[name]}" for name in ("revision", "split") if pulled.get(name)]
        origin = ", ".join([str(pulled.get("repo")), *more])
        raise MismatchError(f"{out} holds what was pulled from {origin}, which is not replaced. Choose another folder.")
    return before


def _fetch(api: Any, repo: str, commit: str, contents: Contents, out: Path) -> dict[str, int]:
    """Have every file in the folder, with the bytes of the manifest; sizes of those fetched, which are synced."""
    fetched = missing = [file for file in contents.files if not file.is_in(out)]
    target = {"repo_type": "dataset", "revision": commit, "local_dir": out, "max_workers": _STREAMS}
    for _ in range(2 if missing else 0):  # twice if bytes are wrong
        for file in missing:
            # What is here under its name is not whole, and huggingface_hub might take it for what it fetched.
            (out / file.name).unlink(missing_ok=True)
        api.snapshot_download(repo, allow_patterns=[glob.escape(file.name) for file in missing], **target)
        if not any((out / file.name).exists() for file in missing):
            # It returns an empty folder too, when the Hub can't be reached.
            raise InputError(f"Can't pull {repo}: the Hub does not answer.\nRun the same command again.")
        missing = [file for file in missing if not file.is_in(out)]
        if not missing:
            break
    if missing:
        (out / missing[0].name).unlink(missing_ok=True)
        raise StoreError(
            f"{repo}: {missing[0].name} is not what its manifest says (size or hash differs), fetched twice.\n"
            "The repository is damaged: remove that file there, and push the store again."
        )
    for file in fetched:
        with (out / file.name).open("rb") as opened:
            os.fsync(opened.fileno())
    # What huggingface_hub notes down of its downloads.
    shutil.rmtree(out / ".cache" / "huggingface", ignore_errors=True)
    with contextlib.suppress(OSError):
        (out / ".cache").rmdir()
    sync_folder(out)
    return {file.name: (out / file.name).stat().st_size for file in fetched}
