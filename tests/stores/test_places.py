"""Where output may go and what a folder or an address holds: said in a line, and nothing written to the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import TOKENIZER, invoke
from tests.kit.token_stores import write_store

import milldam
from milldam.errors import ConfigError, InputError, MilldamError, ResourceError, StoreError
from milldam.stores.tokens.manifest import Manifest

ADDRESS = "s3://bucket/out"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a store, rows, and a script."""
    write_store(tmp_path / "st", [[3, 2], [4]])
    (tmp_path / "in.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "f.py").write_text("def same(batch):\n    return batch\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(desk: Path) -> Path:
    milldam.map("in.jsonl", lambda batch: batch, "table", workers=1, memory="2GB")
    return desk / "table"


WRITERS: dict[str, Callable[[str], Any]] = {
    "tokenize": lambda out: milldam.tokenize("in.jsonl", out, tokenizer=TOKENIZER, workers=1),
    "map": lambda out: milldam.map("in.jsonl", lambda batch: batch, out, workers=1),
    "export": lambda out: milldam.export("st", "npy", f"{out}.npy"),
    "export a folder": lambda out: milldam.export("st", "mds", out),
    "import": lambda out: milldam.import_tokens("tokens.npy", out),
    "pull": lambda out: milldam.pull("anna/corpus", out),
}


@pytest.mark.parametrize("name", WRITERS)
def test_an_address_is_no_place_for_output(desk: Path, name: str) -> None:
    """As a path it would be a folder called `s3:` here: it is refused with what to do, and nothing is made."""
    milldam.export("st", "npy", "tokens.npy")
    before = sorted(desk.iterdir())
    with pytest.raises(ConfigError, match=r"s3://bucket/.*: the output is a folder on this machine.*milldam push"):
        WRITERS[name](ADDRESS)
    assert sorted(desk.iterdir()) == before


def test_ids_beyond_any_vocabulary_are_refused(desk: Path) -> None:
    """Ids of two bytes that are read as four: without a vocabulary's size they are not believed."""
    np.arange(1, 2001, dtype=np.uint16).tofile("tokens.bin")
    with pytest.raises(InputError, match=r"is not a token id of a vocabulary of 16,777,216\. .*dtype.*vocab_size"):
        milldam.import_tokens("tokens.bin", "imported", dtype="uint32")
    assert milldam.import_tokens("tokens.bin", "imported", dtype="uint32", vocab_size=2**30).tokens == 1000
    assert milldam.import_tokens("tokens.bin", "narrow").vocab_size == 2001


# ---- what a folder holds ----


def test_a_table_is_not_called_an_unfinished_store(tmp_path: Path) -> None:
    """Nor one of other rows a table of windows."""
    (tmp_path / "run").mkdir()
    (tmp_path / "milldam-table.json").write_text("{}")
    with pytest.raises(StoreError, match=r"a table, not a token store\. .*to_hf"):
        Manifest.read(tmp_path)


# ---- tables at an address ----


def test_a_table_at_an_address_is_said_to_be_one(table: Path) -> None:
    """Read or as a source of rows: it has to be fetched first."""
    address = f"file://{table}"
    same = {"workers": 1, "memory": "2GB"}
    for use in (milldam.Table, lambda given: milldam.map(given, lambda batch: batch, "again", **same)):
        with pytest.raises(MilldamError, match="table.*`milldam pull`"):
            use(address)
    with pytest.raises(StoreError, match="no store there"):
        milldam.open(address)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "pull"])
def test_a_file_system_that_takes_no_files_is_said(desk: Path, name: str) -> None:
    """Not as a bug of milldam."""
    milldam.export("st", "npy", "tokens.npy")
    with pytest.raises(ResourceError, match=r"/proc/.*takes no files.*Choose another place"):
        WRITERS[name]("/proc/milldam-out")
