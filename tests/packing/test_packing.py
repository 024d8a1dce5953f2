"""Packing: every token in exactly one row, in rows of exactly one length, with the boundaries kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.jobs import run_apart
from tests.kit.token_stores import shard_file

import milldam
from milldam.errors import ConfigError, MismatchError, ResourceError
from milldam.loader.boundaries import document_lengths
from milldam.loader.reading import Way, open_reader
from milldam.packing import rows as writing
from milldam.packing.best_fit import Cutter, Rows, best_fit_rows, wrapped_rows
from milldam.packing.boundaries import read_boundaries
from milldam.packing.rows import Packed, pack, plan_rows, write_rows
from milldam.rules import PackingRules
from milldam.stores.tokens.format import Index
from milldam.stores.tokens.manifest import Manifest, Shard
from milldam.stores.tokens.reader import Store, open_store
from milldam.stores.tokens.writer import ShardWriter, Tokens
from milldam.stores.verify import verify

WRAPPED, PADDED, BEST_FIT = PackingRules(), PackingRules(pad_last=True), PackingRules(strategy="best_fit")
PAD = 65_000

lengths_lists = st.lists(st.integers(1, 40), max_size=80)
# Lengths of documents by shard, by split.
split_lengths = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=12), min_size=1, max_size=4)


def make_store(folder: Path, shards: dict[str, list[list[int]]]) -> Store:
    """A store whose tokens count up from 0 through each split, so that a token says where it came from."""
    folder.mkdir(parents=True)
    made = [one for split, lengths in shards.items() for one in _write_split(folder, split, lengths)]
    (folder / "tokenizer.json").write_bytes(b"{}")
    tokenizer = {"name": "t", "xxh3": xxhash.xxh3_128(b"{}").hexdigest(), "eos": 7, "bos": None}
    given_input = {"files": 1, "bytes": 1, "fingerprint": ""}
    Manifest("uint16", 2**16, tokenizer, "test", {}, given_input, tuple(made)).write(folder)
    return open_store(folder)


def _write_split(folder: Path, split: str, shards: list[list[int]]) -> Iterator[Shard]:
    position = 0
    for lengths in shards:
        with ShardWriter(folder, split, "uint16") as writer:
            flat = np.arange(position, position + sum(lengths)) % PAD
            writer.append(Tokens(flat.astype(np.uint16), np.array(lengths, np.int64)))
            yield writer.commit()
        position += sum(lengths)


def pack_lengths(lengths: list[int], row: int, *, strategy: str, chunk: int = 7, buffer: int = 5) -> list[Rows]:
    """Rows from lengths that come a few at a time."""
    documents = (np.array(lengths[k : k + chunk], np.int64) for k in range(0, len(lengths), chunk))
    cut = Cutter(row, wrapped=strategy == "wrapped")(documents)
    if strategy == "wrapped":
        return list(wrapped_rows(cut, row, pad_last=True))
    return list(best_fit_rows(cut, row, buffer=buffer))


def as_lists(several: list[Rows]) -> list[list[tuple[int, int]]]:
    """Every row as its (start, length) pairs."""
    found = []
    for rows in several:
        ends = np.cumsum(rows.counts).tolist()
        pairs = list(zip(rows.pieces.starts.tolist(), rows.pieces.lengths.tolist(), strict=True))
        found += [pairs[end - count : end] for end, count in zip(ends, rows.counts.tolist(), strict=True)]
    return found


def positions(rows: list[list[tuple[int, int]]]) -> list[int]:
    return sorted(p for row in rows for start, length in row for p in range(start, start + length))


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# ---- where pieces go ----


@given(lengths=lengths_lists, row=st.integers(1, 30), strategy=st.sampled_from(["wrapped", "best_fit"]))
def test_every_token_is_in_exactly_one_row(lengths: list[int], row: int, strategy: str) -> None:
    """No token is lost, none is there twice, and no row holds more than it can."""
    rows = as_lists(pack_lengths(lengths, row, strategy=strategy))
    assert positions(rows) == list(range(sum(lengths)))
    assert all(0 < sum(length for _, length in one) <= row for one in rows)


@given(lengths=lengths_lists, row=st.integers(1, 30))
def test_wrapped_rows_are_the_stream_cut_at_every_row(lengths: list[int], row: int) -> None:
    """Row k holds tokens [k * row, (k + 1) * row), and a piece ends where a document or a row does."""
    rows = as_lists(pack_lengths(lengths, row, strategy="wrapped"))
    ends = set(np.cumsum(lengths).tolist()) | set(range(0, sum(lengths) + row, row))
    for number, one in enumerate(rows):
        assert one[0][0] == number * row
        assert all(start + length in ends for start, length in one)
    assert sum(len(one) for one in rows) == len({end for end in ends if 0 < end <= sum(lengths)} | {sum(lengths)} - {0})


@given(lengths=lengths_lists, row=st.integers(1, 30), buffer=st.integers(1, 50))
def test_best_fit_cuts_only_what_is_longer_than_a_row(lengths: list[int], row: int, buffer: int) -> None:
    """Every piece is a whole document, or a full row of a longer one, or its remainder."""
    found = sorted(p for one in as_lists(pack_lengths(lengths, row, strategy="best_fit", buffer=buffer)) for p in one)
    starts = np.cumsum([0, *lengths]).tolist()
    expected = [
        (start + at, min(row, length - at))
        for start, length in zip(starts[:-1], lengths, strict=True)
        for at in range(0, length, row)
    ]
    assert found == expected


@given(lengths=lengths_lists, row=st.integers(1, 30), chunks=st.tuples(st.integers(1, 100), st.integers(1, 100)))
@pytest.mark.parametrize("strategy", ["wrapped", "best_fit"])
def test_rows_do_not_depend_on_how_lengths_are_read(
    lengths: list[int], row: int, chunks: tuple[int, int], strategy: str
) -> None:
    """The size of chunks is a matter of memory alone."""
    one, other = (pack_lengths(lengths, row, strategy=strategy, chunk=chunk) for chunk in chunks)
    assert as_lists(one) == as_lists(other)


@given(lengths=st.lists(st.integers(1, 30), max_size=60), row=st.integers(1, 30))
def test_best_fit_decreasing_is_what_its_name_says(lengths: list[int], row: int) -> None:
    """With a buffer that holds everything: as full as when every piece is put where least stays free."""
    found = as_lists(pack_lengths(lengths, row, strategy="best_fit", buffer=10_000))
    cut = [min(row, length - at) for length in lengths for at in range(0, length, row)]
    free: list[int] = []
    for length in sorted(cut, reverse=True):
        fitting = [room for room in free if room >= length]
        if fitting:
            free.remove(min(fitting))
        free.append((min(fitting) if fitting else row) - length)
    assert sorted(row - sum(length for _, length in one) for one in found) == sorted(free)


def test_best_fit_rows_keep_store_order() -> None:
    """Rows come by their first document, and documents in a row as they came."""
    rows = as_lists(pack_lengths([3, 9, 6, 1, 7, 4], 10, strategy="best_fit", buffer=100))
    assert rows == [[(0, 3), (19, 7)], [(3, 9), (18, 1)], [(12, 6), (26, 4)]]


def test_best_fit_fills_rows_far_longer_than_its_buffer() -> None:
    """Rows stay open from one buffer to the next: short documents fill long rows even when few are held."""
    rows = as_lists(pack_lengths([3] * 1000, 1000, strategy="best_fit", buffer=10))
    assert [len(one) for one in rows] == [333, 333, 333, 1]


def test_best_fit_holds_a_bounded_number_of_rows() -> None:
    """Rows that nothing fits into are handed on while the input is still read."""
    read = 0

    def documents() -> Iterator[np.ndarray]:
        nonlocal read
        for _ in range(100):
            read += 1000
            yield np.full(1000, 60, np.int64)

    cut = Cutter(100, wrapped=False)(documents())
    handed = 0
    for rows in best_fit_rows(cut, 100, buffer=1000):
        handed += len(rows)
        assert read - handed <= 1000 + 125
    assert handed == 100_000


def test_a_giant_document_is_cut_in_bounded_memory() -> None:
    """Ten billion tokens in one document make millions of rows, some thousands at a time."""
    cut = Cutter(4096, wrapped=False)
    largest, count = 0, 0
    for rows in best_fit_rows(cut(iter([np.array([10**10], np.int64)])), 4096, buffer=10_000):
        largest, count = max(largest, len(rows)), count + len(rows)
    assert count == -(-(10**10) // 4096)
    assert largest <= 10_000 + 1024
    assert cut.cut_documents == 1


# ---- figures ----


def test_figures_of_wrapped_rows(tmp_path: Path) -> None:
    """The tail is reported, or padded; documents that a row's end divides are counted."""
    store = make_store(tmp_path / "s", {"train": [[3, 5], [4, 1]]})  # 13 tokens
    assert plan_rows(store.path, "train", WRAPPED, 5) == Packed("wrapped", 5, 2, 10, 0, 3, 2)
    assert plan_rows(store.path, "train", PADDED, 5) == Packed("wrapped", 5, 3, 13, 2, 0, 2)
    assert plan_rows(store.path, "train", PADDED, 5).as_dict()["efficiency"] == round(13 / 15, 6)


