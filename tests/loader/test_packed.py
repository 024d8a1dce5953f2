"""Packed rows: every token in one row, and beside it all that keeps documents apart, as a plain loop would say it."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import flat_tokens, shard_file, write_store

from milldam.errors import ConfigError, MismatchError, ResourceError, StoreError
from milldam.files import NewFile
from milldam.loader.boundaries import Documents, document_lengths
from milldam.loader.order import Stretches
from milldam.loader.packed import PackedRows, RowRules
from milldam.loader.row_pieces import RowFinder, RowSource
from milldam.loader.stores import Store
from milldam.loader.stream import TokenStream
from milldam.loader.views import Trainable
from milldam.stores.tokens.format import HEADER, MAGIC

PER_TOKEN = ("input_ids", "labels", "position_ids", "document_ids", "loss_mask")

# Lengths of the documents of each shard; some shards have none.
shard_lengths = st.lists(st.lists(st.integers(1, 25), max_size=12), min_size=1, max_size=4).filter(
    lambda shards: any(map(len, shards))
)
strategies = st.sampled_from(["wrapped", "best_fit"])
forms = st.sampled_from(["shifted", "hf"])
ways = st.sampled_from(["map", "pread"])


@pytest.fixture(autouse=True)
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache is a folder of the test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "milldam" / "rows"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Path]:
    """Folders that no example had before."""
    return (tmp_path / f"store-{number}" for number in itertools.count())


class Plain:
    """The documents of a stretch of a store, as lists: what rows are checked against."""

    def __init__(self, store: Store, first: int, stop: int) -> None:
        self.tokens = flat_tokens(store).tolist()
        self.first, self.stop = first, stop
        lengths = [length for lengths in store.document_lengths() for length in lengths.tolist()]
        self.document = [number for number, length in enumerate(lengths) for _ in range(length)]

    def target(self, position: int) -> int | None:
        """The next token, when it is of the same document and of this stretch."""
        after = position + 1
        if after >= self.stop or self.document[after] != self.document[position]:
            return None
        return self.tokens[after]

    def row(self, pieces: list[list[int]], seq_len: int, form: str) -> dict[str, list[Any]]:
        """A row of pieces, each a list of positions."""
        row: dict[str, list[Any]] = {name: [] for name in PER_TOKEN}
        for piece in pieces:
            for place, position in enumerate(piece):
                token = self.tokens[position]
                label = self.target(position) if form == "shifted" else token if place else None
                values = (token, -100 if label is None else label, place, self.document[position], label is not None)
                for name, value in zip(PER_TOKEN, values, strict=True):
                    row[name].append(value)
        for place in range(seq_len - len(row["labels"])):
            for name, value in zip(PER_TOKEN, (0, -100, place, -1, False), strict=True):
                row[name].append(value)
        return row

    def wrapped(self, number: int, seq_len: int) -> list[list[int]]:
        begin = self.first + number * seq_len
        positions = range(begin, min(begin + seq_len, self.stop))
        return [list(piece) for _, piece in itertools.groupby(positions, key=lambda one: self.document[one])]


def seen_positions(plain: Plain, batch: dict[str, Any], row: int) -> list[list[int]]:
    """The pieces of a best-fit row, as what it says of its documents and tokens tells it."""
    pieces: list[list[int]] = []
    for token, place, document in zip(
        *(batch[name][row].tolist() for name in ("input_ids", "position_ids", "document_ids")), strict=True
    ):
        if document < 0:
            continue
        if place == 0:
            mine = [p for p in range(plain.first, plain.stop) if plain.document[p] == document]
            start = next(p for p in mine if plain.tokens[p] == token)
            pieces.append([])
        pieces[-1].append(start + place)
    return pieces


def check_cu_seqlens(batch: dict[str, Any]) -> None:
    """They begin where positions begin anew, and end with the batch."""
    flat = batch["position_ids"].reshape(-1)
    begins = np.flatnonzero(flat == 0)
    assert batch["cu_seqlens"].dtype == np.int32
    np.testing.assert_array_equal(batch["cu_seqlens"], [*begins, len(flat)])
    assert batch["max_seqlen"] == np.diff(batch["cu_seqlens"]).max()


# ---- what a row says ----


@given(data=st.data(), shards=shard_lengths, seq_len=st.integers(1, 30), strategy=strategies, form=forms, way=ways)
@settings(max_examples=100, deadline=None)
def test_rows_are_what_a_plain_loop_makes(
    fresh: Iterator[Path], data: st.DataObject, shards: list[list[int]], seq_len: int, strategy: Any, form: Any,
    way: Any,
) -> None:  # fmt: skip
    """Tokens, labels, positions, documents and mask of both strategies and forms; each token is in exactly one row."""
    store = write_store(next(fresh), shards)
    first = data.draw(st.integers(0, store.tokens - 1))
    stop = data.draw(st.integers(first + 1, store.tokens))
    part = _Stretch(store, first, stop)
    pad_last = strategy == "wrapped"
    rows = part.packed(
        seq_len, strategy=strategy, form=form, pad_last=pad_last, buffer=data.draw(st.integers(1, 9)), read=way
    )
    plain = Plain(store, first, stop)
    numbers = np.array(data.draw(st.permutations(range(len(rows)))))
    batch = rows.read(numbers)
    seen: list[int] = []
    for place, number in enumerate(numbers.tolist()):
        pieces = plain.wrapped(number, seq_len) if pad_last else seen_positions(plain, batch, place)
        expected = plain.row(pieces, seq_len, form)
        for name in PER_TOKEN:
            assert batch[name][place].tolist() == expected[name], name
        seen += itertools.chain(*pieces)
    assert sorted(seen) == list(range(first, stop))
    check_cu_seqlens(batch)


class _Stretch(Trainable):
    """Any stretch of a store."""

    def __init__(self, store: Store, first: int, stop: int) -> None:
        self._made_from = (store, first, stop)

    def stream(self) -> TokenStream:
        store, first, stop = self._made_from
        return store.stream().part(first, stop)


def test_a_row_reads_as_the_documentation_says(tmp_path: Path) -> None:
    """Documents of 3, 6 and 2 tokens in rows of 4, in both forms."""
    store = write_store(tmp_path / "s", [[3, 6, 2]])  # 1 2 0 | 4 5 6 7 8 0 | 10 0
    shifted = store.packed(4, pad_last=True).read(np.arange(3))
    assert shifted["input_ids"].tolist() == [[1, 2, 0, 4], [5, 6, 7, 8], [0, 10, 0, 0]]
    assert shifted["labels"].tolist() == [[2, 0, -100, 5], [6, 7, 8, 0], [-100, 0, -100, -100]]
    assert shifted["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 0, 1, 0]]
    assert shifted["document_ids"].tolist() == [[0, 0, 0, 1], [1, 1, 1, 1], [1, 2, 2, -1]]
    assert shifted["cu_seqlens"].tolist() == [0, 3, 4, 8, 9, 11, 12]
    assert shifted["max_seqlen"] == 4
    hf = store.packed(4, form="hf").read(np.arange(2))
    assert hf["labels"].tolist() == [[-100, 2, 0, -100], [-100, 6, 7, 8]]
    assert hf["loss_mask"].tolist() == [[False, True, True, False], [False, True, True, True]]


def test_one_row_is_a_batch_of_one_without_its_dimension_and_what_is_of_a_batch(tmp_path: Path) -> None:
    """`rows[k]`, also from the end; beyond it there is none."""
    rows = write_store(tmp_path / "s", [[3, 6, 2], [9]]).packed(5)
    row = rows[-1]
    assert row["input_ids"].shape == (5,)
    assert row["input_ids"].tolist() == rows.read(np.array([3]))["input_ids"][0].tolist()
    assert row.keys() == rows.read(np.array([3])).keys() - {"cu_seqlens", "max_seqlen"}
    with pytest.raises(IndexError, match="sample 4 of 4"):
        rows[4]


@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_batch_is_written_into_the_one_given(tmp_path: Path, strategy: Any, dtype: Any) -> None:
    """The arrays of fixed shape are used again; a shorter batch takes their first rows."""
    rows = write_store(tmp_path / "s", [[3, 6, 2, 7], [9, 4, 4]]).packed(5, strategy=strategy)
    out = rows.read(np.arange(4), dtype)
    batch = rows.read(np.array([5, 2, 3]), dtype, out)
    expected = rows.read(np.array([5, 2, 3]))
    for name in PER_TOKEN:
        assert np.shares_memory(batch[name], out[name])
        np.testing.assert_array_equal(batch[name], expected[name])
    assert batch["labels"].dtype == batch["position_ids"].dtype == dtype
    np.testing.assert_array_equal(batch["cu_seqlens"], expected["cu_seqlens"])


def test_a_dtype_that_holds_no_labels_is_refused(tmp_path: Path) -> None:
    """-100 is no unsigned number, and tokens do not fit in 16 bits."""
    with pytest.raises(ConfigError, match="need int32 or int64"):
        write_store(tmp_path / "s", [[9]]).packed(4).read(np.array([0]), np.uint16)


def test_wrapped_rows_leave_out_or_pad_the_tail(tmp_path: Path) -> None:
    """Without pad_last the tokens that fill no row are not delivered; too few for one row is an error."""
    store = write_store(tmp_path / "s", [[4, 3], [4]])
    assert len(store.packed(4)) == 2
    assert len(store.packed(4, pad_last=True)) == 3
    assert len(store.packed(20, pad_last=True)) == 1
    with pytest.raises(ConfigError, match="11 tokens are too few for one row of seq_len=20"):
        store.packed(20)


def test_documents_of_several_sequences_are_one(tmp_path: Path) -> None:
    """An index as Megatron writes it, a sequence a sentence, gives documents, not sentences; empty ones are skipped."""
    store = write_store(tmp_path / "s", [[5, 4, 3], [2, 6]])
    lengths = np.array([2, 3, 0, 4, 1, 2], "<i4")
    documents = np.array([0, 2, 2, 4, 6], "<i8")  # of 5, 0, 4 and 3 tokens
    offsets = (np.cumsum(lengths) - lengths).astype("<i8") * 2
    head = HEADER.pack(MAGIC, 1, 8, len(lengths), len(documents))
    shard_file(store.path, 0, "idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + documents.tobytes())
    found = Documents(store.stream()).find(np.arange(20))
    assert found.tolist() == [0] * 5 + [2] * 4 + [3] * 3 + [4] * 2 + [5] * 6
    assert store.packed(20)[0]["position_ids"].tolist() == [*range(5), *range(4), *range(3), *range(2), *range(6)]
    assert store.packed(20, strategy="best_fit")[0]["document_ids"].tolist() == found.tolist()


def test_long_documents_read_the_same_in_both_ways(tmp_path: Path) -> None:
    """Pieces of some hundred tokens are copied in another manner than short ones."""
    store = write_store(tmp_path / "s", [[300, 170, 90], [700, 5, 256, 513]])
    mapped, positioned = (store.packed(256, strategy="best_fit", read=way) for way in ("map", "pread"))
    numbers = np.arange(len(mapped))[::-1]
    found, expected = mapped.read(numbers), positioned.read(numbers)
    for name in PER_TOKEN:
        np.testing.assert_array_equal(found[name], expected[name])
    own = found["document_ids"] >= 0
    assert sorted(found["input_ids"][own].tolist()) == sorted(flat_tokens(store).tolist())


# ---- rules and errors ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len: 0; use 1 or more"),
        ({"strategy": "best"}, 'strategy: "best"; use wrapped or best_fit'),
        ({"form": "xy"}, 'form: "xy"; use shifted or hf'),
        ({"strategy": "best_fit", "buffer": 0}, "buffer: 0; use 1 or more"),
        ({"strategy": "best_fit", "pad_last": True}, "best_fit pads every row"),
    ],
)
def test_wrong_rules_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    """Each with what may be used instead."""
    with pytest.raises(ConfigError, match=message):
        write_store(tmp_path / "s", [[9]]).packed(**{"seq_len": 4} | options)


class _Bare(Trainable):
    """Files whose documents are not known."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def stream(self) -> TokenStream:
        stream = self._store.stream()
        return replace(stream, files=tuple(replace(file, index=None) for file in stream.files))


