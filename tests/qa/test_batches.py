"""Batches of windows, plain, time-step-major and in lanes: every chosen window once, rows aligned, exact states.

Stores here have windows of 6 tokens, all of them the window's own number + 5, so that a row says which window it is.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.qa_jobs import store_of

from milldam.errors import ConfigError
from milldam.loader.permutation import Int64s
from milldam.loader.reading import ranges
from milldam.qa.batches import COLUMNS, DocumentSamples, Rows, Selection, WindowSamples, lanes
from milldam.qa.store import FeatureStore, Form

LENGTH, PAD, PAD_TYPE = 6, 3, 2
FIRST_TOKEN = 5


@dataclass(frozen=True)
class MemoryStore:
    """A store without files: documents with so many segments; `answers`: the segment with the answer of each."""

    segments: tuple[int, ...]
    answers: tuple[int | None, ...] = ()
    pad_left: bool = False

    @cached_property
    def columns(self) -> dict[str, Any]:
        counts = np.array(self.segments, np.int64)
        windows = int(counts.sum())
        example, segment = np.repeat(np.arange(len(counts)), counts), ranges(np.zeros_like(counts), counts)
        length = 1 + np.arange(windows) % LENGTH
        places = np.arange(LENGTH)[::-1] if self.pad_left else np.arange(LENGTH)
        inside = places < length[:, None]
        cls = np.full(windows, LENGTH - 1 if self.pad_left else 0)
        answers = self.answers or (None,) * len(counts)
        holds = np.array([-1 if one is None else one for one in answers], np.int64)[example] == segment
        start = np.where(holds, 2, cls)
        return {
            "input_ids": np.where(inside, FIRST_TOKEN + np.arange(windows)[:, None], PAD).astype(np.uint16),
            "token_type_ids": np.where(inside, 1, PAD_TYPE).astype(np.uint8),
            "length": length,
            "start_positions": start,
            "end_positions": start,
            "cls_index": cls,
            "has_answer": start != cls,
            "segment_index": segment,
            "total_segments": counts[example],
            "example": example,
        }

    @property
    def form(self) -> Form:
        return Form(LENGTH, "uint16", PAD, PAD_TYPE, self.pad_left, 1, 1)

    @property
    def fingerprint(self) -> str:
        return str(self.segments)

    @property
    def examples(self) -> int:
        return len(self.segments)

    def __len__(self) -> int:
        return sum(self.segments)

    def rows(self, numbers: Int64s, columns: Sequence[str], /) -> Mapping[str, Any]:
        return {name: self.columns[name][numbers] for name in columns}

    def windows_of(self, examples: Int64s, /) -> tuple[Int64s, Int64s]:
        counts = np.array(self.segments, np.int64)
        return (counts.cumsum() - counts)[examples], counts[examples]


def seen(rows: Rows) -> list[tuple[int, int]]:
    """(document, segment) of the rows that are no padding."""
    busy = rows.get("document_mask", np.ones(len(rows["example"]), np.bool_))
    return list(zip(rows["example"][busy].tolist(), rows["segment_index"][busy].tolist(), strict=True))


def all_windows(segments: Sequence[int]) -> Counter[tuple[int, int]]:
    """Every (document, segment)."""
    return Counter((k, t) for k, count in enumerate(segments) for t in range(count))


def same(one: Any, other: Any) -> bool:
    """Whether two batches have the same arrays."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


documents = st.lists(st.integers(1, 7), min_size=1, max_size=40)
selections = st.none() | st.builds(
    lambda strategy, most, seed: Selection(strategy=strategy, max_segments=most, seed=seed),
    st.sampled_from(["first_n", "answer_centered", "random_continuous"]),
    st.integers(1, 5),
    st.integers(0, 9),
)


@pytest.fixture(params=["right", "left"])
def real(request: pytest.FixtureRequest, tmp_path: Path) -> FeatureStore:
    """13 documents with 34 windows in three shards."""
    shards = [[1, 3, 2, 7], [1], [4, 2, 1, 1, 5, 3, 2, 2]]
    contexts = [[" ".join(["of the city"] + ["was"] * (27 * count + 15)) for count in counts] for counts in shards]
    return store_of(tmp_path, contexts, max_seq_length=64, overlap=34, padding_side=request.param)


# ---- plain windows, and time steps ----


