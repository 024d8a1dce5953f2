"""What is special to shards of features: token ids, positions, which windows are whose, texts.

Reads every file at most twice, in blocks: constant memory. Of the contents of a file, the first problem alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from milldam.errors import StoreError
from milldam.stores.features.format import CONTEXTS, CONTEXTS_INDEX, FIRST_WINDOW, IDS, TEXTS, TEXTS_INDEX, hash_id
from milldam.stores.features.manifest import FeatureManifest
from milldam.stores.features.reader import FeatureStore
from milldam.stores.place import Place
from milldam.stores.verify import wrong_bytes

_BLOCK = 1 << 10
"""Windows or examples at a time."""

Int64s = npt.NDArray[np.int64]


def problems(place: Place, manifest: FeatureManifest) -> Iterator[str]:
    folder = Path(place.name)
    found = [wrong_bytes(place, name, record) for name, record in dict(manifest.files()).items()]
    yield from (problem for problem in found if problem is not None)
    if any(found):
        # What does not have its bytes says nothing about its contents.
        return
    wrong: list[str] = []
    for shard in {shard.name: shard for shard in manifest.shards}.values():
        for index, file in ((FIRST_WINDOW, None), (TEXTS_INDEX, TEXTS), (CONTEXTS_INDEX, CONTEXTS)):
            end = shard.windows if file is None else shard.size(file)
            # A context may be empty; an example or the windows of one may not.
            wrong += _verify_index(folder / f"{shard.name}.{index}", end, least=0 if file == CONTEXTS else 1)
    yield from wrong
    if not wrong:
        store = FeatureStore(folder)
        yield from _verify_windows(store)
        yield from _verify_examples(store)


def _verify_index(path: Path, end: int, *, least: int) -> Iterator[str]:
    """Entries begin at 0, rise by at least so much, and end where they should."""
    last: int | None = None
    with path.open("rb") as file:
        while block := file.read(8 << 16):
            entries = np.frombuffer(block, "<i8")
            if last is None and entries[0] != 0:
                yield f"{path}: begins with {entries[0]}, not with 0"
                return
            steps = np.diff(entries, prepend=entries[0] - least if last is None else last)
            if (steps < least).any():
                yield f"{path}: its entries do not rise"
                return
            last = int(entries[-1])
    if last != end:
        yield f"{path}: ends with {last} where {end:,} is the end"


def _verify_windows(store: FeatureStore) -> Iterator[str]:
    vocab_size = store.manifest.tokenizer.get("vocab_size")
    for begin in range(0, len(store), _BLOCK):
        numbers = np.arange(begin, min(begin + _BLOCK, len(store)))
        try:
            for what, wrong in _wrong_windows(store, numbers, vocab_size):
                if wrong.any():
                    yield f"{store.path}: window {begin + int(wrong.argmax()):,}: {what}"
                    return
        except StoreError as error:
            yield str(error)
            return


def _wrong_windows(store: FeatureStore, numbers: Int64s, vocab_size: int | None) -> Iterator[tuple[str, Any]]:
    """(what, which windows) of a block."""
    rows = {name: array.astype(np.int64) for name, array in store.rows(numbers, _CHECKED).items()}
    longest = store.form.max_seq_length
    length = rows["length"]
    yield f"a length outside of 1 to {longest}", (length < 1) | (length > longest)
    begin = longest - length if store.form.pad_left else np.zeros_like(length)
    start, end, cls, answered = rows["start_positions"], rows["end_positions"], rows["cls_index"], rows["has_answer"]
    yield "cls_index is on padding", (cls < begin) | (cls >= begin + length)
    context, stop = rows["context_begin"], rows["context_begin"] + rows["context_tokens"]
    yield "its context is on padding", (context < begin) | (stop < context) | (stop > begin + length)
    yield "the answer is not in the context", (answered == 1) & ((start < context) | (end < start) | (end >= stop))
    yield "without an answer, the end is not at cls_index", (answered == 0) & (end != cls)
    yield "its example is not there", (rows["example"] < 0) | (rows["example"] >= store.examples)
    first, counts = store.windows_of(rows["example"])
    misplaced = (numbers - first != rows["segment"]) | (counts != rows["segments"])
    yield f"its example or segment is not what {FIRST_WINDOW} says", misplaced
    yield from _wrong_tokens(store, numbers, rows | {"begin": begin, "stop": stop}, vocab_size)


_CHECKED = (
    "length",
    "start_positions",
    "end_positions",
    "cls_index",
    "has_answer",
    "context_begin",
    "context_tokens",
    "segment",
    "segments",
    "example",
)


def _wrong_tokens(
    store: FeatureStore, numbers: Int64s, rows: dict[str, Int64s], vocab_size: int | None
) -> Iterator[tuple[str, Any]]:
    columns = store.rows(numbers, ("input_ids", "offsets", "attention_mask"))
    ids, offsets, padding = columns["input_ids"], columns["offsets"], columns["attention_mask"] == 0
    yield "padding that is not the pad token", (padding & (ids != store.form.pad_id)).any(axis=1)
    if vocab_size is not None:
        yield f"a token id outside the vocabulary of {vocab_size:,}", ((ids < 0) | (ids >= vocab_size)).any(axis=1)
    places = np.arange(store.form.max_seq_length)
    context = (places >= rows["context_begin"][:, None]) & (places < rows["stop"][:, None])
    wrong = np.where(context, (offsets[..., 0] < 0) | (offsets[..., 1] < offsets[..., 0]), (offsets != -1).any(axis=2))
    yield "offsets that are not those of its context", wrong.any(axis=1)


def _verify_examples(store: FeatureStore) -> Iterator[str]:
    """Every example can be read, has its chosen answer where it says, and lies in the index of ids."""
    number = 0
    for shard in store.manifest.shards:
        with (store.path / f"{shard.name}.{IDS}").open("rb") as ids:
            for _ in range(shard.examples):
                problem = _wrong_example(store, number, int.from_bytes(ids.read(8), "little"))
                if problem is not None:
                    yield problem
                    return
                number += 1


def _wrong_example(store: FeatureStore, number: int, hash: int) -> str | None:
    try:
        example = store.example(number)
    except StoreError as error:
        return str(error)
    if hash != hash_id(example["id"]):
        return f"{store.path}: example {number:,} can't be found by its id; {IDS} has another one"
    span = example["chosen_answer_char_span"]
    if span is not None and example["context"][span[0] : span[1]] != example["chosen_answer_text"]:
        return f"{store.path}: example {number:,}: its chosen answer is not at its place in the context"
    return None
