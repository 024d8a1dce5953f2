"""The job of `milldam export`: a store -> the files of another tool. A unit is a file.

All is made in the work folder `.OUT.milldam-export` beside OUT (same disk, so a rename is enough):

    run/                    as of any job: plan, records, lock
    files/                  what will be OUT; a folder is renamed in one step, a file or pair file by file
    milldam-export.json     says that all files are there
    replaced/               the folder that was OUT before, until all is done

So OUT is whole or not there. What it was made from is kept, in `OUT/.milldam-export.json` for a folder (pyarrow,
datasets and MDS pass over it) and in `OUT.milldam-export.json` beside a file or pair; then the work folder is
removed. Without that file nobody could tell whether an export is up to date.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from milldam.choices import Executor, Side
from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import (
    explain_os_errors,
    has_size,
    read_sealed,
    refuse_address,
    remove_temporaries,
    stays_in_folder,
    sync_folder,
    write_sealed,
)
from milldam.formats import Format, FormatName, load_format
from milldam.formats.writing import Export, OutputFile, has_splits, split_parts
from milldam.loader.opening import open_data
from milldam.loader.stores import Store
from milldam.memory import parse_size
from milldam.rules import AtLeastOne, Settings, Size
from milldam.run import engine
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.folder import PLAN, RUN_FOLDER, RunFolder
from milldam.run.pools import WorkPlan
from milldam.run.records import RECORDS, Record, Records
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity
from milldam.stores.kinds import Kind
from milldam.stores.place import Folder

RECORD_NAME = "milldam-export.json"
EXPORT = Kind("export", RECORD_NAME, "milldam export", "an export that is not in its place", "Run it again.")
_MASKED = ("hf", "parquet")
"""Formats with columns for what is trained on."""
log = logging.getLogger("milldam")


def _record_of(out: Path, *, is_folder: bool) -> Path:
    return out / f".{RECORD_NAME}" if is_folder else out.with_name(f"{out.name}.{RECORD_NAME}")


def exported(out: Path) -> dict[str, Any]:
    """The record of the export that is there; empty: none is."""
    return read_sealed(_record_of(out, is_folder=out.is_dir())) or {}


@dataclass(frozen=True, slots=True)
class ExportSettings(Settings):
    """What the user asks for."""

    to: FormatName
    out: str
    split: str | None = None
    seq_len: AtLeastOne | None = None
    """Tokens of a row; None: a document a row."""
    side: Side | None = None
    """Of preference pairs: write the documents of one side; None: both, as pairs."""
    dtype: str | None = None
    shard_size: Size = "256MB"
    """Of a file, about, in formats of several files."""
    memory: Size | None = None
    workers: AtLeastOne | None = None
    executor: Executor = "local"
    address: str | None = None
    overwrite: bool = False


class ExportFacts(TypedDict):
    """What only an export tells."""

    to: str
    dtype: str


ExportSummary = Summary[ExportFacts]


def run_export(store: str | Path | Store, settings: ExportSettings, observer: Observer | None = None) -> ExportSummary:
    """Do the export, or what is left of it."""
    job = _job(store, settings)
    return engine.run(job, job.options, observer)


def array_of(store: str | Path | Store, settings: ExportSettings) -> engine.ArrayWork[ExportSummary]:
    """The same for tasks of a job array."""
    job = _job(store, settings)
    return engine.array_of(job, job.options)


def _job(store: str | Path | Store, settings: ExportSettings) -> ExportJob:
    opened = store if isinstance(store, Store) else open_data(store)
    if not isinstance(opened, Store):
        raise ConfigError(f"{store}: not a store, but a file of {opened.kind}. `milldam import` makes a store of it.")
    return ExportJob(opened, settings)


class ExportJob(engine.Job[ExportSummary]):
    """A store to the files of another tool."""

    kind = EXPORT
    stage_names = ("export",)
    outputs = ("files/",)

    def __init__(self, store: Store, settings: ExportSettings) -> None:
        format, out = load_format(settings.to), Path(settings.out)
        _check(format, store, out, settings)
        chosen = _chosen_part(format, store, out, settings)
        _check_sides(chosen, settings)
        if chosen.has_spans and settings.to not in _MASKED:
            lost = "has no place for what is trained on: all tokens look alike there. hf and parquet have"
            log.warning(f"{chosen.name}: {settings.to} {lost}.")
        dtype = _chosen_dtype(format.DTYPES, chosen, settings)
        self._settings, self._format, self.workers, self._out = settings, format, settings.workers, out
        self._work = out.with_name(f".{out.name}.milldam-export")
        self._files = self._work / "files"
        self._is_folder = format.SHAPE == "folder" or (format.ALL_SPLITS and has_splits(chosen))
        self._record = _record_of(out, is_folder=self._is_folder)
        endings = (".bin", ".idx") if format.SHAPE == "pair" else ("",)
        self._outputs = [out.with_name(out.name + ending) for ending in endings]
        size = parse_size(settings.shard_size)
        self._export = Export(chosen, out, self._files, dtype, settings.seq_len, size, settings.side)
        # The only split is the whole store, named or not.
        asked: dict[str, Any] = {"to": settings.to, "split": chosen.split_name if len(chosen.splits) > 1 else None}
        asked |= {"store": chosen.fingerprint} | {name: getattr(settings, name) for name in format.OPTIONS}
        asked |= {"shard_size": size} if "shard_size" in format.OPTIONS else {}
        read = {"files": len(chosen.shards), "bytes": chosen.tokens * chosen.dtype.itemsize}
        self._identity = Identity({"export": asked}, read | {"fingerprint": chosen.fingerprint})
        self.options = engine.Options.of(settings, self._work, name=out)

    # ---- what is there ----

    def made_before(self, anew: bool) -> ExportSummary | None:
        """Tell of an export that is up to date; refuse to replace another, unless `anew`."""
        made, settings = read_sealed(self._record) or {}, self._identity.settings
        begun = (read_sealed(self._work / RUN_FOLDER / PLAN) or {}).get("settings")
        is_same = made.get("settings") == settings and self._has_all(made["sizes"], self._out)
        if is_same and not anew and begun in (None, settings):
            if self._work.exists():  # whoever published it was killed before he could remove it
                with RunFolder(self._work, EXPORT, name=self._out):
                    self._clear()
            return replace(self._summary(made), up_to_date=True)
        there = next((path for path in self._outputs if path.exists()), None)
        if there is not None:
            self._refuse(there, made, overwrite=anew or begun == settings)
        return None

    def _has_all(self, sizes: dict[str, int], *places: Path) -> bool:
        """Whether each file is in one of some places; beside OUT, where that is no folder."""
        folders = [place if self._is_folder or place != self._out else place.parent for place in places]
        return bool(sizes) and all(
            any(has_size(folder / name, size) for folder in folders) for name, size in sizes.items()
        )

    def _refuse(self, there: Path, made: dict[str, Any], *, overwrite: bool) -> None:
        """Nothing is replaced unasked, and no folder that is not ours even then."""
        if self._is_folder and not made:
            if not there.is_dir() or any(there.iterdir()):
                raise ConfigError(f"{there}: not made by `milldam export`; it is left alone.")
        elif there.is_dir() and not self._is_folder:
            raise ConfigError(f"{there}: is a folder; {self._settings.to} is a file.")
        elif not overwrite:
            known = "made from another store or with other options, or changed since"
            origin = known if made else "no record says what it was made from"
            raise MismatchError(f"{there}: exists ({origin}). Replace it with ", Setting("overwrite", True), ".")

    # ---- the work ----

    def prepare(self, run: Session) -> Identity:
        run.folder.inputs.write(())
        return self._identity

    def units(self, run: Session) -> Iterable[OutputFile]:
        return self._format.files(self._export)

    def stages(self, run: Session) -> Iterator[Stage]:
        folder = run.folder
        with explain_os_errors(self._files):
            self._files.mkdir(exist_ok=True)
        self._records = Records(folder.journal, RECORDS, folder.out, folder.units.keys())
        yield Stage("export", _FileMaker(self._settings.to, self._export), self._records, OutputFile.from_json)

    def finish(self, run: Session, plan: WorkPlan) -> ExportSummary:
        files, made = self._files, self._made(run.folder)
        complete = getattr(self._format, "complete_folder", None)
        if complete is not None:
            for split, each in made.items():
                complete(self._export, split, files / split if has_splits(self._export.store) else files, each)
        for folder in (files, *(path for path in files.iterdir() if path.is_dir())):
            remove_temporaries(folder)
            sync_folder(folder)
        paths = sorted(path for path in files.rglob("*") if path.is_file() and path.name != f".{RECORD_NAME}")
        sizes = {path.relative_to(files).as_posix(): path.stat().st_size for path in paths}
        counts = self._counts([one for each in made.values() for one in each])
        identity = {"settings": self._identity.settings, "input": self._identity.input}
        manifest = identity | {"counts": counts, "dtype": self._export.dtype.name, "sizes": sizes}
        EXPORT.write(run.folder.out, manifest)
        summary = self._summary(manifest)
        return run.measured(replace(summary, units=plan.units, reused=self._records.reused, workers=plan.workers))

    def _made(self, folder: RunFolder) -> dict[str, list[dict[str, Any]]]:
        """What was made of each split: name, rows, tokens, bytes and xxh3."""
        made: dict[str, list[dict[str, Any]]] = {split: [] for split in split_parts(self._export.store)}
        for number, record in self._records.in_plan_order():
            file: OutputFile = folder.units.at(number, OutputFile.from_json)
            name = {"file": Path(file.name).name}
            written = record.outputs[f"files/{file.name}"]
            made[file.split].append(written | name | {"rows": file.rows, "tokens": file.tokens})
        return made

    def _counts(self, made: list[dict[str, Any]]) -> dict[str, int]:
        if "seq_len" not in self._format.OPTIONS:
            return {}
        rows, store, seq_len = sum(one["rows"] for one in made), self._export.store, self._export.seq_len
        if store.has_spans and seq_len is not None and self._settings.to in _MASKED:
            # Rows are padded; what is left out is what is too long for one.
            found = [part.packed(seq_len, side=self._export.side).too_long for part in split_parts(store).values()]
            left = {"tokens_left_out": sum(one.tokens for one in found)}
            return {"rows": rows, "documents_left_out": sum(one.documents for one in found)} | left
        kept = sum(one["tokens"] for one in made)
        return {"rows": rows, "tokens_left_out": store.tokens - kept}

    def up_to_date(self, run: Session) -> ExportSummary | None:
        """All was made before a kill; only its names are missing."""
        made = EXPORT.value(Folder(run.folder.out))
        if not self._has_all(made["sizes"], self._files, self._out):
            return None
        summary = self._summary(made)
        return replace(summary, units=summary.counts["files"], reused=summary.counts["files"])

    def _summary(self, made: dict[str, Any]) -> ExportSummary:
        store, sizes = self._export.store, made["sizes"]
        counts = {"documents": len(store), "tokens": store.tokens, "files": len(sizes)} | made["counts"]
        facts: ExportFacts = {"to": self._settings.to, "dtype": made["dtype"]}
        return Summary("export", str(self._out), facts, counts=counts, output_bytes=sum(sizes.values()))

    # ---- its place ----

    def publish(self) -> None:
        """Give the files their names. Killed on the way, the next call goes on here."""
        with RunFolder(self._work, EXPORT, name=self._out), explain_os_errors(self._out):
            if not (self._work / RECORD_NAME).exists():
                return  # another process has done it
            record = EXPORT.value(Folder(self._work))
            if self._is_folder:
                self._publish_folder(record)
            else:
                self._publish_files(record)
            self._clear()

    def _publish_folder(self, record: dict[str, Any]) -> None:
        if not self._files.exists():
            return  # it has its name
        remove_temporaries(self._files)  # of a process that was killed here
        write_sealed(self._files / self._record.name, record)
        if self._out.exists():
            # Moved away in one step: nobody sees it half removed.
            shutil.rmtree(self._work / "replaced", ignore_errors=True)
            self._out.rename(self._work / "replaced")
        self._files.rename(self._out)
        sync_folder(self._out.parent)

    def _publish_files(self, record: dict[str, Any]) -> None:
        """The last, which readers of a pair look for, goes first and comes last: it never says of other files."""
        waiting = [path for path in self._outputs if (self._files / path.name).exists()]
        outdated = getattr(self._format, "outdated", None)
        for path in (self._record, *(outdated(self._out) if outdated else ()), *waiting[1:]):
            path.unlink(missing_ok=True)
        for path in waiting:
            (self._files / path.name).rename(path)
            sync_folder(path.parent)
        # Made in the work folder, so that a kill leaves nothing beside OUT.
        write_sealed(self._work / "record", record)
        (self._work / "record").rename(self._record)
        sync_folder(self._out.parent)

    def _clear(self) -> None:
        """Remove the work folder; the manifest last: it tells a later call what was done."""
        for path in (self._work / "replaced", self._files, self._work / RUN_FOLDER, self._work):
            shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _FileMaker:
    """Writes the files of an export."""

    to: str
    export: Export

    def load(self) -> Make:
        write_file = load_format(self.to).write_file

        def make(assigned: Assigned, progress: Progress) -> Iterator[Record]:
            path = self.export.folder / assigned.unit.name
            with explain_os_errors(path):
                path.parent.mkdir(exist_ok=True)
            written = write_file(self.export, assigned.unit, progress)
            yield Record(assigned.key, outputs={f"files/{assigned.unit.name}": written})

        return make


# ---- what can be written ----


def _check(format: Format, store: Store, out: Path, settings: ExportSettings) -> None:
    refuse_address(out)
    for name in ("seq_len", "dtype", "side"):
        if getattr(settings, name) is not None and name not in format.OPTIONS:
            raise ConfigError(f"{settings.to}: ", Setting(name), " does not apply to this format. Leave it out.")
    if out.name in ("", ".."):
        raise ConfigError(f"{out}: name what is to be made, such as {settings.to}-data.")
    if store.place.folder is not None and out.resolve() == store.place.folder.resolve():
        raise ConfigError(f"{out}: is the store itself. Choose another place.")


def _check_sides(store: Store, settings: ExportSettings) -> None:
    """Of preference pairs, both sides look alike in rows that are packed, and in formats without columns for them."""
    pairs = store.manifest.chat is not None and store.manifest.chat["pairs"]
    if settings.side is not None and not pairs:
        raise ConfigError(Setting("side", settings.side), f": {store.name} is not a store of pairs. Leave it out.")
    if pairs and settings.to not in _MASKED:
        told = f"{store.name}: {settings.to} has no place for preference pairs: chosen and rejected answers would look"
        raise ConfigError(f"{told} alike. Use ", Setting("to", "hf"), " or ", Setting("to", "parquet"), ".")
    if pairs and settings.side is None and settings.seq_len is not None:
        told = f"{store.name}: rows would have chosen and rejected answers alike. Name one side: "
        raise ConfigError(told, Setting("side", "chosen"), "; or leave out ", Setting("seq_len"), ".")


def _chosen_part(format: Format, store: Store, out: Path, settings: ExportSettings) -> Store:
    """The part of the store that is meant, when it can be written."""
    chosen = store if settings.split is None else store.named_part(settings.split)
    if not format.ALL_SPLITS:
        chosen.stream()  # which refuses several splits where one must be named
    if chosen.tokens == 0:
        raise ConfigError(f"{chosen.name}: has no tokens. There is nothing to export.")
    for split, part in split_parts(chosen).items():
        # They become folders and files.
        if not stays_in_folder(split, hidden=False):
            raise ConfigError(f'{store.name}: the split "{split}" is not a valid file name. Nothing is written.')
        if settings.seq_len is not None and part.tokens < settings.seq_len:
            told = f': the split "{split}" has {part.tokens:,} tokens, not even one row. Take shorter rows.'
            raise ConfigError(Setting("seq_len", settings.seq_len), told)
    check_out = getattr(format, "check_out", None)
    if check_out is not None:
        check_out(chosen, out)
    return chosen


def _chosen_dtype(known: tuple[str, ...], store: Store, settings: ExportSettings) -> np.dtype[Any]:
    """The dtype to write: the one that is asked for, or the first of the format's that holds the vocabulary."""
    wide = [name for name in known if np.iinfo(name).max >= store.vocab_size - 1]
    name = wide[0] if settings.dtype is None else settings.dtype
    if name not in known:
        raise ConfigError(Setting("dtype", name), f": {settings.to} takes {', '.join(known[:-1])} or {known[-1]}.")
    if name not in wide:
        told = f": holds ids up to {np.iinfo(name).max:,}, and the vocabulary of {store.name} has {store.vocab_size:,}."
        raise ConfigError(Setting("dtype", name), f"{told} Take {' or '.join(wide)}.")
    return np.dtype(name).newbyteorder("<")
