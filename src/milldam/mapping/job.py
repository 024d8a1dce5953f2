"""The job of `milldam.map`, on run/engine.py: rows of any source through any function, to a table.

prepare   the function's identity, the source: nothing is read that need not be
units     rows of sources that can be read only once go to the run folder first
map       units to shards; the first batch of the first worker tells how many workers there are
finish    types of all units put together for the manifest    mapping/table_job.py

A unit's key is everything that its rows depend on: function, settings, what it reads. So other settings are no reason
to refuse a folder: what has a record under its key is what this run would make.

Memory: this process plans and keeps count; a worker holds one batch, in and out of the function.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa

from milldam.errors import ConfigError, InputError, MilldamError, Setting, StoreError
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import ONCE, cached_out
from milldam.mapping.function import ALL
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.rows import source_of
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
from milldam.sources.compression import STDIN
from milldam.sources.units import InputFile
from milldam.stores.kinds import TABLE
from milldam.stores.table.manifest import TableManifest, TableSchema
from milldam.stores.table.reader import cast_column

_VERSION = 3
"""Of the way from rows to rows: another one makes other keys."""
_CHANGES_SHOWN = 6
_MARGIN = 1.15
"""Batches differ in size, and a shard waits to be written."""


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> TableSummary:
    """Make the table, or what is left to make of it. `held_bytes`: memory that the calling program holds already."""
    job = MapJob(settings)
    if settings.out is not None:
        return engine.run(job, _options(settings, Path(settings.out), held_bytes), observer)
    with tempfile.TemporaryDirectory() as spool:
        job.look(Path(spool))
        key = job.cache_key
    with cached_out(key) as out:
        return engine.run(job, _options(settings, out, held_bytes), observer)


def _options(settings: MapSettings, out: Path, held_bytes: int = 0) -> engine.Options:
    return engine.Options.of(settings, out, held_bytes=held_bytes, adapts=True)


def array_of(settings: MapSettings) -> ArrayWork[TableSummary]:
    """The same for tasks of a job array."""
    if settings.out is None:
        raise ConfigError(Setting("out"), ": name a folder for the table: other machines don't see this one's cache.")
    if settings.source == STDIN or (isinstance(settings.source, list | tuple) and STDIN in settings.source):
        raise ConfigError(f"{STDIN}: other machines can't read it. Save it to a file.")
    function = identify(settings.function, settings.fn_kwargs, key=settings.key)
    if function.unhashable:
        raise ConfigError(
            f"What {function.name} depends on can't be hashed: {'; '.join(function.unhashable)}. So array tasks could "
            "not tell whether they do the same. Name it by ",
            Setting("key"),
            ".",
        )
    return ArrayWork(MapJob(settings), _options(settings, Path(settings.out)))


class MapJob(TableJob):
    """Rows to a table."""

    stage_names, outputs = ("map",), None

    def __init__(self, settings: MapSettings) -> None:
        self.settings, self.workers = settings, settings.workers
        self.batch_bytes = max(0, 4 * settings.most_batch_bytes - WORK_BYTES)
        schema = given_schema(settings.schema)
        self._schema = None if schema is None else TableSchema.of(schema)
        self.function: FunctionIdentity | None = None
        self._once = uuid.uuid4().hex
        """In the keys if the function has no hash: nothing is reused."""

    # ---- prepare ----

    def look(self, spool: Path) -> FunctionIdentity:
        """Identify function and source. `spool`: a folder for what can be read only once."""
        if self.function is None:
            self.function = identify(self.settings.function, self.settings.fn_kwargs, key=self.settings.key)
            self._source = source_of(self.settings, spool)
        else:  # before there was a folder
            self._source = copy.copy(self._source)
            self._source.spool_folder = spool
        return self.function

    @property
    def cache_key(self) -> str:
        """The table's name in the cache: its function and settings, then the names of its files, or the content of what
        has no name. What can't be identified is never found again."""
        assert self.function is not None
        if self.function.unhashable or self._source.unidentified is not None:
            return f"{ONCE}{uuid.uuid4().hex[:16]}"
        how = [self._recipe, self.settings.cuts, None if self._schema is None else self._schema.ipc]
        return "-".join(key_of(part) for part in (how, self._source.name))

    @property
    def _recipe(self) -> str:
        """A hash of all that rows depend on besides what they are read from."""
        assert self.function is not None
        schema, of_source = None if self._schema is None else self._schema.ipc, self._source_schema()
        features = None if of_source is None else of_source.to_arrow().metadata
        known = "" if not self.function.unhashable else self._once
        return key_of(_VERSION, self.function.hash, self.settings.parameters, schema, repr(features), known)

    def _source_schema(self) -> TableSchema | None:
        with contextlib.suppress(MilldamError):  # the reader reports a first file that is damaged
            schema = self._source.schema
            return None if schema is None else TableSchema.of(schema)
        return None

    def prepare(self, run: Session) -> Identity:
        folder, spool = run.folder, run.folder.folder / SPOOL
        if (folder.out / TABLE.manifest).exists() and TableManifest.read(folder.out).qa is not None:
            raise ConfigError(f"{folder.out}: holds windows that `milldam qa` made. Choose another place.")
        function = self.look(spool)
        if function.unhashable:
            run.observer.warn(
                f"What {function.name} depends on can't be hashed: {'; '.join(function.unhashable)}. Nothing is reused "
                'from an earlier run. Name it yourself by the setting "key", and change the name whenever it changes.'
            )
        if self._source.unidentified is not None:
            self._source.spool()  # its content identifies it
        columns = None if self._schema is None else asdict(self._schema)
        made_from = {"function": asdict(function), "rows_version": _VERSION, "schema": columns}
        made_from |= {**self.settings.parameters, **self.settings.cuts}
        files = self._source.files() if self._source.rows is None else ()
        folder.inputs.write((0, file) for file in _outside(files, folder.out))
        self._identity = Identity(made_from, self._source.identity)
        self.changed = _changes(folder, self._identity)
        return self._identity

    def units(self, run: Session) -> Iterable[RowUnit]:
        if self._source.rows is not None and self._source.unidentified is None:
            run.enter("read")
            self._source.spool()
        return self._source.units()

    def up_to_date(self, run: Session) -> TableSummary | None:
        assert self.function is not None
        return None if self.function.unhashable else super().up_to_date(run)

    # ---- map ----

    def plan_facts(self, run: Session) -> dict[str, Any]:
        folder, settings = run.folder, self.settings
        records, sizes = self.open_records(run, self._recipe), folder.units.sizes()
        schema, of_source = (None if one is None else one.to_arrow() for one in (self._schema, self._source_schema()))
        self._load = MapLoad(
            replace(settings, source=None), self._source.reader, folder.out, schema, of_source, run.budget.limit_bytes
        )
        wants_several = records.pending_bytes(sizes) > SMALL_INPUT if settings.workers is None else settings.workers > 1
        self._is_apart = (settings.executor != "local" or wants_several) and self._can_travel(run)
        left = len(sizes) - records.complete
        useful = max(1, min(settings.workers or run.pool.cores, left)) if self._is_apart else 1
        note = _reused(records.complete, len(sizes), self.changed)
        log.info("%s: %s", folder.out, note)
        return {
            "useful": useful,
            "done": records.complete,
            "encoder": "python",
            "encoder_note": f"{self.function and self.function.name}; {note}",
            "left_out": self._source.left_out,
        }

    def _can_travel(self, run: Session) -> bool:
        """Whether the function can be sent to other processes; otherwise one worker, this process, does it all."""
        try:
            self._load.pack()
        except ConfigError as error:
            if (self.settings.workers or 1) > 1 or self.settings.executor != "local":
                raise
            run.observer.warn(f"One worker, in this process. {error}")
            return False
        return True

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
        with_rows: dict[str, int] = {}
        without_rows: dict[str, int] = {}
        for number, record in enumerate(self.in_order()):
            for ipc in record.facts["types"]:
                (with_rows if record.facts["shards"] else without_rows).setdefault(ipc, number)
        schema, read, rejected = (
            self._schema or self._types_of_all(with_rows or without_rows),
            counts["read"],
            reasons["rejected"],
        )
        if schema is None and not (read or rejected):  # the columns of a source without rows
            schema = self._types_without_rows()
        if schema is None or (read and read == rejected.get(FAILED)):
            assert self.function is not None
            cause = f"No rows came out of {self.function.name}" if read else "No rows in the input"
            listed = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
            cause += f" (rejected: {listed})" if listed else ""
            raise InputError(f"{cause}: there is no table to make.{first_reject(out)}")
        facts = {"units": counts["units"], "read": read, "rejected": rejected}
        return TableManifest(schema, self._identity.settings, self._identity.input, facts)

    def _types_of_all(self, first: dict[str, int]) -> TableSchema | None:
        """The columns of all units, put together; None: there are none. `first`: types -> the first unit that has them.
        Raises InputError if two units disagree."""
        if not first:
            return None
        schemas = {ipc: TableSchema.read(ipc) for ipc in first}
        try:
            schema = unified(list(schemas.values()))
        except ValueError as error:
            name = str(error)
            kinds = [(first[ipc], one.field(name).type) for ipc, one in schemas.items() if name in one.names]
            other = next((one for one in kinds if one[1] != kinds[0][1]), kinds[0])
            raise _disagree(name, *kinds[0], *other) from None
        # Every value of a shard with narrower types must have a place in the wider one: 2**60 is no float.
        for number, record in enumerate(self.in_order()):
            for (name, _), ipc in zip(record.facts["shards"], record.facts["types"], strict=False):
                narrow = [one for one in schemas[ipc] if one.type not in (pa.null(), schema.field(one.name).type)]
                if narrow:
                    self._require_castable(number, name, narrow, schema)
        metadata: dict[bytes, bytes] = {}
        for one in schemas.values():
            metadata |= one.metadata or {}
        return TableSchema.of(schema.with_metadata(metadata or None))

    def _require_castable(self, number: int, shard: str, narrow: list[pa.Field], schema: pa.Schema) -> None:
        with pa.memory_map(str(self._load.out / shard)) as file:
            for batch, field in product(pa.ipc.open_stream(file), narrow):
                wide = schema.field(field.name).type
                try:
                    cast_column(batch.column(field.name), wide)
                except pa.ArrowException as error:
                    raise _disagree(field.name, number, f"{field.type} ({error})", "others", wide) from None

    def _types_without_rows(self) -> TableSchema | None:
        """The columns of the source, without those to be removed; None: it names none."""
        schema, removed = self._source.schema, self.settings.remove_columns
        if schema is None:
            return None
        names = [name for name in self.settings.columns or schema.names if removed != ALL and name not in removed]
        return TableSchema.of(pa.schema([schema.field(name) for name in names], metadata=schema.metadata))


