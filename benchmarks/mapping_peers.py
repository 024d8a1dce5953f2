"""What `mapping.py` measures milldam against, in a process of its own: HF datasets mapping a tokenizer, as users do.

In: a folder of .jsonl files (text, label, file), a tokenizer.json, a folder for the cache. Out: on stdout one JSON line
with the anonymous memory after loading and after each of 16 shards, the seconds, the tokens and the versions.

The program of seed 000 in SHARD mode: the dataset in 16 parts, each mapped (`tokenizer(batch["text"])`, batches of
one, writer_batch_size=1, in this process), all kept and put together at the end. A second run finds them cached.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

SHARDS = 16


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(number) for number in re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", status))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("documents", "tokenizer", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--shards", type=int, default=SHARDS, help="map only the first so many of the 16")
    arguments = parser.parse_args()

    from datasets import concatenate_datasets, disable_progress_bars, load_dataset
    from transformers import PreTrainedTokenizerFast

    disable_progress_bars()
    files = sorted(str(path) for path in arguments.documents.glob("*.jsonl"))
    started = time.perf_counter()
    # One document can be larger than the loader's chunks, which it then grows by itself.
    data = load_dataset("json", data_files=files, split="train", cache_dir=str(arguments.folder / "cache"))
    loading = time.perf_counter() - started
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(arguments.tokenizer))

    def tokenize(batch: dict[str, list[Any]]) -> Any:
        return tokenizer(batch["text"])

    loaded = anonymous_bytes()
    shards, parts = [], []
    started = time.perf_counter()
    for number in range(min(arguments.shards, len(data))):
        part = data.shard(SHARDS, number, contiguous=True)
        part = part.map(tokenize, batched=True, batch_size=1, writer_batch_size=1, remove_columns=["text"])
        parts.append(part)
        seconds = time.perf_counter() - started
        shards.append({"shard": number, "anonymous": anonymous_bytes(), "seconds": seconds})
    made = concatenate_datasets(parts)
    figures = {
        "seconds": time.perf_counter() - started,
        "loading_seconds": loading,
        "loaded_anonymous": loaded,
        "rows": len(made),
        "tokens": sum(count_tokens(made, row) for row in range(len(made))),
        "shards": shards,
        "versions": {name: metadata.version(name) for name in ("datasets", "transformers", "tokenizers")},
    }
    print(json.dumps(figures))


def count_tokens(data: Any, row: int) -> int:
    """From the mapped table, without making Python lists of the ids."""
    return len(data.data.column("input_ids")[row].values)


if __name__ == "__main__":
    main()
