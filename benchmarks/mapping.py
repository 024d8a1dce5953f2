"""Seed 000's job, side by side: a tokenizer mapped over 1,150 documents without a space, by milldam and HF datasets.

In: nothing but a tokenizer; the documents (1.5 GB) are made once by examples/mapping/memory_mapping.py and kept in the
folder. Out: a Markdown table with the peak of anonymous memory, the memory after the first and the last of 16 shards,
and the seconds of a first and a second run of the same command; with --json every single figure, shard by shard.

- milldam: examples/mapping/memory_mapping.py, with a budget for everything (512 MB): SHARD, one `milldam.map` a shard,
  and BASIC, one for all. Its documents are tokenized by `TextEncoder`, exactly, in pieces.
- datasets: mapping_peers.py, the same in SHARD mode with `tokenizer(batch["text"])`, batches of one, in one process.

After a shard: anonymous memory (RssAnon + RssShmem) of the program and its children; in BASIC the workers are at work
on the next shards then, so the last of these figures is that of the last shard but one. Peak: of the whole tree,
sampled every 50 ms (memory.py). Each run is a fresh process in a memory cgroup (Linux, root), milldam's with a hard
limit at its budget plus --headroom, since page cache counts, too.

    python benchmarks/mapping.py --python /tmp/bench/hfd/bin/python --json benchmarks/results/mapping.json
    python benchmarks/mapping.py --num_files 45 --python /tmp/bench/hfd/bin/python           100 MB, to try

With --rows SIZE ordinary rows of that size instead (mapping_rows.py, about four times the bytes come out), by
`milldam map` and by `datasets.map` with as many processes, each in a cgroup with the limit of milldam's budget and
--headroom:

    python benchmarks/mapping.py --rows 400MB --headroom 78MB --python .venv/bin/python
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memory import Report, end_on_terminate, measure
from sizes import megabytes, parse_size
from tokenizing import STDERR_LINES, heading, json_in, machine

HERE = Path(__file__).resolve()
EXAMPLE = HERE.parents[1] / "examples/mapping/memory_mapping.py"
TOKENIZER = HERE.parents[2] / "shared/data/tokenizers/gpt2/tokenizer.json"
CONTENDERS = ("milldam SHARD", "milldam BASIC", "datasets")
FILES = 1150

# The command's output goes to files: the cgroup's shell knows no pipes.
TO_FILES = 'exec "$@" > "$0/stdout" 2> "$0/stderr"'


@dataclass(frozen=True, slots=True)
class Run:
    """One command: what it took, and what it said of itself."""

    peak_bytes: int
    seconds: float
    """Of the whole command, imports included."""
    exit_status: int
    oom_kills: int
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def after_shards(self) -> list[int]:
        return [one["anonymous"] for one in self.said.get("shards", ())]


def run(command: list[str], folder: Path, limit_bytes: int | None) -> Run:
    """In a cgroup of its own. A failure is a figure, too: the kernel may end who takes too much."""
    report: Report = measure(["/bin/sh", "-c", TO_FILES, str(folder), *command], limit_bytes)
    if report.exit_status:
        last = (folder / "stderr").read_text(errors="replace").splitlines()[-STDERR_LINES:]
        print(f"exit status {report.exit_status} of {' '.join(command)}", *last, sep="\n", file=sys.stderr)
    peak = max(report.tree_peak_bytes, report.cgroup_peak_bytes)
    said = json_in((folder / "stdout").read_text(errors="replace"))
    return Run(peak, report.wall_seconds, report.exit_status, report.oom_kills, said)


def make_documents(folder: Path, count: int) -> Path:
    """By the example itself."""
    spec = importlib.util.spec_from_file_location("memory_mapping", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = sys.modules["memory_mapping"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    documents = folder / f"documents-{count}"
    example.make_documents(documents, count)
    return documents


def run_milldam(arguments: argparse.Namespace, documents: Path, mode: str) -> Run:
    said = arguments.folder / "figures.json"
    said.unlink(missing_ok=True)
    command = [sys.executable, str(EXAMPLE), "--mode", mode, "--documents", str(documents), "--json", str(said)]
    command += ["--out", str(arguments.folder / "milldam"), "--memory", arguments.memory]
    command += ["--tokenizer", str(arguments.tokenizer), "--num_files", str(arguments.num_files)]
    limit = parse_size(arguments.memory) + arguments.headroom
    found = run([*command, "--num_proc", str(arguments.workers)], arguments.folder, limit)
    return Run(found.peak_bytes, found.seconds, found.exit_status, found.oom_kills, json_in(read_if_there(said)))


def compare_rows(arguments: argparse.Namespace) -> list[str]:
    """A line for each, in a cgroup of one limit: seconds, the kernel's peaks, kills."""
    source, rows = arguments.folder / "rows.jsonl", HERE.with_name("mapping_rows.py")
    words = ["river", "mill", "of", "the", "stone", "water", "a", "bounded", "runs", "evenly"]
    rng, written = random.Random(0), 0
    with source.open("w") as file:
        while written < arguments.rows:
            text = " ".join(rng.choices(words, k=rng.randint(50, 500)))
            written += file.write(json.dumps({"id": written, "text": text}) + "\n")
    out, cache, limit = arguments.folder / "table", arguments.folder / "cache", parse_size(arguments.memory)
    limit += arguments.headroom
    milldam = [sys.executable, "-m", "milldam", "map", f"{rows}:split_words", str(source), "-o", str(out), "--json"]
    milldam += ["--memory", arguments.memory, "--workers", str(arguments.workers)]
    commands = {"milldam": milldam}
    if arguments.python:
        commands["datasets"] = [arguments.python, str(rows), str(source), str(cache), str(arguments.workers)]
    lines = ["| | seconds | peak anonymous | peak charged | kills | rows | bytes |", "|---|---|---|---|---|---|---|"]
    for name, command in commands.items():
        for folder in (out, cache):
            shutil.rmtree(folder, ignore_errors=True)
        report = measure(["/bin/sh", "-c", TO_FILES, str(arguments.folder), *command], limit)
        said = json_in((arguments.folder / "stdout").read_text(errors="replace"))
        count, size = said.get("rows", said.get("counts", {}).get("rows")), said.get("bytes", said.get("output_bytes"))
        peaks = f"{megabytes(report.cgroup_peak_bytes)} | {megabytes(report.charged_peak_bytes or 0)}"
        ended = f"{report.oom_kills}" + (f", exit status {report.exit_status}" if report.exit_status else "")
        lines.append(f"| {name} | {report.wall_seconds:.0f} | {peaks} | {ended} | {count} | {size} |")
    return lines


