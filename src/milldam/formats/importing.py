"""The job of `milldam import`: tokens of other tools -> a store, in the frame of run/job.py.

A unit is a file of the source. Documents are its rows; or all rows are joined to one stream that is cut behind, or
before, each of an id: then documents go over files, and all files of a split are one unit. A shard ends with the
document that fills it, or with its unit. It is recorded together with what was taken of the unit by then, where a
killed import goes on; the file that was left half way is read again from its begin.

    scan      only where neither a tokenizer nor the user says the vocabulary: the largest id of each unit
    import    shards of each unit

Without a tokenizer the store has none: no tokenizer.json, `tokenizer` in the manifest named "none" with no hash. Then
the vocabulary is what `vocab_size` says, or one more than the largest id.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

import numpy as np
from annotated_types import Ge, Le

from milldam.choices import Executor
from milldam.errors import ConfigError, InputError, Setting
from milldam.files import hash_bytes, stays_in_folder
from milldam.formats import ReadName
from milldam.formats.finding import ReadRules, SourceFile, find_files
from milldam.formats.foreign import token_dtype_of
from milldam.formats.import_units import (
    Assignment,
    Border,
    ImportTask,
    ImportUnit,
    Position,
    ScanTask,
    listed,
    units_of,
)
from milldam.memory import parse_size, usage
from milldam.rules import SETTINGS, AtLeastOne, Size
from milldam.run import job as frame
from milldam.run.folder import NEW, RunFolder
from milldam.run.one_stage import plan_work, stage_of
from milldam.run.pools import WORK_BYTES, WorkPlan, require_room
from milldam.run.records import Records, sweep
from milldam.run.session import Session, Stage
from milldam.run.summary import Observer, Summary
from milldam.run.units import Identity
from milldam.stores.kinds import TOKENS, live_files
from milldam.stores.place import Folder
from milldam.stores.tokens.format import token_dtype
from milldam.stores.tokens.manifest import (
    SHARD_FILES,
    Manifest,
    ManifestText,
    Shard,
    ShardSpool,
    Totals,
    totals_by_split,
)
from milldam.stores.verify import has_every_file

RECORDS, SCANS = "records.jsonl", "scans.jsonl"
SHARDS = tuple(f"*.{ending}" for ending in SHARD_FILES)
_COPIES = 3
"""Of a row's ids: decoded, with their levels, and as tokens (measured: 11.3 bytes for each of four)."""
OUTPUTS = (*SHARDS, "tokenizer.json")
NO_TOKENIZER = "none"
_LARGEST_BELIEVED = 2**24
"""No vocabulary is larger; ids of two bytes that are read as four are, nearly always."""


@dataclass(frozen=True, slots=True)
class ImportSettings:
    """What the user asks for."""

    __pydantic_config__: ClassVar[dict[str, Any]] = SETTINGS

    source: tuple[str, ...]
    out: str
    format: ReadName | None = None
    """None: seen from the files."""
    tokenizer: str | None = None
    column: str | None = None
    masks: str | None = None
    """The column that says what is trained on; "none": none is to; None: seen from the names."""
    eos: Annotated[int, Ge(0)] | None = None
    bos: Annotated[int, Ge(0)] | None = None
    dtype: str | None = None
    split: str | None = None
    vocab_size: Annotated[int, Ge(1), Le(2**31)] | None = None
    shard_size: Size = "256MB"
    memory: Size | None = None
    workers: AtLeastOne | None = None
    executor: Executor = "local"
    address: str | None = None
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not self.source:
            raise ConfigError(Setting("source"), ": name at least one file or folder.")
        if self.eos is not None and self.bos is not None:
            told = ": documents are cut after one id, or before one. Leave one out."
            raise ConfigError(Setting("eos"), " and ", Setting("bos"), told)
        if self.masks not in (None, "none") and self.border is not None:
            told = ": a stream that is cut at an id has no rows that a mask could belong to. Leave one out."
            raise ConfigError(Setting("masks"), " and ", Setting("eos"), told)
        if self.split is not None and not stays_in_folder(self.split, hidden=False):
            raise ConfigError(Setting("split", self.split), ": no name for files. Use letters and digits.")
        if self.dtype is not None:
            token_dtype_of(self.dtype)
        if self.tokenizer is not None and self.vocab_size is not None:
            told = ": the tokenizer says it. Leave one out."
            raise ConfigError(Setting("vocab_size"), " and ", Setting("tokenizer"), told)

    @property
    def border(self) -> Border | None:
        id = self.bos if self.eos is None else self.eos
        return None if id is None else Border(id, begins=self.eos is None)


