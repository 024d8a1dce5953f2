"""The plan: what it is made from, and on disk its input and its units, written once, read in order or by number, never
held. `Identity` is what a result depends on.

`units.jsonl` has a unit a line; `units.offsets` for each the byte where its line begins, its size in bytes of input and
its key, so that any unit is found by one read, and the sizes and keys of a million are read at once.

A key says what a unit is made from: equal keys mean equal results. Numbers are places in the plan and shift when the
input grows; what is kept from one plan to the next is kept by key.

The input is listed file by file, to tell what changed since: `inputs.jsonl` is the input of the plan,
`inputs.new.jsonl` the input as it is now. Nothing of it is held in memory but, for a message, the first files that
differ.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from milldam.files import explain_os_errors, hash_bytes, hash_file, record_of
from milldam.input_files import InputState, changed_files
from milldam.markup import counted
from milldam.stores.kinds import Kind, result_id
from milldam.stores.place import Folder

_ENTRY = np.dtype([("offset", "<i8"), ("size", "<i8"), ("key", "<u8")])
_BUFFER_BYTES = 1 << 16
KeyArray = npt.NDArray[np.uint64]
UnitT = TypeVar("UnitT")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a result depends on: two runs with equal identities give equal bytes."""

    settings: dict[str, Any]
    input: dict[str, Any]
    """Number of files, bytes, and a fingerprint of names, sizes and versions."""
    tokenizer_name: str | None = field(default=None, compare=False)
    """What people call the tokenizer, which the settings hold as a hash: the same one may have another name."""

    @classmethod
    def of_store(cls, out: Path, kind: Kind) -> Identity:
        """Of a finished store. Raises StoreError when that can't be told."""
        head = kind.head(Folder(out))
        return cls(head["settings"], head["input"], head.get("tokenizer", {}).get("name"))

    @property
    def run_id(self) -> str:
        """Names the result."""
        return result_id(self.settings, self.input)

    def differences(self, other: Identity) -> list[str]:
        """What differs, a line each; empty when nothing does."""
        before, now = _flat(self.settings), _flat(other.settings)
        lone = {name: told for name in {**self.settings, **other.settings} if (told := self._alone(name, other))}
        found = [f"{name}: {told}" for name, told in lone.items()]
        found += [
            f"{name}: {other._shown(name, now)} (made with {self._shown(name, before)})"
            for name in dict.fromkeys([*before, *now])
            if before.get(name) != now.get(name) and name.partition(".")[0] not in lone
        ]
        # What else the input has, such as evaluation sets, is in the settings where only one of both has it.
        if self.input != other.input and (not found or self._files() != other._files()):
            same = "other content" if self._files() == other._files() else other._files()
            found.append(f"input: {same} (made from {self._files()})")
        return found

    def _alone(self, name: str, other: Identity) -> str:
        """Of a list of parts, such as evaluation sets, that only one of both has."""
        before, now = self.settings.get(name), other.settings.get(name)
        if (before is None) is (now is None) or not isinstance(now if before is None else before, list):
            return ""
        return "given (made without)" if before is None else "not given (made with it)"

    def _files(self) -> str:
        return f"{counted(self.input['files'], 'file')}, {self.input['bytes']:,} bytes"

    def _shown(self, name: str, flat: dict[str, Any]) -> str:
        shown = _short(flat.get(name))
        is_tokenizer = name.rpartition(".")[2] == "tokenizer" and self.tokenizer_name is not None
        return f'"{self.tokenizer_name}", hash {shown}' if is_tokenizer else shown


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> _flat({"a": 1, "b": {"c": [2, {"d": 3}]}})
    {'a': 1, 'b.c.0': 2, 'b.c.1.d': 3}
    """
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        return {name: value}
    found: dict[str, Any] = {}
    for key, inner in items:
        found |= _flat(inner, f"{name}.{key}" if name else str(key))
    return found


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class PlannedUnit(Protocol):
    @property
    def size(self) -> int:
        """Bytes of input."""
        ...

    @property
    def key(self) -> str:
        """What it is made from: 16 hexadecimal digits or more, of which the first 16 count."""
        ...

    def as_json(self) -> dict[str, Any]: ...


def key_of(*parts: Any) -> str:
    """The key of something that is made from some plain values.

    >>> key_of("a.txt", 0, 100)
    '8a1131c71c64ddd8'
    """
    return hash_bytes(json.dumps(parts, sort_keys=True).encode())[:16]


class Keys:
    """The keys of a stage's units, by number. 16 bytes a unit."""

    def __init__(self, values: KeyArray) -> None:
        self._values = values
        self._order = np.argsort(values, kind="stable")
        self._sorted = values[self._order]

    @classmethod
    def of(cls, keys: Iterable[str]) -> Keys:
        return cls(_distinct(np.fromiter((int(key[:16], 16) for key in keys), np.uint64)))

    def mixed(self, more: KeyArray) -> Keys:
        """The keys of what is made from these units and something else, a number for each."""
        return Keys(_mix(self._values, more))

    def __len__(self) -> int:
        return len(self._values)

    def tobytes(self) -> bytes:
        return self._values.tobytes()

    def __getitem__(self, number: int) -> str:
        return f"{int(self._values[number]):016x}"

    def number_of(self, key: str) -> int | None:
        """The unit of a key; None: there is none in this plan."""
        value = np.uint64(int(key, 16))
        place = int(np.searchsorted(self._sorted, value))
        return int(self._order[place]) if place < len(self._sorted) and self._sorted[place] == value else None


