"""`milldam.tokenize` of what a program holds or makes: frames, tables, datasets, generators; never taken for paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.kit.jobs import TOKENIZER, store_bytes, write_lines

import milldam

TEXTS = [f"{number} sacks of flour, {'ground ' * (number % 7)}at dawn" for number in range(300)]
OPTIONS: dict[str, Any] = {"tokenizer": TOKENIZER, "workers": 1, "memory": "1GB"}


def rows() -> list[dict[str, Any]]:
    return [{"text": text, "score": float("nan") if number % 2 else 1.5} for number, text in enumerate(TEXTS)]


def frame(package: str) -> Any:
    return pytest.importorskip(package).DataFrame({"text": TEXTS, "score": [1.5, float("nan")] * 150})


def dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS})


def generate() -> Iterator[str]:
    yield from TEXTS


SOURCES: dict[str, Callable[[], Any]] = {
    "pandas": lambda: frame("pandas"),
    "polars": lambda: frame("polars"),
    "arrow table": lambda: pa.table({"text": TEXTS}),
    "record batch": lambda: pa.record_batch({"text": TEXTS}),
    "arrow array": lambda: pa.array(TEXTS),
    "pandas series": lambda: frame("pandas")["text"],
    "dataset": dataset,
    "chosen rows": lambda: dataset().select(range(299, -1, -1)).select(range(299, -1, -1)),
    "streamed dataset": lambda: dataset().to_iterable_dataset(),
    "dicts": rows,
    "generator": generate,
    "generator function": lambda: generate,
    "iterator": lambda: iter(TEXTS),
    "iterator of rows": lambda: iter(rows()),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("reference")
    store = milldam.tokenize(write_lines(folder / "corpus.jsonl", TEXTS), folder / "store", **OPTIONS)
    return [document.tolist() for document in store]


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_that_are_given_are_tokenized(
    kind: str, reference: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same documents as from a file, and nothing is left beside the store or in the working directory."""
    monkeypatch.chdir(tmp_path)
    store = milldam.tokenize(SOURCES[kind](), "store", **OPTIONS)
    assert [document.tolist() for document in store] == reference
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_given_rows_are_known_by_their_content(tmp_path: Path) -> None:
    """Equal ones are up to date, whatever they come as; others are refused like any other input."""
    milldam.tokenize(iter(TEXTS), tmp_path / "store", **OPTIONS)
    before = store_bytes(tmp_path / "store")
    manifest = (tmp_path / "store/milldam.json").stat()
    milldam.tokenize(pa.table({"text": TEXTS}), tmp_path / "store", **OPTIONS)
    assert (tmp_path / "store/milldam.json").stat() == manifest
    milldam.tokenize(iter([*TEXTS, "one more"]), tmp_path / "other", **OPTIONS)
    assert store_bytes(tmp_path / "other") != before


def test_conversations_that_are_given_are_tokenized(tmp_path: Path) -> None:
    """With the same masks as from a file."""
    talk = [{"role": "user", "content": "How much?"}, {"role": "assistant", "content": "Two sacks."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    template = tmp_path / "template.jinja"
    turns = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    template.write_text(turns + "{% if add_generation_prompt %}<assistant>{% endif %}")
    options = OPTIONS | {"chat": True, "chat_template": template}
    expected = milldam.tokenize(tmp_path / "chat.jsonl", tmp_path / "one", **options)
    found = milldam.tokenize([{"messages": talk}], tmp_path / "two", **options)
    assert found[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            ["A text with words.", "Another one."],
            r"A text with words\.: no such file.*are paths.*iter",
        ),
        ([1, 2], "row 0 is of type int"),
        ({"text": TEXTS}, "dict: no input"),
        (7, "int: no input"),
        (iter([]), "The input has no rows"),
        ([{"text": "a", "n": 1}, {"text": "b", "n": "c"}], 'column "n": its values are not of one type'),
    ],
)
def test_what_is_no_input_is_refused_with_a_hint(inputs: Any, message: str, tmp_path: Path) -> None:
    """Nothing is guessed, and nothing is left."""
    with pytest.raises(milldam.MilldamError, match=f"(?s){message}"):
        milldam.tokenize(inputs, tmp_path / "store", **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_dict_of_splits_asks_for_one(tmp_path: Path) -> None:
    """With the way to name it."""
    splits = pytest.importorskip("datasets").DatasetDict(train=dataset())
    with pytest.raises(milldam.ConfigError, match=r'dataset\["train"\]'):
        milldam.tokenize(splits, tmp_path / "store", **OPTIONS)
