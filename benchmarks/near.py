"""Near-duplicates: what is removed and what should have been, against peers; how fast, on what cores and memory.

    python benchmarks/near.py quality                         # milldam's removals against brute force, 20,000 documents
    python benchmarks/near.py peers --python VENV/bin/python  # the same for rensa, datatrove, text-dedup, with time
    python benchmarks/near.py speed --documents 80_000 --peers rensa --python VENV/bin/python   # time alone
    python benchmarks/near.py stages CORPUS.jsonl --workers 1 4   # wall seconds of each stage by workers
    python benchmarks/near.py signatures CORPUS.jsonl.zst     # MB of text a CPU second, one core, by document size
    python benchmarks/near.py estimate                        # bias, spread and recall on pairs of known similarity
    python benchmarks/near.py resolve 200_000 2_000_000 --limit 256MB

`quality` and `peers` plant edits in real text (near_quality.py) and judge what is kept by the true similarities. The
exit status is 1 when milldam removed what it must not (nothing that stays is 0.7 like it), found less than 98 % of what
is 0.85 alike, or named a similarity that is not so.

`resolve` works on made-up signatures and sketches, a fifth of which are near-duplicates of another one, in clusters of
up to a few dozen. Each size runs in a process of its own in a memory cgroup with that limit (Linux, root).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pyarrow as pa

import cores
import milldam
from cores import MILLDAM, Task, run_command
from corpus import SEED_FOLDER, read_texts
from memory import lines_of, measure
from milldam.dedup.candidates import NearWork, find_pairs, least_matches, pair_steps
from milldam.dedup.minhash import CHANCE, NO_WORDS, MinHasher, unit_name
from milldam.dedup.near import decide, verify_pairs
from milldam.dedup.sketches import SketchWriter, sketch_paths
from milldam.memory import usage
from milldam.rules import NearRules
from milldam.sources.compression import read_blocks
from near_peers import PEERS
from near_quality import KINDS, Corpus, Mask, Removals, Verdict, judge, plant
from sizes import megabytes, parse_size
from tokenizing import json_in

RULES = NearRules(ngram=5, bands=32, rows=8, threshold=0.8)
DOCUMENT_BYTES = (100, 500, 2800, 20_000)
ROUNDS = 5
UNIT_DOCUMENTS = 100_000
SKETCH_VALUES, VERIFY_PARTS = 16, 64
FORKED = get_context("fork")
PARTS = 8
"""Files of a planted corpus, each a unit."""
MEMORY = "1GB"
TOKENIZER = Path(milldam.__file__).with_name("demo_data") / "tokenizer.json"


# ---- quality and peers ----


@dataclass(frozen=True, slots=True)
class Contender:
    """What one of them made of the corpus."""

    name: str
    wall: float
    cpu: float
    kept: Mask
    stages: dict[str, float] = field(default_factory=dict)
    removals: Removals | None = None


def run_milldam(corpus: Corpus, folder: Path, workers: int) -> Contender:
    """The whole command, tokenizing included."""
    out = folder / "out"
    config = {
        "datasets": str(corpus.folder),
        "tokenizer": str(TOKENIZER),
        "dedup": "near",
        "write_dropped": True,
        "out": str(out),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    options = ["--memory", MEMORY, "--workers", str(workers), "--json"]
    wall, cpu, said, failed = run_command([*MILLDAM, "preprocess", str(folder / "config.yaml"), *options])
    if failed:
        raise SystemExit(f"milldam: {failed}")
    removals = corpus.removals(out)
    return Contender("milldam", wall, cpu, removals.kept, json_in(said)["stages"], removals)


def run_peer(name: str, corpus: Corpus, folder: Path, workers: int, python: Path) -> Contender:
    script = str(Path(__file__).with_name("near_peers.py"))
    command = [str(python), script, name, str(corpus.folder), str(folder), "--workers", str(workers)]
    wall, cpu, said, failed = run_command(command)
    if failed:
        raise SystemExit(f"{name}: {failed}")
    told = json.loads(said.splitlines()[-1])
    kept = np.zeros(len(corpus.documents), bool)
    kept[told["kept"]] = True
    return Contender(f"{name} {told['version']}", wall, cpu, kept)


def show_kinds(corpus: Corpus, found: Contender, verdict: Verdict) -> None:
    kinds = np.array([one.kind for one in corpus.documents])
    print(f"\n| {found.name}, by kind | documents | removed | wrong | missed |\n|---|---|---|---|---|")
    for kind in KINDS:
        removed = int((~found.kept & (kinds == kind)).sum())
        wrong, missed = (int((kinds[these] == kind).sum()) for these in (verdict.wrong_numbers, verdict.missed_numbers))
        print(f"| {kind} | {(kinds == kind).sum():,} | {removed:,} | {wrong:,} | {missed:,} |")


def planted(arguments: argparse.Namespace, place: Path) -> Corpus:
    seeds = (SEED_FOLDER / "gutenberg-64MB.jsonl.zst", SEED_FOLDER / "multilingual-17MB.jsonl.zst")
    texts = [text for path in seeds for _, text in read_texts(path)]
    corpus = Corpus.write(place / "corpus", plant(texts, arguments.documents, arguments.seed), PARTS)
    size = f"{len(corpus.documents):,} documents, {megabytes(corpus.text_bytes)}"
    print(f"{size}, seed {arguments.seed}, {arguments.workers} workers\n")
    return corpus


def take_turns(corpus: Corpus, arguments: argparse.Namespace, place: Path) -> Iterator[tuple[str, Contender]]:
    """milldam, and the peers that are asked for, on one corpus."""
    for number in range(arguments.rounds):
        for peer in ("milldam", *arguments.peers):
            folder = place / f"{peer}-{number}"
            folder.mkdir()
            given = corpus, folder, arguments.workers
            yield peer, run_milldam(*given) if peer == "milldam" else run_peer(peer, *given, arguments.python)
            shutil.rmtree(folder)


def race(arguments: argparse.Namespace) -> None:
    """Time alone, for corpora that are too large to be judged by brute force."""
    with tempfile.TemporaryDirectory() as name:
        corpus = planted(arguments, Path(name))
        print("| | wall s | CPU s | removed |\n|---|---|---|---|")
        for _, found in take_turns(corpus, arguments, Path(name)):
            print(f"| {found.name} | {found.wall:.1f} | {found.cpu:.1f} | {(~found.kept).sum():,} |", flush=True)


def compare(arguments: argparse.Namespace) -> None:
    """Time, and what was removed wrongly or missed."""
    with tempfile.TemporaryDirectory() as name:
        corpus = planted(arguments, Path(name))
        truth = corpus.truth()
        print("| | wall s | CPU s | " + " | ".join(judge(truth, np.ones(len(truth.sizes), bool)).figures()) + " |")
        verdicts = {}
        for peer, found in take_turns(corpus, arguments, Path(name)):
            verdicts[peer] = verdict = judge(truth, found.kept)
            figures = " | ".join(f"{value:,}" for value in verdict.figures().values())
            print(f"| {found.name} | {found.wall:.1f} | {found.cpu:.1f} | {figures} |", flush=True)
            if peer == "milldam":
                ours = found
        show_kinds(corpus, ours, verdicts["milldam"])
        assert ours.removals is not None
        false = len(ours.removals.false_names(truth))
        print(f"\nmilldam by stage: {ours.stages}\ndrops that name what is not so: {false}")
    sys.exit(int(verdicts["milldam"].wrong > 0 or verdicts["milldam"].recall < 0.98 or false > 0))


# ---- stages ----


def measure_stages(arguments: argparse.Namespace) -> None:
    """Wall seconds of each stage by workers, the best of some rounds, and how many times those of the first."""
    task = Task(arguments.corpus, TOKENIZER, arguments.memory, None, "")
    best: dict[int, dict[str, float]] = {}
    for _ in range(arguments.rounds):
        for workers in arguments.workers:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                run = cores.run_milldam(task, "near", workers, Path(folder))
            if run.failed:
                raise SystemExit(run.failed)
            stages = run.stages | {"in all": run.wall, "CPU": run.cpu}
            held = best.setdefault(workers, stages)
            best[workers] = {name: min(seconds, held[name]) for name, seconds in stages.items()}
    heads = [f"{workers} workers s" for workers in best] + [f"times, {workers}" for workers in [*best][1:]]
    print("| stage | " + " | ".join(heads) + " |\n|---" + "|---" * len(heads) + "|")
    first = next(iter(best.values()))
    for stage in first:
        times = [first[stage] / max(1e-9, one[stage]) for one in [*best.values()][1:]]
        cells = [f"{one[stage]:.2f}" for one in best.values()] + [f"{one:.2f}" for one in times]
        print(f"| {stage} | " + " | ".join(cells) + " |")


# ---- signatures ----


def measure_signatures(corpus: Path, megabytes_read: int) -> None:
    """The best of some rounds, by the process's own time: others on the machine disturb it least."""
    compression = "zst" if corpus.suffix == ".zst" else None
    with corpus.open("rb") as file:
        head = b"".join(itertools.islice(read_blocks(file, compression), megabytes_read))
    text = "\n".join(json.loads(line)["text"] for line in head.split(b"\n")[:-1])
    hasher = MinHasher(RULES)
    for size in DOCUMENT_BYTES:
        documents = pa.array([text[at : at + size] for at in range(0, len(text), size)], pa.large_string())
        best = min(_cpu_seconds(hasher, documents) for _ in range(ROUNDS))
        print(f"documents of {size:6} characters: {documents.nbytes / best / 1e6:6.1f} MB a CPU second")


