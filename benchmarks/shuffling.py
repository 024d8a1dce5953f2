"""How well the orders of a loader mix a corpus that is sorted by domain.

In: nothing; the data is made: 1,000 units of 16,000 samples (64 GB of text, in windows of 1,024 tokens), 100 domains
one after the other, each sample known by its number. Out: a Markdown table.

- domains: distinct ones among 512 consecutive samples, on average; of the part of the first epoch that is looked at.
- share: how far the share of a domain in 512 consecutive samples is from its share in the corpus (total variation).
- spread: the standard deviation of the places in the corpus of 512 consecutive samples, over that of a full shuffle.

    python benchmarks/shuffling.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import milldam
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

UNITS, UNIT_SAMPLES, DOMAINS, LOOK = 1000, 16_000, 100, 512


def write_data(folder: Path) -> None:
    """A sample is one token, its number in the corpus."""
    shards: list[Shard] = []
    folder.mkdir()
    for unit in range(UNITS):
        with ShardWriter(folder, "train", "int32") as writer:
            tokens = np.arange(unit * UNIT_SAMPLES, (unit + 1) * UNIT_SAMPLES, dtype=np.int32)
            writer.append(Tokens(tokens, np.array([UNIT_SAMPLES])))
            shards.append(replace(writer.commit(), unit=unit, part=0))
    tokenizer = {"name": "none", "eos": 0}
    manifest = Manifest("int32", 1 << 30, tokenizer, "none", {}, {}, tuple(shards), units=UNITS)
    manifest.write(folder)


def stretches(batches: Any, skip: int, count: int) -> Iterator[Any]:
    """Numbers of consecutive samples, `count` times, evenly over what follows `skip` samples."""
    apart = (UNITS * UNIT_SAMPLES - skip) // count
    for number in range(count):
        state = batches.state_dict() | {"samples_seen": skip + number * apart}
        batches.load_state_dict(state)
        yield next(batches)["input_ids"][:, 0]


def figures(batches: Any, skip: int = 0, count: int = 200) -> tuple[float, float, float]:
    seen, away, spread = [], [], []
    for numbers in stretches(batches, skip, count):
        domains = numbers * DOMAINS // (UNITS * UNIT_SAMPLES)
        shares = np.bincount(domains, minlength=DOMAINS) / len(domains)
        seen.append(len(np.unique(domains)))
        away.append(np.abs(shares - 1 / DOMAINS).sum() / 2)
        spread.append(numbers.std() / (UNITS * UNIT_SAMPLES / 12**0.5))
    return float(np.mean(seen)), float(np.mean(away)), float(np.mean(spread))


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    folder = Path(tempfile.mkdtemp(prefix="shuffling-"))
    try:
        write_data(folder / "s.milldam")
        whole = milldam.open(folder / "s.milldam").windows(1, form="hf")
        units = milldam.open(folder / "s.milldam", units=True).windows(1, form="hf")
        rows = {
            "full shuffle": (whole.batches(LOOK, seed=1), 0, 200),
            "units": (units.batches(LOOK, seed=1), 0, 200),
            "units, behind the first 128": (units.batches(LOOK, seed=1), 128 * UNIT_SAMPLES, 200),
            'shuffle="shard"': (whole.batches(LOOK, seed=1, shuffle="shard"), 0, 200),
            "a buffer of 10,000 samples, as HF has it": (_Buffer(10_000), 0, 200),
            "in sequence": (whole.batches(LOOK, shuffle=False), 0, 200),
        }
        print("| order | domains of 100 | share | spread |\n|---|--:|--:|--:|")
        for name, arguments in rows.items():
            domains, away, spread = figures(*arguments)
            print(f"| {name} | {domains:.1f} | {away:.2f} | {spread:.2f} |", flush=True)
    finally:
        shutil.rmtree(folder)
    return 0


class _Buffer:
    """The order of a shuffle buffer: a random one of the buffer goes out, the next sample comes in."""

    def __init__(self, size: int) -> None:
        self._size, self._place = size, 0
        self._random = np.random.default_rng(1)

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._place = state["samples_seen"]

    def __next__(self) -> dict[str, Any]:
        # In the long run a sample stays in the buffer for `size` steps on average, at random.
        ages = self._random.geometric(1 / self._size, LOOK)
        numbers = self._place + self._size + np.arange(LOOK) - ages
        return {"input_ids": np.clip(numbers, 0, None)[:, None]}


if __name__ == "__main__":
    sys.exit(main())
