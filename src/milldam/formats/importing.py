"""An import from end to end: find the files, settle the vocabulary, write shards, then the manifest.

Documents are the rows of the source, or one stream that is cut behind, or before, each of an id, which stays with the
document that it ends or begins. A shard ends with the document that fills it, and is recorded together with what was
taken of the source by then; a killed import goes on behind the last recorded shard and makes the same bytes. A file
that was left half way is read again from its begin, and what was taken of it dropped.

Without a tokenizer the store has none: no tokenizer.json, `tokenizer` in the manifest named "none" with no hash. Then
the vocabulary is what `vocab_size` says, or one more than the largest id: for that the source is read once more first.

Memory: blocks of a million tokens, and what the formats need besides (a row group's column of Parquet; 16 bytes for
each sample of an MDS shard or a litdata chunk).
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes, stays_in_folder
from milldam.formats import load_format
from milldam.formats.finding import find_files
from milldam.formats.foreign import token_dtype_of
from milldam.formats.reading import ReadRules, SourceFile
from milldam.input_files import version_of
from milldam.run.identity import Identity
from milldam.run.old_folder import FINISHED, NEW, UNFINISHED, Run
from milldam.run.old_records import PartRecord, shards_in_order
from milldam.sealed import read_sealed, write_sealed
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import Manifest
from milldam.stores.tokens.writer import ShardWriter, Tokens

if TYPE_CHECKING:
    from milldam.tokenizers.loading import LoadedTokenizer

NO_TOKENIZER = "none"
ENGINE = "imported"
_POSITIONS, _VOCABULARY = "positions.jsonl", "vocabulary.json"
_LARGEST_ID = 2**31 - 1
_LARGEST_BELIEVED = 2**24
"""No vocabulary is larger; ids of two bytes that are read as four are, nearly always."""


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """What the user asks for."""

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

    @property
    def border(self) -> Border | None:
        id = self.bos if self.eos is None else self.eos
        return None if id is None else Border(id, begins=self.eos is None)


@dataclass(frozen=True, slots=True)
class Border:
    """Where a stream is cut."""

    id: int
    begins: bool
    """Before the id, not behind it."""


@dataclass(frozen=True, slots=True)
class ImportSummary:
    out: Path
    formats: tuple[str, ...]
    files: int
    up_to_date: bool
    documents: int
    tokens: int
    vocab_size: int
    dtype: str
    splits: dict[str, dict[str, int]]
    seconds: float = 0.0
    resumed: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"out": str(self.out)}


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """What of a tokenizer goes into a store."""

    json: str | None
    vocab_size: int | None
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Position:
    """How much of the source is in shards: rows, or tokens of a stream, of a file, and all files before it."""

    file: int = 0
    taken: int = 0


def run_import(settings: ImportSettings) -> ImportSummary:
    """Do the import, or what is left of it."""
    started = time.monotonic()
    _check(settings)
    files = find_files(settings.sources, settings.format, settings.split)
    tokenizer = _look_up_tokenizer(settings)
    with Run(settings.out) as run:
        asked = _identity_settings(settings, tokenizer, files)
        identity = Identity(asked, _list_input(run, files), tokenizer.facts["name"])
        begin = _where_to_begin(run, identity, overwrite=settings.overwrite)
        if begin != FINISHED:
            resumed = begin == UNFINISHED and run.has_results()
            _begin(run, begin, identity, tokenizer)
            manifest = _Import(settings, run, files, tokenizer, identity).do()
            summary = _summary(settings, files, manifest)
            run.write_status({"stage": "finished", "units": 1, "units_done": 1})
            return dataclasses.replace(summary, up_to_date=False, resumed=resumed, seconds=time.monotonic() - started)
        return _summary(settings, files, Manifest.read(run.out))


def _check(settings: ImportSettings) -> None:
    if not settings.sources:
        raise ConfigError("import: name at least one file or folder.")
    if settings.format is not None:
        load_format(settings.format)
    if settings.shard_size < 1:
        raise ConfigError(Setting("shard_size"), ": a size such as 256MB is wanted.")
    if settings.split is not None and not stays_in_folder(settings.split, hidden=False):
        raise ConfigError(Setting("split", settings.split), ": no name for files. Use letters and digits.")
    if settings.dtype is not None:
        token_dtype_of(settings.dtype)
    _check_ids_given(settings)


def _check_ids_given(settings: ImportSettings) -> None:
    for name, id in (("eos", settings.eos), ("bos", settings.bos)):
        if id is not None and id < 0:
            raise ConfigError(Setting(name, id), ": the id of a token is wanted, 0 or more.")
    if settings.eos is not None and settings.bos is not None:
        told = ": documents are cut behind one id, or before one. Leave one out."
        raise ConfigError(Setting("eos"), " and ", Setting("bos"), told)
    if settings.vocab_size is not None and not 1 <= settings.vocab_size <= 2**31:
        raise ConfigError(Setting("vocab_size", settings.vocab_size), ": from 1 to 2**31.")
    if settings.dtype is not None:
        token_dtype_of(settings.dtype)
    if settings.tokenizer is not None and settings.vocab_size is not None:
        raise ConfigError(
            Setting("vocab_size"), " and ", Setting("tokenizer"), ": the tokenizer says it. Leave one out."
        )


def _look_up_tokenizer(settings: ImportSettings) -> _Tokenizer:
    facts: dict[str, Any] = {"bos": settings.bos, "eos": settings.eos, "bos_token": None, "eos_token": None}
    if settings.tokenizer is None:
        return _Tokenizer(None, settings.vocab_size, {"name": NO_TOKENIZER, "xxh3": None} | facts)
    from milldam.tokenizers.loading import load_tokenizer

    loaded = load_tokenizer(settings.tokenizer)
    for name in ("bos", "eos"):
        if facts[name] is not None:
            facts[f"{name}_token"] = _token_of(loaded, name, facts[name])
    named = {"name": loaded.name, "xxh3": hash_bytes(loaded.json.encode())}
    return _Tokenizer(loaded.json, loaded.vocab_size, named | facts)


def _token_of(loaded: LoadedTokenizer, name: str, id: int) -> str:
    token = loaded.huggingface.id_to_token(id)
    if token is None:
        told = f": the tokenizer {loaded.name} has no such id; it has {loaded.vocab_size:,}."
        raise ConfigError(Setting(name, id), told)
    return str(token)


def _identity_settings(settings: ImportSettings, tokenizer: _Tokenizer, files: list[SourceFile]) -> dict[str, Any]:
    """Everything that changes the result. The files are in the input's identity, what they are taken for is here."""
    layout = hash_bytes(json.dumps([(file.format, file.split, file.facts) for file in files]).encode())
    asked = {name: getattr(settings, name) for name in ("column", "eos", "dtype", "split", "vocab_size", "shard_size")}
    if settings.bos is not None:
        asked["bos"] = settings.bos
    return {"import": asked | {"tokenizer": tokenizer.facts["xxh3"], "layout": layout}}


