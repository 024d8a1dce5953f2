"""Makes stores of random tokens, of any size: what the loading benchmarks read.

`write_store`: every token is drawn, documents of 600 tokens on average, each ended by token 50256. Holds 5M tokens.
`write_sparse_store`: files of the right sizes that are holes; all tokens are 0, its indexes have a header and zeros.
Good for opening and for cutting windows, not for documents.
`join_store`: the shards of a store as one pair of files, for those that read no more than one.

    python benchmarks/token_store.py /tmp/bench/1B.milldam --tokens 1e9 --shards 16
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from milldam.stores.tokens.format import DTYPE_CODES, HEADER, MAGIC, VERSION, Index
from milldam.stores.tokens.manifest import NAME, Manifest, Shard
from milldam.stores.tokens.writer import ShardWriter, Tokens

VOCABULARY = 50_257
END = 50_256
DTYPE = "uint16"
DOCUMENT_TOKENS = 600
PIECE_TOKENS = 5_000_000
PIECE_DOCUMENTS = 8_000
SHARDS = 16


def write_store(folder: Path, tokens: int, shards: int = SHARDS, seed: int = 0) -> Path:
    """A store of so many random tokens; one that is there already is left as it is."""
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        sizes = shard_sizes(tokens, shards)
        write_manifest(folder, [write_shard(folder, size, rng) for size in sizes])
    return folder


def write_sparse_store(folder: Path, tokens: int, shards: int = SHARDS) -> Path:
    """A store whose files are holes."""
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        sizes = shard_sizes(tokens, shards)
        write_manifest(folder, [write_sparse_shard(folder, number, size) for number, size in enumerate(sizes)])
    return folder


def join_store(store: Path, target: Path) -> Path:
    """All shards of a store as one pair of files, `target`.bin and .idx; a pair that is there is left as it is."""
    if not target.with_suffix(".idx").exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with ShardWriter(target.parent, "train", DTYPE) as writer:
            for shard in Manifest.read(store).shards:
                for piece in shard_pieces(store / shard.name):
                    writer.append(piece)
            made = target.parent / writer.commit().name
        for ending in (".bin", ".idx"):
            made.with_suffix(ending).replace(target.with_suffix(ending))
    return target


def shard_pieces(shard: Path) -> Iterator[Tokens]:
    """The documents of a shard, some thousands at a time."""
    index = Index.map(shard.with_suffix(".idx"))
    flat = np.asarray(np.memmap(shard.with_suffix(".bin"), DTYPE, mode="r"))
    at = 0
    for first in range(0, len(index.documents) - 1, PIECE_DOCUMENTS):
        lengths = index.document_lengths(first, first + PIECE_DOCUMENTS)
        stop = at + int(lengths.sum())
        yield Tokens(flat[at:stop], lengths)
        at = stop


def shard_sizes(tokens: int, shards: int) -> list[int]:
    ends = [tokens * number // shards for number in range(shards + 1)]
    return [stop - first for first, stop in itertools.pairwise(ends)]


def write_shard(folder: Path, tokens: int, rng: np.random.Generator) -> Shard:
    with ShardWriter(folder, "train", DTYPE) as writer:
        for first in range(0, tokens, PIECE_TOKENS):
            writer.append(random_documents(min(PIECE_TOKENS, tokens - first), rng))
        return writer.commit()


def random_documents(tokens: int, rng: np.random.Generator) -> Tokens:
    flat = rng.integers(0, VOCABULARY, tokens, dtype=np.uint16)
    inner = rng.choice(tokens - 1, (tokens - 1) // DOCUMENT_TOKENS, replace=False) + 1
    ends = np.append(np.sort(inner), tokens)
    flat[ends - 1] = END
    return Tokens(flat, np.diff(ends, prepend=0).astype(np.int64))


def write_sparse_shard(folder: Path, number: int, tokens: int) -> Shard:
    name, documents = f"train-{number:012x}", tokens // DOCUMENT_TOKENS
    bin_bytes = tokens * np.dtype(DTYPE).itemsize
    index_bytes = HEADER.size + 12 * documents + 8 * (documents + 1)
    header = HEADER.pack(MAGIC, VERSION, DTYPE_CODES[DTYPE], documents, documents + 1)
    write_hole(folder / f"{name}.bin", b"", bin_bytes)
    write_hole(folder / f"{name}.idx", header, index_bytes)
    return Shard(
        name=name,
        split="train",
        documents=documents,
        tokens=tokens,
        text_bytes=0,
        characters=0,
        bin={"bytes": bin_bytes, "xxh3": f"sparse {number}"},
        idx={"bytes": index_bytes, "xxh3": f"sparse {number}"},
    )


def write_hole(path: Path, begin: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(size)


def write_manifest(folder: Path, shards: list[Shard]) -> None:
    Manifest(
        dtype=DTYPE,
        vocab_size=VOCABULARY,
        tokenizer={"name": "random", "eos": END},
        encoder="none",
        settings={},
        input={},
        shards=tuple(shards),
    ).write(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--sparse", action="store_true", help="holes instead of tokens")
    given = parser.parse_args()
    write = write_sparse_store if given.sparse else write_store
    print(write(given.folder, int(given.tokens), given.shards))


if __name__ == "__main__":
    main()
