"""What crosses rooms: imports point one way, the light parts stay light, and the documentation tells the truth."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tests.kit.jobs import TOKENIZER, write_lines

import milldam

PROJECT = Path(__file__).parents[2]
PACKAGE = Path(milldam.__file__).parent

# ---- imports point one way ----


def modules() -> dict[str, Path]:
    """Every module of the package, by its name below milldam."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@functools.cache
def imports_of(name: str, *, deferred: bool = True) -> set[str]:
    """The modules of ours that one imports; `deferred`: inside functions too. Those for types only are left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(MODULES[name].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if deferred or not isinstance(node, ast.FunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and [one.name for one in node.names] != ["__version__"]:
            # `from milldam.a import b` is milldam.a.b if that is a module, else milldam.a.
            full = ((f"{node.module}.{alias.name}", node.module) for alias in node.names)
            found |= {inner if inner.removeprefix("milldam.") in MODULES else outer for inner, outer in full}
    ours = (one.removeprefix("milldam").removeprefix(".") for one in found if one.split(".")[0] == "milldam")
    return {one for one in ours if one}


def is_under(name: str, rooms: set[str]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


GROUND = {
    "errors": set(), "files": {"errors"}, "checked": {"errors"},
    "input_files": {"checked", "errors", "files", "stores"},
    "choices": set(), "rules": {"choices", "errors", "memory"},
    "memory": {"errors"}, "prefetch": set(), "markup": set(), "native": {"errors"},
    "text": {"errors", "native", "rules"},
}  # fmt: skip
"""What every room may use, and what it may use itself."""
ALLOWED: dict[str, set[str]] = GROUND | {
    # Steps are neighbours in the flow of data, not in the code: what they share is on the ground.
    **{name: {*GROUND} for name in ("dedup", "decontamination", "filters")},
    "sources": {*GROUND, "stores"},
    "packing": {*GROUND, "stores", "loader"},
    "tokenizers": {*GROUND, "stores.tokens.format", "stores.tokens.writer"},
    "chat": {*GROUND, "sources", "tokenizers"},
    # Who reads or writes a store needs neither text nor a run; a training node needs numpy and the store.
    "stores": {"checked", "errors", "files", "input_files", "markup", "memory"},
    "loader": {*GROUND, "stores", "packing", "remote", "formats"},
    "remote": {"errors", "files", "input_files", "memory", "stores"},
    # Settings know the rules of the rooms and nothing that does the work; a report reads what a run left.
    "config": {"choices", "errors", "files", "memory", "rules"},
    "report": {"errors", "files", "markup", "memory", "stores"},
    # Executors get callables; what runs in a worker knows no job.
    **{f"run.{name}": {"run", "errors", "memory"} for name in ("tasks", "pools", "fork", "ray_cluster")},
}
"""Rooms and modules, and all that they may import."""
FORBIDDEN = {
    "cli": {"cli", "__main__"},
    "report": {"report", "cli", "pipeline"},
    "config.loading": {"config", "cli", "api"},
}
"""Rooms and modules, and all that may import them."""
ABOVE = {"run", "pipeline", "mapping", "qa", "feeding", "formats", "hub", "torch", "api", "cli", "__main__", ""}


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_what_it_may(room: str) -> None:
    """From the top down, also inside functions."""
    names = [name for name in MODULES if is_under(name, {room})]
    assert names
    found = {
        f"{name} -> {one}" for name in names for one in imports_of(name) if not is_under(one, ALLOWED[room] | {room})
    }
    assert found == set()


@pytest.mark.parametrize("room", sorted(FORBIDDEN))
def test_a_room_is_imported_by_those_who_may(room: str) -> None:
    """The library never prints by way of its commands, and reads a file only where users name one."""
    users = {name for name in MODULES for one in imports_of(name) if is_under(one, {room})}
    assert {name for name in users if not is_under(name, FORBIDDEN[room])} == set()


def test_every_room_has_its_place() -> None:
    """A new room must be placed among the others, so that the rules above hold for it."""
    assert {name.split(".")[0] for name in MODULES} == {name for name in ALLOWED if "." not in name} | ABOVE


def test_the_library_neither_prints_nor_exits() -> None:
    """Only `cli` prints; only it and the worker process exit."""
    found = []
    for name, path in MODULES.items():
        if is_under(name, {"cli"}):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "print" or (called in ("sys.exit", "exit") and name != "run.fork"):
                found.append(f"{name}: {called}")
    assert found == []


def test_messages_outside_the_command_line_name_settings_not_options() -> None:
    """A setting in a message is a `Setting`, which the command line spells; whole commands may be quoted."""
    option = re.compile(r"(?<![\w-])(--[a-z][a-z-]+|-o)(?![\w-])")
    command = re.compile(r"milldam [a-z-]+ |ray start|sbatch|zstd |--parsable|--requeue")
    scripts = {"loader.opening", "config.loading", "hub.card", "dedup.index", "native.build"}
    found = []
    for name, path in MODULES.items():
        if is_under(name, {"cli"} | scripts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if id(node) not in said and option.search(text) and not command.search(text):
                found.append(f"{name}: {text}")
    assert found == []


def test_there_are_no_import_cycles() -> None:
    """At module level, imports form no ring."""
    level = {name: imports_of(name, deferred=False) & set(MODULES) - {name} for name in MODULES}
    done: set[str] = set()
    while ready := {name for name, needed in level.items() if name not in done and needed <= done}:
        done |= ready
    assert sorted(set(MODULES) - done) == []


# ---- public names, and what they cost ----


def test_public_names_are_the_sorted_all() -> None:
    """What a user may use is what `__all__` says, in order, and nothing else."""
    assert milldam.__all__ == sorted(milldam.__all__)
    assert dir(milldam) == sorted(milldam.__all__)
    for name in milldam.__all__:
        assert getattr(milldam, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        milldam.nope  # noqa: B018


@pytest.mark.parametrize("name", sorted(MODULES))
def test_names_in_all_exist(name: str) -> None:
    """No module offers what it does not have, and each says what it is for."""
    module = importlib.import_module(f"milldam.{name}".rstrip("."))
    assert all(hasattr(module, one) for one in getattr(module, "__all__", []))
    assert module.__doc__, f"{name} has no docstring"


HEAVY = {
    "torch", "datasets", "ray", "transformers", "pyarrow", "tokenizers", "gigatoken", "awkward", "numpy",
    "pydantic", "pydantic_core", "yaml", "huggingface_hub", "py3langid", "pandas", "sentencepiece",
}  # fmt: skip


def loaded_after(code: str, *arguments: object) -> set[str]:
    """Top-level packages that some code loads in a fresh interpreter."""
    report = "; import sys; print(*{name.split('.')[0] for name in sys.modules}, file=sys.stderr)"
    command = [sys.executable, "-c", code + report, *(str(one) for one in arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_import_milldam_loads_nothing_heavy() -> None:
    """`import milldam` costs next to nothing."""
    assert loaded_after("import milldam") & HEAVY == set()


LIGHT = {"psutil", "filelock", "fsspec", "rich", "xxhash"}
"""What takes a while too, though less: no help needs it."""


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """Asking for help does not load what the work needs."""
    code = "import sys; from milldam.cli import main; main(sys.argv[1:], standalone_mode=False)"
    assert loaded_after(code, *arguments) & (HEAVY | LIGHT) == set()


def test_help_of_no_command_loads_anything_heavy() -> None:
    """Nor does the help of any command."""
    code = "from milldam.cli import main; [main([name, '--help'], standalone_mode=False) for name in main.commands]"
    assert loaded_after(code) & (HEAVY | LIGHT) == set()


def test_the_rules_of_the_rooms_load_nothing_heavy() -> None:
    """What may be set is known without what does it."""
    assert loaded_after("import milldam.rules") & HEAVY == set()


def test_reading_a_store_needs_numpy_alone(tmp_path: Path) -> None:
    """A training node opens and reads a store without pyarrow or a tokenizer."""
    lines = write_lines(tmp_path / "c.jsonl", ["one", "two"])
    milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    code = (
        "import sys, milldam; store = milldam.open(sys.argv[1]);"
        "assert [len(document) for document in store] and len(store[0]) and repr(store);"
        "assert sum(map(len, store.shard_tokens())) == store.tokens"
    )
    loaded = loaded_after(code, tmp_path / "s")
    assert loaded & HEAVY == {"numpy"}
    assert loaded & {"psutil", "filelock", "fsspec", "click", "rich"} == set()


# ---- documentation ----


_MAPPED = re.compile(r"^ *([a-z_]+(?:, [a-z_]+)*)  +\S", re.MULTILINE)


@pytest.mark.parametrize("name", [name for name, path in MODULES.items() if path.name == "__init__.py" and name])
def test_the_map_of_a_room_names_modules_that_are_there(name: str) -> None:
    """What the docstring of a package lists, a word and what it is, are its modules."""
    text = ast.get_docstring(ast.parse(MODULES[name].read_text(encoding="utf-8"))) or ""
    named = {word for words in _MAPPED.findall(text) for word in words.split(", ")}
    assert sorted(word for word in named if f"{name}.{word}" not in MODULES) == []


def test_the_reference_is_that_of_the_code() -> None:
    """docs/cli.md has every command and option, docs/config.md every key: `python site/reference.py` writes them."""
    for page, text in runpy.run_path(str(PROJECT / "site/reference.py"))["pages"]().items():
        assert page.read_text(encoding="utf-8") == text, page.name


def test_every_exit_code_is_documented() -> None:
    """The codes of the exception tree are in docs/cli.md."""
    from milldam import errors

    text = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    codes = {one.exit_code for one in vars(errors).values() if isinstance(one, type) and hasattr(one, "exit_code")}
    assert [code for code in codes | {130} if not re.search(rf"^\| {code} \|", text, flags=re.MULTILINE)] == []


def test_links_in_the_documentation_lead_somewhere() -> None:
    """A relative link in the README or docs names a file that is there."""
    broken: list[str] = []
    for page in [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *(PROJECT / "docs").rglob("*.md")]:
        text = page.read_text(encoding="utf-8") if page.exists() else ""
        targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        broken += [f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()]
    assert broken == []


def test_the_file_tree_for_contributors_is_the_one_there_is() -> None:
    """Every file that the tree in CONTRIBUTING.md names exists, and no room is left out."""
    text = (PROJECT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tree = text.split("src/milldam/\n", 1)[1].split("```", 1)[0]
    named = {line.split()[0].rstrip("/") for line in tree.splitlines() if line.strip()}
    rooms = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    rooms -= {"__pycache__", "__init__.py"}
    below = {path.name for path in PACKAGE.rglob("*") if path.suffix == ".py"} | rooms
    assert sorted(named - below) == [], "named, but not there"
    assert sorted(rooms - named) == [], "there, but not named"


def test_the_first_commands_of_the_readme_work_in_a_clone() -> None:
    """They are targets of the Makefile, and installations of what lies here: milldam is in no registry yet."""
    block = (PROJECT / "README.md").read_text(encoding="utf-8").split("```sh elsewhere\n")[1].partition("```")[0]
    commands = [re.sub(r"\s*#.*", "", line) for line in block.splitlines()]
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    for command in commands:
        target = re.fullmatch(r"make ([a-z-]+)", command)
        assert re.fullmatch(r'pip install "?\.(\[[a-z,]+\])?"?', command) or (
            target and re.search(rf"^{target[1]}:", makefile, re.MULTILINE)
        ), command


def test_the_readme_is_short() -> None:
    """150 lines are enough to begin with."""
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
