"""The job of `milldam pull`: a repository -> a folder, in the frame of run/job.py. A group of files is a unit.

    OUT/.milldam-pull/          the work folder, until the pull is done (run/folder.py)
    OUT/.milldam-pull.json      where a finished store came from

`snapshot_download` fetches a group into the work folder; size and xxh3 are compared with the manifest, the files
synced, then recorded. When all are there they get their names in OUT, and the manifest comes last: until then a store
that was there stays whole, also for those who read it. What OUT has already is not fetched. All of one commit, even
when someone pushes meanwhile. Memory: the manifest, an entry per file, and the buffers of a few streams.
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
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
from milldam.hub.client import REPO_TYPE, Tree, awaited, hub_api, quiet, read_small, read_tree, repo_name, tried
from milldam.hub.contents import (
    Contents,
    FileGroup,
    StoredFile,
    is_whole,
    kind_among,
    moving,
    parse_contents,
    plan_groups,
    select_split,
    wrong_size,
)
from milldam.hub.pushing import MARK
from milldam.run import job as frame
from milldam.run.folder import RunFolder, WorkFolder
from milldam.run.pools import WorkPlan
from milldam.run.records import RECORDS, Record, Records
from milldam.run.session import Session, Stage
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity
from milldam.stores.kinds import KINDS, Kind, live_files, replacing, store_kind

PULL = Kind("pull", "milldam-pull.json", "milldam pull", "a pull that is not in its place", "Run it again.")
STREAMS = 4
"""Files that are fetched at a time."""
_CACHE = Path(".cache", "huggingface")
"""What huggingface_hub keeps of its work, in the folder that it fetches to."""


@dataclass(frozen=True, slots=True)
class PullRequest:
    repo: str
    out: Path | None = None
    """None: a folder of the repository's name, here."""
    revision: str | None = None
    split: str | None = None


class PullFacts(TypedDict):
    """What only a pull tells."""

    repo: str
    commit: str
    kind: str


PullSummary = Summary[PullFacts]


def pull_store(request: PullRequest, observer: Observer | None = None) -> PullSummary:
    """Pull a store, or what is left of it; see the module."""
    repo = repo_name(request.repo)
    out = request.out or Path(repo.split("/")[1])
    refuse_address(out)
    api = hub_api()
    with quiet():
        tree = read_tree(api, repo, request.revision)
        contents = _contents_there(api, repo, tree, request.split)
        job = PullJob(request, repo, out, api, tree, contents)
        job.refuse_existing()
        if not job.place.work.exists() and job.is_finished():
            return replace(job.summary({}), up_to_date=True)
        summary = frame.run(job, frame.Options(job.place.work, name=out), observer)
        job.place.remove()
    return summary


def _contents_there(api: Any, repo: str, tree: Tree, split: str | None) -> Contents:
    """What the manifest there names; every file must be in the repository, of its size."""
    if MARK in tree.entries and not any(kind.manifest in tree.entries for kind in KINDS):
        raise StoreError(f"{repo}: a push to it is not finished. Run that `milldam push` again, then pull.")
    kind = kind_among(set(tree.entries), repo)
    contents = parse_contents(read_small(api, repo, tree, kind.manifest), kind, repo)
    for file in contents.files:
        entry = tree.entries.get(file.name)
        if entry is None or file.bytes not in (None, entry.size):
            found = "missing" if entry is None else f"{entry.size:,} bytes where the manifest says {file.bytes:,}"
            raise StoreError(f"{repo}: {file.name}: {found}. The repository is damaged; push the store again.")
    return contents if split is None else select_split(contents, split, repo)


@dataclass(frozen=True, slots=True)
class _Prepared:
    identity: Identity


