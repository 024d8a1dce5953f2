"""Near-duplicates: how fast signatures are made, how good they are, and what finding the duplicates costs.

    python benchmarks/near.py signatures CORPUS.jsonl.zst     # MB of text a CPU second, one core, by document size
    python benchmarks/near.py estimate                        # bias, spread and recall on pairs of known similarity
    python benchmarks/near.py resolve 200_000 2_000_000 --memory 256MB --threads 2

`resolve` works on made-up signatures, a fifth of which are near-duplicates of another one (similarity 0.85, in clusters
of up to a few dozen), in a temporary folder (256 bytes of disk a document, and 65 more while it works). Each size runs
in a process of its own; its memory is what it holds beyond the imports, sampled every 10 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from milldam.dedup.minhash import CHANCE, MinHasher, SignatureWriter, signature_file_name
from milldam.dedup.near import least_matches, resolve_near
from milldam.dedup.rules import NearRules
from milldam.memory import usage
from milldam.sources.compression import read_blocks
from sizes import megabytes, parse_size

RULES = NearRules(ngram=5, bands=32, rows=8, threshold=0.8)
DOCUMENT_BYTES = (100, 500, 2800, 20_000)
ROUNDS = 5
UNIT_DOCUMENTS = 100_000
SAMPLE_SECONDS = 0.01


# ---- signatures ----


def measure_signatures(corpus: Path, megabytes_read: int) -> None:
    """The best of some rounds, by the process's own time: others on the machine disturb it least."""
    compression = "zst" if corpus.suffix == ".zst" else None
    with corpus.open("rb") as file:
        head = next(read_blocks(file, compression, megabytes_read * 10**6))
    text = "\n".join(json.loads(line)["text"] for line in head.split(b"\n")[:-1])
    hasher = MinHasher(RULES)
    for size in DOCUMENT_BYTES:
        documents = pa.array([text[at : at + size] for at in range(0, len(text), size)], pa.large_string())
        best = min(_cpu_seconds(hasher, documents) for _ in range(ROUNDS))
        print(f"documents of {size:6} characters: {documents.nbytes / best / 1e6:6.1f} MB a CPU second")


def _cpu_seconds(hasher: MinHasher, documents: pa.LargeStringArray) -> float:
    start = time.process_time()
    hasher.signatures(documents)
    return time.process_time() - start


# ---- estimate ----


def measure_estimate(pairs: int) -> None:
    """For pairs that differ in single words, so that the true similarity is known."""
    random, hasher = np.random.default_rng(0), MinHasher(RULES)
    print("words  similarity  mean estimate  deviation (256 permutations)  compared  taken")
    for every in (45, 23, 15):
        for replaced in (2, 4, 8, 20):
            true = (every - 5) / (every + 5)
            sides = zip(*(_pair(random, replaced, every) for _ in range(pairs)), strict=True)
            one, other = (hasher.signatures(pa.array(side, pa.large_string())) for side in sides)
            equal = one == other
            estimate = (equal.mean(axis=1) - CHANCE) / (1 - CHANCE)
            compared = equal.reshape(pairs, RULES.bands, RULES.rows).all(axis=2).any(axis=1)
            taken = compared & (equal.sum(axis=1) >= least_matches(RULES))
            spread = f"{estimate.std():.4f} ({(true * (1 - true) / 256) ** 0.5:.4f})"
            line = f"{every * replaced + 4:5} {true:11.3f} {estimate.mean():14.4f}  {spread:28}"
            print(f"{line} {compared.mean():9.3f} {taken.mean():6.3f}")


def _pair(random: np.random.Generator, replaced: int, every: int) -> tuple[str, str]:
    one = [f"w{number}" for number in random.integers(0, 20_000, every * replaced + 4).tolist()]
    other = list(one)
    for k in range(replaced):
        other[k * every + 4] = f"x{random.integers(0, 10**9)}"
    return " ".join(one), " ".join(other)


# ---- resolve ----


def make_signatures(folder: Path, documents: int) -> None:
    """Random rows; every fifth is a copy of an earlier one of its unit with 15 % of the places changed."""
    random = np.random.default_rng(0)
    for unit, start in enumerate(range(0, documents, UNIT_DOCUMENTS)):
        rows = random.integers(0, 255, (min(UNIT_DOCUMENTS, documents - start), 256), dtype=np.uint8)
        copies = np.arange(4, len(rows), 5)
        models = (copies * random.random(len(copies)) ** 2).astype(np.int64)
        models -= models % 5 == 4  # models are no copies themselves
        changed = random.random((len(copies), 256), dtype=np.float32) < 0.15
        rows[copies] = np.where(changed, rows[copies], rows[models])
        with SignatureWriter(folder / signature_file_name(unit)) as writer:
            writer.add(rows)
            writer.commit()


def measure_resolve(documents: int, memory: str, threads: int) -> None:
    """Make the signatures here, resolve them in a new process."""
    with tempfile.TemporaryDirectory() as name:
        make_signatures(Path(name), documents)
        arguments = ["resolve-here", name, "--memory", memory, "--threads", str(threads)]
        subprocess.run([sys.executable, __file__, *arguments], check=True)


def resolve_here(folder: Path, memory_bytes: int, threads: int) -> None:
    held = usage().anonymous
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_SECONDS):
            peak = max(peak, usage().anonymous)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    found = resolve_near(folder, RULES, exempt_below=0, memory_bytes=memory_bytes, threads=threads)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    counts = f"{found.documents:,} documents, {found.candidates:,} candidates, {found.dropped:,} dropped"
    print(f"{counts}: {seconds:.1f} s, peak {megabytes(peak - held)} of {megabytes(memory_bytes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    signatures = commands.add_parser("signatures")
    signatures.add_argument("corpus", type=Path, help="JSON lines with a field text, compressed or not")
    signatures.add_argument("--megabytes", type=int, default=8)
    estimate = commands.add_parser("estimate")
    estimate.add_argument("--pairs", type=int, default=1000)
    resolve = commands.add_parser("resolve")
    resolve.add_argument("documents", type=int, nargs="+")
    here = commands.add_parser("resolve-here")
    here.add_argument("folder", type=Path)
    for command in (resolve, here):
        command.add_argument("--memory", default="256MB")
        command.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.command == "signatures":
        measure_signatures(arguments.corpus, arguments.megabytes)
    elif arguments.command == "estimate":
        measure_estimate(arguments.pairs)
    elif arguments.command == "resolve-here":
        resolve_here(arguments.folder, parse_size(arguments.memory), arguments.threads)
    else:
        for documents in arguments.documents:
            measure_resolve(documents, arguments.memory, arguments.threads)


if __name__ == "__main__":
    main()
