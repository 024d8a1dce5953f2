"""CPU time a sample of every kind of batch: windows, packed rows, mixtures of twelve stores, in one process.

In: a folder for data: a store of 100M random tokens and twelve of 8M are made there once and kept. Out: a Markdown
table of microseconds of CPU a sample, int64 batches of 16 samples of 1024 tokens, shuffled: the median of rounds in
which all kinds take turns, since machines drift, and the least. The first epoch is through before the clock starts, so
that every page of the mapped files has been touched.

    python benchmarks/samples.py --data /tmp/bench/samples
    PYTHONPATH=old/src python benchmarks/samples.py --data /tmp/bench/samples     # another version, the same data
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import milldam
from milldam.loader.stores import Store
from token_store import write_store

TOKENS, SHARDS = 100_000_000, 8
SOURCES, SOURCE_TOKENS, SOURCE_SHARDS = 12, 8_000_000, 2
SEQ_LEN, BATCH_SIZE = 1024, 16
ROUNDS, BATCHES = 15, 256


def kinds(data: Path) -> Iterator[tuple[str, Any]]:
    store = Store(write_store(data / "one", TOKENS, SHARDS))
    sources = [
        Store(write_store(data / f"source-{number}", SOURCE_TOKENS, SOURCE_SHARDS, seed=number + 1))
        for number in range(SOURCES)
    ]
    mixture = milldam.mix({source: number % 5 + 1 for number, source in enumerate(sources)})
    yield "windows", store.windows(SEQ_LEN)
    yield "windows, pread", store.windows(SEQ_LEN, read="pread")
    yield "wrapped rows", store.packed(SEQ_LEN)
    yield "best-fit rows", store.packed(SEQ_LEN, strategy="best_fit")
    yield "windows of a mixture", mixture.windows(SEQ_LEN)
    yield "windows of a mixture, pread", mixture.windows(SEQ_LEN, read="pread")
    yield "wrapped rows of a mixture", mixture.packed(SEQ_LEN)
    yield "best-fit rows of a mixture", mixture.packed(SEQ_LEN, strategy="best_fit")


def microseconds(batches: Iterator[Any]) -> float:
    begun = time.process_time()
    for _ in itertools.islice(batches, BATCHES):
        pass
    return 1e6 * (time.process_time() - begun) / (BATCHES * BATCH_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder for the stores")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="kinds whose names hold one of these")
    arguments = parser.parse_args()
    wanted = arguments.only or [""]
    running = {
        name: iter(samples.batches(BATCH_SIZE, seed=0, epochs=None))
        for name, samples in kinds(arguments.data)
        if any(word in name for word in wanted)
    }
    for batches in running.values():
        for _ in itertools.islice(batches, TOKENS // SEQ_LEN // BATCH_SIZE):
            pass
    found: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name, batches in running.items():
            found[name].append(microseconds(batches))
    print("| | CPU us a sample: median | least |\n|---|--:|--:|")
    for name, times in found.items():
        print(f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} |")


if __name__ == "__main__":
    main()
