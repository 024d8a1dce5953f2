"""The job of `milldam.map`, on run/engine.py: rows of any source through any function, to a table.

prepare   the function's identity, the source: nothing is read that need not be
units     rows of sources that can be read only once go to the run folder first
map       units to shards; the first batch of the first worker tells how many workers there are
finish    types of all units put together, rejects gathered, the manifest written last; then what only the old table
          needs is removed

A unit's key is everything that its rows depend on: function, settings, what it reads. So other settings are no reason
to refuse a folder: what has a record under its key is what this run would make.

Memory: this process plans and keeps count; a worker holds one batch, in and out of the function.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import pyarrow as pa
from xxhash import xxh3_64_intdigest

from milldam.errors import ConfigError, InputError, MilldamError, Setting, StoreError
from milldam.files import record_of
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import ONCE, cached_out
from milldam.mapping.function import ALL, CallRules
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.rows import RowUnit, Source, indices_name, source_of
from milldam.mapping.schema import given_schema, unified
from milldam.mapping.settings import MapSettings
from milldam.mapping.working import ALONE, FAILED, MapLoad, MapRules, rejects_name
from milldam.markup import counted
from milldam.memory import usage
from milldam.pipeline.rejects import first_reject, gather_rejects
from milldam.run import engine
from milldam.run.engine import Stage
from milldam.run.folder import FINISHED, PLAN, RunFolder
from milldam.run.pools import WORK_BYTES, Workers, WorkPlan, fit_workers
from milldam.run.records import RECORDS, Record, Records, sweep
from milldam.run.session import Session
from milldam.run.summary import Observer, Summary, log
from milldam.run.units import Identity, key_of
from milldam.sources.compression import STDIN
from milldam.sources.units import InputFile
from milldam.stores.generations import live_files
from milldam.stores.kinds import TABLE
from milldam.stores.table.manifest import NAME, MadeUnit, TableManifest, TableSchema, TableShard
from milldam.stores.table.reader import as_schema
from milldam.stores.table.writer import ENDING, ROWS
from milldam.stores.verify import has_every_file

SPOOL = "rows"
"""In the run folder: what could be read only once, and row numbers of a dataset."""
_VERSION = 2
"""Of the way from rows to rows: another one makes other keys."""
_CHANGES_SHOWN = 6
_MARGIN = 1.15
"""Batches differ, and a shard waits to be written."""


class MapFacts(TypedDict):
    columns: dict[str, str]
    """Name -> type."""


MapSummary: TypeAlias = Summary[MapFacts]


def run_map(settings: MapSettings, observer: Observer | None = None, *, held_bytes: int = 0) -> MapSummary:
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


def array_of(settings: MapSettings) -> engine.ArrayWork[MapSummary]:
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
    return engine.array_of(MapJob(settings), _options(settings, Path(settings.out)))


class MapJob(engine.Job[MapSummary]):
    """Rows to a table."""

    kind, stage_names, outputs = TABLE, ("map",), None

    def __init__(self, settings: MapSettings) -> None:
        self.settings, self.workers = settings, settings.workers
        self.batch_bytes = max(0, 4 * settings.most_batch_bytes - WORK_BYTES)
        schema = given_schema(settings.schema)
        self._schema = None if schema is None else TableSchema.of(schema)
        self._function: FunctionIdentity | None = None
        self._once = uuid.uuid4().hex
        """In the keys where the function has no hash: nothing is reused."""
        self._count = 0
        """Workers that there were."""

    # ---- prepare ----

    def look(self, spool: Path) -> None:
        """Identify function and source. `spool`: a folder for what can be read only once, and what is worth keeping."""
        settings = self.settings
        if self._function is not None:  # before there was a folder
            self._source: Source = copy.copy(self._source)
            self._source.spool_folder = spool
            return
        self._function = identify(settings.function, settings.fn_kwargs, key=settings.key)
        self._source = source_of(settings, spool)

    @property
    def function(self) -> FunctionIdentity:
        assert self._function is not None
        return self._function

    @property
    def cache_key(self) -> str:
        """The table's name in the cache: its function and settings, then its input. What can't be identified is
        never found again."""
        if self.function.unhashable or self._source.unidentified is not None:
            return f"{ONCE}{uuid.uuid4().hex[:16]}"
        how = [self._recipe, self.settings.cuts, None if self._schema is None else self._schema.ipc]
        return "-".join(key_of(part) for part in (how, self._source.identity))

    @property
    def _recipe(self) -> str:
        """A hash of all that rows depend on besides what they are read from."""
        schema = None if self._schema is None else self._schema.ipc
        features = None if self._of_source is None else self._of_source.to_arrow().metadata
        known = "" if not self.function.unhashable else self._once
        return key_of(_VERSION, self.function.hash, self.settings.parameters, schema, repr(features), known)

    @property
    def _of_source(self) -> TableSchema | None:
        with contextlib.suppress(MilldamError):  # a first file that is damaged is told by who reads it
            schema = self._source.schema
            return None if schema is None else TableSchema.of(schema)
        return None

    def prepare(self, run: Session) -> Identity:
        folder, spool = run.folder, run.folder.folder / SPOOL
        self.look(spool)
        nothing = "Nothing is reused from an earlier run."
        if self.function.unhashable:
            run.observer.warn(
                f"What {self.function.name} depends on can't be hashed: {'; '.join(self.function.unhashable)}. "
                f'{nothing} Name it yourself by the setting "key", and change the name whenever it changes.'
            )
        if self._source.unidentified is not None:
            self._source.spool()  # by its content it is known
        columns = None if self._schema is None else asdict(self._schema)
        function = {"rows_version": _VERSION, **self.function.as_json()}
        made_from = {"function": function, **self.settings.parameters, **self.settings.cuts, "schema": columns}
        folder.inputs.write((0, file) for file in _outside(self._source.files(), folder.out, spool))
        self._identity = Identity(made_from, self._source.identity)
        self._changed = _changes(folder, self._identity)
        return self._identity

    def units(self, run: Session) -> Iterable[RowUnit]:
        if self._source.needs_spooling and self._source.unidentified is None:
            run.enter("read")
            self._source.spool()
        return self._source.units()

    def up_to_date(self, run: Session) -> MapSummary | None:
        folder = run.folder
        if self.function.unhashable or not has_every_file(folder.out, self.kind):
            return None
        table = TableManifest.read(folder.out)
        if folder.state() != FINISHED:
            (folder.folder / PLAN).unlink()  # of another table, of which nothing came
        _clear_up(folder, table)
        log.info("%s is up to date; %s", folder.out, _reused(len(table.units), len(table.units)))
        return _summary(table, folder.out)

    # ---- map ----

    def plan_facts(self, run: Session) -> dict[str, Any]:
        folder, settings = run.folder, self.settings
        keys, sizes = folder.units.keys(), folder.units.sizes()
        mixed = keys.mixed(np.full(len(keys), xxh3_64_intdigest(self._recipe.encode()), np.uint64))
        self._records = records = Records(folder.journal, RECORDS, folder.out, mixed)
        if not settings.overwrite and (folder.out / NAME).exists():
            # Units of the finished table whose records a run with another function has dropped meanwhile.
            for unit in TableManifest.read(folder.out).units:
                if records.keys.number_of(unit.key) is not None and records.holds(
                    record := _recorded(unit, folder.out)
                ):
                    records.add(record)
        self._pending = tuple(records.pending())
        self._reused = records.complete
        self._load = self._made_load(run)
        wanted = settings.workers or run.pool.cores
        self._is_apart = settings.wants_processes(records.pending_bytes(sizes)) and self._can_travel(run)
        useful = max(1, min(wanted, len(self._pending))) if self._is_apart else 1
        held = usage().anonymous
        self._count = fit_workers(run.budget, held, 0, useful, own_bytes=self.batch_bytes)
        rules = replace(self._load.rules, share_bytes=(run.budget.limit_bytes - held) // self._count)
        self._load = replace(self._load, rules=rules)
        note = _reused(records.complete, len(sizes), self._changed)
        log.info("%s: %s", folder.out, note)
        return {
            "workers": self._count,
            "useful": useful,
            "done": records.complete,
            "encoder": "python",
            "encoder_note": f"{self.function.name}; {note}",
            "left_out": self._source.left_out,
        }

    def _made_load(self, run: Session) -> MapLoad:
        settings = self.settings
        same = {one.name: getattr(settings, one.name) for one in fields(CallRules)}
        calls = CallRules(**same | {"batch_bytes": settings.most_batch_bytes})
        rules = MapRules(run.folder.out, calls, self._schema, self._of_source, run.budget.limit_bytes)
        return MapLoad(rules, settings.function, settings.fn_kwargs, self._source.reader, settings.function_spec)

    def _can_travel(self, run: Session) -> bool:
        """Whether the function reaches other processes; without that one worker, this process, does it all."""
        try:
            self._load.pack()
        except ConfigError as error:
            if (self.settings.workers or 1) > 1 or self.settings.executor != "local":
                raise
            run.observer.warn(f"One worker, in this process. {error}")
            return False
        return True

    def stages(self, run: Session) -> Iterator[Stage]:
        if not self._pending:
            return
        limit, most = run.budget.limit_bytes, self._count

        def fit(first: dict[str, int]) -> tuple[int, int]:
            """How many workers there may be by what the first batch took, and what one may hold after a unit."""
            left = limit - usage().anonymous - first["inherited_bytes"]
            self._count = max(1, min(most, int(left // (_MARGIN * first["peak_bytes"]))))
            share = (left + first["inherited_bytes"]) // self._count
            return self._count, share - (first["peak_bytes"] - first["idle_bytes"])

        threads = max(1, run.pool.cores // most)
        workers = Workers(most, threads, apart=self._is_apart and most == 1, fit=fit if self._is_apart else None)
        yield Stage("map", self._load, self._records, lambda value: RowUnit(**value), workers)

    # ---- finish ----

    def finish(self, run: Session, plan: WorkPlan) -> MapSummary:
        folder, made_from = run.folder, self._identity
        records = [record for _, record in self._records.in_plan_order()]
        rejects = [folder.out / name for record in records for name in record.files]
        damage = gather_rejects(folder.out, rejects, lambda: (file["path"] for file in folder.inputs.planned()))
        if damage.files:
            run.observer.warn(str(damage))
        units = tuple(map(_made, records))
        schema = self._schema or _types_of_all(records, folder.out) or self._types_without_rows(units)
        if schema is None:
            raise InputError(self._nothing(units))
        table = TableManifest(schema=schema, settings=made_from.settings, input=made_from.input, units=units)
        read, rejected = table.counts["read"], table.counts["rejected"]
        if rejected and read == rejected.get(FAILED, 0):
            raise InputError(self._nothing(units) + first_reject(folder.out))
        summary = replace(
            run.measured(_summary(table, folder.out)),
            up_to_date=False,
            reused=self._reused,
            changed=self._changed,
            workers=max(1, self._count),
        )
        summary.write(folder.folder)
        table.write(folder.out)
        _clear_up(folder, table)
        return summary

    def _types_without_rows(self, units: tuple[MadeUnit, ...]) -> TableSchema | None:
        """Of a source without rows: the columns that it has, less those that are to be removed; None: it names none."""
        found = self._source.schema
        if found is None or any(unit.read or unit.rejected for unit in units):
            return None
        wanted, removed = self.settings.columns, self.settings.remove_columns
        names = [name for name in wanted or found.names if removed != ALL and name not in removed]
        return TableSchema.of(pa.schema([found.field(name) for name in names], metadata=found.metadata))

    def _nothing(self, units: tuple[MadeUnit, ...]) -> str:
        """Why there is no table to make."""
        rejected: dict[str, int] = {}
        for unit in units:
            rejected |= {reason: rejected.get(reason, 0) + count for reason, count in unit.rejected.items()}
        is_read = any(unit.read for unit in units)
        what = f"No rows came out of {self.function.name}" if is_read else "No rows in the input"
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in rejected.items())
        return f"{what}{f' (rejected: {reasons})' if reasons else ''}: there is no table to make."


def _made(record: Record) -> MadeUnit:
    """A unit, for the manifest."""
    shards = [TableShard(name, rows, **record.outputs[name]) for name, rows in record.facts["shards"]]
    return MadeUnit(record.key, record.facts["read"], tuple(shards), record.facts["rejected"])


def _recorded(unit: MadeUnit, out: Path) -> Record:
    """A unit of a finished table, as its worker recorded it."""
    shards = [(shard, out / shard.name) for shard in unit.shards]
    types = [TableSchema.of(pa.ipc.open_stream(pa.memory_map(str(path))).schema) for _, path in shards if path.exists()]
    rejects = rejects_name(unit.key)
    files = {rejects: record_of(out / rejects) if (out / rejects).exists() else {"bytes": -1}} if unit.rejected else {}
    facts = {
        "read": unit.read,
        "rejected": unit.rejected,
        "types": [one.ipc for one in types],
        "optional": list(dict.fromkeys(name for one in types for name in one.columns)),
        "shards": [[shard.name, shard.rows] for shard in unit.shards],
    }
    outputs = {shard.name: {"bytes": shard.bytes, "xxh3": shard.xxh3} for shard in unit.shards}
    return Record(unit.key, outputs=outputs, files=files, counts={"rows": unit.rows}, facts=facts)


def _types_of_all(records: list[Record], out: Path) -> TableSchema | None:
    """The columns of all units, put together; None: there are none. Raises InputError where two units don't agree."""
    with_rows = any(record.facts["shards"] for record in records)
    first: dict[str, int] = {}
    optional: set[str] = set()
    for number, record in enumerate(records):
        if record.facts["shards"] or not with_rows:
            optional.update(record.facts["optional"])
            for ipc in record.facts["types"]:
                first.setdefault(ipc, number)
    schemas = {number: TableSchema.read(ipc) for ipc, number in reversed(first.items())}
    schemas = dict(sorted(schemas.items()))
    if not first:
        return None
    everything = [TableSchema.read(ipc) for ipc in first]
    for name in dict.fromkeys(name for schema in everything for name in schema.names):
        lacking = next((number for number, schema in schemas.items() if name not in schema.names), None)
        if lacking is not None and name not in optional:
            having = next(number for number, schema in schemas.items() if name in schema.names)
            raise _disagree(name, having, "", lacking, "missing")
    try:
        schema = unified(everything)
    except ValueError as error:
        name = str(error)
        kinds = [(number, schema.field(name).type) for number, schema in schemas.items() if name in schema.names]
        other = next((one for one in kinds if one[1] != kinds[0][1]), kinds[0])
        raise _disagree(name, *kinds[0], *other) from None
    _require_castable(records, schema, out)
    metadata: dict[bytes, bytes] = {}
    for one in everything:
        metadata |= one.metadata or {}
    return TableSchema.of(schema.with_metadata(metadata or None))