@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
def test_data_without_documents_can_not_be_packed(tmp_path: Path, strategy: Any) -> None:
    """The error says what can be used instead."""
    bare = _Bare(write_store(tmp_path / "s", [[9]]))
    with pytest.raises(ConfigError, match=r"documents begin and end is not known .* windows\(\)"):
        bare.packed(4, strategy=strategy)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "can't be read as an index"),
        (lambda path: path.write_bytes(b""), "0 bytes are not an index"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "Make it again"),
        (
            lambda path: path.write_bytes(shard_file(path.parent, 1, "idx").read_bytes()),
            "documents end at byte 18",
        ),
    ],
)
def test_a_damaged_document_index_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    """Whatever is wrong with an index file, the error says which one it is."""
    store = write_store(tmp_path / "s", [[4, 3], [9]])
    damage(shard_file(store.path, 0, "idx"))
    with pytest.raises(StoreError, match=rf"train-\w+.idx: .*{message}"):
        store.packed(4)[0]


# ---- the file of rows ----


@given(shards=shard_lengths, data=st.data())
@settings(max_examples=20, deadline=None)
def test_documents_of_a_part_are_cut_by_its_edges(
    fresh: Iterator[Path], shards: list[list[int]], data: st.DataObject
) -> None:
    """Lengths add up to the part, and are those of the documents in it."""
    store = write_store(next(fresh), shards)
    first = data.draw(st.integers(0, store.tokens - 1))
    stop = data.draw(st.integers(first + 1, store.tokens))
    plain = Plain(store, first, stop)
    expected = [len(list(same)) for _, same in itertools.groupby(plain.document[first:stop])]
    found = [length for lengths in document_lengths(store.stream().part(first, stop)) for length in lengths.tolist()]
    assert found == expected


