"""The compiled kernels: made from these C files, equal to numpy, and done without where there is no compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import TOKENIZER, run_here, write_lines
from tests.kit.kernels import without_kernels

from milldam import native
from milldam.dedup.sketches import Sets
from milldam.native import build
from milldam.run.summary import package_versions

VALUES = st.lists(st.sets(st.integers(0, 60) | st.integers(0, 2**32 - 1), max_size=40), min_size=1, max_size=8)


def test_the_library_is_made_from_these_files() -> None:
    """Where the tests run there is a compiler: numpy would hide that no kernel is ever used."""
    assert native.library() is not None, build.build() or "stale: run `make src/milldam/native/kernels.so`"


def test_an_array_of_another_type_is_refused() -> None:
    compare = native.kernel("compare_sets", np.uint32)
    assert compare is not None
    with pytest.raises(TypeError, match="uint32 end to end, not float64"):
        compare(np.zeros(3))
    with pytest.raises(TypeError, match="uint32 end to end"):
        compare(np.zeros(6, np.uint32)[::2])


def test_arrays_that_are_too_small_are_refused() -> None:
    """Before anything is read or written beyond them, in kernels with and without room of the caller's."""
    keys, counts = np.arange(9, dtype=np.uint64), np.zeros(3, np.uint32)
    text, offsets = np.frombuffer(b"ab", np.uint8), np.array([0, 3])
    for name, arguments in {
        "sort": (keys, keys[:8].copy()),
        "count": (np.array([0, 3]), counts),
        "count_characters": (text, offsets, np.zeros(1, np.int64)),
        "gather": (counts, np.array([2]), np.array([2]), np.empty(2, np.uint32)),
        "json_texts": (text, text, np.empty(1, np.uint8), offsets),
    }.items():
        kernel = native.kernel(name, *(one.dtype.type for one in arguments))
        assert kernel is not None
        with pytest.raises(ValueError, match=f"milldam_{name} in C refuses arrays"):
            kernel(*arguments)


def copied(folder: Path) -> Path:
    shutil.copytree(build.FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_a_library_of_other_files_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(tmp_path / "native")
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "LIBRARY", folder / "kernels.so")
    assert native.library.__wrapped__() is not None
    with (folder / "sets.c").open("a") as file:
        file.write("/* changed */\n")
    assert native.library.__wrapped__() is None


def test_without_a_compiler_the_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "kernels.so")
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert build.build() == "no C compiler (cc, gcc, clang, or `pip install ziglang`)"
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert str(build.build()).startswith("/nowhere/cc: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "gcc '", "false"])
def test_a_compiler_that_does_not_work_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    """The next one is tried; where none works, the build can know before and ask for ziglang."""
    monkeypatch.setattr(build, "LIBRARY", tmp_path / "kernels.so")
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    monkeypatch.setenv("CC", compiler)
    assert build.can_compile()
    assert build.build() is None and build.LIBRARY.exists()
    broken = tmp_path / "bin" / "gcc"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho stdint.h: no such file >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    assert not build.can_compile()
    assert str(build.build()).endswith("gcc: stdint.h: no such file")


@pytest.mark.parametrize(("value", "used"), [("1", False), ("true", False), ("0", True), ("", True), ("no", True)])
def test_kernels_are_off_when_the_variable_says_so(monkeypatch: pytest.MonkeyPatch, value: str, used: bool) -> None:
    monkeypatch.setenv("MILLDAM_WITHOUT_KERNELS", value)
    assert (native.library.__wrapped__() is not None) is used


def test_a_run_without_kernels_says_so(tmp_path: Path) -> None:
    """In its plan, which a quiet run does not print."""
    corpus = write_lines(tmp_path / "corpus.jsonl", ["The mill stands."])
    asked = ("tokenize", corpus, "--tokenizer", TOKENIZER, "-o")
    assert "Kernels" not in run_here(*asked, tmp_path / "with").stderr
    with without_kernels():
        assert "Kernels: none, numpy instead" in run_here(*asked, tmp_path / "without").stderr
        assert run_here(*asked, tmp_path / "quiet", "-q").stderr == ""


@given(st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=60), st.integers(0, 64))
def test_numbers_are_sorted(values: list[int], shift: int) -> None:
    """Also where some or all of their bytes are the same."""
    sort = native.kernel("sort", np.uint64, np.uint64)
    assert sort is not None
    numbers = np.array([value >> shift for value in values], np.uint64)
    expected = np.sort(numbers)
    sort(numbers, np.empty_like(numbers))
    assert np.array_equal(numbers, expected)


@given(sets=VALUES, cut=st.lists(st.booleans(), min_size=8, max_size=8))
def test_sets_are_compared_as_in_numpy(sets: list[set[int]], cut: list[bool]) -> None:
    counts = np.array([len(one) for one in sets])
    values = np.array([value for one in sets for value in sorted(one)], np.uint32)
    made = Sets(values, counts, np.array(cut[: len(sets)]) & (counts > 0))
    first, second = (one.ravel() for one in np.indices((len(sets), len(sets))).astype(np.int64))
    first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
    found = made.compare(first, second)
    with without_kernels():
        expected = made.compare(first, second)
    assert np.array_equal(found, expected)


def test_a_summary_says_whether_kernels_were_used() -> None:
    assert package_versions.__wrapped__()["kernels"] == build.digest()
    with without_kernels():
        assert package_versions.__wrapped__()["kernels"] == "none, numpy instead"
