"""Training on a GPU, fed by milldam against the same batches already on the GPU: step times and losses.

In: nothing; the data is made (see `write_data`): a Markov source over 50,257 ids, so that there is something to learn,
200M tokens in 8 shards. Out: a Markdown table, and with --json every figure and the loss curves.

- milldam: windows -> batches, shuffled -> milldam.torch.tensors on the device.
- resident: the same batches, all on the device before the clock starts. No loader can be faster.
- sampled: as nanoGPT does it: windows at random places of a mapped file, stacked one by one, pinned, copied. Other
  samples, so its losses are not compared.

All train one model, from the same weights, in turns (machines drift), the order turned round after each round. Kernels
are deterministic, so equal batches give equal losses to the last bit. ms/step is wall time over all timed steps,
nothing waiting in between unless a case says so; the difference is the median over the rounds, and the noise is how far
the resident runs lie apart. "in next()" is what the training loop itself spends in getting a batch.

Cases "loss read": the loop reads the loss after every step and so waits for the GPU, as many loops do; then nothing
hides what a loader does between steps. Exit status 1 when losses differ.

    python benchmarks/training.py --json training.json             # an H200: about six minutes
    python benchmarks/training.py --device cpu --tiny              # only to see that it runs
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

# Read when CUDA starts: without it matrix products may differ from run to run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from torch import Tensor

from milldam.loader.stores import Store
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.torch import tensors
from tiny_transformer import GPT, Shape

VOCABULARY = 50_257
END_TOKEN = 50_256
DOCUMENT_TOKENS = 600
SUCCESSORS = 8
CHAINS = 8192
SHARDS = 8
SEED = 20_240
LEARNING_RATE = 6e-4

Pair = tuple[Tensor, Tensor]
Feed = Callable[[], Iterator[Pair]]
"""Begins anew and gives batches (x, y) on the device."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    shape: Shape
    batch_size: int
    compiled: bool = False
    reads_loss: bool = False
    """The loop waits for the loss of every step before it goes on."""
    warm_up: int = 30
    timed: int = 300
    rounds: int = 4

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch_size * self.shape.seq_len


_SMALL_128 = Case("256-d, seq 128", Shape(256, 6, 4, 128), 512, timed=200)
_SMALL_1024 = Case("256-d, seq 1024", Shape(256, 6, 4, 1024), 64, timed=200)
_LARGE = Case("768-d, seq 1024", Shape(768, 12, 12, 1024), 16, timed=200, rounds=3)
# The ones that matter most come first: when the time is up, those that are left get one round.
CASES = (
    _SMALL_128,
    replace(_SMALL_128, name="256-d, seq 128, compiled", compiled=True),
    _LARGE,
    _SMALL_1024,
    replace(_SMALL_1024, name="256-d, seq 1024, compiled", compiled=True),
    replace(_LARGE, name="768-d, seq 1024, loss read", reads_loss=True, rounds=2),
    # So small a step that the GPU waits for the thread that feeds it: there a loader's time can't hide.
    replace(_SMALL_128, name="256-d, seq 128, batch 64", batch_size=64),
)
_TINY = Case("32-d, seq 64", Shape(32, 2, 2, 64), 4, warm_up=2, timed=6, rounds=2)
TINY_CASES = (_TINY, replace(_TINY, name="32-d, seq 64, loss read", reads_loss=True))


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with one feed."""

    feed: str
    ms_per_step: float
    """Wall time over all timed steps."""
    median_ms: float
    """Of single steps, by the device's clock; and the slowest."""
    slowest_ms: float
    in_next_ms: float
    """Median time that the loop spends in getting a batch, and what one in a hundred exceeds."""
    in_next_p99_ms: float
    losses: list[float]


