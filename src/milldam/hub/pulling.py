"""`milldam pull`: a repository -> a folder, every file compared with the manifest, which is written last.

    OUT/.milldam-pull/          what is being fetched, until the pull is done
    OUT/.milldam-pull.json      where the store comes from, and the hashes of the manifests that came from there

`snapshot_download` fetches what is not here yet; size and xxh3 are compared with the manifest, the files synced and
given their names, and the manifest comes last: until then a store that was here stays whole, also for those who read
it. All of one commit, even when someone pushes meanwhile. After a kill, files that are here are read and kept. Memory:
the manifest, an entry per file, and the buffers of a few streams.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from milldam.errors import ConfigError, InputError, MismatchError, StoreError
from milldam.files import (
    explain_os_errors,
    hash_bytes,
    read_sealed,
    refuse_address,
    remove_temporaries,
    sync_folder,
    write_file,
    write_sealed,
)
from milldam.hub.client import explained, files_at, hub_api, read_file, repo_name
from milldam.hub.contents import Contents, kind_among, parse_contents, select_split
from milldam.run.summary import Summary
from milldam.stores.generations import keep, live_files
from milldam.stores.kinds import store_kind

_STREAMS = 4
"""Files that are fetched at a time."""
_RECORD, _INCOMING = ".milldam-pull.json", ".milldam-pull"


class PullFacts(TypedDict):
    """What only a pull tells."""

    repo: str
    commit: str
    kind: str


PullSummary = Summary[PullFacts]


def pull_store(
    repo: str,
    out: Path | None = None,
    *,
    revision: str | None = None,
    split: str | None = None,
    progress: bool = False,
) -> PullSummary:
    """Pull a store, or what is left of it; `out`: by default a folder of the repository's name, here."""
    repo = repo_name(repo)
    out = out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    fetched: dict[str, int] = {}
    stale: list[str] = []
    with explained(f"pull {repo}", progress=progress):
        commit = api.repo_info(repo, repo_type="dataset", revision=revision).sha
        contents = _contents_at(api, repo, commit, split)
        record = _claim(out, contents, {"repo": repo, "revision": revision, "split": split})
        manifest, incoming = out / contents.kind.manifest, out / _INCOMING
        is_new = not manifest.exists() or manifest.read_bytes() != contents.manifest_bytes
        if is_new or incoming.exists() or any(file.wrong_size(out) for file in contents.files):
            with explain_os_errors(manifest):
                incoming.mkdir(parents=True, exist_ok=True)
            with _alone(out):
                with explain_os_errors(manifest):
                    write_sealed(out / _RECORD, record)
                fetched = _fetch(api, repo, commit, contents, out)
                with explain_os_errors(manifest):
                    stale = _put_in_place(out, contents, record, is_new=is_new)
                fetched |= {manifest.name: len(contents.manifest_bytes)} if is_new else {}
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
    """What the manifest there names; every file must be in the repository, of its size."""
    there = files_at(api, repo, commit)
    kind = kind_among(set(there), repo)
    contents = parse_contents(read_file(api, repo, commit, kind.manifest), kind, repo)
    for file in contents.files:
        size = there[file.name].size if file.name in there else None
        if size is None or file.bytes not in (None, size):
            problem = "missing" if size is None else f"{size:,} bytes where the manifest says {file.bytes:,}"
            raise StoreError(f"{repo}: {file.name}: {problem}. The repository is damaged; push the store again.")
    return contents if split is None else select_split(contents, split, repo)


