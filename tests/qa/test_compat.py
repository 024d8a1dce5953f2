"""The workflows of seed 003 run as written, with a local file and tokenizer, and none of its faults."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from milldam.errors import ConfigError, StoreError
from milldam.qa.batches import COLUMNS
from milldam.qa.compat import (
    StreamingSquadProcessor,
    configure_memory_tokens,
    create_dataloader,
    create_dataset_from_cache,
    process_and_cache_dataset,
)

CONTEXT = (
    "The Normans were the people who in the 10th and 11th centuries gave their name to Normandy, a region in France."
)
SIZES: dict[str, Any] = {"max_seq_length": 32, "doc_stride": 8}


def example(id: str, repeats: int, answer: str | None) -> dict[str, Any]:
    context = " ".join([CONTEXT] * repeats)
    answers = (
        {"text": [answer], "answer_start": [context.rindex(answer)]} if answer else {"text": [], "answer_start": []}
    )
    return {"id": id, "title": "Normans", "context": context, "question": "Where is Normandy?", "answers": answers}


EXAMPLES = [
    example("a", 1, "France"),
    example("b", 6, "Normandy"),
    example("c", 3, None),
    example("d", 4, "10th"),
    example("e", 2, "The Normans"),
]


@pytest.fixture(scope="module")
def squad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "squad_v2.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in EXAMPLES), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(wordpiece_json: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(str(wordpiece_json))
    made.add_special_tokens(["[PAD]"])
    return made


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def process(squad: Path, cache: Path, tokenizer: Any, **options: Any) -> int:
    given = {"dataset_name": str(squad), "split": "train", "cache_dir": cache, "tokenizer": tokenizer, "workers": 1}
    return process_and_cache_dataset(**given | SIZES | options)


def opened(squad: Path, cache: Path, tokenizer: Any, **options: Any) -> Any:
    given = {"dataset_name": str(squad), "split": "train", "cache_dir": cache, "tokenizer": tokenizer}
    return create_dataset_from_cache(**given | SIZES | options)


def test_the_three_workflows(squad: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process, open lazily, train, with the arguments as the document has them; memory tokens reach the windows."""
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    memory = configure_memory_tokens(tokenizer, memory_num_tokens=4)
    total_features = process_and_cache_dataset(
        dataset_name=str(squad),
        split="train",
        cache_dir="./.cache",
        max_examples=None,
        max_seq_length=48,
        doc_stride=8,
        streaming_chunk_size=1000,
        tokenizer=tokenizer,
        use_streaming=True,
        max_memory_gb=8.0,
    )
    dataset = create_dataset_from_cache(
        dataset_name=str(squad),
        split="train",
        cache_dir="./.cache",
        max_examples=None,
        max_seq_length=48,
        doc_stride=8,
        max_n_segs=None,
        tokenizer=tokenizer,
        use_lazy_loading=True,
    )
    assert len(dataset) == total_features > len(EXAMPLES)
    dataloader = create_dataloader(dataset=dataset, batch_size=2, shuffle=True, num_workers=0, use_time_step_major=True)
    assert len(dataloader) == 3
    for _ in range(2):
        seen = []
        for time_step_batches in dataloader:
            seen += time_step_batches[0]["example_id"]
            for step in time_step_batches:
                assert step["input_ids"].dtype == torch.int64
                rows = step["input_ids"][step["document_mask"]]
                assert all((rows == token).any(dim=1).all() for token in itertools.chain(*memory.values()))
        assert sorted(seen) == ["a", "b", "c", "d", "e"]
    processor = StreamingSquadProcessor(
        tokenizer=tokenizer, max_seq_length=48, doc_stride=8, streaming_chunk_size=1000, max_memory_gb=6.0
    )
    again = processor.process_dataset_streaming(
        dataset_name=str(squad), split="train", max_examples=None, cache_manager=None, max_n_segs=None
    )
    assert again == total_features
    assert processor.dataset.path.resolve() == dataset.path.resolve(), "the same arguments, the same features"


