"""Conversations go to HF datasets and Parquet with what is trained on, and come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.kit.chat_stores import Chat, chat_store, random_chat

import milldam
from milldam.errors import ConfigError, InputError
from milldam.loader.stores import Store
from milldam.stores.verify import verify


@pytest.fixture
def every() -> list[Chat]:
    rng = np.random.default_rng(5)
    return [random_chat(rng, int(length)) for length in rng.integers(1, 40, 60)]


@pytest.fixture
def store(every: list[Chat], tmp_path: Path) -> Store:
    return chat_store(tmp_path / "chat.milldam", [every[:20], every[20:]])


def rows_of(to: str, out: Path) -> list[dict[str, Any]]:
    """What the tool itself reads of an export."""
    if to == "parquet":
        return [row for path in sorted(out.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    datasets = pytest.importorskip("datasets")
    found: list[dict[str, Any]] = list(datasets.load_from_disk(str(out)))
    return found


def labels_of(chat: Chat) -> list[int]:
    return [token if trained else -100 for token, trained in zip(chat.ids, chat.trained, strict=True)]


@pytest.mark.parametrize("to", ["hf", "parquet"])
def test_conversations_are_exported_with_labels_and_masks(
    store: Store, every: list[Chat], tmp_path: Path, to: str
) -> None:
    """As HF has them: labels unshifted, -100 where a token is not trained on; attention sees all."""
    milldam.export(store, to, tmp_path / "out", workers=1, shard_size="2KB")
    expected = [
        {
            "input_ids": chat.ids,
            "labels": labels_of(chat),
            "assistant_masks": [int(one) for one in chat.trained],
            "attention_mask": [1] * len(chat.ids),
        }
        for chat in every
    ]
    assert rows_of(to, tmp_path / "out") == expected


@pytest.mark.parametrize("to", ["hf", "parquet"])
@pytest.mark.parametrize("masks", [None, "labels", "assistant_masks"])
def test_what_is_trained_on_comes_back(store: Store, every: list[Chat], tmp_path: Path, to: str, masks: Any) -> None:
    milldam.export(store, to, tmp_path / "out", workers=1)
    again = milldam.import_tokens(
        tmp_path / "out", tmp_path / "again.milldam", masks=masks, workers=1, shard_size="500"
    )
    assert len(again.shards) > 1 and not list(verify(tmp_path / "again.milldam"))
    assert again.manifest.chat is not None
    assert again.manifest.chat["trained_tokens"] == sum(sum(chat.trained) for chat in every)
    for number, chat in enumerate(every):
        assert again[number].tolist() == chat.ids
        assert again.spans(number).tolist() == [list(span) for span in chat.spans]


@pytest.mark.parametrize("to", ["hf", "parquet"])
def test_packed_rows_are_exported_with_positions_and_lengths(store: Store, tmp_path: Path, to: str) -> None:
    """The rows that `packed` gives, padding as a piece of its own."""
    summary = milldam.export(store, to, tmp_path / "out", seq_len=30, workers=1, shard_size="2KB")
    rows = store.packed(30, form="hf")
    assert summary.counts["tokens_left_out"] == rows.too_long.tokens > 0
    found = rows_of(to, tmp_path / "out")
    assert len(found) == len(rows) == summary.counts["rows"]
    for number, row in enumerate(found):
        expected = rows[number]
        for name in ("input_ids", "labels", "position_ids"):
            assert row[name] == expected[name].tolist()
        assert row["assistant_masks"] == expected["loss_mask"].astype(int).tolist()
        begins = np.flatnonzero(expected["position_ids"] == 0)
        assert row["seq_lengths"] == np.diff([*begins, 30]).tolist()


def test_pairs_are_exported_as_trl_has_them_after_tokenization(tmp_path: Path) -> None:
    """A pair a row; packed rows and other formats would not tell both sides apart."""
    rng = np.random.default_rng(5)
    every = []
    for length in rng.integers(1, 9, 50):
        prompt = rng.integers(1, 1000, int(length)).tolist()
        answers = (rng.integers(1, 1000, int(n)).tolist() for n in rng.integers(1, 9, 2))
        every += [Chat(prompt + answer, [False] * len(prompt) + [True] * len(answer)) for answer in answers]
    store = chat_store(tmp_path / "s", [every], pairs=True)
    milldam.export(store, "parquet", tmp_path / "out", workers=1, shard_size="200")
    pairs = store.pairs()
    assert rows_of("parquet", tmp_path / "out") == [
        {name: ids.tolist() for name, ids in pairs[k].items()} for k in range(50)
    ]
    for to, options in (("nanogpt", {}), ("hf", {"seq_len": 8})):
        with pytest.raises(ConfigError, match="can't hold preference pairs"):
            milldam.export(store, to, tmp_path / "none.bin", **options)


def test_labels_of_documents_are_exported_as_trl_has_them(tmp_path: Path, every: list[Chat]) -> None:
    """KTO: the last stretch that is trained on is the completion, what comes before it the prompt."""
    labels = [k % 3 == 0 for k in range(len(every))]
    milldam.export(chat_store(tmp_path / "s", [every], labels=labels), "parquet", tmp_path / "out", workers=1)
    rows = rows_of("parquet", tmp_path / "out")
    assert [row["label"] for row in rows] == labels
    for chat, row in zip(every, rows, strict=True):
        begin, end = chat.spans[-1] if chat.spans else (len(chat.ids), len(chat.ids))
        assert (row["prompt_ids"], row["completion_ids"]) == (chat.ids[:begin], chat.ids[begin:end])


def test_what_is_trained_on_is_said_by_all_files_or_none(tmp_path: Path) -> None:
    table(tmp_path / "a.parquet", input_ids=[[1, 2]], assistant_masks=[[0, 1]])
    table(tmp_path / "b.parquet", input_ids=[[1, 2]])
    with pytest.raises(InputError, match="Some files say what is trained on"):
        milldam.import_tokens([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "s", workers=1)


def test_a_format_without_masks_says_so(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    milldam.export(store, "nanogpt", tmp_path / "out.bin", workers=1)
    assert "nanogpt can't hold what is trained on" in caplog.text


def table(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_labels_that_are_no_labels_are_refused(tmp_path: Path) -> None:
    """Shifted ones, and those of other lengths; classes are none of our business."""
    shifted = table(tmp_path / "a.parquet", input_ids=[[7, 8, 9]], labels=[[8, 9, -100]])
    with pytest.raises(InputError, match="neither a mask of zeros and ones nor labels"):
        milldam.import_tokens(shifted, tmp_path / "s", workers=1)
    assert not milldam.import_tokens(shifted, tmp_path / "s", masks="none", workers=1, overwrite=True).has_spans
    short = table(tmp_path / "b.parquet", input_ids=[[7, 8, 9]], labels=[[7, 8]])
    with pytest.raises(InputError, match='"labels" has not as many values'):
        milldam.import_tokens(short, tmp_path / "t", workers=1)
    classes = table(tmp_path / "c.parquet", input_ids=[[7, 8, 9]], labels=[1])
    assert not milldam.import_tokens(classes, tmp_path / "u", workers=1).has_spans
    with pytest.raises(InputError, match='no column "mask"'):
        milldam.import_tokens(classes, tmp_path / "v", masks="mask", workers=1)
