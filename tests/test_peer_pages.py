"""docs/coming-from: what the pages show of ours runs, in the order in which it stands there.

A block's fence says what becomes of it: `sh` and `python` are run; `python theirs` and `sh theirs` are not; with a
file's name behind the language, the block is written to that file. Each page starts in a folder with `corpus.jsonl`
and `tokenizer/`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from jobs import DEMO, MILLDAM, TOKENIZER, invoke, run_milldam
from milldam.cli import main

PAGES = sorted((Path(__file__).parents[1] / "docs" / "coming-from").glob("*.md"))
MAX_LINES = 120


class Block(NamedTuple):
    language: str
    mark: str
    content: str

    @property
    def is_ours(self) -> bool:
        return self.mark != "theirs"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)]


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each `milldam` line."""
    for line in block.content.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            assert words[0] == "milldam", f"{line}: only milldam is run; mark what is not ours"
            yield words[1:]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(DEMO / "corpus.jsonl", tmp_path)
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(TOKENIZER, tmp_path / "tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(MILLDAM).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def run(words: list[str]) -> None:
    """In this process, but where memory is limited: what the tests before have loaded would count."""
    if "--memory" in words:
        run_milldam(*words)
        return
    done = invoke(*words)
    assert done.exit_code == 0, f"milldam {shlex.join(words)}\n{done.output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_of_ours_runs(page: Path, desk: Path) -> None:
    """Commands and Python blocks of a page, one after the other, end without an error."""
    ran = 0
    for block in blocks_of(page):
        if not block.is_ours:
            continue
        if block.mark:
            (desk / block.mark).write_text(block.content)
        elif block.language == "sh":
            for words in commands_of(block):
                run(words)
                ran += 1
        elif block.language == "python":
            # In this process: torch takes seconds to load.
            exec(compile(block.content, page.name, "exec"), {"__name__": "__main__"})
            ran += 1
    assert ran


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_shows_of_theirs_is_python(page: Path) -> None:
    """Their code can at least be parsed; it was run by hand, with the version that the page names."""
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.content, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_in_the_list(page: Path) -> None:
    """Each page fits on a few screens, and the list leads to it."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert page.stem == "README" or f"({page.name})" in PAGES[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    """No page promises a command or an option of ours that is not there."""
    for name, options in re.findall(r"`milldam ([a-z][\w-]*)([^`\n]*)`", page.read_text(encoding="utf-8")):
        assert name in main.commands, f"{page.name}: milldam {name}"
        own = options.split(" -- ")[0]
        known = {option for one in main.commands[name].params for option in one.opts}
        assert set(re.findall(r"(?<!\S)--?[a-z][\w-]*", own)) <= known, f"{page.name}: milldam {name}{options}"
