"""Readers: mapped and positioned reads give the tokens of the files end to end; damage is an error, never a crash."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milldam.errors import StoreError
from milldam.loader.reading import MappedReader, PositionedReader, Reader
from milldam.loader.stream import TokenFile, TokenStream

READERS: list[Callable[[TokenStream], Reader]] = [MappedReader, PositionedReader]
DTYPES = ["uint8", "uint16", "int32", "int64"]


@dataclass(frozen=True)
class Files:
    stream: TokenStream
    flat: npt.NDArray[Any]
    """All tokens, end to end."""


def write_files(
    folder: Path, sizes: list[int], *, dtype: str = "uint16", headers: list[int] | None = None, behind: int = 3
) -> Files:
    """Files of so many random tokens each, behind `headers` tokens of junk and before `behind` bytes of it."""
    width = np.dtype(dtype).itemsize
    rng = np.random.default_rng(sum(sizes))
    made, parts = [], [np.empty(0, dtype)]
    for number, size in enumerate(sizes):
        tokens = rng.integers(1, 120, size).astype(dtype)
        first_byte = (headers or [0] * len(sizes))[number] * width
        path = folder / f"{number}.bin"
        path.write_bytes(b"\xee" * first_byte + tokens.tobytes() + b"\xdd" * behind)
        made.append(TokenFile(path, size, first_byte))
        parts.append(tokens)
    flat = np.concatenate(parts)
    return Files(TokenStream("files", tuple(made), np.dtype(dtype), 0, len(flat), "print"), flat)


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for one example: hypothesis runs many in one test."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def open_descriptors() -> int:
    gc.collect()  # what earlier tests left
    return len(os.listdir("/proc/self/fd"))


file_sizes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 40, 2048, 2049]), min_size=1, max_size=9).filter(any)


@st.composite
def reads(draw: st.DrawFn, total: int) -> tuple[list[int], int]:
    """Begins of rows and their length, the very first and the very last row often among them."""
    length = draw(st.integers(1, total) | st.integers(1, min(total, 8)))
    edges = st.sampled_from([0, total - length])
    return draw(st.lists(st.integers(0, total - length) | edges, max_size=12)), length


@pytest.mark.parametrize("make", READERS)
@given(sizes=file_sizes, dtype=st.sampled_from(DTYPES), data=st.data())
def test_rows_are_those_of_the_files_end_to_end(
    make: Callable[[TokenStream], Reader], sizes: list[int], dtype: str, data: st.DataObject
) -> None:
    """Rows anywhere, over one border or several, also to the very last token."""
    headers = data.draw(st.lists(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes)))
    starts, length = data.draw(reads(sum(sizes)))
    with new_folder() as folder:
        files = write_files(folder, sizes, dtype=dtype, headers=headers)
        reader = make(files.stream)
        rows = reader.rows(np.array(starts, np.int64), length)
        assert rows.dtype == dtype
        assert rows.shape == (len(starts), length)
        assert rows.tolist() == [files.flat[start : start + length].tolist() for start in starts]


@pytest.mark.parametrize("make", READERS)
@given(sizes=file_sizes, dtype=st.sampled_from(DTYPES), data=st.data())
def test_runs_are_those_of_the_files_end_to_end(
    make: Callable[[TokenStream], Reader], sizes: list[int], dtype: str, data: st.DataObject
) -> None:
    """Runs of any lengths, none included, and the same read again after other reads."""
    total = sum(sizes)
    starts = data.draw(st.lists(st.integers(0, total), max_size=10))
    lengths = [data.draw(st.integers(0, total - start) | st.just(total - start)) for start in starts]
    with new_folder() as folder:
        files = write_files(folder, sizes, dtype=dtype)
        reader = make(files.stream)
        expected = [token for s, n in zip(starts, lengths, strict=True) for token in files.flat[s : s + n].tolist()]
        for _ in range(2):
            runs = reader.runs(np.array(starts, np.int64), np.array(lengths, np.int64))
            assert runs.dtype == dtype
            assert runs.tolist() == expected
            reader.rows(np.array([0, 0]), 1)


@pytest.mark.parametrize("make", READERS)
@pytest.mark.parametrize("missing", [1, 4, 2_000])
def test_a_file_cut_short_is_an_error(make: Callable[[TokenStream], Reader], missing: int, tmp_path: Path) -> None:
    """Fewer bytes than the tokens need is said before anything of it is read, never a bus error."""
    files = write_files(tmp_path, [10, 3_000, 10], behind=0)
    path = files.stream.files[1].path
    os.truncate(path, path.stat().st_size - missing)
    with pytest.raises(StoreError, match=rf"1\.bin: {6000 - missing:,} bytes where 6,000 are expected"):
        make(files.stream).rows(np.array([20]), 5)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Positioned reads find out when the file was longer before."""
    files = write_files(tmp_path, [1_000], behind=0)
    reader = PositionedReader(files.stream)
    reader.rows(np.array([0]), 10)
    os.truncate(files.stream.files[0].path, 100)
    with pytest.raises(StoreError, match=r"0\.bin: has become shorter"):
        reader.rows(np.array([900]), 10)
    with pytest.raises(StoreError, match=r"0\.bin: has become shorter"):
        reader.runs(np.array([900, 40]), np.array([10, 5]))


def test_threads_do_not_overwrite_one_another(tmp_path: Path) -> None:
    """A positioned reader used by two threads gives each its own rows, and closes the files of a thread that ended."""
    files = write_files(tmp_path, [500, 500])
    reader = PositionedReader(files.stream)
    mine = reader.rows(np.array([0]), 50)
    before = open_descriptors()
    theirs: list[list[int]] = []
    thread = threading.Thread(target=lambda: theirs.append(reader.rows(np.array([600]), 50)[0].tolist()))
    thread.start()
    thread.join()
    assert mine[0].tolist() == files.flat[:50].tolist()
    assert theirs == [files.flat[600:650].tolist()]
    gc.collect()
    assert open_descriptors() == before
