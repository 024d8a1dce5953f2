"""Preferences of the documents -> their ranks: of documents that are alike, the one with the lowest stays.

A preference is a number of 64 bits, the lowest first; of equal ones, the place in the plan decides. Sorted is
(preference, place) as keys of 64 bits: of the preferences, from their last bits on, as many at a time as fit beside a
place. Memory: what is asked for. Disk: 32 bytes a document, 16 of which stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milldam.dedup.candidates import POSITIONS, RANKS, Documents, NearWork
from milldam.dedup.drops import EXACT, drop_files, drops_in, unit_and_row
from milldam.dedup.keys import SortedKeys, mapped, new_mapped, work_folder
from milldam.dedup.minhash import SignatureFiles, unit_name
from milldam.dedup.shingles import Hashes, Int64s

_HELD_BYTES = 48
"""What is held of a document at a time."""


def preference_file_name(unit: int) -> str:
    """Where a unit's preferences are: a number of 8 bytes a document, lower ones first."""
    return f"preferences-{unit_name(unit)}.bin"


def rank(work: NearWork) -> None:
    """Put the documents in the order of preference: two files of 8 bytes a document. Without them, plan order it is."""
    with work_folder(work.folder / "near-ranking") as folder:
        documents = Documents(work)
        if documents.count:
            positions = _sorted(work, documents, folder)
            ranks = new_mapped(folder / RANKS, np.int64, documents.count)
            for some in _numbers(work, 0, documents.count):
                ranks[positions[some]] = some
            for name in (RANKS, POSITIONS):
                (folder / name).replace(work.folder / name)


def _sorted(work: NearWork, documents: Documents, folder: Path) -> Int64s:
    """The positions in order; also in the file `POSITIONS`."""
    preferences, most = _preferences(work, documents, folder / "preferences")
    bits = max(1, (documents.count - 1).bit_length())
    before: Int64s | None = None
    for shift in range(0, max(1, most.bit_length()), 64 - bits):
        keys = SortedKeys(folder / "keys", work.share(_HELD_BYTES))
        for some in _numbers(work, documents.exempt, documents.count):
            part = preferences[some if before is None else before[some]] >> np.uint64(shift)
            # What goes over the left edge is sorted by in the next round.
            keys.add(part << np.uint64(bits) | some.astype(np.uint64))
        (folder / POSITIONS).unlink(missing_ok=True)  # it is still mapped
        after = new_mapped(folder / POSITIONS, np.int64, documents.count)
        for some in _numbers(work, 0, documents.exempt):
            after[some] = some
        done = documents.exempt
        for block in keys.blocks(work.share(_HELD_BYTES)):
            places = (block & np.uint64((1 << bits) - 1)).astype(np.int64)
            after[done : done + len(places)] = places if before is None else before[places]
            done += len(places)
        keys.remove()
        before = after
    return after


def _preferences(work: NearWork, documents: Documents, path: Path) -> tuple[Hashes, int]:
    """By position, and the largest of them. A text that occurs several times has the best that a field gives it."""
    preferences, most = new_mapped(path, np.uint64, documents.count), 0
    table = documents.signatures
    for unit in table.units[table.units >= work.exempt_below].tolist():
        base, stop = table.before(unit), table.before(unit + 1)
        given = mapped(work.folder / preference_file_name(unit), np.uint64)
        for some in _numbers(work, base, stop):
            preferences[some] = given[some - base]
            most = max(most, int(preferences[some].max()))
    if work.rules.preferred_field is not None:
        _raise_copied(preferences, work, table)
    return preferences, most


def _raise_copied(preferences: Hashes, work: NearWork, table: SignatureFiles) -> None:
    for path in drop_files(work.folder, EXACT):
        for drops in drops_in(path):
            units, _ = unit_and_row(drops["of"])
            ranked = drops[units >= work.exempt_below]
            copies, first = (table.positions(*unit_and_row(ranked[name])) for name in ("place", "of"))
            np.minimum.at(preferences, first, preferences[copies])


def _numbers(work: NearWork, first: int, stop: int) -> Iterator[Int64s]:
    """From one up to another, some at a time."""
    for start in range(first, stop, work.share(_HELD_BYTES)):
        yield np.arange(start, min(stop, start + work.share(_HELD_BYTES)))
