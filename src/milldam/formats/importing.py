"""The job of `milldam import`: tokens of other tools -> a store.

A unit is a file of the source. Documents are its rows; or its rows are joined to one stream that is cut behind, or
before, each of an id, which stays with the document that it ends or begins. A document never spans two files. A shard
ends with the document that fills it, or with its unit. Its record says how many documents of the unit are done then: a
killed import resumes there, and reads the file that was left half way again from its begin.

Without a tokenizer the store has none: no tokenizer.json, `tokenizer` in the manifest named "none" with no hash. Then
the vocabulary is what `vocab_size` says; or one more than the largest id, and the tokens are as wide as the source
suggests: uint16 where that is in files of uint16, else int32. Memory: blocks of a million tokens, and what the formats
need besides (a row group's column of Parquet).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes, stays_in_folder
from milldam.formats.columns import read_columns
from milldam.formats.flat import cut_blocks, read_blocks
from milldam.formats.foreign import OPENED, MegatronFile, foreign_path, format_of, open_foreign, token_dtype_of
from milldam.formats.settings import ImportSettings
from milldam.input_files import is_ours, nearby, version_of
from milldam.loader.reading import open_reader
from milldam.memory import parse_size
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import WorkPlan
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.records import RECORDS, Record, Records, sweep
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity, key_of, mixed_keys
from milldam.stores.kinds import TOKENS, live_files, store_kind
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import SHARD_FILES, Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.stores.verify import has_every_file

SHARDS = tuple(f"*.{ending}" for ending in SHARD_FILES)
_LARGEST_BELIEVED = 2**24
"""No vocabulary is larger; ids of two bytes that are read as four are, nearly always."""
_ENDINGS = dict.fromkeys(OPENED, "") | {".parquet": "parquet", ".pq": "parquet", ".arrow": "hf", ".feather": "hf"}
_SPLIT = re.compile(r"(?:^|[_.-])(train|validation|valid|val|test|eval|dev)(?=[_.-]|$)")
_KNOWN = (
    "Known are .npy, .bin (nanoGPT, llm.c), .bin with .idx (Megatron), .parquet, .arrow, "
    "and the folders of save_to_disk."
)


ImportSummary: TypeAlias = Summary[Mapping[str, Any]]


def run_import(settings: ImportSettings, observer: Observer | None = None) -> ImportSummary:
    """Do the import, or what is left of it."""
    return engine.run(ImportJob(settings), engine.Options.of(settings), observer)


def array_of(settings: ImportSettings) -> ArrayWork[ImportSummary]:
    """The same for tasks of a job array."""
    return ArrayWork(ImportJob(settings), engine.Options.of(settings))


# ---- what the user names -> the files to read, in a fixed order; no token is read ----


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the source: a unit. Of a pair of Megatron-LM, the tokens."""

    path: str
    size: int
    version: str
    format: str
    split: str

    @property
    def key(self) -> str:
        # By its name: data that moves to another folder is still the same data.
        return key_of(self.split, key_of(Path(self.path).name, self.size, self.version, self.format))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> SourceFile:
        return cls(**value)


def find_files(settings: ImportSettings) -> list[SourceFile]:
    """Everything to read, that of training first.

    A folder that `save_to_disk` wrote is read as its index says; of other folders everything is read that is known,
    their folders included. A split is the last word in a path below the source that names one, as in `val/0.parquet`
    or fineweb_train_000001.bin; files that belong to none belong to train.
    """
    found: list[tuple[Path, str | None]] = []
    for source in (Path(one).expanduser() for one in settings.source):
        if store_kind(source) is TOKENS:
            raise ConfigError(f"{source}: is already a milldam store. There is nothing to import.")
        path = foreign_path(source) or source
        if not path.exists():
            raise InputError(f"{source}: no such file or folder.{nearby(str(source))}")
        several = list(_files_in(path, None)) if path.is_dir() else [(path, None)]
        if not several or any(one.suffix not in _ENDINGS for one, _ in several):
            raise InputError(f"{source}: no tokens that milldam knows.\n{_KNOWN}")
        found += several
    has_splits, files = any(split is not None for _, split in found), []
    for path, split in found:
        format = _ENDINGS[path.suffix] or format_of(path)
        if settings.format not in (None, format) and "" not in (_ENDINGS[path.suffix], settings.format):
            raise ConfigError(f"{path}: is {format}, not {settings.format}.")
        if settings.split is None or not has_splits or settings.split == (split or "train"):
            name = settings.split or split or "train"
            files.append(_source_file(path.with_suffix(".bin") if format == "megatron" else path, format, name))
    if not files:
        known = dict.fromkeys(split or "train" for _, split in found)
        raise ConfigError(f'No split "{settings.split}" in the source; it has {", ".join(known)}.')
    return sorted(files, key=lambda file: file.split != "train")


