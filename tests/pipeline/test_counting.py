"""Slices, limits in documents, and weights: which documents of a dataset a job takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import write_lines
from tests.kit.preprocess_jobs import (
    assert_holds,
    drops_by_stage,
    fresh_texts,
    giant_text,
    kept_of,
    preprocess,
    short,
    texts_in,
    texts_with_copies,
    write_gz,
    write_parquet,
    write_saved_data_set,
    write_text_lines,
)

from milldam.errors import ConfigError, InputError
from milldam.pipeline.counting import RowCounts
from milldam.pipeline.documents import SetRules
from milldam.pipeline.preparing import Source
from milldam.run.folder import RunFolder
from milldam.run.records import Record
from milldam.run.units import Identity
from milldam.sources.batch import TextRules
from milldam.sources.data_sets import RowSlice
from milldam.sources.units import Slice, Unit
from milldam.stores.kinds import TOKENS

# ---- ranges ----


@contextmanager
def counts_for(
    folder: Path, datasets: list[int], sources: list[tuple[RowSlice | None, int | None]]
) -> Iterator[RowCounts]:
    """The counts of a plan whose units are of some datasets, in a run folder."""
    made = tuple(Source(SetRules(TextRules()), rows, most) for rows, most in sources)
    with RunFolder(folder, TOKENS) as run:
        run.stage(
            Unit(index, (Slice(f"{index}", "txt", None, index),), dataset) for index, dataset in enumerate(datasets)
        )
        run.start(Identity({}, run.inputs.write(())))
        yield RowCounts(run, made)


def count(counts: RowCounts, unit: int, documents: int) -> None:
    counts.add(Record(counts.keys[unit], counts={"documents": documents}))


EDGE = st.one_of(st.none(), st.integers(-60, 60))


@given(
    documents=st.lists(st.integers(0, 15), min_size=1, max_size=8),
    start=EDGE,
    stop=EDGE,
    most=st.one_of(st.none(), st.integers(1, 40)),
)
def test_rows_of_units_are_the_slice_of_all_documents(
    documents: list[int], start: int | None, stop: int | None, most: int | None
) -> None:
    """As Python slices a list; no unit is counted once enough are."""
    counted = []
    sources = [(RowSlice(start, stop), most)]
    with TemporaryDirectory() as folder, counts_for(Path(folder), [0] * len(documents), sources) as counts:
        for unit in counts.missing():
            count(counts, unit, documents[unit])
            counted.append(unit)
        ranges = sorted(counts.ranges().items())
    every = [(unit, row) for unit, number in enumerate(documents) for row in range(number)]
    expected = every[start:stop][:most]
    found = [(unit, row) for unit, (first, behind) in ranges for row in range(first, behind)]
    assert found == expected
    if (start or 0) >= 0 and stop is not None and stop > (start or 0):
        before_last = sum(documents[unit] for unit in counted[:-1])
        assert not counted or before_last < stop


@given(documents=st.lists(st.integers(0, 15), min_size=1, max_size=8), edges=st.tuples(*[st.integers(0, 100)] * 2))
def test_percents_part_the_documents(documents: list[int], edges: tuple[int, int]) -> None:
    """[:a%], [a%:b%] and [b%:] together are everything, once."""
    low, high = sorted(edges)
    every = [(unit, row) for unit, number in enumerate(documents) for row in range(number)]
    found = []
    for start, stop in ((None, low), (low, high), (high, None)):
        sources = [(RowSlice(start, stop, percent=True), None)]
        with TemporaryDirectory() as folder, counts_for(Path(folder), [0] * len(documents), sources) as counts:
            for unit in counts.missing():
                count(counts, unit, documents[unit])
            found += [(unit, row) for unit, (a, b) in sorted(counts.ranges().items()) for row in range(a, b)]
    assert found == every


def test_data_sets_are_counted_each_on_its_own(tmp_path: Path) -> None:
    """One that is wanted whole is not counted; units already counted are not counted again."""
    sources = [(RowSlice(3, 6), None), (None, None), (None, 5)]
    with counts_for(tmp_path, [0, 0, 1, 2, 2], sources) as counts:
        count(counts, 0, 4)
        assert list(counts.missing()) == [1, 3, 4]
        for unit, number in ((1, 9), (3, 2), (4, 9)):
            count(counts, unit, number)
    assert counts.ranges() == {0: (3, 4), 1: (0, 2), 3: (0, 2), 4: (0, 3)}


# ---- in a job ----

SLICES: list[tuple[str, slice]] = [
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
    write = write_lines if kind == "jsonl" else write_parquet
    path = write(tmp_path / f"a.{kind}", texts)
    store = preprocess(tmp_path / "s", [{"path": path, "split": split}], dedup="off", shard_size="100KB")
    assert_holds(store, list(kept_of_all(texts[rows])))
    assert sum(sum(reasons.values()) for reasons in drops_by_stage(store.path).values()) == len(texts[rows]) - len(
        store
    )


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


@pytest.mark.slow
def test_a_slice_that_begins_or_ends_at_a_giant(tmp_path: Path) -> None:
    """A document in parts is taken whole or not at all."""
    giants = [giant_text(2_300_000, seed) for seed in range(2)]
    texts = ["a", giants[0], "b", giants[1], "c", "d"]
    path = write_lines(tmp_path / "a.jsonl", texts)
    for start, stop in ((0, 1), (1, 3), (2, 4), (3, 4), (4, 6)):
        out = tmp_path / f"{start}-{stop}"
        store = preprocess(
            out, [{"path": path, "split": f"train[{start}:{stop}]"}], dedup="exact" if start == 1 else "off"
        )
        assert short(texts_in(store)) == short(texts[start:stop])


@pytest.mark.parametrize("most", [1, 500, 10_000])
def test_max_documents_takes_the_first(tmp_path: Path, most: int) -> None:
    """In every format, streams that can't be cut included; more than there are means all."""
    texts = list(fresh_texts(900, 6))
    for path in (
        write_gz(tmp_path / "a.jsonl.gz", texts),
        write_text_lines(tmp_path / "b.txt", texts),
    ):
        sets = [{"path": path, "max_documents": most, "documents": "line"}]
        store = preprocess(tmp_path / path.name[0], sets, dedup="off", shard_size="100KB")
        assert_holds(store, texts[:most])


