"""Grows a corpus of any size, with variation, from small real seed texts.

In: jsonl(.zst) files with a `text` per line (and perhaps a `lang`). Out: one jsonl or txt file of
about `--size` bytes. Each document is a seed document picked at random, its sentences in a new
order, one word in about 30 exchanged for one from other documents of its language, and one name or
number put in that nobody wrote before: neither dedup nor a tokenizer's cache is flattered.

The same seed, options and version of Python give the same bytes. Memory: a little over twice the
seed texts (170 MB for the default two), whatever the size. Speed: some seconds to cut the seeds,
then about 120 MB/s (50 with documents of 200 bytes), because text is cut and JSON-escaped once and
a document is only a join of bytes.

    python benchmarks/corpus.py --size 1GB --out /tmp/bench/1GB.jsonl
    python benchmarks/corpus.py --size 1GB --out /tmp/bench/1GB.txt --format txt --hexdumps 5
    python benchmarks/corpus.py --size 200MB --out /tmp/bench/small.jsonl --document-bytes 200
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import BinaryIO

from sizes import megabytes, parse_size

SEED_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "data" / "text"
WRITE_BYTES = 4 << 20
HEX_BLOCK_CHARACTERS = 1 << 20

PIECE_BYTES = 160
"""A piece ends at the first sentence end past this size: one word of about 30 is exchanged."""
MIN_PIECE_BYTES = 50
PIECES_PER_SHORT_DOCUMENT = 3
"""With fewer pieces, and so fewer exchanged words, documents of 200 bytes would often be equal."""

_ENCODER = json.JSONEncoder(ensure_ascii=False)
_SENTENCE = re.compile(r"[^\n.!?。！？।]*(?:[.!?]+[\"'”’)\]]*(?:\s+|\Z)|[。！？।]+\s*|\n\s*|[.!?]+|\Z)")
_WORD = re.compile(r"(?<!\S)[^\s.,;:!?()\[\]{}<>\"“”'`*_#|/\\=]{2,24}(?=[\s.,;:!?])")

Piece = tuple[bytes, bytes, bytes]
"""What stands before the exchanged word, what stands after it, and the space to the next piece."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a document is written to the file."""

    opening: bytes
    closing: bytes
    is_json: bool

    def escape(self, text: str) -> bytes:
        """The text's bytes inside a document of this form."""
        if self.is_json:
            text = _ENCODER.encode(text)[1:-1]
        return text.encode()

    def prepare(self, text: str) -> str:
        """The text without what this form can't hold: in txt a blank line ends the document."""
        if self.is_json:
            return text
        return "\n".join(line for line in text.split("\n") if line.strip())

    def separator(self, space: str) -> bytes:
        """The space after a piece, in the few shapes that a form knows."""
        if "\n" not in space:
            return self.escape(space[:1])
        return self.escape("\n\n" if self.is_json and space.count("\n") > 1 else "\n")


FORMS = {
    "jsonl": Form(b'{"text": "', b'"}\n', is_json=True),
    "txt": Form(b"", b"\n\n", is_json=False),
}


@dataclass(frozen=True, slots=True)
class SeedDocument:
    """A seed document in pieces, and the words of its whole language to exchange for its own."""

    pieces: list[Piece]
    words: list[bytes]


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the bytes of a corpus."""

    size_bytes: int
    form: Form
    seed: int
    shares: dict[Path, float]
    """Seed file -> its share of the bytes; the shares add up to 1."""
    document_bytes: int | None
    """Documents are cut at a sentence end near this size; shorter ones stay as they are."""
    hexdumps: int
    """How many documents of hex digits without a space: the worst case for a tokenizer's memory."""
    hexdump_characters: int

    @property
    def piece_bytes(self) -> int:
        """How finely the seeds are cut."""
        if self.document_bytes is None:
            return PIECE_BYTES
        fine = self.document_bytes // PIECES_PER_SHORT_DOCUMENT
        return max(MIN_PIECE_BYTES, min(PIECE_BYTES, fine))


@dataclass(slots=True)
class Written:
    """What has gone to the file so far."""

    total_bytes: int = 0
    documents: int = 0


