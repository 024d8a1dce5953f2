"""What every import reads: a file of tokens, and what the user and the index beside it say of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.files import stays_in_folder

USUAL_COLUMNS = ("input_ids", "tokens", "token_ids", "ids")


@dataclass(frozen=True, slots=True)
class SourceFile:
    format: str
    """The module here that reads it."""
    path: Path
    split: str | None
    """None: the source has no splits."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What an index beside it says of it."""


@dataclass(frozen=True, slots=True)
class ReadRules:
    column: str | None
    dtype: str | None
    scratch: Path
    """A folder for what has to be decompressed."""


def choose_column(names: list[str], asked: str | None, path: Path) -> str:
    """The column that was asked for, one by its usual name, or the only one."""
    usual = [name for name in USUAL_COLUMNS if name in names]
    found = asked if asked is not None else usual[0] if usual else names[0] if len(names) == 1 else None
    if found is None or found not in names:
        what = f'no column "{asked}"' if asked is not None else "no column of a usual name"
        told = f"{path}: {what}; it has {', '.join(names)}. Say which one holds the ids with "
        raise InputError(told, Setting("column"), ".")
    return found


def require_integers(dtype: np.dtype[Any], path: Path, what: str) -> np.dtype[Any]:
    if dtype.kind not in "iu":
        raise InputError(f"{path}: {what} holds {dtype}; tokens are integers.")
    return dtype


def read_index(path: Path) -> dict[str, Any] | None:
    """The object in an index; None when there is no such file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not an index that milldam knows.")
    return value


def inside(folder: Path, name: object) -> Path:
    """A file that an index names. It may come from anywhere: it must not make us read files elsewhere."""
    if not stays_in_folder(name):
        raise InputError(f'{folder}: its index names the file "{name}", which leaves the folder; refused.')
    return folder / str(name)
