"""What every export has in common: its plan, its ledger, its lock, and how its files get their names.

All files are made in the work folder `.OUT.milldam-export` beside OUT (same disk, so a rename is enough):

    plan.json        format, store and options; another plan is refused
    records.jsonl    the ledger: what is durable already, a line each
    lock             held while an export is at work
    files/           what will be OUT; a folder is renamed in one step, a file or pair file by file
    replaced/        the folder that was OUT before, until all is done

So OUT is whole or not there. What it was made from is kept, in `OUT/.milldam-export.json` for a folder (pyarrow,
datasets, MDS and litdata pass over it) and in `OUT.milldam-export.json` beside a file or pair; then the work folder is
removed. Without that file nobody could tell whether an export is up to date.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import (
    explain_os_errors,
    refuse_address,
    remove_temporaries,
    stays_in_folder,
    sync_folder,
)
from milldam.formats import Format, load_format
from milldam.formats.flat import has_splits, split_parts
from milldam.loader.stores import Store
from milldam.sealed import read_sealed, seal_line, unseal_line, write_sealed

PLAN_VERSION = 1
RECORD_NAME = "milldam-export.json"
PLAN, RECORDS = "plan.json", "records.jsonl"
_SUFFIXES = {"file": ("",), "pair": (".bin", ".idx"), "folder": ("",)}
_COMPLETE = "complete"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    split: str | None = None
    seq_len: int | None = None
    """Tokens of a row; None: a document a row."""
    dtype: str | None = None
    shard_size: int = 256_000_000
    """Bytes of a file, about, in formats of several files."""


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """What a finished export tells."""

    out: Path
    to: str
    up_to_date: bool
    documents: int
    tokens: int
    """In the store's part that was exported."""
    bytes: int
    """Of all files."""
    files: int
    counts: dict[str, Any] = field(default_factory=dict)
    """What the format has beside these, such as rows and the tokens left over at the end."""
    seconds: float = 0.0
    resumed: bool = False
    """Went on from what an earlier call had done."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


class Ledger:
    """What is done already: a record a line, durable when `add` returns. A torn or damaged line is cut off, with what
    follows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records = self._recover()

    def records(self) -> list[dict[str, Any]]:
        """All records, those of earlier runs first."""
        return list(self._records)

    def add(self, record: dict[str, Any]) -> None:
        with explain_os_errors(self._path), self._path.open("ab") as file:
            file.write(seal_line(record))
            file.flush()
            os.fsync(file.fileno())
        self._records.append(record)

    def forget(self) -> None:
        """Begin anew: what the records tell of is gone."""
        with explain_os_errors(self._path), self._path.open("r+b") as file:
            file.truncate(0)
            os.fsync(file.fileno())
        self._records = []

    def _recover(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            with explain_os_errors(self._path):
                self._path.touch()
                sync_folder(self._path.parent)
            return []
        records: list[dict[str, Any]] = []
        good = 0
        with self._path.open("r+b") as file:
            for line in file:
                record = unseal_line(line)
                if record is None:
                    break
                records.append(record)
                good += len(line)
            file.truncate(good)
        return records


@dataclass(frozen=True, slots=True)
class Export:
    """An export at work: what an exporter's `write` gets."""

    store: Store
    """Of the chosen split, or the whole store where it has one split or the format takes several."""
    out: Path
    """Where the user wants it; write nothing there."""
    folder: Path
    """Where the files are made, under the names that they will have; for a folder, what will be OUT."""
    options: Options
    dtype: np.dtype[Any]
    """Of the tokens to write."""
    ledger: Ledger


def run_export(store: Store, to: str, out: Path, options: Options, *, overwrite: bool = False) -> ExportSummary:
    """Do the export, or what is left of it."""
    started = time.monotonic()
    format = load_format(to)
    _check(format, to, store, out, options)
    chosen = _chosen_part(format, store, out, options)
    dtype = _chosen_dtype(format.DTYPES, to, chosen, options.dtype)
    place = _Place(format, to, chosen, out)
    plan = _plan(format, to, chosen, options)
    if not overwrite and not place.work.exists() and place.finished(plan):
        return place.summary(up_to_date=True)
    with place.locked():
        if place.finished(plan) and (not overwrite or place.published(plan)):
            # Killed when all was done but the clearing up, or finished by another while we waited.
            place.clear()
            return place.summary(up_to_date=True)
        place.prepare(plan, overwrite=overwrite)
        export = Export(chosen, out, place.files, options, dtype, Ledger(place.work / RECORDS))
        resumed = bool(export.ledger.records())
        place.publish(plan, _written(format, export, place))
        place.clear()
    return place.summary(seconds=time.monotonic() - started, resumed=resumed)


def _written(format: Format, export: Export, place: _Place) -> dict[str, Any]:
    """The format's counts. Once it is through, it is not asked again: its files may have their names already."""
    done = _completion(export.ledger)
    if done is not None:
        if place.holds(done.get("sizes", {})):
            counts: dict[str, Any] = done[_COMPLETE]
            return counts
        export.ledger.forget()
    counts = format.write(export) | {"dtype": export.dtype.name}
    sync_folder(export.folder)
    export.ledger.add({_COMPLETE: counts, "sizes": _sizes_below(export.folder)})
    return counts


def _completion(ledger: Ledger) -> dict[str, Any] | None:
    """The record that all was written."""
    return next((record for record in ledger.records() if _COMPLETE in record), None)


def _check(format: Format, to: str, store: Store, out: Path, options: Options) -> None:
    refuse_address(out)
    for name in ("seq_len", "dtype"):
        if getattr(options, name) is not None and name not in format.OPTIONS:
            raise ConfigError(f"{to}: ", Setting(name), " does not apply to this format. Leave it out.")
    if options.seq_len is not None and options.seq_len < 1:
        raise ConfigError(Setting("seq_len", options.seq_len), ": a row has at least one token.")
    if options.shard_size < 1:
        raise ConfigError(Setting("shard_size"), ": a size such as 256MB is wanted.")
    if out.name in ("", ".."):
        raise ConfigError(f"-o {out}: name what is to be made, such as {to}-data.")
    if store.place.folder is not None and out.resolve() == store.place.folder.resolve():
        raise ConfigError(f"{out}: is the store itself. Choose another place with -o.")


def _chosen_part(format: Format, store: Store, out: Path, options: Options) -> Store:
    """The part of the store that is meant, when it can be written."""
    chosen = store if options.split is None else store.named_part(options.split)
    if not format.ALL_SPLITS:
        chosen.stream()  # which refuses several splits where one must be named
    if chosen.tokens == 0:
        raise ConfigError(f"{chosen.name}: has no tokens. There is nothing to export.")
    for split, part in split_parts(chosen).items():
        # They become folders and files.
        if not stays_in_folder(split, hidden=False):
            raise ConfigError(f'{store.name}: the split "{split}" is no name for a file. Nothing is written.')
        if options.seq_len is not None and part.tokens < options.seq_len:
            told = (
                f': the split "{split}" has {part.tokens:,} tokens, not even one row. Take shorter rows, or documents.'
            )
            raise ConfigError(Setting("seq_len", options.seq_len), told)
    check_out = getattr(format, "check_out", None)
    if check_out is not None:
        check_out(chosen, out)
    return chosen


def _chosen_dtype(known: tuple[str, ...], to: str, store: Store, asked: str | None) -> np.dtype[Any]:
    """The dtype to write: the one that is asked for, or the first of the format's that holds the vocabulary."""
    wide = [name for name in known if np.iinfo(name).max >= store.vocab_size - 1]
    name = wide[0] if asked is None else asked
    if name not in known:
        raise ConfigError(Setting("dtype", name), f": {to} takes {', '.join(known[:-1])} or {known[-1]}.")
    if name not in wide:
        told = f": holds ids up to {np.iinfo(name).max:,}, and the vocabulary of {store.name} has {store.vocab_size:,}."
        raise ConfigError(Setting("dtype", name), f"{told} Take {' or '.join(wide)}.")
    return np.dtype(name).newbyteorder("<")


def _plan(format: Format, to: str, store: Store, options: Options) -> dict[str, Any]:
    """What the result depends on. The only split is the whole store, named or not."""
    part = store.split_name if len(store.splits) > 1 else None
    asked = {name: getattr(options, name) for name in format.OPTIONS}
    plan = {"version": PLAN_VERSION, "format": to, "store": store.fingerprint, "split": part}
    return plan | {"options": asked}


class _Place:
    """Where an export goes, and the work folder beside it."""

    def __init__(self, format: Format, to: str, store: Store, out: Path) -> None:
        self.kind = "folder" if format.ALL_SPLITS and has_splits(store) else format.SHAPE
        self.format, self.to, self.store, self.out = format, to, store, out
        self.work = out.with_name(f".{out.name}.milldam-export")
        self.files, self.replaced = self.work / "files", self.work / "replaced"
        beside = out.with_name(f"{out.name}.{RECORD_NAME}")
        self.record = out / f".{RECORD_NAME}" if self.kind == "folder" else beside
        self._cleared = False
        self._outputs = [out.with_name(out.name + suffix) for suffix in _SUFFIXES[self.kind]]

    def finished(self, plan: dict[str, Any]) -> bool:
        """Whether OUT is there, with all its files at their sizes, and made by this plan."""
        record = read_sealed(self.record)
        if record is None or record.get("plan") != plan or not record.get("sizes"):
            return False
        return all(_size(self._folder / name) == size for name, size in record["sizes"].items())

    def published(self, plan: dict[str, Any]) -> bool:
        """Whether the export that was at work here by this plan has put its result in place: OUT is of that one."""
        if read_sealed(self.work / PLAN) != plan or not (self.work / RECORDS).exists():
            return False
        done = _completion(Ledger(self.work / RECORDS))
        return done is not None and not any(self.files.glob("*"))

    def holds(self, sizes: dict[str, int]) -> bool:
        """Whether what was made is still there to be given its names, or has them."""
        places = (self.files,) if self.kind == "folder" else (self.files, self._folder)
        return bool(sizes) and all(any(_size(one / name) == size for one in places) for name, size in sizes.items())

    @property
    def _folder(self) -> Path:
        return self.out if self.kind == "folder" else self.out.parent

    def summary(self, *, up_to_date: bool = False, seconds: float = 0.0, resumed: bool = False) -> ExportSummary:
        record = read_sealed(self.record) or {}
        sizes = record.get("sizes", {})
        figures = (len(self.store), self.store.tokens, sum(sizes.values()), len(sizes), record.get("counts", {}))
        return ExportSummary(self.out, self.to, up_to_date, *figures, seconds, resumed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self.work / "lock")
        with explain_os_errors(self.work):
            self.work.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0.2, poll_interval=0.01)
            except (Timeout, FileNotFoundError):
                raise ConfigError(f"{self.out}: another export is at work on it. Wait for it, or change -o.") from None
        try:
            yield
        finally:
            if not self._cleared and not (self.work / PLAN).exists():
                self.clear()
            lock.release()

    def prepare(self, plan: dict[str, Any], *, overwrite: bool) -> None:
        """Make the work folder ready for this plan, or refuse: what is there is of another."""
        begun = read_sealed(self.work / PLAN)
        if begun != plan:
            if begun is not None and not overwrite:
                raise MismatchError(_begun_otherwise(self.out, begun, plan))
            self._refuse_existing(overwrite=overwrite)
            # The plan last: a kill on the way leaves nothing under another plan's name.
            for path in (self.work / PLAN, self.work / RECORDS, self.files):
                _remove(path)
            write_sealed(self.work / PLAN, plan)
        else:
            self._refuse_existing(overwrite=True)
        with explain_os_errors(self.files):
            self.files.mkdir(exist_ok=True)
            sync_folder(self.work)
        remove_temporaries(self.files)

    def _refuse_existing(self, *, overwrite: bool) -> None:
        """Nothing is replaced unasked, and no folder that is not ours even then."""
        there = next((path for path in self._outputs if path.exists()), None)
        if there is None:
            return
        made = read_sealed(self.record)
        if self.kind == "folder":
            if made is None and (not self.out.is_dir() or any(self.out.iterdir())):
                raise ConfigError(f"{self.out}: not made by `milldam export`; it is left alone. Change -o.")
        elif there.is_dir():
            raise ConfigError(f"{there}: is a folder; {self.to} is a file. Say which with -o.")
        if not overwrite and not (self.kind == "folder" and made is None):
            origin = "made from another store or with other options" if made else "no record says what it was made from"
            raise MismatchError(f"{there}: exists ({origin}). Replace it with --overwrite, or change -o.")

    def publish(self, plan: dict[str, Any], counts: dict[str, Any]) -> None:
        """Give the files their names. Killed on the way, the next call goes on here."""
        record = {"made_by": "milldam export", "plan": plan, "counts": counts}
        with explain_os_errors(self.out):
            if self.kind == "folder":
                write_sealed(self.files / f".{RECORD_NAME}", record | {"sizes": _sizes_below(self.files)})
                self._swap_folder()
            else:
                self._rename_files()
                sizes = {path.name: path.stat().st_size for path in self._outputs}
                # Made in the work folder, so that a kill leaves nothing beside OUT.
                write_sealed(self.work / RECORD_NAME, record | {"sizes": sizes})
                (self.work / RECORD_NAME).rename(self.record)
                sync_folder(self.record.parent)

    def _swap_folder(self) -> None:
        if self.out.exists():
            # Moved away in one step: nobody sees it half removed.
            _remove(self.replaced)
            self.out.rename(self.replaced)
        self.files.rename(self.out)
        sync_folder(self.out.parent)

    def _rename_files(self) -> None:
        """The last, which readers of a pair look for, goes first and comes last: it never says of other files."""
        waiting = [path for path in self._outputs if (self.files / path.name).exists()]
        outdated = getattr(self.format, "outdated", None)
        for path in (self.record, *(outdated(self.out) if outdated else ()), *waiting[1:]):
            path.unlink(missing_ok=True)
        for path in waiting:
            (self.files / path.name).rename(path)
            sync_folder(self.out.parent)

    def clear(self) -> None:
        """Remove the work folder; the plan and the records last, which tell a later call that all was done."""
        self._cleared = True
        for folder in (self.replaced, self.files, self.work):
            shutil.rmtree(folder, ignore_errors=True)


def _begun_otherwise(out: Path, begun: dict[str, Any], plan: dict[str, Any]) -> str:
    """What differs from the export that was begun here."""
    before = begun | begun.get("options", {})
    now = plan | plan["options"]
    names = [name for name in now if name not in ("options", "version") and before.get(name) != now[name]]
    changes = "".join(f"\n  {name}: {before.get(name)} -> {now[name]}" for name in names)
    return (
        f"{out}: an export was begun here from another store or with other options:{changes}\n"
        "Go on with those, or start anew with --overwrite."
    )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sizes_below(folder: Path) -> dict[str, int]:
    """Every file of an export with its size, in order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != f".{RECORD_NAME}")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