def test_figures_of_best_fit_rows(tmp_path: Path) -> None:
    """No tail; padding, efficiency and cut documents are counted."""
    store = make_store(tmp_path / "s", {"train": [[3, 12], [4, 1]]})  # pieces 3, 5, 5, 2, 4, 1
    packed = plan_rows(store.path, "train", BEST_FIT, 5)
    assert packed == Packed("best_fit", 5, 4, 20, 0, 0, 1)
    assert packed.efficiency == 1.0


def test_figures_of_every_split(tmp_path: Path) -> None:
    """`pack` without a folder writes nothing and tells the same as with one."""
    store = make_store(tmp_path / "s", {"train": [[3, 5], [4, 1]], "val": [[2]]})
    told = pack(store.path, PADDED, 4, None)
    assert list(told) == ["train", "val"]
    assert told["val"]["rows"] == 1 and told["val"]["padding"] == 2
    assert not (tmp_path / "rows").exists()
    assert pack(store.path, PADDED, 4, tmp_path / "rows") == told
    assert open_store(tmp_path / "rows", split="val")[0].tolist() == [0, 1, 7, 7], "padded with EOS"


def test_a_wrong_row_is_refused(tmp_path: Path) -> None:
    """A length, buffer or pad id that can't be is an error before anything is written."""
    store = make_store(tmp_path / "s", {"train": [[3]]})
    with pytest.raises(ConfigError, match="seq_len: 0"):
        plan_rows(store.path, "train", WRAPPED, 0)
    with pytest.raises(ConfigError, match="buffer: 0"):
        plan_rows(store.path, "train", PackingRules(strategy="best_fit", buffer=0), 4)
    with pytest.raises(ConfigError, match="pad id 65,536 is outside"):
        write_rows(store.path, tmp_path / "rows", WRAPPED, seq_len=4, pad_id=65_536)
    assert not (tmp_path / "rows").exists()