@given(documents, st.integers(1, 9), st.integers(1, 3), st.booleans(), st.booleans())
def test_batches_bring_every_window_once_an_epoch(
    segments: list[int], batch_size: int, ranks: int, shuffle: bool, pad_left: bool
) -> None:
    """Whatever the batch size and the ranks, two epochs are every window twice; rows of steps keep their places."""
    store = MemoryStore(tuple(segments), pad_left=pad_left)
    plain: Counter[tuple[int, int]] = Counter()
    by_steps: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        options: dict[str, Any] = {"seed": 3, "shuffle": shuffle, "rank": rank, "world_size": ranks, "epochs": 2}
        plain.update(itertools.chain(*map(seen, WindowSamples(store).batches(batch_size, **options))))
        for steps in DocumentSamples(store).batches(batch_size, **options):
            check_steps(steps, store)
            by_steps.update(itertools.chain(*map(seen, steps)))
    assert plain == by_steps == all_windows(segments) + all_windows(segments)


def test_a_plain_batch_has_the_columns_that_models_take(real: FeatureStore) -> None:
    """Names, shapes and dtypes, and the values of one window as the store gives them."""
    samples = WindowSamples(real)
    batch = next(samples.batches(34, shuffle=False))
    assert tuple(batch) == COLUMNS
    assert {batch[name].shape for name in ("input_ids", "attention_mask", "token_type_ids")} == {(34, 64)}
    assert {name for name in COLUMNS if batch[name].dtype != np.int64} == {"has_answer"}
    for number in range(len(real)):
        window = real[number]
        for name in set(COLUMNS) - {"example", "window"}:
            assert np.array_equal(batch[name][number], window[name]), name
            assert np.array_equal(samples[number][name], window[name]), name
    assert batch["window"].tolist() == list(range(34))
    assert batch["example"].tolist() == np.repeat(np.arange(13), real.windows_of(np.arange(13))[1]).tolist()


