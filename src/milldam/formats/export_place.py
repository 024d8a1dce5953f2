"""Where an export goes: OUT, and the work folder beside it.

All is made in the work folder `.OUT.milldam-export` beside OUT (same disk, so a rename is enough):

    run/                    as of any job: plan, records, lock
    files/                  what will be OUT; a folder is renamed in one step, a file or pair file by file
    milldam-export.json     says that all files are there
    replaced/               the folder that was OUT before, until all is done

So OUT is whole or not there. What it was made from is kept, in `OUT/.milldam-export.json` for a folder (pyarrow,
datasets, MDS and litdata pass over it) and in `OUT.milldam-export.json` beside a file or pair; then the work folder is
removed. Without that file nobody could tell whether an export is up to date.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from milldam.checked import read_json
from milldam.errors import ConfigError, MismatchError, Setting
from milldam.files import explain_os_errors, sync_folder
from milldam.formats import Format
from milldam.formats.writing import has_splits
from milldam.loader.stores import Store
from milldam.run.folder import Identity, WorkFolder
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.kinds import Kind
from milldam.stores.place import Folder

RECORD_NAME = "milldam-export.json"
EXPORT = Kind("export", RECORD_NAME, "milldam export", "an export that is not in its place", "Run it again.", "")
_SUFFIXES = {"file": ("",), "pair": (".bin", ".idx"), "folder": ("",)}


def _record_place(out: Path, *, is_folder: bool) -> Path:
    return out / f".{RECORD_NAME}" if is_folder else out.with_name(f"{out.name}.{RECORD_NAME}")


def exported(out: Path) -> dict[str, Any]:
    """What is written down of the export that is there; empty: nothing."""
    return read_sealed(_record_place(out, is_folder=out.is_dir())) or {}


class Place:
    """Where an export goes, and the work folder beside it."""

    def __init__(self, format: Format, to: str, store: Store, out: Path) -> None:
        self._format, self._to, self.out = format, to, out
        self._is_folder = format.SHAPE == "folder" or (format.ALL_SPLITS and has_splits(store))
        self.folder = WorkFolder(out.with_name(f".{out.name}.milldam-export"), EXPORT, out)
        self.work, self.files = self.folder.work, self.folder.files
        self._replaced = self.work / "replaced"
        self._record = _record_place(out, is_folder=self._is_folder)
        suffixes = ("",) if self._is_folder else _SUFFIXES[format.SHAPE]
        self._outputs = [out.with_name(out.name + suffix) for suffix in suffixes]

    def made(self) -> dict[str, Any]:
        """What is written down of the export that is there; empty: nothing."""
        return read_sealed(self._record) or {}

    def finished(self, identity: Identity) -> bool:
        """Whether OUT is there, with all its files at their sizes, and made from this."""
        made, folder = self.made(), self.out if self._is_folder else self.out.parent
        if not made.get("sizes") or made.get("settings") != identity.settings:
            return False
        return all(_size(folder / name) == size for name, size in made["sizes"].items())

    def refuse_existing(self, *, overwrite: bool) -> None:
        """Nothing is replaced unasked, and no folder that is not ours even then."""
        there = next((path for path in self._outputs if path.exists()), None)
        if there is None:
            return
        made = self.made()
        if self._is_folder:
            if not made and (not self.out.is_dir() or any(self.out.iterdir())):
                raise ConfigError(f"{self.out}: not made by `milldam export`; it is left alone.")
        elif there.is_dir():
            raise ConfigError(f"{there}: is a folder; {self._to} is a file.")
        if not overwrite and not (self._is_folder and not made):
            known = "made from another store or with other options, or changed since"
            origin = known if made else "no record says what it was made from"
            raise MismatchError(f"{there}: exists ({origin}). Replace it with ", Setting("overwrite", True), ".")

    def forget_lost_files(self) -> None:
        """What was made and waits for its name is no longer all there: then it is not finished."""
        record = read_json(self.work / RECORD_NAME) if (self.work / RECORD_NAME).exists() else {"sizes": {}}
        places = (self.files, self.out if self._is_folder else self.out.parent)
        if not all(any(_size(one / name) == size for one in places) for name, size in record["sizes"].items()):
            (self.work / RECORD_NAME).unlink()

    def publish(self) -> None:
        """Give the files their names. Killed on the way, the next call goes on here."""
        if not (self.work / RECORD_NAME).exists():
            return  # another process has done it
        record = EXPORT.value(Folder(self.work))
        with explain_os_errors(self.out):
            if self._is_folder:
                if self.files.exists():
                    write_sealed(self.files / f".{RECORD_NAME}", record)
                    self._swap_folder()
            else:
                self._rename_files()
                # Made in the work folder, so that a kill leaves nothing beside OUT.
                write_sealed(self.work / "record", record)
                (self.work / "record").rename(self._record)
                sync_folder(self.out.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)
        self.folder.clear()

    def _swap_folder(self) -> None:
        if self.out.exists():
            # Moved away in one step: nobody sees it half removed.
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.out.rename(self._replaced)
        self.files.rename(self.out)
        sync_folder(self.out.parent)

    def _rename_files(self) -> None:
        """The last, which readers of a pair look for, goes first and comes last: it never says of other files."""
        waiting = [path for path in self._outputs if (self.files / path.name).exists()]
        outdated = getattr(self._format, "outdated", None)
        for path in (self._record, *(outdated(self.out) if outdated else ()), *waiting[1:]):
            path.unlink(missing_ok=True)
        for path in waiting:
            (self.files / path.name).rename(path)
            sync_folder(self.out.parent)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def sizes_below(folder: Path) -> dict[str, int]:
    """Every file of an export with its size, in order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != f".{RECORD_NAME}")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
