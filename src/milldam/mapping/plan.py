"""The contract between a source of rows and who maps them: the plan of units, the reader of a unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from milldam.files import hash_bytes
from milldam.sources.batch import OnReject, Places, TextRules
from milldam.sources.rows import Rows
from milldam.sources.units import InputFile

if TYPE_CHECKING:
    import pyarrow as pa

    from milldam.mapping.settings import MapSettings

HASHES = "pieces.jsonl"
"""In the spool: the hashes of large files' pieces, which the next run needs too."""


def indices_name(fingerprint: str) -> str:
    """In the spool: the row numbers of a dataset."""
    return f"indices-{fingerprint[:16]}.npy"


def hash_json(value: Any) -> str:
    return hash_bytes(json.dumps(value).encode())


def text_rules(settings: MapSettings) -> TextRules:
    return TextRules(
        documents=settings.documents,
        separator=settings.separator,
        invalid_utf8=settings.invalid_utf8,
        strict=settings.strict,
    )


@dataclass(frozen=True, slots=True)
class RowUnit:
    index: int
    key: str
    """The identity of what it reads: equal keys, equal rows. Made of content or versions, not of its place in the plan;
    where rows are numbered, also of `first_row`."""
    size: int
    """Bytes of input, for progress."""
    place: dict[str, Any]
    """What its reader has to read; plain JSON."""
    first_row: int | None = None
    """Number of its first row among all; None where rows are not numbered."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RowUnit:
        return cls(**value)


class RowReader(Protocol):
    """Reads units in any process; it pickles, by path where that can be."""

    def read(self, unit: RowUnit, on_reject: OnReject, places: Places | None = None) -> Iterator[Rows]:
        """The rows of a unit, a few megabytes at a time (a larger row alone); the same ones each time.

        `places` is told which file they come from, where they come from files.
        """
        ...


class SourcePlan(Protocol):
    unidentified: str | None
    """Why the source can't be identified: what was made of it is not reused. None: it is identified."""
    columns: list[str] | None
    """The columns that a batch has; None: not known beforehand."""
    left_out: str
    """Files of its folders that are not read, told once `identity` is asked for; empty: none."""
    needs_spooling: bool
    """Whether `spool` must be called before `units` and `reader` are used."""
    spool_folder: Path
    """For what can be read only once, and what is worth keeping."""

    @property
    def schema(self) -> pa.Schema | None:
        """Of the rows, where the source says it even when it has none."""
        ...

    @property
    def identity(self) -> dict[str, Any]:
        """{"files", "bytes", "fingerprint"}: equal ones mean equal rows. Lists the files at the first call."""
        ...

    @property
    def reader(self) -> RowReader: ...

    def units(self) -> Iterator[RowUnit]:
        """In order, made from the input and the settings alone; streamed, and the same at each call."""
        ...

    def files(self) -> Iterator[InputFile]:
        """What is read, with versions, so that a change can be named."""
        ...

    def spool(self) -> None:
        """Write the rows to the spool, durably; nothing is done when they are there already."""
        ...
