"""The hashes of finished runs, so that a later run drops what one of them has seen; with near-dedup signatures too.

    <run id>.hashes       the distinct hashes of a run, sorted, immutable: high halves, then low ones: 16 bytes each
    <run id>.signatures   only with near-dedup: the signature of each document that was kept, `bands` x `rows` bytes
    <run id>.sketches     and its shingles, to verify on: 4 bytes a distinct one, `SHINGLES_KEPT` of a document at most
    <run id>.rows         where these end: 16 bytes a document
    <run id>.json         what the run is; written last, without it the other files do not exist
    lock                  held by who changes something

A run enters when it is finished, under its id, and is left out when it asks for the files: resuming or repeating it
never drops its own documents. A run that writes to the folder of an earlier one replaces it, since its store is gone.
What a run dropped because an earlier one had it does not enter again: the earlier one stays its owner.

Committing groups the hashes in bounded memory, as `exact` does; killed at any point, the index is as it was before, or
without the run that is being replaced, and the next commit clears up.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from filelock import FileLock

from milldam.dedup.drops import SEEN_BEFORE, DropSet, Original
from milldam.dedup.exact import Words, count_hashes, each_range, sources_of
from milldam.dedup.fingerprints import HASH_BYTES, Hashes, fingerprint
from milldam.dedup.keys import SCATTERED, Int64s, mapped
from milldam.dedup.minhash import signature_files, unit_name
from milldam.dedup.sketches import SketchRows, SketchWriter, sketch_paths
from milldam.errors import ConfigError, Setting, StoreError
from milldam.files import (
    NewFile,
    explain_os_errors,
    has_size,
    hash_bytes,
    read_sealed,
    remove_matching,
    remove_temporaries,
    write_json,
    write_sealed,
)
from milldam.rules import DedupRules, NearRules
from milldam.text.arrays import Mask, Verdicts

PINNED = "index-runs.json"
"""Which runs of the index a run is compared with."""
_ENDINGS = _HASHES, _SIGNATURES, _SKETCHES, _ROWS = ".hashes", ".signatures", ".sketches", ".rows"
SHINGLES_KEPT = 4096
"""Of a document, those with the smallest hashes: above, similarity is estimated, 0.006 off (one standard deviation)."""
_KEPT_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class IndexedRun:
    """A run whose hashes are in the index."""

    id: str
    out: str
    """The folder of its store."""
    documents: int
    hashes: int
    """Distinct ones that no earlier run of the index had."""
    bytes: int
    xxh3: str
    """Of the file of its hashes."""
    created: float
    """Seconds since 1970."""
    normalize: bool = False
    """Its hashes are of texts without case, white space and punctuation."""
    near: dict[str, int] | None = None
    """With near-dedup: `ngram`, `bands` and `rows` of its signatures, and the bytes of its three files."""


def _rules_of(near: Mapping[str, int]) -> dict[str, int]:
    """The rules that signatures must have in common to be compared."""
    return {name: near[name] for name in ("ngram", "bands", "rows")}


class DedupIndex:
    """The index in a folder; several runs may use it at the same time."""

    def __init__(self, folder: Path, *, normalize: bool = False, near: NearRules | None = None) -> None:
        self.folder, self.place, self._normalize = folder, str(folder.resolve()), normalize
        self._near = None if near is None else _rules_of(asdict(near))
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"dedup.index: {folder} is a file; name a folder.")

    @classmethod
    def of(cls, rules: DedupRules) -> DedupIndex:
        """The one that a configuration names."""
        assert rules.index is not None
        return cls(Path(rules.index), normalize=rules.normalize, near=rules.near)

    def runs(self) -> list[IndexedRun]:
        """The runs in the index, the oldest first."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                found.append(IndexedRun(**json.loads(path.read_bytes())))
            except FileNotFoundError:
                continue  # removed meanwhile
            except (ValueError, TypeError):
                raise StoreError(
                    f"{path}: not the record of a run. Remove it if the folder is a dedup index."
                ) from None
        return sorted(found, key=lambda run: (run.created, run.id))

    def others(self, excluding_id: str, excluding_out: str) -> list[IndexedRun]:
        """All runs but one, and but the one that wrote to the same folder before."""
        others = [run for run in self.runs() if run.id != excluding_id and run.out != excluding_out]
        for run in others:
            differing = ""
            if run.normalize != self._normalize:
                differing = f"normalize: {str(run.normalize).lower()}"
            elif self._near is not None and run.near is not None and _rules_of(run.near) != self._near:
                differing = f"near: {_rules_of(run.near)}"
            if differing:
                message = f"the run {run.id} in this index has dedup.{differing}, and can't be compared with this one"
                raise ConfigError(f"{self.folder}: {message}. Use another index, or the same settings.")
        return others

    def require_whole(self, run_id: str, out: str) -> None:
        """Raise StoreError when a run of these can't be compared with."""
        for run in self.others(run_id, out):
            self.check(run)

    def state(self, out: str) -> str:
        """Names what the index holds, but for the run that wrote to a folder; an index of nothing is refused."""
        runs = self.others("", out)
        if not runs:
            raise ConfigError(
                f"dedup.index: {self.folder} holds no runs to compare with. A finished run with "
                f"dedup: {{index: {self.folder}}} enters it."
            )
        return _state_of(runs)

    def pin(self, folder: Path, out: str, *, run_id: str = "", state: str | None = None) -> list[tuple[str, Path]]:
        """The runs to compare with and their hash files, under names of a run's own folder, taken once: what the index
        gains or loses while the run is at work, or until it is resumed, does not change its result.

        `state`: what the index must hold; taken anew where the folder has that of another one.
        """
        record = folder / PINNED
        pinned, fresh = read_sealed(record), not record.exists()
        whole = pinned is not None and all(
            has_size(folder / name, size) for run in pinned["runs"] for name, size in run["files"].items()
        )
        if state is not None:
            fresh = not whole or pinned is None or (pinned["index"], pinned["state"]) != (self.place, state)
        if fresh:
            with self._locked(), explain_os_errors(folder):
                remove_matching(folder, "index-*.hashes", "*-index-*")
                runs = self.others(run_id, out)
                if state not in (None, _state_of(runs)):
                    message = f"dedup.index: {self.folder} is no longer as it was when the run was planned."
                    raise StoreError(f"{message} Start over with ", Setting("overwrite", True), ".")
                linked = [{"id": run.id, "files": self._link(run, k, folder)} for k, run in enumerate(runs)]
                pinned = {"index": self.place, "state": _state_of(runs), "runs": linked}
                write_sealed(record, pinned)
        elif not whole:
            message = f"{record}: damaged, or what it names: the runs that this one is compared with. Start over with "
            raise StoreError(message, Setting("overwrite", True), ".")
        assert pinned is not None
        return [(run["id"], folder / pinned_names(number)[_HASHES]) for number, run in enumerate(pinned["runs"])]

    def _link(self, run: IndexedRun, number: int, folder: Path) -> dict[str, int]:
        """Link the files of a run, those for near-duplicates where they are wanted; their sizes."""
        self.check(run)
        found = {}
        for ending, name in pinned_names(number).items():
            path, target = self.folder / f"{run.id}{ending}", folder / name
            if ending == _HASHES or (self._near is not None and path.exists()):
                try:
                    target.hardlink_to(path)
                except OSError:  # the folders are on different disks
                    shutil.copyfile(path, target)
                found[name] = path.stat().st_size
        return found

    def commit(
        self,
        run_id: str,
        out: str,
        fingerprints: Path,
        *,
        exempt_below: int,
        memory_bytes: int,
        threads: int,
    ) -> IndexedRun:
        """Put a finished run's hashes into the index, in place of what it or a run of the same `out` had there.

        `fingerprints`: the folder with its hash files, and those of the runs that it was compared with. What one of
        these has is left to it, but for what documents of units below `exempt_below` have: they stay. `memory_bytes`:
        what this call may add to the process.
        """
        sources = sources_of(fingerprints)
        own = [one for one in sources if one[1] >= 0]
        sources.sort(key=lambda source: not 0 <= source[1] < exempt_below)  # what stays comes first
        with self._locked():
            remove_temporaries(self.folder)
            with NewFile(self.folder / f"{run_id}{_HASHES}") as new:

                def first_in_run(table: Words) -> Words:
                    """(2, hashes): those that no earlier run has."""
                    return table[:2, table[2].view(np.int64) >= 0]

                _write_hashes(new, each_range(sources, memory_bytes, threads, first_in_run, lambda *_: None))
                for run in self.runs():
                    if run.id == run_id or run.out == out:
                        self._record(run.id).unlink()
                near = None if self._near is None else self._write_near(run_id, fingerprints, self._near)
                file = new.commit()
            documents, hashes = count_hashes(own), new.size // HASH_BYTES
            run = IndexedRun(
                run_id, out, documents, hashes, file["bytes"], file["xxh3"], time.time(), self._normalize, near
            )
            write_json(self._record(run_id), asdict(run))
            self._remove_orphans()
        return run

    def remove(self, run_id: str) -> None:
        """Forget a run: what only it has seen is new again."""
        with self._locked():
            known = [run.id for run in self.runs()]
            if run_id not in known:
                has = ", ".join(known) or "none"
                raise ConfigError(f'{self.folder}: no run "{run_id}" in this index. It has: {has}.')
            self._record(run_id).unlink()
            self._remove_orphans()

    def _write_near(self, run_id: str, folder: Path, near: dict[str, int]) -> dict[str, int]:
        """Write signatures, sketches and rows of the documents that a run kept; what they are.

        `folder`: has the signatures and sketches of its units, and its drop files.
        """
        size, at = near["bands"] * near["rows"], self.folder
        with (
            NewFile(at / f"{run_id}{_SIGNATURES}") as signatures,
            SketchWriter(at / f"{run_id}{_SKETCHES}", at / f"{run_id}{_ROWS}") as sketches,
        ):
            for unit, path in signature_files(folder).items():
                values, ends = sketch_paths(folder, unit_name(unit))
                if unit < 0 or not ends.exists():
                    continue
                table, found = mapped(path, np.uint8).reshape(-1, size), SketchRows(ends)
                verdicts = Verdicts(len(table))
                DropSet(folder, unit).apply(np.arange(len(table)), verdicts)
                kept = found.rows[verdicts.keep[found.rows.astype(np.int64)]].astype(np.int64)
                for start in range(0, len(kept), _KEPT_AT_ONCE):
                    rows = kept[start : start + _KEPT_AT_ONCE]
                    rows = rows[found.find(rows).counts > 0]  # what filters dropped has none
                    spans = found.find(rows)
                    counts = np.minimum(spans.counts, SHINGLES_KEPT)
                    cut = spans.cut | (spans.counts > SHINGLES_KEPT)
                    numbers = signatures.size // size + np.arange(len(rows))
                    sketches.add(numbers, spans.read(values, SHINGLES_KEPT), counts, cut)
                    signatures.write(table[rows].tobytes())
            files = signatures.commit(), *sketches.commit(durable=True).values()
        return near | {"bytes": sum(int(file["bytes"]) for file in files)}

    def _locked(self) -> FileLock:
        with explain_os_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        return FileLock(self.folder / "lock")

    def _remove_orphans(self) -> None:
        """Files without a record: of runs that were replaced or removed, or killed while they committed."""
        for path in (path for ending in _ENDINGS for path in self.folder.glob(f"*{ending}")):
            if not self._record(path.stem).exists():
                path.unlink()

    def check(self, run: IndexedRun) -> None:
        """Raise StoreError when the files of a run are not there, or not as large as they were."""
        path = self.folder / f"{run.id}{_HASHES}"
        near = (self.folder / f"{run.id}{ending}" for ending in (_SIGNATURES, _SKETCHES, _ROWS))
        held = sum(one.stat().st_size for one in near if one.exists()) if run.near is not None else 0
        if not has_size(path, run.bytes) or (run.near is not None and held != run.near["bytes"]):
            raise StoreError(
                f"{path}: missing or damaged.\n"
                f"Remove the run with `milldam dedup-index {self.folder} --remove {run.id}`."
            )

    def _record(self, run_id: str) -> Path:
        return self.folder / f"{run_id}.json"


