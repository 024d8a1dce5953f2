"""Near-dedup against brute force: what is removed is like something that stays, what is alike is removed, by name."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import demo_texts
from tests.kit.preprocess_jobs import lines_job, make_words, preprocess, summary_of, texts_in

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DOCUMENTS, PARTS = 1500, 6


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    """The benchmark's corpus and judge."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import near_quality

        yield near_quality
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def corpus(quality: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Documents in many languages and of made-up words, with every kind of planted edit."""
    rng = random.Random("quality")
    texts = demo_texts() + [make_words(rng, rng.randrange(40, 400)) for _ in range(DOCUMENTS // 2)]
    return quality.Corpus.write(tmp_path_factory.mktemp("near") / "corpus", quality.plant(texts, DOCUMENTS), PARTS)


@pytest.fixture(scope="module")
def store(corpus: Any) -> Path:
    out = corpus.folder.parent / "out"
    preprocess(out, corpus.folder, dedup="near", write_dropped=True)
    return out


def test_near_dedup_removes_what_is_like_a_document_that_stays_and_nothing_else(
    quality: Any, corpus: Any, store: Path
) -> None:
    """By the true similarities: deletions, insertions, shuffled paragraphs, boilerplate, chains, templates, code."""
    truth, removals = corpus.truth(), corpus.removals(store)
    verdict = quality.judge(truth, removals.kept)
    assert (verdict.wrong, verdict.below) == (0, 0)
    assert verdict.found > 100 and verdict.recall >= 0.98
    assert verdict.left <= 2


def test_a_near_duplicate_names_a_document_that_stays_and_its_true_similarity(corpus: Any, store: Path) -> None:
    """Among the store's dropped documents, rounded down to thousandths."""
    removals = corpus.removals(store)
    assert len(removals.named) > 100
    assert removals.false_names(corpus.truth()) == []


# ---- to look at ----


def test_copies_that_take_a_share_of_the_corpus_are_warned_of(tmp_path: Path) -> None:
    """With the document that stays."""
    rng = random.Random("template")
    form = make_words(rng, 200).split()
    copies = [" ".join([*form[:100], f"filled{number}", *form[101:]]) for number in range(150)]
    store = lines_job(tmp_path, [*copies, *(make_words(rng, 30) for _ in range(50))], dedup="near")
    (warning,) = summary_of(store.path)["warnings"]
    assert warning.startswith("150 documents (75 % of the corpus) are copies of one text, of which 1 stays: ")
    assert "corpus.jsonl, line 1" in warning and len(texts_in(store)) == 51
