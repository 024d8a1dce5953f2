"""The peers that `preprocessing.py` measures milldam against, each run in a process of its own.

In: a peer's name, a folder of .jsonl files, a tokenizer.json and an empty folder. Out: in that folder `result` (what
training would read) and beside it whatever the peer leaves behind; on stdout one JSON line with the documents it kept,
their tokens, the rows it wrote, and its version. The job of both: strip, drop short texts, drop exact duplicates,
encode, an end token after each document, rows of 2048 tokens, save.

- datasets: load_dataset, map and filter in processes, a set of hashes in one (it can't be shared), rows cut from
  batches of documents, save_to_disk. Batched everywhere, tokens as uint16, rows by Arrow without Python lists. The
  tail of a batch that fills no row is lost, as in the usual recipe.
- datatrove: its three stages of exact dedup (signatures, finding, filtering), then DocumentTokenizer, two tasks. Its
  result is a stream of tokens that its loader cuts into rows when it reads: nothing more is written.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

MIN_CHARACTERS = 100
ROW_TOKENS = 2048
END_TOKEN = "<|endoftext|>"
PARTS = "part-*.jsonl"
"""The corpus's files in its folder."""

DATATROVE_BATCH = 1000
"""Documents encoded together, in its favour: it holds all their encodings at once, and its default is 10,000."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a peer is given."""

    corpus: Path
    tokenizer: Path
    folder: Path
    workers: int

    @property
    def result(self) -> Path:
        """Where what training would read goes."""
        return self.folder / "result"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a peer made of it."""

    documents: int
    tokens: int
    rows: int
    version: str


# ---- HF datasets ----


def run_datasets(job: Job) -> Outcome:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HOME"] = str(job.folder / "home")
    import pyarrow.compute as pc
    from datasets import Features, Sequence, Value, load_dataset

    files = [str(path) for path in sorted(job.corpus.glob(PARTS))]
    texts = load_dataset("json", data_files=files, split="train", cache_dir=str(job.folder / "cache"))
    texts = texts.map(stripped, batched=True, num_proc=job.workers)
    texts = texts.filter(long_enough, batched=True, num_proc=job.workers)
    seen: set[bytes] = set()
    texts = texts.filter(partial(first_seen, seen), batched=True)
    features = Features({"input_ids": Sequence(Value("uint16"))})
    tokens = texts.map(
        encoder_of(job.tokenizer), batched=True, num_proc=job.workers, remove_columns=["text"], features=features
    )
    rows = tokens.with_format("arrow").map(cut_rows, batched=True, num_proc=job.workers, features=features)
    rows.with_format(None).save_to_disk(str(job.result))
    count = pc.sum(pc.list_value_length(tokens.data.column("input_ids"))).as_py()
    return Outcome(len(tokens), count, len(rows), metadata.version("datasets"))


def stripped(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"text": [text.strip() for text in batch["text"]]}


def long_enough(batch: dict[str, list[str]]) -> list[bool]:
    return [len(text) >= MIN_CHARACTERS for text in batch["text"]]


def first_seen(seen: set[bytes], batch: dict[str, list[str]]) -> list[bool]:
    import xxhash

    new = []
    for text in batch["text"]:
        digest = xxhash.xxh3_128_digest(text.encode())
        new.append(digest not in seen)
        seen.add(digest)
    return new


def encoder_of(tokenizer_path: Path) -> Callable[[dict[str, list[str]]], dict[str, list[Any]]]:
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    end = tokenizer.token_to_id(END_TOKEN)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = tokenizer.encode_batch_fast(batch["text"])
        return {"input_ids": [np.array([*row.ids, end], np.uint16) for row in encoded]}

    return encode


def cut_rows(batch: Any) -> Any:
    """The documents of an Arrow table end to end, in rows; the tail is left out."""
    import numpy as np
    import pyarrow as pa

    tokens = batch["input_ids"].combine_chunks().flatten()
    count = len(tokens) // ROW_TOKENS
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * ROW_TOKENS)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens[: count * ROW_TOKENS])})


# ---- datatrove ----


def run_datatrove(job: Job) -> Outcome:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        ExactDedupFilter,
        ExactDedupSignature,
        ExactFindDedups,
    )
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    signatures, duplicates = str(job.folder / "signatures"), str(job.folder / "duplicates")
    rules = ExactDedupConfig(content_getter=text_of)
    # The first and the last stage must see the same documents in the same order.
    read = [JsonlReader(str(job.corpus), glob_pattern=PARTS), cleaned]
    encode = DocumentTokenizer(
        str(job.result),
        str(job.tokenizer),
        eos_token=END_TOKEN,
        batch_size=DATATROVE_BATCH,
        shuffle_documents=False,
    )
    stages = {
        "sign": [*read, ExactDedupSignature(signatures, rules, finder_workers=job.workers)],
        "find": [ExactFindDedups(signatures, duplicates, rules)],
        "encode": [*read, ExactDedupFilter(duplicates, rules), encode],
    }
    for name, stage in stages.items():
        logs = str(job.folder / "logs" / name)
        LocalPipelineExecutor(stage, tasks=job.workers, workers=job.workers, logging_dir=logs).run()
    return outcome_of_datatrove(job.result)


def text_of(document: Any) -> bytes:
    # As bytes: xxhash 4, which datatrove hashes with, takes no str.
    text: str = document.text
    return text.encode()


def cleaned(documents: Iterator[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
    """A step of datatrove's: strips, and drops what is short."""
    for document in documents:
        document.text = document.text.strip()
        if len(document.text) >= MIN_CHARACTERS:
            yield document


def outcome_of_datatrove(result: Path) -> Outcome:
    """Counted from its files: 2 bytes a token, 8 bytes a document in the index."""
    streams = [path.stat().st_size // 2 for path in result.glob("*.ds")]
    documents = sum(path.stat().st_size // 8 for path in result.glob("*.ds.index"))
    rows = sum(tokens // ROW_TOKENS for tokens in streams)
    return Outcome(documents, sum(streams), rows, metadata.version("datatrove"))


PEERS: dict[str, Callable[[Job], Outcome]] = {"datasets": run_datasets, "datatrove": run_datatrove}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("corpus", type=Path, help=f"a folder of {PARTS}")
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("folder", type=Path, help="an empty one")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    given = parser.parse_args()
    # The processes fill the cores; threads in each of them would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    outcome = PEERS[given.peer](Job(given.corpus, given.tokenizer, given.folder, given.workers))
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
