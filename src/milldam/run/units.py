"""The plan of a run: what its result depends on (`Identity`), and on disk its input files and its units.

`units.jsonl` has a unit a line; `units.offsets` has for each the byte where its line begins, its size in bytes of input
and its key, so that one read finds any unit, and the sizes and keys of a million are read at once. A key says what a
unit is made from: equal keys mean equal results. Numbers are places in the plan and shift when the input grows; what
is kept from one plan to the next is kept by key.

`inputs.jsonl` lists the input of the plan file by file, `inputs.new.jsonl` the input as it is now. Neither list is held
in memory.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.files import NewFile, commit_together, explain_os_errors, hash_bytes, hash_file
from milldam.input_files import NO_INPUT, add_input, changed_files
from milldam.markup import counted
from milldam.stores.kinds import Kind, result_id

KeyArray = npt.NDArray[np.uint64]
_BLOCK = 1 << 16
_ENTRY = np.dtype([("offset", "<i8"), ("size", "<i8"), ("key", "<u8")])


@dataclass(frozen=True, slots=True)
class Identity:
    """All that a result depends on: two runs with equal identities give equal bytes."""

    settings: dict[str, Any]
    input: dict[str, Any]
    """Number of files, bytes, and a fingerprint of names, sizes and versions."""
    tokenizer_name: str | None = field(default=None, compare=False)
    """The tokenizer's name for messages; the settings hold its hash."""

    @classmethod
    def of_store(cls, out: Path, kind: Kind) -> Identity:
        """The identity of a finished store. Raises StoreError when it can't be read."""
        path = out / kind.manifest
        head = kind.facts(path.read_bytes(), path)
        return cls(head["settings"], head["input"], head.get("tokenizer", {}).get("name"))

    @property
    def run_id(self) -> str:
        return result_id(self.settings, self.input)

    def differences(self, other: Identity) -> list[str]:
        """The differences, a line each."""
        lines, listed = [], set()
        for name in {**self.settings, **other.settings}:
            old, new = self.settings.get(name), other.settings.get(name)
            if (isinstance(old, list) and new is None) or (isinstance(new, list) and old is None):
                listed.add(name)  # such as evaluation sets
                lines.append(f"{name}: {'given (made without)' if old is None else 'not given (made with it)'}")
        before, now = _flat(self.settings), _flat(other.settings)
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name) and name.partition(".")[0] not in listed:
                shown = other._shown(name, now.get(name)), self._shown(name, before.get(name))
                lines += [f"{name}: {shown[0]} (made with {shown[1]})"]
        files = [f"{counted(one.input['files'], 'file')}, {one.input['bytes']:,} bytes" for one in (self, other)]
        # The input also has a state for settings such as evaluation sets: where those differ, they are named already.
        if self.input != other.input and (not lines or files[0] != files[1]):
            lines.append(f"input: {'other content' if files[0] == files[1] else files[1]} (made from {files[0]})")
        return lines

    def _shown(self, name: str, value: Any) -> str:
        text = json.dumps(value, ensure_ascii=False)
        text = text if len(text) <= 60 else text[:57] + "..."
        is_tokenizer = name.rpartition(".")[2] == "tokenizer" and self.tokenizer_name is not None
        return f'"{self.tokenizer_name}", hash {text}' if is_tokenizer else text


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested settings by dotted names.

    >>> _flat({"a": 1, "b": {"c": [2, {"d": 3}]}})
    {'a': 1, 'b.c.0': 2, 'b.c.1.d': 3}
    """
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        flat |= _flat(inner, f"{name}.{key}" if name else str(key))
    return flat


# ---- keys ----


def key_of(*parts: Any) -> str:
    """The key of something that is made from some plain values.

    >>> key_of("a.txt", 0, 100)
    '8a1131c71c64ddd8'
    """
    return hash_bytes(json.dumps(parts, sort_keys=True).encode())[:16]


def keys_of(parts: Iterable[Iterable[Any]]) -> KeyArray:
    """The keys of several things, each by its values; each another one."""
    return _distinct(np.fromiter((int(key_of(*values), 16) for values in parts), np.uint64))


def mixed_keys(keys: KeyArray, more: KeyArray | int) -> KeyArray:
    """The keys of what is made from these units and something else, a number for each or one for all."""
    return mixed(keys ^ mixed(np.zeros(len(keys), np.uint64) + np.asarray(more, np.uint64)))


def mixed(values: KeyArray) -> KeyArray:
    """Other numbers, evenly spread, one for each."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _distinct(keys: KeyArray) -> KeyArray:
    """Distinct keys: of equal ones the first stays, the others are mixed with how often it came before."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    again = np.arange(len(keys)) - np.repeat(begins, np.diff(np.append(begins, len(keys))))
    distinct, repeated = keys.copy(), order[again > 0]
    distinct[repeated] = mixed(keys[repeated] ^ mixed(again[again > 0].astype(np.uint64)))
    return distinct


# ---- units and input files on disk ----


class UnitList:
    """A list of units in a folder: `units.jsonl` and `units.offsets` for the name "units"."""

    def __init__(self, folder: Path, name: str) -> None:
        self._lines, self._entries = folder / f"{name}.jsonl", folder / f"{name}.offsets"
        self._begins: npt.NDArray[np.int64] | None = None
        """Where each line begins, once a unit was read."""

    @contextlib.contextmanager
    def listing(self, units: Iterable[Any]) -> Iterator[Callable[[], dict[str, dict[str, Any]]]]:
        """List units (each with a size, a key of at least 16 hexadecimal digits, and `as_json`). The call that it gives
        puts the list in place, and returns size and hash of both files by name. Holds 24 bytes a unit."""
        begins, sizes, keys, at, held = array("q"), array("q"), array("Q"), 0, b""
        with NewFile(self._lines) as lines, NewFile(self._entries) as file:
            for unit in units:
                begins.append(at)
                sizes.append(unit.size)
                keys.append(int(unit.key[:16], 16))
                # ASCII, with escapes: a file's name need not be UTF-8.
                line = json.dumps(unit.as_json()).encode() + b"\n"
                held, at = held + line, at + len(line)
                if len(held) >= _BLOCK:
                    lines.write(held)
                    held = b""
            lines.write(held)
            entries = np.empty(len(keys), _ENTRY)
            entries["offset"], entries["size"] = begins, sizes
            entries["key"] = _distinct(np.frombuffer(keys, np.uint64))
            file.write(entries.tobytes())
            self._begins = None
            yield lambda: commit_together({self._lines.name: lines, self._entries.name: file})

    def remove(self) -> None:
        self._lines.unlink(missing_ok=True)
        self._entries.unlink(missing_ok=True)

    def __len__(self) -> int:
        return self._entries.stat().st_size // _ENTRY.itemsize if self._entries.exists() else 0

    def entries(self) -> npt.NDArray[np.void]:
        """Offset, size and key of every unit. Not by np.fromfile, which takes an error for the end of the file."""
        return np.frombuffer(self._entries.read_bytes(), _ENTRY)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of input of each unit."""
        return np.asarray(self.entries()["size"])

    def keys(self) -> KeyArray:
        return np.array(self.entries()["key"])

    def all(self, parse: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
        """Every unit, in order."""
        with self._lines.open("rb") as lines:
            for line in lines:
                yield parse(json.loads(line))

    def at(self, number: int, parse: Callable[[dict[str, Any]], Any]) -> Any:
        """One unit, by a read."""
        if self._begins is None:
            self._begins = self.entries()["offset"]
        with self._lines.open("rb") as lines:
            lines.seek(int(self._begins[number]))
            return parse(json.loads(lines.readline()))


class InputList:
    """The input file by file: that of the plan, and as it is now. `own`: the folder in which this process lists it."""

    def __init__(self, folder: Path, own: Path) -> None:
        self.path, self.new = folder / "inputs.jsonl", own / "inputs.new.jsonl"
        self._begins: dict[int, int] = {}
        """Where the files of each dataset begin in the new list."""

    def write(self, files: Iterable[tuple[int, Any]]) -> dict[str, Any]:
        """List the input as it is now (number of the dataset, file), dataset after dataset; return its number, size and
        fingerprint."""
        state, at = NO_INPUT, 0
        self._begins.clear()
        with explain_os_errors(self.new), self.new.open("w", encoding="utf-8") as listing:
            for dataset, file in files:
                # Not by asdict, which copies: it would take longer than all the rest. ASCII: see above.
                entry = {name: getattr(file, name) for name in file.__dataclass_fields__}
                self._begins.setdefault(dataset, at)
                at += listing.write(json.dumps(entry | ({"dataset": dataset} if dataset else {})) + "\n")
                state = add_input(state, file.path, file.size, file.version, dataset)
        return state

    def planned(self) -> Iterator[dict[str, Any]]:
        """The files of the plan."""
        with self.path.open("rb") as listing:
            yield from map(json.loads, listing)

    def listed(self, dataset: int = 0) -> Iterator[dict[str, Any]]:
        """The files of a dataset, as just listed; those of others are not read."""
        if dataset not in self._begins:
            return
        with self.new.open("rb") as listing:
            listing.seek(self._begins[dataset])
            for file in map(json.loads, listing):
                if file.pop("dataset", 0) != dataset:
                    return
                yield file

    def differs(self) -> bool:
        """Whether the input as it is now is not that of the plan, in content or in place."""
        return not self.path.exists() or hash_file(self.path) != hash_file(self.new)

    def changes(self) -> list[str]:
        """The files that are new, gone or changed since the plan, in words; of very many files not all are compared."""
        return changed_files(self.path, self.new) if self.path.exists() and self.new.exists() else []
