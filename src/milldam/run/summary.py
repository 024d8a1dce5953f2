"""The summary of a finished job, the same for every job: `run/summary.json`, `--json`, the closing lines of a command.

A figure of every job is a field here; figures of one kind of job are in its `facts`. An `Observer` gets progress.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from milldam.files import write_sealed
from milldam.markup import counted
from milldam.memory import format_size
from milldam.run.tasks import cores

if TYPE_CHECKING:
    from milldam.run.budget import MemoryUse, WorkPlan

SUMMARY = "summary.json"
Facts = TypeVar("Facts", bound=Mapping[str, object])
"""Figures of one kind of job: a TypedDict beside the job."""


@dataclass(frozen=True, slots=True)
class Summary(Generic[Facts]):
    job: str
    """tokenize, preprocess, qa, map, import, export, push or pull."""
    out: str
    """The folder, file or address that was made."""
    facts: Facts
    up_to_date: bool = False
    """Nothing was left to do."""
    units: int = 0
    reused: int = 0
    """Units that were not made again."""
    changed: tuple[str, ...] = ()
    """Why the others were made: what is new or differs."""
    counts: dict[str, int] = field(default_factory=dict)
    """Documents, tokens, rows, files, ... that were read and made."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Records that could not be read, by reason."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Documents that were left out, by reason."""
    audit: dict[str, str] = field(default_factory=dict)
    """Files of what was set aside: rejects, dropped, contamination."""
    output_bytes: int = 0
    """Size of the result on disk, without the run folder."""
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    """Seconds by stage."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds of work by kind, summed over workers."""
    memory: MemoryUse | None = None
    workers: int = 0
    warnings: tuple[str, ...] = ()
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    started: float = 0.0
    finished: float = 0.0
    """Unix times; the start is that of the first session of a run that was resumed."""

    @property
    def made(self) -> str:
        """The content of the result, in a few words.

        >>> Summary("tokenize", "out", {}, counts={"documents": 91, "tokens": 23_862, "read": 95}).made
        '91 documents, 23,862 tokens'
        """
        names = _RESULTS.get(self.job, ("documents", "tokens"))
        return ", ".join(counted(self.counts.get(name, 0), name.removesuffix("s")) for name in names)

    @property
    def over_budget(self) -> str:
        """A sentence when more memory was taken than the budget has; else empty."""
        if self.memory is None or self.memory["peak"] <= self.memory["budget"]:
            return ""
        peak, budget = format_size(self.memory["peak"]), format_size(self.memory["budget"])
        return f"memory: the peak of {peak} was over the budget of {budget}"

    def __str__(self) -> str:
        """
        >>> print(Summary("map", "t", {}, units=16, reused=4, changed=("function f: code",), counts={"rows": 8}))
        t: 8 rows; 4 of 16 units reused; changed: function f: code
        """
        parts = [f"{self.out}: {self.made}"]
        parts += [f"{self.reused} of {counted(self.units, 'unit')} reused"] if self.units else []
        parts += [f"changed: {', '.join(self.changed)}"] if self.changed else []
        parts += [f"rejected: {sum(self.rejected.values()):,}"] if self.rejected else []
        return "; ".join([*parts, *self.warnings, *filter(None, [self.over_budget])])

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, run_folder: Path) -> None:
        write_sealed(run_folder / SUMMARY, self.as_json())


# ---- where and with what ----


def describe_machine() -> dict[str, str]:
    memory = format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return {"system": platform.platform(), "cores": str(cores()), "memory": memory}


@functools.cache
def package_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    from milldam import native

    versions = {"python": sys.version.split()[0]}
    for name in ("milldam", "gigatoken", "tokenizers", "pyarrow", "numpy"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions | {"kernels": native.build.library().stem.removeprefix("kernels-")}


_RESULTS = {"map": ("rows",), "qa": ("examples", "windows"), "push": ("files",), "pull": ("files",)}
log = logging.getLogger("milldam")


@dataclass(slots=True)
class Snapshot:
    """Where a stage of a run stands."""

    stage: str = ""
    units: int = 0
    units_done: int = 0
    input_total: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    anonymous_bytes: int = 0
    budget_bytes: int = 0
    elapsed: float = 0.0
    workers: dict[int, dict[str, Any]] = field(default_factory=dict)


class Observer(Protocol):
    """Gets the progress of a run: the command line's display, or the library's `Quiet`."""

    @property
    def command(self) -> tuple[str, ...]:
        """The words of the command line that began the run, to resume it with; none in a program."""
        ...

    def planned(self, plan: WorkPlan) -> None: ...
    def progress(self, snapshot: Snapshot) -> None: ...
    def warn(self, message: str) -> None: ...


class Quiet:
    """The library's own observer: warnings go to `logging`, the rest nowhere."""

    command = ()

    def planned(self, plan: WorkPlan) -> None:
        log.info("plan: %d of %d units to do, %d workers", plan.units - plan.done, plan.units, plan.workers)
        if plan.left_out:
            log.warning('not read: %s. To read text among them, name it with input_format="txt".', plan.left_out)

    def progress(self, snapshot: Snapshot) -> None:
        pass

    def warn(self, message: str) -> None:
        log.warning(message)
