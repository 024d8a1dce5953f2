"""Question answering at the size of SQuAD v2 train, side by side: milldam and HF datasets with the usual recipe.

In: the SQuAD files in `../shared/data/squad` and a tokenizer. Out: a Markdown table with wall time and peak memory of
each, whether they made the same windows, then the memory and the rate of a training epoch over milldam's store; with
--json every single figure.

The examples (130,319 by default) are made from the files with variation, about 5 questions a context: in every copy of
a context one word in eight outside its answers is another context's word, numbers outside of them get other digits,
and a made-up name is put in front, so that no two contexts are the same. Written once, kept in the folder, used again.

- milldam: `milldam qa`, 600 MB, two workers, from the SQuAD file; the clock is on for the whole command.
- datasets: see qa_peers.py, two processes, from the same examples as lines. Its whole time and its map alone are both
  told: the ratio is with the map alone, in its favour, since loading and saving are left out.
- epoch: time-step-major batches of 8 documents over milldam's store, shuffled, in a process of its own; its memory is
  anonymous memory (RssAnon) beyond what the imports took, sampled every 10 ms.

Each run is a fresh process in a memory cgroup (Linux, root: see memory.py), milldam's with a hard limit at its budget
plus --headroom, since page cache counts, too.

    python benchmarks/qa.py --python /tmp/bench/hfd/bin/python --json /tmp/bench/qa.json
    python benchmarks/qa.py --examples 6000 --python /tmp/bench/hfd/bin/python
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from memory import Report, end_on_terminate, measure
from sizes import megabytes, parse_size
from tokenizing import STDERR_LINES, heading, json_in, machine

HERE = Path(__file__).resolve()
SHARED = HERE.parents[2] / "shared/data"
SOURCES = ("squad-v2-dev-part.json", "xquad.en.json")
EXAMPLES = 130_319
SEED_MINUTES = 50
"""What seed 003 states for its own processing."""
QUESTIONS = 9
"""On one context at most, which gives 5.9 on average; SQuAD v2 train has 6.8."""
CHANGED_SHARE = 1 / 8
SAMPLE_SECONDS = 0.01

# The command's output goes to files beside its folder: the cgroup's shell knows no pipes.
TO_FILES = 'exec "$@" > "$0/stdout" 2> "$0/stderr"'
_WORD = re.compile(r"\w+")
_SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


# ---- the examples ----


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A context and its questions, as SQuAD has them."""

    context: str
    qas: list[dict[str, Any]]


class Variation:
    """Makes other paragraphs out of given ones; the same seed gives the same."""

    def __init__(self, paragraphs: list[Paragraph], seed: int) -> None:
        self._random = Random(seed)
        self._words = [word for paragraph in paragraphs for word in _WORD.findall(paragraph.context)]

    def of(self, paragraph: Paragraph, copy: int) -> Paragraph:
        """The paragraph with other words, its answers where they now are."""
        kept = [(one["answer_start"], one["answer_start"] + len(one["text"])) for one in answers_in(paragraph)]
        name = "".join(self._random.choices(_SYLLABLES, k=4)).capitalize()
        parts, moved, last = [f"{name} {copy}: "], [(0, len(name) + len(str(copy)) + 3)], 0
        shift = moved[0][1]
        for match in _WORD.finditer(paragraph.context):
            if any(match.start() < stop and start < match.end() for start, stop in kept):
                continue
            other = self._other(match[0])
            if other != match[0]:
                parts += [paragraph.context[last : match.start()], other]
                last = match.end()
                shift += len(other) - len(match[0])
                moved.append((last, shift))
        parts.append(paragraph.context[last:])
        return Paragraph("".join(parts), [self._question(asked, copy, moved) for asked in paragraph.qas])

    def _other(self, word: str) -> str:
        if word.isdigit():
            return "".join(self._random.choices("0123456789", k=len(word)))
        return self._random.choice(self._words) if self._random.random() < CHANGED_SHARE else word

    def _question(self, asked: dict[str, Any], copy: int, moved: list[tuple[int, int]]) -> dict[str, Any]:
        question = _WORD.sub(lambda match: self._other(match[0]), asked["question"])
        answers = [
            {**one, "answer_start": one["answer_start"] + shift_at(moved, one["answer_start"])}
            for one in asked["answers"]
        ]
        return {**asked, "id": f"{asked['id']}-{copy}", "question": question, "answers": answers}