class PullJob:
    """A repository, at a commit, to a folder."""

    kind = PULL

    def __init__(self, request: PullRequest, repo: str, out: Path, api: Any, tree: Tree, contents: Contents) -> None:
        self._repo, self._out, self._api, self._tree, self._contents = repo, out, api, tree, contents
        self._asked = {"repo": repo, "revision": request.revision, "split": request.split}
        self.place = WorkFolder(out / ".milldam-pull", PULL, out)
        self._record = out / f".{PULL.manifest}"

    # ---- what is here ----

    def refuse_existing(self) -> None:
        """Nothing is replaced but what was pulled from the same."""
        if self._out.exists() and not self._out.is_dir():
            raise ConfigError(f"{self._out}: a file, not a folder. Choose another place.")
        begun = self.place.begun()
        if begun is not None:
            self._refuse_other(begun["pull"], "an unfinished pull of")
            return
        held = store_kind(self._out)
        if held is None:
            others = sorted(path.name for path in self._out.iterdir()) if self._out.exists() else []
            if others:
                raise ConfigError(f"{self._out} holds something else ({others[0]}). Choose another folder.")
            return
        data = (self._out / held.manifest).read_bytes()
        if data == self._contents.manifest_bytes:
            return
        # Another manifest than the one that was pulled: since then, a store was made here.
        if held is not self._contents.kind or self._pulled().get("manifest") != hash_bytes(data):
            raise MismatchError(f"{self._out} holds another store, which is not replaced. Choose another folder.")
        self._refuse_other(self._pulled(), "what was pulled from")

    def _pulled(self) -> dict[str, Any]:
        """What is written down of an earlier pull."""
        return read_sealed(self._record) or {}

    def _refuse_other(self, pulled: dict[str, Any], what: str) -> None:
        if any(pulled.get(key) != value for key, value in self._asked.items()):
            more = [f"{name} {pulled[name]}" for name in ("revision", "split") if pulled.get(name)]
            told = ", ".join([str(pulled.get("repo")), *more])
            raise MismatchError(f"{self._out} holds {what} {told}, which is not replaced. Choose another folder.")

    def is_finished(self) -> bool:
        """The manifest is there, and the files have their sizes; `milldam verify` reads them."""
        path = self._out / self._contents.kind.manifest
        if not path.exists() or path.read_bytes() != self._contents.manifest_bytes:
            return False
        return not any(wrong_size(self._out, file) for file in self._contents.files)

    # ---- the job ----

    def prepare(self, session: Session) -> _Prepared:
        session.folder.inputs.write(())
        return _Prepared(Identity({"pull": self._asked}, self._contents.state))

    def has_results(self, folder: RunFolder) -> bool:
        return True

    def plan(self, session: Session, prepared: _Prepared, begin: str) -> WorkPlan:
        plan = plan_groups(session, prepared.identity, begin, self._contents)
        with explain_os_errors(self.place.files):
            self.place.files.mkdir(exist_ok=True)
        return plan

    def stages(self, session: Session, prepared: _Prepared, plan: WorkPlan) -> Generator[Stage, None, Records]:
        folder = session.folder
        records = Records(folder.journal, RECORDS, folder.out, folder.units.keys())
        yield moving(partial(self._bring, session.observer.warn), folder, records, plan)
        return records

    def finish(self, session: Session, prepared: _Prepared, plan: WorkPlan, done: Records) -> PullSummary:
        """Give the files their names, the manifest last. Killed on the way, what has its name is found in OUT."""
        manifest, before = self._out / self._contents.kind.manifest, set(self._pulled().get("files", ()))
        fetched = done.counts - done.before
        with explain_os_errors(manifest):
            remove_temporaries(self._out)
            for file in self._contents.files:
                if (self.place.files / file.name).exists():
                    (self.place.files / file.name).rename(self._out / file.name)
            sync_folder(self._out)
            if not manifest.exists() or manifest.read_bytes() != self._contents.manifest_bytes:
                with replacing(manifest):
                    write_file(manifest, self._contents.manifest_bytes)
                fetched.update(fetched=1, fetched_bytes=len(self._contents.manifest_bytes))
            # What someone still reads goes with a later pull.
            read = set(live_files(self._out, self._contents.kind)) & before
            stale = before - self._contents.names - read
            for name in stale:
                (self._out / name).unlink(missing_ok=True)
        written = {"files": sorted(self._contents.names | read), "commit": self._tree.commit}
        write_sealed(self._record, self._asked | written | {"manifest": hash_bytes(self._contents.manifest_bytes)})
        summary = replace(self.summary(dict(fetched), len(stale)), units=plan.units, reused=done.reused)
        return session.measured(replace(summary, workers=plan.workers))

    def up_to_date(self, session: Session, prepared: _Prepared) -> PullSummary | None:
        """A work folder is removed when all is done."""
        return None

    def summary(self, done: dict[str, int], removed: int = 0) -> PullSummary:
        files, fetched = len(self._contents.names), done.get("fetched", 0)
        counts = {"files": files, "fetched": fetched, "kept": files - fetched}
        return Summary(
            job="pull",
            out=str(self._out),
            facts={"repo": self._repo, "commit": self._tree.commit, "kind": self._contents.kind.name},
            counts=counts | {"fetched_bytes": done.get("fetched_bytes", 0), "removed": removed},
            output_bytes=self._contents.state["bytes"],
        )

    # ---- fetching ----

    def _bring(self, warn: Callable[[str], None], group: FileGroup, tell: Callable[[int], None]) -> Record:
        """Have the files of a group here, each compared with the manifest and synced."""
        here = [
            next((one for one in (self._out, self.place.files) if is_whole(one, file)), None) for file in group.files
        ]
        missing = [file for file, folder in zip(group.files, here, strict=True) if folder is None]
        # Twice if bytes are wrong.
        wrong = self._fetch(self._fetch(missing, tell, warn), tell, warn)
        if wrong:
            raise StoreError(
                f"{self._repo}: {wrong[0].name} is not what its manifest says (size or hash differs), fetched "
                "twice.\nThe repository is damaged: remove that file there, and push the store again."
            )
        outputs = {}
        for file, folder in zip(group.files, here, strict=True):
            # By its path from the work folder, which is in OUT.
            name = f"../{file.name}" if folder == self._out else f"files/{file.name}"
            outputs[name] = {"bytes": (self.place.work / name).stat().st_size, "xxh3": file.xxh3}
        size = sum(_size(self.place.files / file.name) for file in missing)
        counts = {"files": len(here), "fetched": len(missing), "fetched_bytes": size}
        return Record("", outputs=outputs, counts=counts)

    def _fetch(
        self, files: list[StoredFile], tell: Callable[[int], None], warn: Callable[[str], None]
    ) -> list[StoredFile]:
        """Fetch files, and compare them with the manifest; those that are wrong, which are removed again."""
        if not files:
            return []
        folder = self.place.files
        for file in files:
            # What is here under its name is not whole, and huggingface_hub might take it for what it fetched.
            (folder / file.name).unlink(missing_ok=True)
        call = partial(
            self._api.snapshot_download,
            self._repo,
            repo_type=REPO_TYPE,
            revision=self._tree.commit,
            local_dir=folder,
            allow_patterns=[glob.escape(file.name) for file in files],
            max_workers=STREAMS,
        )
        beat = partial(_tell_size, folder, files, tell)
        tried("fetch the files of", self._repo, lambda: awaited(call, beat), warn=warn)
        if not any((folder / file.name).exists() for file in files):
            # It returns an empty folder too, when the Hub can't be reached.
            raise InputError(f"Can't fetch the files of {self._repo}: the Hub does not answer.\nRun the command again.")
        wrong = [file for file in files if not is_whole(folder, file)]
        for file in wrong:
            (folder / file.name).unlink(missing_ok=True)
        for path in (folder / file.name for file in set(files) - set(wrong)):
            with explain_os_errors(path), path.open("rb") as opened:
                os.fsync(opened.fileno())
        sync_folder(folder)
        shutil.rmtree(folder / _CACHE, ignore_errors=True)
        return wrong


def _tell_size(folder: Path, files: list[StoredFile], tell: Callable[[int], None]) -> None:
    """What has come of some files so far, whole or not."""
    begun = (folder / _CACHE / "download").glob("*.incomplete")
    tell(sum(_size(path) for path in (*(folder / file.name for file in files), *begun)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # not yet, or just renamed
        return 0
