"""The workflows of seed 003 run as written, with a local file and tokenizer, and none of its faults."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.kit.qa_jobs import flat, lines

from milldam.errors import ConfigError
from milldam.qa.compat import (
    configure_memory_tokens,
    create_dataloader,
    create_dataset_from_cache,
    process_and_cache_dataset,
)
from milldam.qa.examples import Answer, Example

CONTEXT = "The Normans were the people who in the 10th and 11th centuries gave their name to Normandy, in France. "
EXAMPLES = [
    Example(id, "Where is Normandy?", CONTEXT * repeats, (Answer(text, CONTEXT.index(text)),) if text else ())
    for id, repeats, text in (("a", 1, "France"), ("b", 6, "Normandy"), ("c", 3, ""), ("d", 4, "10th"))
]


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    path = tmp_path / "squad_v2.jsonl"
    path.write_text(lines(flat(EXAMPLES)), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(wordpiece_json: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(str(wordpiece_json))
    made.add_special_tokens(["[PAD]"])
    return made


def both(squad: Path, tokenizer: Any, **options: Any) -> Any:
    """Processed and opened."""
    given = {"cache_dir": squad.parent / "cache", "max_seq_length": 32, "doc_stride": 8, "tokenizer": tokenizer}
    count = process_and_cache_dataset(squad, workers=1, **given | options)
    dataset = create_dataset_from_cache(squad, **given | options)
    assert len(dataset) == count
    return dataset


def test_the_workflow_of_the_scripts(squad: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process, open lazily, train, with the arguments as the document has them; memory tokens reach the windows."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(squad.parent)
    memory = configure_memory_tokens(tokenizer, memory_num_tokens=4)
    assert configure_memory_tokens(tokenizer, 4) == memory
    same: dict[str, Any] = {"dataset_name": str(squad), "split": "train", "cache_dir": "./.cache", "max_examples": None}
    same |= {"max_seq_length": 48, "doc_stride": 8, "max_n_segs": None, "tokenizer": tokenizer}
    total = process_and_cache_dataset(**same, streaming_chunk_size=1000, use_streaming=True, max_memory_gb=8.0)
    dataset = create_dataset_from_cache(**same, use_lazy_loading=True)
    assert len(dataset) == total > len(EXAMPLES)
    dataloader = create_dataloader(dataset=dataset, batch_size=2, shuffle=True, num_workers=0, use_time_step_major=True)
    assert len(dataloader) == 2
    for _ in range(2):
        seen = []
        for time_step_batches in dataloader:
            seen += [dataset.example(number)["id"] for number in time_step_batches[0]["example"].tolist()]
            for step in time_step_batches:
                assert step["input_ids"].dtype == torch.int64
                rows = step["input_ids"][step["document_mask"]]
                assert all((rows == token).any(dim=1).all() for token in itertools.chain(*memory.values()))
        assert sorted(seen) == ["a", "b", "c", "d"]
    windows = create_dataloader(dataset, 3, shuffle=False, use_time_step_major=False, num_workers=1)
    assert next(iter(windows))["example"].tolist() == [0, 0, 1]


def test_old_features_are_never_returned(squad: Path, tokenizer: Any) -> None:
    """Every setting, the tokenizer and the data decide which features are found; truncation left behind does not."""
    folders = [both(squad, tokenizer).path]
    tokenizer.enable_truncation(5)
    assert both(squad, tokenizer).path == folders[0]
    changes: list[dict[str, Any]] = [{"max_seq_length": 40}, {"doc_stride": 9}, {"max_examples": 2}, {"max_n_segs": 1}]
    folders += [both(squad, tokenizer, **change).path for change in changes]
    configure_memory_tokens(tokenizer, 1)
    folders.append(both(squad, tokenizer).path)
    assert len(set(folders)) == len(folders)
    squad.write_text(lines(flat(EXAMPLES[1:])))
    assert both(squad, tokenizer).example(0)["id"] == "b"
    with pytest.raises(ConfigError, match="no fast tokenizer"):
        create_dataset_from_cache(squad, tokenizer=object())
