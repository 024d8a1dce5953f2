"""Training straight from text: are its batches those of the finished store, and how soon does the first one come?

`equal` makes a store of a text, then feeds the text itself, from nothing each time, with every number of ranks and
workers, and compares every sample of two epochs by its place in the global order. `first` lays out 10,000 files of
about 10 MB, links to some parts of the text, and a compressed file of a gigabyte under several names, and tells when
the first batch came after `milldam.open`, where the tokenizer is known on this machine and where it is not.

    python benchmarks/feeding_checks.py equal 1gb.jsonl --tokenizer gpt2/
    python benchmarks/feeding_checks.py first 1gb.jsonl --tokenizer gpt2/ --rounds 5
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

import milldam

SEQ_LEN, BATCH, EPOCHS = 1024, 16, 2


def digests(data: Any, world: int) -> Iterator[int]:
    """Of every sample, in the global order; the ranks step together."""
    windows = data.windows(SEQ_LEN)
    ranks = [windows.batches(BATCH, seed=0, epochs=EPOCHS, rank=rank, world_size=world) for rank in range(world)]
    for step in zip(*(_filled(batches) for batches in ranks), strict=False):
        if all(batch is None for batch in step):
            return
        rows = [[] if batch is None else list(map(_digest, *batch)) for batch in step]
        for places in itertools.zip_longest(*rows):
            yield from (digest for digest in places if digest is not None)


def _filled(batches: Any) -> Iterator[Any]:
    """A rank may have one batch fewer than the others."""
    return itertools.chain(batches, itertools.repeat(None, 1))


def _digest(x: Any, y: Any) -> int:
    return int(xxh3_64_intdigest(x.tobytes()) ^ xxh3_64_intdigest(y.tobytes()) >> 1)


def equal(arguments: argparse.Namespace, work: Path) -> int:
    how = {"tokenizer": arguments.tokenizer, "memory": "1GB", "shard_size": arguments.shard_size}
    milldam.tokenize(arguments.text, work / "finished", workers=2, **how)
    expected = np.fromiter(digests(milldam.open(work / "finished", units=True), 1), np.uint64)
    print(f"finished store: {len(expected):,} samples of {EPOCHS} epochs", flush=True)
    differing = 0
    for workers, world in itertools.product((1, 2, 4), (1, 2, 3, 8)):
        with milldam.open(arguments.text, store=work / "fed", workers=workers, **how) as feed:
            found = np.fromiter(digests(feed, world), np.uint64)
        same = len(found) == len(expected) and bool((found == expected).all())
        differing += not same
        print(f"workers {workers}, ranks {world}: {'equal' if same else 'DIFFERENT'}", flush=True)
        shutil.rmtree(work / "fed")
    return differing


_FIRST = """
import resource, sys, time
import milldam.api, milldam.feeding.growing, milldam.loader.feeds
began = time.perf_counter()
feed = milldam.open(sys.argv[1], tokenizer=sys.argv[2], store=sys.argv[3], memory="2GB")
next(iter(feed.windows(1024).batches(16, seed=int(sys.argv[4]))))
print(time.perf_counter() - began, feed.stats()["units"])
feed.close()
"""


def first(arguments: argparse.Namespace, work: Path) -> int:
    inputs = {"10,000 files of 10 MB": _many, "files of 1 GB, .zst": _compressed}
    for name, make in inputs.items():
        data = make(arguments.text, work)
        for cache in ("cold", "warm"):
            seconds: list[float] = []
            for seed in range(arguments.rounds):
                folder = work / "cache"
                if cache == "cold":
                    shutil.rmtree(folder, ignore_errors=True)
                given = [str(data), str(arguments.tokenizer), str(work / "fed"), str(seed)]
                command = [sys.executable, "-c", _FIRST, *given]
                environment = os.environ | {"MILLDAM_CACHE": str(folder)}
                told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
                seconds.append(float(told.split()[0]))
                shutil.rmtree(work / "fed")
            found = f"median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f}"
            print(f"{name}, tokenizer {cache}: first batch {found}; {told.split()[1]} units", flush=True)
    return 0


def _many(text: Path, work: Path) -> Path:
    """Each file is one of some parts of the text under another name."""
    parts = []
    with text.open("rb") as lines:
        for number in range(min(30, text.stat().st_size // 10_000_000)):
            parts.append(work / f"part-{number:02d}")
            size = 0
            with parts[-1].open("wb") as part:
                while size < 10_000_000 and (line := lines.readline()):
                    size += part.write(line)
    for number in range(10_000):
        folder = work / "many" / f"{number // 1000}"
        folder.mkdir(parents=True, exist_ok=True)
        os.link(parts[number % len(parts)], folder / f"{number:05d}.jsonl")
    return work / "many"


def _compressed(text: Path, work: Path) -> Path:
    folder = work / "zst"
    folder.mkdir()
    copies = -(-3_000_000_000 // text.stat().st_size)
    subprocess.run(f"cat {' '.join([str(text)] * copies)} | zstd -1 -q -o {folder}/0.jsonl.zst", shell=True, check=True)
    for number in range(1, 8):
        os.link(folder / "0.jsonl.zst", folder / f"{number}.jsonl.zst")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=["equal", "first"])
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shard-size", help="of `equal`: text of a unit; default: 64MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, help="folder for what is made; default: a temporary one")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="feeding-", dir=arguments.work) as work:
        code = {"equal": equal, "first": first}[arguments.check](arguments, Path(work))
    print(f"{time.perf_counter() - began:.0f} s")
    return min(1, code)


if __name__ == "__main__":
    sys.exit(main())
