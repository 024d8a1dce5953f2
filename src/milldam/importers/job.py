"""An import from end to end: find the pieces, settle the vocabulary, write shards, then the manifest.

A shard ends with the document that fills it, and is recorded together with what was taken of the source by then; a
killed import goes on behind the last recorded shard and makes the same bytes. A piece that was left half way is read
again from its begin, and what was taken of it dropped.

Without a tokenizer the store has none: no tokenizer.json, `tokenizer` in the manifest named "none" with no hash. Then
the vocabulary is what `vocab_size` says, or one more than the largest id: for that the source is read once more first.

Memory: blocks of a million tokens, and what the formats need besides (a row group's column of Parquet; 16 bytes for
each sample of an MDS shard or a litdata chunk).
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from milldam.errors import ConfigError, InputError
from milldam.files import hash_bytes
from milldam.importers.documents import Border, documents_of, read_piece
from milldam.importers.finding import find_pieces
from milldam.importers.pieces import Piece, ReadRules, listed, no_tokens
from milldam.importers.settings import ImportSettings
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
    """How much of the source is in shards: rows, or tokens of a stream, of a piece, and all pieces before it."""

    piece: int = 0
    taken: int = 0


def run_import(settings: ImportSettings) -> ImportSummary:
    """Do the import, or what is left of it."""
    started = time.monotonic()
    pieces = find_pieces(settings)
    tokenizer = _look_up_tokenizer(settings)
    with Run(settings.out) as run:
        asked = _identity_settings(settings, tokenizer, pieces)
        identity = Identity(asked, _list_input(run, pieces), tokenizer.facts["name"])
        begin = _where_to_begin(run, identity, overwrite=settings.overwrite)
        if begin != FINISHED:
            resumed = begin == UNFINISHED and run.has_results()
            _begin(run, begin, identity, tokenizer)
            manifest = _Import(settings, run, pieces, tokenizer, identity).do()
            summary = _summary(settings, pieces, manifest)
            run.write_status({"stage": "finished", "units": 1, "units_done": 1})
            return dataclasses.replace(summary, up_to_date=False, resumed=resumed, seconds=time.monotonic() - started)
        return _summary(settings, pieces, Manifest.read(run.out))


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
        raise ConfigError(f"--{name} {id}: the tokenizer {loaded.name} has no such id; it has {loaded.vocab_size:,}.")
    return str(token)


def _identity_settings(settings: ImportSettings, tokenizer: _Tokenizer, pieces: list[Piece]) -> dict[str, Any]:
    """Everything that changes the result. The files are in the input's identity, what they are taken for is here."""
    layout = hash_bytes(json.dumps([(piece.kind, piece.split, piece.facts) for piece in pieces]).encode())
    asked = {name: getattr(settings, name) for name in ("column", "eos", "dtype", "split", "vocab_size", "shard_size")}
    if settings.bos is not None:
        asked["bos"] = settings.bos
    return {"import": asked | {"tokenizer": tokenizer.facts["xxh3"], "layout": layout}}


def _list_input(run: Run, pieces: list[Piece]) -> dict[str, Any]:
    return run.write_inputs((0, file) for piece in pieces for file in listed(piece))


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