@dataclass(slots=True)
class Result:
    case: Case
    parameters: int
    runs: list[Run] = field(default_factory=list)

    def of(self, feed: str) -> list[Run]:
        return [run for run in self.runs if run.feed == feed]

    def median(self, feed: str, figure: str = "ms_per_step") -> float:
        return statistics.median(float(getattr(run, figure)) for run in self.of(feed))

    def difference(self, feed: str) -> float:
        """Percent over resident: the median of the rounds."""
        pairs = zip(self.of(feed), self.of("resident"), strict=True)
        return statistics.median(100 * (run.ms_per_step / bare.ms_per_step - 1) for run, bare in pairs)

    @property
    def noise(self) -> float:
        """Percent between the slowest and the fastest run of the resident batches."""
        times = [run.ms_per_step for run in self.of("resident")]
        return 100 * (max(times) / min(times) - 1)

    @property
    def loss_difference(self) -> float:
        """The largest between any two runs over the same batches, at any step."""
        curves = [run.losses for run in self.runs if run.feed != "sampled"]
        gaps = (abs(a - b) for one in curves for a, b in zip(curves[0], one, strict=True))
        # NaN must not pass for a small difference.
        return max(float("inf") if gap != gap else gap for gap in gaps)

    def row(self) -> str:
        first, last = self.of("resident")[0].losses[0], self.of("resident")[0].losses[-1]
        equal = "equal" if self.loss_difference == 0 else f"differ by {self.loss_difference:.2g}"
        cells = (
            self.case.name,
            f"{self.parameters / 1e6:.1f}M",
            f"{self.case.tokens:,}",
            f"{self.median('milldam'):.3f}",
            f"{self.median('resident'):.3f}",
            f"{self.difference('milldam'):+.2f} %",
            f"{self.noise:.2f} %",
            f"{1000 * self.median('milldam', 'in_next_ms'):.0f} µs",
            f"{equal} ({first:.3f} to {last:.3f})",
            f"{self.difference('sampled'):+.2f} %, {1000 * self.median('sampled', 'in_next_ms'):.0f} µs",
        )
        return f"| {' | '.join(cells)} |"

    def record(self) -> dict[str, Any]:
        """For JSON; equal loss curves are written once."""
        curve = self.of("resident")[0].losses
        runs = [asdict(run) | {"losses": "as resident" if run.losses == curve else run.losses} for run in self.runs]
        names = ("ms_per_step", "median_ms", "in_next_ms")
        figures = {
            feed: {name: self.median(feed, name) for name in names} for feed in ("milldam", "resident", "sampled")
        }
        for feed in ("milldam", "sampled"):
            figures[feed]["difference_percent"] = self.difference(feed)
        return {
            "case": asdict(self.case),
            "parameters": self.parameters,
            "tokens_per_step": self.case.tokens,
            "figures": figures,
            "noise_percent": self.noise,
            "max_loss_difference": self.loss_difference,
            "resident_losses": curve,
            "runs": runs,
        }


HEADER = (
    "| case | parameters | tokens/step | ms/step, milldam | ms/step, resident | difference | noise | in next() "
    "| losses | sampled: difference, in next() |\n|---|--:|--:|--:|--:|--:|--:|--:|---|--:|"
)


# Data


