"""The job of `milldam export`: a store -> the files of another tool. A unit is a file.

The work folder `.OUT.milldam-export` beside OUT (same disk, so a rename is enough) stays there, so that a later call
knows what OUT was made from:

    run/                    as of any job: plan, records, lock
    files/                  what will be OUT: a folder is renamed in one step, a file or pair file by file
    replaced/               the folder that was OUT before, for a moment
    milldam-export.json     what OUT was made from; written last

So OUT is whole or not there. A folder that milldam exported has an empty file `.milldam-export` in it, and is replaced
only on request; others never are.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import (
    explain_os_errors,
    has_size,
    read_sealed,
    refuse_address,
    remove_temporaries,
    stays_in_folder,
    sync_folder,
)
from milldam.formats import Format, load_format
from milldam.formats.rows import Rows
from milldam.formats.settings import ExportSettings
from milldam.formats.writing import Export, OutputFile, has_splits
from milldam.loader.opening import open_data
from milldam.loader.stores import Store
from milldam.memory import parse_size
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import WorkPlan
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.records import RECORDS, Record, Records
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity
from milldam.stores.kinds import Kind
from milldam.stores.place import Folder

EXPORT = Kind("export", "milldam-export.json", "milldam export", "an export that is not in its place", "Run it again.")
MARK = ".milldam-export"
_MASKED = ("hf", "parquet")
"""Formats with columns for what is trained on."""
log = logging.getLogger("milldam")


def work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.milldam-export")


class ExportFacts(TypedDict):
    """Facts of the summary that only an export has."""

    to: str
    dtype: str


ExportSummary = Summary[ExportFacts]


def run_export(store: str | Path | Store, settings: ExportSettings, observer: Observer | None = None) -> ExportSummary:
    """Do the export, or what is left of it."""
    job = ExportJob(store, settings)
    return engine.run(job, job.options, observer)


def array_of(store: str | Path | Store, settings: ExportSettings) -> ArrayWork[ExportSummary]:
    """The same for tasks of a job array."""
    job = ExportJob(store, settings)
    return ArrayWork(job, job.options)


class ExportJob(engine.Job[ExportSummary]):
    """A store to the files of another tool."""

    kind = EXPORT
    stage_names = ("export",)
    outputs = ("files/",)

    def __init__(self, store: str | Path | Store, settings: ExportSettings) -> None:
        refuse_address(settings.out)
        opened = store if isinstance(store, Store) else open_data(store)
        if not isinstance(opened, Store):
            raise ConfigError(
                f"{store}: not a store, but a file of {opened.kind}. `milldam import` makes a store of it."
            )
        format, out, size = load_format(settings.to), Path(settings.out), parse_size(settings.shard_size)
        chosen = _chosen_part(format, opened, out, settings)
        dtype = _chosen_dtype(format.DTYPES, chosen, settings)
        work = work_folder(out)
        self._settings, self._format, self.workers, self._out = settings, format, settings.workers, out
        self._export = Export(chosen, out, work / "files", dtype, settings.seq_len, size, settings.side)
        self._is_folder = format.SHAPE == "folder" or has_splits(chosen)
        endings = (".bin", ".idx") if format.SHAPE == "pair" else ("",)
        self._outputs = [out.with_name(out.name + ending) for ending in endings]
        # The only split is the whole store, named or not.
        recipe: dict[str, Any] = {"to": settings.to, "split": chosen.split_name if len(chosen.splits) > 1 else None}
        recipe |= {"store": chosen.fingerprint} | {name: getattr(settings, name) for name in format.OPTIONS}
        recipe |= {"shard_size": size} if "shard_size" in format.OPTIONS else {}
        read = {"files": len(chosen.shards), "bytes": chosen.tokens * chosen.dtype.itemsize}
        self._identity = Identity({"export": recipe}, read | {"fingerprint": chosen.fingerprint})
        self.options = engine.Options.of(settings, work, name=out)

    def prepare(self, run: Session) -> Identity:
        """Refuse to replace anything unless asked to, and a folder that milldam did not make even then."""
        made = read_sealed(run.folder.out / EXPORT.manifest) or {}
        settings = self._identity.settings
        is_same = made.get("settings") == settings
        is_whole = is_same and self._has_all(made["sizes"])
        # An unfinished run of the same resumes; of an export with other settings, the frame says what differs.
        is_ours = not is_same if made else run.folder.plan().get("settings") == settings
        for path in (path for path in self._outputs if path.exists() and not is_whole):
            if self._is_folder and path.is_dir() and not any(path.iterdir()):
                continue
            if self._is_folder and not (path / MARK).exists():
                raise ConfigError(f"{path}: not made by `milldam export`; it is left alone.")
            if path.is_dir() and not self._is_folder:
                raise ConfigError(f"{path}: is a folder; {self._settings.to} is a file.")
            if not is_ours and not self._settings.overwrite:
                reason = "changed since it was exported" if made else "no record says what it was made from"
                raise MismatchError(f"{path}: exists ({reason}). Replace it with ", Setting("overwrite", True), ".")
        run.folder.inputs.write(())
        return self._identity

    def _has_all(self, sizes: dict[str, int]) -> bool:
        place = self._out if self._is_folder else self._out.parent
        return bool(sizes) and all(has_size(place / name, size) for name, size in sizes.items())

    def units(self, run: Session) -> Iterable[OutputFile]:
        return self._format.files(self._export)

    def stages(self, run: Session) -> Iterator[Stage]:
        folder = run.folder
        with explain_os_errors(self._export.folder):
            self._export.folder.mkdir(exist_ok=True)
        self._records = Records(folder.journal, RECORDS, folder.out, folder.units.keys())
        yield Stage("export", _FileMaker(self._settings.to, self._export), self._records, OutputFile.from_json)

    def finish(self, run: Session, plan: WorkPlan) -> ExportSummary:
        export, files = self._export, self._export.folder
        made: dict[str, list[dict[str, Any]]] = {split: [] for split in export.parts}
        for number, record in self._records.in_plan_order():
            file: OutputFile = run.folder.units.at(number, OutputFile.from_json)
            facts = {"file": Path(file.name).name, "rows": file.rows, "tokens": file.tokens}
            made[file.split].append(record.outputs[f"files/{file.name}"] | facts)
        complete = getattr(self._format, "complete_folder", None)
        for split, each in made.items():
            if complete is None:
                break
            complete(export, split, files / split if export.has_splits else files, each)
        with explain_os_errors(files):
            for folder in (files, *(path for path in files.iterdir() if path.is_dir())):
                remove_temporaries(folder)
                sync_folder(folder)
            paths = sorted(path for path in files.rglob("*") if path.is_file() and path.name != MARK)
            sizes = {path.relative_to(files).as_posix(): path.stat().st_size for path in paths}
            self._publish(files)
        counts = self._counts([one for each in made.values() for one in each])
        identity = {"settings": self._identity.settings, "input": self._identity.input}
        manifest = identity | {"counts": counts, "dtype": export.dtype.name, "sizes": sizes}
        EXPORT.write(run.folder.out, manifest)
        shutil.rmtree(run.folder.out / "replaced", ignore_errors=True)
        summary = self._summary(manifest)
        return run.measured(replace(summary, units=plan.units, reused=self._records.reused, workers=plan.workers))

    def _publish(self, files: Path) -> None:
        """Give the files their names. Killed on the way, the next call makes those again that have theirs."""
        if self._is_folder:
            (files / MARK).touch()
            if self._out.exists():
                # Moved away in one step: nobody sees it half removed.
                shutil.rmtree(files.with_name("replaced"), ignore_errors=True)
                self._out.rename(files.with_name("replaced"))
            files.rename(self._out)
        else:
            # The last, which readers of a pair look for, goes first and comes last: it never describes other files.
            outdated = self._outputs[1:]
            if self._settings.to == "npy":
                from milldam.formats.npy import read_sidecar, sidecar_path

                outdated = [sidecar_path(self._out)] if read_sidecar(self._out) is not None else []
            for path in outdated:
                path.unlink(missing_ok=True)
            for path in self._outputs:
                (files / path.name).rename(path)
                sync_folder(path.parent)
        sync_folder(self._out.parent)

    def _counts(self, made: list[dict[str, Any]]) -> dict[str, int]:
        if "seq_len" not in self._format.OPTIONS:
            return {}
        rows, export = sum(one["rows"] for one in made), self._export
        if export.store.has_spans and export.seq_len is not None and self._settings.to in _MASKED:
            # Rows are padded; what is left out is what is too long for one.
            too_long = [Rows(export, split, masked=True).packed.too_long for split in export.parts]
            left = {"tokens_left_out": sum(one.tokens for one in too_long)}
            return {"rows": rows, "documents_left_out": sum(one.documents for one in too_long)} | left
        return {"rows": rows, "tokens_left_out": export.store.tokens - sum(one["tokens"] for one in made)}

    def up_to_date(self, run: Session) -> ExportSummary | None:
        made = EXPORT.facts(Folder(run.folder.out))
        return replace(self._summary(made), up_to_date=True) if self._has_all(made["sizes"]) else None

    def _summary(self, made: dict[str, Any]) -> ExportSummary:
        store, sizes = self._export.store, made["sizes"]
        counts = {"documents": len(store), "tokens": store.tokens, "files": len(sizes)} | made["counts"]
        facts: ExportFacts = {"to": self._settings.to, "dtype": made["dtype"]}
        return Summary("export", str(self._out), facts, counts=counts, output_bytes=sum(sizes.values()))


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


def _chosen_part(format: Format, store: Store, out: Path, settings: ExportSettings) -> Store:
    """The part of the store to write, if the format can hold it and OUT can be made."""
    to = settings.to
    for name in ("seq_len", "dtype", "side"):
        if getattr(settings, name) is not None and name not in format.OPTIONS:
            raise ConfigError(f"{to}: ", Setting(name), " does not apply to this format. Leave it out.")
    if out.name in ("", ".."):
        raise ConfigError(f"{out}: name what is to be made, such as {to}-data.")
    if store.place.folder is not None and out.resolve() == store.place.folder.resolve():
        raise ConfigError(f"{out}: is the store itself. Choose another place.")
    chosen = store if settings.split is None else store.named_part(settings.split)
    if not format.ALL_SPLITS:
        chosen.stream()  # which refuses several splits where one must be named
    if chosen.tokens == 0:
        raise ConfigError(f"{chosen.name}: has no tokens. There is nothing to export.")
    for split in chosen.splits if chosen.split_name is None else (chosen.split_name,):
        # They become folders and files.
        if not stays_in_folder(split, hidden=False):
            raise ConfigError(f'{store.name}: the split "{split}" is not a valid file name. Nothing is written.')
        tokens = sum(shard.tokens for shard in chosen.shards if shard.split == split)
        if settings.seq_len is not None and tokens < settings.seq_len:
            problem = f': the split "{split}" has {tokens:,} tokens, not even one row. Use shorter rows.'
            raise ConfigError(Setting("seq_len", settings.seq_len), problem)
    _check_name(format, chosen, out, to)
    _check_chat(chosen, settings)
    return chosen


def _check_name(format: Format, store: Store, out: Path, to: str) -> None:
    """Refuse a name that the tool would not read."""
    if format.SHAPE == "pair" and out.suffix in (".bin", ".idx"):
        raise ConfigError(f"{out}: a pair is named without its endings: {out.with_suffix('')}.")
    if format.SHAPE == "file" and not has_splits(store) and out.suffix not in format.SUFFIXES:
        raise ConfigError(f"{out}: {to} is a file that ends in {format.SUFFIXES[0]}.")
    if format.SHAPE == "file" and has_splits(store) and out.suffix in format.SUFFIXES:
        raise ConfigError(
            f"{out}: of several splits ({', '.join(store.splits)}), {to} is a folder with a file for each. "
            "Name a folder, or choose one split with ",
            Setting("split", store.splits[0]),
            ".",
        )


def _check_chat(store: Store, settings: ExportSettings) -> None:
    """Of preference pairs, both sides look alike in rows that are packed, and in formats without columns for them."""
    pairs = store.manifest.chat is not None and store.manifest.chat["pairs"]
    if settings.side is not None and not pairs:
        raise ConfigError(Setting("side", settings.side), f": {store.name} is not a store of pairs. Leave it out.")
    if pairs and settings.to not in _MASKED:
        problem = f"{store.name}: {settings.to} can't hold preference pairs: chosen and rejected answers would look"
        raise ConfigError(f"{problem} alike. Use ", Setting("to", "hf"), " or ", Setting("to", "parquet"), ".")
    if pairs and settings.side is None and settings.seq_len is not None:
        problem = f"{store.name}: chosen and rejected answers would look alike in packed rows. Name one side: "
        raise ConfigError(problem, Setting("side", "chosen"), "; or leave out ", Setting("seq_len"), ".")
    if store.has_spans and settings.to not in _MASKED:
        lost = "can't hold what is trained on: all tokens look alike there. hf and parquet can"
        log.warning(f"{store.name}: {settings.to} {lost}.")


def _chosen_dtype(known: tuple[str, ...], store: Store, settings: ExportSettings) -> np.dtype[Any]:
    """The dtype that the user names, or the first of the format's that holds the vocabulary."""
    wide = [name for name in known if np.iinfo(name).max >= store.vocab_size - 1]
    name = wide[0] if settings.dtype is None else settings.dtype
    if name not in known:
        raise ConfigError(Setting("dtype", name), f": {settings.to} takes {', '.join(known[:-1])} or {known[-1]}.")
    if name not in wide:
        limit = f"holds ids up to {np.iinfo(name).max:,}"
        problem = f": {limit}, and the vocabulary of {store.name} has {store.vocab_size:,}. Use {' or '.join(wide)}."
        raise ConfigError(Setting("dtype", name), problem)
    return np.dtype(name).newbyteorder("<")
