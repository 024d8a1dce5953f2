"""The loaders that `feeding.py` measures, each run in a process of its own: text in, (x, y) batches of 1,024 out.

In: a contender's name, a JSON-lines file (for nanochat the same as Parquet), a tokenizer folder. Out: a JSON line with
`tokens` (of x), `seconds` (from the first line of work to the last batch, imports not counted), `first_batch`,
`batches`, and `cpu`, the CPU seconds of all its processes. All use GPT-2's tokenizer and batches of 16.
`--tokens`: stop after so many.

- milldam: `milldam.open(text, tokenizer=..., store=...)` on a store that is not begun; two workers.
- tokenize: `milldam tokenize` of the same text, which delivers no batch: what there is to reach.
- titan: torchtitan's text dataset and data loader, from the JSON lines by HF datasets, its own HuggingFaceTokenizer.
- datasets: HF datasets streaming, tokenized in `map`, packed end to end, in a torch DataLoader with two workers.
- nanochat: its loader from Parquet, with tiktoken on two threads (`--nanochat` names a checkout).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

BATCH_SIZE, SEQ_LEN = 16, 1024


@dataclass(frozen=True, slots=True)
class Task:
    text: Path
    tokenizer: Path
    work: Path
    """A folder that may be filled; another one for every run."""
    nanochat: Path | None


def milldam_batches(task: Task) -> Iterator[Any]:
    import milldam

    with milldam.open(task.text, tokenizer=task.tokenizer, store=task.work / "s.milldam", workers=2) as feed:
        for x, _ in feed.windows(SEQ_LEN).batches(BATCH_SIZE, seed=1):
            yield x


def tokenized(task: Task) -> Iterator[Any]:
    """One batch that is all of it."""
    import milldam

    yield milldam.tokenize(task.text, task.work / "t.milldam", tokenizer=task.tokenizer, workers=2)


def titan_batches(task: Task) -> Iterator[Any]:
    from functools import partial

    from datasets import load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets import text_datasets as titan

    load = partial(load_dataset, "json", data_files=str(task.text), split="train", streaming=True)
    titan.DATASETS["ours"] = DatasetConfig(
        path=str(task.text), loader=lambda path: load(), sample_processor=lambda sample: sample["text"]
    )
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(task.tokenizer))
    data = titan.HuggingFaceTextDataset("ours", None, tokenizer, seq_len=SEQ_LEN, infinite=False)
    from torchtitan.components.dataloader import ParallelAwareDataloader

    loader = ParallelAwareDataloader(data, dp_rank=0, dp_world_size=1, batch_size=BATCH_SIZE)
    for inputs, _ in loader:
        yield inputs["input"]


def datasets_batches(task: Task) -> Iterator[Any]:
    import torch
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(task.tokenizer / "tokenizer.json"))
    end: Any = tokenizer.token_to_id("<|endoftext|>")

    def cut(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        flat = list(itertools.chain.from_iterable([*one.ids, end] for one in tokenizer.encode_batch(rows["text"])))
        # What fills no row of 1,025 is left out, as HF's examples do it.
        return {"ids": [flat[at : at + SEQ_LEN + 1] for at in range(0, len(flat) - SEQ_LEN, SEQ_LEN)]}

    lines = load_dataset("json", data_files=str(task.text), split="train", streaming=True)
    shuffled = lines.shuffle(seed=1, buffer_size=1000)
    rows = shuffled.map(cut, batched=True, batch_size=1000, remove_columns=list(next(iter(lines))))
    rows = rows.with_format("torch")
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=BATCH_SIZE, num_workers=2)
    for batch in loader:
        yield batch["ids"][:, :-1]


def nanochat_batches(task: Task) -> Iterator[Any]:
    assert task.nanochat is not None
    sys.path.insert(0, str(task.nanochat))
    import pyarrow as pa
    import pyarrow.parquet as pq
    from nanochat import dataloader

    # As nanochat's data has it: row groups of 1,024 documents; its last file is for validation.
    paths = [task.text.with_suffix(f".{number}.parquet") for number in range(2)]
    for path in paths:
        if not path.exists():
            texts = [json.loads(line)["text"] for line in task.text.open("rb")]
            pq.write_table(pa.table({"text": texts}), path, row_group_size=1024)
    dataloader.list_parquet_files = lambda **_: [str(path) for path in paths]
    make = dataloader.tokenizing_distributed_data_loader_with_state_bos_bestfit
    for x, _, state in make(_Tiktoken(task.tokenizer), BATCH_SIZE, SEQ_LEN, "train", tokenizer_threads=2, device="cpu"):
        if state["epoch"] > 1:
            return
        yield x


class _Tiktoken:
    """GPT-2's tokens by tiktoken, as nanochat's own tokenizer calls it."""

    def __init__(self, folder: Path) -> None:
        import tiktoken

        vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(rest)}
        pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
        ranks = {
            bytes(byte_of[letter] for letter in token): rank
            for token, rank in vocabulary.items()
            if token != "<|endoftext|>"
        }
        self._encoding = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def get_bos_token_id(self) -> int:
        return 50_256

    def encode(self, texts: list[str], prepend: int, num_threads: int) -> list[list[int]]:
        encoded = self._encoding.encode_ordinary_batch(texts, num_threads=num_threads)
        return [[prepend, *ids] for ids in encoded]


IMPORTS = {
    "milldam": ["milldam.feeding.growing", "milldam.loader.batches"],
    "tokenize": ["milldam.pipeline.starting"],
    "titan": ["datasets", "torchtitan.hf_datasets.text_datasets", "torchtitan.components.dataloader"],
    "datasets": ["datasets", "tokenizers", "torch.utils.data"],
    "nanochat": ["pyarrow.parquet", "tiktoken", "torch"],
}
CONTENDERS: dict[str, Callable[[Task], Iterator[Any]]] = {
    "milldam": milldam_batches,
    "tokenize": tokenized,
    "titan": titan_batches,
    "datasets": datasets_batches,
    "nanochat": nanochat_batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--nanochat", type=Path)
    parser.add_argument("--tokens", type=int, default=1 << 62)
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    task = Task(arguments.text, arguments.tokenizer, arguments.work, arguments.nanochat)
    for module in IMPORTS[arguments.contender]:
        import_module(module)
    batches, tokens, first, began = 0, 0, 0.0, time.perf_counter()
    cpu = sum(os.times()[:4])
    running = CONTENDERS[arguments.contender](task)
    for x in running:
        first = first or time.perf_counter() - began
        batches += 1
        tokens += x.tokens if arguments.contender == "tokenize" else x.size if hasattr(x, "strides") else x.numel()
        if tokens >= arguments.tokens:
            break
    seconds = time.perf_counter() - began
    # Ends workers, so that their CPU time counts.
    running.close()  # type: ignore[attr-defined]
    del running
    used = sum(os.times()[:4]) - cpu
    shutil.rmtree(arguments.work, ignore_errors=True)
    print(json.dumps({"tokens": tokens, "seconds": seconds, "first_batch": first, "batches": batches, "cpu": used}))


if __name__ == "__main__":
    main()
