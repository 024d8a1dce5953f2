"""milldam in a program of somebody else's: what it leaves as it was, and what reaches it across processes."""

from __future__ import annotations

import csv
import importlib
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.kit.jobs import TOKENIZER, write_lines

import milldam
from milldam import MilldamError
from milldam.errors import Setting

OPTIONS: dict[str, Any] = {"tokenizer": TOKENIZER, "memory": "1GB", "workers": 1}


def error_kinds() -> Iterator[type[Exception]]:
    """Every error that is made anywhere in milldam."""
    package = Path(milldam.__file__).parent
    for path in package.rglob("*.py"):
        for name in re.findall(r"^class (\w+)\(\w*(?:Error|Exception)\):", path.read_text(), re.MULTILINE):
            module = ".".join(("milldam", *path.relative_to(package).with_suffix("").parts))
            yield getattr(importlib.import_module(module.removesuffix(".__init__")), name)


def test_every_error_survives_pickling_with_its_message() -> None:
    """Whatever a subclass is made from: errors come from workers."""
    kinds = set(error_kinds())
    assert {getattr(milldam, name) for name in milldam.__all__ if name.endswith("Error")} <= kinds
    for kind in kinds:
        if issubclass(kind, MilldamError):
            error = kind.__new__(kind, "line 3: ", Setting("text_column", "body"), ".")
            error.reason = "no_field"
            again = pickle.loads(pickle.dumps(error))
            assert type(again) is kind and again.reason == "no_field", kind
            assert str(again) == "line 3: text_column='body'.", kind
            assert again.spelled(lambda setting: "--" + setting.name) == "line 3: --text_column."


def test_csv_keeps_the_limit_of_the_program(tmp_path: Path) -> None:
    """Fields beyond the csv module's own limit are read all the same."""
    before = csv.field_size_limit(77_777)
    try:
        (tmp_path / "corpus.csv").write_text(f'text\n"{"mill race " * 10_000}"\n')
        assert milldam.tokenize(tmp_path / "corpus.csv", tmp_path / "store", **OPTIONS).tokens > 20_000
        assert csv.field_size_limit() == 77_777
    finally:
        csv.field_size_limit(before)


def test_nothing_stays_in_the_import_system(tmp_path: Path) -> None:
    """Nor is a package hidden from the program's threads meanwhile."""
    corpus = write_lines(tmp_path / "corpus.jsonl", ["some text"] * 10)
    program = (
        "import sys, milldam\n"
        f"milldam.tokenize({str(corpus)!r}, 'store', tokenizer={str(TOKENIZER)!r}, workers=1)\n"
        f"milldam.map({str(corpus)!r}, lambda rows: {{'n': [1] * len(rows['text'])}}, 'table', workers=1)\n"
        "assert not [one for one in sys.meta_path if one.__module__.startswith('milldam')], sys.meta_path\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