def _mix(keys: KeyArray, more: KeyArray) -> KeyArray:
    """Other keys, evenly spread, that depend on both."""
    return mixed(keys ^ mixed(more))


def mixed(values: KeyArray) -> KeyArray:
    """Other numbers, evenly spread, one for each."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _distinct(keys: KeyArray) -> KeyArray:
    """What is named twice has two keys: the first one's, and one that says that it comes again."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    again = np.arange(len(keys)) - np.repeat(begins, np.diff(np.append(begins, len(keys))))
    distinct = keys.copy()
    repeated = order[again > 0]
    distinct[repeated] = _mix(keys[repeated], again[again > 0].astype(np.uint64))
    return distinct


class UnitList:
    """A list of units in a folder: `units.jsonl` and `units.offsets` for the name "units"."""

    def __init__(self, folder: Path, name: str) -> None:
        self._lines, self._entries = folder / f"{name}.jsonl", folder / f"{name}.offsets"
        self._opened: IO[bytes] | None = None
        """The lines, open from the first unit that is asked for on: units come one after the other."""
        self._begins: npt.NDArray[np.int64] | None = None

    def records(self) -> dict[str, dict[str, Any]]:
        """Size and hash of both files, by their names."""
        return {path.name: record_of(path) for path in (self._lines, self._entries)}

    def write(self, units: Iterable[PlannedUnit]) -> int:
        """Write the units of a plan; how many there are. 24 bytes a unit are held."""
        begins, sizes, keys, at = array("q"), array("q"), array("Q"), 0
        with explain_os_errors(self._lines):
            with self._lines.open("w", encoding="utf-8") as lines:
                for unit in units:
                    begins.append(at)
                    sizes.append(unit.size)
                    keys.append(int(unit.key[:16], 16))
                    # ASCII, with escapes: a file's name need not be UTF-8, and a character is a byte.
                    at += lines.write(json.dumps(unit.as_json()) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
            entries = np.empty(len(keys), _ENTRY)
            entries["offset"], entries["size"] = begins, sizes
            entries["key"] = _distinct(np.frombuffer(keys, np.uint64))
            with self._entries.open("wb") as file:
                file.write(entries.tobytes())
                file.flush()
                os.fsync(file.fileno())
        return len(entries)

    def replace(self, other: UnitList) -> None:
        """Take the place of another list. The lines last: they are the plan."""
        self.close()
        other.close()
        self._entries.replace(other._entries)
        self._lines.replace(other._lines)

    def remove(self) -> None:
        self.close()
        self._lines.unlink(missing_ok=True)
        self._entries.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; they are opened again when a unit is asked for."""
        if self._opened is not None:
            self._opened.close()
        self._opened = self._begins = None

    def __len__(self) -> int:
        """0 where nothing is planned."""
        return self._entries.stat().st_size // _ENTRY.itemsize if self._entries.exists() else 0

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of input of each unit."""
        sizes: npt.NDArray[np.int64] = self._read_entries()["size"]
        return sizes

    def keys(self) -> Keys:
        return Keys(self._read_entries()["key"])

    def _read_entries(self) -> npt.NDArray[np.void]:
        """Not by np.fromfile, which takes an error for the end of the file."""
        return np.frombuffer(self._entries.read_bytes(), _ENTRY)

    def all(self, parse: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        """Every unit, in order."""
        with self._lines.open("rb") as lines:
            for line in lines:
                yield parse(json.loads(line))

    def at(self, number: int, parse: Callable[[dict[str, Any]], UnitT]) -> UnitT:
        """One unit, by a read, which for units in order is mostly from a buffer."""
        if self._opened is None or self._begins is None:
            self._begins = self._read_entries()["offset"]
            self._opened = self._lines.open("rb", buffering=_BUFFER_BYTES)
        self._opened.seek(int(self._begins[number]))
        return parse(json.loads(self._opened.readline()))


class InputList:
    """The input file by file: of the plan, and as it is now. `own`: where this process lists what is there now."""

    def __init__(self, folder: Path, own: Path) -> None:
        self._planned, self._now = folder / "inputs.jsonl", own / "inputs.new.jsonl"
        self._listed_at: dict[int, int] = {}
        """Where the files of each dataset begin in what was just listed."""

    def write(self, files: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        """List the input (number of the dataset, file) as it is now; its number, size and fingerprint.

        The files of a dataset come one after the other.
        """
        state, at = InputState(), 0
        self._listed_at.clear()
        with explain_os_errors(self._now), self._now.open("w", encoding="utf-8") as listing:
            for dataset, file in files:
                # Not by asdict, which copies: it would take longer than all the rest. ASCII: see above.
                entry = {name: getattr(file, name) for name in file.__dataclass_fields__}
                line = json.dumps(entry | ({"dataset": dataset} if dataset else {})) + "\n"
                self._listed_at.setdefault(dataset, at)
                at += listing.write(line)
                state.add(file.path, file.size, file.version, dataset)
        return state.as_json()

    def planned(self) -> Iterator[dict[str, Any]]:
        """The files of the plan."""
        with self._planned.open("rb") as listing:
            yield from map(json.loads, listing)

    def listed(self, dataset: int = 0) -> Iterator[dict[str, Any]]:
        """The files of a dataset, as `write` has just listed them; those of others are not read."""
        if dataset not in self._listed_at:
            return
        with self._now.open("rb") as listing:
            listing.seek(self._listed_at[dataset])
            for file in map(json.loads, listing):
                if file.pop("dataset", 0) != dataset:
                    return
                yield file

    def differs(self) -> bool:
        """Whether the input as it is now is not that of the plan, in content or in place."""
        return not self._planned.exists() or hash_file(self._planned) != hash_file(self._now)

    def changes(self) -> list[str]:
        """The files that are new, gone or changed since the plan, in words; of very many files not all are compared."""
        if not self._planned.exists() or not self._now.exists():
            return []
        return changed_files(self._planned, self._now)

    def take(self) -> None:
        """Make the input as it is now that of the plan."""
        self._now.replace(self._planned)

    def forget(self) -> None:
        """Remove what was listed and did not become a plan."""
        self._now.unlink(missing_ok=True)
