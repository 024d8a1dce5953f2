"""The peers that `near.py peers` measures milldam against, each run in a process of its own.

In: a peer's name, a folder of part-*.jsonl (fields `id`, `text`) and an empty folder. Out: in that folder the documents
that were kept, as JSON lines, and on stdout one JSON line with the peer's version and their ids. All of them look for
word 5-grams in common, threshold 0.8, on as many processes or threads as are asked for.

- rensa: n-grams made in Python as its README makes words, a batch at a time; `from_token_sets` (all cores) and
  `add_pairs`, which compares each document with those kept so far. 256 values in 32 bands of 8, as milldam has.
- datatrove: its four stages (signatures, buckets, clusters, filter), its default of 14 buckets of 8 hashes; it takes
  all pairs that share a bucket, so its threshold follows from these: about 0.72.
- text-dedup: its command `text_dedup.minhash`, 256 values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

PARTS = "part-*.jsonl"
NGRAM, THRESHOLD, BANDS, ROWS = 5, 0.8, 32, 8
RENSA_BATCH = 1000
"""Documents whose n-grams are held at once, as Python texts."""
_WORD = re.compile(r"\w+")

Job = tuple[Path, Path, int]
"""Corpus, folder, workers."""


def read_lines(corpus: Path) -> Iterator[str]:
    for path in sorted(corpus.glob(PARTS)):
        with path.open(encoding="utf-8") as lines:
            yield from lines


def ngrams(text: str) -> list[str]:
    words = _WORD.findall(text.lower())
    return [" ".join(words[k : k + NGRAM]) for k in range(max(1, len(words) - NGRAM + 1))]


def run_rensa(job: Job) -> list[int]:
    corpus, folder, workers = job
    os.environ["RAYON_NUM_THREADS"] = str(workers)
    from rensa import RMinHash, RMinHashDeduplicator

    size = BANDS * ROWS
    dedup = RMinHashDeduplicator(threshold=THRESHOLD, num_perm=size, use_lsh=True, num_bands=BANDS)
    kept: list[int] = []
    with (folder / "kept.jsonl").open("w", encoding="utf-8") as out:
        all_lines = read_lines(corpus)
        while lines := list(islice(all_lines, RENSA_BATCH)):
            records = [json.loads(line) for line in lines]
            sketches = RMinHash.from_token_sets([ngrams(one["text"]) for one in records], num_perm=size, seed=42)
            keys = [str(one["id"]) for one in records]
            flags = dedup.add_pairs(list(zip(keys, sketches, strict=True)))
            out.writelines(line for line, keep in zip(lines, flags, strict=True) if keep)
            kept += [one["id"] for one, keep in zip(records, flags, strict=True) if keep]
    return kept


def run_datatrove(job: Job) -> list[int]:
    corpus, folder, workers = job
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter

    config = MinhashConfig(n_grams=NGRAM)
    places = {name: str(folder / name) for name in ("signatures", "buckets", "clusters", "kept")}
    read = JsonlReader(str(corpus), glob_pattern=PARTS)
    write = JsonlWriter(places["kept"], compression=None)
    stages: list[tuple[str, list[Any], int]] = [
        ("sign", [read, MinhashDedupSignature(places["signatures"], config)], workers),
        ("bucket", [MinhashDedupBuckets(places["signatures"], places["buckets"], config=config)], config.num_buckets),
        ("cluster", [MinhashDedupCluster(places["buckets"], places["clusters"], config=config)], 1),
        ("filter", [read, MinhashDedupFilter(places["clusters"]), write], workers),
    ]
    for name, stage, tasks in stages:
        logs = str(folder / "logs" / name)
        LocalPipelineExecutor(
            stage, tasks=tasks, workers=min(workers, tasks), logging_dir=logs, start_method="fork"
        ).run()
    return ids_of(Path(places["kept"]).glob("*.jsonl"))


def run_text_dedup(job: Job) -> list[int]:
    corpus, folder, workers = job
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    from datasets import load_dataset, load_from_disk

    # Its own reader knows a hub's datasets and saved ones.
    files = [str(path) for path in sorted(corpus.glob(PARTS))]
    load_dataset("json", data_files=files, split="train").save_to_disk(str(folder / "saved"))
    shape = ["--ngram", NGRAM, "--threshold", THRESHOLD, "--num_perm", BANDS * ROWS, "--b", BANDS, "--r", ROWS]
    places = ["--path", folder / "saved", "--output", folder / "kept", "--cache_dir", folder / "cache"]
    options = ["--local", "--column", "text", "--split", "train", "--batch_size", 1000, "--num_proc", workers]
    command = [sys.executable, "-m", "text_dedup.minhash", *shape, *places, *options]
    subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
    return [int(one) for one in load_from_disk(str(folder / "kept"))["id"]]


def ids_of(paths: Iterator[Path]) -> list[int]:
    """datatrove does not write an id of 0."""
    return [json.loads(line).get("id", 0) for path in paths for line in path.open(encoding="utf-8")]


PEERS: dict[str, Callable[[Job], list[int]]] = {
    "rensa": run_rensa,
    "datatrove": run_datatrove,
    "text-dedup": run_text_dedup,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("corpus", type=Path, help=f"a folder of {PARTS}")
    parser.add_argument("folder", type=Path, help="an empty one")
    parser.add_argument("--workers", type=int, default=2, help="processes or threads (2)")
    given = parser.parse_args()
    kept = PEERS[given.peer]((given.corpus, given.folder, given.workers))
    print(json.dumps({"version": metadata.version(given.peer), "kept": kept}))


if __name__ == "__main__":
    main()