class _Import:
    """The work itself, behind the shards that are recorded."""

    def __init__(
        self, settings: ImportSettings, run: Run, pieces: list[Piece], tokenizer: _Tokenizer, identity: Identity
    ) -> None:
        self._settings, self._run, self._pieces = settings, run, pieces
        self._tokenizer, self._identity = tokenizer, identity
        self._rules = ReadRules(settings.column, settings.dtype, run.folder)
        id = settings.bos if settings.eos is None else settings.eos
        self._border = None if id is None else Border(id, begins=settings.eos is None)
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
        if _list_input(run, self._pieces) != self._identity.input:
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
            for piece in self._pieces:
                for tokens in read_piece(piece, self._rules):
                    largest = max(largest, _largest(tokens, piece))
            if largest >= _LARGEST_BELIEVED:
                raise InputError(_unbelievable(largest, self._settings))
            write_sealed(path, {"vocab_size": max(largest, 0 if self._border is None else self._border.id) + 1})
        found = read_sealed(path)
        assert found is not None
        return int(found["vocab_size"])

    def _write_shards(self, vocab_size: int) -> None:
        position = self._recorded_position()
        split: str | None = None
        for number in range(position.piece, len(self._pieces)):
            piece = self._pieces[number]
            if piece.split != split:
                self._finish_split(number)
            split = piece.split
            taken = position.taken if number == position.piece else 0
            for tokens in documents_of(piece, self._rules, self._border, taken):
                _check_ids(tokens, piece, vocab_size)
                taken = self._add(tokens, number, taken)
        self._finish_split(len(self._pieces))

    def _recorded_position(self) -> _Position:
        self._made = self._run.done_so_far(0)[0]
        return _positions(self._run)[self._made - 1] if self._made else _Position()

    def _add(self, tokens: Tokens, piece: int, taken: int) -> int:
        """Write documents, and end the shard with the one that fills it; what is taken of the piece then."""
        flat, lengths = tokens.flat, tokens.lengths
        in_rows = self._border is None
        if not in_rows and not self._open and lengths[0] == 0:
            # A border before which there is nothing.
            lengths = lengths[1:]
        while len(lengths):
            writer = self._shard_of(self._pieces[piece])
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
                self._commit(_Position(piece, taken))
        return taken

    def _shard_of(self, piece: Piece) -> ShardWriter:
        if self._writer is None:
            name = f"{piece.split}-{self._made:05d}"
            self._writer = ShardWriter(self._run.out, name, str(piece.split), self._dtype)
        return self._writer

    def _finish_split(self, next_piece: int) -> None:
        """End the document that is open and the shard."""
        if self._writer is not None:
            if self._open:
                self._writer.append(no_tokens())
                self._open = False
            self._commit(_Position(next_piece, 0))

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


def _largest(tokens: Tokens, piece: Piece) -> int:
    """The largest id of a block, which must be one; -1 when it is empty."""
    if not len(tokens.flat):
        return -1
    smallest, largest = int(tokens.flat.min()), int(tokens.flat.max())
    if smallest < 0 or largest > _LARGEST_ID:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{piece.path}: {wrong} is no token id. Is it of another dtype, or another column?")
    return largest


def _unbelievable(largest: int, settings: ImportSettings) -> str:
    sources = ", ".join(map(str, settings.sources))
    asked = "the dtype" if settings.dtype is None else f"--dtype {settings.dtype}"
    return (
        f"{sources}: the largest token id is {largest:,}, and no vocabulary is that large. "
        f"Is {asked} right, and the column? If it is, say --vocab-size."
    )


def _check_ids(tokens: Tokens, piece: Piece, vocab_size: int) -> None:
    largest = _largest(tokens, piece)
    if largest >= vocab_size:
        raise InputError(
            f"{piece.path}: token id {largest} outside the vocabulary of {vocab_size:,}. "
            "Is it of another tokenizer, or of another dtype?"
        )


def _summary(settings: ImportSettings, pieces: list[Piece], manifest: Manifest) -> ImportSummary:
    splits: dict[str, dict[str, int]] = {}
    for shard in manifest.shards:
        counted = splits.setdefault(shard.split, {"documents": 0, "tokens": 0})
        counted["documents"] += shard.documents
        counted["tokens"] += shard.tokens
    return ImportSummary(
        out=settings.out,
        formats=tuple(dict.fromkeys(piece.kind for piece in pieces)),
        files=len(pieces),
        up_to_date=True,
        documents=manifest.documents,
        tokens=manifest.tokens,
        vocab_size=manifest.vocab_size,
        dtype=manifest.dtype,
        splits=splits,
    )
