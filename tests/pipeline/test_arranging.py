"""Splits and limits that are exact in tokens, against a naive reference."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import leftovers, write_lines
from tests.kit.preprocess_jobs import (
    fresh_texts,
    giant_text,
    ids_of,
    lines_job,
    preprocess,
    texts_in,
    texts_with_copies,
    tokenizer,
    tree_bytes,
)

import milldam
from milldam.errors import InputError
from milldam.pipeline import arranging
from milldam.pipeline.arranging import ArrangeLoad, Cap, Staged, find_boundaries, find_cap
from milldam.pipeline.judging import Facts
from milldam.pipeline.unit_output import STAGED, Shelf
from milldam.run.engine import Assigned, Telling
from milldam.run.records import Journal, Record
from milldam.stores.tokens.format import Index
from milldam.stores.tokens.writer import Tokens

# A document: how many tokens it has, and its key; few keys, so that they are equal often.
Document = tuple[int, int]
DOCUMENTS = st.lists(
    st.tuples(st.integers(1, 30), st.sampled_from([0, 1, 2**48 - 1, 2**48, 2**48 + 1, 2**63, 2**64 - 1])),
    min_size=1,
    max_size=12,
)
SHARDS = st.lists(DOCUMENTS, min_size=1, max_size=4)


def stage(out: Path, shards: list[list[Document]], datasets: list[int] | None = None) -> list[Staged]:
    """Staged shards whose tokens count up through all of them."""
    staged, position = [], 0
    for unit, documents in enumerate(shards):
        lengths = np.array([length for length, _ in documents], dtype=np.int64)
        keys = np.array([key for _, key in documents], dtype=np.uint64)
        flat = np.arange(position, position + int(lengths.sum())).astype(np.uint16)
        position += len(flat)
        facts = Facts(np.zeros(len(keys), np.int64), keys, lengths * 3, lengths * 2, np.arange(len(keys)))
        with Shelf(out, f"{unit:05d}", (STAGED,), "uint16") as shelf:
            shelf.add(Tokens(flat, lengths), facts)
            made = [asdict(shard) for shard in shelf.commit()]
            files = shelf.files(made)[1]
        facts_ = {"shards": made, "dropped": {}, "dataset": datasets[unit] if datasets else 0}
        staged.append(Staged(unit, Record(f"{unit:016x}", files=files, facts=facts_), key=f"{unit:016x}"))
    return staged


def made_of(load: ArrangeLoad, staged: Staged) -> Iterator[Record]:
    given = Assigned(0, staged.key, 0, facts=staged.as_json())
    return load.load()(given, Telling(lambda kind, value: None, 0))


def arrange(out: Path, staged: list[Staged], wanted: dict[str, int]) -> dict[str, list[list[int]]]:
    """Documents of each split as lists of tokens, in order."""
    boundaries = find_boundaries(out, lambda: iter(staged), wanted)
    task = ArrangeLoad(out, tuple(wanted), tuple(boundaries))
    records = [record for one in staged for record in made_of(task, one)]
    found: dict[str, list[list[int]]] = {}
    for record in records:
        for shard in record.facts["shards"]:
            tokens = np.fromfile(out / f"{shard['name']}.bin", np.uint16)
            lengths = Index.map(out / f"{shard['name']}.idx").lengths.tolist()
            ends = np.cumsum(lengths).tolist()
            assert ends[-1] == len(tokens) == shard["tokens"] and len(ends) == shard["documents"]
            pieces = [tokens[end - length : end].tolist() for end, length in zip(ends, lengths, strict=True)]
            found.setdefault(shard["split"], []).extend(pieces)
    return found


def naive(shards: list[list[Document]], wanted: dict[str, int]) -> dict[str, list[list[int]]]:
    """Documents sorted by (key, place) fill one split after the other, the last of each cut, its equals left out."""
    places, position = [], 0
    for unit, documents in enumerate(shards):
        for row, (length, key) in enumerate(documents):
            places.append((key, (unit, row), list(range(position, position + length))))
            position += length
    left = sorted(places)
    parts: dict[str, list[tuple[tuple[int, int], list[int]]]] = {}
    for split, tokens in wanted.items():
        room = tokens
        while room and left:
            last, place, ids = left.pop(0)
            parts.setdefault(split, []).append((place, ids[:room]))
            room -= min(room, len(ids))
        left = [one for one in left if one[0] != last]
    parts["train"] = [(place, ids) for _, place, ids in left]
    return {split: [ids for _, ids in sorted(part)] for split, part in parts.items() if part}


def assert_arranged(out: Path, staged: list[Staged], shards: list[list[Document]], wanted: dict[str, int]) -> None:
    """As the reference has it, each split with exactly its tokens; an error where nothing would be left to train."""
    expected = naive(shards, wanted)
    if "train" not in expected:
        with pytest.raises(InputError, match="train"):
            arrange(out, staged, wanted)
        return
    found = arrange(out, staged, wanted)
    assert {split: sum(map(len, found.get(split, []))) for split in wanted} == wanted
    assert found == expected


@settings(max_examples=30)
@given(shards=SHARDS, share=st.floats(0.001, 0.999), small_chunks=st.booleans())
def test_one_exact_split_against_a_naive_reference(
    shards: list[list[Document]], share: float, small_chunks: bool
) -> None:
    """Documents in the order of keys until the tokens are full; the last is cut; train keeps the rest."""
    total = sum(length for documents in shards for length, _ in documents)
    wanted = {"val": max(1, int(share * total))}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if small_chunks:
            patch.setattr(arranging, "_CHUNK_DOCUMENTS", 3)
            patch.setattr(arranging, "CHUNK_TOKENS", 20)
        assert_arranged(Path(folder), stage(Path(folder), shards), shards, wanted)


@settings(max_examples=30)
@given(shards=SHARDS, shares=st.tuples(st.floats(0.001, 0.4), st.floats(0.001, 0.4)))
def test_two_exact_splits_have_their_tokens_each(shards: list[list[Document]], shares: tuple[float, float]) -> None:
    """What is cut off at the end of the first split does not count for the second."""
    total = sum(length for documents in shards for length, _ in documents)
    wanted = {"val": max(1, int(shares[0] * total)), "test": max(1, int(shares[1] * total))}
    with tempfile.TemporaryDirectory() as folder:
        assert_arranged(Path(folder), stage(Path(folder), shards), shards, wanted)


@settings(max_examples=30)
@given(documents=DOCUMENTS, room=st.integers(0, 200), chunk=st.sampled_from([2, 5, 1 << 18]))
def test_a_cap_keeps_the_first_tokens(documents: list[Document], room: int, chunk: int) -> None:
    """The first documents whole, the last cut, nothing behind it; the room that is left is told."""
    lengths = [length for length, _ in documents]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(arranging, "_CHUNK_DOCUMENTS", chunk)
        (staged,) = stage(Path(folder), [documents])
        cap, left = find_cap(Path(folder), staged, room)
    assert left == max(0, room - sum(lengths))
    if room >= sum(lengths):
        assert cap is None
        return
    assert cap is not None
    kept = lengths[: cap.documents]
    if cap.last_tokens is not None:
        kept[-1] = cap.last_tokens
    assert sum(kept) == room and all(kept)


@settings(max_examples=30)
@given(documents=DOCUMENTS, cap=st.integers(1, 100), wanted=st.integers(1, 60))
def test_splits_are_taken_from_what_a_cap_leaves(documents: list[Document], cap: int, wanted: int) -> None:
    """A cut document has its cut length wherever it goes."""
    kept, room = [], cap
    for length, key in documents:
        if room:
            kept.append((min(room, length), key))
            room -= min(room, length)
    with tempfile.TemporaryDirectory() as folder:
        (staged,) = stage(Path(folder), [documents])
        limit, _ = find_cap(Path(folder), staged, cap)
        # Tokens count up from 0: those behind the cap are the last ones.
        assert_arranged(Path(folder), [replace(staged, cap=limit)], [kept], {"val": wanted})


def test_a_cap_of_no_documents_gives_no_shard(tmp_path: Path) -> None:
    """A dataset that is full before a unit leaves nothing of it."""
    (staged,) = stage(tmp_path, [[(5, 1), (6, 2)]])
    assert find_cap(tmp_path, staged, 0) == (Cap(0), 0)
    assert arrange(tmp_path, [replace(staged, cap=Cap(0))], {}) == {}


def test_a_document_longer_than_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A giant with several entries in the index is one document."""
    from milldam.stores.tokens import format as store_format

    monkeypatch.setattr(store_format, "MAX_SEQUENCE", 10)
    documents = [(25, 3), (4, 1), (10, 2), (11, 0)]
    (staged,) = stage(tmp_path, [documents])
    boundaries = find_boundaries(tmp_path, lambda: iter([staged]), {"val": 20})
    task = ArrangeLoad(tmp_path, ("val",), tuple(boundaries))
    records = list(made_of(task, staged))
    assert {shard["split"]: shard["tokens"] for shard in records[0].facts["shards"]} == {"val": 20, "train": 25}
    assert {shard["split"]: shard["documents"] for shard in records[0].facts["shards"]} == {"val": 3, "train": 1}


