"""The tables of docs/scale.md: what a job would need that is too large to try, by the constants of `milldam plan`.

    python benchmarks/scale.py                                  15 TB, 10 billion documents, 60,000 units
    python benchmarks/scale.py --input 1e12 --documents 1e9 --units 4000 --nodes 1 4 8

Nothing is read: the figures of pipeline/needs.py, with what only matters at such sizes (manifest, run folder, loader).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import replace

from milldam.config.settings import Config
from milldam.dedup import DECIDE, GROUP, NEAR, SHINGLE, VERIFY
from milldam.memory import format_size
from milldam.pipeline.needs import Load, Machines, Needs, find_needs

# English JSON lines, GPT-2: seconds of one core for a gigabyte of text, and for a document (docs/log.md).
WORK = {"read": 5.8, "hash": 0.2, "signatures": 2.4, "encode": 9.7, "write": 1.4}
DOCUMENT_WORK = {"hash": 2e-6, "signatures": 2e-6}
TEXT_SHARE, BYTES_A_TOKEN, TOKEN_BYTES = 0.98, 4.4, 2

# A shard: its entry in the manifest and in the records; its cost in a loader (a store of 60,000 shards, links to one).
MANIFEST_BYTES, RECORD_BYTES = 350, 420
OPEN_SECONDS, FIRST_BATCH_SECONDS, LOADER_BYTES = 11e-6, 16e-6, 1700

EXACT = ("fingerprint", GROUP, "tokenize", "report")
WITH_NEAR = ("fingerprint", GROUP, NEAR, SHINGLE, VERIFY, DECIDE, "tokenize", "report")


def load_of(input_bytes: float, documents: float, units: int) -> Load:
    text = input_bytes * TEXT_SHARE
    work = {kind: one * text / 1e9 + DOCUMENT_WORK.get(kind, 0.0) * documents for kind, one in WORK.items()}
    tokens = int(text / BYTES_A_TOKEN)
    return Load(
        documents=int(documents),
        text_bytes=int(text),
        tokens=tokens,
        token_bytes=tokens * TOKEN_BYTES,
        input_bytes=int(input_bytes),
        units=units,
        shard_size=int(input_bytes / units),
        keeps_texts=False,
        work=defaultdict(float, work),
    )


def show_sizes(name: str, needs: Needs) -> None:
    stage, most = needs.peak
    print(f"\n{name}: {needs.shards:,} shards, {needs.tokens / 1e12:.1f} trillion tokens")
    print(f"  store {format_size(needs.store_bytes)}, {format_size(needs.index_bytes)} of it .idx")
    manifest, records = (format_size(needs.shards * one) for one in (MANIFEST_BYTES, RECORD_BYTES))
    print(f"  manifest {manifest}, records {records}")
    print(f"  {needs.partitions} partitions of hashes, {needs.band_steps} steps of bands")
    print("  meanwhile: " + ", ".join(f"{kind} {format_size(size)}" for kind, size in needs.temporary_bytes.items()))
    print(f"  disk at most {format_size(most)}, in {stage}")
    first = needs.shards * (OPEN_SECONDS + FIRST_BATCH_SECONDS)
    print(f"  loader: first batch after {first:.1f} s, {format_size(needs.shards * LOADER_BYTES)} a process")


def show_hours(by_nodes: dict[int, Needs]) -> None:
    print("  hours on nodes".ljust(18) + "".join(f"{nodes:>10}" for nodes in by_nodes))
    stages = next(iter(by_nodes.values())).seconds
    for stage in stages:
        print(f"  {stage:<16}" + "".join(f"{needs.seconds[stage] / 3600:10.2f}" for needs in by_nodes.values()))
    print("  in all".ljust(18) + "".join(f"{sum(needs.seconds.values()) / 3600:10.1f}" for needs in by_nodes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=float, default=15e12, help="bytes of JSON lines")
    parser.add_argument("--documents", type=float, default=1e10)
    parser.add_argument("--units", type=int, default=60_000)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--workers", type=int, default=32, help="of each node")
    given = parser.parse_args()
    load = load_of(given.input, given.documents, given.units)
    exact = Config(datasets="corpus/", tokenizer="gpt2", out="corpus.milldam", dedup="exact")
    jobs = {"exact dedup": (exact, EXACT), "near-dedup": (replace(exact, dedup="near"), WITH_NEAR)}
    for name, (config, stages) in jobs.items():
        found = {nodes: find_needs(config, load, stages, Machines(nodes, given.workers)) for nodes in given.nodes}
        show_sizes(name, found[given.nodes[0]])
        show_hours(found)


if __name__ == "__main__":
    main()