class ImportFacts(TypedDict):
    """What only an import tells."""

    formats: tuple[str, ...]
    dtype: str
    vocab_size: int
    splits: dict[str, dict[str, int]]


ImportSummary = Summary[ImportFacts]


def run_import(settings: ImportSettings, observer: Observer | None = None) -> ImportSummary:
    """Do the import, or what is left of it."""
    return frame.run(ImportJob(settings), frame.Options.of(settings), observer)


def array_of(settings: ImportSettings) -> frame.ArrayWork[ImportSummary]:
    """The same for tasks of a job array."""
    return frame.ArrayWork(ImportJob(settings), frame.Options.of(settings))


# ---- the tokenizer ----


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """What of a tokenizer goes into a store."""

    json: str | None
    vocab_size: int | None
    """None: it has to be found."""
    facts: dict[str, Any]


def _look_up_tokenizer(settings: ImportSettings) -> _Tokenizer:
    facts: dict[str, Any] = {"bos": settings.bos, "eos": settings.eos, "bos_token": None, "eos_token": None}
    if settings.tokenizer is None:
        return _Tokenizer(None, settings.vocab_size, {"name": NO_TOKENIZER, "xxh3": None} | facts)
    from milldam.tokenizers.loading import load_tokenizer

    loaded = load_tokenizer(settings.tokenizer)
    for name in ("bos", "eos"):
        if facts[name] is None:
            continue
        token = loaded.huggingface.id_to_token(facts[name])
        if token is None:
            told = f": the tokenizer {loaded.name} has no such id; it has {loaded.vocab_size:,}."
            raise ConfigError(Setting(name, facts[name]), told)
        facts[f"{name}_token"] = str(token)
    named = {"name": loaded.name, "xxh3": hash_bytes(loaded.json.encode())}
    return _Tokenizer(loaded.json, loaded.vocab_size, named | facts)


def _row_bytes(file: SourceFile, settings: ImportSettings) -> int:
    """What the rows of a Parquet file take: read, decoded and as tokens. A few bytes on disk may be millions of ids."""
    if file.format != "parquet":
        return 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    from milldam.formats.columns import choose_columns

    try:
        with pq.ParquetFile(file.path) as parquet:
            columns = choose_columns(parquet.schema_arrow, settings.column, settings.masks, file.path).names
            groups = [parquet.metadata.row_group(number) for number in range(parquet.metadata.num_row_groups)]
    except (OSError, pa.ArrowException):
        return 0  # whoever reads it says what is wrong
    each = (
        sum(
            _COPIES * (4 if chunk.physical_type == "INT32" else 8) * chunk.num_values // max(1, group.num_rows)
            for chunk in map(group.column, range(group.num_columns))
            if chunk.path_in_schema.split(".")[0] in columns
        )
        for group in groups
    )
    return max(each, default=0)


# ---- the job ----


@dataclass(frozen=True, slots=True)
class _Prepared:
    identity: Identity
    files: list[SourceFile]
    units: list[ImportUnit]
    tokenizer: _Tokenizer


@dataclass(frozen=True, slots=True)
class _Done:
    records: Records
    vocab_size: int


