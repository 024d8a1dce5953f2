"""Which documents near-dedup drops is frozen, on three corpora: English with changed words, chains of small edits,
eleven languages.

Invariant: the hashes in `golden_drops.json` were written by the commit before the house was rebuilt (d451861). To write
them anew: MILLDAM_WRITE_GOLDEN=1 pytest tests/guards/test_golden_drops.py
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import xxhash
from tests.kit.jobs import TOKENIZER, make_texts, write_lines, zstd

import milldam

GOLDEN = Path(__file__).with_name("golden_drops.json")
LANGUAGES = Path(__file__).parents[3] / "shared/data/text/multilingual-17MB.jsonl.zst"


def _edited(text: str, share: float, rng: random.Random) -> str:
    """A text of which a share of the words is another."""
    words = text.split(" ")
    for _ in range(max(1, int(share * len(words)))):
        words[rng.randrange(len(words))] = f"changed{rng.randrange(1000)}"
    return " ".join(words)


def english() -> Iterator[str]:
    rng = random.Random(1)
    for text in make_texts(1_500_000, seed=21):
        yield text
        if rng.random() < 0.4:
            yield _edited(text, rng.choice([0.01, 0.05, 0.1, 0.2, 0.4]), rng)


def chains() -> Iterator[str]:
    """Forty times forty documents, each nine tenths like the one before it."""
    rng = random.Random(2)
    for text in islice((text for text in make_texts(3_000_000, seed=22) if len(text.split()) > 80), 40):
        for _ in range(40):
            yield text
            text = _edited(text, 0.02, rng)


def languages() -> Iterator[str]:
    rng = random.Random(3)
    with zstd.open(LANGUAGES, "rb") as file:
        for line in islice(io.TextIOWrapper(file, encoding="utf-8"), 1_500):
            text = json.loads(line)["text"][:4_000]
            yield text
            if rng.random() < 0.4:
                yield _edited(text, rng.choice([0.01, 0.03, 0.1]), rng)


@pytest.mark.parametrize("corpus", [english, chains, languages], ids=lambda corpus: corpus.__name__)
def test_the_same_near_duplicates_are_dropped(corpus: Callable[[], Iterator[str]], tmp_path: Path) -> None:
    """Not one more, not one less."""
    if corpus is languages and not LANGUAGES.exists():
        pytest.skip(f"{LANGUAGES} is not there")
    texts = list(corpus())
    write_lines(tmp_path / "corpus.jsonl", texts)
    config = {"datasets": str(tmp_path / "corpus.jsonl"), "tokenizer": str(TOKENIZER), "clean": "off", "dedup": "near"}
    milldam.preprocess(
        config | {"out": str(tmp_path / "out"), "write_dropped": True, "shard_size": "1MB", "workers": 1}
    )
    dropped = zstd.decompress(next((tmp_path / "out").glob("dropped*.zst")).read_bytes()).splitlines()
    lost = sorted(xxhash.xxh3_64_hexdigest(json.loads(line)["text"].encode()) for line in dropped)
    found = {"documents": len(texts), "dropped": len(lost), "hash": xxhash.xxh3_64_hexdigest("".join(lost).encode())}
    assert 50 < len(lost) < len(texts)
    golden = json.loads(GOLDEN.read_bytes()) if GOLDEN.exists() else {}
    if os.environ.get("MILLDAM_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden | {corpus.__name__: found}, indent=1, sort_keys=True) + "\n")
    else:
        assert found == golden[corpus.__name__]
