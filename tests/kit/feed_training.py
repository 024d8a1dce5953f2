"""A training program that can be killed anywhere: `python -m tests.kit.feed_training SETTINGS.json`.

It steps the batches of all ranks together, as training does, writes a line for each step and saves its state after it;
started again, it goes on from the state.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import milldam


def sample_digests(batch: Any) -> list[str]:
    """A digest for each sample of an (x, y) batch."""
    return [xxhash.xxh3_64_hexdigest(np.concatenate(pair).tobytes()) for pair in zip(*batch, strict=True)]


def feed_digests(
    feed: milldam.Feed, batches: int | None = None, *, split: str | None = None, **options: Any
) -> list[str]:
    """Of the samples of some batches, or of all."""
    found: list[str] = []
    for number, batch in enumerate(feed.windows(32, split=split).batches(8, **{"seed": 3} | options), start=1):
        found += sample_digests(batch)
        if number == batches:
            break
    return found


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    steps, state = Path(settings["steps"]), Path(settings["state"])
    world = settings["world"]
    with milldam.open(settings["input"], **settings["options"]) as feed, steps.open("a") as log:
        samples = feed.windows(settings["seq_len"])
        order = {"seed": settings["seed"], "epochs": settings["epochs"], "drop_last": False}
        ranks = [samples.batches(settings["batch"], rank=rank, world_size=world, **order) for rank in range(world)]
        if state.exists():
            for batches in ranks:
                batches.load_state_dict(json.loads(state.read_text()))
        iterators = [iter(batches) for batches in ranks]
        while True:
            seen = ranks[0].state_dict()["samples_seen"]
            if seen == settings["samples"]:
                break
            step = [next(iterator, None) for iterator in iterators]
            digests = [[] if batch is None else sample_digests(batch) for batch in step]
            log.write(json.dumps([seen, world, digests]) + "\n")
            log.flush()
            new = state.with_suffix(".new")
            new.write_text(json.dumps(ranks[0].state_dict()))
            new.replace(state)
            time.sleep(settings.get("pause", 0.0))
    Path(settings["done"]).touch()


if __name__ == "__main__":
    main()