# ---- rows on disk ----


@settings(max_examples=25)
@given(
    train=split_lengths,
    val=split_lengths,
    row=st.integers(1, 25),
    rules=st.sampled_from([WRAPPED, PADDED, BEST_FIT, PackingRules(strategy="best_fit", buffer=3)]),
    shard_rows=st.integers(1, 9),
)
def test_written_rows_hold_every_token_once(
    tmp_path_factory: pytest.TempPathFactory,
    train: list[list[int]],
    val: list[list[int]],
    row: int,
    rules: PackingRules,
    shard_rows: int,
) -> None:
    """Rows of exactly `row` tokens, padding last, all tokens of each split once, whatever the shards; a whole store."""
    folder = tmp_path_factory.mktemp("rows")
    store = make_store(folder / "s", {"train": train, "val": val})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "SHARD_BYTES", shard_rows * row * 2)
        patch.setattr(writing, "_BATCH_TOKENS", 4 * row)
        packed = write_rows(store.path, folder / "packed", rules, seq_len=row, pad_id=PAD)
    assert list(verify(folder / "packed")) == []
    for split, lengths in (("train", train), ("val", val)):
        assert packed[split] == plan_rows(store.path, split, rules, row)
        shards = [s for s in open_store(folder / "packed").manifest.shards if s.split == split]
        assert all(s.documents <= shard_rows for s in shards)
        files = [np.fromfile(folder / "packed" / f"{s.name}.bin", np.uint16).reshape(-1, row) for s in shards]
        rows = np.concatenate([*files, np.empty((0, row), np.uint16)])
        assert len(rows) == packed[split].rows
        is_padding = rows == PAD
        assert is_padding.sum() == packed[split].padding
        assert not (is_padding[:, :-1] & ~is_padding[:, 1:]).any(), "padding comes last"
        total = sum(map(sum, lengths))
        assert np.sort(rows[~is_padding]).tolist() == list(range(total - packed[split].tail))


