"""Tokenizing a corpus, side by side on one machine: milldam, its encoder alone, and HF datasets.

In: a .jsonl or .txt corpus (see corpus.py) and a tokenizer.json. Out: a Markdown table with the
median MB/s of text of each, the ratios, and with --json every single figure.

- milldam: the wall time of the whole `milldam tokenize` command: start, reading, encoding, writing.
- gigatoken: the encoder alone, from memory, writing nothing: the rate milldam can come near to.
- datasets: load_dataset, map(encode_batch_fast) in processes, save_to_disk, on the first
  --peer-size of the corpus, since it is slow. jsonl only.

The page cache is warmed first, the runs take turns (machines drift), and each is a fresh process
with a fresh folder that is deleted afterwards. MB are 10^6 bytes of UTF-8 text, without JSON.
Needs disk for one result in --folder. A contender that is not installed is left out, and said so.

    pip install datasets transformers
    python benchmarks/tokenizing.py /tmp/bench/1GB.jsonl --tokenizer gpt2/tokenizer.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

from peers import read_texts
from sizes import megabytes, parse_size

PEERS = Path(__file__).resolve().with_name("peers.py")
VERSIONS_OF = ("milldam", "gigatoken", "tokenizers", "datasets", "pyarrow", "numpy")
READ_BYTES = 16 << 20
STDERR_LINES = 15


@dataclass(frozen=True, slots=True)
class Task:
    """What every contender is given."""

    corpus: Path
    slice: Path
    """The corpus's beginning, for the slow peer."""
    tokenizer: Path
    milldam: str
    memory: str
    workers: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one contender."""

    seconds: float
    text_bytes: int
    tokens: int | None
    details: dict[str, Any] = field(default_factory=dict)
    """All that the contender said itself."""

    @property
    def rate(self) -> float:
        """MB of text a second."""
        return self.text_bytes / 1e6 / self.seconds


Contender = Callable[[Task, Path], Run]
"""Does the task once, in an empty folder."""


def run_milldam(text_bytes: int) -> Contender:
    """milldam's contender; the text's size is counted beforehand, the same for everybody."""

    def run(task: Task, folder: Path) -> Run:
        command = [task.milldam, "tokenize", str(task.corpus), "-o", str(folder / "tokens")]
        command += ["--tokenizer", str(task.tokenizer), "--memory", task.memory]
        command += ["--workers", str(task.workers), "--json"]
        started = time.perf_counter()
        output = output_of(command)
        seconds = time.perf_counter() - started
        details = json_in(output)
        return Run(seconds, text_bytes, details.get("tokens"), details)

    return run


def run_gigatoken(task: Task, _folder: Path) -> Run:
    return run_peer("gigatoken", task.corpus, task, [])


def run_datasets(task: Task, folder: Path) -> Run:
    options = ["--workers", str(task.workers), "--folder", str(folder)]
    return run_peer("datasets", task.slice, task, options)


def run_peer(name: str, corpus: Path, task: Task, options: list[str]) -> Run:
    command = [sys.executable, str(PEERS), name, str(corpus), str(task.tokenizer), *options]
    figures = json_in(output_of(command))
    return Run(figures["seconds"], figures["text_bytes"], figures["tokens"], figures)


def output_of(command: list[str]) -> str:
    """What the command prints; a failure ends the benchmark with the last lines it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[-STDERR_LINES:])
        raise SystemExit(f"exit status {done.returncode} of {' '.join(command)}\n{said}")
    return done.stdout


def json_in(output: str) -> dict[str, Any]:
    """The JSON object that a command printed, alone or as its last line; empty without one."""
    for text in (output, output.strip().rpartition("\n")[2]):
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            return found
    return {}


def chosen_contenders(task: Task, text_bytes: int) -> tuple[dict[str, Contender], list[str]]:
    """The contenders that can run here, and why the others can't."""
    contenders: dict[str, Contender] = {}
    missing = []
    if shutil.which(task.milldam):
        contenders["milldam"] = run_milldam(text_bytes)
    else:
        missing.append(f"milldam: no command {task.milldam}; pip install -e . or give --milldam")
    if util.find_spec("gigatoken"):
        contenders["gigatoken"] = run_gigatoken
    else:
        missing.append("gigatoken: pip install gigatoken")
    if task.corpus.suffix != ".jsonl":
        missing.append("datasets: takes the jsonl corpus only")
    elif util.find_spec("datasets"):
        contenders["datasets"] = run_datasets
    else:
        missing.append("datasets: pip install datasets transformers")
    return contenders, missing


