"""The job of `milldam.map`, on run/engine.py: rows of any source through any function, to a table.

prepare   the function's identity, the source: no file is read that need not be; rows that lie in none are written first
units     ranges of files or of a dataset
map       units to shards; the first batch of the first worker tells how many workers there are
finish    types of all units put together for the manifest    mapping/table_job.py

A unit's key is everything that its rows depend on: function, settings, what it reads. So other settings are no reason
to refuse a folder: what has a record under its key is what this run would make.

Memory: this process plans and keeps count; a worker holds one batch, in and out of the function.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError, Setting, StoreError
from milldam.files import TEMPORARY_SUFFIX
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import cache_folder, cached_out
from milldam.mapping.function import ALL
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.rows import Files, Source, source_of
from milldam.mapping.schema import given_schema, unified
from milldam.mapping.settings import MapSettings
from milldam.mapping.table_job import SPOOL, RowUnit, TableJob, TableSummary
from milldam.mapping.working import FAILED, MapLoad
from milldam.markup import counted
from milldam.memory import usage
from milldam.pipeline.rejects import first_reject
from milldam.run import engine
from milldam.run.array import ArrayWork
from milldam.run.budget import SMALL_INPUT, WORK_BYTES
from milldam.run.engine import Session, Stage
from milldam.run.folder import RunFolder
from milldam.run.summary import Observer, log
from milldam.run.tasks import Workers
from milldam.run.units import Identity, key_of
from milldam.stores.kinds import TABLE
from milldam.stores.table.manifest import TableManifest, TableSchema

_VERSION = 4
"""Of the way from rows to rows: another one makes other keys."""
_CHANGES_SHOWN = 6
_MARGIN = 1.15
"""Batches differ in size, and a shard waits to be written."""


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> TableSummary:
    """Make the table, or what is left to make of it. `held_bytes`: memory that the calling program holds already."""
    job = MapJob(settings)
    if settings.out is not None:
        return engine.run(job, _options(settings, Path(settings.out), held_bytes), observer)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(TEMPORARY_SUFFIX, ".", cache_folder(), ignore_cleanup_errors=True) as folder:
        job.look(Path(folder) / SPOOL)
        with cached_out(job.cache_key) as out:
            return engine.run(job, _options(settings, out, held_bytes), observer)


def _options(settings: MapSettings, out: Path, held_bytes: int = 0) -> engine.Options:
    return engine.Options.of(settings, out, held_bytes=held_bytes, adapts=True)


def array_of(settings: MapSettings) -> ArrayWork[TableSummary]:
    """The same for tasks of a job array."""
    if settings.out is None:
        raise ConfigError(Setting("out"), ": name a folder for the table: other machines don't see this one's cache.")
    job = MapJob(settings)
    job.require_hash()
    job.look(Path(settings.out) / SPOOL)
    return ArrayWork(job, _options(settings, Path(settings.out)))


class MapJob(TableJob):
    """Rows to a table."""

    stage_names, outputs = ("map",), None
    _source: Source

    def __init__(self, settings: MapSettings) -> None:
        self.settings, self.workers = settings, settings.workers
        self.function = identify(settings.function, settings.fn_kwargs, key=settings.key)
        self.batch_bytes = max(0, 4 * settings.most_batch_bytes - WORK_BYTES)
        schema = given_schema(settings.schema)
        self._schema = None if schema is None else TableSchema.of(schema)
        self._once = uuid.uuid4().hex if self.function.unhashable else ""
        """In the keys if the function has no hash: nothing is reused."""
        self._no_hash = f"What {self.function.name} depends on can't be hashed: {'; '.join(self.function.unhashable)}."

    # ---- prepare ----

    def require_hash(self) -> None:
        """For a table that is to be found again, and for processes that must know that they do the same."""
        if self.function.unhashable:
            otherwise = "; on this machine, a folder for the table is enough."
            raise ConfigError(f"{self._no_hash} Name it by ", Setting("key"), otherwise)

    def look(self, folder: Path) -> Source:
        """Look the source up. `folder`: for rows that are written to files first."""
        if not hasattr(self, "_source"):
            self._source = source_of(self.settings, folder)
        elif isinstance(self._source, Files) and self._source.spooled not in (None, folder):
            shutil.rmtree(folder, ignore_errors=True)
            self._source.spooled = Path(shutil.move(self._source.spooled, folder))
        return self._source

    @property
    def cache_key(self) -> str:
        """The table's name in the cache: its function and settings, then the names of its files, or the content of what
        has no name."""
        self.require_hash()
        return "-".join(key_of(part) for part in ([self._recipe, self.settings.unit_bytes], self._source.name))

    @property
    def _recipe(self) -> str:
        """A hash of all that rows depend on besides what they are read from."""
        schema, of_source = None if self._schema is None else self._schema.ipc, self._source.schema
        features = None if of_source is None else of_source.metadata
        return key_of(_VERSION, self.function.hash, self.settings.parameters, schema, repr(features), self._once)

    def prepare(self, run: Session) -> Identity:
        folder = run.folder
        if (folder.out / TABLE.manifest).exists() and TableManifest.read(folder.out).qa is not None:
            raise ConfigError(f"{folder.out}: holds windows that `milldam qa` made. Choose another place.")
        source, function = self.look(folder.folder / SPOOL), self.function
        if function.unhashable:
            reuse = 'Nothing is reused from an earlier run. Name it by the setting "key", and change the name with it.'
            run.observer.warn(f"{self._no_hash} {reuse}")
        columns = None if self._schema is None else asdict(self._schema)
        made_from = {"function": asdict(function), "rows_version": _VERSION, "schema": columns}
        made_from |= {**self.settings.parameters, "shard_size": self.settings.unit_bytes}
        for path in (one.removeprefix("file://") for one in source.paths):
            if not is_address(path) and Path(path).resolve().is_relative_to(folder.out.resolve()):
                raise ConfigError(
                    f"{path} is input and is inside the output folder {folder.out}: its rows would be lost. "
                    "Choose another folder for the table."
                )
        files = source.files() if source.spooled is None else ()
        folder.inputs.write((0, replace(file, path=without_secrets(file.path))) for file in files)
        self._identity = Identity(made_from, source.identity)
        self.changed = _changes(folder, self._identity)
        return self._identity

    def units(self, run: Session) -> Iterable[RowUnit]:
        return self._source.units()

    def up_to_date(self, run: Session) -> TableSummary | None:
        return None if self.function.unhashable else super().up_to_date(run)

    # ---- map ----

    def plan_facts(self, run: Session) -> dict[str, Any]:
        folder, settings, source = run.folder, self.settings, self._source
        records, sizes = self.open_records(run, self._recipe), folder.units.sizes()
        schema, limit = None if self._schema is None else self._schema.to_arrow(), run.budget.limit_bytes
        self._load = MapLoad(replace(settings, source=None), source.reader, folder.out, schema, source.schema, limit)
        wants_several = records.pending_bytes(sizes) > SMALL_INPUT if settings.workers is None else settings.workers > 1
        self._is_apart = settings.executor != "local" or wants_several
        if self._is_apart:
            try:
                self._load.pack()
            except ConfigError as error:  # one worker, this process, does it all
                if (settings.workers or 1) > 1 or settings.executor != "local":
                    raise
                run.observer.warn(f"One worker, in this process. {error}")
                self._is_apart = False
        left = len(sizes) - records.complete
        note = f"{records.complete} of {counted(len(sizes), 'unit')} reused"
        if self.changed:
            note += f"; changed: {'; '.join(self.changed[:_CHANGES_SHOWN])}"
        log.info("%s: %s", folder.out, note)
        return {
            "useful": max(1, min(settings.workers or run.pool.cores, left)) if self._is_apart else 1,
            "done": records.complete,
            "encoder": "python",
            "encoder_note": f"{self.function.name}; {note}",
            "left_out": source.left_out,
        }

    def stages(self, run: Session) -> Iterator[Stage]:
        if next(self.records.pending(), None) is None:
            return
        limit, most = run.budget.limit_bytes, run.workers

        def fit(first: dict[str, int]) -> tuple[int, int]:
            """How many workers fit, by what the first batch took, and what one may hold after a unit."""
            left = limit - usage().anonymous - first["inherited_bytes"]
            run.workers = max(1, min(most, int(left // (_MARGIN * first["peak_bytes"]))))
            share = (left + first["inherited_bytes"]) // run.workers
            return run.workers, share - (first["peak_bytes"] - first["idle_bytes"])

        threads = max(1, run.pool.cores // most)
        workers = Workers(most, threads, apart=self._is_apart and most == 1, fit=fit if self._is_apart else None)
        yield Stage("map", self._load, self.records, lambda value: RowUnit(**value), workers)

    # ---- finish ----

    def manifest(self, out: Path, counts: Counter[str], reasons: dict[str, dict[str, int]]) -> TableManifest:
        read, rejected, source = counts["read"], reasons["rejected"], self._source.schema
        is_without_rows = not read and (rejected or (source is None and self._schema is None))
        if is_without_rows or (read and read == rejected.get(FAILED)):
            cause = f"No rows came out of {self.function.name}" if read else "No rows in the input"
            listed = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
            cause += f" (rejected: {listed})" if listed else ""
            raise InputError(f"{cause}: there is no table to make.{first_reject(out)}")
        schema = self._schema or self._types_of_all()
        if schema is None:  # no rows: the columns of the source that would stay, if it names them
            columns, removed = source if source is not None else pa.schema([]), self.settings.remove_columns
            names = [name for name in self.settings.columns or columns.names if removed != ALL and name not in removed]
            schema = TableSchema.of(pa.schema([columns.field(name) for name in names if name in columns.names]))
        facts = {"units": counts["units"], "read": read, "rejected": rejected}
        return TableManifest(schema, self._identity.settings, self._identity.input, facts)

    def _types_of_all(self) -> TableSchema | None:
        """The columns of all units, put together; None: there are no rows. Raises InputError if two units disagree."""
        first: dict[str, int] = {}
        for number, record in enumerate(self.in_order()):
            for ipc in record.facts["types"]:
                first.setdefault(ipc, number)
        if not first:
            return None
        schemas = {ipc: TableSchema.read(ipc) for ipc in first}
        try:
            schema = unified(list(schemas.values()))
        except ValueError as error:
            name = str(error)
            kinds = {one.field(name).type: first[ipc] for ipc, one in schemas.items() if name in one.names}
            listed = ", ".join(f"{kind} in unit {number}" for kind, number in kinds.items())
            raise InputError(
                f'column "{name}": {listed}. Return the same types for every row, or give the type that holds all '
                "values: schema= of milldam.map. Finished units are safe."
            ) from None
        metadata = {name: value for one in schemas.values() for name, value in (one.metadata or {}).items()}
        return TableSchema.of(schema.with_metadata(metadata or None))


def _changes(folder: RunFolder, now: Identity) -> tuple[str, ...]:
    """What differs from the last run in this folder."""
    try:
        before = folder.identity()
    except StoreError:  # there was none, or it can't be read
        return ()
    old, new = (FunctionIdentity(**one.settings["function"]) for one in (before, now))
    lines = [f"function {new.name}: {part}" for part in old.differences(new)]
    was, same = ({**one.settings, "function": ""} for one in (before, now))
    lines += Identity(was, now.input).differences(Identity(same, now.input))
    lines += [f"input {line}" for line in folder.inputs.changes()]
    return tuple(lines or (["input"] if before.input != now.input else []))
