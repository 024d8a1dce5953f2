"""A user's own function: found by name, hashed, and called with care."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from milldam.errors import ConfigError
from milldam.text.user_functions import FIRST_DOCUMENTS, UserFunction, function_hash, load_function


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


UPPER = "def upper(text):\n    return text.upper()\n"


def test_a_module_in_the_current_folder_is_found(desk: Path) -> None:
    """`module:function` and `package.module:function` work beside the user's files, and the path stays as it was."""
    write(desk / "desk_module.py", UPPER)
    write(desk / "desk_package" / "inner.py", UPPER)
    path = list(sys.path)
    assert load_function("desk_module:upper")("a") == "A"
    assert load_function("desk_package.inner:upper")("a") == "A"
    assert sys.path == path


def test_a_file_is_found_and_may_import_its_neighbours(desk: Path) -> None:
    """`path/to/file.py:function`; its own folder is importable meanwhile."""
    write(desk / "rules" / "desk_neighbour.py", UPPER)
    write(desk / "rules" / "clean.py", "from desk_neighbour import upper\n")
    path = list(sys.path)
    assert load_function("rules/clean.py:upper")("a") == "A"
    assert load_function(f"{desk}/rules/clean.py:upper")("a") == "A"
    assert sys.path == path


@pytest.mark.parametrize("spec", ["desk_edited.py:f", "desk_edited:f"])
def test_an_edited_function_has_another_hash_and_is_loaded_again(desk: Path, spec: str) -> None:
    """Never stale: neither the hash nor the function, within one process."""
    write(desk / "desk_edited.py", "def f(text): return 'old'\n")
    before = function_hash(spec)
    assert load_function(spec)("") == "old"
    assert load_function(spec) is load_function(spec)
    assert function_hash(spec) == before
    write(desk / "desk_edited.py", "def f(text): return 'new'\n")
    assert function_hash(spec) != before
    assert load_function(spec)("") == "new"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("upper", "names no function. Write it as module:function"),
        ("desk_helper:", "names no function"),
        (":upper", "names no function"),
        ("desk_helper:uper", 'no function "uper" in desk_helper. Did you mean "upper"?'),
        ("desk_helper:NUMBER", 'no function "NUMBER" in desk_helper'),
        ("desk_missing:upper", "no module desk_missing. It is looked for in"),
        ("desk_missing.inner:upper", "no module desk_missing.inner"),
        ("missing/file.py:upper", "no file missing/file.py"),
        ("desk_broken:upper", "importing desk_broken failed with\nModuleNotFoundError: No module named 'nowhere'"),
        ("desk_broken.py:upper", "importing desk_broken.py failed with\nModuleNotFoundError"),
        ("desk_parent.inner:upper", "importing desk_parent.inner failed with\nZeroDivisionError"),
    ],
)
def test_errors_say_what_is_wrong(desk: Path, spec: str, message: str) -> None:
    """Every way to misname a function has its message."""
    write(desk / "desk_helper.py", UPPER + "NUMBER = 1\n")
    write(desk / "desk_broken.py", "import nowhere\n" + UPPER)
    write(desk / "desk_parent" / "__init__.py", "1 / 0\n")
    with pytest.raises(ConfigError) as caught:
        load_function(spec)
    assert message in str(caught.value)


def test_one_bad_document_is_no_end(desk: Path) -> None:
    """After a document that worked, failures are answered, however many."""
    write(desk / "desk_picky.py", "def f(text):\n    return 1 / len(text)\n")
    function = UserFunction("desk_picky:f")
    assert function("a") == 1
    assert all(function("") is UserFunction.FAILED for _ in range(3 * FIRST_DOCUMENTS))


def test_a_function_that_never_works_is_an_error(desk: Path) -> None:
    """The message has the function, the exception and the text."""
    write(desk / "desk_hopeless.py", "def f(text):\n    raise KeyError('title')\n")
    function = UserFunction("desk_hopeless:f")
    for _ in range(FIRST_DOCUMENTS - 1):
        assert function("some text") is UserFunction.FAILED
    with pytest.raises(ConfigError, match=r"(?s)desk_hopeless:f.*KeyError: 'title'.*begins 'some text'"):
        function("some text")
