"""The run folder of a table, and what is in it that can be reused.

    plan.json       function, settings and input of the run that was begun last
    mapped.jsonl    a line per unit that was made and is not in a manifest yet, by key; its shard is durable
    units.jsonl     the units, while they are worked on: with the addresses that they are read from
    schema.json     the columns, and what they were inferred from
    rejects-*.jsonl the records of a unit that were set aside

A shard is named by the key of its unit: everything its rows depend on. So whatever was begun, changed or killed here
before, what has a record and its file is exactly what this run would make.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from milldam.files import NewFile
from milldam.mapping.identity import FunctionIdentity
from milldam.mapping.memory_gate import remove_gates
from milldam.mapping.plan import HASHES, indices_name
from milldam.mapping.shards import PREFIX, SUFFIX, shard_name
from milldam.mapping.unit_list import UnitList
from milldam.mapping.units import RowUnit
from milldam.mapping.working import rejects_path
from milldam.run.old_folder import FINISHED, PLAN, Run
from milldam.run.old_folder import TABLE_RECORDS as RECORDS
from milldam.sealed import read_sealed, seal_line, unseal_line, write_sealed
from milldam.stores.table.manifest import NAME as MANIFEST
from milldam.stores.table.manifest import MadeUnit, TableManifest

SCHEMA, SPOOL, UNITS = "schema.json", "rows", "units.jsonl"


class MapRun(Run):
    """The run folder of a table: the same, with another manifest, and records by key."""

    manifest = MANIFEST

    def __enter__(self) -> MapRun:
        super().__enter__()
        return self

    def table(self) -> TableManifest | None:
        """The manifest, if the table is finished."""
        return TableManifest.read(self.out) if self.state() == FINISHED else None

    def described(self) -> dict[str, Any] | None:
        """Function, settings and input of what was last begun here."""
        plan = read_sealed(self.folder / PLAN)
        if plan is not None:
            return plan
        table = self.table()
        return None if table is None else {name: getattr(table, name) for name in ("function", "settings", "input")}

    def made(self) -> dict[str, MadeUnit]:
        """Every unit with a record, in the manifest or beside it, whose shard is there: by key."""
        table = self.table()
        found = {unit.key: unit for unit in (table.units if table is not None else ())}
        for line in self.appended(RECORDS):
            unit = MadeUnit.from_json(line)
            found[unit.key] = unit
        return {key: unit for key, unit in found.items() if self._has_files(unit)}

    def _has_files(self, unit: MadeUnit) -> bool:
        """Whether its shard is there, and what it set aside is as it was written."""
        count = sum(unit.rejected.values())
        return self.has_shard(unit) and (not count or _are_rejects(rejects_path(self.folder, unit.key), count))

    def has_shard(self, unit: MadeUnit) -> bool:
        """Whether its shard is there, of the size that was recorded."""
        if unit.shard is None:
            return True
        try:
            return (self.out / unit.shard.name).stat().st_size == unit.shard.bytes
        except OSError:
            return False

    def safe(self) -> dict[str, int]:
        made = self.made().values()
        return {"units_done": len(made), "rows": sum(unit.rows for unit in made)}

    def has_results(self) -> bool:
        return bool(self.made())

    def planned_units(self) -> int | None:
        table = self.table()
        if table is not None:
            return len(table.units)
        return super().planned_units()

    def list_units(self, units: Iterable[RowUnit]) -> UnitList:
        """Write the plan's units down."""
        return UnitList(self._units, units)

    # ---- from one state to the next: each step leaves one from which the same call goes on ----

    def begin(self, description: dict[str, Any], made: Iterable[MadeUnit]) -> None:
        """From here on there is no table, but what can be reused of it: the call that made it makes it at once."""
        self.tidy()
        remove_gates(self.folder)
        self.record_only(made)
        (self.out / MANIFEST).unlink(missing_ok=True)
        listed = self.folder / "inputs.new.jsonl"
        if listed.exists():
            listed.replace(self.folder / "inputs.jsonl")
        write_sealed(self.folder / PLAN, {**description, "started": time.time()})

    def record_only(self, made: Iterable[MadeUnit]) -> None:
        """Replace the records by those of some units."""
        self.close_appended()
        with NewFile(self.folder / RECORDS) as records:
            for unit in made:
                records.write(seal_line(unit.as_json()))
            records.commit()

    def forget(self) -> None:
        """Remove everything that was made: the manifest first, then the records, then what they speak of."""
        (self.out / MANIFEST).unlink(missing_ok=True)
        self.close_appended()
        (self.folder / RECORDS).unlink(missing_ok=True)
        self.remove_all_but(())

    def add(self, made: MadeUnit) -> None:  # type: ignore[override]
        """Record a unit whose shard is durable: from here on it is never made again."""
        self.append(RECORDS, made.as_json())

    def clear_up(self, table: TableManifest) -> None:
        """Remove what a finished table no longer needs."""
        self.tidy()
        self.remove_all_but(table.units)
        remove_gates(self.folder)
        self.close_appended()
        self._units.remove()
        (self.folder / RECORDS).unlink(missing_ok=True)
        self._clear_spool(table)

    def _clear_spool(self, table: TableManifest) -> None:
        """What a run with another function needs again stays: hashes, and row numbers of the data set."""
        folder, kept = self.folder / SPOOL, {HASHES, indices_name(table.input["fingerprint"])}
        for path in folder.glob("*"):
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def remove_all_but(self, units: Iterable[MadeUnit]) -> None:
        kept = {name for unit in units for name in (shard_name(unit.key), rejects_path(self.folder, unit.key).name)}
        for folder, pattern in ((self.out, f"{PREFIX}*{SUFFIX}"), (self.folder, "rejects-*.jsonl")):
            for path in folder.glob(pattern):
                if path.name not in kept:
                    path.unlink(missing_ok=True)

    # ---- what changed ----

    def changes(self, description: dict[str, Any]) -> list[str]:
        """What is different from what was last begun here, a line each."""
        before = self.described()
        if before is None:
            return []
        old, new = (FunctionIdentity.from_json(one["function"]) for one in (before, description))
        found = [f"function {new.name}: {what}" for what in old.differences(new)]
        settings, now = before["settings"], description["settings"]
        found += [
            f"{name}: {_shown(now.get(name))} (was {_shown(settings.get(name))})"
            for name in dict.fromkeys([*settings, *now])
            if settings.get(name) != now.get(name)
        ]
        if before["input"] != description["input"]:
            found += [f"input {line}" for line in self._changed_inputs()] or ["input"]
        return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _are_rejects(path: Path, count: int) -> bool:
    """Whether a file holds so many records that were set aside, each as it was written."""
    try:
        with path.open("rb") as lines:
            for line in lines:
                reject = unseal_line(line)
                if reject is None:
                    return False
                count -= reject.get("records", 1)  # none, where a file was damaged between two
    except OSError:
        return False
    return count == 0


def rejects_of(folder: Path, units: Iterable[MadeUnit]) -> list[Path]:
    """The files of records that were set aside, in plan order."""
    return [path for unit in units if (path := rejects_path(folder, unit.key)).exists()]
