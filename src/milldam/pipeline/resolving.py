"""The dedup stages of a job: fingerprints of every unit -> drop sets, and the hashes of a finished run into the index.

Exact duplicates are grouped in one process of its own with what the budget leaves, so that all its memory comes back
before the second pass begins; a cluster has one on each of its machines. The steps of near-dedup are shared by all
workers. Each step leaves files that say that it is done; a resumed job goes on behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.dedup import DECIDE, GROUP, NEAR, RANK, SHINGLE, VERIFY
from milldam.errors import StoreError
from milldam.files import is_whole, read_sealed, record_of, replace_unsynced, seal_file, write_sealed
from milldam.memory import held_bytes
from milldam.rules import DedupRules
from milldam.run.tasks import PART, Report
from milldam.run.units import Identity

if TYPE_CHECKING:
    from milldam.dedup.candidates import NearWork
    from milldam.dedup.index import DedupIndex

NEAR_STAGES = (RANK, NEAR, SHINGLE, VERIFY, DECIDE)
WORK_STAGES = (RANK, NEAR, VERIFY)
"""What these leave is checked by its hash before it is used again, and made again where it is not whole: nothing waits
for the disk."""
FEW_DOCUMENTS, FEW_BYTES = 50_000, 64 << 20
"""So many are looked through for near-duplicates in this process, in a second or two, with so much memory."""


@dataclass(frozen=True, slots=True)
class ResolveTask:
    """Drop sets from fingerprints, in steps: a partition of the hashes each; then some bands of the signatures each, a
    part of the pairs each, and at last what follows from all pairs."""

    folder: Path
    rules: DedupRules
    partitions: int
    exempt_below: int
    """Documents of the units before this one are never dropped."""
    index_files: tuple[Path, ...]
    units: int
    """Of the plan: pairs are verified in twice as many parts, unless they are many."""
    memory_bytes: int
    """What a process that does it may take in all."""
    threads: int

    def start(self) -> Callable[[int, Report], None]:
        if self.rules.near is not None:
            # What every worker needs is there before they are forked.
            from milldam.dedup import near  # noqa: F401
        return self._resolve

    def _resolve(self, step: int, report: Report) -> None:
        # What this process holds already counts too.
        left = self.memory_bytes - held_bytes()
        stage = self._stage_of(step)
        found = self._exact(step, left) if stage == GROUP else self._near(stage, step - self.stages[stage][0], left)
        files = {path.name: record_of(path) for path in self._files(stage, step)}
        told = {"found": found, "files": files}
        if stage in WORK_STAGES:
            replace_unsynced(resolved_path(self.folder, step), seal_file(told))
        else:
            write_sealed(resolved_path(self.folder, step), told)
        if stage == DECIDE:
            from milldam.dedup.near import remove_work

            remove_work(self.near_work(0))  # not before: killed in between, it could not be done again
        report(PART, found)

    def _stage_of(self, step: int) -> str:
        return next(stage for stage, steps in self.stages.items() if step in steps)

    def _files(self, stage: str, step: int) -> Iterable[Path]:
        """What a step leaves for those behind it."""
        number = step - self.stages[stage][0]
        patterns = {
            GROUP: (f"drops-{self.rules.method}-{number:05d}.bin",),
            RANK: ("ranks.bin", "positions.bin"),
            NEAR: (f"pairs-{number:03d}.keys", f"marks-{number:03d}.bits"),
            VERIFY: (f"edges-{number:05d}.*",),
            DECIDE: ("drops-near-*.bin",),
        }
        return chain.from_iterable(map(self.folder.glob, patterns[stage]))

    def todo(self, stage: str) -> list[int]:
        """The steps of a stage that are not done, or whose files are not as they were written."""
        if stage in NEAR_STAGES and self.is_decided:
            return []  # what it leaves is gone, and not needed
        return [step for step in self.stages[stage] if not self._is_done(step)]

    @property
    def is_decided(self) -> bool:
        """Whether near-duplicates are found."""
        return all(map(self._is_done, self.stages.get(DECIDE, ())))

    def _is_done(self, step: int) -> bool:
        told = read_sealed(resolved_path(self.folder, step))
        return told is not None and all(is_whole(self.folder / name, file) for name, file in told["files"].items())

    def found(self, step: int) -> dict[str, Any]:
        """What a step that is done found."""
        told = read_sealed(resolved_path(self.folder, step))
        if told is None:
            raise StoreError(
                f"{resolved_path(self.folder, step)}: damaged. Run the same command again to make it again."
            )
        return dict(told["found"])

    def _exact(self, partition: int, memory_bytes: int) -> dict[str, Any]:
        from milldam.dedup.bloom import resolve_bloom
        from milldam.dedup.exact import resolve_exact

        if self.rules.method == "bloom":
            rate = self.rules.false_positive_rate
            limits = {"exempt_below": self.exempt_below, "memory_bytes": memory_bytes}
            return asdict(resolve_bloom(self.folder, rate=rate, index_files=self.index_files, **limits))
        return asdict(
            resolve_exact(
                self.folder,
                partition,
                self.partitions,
                exempt_below=self.exempt_below,
                index_files=self.index_files,
                memory_bytes=memory_bytes,
                threads=self.threads,
            )
        )

    def near_work(self, memory_bytes: int) -> NearWork:
        from milldam.dedup.candidates import NearWork

        assert self.rules.near is not None
        return NearWork(
            folder=self.folder,
            rules=self.rules.near,
            exempt_below=self.exempt_below,
            memory_bytes=memory_bytes,
            mark_all=self.rules.index is not None,
            threads=self.threads,
        )

    def _near(self, stage: str, number: int, memory_bytes: int) -> dict[str, Any]:
        from milldam.dedup.candidates import find_pairs
        from milldam.dedup.near import decide, verify_pairs
        from milldam.dedup.ranking import rank

        work = self.near_work(memory_bytes)
        if stage == RANK:
            rank(work)
            return {}
        if stage == NEAR:
            return {"pairs": find_pairs(work, number)}
        if stage == VERIFY:
            return {"pairs": verify_pairs(work, number, len(self.stages[VERIFY]))}
        return asdict(decide(work, sum(self.found(step)["pairs"] for step in self.stages[VERIFY])))

    def is_small(self, stage: str) -> bool:
        """Whether a stage takes too little time and memory for a process of its own."""
        if stage in NEAR_STAGES:
            from milldam.dedup.candidates import Documents

            return Documents(self.near_work(0)).count <= FEW_DOCUMENTS
        from milldam.dedup.exact import FEW_HASHES, count_hashes, sources_of

        if self.partitions > 1 or self.rules.method != "exact":
            return False
        return count_hashes(sources_of(self.folder, self.index_files)) <= FEW_HASHES

    @property
    def stages(self) -> dict[str, range]:
        """The steps of each stage but the one that is done unit by unit; a stage needs all of those before it."""
        return steps_of(self.rules, self.partitions, self.units)


def steps_of(rules: DedupRules, partitions: int, units: int) -> dict[str, range]:
    """The steps of each stage in order, none of what is done unit by unit. Exact first: what it drops is in no pair."""
    counts = {GROUP: {"off": 0, "bloom": 1}.get(rules.method, partitions)}
    if rules.near is not None:
        from milldam.dedup.candidates import pair_steps
        from milldam.dedup.near import verify_parts

        ranking, pairing = int(rules.near.prefer != "first"), pair_steps(rules.near)
        counts |= {RANK: ranking, NEAR: pairing, SHINGLE: 0, VERIFY: verify_parts(units), DECIDE: 1}
    found, first = {}, 0
    for stage, count in counts.items():
        if count or stage == SHINGLE:
            found[stage] = range(first, first + count)
        first += count
    return found


def in_order(stages: Iterable[str]) -> list[str]:
    """Near-dedup last: what the other stages drop is in no pair."""
    return sorted(stages, key=NEAR_STAGES.__contains__)


def resolved_path(folder: Path, step: int) -> Path:
    return folder / f"resolved-{step:05d}.json"


def resolved(task: ResolveTask) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the steps found together: exact, near."""
    exact: Counter[str] = Counter()
    clusters: Counter[str] = Counter()
    near: dict[str, Any] = {}
    stages = task.stages
    for step in stages.get(GROUP, ()):
        found = task.found(step)
        clusters.update(found.pop("clusters", {}))
        exact.update({name: value for name, value in found.items() if isinstance(value, int)})
    for step in stages.get(DECIDE, ()):
        found = task.found(step)
        near = found | {"clusters": found["cluster_sizes"], "cluster_count": found["clusters"]}
    return (dict(exact) | {"clusters": dict(clusters)} if exact else {}), near


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Enter the hashes of a run into the index that runs share."""

    run_id: str
    out: str
    resolved: ResolveTask
    """How its duplicates were found."""

    def start(self) -> Callable[[int, Report], None]:
        return self._commit

    def _commit(self, step: int, report: Report) -> None:
        task = self.resolved
        open_index(task.rules).commit(
            self.run_id,
            self.out,
            task.folder,
            exempt_below=task.exempt_below,
            index_files=task.index_files,
            memory_bytes=task.memory_bytes - held_bytes(),
            threads=task.threads,
        )


def open_index(rules: DedupRules) -> DedupIndex:
    from milldam.dedup.index import DedupIndex

    assert rules.index is not None
    return DedupIndex(Path(rules.index), normalize=rules.normalize, near=rules.near)


def check_index(rules: DedupRules, identity: Identity, out: str) -> None:
    """Raise StoreError when the index can't be used."""
    if rules.index is not None:
        open_index(rules).files(identity.run_id, out)


def pin_index(rules: DedupRules, folder: Path, identity: Identity, out: str) -> dict[str, Path]:
    """Runs of the index that this one is compared with, those there are when it begins, and their hash files."""
    if rules.index is None:
        return {}
    return dict(open_index(rules).pin(folder, run_id=identity.run_id, out=out))
