"""What the tests of `milldam preprocess` share: corpora with duplicates, a plain reference, and what a store holds."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import tokenizers
from tests.kit.jobs import EOS_TEXT, TOKENIZER, write_lines

import milldam
from milldam.api import preprocess as run_preprocess

GIANT_CHARACTERS = 100_000
"""Longer texts are compared as text: HF tokenizers would take too long for them."""
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff]")


# ---- texts ----


def make_words(rng: random.Random, count: int) -> str:
    """Words of two to nine letters that hardly ever come together twice."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(rng.choices(letters, k=rng.randrange(2, 10))) for _ in range(count))


def fresh_texts(count: int, seed: int = 0, *, words: tuple[int, int] = (3, 40)) -> list[str]:
    """Texts of which no two are alike."""
    rng = random.Random(f"fresh {seed}")
    return [f"{seed}-{number} {make_words(rng, rng.randrange(*words))}" for number in range(count)]


def texts_with_copies(count: int, seed: int = 0, *, copies: float = 0.3) -> list[str]:
    """Some of them copies of earlier ones, a few in other white space, with control characters, or blank."""
    rng = random.Random(f"copies {seed}")
    made: list[str] = []
    for text in fresh_texts(count, seed):
        kind = rng.random()
        if kind < copies and made:
            text = rng.choice(made)
        elif kind < copies + 0.05:
            text = rng.choice(["", "  \n", "\x00\x07"])
        decorated = {0: f"  {text}\n", 1: f"\x01{text}\x7f"}.get(rng.randrange(8), text)
        made.append(decorated)
    return made


def giant_text(characters: int, seed: int = 0) -> str:
    """One line of so many characters, not all of them ASCII."""
    rng = random.Random(f"giant {seed}")
    block = f"{make_words(rng, 3000)} Größe, 日本語 "
    text = " ".join(f"{number} {block}" for number in range(characters // len(block) + 1))
    return text[:characters].strip()


# ---- files ----


def write_saved_data_set(folder: Path, shards: list[list[str]]) -> Path:
    """As HF `save_to_disk` writes it: Arrow streams, and state.json that names them in order."""
    folder.mkdir()
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, texts in zip(names, shards, strict=True):
        table = pa.table({"text": texts})
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_indices_data_files": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# ---- the reference ----


def cleaned(text: str) -> str:
    """The default cleaning, character by character."""
    return _CONTROLS.sub("", text).strip()


def kept_of(texts: Iterable[str], *, seen: Iterable[str] = (), clean: Callable[[str], str] = cleaned) -> list[str]:
    """Cleaned, blank ones and duplicates left out, in order: what a Python set gives."""
    known = set(seen)
    kept = []
    for text in map(clean, texts):
        if text and text not in known:
            known.add(text)
            kept.append(text)
    return kept


@cache
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TOKENIZER))


@cache
def ids_of(text: str) -> tuple[int, ...]:
    """The tokens of a document, EOS at its end."""
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return tuple(ids if ids[-1:] == [0] else [*ids, 0])


# ---- jobs ----


def preprocess(out: Path, datasets: Any, **settings: Any) -> milldam.Store:
    """The job in this process; a path or a list of paths and datasets."""
    return run_preprocess(config_of(out, datasets, **settings))


def config_of(out: Path, datasets: Any, **settings: Any) -> dict[str, Any]:
    own = {"tokenizer": str(TOKENIZER), "out": str(out), "workers": 1, "memory": "4GB"}
    return {"datasets": _plain(datasets), **own, **{name: _plain(value) for name, value in settings.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """JSON is YAML."""
    path.write_text(json.dumps(config))
    return path


def lines_job(folder: Path, texts: list[str], out: str = "out", **settings: Any) -> milldam.Store:
    """The job on the texts as one JSON Lines file."""
    folder.mkdir(exist_ok=True)
    path = folder / "corpus.jsonl"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    if not path.exists() or path.read_text(encoding="utf-8") != lines:
        write_lines(path, texts)
    return preprocess(folder / out, path, **settings)


# ---- what came out ----


def texts_in(store: Path | milldam.Store, split: str | None = None) -> list[str]:
    """The documents as text, without the EOS that ends each."""
    folder = store.path if isinstance(store, milldam.Store) else store
    opened = milldam.open(folder, split=split)
    decoded = tokenizer().decode_batch([document.tolist() for document in opened], skip_special_tokens=False)
    assert all(text.endswith(EOS_TEXT) for text in decoded)
    return [text.removesuffix(EOS_TEXT) for text in decoded]


def assert_holds(store: milldam.Store, texts: list[str], split: str | None = None) -> None:
    """Document by document: the texts, and for those of ordinary size the ids too."""
    assert short(texts_in(store, split)) == short(texts)
    documents = list(milldam.open(store.path, split=split)) if split in (None, *store.splits) else []
    for text, document in zip(texts, documents, strict=True):
        if len(text) < GIANT_CHARACTERS:
            assert tuple(document.tolist()) == ids_of(text)


def short(texts: list[str]) -> list[str]:
    """Giant ones by a hash, so that a difference can be shown."""
    return [text if len(text) < GIANT_CHARACTERS else f"{text[:40]} {len(text)} {hash(text)}" for text in texts]


def summary_of(out: Path) -> dict[str, Any]:
    told = json.loads((out / "run" / "summary.json").read_bytes())
    return {**told, **told["facts"]}


def drops_by_stage(out: Path) -> dict[str, dict[str, int]]:
    """Stage -> reason -> documents; the flow must add up, too."""
    flow = summary_of(out)["flow"]
    for stage, following in itertools.pairwise(flow):
        assert stage["documents_out"] == following["documents_in"], stage
    for stage in flow:
        assert stage["documents_in"] - sum(stage["dropped"].values()) == stage["documents_out"], stage
    return {stage["stage"]: stage["dropped"] for stage in flow if stage["dropped"]}
