"""Training a GPT on a GPU straight from text, against the same batches already on the GPU: step times, losses, CPU.

In: a JSON-lines file, of which `--copies` are written, each begun at another line. Out: a Markdown table, and with
--json every figure and the loss curves.

- text: `milldam.open(text, tokenizer=..., store=...)` on a store that is not begun, anew for every run: workers encode
  while the model trains.
- milldam: the same batches from the finished store, `milldam.open(store, units=True)`.
- resident: the same batches, all on the device before the clock starts. No loader can be faster.

One model, from the same weights, in turns, as `training.py` has it; kernels are deterministic, so equal batches give
equal losses to the last bit. "maker" is the CPU time of the processes that tokenize beside the training, in cores.
Exit status 1 when losses differ.

    python benchmarks/feeding_training.py text.jsonl --tokenizer gpt2 --json result.json     # an H200: 3 minutes
    python benchmarks/feeding_training.py text.jsonl --tokenizer gpt2 --device cpu --tiny    # to see that it runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

import milldam
from milldam.torch import tensors
from tiny_transformer import Shape
from training import _TINY, SEED, Case, Pair, be_deterministic, in_turns, machine

CASE = Case("124M GPT, seq 1024, batch 32", Shape(768, 12, 12, 1024), 32, warm_up=30, timed=150, rounds=3)


@dataclass(slots=True)
class FromText:
    """Begins a store anew with every run, and notes what its maker took."""

    text: list[str]
    tokenizer: str
    store: Path
    case: Case
    device: torch.device
    workers: int
    cores: list[float] = field(default_factory=list)
    """CPU seconds of the maker's processes a second of training."""
    stats: list[dict[str, float]] = field(default_factory=list)
    first_batch: list[float] = field(default_factory=list)

    def __call__(self) -> Iterator[Pair]:
        shutil.rmtree(self.store, ignore_errors=True)
        began = time.perf_counter()
        with milldam.open(self.text, tokenizer=self.tokenizer, store=self.store, workers=self.workers) as feed:
            batches = feed.windows(self.case.shape.seq_len).batches(self.case.batch_size, seed=SEED, epochs=None)
            placed: Iterator[Pair] = iter(tensors(batches, device=self.device, pin_memory=self.device.type == "cuda"))
            yield next(placed)
            self.first_batch.append(time.perf_counter() - began)
            used, started = _children_seconds(), time.perf_counter()
            # The run ends with its last batch.
            yield from itertools.islice(placed, self.case.steps - 2)
            seconds = time.perf_counter() - started
            self.cores.append((_children_seconds() - used) / max(seconds, 1e-9))
            self.stats.append(batches.stats())
            yield next(placed)


def _children_seconds() -> float:
    """CPU time of all processes below this one, those that have ended included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def write_copies(source: Path, folder: Path, copies: int) -> list[str]:
    """Files with the same documents, each begun at another one."""
    lines = source.read_bytes().splitlines(keepends=True)
    paths = []
    for number in range(copies):
        at = len(lines) * number // copies
        path = folder / f"text-{number:03}.jsonl"
        with path.open("wb") as file:
            file.writelines(lines[at:] + lines[:at])
        paths.append(str(path))
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: to see that it runs")
    parser.add_argument("--seconds", type=float, default=150, help="after these no round begins; default: 150")
    parser.add_argument("--folder", type=Path, help="where data is made for the time; default: the temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    until, device = time.monotonic() + arguments.seconds, torch.device(arguments.device)
    case = replace(_TINY, warm_up=2, timed=40) if arguments.tiny else CASE
    be_deterministic()
    folder = Path(tempfile.mkdtemp(prefix="feeding-", dir=arguments.folder))
    try:
        text = write_copies(arguments.text, folder, arguments.copies)
        # The whole store, for comparison: all cores, off the clock.
        finished = folder / "finished.milldam"
        milldam.tokenize(text, finished, tokenizer=arguments.tokenizer)
        from_text = FromText(text, arguments.tokenizer, folder / "fed.milldam", case, device, arguments.workers)
        windows = milldam.open(finished, units=True).windows(case.shape.seq_len)
        held = [
            tuple(torch.from_numpy(part).to(device) for part in pair)
            for pair in itertools.islice(windows.batches(case.batch_size, seed=SEED, epochs=None), case.steps)
        ]
        feeds: dict[str, Any] = {
            "text": from_text,
            "milldam": lambda: iter(tensors(windows.batches(case.batch_size, seed=SEED, epochs=None), device=device)),
            "resident": lambda: iter(held),
        }
        result = in_turns(case, feeds, device, until)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report(result, from_text, arguments.json, machine(device))


def report(result: Any, from_text: FromText, path: Path | None, where: dict[str, Any]) -> int:
    last = from_text.stats[-1]
    figures = {
        "machine": where,
        "case": result.case.name,
        "parameters": result.parameters,
        "tokens_per_step": result.case.tokens,
        "ms_per_step": {feed: result.median(feed) for feed in ("text", "milldam", "resident")},
        "longer_percent": {feed: result.difference(feed) for feed in ("text", "milldam")},
        "noise_percent": result.noise,
        "max_loss_difference": result.loss_difference,
        "losses": [result.of("resident")[0].losses[0], result.of("resident")[0].losses[-1]],
        "maker_cores": statistics.median(from_text.cores),
        "first_batch_seconds": statistics.median(from_text.first_batch),
        "in_next_us": 1000 * result.median("text", "in_next_ms"),
        "feed": last,
    }
    print("| feed | ms/step | over resident | in next() |\n|---|--:|--:|--:|")
    for feed in ("text", "milldam", "resident"):
        over = "" if feed == "resident" else f"{result.difference(feed):+.2f} %"
        waiting = f"{1000 * result.median(feed, 'in_next_ms'):.0f} us"
        print(f"| {feed} | {result.median(feed):.3f} | {over} | {waiting} |")
    equal = "equal" if result.loss_difference == 0 else f"differ by {result.loss_difference:.2g}"
    print(f"noise {result.noise:.2f} %; losses {equal}: {figures['losses'][0]:.3f} to {figures['losses'][1]:.3f}")
    print(f"maker {figures['maker_cores']:.2f} cores, first batch {figures['first_batch_seconds']:.2f} s; {last}")
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if result.loss_difference == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