def test_max_documents_of_a_slice(tmp_path: Path) -> None:
    """The first so many of the slice."""
    texts = fresh_texts(100)
    path = write_lines(tmp_path / "a.jsonl", texts)
    store = preprocess(tmp_path / "s", [{"path": path, "split": "train[20:]", "max_documents": 7}], dedup="off")
    assert texts_in(store) == texts[20:27]


def test_a_slice_behind_the_end_is_an_error(tmp_path: Path) -> None:
    """No documents: said so."""
    path = write_lines(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(InputError, match="No documents"):
        preprocess(tmp_path / "s", [{"path": path, "split": "train[5:9]"}], dedup="off")
    with pytest.raises(ConfigError, match="is not a slice"):
        preprocess(tmp_path / "s", [{"path": path, "split": "train[x]"}], dedup="off")


def test_a_saved_hf_data_set_is_read_in_its_order(tmp_path: Path) -> None:
    """Arrow streams in a folder of `save_to_disk`, whole and in slices."""
    texts = fresh_texts(90)
    folder = write_saved_data_set(tmp_path / "hf", [texts[:40], texts[40:41], texts[41:]])
    assert texts_in(preprocess(tmp_path / "a", folder, dedup="off")) == texts
    sets = [{"path": folder, "split": "train[30:50]"}]
    assert texts_in(preprocess(tmp_path / "b", sets, dedup="off")) == texts[30:50]


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


def test_a_weight_with_a_slice_and_an_exact_split(tmp_path: Path) -> None:
    """Repetitions are of the slice; the split is still exact."""
    texts = fresh_texts(300)
    path = write_lines(tmp_path / "a.jsonl", texts)
    sets = [{"path": path, "weight": 2, "split": "train[50:150]"}]
    store = preprocess(tmp_path / "s", sets)
    assert texts_in(store) == texts[50:150] * 2
    exact = preprocess(tmp_path / "e", sets, splits={"val_tokens": 400})
    assert {name: counted["tokens"] for name, counted in _splits(exact).items()}["val"] == 400


def _splits(store: Any) -> dict[str, dict[str, int]]:
    from tests.kit.preprocess_jobs import summary_of

    return dict(summary_of(store.path)["splits"])


def test_samples_of_a_weight_below_one_are_counted(tmp_path: Path) -> None:
    """What is not sampled is a drop with a reason, and makes no duplicate of another."""
    texts = fresh_texts(200)
    path = write_lines(tmp_path / "a.jsonl", [*texts, *texts])
    store = preprocess(tmp_path / "s", [{"path": path, "weight": 0.5}])
    dropped = drops_by_stage(store.path)
    assert dropped["dedup"] == {"duplicate": len(store)}
    assert dropped["sample"] == {"not_sampled": 400 - 2 * len(store)} and 60 < len(store) < 140
