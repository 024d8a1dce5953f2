"""The dedup stages of a job: fingerprints of every unit -> drop sets, and the hashes of a finished run into the index.

On a machine, grouping runs in one process of its own with what the budget leaves, so that all its memory comes back
before the second pass begins; a cluster has one on each of its machines. Each step leaves files that say that it is
done; a resumed job goes on behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from milldam.dedup.rules import DedupRules
from milldam.errors import StoreError
from milldam.memory import held_bytes
from milldam.run.identity import Identity
from milldam.run.tasks import PART, Report
from milldam.sealed import is_whole, read_sealed, record_of, write_sealed

GROUP, NEAR, JOIN = "group", "near", "join"
"""The stages."""


@dataclass(frozen=True, slots=True)
class ResolveTask:
    """Drop sets from fingerprints, in steps: a partition of the hashes each, then some bands of the signatures each,
    and at last the pairs of all bands together."""

    folder: Path
    rules: DedupRules
    partitions: int
    exempt_below: int
    """Documents of the units before this one are never dropped."""
    index_files: tuple[Path, ...]
    memory_bytes: int
    """What the process that does it may take in all."""
    threads: int

    def start(self) -> Callable[[int, Report], None]:
        return self._resolve

    def _resolve(self, step: int, report: Report) -> None:
        # What this process holds already counts too.
        left = self.memory_bytes - held_bytes()
        found = self._exact(step, left) if step < self.partitions else self._near(step - self.partitions, left)
        files = {path.name: record_of(path) for path in self._files(step)}
        write_sealed(resolved_path(self.folder, step), {"found": found, "files": files})
        if step in self.stages.get(JOIN, ()):
            from milldam.dedup.near import remove_pairs

            remove_pairs(self.folder)  # not before: killed in between, it could not be done again
        report(PART, found)

    def _files(self, step: int) -> Iterable[Path]:
        """What a step leaves for those behind it."""
        if step < self.partitions:
            return self.folder.glob(f"drops-{self.rules.method}-{step:05d}.parquet")
        is_join = step in self.stages.get(JOIN, ())
        return self.folder.glob("drops-near-*.parquet" if is_join else f"pairs-*-{step - self.partitions:03d}.keys")

    def todo(self, stage: str) -> list[int]:
        """The steps of a stage that are not done, or whose files are not as they were written."""
        if stage == NEAR and not self.todo(JOIN):
            return []  # its pairs are gone, and not needed
        return [step for step in self.stages[stage] if not self._is_done(step)]

    def _is_done(self, step: int) -> bool:
        told = read_sealed(resolved_path(self.folder, step))
        return told is not None and all(is_whole(self.folder / name, file) for name, file in told["files"].items())

    def found(self, step: int) -> dict[str, Any]:
        """What a step that is done found."""
        told = read_sealed(resolved_path(self.folder, step))
        if told is None:
            raise StoreError(
                f"{resolved_path(self.folder, step)}: damaged. Run the same command again to make it anew."
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

    def _near(self, step: int, memory_bytes: int) -> dict[str, Any]:
        from milldam.dedup.near import find_pairs, join_pairs, pair_steps

        assert self.rules.near is not None
        limits = {"memory_bytes": memory_bytes, "threads": self.threads}
        if step < pair_steps(self.rules.near):
            return {"pairs": find_pairs(self.folder, self.rules.near, step, **limits)}
        return asdict(join_pairs(self.folder, self.rules.near, exempt_below=self.exempt_below, **limits))

    @property
    def is_small(self) -> bool:
        """Whether it takes too little time and memory for a process of its own."""
        from milldam.dedup.exact import Prints

        prints = Prints(files=sorted(self.folder.glob("hashes-*.parquet")), index_files=list(self.index_files))
        return prints.are_few and self.rules.method == "exact" and self.rules.near is None

    @property
    def stages(self) -> dict[str, range]:
        """The steps of each stage; a stage needs all of those before it."""
        return steps_of(self.rules, self.partitions)


def steps_of(rules: DedupRules, partitions: int) -> dict[str, range]:
    """The steps of each stage in order. Exact first: what it drops is no candidate for near."""
    exact = {"off": 0, "bloom": 1}.get(rules.method, partitions)
    found = {GROUP: range(exact)} if exact else {}
    if rules.near is not None:
        from milldam.dedup.near import pair_steps

        last = partitions + pair_steps(rules.near)
        found |= {NEAR: range(partitions, last), JOIN: range(last, last + 1)}
    return found


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
    for step in stages.get(JOIN, ()):
        found = task.found(step)
        near = found | {"clusters": found["cluster_sizes"], "cluster_count": found["clusters"]}
    return (dict(exact) | {"clusters": dict(clusters)} if exact else {}), near


@dataclass(frozen=True, slots=True)
class IndexTask:
    """Enter the hashes of a run into the index that runs share."""

    index: str
    run_id: str
    out: str
    resolved: ResolveTask
    """How its duplicates were found."""

    def start(self) -> Callable[[int, Report], None]:
        return self._commit

    def _commit(self, step: int, report: Report) -> None:
        from milldam.dedup.index import DedupIndex, Sorting

        task = self.resolved
        sorting = Sorting(
            partitions=task.partitions,
            exempt_below=task.exempt_below,
            index_files=task.index_files,
            memory_bytes=task.memory_bytes - held_bytes(),
            threads=task.threads,
        )
        DedupIndex(Path(self.index), normalize=task.rules.normalize).commit(self.run_id, self.out, task.folder, sorting)


def check_index(rules: DedupRules, identity: Identity, out: str) -> None:
    """Raise StoreError when the index can't be used."""
    if rules.index is not None:
        from milldam.dedup.index import DedupIndex

        DedupIndex(Path(rules.index), normalize=rules.normalize).files(identity.run_id, out)


def pin_index(rules: DedupRules, folder: Path, identity: Identity, out: str) -> dict[str, Path]:
    """Runs of the index that this one is compared with, those there are when it begins, and their files."""
    if rules.index is None:
        return {}
    from milldam.dedup.index import DedupIndex

    return dict(DedupIndex(Path(rules.index), normalize=rules.normalize).pin(folder, run_id=identity.run_id, out=out))
