"""What a table is made from: the function and its identity, the source, and every setting that changes a row.

Reads no more of the input than its identity takes. Equal recipes and equal units mean equal rows.
"""

from __future__ import annotations

import copy
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from milldam.errors import ConfigError
from milldam.input_files import is_address, without_secrets
from milldam.mapping.cache import ONCE
from milldam.mapping.calling import CallRules
from milldam.mapping.identity import FunctionIdentity, identify
from milldam.mapping.memory_gate import Room
from milldam.mapping.plan import SourcePlan, hash_json
from milldam.mapping.schema import given_schema
from milldam.mapping.settings import MapSettings
from milldam.mapping.sources import plan_source
from milldam.run.units import Identity
from milldam.sources.compression import STDIN
from milldam.sources.units import InputFile
from milldam.stores.table.manifest import TableSchema

VERSION = 1
"""Of the way from rows to rows: another one makes other keys."""


@dataclass(frozen=True, slots=True)
class Prepared:
    settings: MapSettings
    function: FunctionIdentity
    source: SourcePlan
    schema: TableSchema | None
    """The columns, where the user gave them."""
    room: Room

    @property
    def call_rules(self) -> CallRules:
        same = {one.name: getattr(self.settings, one.name) for one in fields(CallRules)}
        return CallRules(**same | {"batch_bytes": self.settings.most_batch_bytes})

    @property
    def recipe(self) -> str:
        """A hash of all that rows depend on besides what they are read from and the columns."""
        return hash_json([VERSION, self.function.hash, self.settings.parameters])

    @property
    def is_known(self) -> bool:
        """Whether equal keys mean equal rows."""
        return not self.function.unhashable and self.source.unidentified is None

    @property
    def doubts(self) -> list[str]:
        """Why equal keys need not mean equal rows, and what to do about it."""
        found, nothing = [], "Nothing is reused from an earlier run."
        if self.function.unhashable:
            unhashable = "; ".join(self.function.unhashable)
            name = 'Name it yourself by the setting "key", and change the name whenever it changes.'
            found.append(f"What {self.function.name} depends on can't be hashed: {unhashable}. {nothing} {name}")
        if self.source.unidentified is not None:
            found.append(f"The source can't be identified: {self.source.unidentified}. {nothing}")
        return found

    @property
    def identity(self) -> Identity:
        """What the table is made from."""
        columns = None if self.schema is None else asdict(self.schema)
        function = {"rows_version": VERSION, **self.function.as_json()}
        settings = {"function": function, **self.settings.parameters, **self.settings.cuts, "schema": columns}
        return Identity(settings, self.source.identity)

    def differences(self, before: Identity) -> list[str]:
        """What made another table of the same input, a line each."""
        now = self.identity.settings
        old, new = (FunctionIdentity.from_json(settings["function"]) for settings in (before.settings, now))
        found = [f"function {new.name}: {what}" for what in old.differences(new)]
        names = [name for name in dict.fromkeys([*before.settings, *now]) if name != "function"]
        return found + [
            f"{name}: {_shown(now.get(name))} (was {_shown(before.settings.get(name))})"
            for name in names
            if before.settings.get(name) != now.get(name)
        ]

    @property
    def cache_key(self) -> str:
        """The table's name in the cache: its function and settings, then its input. What can't be identified is
        never found again."""
        if not self.is_known:
            return f"{ONCE}{uuid.uuid4().hex[:16]}"
        how = [self.recipe, self.settings.cuts, None if self.schema is None else self.schema.ipc]
        return "-".join(hash_json(part)[:16] for part in (how, self.source.identity))

    def moved_to(self, spool: Path) -> Prepared:
        """The same, with another folder for what must go through the disk; nothing is identified again."""
        source = copy.copy(self.source)
        source.spool_folder = spool
        return replace(self, source=source)


def prepare(settings: MapSettings, room: Room, spool: Path) -> Prepared:
    """Identify function and source. `spool`: a folder for what can be read only once, and what is worth keeping."""
    function = identify(settings.function, settings.fn_kwargs, key=settings.key)
    source = plan_source(settings, spool, room)
    schema = given_schema(settings.schema)
    return Prepared(settings, function, source, None if schema is None else TableSchema.of(schema), room)


def outside(files: Iterator[InputFile], out: Path, spool: Path) -> Iterator[InputFile]:
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


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
