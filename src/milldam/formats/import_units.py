"""What an import works on: a unit is one or several files of the source, of which a worker makes shards.

Documents are the source's own rows, or those of one stream that is cut at each of an id, which stays with the document
that it ends or begins. A shard ends with the document that fills it. It is recorded together with what was taken of its
unit by then; the record that ends a unit names none. Memory: blocks of a million tokens, and what the formats need
besides (a row group's column of Parquet).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from milldam.errors import InputError
from milldam.formats import load_format
from milldam.formats.finding import ReadRules, SourceFile
from milldam.input_files import version_of
from milldam.run.one_stage import Telling
from milldam.run.records import Record
from milldam.run.tasks import PART, Report, Work
from milldam.run.units import key_of
from milldam.stores.tokens.manifest import Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ImportUnit:
    """Files that are read one after the other."""

    split: str
    files: tuple[SourceFile, ...]
    size: int
    state: str
    """Changes when a file changes, or what is said of it."""

    @classmethod
    def of(cls, files: list[SourceFile]) -> ImportUnit:
        found = [list(listed(file)) for file in files]
        told = [[_named(one) for one in each] for each in found]
        said = [(file.format, file.facts) for file in files]
        size = sum(one.size for each in found for one in each)
        return cls(str(files[0].split), tuple(files), size, key_of(told, said))

    @property
    def key(self) -> str:
        return key_of(self.split, self.state)

    def as_json(self) -> dict[str, Any]:
        files = [{"format": file.format, "path": str(file.path), "facts": file.facts} for file in self.files]
        return {"split": self.split, "files": files, "size": self.size, "state": self.state}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ImportUnit:
        split = value["split"]
        files = tuple(SourceFile(one["format"], Path(one["path"]), split, one["facts"]) for one in value["files"])
        return cls(split, files, value["size"], value["state"])


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file as the run folder lists it."""

    path: str
    size: int
    version: str


def _named(file: _ListedFile) -> tuple[str, int, str]:
    """By its name: data that moves to another folder is still the same data."""
    return Path(file.path).name, file.size, file.version


def listed(file: SourceFile) -> Iterator[_ListedFile]:
    """What a file is read from, as it is now."""
    for path in (file.path, file.path.with_suffix(".idx")) if file.format == "megatron" else (file.path,):
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}).") from None
        yield _ListedFile(str(path), status.st_size, version_of(status))


def units_of(files: list[SourceFile], *, joined: bool) -> list[ImportUnit]:
    if not joined:
        return [ImportUnit.of([file]) for file in files]
    splits = dict.fromkeys(file.split for file in files)
    return [ImportUnit.of([file for file in files if file.split == split]) for split in splits]


# ---- the work on a unit ----


@dataclass(frozen=True, slots=True)
class Assignment:
    """A unit, and how much of it is done already."""

    unit: ImportUnit
    key: str
    part: int
    position: Position


@dataclass(frozen=True, slots=True)
class ScanTask:
    """Finds the largest id of a unit."""

    rules: ReadRules

    def start(self) -> Work:
        return self._scan

    def _scan(self, given: Assignment, report: Report) -> None:
        largest, told = -1, Telling(report, given.unit.size)
        for file in given.unit.files:
            for tokens in load_format(file.format).read(file, self.rules):
                largest = max(largest, _largest(tokens, file))
                _tell(told, tokens)
        told.tell()
        report(PART, Record(given.key, facts={"largest": largest}))


@dataclass(frozen=True, slots=True)
class ImportTask:
    """Writes the shards of a unit, from where an earlier run stopped; the record that ends it names none."""

    out: Path
    rules: ReadRules
    border: Border | None
    dtype: str
    vocab_size: int
    shard_tokens: int

    def start(self) -> Work:
        return self._import

    def _import(self, given: Assignment, report: Report) -> None:
        part, told = given.part, Telling(report, given.unit.size)
        blocks = cut_shards(given.unit.files, self.rules, self.border, given.position, self.shard_tokens)
        for block in blocks:
            chat: Counter[str] = Counter()
            with ShardWriter(self.out, given.unit.split, self.dtype) as writer:
                for filled in chain([block], blocks):
                    self._check(filled.tokens, filled.file)
                    writer.append(filled.tokens)
                    chat += _chat_facts(filled.tokens)
                    _tell(told, filled.tokens)
                    block = filled
                    if filled.full:
                        break
                report(PART, _record(given.key, part, writer.commit(), block.position, chat))
            part += 1
        told.tell()
        report(PART, Record(given.key, part))

    def _check(self, tokens: Tokens, file: SourceFile) -> None:
        largest = _largest(tokens, file)
        if largest >= self.vocab_size:
            raise InputError(
                f"{file.path}: token id {largest} outside the vocabulary of {self.vocab_size:,}. "
                "Is it of another tokenizer, or of another dtype?"
            )


def _chat_facts(tokens: Tokens) -> Counter[str]:
    """Tokens that are trained on, pairs and labels of a block."""
    spans = tokens.spans
    if spans is None:
        return Counter()
    pairs = len(tokens.lengths) // 2 if tokens.documents_each == 2 else 0
    return Counter(trained=spans.trained_tokens, pairs=pairs, labels=0 if spans.labels is None else len(spans.labels))


def _record(key: str, part: int, shard: Shard, position: Position, chat: Counter[str]) -> Record:
    outputs = {f"{shard.name}.{ending}": file for ending, file in shard.files.items()}
    facts: dict[str, Any] = {"shards": [asdict(shard)], "position": asdict(position)}
    if shard.spans:
        facts["chat"] = {name: chat[name] for name in ("trained", "pairs", "labels")}
    return Record(key, part, False, outputs, counts={"documents": shard.documents, "tokens": shard.tokens}, facts=facts)


def _tell(telling: Telling, tokens: Tokens) -> None:
    documents = len(tokens.lengths) - tokens.open
    telling.add(documents=documents, tokens=len(tokens.flat), input_bytes=tokens.flat.nbytes)


def _largest(tokens: Tokens, file: SourceFile) -> int:
    """The largest id of a block, which must be one; -1 when it is empty."""
    if not len(tokens.flat):
        return -1
    smallest, largest = int(tokens.flat.min()), int(tokens.flat.max())
    if smallest < 0 or largest > _LARGEST_ID:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{file.path}: {wrong} is not a token id. Is it of another dtype, or another column?")
    return largest


# ---- files -> documents -> shards ----


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
