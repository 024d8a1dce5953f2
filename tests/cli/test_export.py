"""`milldam export` as people call it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from tests.kit.token_stores import flat_tokens, write_store

from milldam.cli import main
from milldam.errors import ConfigError, MismatchError, StoreError
from milldam.loader.stores import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return write_store(tmp_path / "store", [[5, 300], [700]])


def run(*arguments: object) -> str:
    """What the command prints; its errors are raised."""
    words = ["--debug", "export", *(str(argument) for argument in arguments)]
    result = CliRunner().invoke(main, words, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_export_says_what_it_made_and_then_that_it_is_up_to_date(store: Store, tmp_path: Path) -> None:
    """Counts, size and time; a second call says that there is nothing to do."""
    arguments = (store.path, "--to", "nanogpt", "-o", tmp_path / "train.bin")
    first = run(*arguments).splitlines()
    assert first[-1] == f"{tmp_path / 'train.bin'}: 3 documents, 1,005 tokens, 2 KB on disk"
    assert first[0] == "1 file" and re.match(r"[\d.]+ s, 1 worker", first[-2])
    assert first[1].startswith("Memory: peak ") and len(first) == 4
    assert run(*arguments) == f"{tmp_path / 'train.bin'} is up to date: 3 documents, 1,005 tokens.\n"
    np.testing.assert_array_equal(np.fromfile(tmp_path / "train.bin", np.uint16), flat_tokens(store))


def test_export_prints_json(store: Store, tmp_path: Path) -> None:
    """For programs: the whole summary in one line."""
    printed = json.loads(run(store.path, "--to", "megatron", "-o", tmp_path / "pair", "--dtype", "int32", "--json"))
    assert printed["out"] == str(tmp_path / "pair")
    assert printed["facts"] == {"to": "megatron", "dtype": "int32"}
    assert printed["counts"] == {"documents": 3, "tokens": 1005, "files": 2} and printed["up_to_date"] is False


def test_export_refuses_with_milldams_errors(store: Store, tmp_path: Path) -> None:
    """Wrong options, other stores and no stores: errors that become a line and an exit code."""
    with pytest.raises(ConfigError, match="seq_len does not apply"):
        run(store.path, "--to", "npy", "-o", tmp_path / "a.npy", "--seq-len", "8")
    with pytest.raises(StoreError):
        run(tmp_path, "--to", "npy", "-o", tmp_path / "a.npy")
    run(store.path, "--to", "npy", "-o", tmp_path / "a.npy")
    with pytest.raises(ConfigError, match="milldam import"):
        run(tmp_path / "a.npy", "--to", "nanogpt", "-o", tmp_path / "a.bin")
    other = write_store(tmp_path / "other", [[7]])
    with pytest.raises(MismatchError, match="overwrite"):
        run(other.path, "--to", "npy", "-o", tmp_path / "a.npy")
    run(other.path, "--to", "npy", "-o", tmp_path / "a.npy", "--overwrite")
    with pytest.raises(click.BadParameter, match="tfrecord"):
        run(store.path, "--to", "tfrecord", "-o", tmp_path / "a")
