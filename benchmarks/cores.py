"""What more cores bring, and cost: milldam on 1, 2, 4, ... workers, against gigatoken's own reader and Megatron-LM.

In: a JSON-lines corpus (corpus.py) and a tokenizer.json. Out: a Markdown table, and with --json every single figure:
wall and CPU-seconds of the whole command, the seconds of reading, encoding and writing as its workers clocked them, the
peak of its memory, and whether tokens and bytes are the same everywhere.

- tokenize, exact, near: `milldam tokenize`, and `milldam preprocess` with `dedup: exact` and `dedup: near`
- map: `milldam map` of a function that counts words
- encode_files: gigatoken's own reader and encoder on as many threads; nothing is written (cores_peers.py)
- preprocess_data_fast: Megatron-LM's two steps on as many threads, with --megatron CHECKOUT

Every run is a fresh process with a fresh folder; runs take turns, and the table has medians. CPU-seconds are those of
all processes (rusage of children, with theirs), `rest` what is in none of the stages: start, imports, loading,
hand-over, sampling. Stages are clocked by the wall in each worker: on busy cores they hold more than CPU, and `commit`,
which is not subtracted, is mostly waiting for the disk. Peaks: anonymous and shared memory of the process tree, as the
run recorded it. Needs no network; a packed environment (PYTHONPATH) works as an installed one does.

    python benchmarks/cores.py /tmp/bench/1GB.jsonl --tokenizer gpt2/tokenizer.json --megatron /tmp/Megatron-LM
    python benchmarks/cores.py /tmp/bench/1GB.jsonl --tokenizer gpt2/tokenizer.json --jobs tokenize --workers 1 16
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cores_peers import hash_files
from tokenizing import STDERR_LINES, fresh_folder, heading, json_in, machine, warm_page_cache

HERE = Path(__file__).resolve()
RESULTS = HERE.with_name("results") / "cores.json"
MILLDAM = [sys.executable, "-c", "from milldam.cli import main; main()"]
JOBS = ("tokenize", "exact", "near", "map")
PEERS = ("encode_files", "preprocess_data_fast")
STAGES = ("read", "encode", "write", "commit")
COUNT_WORDS = 'def count_words(batch):\n    return {"words": [len(text.split()) for text in batch["text"]]}\n'


@dataclass(frozen=True, slots=True)
class Task:
    """What every contender is given."""

    corpus: Path
    tokenizer: Path
    memory: str
    megatron: Path | None
    eos: str


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one contender."""

    wall: float
    cpu: float
    peak: int = 0
    tokens: int | None = None
    hash: str = ""
    """Of the tokens as bytes; of a table, of all its files."""
    work: dict[str, float] = field(default_factory=dict)
    """Seconds by kind of work, summed over workers."""
    stages: dict[str, float] = field(default_factory=dict)
    """Wall seconds by stage."""
    failed: str = ""
    load: float = 0.0
    """The machine's load average when it began."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def rest(self) -> float:
        """CPU-seconds outside of what the workers clocked."""
        return self.cpu - sum(seconds for kind, seconds in self.work.items() if kind != "commit")


Contender = tuple[str, int]
"""A job or a peer, and its workers or threads."""


# ---- running ----


def run_command(command: list[str], threads: int | None = None) -> tuple[float, float, str, str]:
    """Wall and CPU-seconds of a command and its children, what it printed, and why it failed."""
    environment = os.environ | ({} if threads is None else {"RAYON_NUM_THREADS": str(threads)})
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = "\n".join(done.stderr.splitlines()[-STDERR_LINES:])
    return wall, cpu, done.stdout, f"exit status {done.returncode}: {said}" if done.returncode else ""


def run_milldam(task: Task, job: str, workers: int, folder: Path) -> Run:
    out = folder / "out"
    options = ["-o", str(out), "--memory", task.memory, "--workers", str(workers), "--json"]
    wall, cpu, output, failed = run_command([*MILLDAM, *command_of(task, job, folder), *options])
    if failed:
        return Run(wall, cpu, failed=failed)
    said = json_in(output)
    return Run(
        wall,
        cpu,
        said["memory"]["peak"],
        said["counts"].get("tokens"),
        hash_of_table(out) if job == "map" else hash_of_store(out),
        said["work"],
        said["stages"],
        details={name: said[name] for name in ("seconds", "units", "workers", "counts", "memory", "output_bytes")},
    )


def command_of(task: Task, job: str, folder: Path) -> list[str]:
    if job == "tokenize":
        return ["tokenize", str(task.corpus), "--tokenizer", str(task.tokenizer)]
    if job == "map":
        function = folder / "count_words.py"
        function.write_text(COUNT_WORDS)
        return ["map", f"{function}:count_words", str(task.corpus), "--remove-columns", "all"]
    config = folder / "config.yaml"
    settings = {"datasets": str(task.corpus), "tokenizer": str(task.tokenizer), "dedup": job}
    config.write_text(json.dumps(settings))  # JSON is YAML, too
    return ["preprocess", str(config)]


def hash_of_store(out: Path) -> str:
    """Of all tokens, in the order of the shards."""
    shards = json.loads((out / "milldam.json").read_text())["shards"]
    return hash_files([out / f"{shard['name']}.bin" for shard in shards])


def hash_of_table(out: Path) -> str:
    return hash_files(sorted(path for path in out.iterdir() if path.is_file()))


def run_peer(task: Task, peer: str, threads: int, folder: Path) -> Run:
    command = [sys.executable, str(HERE.with_name("cores_peers.py")), peer, str(task.corpus), str(task.tokenizer)]
    command += ["--folder", str(folder), "--eos", task.eos, "--started", str(time.monotonic())]
    if task.megatron is not None:
        command += ["--megatron", str(task.megatron)]
    wall, cpu, output, failed = run_command(command, threads)
    if failed:
        return Run(wall, cpu, failed=failed)
    said = json_in(output)
    figures = (said["wall"], said["cpu"], said["peak"], said["tokens"], said["hash"])
    return Run(*figures, stages={"work": said["work_wall"]}, details=said)


def take_turns(
    task: Task, contenders: list[Contender], repeats: int, parent: Path | None
) -> Iterator[tuple[Contender, Run]]:
    """Every contender once, then every one again: a machine that slows down slows all."""
    for repeat in range(repeats):
        for name, workers in contenders:
            work: Callable[[Task, str, int, Path], Run] = run_peer if name in PEERS else run_milldam
            load = os.getloadavg()[0]
            with fresh_folder(parent) as folder:
                run = work(task, name, workers, folder)
            run = Run(**{**asdict(run), "load": load})
            print(
                f"{repeat + 1}/{repeats} {name} x {workers}: {run.failed or f'{run.wall:.2f} s'}",
                file=sys.stderr,
                flush=True,
            )
            yield (name, workers), run


# ---- telling ----


def table(runs: dict[Contender, list[Run]]) -> list[str]:
    names = ["", "workers", "wall s", "of encode_files", "CPU s", "of 1 worker", *STAGES, "other work", "rest"]
    names += ["peak MB", "tokens", "bytes"]
    return [
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
        *(f"| {' | '.join(row(one, runs))} |" for one in runs),
    ]


def row(contender: Contender, runs: dict[Contender, list[Run]]) -> list[str]:
    """Medians of the runs that did not fail."""
    name, workers = contender
    good = [run for run in runs[contender] if not run.failed]
    if not good:
        return [name, str(workers), "failed", *[""] * (len(STAGES) + 8)]
    cells = [
        name,
        str(workers),
        f"{median(good, 'wall'):.2f}",
        share(contender, runs, ("encode_files", workers), "wall"),
    ]
    cells += [f"{median(good, 'cpu'):.1f}", share((name, 1), runs, contender, "cpu")]
    if name in PEERS:
        cells += [""] * (len(STAGES) + 2)
    else:
        work = [statistics.median(run.work.get(stage, 0.0) for run in good) for stage in STAGES]
        other = [sum(seconds for kind, seconds in run.work.items() if kind not in STAGES) for run in good]
        cells += [f"{seconds:.1f}" for seconds in (*work, statistics.median(other), median(good, "rest"))]
    tokens = good[0].tokens
    cells += [f"{median(good, 'peak') / 1e6:.0f}", "" if tokens is None else f"{tokens:,}"]
    return [*cells, sameness(name, runs)]


def median(runs: list[Run], figure: str) -> float:
    values: list[float] = [getattr(run, figure) for run in runs]
    return statistics.median(values)


def share(ours: Contender, runs: dict[Contender, list[Run]], theirs: Contender, figure: str) -> str:
    """Their median over ours: of wall time, how fast we are against them."""
    found = [[run for run in runs.get(one, ()) if not run.failed] for one in (theirs, ours)]
    return f"{median(found[0], figure) / median(found[1], figure):.2f}" if all(found) else ""


def sameness(name: str, runs: dict[Contender, list[Run]]) -> str:
    """Whether all runs of a job made the same; what tokenizes everything is compared with the peers, too."""
    group = (*PEERS, "tokenize") if name in (*PEERS, "tokenize") else (name,)
    hashes = {run.hash for (one, _), own in runs.items() if one in group for run in own if not run.failed}
    return "equal" if len(hashes) == 1 else "DIFFER"


def stage_lines(runs: dict[Contender, list[Run]]) -> list[str]:
    """Wall seconds by stage of each, medians."""
    lines = ["", "Wall seconds by stage; start: imports, and all else before and after the work:", ""]
    for (name, workers), own in runs.items():
        good = [run for run in own if not run.failed and run.stages]
        if good:
            start = statistics.median(run.wall - sum(run.stages.values()) for run in good)
            stages = {stage: statistics.median(run.stages.get(stage, 0.0) for run in good) for stage in good[0].stages}
            told = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in {"start": start, **stages}.items())
            lines.append(f"- {name} x {workers}: {told}")
    return lines if len(lines) > 3 else []


def write_json(path: Path, place: dict[str, Any], settings: dict[str, str], runs: dict[Contender, list[Run]]) -> None:
    told = [
        {"contender": name, "workers": workers, "runs": [asdict(run) | {"rest": run.rest} for run in own]}
        for (name, workers), own in runs.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": place, "settings": settings, "contenders": told}, indent=1) + "\n")


# ---- the command ----


def doublings(most: int) -> list[int]:
    """
    >>> doublings(12)
    [1, 2, 4, 8, 12]
    """
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def chosen_contenders(arguments: argparse.Namespace) -> list[Contender]:
    names = list(arguments.jobs)
    for peer, present, how in (
        ("encode_files", True, ""),
        ("preprocess_data_fast", arguments.megatron is not None, "give --megatron CHECKOUT"),
    ):
        if peer in arguments.peers and present:
            names.append(peer)
        elif peer in arguments.peers:
            print(f"left out, {peer}: {how}", file=sys.stderr)
    return [(name, workers) for workers in arguments.workers for name in names]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("corpus", type=Path, help="a .jsonl file with a field text")
    add("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    add("--workers", type=int, nargs="+", default=doublings(cores), help="how many (1, 2, 4, ... all cores)")
    add("--jobs", nargs="*", choices=JOBS, default=JOBS, help="of milldam (all)")
    add("--peers", nargs="*", choices=PEERS, default=PEERS, help="to measure against (all)")
    add("--megatron", type=Path, help="a checkout of Megatron-LM; without it its tool is left out")
    add("--eos", default="<|endoftext|>", help="the tokenizer's end token (<|endoftext|>)")
    add("--memory", default="8GB", help="milldam's --memory (8GB)")
    add("--repeats", type=int, default=3, help="runs of each (3)")
    add("--folder", type=Path, help="where results go meanwhile (the system's temporary one)")
    add("--json", type=Path, default=RESULTS, help="every figure (benchmarks/results/cores.json)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    task = Task(arguments.corpus, arguments.tokenizer, arguments.memory, arguments.megatron, arguments.eos)
    contenders, place = chosen_contenders(arguments), machine()
    settings = {name: str(value) for name, value in vars(arguments).items()}
    warm_page_cache(task.corpus)
    runs: dict[Contender, list[Run]] = {
        one: [] for one in sorted(contenders, key=lambda one: (JOBS + PEERS).index(one[0]))
    }
    for contender, run in take_turns(task, contenders, arguments.repeats, arguments.folder):
        runs[contender].append(run)
        # After each run: what was measured stays when the time on a machine is over.
        write_json(arguments.json, place, settings, runs)
    size = f"{task.corpus.name}, {task.corpus.stat().st_size / 1e9:.2f} GB; --memory {task.memory}"
    print("\n".join([*heading(place), size, "", *table(runs), *stage_lines(runs)]))


if __name__ == "__main__":
    main()