def _cpu_seconds(hasher: MinHasher, documents: pa.LargeStringArray) -> float:
    start = time.process_time()
    hasher.signatures(documents)
    return time.process_time() - start


# ---- estimate ----


def measure_estimate(pairs: int) -> None:
    """For pairs that differ in single words, so that the true similarity is known."""
    random, hasher = np.random.default_rng(0), MinHasher(RULES)
    print("words  similarity  mean estimate  deviation (256 permutations)  compared  taken")
    for every in (45, 23, 15):
        for replaced in (2, 4, 8, 20):
            true = (every - 5) / (every + 5)
            sides = zip(*(_pair(random, replaced, every) for _ in range(pairs)), strict=True)
            one, other = (hasher.signatures(pa.array(side, pa.large_string())) for side in sides)
            equal = one == other
            estimate = (equal.mean(axis=1) - CHANCE) / (1 - CHANCE)
            compared = equal.reshape(pairs, RULES.bands, RULES.rows).all(axis=2).any(axis=1)
            taken = compared & (equal.sum(axis=1) >= least_matches(RULES))
            spread = f"{estimate.std():.4f} ({(true * (1 - true) / 256) ** 0.5:.4f})"
            line = f"{every * replaced + 4:5} {true:11.3f} {estimate.mean():14.4f}  {spread:28}"
            print(f"{line} {compared.mean():9.3f} {taken.mean():6.3f}")


