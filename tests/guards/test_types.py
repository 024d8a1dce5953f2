"""What a user's type checker sees: README's Python passes mypy and pyright in strict mode, and nothing is `Any`.

The checkers look at milldam as at any installed package, without this project's settings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.guards.test_pages import blocks_of

PROJECT = Path(__file__).parents[2]
PYRIGHT = Path(sys.executable).with_name("basedpyright")

SHOWN = {
    'milldam.open("s")': "Store",
    'milldam.open("s", split="val", cache="1GB")': "Store",
    'milldam.open("t", kind="table")': "Table",
    'milldam.open("f", kind="features")': "FeatureStore",
    'milldam.open("train.bin", dtype="int32")': "ForeignFile",
    'milldam.open("x.npy", kind="file")': "ForeignFile",
    "store[0]": "ndarray",
    "store.tokenizer": "Tokenizer",
    'store.split("val")': "Store",
    "store.split(train=0.9, val=...)": "dict[str, Part]",
    "store.split(train=0.9, val=...)['val'].windows(8)[0]": "tuple[ndarray, ndarray]",
    "store.windows(8)": "Windows[tuple[ndarray, ndarray]]",
    'store.windows(8, form="hf", stride=4)[0]': "Labelled",
    'store.windows(8, form="hf").batches(2)': "Batches[Labelled]",
    "store.windows(8).batches(2, shuffle='block').state_dict()": "dict[str, object]",
    "next(store.windows(8).batches(2, epochs=None))[1]": "ndarray",
    "store.packed(8)[0]": "PackedRow",
    "next(store.packed(8, strategy='best_fit').batches(2))": "PackedBatch",
    "next(store.packed(8).batches(2))['cu_seqlens']": "ndarray",
    "next(store.packed(8).batches(2))['max_seqlen']": "int",
    "store.streams(2, 8)[0]": "tuple[ndarray, ndarray]",
    "next(iter(store.streams(2, 8)))": "tuple[ndarray, ndarray]",
    'milldam.mix({"a": 0.7, "b": 3})': "Mixture",
    'milldam.mix({"a": 0.7, "b": 3}).windows(8, split="train").batches(2)': "Batches[tuple[ndarray, ndarray]]",
    "milldam.mix({store: 1, other: 2}).packed(8)[0]": "PackedRow",
    "milldam.mix({store.windows(8): 1, other.windows(8): 2})[0]": "tuple[ndarray, ndarray]",
    "milldam.mix({store.packed(8): 1, other.packed(8): 2}).epochs_of(10)": "tuple[float, ...]",
    "milldam.ConfigError('x').exit_code": "int",
}
"""Expressions, and their types as one would say them."""
OPENING = """
import milldam

store = milldam.open("s")
other = milldam.open("other")
"""


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    """The Python of README as a user's script."""
    script = tmp_path / "readme.py"
    blocks = [one.content for one in blocks_of(PROJECT / "README.md") if one.language == "python" and not one.mark]
    assert any("milldam.tokenize" in one for one in blocks)
    script.write_text("\n".join(blocks))
    return script


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    """A script that asks for the type of every expression, a line each."""
    script = tmp_path / "shown.py"
    script.write_text(OPENING + "\n".join(f"reveal_type({expression})" for expression in SHOWN))
    return script


def said(revealed: str) -> str:
    """A type as one would say it: without modules, and of an array nothing but that it is one.

    >>> said("tuple[numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.integer[Any]]], milldam.loader.stores.Store]")
    'tuple[ndarray, Store]'
    """
    short = re.sub(r"TypedDict\(([\w.]+), \{.*?\}\)", r"\1", revealed)
    short = re.sub(r"\b(?:\w+\.)+(?=\w)", "", short)
    while (begin := short.find("ndarray[")) >= 0:
        depth, end = 1, begin + len("ndarray[")
        while depth:
            depth += {"[": 1, "]": -1}.get(short[end], 0)
            end += 1
        short = short[: begin + len("ndarray")] + short[end:]
    return short


def mypy(script: Path) -> str:
    cache = PROJECT / ".mypy_cache" / "user"
    options = ["--strict", "--config-file=", f"--cache-dir={cache}", f"--python-executable={sys.executable}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, script.name], cwd=script.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pyright(script: Path) -> list[str]:
    """Messages, none of which is an error."""
    if not PYRIGHT.exists():
        pytest.skip('needs basedpyright, which is pyright as a wheel: pip install -e ".[dev]"')
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (script.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, script.name]
    done = subprocess.run(command, cwd=script.parent, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [one["message"] for one in found if one["severity"] == "error"] == []
    return [one["message"] for one in found if one["severity"] == "information"]


def test_mypy_takes_the_python_of_the_readme(readme: Path) -> None:
    """In strict mode, as a user would run it."""
    assert mypy(readme).startswith("Success")


def test_pyright_takes_the_python_of_the_readme(readme: Path) -> None:
    """In strict mode, which refuses types that are known in part."""
    pyright(readme)


def test_mypy_knows_every_type_that_a_user_meets(shown: Path) -> None:
    """None is `Any`, but for numpy's own integers of any width."""
    revealed = re.findall(r'Revealed type is "(.*)"$', mypy(shown), flags=re.MULTILINE)
    assert dict(zip(SHOWN, map(said, revealed), strict=True)) == SHOWN


def test_pyright_knows_every_type_that_a_user_meets(shown: Path) -> None:
    """The same types as mypy, in pyright's words."""
    revealed = [said(re.sub(r'^Type of ".*" is "(.*)"$', r"\1", one, flags=re.DOTALL)) for one in pyright(shown)]
    assert dict(zip(SHOWN, revealed, strict=True)) == SHOWN
