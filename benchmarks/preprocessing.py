"""Preprocessing a corpus, side by side on one machine: milldam, HF datasets and datatrove.

In: a .jsonl corpus (see corpus.py). Out: a Markdown table with wall time, peak memory and disk of each, what dedup
adds to tokenizing alone, and with --json every single figure.

The job: strip, drop texts under 100 characters, drop exact duplicates, encode with GPT-2, an end token after each
document, rows of 2048 tokens, save. It is done on a copy of the corpus's beginning in which a fifth of the documents
are copies of earlier ones, half of the copies with white space around them (only who strips first finds those). The
copy is kept beside the corpus and used again.

- milldam: `milldam preprocess`, 512 MB, rows written out beside the store, report included.
- datasets, datatrove: see preprocessing_peers.py.
- tokenize: `milldam tokenize` of the same corpus, all documents: what dedup is measured against.
- dedup: `milldam preprocess` with default cleaning and exact dedup, nothing else; its report is on the clock.

Each run is a fresh process in a memory cgroup without a limit (Linux, root: see memory.py) and in a fresh folder that
is deleted afterwards; the page cache is warm, and the runs take turns (machines drift). The clock is on for the whole
command, imports included. Memory is the kernel's count of anonymous and shared pages of the whole tree, each once,
sampled every 50 ms; the wall time is no finer. Disk is what the run leaves, caches and intermediate files included.
How many documents each must keep is counted beforehand; one that keeps another number is marked, and the exit status
is 1. The peers take minutes for 200 MB.

    python benchmarks/preprocessing.py /tmp/bench/200MB.jsonl --tokenizer gpt2/tokenizer.json --peers peers/bin/python
    python benchmarks/preprocessing.py /tmp/bench/1GB.jsonl --size 1GB --tokenizer gpt2/tokenizer.json \\
        --only tokenize dedup --copies 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

import yaml

from memory import end_on_terminate, measure
from preprocessing_peers import END_TOKEN, MIN_CHARACTERS, PARTS, ROW_TOKENS
from sizes import megabytes, parse_size
from tokenizing import STDERR_LINES, fresh_folder, heading, json_in, machine, warm_page_cache

PEERS = Path(__file__).resolve().with_name("preprocessing_peers.py")
PART_COUNT = 8
"""Files of the corpus: datatrove shares out whole files."""

# The command's output goes to files beside its folder: the cgroup's shell knows no pipes.
TO_FILES = 'exec "$@" > "$0/stdout" 2> "$0/stderr"'


# ---- the corpus with copies ----


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the corpus with copies."""

    source: str
    source_bytes: int
    source_modified: float
    size_bytes: int
    copies: float
    """Share of the documents that are copies of an earlier one."""
    seed: int = 0


@dataclass(slots=True)
class Counts:
    """What is in the corpus, by Python's own means: what the contestants are checked against."""

    documents: int = 0
    distinct: int = 0
    kept: int = 0
    """Distinct ones that are long enough."""
    text_bytes: int = 0
    file_bytes: int = 0


class Census:
    """Counts documents; holds a hash of 16 bytes of each distinct one."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._seen: set[bytes] = set()

    def add(self, line: bytes) -> None:
        text = json.loads(line)["text"]
        encoded = text.encode()
        self.counts.documents += 1
        self.counts.text_bytes += len(encoded)
        self.counts.file_bytes += len(line)
        stripped = text.strip()
        digest = hashlib.blake2b(stripped.encode(), digest_size=16).digest()
        if digest not in self._seen:
            self._seen.add(digest)
            self.counts.distinct += 1
            self.counts.kept += len(stripped) >= MIN_CHARACTERS


def lines_with_copies(source: BinaryIO, recipe: Recipe) -> Iterator[bytes]:
    """The source's lines, and among them copies of lines that went before, from anywhere."""
    rng = Random(recipe.seed)
    starts, position = array("Q"), 0
    for line in source:
        while starts and rng.random() < recipe.copies:
            start = starts[int(rng.random() * len(starts))]
            yield copied(line_at(source, start), padded=rng.random() < 0.5)
        starts.append(position)
        position += len(line)
        yield line


def line_at(source: BinaryIO, start: int) -> bytes:
    """The line that begins there; the place where the file is read on does not move."""
    found = b""
    while not found.endswith(b"\n"):
        block = os.pread(source.fileno(), 1 << 16, start + len(found))
        if not block:
            break
        found += block[: block.find(b"\n") + 1] or block
    return found