def _pair(random: np.random.Generator, replaced: int, every: int) -> tuple[str, str]:
    one = [f"w{number}" for number in random.integers(0, 20_000, every * replaced + 4).tolist()]
    other = list(one)
    for k in range(replaced):
        other[k * every + 4] = f"x{random.integers(0, 10**9)}"
    return " ".join(one), " ".join(other)


# ---- resolve ----


def make_unit(folder: Path, documents: int, unit: int) -> None:
    """Signatures, and sketches of what is in pairs; every fifth document is like an earlier one of its unit, 0.88 by
    its shingles."""
    random = np.random.default_rng(unit)
    count = min(UNIT_DOCUMENTS, documents - unit * UNIT_DOCUMENTS)
    rows = random.integers(0, 256, (count, 256), dtype=np.uint8)
    np.minimum(rows, NO_WORDS - 1, out=rows)
    copies = np.arange(4, count, 5)
    models = (copies * random.random(len(copies)) ** 2).astype(np.int64)
    models -= models % 5 == 4  # models are no copies themselves
    changed = random.random((len(copies), 256), dtype=np.float32) < 0.15
    rows[copies] = np.where(changed, rows[copies], rows[models])
    (folder / f"signatures-{unit_name(unit)}.bin").write_bytes(rows.data)
    paired = np.union1d(copies, models)
    sketches = random.integers(0, 2**32, (len(paired), SKETCH_VALUES), dtype=np.uint32)
    one, other = (np.searchsorted(paired, some) for some in (copies, models))
    sketches[one, 1:] = sketches[other, 1:]
    sketches.sort(axis=1)
    with SketchWriter(*sketch_paths(folder, unit_name(unit))) as sketched:
        sketched.add(paired, sketches.reshape(-1), np.full(len(paired), SKETCH_VALUES))
        sketched.commit(durable=False)


