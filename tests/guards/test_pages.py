"""README and docs: what a page shows runs, block after block, at a desk with the files that pages speak of.

A block's fence says what becomes of it: `sh` and `python` are run, Python in one session a page; with a file's name
behind the language, the block is written to that file. `theirs` marks the code of another tool, `elsewhere` what needs
another machine (a cluster, the Hub, a GPU): these are not run, but must parse. Blocks without a language are output.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tests.kit.jobs import MILLDAM, run_here
from tests.kit.quick import first_quick
from tests.kit.reading_desk import lay_out

from milldam.cli import main

PROJECT = Path(__file__).parents[2]
PEERS = sorted((PROJECT / "docs" / "coming-from").glob("*.md"))
STARTS = sorted((PROJECT / "docs" / "start").glob("*.md"))
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md")), *STARTS, *PEERS]
FIRST = [PROJECT / "README.md", *STARTS]
RUNNING = first_quick([*FIRST, *(page for page in PAGES if page not in FIRST and page.name != "log.md")], len(FIRST))
NOT_RUN = ("theirs", "elsewhere")
MAX_LINES = 120
ROOM = "8GB"


class Block(NamedTuple):
    language: str
    mark: str
    content: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(*found) for found in re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)]


def page_id(page: Path) -> str:
    return str(page.relative_to(PROJECT))


def each(pages: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=page_id)


@pytest.fixture(scope="session")
def laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    lay_out(folder)
    return folder


@pytest.fixture
def desk(laid_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(laid_out, tmp_path, dirs_exist_ok=True)
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(MILLDAM).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.mark.filterwarnings("default")  # other tools, whose readers pages show, warn as they like
@each(RUNNING)
def test_what_a_page_shows_runs(page: Path, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands and Python blocks of a page, one after the other, end without an error; a store looks as it is shown."""
    session: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        if block.mark and block.mark not in NOT_RUN:
            # What the tests before have loaded into this process would count against a budget.
            content = re.sub(r"^memory: \w+", f"memory: {ROOM}", block.content, flags=re.MULTILINE)
            (desk / block.mark).write_text(content)
        elif block.mark:
            continue
        elif block.language == "sh":
            run_shell(block.content, limited=page == PROJECT / "README.md")
        elif block.language == "python":
            # In this process: torch takes seconds to load.
            exec(compile(block.content, page.name, "exec"), session)
            printed = capsys.readouterr().out
            for shown in re.findall(r"^print\(store\)\s+# (Store\(.*)$", block.content, flags=re.MULTILINE):
                assert shown in printed


def run_shell(content: str, *, limited: bool) -> None:
    """Plain `milldam` lines in this process, but where a budget is to be kept; anything else by a shell."""
    for line in content.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        # The demo has a budget of its own.
        plain = re.fullmatch(r"milldam (?!demo)[^|<>$&;]*", re.sub(r"'[^']*'|#.*", "", line))
        if plain and not (limited and "--memory" in line):
            run_here(*with_room(shlex.split(line, comments=True)[1:]))
        else:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, f"{line}\n{done.stderr}"


def with_room(words: list[str]) -> list[str]:
    """The same command with more memory: what the tests before have loaded into this process would count."""
    return [ROOM if before == "--memory" else word for before, word in itertools.pairwise(["", *words])]


@each(PAGES)
def test_every_block_can_be_read(page: Path) -> None:
    """Python and YAML parse, and a language is one that we know; what can't run here is at least well formed."""
    for block in blocks_of(page):
        assert block.language in ("sh", "python", "yaml"), f"{page.name}: {block.language}"
        if block.language == "python":
            ast.parse(block.content, page.name)
        if block.language == "yaml":
            yaml.safe_load(block.content)


def lines_that_promise(page: Path) -> Iterator[str]:
    """`milldam ...` in the text, and on the lines of shell blocks, those that run elsewhere too."""
    yield from re.findall(r"`milldam ([^`\n]*)`", page.read_text(encoding="utf-8"))
    for block in blocks_of(page):
        if block.language == "sh" and block.mark != "theirs":
            content = block.content.replace("\\\n", " ")
            yield from re.findall(r"^(?:.*\| )?milldam (.*?)(?: +#.*)?$", content, flags=re.MULTILINE)


@each(PAGES)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    """No page promises a command or an option of ours that is not there."""
    for line in lines_that_promise(page):
        name, _, rest = line.partition(" ")
        if not re.fullmatch(r"[a-z][\w-]*", name):
            continue  # options of `milldam` itself, or a placeholder
        assert name in main.commands, f"{page.name}: milldam {name}"
        known = {option for one in main.commands[name].params for option in one.opts} | {"-h", "--help"}
        used = set(re.findall(r"(?<!\S)--?[a-z][\w-]*", rest.split(" -- ")[0]))
        assert used <= known, f"{page.name}: milldam {line}"


@each([*STARTS, *PEERS])
def test_a_page_for_newcomers_is_short_and_in_the_list(page: Path) -> None:
    """Each page fits on a few screens, and the list of its folder leads to it."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert page.stem == "README" or f"({page.name})" in page.with_name("README.md").read_text(encoding="utf-8")


def test_the_picture_shows_what_was_measured() -> None:
    """It is what its script draws from the figures that are there now."""
    drawn = runpy.run_path(str(PROJECT / "benchmarks/picture.py"))["drawn"]()
    assert drawn == (PROJECT / "docs/pictures/measured.svg").read_text(encoding="utf-8")
