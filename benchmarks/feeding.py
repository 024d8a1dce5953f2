"""Training straight from text: tokens/s of (x, y) batches of 1,024, against other loaders that tokenize as they go.

In: a JSON-lines file, GPT-2's tokenizer, for the peers a Python that has them. Out: a Markdown table, and with --json
every figure. Contenders run in turns, each in a fresh process (`feeding_peers.py` says what each one does), `--rounds`
times; medians. On a machine that others use, trust tokens per CPU-second: that of all processes of a contender.

    python -m venv /tmp/peers; /tmp/peers/bin/pip install torch torchtitan datasets tokenizers tiktoken
    git clone --depth 1 https://github.com/karpathy/nanochat /tmp/nanochat
    python benchmarks/feeding.py 300MB.jsonl --tokenizer gpt2/ --peers /tmp/peers/bin/python --nanochat /tmp/nanochat
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS, PEERS = ("milldam", "tokenize"), ("titan", "datasets", "nanochat")


def run(name: str, arguments: argparse.Namespace, work: Path) -> dict[str, float] | None:
    python = sys.executable if name in OURS else arguments.peers
    script = Path(__file__).with_name("feeding_peers.py")
    command = [str(python), str(script), name, str(arguments.text), "--tokenizer", str(arguments.tokenizer)]
    command += ["--work", str(work)]
    command += ["--tokens", str(arguments.peer_tokens)] if name in PEERS else []
    command += ["--nanochat", str(arguments.nanochat)] if arguments.nanochat else []
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"{name}: {ended.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    figures: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="the Python of the peers; default: without them")
    parser.add_argument("--nanochat", type=Path, help="a checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-tokens", type=int, default=10_000_000, help="where a peer stops; default: 10,000,000")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [*OURS, *(PEERS if arguments.peers else ())]
    if arguments.nanochat is None and "nanochat" in names:
        names.remove("nanochat")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="feeding-") as work:
                figures = run(name, arguments, Path(work) / "work")
            if figures is not None:
                found[name].append(figures)
                print(f"{name}: {figures}", file=sys.stderr, flush=True)
    table = {name: _medians(runs) for name, runs in found.items() if runs}
    _show(table)
    if arguments.json:
        report = {"command": sys.argv, "medians": table, "runs": found}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median([of(one) for one in runs])

    return {
        "tokens_per_second": median(lambda one: one["tokens"] / one["seconds"]),
        "tokens_per_cpu_second": median(lambda one: one["tokens"] / one["cpu"]),
        "first_batch": median(lambda one: one["first_batch"]),
        "tokens": median(lambda one: one["tokens"]),
    }


def _show(table: dict[str, dict[str, Any]]) -> None:
    ours = table["milldam"]
    print(
        "| | tokens/s | milldam's is | tokens/CPU-second | milldam's is | first batch, s |\n|---|--:|--:|--:|--:|--:|"
    )
    for name, figures in table.items():
        wall, cpu = figures["tokens_per_second"], figures["tokens_per_cpu_second"]
        by_wall, by_cpu = ours["tokens_per_second"] / wall, ours["tokens_per_cpu_second"] / cpu
        first = "" if name == "tokenize" else f"{figures['first_batch']:.2f}"
        print(f"| {name} | {wall:,.0f} | {by_wall:.2f} x | {cpu:,.0f} | {by_cpu:.2f} x | {first} |")


if __name__ == "__main__":
    sys.exit(main())