def answers_in(paragraph: Paragraph) -> Iterator[dict[str, Any]]:
    return (answer for asked in paragraph.qas for answer in asked["answers"])


def shift_at(moved: list[tuple[int, int]], place: int) -> int:
    """By how much a place has moved: (place, shift from there on), ascending."""
    return max(pair for pair in moved if pair[0] <= place)[1]


def read_paragraphs() -> list[Paragraph]:
    loaded = [json.loads((SHARED / "squad" / name).read_text(encoding="utf-8")) for name in SOURCES]
    articles = itertools.chain.from_iterable(one["data"] for one in loaded)
    paragraphs = (one for article in articles for one in article["paragraphs"])
    return [Paragraph(one["context"], part) for one in paragraphs for part in shared_out(one["qas"])]


def shared_out(questions: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """In equal parts of at most QUESTIONS: the dev set has more on a context than the training set."""
    parts = -(-len(questions) // QUESTIONS)
    return (questions[part::parts] for part in range(parts))


def varied(count: int, seed: int = 0) -> Iterator[Paragraph]:
    """Paragraphs with this many questions together."""
    given = read_paragraphs()
    variation = Variation(given, seed)
    left = count
    for copy in itertools.count():
        for paragraph in given:
            if left <= 0:
                return
            made = variation.of(paragraph, copy)
            yield Paragraph(made.context, made.qas[:left])
            left -= len(made.qas)


def write_examples(count: int, folder: Path) -> tuple[Path, Path]:
    """The same examples as a SQuAD file and as lines; made when they are not there."""
    nested, flat = folder / f"squad-{count}.json", folder / f"squad-{count}.jsonl"
    if nested.exists() and flat.exists():
        return nested, flat
    drafts = [path.with_name(f"{path.name}.draft") for path in (nested, flat)]
    with drafts[0].open("w", encoding="utf-8") as file, drafts[1].open("w", encoding="utf-8") as lines:
        file.write('{"version": "v2.0", "data": [')
        for number, paragraph in enumerate(varied(count)):
            title = f"article {number}"
            article = {"title": title, "paragraphs": [{"context": paragraph.context, "qas": paragraph.qas}]}
            file.write((", " if number else "") + json.dumps(article, ensure_ascii=False))
            lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in flat_rows(title, paragraph))
        file.write("]}\n")
    for draft, path in zip(drafts, (nested, flat), strict=True):
        draft.replace(path)
    return nested, flat


def flat_rows(title: str, paragraph: Paragraph) -> Iterator[dict[str, Any]]:
    for asked in paragraph.qas:
        answers = {
            "text": [one["text"] for one in asked["answers"]],
            "answer_start": [one["answer_start"] for one in asked["answers"]],
        }
        row = {"id": asked["id"], "title": title, "context": paragraph.context, "question": asked["question"]}
        yield {**row, "answers": answers}


def write_tokenizer(spec: str, folder: Path) -> Path:
    """A folder with the tokenizer in the one form that both load, with its template and its side of padding."""
    import tokenizers

    from milldam.qa.settings import QARules
    from milldam.qa.template import template_of
    from milldam.tokenizers.loading import load_tokenizer

    loaded = load_tokenizer(spec)
    made = loaded.huggingface
    own = template_of(made, QARules(), loaded.named)
    if made.post_processor is None and made.token_to_id("[CLS]") is not None:
        ids = [(name, made.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
        )
    target = folder / "tokenizer"
    target.mkdir(exist_ok=True)
    facts: dict[str, Any] = {"padding_side": "left" if own.pad_left else "right", "pad_token_type_id": own.pad_type}
    facts |= {"pad_token": made.id_to_token(own.pad_id)}
    facts |= {"cls_token": made.id_to_token(own.cls_id)} if own.cls_id is not None else {}
    (target / "tokenizer_config.json").write_text(json.dumps(facts))
    made.save(str(target / "tokenizer.json"))
    return target


# ---- the runs ----


@dataclass(frozen=True, slots=True)
class Run:
    """One process: what it used, and what it said."""

    seconds: float
    peak_bytes: int
    charged_bytes: int | None
    said: dict[str, Any] = field(default_factory=dict)


def run(command: list[str], folder: Path, limit_bytes: int | None) -> Run:
    """Runs it in a cgroup; a failure ends the benchmark with the last lines it said."""
    os.sync()
    said = folder / "said"
    said.mkdir(parents=True, exist_ok=True)
    report: Report = measure(["/bin/sh", "-c", TO_FILES, str(said), *command], limit_bytes)
    if report.exit_status != 0:
        last = "\n".join((said / "stderr").read_text().splitlines()[-STDERR_LINES:])
        raise SystemExit(f"exit status {report.exit_status} of {' '.join(command)}\n{last}")
    details = json_in((said / "stdout").read_text())
    return Run(report.wall_seconds, report.cgroup_peak_bytes, report.charged_peak_bytes, details)


def run_milldam(arguments: argparse.Namespace, nested: Path, tokenizer: Path) -> Run:
    out = arguments.folder / "store"
    shutil.rmtree(out, ignore_errors=True)
    command = [arguments.milldam, "qa", str(nested), "-o", str(out), "--tokenizer", str(tokenizer)]
    command += ["--max-seq-length", str(arguments.length), "--overlap", str(arguments.overlap)]
    command += ["--memory", str(arguments.memory), "--workers", str(arguments.workers), "--json"]
    return run(command, arguments.folder, parse_size(arguments.memory) + arguments.headroom)


def run_datasets(arguments: argparse.Namespace, flat: Path, tokenizer: Path) -> Run:
    folder = arguments.folder / "datasets"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    command = [arguments.python, str(HERE.with_name("qa_peers.py")), str(flat), str(tokenizer), str(folder)]
    command += ["--workers", str(arguments.workers), "--length", str(arguments.length)]
    return run([*command, "--overlap", str(arguments.overlap)], arguments.folder, None)


def run_epoch(arguments: argparse.Namespace) -> Run:
    command = [sys.executable, str(HERE), "--epoch", str(arguments.folder / "store")]
    return run(command, arguments.folder, None)


# ---- the epoch, in a process of its own ----


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * sum(int(number) for number in re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+)", status, re.MULTILINE))


class Peak:
    """The most anonymous memory of this process, sampled by a thread."""

    def __init__(self) -> None:
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def epoch(store_path: Path, batch_size: int = 8) -> dict[str, Any]:
    """Every window of the store once, in time-step-major batches."""
    from milldam.qa.batches import DocumentSamples
    from milldam.qa.store import FeatureStore

    imported = anonymous_bytes()
    started = time.perf_counter()
    steps = windows = tokens = 0
    with Peak() as peak:
        store = FeatureStore(store_path)
        for batch in DocumentSamples(store).batches(batch_size, seed=1, drop_last=False):
            for step in batch:
                steps += 1
                windows += int(step["document_mask"].sum())
                tokens += int(step["attention_mask"].sum())
    seconds = time.perf_counter() - started
    assert windows == len(store), f"{windows} of {len(store)} windows"
    memory = {"imports_bytes": imported, "beyond_imports_bytes": peak.bytes - imported}
    figures = {"windows": windows, "steps": steps, "tokens": tokens, "seconds": seconds}
    return {**figures, "windows_per_second": windows / seconds, **memory}


# ---- what is shown ----


def differing_positions(folder: Path) -> tuple[int, int, int]:
    """Windows of each, and in how many start or end differ: (milldam, datasets, different)."""
    import numpy as np

    from milldam.qa.store import FeatureStore

    store = FeatureStore(folder / "store")
    theirs = np.load(folder / "datasets/positions.npy", mmap_mode="r")
    if len(store) != len(theirs):
        return len(store), len(theirs), max(len(store), len(theirs))
    different = 0
    for first in range(0, len(theirs), 1 << 16):
        numbers = np.arange(first, min(first + (1 << 16), len(theirs)))
        mine = store.rows(numbers, ("start_positions", "end_positions"))
        pair = np.stack([mine["start_positions"], mine["end_positions"]], axis=1)
        different += int((pair != theirs[first : first + len(numbers)]).any(axis=1).sum())
    return len(store), len(theirs), different


def report_lines(arguments: argparse.Namespace, runs: dict[str, Run]) -> list[str]:
    lines = [
        *heading(machine()),
        "",
        f"{arguments.examples:,} examples, windows of {arguments.length}, {arguments.overlap} shared",
        "",
    ]
    lines += ["| | seconds | of them the map alone | peak memory | milldam is |", "|---|---|---|---|---|"]
    ours = runs["milldam"]
    for name in ("milldam", "datasets"):
        if name in runs:
            one = runs[name]
            alone = one.said.get("map_seconds")
            ratio = "" if name == "milldam" else f"{(alone or one.seconds) / ours.seconds:.1f} times as fast"
            shown = "" if alone is None else f"{alone:.1f}"
            lines.append(f"| {name} | {one.seconds:.1f} | {shown} | {megabytes(one.peak_bytes)} | {ratio} |")
    scaled = SEED_MINUTES * 60 * arguments.examples / EXAMPLES
    lines += ["", f"Seed 003 states {SEED_MINUTES} minutes for {EXAMPLES:,}: {scaled / ours.seconds:.0f} times ours."]
    if "datasets" in runs:
        mine, theirs, different = differing_positions(arguments.folder)
        lines.append(f"Windows: {mine:,} and {theirs:,}; another start or end in {different:,} (see docs/qa.md).")
    if "epoch" in runs:
        said = runs["epoch"].said
        beyond = megabytes(said["beyond_imports_bytes"])
        rate = f"{said['windows']:,} windows in {said['seconds']:.1f} s, {said['windows_per_second']:,.0f} a second"
        lines.append(f"Epoch: {rate}; {beyond} beyond imports.")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--tokenizer", default=str(SHARED / "tokenizers/xlnet-base-cased"))
    parser.add_argument("--length", type=int, default=384)
    parser.add_argument("--overlap", type=int, default=128)
    parser.add_argument("--memory", default="600MB", help="milldam's budget")
    parser.add_argument(
        "--headroom", type=parse_size, default=parse_size("200MB"), help="of the hard limit, for page cache"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--milldam", default=str(Path(sys.executable).with_name("milldam")))
    parser.add_argument("--python", help="a Python with datasets and transformers; none: milldam alone")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench/qa"))
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--epoch", type=Path, help="read this store once, and say what it took")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.epoch:
        print(json.dumps(epoch(arguments.epoch)))
        return
    end_on_terminate()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    nested, flat = write_examples(arguments.examples, arguments.folder)
    tokenizer = write_tokenizer(arguments.tokenizer, arguments.folder)
    runs = {"milldam": run_milldam(arguments, nested, tokenizer)}
    if arguments.python:
        runs["datasets"] = run_datasets(arguments, flat, tokenizer)
    runs["epoch"] = run_epoch(arguments)
    print("\n".join(report_lines(arguments, runs)))
    if arguments.json:
        figures = {
            "machine": machine(),
            "examples": arguments.examples,
            **{name: asdict(one) for name, one in runs.items()},
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