def write_data(folder: Path, tokens: int) -> tuple[Store, Path]:
    """A store of about so many tokens, and the same tokens in one flat file, as nanoGPT has them."""
    generator = np.random.default_rng(SEED)
    # Ids near 0 are the frequent ones, as in text: P(id) falls as 1 / id.
    successors = np.exp(generator.random((VOCABULARY, SUCCESSORS)) * np.log(END_TOKEN)).astype(np.uint16) - 1
    store, flat_path = folder / "store", folder / "train.bin"
    store.mkdir(parents=True)
    shards: list[Shard] = []
    with flat_path.open("wb") as flat_file:
        for _ in range(SHARDS):
            flat = _markov_tokens(generator, successors, tokens // SHARDS)
            ends = np.flatnonzero(flat == END_TOKEN) + 1
            with ShardWriter(store, "train", "uint16") as writer:
                writer.append(Tokens(flat, np.diff(ends, prepend=0)))
                shards.append(writer.commit())
            flat_file.write(flat.data)
    tokenizer = {"name": "none", "eos": END_TOKEN}
    Manifest("uint16", VOCABULARY, tokenizer, "none", {}, {}, tuple(shards)).write(store)
    return Store(store), flat_path


def _markov_tokens(generator: np.random.Generator, successors: Any, tokens: int) -> Any:
    """Documents end to end. Thousands of chains run side by side, since each step needs the one before."""
    chains = min(CHAINS, tokens // DOCUMENT_TOKENS)
    length = tokens // chains
    # The first successor of a token comes twice as often as each of the others.
    choices = generator.integers(0, SUCCESSORS + 1, (length, chains), np.uint8) % SUCCESSORS
    steps = np.empty((length, chains), np.uint16)
    state = generator.integers(0, END_TOKEN, chains)
    for step in range(length):
        state = successors[state, choices[step]]
        steps[step] = state
    flat = steps.T.ravel()
    flat[generator.integers(0, len(flat), len(flat) // DOCUMENT_TOKENS)] = END_TOKEN
    flat[-1] = END_TOKEN
    return flat


# Feeds


def fed(store: Store, case: Case, device: torch.device) -> Feed:
    def feed() -> Iterator[Pair]:
        batches = store.windows(case.shape.seq_len).batches(case.batch_size, seed=SEED, epochs=None)
        return iter(tensors(batches, device=device, pin_memory=device.type == "cuda"))

    return feed


def resident(store: Store, case: Case, device: torch.device) -> Feed:
    """The same batches, copied by the plainest means there are."""
    batches = store.windows(case.shape.seq_len).batches(case.batch_size, seed=SEED, epochs=None)
    held = [tuple(torch.from_numpy(part).to(device) for part in pair) for pair in itertools.islice(batches, case.steps)]
    return lambda: iter(held)  # type: ignore[arg-type, unused-ignore]


def sampled(path: Path, case: Case, device: torch.device) -> Feed:
    def feed() -> Iterator[Pair]:
        places = np.random.default_rng(SEED)
        while True:
            # nanoGPT maps the file anew for every batch, since a mapping that is kept grew in older versions of numpy.
            data = np.memmap(path, np.uint16, "r")
            starts = places.integers(0, len(data) - case.shape.seq_len, case.batch_size)
            x, y = (_stacked(data, starts + shift, case.shape.seq_len) for shift in (0, 1))
            if device.type == "cuda":
                x, y = x.pin_memory(), y.pin_memory()
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return feed


def _stacked(data: Any, starts: Any, length: int) -> Tensor:
    return torch.stack([torch.from_numpy(data[start : start + length].astype(np.int64)) for start in starts])


# Training


class Clock:
    """When each step ended: by events on the GPU, which do not wait, or by the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_ms(self) -> list[float]:
        """Of the steps between marks; the device must have come to its end."""
        pairs = itertools.pairwise(self._marks)
        return [a.elapsed_time(b) if self._on_gpu else 1000 * (b - a) for a, b in pairs]


class Trainer:
    """One model that can be set back to its first weights, so that every run has the same memory and kernels."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(SEED)
        self.case, self._device = case, device
        self._model = GPT(case.shape).to(device)
        self._first = [weights.detach().clone() for weights in self._model.parameters()]
        self._loss = torch.compile(self._model, dynamic=False) if case.compiled else self._model

    @property
    def parameters(self) -> int:
        return sum(weights.numel() for weights in self._first)

    def _set_back(self) -> torch.optim.Optimizer:
        with torch.no_grad():
            for weights, first in zip(self._model.parameters(), self._first, strict=True):
                weights.copy_(first)
                weights.grad = None
        return torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, fused=True)

    def run(self, name: str, feed: Feed, *, steps: int | None = None) -> Run:
        """Train from the first weights on; the warm-up comes first, off the clock."""
        steps = steps or self.case.steps
        optimizer = self._set_back()
        losses = torch.zeros(steps, device=self._device)
        clock, waits, started = Clock(self._device), [], 0.0
        batches = feed()
        for step in range(steps):
            if step == min(self.case.warm_up, steps - 1):
                self._wait()
                clock.mark()
                started = time.perf_counter()
            asked = time.perf_counter()
            x, y = next(batches)
            waits.append(time.perf_counter() - asked)
            losses[step] = self._step(optimizer, x, y)
            clock.mark()
        self._wait()
        seconds = time.perf_counter() - started
        timed = min(self.case.timed, steps)
        each = clock.step_ms()[-timed:]
        wait_ms, slow_wait_ms = (1000 * float(np.percentile(waits[-timed:], percent)) for percent in (50, 99))
        by_step = (1000 * seconds / timed, statistics.median(each), max(each))
        return Run(name, *by_step, wait_ms, slow_wait_ms, losses.tolist())

    def _step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            loss: Tensor = self._loss(x, y)
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if self.case.reads_loss:
            loss.item()
        return loss.detach()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def measure(case: Case, data: tuple[Store, Path], device: torch.device, until: float) -> Result:
    store, path = data
    feeds = {
        "milldam": fed(store, case, device),
        "resident": resident(store, case, device),
        "sampled": sampled(path, case, device),
    }
    return in_turns(case, feeds, device, until)


def in_turns(case: Case, feeds: dict[str, Feed], device: torch.device, until: float) -> Result:
    """All feeds in turns; no round begins after `until`, but one is always run."""
    trainer = Trainer(case, device)
    # Compiles, and finds the memory that all runs then use again.
    trainer.run("resident", feeds["resident"], steps=min(10, case.steps))
    result = Result(case, trainer.parameters)
    names = list(feeds)
    for _ in range(case.rounds):
        result.runs.extend(trainer.run(name, feeds[name]) for name in names)
        names.reverse()
        if time.monotonic() > until:
            break
    return result


# The whole


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little data: to see that it runs")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases whose names hold one of these")
    parser.add_argument("--tokens", type=int, default=200_000_000, help="of the data; default: 200,000,000")
    parser.add_argument("--seconds", type=float, default=420, help="after these no round begins; default: 420")
    parser.add_argument("--folder", type=Path, help="where the data is made for the time; default: the temporary one")
    parser.add_argument("--json", type=Path, help="all figures to this file")
    return parser.parse_args()


@contextmanager
def temporary_data(parent: Path | None, tokens: int) -> Iterator[tuple[Store, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="training-", dir=parent))
    try:
        yield write_data(folder, tokens)
    finally:
        shutil.rmtree(folder)


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    # It would fill all new memory with NaN: work that no training does.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined, unused-ignore]
    # Flash attention is left: quick, and deterministic backwards when asked for as above.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"device": name, "cpus": os.cpu_count(), "cuda": torch.version.cuda} | versions


def chosen(cases: tuple[Case, ...], only: list[str] | None) -> list[Case]:
    return [case for case in cases if only is None or any(word in case.name for word in only)]


def main() -> int:
    arguments = parse_arguments()
    until = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    be_deterministic()
    cases = chosen(TINY_CASES if arguments.tiny else CASES, arguments.only)
    tokens = 400_000 if arguments.tiny else arguments.tokens
    report: dict[str, Any] = {"command": sys.argv, "machine": machine(device), "cases": []}
    print(", ".join(f"{name} {value}" for name, value in report["machine"].items()), flush=True)
    equal = True
    with temporary_data(arguments.folder, tokens) as data:
        print(f"{data[0]}\n\n{HEADER}", flush=True)
        for case in cases:
            result = measure(case, data, device, until)
            print(result.row(), flush=True)
            equal &= result.loss_difference == 0
            report["cases"].append(result.record())
            if arguments.json:
                # After every case: what is measured stays when the time is up.
                arguments.json.write_text(json.dumps(report, indent=1) + "\n")
            torch.compiler.reset()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
