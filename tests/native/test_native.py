"""The compiled kernels: made from the C files that are there, by the first compiler that works."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam import native
from milldam.dedup.sketches import compare_sets
from milldam.errors import ResourceError
from milldam.native import build
from milldam.text.arrays import character_counts

TEXTS = st.lists(st.text(max_size=30) | st.text(st.sampled_from("aé你🙂\n"), min_size=200, max_size=800), max_size=6)
VALUES = st.lists(st.sets(st.integers(0, 60) | st.integers(0, 2**32 - 1), max_size=40), min_size=1, max_size=8)


def test_an_array_of_another_type_is_refused() -> None:
    compare = native.kernel("compare_sets", np.uint32)
    with pytest.raises(TypeError, match="uint32 end to end, not float64"):
        compare(np.zeros(3))
    with pytest.raises(TypeError, match="uint32 end to end"):
        compare(np.zeros(6, np.uint32)[::2])


def test_arrays_that_are_too_small_are_refused() -> None:
    """Before anything is read or written beyond them, in kernels with and without room of the caller's."""
    counts = np.zeros(3, np.uint32)
    text, offsets = np.frombuffer(b"ab", np.uint8), np.array([0, 3])
    for name, arguments in {
        "drop": (np.array([0, 3]), np.array([1, 1]), counts.astype(np.uint8)),
        "count_characters": (text, offsets, np.zeros(1, np.int64)),
        "json_texts": (text, text, np.empty(1, np.uint8), offsets),
    }.items():
        kernel = native.kernel(name, *(one.dtype.type for one in arguments))
        with pytest.raises(ValueError, match=f"milldam_{name} in C refuses arrays"):
            kernel(*arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the C files."""
    folder = tmp_path / "native"
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(build, "FOLDER", folder)
    return folder


def test_a_library_is_made_anew_when_a_file_changes(folder: Path) -> None:
    """As in a checkout after a rebase; the old one goes. What can't be loaded here is made anew, too."""
    before = build.library()
    assert native.library.__wrapped__() and before.exists()
    with (folder / "sets.c").open("a") as file:
        file.write("long milldam_added(void) { return 7; }\n")
    assert native.library.__wrapped__().milldam_added() == 7
    assert build.library() != before and list(folder.glob("kernels*")) == [build.library()]
    with (folder / "sets.c").open("a") as file:
        file.write("long milldam_more(void) { return 8; }\n")
    build.library().write_bytes(b"of another machine")
    assert native.library.__wrapped__().milldam_more() == 8


def test_without_a_compiler_an_error_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first use; nothing is left behind."""
    build.library().unlink()
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ResourceError, match=r"Install a C compiler \(or `pip install ziglang`\), .*\nno C compiler"):
        native.library.__wrapped__()
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(ResourceError, match="\n/nowhere/cc: "):
        native.library.__wrapped__()
    assert not list(folder.glob("kernels*"))


@given(sets=VALUES, cut=st.lists(st.booleans(), min_size=8, max_size=8))
def test_sets_are_compared_as_sets_of_python(sets: list[set[int]], cut: list[bool]) -> None:
    counts = np.array([len(one) for one in sets])
    values = np.array([value for one in sets for value in sorted(one)], np.uint32)
    made_cut = np.array(cut[: len(sets)]) & (counts > 0)
    first, second = (one.ravel() for one in np.indices((len(sets), len(sets))).astype(np.int64))
    first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
    found = compare_sets(values, counts, made_cut, first, second)
    both, either = [], []
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        bound = min(max(sets[k]) if made_cut[k] else 2**32 for k in (one, other))
        both.append(sum(value <= bound for value in sets[one] & sets[other]))
        either.append(sum(value <= bound for value in sets[one] | sets[other]))
    assert found[0].tolist() == both and found[1].tolist() == either


@given(texts=TEXTS, first=st.integers(0, 3))
def test_characters_are_counted_as_python_counts_them(texts: list[str], first: int) -> None:
    """Of slices too, and of none."""
    array = pa.array(texts, pa.large_string())[first:]
    assert character_counts(array).tolist() == [len(text) for text in texts[first:]]
