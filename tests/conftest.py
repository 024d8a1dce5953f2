"""What all tests share: hypothesis without randomness or a database, and where the data lies."""

from __future__ import annotations

import collections
import itertools
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, settings
from tests.kit.token_pieces import TokenizerJson

# What is started in the background (`nohup make test &`) ignores Ctrl-C, and so would everything that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, not machines: what was written is there without waiting for the disk.
os.fsync = lambda descriptor: None

PROJECT = Path(__file__).parents[1]

# `make test` looks at fewer examples of each property than `make test-all` does.
for profile, examples in {"quick": 20, "all": 100}.items():
    settings.register_profile(
        profile,
        deadline=None,
        database=None,
        derandomize=True,
        max_examples=examples,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
settings.load_profile("quick")


KNOWN = PROJECT / ".pytest_cache/tokenizers"
"""What milldam found out of the tests' tokenizers, kept from run to run: a sweep over all of Unicode takes seconds."""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing of the user's cache is seen or left."""
    cache = tmp_path_factory.mktemp("cache")
    if KNOWN.exists():
        shutil.copytree(KNOWN, cache / "tokenizers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLDAM_CACHE", str(cache))
        yield
    KNOWN.mkdir(parents=True, exist_ok=True)
    for found in cache.glob("tokenizers/characters-*"):
        if not (KNOWN / found.name).exists():
            shutil.copy(found, KNOWN / f"{found.name}.{os.getpid()}")
            (KNOWN / f"{found.name}.{os.getpid()}").rename(KNOWN / found.name)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Path:
    """The tokenizer.json that comes with milldam."""
    return PROJECT / "src/milldam/demo_data/tokenizer.json"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the project."""
    folder = PROJECT.parent / "shared/data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture(scope="session")
def demo_texts() -> list[str]:
    """The documents of the corpus that comes with milldam."""
    lines = (PROJECT / "src/milldam/demo_data/corpus.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["text"] for line in lines if line]


@pytest.fixture(scope="session")
def unigram_json(demo_texts: list[str]) -> str:
    """A small Unigram tokenizer that marks word starts: frequent parts of the demo corpus's words, and every letter.

    Made by hand, since the trainer of HF tokenizers gives another vocabulary every time.
    """
    words = collections.Counter(f"▁{word}" for text in demo_texts for word in text.split(" "))
    parts: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for start, stop in itertools.combinations(range(min(len(word), 40) + 1), 2):
            if stop - start <= 8:
                parts[word[start:stop]] += count
    letters = [part for part in sorted(parts) if len(part) == 1 and parts[part] > 3]
    frequent = sorted((part for part in parts if len(part) > 1), key=lambda part: (-parts[part] * len(part), part))
    total = sum(parts.values())
    vocab = [("<unk>", 0.0), ("</s>", 0.0)]
    vocab += [(part, math.log(parts[part] / total)) for part in [*letters, *frequent[:1000]]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(vocab, unk_id=0))
    tokenizer.normalizer = tokenizers.normalizers.NFKC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return TokenizerJson(tokenizer.to_str())


@pytest.fixture(scope="session")
def wordpiece_json(demo_texts: list[str]) -> str:
    """A small WordPiece tokenizer as BERT has it, trained on the demo corpus."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=1500, show_progress=False, special_tokens=special)
    tokenizer.train_from_iterator(demo_texts, trainer)
    return TokenizerJson(tokenizer.to_str())