def _require_castable(records: list[Record], schema: pa.Schema, out: Path) -> None:
    """Every value of a shard with narrower types must have a place in the wider one: 2**60 is no float."""
    for number, record in enumerate(records):
        for (name, _), ipc in zip(record.facts["shards"], record.facts["types"], strict=False):
            types = TableSchema.read(ipc)
            differing = [
                one for one in types if not (pa.types.is_null(one.type) or one.type == schema.field(one.name).type)
            ]
            if not differing:
                continue
            with pa.memory_map(str(out / name)) as file:
                for batch in pa.ipc.open_stream(file):
                    for field in differing:
                        column = pa.table({field.name: batch.column(field.name)})
                        try:
                            as_schema(column, pa.schema([schema.field(field.name)]))
                        except pa.ArrowException as error:
                            kind = schema.field(field.name).type
                            raise _disagree(field.name, number, f"{field.type} ({error})", "others", kind) from None


def _disagree(name: str, unit: int, kind: object, other: int | str, other_kind: object) -> InputError:
    return InputError(
        f'column "{name}": {kind or "there"} in unit {unit}, {other_kind} in unit {other}. Return the same columns and '
        "types for every row, or give the type that holds all values: schema= of milldam.map. Finished units are safe."
    )


# ---- what is left over ----