def test_rows_stay_in_place_and_padding_is_the_pad_token(squad: Path, cache: Path, tokenizer: Any) -> None:
    """Where a document has ended its row is padding, and the others keep theirs."""
    process(squad, cache, tokenizer)
    dataset = opened(squad, cache, tokenizer)
    segments = [len(dataset.document(number)["input_ids"]) for number in range(5)]
    (steps,) = create_dataloader(dataset, 5, shuffle=False)
    assert len(steps) == max(segments)
    for number, step in enumerate(steps):
        assert step["example_id"] == step["example_ids"] == ["a", "b", "c", "d", "e"]
        assert step["document_mask"].tolist() == [number < count for count in segments]
        ended = ~np.asarray(step["document_mask"])
        assert (np.asarray(step["input_ids"])[ended] == tokenizer.token_to_id("[PAD]")).all()
        assert not np.asarray(step["attention_mask"])[ended].any()
        for row in np.flatnonzero(~ended):
            assert np.asarray(step["input_ids"])[row].tolist() == dataset.document(row)["input_ids"][number].tolist()
    wanted = {
        "input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "offset_mapping",
        "cls_index", "has_answer", "chosen_answer_text", "chosen_answer_char_span", "context", "question",
        "segment_index", "total_segments", "example_id", "example_ids", "document_mask",
    }  # fmt: skip
    assert set(steps[0]) == wanted | set(COLUMNS) - {"example"}, "what batches have, no column lost"
    if "window" in COLUMNS:
        assert np.asarray(steps[0]["window"]).tolist() == [sum(segments[:row]) for row in range(5)]
        assert (np.asarray(steps[-1]["window"])[~np.asarray(steps[-1]["document_mask"])] == -1).all()
    assert steps[0]["chosen_answer_text"] == ["France", "Normandy", "", "10th", "The Normans"]
    begin, stop = steps[0]["chosen_answer_char_span"][1].tolist()
    assert steps[0]["context"][1][begin:stop] == "Normandy"
    assert steps[0]["chosen_answer_char_span"][2].tolist() == [-1, -1]


def test_other_arguments_never_give_old_features(squad: Path, cache: Path, tokenizer: Any) -> None:
    """Every setting, the tokenizer and the data are in the name of the cache."""
    process(squad, cache, tokenizer)
    kept = opened(squad, cache, tokenizer).path
    for changed in (
        {"max_seq_length": 40},
        {"doc_stride": 9},
        {"max_examples": 2},
        {"max_n_segs": 1},
        {"split": "dev"},
    ):
        with pytest.raises(StoreError, match="Call process_and_cache_dataset with the same arguments first"):
            opened(squad, cache, tokenizer, **changed)
    larger = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    configure_memory_tokens(larger, 1)
    with pytest.raises(StoreError, match=kept.name):
        opened(squad, cache, larger)
    assert opened(squad, cache, tokenizer).path == kept


def test_changed_data_is_other_data(tmp_path: Path, tokenizer: Any) -> None:
    """A file that was written anew is processed anew, and not found before."""
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(EXAMPLES[0]) + "\n")
    first = process(path, tmp_path / "cache", tokenizer)
    path.write_text(json.dumps(EXAMPLES[1]) + "\n")
    with pytest.raises(StoreError, match="from other data"):
        opened(path, tmp_path / "cache", tokenizer)
    assert process(path, tmp_path / "cache", tokenizer) > first
    assert opened(path, tmp_path / "cache", tokenizer).example(0)["id"] == "b"


@pytest.mark.parametrize("kind", ["glob", "address", "address with a glob"])
def test_changed_data_is_other_data_by_any_name(kind: str, tmp_path: Path, tokenizer: Any) -> None:
    """A glob or an address is known by the files behind it, not by its text."""
    (tmp_path / "g").mkdir()
    path = tmp_path / "g/d.jsonl"
    name = {"glob": f"{path.parent}/*.jsonl", "address": path.as_uri()}.get(kind, f"{path.parent.as_uri()}/*.jsonl")
    path.write_text(json.dumps(EXAMPLES[0]) + "\n")
    options = {"dataset_name": name}
    process(path, tmp_path / "cache", tokenizer, **options)
    assert opened(path, tmp_path / "cache", tokenizer, **options).example(0)["id"] == "a"
    path.write_text(json.dumps(EXAMPLES[1]) + "\n")
    with pytest.raises(StoreError, match="from other data"):
        opened(path, tmp_path / "cache", tokenizer, **options)
    process(path, tmp_path / "cache", tokenizer, **options)
    assert opened(path, tmp_path / "cache", tokenizer, **options).example(0)["id"] == "b"