@pytest.mark.parametrize("rules", [PADDED, BEST_FIT])
def test_pieces_of_a_row_are_its_sequences(tmp_path: Path, rules: PackingRules) -> None:
    """In the index a document is a row, its sequences the pieces of documents, padding one of its own."""
    lengths = [3, 9, 6, 1, 7, 4, 2]
    store = make_store(tmp_path / "s", {"train": [lengths[:3], lengths[3:]]})
    write_rows(store.path, tmp_path / "rows", rules, seq_len=10, pad_id=PAD)
    index = Index.map(shard_file(tmp_path / "rows", 0, "idx"))
    tokens = np.fromfile(shard_file(tmp_path / "rows", 0, "bin"), np.uint16)
    ends = set(np.cumsum(lengths).tolist())
    assert index.documents[-1] == len(index.lengths)
    for offset, length in zip(index.offsets.tolist(), index.lengths.tolist(), strict=True):
        piece = tokens[offset // 2 : offset // 2 + length].astype(int)
        if piece[0] != PAD:
            assert (np.diff(piece) == 1).all()
            assert not ends & set(piece[1:].tolist()), "no document begins inside a piece"
        else:
            assert (piece == PAD).all() and (offset // 2 + length) % 10 == 0
    if rules is BEST_FIT:
        assert index.lengths.tolist() == [3, 7, 9, 1, 6, 4, 2, 8]
        assert index.documents.tolist() == [0, 2, 4, 6, 8]


def test_boundaries_follow_from_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Position ids begin anew with every piece; cu_seqlens are the ends of pieces; rows may lie in several shards."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 40)
    store = make_store(tmp_path / "s", {"train": [[3, 9, 6, 1, 7, 4, 2]], "val": [[5]]})
    write_rows(store.path, tmp_path / "rows", BEST_FIT, seq_len=10, pad_id=PAD)
    rows = open_store(tmp_path / "rows", split="train")
    assert len(rows.manifest.shards) == 3
    found = read_boundaries(rows, 1, 4)
    assert found.cu_seqlens.tolist() == [0, 9, 10, 16, 20, 22, 30]
    assert found.position_ids.tolist() == [[*range(9), 0], [*range(6), *range(4)], [0, 1, *range(8)]]
    assert found.counts.tolist() == [2, 2, 2]
    with pytest.raises(IndexError, match="of a store of 4 rows"):
        read_boundaries(rows, 4, 9)


@pytest.mark.parametrize("longest", [20, 300])
@pytest.mark.parametrize("way", ["map", "pread"])
def test_rows_are_the_same_however_tokens_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, longest: int
) -> None:
    """Short pieces and long ones, from mapped files and from files that are larger than memory."""
    rng = np.random.default_rng(1)
    store = make_store(tmp_path / "s", {"train": [rng.integers(1, longest, 90).tolist() for _ in range(3)]})
    monkeypatch.setattr(writing, "open_reader", lambda stream: open_reader(stream, way))
    write_rows(store.path, tmp_path / "rows", BEST_FIT, seq_len=256, pad_id=PAD)
    rows, index = open_store(tmp_path / "rows"), Index.map(shard_file(tmp_path / "rows", 0, "idx"))
    flat = np.concatenate(list(rows))
    for offset, length in zip((index.offsets // 2).tolist(), index.lengths.tolist(), strict=True):
        piece = flat[offset : offset + length].astype(int)
        assert (piece == PAD).all() or (np.diff(piece) == 1).all()


# ---- never stale, never half ----


def test_rows_are_written_once(tmp_path: Path) -> None:
    """Rows that are there already are left alone; other rules or another source make them anew."""
    source = {"train": [[3, 5], [4, 1]]}
    store, rows = make_store(tmp_path / "s", source), tmp_path / "rows"

    def write(store: Store, rules: PackingRules = WRAPPED, row: int = 4, pad: int = 7) -> bool:
        """Whether it was written anew."""
        before = (rows / "milldam.json").stat().st_mtime_ns if (rows / "milldam.json").exists() else None
        told = write_rows(store.path, rows, rules, seq_len=row, pad_id=pad)
        assert told["train"] == plan_rows(store.path, "train", rules, row)
        return (rows / "milldam.json").stat().st_mtime_ns != before

    assert write(store)
    assert not write(store)
    assert not write(store, PackingRules(buffer=3, write=True)), "what wrapped does not look at"
    assert write(store, PADDED)
    assert write(store, PADDED, row=3)
    assert write(store, PADDED, row=3, pad=8)
    assert write(store, BEST_FIT, row=3, pad=8)
    assert write(make_store(tmp_path / "t", {"train": [[3, 5], [4, 2]]}), BEST_FIT, row=3, pad=8)
    shard_file(rows, 0, "idx").unlink()
    assert write(store, BEST_FIT, row=3, pad=8)
    assert not write(store, BEST_FIT, row=3, pad=8)


def test_shards_of_earlier_rows_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder holds what its manifest names, and no more."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 8)
    store = make_store(tmp_path / "s", {"train": [[9, 9]]})
    write_rows(store.path, tmp_path / "rows", WRAPPED, seq_len=4, pad_id=7)
    assert shard_file(tmp_path / "rows", 3, "bin").exists()
    write_rows(store.path, tmp_path / "rows", WRAPPED, seq_len=9, pad_id=7)
    named = [f"{shard.name}.{kind}" for shard in open_store(tmp_path / "rows").shards for kind in ("bin", "idx")]
    assert len(named) == 4 and sorted(folder_bytes(tmp_path / "rows")) == [
        "milldam.json",
        "tokenizer.json",
        *sorted(named),
    ]


def test_a_store_of_documents_is_not_overwritten(tmp_path: Path) -> None:
    """Rows can't be written over the documents they come from."""
    store = make_store(tmp_path / "s", {"train": [[9]]})
    before = folder_bytes(store.path)
    with pytest.raises(MismatchError, match="holds a store of documents"):
        write_rows(store.path, store.path, WRAPPED, seq_len=4, pad_id=7)
    assert folder_bytes(store.path) == before


def test_a_split_too_small_for_a_row_leaves_no_shard(tmp_path: Path) -> None:
    """Its tokens are all tail, and the rows are a whole store all the same."""
    store = make_store(tmp_path / "s", {"train": [[9]], "val": [[3]]})
    packed = write_rows(store.path, tmp_path / "rows", WRAPPED, seq_len=4, pad_id=7)
    assert (packed["val"].rows, packed["val"].tail, packed["val"].efficiency) == (0, 3, 1.0)
    assert open_store(tmp_path / "rows").splits == ("train",)
    assert list(verify(tmp_path / "rows")) == []


def test_a_failed_write_leaves_nothing_that_passes_for_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the error says so, temporaries are gone, and the next write makes the same bytes."""
    monkeypatch.setattr(writing, "SHARD_BYTES", 8)
    store, rows = make_store(tmp_path / "s", {"train": [[9, 9]]}), tmp_path / "rows"
    write_rows(store.path, rows, WRAPPED, seq_len=4, pad_id=7)
    whole = folder_bytes(rows)
    appended = writing._RowShard.append

    def fail(self: writing._RowShard, *arguments: object) -> None:
        appended(self, *arguments)  # type: ignore[arg-type]
        if len(list(rows.glob("*.bin"))) == 2:
            raise ResourceError("The disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(writing._RowShard, "append", fail)
        with pytest.raises(ResourceError):
            write_rows(store.path, rows, PADDED, seq_len=4, pad_id=7)
    assert "milldam.json" not in folder_bytes(rows) and len(list(rows.glob("train-*"))) == 4
    write_rows(store.path, rows, WRAPPED, seq_len=4, pad_id=7)
    assert folder_bytes(rows) == whole


def test_a_killed_write_starts_again(tmp_path: Path) -> None:
    """Killed between shards, the folder is no store; the same call then gives the bytes of an undisturbed one."""
    store, rows = make_store(tmp_path / "s", {"train": [[9, 9], [30]]}), tmp_path / "rows"
    program = """
import os, sys
from pathlib import Path
from milldam.packing import rows as writing
from milldam.packing.rows import write_rows
from milldam.rules import PackingRules
writing.SHARD_BYTES = 8
commit = writing._RowShard.commit
def die(self):
    if len(list(Path(sys.argv[2]).glob("*.bin"))) == 3:
        os._exit(9)
    return commit(self)
if sys.argv[3] == "die":
    writing._RowShard.commit = die
write_rows(sys.argv[1], Path(sys.argv[2]), PackingRules(), seq_len=4, pad_id=7)
"""
    for folder, fate, code in ((rows, "die", 9), (rows, "live", 0), (tmp_path / "other", "live", 0)):
        command = [sys.executable, "-c", program, str(store.path), str(folder), fate]
        assert subprocess.run(command, timeout=60).returncode == code
        assert (folder / "milldam.json").exists() == (code == 0)
    assert folder_bytes(rows) == folder_bytes(tmp_path / "other")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="measures by /proc")
@pytest.mark.parametrize("rules", [PADDED, BEST_FIT])
def test_memory_does_not_grow_with_the_store(tmp_path: Path, rules: PackingRules) -> None:
    """Ten times the tokens are written in the memory that one takes."""
    peaks = []
    for times in (1, 10):
        folder = tmp_path / f"{times}"
        make_store(folder, {"train": [[700] * 2000] * times})
        peaks.append(_peak_of_writing(folder, tmp_path / f"rows{times}", rules))
    assert peaks[1] - peaks[0] < 16e6, peaks
    assert shard_file(tmp_path / "rows10", 0, "bin").stat().st_size > 25e6


def _peak_of_writing(store: Path, rows: Path, rules: PackingRules) -> int:
    program = """
import sys
from pathlib import Path
from milldam.memory import usage
from milldam.packing import rows as writing
from milldam.packing.rows import write_rows
from milldam.rules import PackingRules

highest, append = 0, writing._RowShard.append

def watch(self, *arguments):
    global highest
    append(self, *arguments)
    highest = max(highest, usage().anonymous)

writing._RowShard.append = watch
rules = PackingRules(strategy=sys.argv[3], pad_last=sys.argv[4] == "True")
write_rows(Path(sys.argv[1]), Path(sys.argv[2]), rules, seq_len=1024, pad_id=7)
print(highest)
"""
    return int(run_apart(program, store, rows, rules.strategy, rules.pad_last))


def test_lengths_are_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of many documents is not read at once."""
    monkeypatch.setattr("milldam.stores.tokens.format.BLOCK_DOCUMENTS", 3)
    store = make_store(tmp_path / "s", {"train": [[1, 2, 3, 4, 5, 6, 7], [8]]})
    stream = milldam.open(store.path).stream()
    assert [part.tolist() for part in document_lengths(stream)] == [[1, 2, 3], [4, 5, 6], [7], [8]]
