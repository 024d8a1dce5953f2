"""Tokens of other tools become a store with the same tokens and documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.kit.token_stores import Documents, documents_of, random_documents, store_of

from milldam.errors import ConfigError, InputError
from milldam.formats import export, flat, import_tokens
from milldam.formats.importing import ImportSummary, run_import
from milldam.formats.settings import ImportSettings
from milldam.stores.verify import verify

FLAT = ("npy", "nanogpt")
ROWS = ("hf", "parquet")
EOS = 7

documents_strategy = st.lists(st.lists(st.integers(0, 300), max_size=12), min_size=1, max_size=12)
many_examples = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def fresh(tmp_path: Path) -> Path:
    """A folder of its own for each example of a property."""
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    return folder


# ---- there and back ----


@pytest.mark.parametrize("to", [*ROWS, "megatron"])
def test_documents_come_back_as_they_were(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store -> format -> store: equal documents, whatever their lengths, the blocks and the sizes of files."""
    monkeypatch.setattr(flat, "BLOCK_TOKENS", 16)

    @many_examples
    @given(documents_strategy, st.integers(40, 400), st.integers(20, 200), st.sampled_from(["uint16", "int32"]))
    def holds(documents: Documents, file_size: int, shard_size: int, dtype: str) -> None:
        assume(any(documents))
        folder = fresh(tmp_path)
        store = store_of(folder / "store", {"train": documents}, dtype=dtype)
        export(store, to, folder / "out", shard_size=file_size)
        made = import_tokens(folder / "out", folder / "back", vocab_size=60_000, shard_size=shard_size)
        assert documents_of(folder / "back") == [list(document) for document in documents]
        assert made.tokens == store.tokens

    holds()


def rows_of_files(to: str, out: Path) -> list[list[list[int]]]:
    if to == "parquet":
        return [pq.read_table(path)["input_ids"].to_pylist() for path in sorted(out.glob("*.parquet"))]
    return [pa.ipc.open_stream(path).read_all()["input_ids"].to_pylist() for path in sorted(out.glob("*.arrow"))]