def _disagree(name: str, unit: int, kind: object, other: int | str, other_kind: object) -> InputError:
    return InputError(
        f'column "{name}": {kind} in unit {unit}, {other_kind} in unit {other}. Return the same '
        "types for every row, or give the type that holds all values: schema= of milldam.map. Finished units are safe."
    )


def _outside(files: Iterable[InputFile], out: Path) -> Iterator[InputFile]:
    """The files, by names without secrets. Raises ConfigError if one lies in the folder of the table."""
    before, inside = "", False
    for file in files:
        path = file.path.removeprefix("file://")
        if is_address(path):
            yield replace(file, path=without_secrets(path))
            continue
        # By plain strings: pathlib takes longer, and there may be millions of files, most of them in one folder.
        real = os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path)  # noqa: PTH114
        folder = os.path.dirname(real)  # noqa: PTH120
        if folder != before:
            before, inside = folder, Path(folder).resolve().is_relative_to(out.resolve())
        if inside:
            raise ConfigError(
                f"{path} is input and is inside the output folder {out}: its rows would be lost. "
                "Choose another folder for the table."
            )
        yield file


# ---- messages ----


def _changes(folder: RunFolder, made_from: Identity) -> tuple[str, ...]:
    """What differs from the last run in this folder."""
    try:
        before = folder.identity()
    except StoreError:  # there was none, or it can't be read
        return ()
    was, now = before.settings, made_from.settings
    old, new = (FunctionIdentity(**settings["function"]) for settings in (was, now))
    lines = [f"function {new.name}: {part}" for part in old.differences(new)]
    for name in dict.fromkeys([*was, *now]):
        if name != "function" and was.get(name) != now.get(name):
            new_value, old_value = (json.dumps(one.get(name), ensure_ascii=False)[:60] for one in (now, was))
            lines.append(f"{name}: {new_value} (was {old_value})")
    lines += [f"input {line}" for line in folder.inputs.changes()]
    return tuple(lines or (["input"] if before.input != made_from.input else []))


def _reused(reused: int, units: int, changed: tuple[str, ...] = ()) -> str:
    """How many units were reused, and why no more were."""
    more = len(changed) - _CHANGES_SHOWN
    why = [*changed[:_CHANGES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return f"{reused} of {counted(units, 'unit')} reused" + (f"; changed: {'; '.join(why)}" if changed else "")