def _source_file(path: Path, format: str, split: str) -> SourceFile:
    """A file as it is now."""
    size, versions = 0, list[str]()
    for one in (path, path.with_suffix(".idx")) if format == "megatron" else (path,):
        try:
            status = os.stat(one)
        except OSError as error:
            raise InputError(f"{one}: can't be read ({error.strerror}).") from None
        size, versions = size + status.st_size, [*versions, version_of(status)]
    return SourceFile(str(path), size, " ".join(versions), format, split)


def _files_in(folder: Path, split: str | None) -> Iterator[tuple[Path, str | None]]:
    """The files of a folder, and the split of each; an index of Megatron goes with its tokens."""
    indexes = {
        name: _read_index(folder / name) for name in ("dataset_dict.json", "state.json") if (folder / name).exists()
    }
    if "dataset_dict.json" in indexes:
        for name in indexes["dataset_dict.json"].get("splits", []):
            if not (_inside(folder, name) / "state.json").is_file():
                raise InputError(f"{folder / name}: no dataset in it, though dataset_dict.json names it.")
            yield from _files_in(folder / name, name)
    elif "state.json" in indexes:
        if indexes["state.json"].get("_indices_data_files"):
            raise InputError(f"{folder}: its rows are chosen by indices. Save it again with .flatten_indices().")
        yield from ((_inside(folder, one["filename"]), split) for one in indexes["state.json"].get("_data_files", []))
    else:
        for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
            names = _SPLIT.findall(path.name if path.is_dir() else path.stem)
            part = names[-1] if names else split
            if path.is_dir() and not is_ours(str(path)):
                yield from _files_in(path, part)
            elif path.is_file() and path.suffix in _ENDINGS and path.suffix != ".idx":
                yield path, part


