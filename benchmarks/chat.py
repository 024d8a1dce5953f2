"""Conversations to tokens with loss masks: milldam against the way TRL prepares them, on the same conversations.

In: JSON lines with `messages` (shared/data/chat/messages.jsonl), grown by variation: every copy has a word of its own
in each message, so that no cache is flattered. Out: conversations a second, peak memory of the process tree, and
whether ids and masks are equal on the conversations that both made.

TRL's way is `datasets.map` of `apply_chat_template(..., return_assistant_tokens_mask=True)` in two processes, then its
`pack_dataset` in two processes, as SFTTrainer calls them. It is given `--peer-count` conversations and compared by
rate: it is slow. Where trl is not installed (`--peer-python`: where it is), its packing is left out. milldam's time is
that of the whole command; its packing, that of opening the store and finding its rows.

    python benchmarks/chat.py messages.jsonl --tokenizer qwen2.5/ --template qwen2_5_training.jinja --count 200000
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MILLDAM = [sys.executable, "-c", "from milldam.cli import main; main()"]
PEER = """
import json, sys, time
from datasets import load_dataset
from transformers import PreTrainedTokenizerFast
data, tokenizer_json, template, out, seq_len = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_json, bos_token="<|endoftext|>", eos_token="<|im_end|>")
tokenizer.chat_template = open(template, encoding="utf-8").read()
def rows(lines):
    for line in lines["text"]:
        row = json.loads(line)
        yield tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True,
                                            return_assistant_tokens_mask=True)
def prepare(lines):
    made = list(rows(lines))
    return {name: [one[name] for one in made] for name in ("input_ids", "assistant_masks")}
lines = load_dataset("text", data_files=data, split="train")
begun = time.perf_counter()
made = lines.map(prepare, batched=True, num_proc=2, remove_columns=["text"], load_from_cache_file=False)
made.save_to_disk(out)
prepared = time.perf_counter()
try:
    from trl import pack_dataset
except ImportError:
    pack_dataset = None
loaded = time.perf_counter()
if pack_dataset is not None:
    pack_dataset(made, int(seq_len), "bfd", {"num_proc": 2, "load_from_cache_file": False})
packed = time.perf_counter() - loaded if pack_dataset is not None else None
print(json.dumps({"prepare": prepared - begun, "pack": packed}))
"""


def grow(source: Path, count: int, out: Path) -> None:
    """`count` conversations, each with words of its own."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    with out.open("w", encoding="utf-8") as file:
        for number in range(count):
            row = rows[number % len(rows)]
            messages = [_varied(message, number) for message in row["messages"]]
            file.write(json.dumps(row | {"messages": messages}, ensure_ascii=False) + "\n")


def _varied(message: dict[str, Any], number: int) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    words = content.split(" ")
    words.insert(number % len(words), f"w{number:x}")
    return message | {"content": " ".join(words)}


def run_milldam(data: Path, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    command = [*MILLDAM, "tokenize", data, "--chat", "--chat-template", options.template, "-o", out, "--tokenizer"]
    command += [options.tokenizer, "--memory", options.memory, "--workers", "2", "--json"]
    for name, value in (("bos_token", "<|endoftext|>"), ("eos_token", "<|im_end|>")):
        command += ["--chat-variable", f"{name}={value}"]
    begun = time.perf_counter()
    done = subprocess.run([str(one) for one in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return {"seconds": time.perf_counter() - begun, **json.loads(done.stdout)}


def compare(store_path: Path, peer: Path) -> str:
    """Whether ids and masks are the same, conversation by conversation, as far as the peer came."""
    import numpy as np
    from datasets import load_from_disk

    import milldam

    store, rows = milldam.open(store_path), load_from_disk(str(peer)).with_format("numpy")
    for number, row in enumerate(rows):
        mask = np.zeros(len(row["input_ids"]), np.int64)
        for begin, end in store.spans(number):
            mask[begin:end] = 1
        if not np.array_equal(store[number], row["input_ids"]) or not np.array_equal(mask, row["assistant_masks"]):
            return f"conversation {number} differs"
    return f"{len(rows):,} conversations equal"


def pack_milldam(store: Path, seq_len: int) -> float:
    """Seconds to open a store and find its rows: nothing is written."""
    import milldam

    begun = time.perf_counter()
    rows = len(milldam.open(store).packed(seq_len))
    seconds = time.perf_counter() - begun
    print(f"  {rows:,} rows of {seq_len:,} packed in {seconds:.2f} s")
    return seconds


def run_peer(data: Path, options: argparse.Namespace, out: Path) -> dict[str, float | None]:
    given = [data, options.tokenizer / "tokenizer.json", options.template, out, options.seq_len]
    done = subprocess.run([options.peer_python, "-c", PEER, *map(str, given)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    seconds: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def show_ratios(ours: dict[str, float], theirs: dict[str, float | None], options: argparse.Namespace) -> None:
    """Conversations a second against each other, with packing and without."""
    prepare, pack, count = theirs["prepare"], theirs["pack"], options.peer_count
    assert prepare is not None
    print(f"TRL's way: {count:,} in {prepare:.1f} s, {count / prepare:,.0f}/s")
    print(f"ratio {options.count / ours['prepare'] * prepare / count:.1f} without packing")
    if pack is not None:
        both = prepare + pack
        print(f"  packed in {pack:.1f} s more, {count / both:,.0f}/s")
        print(f"ratio {options.count / (ours['prepare'] + ours['pack']) * both / count:.1f} with packing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("messages", type=Path)
    add("--tokenizer", type=Path, required=True, help="a folder with tokenizer.json")
    add("--template", type=Path, required=True)
    add("--count", type=int, default=200_000)
    add("--peer-count", type=int, default=10_000, help="0: milldam alone")
    add("--peer-python", default=sys.executable, help="one that has datasets, transformers and trl")
    add("--seq-len", type=int, default=2048, help="of packed rows")
    add("--memory", default="512MB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grow(options.messages, options.count, folder / "all.jsonl")
        made = run_milldam(folder / "all.jsonl", options, folder / "store")
        rate = options.count / made["seconds"]
        print(f"milldam: {options.count:,} conversations in {made['seconds']:.1f} s, {rate:,.0f}/s")
        print(f"  peak {made['memory']['peak'] / 1e6:,.0f} MB of {options.memory}")
        ours = {"prepare": made["seconds"], "pack": pack_milldam(folder / "store", options.seq_len)}
        if options.peer_count:
            grow(options.messages, options.peer_count, folder / "some.jsonl")
            theirs = run_peer(folder / "some.jsonl", options, folder / "peer")
            show_ratios(ours, theirs, options)
            print(compare(folder / "store", folder / "peer"))


if __name__ == "__main__":
    main()