def read_if_there(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_datasets(arguments: argparse.Namespace, documents: Path) -> Run:
    folder = arguments.folder / "datasets"
    folder.mkdir(exist_ok=True)
    peers = str(HERE.with_name("mapping_peers.py"))
    command = [arguments.python, peers, str(documents), str(arguments.tokenizer), str(folder)]
    command += ["--shards", str(arguments.peer_shards)]
    return run(command, arguments.folder, arguments.peer_limit)


def run_twice(arguments: argparse.Namespace, documents: Path, name: str) -> list[Run]:
    """From nothing, and again with what the first left; what is left then is removed."""
    place = arguments.folder / name.split()[0]
    shutil.rmtree(place, ignore_errors=True)
    runs = []
    for _ in range(2):
        if name == "datasets":
            runs.append(run_datasets(arguments, documents))
        else:
            runs.append(run_milldam(arguments, documents, name.split()[1]))
        if runs[-1].exit_status:
            break
    shutil.rmtree(place, ignore_errors=True)
    return runs


def row(name: str, runs: list[Run]) -> str:
    first = runs[0]
    if first.exit_status or not first.after_shards:
        why = "killed: out of memory" if first.oom_kills else f"exit status {first.exit_status}"
        return f"| {name} | {megabytes(first.peak_bytes)} | {why} | | | {first.seconds:.0f} | | | |"
    begin, end = first.after_shards[0], first.after_shards[-2 if "BASIC" in name else -1]
    cells = [
        name,
        megabytes(first.peak_bytes),
        megabytes(begin),
        megabytes(end),
        f"{100 * (end - begin) / begin:+.1f} %",
    ]
    cells += [f"{first.seconds:.0f}", f"{first.said['tokens']:,}"]
    if len(runs) > 1 and not runs[1].exit_status:
        again = runs[1]
        reused = f"{again.said['reused']} of {again.said['units']} units" if "units" in again.said else ""
        cells += [f"{again.seconds:.1f}", reused]
    return "| " + " | ".join([*cells, "", ""][:9]) + " |"


def report_lines(arguments: argparse.Namespace, runs: dict[str, list[Run]], size: int) -> list[str]:
    lines = [
        *heading(machine()),
        "",
        f"{arguments.num_files} documents, {size / 1e9:.2f} GB; budget {arguments.memory}; datasets: the first "
        f"{arguments.peer_shards} of 16 shards",
        "",
    ]
    lines += [
        "| | peak anonymous | after the first shard | after the last | grown | seconds | tokens | again, s | reused |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    return lines + [row(name, own) for name, own in runs.items()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_files", type=int, default=FILES)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--memory", default="512MB", help="milldam's budget")
    parser.add_argument(
        "--headroom", type=parse_size, default=parse_size("200MB"), help="of the hard limit, for page cache"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--python", help="a Python with datasets and transformers; none: milldam alone")
    parser.add_argument("--peer_limit", type=parse_size, help="hard limit for datasets; none without it")
    parser.add_argument("--peer_shards", type=int, default=16, help="datasets maps the first so many of the 16 shards")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench/mapping"))
    parser.add_argument("--rows", type=parse_size, help="ordinary rows of this size instead, and what comes of them")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    end_on_terminate()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.rows:
        print("\n".join([*heading(machine()), "", *compare_rows(arguments)]))
        return
    documents = make_documents(arguments.folder, arguments.num_files)
    size = sum(path.stat().st_size for path in documents.glob("*.jsonl"))
    wanted = [name for name in CONTENDERS if name in arguments.only and (name != "datasets" or arguments.python)]
    runs = {name: run_twice(arguments, documents, name) for name in wanted}
    print("\n".join(report_lines(arguments, runs, size)))
    if arguments.json:
        kept = {name: [asdict(one) for one in own] for name, own in runs.items()}
        figures = {
            "machine": machine(),
            "num_files": arguments.num_files,
            "bytes": size,
            "memory": arguments.memory,
            **kept,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
