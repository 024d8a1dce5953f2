"""Where output may go and what a folder or an address holds: said in a line, and nothing written to the wrong place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kit.jobs import TOKENIZER
from tests.kit.token_stores import write_store

import milldam
from milldam.errors import ConfigError, MilldamError, ResourceError, StoreError
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


def test_a_table_is_not_called_a_store_and_read_here_alone(desk: Path) -> None:
    """Read or as a source of rows: one at an address has to be fetched first."""
    same: dict[str, Any] = {"workers": 1, "memory": "2GB"}
    milldam.map("in.jsonl", lambda batch: batch, "table", **same)
    with pytest.raises(StoreError, match=r"a table, not a token store\. .*to_hf"):
        Manifest.read(desk / "table")
    address = f"file://{desk / 'table'}"
    for use in (milldam.Table, lambda given: milldam.map(given, lambda batch: batch, "again", **same)):
        with pytest.raises(MilldamError, match=r"table.*`milldam pull`"):
            use(address)
    with pytest.raises(StoreError, match="no store there"):
        milldam.open(address)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "pull"])
def test_a_file_system_that_takes_no_files_is_said(desk: Path, name: str) -> None:
    """Not as a bug of milldam."""
    milldam.export("st", "npy", "tokens.npy")
    with pytest.raises(ResourceError, match=r"/proc/.*takes no files.*Choose another place"):
        WRITERS[name]("/proc/milldam-out")