def test_data_that_changed_behind_its_name_is_processed_anew(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the Hub: the folder is the same, its features are those of the data as it is now."""
    monkeypatch.setattr("milldam.qa.compat.caching._identity", lambda dataset, split: dataset)
    path = tmp_path / "d.jsonl"
    for number in (0, 1):
        path.write_text(json.dumps(EXAMPLES[number]) + "\n")
        process(path, tmp_path / "cache", tokenizer)
        assert opened(path, tmp_path / "cache", tokenizer).example(0)["id"] == EXAMPLES[number]["id"]


def test_a_tokenizer_that_was_used_is_the_same(squad: Path, cache: Path, tokenizer: Any) -> None:
    """Truncation and padding that calls leave behind change no name."""
    process(squad, cache, tokenizer)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=7)
    assert opened(squad, cache, tokenizer).examples == 5


def test_a_path_is_a_tokenizer_too(squad: Path, tmp_path: Path, tokenizer: Any) -> None:
    """With what lies beside it; limits on examples and segments are exact."""
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok/tokenizer.json"))
    (tmp_path / "tok/tokenizer_config.json").write_text('{"padding_side": "left", "pad_token": "[PAD]"}')
    options = {"max_examples": 3, "max_n_segs": 2}
    total = process(squad, tmp_path / "c", tmp_path / "tok", **options)
    dataset = opened(squad, tmp_path / "c", str(tmp_path / "tok"), **options)
    assert (dataset.examples, total) == (3, len(dataset))
    assert dataset.form.pad_left
    assert max(len(dataset.document(number)["input_ids"]) for number in range(3)) == 2


def test_a_method_may_change_every_example(squad: Path, tmp_path: Path, tokenizer: Any) -> None:
    """What `process_example` gives is what is cached; None leaves an example out; limits count what is left."""

    class Shorter(StreamingSquadProcessor):
        def process_example(self, example: dict[str, Any]) -> dict[str, Any] | None:
            return None if example["id"] == "b" else example | {"question": "Who?"}

    class Cache:
        cache_dir = tmp_path

    processor = Shorter(tokenizer, **SIZES)
    processor.workers = 1
    with pytest.raises(StoreError, match="Nothing was processed yet"):
        processor.dataset  # noqa: B018
    total = processor.process_dataset_streaming(squad, "train", 3, Cache())
    found = [processor.dataset.example(number) for number in range(processor.dataset.examples)]
    assert [(one["id"], one["question"]) for one in found] == [("a", "Who?"), ("c", "Who?"), ("d", "Who?")]
    path = processor.dataset.path
    assert (processor.process_dataset_streaming(squad, "train", 3, Cache()), processor.dataset.path) == (total, path)
    with pytest.raises(ConfigError, match="has no cache_dir"):
        processor.process_dataset_streaming(squad, "train", 3, object())


def test_records_that_are_no_examples_are_told(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where a method changes examples: nothing is left out in silence."""

    class Same(StreamingSquadProcessor):
        def process_example(self, example: dict[str, Any]) -> dict[str, Any] | None:
            return example

    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(EXAMPLES[0]) + "\n" + '{"id": "x"}\n')
    processor = Same(tokenizer, **SIZES)
    processor.workers = 1
    with caplog.at_level(logging.WARNING, "milldam"):
        processor.process_dataset_streaming(path, cache_manager=type("Cache", (), {"cache_dir": str(tmp_path / "c")}))
    assert processor.dataset.examples == 1
    assert "1 records are not examples" in caplog.text


