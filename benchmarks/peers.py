"""The peers that `tokenizing.py` measures milldam against, each run in a process of its own.

In: a peer's name, a corpus, a tokenizer.json. Out: one JSON line with `seconds` (what the peer's
own work took, its imports not counted), `text_bytes` (UTF-8 of the texts alone), `documents` and
`tokens`. A fresh process each time, so that no cache is warm and no memory is left from before.

- gigatoken: the encoder alone, from memory. Texts are read in chunks of 64 MB, untimed; only its
  `encode_batch`, with its default parallelism, is on the clock. Nothing is written.
- datasets: what many people do. load_dataset, map in processes, save_to_disk, all on the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

CHUNK_BYTES = 64 * 10**6


@dataclass(slots=True)
class Figures:
    """What one run of a peer took and made."""

    seconds: float = 0.0
    text_bytes: int = 0
    documents: int = 0
    tokens: int = 0


def read_texts(corpus: Path) -> Iterator[str]:
    """The documents: a line's `text` of a .jsonl file, else what stands between blank lines."""
    if corpus.suffix == ".jsonl":
        with corpus.open(encoding="utf-8", newline="\n") as file:
            yield from (json.loads(line)["text"] for line in file if line.strip())
    else:
        yield from _between_blank_lines(corpus)


def _between_blank_lines(corpus: Path) -> Iterator[str]:
    lines: list[str] = []
    with corpus.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            if line != "\n":
                lines.append(line)
            elif lines:
                yield "".join(lines).removesuffix("\n")
                lines = []
    if lines:
        yield "".join(lines).removesuffix("\n")


def chunks(texts: Iterator[str], figures: Figures) -> Iterator[list[str]]:
    """Lists of about 64 MB of text, counted on the way."""
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(text)
        text_bytes = len(text.encode())
        figures.documents += 1
        figures.text_bytes += text_bytes
        size += text_bytes
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def run_gigatoken(corpus: Path, tokenizer_path: Path) -> Figures:
    import gigatoken

    tokenizer = gigatoken.Tokenizer(str(tokenizer_path))
    # The first call imports awkward and starts the threads: not the encoder's rate.
    tokenizer.encode_batch(["warm"])
    figures = Figures()
    for chunk in chunks(read_texts(corpus), figures):
        started = time.perf_counter()
        encoded = tokenizer.encode_batch(chunk)
        figures.seconds += time.perf_counter() - started
        figures.tokens += len(encoded.layout.content)
    return figures


def run_datasets(corpus: Path, tokenizer_path: Path, workers: int, folder: Path) -> Figures:
    # The processes fill the cores; threads in each of them would only be in the way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [row.ids for row in tokenizer.encode_batch_fast(batch["text"])]}

    started = time.perf_counter()
    texts = load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder / "cache"))
    tokens = texts.map(tokenize, batched=True, num_proc=workers, remove_columns=texts.column_names)
    tokens.save_to_disk(str(folder / "tokens"))
    figures = Figures(seconds=time.perf_counter() - started, documents=len(tokens))
    figures.tokens = sum(len(row) for row in tokens.with_format("arrow")["input_ids"])
    figures.text_bytes = sum(len(text.encode()) for text in read_texts(corpus))
    return figures


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=("gigatoken", "datasets"))
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--workers", type=int, default=2, help="processes of datasets' map (2)")
    parser.add_argument("--folder", type=Path, help="an empty one, for what datasets writes")
    arguments = parser.parse_args()
    if arguments.peer == "datasets" and arguments.folder is None:
        parser.error("datasets writes its cache and its result: give it a --folder")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if arguments.peer == "gigatoken":
        figures = run_gigatoken(arguments.corpus, arguments.tokenizer)
    else:
        figures = run_datasets(arguments.corpus, arguments.tokenizer, arguments.workers, arguments.folder)
    print(json.dumps(asdict(figures)))


if __name__ == "__main__":
    main()
