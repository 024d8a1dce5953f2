"""Every job once, by its words on the command line: what one can, all can, and what holds for one holds for all."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.kit.chat_jobs import TEMPLATE, make_conversations, write_messages
from tests.kit.jobs import TOKENIZER, run_milldam, store_bytes, write_lines
from tests.kit.preprocess_jobs import fresh_texts, write_config
from tests.kit.qa_jobs import SIZES, write_examples
from tests.kit.token_stores import random_documents, store_of

FUNCTION = """
def count(rows):
    return {"text": rows["text"], "letters": [len(text) for text in rows["text"]]}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A job by its words on the command line, and where its result lies."""

    words: tuple[object, ...]
    stages: tuple[str, ...]
    folder: Path
    ending: str = ""
    out: tuple[object, ...] = ("--workers", 1, "-o")
    """The words in front of the place of its result."""
    index: Path | None = None
    """An index that the job adds to: each result has a copy of it, at the same place beside it."""

    def path(self, out: str) -> Path:
        if self.index is None:
            return self.folder / f"{out}{self.ending}"
        if not (self.folder / out).exists():
            shutil.copytree(self.index, self.folder / out / self.index.name)
        return self.folder / out / "store"

    def to(self, out: str) -> tuple[object, ...]:
        return (*self.words, *self.out, self.path(out))

    def cwd(self, out: str) -> Path | None:
        """Where the words are to be said; None: anywhere."""
        return None if self.index is None else self.path(out).parent

    def made(self, out: str) -> dict[str, bytes]:
        """Every file of the result, but for what tells of the run."""
        path = self.path(out)
        made = store_bytes(path) if path.is_dir() else {"": path.read_bytes()}
        if self.index is not None:
            made |= {name: data for name, data in store_bytes(path.parent).items() if name.endswith(".hashes")}
        return made

    def kept(self, out: str) -> Path:
        """Where an unfinished run keeps what is done."""
        path = self.path(out)
        beside = path.with_name(f".{path.name}.milldam-export")
        return beside if self.words[0] == "export" else path / "run"

    def traces(self, out: str) -> list[Path]:
        """Files that only a run at work may have, wherever it puts them."""
        path, kept = self.path(out), self.kept(out)
        beside = [one for one in path.parent.glob(f".{path.name}*") if one != kept]
        return [*beside, *(one for folder in (path, kept) for one in folder.rglob("*.tmp"))]

    def task(self, out: str, stage: str, *which: object) -> tuple[object, ...]:
        return ("run-units", "--stage", stage, *which, *self.to(out))


def lines(folder: Path) -> list[Path]:
    return [write_lines(folder / f"in-{k}.jsonl", fresh_texts(1200, k)) for k in range(4)]


def config_file(folder: Path, name: str, datasets: list[Path], **rules: Any) -> Path:
    common = {"tokenizer": str(TOKENIZER), "out": str(folder / "never"), "shard_size": "100KB"}
    return write_config(folder / name, {"datasets": [*map(str, datasets)]} | common | rules)


def tokenize_job(folder: Path) -> Case:
    return Case(("tokenize", *lines(folder), "--tokenizer", TOKENIZER, "--shard-size", "100KB"), ("tokenize",), folder)


def preprocess_job(folder: Path) -> Case:
    path = config_file(folder, "config.yaml", lines(folder), dedup="exact", splits={"val": 0.2})
    return Case(("preprocess", path), ("fingerprint", "group", "tokenize"), folder)


def near_job(folder: Path) -> Case:
    texts = [f"{text} {word}" for text in fresh_texts(150, 9, words=(30, 60)) for word in ("once", "twice")]
    datasets = [write_lines(folder / f"near-{k}.jsonl", texts[k::3]) for k in range(3)]
    with datasets[1].open("a") as last:
        last.write('{"title": "no text here"}\n')
    path = config_file(folder, "near.yaml", datasets, dedup={"near": {"prefer": "longest"}}, write_dropped=True)
    return Case(("preprocess", path), (), folder)


def everything_job(folder: Path) -> Case:
    """Exact, seen before, near, contaminated; too short; splits by tokens; rows; an index that grows; rejects."""
    base = fresh_texts(300, 3, words=(30, 60))
    texts = [*base, *base[:20], *(f"{text} more" for text in base[20:60]), *(f"short {k}" for k in range(9))]
    datasets = [write_lines(folder / f"all-{k}.jsonl", texts[k::3]) for k in range(3)]
    with datasets[1].open("a") as last:
        last.write('{"text": 7}\n')
    write_lines(folder / "items.jsonl", [" ".join(base[70].split()[:20])])
    old = write_lines(folder / "old.jsonl", base[80:110])
    dedup = {"index": "seen", "near": {}}
    run_milldam("preprocess", config_file(folder, "old.yaml", [old], dedup=dedup, out="old"), cwd=folder)
    rules = {
        "decontaminate": str(folder / "items.jsonl"),
        "filters": {"min_tokens": 9},
        "splits": {"val_tokens": 3000},
        "packing": {"strategy": "best_fit", "write": True},
        "seq_len": 128,
        "write_dropped": True,
    }
    path = config_file(folder, "all.yaml", datasets, dedup=dedup, out="never", **rules)
    return Case(("preprocess", path), (), folder, out=("--workers", 2, "-o"), index=folder / "seen")


def pairs_job(folder: Path) -> Case:
    """A stream of preference pairs: one unit that comes in parts, each with two sides."""
    lines = []
    for k, text in enumerate(fresh_texts(1500, 4, words=(20, 40))):
        prompt, answer = [{"role": "user", "content": f"{k}?"}], {"role": "assistant", "content": text}
        worse = {"role": "assistant", "content": text[::-1]}
        lines.append(json.dumps({"prompt": prompt, "chosen": [answer], "rejected": [worse]}) + "\n")
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), 1))
    (folder / "tags.jinja").write_text(TEMPLATE, "utf-8")
    words = ("tokenize", folder / "pairs.jsonl.gz", "--tokenizer", TOKENIZER, "--chat", "--shard-size", "100KB")
    return Case((*words, "--chat-template", folder / "tags.jinja"), ("tokenize",), folder)


def feed_job(folder: Path) -> Case:
    words = ("feed", config_file(folder, "feed.yaml", lines(folder), dedup="off"), "--seq-len", 64)
    return Case((*words, "--epochs", 1, "--seconds", 60), (), folder, out=("--store",))


def chat_job(folder: Path) -> Case:
    """Its template has no tags: every mask is proven, by whoever does the unit."""
    datasets = [write_messages(folder / f"c-{k}.jsonl", make_conversations(300, k)) for k in range(4)]
    plain = re.sub("{% (end)?generation %}", "", TEMPLATE)
    prompt = '{% if add_generation_prompt %}{{ "<assistant>\\n" }}{% endif %}'
    (folder / "plain.jinja").write_text(plain + prompt, "utf-8")
    chat = {"template": str(folder / "plain.jinja"), "dedup_on": "prompt", "group_by": "prompt"}
    path = config_file(folder, "config.yaml", datasets, dedup="exact", splits={"val": 0.2}, chat=chat)
    return Case(("preprocess", path), ("fingerprint", "group", "tokenize"), folder)


def qa_job(folder: Path) -> Case:
    """Each file is a unit: what is small shares one, so they have room at the end."""
    examples = [write_examples(folder / f"q-{k}.jsonl", 40, seed=k) for k in range(4)]
    for path in examples:
        path.write_bytes(path.read_bytes() + b"\n" * 300_000)
    return Case(("qa", *examples, "--tokenizer", TOKENIZER, *SIZES), ("window",), folder)


def map_job(folder: Path) -> Case:
    (folder / "letters.py").write_text(FUNCTION)
    words = ("map", f"{folder / 'letters.py'}:count", *lines(folder), "--shard-size", "120KB")
    return Case(words, ("map",), folder)


def import_job(folder: Path) -> Case:
    for k in range(4):
        np.save(folder / f"tokens-{k}.npy", np.arange(k, 5000 + k, dtype=np.uint16))
    return Case(("import", *sorted(folder.glob("tokens-*.npy"))), ("scan", "import"), folder)


def export_job(folder: Path, to: str, *options: object) -> Case:
    store_of(folder / "store", {"train": random_documents([50] * 4000)})
    return Case(("export", folder / "store", "--to", to, *options), ("export",), folder, ".npy" if to == "npy" else "")


JOBS: dict[str, Callable[[Path], Case]] = {
    "preprocess": preprocess_job,
    "qa": qa_job,
    "map": map_job,
    "export of a folder": lambda folder: export_job(folder, "parquet", "--shard-size", "100KB"),
    "tokenize": tokenize_job,
    "chat": chat_job,
    "import": import_job,
    "export of a file": lambda folder: export_job(folder, "npy"),
}
OTHERS: dict[str, Callable[[Path], Case]] = {
    "near": near_job,
    "everything": everything_job,
    "pairs": pairs_job,
    "feed": feed_job,
}
"""Jobs that array tasks do not do, or whose stages are many."""
ALL_JOBS = JOBS | OTHERS
