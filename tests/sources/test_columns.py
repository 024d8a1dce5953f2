"""Which field holds the text: the obvious one, or an error that names the candidates."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milldam.errors import InputError
from milldam.sources import compression, streams
from milldam.sources.columns import find_text_column
from milldam.sources.units import Slice, list_inputs


def column_of(folder: Path, *records: Any, wanted: str | None = None) -> str | None:
    """The text column of a JSON lines file with these records."""
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return find(path, wanted=wanted)


def find(*paths: Path, wanted: str | None = None) -> str | None:
    files = list_inputs([str(path) for path in paths])
    return find_text_column((Slice(file.path, file.format, file.compression) for file in files), wanted)


@pytest.mark.parametrize(
    ("record", "column"),
    [
        ({"text": "a", "content": "b", "title": "c"}, "text"),
        ({"id": "1", "content": "b"}, "content"),
        ({"id": "1", "Body": "b"}, "Body"),
        ({"id": 1, "story": "b", "url": "c"}, "story"),
        ({"id": 1, "anything": "b"}, "anything"),
        ({"id": "1", "meta": {"text": "b"}}, "meta.text"),
        ({"n": 1, "meta": {"deep": {"er": "b"}}}, "meta.deep.er"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_obvious_candidate_is_taken(tmp_path: Path, record: Any, column: str) -> None:
    """ "text" before all, then the one field with a usual name, then the only field that holds text."""
    assert column_of(tmp_path, record) == column


@pytest.mark.parametrize(
    ("record", "names", "most"),
    [
        ({"content": "a", "body": "bb"}, '"content", "body"', "body"),
        ({"question": "a", "answer": "bb"}, '"question", "answer"', "answer"),
        ({"prompt": "a long question", "completion": "b"}, '"prompt", "completion"', "prompt"),
        ({"a": {"text": "x"}, "b": {"text": "yy"}}, '"a.text", "b.text"', "b.text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_several_candidates_are_an_error_that_proposes_the_one_with_most_text(
    tmp_path: Path, record: Any, names: str, most: str
) -> None:
    """It names them and what to type; a usual name that another candidate equals is no reason to choose."""
    expected = re.escape(f"several fields hold text: {names}. Say which one, such as: text_column={most!r}")
    with pytest.raises(InputError, match=expected):
        column_of(tmp_path, record)


# ---- why there is none ----

LINES = b'{"text": "The mill stands."}\n' * 50
CHAT = {"id": "7", "conversations": [{"from": "human", "value": "Who are you?"}], "tools": "[]"}


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.jsonl", b" \n\n", "it is empty."),
        ("a.jsonl.zst", gzip.compress(LINES), "damaged zst data"),
        ("a.jsonl", LINES.decode().encode("utf-16"), "UTF-16 (it begins"),
        ("a.csv", b"id;text\n1;a\n", 'its first line must name columns; it begins with "id;text"'),
        (
            "a.jsonl",
            b"<html>404</html>",
            'a field of text; it begins with "<html>404</html>"',
        ),
        ("a.json", b'["a", "b"]', "its records must be objects"),
        ("a.json", b'{"version": "1", "data": [{"text": "a"}]}', '"data" (a list)'),
        ("a.jsonl", b'{"n": 1, "tags": [2]}\n', 'none of its fields holds text: "n" (a number), "tags" (a list).'),
        ("a.jsonl", json.dumps(CHAT).encode(), 'If "conversations" holds conversations, ask for chat.'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_reason_why_there_is_no_text_is_named(tmp_path: Path, name: str, data: bytes, why: str) -> None:
    """The true one, of those that people meet."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError) as caught:
        find(tmp_path / name)
    assert why in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


def test_a_hash_beside_conversations_is_not_taken_for_the_text(tmp_path: Path) -> None:
    """A folder of chat data is refused as such; a real text column beside it is found."""
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "b.jsonl").write_text('{"sha": "0a1b2c3d"}\n')
    with pytest.raises(InputError, match="holds conversations, ask for chat"):
        find(tmp_path)
    (tmp_path / "c.jsonl").write_text('{"body": "some text"}\n')
    assert find(tmp_path) == "body"


# ---- standard input ----


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[bytes]], None]]:
    """Gives standard input these pieces, one after the other, as a slow writer does to a pipe."""
    threads: list[threading.Thread] = []

    def give(pieces: list[bytes]) -> None:
        reading, writing = os.pipe()
        monkeypatch.setattr(sys, "stdin", os.fdopen(reading))
        streams.standard_input.cache_clear()
        threads.append(threading.Thread(target=write_slowly, args=(writing, pieces)))
        threads[-1].start()

    yield give
    for thread in threads:
        thread.join()


def write_slowly(writing: int, pieces: list[bytes]) -> None:
    with os.fdopen(writing, "wb", buffering=0) as pipe:
        for piece in pieces:
            pipe.write(piece)
            time.sleep(0.05)


def test_looking_at_standard_input_takes_nothing_from_it(stdin: Callable[[list[bytes]], None]) -> None:
    """What was looked at is still there to be read."""
    data = b'{"body": "a"}\n{"body": "b"}\n'
    stdin([data])
    assert find_text_column([Slice("-", "jsonl", None)], None) == "body"
    assert compression.open_bytes("-").read() == data


@pytest.mark.parametrize(
    ("data", "format"),
    [(b' {"text": "a"}\n', "jsonl"), (b'[\n {"text": "a"}]', "json"), (b"[1] plain\n", "txt"), (b"", "txt")],
)
def test_the_format_of_standard_input_is_told_by_its_head(
    stdin: Callable[[list[bytes]], None], data: bytes, format: str
) -> None:
    """It has no name that could say so."""
    stdin([data])
    assert [file.format for file in list_inputs(["-"])] == [format]