def _outside(files: Iterator[InputFile], out: Path, spool: Path) -> Iterator[InputFile]:
    """The files, by names that tell no secrets. Raises ConfigError when one lies where the table is going to be.

    `spool`: what of it is ours; standard input is copied there.
    """
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
            before, place = folder, Path(folder).resolve()
            inside = place.is_relative_to(out.resolve()) and not place.is_relative_to(spool.resolve())
        if inside and path != STDIN:
            raise ConfigError(
                f"{path} is input and is inside the output folder {out}: its rows would be lost. "
                "Choose another folder for the table."
            )
        yield file


def _clear_up(folder: RunFolder, table: TableManifest) -> None:
    """Remove what a finished table, or one that somebody has open, no longer needs. What a run with another function
    needs again stays: row numbers of the dataset."""
    folder.tidy()
    sweep(folder.out, [f"{ROWS}-*{ENDING}"], live_files(folder.out, TABLE))
    rejects = (Path(rejects_name(unit.key)).name for unit in table.units if unit.rejected)
    sweep(folder.folder, ["rejects-*.jsonl"], rejects)
    (folder.folder / ALONE).unlink(missing_ok=True)
    folder.units.remove()  # it may hold addresses with secrets
    spool = folder.folder / SPOOL
    for path in spool.glob("*"):
        if path.name != indices_name(table.input["fingerprint"]):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        spool.rmdir()


