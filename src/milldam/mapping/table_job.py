"""Rows -> a step -> shards -> a table: the part that the jobs of `milldam.map` and `milldam qa` share.

A job brings its identity, its units, a stage whose step makes the shards of a unit, and the facts of its manifest. Here
are the records of the units, the lists that are gathered, the manifest, which is written last, and the summary. Files
that only an earlier table needs are removed after that.

Memory: this process plans and keeps count, and reads one record at a time, since there may be a million.
"""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

from milldam.errors import InputError
from milldam.input_files import without_secrets
from milldam.pipeline.rejects import gather_rejects
from milldam.run import engine
from milldam.run.budget import WorkPlan
from milldam.run.engine import Assigned, Session
from milldam.run.folder import FINISHED, PLAN, RUN_FOLDER, RunFolder
from milldam.run.records import RECORDS, Files, Record, Records, read_records, sweep
from milldam.run.summary import Summary, log
from milldam.run.units import mixed_keys
from milldam.sources.units import Slice, is_as_listed
from milldam.stores.kinds import TABLE, live_files
from milldam.stores.table.manifest import TableManifest, TableShard
from milldam.stores.table.writer import ENDING, ROWS
from milldam.stores.verify import has_every_file

TableSummary: TypeAlias = Summary[Mapping[str, Any]]
SPOOL = "rows"
"""In the run folder: rows that could be read only once, and row numbers of a dataset."""
SHARDS = f"{ROWS}-*{ENDING}"
REJECTS = "rejects-"
"""How the names of the files of rejected records begin that units leave in the run folder."""


@dataclass(frozen=True, slots=True)
class RowUnit:
    index: int
    key: str
    """Equal keys, equal rows; if rows are numbered, also equal numbers. Independent of its place in the plan."""
    size: int
    """Bytes of input, for progress."""
    place: dict[str, Any]
    """What its reader has to read; plain JSON."""
    first_row: int | None = None
    """Number of its first row among all; None if rows are not numbered."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def require_unchanged(slices: Iterable[Slice]) -> None:
    """After they are read: raise InputError unless their files are those that were listed."""
    for path, state in {slice.path: slice.state for slice in slices}.items():
        if not is_as_listed(path, state):
            raise changed_while_read(without_secrets(path))


def changed_while_read(path: str) -> InputError:
    again = "Run the same job again: finished units of files that did not change are reused."
    return InputError(f"{path}: changed while it was read. {again}")


def unit_record(
    assigned: Assigned,
    shards: list[TableShard],
    lists: Files,
    counts: Mapping[str, int],
    rejected: Mapping[str, int],
    **facts: Any,
) -> Record:
    """The record of a unit whose shards and lists are durable. `counts` are added up over all units."""
    return Record(
        assigned.key,
        outputs={shard.name: {"bytes": shard.bytes, "xxh3": shard.xxh3} for shard in shards},
        files={f"{RUN_FOLDER}/{name}": file for name, file in lists.items()},
        counts={"rows": sum(shard.rows for shard in shards)},
        facts={
            "counts": dict(counts),
            "rejected": dict(sorted(rejected.items())),
            "shards": [[shard.name, shard.rows] for shard in shards],
            **facts,
        },
    )


class TableJob(engine.Job[TableSummary]):
    """A job whose result is a table."""

    kind = TABLE
    records: Records
    changed: tuple[str, ...] = ()
    """What differs from the last run in the folder, where more than the input can."""

    @abstractmethod
    def manifest(self, out: Path, counts: Counter[str], reasons: dict[str, dict[str, int]]) -> TableManifest:
        """The manifest without its shards. `counts`: units, and the sums of what their records count; `reasons`: how
        much was rejected and dropped, by reason. Raises InputError when there is no table to make."""

    def open_records(self, run: Session, recipe: str) -> Records:
        """The records of the listed units. `recipe`: everything that rows depend on besides their unit."""
        keys = mixed_keys(run.folder.units.keys(), xxh3_64_intdigest(recipe.encode()))
        self.records = Records(run.folder, RECORDS, keys)
        return self.records

    def in_order(self) -> Iterator[Record]:
        """The records of all units, one at a time."""
        return (record for _, record in self.records.in_plan_order())

    def rejects(self, out: Path) -> Iterator[Path]:
        """The files of rejected records of all units."""
        names = (name for record in self.in_order() for name in record.files)
        return (out / name for name in names if Path(name).name.startswith(REJECTS))

    def _shards(self) -> Iterator[TableShard]:
        for record in self.in_order():
            yield from (TableShard(name, rows, **record.outputs[name]) for name, rows in record.facts["shards"])

    def finish(self, run: Session, plan: WorkPlan) -> TableSummary:
        folder, out = run.folder, run.folder.out
        damage = gather_rejects(out, self.rejects(out), lambda: (file["path"] for file in folder.inputs.planned()))
        if damage.files:
            run.observer.warn(str(damage))
        counts: Counter[str] = Counter(units=0, read=0)
        reasons: dict[str, Counter[str]] = {"rejected": Counter(), "dropped": Counter()}
        for record in self.in_order():
            counts.update(record.facts["counts"], units=1)
            for name, by_reason in reasons.items():
                by_reason.update(record.facts.get(name, {}))
        table = self.manifest(out, counts, {name: dict(sorted(one.items())) for name, one in reasons.items()})
        table = replace(table, shards=tuple(self._shards()))
        summary = replace(
            run.measured(_summary(table, out)),
            up_to_date=False,
            reused=self.records.reused,
            changed=self.changed or plan.changes,
            workers=run.workers,
        )
        summary.write(folder.folder)
        table.write(out)
        clean_up(folder)
        return summary

    def up_to_date(self, run: Session) -> TableSummary | None:
        folder = run.folder
        if not has_every_file(folder.out, TABLE):
            return None
        table = TableManifest.read(folder.out)
        if folder.state() != FINISHED:
            (folder.folder / PLAN).unlink()  # of another table, of which nothing came
        clean_up(folder)  # a kill may have come after the manifest
        summary = _summary(table, folder.out)
        log.info("%s is up to date: %s", folder.out, summary.made)
        return summary


def _summary(table: TableManifest, out: Path) -> TableSummary:
    """The summary of a table that is up to date."""
    name, rows, facts = (
        ("map", "rows", {"columns": table.schema.columns}) if table.qa is None else ("qa", "examples", {})
    )
    counts = {name: count for name, count in table.counts.items() if isinstance(count, int)}
    units = counts.pop("units")
    return Summary(
        name,
        str(out),
        facts,
        up_to_date=True,
        units=units,
        reused=units,
        counts={rows: table.rows, **counts},
        rejected=table.counts["rejected"],
        dropped=table.counts.get("dropped", {}),
        output_bytes=table.bytes,
    )


def clean_up(folder: RunFolder) -> None:
    """Remove what a finished table, or one that somebody has open, no longer needs."""
    folder.tidy()
    sweep(folder.out, [SHARDS], live_files(folder.out, TABLE))
    kept = (Path(name).name for record in read_records(folder.folder, RECORDS) for name in record.files)
    sweep(folder.folder, [f"{REJECTS}*.jsonl"], kept)
    folder.units.remove()  # it may hold addresses with secrets
    shutil.rmtree(folder.folder / SPOOL, ignore_errors=True)