def count_builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seq_len of every index that is made from here on."""
    made: list[int] = []
    rows = RowSource.rows

    def counted(source: RowSource) -> Any:
        made.append(source.seq_len)
        return rows(source)

    monkeypatch.setattr(RowSource, "rows", counted)
    return made


def test_rows_are_made_once_and_kept_in_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second time they are mapped; other settings have files of their own; the log says what is done."""
    made = count_builds(monkeypatch)
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])
    with caplog.at_level(logging.INFO, "milldam"):
        first = store.packed(6, strategy="best_fit").read(np.arange(3))
    assert "making the best-fit rows of 6 tokens" in caplog.text
    assert "3 rows, 100.00 % full" in caplog.text
    again = Store(store.path).packed(6, strategy="best_fit").read(np.arange(3))
    np.testing.assert_array_equal(first["input_ids"], again["input_ids"])
    assert made == [6]
    store.packed(7, strategy="best_fit")
    store.packed(6, strategy="best_fit", buffer=2)
    store.split(train=0.5, val=...)["val"].packed(6, strategy="best_fit")
    assert made == [6, 7, 6, 6]
    assert len(list((store.path / "rows").glob("*.rows"))) == 4


def test_rows_are_made_anew_when_the_store_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other documents, in the same folder: the outdated file is replaced."""
    made = count_builds(monkeypatch)
    write_store(tmp_path / "s", [[4, 3], [9, 2]]).packed(6, strategy="best_fit")
    changed = write_store(tmp_path / "s", [[3, 4], [9, 2]])
    rows = changed.packed(6, strategy="best_fit")
    assert made == [6, 6]
    assert sum(rows[k]["document_ids"].tolist().count(0) for k in range(len(rows))) == 3
    assert len(list((changed.path / "rows").glob("*.rows"))) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-4],
        lambda data: data + b"\0\0\0\0",
        lambda data: data[:10],
        lambda data: b"",
        lambda data: b"X" + data[1:],
        lambda data: data[:8] + b"\2" + data[9:],
        lambda data: data[:-8] + b"\1" + data[-7:],
        lambda data: data[:18] + bytes(8) + data[26:],
    ],
)
def test_a_damaged_file_of_rows_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Cut short, longer, of another version, or with a head or an end that makes no sense."""
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])
    expected = store.packed(6, strategy="best_fit").read(np.arange(3))["input_ids"].copy()
    (path,) = (store.path / "rows").glob("*.rows")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(damage(whole))
    made = count_builds(monkeypatch)
    found = store.packed(6, strategy="best_fit").read(np.arange(3))["input_ids"]
    np.testing.assert_array_equal(found, expected)
    assert made == [6]
    assert path.read_bytes() == whole


