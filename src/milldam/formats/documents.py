"""Files of tokens -> documents, cut into shards: the source's own rows, or one stream that is cut at each of an id.

The id stays with the document that it ends or begins. A shard ends with the document that fills it. Where a resumed
import goes on is said by what was taken of the files: rows, or tokens of a stream. Holds a block of a file at a time.

What every import reads: a file of tokens, and what the user and the index beside it say of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError, Setting
from milldam.files import stays_in_folder
from milldam.formats import load_format
from milldam.stores.tokens.writer import Tokens

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
    masks: str | None = None
    """The column that says what is trained on; "none": none is to; None: seen from the names."""


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


_NOTHING = Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))
"""Ends an open document."""


@dataclass(frozen=True, slots=True)
class Border:
    """Where a stream is cut."""

    id: int
    begins: bool
    """Before the id, not behind it."""


@dataclass(frozen=True, slots=True)
class Position:
    """How much of some files is taken: a number of rows, or of tokens of a stream, and all files before it."""

    file: int = 0
    taken: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    tokens: Tokens
    """For the shard that is being filled."""
    file: SourceFile
    full: bool
    """The shard ends with it."""
    position: Position
    """What is taken then."""


def cut_shards(
    files: Sequence[SourceFile], rules: ReadRules, border: Border | None, position: Position, shard_tokens: int
) -> Iterator[Block]:
    """The documents of files in order, from a position on; those of a stream go from one file to the next."""
    in_rows = border is None
    held, is_open = 0, False
    for number in range(position.file, len(files)):
        taken = position.taken if number == position.file else 0
        blocks = load_format(files[number].format).read(files[number], rules)
        for tokens in _rows(blocks, taken) if border is None else _stream(blocks, taken, border):
            flat, lengths, spans = tokens.flat, tokens.lengths, tokens.spans
            if not in_rows and not is_open and lengths[0] == 0:
                # A border before which there is nothing.
                lengths = lengths[1:]
            while len(lengths):
                closed = len(lengths) - tokens.open
                ends = lengths.cumsum()
                last = int(ends[:closed].searchsorted(shard_tokens - held))
                full = last < closed
                # Both of a pair go into one shard.
                stop = (last // tokens.documents_each + 1) * tokens.documents_each if full else len(lengths)
                count = int(ends[stop - 1])
                is_open = tokens.open and not full
                taken += (stop if full else closed) if in_rows else count
                held = 0 if full else held + count
                own = None if spans is None else spans.between(0, stop)
                some = Tokens(flat[:count], lengths[:stop], is_open, spans=own, documents_each=tokens.documents_each)
                yield Block(some, files[number], full, Position(number, taken))
                flat, lengths = flat[count:], lengths[stop:]
                spans = None if spans is None else spans.between(stop, None)
    if is_open:
        yield Block(_NOTHING, files[-1], full=False, position=Position(len(files), 0))


def _rows(blocks: Iterator[Tokens], taken: int) -> Iterator[Tokens]:
    """As the source has them, without those that were taken."""
    for tokens in blocks:
        closed = len(tokens.lengths) - tokens.open
        if taken > closed:
            taken -= closed
            continue
        if taken:
            begin = int(tokens.lengths[:taken].sum())
            spans = None if tokens.spans is None else tokens.spans.between(taken, None)
            tokens = replace(tokens, flat=tokens.flat[begin:], lengths=tokens.lengths[taken:], spans=spans)
            taken = 0
        if len(tokens.lengths):
            yield tokens


def _stream(blocks: Iterator[Tokens], taken: int, border: Border) -> Iterator[Tokens]:
    """Cut at the border, without the tokens that were taken.

    A document that is open is ended by what comes next, even when that begins with a border: by nothing, then.
    """
    for tokens in blocks:
        dropped = min(taken, len(tokens.flat))
        taken -= dropped
        flat = tokens.flat[dropped:]
        if not len(flat):
            continue
        ends = np.flatnonzero(flat == border.id) + (not border.begins)
        open_end = not len(ends) or ends[-1] < len(flat)
        edges = np.concatenate(([0], ends, [len(flat)] if open_end else []))
        yield Tokens(flat, np.diff(edges).astype(np.int64), open=bool(open_end))
