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

import json
import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import (
    NewFile,
    explain_os_errors,
    has_size,
    hash_bytes,
    read_sealed,
    refuse_address,
    remove_temporaries,
    sync_folder,
)
from milldam.formats import FORMATS, Format
from milldam.formats.flat import flat_files, write_flat
from milldam.formats.mds import complete_mds, write_mds
from milldam.formats.rows import Rows, complete_hf, write_rows
from milldam.formats.settings import ExportSettings
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

EXPORT = Kind("export", "milldam-export.json", "milldam export", "an export that is not in its place", "Run it again.")
MARK = ".milldam-export"
_COMPLETE = {"hf": complete_hf, "mds": complete_mds}
"""What is written besides rows, when all of them are there."""
log = logging.getLogger("milldam")


def work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.milldam-export")


ExportSummary: TypeAlias = Summary[Mapping[str, Any]]


def run_export(store: str | Path | Store, settings: ExportSettings, observer: Observer | None = None) -> ExportSummary:
    """Do the export, or what is left of it."""
    job = ExportJob(store, settings)
    return engine.run(job, job.options, observer)


def array_of(store: str | Path | Store, settings: ExportSettings) -> ArrayWork[ExportSummary]:
    """The same for tasks of a job array."""
    job = ExportJob(store, settings)
    return ArrayWork(job, job.options)