def test_rows_that_can_not_be_are_refused(tmp_path: Path) -> None:
    """What is damaged behind the head shows when it is read, and never as tokens of other documents."""
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])
    rows = store.packed(6, strategy="best_fit")
    (path,) = (store.path / "rows").glob("*.rows")
    damaged = bytearray(path.read_bytes())
    damaged[HEADER.size] += 3
    path.unlink()
    path.write_bytes(damaged)
    rows = store.packed(6, strategy="best_fit")
    with pytest.raises(StoreError, match=r"\.rows: is damaged. Remove it"):
        rows.read(np.arange(len(rows)))


def test_a_store_that_can_not_be_written_keeps_its_rows_with_the_user(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's cache folder is used, and found again; two stores do not mix there."""
    made = count_builds(monkeypatch)
    stores = [write_store(tmp_path / name, [[4, 3], [9, 2]]) for name in "ab"]
    for store in stores:
        # Not even root can make a folder where a file is.
        (store.path / "rows").write_bytes(b"")
        store.packed(6, strategy="best_fit")
        store.packed(6, strategy="best_fit")
    assert made == [6, 6]
    assert len(list(user_cache.glob("*.rows"))) == 2


def test_data_without_a_cache_folder_uses_the_users(tmp_path: Path, user_cache: Path) -> None:
    """So foreign files can be packed too, when their documents are known."""

    class NoCache(_Bare):
        def stream(self) -> TokenStream:
            return replace(self._store.stream(), cache=None)

    NoCache(write_store(tmp_path / "s", [[9]])).packed(6, strategy="best_fit")
    assert len(list(user_cache.glob("*.rows"))) == 1


def test_no_place_for_rows_is_an_error_that_says_so(tmp_path: Path, user_cache: Path) -> None:
    """Both folders are named, and what to do."""
    store = write_store(tmp_path / "s", [[9]])
    (store.path / "rows").write_bytes(b"")
    user_cache.parent.mkdir(parents=True)
    user_cache.write_bytes(b"")
    with pytest.raises(ResourceError, match=r"s/rows, .*user/milldam/rows. Set XDG_CACHE_HOME"):
        store.packed(6, strategy="best_fit")


def test_a_lock_that_can_not_be_made_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no locks."""
    import filelock

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert len(write_store(tmp_path / "s", [[4, 3], [9, 2]]).packed(6, strategy="best_fit")) == 3


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is said to be one, and the next try begins anew."""
    store = write_store(tmp_path / "s", [[4, 3], [9, 2]])

    def full(self: NewFile) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "commit", full)
        with pytest.raises(ResourceError, match="disk is full"):
            store.packed(6, strategy="best_fit")
    assert [path.suffix for path in (store.path / "rows").iterdir()] in ([], [".lock"])
    assert len(store.packed(6, strategy="best_fit")) == 3