def test_what_can_not_be_meant_is_refused(real: FeatureStore) -> None:
    """Columns, strategy and number of segments, at once and each in a sentence."""
    for columns in (["input_id"], "input_id"):
        with pytest.raises(ConfigError, match=r'no column "input_id".*Did you mean "input_ids"'):
            DocumentSamples(real, columns=columns)
    with pytest.raises(ConfigError, match="use first_n, answer_centered or random_continuous"):
        Selection(strategy="answer_centred", max_segments=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use 1 or more"):
        Selection(max_segments=0)


def check_steps(steps: list[Rows], store: Any) -> None:
    """Row b is document b at every step, and padding from its end on."""
    documents = steps[0]["example"].tolist()
    counts = [store.segments[document] for document in documents]
    assert len(steps) == max(counts)
    for t, step in enumerate(steps):
        there = [t < count for count in counts]
        assert step["document_mask"].tolist() == there
        assert step["example"].tolist() == [k if on else -1 for k, on in zip(documents, there, strict=True)]
        check_rows(step, store)


def check_rows(rows: Rows, store: FeatureStore) -> None:
    """Rows with a window are that window's, rows without are padding."""
    busy = rows["document_mask"]
    first, _ = store.windows_of(rows["example"][busy])
    window = first + rows["segment_index"][busy]
    assert (rows["input_ids"][busy].max(axis=1, where=rows["attention_mask"][busy] > 0, initial=0) == window + 5).all()
    pads = {name: column[~busy] for name, column in rows.items()}
    assert (pads["input_ids"] == PAD).all()
    assert (pads["token_type_ids"] == PAD_TYPE).all()
    assert not pads["attention_mask"].any()
    cls = LENGTH - 1 if store.form.pad_left else 0
    for name in ("cls_index", "start_positions", "end_positions"):
        assert (pads[name] == cls).all()
    assert not pads["has_answer"].any()
    assert (pads["example"] == -1).all()


def test_documents_of_1_3_and_2_segments_give_aligned_rows() -> None:
    """[A, B, C], [pad, B, C], [pad, B, pad]: where a short document comes first, too."""
    steps = next(DocumentSamples(MemoryStore((1, 3, 2))).batches(3, shuffle=False))
    assert [step["example"].tolist() for step in steps] == [[0, 1, 2], [-1, 1, 2], [-1, 1, -1]]
    assert [step["segment_index"].tolist() for step in steps] == [[0, 0, 0], [-1, 1, 1], [-1, 2, -1]]
    assert [step["document_mask"].tolist() for step in steps] == [[True] * 3, [False, True, True], [False, True, False]]


@given(documents, st.integers(1, 6), st.integers(0, 12), selections)
def test_documents_resume_from_json_anywhere_with_other_ranks(
    segments: list[int], batch_size: int, stop: int, selection: Selection | None
) -> None:
    """One rank up to anywhere, then two from its state: each (epoch, document) once, the same segments, which depend on
    seed, epoch and document alone."""
    samples = DocumentSamples(MemoryStore(tuple(segments)), selection=selection)
    whole = Counter(itertools.chain(*map(seen, itertools.chain(*samples.batches(3, seed=4, epochs=2)))))
    first = samples.batches(batch_size, seed=4, epochs=2)
    # What was at the end would begin the next epochs.
    before = list(itertools.islice(first, min(stop, len(first) - 1)))
    state = json.loads(json.dumps(first.state_dict()))
    found = Counter(itertools.chain(*map(seen, itertools.chain(*before))))
    for rank in range(2):
        second = samples.batches(2, seed=4, epochs=2, rank=rank, world_size=2)
        second.load_state_dict(state)
        found.update(itertools.chain(*map(seen, itertools.chain(*second))))
    assert found == whole


# ---- which segments ----


@given(documents, selections, st.integers(0, 3), st.data())
def test_a_selection_is_a_stretch_of_the_document_with_its_answer(
    segments: list[int], selection: Selection | None, epoch: int, data: st.DataObject
) -> None:
    """Within the document, as long as can be; answer_centered holds the answer, in the middle where there is room."""
    selection = selection or Selection(strategy="answer_centered", max_segments=3)
    answers = tuple(data.draw(st.none() | st.integers(0, count - 1)) for count in segments)
    store = MemoryStore(tuple(segments), answers)
    numbers = np.arange(store.examples)
    window, count = DocumentSamples(store, selection=selection).chosen(numbers + epoch * store.examples)
    first, most = window - store.windows_of(numbers)[0], selection.max_segments
    assert count.tolist() == [min(most, total) for total in segments]
    assert (first >= 0).all() and (first + count <= np.array(segments)).all()
    if selection.strategy == "first_n":
        assert not first.any()
    if selection.strategy == "answer_centered":
        for begin, total, answer in zip(first.tolist(), segments, answers, strict=True):
            if answer is None:
                assert begin == 0
                continue
            assert begin <= answer < begin + most
            # No other stretch has it nearer to the middle.
            off = [abs(2 * (answer - b) - (min(most, total) - 1)) for b in range(max(1, total - most + 1))]
            assert off[begin] == min(off)


# ---- lanes ----


def check_lanes(steps: Iterable[Rows], store: MemoryStore) -> list[tuple[int, int]]:
    """A lane goes through a document segment by segment, and resets where one begins; all (document, segment)."""
    found: list[tuple[int, int]] = []
    last: list[tuple[int, int]] | None = None
    ended = False
    for step in steps:
        check_rows(step, store)
        now = list(zip(step["example"].tolist(), step["segment_index"].tolist(), strict=True))
        for lane, (document, segment) in enumerate(now):
            assert bool(step["reset"][lane]) == (document >= 0 and segment == 0)
            if segment > 0 and last is not None:
                assert last[lane] == (document, segment - 1)
        # Once a lane finds no document, no document is left for any.
        assert not (ended and step["reset"].any())
        ended = ended or not step["document_mask"].all()
        last = now
        found += seen(step)
    return found


@given(documents, st.integers(1, 7), st.integers(1, 3), st.booleans(), st.booleans(), st.integers(0, 9))
def test_lanes_bring_every_window_once_an_epoch_without_padding_before_the_end(
    segments: list[int], rows: int, ranks: int, shuffle: bool, pad_left: bool, skip: int
) -> None:
    """Any lanes and ranks: documents in one piece, no free lane while documents wait, ranks end together; and what is
    skipped changes nothing of what follows."""
    store = MemoryStore(tuple(segments), pad_left=pad_left)
    found: Counter[tuple[int, int]] = Counter()
    counts = set()
    for rank in range(ranks):
        options: dict[str, Any] = {"seed": 5, "rank": rank, "world_size": ranks, "epochs": 2, "shuffle": shuffle}
        steps = list(lanes(DocumentSamples(store), rows, **options))
        counts.add(len(steps))
        found.update(check_lanes(steps, store))
        assert same(list(lanes(DocumentSamples(store), rows, skip=skip, **options)), steps[skip:])
    assert found == all_windows(segments) + all_windows(segments)
    assert len(counts) == 1


def test_lanes_of_a_real_store_are_busy_where_time_steps_wait(real: FeatureStore) -> None:
    """Many epochs over 13 documents: hardly a row of padding."""
    busy = [step["document_mask"] for step in lanes(DocumentSamples(real), 4, seed=1, epochs=40)]
    assert np.concatenate(busy).mean() > 0.98
    masks = [step["document_mask"] for steps in DocumentSamples(real).batches(4, seed=1, epochs=40) for step in steps]
    assert np.concatenate(masks).mean() < 0.7
