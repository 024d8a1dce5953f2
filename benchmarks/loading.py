"""Loading tokens for training, side by side on one machine: milldam, five peers and a bare loop in C.

In: a folder for data. Out: Markdown tables, and with --json every single figure:

- samples/s at each length of samples, what that is of the best peer and of C, and CPU time a sample;
- from opening to the first batch, and anonymous memory beyond the imports;
- the same two of milldam alone, on a sparse store of ten times the tokens;
- anonymous memory of a torch DataLoader with two workers, epoch by epoch.

A store of random tokens is made once and kept, and from it what each peer reads (see loading_peers.py, which says how
each is used). Every run is a fresh process with the page cache warm; runs take turns, since machines drift. Memory is
RssAnon, by the process itself and every 10 ms from outside. The order of contenders that shuffle over the whole data is
random, so pages are touched for the first time while the clock runs, by milldam and the mapped ones of the peers alike.
On a machine that is not quiet neither rates nor their ratios mean anything; the load average before each run is noted.

    python benchmarks/loading.py --data /tmp/bench/loading --json /tmp/bench/loading.json \\
        --python torch=peers/bin/python hf=hf/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loading_peers import CONTENDERS, Task, anonymous_bytes
from token_store import join_store, write_sparse_store, write_store
from tokenizing import STDERR_LINES, heading, machine, warm_page_cache

PEERS = Path(__file__).resolve().with_name("loading_peers.py")
POLL_SECONDS = 0.01
OURS = "milldam"
BOUND = "c"
OPENED = ("milldam", "milldam-pread", "milldam-map")
"""Measured on the sparse store, too."""
FLAT_TOKENS = 100_000_000
SPARSE_FACTOR = 10


@dataclass(frozen=True, slots=True)
class Setting:
    """All that decides what is measured."""

    data: Path
    tokens: int
    seq_lens: list[int]
    batch_size: int
    repeats: int
    warm_up: float
    seconds: float
    pythons: dict[str, str]

    def python_of(self, name: str) -> str:
        """The interpreter that has what a contender imports: by its name, by its family, or this one."""
        family = name.partition("-")[0]
        needs_torch = "torch" in CONTENDERS[name].imports
        for key in (name, family if family != OURS else "", "torch" if needs_torch else ""):
            if key in self.pythons:
                return self.pythons[key]
        return sys.executable

    def folder(self, tokens: int) -> Path:
        return self.data / f"{tokens // 10**6}M"

    def task(self, seq_len: int, tokens: int | None = None) -> Task:
        return Task(self.folder(tokens or self.tokens), seq_len, self.batch_size)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one contender."""

    name: str
    seq_len: int
    first_seconds: float
    imported_bytes: int
    import_seconds: float
    """Of its own packages; numpy was there before."""
    first_batch_bytes: int
    """Anonymous memory at the first batch, beyond the imports."""
    peak_bytes: int
    """The most there was until the end, beyond the imports."""
    samples: int
    seconds: float
    cpu_seconds: float
    load_before: float
    """What else ran on the machine: its load average before."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


# ---- data ----


def prepare(setting: Setting, names: list[str]) -> dict[str, float]:
    """The store and what each contender reads; seconds of those that were made now."""
    made: dict[str, float] = {}
    for seq_len in setting.seq_lens:
        task = setting.task(seq_len)
        write_store(task.store, setting.tokens)
        join_store(task.store, task.joined)
        for name in names:
            if CONTENDERS[name].prepare is not None:
                begin = time.perf_counter()
                output_of(command(setting, "prepare", name, task))
                made[f"{name} {seq_len}"] = time.perf_counter() - begin
                print(f"prepared {name} {seq_len}: {made[f'{name} {seq_len}']:.0f} s", file=sys.stderr)
    return made


def command(setting: Setting, action: str, name: str, task: Task, *options: str) -> list[str]:
    sizes = ["--seq-len", str(task.seq_len), "--batch-size", str(task.batch_size)]
    return [setting.python_of(name), str(PEERS), action, name, str(task.data), *sizes, *options]


def output_of(arguments: list[str]) -> str:
    """A failure ends the benchmark with the last lines it said."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment())
    if done.returncode != 0:
        last = "\n".join(done.stderr.splitlines()[-STDERR_LINES:])
        raise SystemExit(f"exit status {done.returncode} of {' '.join(arguments)}\n{last}")
    return done.stdout