def _read_index(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: can't be read ({error}).") from None
    return value if isinstance(value, dict) else {}


def _inside(folder: Path, name: object) -> Path:
    """A file that an index names. It may come from anywhere: it must not make us read files elsewhere."""
    if not stays_in_folder(name, hidden=False):
        raise InputError(f'{folder}: its index names the file "{name}", which leaves the folder; refused.')
    return folder / str(name)


# ---- the job ----


class ImportJob(engine.Job[ImportSummary]):
    """Tokens of other tools to a store."""

    kind, outputs, stage_names = TOKENS, (*SHARDS, "tokenizer.json"), ("import",)

    def __init__(self, settings: ImportSettings) -> None:
        if settings.dtype is not None:
            token_dtype_of(settings.dtype)
        self._settings, self.workers = settings, settings.workers

    def prepare(self, run: Session) -> Identity:
        settings = self._settings
        self._files = find_files(settings)
        vocab_size, self._tokenizer_json = settings.vocab_size, b""
        self._tokenizer: dict[str, Any] = {"name": "none", "xxh3": None}
        ids = {"bos": settings.bos, "eos": settings.eos}
        tokens: dict[str, str | None] = {"bos_token": None, "eos_token": None}
        if settings.tokenizer is not None:
            from milldam.tokenizers.loading import load_tokenizer

            loaded = load_tokenizer(settings.tokenizer)
            for name, id in ids.items():
                tokens[f"{name}_token"] = token = None if id is None else loaded.huggingface.id_to_token(id)
                if id is not None and token is None:
                    problem = f": the tokenizer {loaded.name} has no such id; it has {loaded.vocab_size:,}."
                    raise ConfigError(Setting(name, id), problem)
            vocab_size, self._tokenizer_json = vocab_size or loaded.vocab_size, loaded.json.encode()
            self._tokenizer = {"name": loaded.name, "xxh3": hash_bytes(self._tokenizer_json)}
        self._tokenizer |= ids | tokens
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size or 2**16)
        if vocab_size is None and any(self._is_wide(file) for file in self._files):
            self._dtype = "int32"
        named = ("column", "masks", "eos", "bos", "dtype", "split", "vocab_size")
        recipe = {name: getattr(settings, name) for name in named}
        recipe |= {"shard_size": parse_size(settings.shard_size), "tokenizer": self._tokenizer["xxh3"]}
        state = run.folder.inputs.write((0, file) for file in self._files)
        # And what they are taken for.
        digest = hash_bytes(f"{state['fingerprint']} {[file.key for file in self._files]}".encode())
        input = state | {"fingerprint": digest}
        self._identity = Identity({"import": recipe}, input, self._tokenizer["name"])
        return self._identity

    def _is_wide(self, file: SourceFile) -> bool:
        """Whether the ids of a file are taken for larger than uint16."""
        if file.format in ("hf", "parquet"):
            return True
        return open_foreign(Path(file.path), self._settings.dtype).dtype.itemsize > 2

    def units(self, run: Session) -> Iterable[SourceFile]:
        return self._files

    def files(self, run: Session) -> dict[str, bytes]:
        return {"tokenizer.json": self._tokenizer_json} if self._tokenizer_json else {}

    def stages(self, run: Session) -> Iterator[Stage]:
        folder, width = run.folder, np.dtype(self._dtype).itemsize
        # A wider file that is new makes all shards wider.
        self._records = Records(folder, RECORDS, mixed_keys(folder.units.keys(), width))
        limit = self._vocab_size or (_LARGEST_BELIEVED if width > 2 else 2**16)
        load = _Import(folder.out, self._settings, self._dtype, limit)
        yield Stage("import", load, self._records, SourceFile.from_json)

    def finish(self, run: Session, plan: WorkPlan) -> ImportSummary:
        folder, records = run.folder, [(unit, one) for unit, one in self._records.in_plan_order() if not one.last]
        folder.tidy()
        if find_files(self._settings) != self._files:
            raise InputError("The source changed while it was read. Run the same command again: it reads what changed.")
        shards = [Shard(**one.facts["shard"] | {"unit": unit, "part": one.part}) for unit, one in records]
        if not shards:
            raise InputError(f"No documents in {', '.join(self._settings.source)}: nothing to import.")
        if len({shard.spans is None for shard in shards}) > 1:
            problem = "Some files say what is trained on and others don't. Import each kind separately, or use "
            raise InputError(problem, Setting("masks", "none"), ".")
        chat = None
        if shards[0].spans is not None:
            chat = {"form": "tokens", "pairs": False, "conversations": sum(one.documents for one in shards), "turns": 0}
            chat |= {"trained_tokens": sum(one.facts["trained"] for _, one in records)}
        largest = max(*(one.facts["largest"] for _, one in records), self._settings.border or 0)
        identity = self._identity
        manifest = Manifest(
            self._dtype,
            self._vocab_size or largest + 1,
            self._tokenizer,
            "imported",
            identity.settings,
            identity.input,
            shards=tuple(sorted(shards, key=lambda shard: (shard.split != "train", shard.split))),
            chat=chat,
            units=plan.units,
        )
        manifest.write(folder.out)
        sweep(folder.out, SHARDS, live_files(folder.out, TOKENS))
        summary = replace(self._summary(folder.out, manifest), up_to_date=False, units=plan.units, workers=plan.workers)
        summary = run.measured(replace(summary, changed=plan.changes, reused=self._records.reused))
        summary.write(folder.folder)
        return summary

    def up_to_date(self, run: Session) -> ImportSummary | None:
        out = run.folder.out
        return self._summary(out, Manifest.read(out)) if has_every_file(out, TOKENS) else None

    def _summary(self, out: Path, manifest: Manifest) -> ImportSummary:
        facts = {
            "formats": tuple(dict.fromkeys(file.format for file in self._files)),
            "dtype": manifest.dtype,
            "vocab_size": manifest.vocab_size,
            "splits": manifest.counts_by_split,
        }
        counts = {name: manifest.totals[name] for name in ("documents", "tokens")} | {"files": len(self._files)}
        return Summary("import", str(out), facts, up_to_date=True, counts=counts)


# ---- in a worker ----


