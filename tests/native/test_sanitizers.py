"""Whole commands with kernels that notice every byte read or written beyond an array; texts grow by one byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kit.jobs import TOKENIZER, write_lines

import milldam

PACKAGE = Path(milldam.__file__).parent
CHECKS = "-g -fsanitize=address,undefined -fno-sanitize-recover=all"
ITEMS = [
    "What was the mill's name that stood by the river in the valley before the flood of the year",
    "ha " * 200,
    "a b c d e f g h i j k l m n o p q r s t u v w x y z",
    "黑豹队的防守只丢了308分,在联赛中排名第六",
    "x" * 700 + " some words of sixteen letters",
]
BATCHES = """
import sys, milldam
store = milldam.open(sys.argv[1])
for strategy in ("wrapped", "best_fit"):
    for length in range(1, 40):
        options = {"pad_last": True} if strategy == "wrapped" else {"too_long": "split"}
        for form in ("shifted", "hf"):
            rows = store.packed(length, strategy=strategy, form=form, **options)
            for batch in rows.batches(30, epochs=1, drop_last=False):
                batch["labels"].sum()
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of milldam whose library in C is checked while it runs."""
    compiler = shutil.which("gcc")
    if compiler is None or not preloaded(compiler):
        pytest.skip("gcc and its libasan.so are needed")
    folder = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(PACKAGE, folder / "milldam", ignore=shutil.ignore_patterns("__pycache__", "kernels*"))
    build = "import sys, build; sys.exit(build.build())"
    environment = os.environ | {"CC": f"{compiler} {CHECKS}"}
    subprocess.run([sys.executable, "-c", build], cwd=folder / "milldam" / "native", env=environment, check=True)
    return folder


def preloaded(compiler: str) -> str | None:
    path = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return str(Path(path).resolve()) if Path(path).is_absolute() else None


def run_checked(package: Path, *command: object) -> None:
    """A Python process in which the library ends everything at the first byte beyond an array."""
    library = preloaded(shutil.which("gcc") or "")
    environment = os.environ | {"PYTHONPATH": str(package), "LD_PRELOAD": str(library)}
    environment["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1:log_to_syslog=0"
    done = subprocess.run([sys.executable, "-c", *map(str, command)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"


def run_command(package: Path, *arguments: object) -> None:
    program = (
        f"import milldam; assert milldam.__file__.startswith({str(package)!r})\nfrom milldam.cli import main; main()"
    )
    run_checked(package, program, *arguments, "--workers", 1, "--memory", "4GB")


def growing(alphabet: str, sizes: Iterator[int] | range) -> list[str]:
    """Texts of so many characters."""
    return [(alphabet * (size // len(alphabet) + 1))[:size] for size in sizes]


def growing_texts() -> list[str]:
    alphabets = ["a", "a b ", "p7 p7 ", "the mill's wheel – ", "中文a", "é́Ω ", "x" * 63 + "é", "😀 "]
    texts = [text for alphabet in alphabets for text in growing(alphabet, range(1, 200))]
    fillers = [f"{number} " + "p7 p7 " * 2000 for number in range(60)]
    for size in [*range(32_760, 32_775), *range(100_000, 100_070)]:
        fillers.insert(size % 60, (("a b c d " if size % 2 else "abcdefg hijk ") * 13_000)[:size])
    return texts + fillers + [f"{text} {item} {text}" for text in texts[:300:7] for item in ITEMS]


@pytest.mark.slow
@pytest.mark.parametrize("dedup", ["off", "near"])
def test_no_kernel_leaves_its_arrays_in_a_job(package: Path, tmp_path: Path, dedup: str) -> None:
    """JSON lines, characters, words, signatures, sketches, evaluation items and tokens."""
    corpus = write_lines(tmp_path / "corpus.jsonl", growing_texts())
    evals = tmp_path / "evals.jsonl"
    evals.write_text("".join(json.dumps({"question": item}) + "\n" for item in ITEMS), encoding="utf-8")
    config = {
        "datasets": str(corpus),
        "tokenizer": str(TOKENIZER),
        "out": str(tmp_path / "store"),
        "dedup": dedup,
        "filters": {"min_characters": 2},
        "decontaminate": [{"path": str(evals)}],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(config), encoding="utf-8")
    run_command(package, "preprocess", tmp_path / "job.yaml")


@pytest.mark.slow
def test_no_kernel_leaves_its_arrays_in_rows_of_conversations(package: Path, tmp_path: Path) -> None:
    """Of every length, in both forms."""
    lines = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}]}
        for text in growing("the mill's wheel – ", range(1, 200))
    ]
    chat = tmp_path / "chat.jsonl"
    chat.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "template.jinja").write_text(template)
    options = ("--chat", "--chat-template", tmp_path / "template.jinja", "--tokenizer", TOKENIZER)
    run_command(package, "tokenize", chat, "-o", tmp_path / "store", *options)
    run_checked(package, BATCHES, tmp_path / "store")
