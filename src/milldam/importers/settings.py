"""What the user asks an import for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import ConfigError, did_you_mean
from milldam.files import stays_in_folder
from milldam.importers import FORMATS
from milldam.memory import parse_size


@dataclass(frozen=True, slots=True)
class ImportSettings:
    sources: tuple[Path, ...]
    out: Path
    format: str | None = None
    """None: seen from the files."""
    tokenizer: str | None = None
    column: str | None = None
    eos: int | None = None
    bos: int | None = None
    dtype: str | None = None
    split: str | None = None
    vocab_size: int | None = None
    shard_size: int = 256_000_000
    overwrite: bool = False


def settings_of(source: str | Path | Sequence[str | Path], out: str | Path, options: dict[str, Any]) -> ImportSettings:
    """Checked settings; `shard_size` may be a size such as "64MB"."""
    known = [field.name for field in dataclasses.fields(ImportSettings) if field.name not in ("sources", "out")]
    for name in options:
        if name not in known:
            raise ConfigError(f'import: no option "{name}".{did_you_mean(name, known)}')
    given = {name: value for name, value in options.items() if value is not None}
    if "shard_size" in given:
        given["shard_size"] = parse_size(given["shard_size"])
    sources = (source,) if isinstance(source, str | Path) else tuple(source)
    settings = ImportSettings(tuple(Path(one).expanduser() for one in sources), Path(out), **given)
    _check(settings)
    return settings


def _check(settings: ImportSettings) -> None:
    if not settings.sources:
        raise ConfigError("import: name at least one file or folder.")
    if settings.format is not None and settings.format not in FORMATS:
        hint = did_you_mean(settings.format, FORMATS)
        raise ConfigError(f'No format "{settings.format}"; there are {", ".join(FORMATS)}.{hint}')
    if settings.shard_size < 1:
        raise ConfigError("--shard-size: a size such as 256MB is wanted.")
    _check_borders(settings)
    if settings.vocab_size is not None and not 1 <= settings.vocab_size <= 2**31:
        raise ConfigError(f"--vocab-size {settings.vocab_size}: from 1 to 2**31.")
    _check_dtype(settings.dtype)
    if settings.tokenizer is not None and settings.vocab_size is not None:
        raise ConfigError("--vocab-size and --tokenizer: the tokenizer says it. Leave one out.")


def _check_borders(settings: ImportSettings) -> None:
    for name in ("eos", "bos"):
        id = getattr(settings, name)
        if id is not None and id < 0:
            raise ConfigError(f"--{name} {id}: the id of a token is wanted, 0 or more.")
    if settings.eos is not None and settings.bos is not None:
        raise ConfigError("--eos and --bos: documents are cut behind one id, or before one. Leave one out.")
    if settings.split is not None and not stays_in_folder(settings.split, hidden=False):
        raise ConfigError(f'--split "{settings.split}": no name for files. Use letters and digits.')


def _check_dtype(name: str | None) -> None:
    if name is None:
        return
    try:
        is_integer = np.dtype(name).kind in "iu"
    except TypeError:
        is_integer = False
    if not is_integer:
        raise ConfigError(f"--dtype {name}: tokens are integers, such as uint16 or int32.")
