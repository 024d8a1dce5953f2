"""Damaged files of every kind, by every way of reading them: a right result, or an error that names the file."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.damage import damaged, other_value
from tests.kit.jobs import TOKENIZER, invoke, write_lines
from tests.kit.qa_jobs import small_store

import milldam
from milldam.errors import MilldamError
from milldam.packing.rows import read_boundaries

Use = Callable[[Path], Any]
CASES, SLOW_CASES = 150, 1000


@pytest.fixture(scope="module")
def stores() -> Iterator[Path]:
    """One of each kind that `milldam.open` opens, small and whole."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # many small files are synced
    with tempfile.TemporaryDirectory(dir=memory) as name:
        folder = Path(name)
        texts = [f"document {n} " + "word " * n for n in range(40)]
        lines = write_lines(folder / "in.jsonl", texts)
        rules: dict[str, Any] = {"workers": 1, "memory": "1GB"}
        config = {"datasets": str(lines), "tokenizer": str(TOKENIZER), "out": str(folder / "tokens")}
        config |= {"splits": {"val": 0.3}, "seq_len": 16, "packing": {"write": True}}
        milldam.preprocess(config | rules)
        milldam.tokenize(lines, folder / "plain", tokenizer=TOKENIZER, **rules)
        milldam.map(
            lines, lambda rows: {"length": [len(t) for t in rows["text"]]}, folder / "table", shard_size="2KB", **rules
        )
        small_store(folder / "features")
        npy = ("-o", folder / "t.npy", "--format", "npy", "--tokenizer", TOKENIZER)
        assert invoke("tokenize", lines, *npy).exit_code == 0
        milldam.export(folder / "plain", "megatron", folder / "pair")
        yield folder


def read_tokens(path: Path) -> None:
    store = milldam.open(path)
    for document in store:
        np.asarray(document).sum()
    [len(one) for one in store.document_lengths()]
    store.decode(store[0][:5])
    repr(store)


def train_on(path: Path) -> None:
    data = milldam.open(path)
    if getattr(data, "splits", ()) and len(data.splits) > 1:
        data = data.split("train")
    for samples in (data.windows(8), data.streams(2, 8)):
        for _ in samples.batches(4) if hasattr(samples, "order") else samples:
            pass
    if hasattr(data, "__len__"):
        for strategy in ("wrapped", "best_fit"):
            for _ in data.packed(8, strategy=strategy).batches(4):
                pass


def read_rows(path: Path) -> None:
    store = milldam.open(path / "packed")
    read_boundaries(store, 0, 2)
    for row in store:
        row.sum()


def read_table(path: Path) -> None:
    table = milldam.open(path)
    repr(table), table[0], table[1:5], list(table), list(table.batches(7, format="numpy"))
    table.to_arrow(), table.to_hf()


def read_features(path: Path) -> None:
    store = milldam.qa.FeatureStore(path)
    repr(store), list(store)
    for number in range(store.examples):
        store.windows_of([number]), store.example(number)
    store.memory_positions(np.arange(len(store)))


def command(*arguments: str) -> Use:
    def use(path: Path) -> None:
        out = path.parent / "exported"
        done = invoke(*(one.format(path, out=out) for one in arguments))
        for made in path.parent.glob("*exported*"):
            shutil.rmtree(made) if made.is_dir() else made.unlink()
        if done.exit_code not in (0, 1):
            raise SaidError(done.output, done.exit_code)
        if done.exit_code == 1 and arguments[0] != "verify":
            raise AssertionError(done.output)
        assert "bug in milldam" not in done.output

    return use


class SaidError(MilldamError):
    def __init__(self, output: str, code: int) -> None:
        super().__init__(output)
        self.exit_code = code