def copied(line: bytes, *, padded: bool) -> bytes:
    if not padded:
        return line
    return json.dumps({"text": f" \n{json.loads(line)['text']}\t "}, ensure_ascii=False).encode() + b"\n"


def write_corpus(recipe: Recipe, folder: Path) -> Counts:
    """Writes the parts, one after the other, each an equal share of the size."""
    census = Census()
    with Path(recipe.source).open("rb") as source:
        lines = lines_with_copies(source, recipe)
        for part in range(PART_COUNT):
            end = recipe.size_bytes * (part + 1) // PART_COUNT
            with (folder / PARTS.replace("*", str(part))).open("wb") as file:
                while census.counts.file_bytes < end and (line := next(lines, None)):
                    file.write(line)
                    census.add(line)
    return census.counts


def corpus_with_copies(recipe: Recipe, cache: Path) -> tuple[Path, Counts]:
    """The folder with the corpus, made when the cache has none of this recipe."""
    size = f"{recipe.size_bytes / 1e6:.0f}MB"
    folder = cache / f"{Path(recipe.source).stem}-{size}-{recipe.copies:.0%}-copies".replace("%", "")
    note = folder / "recipe.json"
    if note.exists():
        noted = json.loads(note.read_text())
        if noted["recipe"] == asdict(recipe):
            return folder, Counts(**noted["counts"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    counts = write_corpus(recipe, folder)
    # Last: without it the folder is half-written.
    note.write_text(json.dumps({"recipe": asdict(recipe), "counts": asdict(counts)}, indent=2) + "\n")
    return folder, counts


# ---- the contestants ----


@dataclass(frozen=True, slots=True)
class Task:
    """What every contestant is given."""

    corpus: Path
    counts: Counts
    tokenizer: Path
    milldam: str
    peers: str
    memory: str
    workers: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Contestant:
    """A command for the task, made for an empty folder, and how many documents it must keep."""

    command: Callable[[Task, Path], list[str]]
    expected: Callable[[Counts], int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one contestant."""

    seconds: float
    peak_bytes: int
    tree_peak_bytes: int
    disk_bytes: int
    result_bytes: int
    documents: int
    tokens: int
    rows: int
    details: dict[str, Any] = field(default_factory=dict)
    """All that the contestant said itself."""


WHOLE_JOB: dict[str, Any] = {
    "clean": {"control_characters": False, "strip": True},
    "dedup": "exact",
    "filters": {"min_characters": MIN_CHARACTERS},
    "packing": {"strategy": "wrapped", "write": True},
    "seq_len": ROW_TOKENS,
}
DEDUP_ALONE: dict[str, Any] = {"clean": "default", "dedup": "exact", "packing": "none"}


def preprocess_with(rules: dict[str, Any]) -> Callable[[Task, Path], list[str]]:
    """`milldam preprocess` by a file with these rules."""

    def command(task: Task, folder: Path) -> list[str]:
        files = {"datasets": str(task.corpus / PARTS), "out": str(folder / "result")}
        tokenizer = {"path": str(task.tokenizer), "eos": END_TOKEN}
        config = folder / "preprocess.yaml"
        config.write_text(yaml.safe_dump({**files, "tokenizer": tokenizer, **rules}, sort_keys=False))
        options = ["--memory", task.memory, "--workers", str(task.workers), "--json"]
        return [task.milldam, "preprocess", str(config), *options]

    return command


def tokenize(task: Task, folder: Path) -> list[str]:
    command = [task.milldam, "tokenize", str(task.corpus / PARTS), "-o", str(folder / "result")]
    command += ["--tokenizer", str(task.tokenizer), "--eos", END_TOKEN]
    return [*command, "--memory", task.memory, "--workers", str(task.workers), "--json"]


def peer(name: str) -> Callable[[Task, Path], list[str]]:
    def command(task: Task, folder: Path) -> list[str]:
        places = [str(task.corpus), str(task.tokenizer), str(folder)]
        return [task.peers, str(PEERS), name, *places, "--workers", str(task.workers)]

    return command


CONTESTANTS = {
    "milldam": Contestant(preprocess_with(WHOLE_JOB), lambda counts: counts.kept),
    "datasets": Contestant(peer("datasets"), lambda counts: counts.kept),
    "datatrove": Contestant(peer("datatrove"), lambda counts: counts.kept),
    "tokenize": Contestant(tokenize, lambda counts: counts.documents),
    "dedup": Contestant(preprocess_with(DEDUP_ALONE), lambda counts: counts.distinct),
}
SIDE_BY_SIDE = ("milldam", "datasets", "datatrove")


def installed(name: str, task: Task) -> bool:
    """Whether a contestant can run here."""
    if name in ("datasets", "datatrove"):
        found = subprocess.run([task.peers, "-c", f"import {name}"], capture_output=True, check=False)
        return found.returncode == 0
    return shutil.which(task.milldam) is not None


# ---- measuring ----


def run_once(contestant: Contestant, task: Task) -> Run:
    """Runs it in an empty folder; a failure ends the benchmark with the last lines it said."""
    with fresh_folder(task.folder) as said, fresh_folder(task.folder) as folder:
        command = contestant.command(task, folder)
        # What the one before wrote shall not be on this one's clock.
        os.sync()
        report = measure(["/bin/sh", "-c", TO_FILES, str(said), *command], None)
        if report.exit_status != 0:
            last = "\n".join((said / "stderr").read_text().splitlines()[-STDERR_LINES:])
            raise SystemExit(f"exit status {report.exit_status} of {' '.join(command)}\n{last}")
        details = json_in((said / "stdout").read_text())
        return Run(
            seconds=report.wall_seconds,
            peak_bytes=report.cgroup_peak_bytes,
            tree_peak_bytes=report.tree_peak_bytes,
            disk_bytes=size_of(folder),
            result_bytes=size_of(folder / "result"),
            documents=details["documents"],
            tokens=details["tokens"],
            rows=rows_in(details),
            details=details,
        )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def rows_in(details: dict[str, Any]) -> int:
    """The rows of full length: a peer's own number, or the sum over milldam's splits."""
    if "rows" in details:
        return int(details["rows"])
    return sum(split["rows"] for split in details["packing"].values())


def take_turns(names: list[str], task: Task, repeats: int) -> dict[str, list[Run]]:
    """Every contestant once, then every one again: a machine that slows down slows all."""
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names:
            run = run_once(CONTESTANTS[name], task)
            runs[name].append(run)
            figures = f"{run.seconds:.1f} s, {megabytes(run.peak_bytes)}, {run.documents:,} documents"
            print(f"{repeat + 1}/{repeats} {name}: {figures}", file=sys.stderr)
    return runs


# ---- what is shown ----


def seconds_of(runs: list[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def row(name: str, runs: list[Run], counts: Counts, ours: float | None) -> str:
    times = [run.seconds for run in runs]
    middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    ratio = "" if ours is None or name == "milldam" else f"{seconds_of(runs) / ours:.1f}"
    cells = [
        name,
        f"{seconds_of(runs):.1f}",
        f"{min(times):.1f} to {max(times):.1f}",
        ratio,
        f"{counts.text_bytes / 1e6 / seconds_of(runs):.1f}",
        f"{max(run.peak_bytes for run in runs) / 1e6:.0f}",
        f"{middle.disk_bytes / 1e6:.0f}",
        f"{middle.result_bytes / 1e6:.0f}",
        kept(name, runs, counts),
        f"{middle.tokens:,}",
        f"{middle.rows:,}" if middle.rows else "",
    ]
    return f"| {' | '.join(cells)} |"


def kept(name: str, runs: list[Run], counts: Counts) -> str:
    """The documents of the last run, marked when any run kept another number than it must."""
    shown, expected = f"{runs[-1].documents:,}", CONTESTANTS[name].expected(counts)
    return shown if all_kept(name, runs, counts) else f"{shown} (WRONG: must be {expected:,})"


def all_kept(name: str, runs: list[Run], counts: Counts) -> bool:
    return all(run.documents == CONTESTANTS[name].expected(counts) for run in runs)


def table(runs: dict[str, list[Run]], counts: Counts) -> list[str]:
    """Median time; the highest peak of all runs; the rest of the median run."""
    titles = ["", "wall s, median", "lowest to highest", "times milldam's", "MB/s", "peak MB", "disk MB"]
    titles += ["of that the result", "documents kept", "tokens", "rows"]
    ours = seconds_of(runs["milldam"]) if "milldam" in runs else None
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return lines + [row(name, own, counts, ours if name in SIDE_BY_SIDE else None) for name, own in runs.items()]


def cost_of_dedup(runs: dict[str, list[Run]]) -> list[str]:
    if "dedup" not in runs or "tokenize" not in runs:
        return []
    alone, with_dedup = seconds_of(runs["tokenize"]), seconds_of(runs["dedup"])
    added = (with_dedup / alone - 1) * 100
    return ["", f"Dedup adds {added:.0f} % to the wall time of tokenizing alone ({alone:.2f} s -> {with_dedup:.2f} s)."]


def corpus_line(counts: Counts) -> str:
    return (
        f"{megabytes(counts.file_bytes)} of jsonl in {PART_COUNT} files, {megabytes(counts.text_bytes)} of text, "
        f"{counts.documents:,} documents, {counts.distinct:,} distinct, {counts.kept:,} of them long enough"
    )


def peer_versions(runs: dict[str, list[Run]]) -> dict[str, str]:
    """As the peers said themselves: they may live in another environment than this script."""
    return {name: own[0].details["version"] for name, own in runs.items() if "version" in own[0].details}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    beside_python = Path(sys.executable).with_name("milldam")
    add = parser.add_argument
    add("corpus", type=Path, help="a .jsonl file with a `text` a line, best without duplicates")
    add("--tokenizer", type=Path, required=True, help="a tokenizer.json of GPT-2")
    add("--size", type=parse_size, default=200 * 10**6, help="of the corpus with copies (200MB)")
    add("--copies", type=float, default=0.2, help="share of the documents that are copies (0.2)")
    add("--repeats", type=int, default=3, help="runs of each (3)")
    add("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="these contestants (all)")
    add("--memory", default="512MB", help="milldam's --memory (512MB)")
    add("--workers", type=int, default=2, help="of every contestant (2)")
    add("--milldam", default=str(beside_python), help="the command (the one beside this Python)")
    add("--peers", default=sys.executable, help="the Python that has datasets and datatrove (this one)")
    add("--cache", type=Path, help="where the corpus with copies is kept (beside the corpus)")
    add("--folder", type=Path, help="where results go meanwhile (the system's temporary one)")
    add("--json", type=Path, help="write every figure to this file")
    arguments = parser.parse_args()
    if not 0 <= arguments.copies < 1:
        parser.error("--copies is a share: from 0 to less than 1")
    return arguments


def task_of(arguments: argparse.Namespace, folder: Path) -> Task:
    source = arguments.corpus.resolve()
    told = source.stat()
    recipe = Recipe(str(source), told.st_size, told.st_mtime, arguments.size, arguments.copies)
    corpus, counts = corpus_with_copies(recipe, arguments.cache or source.parent)
    return Task(
        corpus=corpus,
        counts=counts,
        tokenizer=arguments.tokenizer.resolve(),
        milldam=arguments.milldam,
        peers=arguments.peers,
        memory=arguments.memory,
        workers=arguments.workers,
        folder=folder,
    )


def chosen(names: list[str], task: Task) -> list[str]:
    """The contestants that can run here, in our order; of the others it is said."""
    present = [name for name in CONTESTANTS if name in names and installed(name, task)]
    for name in set(names) - set(present):
        print(f"left out, {name}: not found; see benchmarks/README.md", file=sys.stderr)
    return present


def main() -> None:
    arguments = parse_arguments()
    end_on_terminate()
    with fresh_folder(arguments.folder) as folder:
        task = task_of(arguments, folder)
        print(corpus_line(task.counts), file=sys.stderr)
        for part in task.corpus.glob(PARTS):
            warm_page_cache(part)
        runs = take_turns(chosen(arguments.only, task), task, arguments.repeats)
    place = machine()
    place["versions"] |= peer_versions(runs)
    print("\n".join([*heading(place), corpus_line(task.counts), "", *table(runs, task.counts), *cost_of_dedup(runs)]))
    if arguments.json:
        raw = {name: [asdict(run) for run in own] for name, own in runs.items()}
        settings = {name: str(value) for name, value in vars(arguments).items()}
        figures = {"machine": place, "settings": settings, "corpus": asdict(task.counts), "runs": raw}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if not all(all_kept(name, own, task.counts) for name, own in runs.items()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