def _list_input(run: Run, files: list[SourceFile]) -> dict[str, Any]:
    return run.write_inputs((0, listed) for file in files for listed in _listed(file))


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file as the run folder lists it."""

    path: str
    size: int
    version: str


def _listed(file: SourceFile) -> Iterator[_ListedFile]:
    """What a file is read from, as it is now."""
    for path in (file.path, file.path.with_suffix(".idx")) if file.format == "megatron" else (file.path,):
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}).") from None
        yield _ListedFile(str(path), status.st_size, version_of(status))


def _where_to_begin(run: Run, identity: Identity, *, overwrite: bool) -> str:
    """NEW: from nothing; UNFINISHED: go on; FINISHED: nothing to do. Refuses what was made from something else."""
    state = run.state()
    same = run.agrees(identity, overwrite=overwrite)
    if state == NEW or (overwrite and not same) or (state == UNFINISHED and not same and not run.has_results()):
        return NEW
    run.require_same(identity)
    return state


def _begin(run: Run, begin: str, identity: Identity, tokenizer: _Tokenizer) -> None:
    if begin == NEW:
        run.stage([])
        run.start(identity, {} if tokenizer.json is None else {"tokenizer.json": tokenizer.json.encode()})
    if tokenizer.json is None:
        # That of a store that was replaced by this one.
        (run.out / "tokenizer.json").unlink(missing_ok=True)
    positions = _positions(run)
    run.resume(lambda record: record.last or record.part in positions)


def _positions(run: Run) -> dict[int, _Position]:
    """How much of the source each part goes up to."""
    return {line.pop("part"): _Position(**line) for line in run.appended(_POSITIONS)}


_NOTHING = Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))
"""Ends an open document."""


def _documents(file: SourceFile, rules: ReadRules, border: Border | None, taken: int) -> Iterator[Tokens]:
    """The documents of a file without those that were taken; those of a stream go on in the next file."""
    blocks = load_format(file.format).read(file, rules)
    return _rows_behind(blocks, taken) if border is None else _cut(_tokens_behind(blocks, taken), border)


def _rows_behind(blocks: Iterator[Tokens], taken: int) -> Iterator[Tokens]:
    for tokens in blocks:
        closed = len(tokens.lengths) - tokens.open
        if taken > closed:
            taken -= closed
            continue
        if taken:
            begin = int(tokens.lengths[:taken].sum())
            tokens = Tokens(tokens.flat[begin:], tokens.lengths[taken:], tokens.open)
            taken = 0
        if len(tokens.lengths):
            yield tokens


def _tokens_behind(blocks: Iterator[Tokens], taken: int) -> Iterator[Tokens]:
    for tokens in blocks:
        dropped = min(taken, len(tokens.flat))
        taken -= dropped
        if dropped < len(tokens.flat):
            yield Tokens(tokens.flat[dropped:], np.array([len(tokens.flat) - dropped]))


def _cut(blocks: Iterator[Tokens], border: Border) -> Iterator[Tokens]:
    """A document that is open is ended by what comes next, even when that begins with a border: by nothing, then."""
    for tokens in blocks:
        ends = np.flatnonzero(tokens.flat == border.id) + (not border.begins)
        open_end = not len(ends) or ends[-1] < len(tokens.flat)
        edges = np.concatenate(([0], ends, [len(tokens.flat)] if open_end else []))
        yield Tokens(tokens.flat, np.diff(edges).astype(np.int64), open=bool(open_end))


class _Import:
    """The work itself, behind the shards that are recorded."""

    def __init__(
        self, settings: ImportSettings, run: Run, files: list[SourceFile], tokenizer: _Tokenizer, identity: Identity
    ) -> None:
        self._settings, self._run, self._files = settings, run, files
        self._tokenizer, self._identity = tokenizer, identity
        self._rules = ReadRules(settings.column, settings.dtype, run.folder)
        self._border = settings.border
        self._writer: ShardWriter | None = None
        self._open = False
        """The document at the writer's end goes on."""
        self._made = 0

    def do(self) -> Manifest:
        run = self._run
        vocab_size = self._settled_vocabulary()
        if 0 not in run.progress.complete:
            self._dtype = token_dtype(vocab_size)
            self._shard_tokens = max(1, self._settings.shard_size // np.dtype(self._dtype).itemsize)
            try:
                self._write_shards(vocab_size)
            finally:
                self._leave()
            run.add(PartRecord(0, self._made, [], {}, self._made, last=True))
        run.tidy()
        if _list_input(run, self._files) != self._identity.input:
            raise InputError("The source changed while it was read. Run the same command again with --overwrite.")
        shards = shards_in_order(run.records())
        if not shards:
            raise InputError(f"No documents in {', '.join(map(str, self._settings.sources))}: nothing to import.")
        identity, tokenizer = self._identity, self._tokenizer.facts
        manifest = Manifest(
            token_dtype(vocab_size), vocab_size, tokenizer, ENGINE, identity.settings, identity.input, shards
        )
        manifest.write(run.out)
        return manifest

    def _settled_vocabulary(self) -> int:
        """The tokenizer's, or what was said, or from the largest id, looked for once."""
        if self._tokenizer.vocab_size is not None:
            return self._tokenizer.vocab_size
        path = self._run.folder / _VOCABULARY
        if read_sealed(path) is None:
            largest = -1
            for file in self._files:
                for tokens in load_format(file.format).read(file, self._rules):
                    largest = max(largest, _largest(tokens, file))
            if largest >= _LARGEST_BELIEVED:
                raise InputError(_unbelievable(largest, self._settings))
            write_sealed(path, {"vocab_size": max(largest, 0 if self._border is None else self._border.id) + 1})
        found = read_sealed(path)
        assert found is not None
        return int(found["vocab_size"])

    def _write_shards(self, vocab_size: int) -> None:
        position = self._recorded_position()
        split: str | None = None
        for number in range(position.file, len(self._files)):
            file = self._files[number]
            if file.split != split:
                self._finish_split(number)
            split = file.split
            taken = position.taken if number == position.file else 0
            for tokens in _documents(file, self._rules, self._border, taken):
                _check_ids(tokens, file, vocab_size)
                taken = self._add(tokens, number, taken)
        self._finish_split(len(self._files))

    def _recorded_position(self) -> _Position:
        self._made = self._run.done_so_far(0)[0]
        return _positions(self._run)[self._made - 1] if self._made else _Position()

    def _add(self, tokens: Tokens, file: int, taken: int) -> int:
        """Write documents, and end the shard with the one that fills it; what is taken of the file then."""
        flat, lengths = tokens.flat, tokens.lengths
        in_rows = self._border is None
        if not in_rows and not self._open and lengths[0] == 0:
            # A border before which there is nothing.
            lengths = lengths[1:]
        while len(lengths):
            writer = self._shard_of(str(self._files[file].split))
            closed = len(lengths) - tokens.open
            ends = lengths.cumsum()
            last = int(ends[:closed].searchsorted(self._shard_tokens - writer.tokens))
            full = last < closed
            stop = last + 1 if full else len(lengths)
            count = int(ends[stop - 1])
            writer.append(Tokens(flat[:count], lengths[:stop], open=tokens.open and not full))
            self._open = tokens.open and not full
            taken += (stop if full else closed) if in_rows else count
            flat, lengths = flat[count:], lengths[stop:]
            if full:
                self._commit(_Position(file, taken))
        return taken

    def _shard_of(self, split: str) -> ShardWriter:
        if self._writer is None:
            self._writer = ShardWriter(self._run.out, f"{split}-{self._made:05d}", split, self._dtype)
        return self._writer

    def _finish_split(self, next_file: int) -> None:
        """End the document that is open and the shard."""
        if self._writer is not None:
            if self._open:
                self._writer.append(_NOTHING)
                self._open = False
            self._commit(_Position(next_file, 0))

    def _commit(self, position: _Position) -> None:
        assert self._writer is not None
        with self._writer as writer:
            shard = writer.commit()
        self._writer = None
        # The position first: a record without it could not be gone on from.
        self._run.append(_POSITIONS, {"part": self._made} | asdict(position))
        self._run.add(PartRecord(0, self._made, [asdict(shard)], {}, self._made + 1, last=False))
        self._made += 1

    def _leave(self) -> None:
        if self._writer is not None:
            self._writer.__exit__(None, None, None)
            self._writer = None


def _largest(tokens: Tokens, file: SourceFile) -> int:
    """The largest id of a block, which must be one; -1 when it is empty."""
    if not len(tokens.flat):
        return -1
    smallest, largest = int(tokens.flat.min()), int(tokens.flat.max())
    if smallest < 0 or largest > _LARGEST_ID:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{file.path}: {wrong} is no token id. Is it of another dtype, or another column?")
    return largest


def _unbelievable(largest: int, settings: ImportSettings) -> str:
    sources = ", ".join(map(str, settings.sources))
    asked = "the dtype" if settings.dtype is None else f"the dtype {settings.dtype}"
    return (
        f"{sources}: the largest token id is {largest:,}, and no vocabulary is that large. "
        f"Is {asked} right, and the column? If it is, say vocab_size."
    )


def _check_ids(tokens: Tokens, file: SourceFile, vocab_size: int) -> None:
    largest = _largest(tokens, file)
    if largest >= vocab_size:
        raise InputError(
            f"{file.path}: token id {largest} outside the vocabulary of {vocab_size:,}. "
            "Is it of another tokenizer, or of another dtype?"
        )


def _summary(settings: ImportSettings, files: list[SourceFile], manifest: Manifest) -> ImportSummary:
    splits: dict[str, dict[str, int]] = {}
    for shard in manifest.shards:
        counted = splits.setdefault(shard.split, {"documents": 0, "tokens": 0})
        counted["documents"] += shard.documents
        counted["tokens"] += shard.tokens
    return ImportSummary(
        out=settings.out,
        formats=tuple(dict.fromkeys(file.format for file in files)),
        files=len(files),
        up_to_date=True,
        documents=manifest.documents,
        tokens=manifest.tokens,
        vocab_size=manifest.vocab_size,
        dtype=manifest.dtype,
        splits=splits,
    )