# ---- in a job ----


def tokens_of(store: milldam.Store, split: str) -> int:
    return milldam.open(store.path, split=split).tokens


def assert_parts(store: milldam.Store, texts: list[str], exact: dict[str, int]) -> None:
    """Each split has exactly its tokens; together they are all documents, but for the end of one in each exact one."""
    assert {split: tokens_of(store, split) for split in exact} == exact
    left = {ids_of(text) for text in texts}
    for split in store.splits:
        cut = 0
        for document in milldam.open(store.path, split=split):
            ids = tuple(document.tolist())
            if ids not in left:
                whole = [one for one in left if one[: len(ids)] == ids]
                assert whole and split in exact, split
                ids, cut = whole[0], cut + 1
            left.remove(ids)
        assert cut <= 1
    assert not left


def test_an_exact_split_in_a_job(tmp_path: Path) -> None:
    """Exactly so many tokens for any workers; staged shards do not stay; more data changes little of it."""
    texts = texts_with_copies(1500, 3)
    wanted = {"val_tokens": 5000}
    store = lines_job(tmp_path, texts, splits=wanted, shard_size="100KB")
    kept = list(dict.fromkeys(text for text in (one.strip("\x01\x7f \n\x00\x07") for one in texts) if text))
    assert_parts(store, kept, {"val": 5000})
    several = lines_job(tmp_path, texts, "several", splits=wanted, shard_size="100KB", workers=2)
    assert tree_bytes(several.path) == tree_bytes(store.path)
    assert leftovers(store.path) == [] and not list(store.path.glob("staged*"))
    assert sum(shard.documents for shard in store.manifest.shards) == len(kept)