@dataclass(frozen=True, slots=True)
class Export:
    """A store to export, and how. In a worker, a `Load`: it writes files."""

    to: str
    parts: dict[str, Store]
    """The splits to write, by name: the chosen one, or all of a store that has several."""
    out: Path
    """Where the user wants it; nothing is written there."""
    folder: Path
    """Where the files are made, under the names that they will have; for a folder, what will be OUT."""
    dtype: np.dtype[Any]
    """Of the tokens to write."""
    seq_len: int | None
    """Tokens of a row; None: a document a row."""

    @property
    def has_splits(self) -> bool:
        """Whether each split has a file or a folder of its own."""
        return len(self.parts) > 1

    def load(self) -> Make:
        return self._make

    def _make(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        file: OutputFile = assigned.unit
        path = self.folder / file.name
        with explain_os_errors(path):
            path.parent.mkdir(exist_ok=True)
        with NewFile(path) as new:
            if FORMATS[self.to].seq_len:
                rows = Rows(self, file.split)
                write_mds(new, rows, file) if self.to == "mds" else write_rows(new, self.to, rows, file)
            else:
                write_flat(new, self, file, progress)
            yield Record(assigned.key, outputs={f"files/{file.name}": new.commit()})


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to make: a unit of the export."""

    name: str
    """Below the export's folder."""
    split: str
    size: int
    """Bytes of input."""
    rows: int = 0
    tokens: int = 0
    first: int = 0
    """Number of its first row in the split."""
    start: int = 0
    """Position of its first token in the split."""

    @property
    def key(self) -> str:
        return hash_bytes(json.dumps(self.as_json()).encode())[:16]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> OutputFile:
        return cls(**value)


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
        format, out = FORMATS[settings.to], Path(settings.out)
        chosen, parts = _chosen_parts(format, opened, out, settings)
        dtype, work = _chosen_dtype(format, chosen, settings), work_folder(out)
        self._settings, self.workers, self._out, self._store = settings, settings.workers, out, chosen
        self._size = parse_size(settings.shard_size)
        self._export = Export(settings.to, parts, out, work / "files", dtype, settings.seq_len)
        self._is_folder = format.shape == "folder" or len(parts) > 1
        endings = (".bin", ".idx") if format.shape == "pair" else ("",)
        self._outputs = [out.with_name(out.name + ending) for ending in endings]
        # The only split is the whole store, named or not.
        recipe: dict[str, Any] = {"to": settings.to, "split": chosen.split_name if len(chosen.splits) > 1 else None}
        recipe |= {"store": chosen.fingerprint, "dtype": settings.dtype}
        recipe |= {"seq_len": settings.seq_len, "shard_size": self._size} if format.seq_len else {}
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
            if self._is_folder != path.is_dir() or (self._is_folder and not (path / MARK).exists()):
                raise ConfigError(f"{path}: not made by `milldam export`; it is left alone.")
            if not is_ours and not self._settings.overwrite:
                reason = "changed since it was exported" if made else "no record says what it was made from"
                raise MismatchError(f"{path}: exists ({reason}). Replace it with ", Setting("overwrite", True), ".")
        run.folder.inputs.write(())
        return self._identity

    def _has_all(self, sizes: dict[str, int]) -> bool:
        place = self._out if self._is_folder else self._out.parent
        return bool(sizes) and all(has_size(place / name, size) for name, size in sizes.items())

    def units(self, run: Session) -> Iterable[OutputFile]:
        if not FORMATS[self._settings.to].seq_len:
            yield from (OutputFile(name, split, size) for name, split, size in flat_files(self._export))
            return
        for split, store in self._export.parts.items():
            first = start = 0
            for name, rows, tokens in Rows(self._export, split).files(self._settings.to, self._size):
                name = f"{split}/{name}" if self._export.has_splits else name
                yield OutputFile(name, split, tokens * store.dtype.itemsize, rows, tokens, first, start)
                first, start = first + rows, start + tokens

    def stages(self, run: Session) -> Iterator[Stage]:
        folder = run.folder
        with explain_os_errors(self._export.folder):
            self._export.folder.mkdir(exist_ok=True)
        self._records = Records(folder, RECORDS, folder.units.keys())
        yield Stage("export", self._export, self._records, OutputFile.from_json)

    def finish(self, run: Session, plan: WorkPlan) -> ExportSummary:
        export, files = self._export, self._export.folder
        made: dict[str, list[dict[str, Any]]] = {split: [] for split in export.parts}
        for number, record in self._records.in_plan_order():
            file: OutputFile = run.folder.units.at(number, OutputFile.from_json)
            facts = {"file": Path(file.name).name, "rows": file.rows, "tokens": file.tokens}
            made[file.split].append(record.outputs[f"files/{file.name}"] | facts)
        for split, each in made.items():
            if self._settings.to in _COMPLETE:
                _COMPLETE[self._settings.to](export, split, files / split if export.has_splits else files, each)
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
            # The index, which readers of a pair look for, goes first and comes last: it never describes other tokens.
            for path in self._outputs[1:]:
                path.unlink(missing_ok=True)
            for path in self._outputs:
                (files / path.name).rename(path)
                sync_folder(path.parent)
        sync_folder(self._out.parent)

    def _counts(self, made: list[dict[str, Any]]) -> dict[str, int]:
        """Rows, and what is in none of them."""
        rows, export = sum(one["rows"] for one in made), self._export
        if not FORMATS[export.to].seq_len:
            return {}
        if FORMATS[export.to].masks and self._store.has_spans and export.seq_len is not None:
            # Rows are padded; what is left out is what is too long for one.
            too_long = [Rows(export, split).samples.too_long for split in export.parts]
            left = {"tokens_left_out": sum(one.tokens for one in too_long)}
            return {"rows": rows, "documents_left_out": sum(one.documents for one in too_long)} | left
        return {"rows": rows, "tokens_left_out": self._store.tokens - sum(one["tokens"] for one in made)}

    def up_to_date(self, run: Session) -> ExportSummary | None:
        made = read_sealed(run.folder.out / EXPORT.manifest)
        if made is None or not self._has_all(made["sizes"]):
            return None
        return replace(self._summary(made), up_to_date=True)

    def _summary(self, made: dict[str, Any]) -> ExportSummary:
        store, sizes = self._store, made["sizes"]
        counts = {"documents": len(store), "tokens": store.tokens, "files": len(sizes)} | made["counts"]
        facts = {"to": self._settings.to, "dtype": made["dtype"]}
        return Summary("export", str(self._out), facts, counts=counts, output_bytes=sum(sizes.values()))


# ---- what can be written ----


def _chosen_parts(format: Format, store: Store, out: Path, settings: ExportSettings) -> tuple[Store, dict[str, Store]]:
    """The store to write and its splits by name, if the format can hold them and OUT can be made."""
    to, seq_len = settings.to, settings.seq_len
    if seq_len is not None and not format.seq_len:
        raise ConfigError(f"{to}: ", Setting("seq_len"), " does not apply to this format. Leave it out.")
    if out.name in ("", ".."):
        raise ConfigError(f"{out}: name what is to be made, such as {to}-data.")
    if store.place.folder is not None and out.resolve() == store.place.folder.resolve():
        raise ConfigError(f"{out}: is the store itself. Choose another place.")
    chosen = store if settings.split is None else store.named_part(settings.split)
    if not format.splits:
        chosen.stream()  # which refuses several splits where one must be named
    if chosen.tokens == 0:
        raise ConfigError(f"{chosen.name}: has no tokens. There is nothing to export.")
    if chosen.split_name is None and len(chosen.splits) > 1:
        parts = {name: chosen.named_part(name) for name in chosen.splits}
    else:
        parts = {chosen.split_name or chosen.splits[0]: chosen}
    for split, part in parts.items():
        if seq_len is not None and part.tokens < seq_len:
            problem = f': the split "{split}" has {part.tokens:,} tokens, not even one row. Use shorter rows.'
            raise ConfigError(Setting("seq_len", seq_len), problem)
    has_ending = bool(format.ending) and out.suffix == format.ending
    if format.shape == "pair" and out.suffix in (".bin", ".idx"):
        raise ConfigError(f"{out}: a pair is named without its endings: {out.with_suffix('')}.")
    if format.shape == "file" and has_ending != (len(parts) == 1):
        wanted = f"a file that ends in {format.ending}" if len(parts) == 1 else "a folder with a file for each split"
        raise ConfigError(f"{out}: {to} is {wanted}. Name one, or a split with ", Setting("split"), ".")
    pairs = chosen.manifest.chat is not None and chosen.manifest.chat["pairs"]
    if pairs and (not format.masks or seq_len is not None):
        rows = f"{to} can't hold" if not format.masks else "rows of seq_len can't hold"
        problem = f"{store.name}: {rows} preference pairs: chosen and rejected answers would look alike. Use "
        raise ConfigError(problem, Setting("to", "hf"), " or ", Setting("to", "parquet"), ", a pair a row.")
    if chosen.has_spans and not format.masks:
        lost = "can't hold what is trained on: all tokens look alike there. hf and parquet can"
        log.warning(f"{chosen.name}: {to} {lost}.")
    return chosen, parts


def _chosen_dtype(format: Format, store: Store, settings: ExportSettings) -> np.dtype[Any]:
    """The dtype that the user names, or the first of the format's that holds the vocabulary."""
    known = format.dtypes
    wide = [name for name in known if np.iinfo(name).max >= store.vocab_size - 1]
    name = wide[0] if settings.dtype is None else settings.dtype
    if name not in known:
        raise ConfigError(Setting("dtype", name), f": {settings.to} takes {', '.join(known[:-1])} or {known[-1]}.")
    if name not in wide:
        problem = f": too small for a vocabulary of {store.vocab_size:,}. Use {' or '.join(wide)}."
        raise ConfigError(Setting("dtype", name), problem)
    return np.dtype(name).newbyteorder("<")