def test_every_loop_is_an_epoch(squad: Path, cache: Path, tokenizer: Any) -> None:
    """A loop that was left early changes nothing; a state goes on in the middle; a seed gives the same again."""
    process(squad, cache, tokenizer)
    dataset = opened(squad, cache, tokenizer)

    def order(loader: Any) -> list[str]:
        return [id for steps in loader for id in steps[0]["example_id"]]

    loader = create_dataloader(dataset, 2, epoch_seed=3)
    first, second = order(loader), order(loader)
    assert sorted(first) == sorted(second) == ["a", "b", "c", "d", "e"]
    other = create_dataloader(dataset, 2, epoch_seed=3, num_workers=2)
    next(iter(other))
    assert order(other) == second, "the loop before was the first epoch, though it was left early"
    other.set_epoch(0)
    running = iter(other)
    begun = next(running)[0]["example_id"]
    state = json.loads(json.dumps(other.state_dict()))
    resumed = create_dataloader(dataset, 1, epoch_seed=3)
    resumed.load_state_dict(state)
    assert begun + order(resumed) == first
    assert order(resumed) == second
    ranks = [order(create_dataloader(dataset, 1, epoch_seed=3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert sorted(ranks[0] + ranks[1]) == sorted(first)


def test_epochs_that_are_set_and_states_agree(squad: Path, cache: Path, tokenizer: Any) -> None:
    """A loaded state goes on though its epoch is set, also at its end; a set epoch is in the state."""
    process(squad, cache, tokenizer)
    dataset = opened(squad, cache, tokenizer)

    def loader() -> Any:
        return create_dataloader(dataset, 1, epoch_seed=3)

    def order(loader: Any) -> list[str]:
        return [id for steps in loader for id in steps[0]["example_id"]]

    whole = loader()
    epochs = [order(whole) for _ in range(4)]
    begun = loader()
    states = [begun.state_dict() for _ in begun]
    for seen, state in enumerate(states, 1):
        resumed = loader()
        resumed.load_state_dict(state)
        resumed.set_epoch(0)
        assert resumed.state_dict() == state
        assert order(resumed) == epochs[0][seen:]
        resumed.set_epoch(1)
        assert order(resumed) == epochs[1]
        resumed.set_epoch(0)
        assert order(resumed) == epochs[0], "the state was used up"
    other = loader()
    other.load_state_dict(states[1])
    other.set_epoch(2)
    state = json.loads(json.dumps(other.state_dict()))
    assert (state["epoch"], state["samples_seen"]) == (2, 10)
    again = loader()
    again.load_state_dict(state)
    assert [order(again), order(again)] == [order(other), order(other)] == epochs[2:]
    other.set_epoch(2)
    other.set_epoch(1)
    assert order(other) == epochs[1], "set again, no state was loaded"
    with pytest.raises(ConfigError, match="epoch: -1"):
        other.set_epoch(-1)


def test_segments_are_chosen_when_loading(squad: Path, cache: Path, tokenizer: Any) -> None:
    """At most so many a document, with the answer among them where asked; windows alone have none to choose."""
    process(squad, cache, tokenizer)
    dataset = opened(squad, cache, tokenizer)
    for strategy in ("answer_centered", "random_continuous", "first_n"):
        loader = create_dataloader(dataset, 5, False, max_segments=2, segment_selection_strategy=strategy)
        (steps,) = loader
        assert len(steps) == 2
        if strategy == "answer_centered":
            has = np.stack([np.asarray(step["has_answer"]) for step in steps]).any(axis=0)
            assert has.tolist() == [True, True, False, True, True]
    with pytest.raises(ConfigError, match="max_segments: 0"):
        create_dataloader(dataset, 5, max_segments=0)
    with pytest.raises(ConfigError, match="use_time_step_major=True"):
        create_dataloader(dataset, 5, use_time_step_major=False, max_segments=2)


def test_plain_batches_have_windows_as_rows(squad: Path, cache: Path, tokenizer: Any) -> None:
    """Not time-step-major: a dict a batch, each window with its example's texts."""
    total = process(squad, cache, tokenizer)
    dataset = opened(squad, cache, tokenizer)
    batches = list(create_dataloader(dataset, 4, shuffle=False, use_time_step_major=False))
    assert sum(len(batch["input_ids"]) for batch in batches) == total
    ids = [id for batch in batches for id in batch["example_id"]]
    assert ids == [dataset[number]["example_id"] for number in range(total)]
    assert all(np.asarray(batch["document_mask"]).all() for batch in batches)


def test_windows_come_with_their_texts(squad: Path, cache: Path, tokenizer: Any) -> None:
    """`dataset[i]` has every field that scripts index, as a batch has it; the tokens of an answer read as it."""
    process(squad, cache, tokenizer)
    dataset = pickle.loads(pickle.dumps(opened(squad, cache, tokenizer)))
    (batch,) = create_dataloader(dataset, len(dataset), shuffle=False, use_time_step_major=False)
    answered = []
    for number in range(len(dataset)):
        window = dataset[number]
        assert set(window) == set(batch) - {"window", "document_mask", "example_ids"}
        for name, value in window.items():
            assert np.array_equal(np.asarray(value), np.asarray(batch[name][number])), name
        given = next(one for one in EXAMPLES if one["id"] == window["example_id"])
        assert (window["context"], window["question"]) == (given["context"], given["question"])
        begin, end = window["chosen_answer_char_span"]
        assert (window["chosen_answer_text"] or None, begin) == next(
            zip(given["answers"]["text"], given["answers"]["answer_start"], strict=True), (None, -1)
        )
        if window["has_answer"]:
            places = (
                window["offset_mapping"][window["start_positions"]],
                window["offset_mapping"][window["end_positions"]],
            )
            assert window["context"][places[0][0] : places[1][1]] == window["context"][begin:end]
            answered.append(window["example_id"])
    assert set(answered) == {"a", "b", "d", "e"}
    assert dataset[-1]["segment_index"] == dataset[len(dataset) - 1]["segment_index"]
    assert dataset.get_all_documents() == ["a", "b", "c", "d", "e"]
    of = [dataset.get_document_segments(id) for id in (*dataset.get_all_documents(), "z")]
    assert [one for numbers in of for one in numbers] == list(range(len(dataset)))
    assert of[-1] == []


def test_offsets_reach_over_dropped_marks(tmp_path: Path, tokenizer: Any) -> None:
    """In a window and in batches, so that an answer that a script cuts out keeps its accents."""
    context = "the cafe\u0301 in France"
    answers = {"text": ["cafe\u0301"], "answer_start": [4]}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"id": "a", "context": context, "question": "Where?", "answers": answers}) + "\n")
    process(path, tmp_path / "cache", tokenizer)
    dataset = opened(path, tmp_path / "cache", tokenizer)
    (steps,) = create_dataloader(dataset, 1)
    (batch,) = create_dataloader(dataset, 1, use_time_step_major=False)
    rows = [{name: value[0] for name, value in one.items()} for one in (steps[0], batch)]
    for window in (dataset[0], *rows):
        first, last = (window["offset_mapping"][window[f"{name}_positions"]] for name in ("start", "end"))
        assert window["context"][first[0] : last[1]] == window["chosen_answer_text"] == "cafe\u0301"