def test_two_exact_splits_in_a_job(tmp_path: Path) -> None:
    """Both have exactly what was asked."""
    texts = fresh_texts(200)
    store = lines_job(tmp_path, texts, splits={"val_tokens": 1010, "test_tokens": 777}, dedup="off")
    assert_parts(store, texts, {"val": 1010, "test": 777})


def test_too_many_tokens_asked_is_an_error_that_says_how_many_there_are(tmp_path: Path) -> None:
    """Nothing would be left to train."""
    with pytest.raises(InputError, match=r"val_tokens: 100,000 .*[\d,]+ tokens"):
        lines_job(tmp_path, fresh_texts(20), splits={"val_tokens": 100_000}, dedup="off")
    assert not (tmp_path / "out" / "milldam.json").exists()


def test_a_giant_can_be_cut_and_can_be_validation(tmp_path: Path) -> None:
    """A document that came in parts is staged and arranged as any other."""
    giant = giant_text(2_500_000)
    texts = [*fresh_texts(10), giant, *fresh_texts(10, 1)]
    store = lines_job(tmp_path, texts, splits={"val_tokens": 300_000}, dedup="off")
    assert tokens_of(store, "val") == 300_000
    found = [text for split in store.splits for text in _lenient(store, split)]
    assert len(found) == len(texts)
    assert sum(any(text.startswith(one[:50]) for one in found) for text in texts) == len(texts)


