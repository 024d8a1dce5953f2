"""Finds the duplicates among synthetic hashes under a hard memory limit, and reports what it took.

Makes N hashes, a fifth of them duplicates of earlier ones, as hash files of several units; resolves them in a process
of its own inside a memory cgroup (see memory.py); prints time, peak memory and temporary disk. `--check` compares the
drops with those that numpy finds with everything in memory (some 100 bytes a document: for a few million).

    python benchmarks/dedup.py --documents 100000000 --limit 512MB
    python benchmarks/dedup.py --documents 5000000 --limit 256MB --check
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memory import lines_of, measure
from milldam.dedup.drops import drops_in, place_of
from milldam.dedup.exact import resolve_exact
from milldam.dedup.fingerprints import FingerprintWriter, Hashes, stretches
from milldam.memory import usage
from sizes import megabytes, parse_size

DUPLICATES = 0.2
BATCH = 250_000

Words = npt.NDArray[np.uint64]


def scrambled(numbers: Words, salt: int) -> Words:
    """Numbers that look random, the same for the same number: the finaliser of splitmix64."""
    mixed = numbers + np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def synthetic_hashes(first: int, number: int) -> Hashes:
    """The hashes of documents first, first + 1, ...; a fifth of them are those of an earlier document."""
    identity = np.arange(first, first + number, dtype=np.uint64)
    chance = scrambled(identity, 1) / 2.0**64
    earlier = (scrambled(identity, 2) / 2.0**64 * identity).astype(np.uint64)
    identity = np.where(chance < DUPLICATES, earlier, identity)
    return np.stack([scrambled(identity, 3), scrambled(identity, 4)], axis=1)


def make_units(folder: Path, documents: int, units: int) -> None:
    """Hash files of equal size."""
    size = -(-documents // units)
    for unit in range(units):
        number = max(0, min(size, documents - unit * size))
        with FingerprintWriter(folder / f"hashes-{unit:07d}.bin") as writer:
            for row in range(0, number, BATCH):
                writer.add(synthetic_hashes(unit * size + row, min(BATCH, number - row)), row)
            writer.commit()


def folder_bytes(folder: Path, pattern: str) -> int:
    sizes = []
    for path in folder.glob(pattern):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return sum(sizes)


class DiskWatch(threading.Thread):
    """The most that temporary files took, sampled."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.peak_bytes = folder, 0

    def run(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, folder_bytes(self.folder, ".exact-*/**/*"))
            time.sleep(0.05)


def resolve(folder: Path, limit_bytes: int, threads: int) -> None:
    """In the limited process: find the duplicates and leave the figures in a file."""
    watch = DiskWatch(folder)
    watch.start()
    started, processor = time.perf_counter(), time.process_time()
    memory_bytes = limit_bytes - usage().anonymous
    found = resolve_exact(folder, 0, 1, exempt_below=0, memory_bytes=memory_bytes, threads=threads)
    figures = {
        "documents": found["documents"],
        "distinct": found["distinct"],
        "dropped": found["dropped"],
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - processor,
        "temporary_bytes": watch.peak_bytes,
    }
    (folder / "figures.json").write_text(json.dumps(figures))


def all_hashes(folder: Path) -> Iterator[Hashes]:
    for path in sorted(folder.glob("hashes-*.bin")):
        table = np.concatenate(list(stretches(path)), axis=1)
        yield table[:2, np.argsort(table[2])].T


def check(folder: Path, figures: dict[str, float]) -> None:
    """The same documents are dropped, for the same originals, as by a sort of all hashes in memory."""
    parts = list(all_hashes(folder))
    unit = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    row = np.concatenate([np.arange(len(part)) for part in parts])
    hashes = np.ascontiguousarray(np.concatenate(parts)).view("V16").ravel()
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    original = first[inverse]
    dropped = np.flatnonzero(original != np.arange(len(hashes)))
    drops = np.concatenate([some for path in sorted(folder.glob("drops-*.bin")) for some in drops_in(path)])
    drops = drops[np.argsort(drops["place"])]
    same = np.array_equal(drops["place"], place_of(unit[dropped], row[dropped]))
    same &= np.array_equal(drops["of"], place_of(unit[original[dropped]], row[original[dropped]]))
    print(f"check     {len(dropped):,} drops, {'equal to numpy' if same else 'NOT EQUAL to numpy'}")
    if not same or len(first) != figures["distinct"]:
        raise SystemExit(1)


def report(folder: Path, documents: int) -> dict[str, float]:
    figures: dict[str, float] = json.loads((folder / "figures.json").read_text())
    each = max(1, documents)
    print(f"resolved  {figures['documents']:,} documents, {figures['dropped']:,} dropped")
    print(f"time      {figures['seconds']:.1f} s, {figures['cpu_seconds'] / each * 1e6:.2f} us of CPU a document")
    for name, size in (
        ("hashes", folder_bytes(folder, "hashes-*")),
        ("temporary", figures["temporary_bytes"]),
        ("drops", folder_bytes(folder, "drops-*")),
    ):
        print(f"{name:9} {megabytes(size)} of disk, {size / each:.1f} bytes a document")
    return figures


def run(arguments: argparse.Namespace, folder: Path) -> None:
    started = time.perf_counter()
    make_units(folder, arguments.documents, arguments.units)
    print(f"made      {arguments.documents:,} hashes in {time.perf_counter() - started:.1f} s")
    options = [str(arguments.limit), str(arguments.threads)]
    found = measure([sys.executable, __file__, "--resolve", str(folder), *options], arguments.limit)
    print("\n".join(lines_of(found)))
    if found.exit_status:
        raise SystemExit(found.exit_status)
    figures = report(folder, arguments.documents)
    if arguments.check:
        check(folder, figures)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=20_000_000)
    parser.add_argument("--units", type=int, default=20)
    parser.add_argument("--limit", type=parse_size, default=parse_size("512MB"), help="for the whole process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where to work; removed at the end")
    parser.add_argument("--check", action="store_true", help="compare with numpy")
    return parser.parse_args()


def main() -> None:
    if sys.argv[1:2] == ["--resolve"]:
        place, limit, threads = sys.argv[2:]
        resolve(Path(place), int(limit), int(threads))
        return
    arguments = parse_arguments()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        run(arguments, folder)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