def take_turns(contenders: dict[str, Contender], task: Task, repeats: int) -> dict[str, list[Run]]:
    """Every contender once, then every one again: a machine that slows down slows all."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name, contender in contenders.items():
            with fresh_folder(task.folder) as folder:
                run = contender(task, folder)
            runs[name].append(run)
            print(f"{repeat + 1}/{repeats} {name}: {run.rate:.1f} MB/s", file=sys.stderr)
    return runs


@contextmanager
def fresh_folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="run-") as folder:
        yield Path(folder)


def warm_page_cache(path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        while file.read(READ_BYTES):
            pass


def write_slice(corpus: Path, size: int, target: Path) -> None:
    """The corpus's whole lines from its start, up to about `size` bytes."""
    with corpus.open("rb") as source, target.open("wb") as file:
        written = 0
        for line in source:
            if written >= size:
                break
            written += file.write(line)


def machine() -> dict[str, Any]:
    """Where it was measured, and with what."""
    return {
        "name": platform.node(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in VERSIONS_OF},
    }


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def median_run(runs: list[Run]) -> Run:
    """The run in the middle by rate (of an even number, the faster of the two)."""
    return sorted(runs, key=lambda run: run.rate)[len(runs) // 2]


def heading(place: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in place["versions"].items() if version)
    return [
        f"{place['name']}: {place['processor']}, {place['cores']} cores, {place['system']}",
        f"Python {place['python']}, {versions}",
    ]


def table(runs: dict[str, list[Run]]) -> list[str]:
    """MB/s of each; the ratio is milldam's median rate over the row's."""
    lines = ["| | MB of text | seconds | MB/s, median | lowest to highest | tokens | milldam is |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for name, own in runs.items():
        rates = [run.rate for run in own]
        middle = median_run(own)
        cells = [name, f"{middle.text_bytes / 1e6:.0f}", f"{middle.seconds:.2f}"]
        cells += [f"{statistics.median(rates):.1f}", f"{min(rates):.1f} to {max(rates):.1f}"]
        cells += ["?" if middle.tokens is None else f"{middle.tokens:,}", ratio(runs, name)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def ratio(runs: dict[str, list[Run]], name: str) -> str:
    if "milldam" not in runs or name == "milldam":
        return ""
    ours, theirs = (statistics.median(run.rate for run in runs[key]) for key in ("milldam", name))
    return f"{ours / theirs:.2f} x as fast"


def stage_lines(run: Run) -> list[str]:
    """The stages of a milldam run, if it tells them: a number or named numbers for each."""
    stages = run.details.get("stages")
    if not isinstance(stages, dict) or not stages:
        return []
    lines = ["", "milldam's stages (median run):", ""]
    return lines + [f"- {name}: {shown(value)}" for name, value in stages.items()]


def shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside_python = Path(sys.executable).with_name("milldam")
    add = parser.add_argument
    add("corpus", type=Path, help="a .jsonl or .txt file")
    add("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    add("--repeats", type=int, default=3, help="runs of each (3)")
    add("--peer-size", type=parse_size, default=60 * 10**6, help="for datasets (60MB)")
    add("--memory", default="512MB", help="milldam's --memory (512MB)")
    add("--workers", type=int, default=2, help="of milldam and of datasets' map (2)")
    add("--milldam", default=str(beside_python), help="the command (the one beside this Python)")
    add("--folder", type=Path, help="where results go meanwhile (the system's temporary one)")
    add("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


def task_of(arguments: argparse.Namespace, folder: Path) -> Task:
    return Task(
        corpus=arguments.corpus,
        slice=folder / "slice.jsonl",
        tokenizer=arguments.tokenizer,
        milldam=arguments.milldam,
        memory=arguments.memory,
        workers=arguments.workers,
        folder=folder,
    )


def measure(task: Task, arguments: argparse.Namespace) -> dict[str, list[Run]]:
    text_bytes = sum(len(text.encode()) for text in read_texts(task.corpus))
    print(f"{task.corpus}: {megabytes(text_bytes)} of text", file=sys.stderr)
    contenders, missing = chosen_contenders(task, text_bytes)
    for reason in missing:
        print(f"left out, {reason}", file=sys.stderr)
    if "datasets" in contenders:
        write_slice(task.corpus, arguments.peer_size, task.slice)
    warm_page_cache(task.corpus)
    return take_turns(contenders, task, arguments.repeats)


def report(runs: dict[str, list[Run]], place: dict[str, Any]) -> str:
    lines = [*heading(place), "", *table(runs)]
    if "milldam" in runs:
        lines += stage_lines(median_run(runs["milldam"]))
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    place = machine()
    with fresh_folder(arguments.folder) as folder:
        runs = measure(task_of(arguments, folder), arguments)
    print(report(runs, place))
    if arguments.json:
        raw = {name: [asdict(run) for run in own] for name, own in runs.items()}
        settings = {name: str(value) for name, value in vars(arguments).items()}
        figures = {"machine": place, "settings": settings, "runs": raw}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
