"""Docstrings: what an example shows is what comes out, and every public name has one.

Examples run at the desk that pages are read at (tests/kit/reading_desk.py), a fresh one for each docstring, with
`corpus.milldam` made from its corpus. They know `milldam`, `np` and `store`, which is that store.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shutil
from contextlib import chdir
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tests.kit.reading_desk import lay_out

import milldam

SOURCE = Path(milldam.__file__).parent
LIKENESS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
ELSEWHERE = {"milldam.hub.pull", "milldam.hub.push"}
"""Their examples need the Hub, or a tokenizer of transformers."""
PLAIN = {"__version__", "TokenPair"}
"""A string and a type's other name, which can have no docstring."""


def modules_with_examples() -> list[str]:
    found = sorted(
        path for path in SOURCE.rglob("*.py") if re.search("^ *>>> ", path.read_text(encoding="utf-8"), re.M)
    )
    names = (path.relative_to(SOURCE.parent).with_suffix("").parts for path in found)
    return [".".join(name).removesuffix(".__init__") for name in names]


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    lay_out(folder)
    with chdir(folder):
        milldam.tokenize("corpus.jsonl", "corpus.milldam", tokenizer="tokenizer/")
    return folder


@pytest.fixture
def desk(laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(laid_out, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def examples_in(module: ModuleType) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder(exclude_empty=True).find(module)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", modules_with_examples())
def test_what_a_docstring_shows_is_what_comes_out(name: str, desk: Path) -> None:
    """Every example of a module, in the session that a reader would have."""
    tests = examples_in(importlib.import_module(name))
    assert tests
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=LIKENESS)
    for test in tests:
        test.globs |= {"milldam": milldam, "np": np, "store": milldam.open("corpus.milldam"), "__name__": "__main__"}
        runner.run(test, out=told.append)
    assert not runner.failures, "".join(told)


@pytest.mark.parametrize("name", ["milldam", "milldam.qa", "milldam.torch"])
def test_a_public_name_has_an_example(name: str) -> None:
    """In its own docstring, not in that of what it is made from; an error says what it means."""
    module = importlib.import_module(name)
    docstrings = {public: getattr(module, public).__doc__ or "" for public in module.__all__ if public not in PLAIN}
    docstrings = {public: text for public, text in docstrings.items() if not public.endswith("Error")}
    assert [public for public, text in docstrings.items() if ">>> " not in text] == []


def test_only_what_needs_another_machine_is_passed_over() -> None:
    """No example says that it is not run, but for those that need the Hub or transformers."""
    tests = (test for name in modules_with_examples() for test in examples_in(importlib.import_module(name)))
    skipped = {test.name for test in tests if any(one.options.get(doctest.SKIP) for one in test.examples)}
    assert skipped == ELSEWHERE