def cut(tokens: list[int], id: int, *, before: bool) -> list[list[int]]:
    """Documents of a stream, the plain way."""
    documents: list[list[int]] = [[]]
    for token in tokens:
        if before and token == id:
            documents.append([])
        documents[-1].append(token)
        if not before and token == id:
            documents.append([])
    return [document for document in documents if document]


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("to", [*ROWS, *FLAT])
def test_a_stream_is_cut_at_an_id(to: str, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each end of text, or before it, as llm.c writes it: packed rows and flat files, whatever the rows, blocks
    and shards; and where a file ends."""
    monkeypatch.setattr(flat, "BLOCK_TOKENS", 16)
    names, border = {"npy": "out.npy", "nanogpt": "out.bin"}, "bos" if before else "eos"

    @many_examples
    @given(documents_strategy, st.integers(1, 9), st.integers(20, 200))
    def holds(documents: Documents, seq_len: int, shard_size: int) -> None:
        tokens = [token % 16 for document in documents for token in document]
        assume(len(tokens) >= seq_len)
        folder = fresh(tmp_path)
        store = store_of(folder / "store", {"train": [tokens]})
        out = folder / names.get(to, "out")
        export(store, to, out, seq_len=seq_len if to in ROWS else None, shard_size=90)
        files = [tokens] if to in FLAT else [[t for row in one for t in row] for one in rows_of_files(to, out)]
        made = import_tokens(out, folder / "back", shard_size=shard_size, **{border: EOS})
        assert documents_of(folder / "back") == [document for one in files for document in cut(one, EOS, before=before)]
        assert made.vocab_size == max(EOS, *(token for one in files for token in one)) + 1
        assert made.manifest.tokenizer[border] == EOS

    holds()
    with pytest.raises(ConfigError, match="eos and bos"):
        import_tokens(tmp_path / "a.npy", tmp_path / "none", eos=1, bos=1)


@pytest.mark.parametrize("to", ROWS)
def test_splits_keep_their_names(to: str, tmp_path: Path) -> None:
    """A folder of splits gives a store of splits; one of them can be taken alone."""
    documents = {"train": random_documents([5, 3]), "val": random_documents([4], seed=1)}
    export(store_of(tmp_path / "store", documents), to, tmp_path / "out")
    made = import_tokens(tmp_path / "out", tmp_path / "back")
    assert made.splits == ("train", "val")
    assert {split: documents_of(tmp_path / "back", split) for split in made.splits} == documents
    import_tokens(tmp_path / "out", tmp_path / "one", split="val")
    assert documents_of(tmp_path / "one", "val") == documents["val"]
    with pytest.raises(ConfigError, match='No split "dev" in the source; it has train, val'):
        import_tokens(tmp_path / "out", tmp_path / "none", split="dev")


# ---- what other tools leave ----


def test_a_saved_data_set_is_read_by_its_column(tmp_path: Path) -> None:
    """What `save_to_disk` wrote: input_ids of any integers; other columns are passed over."""
    datasets = pytest.importorskip("datasets")
    documents = random_documents([4, 0, 300, 2])
    columns = {"attention_mask": [[1] * len(one) for one in documents], "input_ids": documents, "ids": documents[::-1]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    import_tokens(tmp_path / "saved", tmp_path / "a")
    assert documents_of(tmp_path / "a") == documents
    import_tokens(tmp_path / "saved", tmp_path / "b", column="ids")
    assert documents_of(tmp_path / "b") == documents[::-1]
    with pytest.raises(InputError, match='no column "label"; it has attention_mask, input_ids, ids'):
        import_tokens(tmp_path / "saved", tmp_path / "c", column="label")


def test_arrow_files_of_every_list_are_read(tmp_path: Path) -> None:
    """Lists, large lists and lists of a fixed size, in files and streams of Arrow and in Parquet."""

    rows = [[1, 2], [3, 4], [5, 6]]
    for number, kind in enumerate((pa.list_(pa.int64()), pa.large_list(pa.uint16()), pa.list_(pa.int32(), 2))):
        table = pa.table({"tokens": pa.array(rows, kind)}).slice(1)
        with pa.ipc.new_file(str(tmp_path / f"{number}.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
        pq.write_table(table, tmp_path / f"{number}.parquet")
        for ending in ("arrow", "parquet"):
            import_tokens(tmp_path / f"{number}.{ending}", tmp_path / f"{number}-{ending}")
            assert documents_of(tmp_path / f"{number}-{ending}") == rows[1:]


def write_rows(path: Path, *tokens: int) -> None:
    """A Parquet file with one row."""

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"input_ids": [list(tokens)]}), path)


def test_nothing_in_a_folder_is_passed_over_in_silence(tmp_path: Path) -> None:
    """Files beside folders, folders with an index beside folders without one, folders in them: all is read."""
    mixed = tmp_path / "mixed"
    write_rows(mixed / "a.parquet", 1)
    write_rows(mixed / "sub" / "b.parquet", 2)
    import_tokens(mixed, mixed / "made")
    assert documents_of(mixed / "made") == [[1], [2]]
    assert import_tokens(mixed, mixed / "made").tokens == 2  # what we made is no input
    write_rows(mixed / "sub" / "deep" / "c.parquet", 3)
    import_tokens(mixed, tmp_path / "deep")
    assert documents_of(tmp_path / "deep") == [[1], [2], [3]]
    folders = tmp_path / "folders"
    export(store_of(tmp_path / "store", {"train": [[4, 5]]}), "hf", folders / "train")
    write_rows(folders / "val" / "d.parquet", 6)
    made = import_tokens(folders, tmp_path / "b")
    assert {split: documents_of(tmp_path / "b", split) for split in made.splits} == {"train": [[4, 5]], "val": [[6]]}


def test_a_split_takes_its_own_files_alone(tmp_path: Path) -> None:
    """Files that belong to no split are train: none of them gets into val."""
    for name, token in (("train", 1), ("val", 2), ("extra", 3)):
        write_rows(tmp_path / "in" / f"{name}.parquet", token)
    for split, tokens in (("val", [[2]]), ("train", [[1], [3]])):
        import_tokens(tmp_path / "in", tmp_path / split, split=split)
        assert sorted(documents_of(tmp_path / split, split)) == tokens


# ---- the store that is made ----


def test_a_store_without_a_tokenizer_is_whole(tmp_path: Path) -> None:
    """It opens, trains and verifies; its vocabulary ends with the largest id, and uint16 stays uint16."""
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "wide.npy", np.array([1, 70_000], np.uint32))
    made = import_tokens(tmp_path / "tokens.npy", tmp_path / "store")
    assert list(verify(tmp_path / "store")) == []
    assert (made.vocab_size, made.dtype.name) == (100, "uint16")
    assert made.windows(10)[1][0].tolist() == list(range(10, 20))
    assert "100 tokens" in repr(made)
    assert not (tmp_path / "store" / "tokenizer.json").exists()
    assert import_tokens(tmp_path / "wide.npy", tmp_path / "wide").dtype.name == "int32"


def test_what_is_no_tokens_is_refused(tmp_path: Path) -> None:
    """Negative ids, nulls, floats, text, cut files and indexes that lead elsewhere: each is said, with the file."""

    def refused(name: str, match: str, **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            import_tokens(tmp_path / name, tmp_path / "store", **options)
        assert not (tmp_path / "store" / "milldam.json").exists()

    np.save(tmp_path / "negative.npy", np.array([1, -100]))
    refused("negative.npy", "negative.npy: -100 is not a token id")
    np.arange(1, 2001, dtype=np.uint16).tofile(tmp_path / "narrow.bin")
    refused("narrow.bin", r"is not a token id of a vocabulary of 16,777,216\. .*dtype.*vocab_size", dtype="uint32")
    pq.write_table(pa.table({"input_ids": [[1], None]}), tmp_path / "null.parquet")
    refused("null.parquet", "has nulls")
    pq.write_table(pa.table({"input_ids": [[1.5]]}), tmp_path / "float.parquet")
    refused("float.parquet", "a list of integers is wanted")
    (tmp_path / "notes.txt").write_text("no tokens")
    refused("notes.txt", "no tokens that milldam knows")
    refused("nothing.npy", "no such file")
    store = store_of(tmp_path / "source", {"train": random_documents([9, 9])})
    export(store, "hf", tmp_path / "hf")
    state = json.loads((tmp_path / "hf" / "state.json").read_bytes())
    state["_data_files"][0]["filename"] = "../secret.arrow"
    (tmp_path / "hf" / "state.json").write_text(json.dumps(state))
    refused("hf", "leaves the folder; refused")
    export(store, "mds", tmp_path / "mds")
    refused("mds", "no tokens that milldam knows.\nKnown are ")


def store_bytes(folder: Path) -> dict[str, bytes]:
    """The files that make a store."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_source_that_changed_costs_the_files_that_changed(tmp_path: Path) -> None:
    """Added, edited, removed: the rest is reused, the bytes are those of an import from nothing."""
    source, out = tmp_path / "in", tmp_path / "store"
    for number in range(4):
        write_rows(source / f"{number}.parquet", *range(number, number + 5))

    def imported() -> ImportSummary:
        return run_import(ImportSettings(source=(str(source),), out=str(out), vocab_size=100))

    imported()
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    write_rows(source / "1.parquet", 8, 9)
    write_rows(source / "9.parquet", 4)
    (source / "3.parquet").unlink()
    summary = imported()
    assert (summary.units, summary.reused) == (4, 2)
    assert set(summary.changed) == {"changed: 1.parquet", "new: 9.parquet", "gone: 3.parquet"}
    assert documents_of(out) == [[0, 1, 2, 3, 4], [8, 9], [2, 3, 4, 5, 6], [4]]
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.bin")}
    assert len(after) == 4 and sum(before.get(name) == time for name, time in after.items()) == 2
    import_tokens(source, tmp_path / "fresh", vocab_size=100)
    assert store_bytes(out) == store_bytes(tmp_path / "fresh")
    assert imported().up_to_date
    # A file whose ids may take four bytes makes all shards wider.
    np.save(source / "a.npy", np.array([7], np.uint16))
    for path in source.glob("*.parquet"):
        path.unlink()
    made = import_tokens(source, tmp_path / "grown")
    assert made.dtype.name == "uint16"
    np.save(source / "b.npy", np.array([70_000], np.uint32))
    again = import_tokens(source, tmp_path / "grown")
    assert again.dtype.name == "int32" and documents_of(tmp_path / "grown") == [[7], [70_000]]


def test_names_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    """Splits that an index or the user names become files of the store."""
    export(store_of(tmp_path / "store", {"train": [[1]], "val": [[2]]}), "hf", tmp_path / "hf")
    (tmp_path / "hf" / "dataset_dict.json").write_text('{"splits": ["train", "../hf/val"]}')
    with pytest.raises(InputError, match="leaves the folder; refused"):
        import_tokens(tmp_path / "hf", tmp_path / "made")
    (tmp_path / "hf" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InputError, match=r"test: no dataset in it, though dataset_dict\.json names it"):
        import_tokens(tmp_path / "hf", tmp_path / "made")
    with pytest.raises(ConfigError, match="no name for files"):
        import_tokens(tmp_path / "hf" / "train", tmp_path / "made", split="../out")