# ---- what to say ----


def _changes(folder: RunFolder, made_from: Identity) -> tuple[str, ...]:
    """What is different from what was last begun here."""
    try:
        before = folder.identity()
    except StoreError:  # nothing was begun, or nobody can tell what
        return ()
    was, now = before.settings, made_from.settings
    old, new = (FunctionIdentity.from_json(settings["function"]) for settings in (was, now))
    lines = [f"function {new.name}: {what}" for what in old.differences(new)]
    lines += [
        f"{name}: {_shown(now.get(name))} (was {_shown(was.get(name))})"
        for name in dict.fromkeys([*was, *now])
        if name != "function" and was.get(name) != now.get(name)
    ]
    lines += [f"input {line}" for line in folder.inputs.changes()]
    return tuple(lines or (["input"] if before.input != made_from.input else []))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _reused(reused: int, units: int, changed: tuple[str, ...] = ()) -> str:
    """What was reused, and why no more was."""
    more = len(changed) - _CHANGES_SHOWN
    why = [*changed[:_CHANGES_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    return f"{reused} of {counted(units, 'unit')} reused" + (f"; changed: {'; '.join(why)}" if changed else "")


def _summary(table: TableManifest, out: Path) -> MapSummary:
    """Of a table that is up to date."""
    counts, units = table.counts, len(table.units)
    return Summary(
        "map",
        str(out),
        {"columns": table.schema.columns},
        up_to_date=True,
        units=units,
        reused=units,
        counts={"rows": table.rows, "read": counts["read"]},
        rejected=counts["rejected"],
        output_bytes=table.bytes,
    )