def _lenient(store: milldam.Store, split: str) -> list[str]:
    return [
        tokenizer().decode(document.tolist()[:60], skip_special_tokens=True)
        for document in milldam.open(store.path, split=split)
    ]


@pytest.mark.parametrize("shard_size", ["100KB", "1MB"])
def test_max_tokens_is_exact_for_each_data_set(tmp_path: Path, shard_size: str) -> None:
    """The first documents of a dataset until it has its tokens; others stay; a large limit changes nothing."""
    sets = [fresh_texts(1200, seed) for seed in range(3)]
    limits = [7000, None, 10**9]
    given_sets = [
        {"path": write_lines(tmp_path / f"{k}.jsonl", texts)} | ({"max_tokens": limit} if limit else {})
        for k, (texts, limit) in enumerate(zip(sets, limits, strict=True))
    ]
    store = preprocess(tmp_path / "s", given_sets, dedup="off", shard_size=shard_size)
    documents = [tuple(document.tolist()) for document in store]
    expected, room = [], 7000
    for text in sets[0]:
        if room:
            expected.append(ids_of(text)[:room])
            room -= len(expected[-1])
    expected += [ids_of(text) for texts in sets[1:] for text in texts]
    assert documents == expected


def test_max_tokens_and_an_exact_split_together(tmp_path: Path) -> None:
    """The limit comes first; the split is taken from what it leaves."""
    path = write_lines(tmp_path / "a.jsonl", fresh_texts(400))
    store = preprocess(tmp_path / "s", [{"path": path, "max_tokens": 3000}], dedup="off", splits={"val_tokens": 500})
    assert tokens_of(store, "val") == 500 and 2400 < tokens_of(store, "train") <= 2500


def test_shares_and_max_tokens_together(tmp_path: Path) -> None:
    """A limit in tokens does not undo a split by shares."""
    texts = fresh_texts(400)
    path = write_lines(tmp_path / "a.jsonl", texts)
    plain = preprocess(tmp_path / "p", path, dedup="off", splits={"val": 0.3})
    store = preprocess(tmp_path / "s", [{"path": path, "max_tokens": 10**9}], dedup="off", splits={"val": 0.3})
    assert store.splits == plain.splits
    assert [texts_in(store, split) for split in plain.splits] == [texts_in(plain, split) for split in plain.splits]


def test_a_torn_record_of_the_arranging_loses_nothing(tmp_path: Path) -> None:
    """A line that a full disk tore is done again, and so is none of its neighbours lost."""
    texts = fresh_texts(1500)
    settings_: dict[str, Any] = {"splits": {"val_tokens": 3000}, "shard_size": "100KB", "dedup": "off"}
    reference = lines_job(tmp_path, texts, **settings_)
    assert len(reference.manifest.shards) >= 4

    class TornError(Exception):
        pass

    append = Journal.append

    def tear(self: Journal, name: str, value: dict[str, Any]) -> None:
        append(self, name, value)
        if name == arranging.RECORDS:
            path = self.folder / name
            path.write_bytes(path.read_bytes()[:-20])
            raise TornError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "append", tear)
        with pytest.raises(TornError):
            lines_job(tmp_path, texts, "torn", **settings_)
    store = lines_job(tmp_path, texts, "torn", **settings_)
    assert tree_bytes(store.path) == tree_bytes(reference.path)
