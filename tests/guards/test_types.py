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
    'milldam.open("train.bin", dtype="int32")': "ForeignFile",
    'milldam.open("c.yaml", store="s")': "Feed",
    "store[0]": "ndarray",
    "store.tokenizer": "Tokenizer",
    'store.split("val")': "Store",
    "store.split(train=0.9, val=...)": "dict[str, Part]",
    "store.split(train=0.9, val=...)['val'].windows(8)[0]": "tuple[ndarray, ndarray]",
    "store.windows(8)": "Samples[tuple[ndarray, ndarray], tuple[ndarray, ndarray]]",
    'store.windows(8, form="hf", stride=4)[0]': "Labelled",
    'store.windows(8, form="hf").batches(2)': "Batches[Labelled]",
    "store.windows(8).batches(2, shuffle='block').state_dict()": "dict[str, object]",
    "next(store.windows(8).batches(2, epochs=None))[1]": "ndarray",
    "store.packed(8)[0]": "PackedRow",
    "next(store.packed(8, strategy='best_fit').batches(2))": "PackedBatch",
    "next(store.packed(8).batches(2))['cu_seqlens']": "ndarray",
    "next(store.packed(8).batches(2))['max_seqlen']": "int",
    "next(iter(store.streams(2, 8)))": "tuple[ndarray, ndarray]",
    'milldam.mix({"a": 0.7, "b": 3})': "Mixture",
    'milldam.mix({"a": 0.7, "b": 3}).windows(8, split="train").batches(2)': "Batches[tuple[ndarray, ndarray]]",
    "milldam.mix({store: 1, other: 2}).packed(8)[0]": "PackedRow",
    "milldam.mix({store.windows(8): 1, other.windows(8): 2})[0]": "tuple[ndarray, ndarray]",
    "milldam.mix({store.packed(8): 1, other.packed(8): 2}).drawn(10)": "tuple[int, ...]",
    "milldam.ConfigError('x').exit_code": "int",
}
"""Expressions, and their types as one would say them."""
OPENING = """
import milldam

store = milldam.open("s")
other = milldam.open("other")
"""


WITHOUT = (
    *("awkward", "datasets", "datatrove", "fsspec", "gigatoken", "huggingface_hub", "jax", "lightning", "litdata"),
    *("megatron", "pandas", "pyarrow", "ray", "streaming", "tokenizers", "torch", "torchdata", "transformers"),
)
"""Packages whose types mypy is not to read, as where they are not installed: torch alone would take it a minute."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Python of README as a user's script, and one that asks for the type of every expression."""
    folder = tmp_path_factory.mktemp("user")
    blocks = [one.content for one in blocks_of(PROJECT / "README.md") if one.language == "python" and not one.mark]
    assert any("milldam.tokenize" in one for one in blocks)
    (folder / "readme.py").write_text("\n".join(blocks))
    (folder / "shown.py").write_text(OPENING + "\n".join(f"reveal_type({expression})" for expression in SHOWN))
    return folder


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


@pytest.fixture(scope="module")
def mypy(scripts: Path) -> str:
    """What it says of both scripts in strict mode, as a user would run it."""
    others = ",".join(f"{one}.*" for one in WITHOUT)
    settings = f"[mypy]\nstrict = True\n[mypy-{others}]\nfollow_imports = skip\nignore_missing_imports = True\n"
    (scripts / "mypy.ini").write_text(settings)
    options = [f"--cache-dir={PROJECT / '.mypy_cache' / 'user'}", f"--python-executable={sys.executable}"]
    command = [sys.executable, "-m", "mypy", *options, "readme.py", "shown.py"]
    return subprocess.run(command, cwd=scripts, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def pyright(scripts: Path) -> list[dict[str, str]]:
    """Its messages about both scripts in strict mode, which refuses types that are known in part."""
    if not PYRIGHT.exists():
        pytest.skip('needs basedpyright, which is pyright as a wheel: pip install -e ".[dev]"')
    settings = {"typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (scripts / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, "readme.py", "shown.py"]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True)
    found: list[dict[str, str]] = json.loads(done.stdout)["generalDiagnostics"]
    return found


def of_pyright(found: list[dict[str, str]], script: str, severity: str) -> list[str]:
    return [one["message"] for one in found if Path(one["file"]).name == script and one["severity"] == severity]


def test_mypy_takes_the_python_of_the_readme(mypy: str) -> None:
    """Without a complaint."""
    assert re.search(r"^(Success: no issues found|Found \d+ errors?) ", mypy, re.MULTILINE), mypy
    assert [line for line in mypy.splitlines() if line.startswith("readme.py")] == []


def test_pyright_takes_the_python_of_the_readme(pyright: list[dict[str, str]]) -> None:
    """Without an error."""
    assert of_pyright(pyright, "readme.py", "error") == []


def test_mypy_knows_every_type_that_a_user_meets(mypy: str) -> None:
    """None is `Any`, but for numpy's own integers of any width."""
    assert [line for line in mypy.splitlines() if ": error: " in line] == []
    revealed = re.findall(r'^shown.py.* Revealed type is "(.*)"$', mypy, flags=re.MULTILINE)
    assert dict(zip(SHOWN, map(said, revealed), strict=True)) == SHOWN


def test_pyright_knows_every_type_that_a_user_meets(pyright: list[dict[str, str]]) -> None:
    """The same types as mypy, in pyright's words."""
    assert of_pyright(pyright, "shown.py", "error") == []
    messages = of_pyright(pyright, "shown.py", "information")
    revealed = [said(re.sub(r'^Type of ".*" is "(.*)"$', r"\1", one, flags=re.DOTALL)) for one in messages]
    assert dict(zip(SHOWN, revealed, strict=True)) == SHOWN
