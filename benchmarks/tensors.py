"""What `milldam.torch.tensors` costs a training loop on a GPU: time in next(), and step time against other feeds.

In: nothing; the data is made as `training.py` makes it. Out: three Markdown tables, and with --json every figure:

- whether the batches are equal, tensor by tensor, to those made by the plainest means (exit status 1 when not);
- time in next() and step time of a GPT, for 16 x 1024 and 64 x 128, the loss read after every step or not, with
  batches that are on the GPU already (resident), from milldam, and from the same numpy batches by
  `torch.from_numpy(...).to("cuda", non_blocking=True)` (naive). All train one model from the same weights, in turns;
- the parts: what the numpy batch takes, and each call of torch that a feed is made of, with nothing else to do.

Differences in percent are medians over the rounds; the noise is how far the resident runs lie apart.

    python benchmarks/tensors.py --json tensors.json               # an H200: about five minutes
    python benchmarks/tensors.py --device cpu --tiny               # only to see that it runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milldam.loader.stores import Store
from milldam.torch import tensors
from tiny_transformer import Shape
from training import (
    SEED,
    Case,
    Feed,
    Pair,
    Result,
    be_deterministic,
    fed,
    in_turns,
    machine,
    resident,
    temporary_data,
)

FEEDS = ("milldam", "naive")
COMPARED = 100
"""Batches whose tensors are compared."""
_LONG = Case("16 x 1024, 124M", Shape(768, 12, 12, 1024), 16, timed=150, rounds=3)
_SHORT = Case("64 x 128, 18M", Shape(256, 6, 4, 128), 64, timed=400, rounds=4)
CASES = (
    replace(_LONG, name=f"{_LONG.name}, loss read", reads_loss=True),
    replace(_SHORT, name=f"{_SHORT.name}, loss read", reads_loss=True),
    _SHORT,
    _LONG,
)
_TINY = Case("4 x 64, tiny", Shape(32, 2, 2, 64), 4, warm_up=2, timed=6, rounds=2)
TINY_CASES = (_TINY, replace(_TINY, name="4 x 64, tiny, loss read", reads_loss=True))


# Equal batches


def compared(store: Store, device: torch.device) -> Iterator[tuple[str, bool]]:
    """Kinds of batches, and whether the first hundred are the same by either way."""
    kinds: dict[str, Callable[[], Any]] = {
        "windows": lambda: store.windows(1024).batches(16, seed=SEED),
        "windows, form hf": lambda: store.windows(1024, form="hf").batches(16, seed=SEED),
        "windows, reading ahead": lambda: store.windows(128).batches(64, seed=SEED, prefetch=2),
        "packed": lambda: store.packed(1024).batches(16, seed=SEED),
    }
    for name, made in kinds.items():
        pairs = zip(tensors(made(), device=device), made(), strict=False)
        yield name, all(_equal(there, here) for there, here in itertools.islice(pairs, COMPARED))


def _equal(there: Any, here: Any) -> bool:
    if isinstance(here, dict):
        return there.keys() == here.keys() and all(_equal(there[name], here[name]) for name in here)
    if isinstance(here, tuple):
        return len(there) == len(here) and all(map(_equal, there, here))
    if isinstance(here, np.ndarray):
        wanted = torch.from_numpy(here)
        return there.dtype == wanted.dtype and bool(torch.equal(there.cpu(), wanted))
    return bool(there == here)


# Training


def naive(store: Store, case: Case, device: torch.device) -> Feed:
    def feed() -> Iterator[Pair]:
        for x, y in store.windows(case.shape.seq_len).batches(case.batch_size, seed=SEED, epochs=None):
            yield torch.from_numpy(x).to(device, non_blocking=True), torch.from_numpy(y).to(device, non_blocking=True)

    return feed


def measure(case: Case, store: Store, device: torch.device, until: float) -> Result:
    feeds = {
        "milldam": fed(store, case, device),
        "resident": resident(store, case, device),
        "naive": naive(store, case, device),
    }
    return in_turns(case, feeds, device, until)


HEADER = (
    "| case | ms/step, resident | noise | milldam: difference | in next(), median | p99 "
    "| naive: difference | in next(), median | p99 | losses |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


def row(result: Result) -> str:
    cells = [result.case.name, f"{result.median('resident'):.3f}", f"{result.noise:.2f} %"]
    for feed in FEEDS:
        waits = (1000 * result.median(feed, name) for name in ("in_next_ms", "in_next_p99_ms"))
        cells += [f"{result.difference(feed):+.2f} %", *(f"{wait:.0f} µs" for wait in waits)]
    cells.append("equal" if result.loss_difference == 0 else f"differ by {result.loss_difference:.2g}")
    return f"| {' | '.join(cells)} |"


def record(result: Result) -> dict[str, Any]:
    figures = ("ms_per_step", "median_ms", "slowest_ms", "in_next_ms", "in_next_p99_ms")
    runs = [{"feed": run.feed, **{name: getattr(run, name) for name in figures}} for run in result.runs]
    differences = {feed: result.difference(feed) for feed in FEEDS}
    return {"case": result.case.name, "difference_percent": differences, "noise_percent": result.noise, "runs": runs}


# Parts


def parts(store: Store, device: torch.device, batch_size: int, seq_len: int) -> dict[str, list[float]]:
    """Microseconds of each part, many times over; the device is idle before each."""
    on_gpu = device.type == "cuda"
    narrow = store.windows(seq_len).batches(batch_size, seed=SEED, epochs=None, dtype=np.uint16)
    wide = store.windows(seq_len).batches(batch_size, seed=SEED, epochs=None)
    ours = tensors(store.windows(seq_len).batches(batch_size, seed=SEED, epochs=None), device=device)
    block = torch.empty(2 * 2 * batch_size * seq_len, dtype=torch.uint8, pin_memory=on_gpu)
    there, array = block.to(device), np.zeros(len(block), np.uint8)
    calls: dict[str, Callable[[], Any]] = {
        "next(tensors)": lambda: next(ours),
        "numpy batch, uint16": lambda: next(narrow),
        "numpy batch, int64": lambda: next(wide),
        "torch.empty, pinned": lambda: torch.empty(len(block), dtype=torch.uint8, pin_memory=on_gpu),
        "copy into pinned": lambda: np.copyto(block.numpy(), array),
        "torch.empty on the device": lambda: torch.empty(len(block), dtype=torch.uint8, device=device),
        "block to the device": lambda: block.to(device, non_blocking=True, copy=True),
        "pageable to the device": lambda: torch.from_numpy(array).to(device, non_blocking=True, copy=True),
        "widen there": lambda: there.view(torch.uint16).to(torch.int64),
        "view there": lambda: there[: len(block) // 2].view(torch.uint16).view(batch_size, seq_len).data,
    }
    if on_gpu:
        event = torch.cuda.Event()
        calls["record an event"] = event.record
        calls["wait for an event that is over"] = event.synchronize
        calls["current stream"] = lambda: torch.cuda.current_stream(device)
    return {name: _microseconds(call, on_gpu) for name, call in calls.items()}


def _microseconds(call: Callable[[], Any], on_gpu: bool) -> list[float]:
    times: list[float] = []
    for _ in range(400):
        if on_gpu:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begun))
    return times[100:]


# The whole


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little data: to see that it runs")
    parser.add_argument("--tokens", type=int, default=50_000_000, help="of the data; default: 50,000,000")
    parser.add_argument("--seconds", type=float, default=240, help="after these no round begins; default: 240")
    parser.add_argument("--folder", type=Path, help="where the data is made for the time; default: the temporary one")
    parser.add_argument("--json", type=Path, help="all figures to this file")
    return parser.parse_args()


def print_parts(store: Store, device: torch.device) -> dict[str, Any]:
    print("\n| parts, µs: median (p99) | 16 x 1024 | 64 x 128 |\n|---|--:|--:|")
    sizes = [parts(store, device, *size) for size in ((16, 1024), (64, 128))]
    for name in sizes[0]:
        cells = (f"{np.percentile(size[name], 50):.1f} ({np.percentile(size[name], 99):.0f})" for size in sizes)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return {"16 x 1024": sizes[0], "64 x 128": sizes[1]}


def main() -> int:
    arguments = parse_arguments()
    until = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    be_deterministic()
    report: dict[str, Any] = {"command": sys.argv, "machine": machine(device), "cases": []}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()), flush=True)
    with temporary_data(arguments.folder, 2_000_000 if arguments.tiny else arguments.tokens) as (store, _):
        equal = dict(compared(store, device))
        print("\n| batches | first hundred |\n|---|---|")
        print("\n".join(f"| {name} | {'equal' if same else 'DIFFER'} |" for name, same in equal.items()), flush=True)
        report |= {"equal": equal, "parts": print_parts(store, device)}
        print(f"\n{HEADER}", flush=True)
        for case in TINY_CASES if arguments.tiny else CASES:
            result = measure(case, store, device, until)
            print(row(result), flush=True)
            equal[case.name] = result.loss_difference == 0
            report["cases"].append(record(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