@dataclass(frozen=True, slots=True)
class _Import:
    """Writes the shards of a unit, from where an earlier run stopped."""

    out: Path
    settings: ImportSettings
    dtype: str
    limit: int
    """Every id is less."""

    def load(self) -> Make:
        return self._import

    def _import(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        """A record for each shard, with how many documents are done; the record that ends the unit names no shard."""
        part, taken = assigned.next_part, 0 if assigned.begun is None else assigned.begun.facts["taken"]
        shard_tokens = max(1, parse_size(self.settings.shard_size) // np.dtype(self.dtype).itemsize)
        writer: ShardWriter | None = None
        largest, trained = 0, 0

        def record(writer: ShardWriter) -> Record:
            shard = writer.commit()
            counts = {"documents": shard.documents, "tokens": shard.tokens}
            facts = {"shard": asdict(shard), "taken": taken, "largest": largest, "trained": trained}
            outputs = {f"{shard.name}.{ending}": file for ending, file in shard.files.items()}
            return Record(assigned.key, part, last=False, outputs=outputs, counts=counts, facts=facts)

        try:
            for tokens in _after(taken, self._documents(assigned.unit)):
                while len(tokens.lengths):
                    writer = writer or ShardWriter(self.out, assigned.unit.split, self.dtype)
                    every, closed = len(tokens.lengths), len(tokens.lengths) - tokens.open
                    last = int(tokens.lengths.cumsum()[:closed].searchsorted(shard_tokens - writer.tokens))
                    stop = last + 1 if last < closed else every
                    some, tokens = tokens.pieces(0, stop), tokens.pieces(stop, every)
                    writer.append(some)
                    largest = max(largest, int(some.flat.max(initial=0)))
                    trained += 0 if some.spans is None else some.spans.trained_tokens
                    documents = len(some.lengths) - some.open
                    taken += documents
                    progress.add(documents=documents, tokens=len(some.flat), input_bytes=some.flat.nbytes)
                    if last < closed:
                        yield record(writer)
                        part, writer, largest, trained = part + 1, None, 0, 0
            if writer is not None:
                yield record(writer)
                part += 1
        finally:
            if writer is not None:
                writer.discard()
        yield Record(assigned.key, part)

    def _documents(self, file: SourceFile) -> Iterator[Tokens]:
        """The documents of a file, in blocks; the last of a block may be open."""
        border, begins, at_start, is_open = self.settings.border, self.settings.eos is None, True, False
        for tokens in self._read(file):
            smallest, largest = int(tokens.flat.min(initial=0)), int(tokens.flat.max(initial=0))
            if smallest < 0 or largest >= self.limit:
                raise InputError(
                    f"{file.path}: {smallest if smallest < 0 else largest} is not a token id of a vocabulary of "
                    f"{self.limit:,}. Is it of another tokenizer, dtype or column? If it is right, set ",
                    Setting("vocab_size"),
                    ".",
                )
            if border is None:
                yield tokens
            elif len(tokens.flat):
                ends = np.flatnonzero(tokens.flat == border) + (not begins)
                if at_start and begins and tokens.flat[0] == border:  # there is nothing before it
                    ends = ends[1:]
                is_open, at_start = not len(ends) or bool(ends[-1] < len(tokens.flat)), False
                edges = np.concatenate(([0], ends, [len(tokens.flat)] if is_open else []))
                yield Tokens(tokens.flat, np.diff(edges).astype(np.int64), open=is_open)
        if is_open:
            yield Tokens(np.empty(0, np.int64), np.zeros(1, np.int64))

    def _read(self, file: SourceFile) -> Iterator[Tokens]:
        """The rows of a file, or all of a flat one as one document, some at a time; of a giant one, parts."""
        settings, path = self.settings, Path(file.path)
        if file.format in ("hf", "parquet"):
            # A stream that is cut at an id has no rows that a mask could belong to.
            masks = settings.masks if settings.border is None else "none"
            yield from read_columns(path, "arrow" if file.format == "hf" else "parquet", settings.column, masks)
            return
        opened = open_foreign(path, None if file.format == "megatron" else settings.dtype)
        reader, position = open_reader(opened.stream(), "pread"), 0
        one = iter([np.array([opened.tokens])])
        for lengths in opened.index.length_blocks() if isinstance(opened, MegatronFile) else one:
            for first, stop, count in cut_blocks(lengths):
                if not count:
                    yield Tokens(np.empty(0, opened.dtype), lengths[first:stop])
                end = position + count
                for flat in read_blocks(reader, position, count):
                    position += len(flat)
                    whole = len(flat) == count
                    yield Tokens(flat, lengths[first:stop] if whole else np.array([len(flat)]), open=position < end)


def _after(taken: int, blocks: Iterator[Tokens]) -> Iterator[Tokens]:
    """Without the documents that were taken before."""
    for tokens in blocks:
        closed = len(tokens.lengths) - tokens.open
        if taken <= closed and taken < len(tokens.lengths):
            yield tokens.pieces(taken, len(tokens.lengths))
        taken = max(0, taken - closed)
