"""Files that are whole or not there, and a full disk that is said to be full."""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.kit.jobs import TOKENIZER, run_milldam, small_disk, write_corpus

from milldam import files
from milldam.errors import ResourceError
from milldam.files import (
    NewFile,
    hash_bytes,
    remove_temporaries,
    stays_in_folder,
    write_file,
)
from milldam.stores.tokens.writer import ShardWriter, Tokens


def test_nothing_has_the_name_before_the_commit(tmp_path: Path) -> None:
    """A file shows up under its name when it is committed, whole."""
    path = tmp_path / "a.bin"
    with NewFile(path) as new:
        new.write(b"one")
        new.write(b"two")
        assert not path.exists()
        record = new.commit()
    assert path.read_bytes() == b"onetwo"
    assert record == {"bytes": 6, "xxh3": xxhash.xxh3_128(b"onetwo").hexdigest()}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.bin"]


def test_a_work_file_is_put_in_place_whole_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its name, all its bytes and its record; the disk is not waited for."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("synced"))
    with NewFile(tmp_path / "a.bin") as new:
        new.write(b"one")
        assert not new.path.exists()
        assert new.put_in_place() == {"bytes": 3, "xxh3": hash_bytes(b"one")}
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert new.path.read_bytes() == b"one"


def test_an_older_file_stays_until_the_commit(tmp_path: Path) -> None:
    """Replacing a file leaves the old one readable up to the last moment, and after a failure."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), NewFile(path) as new:
        new.write(b"new")
        raise RuntimeError("stop")
    assert path.read_bytes() == b"old"
    write_file(path, b"new")
    assert path.read_bytes() == b"new"


def test_leftovers_of_killed_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Only hidden temporary files go."""
    for name in (".a.bin.123.tmp", ".b.idx.9.tmp", "notes.tmp", ".hidden", "a.bin"):
        (tmp_path / name).write_bytes(b"x")
    remove_temporaries(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "a.bin", "notes.tmp"]


def test_a_file_that_may_not_grow_so_large_is_a_resource_error(tmp_path: Path) -> None:
    """`ulimit -f`, and file systems that hold no large files: the command names the file and what to do."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", 300_000).path
    asked = ("tokenize", corpus, "-o", tmp_path / "s", "--tokenizer", TOKENIZER, "--workers", 1)
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    said = run_milldam(*asked, code=4, preexec_fn=limited).stderr
    assert "EFBIG" in said and "run the same command again" in said
    assert "bug" not in said
    run_milldam(*asked)


def test_a_folder_that_takes_no_files_is_a_resource_error(tmp_path: Path) -> None:
    """As in /proc, or one that was removed; an input that is gone is not mistaken for it."""
    place = tmp_path / "gone" / "a.bin"
    with pytest.raises(ResourceError, match=r"its folder takes no files.*Choose another"):
        files.NewFile(place)
    with pytest.raises(ResourceError, match="takes no files"), files.explain_os_errors(Path("/proc/x")):
        Path("/proc/x").mkdir()
    with pytest.raises(FileNotFoundError), files.explain_os_errors(tmp_path / "a.bin"):
        (tmp_path / "input.txt").read_bytes()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((errno.ENOSPC, errno.EDQUOT), r"disk is full: .*a\.bin(.|\n)*run the same command again"),
        ((errno.EACCES, errno.EPERM, errno.EROFS), r"not writable .*Choose another"),
        ((errno.EIO, errno.ESTALE, errno.ENOMEM, errno.ENOLCK), r"a\.bin: .*\((.|\n)*run the same command again"),
    ],
)
def test_errors_of_the_system_say_where_and_what_to_do(tmp_path: Path, numbers: tuple[int, ...], message: str) -> None:
    """Never a bug of milldam: what is safe, and the name of the error, which people search for."""
    for number in numbers:
        with pytest.raises(ResourceError, match=message) as caught, files.explain_os_errors(tmp_path / "a.bin"):
            raise OSError(number, os.strerror(number))
        assert caught.value.exit_code == 4


def test_errors_that_are_not_of_the_system_pass_unchanged(tmp_path: Path) -> None:
    """Libraries derive theirs from OSError too; and what is said of another file is not said of this one."""
    with pytest.raises(OSError, match="gateway"), files.explain_os_errors(tmp_path):
        raise OSError("bad gateway")
    with pytest.raises(OSError, match="elsewhere"), files.explain_os_errors(tmp_path / "a.bin"):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "/elsewhere/in.jsonl")


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """On a real full disk the write is refused with our error, and what was begun is removed."""
    disk = tmp_path / "disk"
    with small_disk(disk, "64k"):
        with pytest.raises(ResourceError, match="disk is full"), NewFile(disk / "a.bin") as new:
            new.write(bytes(1 << 20))
        assert list(disk.iterdir()) == []


def test_a_shard_that_fills_the_disk_is_taken_back_whole(tmp_path: Path) -> None:
    """Lengths that wait to be written do not hide the error, nor keep the unfinished shard on the full disk."""
    disk = tmp_path / "disk"
    with small_disk(disk, "64k"):
        documents = Tokens(np.zeros(300, dtype=np.uint16), np.ones(300, dtype=np.int64))
        with pytest.raises(ResourceError, match="disk is full"), ShardWriter(disk, "train", "uint16") as writer:
            for _ in range(1000):
                writer.append(documents)
        assert list(disk.iterdir()) == []


@given(st.text(alphabet="a./\\\0-", max_size=6))
def test_a_name_that_stays_in_a_folder_leads_to_a_file_of_it(name: str) -> None:
    """Whatever a manifest says: what passes is one step below the folder, on any system."""
    if stays_in_folder(name):
        assert (Path("/folder") / name).parent == Path("/folder")
        assert os.path.normpath(f"/folder/{name}") == f"/folder/{name}"
        assert stays_in_folder(name, hidden=False) is not name.startswith(".")
    else:
        assert not name or name in (".", "..") or set(name) & set("/\\\0")
        assert not stays_in_folder(name, hidden=False)
    assert not stays_in_folder(None)


def test_a_library_writes_to_a_file_and_commits_nothing(tmp_path: Path) -> None:
    """What pyarrow closes is still to be committed by whoever made the file."""
    with NewFile(tmp_path / "a") as new:
        with pa.PythonFile(new, mode="w") as file:
            assert file.write(np.arange(3, dtype=np.uint16)) == 6
            assert file.tell() == 6
        assert not (tmp_path / "a").exists()
        new.commit()
    assert (tmp_path / "a").read_bytes() == np.arange(3, dtype=np.uint16).tobytes()
