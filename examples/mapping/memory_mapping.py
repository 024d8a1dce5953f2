"""A tokenizer mapped over documents of megabytes without a space: memory after each of 16 shards.

Makes the documents first (once), unless a folder with some is given: one JSON file each, with `text`, `label` and
`file`; half a million characters in the middle, 1.3 MB on average, none with a space or a newline.

    python examples/mapping/memory_mapping.py --mode BASIC --memory 512MB          one milldam.map over all
    python examples/mapping/memory_mapping.py --mode SHARD --num_files 45          one milldam.map a shard

Run it twice: the first run takes the same memory from the first shard to the last, the second has nothing to do. Stop
the first one anywhere: the next goes on from there. Anonymous memory is what counts: it is what can get a process
killed. File-backed memory is mapped files, which the system takes back whenever it wants.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import milldam
from milldam.memory import Usage, parse_size, process_tree, usage

SHARDS = 16
UNITS_OF_SHARD = 2
"""In SHARD mode, so that two workers share a shard."""
MEDIAN, SPREAD, LARGEST = 562_000, 1.955, 4_000_000
"""Characters of a document, log-normal: 1.3 million on average. What has no white space for longer is not encoded."""
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
WORDS_AT_ONCE = 10_000
SAMPLE_SECONDS = 0.1


# ---- the documents ----


def sizes(count: int) -> list[int]:
    """Characters of each document, in an order that mixes small and large ones; the same every time."""
    normal = statistics.NormalDist()
    spread = [normal.inv_cdf((n + 0.5) / count) for n in range(count)]
    found = [min(LARGEST, int(MEDIAN * 2.718281828459045 ** (SPREAD * z))) for z in spread]
    random.Random(0).shuffle(found)
    return found


def write_document(path: Path, number: int, size: int, words: list[str]) -> None:
    """A line of JSON, written piece by piece; it has its name when it is whole."""
    rng = random.Random(number)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="ascii") as file:
        file.write(f'{{"label": {number % 10}, "file": "{path.name}", "text": "')
        while size > 0:
            size -= file.write("".join(rng.choices(words, k=WORDS_AT_ONCE))[:size])
        file.write('"}\n')
    temporary.replace(path)


def make_documents(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(20_000)]
    paths = [folder / f"{number:04}.jsonl" for number in range(count)]
    for number, (path, size) in enumerate(zip(paths, sizes(count), strict=True)):
        if not path.exists():
            write_document(path, number, size, words)
    return paths


# ---- memory ----


def tree_usage() -> Usage:
    """Of this program and its workers."""
    return sum((usage(process) for process in process_tree()), Usage())


@dataclass(frozen=True, slots=True)
class After:
    """Memory when a shard was finished, and the most that was in use while it was made."""

    shard: int
    anonymous: int
    file_backed: int
    peak_anonymous: int
    seconds: float


class Watch:
    """Samples memory all the time; `finished` looks at it now."""

    def __init__(self) -> None:
        self.shards: list[After] = []
        self.peak = 0
        self._started = time.perf_counter()
        self._highest = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._note(tree_usage())

    def _note(self, now: Usage) -> None:
        self._highest, self.peak = max(self._highest, now.anonymous), max(self.peak, now.anonymous)

    def finished(self, shard: int) -> None:
        now = tree_usage()
        self._note(now)
        seconds = time.perf_counter() - self._started
        self.shards.append(After(shard, now.anonymous, now.file, self._highest, seconds))
        print(f"AFTER SHARD {shard:2}: {told(now)}, at most {self._highest / 1e6:.0f} MB meanwhile", flush=True)
        self._highest = now.anonymous

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def told(memory: Usage) -> str:
    return f"anonymous {memory.anonymous / 1e6:.0f} MB, file-backed {memory.file / 1e6:.0f} MB"


# ---- mapping ----


def tokenizing(encode: milldam.TextEncoder) -> Callable[[Any], dict[str, Any]]:
    """The function to map: ids as numpy arrays, no Python object per token."""

    def tokenize(batch: Any) -> dict[str, Any]:
        return {"input_ids": encode(batch["text"])}

    return tokenize


def options(arguments: argparse.Namespace, paths: list[Path], units: int) -> dict[str, Any]:
    return {
        "shard_size": sum(map(os.path.getsize, paths)) // units + 1,
        "batch_size": arguments.batch_size,
        "format": "arrow",
        "remove_columns": ["text"],
        "workers": arguments.num_proc,
        # The limit is for everything, also for what this program holds by now; milldam's comes on top of that.
        "memory": None if arguments.memory is None else parse_size(arguments.memory) - usage().anonymous,
    }


def basic(
    paths: list[Path], encode: milldam.TextEncoder, arguments: argparse.Namespace, watch: Watch
) -> list[milldam.Table]:
    """One call. A shard is finished when its file is there."""
    out = arguments.out / "basic"
    done = threading.Event()

    def look() -> None:
        before = set(out.glob("rows-*.arrow"))
        shard = len(before)
        while not done.wait(SAMPLE_SECONDS):
            for _ in range(len(set(out.glob("rows-*.arrow")) - before) + len(before) - shard):
                watch.finished(shard)
                shard += 1

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    table = milldam.map([str(path) for path in paths], tokenizing(encode), out, **options(arguments, paths, SHARDS))
    time.sleep(2 * SAMPLE_SECONDS)
    done.set()
    looking.join()
    return [table]


def by_shard(
    paths: list[Path], encode: milldam.TextEncoder, arguments: argparse.Namespace, watch: Watch
) -> list[milldam.Table]:
    """A call a shard; together they are used as one."""
    tables = []
    for shard in range(SHARDS):
        part = paths[len(paths) * shard // SHARDS : len(paths) * (shard + 1) // SHARDS]
        if part:
            out = arguments.out / f"shard-{shard:02}"
            source = [str(path) for path in part]
            tables.append(milldam.map(source, tokenizing(encode), out, **options(arguments, part, UNITS_OF_SHARD)))
            watch.finished(shard)
    return tables


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["BASIC", "SHARD"], default="BASIC")
    parser.add_argument("--num_files", type=int, default=673, help="documents to make, or to take of those given")
    parser.add_argument("--batch_size", type=int, default=1, help="documents a call of the function, at most")
    parser.add_argument(
        "--writer_batch_size", type=int, help="taken, but not needed: what is written is about 4 MB each"
    )
    parser.add_argument("--num_proc", type=int, help="worker processes; by default as many as cores and memory allow")
    parser.add_argument("--memory", help="limit for all of them together, e.g. 512MB; by default half of what is free")
    parser.add_argument("--documents", type=Path, help="a folder of .jsonl files with text; made by default")
    parser.add_argument("--tokenizer", default="openai-community/gpt2", help="file, folder or Hub name")
    parser.add_argument("--out", type=Path, default=Path("memory-mapping"), help="folder for documents and tables")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    if arguments.documents is None:
        paths = make_documents(arguments.out / f"documents-{arguments.num_files}", arguments.num_files)
    else:
        paths = sorted(arguments.documents.glob("*.jsonl"))[: arguments.num_files]
    if not paths:
        sys.exit(f"{arguments.documents}: no .jsonl files")
    made = time.perf_counter() - started
    print(f"DATASET SIZE: {sum(map(os.path.getsize, paths)) / 1e9:.2f} GB in {len(paths)} documents")
    encode = milldam.TextEncoder(arguments.tokenizer)
    loaded = tree_usage()
    print(f"AFTER LOADING: {told(loaded)}", flush=True)
    watch = Watch()
    started = time.perf_counter()
    tables = (basic if arguments.mode == "BASIC" else by_shard)(paths, encode, arguments, watch)
    seconds = time.perf_counter() - started
    watch.stop()
    reports = [table.report for table in tables if table.report is not None]
    reused, units = sum(report.reused for report in reports), sum(report.units for report in reports)
    print(f"{reused} of {units} units reused")
    rows, tokens = sum(map(len, tables)), sum(count_tokens(table) for table in tables)
    print(f"{rows:,} documents, {tokens:,} tokens in {seconds:.1f} s; peak anonymous {watch.peak / 1e6:.0f} MB")
    if arguments.json:
        figures = {
            "seconds": seconds,
            "making_seconds": made,
            "loaded_anonymous": loaded.anonymous,
            "peak_anonymous": watch.peak,
            "reused": reused,
            "units": units,
            "rows": rows,
            "tokens": tokens,
            "shards": [{name: getattr(one, name) for name in After.__slots__} for one in watch.shards],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def count_tokens(table: milldam.Table) -> int:
    """From the lists' offsets: no id is read."""
    import pyarrow.compute as pc

    return int(pc.sum(pc.list_value_length(table["input_ids"])).as_py())


if __name__ == "__main__":
    main()