def test_without_torch_batches_are_arrays(
    squad: Path, cache: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is optional."""
    process(squad, cache, tokenizer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    steps = next(iter(create_dataloader(opened(squad, cache, tokenizer), 2)))
    assert isinstance(steps[0]["input_ids"], np.ndarray)
    assert isinstance(steps[0]["document_mask"], np.ndarray)


def test_memory_tokens_are_added_once(tokenizer: Any) -> None:
    """Twice the same does nothing; fewer than there are is refused."""
    size = tokenizer.get_vocab_size()
    memory = configure_memory_tokens(tokenizer, 3)
    assert memory == configure_memory_tokens(tokenizer, 3)
    assert tokenizer.get_vocab_size() == size + 6
    named = {kind: [tokenizer.id_to_token(token) for token in tokens] for kind, tokens in memory.items()}
    assert named == {
        "mem_read_ids": ["[MEM_READ_0]", "[MEM_READ_1]", "[MEM_READ_2]"],
        "mem_write_ids": ["[MEM_WRITE_0]", "[MEM_WRITE_1]", "[MEM_WRITE_2]"],
    }
    with pytest.raises(ConfigError, match="3 memory tokens already"):
        configure_memory_tokens(tokenizer, 2)
    with pytest.raises(ConfigError, match="use 0 or more"):
        configure_memory_tokens(tokenizer, -1)


def test_wrong_arguments_are_explained(squad: Path, tmp_path: Path, tokenizer: Any) -> None:
    """A tokenizer without offsets, none at all, limits that are none."""
    with pytest.raises(ConfigError, match="object has no offsets"):
        configure_memory_tokens(object(), 1)
    with pytest.raises(ConfigError, match="tokenizer: none given"):
        process(squad, tmp_path, None)
    with pytest.raises(ConfigError, match="max_memory_gb: 0"):
        process(squad, tmp_path, tokenizer, max_memory_gb=0)
    with pytest.raises(ConfigError, match="streaming_chunk_size: 0"):
        process(squad, tmp_path, tokenizer, streaming_chunk_size=0)
