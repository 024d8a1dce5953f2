"""The job of `milldam import`: tokens of other tools -> a store.

A unit is a file of the source. Documents are its rows; or all rows are joined to one stream that is cut behind, or
before, each of an id, which stays with the document that it ends or begins: then documents go over files, and all files
of a split are one unit. A shard ends with the document that fills it, or with its unit. Its record says how far the
unit is taken then: a killed import resumes there, and reads the file that was left half way again from its begin.

    scan      only where neither a tokenizer nor the user says the vocabulary: the largest id of each unit
    import    shards of each unit; the record that ends a unit names none

Without a tokenizer the store has none: no tokenizer.json, `tokenizer` in the manifest named "none" with no hash. Then
the vocabulary is what `vocab_size` says, or one more than the largest id. Memory: blocks of a million tokens, and what
the formats need besides (a row group's column of Parquet).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes
from milldam.formats import load_format
from milldam.formats.finding import ReadRules, SourceFile, find_files
from milldam.formats.foreign import token_dtype_of
from milldam.formats.settings import ImportSettings
from milldam.input_files import version_of
from milldam.memory import parse_size, usage
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import WorkPlan, require_room
from milldam.run.engine import Assigned, Make, Progress, Session, Stage
from milldam.run.records import RECORDS, Record, Records, sweep
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity, key_of
from milldam.stores.kinds import TOKENS, live_files
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import SHARD_FILES, Manifest, Shard, sums
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.stores.verify import has_every_file

SCANS = "scans.jsonl"
SHARDS = tuple(f"*.{ending}" for ending in SHARD_FILES)
_COPIES = 3
"""Of a row's ids, four bytes each: decoded, with their levels, and as tokens (measured: 11.3 bytes)."""
_LARGEST_ID = 2**31 - 1
_LARGEST_BELIEVED = 2**24
"""No vocabulary is larger; ids of two bytes that are read as four are, nearly always."""


class ImportFacts(TypedDict):
    """Facts of the summary that only an import has."""

    formats: tuple[str, ...]
    dtype: str
    vocab_size: int
    splits: dict[str, dict[str, int]]


ImportSummary = Summary[ImportFacts]


def run_import(settings: ImportSettings, observer: Observer | None = None) -> ImportSummary:
    """Do the import, or what is left of it."""
    return engine.run(ImportJob(settings), engine.Options.of(settings), observer)


def array_of(settings: ImportSettings) -> ArrayWork[ImportSummary]:
    """The same for tasks of a job array."""
    return ArrayWork(ImportJob(settings), engine.Options.of(settings))


# ---- units ----