class ImportJob:
    """Tokens of other tools to a store."""

    kind = TOKENS

    def __init__(self, settings: ImportSettings) -> None:
        self._settings = settings

    def require_shareable(self) -> None:
        """Its files are all that it needs."""

    def pieces(self) -> dict[str, int | None]:
        settings = self._settings
        found = settings.tokenizer is None and settings.vocab_size is None
        return dict.fromkeys(("scan", "import") if found else ("import",))

    def prepare(self, session: Session) -> _Prepared:
        settings = self._settings
        sources = [Path(source).expanduser() for source in settings.source]
        files = find_files(sources, settings.format, settings.split)
        tokenizer = _look_up_tokenizer(settings)
        units = units_of(files, joined=settings.border is not None)
        asked = {name: getattr(settings, name) for name in ("column", "eos", "dtype", "split", "vocab_size")}
        asked |= {"shard_size": parse_size(settings.shard_size), "tokenizer": tokenizer.facts["xxh3"]}
        asked |= {name: value for name in ("bos", "masks") if (value := getattr(settings, name)) is not None}
        identity = Identity({"import": asked}, self._input(session.folder, files, units), tokenizer.facts["name"])
        return _Prepared(identity, files, units, tokenizer)

    def _input(self, folder: RunFolder, files: list[SourceFile], units: list[ImportUnit]) -> dict[str, Any]:
        """The input's state: its files, and what they are taken for."""
        state = folder.inputs.write((0, one) for file in files for one in listed(file))
        return state | {"fingerprint": hash_bytes(f"{state['fingerprint']} {[unit.key for unit in units]}".encode())}

    def has_results(self, folder: RunFolder) -> bool:
        return next(folder.journal.read(RECORDS), None) is not None

    def plan(self, session: Session, prepared: _Prepared, begin: str) -> WorkPlan:
        folder, identity = session.folder, prepared.identity
        plan = plan_work(
            session,
            tuple(self.pieces()),
            units=len(prepared.units),
            input_bytes=identity.input["bytes"],
            shard_size=parse_size(self._settings.shard_size),
            workers=self._settings.workers,
        )
        largest = max((_row_bytes(file, self._settings) for file in prepared.files), default=0)
        if largest > WORK_BYTES:  # which every worker has
            require_room(session.budget, {"the rows of these files": usage().anonymous + plan.workers * largest})
        if folder.needs_plan(identity, begin):
            folder.stage(prepared.units)
            text = prepared.tokenizer.json
            files = {} if text is None else {"tokenizer.json": text.encode()}
            folder.start(identity, files, outputs=OUTPUTS if begin == NEW else None)
        return plan

    def stages(self, session: Session, prepared: _Prepared, plan: WorkPlan) -> Generator[Stage, None, _Done]:
        folder = session.folder
        keys, vocab_size = folder.units.keys(), prepared.tokenizer.vocab_size
        # A stream that is cut at an id has no rows that a mask could belong to.
        masks = self._settings.masks if self._settings.border is None else "none"
        rules = ReadRules(self._settings.column, self._settings.dtype, masks)
        if vocab_size is None:
            scans = Records(folder.journal, SCANS, folder.out, keys)
            yield self._stage("scan", ScanTask(rules), folder, scans, plan)
            vocab_size = self._vocabulary(scans)
        dtype = token_dtype(vocab_size)
        width = np.dtype(dtype).itemsize
        # Ids beyond 65,536 that come with a new file make all shards wider.
        records = Records(folder.journal, RECORDS, folder.out, keys.mixed(np.full(len(keys), width, np.uint64)))
        shard_tokens = max(1, plan.shard_size // width)
        task = ImportTask(folder.out, rules, self._settings.border, dtype, vocab_size, shard_tokens)
        yield self._stage("import", task, folder, records, plan)
        return _Done(records, vocab_size)

    def _stage(
        self, name: str, task: ScanTask | ImportTask, folder: RunFolder, records: Records, plan: WorkPlan
    ) -> Stage:
        def assign(number: int) -> Assignment:
            unit, begun = folder.units.at(number, ImportUnit.from_json), records.begun(number)
            if begun is None:
                return Assignment(unit, records.keys[number], 0, Position())
            return Assignment(unit, records.keys[number], begun.part + 1, Position(**begun.facts["position"]))

        return stage_of(name, task, folder, records, assign, plan)

    def _vocabulary(self, scans: Records) -> int:
        """One more than the largest id."""
        largest = max((record.facts["largest"] for _, record in scans.in_plan_order()), default=-1)
        settings, border = self._settings, self._settings.border
        if largest >= _LARGEST_BELIEVED:
            asked = "the dtype" if settings.dtype is None else f"the dtype {settings.dtype}"
            raise InputError(
                f"{', '.join(settings.source)}: the largest token id is {largest:,}, and no vocabulary is that large. "
                f"Is {asked} right, and the column? If it is, say ",
                Setting("vocab_size"),
                ".",
            )
        return max(largest, 0 if border is None else border.id) + 1

    def finish(self, session: Session, prepared: _Prepared, plan: WorkPlan, done: _Done) -> ImportSummary:
        folder, identity = session.folder, prepared.identity
        folder.tidy()
        units = units_of(prepared.files, joined=self._settings.border is not None)
        if self._input(folder, prepared.files, units) != identity.input:
            raise InputError("The source changed while it was read. Run the same command again: it reads what changed.")
        shards = ShardSpool(folder.folder)
        shards.fill(
            Shard(**shard | {"unit": unit, "part": record.part})
            for unit, record in done.records.in_plan_order()
            for shard in record.facts.get("shards", ())
        )
        if not shards.splits:
            raise InputError(f"No documents in {', '.join(self._settings.source)}: nothing to import.")
        facts = Manifest(
            token_dtype(done.vocab_size),
            done.vocab_size,
            prepared.tokenizer.facts,
            "imported",
            identity.settings,
            identity.input,
            shards=(),
            chat=self._chat_facts(done.records),
            units=plan.units,
        )
        summary = self._summary(folder, prepared, facts, shards.splits)
        shards.write(facts, folder.out)
        shards.remove()
        sweep(folder.out, SHARDS, live_files(folder.out, TOKENS))
        records = done.records
        summary = session.measured(
            replace(
                summary,
                up_to_date=False,
                units=plan.units,
                reused=records.reused,
                changed=plan.changes,
                workers=plan.workers,
            )
        )
        summary.write(folder.folder)
        return summary

    def _chat_facts(self, records: Records) -> dict[str, Any] | None:
        """What is known of conversations, where a column said what is trained on."""
        told = [record.facts for _, record in records.in_plan_order() if record.facts.get("shards")]
        found = [facts.get("chat") for facts in told]
        kinds = {chat if chat is None else (chat["pairs"] > 0, chat["labels"] > 0) for chat in found}
        if len(kinds) > 1:
            what = "say what is trained on" if None in kinds else "have pairs, or labels of documents,"
            raise InputError(
                f"Some files {what} and others don't. Import each kind separately, or use ",
                Setting("masks", "none"), ".",
            )  # fmt: skip
        if kinds <= {None}:
            return None
        documents = sum(shard["documents"] for facts in told for shard in facts["shards"])
        trained, pairs = (sum(chat[name] for chat in found if chat) for name in ("trained", "pairs"))
        known = {"form": "tokens", "pairs": pairs > 0, "conversations": documents, "turns": 0}
        return known | {"trained_tokens": trained}

    def up_to_date(self, session: Session, prepared: _Prepared) -> ImportSummary | None:
        if not has_every_file(session.folder.out, TOKENS):
            return None
        manifest = ManifestText.at(Folder(session.folder.out))
        return self._summary(session.folder, prepared, manifest.facts(), totals_by_split(manifest.shards()))

    def _summary(
        self, folder: RunFolder, prepared: _Prepared, manifest: Manifest, splits: dict[str, Totals]
    ) -> ImportSummary:
        documents = {name: {"documents": one.documents, "tokens": one.tokens} for name, one in splits.items()}
        counts = {kind: sum(one[kind] for one in documents.values()) for kind in ("documents", "tokens")}
        return Summary(
            job="import",
            out=str(folder.out),
            up_to_date=True,
            counts=counts | {"files": len(prepared.files)},
            facts={
                "formats": tuple(dict.fromkeys(file.format for file in prepared.files)),
                "dtype": manifest.dtype,
                "vocab_size": manifest.vocab_size,
                "splits": documents,
            },
        )
