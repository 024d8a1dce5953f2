"""What `qa.py` measures milldam against, in a process of its own: HF datasets with the usual recipe.

In: a .jsonl of examples (id, title, context, question, answers), a folder with a tokenizer, an empty folder. Out: in
that folder `result` (what training would read) and `positions.npy` (start and end of each window); on stdout one JSON
line with the windows, the seconds of the map alone, and the versions.

The recipe: `datasets.map`, batched, in processes; the fast tokenizer called with question and context, truncation of
the context alone, overlap, padding to the full length, offsets; then for each window its example's first answer is
looked for, token by token from both ends of the context. Batches of 1000, the default.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

COLUMNS = ("input_ids", "token_type_ids", "attention_mask", "start_positions", "end_positions")


def windows_of(batch: dict[str, list[Any]], *, tokenizer: Any, length: int, overlap: int) -> dict[str, Any]:
    """The windows of a batch of examples, as the recipe makes them."""
    right = tokenizer.padding_side == "right"
    questions = [question.lstrip() for question in batch["question"]]
    made = tokenizer(
        questions if right else batch["context"],
        batch["context"] if right else questions,
        truncation="only_second" if right else "only_first",
        max_length=length,
        stride=overlap,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding="max_length",
    )
    examples, offsets = made.pop("overflow_to_sample_mapping"), made.pop("offset_mapping")
    starts, ends = [], []
    for window, places in enumerate(offsets):
        cls = made["input_ids"][window].index(tokenizer.cls_token_id)
        of = made.sequence_ids(window)
        start, end = span(places, of, 1 if right else 0, batch["answers"][examples[window]]) or (cls, cls)
        starts.append(start)
        ends.append(end)
    return {**made, "start_positions": starts, "end_positions": ends}


def span(
    places: list[tuple[int, int]], of: list[int | None], context: int, answers: dict[str, list[Any]]
) -> tuple[int, int] | None:
    """Where a window has the first answer; None: nowhere, or not all of it."""
    if not answers["answer_start"]:
        return None
    begin = answers["answer_start"][0]
    stop = begin + len(answers["text"][0])
    first = 0
    while of[first] != context:
        first += 1
    last = len(of) - 1
    while of[last] != context:
        last -= 1
    if places[first][0] > begin or places[last][1] < stop:
        return None
    while first < len(places) and places[first][0] <= begin:
        first += 1
    while places[last][1] >= stop:
        last -= 1
    return first - 1, last + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("examples", "tokenizer", "folder"):
        parser.add_argument(name, type=Path)
    for name, value in {"workers": 2, "length": 384, "overlap": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()

    import numpy as np
    from datasets import load_dataset
    from transformers import PreTrainedTokenizerFast

    facts = json.loads((arguments.tokenizer / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(arguments.tokenizer / "tokenizer.json"), **facts)
    if facts["padding_side"] == "left":
        tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    data = load_dataset(
        "json", data_files=str(arguments.examples), split="train", cache_dir=str(arguments.folder / "cache")
    )
    work = partial(windows_of, tokenizer=tokenizer, length=arguments.length, overlap=arguments.overlap)
    started = time.perf_counter()
    made = data.map(work, batched=True, num_proc=arguments.workers, remove_columns=data.column_names)
    seconds = time.perf_counter() - started
    made.save_to_disk(str(arguments.folder / "result"))
    saved = time.perf_counter() - started
    positions = made.with_format("numpy")
    pair = [np.asarray(positions[name][:]) for name in ("start_positions", "end_positions")]
    np.save(arguments.folder / "positions.npy", np.stack(pair, axis=1))
    versions = {name: metadata.version(name) for name in ("datasets", "transformers", "tokenizers")}
    figures = {"windows": len(made), "map_seconds": seconds, "map_and_save_seconds": saved}
    print(json.dumps({**figures, "versions": versions}))


if __name__ == "__main__":
    main()