@dataclass(frozen=True, slots=True)
class ImportUnit:
    """Files that are read one after the other."""

    split: str
    files: tuple[tuple[str, str], ...]
    """Format and path."""
    size: int
    key: str
    """Changes when a file changes, or is read as another format."""

    @classmethod
    def of(cls, files: list[SourceFile]) -> ImportUnit:
        listed = [[*_listed(file)] for file in files]
        # By its name: data that moves to another folder is still the same data.
        states = [[(Path(one.path).name, one.size, one.version) for one in each] for each in listed]
        split, size = str(files[0].split), sum(one.size for each in listed for one in each)
        key = key_of(split, key_of(states, [file.format for file in files]))
        return cls(split, tuple((file.format, str(file.path)) for file in files), size, key)

    @property
    def sources(self) -> list[SourceFile]:
        return [SourceFile(format, Path(path), self.split) for format, path in self.files]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ImportUnit:
        return cls(**value)


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file as the run folder lists it."""

    path: str
    size: int
    version: str


def _listed(file: SourceFile) -> Iterator[_ListedFile]:
    """The files that a source is read from, as they are now."""
    for path in (file.path, file.path.with_suffix(".idx")) if file.format == "megatron" else (file.path,):
        try:
            status = os.stat(path)
        except OSError as error:
            raise InputError(f"{path}: can't be read ({error.strerror}).") from None
        yield _ListedFile(str(path), status.st_size, version_of(status))


# ---- the job ----


class ImportJob(engine.Job[ImportSummary]):
    """Tokens of other tools to a store."""

    kind, outputs = TOKENS, (*SHARDS, "tokenizer.json")

    def __init__(self, settings: ImportSettings) -> None:
        if settings.dtype is not None:
            token_dtype_of(settings.dtype)
        self._settings, self.workers = settings, settings.workers
        self._vocab_size = settings.vocab_size
        scans = settings.tokenizer is None and settings.vocab_size is None
        self.stage_names = ("scan", "import") if scans else ("import",)
        # A stream that is cut at an id has no rows that a mask could belong to.
        masks = settings.masks if settings.border is None else "none"
        self._rules = ReadRules(settings.column, settings.dtype, masks)

    def prepare(self, run: Session) -> Identity:
        settings = self._settings
        sources = [Path(source).expanduser() for source in settings.source]
        self._files = find_files(sources, settings.format, settings.split)
        self._tokenizer, self._tokenizer_json = self._load_tokenizer()
        self.batch_bytes = max((_row_bytes(file, self._rules) for file in self._files), default=0)
        require_room(run.budget, {"the rows of these files": usage().anonymous + self.batch_bytes})
        recipe = {name: getattr(settings, name) for name in ("column", "eos", "dtype", "split", "vocab_size")}
        recipe |= {"shard_size": parse_size(settings.shard_size), "tokenizer": self._tokenizer["xxh3"]}
        recipe |= {name: value for name in ("bos", "masks") if (value := getattr(settings, name)) is not None}
        self._units, input = self._look_at_input(run)
        self._identity = Identity({"import": recipe}, input, self._tokenizer["name"])
        return self._identity

    def _load_tokenizer(self) -> tuple[dict[str, Any], str | None]:
        """The tokenizer's facts for the manifest, and its JSON."""
        settings = self._settings
        facts: dict[str, Any] = {"bos": settings.bos, "eos": settings.eos, "bos_token": None, "eos_token": None}
        if settings.tokenizer is None:
            return {"name": "none", "xxh3": None} | facts, None
        from milldam.tokenizers.loading import load_tokenizer

        loaded = load_tokenizer(settings.tokenizer)
        for name in ("bos", "eos"):
            if facts[name] is not None:
                token = loaded.huggingface.id_to_token(facts[name])
                if token is None:
                    problem = f": the tokenizer {loaded.name} has no such id; it has {loaded.vocab_size:,}."
                    raise ConfigError(Setting(name, facts[name]), problem)
                facts[f"{name}_token"] = str(token)
        self._vocab_size = loaded.vocab_size
        return {"name": loaded.name, "xxh3": hash_bytes(loaded.json.encode())} | facts, loaded.json

    def _look_at_input(self, run: Session) -> tuple[list[ImportUnit], dict[str, Any]]:
        """The units, and the input's state: its files, and what they are taken for."""
        if self._settings.border is None:
            units = [ImportUnit.of([file]) for file in self._files]
        else:  # documents may cross files
            splits = dict.fromkeys(file.split for file in self._files)
            units = [ImportUnit.of([file for file in self._files if file.split == split]) for split in splits]
        state = run.folder.inputs.write((0, one) for file in self._files for one in _listed(file))
        digest = hash_bytes(f"{state['fingerprint']} {[unit.key for unit in units]}".encode())
        return units, state | {"fingerprint": digest}

    def units(self, run: Session) -> Iterable[ImportUnit]:
        return self._units

    def files(self, run: Session) -> dict[str, bytes]:
        return {} if self._tokenizer_json is None else {"tokenizer.json": self._tokenizer_json.encode()}

    def stages(self, run: Session) -> Iterator[Stage]:
        settings, folder = self._settings, run.folder
        keys = folder.units.keys()
        if self._vocab_size is None:
            scans = Records(folder.journal, SCANS, folder.out, keys)
            yield Stage("scan", _Scan(self._rules), scans, ImportUnit.from_json)
            largest = max((record.facts["largest"] for _, record in scans.in_plan_order()), default=-1)
            if largest >= _LARGEST_BELIEVED:
                dtype = "the dtype" if settings.dtype is None else f"the dtype {settings.dtype}"
                raise InputError(
                    f"{', '.join(settings.source)}: the largest token id is {largest:,}, and no vocabulary is that "
                    f"large. Is {dtype} right, and the column? If it is, set ",
                    Setting("vocab_size"),
                    ".",
                )
            self._vocab_size = max(largest, settings.border or 0) + 1
        dtype = token_dtype(self._vocab_size)
        width = np.dtype(dtype).itemsize
        # Ids beyond 65,536 that come with a new file make all shards wider.
        mixed = keys.mixed(np.full(len(keys), width, np.uint64))
        self._records = Records(folder.journal, RECORDS, folder.out, mixed)
        shard_tokens = max(1, parse_size(settings.shard_size) // width)
        begins = settings.eos is None
        load = _Import(folder.out, self._rules, settings.border, begins, dtype, self._vocab_size, shard_tokens)
        yield Stage("import", load, self._records, ImportUnit.from_json)

    def finish(self, run: Session, plan: WorkPlan) -> ImportSummary:
        folder, identity = run.folder, self._identity
        folder.tidy()
        if self._look_at_input(run)[1] != identity.input:
            raise InputError("The source changed while it was read. Run the same command again: it reads what changed.")
        shards = [
            Shard(**record.facts["shard"] | {"unit": unit, "part": record.part})
            for unit, record in self._records.in_plan_order()
            if not record.last
        ]
        if not shards:
            raise InputError(f"No documents in {', '.join(self._settings.source)}: nothing to import.")
        assert self._vocab_size is not None
        facts = Manifest(
            token_dtype(self._vocab_size),
            self._vocab_size,
            self._tokenizer,
            "imported",
            identity.settings,
            identity.input,
            shards=tuple(sorted(shards, key=lambda shard: (shard.split != "train", shard.split))),
            chat=self._chat_facts(),
            units=plan.units,
        )
        summary = self._summary(folder.out, facts)
        facts.write(folder.out)
        sweep(folder.out, SHARDS, live_files(folder.out, TOKENS))
        summary = replace(summary, up_to_date=False, units=plan.units, workers=plan.workers, changed=plan.changes)
        summary = run.measured(replace(summary, reused=self._records.reused))
        summary.write(folder.folder)
        return summary

    def _chat_facts(self) -> dict[str, Any] | None:
        """Facts of conversations, where a column said what is trained on."""
        kinds, sums = set[tuple[bool, ...]](), Counter[str]()
        for _, record in self._records.in_plan_order():
            if not record.last:
                chat = record.facts["chat"]
                kinds.add(() if chat is None else (chat["pairs"] > 0, chat["labels"] > 0))
                sums.update(chat or {}, documents=record.counts["documents"])
        if len(kinds) > 1:
            what = "say what is trained on" if () in kinds else "have pairs, or labels of documents,"
            problem = f"Some files {what} and others don't. Import each kind separately, or use "
            raise InputError(problem, Setting("masks", "none"), ".")
        if kinds <= {()}:
            return None
        known = {"form": "tokens", "pairs": sums["pairs"] > 0, "conversations": sums["documents"], "turns": 0}
        return known | {"trained_tokens": sums["trained"]}

    def up_to_date(self, run: Session) -> ImportSummary | None:
        out = run.folder.out
        if not has_every_file(out, TOKENS):
            return None
        return self._summary(out, Manifest.read(out))

    def _summary(self, out: Path, manifest: Manifest) -> ImportSummary:
        splits = {name: sums(shard for shard in manifest.shards if shard.split == name) for name in manifest.splits}
        documents = {name: {what: one[what] for what in ("documents", "tokens")} for name, one in splits.items()}
        counts = {kind: sum(one[kind] for one in documents.values()) for kind in ("documents", "tokens")}
        facts: ImportFacts = {
            "formats": tuple(dict.fromkeys(file.format for file in self._files)),
            "dtype": manifest.dtype,
            "vocab_size": manifest.vocab_size,
            "splits": documents,
        }
        return Summary("import", str(out), facts, up_to_date=True, counts=counts | {"files": len(self._files)})


def _row_bytes(file: SourceFile, rules: ReadRules) -> int:
    """Memory for rows of a Parquet file, read, decoded and as tokens: a few bytes on disk may be millions of ids."""
    if file.format != "parquet":
        return 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    from milldam.formats.columns import choose_columns

    most = 0
    try:
        with pq.ParquetFile(file.path) as parquet:
            names = choose_columns(parquet.schema_arrow, rules, file.path).names
            for group in map(parquet.metadata.row_group, range(parquet.metadata.num_row_groups)):
                chunks = [group.column(number) for number in range(group.num_columns)]
                values = sum(one.num_values for one in chunks if one.path_in_schema.split(".")[0] in names)
                most = max(most, _COPIES * 4 * values // max(1, group.num_rows))
    except (OSError, pa.ArrowException):
        return 0  # whoever reads it says what is wrong
    return most


# ---- in a worker ----


@dataclass(frozen=True, slots=True)
class _Scan:
    """Finds the largest id of a unit."""

    rules: ReadRules

    def load(self) -> Make:
        return self._scan

    def _scan(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        largest = -1
        for file in assigned.unit.sources:
            for tokens in load_format(file.format).read(file, self.rules):
                largest = max(largest, _largest(tokens, file))
                progress.add(tokens=len(tokens.flat), input_bytes=tokens.flat.nbytes)
        yield Record(assigned.key, facts={"largest": largest})


@dataclass(frozen=True, slots=True)
class _Import:
    """Writes the shards of a unit, from where an earlier run stopped."""

    out: Path
    rules: ReadRules
    border: int | None
    begins: bool
    """A stream is cut before the border, not behind it."""
    dtype: str
    vocab_size: int
    shard_tokens: int

    def load(self) -> Make:
        return self._import

    def _import(self, assigned: Assigned, progress: Progress) -> Iterator[Record]:
        """A record for each shard, with its position: the number of a file, and how many documents have ended in it.
        The record that ends the unit names no shard."""
        files, part = assigned.unit.sources, assigned.next_part
        first, taken = (0, 0) if assigned.begun is None else assigned.begun.facts["position"]
        writer: ShardWriter | None = None
        chat, is_open = Counter[str](), False

        def record(writer: ShardWriter, position: tuple[int, int]) -> Record:
            shard = writer.commit()
            counts = {"documents": shard.documents, "tokens": shard.tokens}
            known = {name: chat[name] for name in ("trained", "pairs", "labels")} if shard.spans else None
            facts = {"shard": asdict(shard), "position": position, "chat": known}
            outputs = {f"{shard.name}.{ending}": file for ending, file in shard.files.items()}
            return Record(assigned.key, part, last=False, outputs=outputs, counts=counts, facts=facts)

        try:
            for number in range(first, len(files)):
                for tokens in _after(taken, self._documents(files[number])):
                    if self.border is not None and not is_open and tokens.lengths[0] == 0:
                        # A border before which there is nothing.
                        tokens, taken = tokens.pieces(1, len(tokens.lengths)), taken + 1
                    while len(tokens.lengths):
                        writer = writer or ShardWriter(self.out, assigned.unit.split, self.dtype)
                        every, closed = len(tokens.lengths), len(tokens.lengths) - tokens.open
                        room = self.shard_tokens - writer.tokens
                        last = int(tokens.lengths.cumsum()[:closed].searchsorted(room))
                        full, each = last < closed, tokens.documents_each
                        # Both of a pair go into one shard.
                        stop = (last // each + 1) * each if full else every
                        some, tokens = tokens.pieces(0, stop), tokens.pieces(stop, every)
                        writer.append(some)
                        documents, is_open = len(some.lengths) - some.open, some.open
                        chat.update(_chat_counts(some))
                        taken += documents
                        progress.add(documents=documents, tokens=len(some.flat), input_bytes=some.flat.nbytes)
                        if full:
                            yield record(writer, (number, taken))
                            part, writer = part + 1, None
                            chat.clear()
                taken = 0
            if writer is not None:
                if is_open:
                    writer.append(Tokens(np.empty(0, np.int64), np.zeros(1, np.int64)))
                yield record(writer, (len(files), 0))
                part += 1
        finally:
            if writer is not None:
                writer.discard()
        yield Record(assigned.key, part)

    def _documents(self, file: SourceFile) -> Iterator[Tokens]:
        """The documents of a file; those of a stream may have begun before it, and go on behind it."""
        for tokens in load_format(file.format).read(file, self.rules):
            if _largest(tokens, file) >= self.vocab_size:
                raise InputError(
                    f"{file.path}: token id {tokens.flat.max()} outside the vocabulary of {self.vocab_size:,}. "
                    "Is it of another tokenizer, or of another dtype?"
                )
            if self.border is None:
                yield tokens
            elif len(tokens.flat):
                ends = np.flatnonzero(tokens.flat == self.border) + (not self.begins)
                is_open = not len(ends) or bool(ends[-1] < len(tokens.flat))
                edges = np.concatenate(([0], ends, [len(tokens.flat)] if is_open else []))
                yield Tokens(tokens.flat, np.diff(edges).astype(np.int64), open=is_open)


def _chat_counts(tokens: Tokens) -> dict[str, int]:
    """Tokens that are trained on, pairs and labels of a block."""
    spans = tokens.spans
    if spans is None:
        return {}
    pairs = len(tokens.lengths) // 2 if tokens.documents_each == 2 else 0
    return {"trained": spans.trained_tokens, "pairs": pairs, "labels": 0 if spans.labels is None else len(spans.labels)}


def _after(taken: int, blocks: Iterator[Tokens]) -> Iterator[Tokens]:
    """Without the documents that were taken before."""
    for tokens in blocks:
        closed = len(tokens.lengths) - tokens.open
        if taken <= closed and taken < len(tokens.lengths):
            yield tokens.pieces(taken, len(tokens.lengths))
        taken = max(0, taken - closed)


def _largest(tokens: Tokens, file: SourceFile) -> int:
    """The largest id of a block, which must be one; -1 when it is empty."""
    if not len(tokens.flat):
        return -1
    smallest, largest = int(tokens.flat.min()), int(tokens.flat.max())
    if smallest < 0 or largest > _LARGEST_ID:
        wrong = smallest if smallest < 0 else largest
        raise InputError(f"{file.path}: {wrong} is not a token id. Is it of another dtype, or another column?")
    return largest
