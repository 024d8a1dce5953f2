"""Slices, limits in documents, and weights: which documents of a dataset a job takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import write_lines
from tests.kit.preprocess_jobs import (
    assert_holds,
    drops_by_stage,
    fresh_texts,
    kept_of,
    preprocess,
    texts_in,
    texts_with_copies,
)
from tests.kit.source_reading import write_texts

from milldam.errors import ConfigError, InputError

# ---- slices ----

SLICES: list[tuple[str, slice]] = [
    ("train[-1000:-400]", slice(-1000, -400)),
    ("train[1400:3000]", slice(1400, 3000)),
    ("train[:700]", slice(None, 700)),
    ("train[150:1_100]", slice(150, 1100)),
    ("train[-90:]", slice(-90, None)),
    ("train[10%:20%]", slice(150, 300)),
    ("train[99%:]", slice(1485, None)),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("split", "rows"), SLICES)
def test_a_slice_takes_what_python_would(tmp_path: Path, kind: str, split: str, rows: slice) -> None:
    """Documents are counted as they are read, before cleaning and dedup."""
    texts = texts_with_copies(1500, 4)
    write = write_lines if kind == "jsonl" else write_texts
    path = write(tmp_path / f"a.{kind}", texts)
    store = preprocess(tmp_path / "s", [{"path": path, "split": split}], dedup="off", shard_size="100KB")
    assert_holds(store, list(kept_of_all(texts[rows])))
    assert sum(sum(reasons.values()) for reasons in drops_by_stage(store.path).values()) == len(texts[rows]) - len(
        store
    )


@settings(max_examples=5)
@given(edges=st.tuples(st.integers(1, 49), st.integers(50, 99)), most=st.integers(1, 120))
def test_percents_part_the_documents(
    tmp_path_factory: pytest.TempPathFactory, edges: tuple[int, int], most: int
) -> None:
    """[:a%], [a%:b%] and [b%:] together are everything, once; of several data sets, each is counted on its own."""
    folder, texts, (low, high) = tmp_path_factory.mktemp("job"), fresh_texts(137), edges
    path, other = write_lines(folder / "a.jsonl", texts), write_lines(folder / "b.jsonl", fresh_texts(90, 1))
    sets = [{"path": path, "split": f"train[{part}]"} for part in (f":{low}%", f"{low}%:{high}%", f"{high}%:")]
    limited: list[Any] = [*sets, other, {"path": other, "max_documents": most}]
    store = preprocess(folder / "s", limited, dedup="off", shard_size="100KB")
    others = fresh_texts(90, 1)
    assert texts_in(store) == [*texts, *others, *others[:most]]


def kept_of_all(texts: list[str]) -> list[str]:
    """Cleaned, blank ones left out, copies kept."""
    return [text for one in texts for text in kept_of([one])]


def test_a_slice_with_dedup_sees_only_its_own_documents(tmp_path: Path) -> None:
    """What is outside the slice is no original of anything; for exact, and for near with its places in the files."""
    texts = texts_with_copies(900, 5, copies=0.5)
    path = write_lines(tmp_path / "a.jsonl", texts)
    sets = [{"path": path, "split": "train[333:777]"}]
    for dedup in ("exact", {"near": {"threshold": 0.95}}):
        name = "near" if isinstance(dedup, dict) else "exact"
        store = preprocess(tmp_path / name, sets, dedup=dedup, shard_size="100KB", workers=2)
        assert_holds(store, kept_of(texts[333:777]))


@pytest.mark.parametrize("most", [1, 500, 10_000])
def test_max_documents_takes_the_first(tmp_path: Path, most: int) -> None:
    """In every format, streams that can't be cut included; more than there are means all."""
    texts = list(fresh_texts(900, 6))
    for path in (
        write_texts(tmp_path / "a.jsonl.gz", texts),
        write_texts(tmp_path / "b.txt", texts),
    ):
        sets = [{"path": path, "max_documents": most, "documents": "line"}]
        store = preprocess(tmp_path / path.name[0], sets, dedup="off", shard_size="100KB")
        assert_holds(store, texts[:most])


def test_a_slice_behind_the_end_is_an_error(tmp_path: Path) -> None:
    """No documents: said so."""
    path = write_lines(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(InputError, match="No documents"):
        preprocess(tmp_path / "s", [{"path": path, "split": "train[5:9]"}], dedup="off")
    with pytest.raises(ConfigError, match=r"train\[x\].*Examples: train"):
        preprocess(tmp_path / "s", [{"path": path, "split": "train[x]"}], dedup="off")


# ---- weights ----


@pytest.mark.parametrize(("weight", "low", "high"), [(2, 2, 2), (0.5, 0, 1), (1.5, 1, 2)])
def test_a_weight_takes_documents_so_often(tmp_path: Path, weight: float, low: int, high: int) -> None:
    """Whole repetitions, and a seeded share for the rest; dedup does not undo them; another dataset stays."""
    texts, others = fresh_texts(1000), fresh_texts(50, 8)
    path, other = write_lines(tmp_path / "a.jsonl", [*texts, *texts[:100]]), write_lines(tmp_path / "b.jsonl", others)
    sets = [{"path": path, "weight": weight}, other]
    store = preprocess(tmp_path / "s", sets, shard_size="100KB")
    found = Counter(texts_in(store))
    assert [found.pop(text) for text in others] == [1] * 50
    assert set(found) <= set(texts)
    times = [found[text] for text in texts]
    assert low <= min(times) and max(times) <= high
    assert abs(sum(times) / 1000 - weight) < 0.06
    seeded = Counter(texts_in(preprocess(tmp_path / "seeded", sets, shard_size="9MB", seed=5)))
    assert (Counter({text: seeded[text] for text in texts}) == Counter(found)) == (weight == int(weight))
