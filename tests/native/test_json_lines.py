"""The kernel that takes texts out of JSON lines: what it takes is what Arrow and Python's json make of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.source_reading import TEXT, Result, read, small_blocks

from milldam.sources import jsonl
from milldam.sources.batch import TextRules

SOUND = [
    b'{"text": "plain"}',
    b'{"a": [1, -0.5e+3, {"b": [[], {}]}], "text": "\\u00e9\\ud83d\\ude42 \\"\\\\\\/\\b\\f\\n\\r\\t", "c": null}',
    b'{ "x" :true ,"text" : "more than sixteen bytes \\u20ac without" , "y": false}\r',
    '{"text": "é你🙂 \U0010ffff ퟿ ࠀ \U00010000 and on", "ü": "ö"}'.encode(),
    b'\t{"te\\u0078t": "", "n": [0, 1.5, 1E5, -1]} ',
]
ODD = [bytes([byte]) for byte in b'"\\u{}[],:0-.e \n\t\0\x1f\x7f']
HIGH = [bytes([byte]) for byte in b"\x80\x8f\x90\x9f\xa0\xbf\xc1\xc2\xe0\xed\xef\xf0\xf4\xf5\xff"]


def both_ways(folder: Path, data: bytes, rules: TextRules = TEXT) -> Result:
    """What reading gives, with the kernel as line by line: texts, rejects and batches."""
    path = folder / "a.jsonl"
    path.write_bytes(data)
    found = read(path, rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "kernel", lambda *_: lambda *_: -1)
        expected = read(path, rules)
    assert found.texts == expected.texts
    assert found.rejects == expected.rejects
    assert [one.bytes_read for one in found.batches] == [one.bytes_read for one in expected.batches]
    return found


@pytest.fixture
def _no_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that the kernel does not take is an error."""
    monkeypatch.delattr(pyarrow.json, "read_json")


def test_values_of_any_depth_are_read(tmp_path: Path) -> None:
    """The kernel follows 64 that are open; deeper ones are left to others."""
    lines = [b'{"text": "%d", "x": %s1%s}' % (deep, b"[" * deep, b"]" * deep) for deep in (63, 64, 65, 500)]
    with small_blocks(1):
        assert both_ways(tmp_path, b"\n".join(lines)).texts == ["63", "64", "65", "500"]


@pytest.mark.usefixtures("_no_arrow")
@pytest.mark.parametrize("line", SOUND, ids=lambda line: repr(line[:30]))
def test_sound_lines_are_taken_by_the_kernel(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + line)
    assert read(path).texts == [json.loads(line)["text"]] * 2


@pytest.mark.parametrize("line", SOUND, ids=lambda line: repr(line[:30]))
def test_a_byte_changed_anywhere_gives_what_is_given_without_the_kernel(tmp_path: Path, line: bytes) -> None:
    """Each byte of a line exchanged, left out, and others put before it; every line is a block of its own."""
    chance = random.Random(len(line))
    mutants = [line]
    for at in range(len(line)):
        mutants.append(line[:at] + line[at + 1 :])
        bytes_put = chance.sample(ODD, 3) + chance.sample(HIGH, 2)
        mutants += [line[:at] + byte + line[at + chance.randrange(2) :] for byte in bytes_put]
    with small_blocks(1):
        found = both_ways(tmp_path, b"\n".join(mutants))
    assert found.texts and found.rejects


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.fixed_dictionaries({"text": st.text(max_size=60) | VALUES}) | st.dictionaries(st.text(max_size=5), VALUES)
CHANGES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2), st.sampled_from(ODD + HIGH)), max_size=3)


@given(records=st.lists(RECORDS, max_size=6), changes=CHANGES, ascii=st.booleans(), block=st.integers(20, 400))
@pytest.mark.parametrize("invalid_utf8", ["reject", "replace", "drop"])
def test_any_lines_give_what_they_give_without_the_kernel(
    tmp_path: Path,
    records: list[Any],
    changes: list[tuple[int, int, bytes]],
    ascii: bool,
    block: int,
    invalid_utf8: str,
) -> None:
    data = b"\n".join(json.dumps(record, ensure_ascii=ascii).encode("utf-8", "surrogatepass") for record in records)
    for at, skipped, byte in changes:
        data = data[:at] + byte + data[at + skipped :]
    with small_blocks(block):
        both_ways(tmp_path, data, TextRules(text_column="text", invalid_utf8=invalid_utf8))
