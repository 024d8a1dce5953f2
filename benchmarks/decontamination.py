"""What decontamination adds to preprocessing, and what it finds.

    python benchmarks/decontamination.py cost /tmp/corpus/1gb.jsonl --tokenizer ../shared/data/tokenizers/gpt2 \
        --squad ../shared/data/squad --workers 1 2 --dedup exact off --rounds 5
    python benchmarks/decontamination.py recall /tmp/corpus/300mb.jsonl --tokenizer ../shared/data/tokenizers/gpt2 \
        --squad ../shared/data/squad

`cost`: CPU seconds of the whole process tree and wall seconds, with and without, in turns; medians and their ratio. The
items are new questions put together of halves of SQuAD's, two to an item: about 22 words of a real set's kind.

`recall`: SQuAD's questions, each planted in a document of the corpus as it is, in capitals with other white space, and
without punctuation: how many of them are found. And the same questions in a part of the corpus as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

MILLDAM = str(Path(sys.executable).with_name("milldam"))
PLANTED: dict[str, Callable[[str], str]] = {
    "verbatim": lambda text: text,
    "in capitals, other white space": lambda text: text.upper().replace(" ", "\n\t"),
    "without punctuation": lambda text: re.sub(r"[^\w\s]", "", text),
}


def questions(folder: Path) -> list[str]:
    found = []
    for name in ("squad-v2-dev-part.json", "xquad.en.json"):
        for article in json.loads((folder / name).read_text(encoding="utf-8"))["data"]:
            found += [qa["question"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    return found


def write_lines(path: Path, field: str, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")


# ---- cost ----


def made_up(known: list[str], count: int) -> list[str]:
    rng = random.Random(0)

    def one() -> str:
        first, second = (rng.choice(known).split() for _ in range(2))
        return " ".join(first[: len(first) // 2] + second[len(second) // 2 :])

    return [f"{one()} {one()}" for _ in range(count)]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def preprocess(config: Path, out: Path, *more: str) -> tuple[float, float]:
    """CPU and wall seconds."""
    shutil.rmtree(out, ignore_errors=True)
    cpu, wall = cpu_seconds(), time.perf_counter()
    subprocess.run([MILLDAM, "preprocess", str(config), "--quiet", *more], check=True)
    return cpu_seconds() - cpu, time.perf_counter() - wall


def cost(arguments: argparse.Namespace, folder: Path) -> None:
    items, config, out = folder / "items.jsonl", folder / "config.yaml", folder / "out"
    write_lines(items, "question", made_up(questions(arguments.squad), arguments.items))
    told = {"datasets": arguments.corpus, "tokenizer": arguments.tokenizer, "out": str(out)}
    config.write_text(json.dumps(told | {"memory": arguments.memory}), encoding="utf-8")
    for dedup, workers in itertools.product(arguments.dedup, arguments.workers):
        common = ("--set", f"dedup={dedup}", "--workers", workers)
        looking = (*common, "--decontaminate", str(items))
        rounds = [[preprocess(config, out, *options) for options in (common, looking)] for _ in range(arguments.rounds)]
        said = []
        for number, name in enumerate(("CPU", "wall")):
            without, with_sets = (median(one[which][number] for one in rounds) for which in (0, 1))
            each = ", ".join(f"{100 * (one[1][number] / one[0][number] - 1):+.0f}" for one in rounds)
            said.append(f"{name} {without:.2f} -> {with_sets:.2f} s: {100 * (with_sets / without - 1):+.1f} % ({each})")
        print(f"dedup {dedup}, {workers} workers: {'; '.join(said)}", flush=True)


# ---- recall ----


def recall(arguments: argparse.Namespace, folder: Path) -> None:
    known = questions(arguments.squad)
    with open(arguments.corpus, encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in itertools.islice(lines, arguments.documents)]
    evals = folder / "evals.jsonl"
    write_lines(evals, "question", known)
    for name, change in PLANTED.items():
        cut = [text[: arguments.characters] for text in itertools.islice(itertools.cycle(texts), len(known))]
        half = arguments.characters // 2
        planted = [f"{text[:half]}\n{change(one)}\n{text[half:]}" for text, one in zip(cut, known, strict=True)]
        found, searched = found_in(folder, arguments.tokenizer, planted, evals)
        print(f"{name}: {found:,} of {searched:,} found ({found / searched:.4f})", flush=True)
    found, _ = found_in(folder, arguments.tokenizer, texts, evals)
    print(f"in {sum(map(len, texts)) / 1e6:.0f} million characters as they are: {found:,} found")


def found_in(folder: Path, tokenizer: str, texts: list[str], evals: Path) -> tuple[int, int]:
    """How many items documents have, and how many were looked for."""
    corpus, out = folder / "corpus.jsonl", folder / "out"
    write_lines(corpus, "text", texts)
    told = {"datasets": str(corpus), "tokenizer": tokenizer, "out": str(out), "dedup": "off"}
    sets = [{"path": str(evals), "columns": "question", "action": "report", "common_share": 1}]
    config = folder / "recall.yaml"
    config.write_text(json.dumps(told | {"decontaminate": sets}), encoding="utf-8")
    preprocess(config, out)
    (one,) = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))["facts"]["contamination"]["sets"]
    searched = one["searched"]
    return one["items_found"], searched["passages"] - searched["too_short"] - searched["common"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cost", "recall"))
    parser.add_argument("corpus")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--workers", nargs="+", default=["1", "2"])
    parser.add_argument("--dedup", nargs="+", default=["exact", "off"])
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=16_000, help="of the corpus, for recall")
    parser.add_argument("--characters", type=int, default=1_000, help="of a document that an item is planted in")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        (cost if arguments.what == "cost" else recall)(arguments, Path(place))


if __name__ == "__main__":
    main()
