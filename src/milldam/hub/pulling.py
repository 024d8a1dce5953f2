"""`milldam pull`: a repository -> a folder, every file compared with the manifest, which is written last.

`snapshot_download` fetches what is not here yet: shards are named after their content, so a store that was here stays
whole until the new manifest takes its place, also for those who read it. All of one commit. `OUT/.milldam-pull.json`
says where the store comes from: nothing is replaced but what was pulled from the same.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.files import (
    explain_os_errors,
    hash_bytes,
    hash_file,
    names_matching,
    read_sealed,
    refuse_address,
    remove_temporaries,
    sync_folder,
    write_file,
    write_sealed,
)
from milldam.hub.client import SHARD_FILES, Contents, explained, hub_api, read_file, repo_name, size_of, sizes_at
from milldam.run.summary import Summary
from milldam.stores.kinds import keep, live_files, store_kind

_RECORD = ".milldam-pull.json"


def pull_store(
    repo: str, out: Path | None = None, *, revision: str | None = None, progress: bool = False
) -> Summary[dict[str, Any]]:
    """Pull a store, or what is left of it; `out`: by default a folder of the repository's name, here."""
    repo = repo_name(repo)
    out = out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    fetched, stale = dict[str, int](), list[str]()
    with explained(f"pull {repo}", progress=progress):
        commit = api.repo_info(repo, repo_type="dataset", revision=revision).sha
        there = sizes_at(api, repo, commit)
        contents = Contents.of(set(there), lambda name: read_file(api, repo, commit, name), repo)
        for name in contents.files:
            if problem := contents.problem(name, there.get(name)):
                raise StoreError(f"{repo}: {problem}. The repository is damaged; push the store again.")
        source = {"repo": repo, "revision": revision}
        before = _refuse_to_replace(out, contents, source)
        manifest, new = out / contents.kind.manifest, hash_bytes(contents.manifest_bytes)
        if before != new or any(contents.problem(name, size_of(out / name)) for name in contents.files):
            with explain_os_errors(manifest):
                out.mkdir(parents=True, exist_ok=True)
                write_sealed(out / _RECORD, source | {"manifests": [before, new]})
                fetched = _fetch(api, repo, commit, contents, out)
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
        output_bytes=sum(record.get("bytes", 0) for record in contents.files.values()),
    )


def _refuse_to_replace(out: Path, contents: Contents, source: dict[str, str | None]) -> str:
    """The hash of the manifest that is there. Nothing is replaced but what was pulled from the same."""
    pulled, kind = read_sealed(out / _RECORD) or {}, store_kind(out)
    if kind is None and not pulled and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is or holds something else. Choose another folder.")
    before = hash_bytes(b"" if kind is None else (out / kind.manifest).read_bytes())
    if before == hash_bytes(contents.manifest_bytes):
        return before
    # With another manifest than the one that was pulled, a store was made here since then.
    made_here = kind is not None and before not in pulled.get("manifests", ())
    if made_here or (pulled and any(pulled.get(name) != value for name, value in source.items())):
        raise MismatchError(f"{out} holds another store, which is not replaced. Choose another folder.")
    return before


def _fetch(api: Any, repo: str, commit: str, contents: Contents, out: Path) -> dict[str, int]:
    """Have every file in the folder, with the bytes of the manifest; sizes of those fetched, which are synced."""

    def is_here(name: str) -> bool:
        path = out / name
        return contents.problem(name, size_of(path)) is None and hash_file(path) == contents.files[name]["xxh3"]

    fetched = [name for name in contents.files if not is_here(name)]
    for name in fetched:
        # What is here under its name is not whole, and huggingface_hub might take it for what it fetched.
        (out / name).unlink(missing_ok=True)
    if fetched:
        patterns = [glob.escape(name) for name in fetched]
        api.snapshot_download(repo, repo_type="dataset", revision=commit, local_dir=out, allow_patterns=patterns)
        if not any((out / name).exists() for name in fetched):
            # It returns an empty folder too, when the Hub can't be reached.
            raise InputError(f"Can't pull {repo}: the Hub does not answer.\nRun the same command again.")
    for name in fetched:
        if not is_here(name):
            (out / name).unlink(missing_ok=True)
            raise StoreError(
                f"{repo}: {name} is not what its manifest says (size or hash differs). Run the same command again; if "
                "it says the same, the repository is damaged: remove that file there, and push the store again."
            )
        with (out / name).open("rb") as opened:
            os.fsync(opened.fileno())
    # What huggingface_hub notes down of its downloads.
    shutil.rmtree(out / ".cache" / "huggingface", ignore_errors=True)
    with contextlib.suppress(OSError):
        (out / ".cache").rmdir()
    sync_folder(out)
    return {name: (out / name).stat().st_size for name in fetched}