def environment() -> dict[str, str]:
    """Without the network, and each contender with the threads it takes by itself."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def can_run(name: str, setting: Setting) -> bool:
    wanted = "; ".join(f"import {module}" for module in CONTENDERS[name].imports) or "pass"
    arguments = [setting.python_of(name), "-c", wanted]
    return subprocess.run(arguments, capture_output=True, check=False, env=environment()).returncode == 0


def warm(path: Path) -> None:
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    for file in files:
        warm_page_cache(file)


# ---- measuring ----


class Peak(threading.Thread):
    """The highest RssAnon of a process, until it ends."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.bytes = 0
        self.done = False

    def run(self) -> None:
        while not self.done:
            try:
                self.bytes = max(self.bytes, anonymous_bytes(self._process))
            except (FileNotFoundError, ProcessLookupError):
                return
            time.sleep(POLL_SECONDS)


def run_once(name: str, setting: Setting, task: Task) -> Run:
    options = ["--warm-up", str(setting.warm_up), "--seconds", str(setting.seconds)]
    arguments = command(setting, "measure", name, task, *options)
    load = os.getloadavg()[0]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        imported = figures_in(process.stdout)
        peak = Peak(process.pid)
        peak.start()
        rest, errors = process.communicate()
        peak.done = True
        peak.join()
    figures = figures_in(iter(rest.splitlines()))
    if process.returncode != 0 or "samples" not in figures:
        last = "\n".join(errors.splitlines()[-STDERR_LINES:])
        raise SystemExit(f"exit status {process.returncode} of {' '.join(arguments)}\n{last}")
    most = max(peak.bytes - imported["imported_bytes"], figures["first_batch_bytes"])
    return Run(name, task.seq_len, peak_bytes=most, load_before=load, **imported, **figures)


def figures_in(lines: Iterator[str]) -> dict[str, Any]:
    """The next line that is JSON; what peers print besides is passed over."""
    for line in lines:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {}


def take_turns(setting: Setting, names: list[str]) -> list[Run]:
    """Every contender once, then every one again: a machine that slows down slows all."""
    runs: list[Run] = []
    for repeat in range(setting.repeats):
        for seq_len in setting.seq_lens:
            for name in names:
                task = setting.task(seq_len)
                warm(CONTENDERS[name].reads(task))
                runs.append(run_once(name, setting, task))
                note(f"{repeat + 1}/{setting.repeats}", runs[-1])
    return runs


def open_sparse(setting: Setting) -> list[Run]:
    """Opening a store of ten times the tokens, which are holes."""
    tokens = setting.tokens * SPARSE_FACTOR
    task = setting.task(setting.seq_lens[0], tokens)
    write_sparse_store(task.store, tokens)
    runs: list[Run] = []
    for repeat in range(setting.repeats):
        for name in OPENED:
            runs.append(run_once(name, setting, task))
            note(f"sparse {repeat + 1}/{setting.repeats}", runs[-1])
    return runs


def note(turn: str, run: Run) -> None:
    figures = f"{run.rate:,.0f} samples/s, first {run.first_seconds * 1e3:.1f} ms, +{run.peak_bytes / 1e6:.1f} MB"
    print(f"{turn} {run.name} {run.seq_len}: {figures}, load {run.load_before:.1f}", file=sys.stderr)


def measure_flatness(setting: Setting) -> list[dict[str, Any]]:
    """Anonymous memory of a DataLoader and its workers after each epoch."""
    name = "milldam-loader"
    task = setting.task(setting.seq_lens[0], FLAT_TOKENS)
    write_store(task.store, FLAT_TOKENS)
    warm(task.store)
    output = output_of(command(setting, "flat", name, task))
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# ---- what is shown ----


def median_rate(runs: list[Run]) -> float:
    return statistics.median(run.rate for run in runs)


def of(runs: list[Run], name: str, seq_len: int) -> list[Run]:
    return [run for run in runs if run.name == name and run.seq_len == seq_len]


