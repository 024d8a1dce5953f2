"""Shuffled reading of a store that is four times the memory it may use.

In: a store (made when it is not there). Out: a Markdown table with samples/s, the bytes read from disk for every byte
that was asked for, and with --json every figure. Each way runs in a fresh process inside a memory cgroup of a quarter
of the store's size (Linux, root: see memory.py), page cache included, as in a container; the store's pages are dropped
from the page cache before, and how many stayed is measured. Runs take turns.

- full: the default: every sample from anywhere; announced to the kernel, then read
- block: shuffle="block"
- mapped: every sample from anywhere, straight from the mapping (read="map"): what most loaders do

    python benchmarks/beyond_memory.py /tmp/bench/loading/1000M/store --json /tmp/bench/beyond_memory.json
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memory import end_on_terminate, measure
from sizes import megabytes
from token_store import write_store
from tokenizing import heading, machine

WAYS: dict[str, dict[str, Any]] = {
    "full": {"read": "auto", "shuffle": True},
    "block": {"read": "auto", "shuffle": "block"},
    "mapped": {"read": "map", "shuffle": True},
}
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SEED = 17


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one way."""

    way: str
    first_seconds: float
    samples: int
    seconds: float
    cpu_seconds: float
    disk_bytes: int
    """Read from the device while the clock ran."""
    asked_bytes: int
    cached_before: float
    """Share of the store that was in the page cache before it began."""
    charged_peak_bytes: int | None
    anonymous_peak_bytes: int

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


# ---- inside the cgroup ----


def read_for(store: Path, way: str, seq_len: int, batch_size: int, seconds: float) -> dict[str, Any]:
    import milldam

    options = dict(WAYS[way])
    windows = milldam.open(store).windows(seq_len, read=options.pop("read"))
    begin = time.perf_counter()
    batches = iter(windows.batches(batch_size, seed=SEED, epochs=None, **options))
    next(batches)
    first = time.perf_counter() - begin
    begin = now = time.perf_counter()
    cpu, disk, steps = time.process_time(), disk_bytes(), 0
    while now - begin < seconds:
        next(batches)
        steps += 1
        now = time.perf_counter()
    return {
        "first_seconds": first,
        "samples": steps * batch_size,
        "seconds": now - begin,
        "cpu_seconds": time.process_time() - cpu,
        "disk_bytes": disk_bytes() - disk,
        "asked_bytes": steps * batch_size * (seq_len + 1) * 2,
    }


def disk_bytes() -> int:
    """What this process made the kernel fetch from the device."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


# ---- outside ----


def drop(store: Path, *, everywhere: bool) -> None:
    """The store's pages out of the page cache; `everywhere`: all clean pages of the machine, which slows all on it."""
    for path in store.glob("*.bin"):
        descriptor = os.open(path, os.O_RDONLY)
        # What is not on disk yet can't be dropped.
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    if everywhere:
        DROP_CACHES.write_text("1\n")


def cached_share(store: Path) -> float:
    """Share of the store's token files that is in the page cache."""
    pages = cached = 0
    for path in store.glob("*.bin"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            flags = resident_pages(mapping)
            pages += len(flags)
            cached += int((flags & 1).sum())
    return cached / max(1, pages)


def resident_pages(mapping: mmap.mmap) -> np.ndarray[Any, np.dtype[np.uint8]]:
    view = np.frombuffer(mapping, np.uint8)
    flags = np.zeros(-(-len(view) // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    if mincore(view.ctypes.data, len(view), flags.ctypes.data) != 0:
        raise SystemExit(f"mincore: {os.strerror(ctypes.get_errno())}")
    return flags


def run_once(store: Path, way: str, given: argparse.Namespace) -> Run:
    drop(store, everywhere=given.drop_caches)
    cached = cached_share(store)
    limit = sum(path.stat().st_size for path in store.glob("*.bin")) // given.share
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "figures.json"
        sizes = ["--seq-len", str(given.seq_len), "--batch-size", str(given.batch_size)]
        inside = [sys.executable, __file__, str(store), *sizes, "--seconds", str(given.seconds)]
        report = measure([*inside, "--inside", way, "--json", str(said)], limit)
        if report.exit_status != 0:
            raise SystemExit(f"{way}: exit status {report.exit_status}, {report.oom_kills} OOM kills")
        figures = json.loads(said.read_text())
    return Run(
        way=way,
        cached_before=cached,
        charged_peak_bytes=report.charged_peak_bytes,
        anonymous_peak_bytes=report.cgroup_peak_bytes,
        **figures,
    )


def take_turns(store: Path, given: argparse.Namespace) -> list[Run]:
    runs: list[Run] = []
    for repeat in range(given.repeats):
        for way in given.only:
            run = run_once(store, way, given)
            runs.append(run)
            figures = f"{run.rate:,.0f} samples/s, {run.disk_bytes / run.asked_bytes:.1f} times the bytes from disk"
            print(f"{repeat + 1}/{given.repeats} {way}: {figures}, {run.cached_before:.0%} cached", file=sys.stderr)
    return runs


def table(runs: list[Run]) -> list[str]:
    titles = ["", "samples/s, median", "lowest to highest", "times mapped", "of block", "CPU us", "disk bytes / asked"]
    titles += ["first batch ms", "anonymous MB"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    rates = {way: statistics.median(run.rate for run in runs if run.way == way) for way in WAYS if of(runs, way)}
    for way, rate in rates.items():
        own = of(runs, way)
        cells = [
            way,
            f"{rate:,.0f}",
            f"{min(run.rate for run in own):,.0f} to {max(run.rate for run in own):,.0f}",
            f"{rate / rates['mapped']:.0f}" if "mapped" in rates else "",
            f"{rate / rates['block']:.0%}" if "block" in rates else "",
            f"{statistics.median(run.cpu_seconds / run.samples for run in own) * 1e6:.1f}",
            f"{statistics.median(run.disk_bytes / run.asked_bytes for run in own):.1f}",
            f"{statistics.median(run.first_seconds for run in own) * 1e3:.0f}",
            f"{max(run.anonymous_peak_bytes for run in own) / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def of(runs: list[Run], way: str) -> list[Run]:
    return [run for run in runs if run.way == way]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("store", type=Path, help="a store; made with 1e9 tokens when it is not there")
    add("--share", type=int, default=4, help="the cgroup gets this part of the store's size (4: a quarter)")
    add("--seq-len", type=int, default=1024)
    add("--batch-size", type=int, default=16)
    add("--seconds", type=float, default=10.0, help="on the clock in each run (10)")
    add("--repeats", type=int, default=3, help="runs of each way (3)")
    add("--only", nargs="+", choices=WAYS, default=list(WAYS), help="these ways (all)")
    add("--drop-caches", action="store_true", help="drop all clean pages of the machine, not just the store's")
    add("--json", type=Path, help="write every figure to this file")
    add("--inside", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    if given.inside:
        figures = read_for(given.store, given.inside, given.seq_len, given.batch_size, given.seconds)
        given.json.write_text(json.dumps(figures))
        return
    end_on_terminate()
    store = write_store(given.store.resolve(), 10**9)
    runs = take_turns(store, given)
    size = sum(path.stat().st_size for path in store.glob("*.bin"))
    about = f"{megabytes(size)} of tokens, {megabytes(size // given.share)} of memory, seq_len {given.seq_len}"
    print("\n".join([*heading(machine()), about, "", *table(runs)]))
    if given.json:
        figures = {"machine": machine(), "about": about, "runs": [asdict(run) for run in runs]}
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
