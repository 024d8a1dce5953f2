"""Where a store lies, and how a file of it is read by its name: the one place that knows, for folders and addresses.

`Folder` is a folder of this machine: files are mapped as they are, nothing is copied or held. A store at an address
(`milldam.remote`) is another `Place`, whose files come through a cache on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from milldam.errors import MismatchError, StoreError
from milldam.files import file_blocks
from milldam.stores.kinds import KEPT, Kind

if TYPE_CHECKING:
    from milldam.remote.place import RemoteFiles, RemotePlace

BLOCK_BYTES = 1 << 20
Place: TypeAlias = "Folder | RemotePlace"
"""A folder of files, wherever it is: both have what `Folder` has."""
Origin: TypeAlias = "RemoteFiles"
"""Fetches the files of a place that is not on this machine."""


def hold(path: Path) -> mmap.mmap | bytes:
    """The content of the file that has this name now. Where that can be, it is under a shared lock for as long as this
    lives, in forked processes too; that of an empty file is not. FileNotFoundError: there is none."""
    while True:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):  # no locks here
                fcntl.flock(file, fcntl.LOCK_SH)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else it was just replaced
                try:
                    # A mapping has a copy of the descriptor, and with it the lock.
                    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                except (OSError, ValueError):  # it is empty, or can't be mapped
                    return file.read()


class Folder:
    """A store in a folder of this machine, of the generation that it has when the manifest is first read.

    That manifest stays held, so that nothing that it names is removed while this lives. Pickles as its path.
    """

    origin = None
    """Fetches the files; None: they lie here."""
    mapped_bytes = None
    """How much may be kept mapped without need; None: no limit."""

    def __init__(self, folder: Path, manifest: Path | None = None) -> None:
        """`manifest`: that of an earlier generation."""
        self.folder, self.name, self.rows = folder, str(folder), folder / "rows"
        """Its path, what messages call it, and the folder for rows of packing that are computed from it once."""
        self._manifest = manifest
        self._held: dict[str, mmap.mmap | bytes] = {}

    def __reduce__(self) -> tuple[type[Folder], tuple[Path]]:
        return Folder, (self.folder,)

    def manifest(self, name: str) -> bytes | mmap.mmap | None:
        """The text of the manifest of this name, the same one each time; None: there is none."""
        path = self._manifest or self.folder / name
        try:
            if name not in self._held:
                self._held[name] = hold(path)
            return self._held[name]
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{path}: can't be read ({error.strerror}).") from None

    def read(self, file: str) -> bytes | None:
        """A small file whole; None: there is none."""
        try:
            return (self.folder / file).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.folder / file}: can't be read ({error}).") from None

    def size(self, file: str) -> int | None:
        """Bytes of a file; None: there is none."""
        path = self.folder / file
        return path.stat().st_size if path.exists() else None

    def blocks(self, file: str) -> Iterator[bytes]:
        """A file's bytes once, in blocks of BLOCK_BYTES but for the last."""
        return file_blocks(self.folder / file)

    def local(self, file: str, record: dict[str, Any]) -> Path:
        """Where a file lies on this machine, or will lie once it is fetched. `record`: its size and hash."""
        return self.folder / file

    def map(self, file: str, record: dict[str, Any]) -> mmap.mmap:
        """A file mapped; it stays readable while the mapping lives. OSError, ValueError: it can't be."""
        with (self.folder / file).open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def same_generation(place: Place, kind: Kind, fingerprint: str) -> Any:
    """The generation of a store that was opened elsewhere: what lies there now, or an earlier one that is kept."""
    folder = place.folder
    generations = [place]
    if folder is not None:
        generations += [Folder(folder, manifest) for manifest in (folder / KEPT).glob("*.json")]
    for one in generations:
        if kind.read(one).fingerprint == fingerprint:
            return one
    raise MismatchError(f"{place.name}: it is not the store that was opened. Open it again.")