def speed_table(runs: list[Run], seq_len: int) -> list[str]:
    names = list(dict.fromkeys(run.name for run in runs))
    rates = {name: median_rate(of(runs, name, seq_len)) for name in names}
    peers = {name: rate for name, rate in rates.items() if CONTENDERS[name].is_peer}
    best = max(peers, key=peers.__getitem__, default=None)
    titles = ["", "samples/s, median", "lowest to highest", "M tokens/s", "times the best peer's", "% of C", "CPU us"]
    lines = [f"seq_len {seq_len}, best peer: {best}", "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, rate in sorted(rates.items(), key=lambda item: -item[1]):
        own = of(runs, name, seq_len)
        cells = [
            name,
            f"{rate:,.0f}",
            f"{min(run.rate for run in own):,.0f} to {max(run.rate for run in own):,.0f}",
            f"{rate * seq_len / 1e6:,.0f}",
            f"{rate / peers[best]:.2f}" if best else "",
            f"{rate / rates[BOUND]:.0%}" if BOUND in rates else "",
            f"{statistics.median(run.cpu_seconds / run.samples for run in own) * 1e6:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def opening_table(title: str, runs: list[Run]) -> list[str]:
    titles = [
        "",
        "seq_len",
        "imports ms",
        "first batch ms, median",
        "highest",
        "after imports MB",
        "at first batch, MB more",
        "peak",
    ]
    lines = [title, "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, seq_len in dict.fromkeys((run.name, run.seq_len) for run in runs):
        own = of(runs, name, seq_len)
        cells = [
            name,
            str(seq_len),
            f"{statistics.median(run.import_seconds for run in own) * 1e3:.0f}",
            f"{statistics.median(run.first_seconds for run in own) * 1e3:.1f}",
            f"{max(run.first_seconds for run in own) * 1e3:.1f}",
            f"{statistics.median(run.imported_bytes for run in own) / 1e6:.0f}",
            f"{max(run.first_batch_bytes for run in own) / 1e6:.1f}",
            f"{max(run.peak_bytes for run in own) / 1e6:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def flatness_table(epochs: list[dict[str, Any]]) -> list[str]:
    lines = ["Anonymous memory, torch DataLoader with 2 workers, MB", "", "| epoch | main | workers |", "|---|---|---|"]
    for epoch in epochs:
        main, *workers = (size / 1e6 for size in epoch["anonymous_bytes"])
        lines.append(f"| {epoch['epoch']} | {main:.1f} | {', '.join(f'{size:.1f}' for size in workers)} |")
    return [*lines, ""]


# ---- the command ----


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, required=True, help="where stores and the peers' data are kept")
    add("--tokens", type=float, default=1e9, help="of the store (1e9)")
    add("--seq-len", type=int, nargs="+", default=[1024, 2048], help="lengths of samples (1024 2048)")
    add("--batch-size", type=int, default=16, help="samples of a batch (16)")
    add("--repeats", type=int, default=3, help="runs of each (3)")
    add("--seconds", type=float, default=5.0, help="on the clock in each run (5)")
    add("--warm-up", type=float, default=1.0, help="seconds before it (1)")
    add("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="these contenders (all)")
    add("--python", nargs="+", default=[], metavar="NAME=PATH", help="interpreters of torch, hf, or one contender")
    add("--skip", nargs="+", default=[], choices=("speed", "sparse", "flat"), help="leave out these parts")
    add("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


def setting_of(given: argparse.Namespace) -> Setting:
    return Setting(
        data=given.data.resolve(),
        tokens=int(given.tokens),
        seq_lens=given.seq_len,
        batch_size=given.batch_size,
        repeats=given.repeats,
        warm_up=given.warm_up,
        seconds=given.seconds,
        # Not resolved: a venv's python is a link, and only under its own name does it find its packages.
        pythons={name: os.path.abspath(path) for name, _, path in (one.partition("=") for one in given.python)},
    )


def measure_all(setting: Setting, names: list[str], skipped: list[str]) -> dict[str, Any]:
    """Every part that is wanted; also what is needed for the tables."""
    parts: dict[str, Any] = {"prepared": {}, "speed": [], "sparse": [], "flat": []}
    if "speed" not in skipped:
        parts["prepared"] = prepare(setting, names)
        parts["speed"] = take_turns(setting, names)
    if "sparse" not in skipped:
        parts["sparse"] = open_sparse(setting)
    if "flat" not in skipped and can_run("milldam-loader", setting):
        parts["flat"] = measure_flatness(setting)
    return parts


def report(parts: dict[str, Any], setting: Setting, missing: list[str]) -> list[str]:
    lines = [*heading(machine()), f"{setting.tokens:,} tokens, batch {setting.batch_size}", ""]
    if missing:
        lines += [f"Left out, can't be imported: {', '.join(missing)}", ""]
    if loads := [run.load_before for run in (*parts["speed"], *parts["sparse"])]:
        lines += [f"Load average before a run: {min(loads):.1f} to {max(loads):.1f}", ""]
    if parts["speed"]:
        for seq_len in setting.seq_lens:
            lines += speed_table(parts["speed"], seq_len)
        lines += opening_table("From opening to the first batch", parts["speed"])
    if parts["sparse"]:
        lines += opening_table(f"The same, {setting.tokens * SPARSE_FACTOR:,} tokens, sparse", parts["sparse"])
    return lines + (flatness_table(parts["flat"]) if parts["flat"] else [])


def main() -> None:
    given = parse_arguments()
    setting = setting_of(given)
    missing = [name for name in given.only if not can_run(name, setting)]
    parts = measure_all(setting, [name for name in given.only if name not in missing], given.skip)
    print("\n".join(report(parts, setting, missing)))
    if given.json:
        figures = {name: [asdict(run) for run in parts[name]] for name in ("speed", "sparse")}
        place = {"machine": machine(), "setting": asdict(setting), "missing": missing}
        given.json.write_text(json.dumps({**place, **parts, **figures}, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