def _write_hashes(new: NewFile, ranges: Iterator[Words]) -> None:
    """Write hashes that come in order: all high halves, then all low ones, which wait in a file without a name."""
    with explain_os_errors(new.path), tempfile.TemporaryFile(dir=new.path.parent) as waiting:
        for high, low in ranges:
            new.write(high.tobytes())
            waiting.write(low.tobytes())
        waiting.seek(0)
        while block := waiting.read(1 << 20):
            new.write(block)


def pinned_names(number: int) -> dict[str, str]:
    """What the files of the runs of the index are called where a run is compared with them, by their endings."""
    unit = -1 - number
    sketches, rows = (path.name for path in sketch_paths(Path(), unit_name(unit)))
    names = (f"index-{number:05d}.hashes", f"signatures-{unit_name(unit)}.bin", sketches, rows)
    return dict(zip(_ENDINGS, names, strict=True))


def _state_of(runs: Sequence[IndexedRun]) -> str:
    return hash_bytes(json.dumps([(run.id, run.hashes, run.xxh3) for run in runs]).encode())


# ---- documents that the index holds, found while they are read ----

_NOWHERE = -1


class SeenBefore:
    """Drops the documents of a unit that the index holds, by the hash files of its runs."""

    def __init__(self, paths: Sequence[Path], *, normalize: bool) -> None:
        self._hashes = [mapped(path, np.uint64, wanted=SCATTERED).reshape(2, -1) for path in paths]
        self._normalize = normalize
        self._runs: dict[int, int] = {}

    def apply(self, texts: pa.LargeStringArray, rows: Int64s, verdicts: Verdicts) -> None:
        """Mark those of the documents of these rows that the index holds."""
        hashes, runs = fingerprint(texts, normalize=self._normalize), np.full(len(rows), _NOWHERE, np.int64)
        order = np.argsort(hashes[:, 0])  # so that neighbours are looked for one after the other
        hi, lo = hashes[order].T
        for number, run in enumerate(self._hashes):  # of several runs, the first that has it counts
            left = np.flatnonzero(runs[order] == _NOWHERE)
            runs[order[left[_held_by(run, np.ascontiguousarray(hi[left]), lo[left])]]] = number
        seen = runs != _NOWHERE
        verdicts.drop(seen, SEEN_BEFORE)
        self._runs = dict(zip(rows[seen].tolist(), runs[seen].tolist(), strict=True))

    def of(self, row: int) -> Original | None:
        """The run that holds the document of a row, of the last batch."""
        run = self._runs.get(row)
        return None if run is None else Original(indexed_run=run)


def _held_by(run: Hashes, hi: Words, lo: Words) -> Mask:
    """Which of some hashes a sorted run has, (2, hashes)."""
    held, place, left = np.zeros(len(hi), np.bool_), np.searchsorted(run[0], hi), np.arange(len(hi))
    # Several may share their high half.
    while len(left):
        left = left[place[left] < run.shape[1]]
        left = left[run[0, place[left]] == hi[left]]
        equal = run[1, place[left]] == lo[left]
        held[left[equal]] = True
        left = left[~equal]
        place[left] += 1
    return held
