"""What decontamination adds to preprocessing: CPU seconds of the whole process tree, with and without, in turns.

    python benchmarks/decontamination.py /tmp/corpus/1gb.jsonl --tokenizer ../shared/data/tokenizers/gpt2 \
        --squad ../shared/data/squad --items 50000

The items are new questions put together of halves of SQuAD's, two to an item: about 22 words of a real set's kind.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def questions(folder: Path) -> list[str]:
    found = []
    for name in ("squad-v2-dev-part.json", "xquad.en.json"):
        for article in json.loads((folder / name).read_text(encoding="utf-8"))["data"]:
            found += [qa["question"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    return found


def write_items(path: Path, known: list[str], count: int) -> None:
    rng = random.Random(0)

    def one() -> str:
        first, second = (rng.choice(known).split() for _ in range(2))
        return " ".join(first[: len(first) // 2] + second[len(second) // 2 :])

    lines = (json.dumps({"question": f"{one()} {one()}"}) + "\n" for _ in range(count))
    path.write_text("".join(lines), encoding="utf-8")


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(arguments: argparse.Namespace, folder: Path, *more: str) -> float:
    config = {"datasets": arguments.corpus, "tokenizer": arguments.tokenizer, "out": str(folder / "out")}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("milldam")), "preprocess", str(folder / "config.yaml"), "--quiet"]
    before = cpu_seconds()
    subprocess.run([*command, "--workers", arguments.workers, "--memory", arguments.memory, *more], check=True)
    shutil.rmtree(folder / "out")
    return cpu_seconds() - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--items", type=int, default=50_000)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_items(folder / "items.jsonl", questions(arguments.squad), arguments.items)
        option = ("--decontaminate", str(folder / "items.jsonl"))
        for number in range(arguments.rounds):
            without, with_sets = run(arguments, folder), run(arguments, folder, *option)
            added = 100 * (with_sets / without - 1)
            print(f"round {number}: without {without:.1f} s, with {with_sets:.1f} s of CPU: {added:+.0f} %", flush=True)


if __name__ == "__main__":
    main()