def _claim(out: Path, contents: Contents, source: dict[str, str | None]) -> dict[str, Any]:
    """What is to be written down of this pull. Nothing is replaced but what was pulled from the same."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out}: a file, not a folder. Choose another place.")
    pulled, held = read_sealed(out / _RECORD) or {}, store_kind(out)
    before: dict[str, list[str]] = {"files": pulled.get("files", []), "manifests": pulled.get("manifests", [])}
    manifest = b"" if held is None else (out / held.manifest).read_bytes()
    if held is None and not pulled and out.exists():
        others = sorted({path.name for path in out.iterdir()} - {_INCOMING})
        if others:
            raise ConfigError(f"{out} holds something else ({others[0]}). Choose another folder.")
    elif manifest and manifest != contents.manifest_bytes and hash_bytes(manifest) not in before["manifests"]:
        # Another manifest than the one that was pulled: since then, a store was made here.
        raise MismatchError(f"{out} holds another store, which is not replaced. Choose another folder.")
    is_same = manifest == contents.manifest_bytes
    if pulled and not is_same and any(pulled.get(name) != value for name, value in source.items()):
        more = [f"{name} {pulled[name]}" for name in ("revision", "split") if pulled.get(name)]
        origin = ", ".join([str(pulled.get("repo")), *more])
        raise MismatchError(f"{out} holds what was pulled from {origin}, which is not replaced. Choose another folder.")
    return source | {
        "files": sorted(contents.names | set(before["files"])),
        "manifests": sorted({hash_bytes(contents.manifest_bytes), *before["manifests"]}),
    }


def _fetch(api: Any, repo: str, commit: str, contents: Contents, out: Path) -> dict[str, int]:
    """Have every file here, in the folder or among what comes in; sizes of those fetched, compared and synced."""
    incoming = out / _INCOMING
    fetched = missing = [file for file in contents.files if not file.is_in(out) and not file.is_in(incoming)]
    for _ in range(2):  # twice if bytes are wrong
        if not missing:
            break
        for file in missing:
            # What is here under its name is not whole, and huggingface_hub might take it for what it fetched.
            (incoming / file.name).unlink(missing_ok=True)
        api.snapshot_download(
            repo,
            repo_type="dataset",
            revision=commit,
            local_dir=incoming,
            allow_patterns=[glob.escape(file.name) for file in missing],
            max_workers=_STREAMS,
        )
        if not any((incoming / file.name).exists() for file in missing):
            # It returns an empty folder too, when the Hub can't be reached.
            raise InputError(f"Can't pull {repo}: the Hub does not answer.\nRun the same command again.")
        missing = [file for file in missing if not file.is_in(incoming)]
    if missing:
        (incoming / missing[0].name).unlink(missing_ok=True)
        raise StoreError(
            f"{repo}: {missing[0].name} is not what its manifest says (size or hash differs), fetched twice.\n"
            "The repository is damaged: remove that file there, and push the store again."
        )
    for file in fetched:
        with (incoming / file.name).open("rb") as opened:
            os.fsync(opened.fileno())
    return {file.name: (incoming / file.name).stat().st_size for file in fetched}


def _put_in_place(out: Path, contents: Contents, record: dict[str, Any], *, is_new: bool) -> list[str]:
    """Give what was fetched its names, the manifest last; names of files of an earlier pull that were removed."""
    remove_temporaries(out)
    incoming = out / _INCOMING
    for path in incoming.iterdir():
        if path.name in contents.names:
            path.rename(out / path.name)
    sync_folder(out)
    manifest = out / contents.kind.manifest
    if is_new:
        keep(manifest)
        write_file(manifest, contents.manifest_bytes)
    # What someone still reads goes with a later pull.
    kept = contents.names | set(live_files(out, contents.kind))
    stale = [name for name in record["files"] if name not in kept and (out / name).exists()]
    for name in stale:
        (out / name).unlink()
    write_sealed(out / _RECORD, record | {"files": sorted(kept), "manifests": [hash_bytes(contents.manifest_bytes)]})
    shutil.rmtree(incoming, ignore_errors=True)
    return stale


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """While no other pull works in the folder."""
    descriptor = os.open(out, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{out}: another pull is using it. Wait for it to end.") from None
        yield
    finally:
        os.close(descriptor)
