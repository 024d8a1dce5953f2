"""The peers that `cores.py` measures milldam against, each run in a process of its own.

In: a peer's name, a JSON-lines corpus, a tokenizer.json, and when the process was started. Out: one JSON line: `wall`
and `cpu` seconds from the start of the process to the end of the peer's work, `work_wall` without imports, `peak` of
anonymous and shared memory (sampled every 20 ms), `documents`, `tokens`, and the `hash` of the tokens as bytes, an end
token after each document. Hashing is off the clock. The environment's RAYON_NUM_THREADS sets the threads.

- encode_files: gigatoken reads the file and encodes it; all tokens are in memory then, and nothing is written.
- preprocess_data_fast: what Megatron-LM's tools/preprocess_data_fast.py does, in its two steps: gigatoken's
  `encode_files`, then `IndexedDatasetBuilder.add_documents` and `finalize` of a checkout. Of Megatron-LM only what the
  builder needs is imported: the script itself loads all of it first, which takes seconds and is not counted here.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

SAMPLE_SECONDS = 0.02
HASHED_BYTES = 64 << 20
PACKAGES = ("megatron", "megatron.core", "megatron.core.datasets")


class Peak:
    """The most anonymous and shared memory that this process has held."""

    def __init__(self) -> None:
        self.bytes = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.sample()
            time.sleep(SAMPLE_SECONDS)

    def sample(self) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
        self.bytes = max(self.bytes, found)


class Clock:
    """Wall and CPU seconds since the process was started, and since its imports were done."""

    def __init__(self, started: float) -> None:
        self._started, self._begun = started, 0.0
        self.peak = Peak()

    def begin(self) -> None:
        self._begun = time.monotonic()

    def figures(self) -> dict[str, Any]:
        now, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        self.peak.sample()
        seconds = {"wall": now - self._started, "work_wall": now - self._begun, "cpu": used.ru_utime + used.ru_stime}
        return {**seconds, "peak": self.peak.bytes}


def encode(corpus: Path, tokenizer: Path, clock: Clock) -> Any:
    """An awkward array of ids a document."""
    import awkward  # noqa: F401 - gigatoken imports it with its first result: an import, not work
    import gigatoken

    clock.begin()
    encoder = gigatoken.Tokenizer(str(tokenizer))
    return encoder.encode_files(gigatoken.JsonlFileSource([str(corpus)], field="text"), parallel=True)


def run_encode_files(arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    encoded = encode(arguments.corpus, arguments.tokenizer, clock)
    figures = clock.figures()
    layout = encoded.layout
    ids, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
    eos, dtype = end_token(arguments.tokenizer, arguments.eos), token_dtype(arguments.tokenizer)
    digest = xxhash.xxh3_128()
    documents = len(offsets) - 1
    for first in range(0, documents, 10_000):
        last = min(first + 10_000, documents)
        some = ids[offsets[first] : offsets[last]].astype(dtype)
        digest.update(np.insert(some, offsets[first + 1 : last + 1] - offsets[first], eos).astype(dtype).data)
    return {**figures, "documents": documents, "tokens": len(ids) + documents, "hash": digest.hexdigest()}


def run_preprocess_data_fast(arguments: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    indexed_dataset = import_indexed_dataset(arguments.megatron)
    encoded = encode(arguments.corpus, arguments.tokenizer, clock)
    tokens, index = arguments.folder / "text_document.bin", arguments.folder / "text_document.idx"
    dtype = token_dtype(arguments.tokenizer)
    builder = indexed_dataset.IndexedDatasetBuilder(str(tokens), dtype=dtype)
    builder.add_documents(encoded, eod_token=end_token(arguments.tokenizer, arguments.eos))
    builder.finalize(str(index))
    figures = clock.figures()
    size = tokens.stat().st_size // np.dtype(dtype).itemsize
    return {**figures, "documents": len(encoded), "tokens": size, "hash": hash_files([tokens])}


def import_indexed_dataset(checkout: Path) -> Any:
    """The module with the builder, without what the packages above it import (triton and all of training)."""
    if not (checkout / "megatron/core/datasets/indexed_dataset.py").exists():
        raise SystemExit(f"{checkout}: no checkout of Megatron-LM")
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = package
    # Its modules import each other in a circle, which works from here only.
    import megatron.core.parallel_state  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    from megatron.core.datasets import indexed_dataset  # type: ignore[import-not-found,unused-ignore]

    return indexed_dataset


def end_token(tokenizer: Path, text: str) -> int:
    added = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
    found = [token["id"] for token in added if token["content"] == text]
    if not found:
        raise SystemExit(f"{tokenizer}: no added token {text}; give --eos")
    return int(found[0])


def token_dtype(tokenizer: Path) -> type[np.generic]:
    """As milldam and Megatron-LM choose it."""
    document = json.loads(tokenizer.read_text(encoding="utf-8"))
    last = max([*document["model"]["vocab"].values(), *(token["id"] for token in document["added_tokens"])])
    return np.uint16 if last + 1 < 65_500 else np.int32


def hash_files(paths: list[Path]) -> str:
    """Of their bytes, end to end."""
    digest = xxhash.xxh3_128()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while block := file.read(HASHED_BYTES):
                digest.update(block)
    return digest.hexdigest()


PEERS: dict[str, Callable[[argparse.Namespace, Clock], dict[str, Any]]] = {
    "encode_files": run_encode_files,
    "preprocess_data_fast": run_preprocess_data_fast,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("corpus", type=Path, help="a .jsonl file with a field text")
    parser.add_argument("tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--started", type=float, default=time.monotonic(), help="monotonic time of the start")
    parser.add_argument("--eos", default="<|endoftext|>", help="the end token (<|endoftext|>)")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--folder", type=Path, help="an empty one, for what Megatron-LM writes")
    arguments = parser.parse_args()
    with suppress(BrokenPipeError):
        print(json.dumps(PEERS[arguments.peer](arguments, Clock(arguments.started))))


if __name__ == "__main__":
    main()