LOOK = (command("stats", "{0}"), command("verify", "{0}"))
EXPORTS = {"npy": "{out}.npy", "megatron": "{out}", "hf": "{out}"}
FEED_OPTIONS = ("feed", "{0}", "--seq-len", "8", "--batch-size", "4", "--seconds", "0.01")
FEED, FEED_VAL = command(*FEED_OPTIONS), command(*FEED_OPTIONS, "--split", "val")
KINDS: dict[str, tuple[str, tuple[Use, ...]]] = {
    # kind: (pattern of the files that are damaged, uses)
    "tokens": (
        "tokens/*",
        (
            read_tokens, train_on, *LOOK, FEED_VAL, command("inspect", "{0}"), command("status", "{0}"),
            *(command("export", "{0}", "--to", to, "-o", out, "--split", "val") for to, out in EXPORTS.items()),
            command("report", "{0}"), lambda path: milldam.export(path, "parquet", path.parent / "exported.parquet"),
        ),
    ),
    "rows": ("tokens/packed/*", (read_rows, lambda path: read_tokens(path / "packed"))),
    "table": ("table/*", (read_table, *LOOK, command("status", "{0}"))),
    "features/store": ("features/store/*", (read_features, *LOOK)),
    "t.npy": ("t.npy*", (train_on, LOOK[0], FEED)),
    "pair": ("pair.*", (train_on, LOOK[0], lambda path: [len(one) for one in milldam.open(path)], FEED)),
}  # fmt: skip


def damage_and_use(stores: Path, kind: str, cases: int, seed: int) -> list[str]:
    """What went wrong: other errors than ours, or ours that do not say where."""
    pattern, uses = KINDS[kind]
    files = sorted(path for path in stores.glob(pattern) if path.is_file() and path.name != "rejects.jsonl")
    assert files
    where = stores / ("tokens" if kind == "rows" else kind)
    for use in uses:
        use(where)  # all is well, as long as nothing is damaged
    rng, found = random.Random(seed), []
    for case in range(cases):
        path = files[case % len(files)]
        before = path.read_bytes()
        after = damaged(path, rng)
        path.write_bytes(after)
        for number, use in enumerate(uses):
            if number and cases < 200 and (case + number) % 3:
                continue  # a sample, while the quick tests run
            try:
                use(where)
            except MilldamError as error:
                if error.exit_code not in (2, 3) or str(stores) not in str(error):
                    found.append(f"{kind} {path.name} case {case} use {number}: {error.exit_code} {error}")
            except Exception:
                found.append(f"{kind} {path.name} case {case} use {number}: {traceback.format_exc()[-700:]}")
        path.write_bytes(before)
        shutil.rmtree(stores / "tokens" / "rows", ignore_errors=True)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_stores_give_a_right_result_or_an_error_that_says_where(stores: Path, kind: str) -> None:
    """Cut, flipped, zeroed, longer, empty, other types, nested, not UTF-8: never an error of Python, never a crash."""
    assert damage_and_use(stores, kind, CASES // len(KINDS), seed=1) == []


# ---- states of loaders ----


def loaders(stores: Path) -> dict[str, Any]:
    """A loader of every kind that has a state."""
    tokens, plain = milldam.open(stores / "tokens", split="train"), milldam.open(stores / "plain")
    mixed = milldam.mix({tokens: 0.7, plain: 0.3}).windows(8)
    inner = milldam.mix({mixed: 0.5, plain.windows(8): 0.5})
    found = {"windows": tokens.windows(8).batches(4), "packed": plain.packed(8, strategy="best_fit").batches(3)}
    found |= {"mixture": mixed.batches(4, epochs=2), "mixture of mixtures": inner.batches(4)}
    return found | {"streams": plain.streams(2, 8).batches()}


def damage_states(stores: Path, cases: int, seed: int) -> list[str]:
    rng, found = random.Random(seed), []
    for name, loader in loaders(stores).items():
        taken = [next(loader), next(loader)]
        assert taken
        state = json.loads(json.dumps(loader.state_dict()))
        for case in range(cases):
            changed = other_value(state, rng)
            try:
                loader.load_state_dict(changed)
                next(iter(loader), None)
            except MilldamError as error:
                if error.exit_code not in (2, 3) or "state" not in str(error).lower():
                    found.append(f"{name} case {case}: {error}")
            except Exception:
                found.append(f"{name} case {case}: {changed}: {traceback.format_exc()[-700:]}")
        loader.load_state_dict(state)
        next(loader)
    return found


def test_damaged_states_are_refused(stores: Path) -> None:
    """A field of another type, out of range, or gone: what is wrong is named, and the loader is as it was."""
    assert damage_states(stores, 60, seed=3) == []
