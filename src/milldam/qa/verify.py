"""What is special to windows of question answering when a table is verified: ids, positions, which windows are whose.

Reads every window once, in blocks: constant memory. Of all windows and of all examples, the first problem alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from milldam.errors import StoreError
from milldam.loader.permutation import Int64s
from milldam.qa.store import NUMBERS, FeatureStore
from milldam.stores.place import Folder

_BLOCK = 1 << 10
"""Windows at a time."""


def problems(place: Folder) -> Iterator[str]:
    try:
        store = FeatureStore(place)
        for begin in range(0, len(store), _BLOCK):
            numbers = np.arange(begin, min(begin + _BLOCK, len(store)))
            for what, wrong in _wrong_windows(store, numbers):
                if wrong.any():
                    yield f"{store.path}: window {begin + int(wrong.argmax()):,}: {what}"
                    return
        for number in range(store.examples):
            example = store.example(number)
            span = example["chosen_answer_char_span"]
            if span is not None and example["context"][span[0] : span[1]] != example["chosen_answer_text"]:
                yield f"{store.path}: example {number:,}: its chosen answer is not at its place in the context"
                return
    except StoreError as error:
        yield str(error)


def _wrong_windows(store: FeatureStore, numbers: Int64s) -> Iterator[tuple[str, Any]]:
    """(what, which windows) of a block."""
    columns = store.rows(numbers, (*NUMBERS, "input_ids", "offsets"))
    rows = {name: columns[name].astype(np.int64) for name in NUMBERS}
    longest, length = store.form.max_seq_length, rows["length"]
    yield f"a length outside of 1 to {longest}", (length < 1) | (length > longest)
    begin = longest - length if store.form.pad_left else np.zeros_like(length)
    start, end, cls = rows["start_positions"], rows["end_positions"], rows["cls_index"]
    yield "cls_index is on padding", (cls < begin) | (cls >= begin + length)
    first, stop = rows["context_begin"], rows["context_begin"] + rows["context_tokens"]
    yield "its context is on padding", (first < begin) | (stop < first) | (stop > begin + length)
    yield "the answer is not in the context", (start != cls) & ((start < first) | (end < start) | (end >= stop))
    yield "without an answer, the end is not at cls_index", (start == cls) & (end != cls)
    yield "its example is not there", (rows["example"] < 0) | (rows["example"] >= store.examples)
    windows, counts = store.windows_of(rows["example"])
    misplaced = (numbers - windows != rows["segment"]) | (counts != rows["segments"])
    yield "its example or segment is not that of its row", misplaced
    ids, offsets, places = columns["input_ids"], columns["offsets"], np.arange(longest)
    padding = store.form.attention_mask(length) == 0
    yield "padding that is not the pad token", (padding & (ids != store.form.pad_id)).any(axis=1)
    vocab_size = (store.manifest.tokenizer or {}).get("vocab_size", np.iinfo(np.int32).max)
    yield f"a token id outside the vocabulary of {vocab_size:,}", ((ids < 0) | (ids >= vocab_size)).any(axis=1)
    inside = (places >= first[:, None]) & (places < stop[:, None])
    wrong = np.where(inside, (offsets[..., 0] < 0) | (offsets[..., 1] < offsets[..., 0]), (offsets != -1).any(axis=2))
    yield "offsets that are not those of its context", wrong.any(axis=1)
