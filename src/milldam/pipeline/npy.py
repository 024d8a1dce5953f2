"""`NAME.npy`: all tokens of the input in one 1-D file for `np.load(mmap_mode="r")`, written as a stream.

The tokens are made as a store in a work folder beside it (so that it resumes like one), joined, and the folder is
removed. Beside the file stays `NAME.npy.json`, which says what it was made from; without it nobody could tell
whether the file is fresh. Disk: twice the file while it is joined.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milldam.checked import checked, read_json
from milldam.config.settings import Config
from milldam.errors import ConfigError, MilldamError, MismatchError, Setting, StoreError
from milldam.files import NewFile, json_bytes, write_file
from milldam.formats.exporting import work_folder as export_folder
from milldam.formats.npy import npy_header
from milldam.formats.writing import token_blocks
from milldam.loader.stores import Store
from milldam.pipeline.finishing import TextSummary, complete
from milldam.pipeline.job import TokenJob
from milldam.run import engine
from milldam.run.engine import Options, Session
from milldam.run.folder import RUN_FOLDER
from milldam.run.summary import Observer
from milldam.stores.kinds import AUDIT, TOKENS
from milldam.stores.tokens.manifest import NAME as MANIFEST
from milldam.stores.tokens.manifest import Manifest


def npy_path(inputs: Sequence[str], out: Path | None) -> Path:
    """The path of the file: by default beside the one text file it is made from."""
    if out is not None:
        return out
    if len(inputs) != 1 or not inputs[0].endswith(".txt"):
        raise ConfigError(Setting("out"), ": say where the file goes; only beside one .txt file it need not be said.")
    return Path(inputs[0]).with_suffix(".npy")


def tokenize_to_npy(config: Config, observer: Observer | None = None) -> TextSummary:
    """Do the job, or what is left of it; a file that is up to date is left alone. `config.out` names the file."""
    npy = Path(config.out)
    sidecar = npy.with_name(npy.name + ".json")
    if npy.suffix != ".npy":
        raise ConfigError(Setting("out"), f": {npy}: the output is a file that ends in .npy.")
    work = work_folder(npy)
    _clear_comparison(work)
    compared = npy.exists() and not config.overwrite and not work.exists()
    if compared:
        _restore_identity(sidecar, npy, work)
    try:
        made = dataclasses.replace(config, out=str(work))
        job = (_ComparedJob if compared else TokenJob)(made, report=False)
        summary = engine.run(job, Options.of(made, name=npy), observer)
    except MilldamError:
        if compared:
            shutil.rmtree(work)
        raise
    if not (compared and summary.up_to_date):
        _join(work, npy)
        _move_audit(work, npy)
        write_file(sidecar, json_bytes(_facts(dataclasses.replace(Manifest.read(work), audit=None))))
    shutil.rmtree(work)
    audit = {what: str(path) for what, path in _audit_beside(npy).items() if path.exists()}
    return dataclasses.replace(summary, out=str(npy), audit=audit, output_bytes=npy.stat().st_size)


def _audit_beside(npy: Path) -> dict[str, Path]:
    return {what: npy.with_name(f"{npy.name}.{what}.{ending}") for what, ending in AUDIT.items()}


def _move_audit(work: Path, npy: Path) -> None:
    listed = Manifest.read(work).audit or {}
    for what, beside in _audit_beside(npy).items():
        if what not in listed:
            beside.unlink(missing_ok=True)
        elif (path := work / listed[what]["name"]).exists():  # else a run that was killed has moved it
            path.replace(beside)


class _ComparedJob(TokenJob):
    """Its folder has the manifest alone: the tokens lie in the file."""

    def up_to_date(self, run: Session) -> TextSummary:
        return complete(self._config, run.folder, report=False)


def _clear_comparison(work: Path) -> None:
    """Remove what a run left that was killed while it only compared: a manifest without its shards."""
    if (work / MANIFEST).exists():
        shards = Manifest.read(work).shards
        if any(not (work / f"{shard.name}.bin").exists() for shard in shards):
            shutil.rmtree(work)


def work_folder(npy: Path) -> Path:
    """The folder in which the tokens of an .npy file are made."""
    return npy.with_name(f".{npy.name}.milldam-npy")


def _facts(manifest: Manifest) -> dict[str, Any]:
    counted = {name: manifest.totals[name] for name in ("documents", "tokens")}
    facts = dataclasses.asdict(manifest) | {"format_version": TOKENS.version} | counted
    return {"format": "milldam npy", **facts}


def _restore_identity(sidecar: Path, npy: Path, work: Path) -> None:
    """Let the run compare itself with the file that exists, by the manifest kept beside it."""
    try:
        manifest = checked(Manifest, read_json(sidecar), sidecar)
    except (FileNotFoundError, StoreError):
        raise MismatchError(
            f"{npy} exists, and no {sidecar.name} beside it says what it was made from. Replace it with ",
            Setting("overwrite", True),
            ".",
        ) from None
    (work / RUN_FOLDER).mkdir(parents=True)
    manifest.write(work)


def _join(work: Path, npy: Path) -> None:
    store = Store(work)
    # What `milldam export --to npy` said of a file that is replaced now.
    shutil.rmtree(export_folder(npy), ignore_errors=True)
    with NewFile(npy) as new:
        new.write(npy_header(store.dtype, store.tokens))
        for block in token_blocks(store):
            new.write(block.data)
        new.commit()