def test_processes_that_start_together_make_the_rows_once(tmp_path: Path) -> None:
    """As the ranks of a training run do."""
    store = write_store(tmp_path / "s", [[7, 3, 5] * 500])
    code = (
        "import logging, sys; logging.basicConfig(level='INFO'); from milldam.loader.stores import Store;"
        "print(len(Store(sys.argv[1]).packed(8, strategy='best_fit', buffer=10)))"
    )
    command = [sys.executable, "-c", code, str(store.path)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [rank.communicate(timeout=60) for rank in ranks]
    assert len({out for out, _ in results}) == 1
    assert sum(log.count("making the best-fit rows") for _, log in results) == 1


# ---- batches, states, pickles ----


@given(
    shards=shard_lengths, seq_len=st.integers(1, 12), strategy=strategies, way=ways, batch_size=st.integers(1, 5),
    shuffle=st.sampled_from([True, False, "block"]), world_size=st.integers(1, 3), copy=st.booleans(),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_batches_deliver_each_row_once(
    fresh: Iterator[Path], shards: list[list[int]], seq_len: int, strategy: Any, way: Any, batch_size: int,
    shuffle: Any, world_size: int, copy: bool,
) -> None:  # fmt: skip
    """Over all ranks and in any order, a row comes exactly once an epoch, and as it is."""
    store = write_store(next(fresh), shards)
    options = {"pad_last": True} if strategy == "wrapped" else {}
    rows = store.packed(seq_len, strategy=strategy, read=way, **options)
    expected = rows.read(np.arange(len(rows)))
    delivered: list[str] = []
    for rank in range(world_size):
        loader = rows.batches(batch_size, shuffle=shuffle, seed=3, rank=rank, world_size=world_size, copy=copy)
        for batch in loader:
            check_cu_seqlens(batch)
            delivered += [_row_as_text(batch, row) for row in range(len(batch["labels"]))]
    assert sorted(delivered) == sorted(_row_as_text(expected, row) for row in range(len(rows)))


def _row_as_text(batch: dict[str, Any], row: int) -> str:
    return json.dumps([batch[name][row].tolist() for name in PER_TOKEN])


@given(
    shards=shard_lengths, seq_len=st.integers(1, 30), strategy=strategies, form=forms, way=ways,
    batch_size=st.integers(1, 5), together=st.sampled_from([1, 7, 40, 1 << 16]), copy=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_batches_are_the_rows_of_their_order_read_one_by_one(
    fresh: Iterator[Path], shards: list[list[int]], seq_len: int, strategy: Any, form: Any, way: Any,
    batch_size: int, together: int, copy: bool,
) -> None:  # fmt: skip
    """However many pieces are looked up together, a batch has what single rows have, and the order is the same."""
    store = write_store(next(fresh), shards)
    options = {"pad_last": True} if strategy == "wrapped" else {}
    rows = store.packed(seq_len, strategy=strategy, form=form, read=way, **options)
    numbers = rows._order(True, 3).numbers(np.arange(2 * len(rows))).tolist()
    expected = [{name: array.tolist() for name, array in rows[number].items()} for number in numbers]
    found: list[dict[str, Any]] = []
    with patch.object(RowFinder, "pieces_at_once", together):
        for batch in rows.batches(batch_size, seed=3, epochs=2, copy=copy):
            check_cu_seqlens(batch)
            found += [{name: batch[name][row].tolist() for name in PER_TOKEN} for row in range(len(batch["labels"]))]
    assert found == expected


@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
def test_stretches_are_announced_as_what_their_rows_are_made_of(tmp_path: Path, strategy: Any) -> None:
    """All tokens of the rows in a stretch are covered by its spans."""
    rows = write_store(tmp_path / "s", [[4, 3, 8], [9, 2, 5]]).packed(6, strategy=strategy, form="hf")

    def covered(starts: Any, lengths: Any) -> set[int]:
        return {p for start, length in zip(starts, lengths, strict=True) for p in range(start, start + length)}

    stretches = Stretches(np.array([3, 0]), np.array([1, 2]))
    numbers = np.array([3, 0, 1])
    assert covered(*rows._lie(stretches)) == covered(*rows._lie(Stretches.single(numbers)))
    assert len(covered(*rows._lie(stretches))) == int((rows.read(numbers)["document_ids"] >= 0).sum())


@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
def test_rows_pickle_as_what_they_were_made_from(tmp_path: Path, strategy: Any) -> None:
    """Small, and with the same samples."""
    store = write_store(tmp_path / "s", [[7, 3, 5] * 500])
    rows = store.split(train=0.5, val=...)["val"].packed(8, strategy=strategy, read="pread", form="hf")
    rows[0]
    pickled = pickle.dumps(rows)
    again: PackedRows = pickle.loads(pickled)
    assert len(pickled) < 1000
    assert again.identity == rows.identity
    np.testing.assert_array_equal(again[3]["labels"], rows[3]["labels"])
    assert strategy in repr(again)


def test_a_state_of_other_rows_is_refused(tmp_path: Path) -> None:
    """Strategy, buffer and padding decide which row has which number."""
    store = write_store(tmp_path / "s", [[7, 3, 5] * 50])
    kinds = [
        RowRules(seq_len=8),
        RowRules(seq_len=8, pad_last=True),
        RowRules(seq_len=8, strategy="best_fit"),
        RowRules(seq_len=8, strategy="best_fit", buffer=4),
    ]
    states = [PackedRows(store, rules).batches(2).state_dict() for rules in kinds]
    for one, other in itertools.permutations(range(len(kinds)), 2):
        with pytest.raises(MismatchError, match="another loader's"):
            PackedRows(store, kinds[one]).batches(2).load_state_dict(states[other])


def test_wrapped_rows_make_no_file(tmp_path: Path) -> None:
    """Where their documents begin is found when they are read."""
    store = write_store(tmp_path / "s", [[7, 3, 5]])
    store.packed(4)[0]
    assert not (store.path / "rows").exists()