def measure_resolve(arguments: argparse.Namespace) -> None:
    """Make the files here, find the duplicates in new processes in a cgroup."""
    limit, workers = arguments.limit, arguments.workers
    for documents in arguments.documents:
        with (
            tempfile.TemporaryDirectory(dir=arguments.input or arguments.folder) as made,
            tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        ):
            start = time.perf_counter()
            with FORKED.Pool() as pool:
                pool.map(partial(make_unit, Path(made), documents), range(-(-documents // UNIT_DOCUMENTS)), chunksize=1)
            for path in Path(made).iterdir():
                if arguments.cold:
                    forget(path)
                (Path(name) / path.name).symlink_to(path)
            print(f"{megabytes(folder_bytes(Path(made)))} made in {time.perf_counter() - start:.1f} s", flush=True)
            command = [sys.executable, __file__, "resolve-here", name, "--limit", str(limit), "--workers", str(workers)]
            print("\n".join(lines_of(measure(command, limit))), flush=True)


def forget(path: Path) -> None:
    """Take a file out of the page cache: what is read of it counts against the limit of who reads it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resolve_here(folder: Path, limit_bytes: int, workers: int) -> None:
    """All steps, those of a stage side by side, each worker with its share of what the limit leaves, as in a job."""
    seconds, disk = {}, {"signatures": folder_bytes(folder)}
    pa.table({"": np.zeros(1)})  # Arrow imports pandas with the first table, where it is there; a job has it do without
    left = limit_bytes - (workers + 1) * usage().anonymous
    work = NearWork(folder=folder, rules=RULES, exempt_below=0, memory_bytes=left // workers, threads=workers)

    def timed(stage: str, steps: range, do: Callable[[int], int], most: int = workers) -> int:
        start = time.perf_counter()
        with FORKED.Pool(min(workers, most)) as pool:
            found = sum(pool.imap_unordered(do, steps))
        seconds[stage] = time.perf_counter() - start
        disk[stage] = folder_bytes(folder)
        print(f"  {stage}: {seconds[stage]:.1f} s", flush=True)
        return found

    timed("near", range(pair_steps(RULES)), partial(find_pairs, work))
    compared = timed("verify", range(VERIFY_PARTS), partial(verify_pairs, work, parts=VERIFY_PARTS))
    start = time.perf_counter()
    found = decide(replace(work, memory_bytes=left), compared)
    seconds["decide"] = time.perf_counter() - start
    print(f"{found['documents']:,} documents, {found['candidates']:,} pairs compared, {found['dropped']:,} dropped")
    print(f"  seconds, {workers} workers: " + ", ".join(f"{stage} {one:.1f}" for stage, one in seconds.items()))
    print("  disk after: " + ", ".join(f"{stage} {megabytes(one)}" for stage, one in disk.items()))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    quality, peers, speed = (commands.add_parser(name) for name in ("quality", "peers", "speed"))
    for command in (quality, peers, speed):
        command.add_argument("--documents", type=int, default=20_000)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--workers", type=int, default=2)
        command.add_argument("--rounds", type=int, default=1)
        command.set_defaults(do=compare, peers=[])
    for command in (peers, speed):
        command.add_argument("--peers", nargs="+", choices=PEERS, default=[*PEERS])
        command.add_argument("--python", type=Path, required=True, help="of an environment that has the peers")
    speed.set_defaults(do=race)
    stages = commands.add_parser("stages")
    stages.add_argument("corpus", type=Path, help="JSON lines with a field text")
    stages.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    stages.add_argument("--memory", default="4GB")
    stages.add_argument("--rounds", type=int, default=1)
    stages.add_argument("--folder", type=Path, help="for the stores (a temporary one)")
    stages.set_defaults(do=measure_stages)
    signatures = commands.add_parser("signatures")
    signatures.add_argument("corpus", type=Path, help="JSON lines with a field text, compressed or not")
    signatures.add_argument("--megabytes", type=int, default=8)
    signatures.set_defaults(do=lambda given: measure_signatures(given.corpus, given.megabytes))
    estimate = commands.add_parser("estimate")
    estimate.add_argument("--pairs", type=int, default=1000)
    estimate.set_defaults(do=lambda given: measure_estimate(given.pairs))
    resolve = commands.add_parser("resolve")
    resolve.add_argument("documents", type=int, nargs="+")
    resolve.add_argument(
        "--folder",
        type=Path,
        help="for the files, 290 bytes a document, 33 a worker",
    )
    resolve.add_argument("--cold", action="store_true", help="read all from disk: page cache counts against the limit")
    resolve.add_argument("--input", type=Path, help="where signatures and sketches are made, when not in --folder")
    resolve.set_defaults(do=measure_resolve)
    here = commands.add_parser("resolve-here")
    here.add_argument("folder", type=Path)
    here.set_defaults(do=lambda given: resolve_here(given.folder, given.limit, given.workers))
    for command in (resolve, here):
        command.add_argument("--limit", type=parse_size, default=parse_size("1GB"), help="of memory (1GB)")
        command.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