def read_texts(path: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every line of a jsonl file, compressed or not."""
    with path.open("rb") as raw:
        stream = _decompressed(raw) if path.suffix == ".zst" else raw
        for line in io.TextIOWrapper(stream, encoding="utf-8"):
            record = json.loads(line)
            yield record.get("lang", ""), record["text"]


def _decompressed(raw: BinaryIO) -> BinaryIO:
    try:
        import zstandard
    except ImportError:
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw))


def sentences(text: str, min_bytes: int) -> Iterator[str]:
    """The text cut after sentences and lines, in runs of at least `min_bytes` save the last."""
    start, size = 0, 0
    for match in _SENTENCE.finditer(text):
        size += len(match[0].encode())
        if size >= min_bytes:
            yield text[start : match.end()]
            start, size = match.end(), 0
    if start < len(text):
        yield text[start:]


def cut_word(body: str, rng: Random) -> tuple[str, str, str]:
    """(before, word, after) for a random word; a text without words gets its place at the end."""
    start = int(rng.random() * len(body))
    match = _WORD.search(body, start) or _WORD.search(body)
    if match is None:
        return body + " ", "", ""
    return body[: match.start()], match[0], body[match.end() :]


class Names:
    """Made-up names and numbers: 67 million names, so that the vocabulary keeps growing."""

    def __init__(self, rng: Random) -> None:
        syllables = [c + v + e for c in "bdfgklmnprstvz" for v in "aeiou" for e in ("", "n", "r", "l")]
        rng.shuffle(syllables)
        pairs = [a + b for a in syllables[:90] for b in syllables[:91]]
        self._heads = [pair.capitalize().encode() for pair in pairs]
        self._tails = [pair.encode() for pair in pairs]
        self._random = rng.random

    def fresh(self) -> bytes:
        """A name in three cases of four, else a number of up to seven digits."""
        draw = self._random()
        if draw < 0.25:
            return b"%d" % (draw * 4 * 10**7)
        head = self._heads[int(self._random() * len(self._heads))]
        return head + self._tails[int(self._random() * len(self._tails))]


class Cutter:
    """Cuts texts into escaped pieces; the words it takes out are kept by language."""

    def __init__(self, recipe: Recipe, rng: Random) -> None:
        self.words: dict[str, list[bytes]] = {}
        self._form = recipe.form
        self._piece_bytes = recipe.piece_bytes
        self._rng = rng
        self._names = Names(rng)
        # Hundreds of thousands of equal words and spaces: keep each once.
        self._once: dict[bytes, bytes] = {}

    def cut(self, language: str, text: str) -> SeedDocument:
        """The document's pieces; as many words join its language's list."""
        words = self.words.setdefault(language, [])
        pieces: list[Piece] = []
        for sentence in sentences(self._form.prepare(text), self._piece_bytes):
            body = sentence.rstrip()
            if body:
                before, word, after = cut_word(body, self._rng)
                # Never an empty word: in txt, a piece of one word would become a blank line.
                words.append(self._kept(self._form.escape(word) or self._names.fresh()))
                space = self._form.separator(sentence[len(body) :] or "\n")
                pieces.append((self._form.escape(before), self._form.escape(after), self._kept(space)))
        return SeedDocument(pieces, words)

    def _kept(self, value: bytes) -> bytes:
        return self._once.setdefault(value, value)


def load_seeds(path: Path, recipe: Recipe, rng: Random) -> list[SeedDocument]:
    """Every document of a seed file that has any text, in pieces."""
    cutter = Cutter(recipe, rng)
    documents = [cutter.cut(language, text) for language, text in read_texts(path)]
    for words in cutter.words.values():
        rng.shuffle(words)
    return [document for document in documents if document.pieces]


class Grower:
    """Makes documents without end out of one list of seed documents."""

    def __init__(self, seeds: list[SeedDocument], recipe: Recipe, rng: Random) -> None:
        self._seeds = seeds
        self._form = recipe.form
        # The piece that crosses the limit is still written: stop one piece early.
        limit = recipe.document_bytes or sys.maxsize
        self._limit_bytes = max(1, limit - recipe.piece_bytes)
        self._rng = rng
        self._names = Names(rng)

    def documents(self) -> Iterator[bytes]:
        """Whole documents as they stand in the file."""
        rng = self._rng
        while True:
            seed = self._seeds[int(rng.random() * len(self._seeds))]
            count = len(seed.pieces)
            # Twice as fast as rng.shuffle, and rng.random is the same in every version of Python.
            pieces = sorted(seed.pieces, key=lambda _: rng.random())
            start = int(rng.random() * (len(seed.words) - count + 1))
            words = seed.words[start : start + count]
            words[int(rng.random() * count)] = self._names.fresh()
            yield from self._joined(pieces, words)

    def _joined(self, pieces: list[Piece], words: list[bytes]) -> Iterator[bytes]:
        opening, closing, limit = self._form.opening, self._form.closing, self._limit_bytes
        parts, size = [opening], 0
        for (before, after, space), word in zip(pieces, words, strict=True):
            parts += (before, word, after, space)
            size += len(before) + len(after)
            if size >= limit:
                parts[-1] = closing
                yield b"".join(parts)
                parts, size = [opening], 0
        if size:
            parts[-1] = closing
            yield b"".join(parts)


def load_growers(recipe: Recipe) -> dict[Path, Grower]:
    """One grower a seed file, each with a random stream of its own."""
    growers = {}
    for number, path in enumerate(recipe.shares):
        rng = Random(f"{recipe.seed}-{number}")
        seeds = load_seeds(path, recipe, rng)
        growers[path] = Grower(seeds, recipe, rng)
    return growers


def mixed(growers: dict[Path, Grower], shares: dict[Path, float]) -> Iterator[bytes]:
    """Documents of all sources, each time from the one furthest below its share of the bytes."""
    streams = {path: grower.documents() for path, grower in growers.items()}
    # Bytes given so far, divided by the share: the smallest is the furthest behind.
    progress = dict.fromkeys(streams, 0.0)
    while True:
        path = min(progress, key=progress.__getitem__)
        document = next(streams[path])
        progress[path] += len(document) / shares[path]
        yield document


def hexdump(characters: int, form: Form, rng: Random) -> Iterator[bytes]:
    """One document of hex digits, in blocks, so that its size costs no memory."""
    yield form.opening
    for start in range(0, characters, HEX_BLOCK_CHARACTERS):
        count = min(HEX_BLOCK_CHARACTERS, characters - start)
        yield rng.randbytes((count + 1) // 2).hex()[:count].encode()
    yield form.closing


def corpus_blocks(recipe: Recipe, documents: Iterator[bytes], written: Written) -> Iterator[bytes]:
    """The file's bytes in order, the hexdumps spread evenly between the documents."""
    rng = Random(f"{recipe.seed}-hexdumps")
    spacing = recipe.size_bytes / max(1, recipe.hexdumps)
    margin = (spacing - recipe.hexdump_characters) / 2
    due = [number * spacing + margin for number in reversed(range(recipe.hexdumps))]
    while due or written.total_bytes < recipe.size_bytes:
        if due and written.total_bytes >= due[-1]:
            due.pop()
            blocks = hexdump(recipe.hexdump_characters, recipe.form, rng)
        else:
            blocks = iter((next(documents),))
        for block in blocks:
            written.total_bytes += len(block)
            yield block
        written.documents += 1


def write_blocks(blocks: Iterable[bytes], path: Path) -> None:
    """Writes the blocks, gathered into large ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pending: list[bytes] = []
        size = 0
        for block in blocks:
            pending.append(block)
            size += len(block)
            if size >= WRITE_BYTES:
                file.write(b"".join(pending))
                pending, size = [], 0
        file.write(b"".join(pending))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--size", type=parse_size, required=True, help="of the file, about: 200MB, 1GB, 20GB")
    add("--out", type=Path, required=True, help="the file to write; replaced when it is there")
    add("--format", choices=FORMS, default="jsonl", help="txt: documents end at blank lines")
    add("--seed", type=int, default=0, help="another number makes another corpus")
    add("--multilingual-share", type=float, default=0.2, help="of the bytes, 0 to 1 (0.2)")
    add("--document-bytes", type=parse_size, help="cut documents to about this, e.g. 200")
    add("--hexdumps", type=int, default=0, help="documents of hex digits, spread evenly (0)")
    add("--hexdump-size", type=parse_size, default=4 * 10**6, help="characters of each (4MB)")
    add("--english", type=Path, default=SEED_FOLDER / "gutenberg-64MB.jsonl.zst")
    add("--multilingual", type=Path, default=SEED_FOLDER / "multilingual-17MB.jsonl.zst")
    arguments = parser.parse_args()
    if not 0 <= arguments.multilingual_share <= 1:
        parser.error("--multilingual-share is a share: 0 to 1")
    if arguments.hexdumps * arguments.hexdump_size > arguments.size:
        parser.error("the hexdumps alone are larger than --size; take fewer or smaller ones")
    return arguments


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    share = arguments.multilingual_share
    shares = {arguments.english: 1 - share, arguments.multilingual: share}
    return Recipe(
        size_bytes=arguments.size,
        form=FORMS[arguments.format],
        seed=arguments.seed,
        shares={path: share for path, share in shares.items() if share > 0},
        document_bytes=arguments.document_bytes,
        hexdumps=arguments.hexdumps,
        hexdump_characters=arguments.hexdump_size,
    )


def main() -> None:
    arguments = parse_arguments()
    recipe = recipe_of(arguments)
    started = time.perf_counter()
    growers = load_growers(recipe)
    loaded = time.perf_counter()
    written = Written()
    documents = mixed(growers, recipe.shares)
    write_blocks(corpus_blocks(recipe, documents, written), arguments.out)
    seconds = time.perf_counter() - loaded
    print(
        f"{arguments.out}: {megabytes(written.total_bytes)}, {written.documents:,} documents; "
        f"seeds cut in {loaded - started:.1f} s, written in {seconds:.1f} s "
        f"({written.total_bytes / 1e6 / seconds:.0f} MB/s)"
    )


if __name__ == "__main__":
    main()
